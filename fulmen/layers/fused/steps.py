"""Decoding steps of layers as chains of launches: one lookup of a plan for all that other calls would look up in turn.

Each function here describes a chain for `fused_call`. Nothing but launches and views lies between the tensors a step is
given and those it returns, so that a repeated step computes addresses alone.

    lightning           [step, store of a draft, out_proj]         q, k, v, gate -> y
    lightning_layer     [qkv_proj and gate, then the same]         x -> y
    grouped             [q, k and v, RoPE and cache]               x -> q
    latent              [down, up, W_k with RoPE and cache]        x -> q
    latent_out          [W_v, o_proj]                              o -> y
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fulmen import dispatch
from fulmen.launch import Chain
from fulmen.layers.fused.append import appended
from fulmen.layers.fused.decode import latent_step, latent_value
from fulmen.layers.fused.linear import linears
from fulmen.layers.fused.projections import Facts
from fulmen.layers.pool import check_held
from fulmen.step import triton as step
from fulmen.step.spec import Tensors, check_inputs, spec_of

Described = tuple[tuple[Tensor, ...], Chain]


Lightning = tuple[int, int, str | None, float, float]  # D, E, activation, scale, eps of the output norm


def lightning(
    facts: Lightning, q: Tensor, k: Tensor, v: Tensor, gate: Tensor | None, norm: Tensor, weight: Tensor,
    bias: Tensor | None, decay: Tensor | None, *pool: Tensor | None,
) -> Described:  # fmt: skip
    """y (B, T, dim) of q, k, v and the gate, before its sigmoid: (B, H, T, .) each.

    The step leaves o * norm * sigmoid(gate) and sums of o^2; out_proj (`weight`, `bias`) divides by the norm.

    pool  state, slots, draft_k, draft_v, accepted, as in `lightning_step`; all of it contiguous, as the decay
    """
    (B, H, T, _), (_, E, _, scale, eps), (state, slots, draft_k, draft_v, accepted) = q.shape, facts, pool
    assert state is not None
    draft = None if draft_k is None or draft_v is None else (draft_k, draft_v)
    check_inputs(q, k, v, decay, state, slots, draft, accepted, scale)
    x = Tensors(q, k, v, decay, state, slots, draft_k, draft_v, accepted, None, gate, norm)
    spec = spec_of(x, scale)._replace(early=True, gated=True)  # early: the projection writes no state
    tile = dispatch.choose("step", spec, "triton").tile
    rows, squares = torch.empty(B, T, H, E, dtype=q.dtype, device=q.device), step.empty_squares(spec, tile)
    assert squares is not None
    launches = step.launches(spec, tile, x, rows.transpose(1, 2), squares)
    last = Facts(None, eps, early=True)
    y, out = linears(last, rows.view(B, T, -1), None, squares, weight, None, None, bias, None, None)
    return y, Chain((rows, squares), (*launches, out))


def lightning_layer(
    facts: Lightning, x: Tensor, qkv: Tensor, gate: Tensor | None, qkv_bias: Tensor | None, gate_bias: Tensor | None,
    *others: Any,
) -> Described:  # fmt: skip
    """y of x (B, T, dim), where q, k and v are the activated projection, as many heads each; `others`: from norm on."""
    (B, T, _), (D, E, activation, _, _) = x.shape, facts
    made, first = linears(Facts(activation), x, None, None, qkv, gate, None, qkv_bias, gate_bias, None)
    heads = made[0].view(B, T, -1, 2 * D + E).transpose(1, 2).split((D, D, E), dim=3)
    gates = None if gate is None else made[1].view(B, T, -1, E).transpose(1, 2)
    y, chain = lightning(facts, *heads, gates, *others)
    return y, Chain((*made, *chain.work), (first, *chain.launches))


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


def latent_out(nope: int, o: Tensor, up: Tensor, weight: Tensor, bias: Tensor | None) -> Described:
    """y (B, N, dim) of o (B, H, N, R): W_v of each head, then o_proj (`weight`, `bias`)."""
    (values,), first = latent_value(nope, o, up)
    y, last = linears(Facts(early=True), values, None, None, weight, None, None, bias, None, None)
    return y, Chain((values,), (first, last))
