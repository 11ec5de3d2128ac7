"""Decoding steps of layers as chains of launches: one lookup of a plan for all that other calls would look up in turn.

Each function here describes a chain for `fused_call`. Nothing but launches and views lies between the tensors a step is
given and those it returns, so that a repeated step computes addresses alone.

    lightning           [step, store of a draft, out_proj]         q, k, v, gate -> y
    lightning_layer     [qkv_proj and gate, then the same]         x -> y
    lightning_rows      [qkv_proj and gate, step, store, norm]     x -> what out_proj reads, of more rows
    grouped             [q, k and v, RoPE and cache]               x -> q
    latent              [down, up, W_k with RoPE and cache]        x -> q
    latent_out          [W_v, o_proj]                              o -> y
    latent_down         [down, norm]                               x -> c_q and kv_a_proj's output, of more rows
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fulmen import dispatch
from fulmen.launch import Chain, Launch
from fulmen.layers.fused.append import appended
from fulmen.layers.fused.decode import latent_step, latent_value
from fulmen.layers.fused.latent import norms
from fulmen.layers.fused.lightning import gated
from fulmen.layers.fused.linear import linears
from fulmen.layers.fused.projections import Facts
from fulmen.layers.pool import check_held
from fulmen.step import triton as step
from fulmen.step.spec import Tensors, check_inputs, spec_of

Described = tuple[tuple[Tensor, ...], Chain]


class Lightning(NamedTuple):
    """Of a lightning layer: head dims of k and v, activation of q, k and v, scale of o; eps and groups of the norm."""

    D: int
    E: int
    activation: str | None
    scale: float
    eps: float
    groups: int


def lightning(
    options: tuple[Any, ...], q: Tensor, k: Tensor, v: Tensor, gate: Tensor | None, norm: Tensor, weight: Tensor,
    bias: Tensor | None, decay: Tensor | None, *pool: Tensor | None,
) -> Described:  # fmt: skip
    """y (B, T, dim) of q, k, v and the gate, before its sigmoid: (B, H, T, .) each.

    The step leaves o * norm * sigmoid(gate) and sums of o^2; out_proj (`weight`, `bias`) divides by the norm.

    pool  state, slots, draft_k, draft_v, accepted, as in `lightning_step`; all of it contiguous, as the decay
    """
    facts = Lightning(*options)
    work, launches = _stepped(facts, (q, k, v, decay, *pool), gate, norm)
    rows, squares = work
    y, out = linears(
        Facts(None, facts.eps, early=True), rows.flatten(2), None, squares, weight, None, None, bias, None, None
    )
    return y, Chain(work, (*launches, out))


def lightning_layer(options: tuple[Any, ...], x: Tensor, *others: Any) -> Described:
    """The same of x (B, T, dim); `others`: weights and biases of qkv_proj and of the gate, then all from norm on."""
    facts = Lightning(*options)
    made, first, heads = _heads(facts, x, *others[:4])
    gates = None if len(made) == 1 else made[1].unflatten(2, (-1, facts.E)).transpose(1, 2)
    y, chain = lightning(options, *heads, gates, *others[4:])
    return y, Chain((*made, *chain.work), (first, *chain.launches))


def lightning_rows(
    options: tuple[Any, ...], x: Tensor, qkv: Tensor, gate: Tensor | None, qkv_bias: Tensor | None,
    gate_bias: Tensor | None, norm: Tensor | None, *others: Tensor | None,
) -> Described:  # fmt: skip
    """What out_proj reads, (B, T, H * E): normed and gated by a launch of its own. `others`: from the decay on."""
    facts = Lightning(*options)
    made, first, heads = _heads(facts, x, qkv, gate, qkv_bias, gate_bias)
    (rows,), launches = _stepped(facts, (*heads, *others))
    z, last = gated((facts.groups, facts.eps), rows.flatten(2), made[1] if len(made) > 1 else None, norm)
    return z, Chain((*made, rows), (first, *launches, last))


def _heads(
    facts: Lightning, x: Tensor, qkv: Tensor, gate: Tensor | None, qkv_bias: Tensor | None, gate_bias: Tensor | None
) -> tuple[tuple[Tensor, ...], Launch, tuple[Tensor, ...]]:
    """The projection, activated, and the gate; their launch; and q, k and v, (B, H, T, .), as many heads each."""
    D, E = facts.D, facts.E
    made, first = linears(Facts(facts.activation), x, None, None, qkv, gate, None, qkv_bias, gate_bias, None)
    return made, first, made[0].unflatten(2, (-1, 2 * D + E)).transpose(1, 2).split((D, D, E), dim=3)


def _stepped(
    facts: Lightning, tensors: tuple[Any, ...], gate: Tensor | None = None, norm: Tensor | None = None
) -> tuple[tuple[Tensor, ...], list[Launch]]:
    """o (B, T, H, E) and, with a norm, its squares, and the launches of `lightning_step` on these tensors."""
    q, k, v, decay, state, slots, draft_k, draft_v, accepted = tensors
    draft = None if draft_k is None else (draft_k, draft_v)
    check_inputs(q, k, v, decay, state, slots, draft, accepted, facts.scale)
    x = Tensors(q, k, v, decay, state, slots, draft_k, draft_v, accepted, None, gate, norm)
    B, H, T, _ = q.shape
    spec = spec_of(x, facts.scale)._replace(early=True, gated=norm is not None)  # early: the projection writes no state
    tile = dispatch.choose("step", spec, "triton").tile
    rows, squares = torch.empty(B, T, H, facts.E, dtype=q.dtype, device=q.device), step.empty_squares(spec, tile)
    launches = step.launches(spec, tile, x, rows.transpose(1, 2), squares)
    return (rows,) if squares is None else (rows, squares), launches


def grouped(
    facts: tuple[int, bool], x: Tensor, q_weight: Tensor, k_weight: Tensor, v_weight: Tensor, q_bias: Tensor | None,
    k_bias: Tensor | None, v_bias: Tensor | None, cos: Tensor | None, sin: Tensor | None, k_cache: Tensor,
    v_cache: Tensor, begin: Tensor, table: Tensor,
) -> Described:  # fmt: skip
    """q (B, H, N, D), turned if there is RoPE; k and v are written to the pages.

    facts  D, and whether RoPE is interleaved
    """
    D, interleaved = facts
    parameters = (q_weight, k_weight, v_weight, q_bias, k_bias, v_bias)
    made, first = linears(Facts(), x, None, None, *parameters)
    q, k, v = (y.view(*x.shape[:2], -1, D) for y in made)
    check_held((k_cache, v_cache), (k, v))
    (after, *turned), write = appended((True, interleaved), q, k, v, k_cache, v_cache, begin, table, cos, sin)
    work = (*made, after) if turned else (*made[1:], after)
    return ((turned[0] if turned else q).transpose(1, 2),), Chain(work, (first, write))


def latent(
    facts: tuple[int, bool, float, float], x: Tensor, q_first: Tensor, kv_a: Tensor, q_first_bias: Tensor | None,
    kv_a_bias: Tensor | None, q_norm: Tensor | None, q_b: Tensor | None, q_b_bias: Tensor | None, kv_norm: Tensor,
    up: Tensor, cos: Tensor, sin: Tensor, kv: Tensor, begin: Tensor, table: Tensor,
) -> Described:  # fmt: skip
    """q (B, H, N, R + P), as `latent_attention` reads it; the latents are written to the pages.

    facts   nope_dim, whether RoPE is interleaved, eps of the norms of c_q and of the latent
    q_norm  None: q_first makes the queries. Else c_q's norm begins in one launch and ends in the next.
    """
    nope, interleaved, q_eps, kv_eps = facts
    made, first = linears(Facts(), x, q_norm, None, q_first, kv_a, None, q_first_bias, kv_a_bias, None)
    queries, down, launches = made[0], made[1], [first]
    check_held((kv,), (down,))
    work = made
    if q_norm is not None:
        norm = Facts(None, q_eps, early=True)
        (queries,), second = linears(norm, made[0], None, made[2], q_b, None, None, q_b_bias, None, None)
        work, launches = (*made, queries), [first, second]
    step_facts = (nope, interleaved, kv_eps)
    (q,), third = latent_step(step_facts, queries, None, down, kv_norm, cos, sin, begin, table, kv, up)
    return (q.transpose(0, 1),), Chain(work, (*launches, third))


def latent_down(
    eps: float, x: Tensor, q_a: Tensor, kv_a: Tensor, q_a_bias: Tensor | None, kv_a_bias: Tensor | None, q_norm: Tensor
) -> Described:
    """c_q, normed, and kv_a_proj's output, of more rows."""
    (c_q, down), first = linears(Facts(), x, None, None, q_a, kv_a, None, q_a_bias, kv_a_bias, None)
    (rstd, y), second = norms((eps,), c_q, q_norm)
    return (y, down), Chain((c_q, rstd), (first, second))


def latent_out(nope: int, o: Tensor, up: Tensor, weight: Tensor, bias: Tensor | None) -> Described:
    """y (B, N, dim) of o (B, H, N, R): W_v of each head, then o_proj (`weight`, `bias`)."""
    (values,), first = latent_value(nope, o, up)
    y, last = linears(Facts(early=True), values, None, None, weight, None, None, bias, None, None)
    return y, Chain((values,), (first, last))
