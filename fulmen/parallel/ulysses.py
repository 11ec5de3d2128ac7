"""Softmax attention of a sequence that is cut over ranks, by exchanging tokens for heads (DeepSpeed-Ulysses).

One all-to-all gives every rank all tokens of some heads, with which it calls `flash_attention` as one device does; a
second brings the results back. Backward is the same in reverse. q, k and v travel together in one buffer:

    (N_local, heads of rank 0 | heads of rank 1 | ...)   ->   (N, heads of this rank)

Heads of k and v are shared out where there are enough, else each is sent to the ranks whose queries read it, and the
gradients that come back are summed in fp32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from fulmen import dispatch
from fulmen.boundary import check_offset_values, check_offsets, once_differentiable, require_tensors
from fulmen.flash.op import flash_attention
from fulmen.flash.spec import Causal, Residuals, Window, check_inputs, check_mask, checked_spec
from fulmen.parallel.groups import Group, Ranks, agree, all_to_all, ranks_of
from fulmen.parallel.shards import Cut, cut_of_shards
from fulmen.plans import deterministic

WHAT = "fulmen.parallel.ulysses_attention"


@_disable_dynamo  # unlike torch.compiler.disable, imports no compiler here
def ulysses_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: Group,
    causal: Causal = False,
    lengths: Sequence[int] | None = None,
    window: Window = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """`fulmen.flash_attention` of a sequence that is cut over the ranks of `group`: this rank's part of o.

    q, k, v     this rank's tokens, consecutive ones, of all heads. The number of q's heads must be a multiple of the
                ranks'; of k's and v's, a multiple or a divisor.
    group       a process group, or a DeviceMesh of one dimension.
    lengths     tokens on each rank; None: as many on every rank as here. Compared once for every N that is new.
    sinks       (H,), the same on every rank; its gradient is that of the heads computed here, to be summed over ranks.
    cu_seqlens  int32 on the inputs' device, of the whole, the same on every rank: packed sequences.
    backend     of the local work, any of `flash_attention`'s.

    All ranks have to call the backward, too. Other arguments are `flash_attention`'s.
    """
    ranks = ranks_of(group)
    check_mask(causal, window, softcap)
    x = check_inputs(q, k, v, sinks, None, None)
    q, k, v = x.q, x.k, x.v
    (B, H, N, D), H_KV, E, P = q.shape, k.shape[1], v.shape[3], ranks.size
    if k.shape[2] != N:
        raise ValueError(f"k has N={k.shape[2]} tokens, must have q's N={N}: a rank has both of the same tokens")
    if H % P:
        raise ValueError(f"q has {H} heads, which {P} ranks cannot share out evenly: use ring_attention")
    if H_KV % P and P % max(H_KV, 1):
        raise ValueError(
            f"k and v have {H_KV} heads and there are {P} ranks: one must divide the other, or use ring_attention"
        )
    cut = cut_of_shards(N, ranks, "contiguous", lengths)
    window = None if window is None else (window[0], window[1])
    options: dict[str, Any] = {"causal": causal, "window": window, "softcap": softcap, "scale": scale}
    grads = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in x[:4])
    _check_whole(x, cu_seqlens, cut, P, options, backend, grads)
    facts = {
        "tokens": cut.lengths, "B": B, "heads": H, "k and v heads": H_KV, "D": D, "E": E, "dtype": q.dtype, **options,
        "packed": cu_seqlens is not None, "sinks": sinks is not None, "gradients": grads,
    }  # fmt: skip
    agree(WHAT, ranks, facts)
    own = slice(ranks.rank * H // P, (ranks.rank + 1) * H // P)
    q, k, v = _ToHeads.apply(q, k, v, ranks, cut)
    o = flash_attention(
        q, k, v, **options, sinks=None if x.sinks is None else x.sinks[own], cu_seqlens_q=cu_seqlens, backend=backend
    )
    return _ToTokens.apply(o, ranks, cut)


def _check_whole(
    x: Residuals, cu_seqlens: Tensor | None, cut: Cut, P: int, options: dict[str, Any], backend: str, grads: bool
) -> None:
    """What `flash_attention` would say of the call each rank will make, said before anybody waits."""
    if not isinstance(backend, str):
        raise dispatch.unknown("flash", backend)
    sizes = ((x.q.shape[1] // P, x.q), (max(x.k.shape[1] // P, 1), x.k), (max(x.v.shape[1] // P, 1), x.v))
    like = [torch.empty(x.q.shape[0], h, cut.total, t.shape[3], dtype=t.dtype, device="meta") for h, t in sizes]
    spec = checked_spec(*like, **options)
    sequences = None
    if cu_seqlens is not None:
        require_tensors({"cu_seqlens": cu_seqlens}, {})
        check_offsets("cu_seqlens", cu_seqlens, x.q)
        check_offset_values("cu_seqlens", cu_seqlens, cut.total)
        sequences = cu_seqlens.shape[0] - 1
    spec = spec._replace(
        device=x.q.device, has_sinks=x.sinks is not None, sequences=sequences, needs_grad=grads,
        deterministic=grads and deterministic(),
    )  # fmt: skip
    dispatch.pick("flash", spec, backend)


# --------------------------------------------------------------------------------------- tokens and heads


def _gathered(parts: list[Tensor], ranks: Ranks, cut: Cut) -> list[Tensor]:
    """Each (B, ranks, heads, N, size) to (B, heads, total, size), all tokens of this rank's heads: one all-to-all."""
    P, N = ranks.size, cut.lengths[ranks.rank]
    flat = torch.cat([x.permute(1, 3, 0, 2, 4).flatten(3) for x in parts], 3)  # (ranks, N, B, features)
    out = all_to_all(WHAT, flat.flatten(0, 1), list(cut.lengths), [N] * P, ranks)
    pieces = out.split([x.shape[2] * x.shape[4] for x in parts], 2)
    return [y.unflatten(2, (x.shape[2], x.shape[4])).permute(1, 2, 0, 3) for x, y in zip(parts, pieces, strict=True)]


def _scattered(parts: list[Tensor], ranks: Ranks, cut: Cut) -> list[Tensor]:
    """The reverse: each (B, heads, total, size) to (B, ranks, heads, N, size)."""
    P, N = ranks.size, cut.lengths[ranks.rank]
    flat = torch.cat([x.permute(2, 0, 1, 3).flatten(2) for x in parts], 2)  # (total, B, features)
    out = all_to_all(WHAT, flat, [N] * P, list(cut.lengths), ranks).unflatten(0, (P, N))
    pieces = out.split([x.shape[1] * x.shape[3] for x in parts], 3)
    return [y.unflatten(3, (x.shape[1], x.shape[3])).permute(2, 0, 3, 1, 4) for x, y in zip(parts, pieces, strict=True)]


def _for_ranks(x: Tensor, P: int) -> Tensor:
    """x (B, heads, N, size) as (B, ranks, heads of each, N, size); one of too few heads goes to several ranks."""
    if x.shape[1] % P == 0:
        return x.unflatten(1, (P, -1))
    return x.repeat_interleave(P // x.shape[1], 1).unsqueeze(2)


def _from_ranks(x: Tensor, heads: int) -> Tensor:
    """The adjoint: (B, ranks, heads of each, N, size) to (B, heads, N, size), summed where ranks shared a head."""
    B, P, each, N, size = x.shape
    if heads == P * each:
        return x.flatten(1, 2)
    exact = torch.promote_types(x.dtype, torch.float32)
    return x.reshape(B, heads, P * each // heads, N, size).to(exact).sum(2).to(x.dtype)


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, ranks: Ranks, cut: Cut) -> tuple[Tensor, ...]:
        ctx.ranks, ctx.cut, ctx.heads = ranks, cut, [x.shape[1] for x in (q, k, v)]
        return tuple(_gathered([_for_ranks(x, ranks.size) for x in (q, k, v)], ranks, cut))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        parts = _scattered(list(grads), ctx.ranks, ctx.cut)
        return *(_from_ranks(x, heads) for x, heads in zip(parts, ctx.heads, strict=True)), None, None


class _ToTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, o: Tensor, ranks: Ranks, cut: Cut) -> Tensor:
        ctx.ranks, ctx.cut = ranks, cut
        return _scattered([o], ranks, cut)[0].flatten(1, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor) -> tuple[Any, ...]:
        return _gathered([do.unflatten(1, (ctx.ranks.size, -1))], ctx.ranks, ctx.cut)[0], None, None
