"""Ring attention: softmax attention of a sequence cut over ranks, keys and values passed from rank to rank.

Each rank keeps its queries. k and v of every shard go around the ring, grouped heads unexpanded. A rank computes with
the shard it holds while the next one comes in, and combines the results in fp32:

    lse = log(exp(lse) + exp(lse_i)),   o = o exp(lse_old - lse) + o_i exp(lse_i - lse)

In the backward k and v go around once more. A block's gradients follow from the whole o and lse, as they do in one
call: p = exp(s - lse), delta = rowsum(do * o). dk and dv of a shard are summed in fp32 along its way and sent back from
the last rank it reaches. A shard goes only as far as its keys are seen: to later ranks under a causal mask, to the
nearest ones under a window. Memory is that of a rank's own tokens, two shards of k and v, and one of fp32 gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from fulmen import dispatch
from fulmen.boundary import check_offset_values, check_scale, empty_rows, once_differentiable, tidy_rows
from fulmen.flash.plan import TENSORS, plan_of
from fulmen.flash.spec import Causal, FlashSpec, Residuals, Window, check_inputs, check_mask
from fulmen.parallel.blocks import Block, Mask, blocks, reach, shapes
from fulmen.parallel.groups import Group, Pending, Ranks, Receive, Send, agree, exchange, ranks_of
from fulmen.parallel.shards import Cut, cut_of_shards
from fulmen.parallel.states import kernels_for
from fulmen.plans import deterministic

WHAT = "fulmen.parallel.ring_attention"
KEYS, SUMS, HOME = 1, 2, 3  # kinds of messages


@_disable_dynamo  # unlike torch.compiler.disable, imports no compiler here
def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: Group,
    causal: Causal = False,
    shards: str = "contiguous",
    lengths: Sequence[int] | None = None,
    window: Window = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """`fulmen.flash_attention` of a sequence that is cut over the ranks of `group`: this rank's part of o.

    q, k, v     this rank's tokens, as `shard` with the same `shards` gives them.
    group       a process group, or a DeviceMesh of one dimension.
    shards      "contiguous", or "zigzag": a rank has a piece from the front and one from the end, which under a causal
                mask shares the work out evenly.
    lengths     tokens on each rank; None: as many on every rank as here. Compared once for every N that is new.
    sinks       (H,), the same on every rank; its gradient is that of this rank's tokens, to be summed over ranks.
    cu_seqlens  int32, of the whole, the same on every rank: packed sequences, which may cross ranks. Its values are
                needed on the host.
    backend     of the local work, any that gives lse; "reference" has no backward to be called here.

    All ranks have to call the backward, too. Other arguments are `flash_attention`'s.
    """
    ranks = ranks_of(group)
    left, right, _ = check_mask(causal, window, softcap)
    x = check_inputs(q, k, v, sinks, None, None)
    N = x.q.shape[2]
    if x.k.shape[2] != N:
        raise ValueError(f"k has N={x.k.shape[2]} tokens, must have q's N={N}: a rank has both of the same tokens")
    cut = cut_of_shards(N, ranks, shards, lengths)
    mask = Mask(left, right, _offsets(cu_seqlens, x.q, cut))
    scale = x.q.shape[3] ** -0.5 if scale is None else check_scale(scale)
    call = Call(ranks, cut, mask, scale, softcap, backend)
    grads = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in x[:4])
    _check_backend(x, call, grads)
    agree(WHAT, ranks, _facts(x, call, grads))
    with torch.autocast(x.q.device.type, enabled=False):
        return _Ring.apply(x.q, x.k, x.v, x.sinks, call)


class Call(NamedTuple):
    """What is no tensor."""

    ranks: Ranks
    cut: Cut
    mask: Mask
    scale: float
    softcap: float | None
    backend: str

    def blocks(self, source: int) -> tuple[Block, ...]:
        return blocks(self.cut, self.mask, self.ranks.rank, source)

    def reach(self, source: int) -> int:
        return reach(self.cut, self.mask, source)


def _offsets(cu_seqlens: Tensor | None, q: Tensor, cut: Cut) -> tuple[int, ...] | None:
    if cu_seqlens is None:
        return None
    if not isinstance(cu_seqlens, Tensor) or cu_seqlens.dtype != torch.int32 or cu_seqlens.ndim != 1:
        raise ValueError("cu_seqlens must be an int32 tensor (sequences + 1,)")
    if q.shape[0] != 1:
        raise ValueError(f"cu_seqlens packs sequences along N, so B must be 1; got q {tuple(q.shape)}")
    if not cu_seqlens.numel():
        raise ValueError("cu_seqlens is empty: it has one number more than there are sequences, [0] for none")
    on_host = cu_seqlens.cpu()
    check_offset_values("cu_seqlens", on_host, cut.total)
    return tuple(on_host.tolist())


def _facts(x: Residuals, call: Call, grads: bool) -> dict[str, Any]:
    B, H, _, D = x.q.shape
    return {
        "tokens": call.cut.lengths, "shards": call.cut.kind, "B": B, "heads": H, "k and v heads": x.k.shape[1], "D": D,
        "E": x.v.shape[3], "dtype": x.q.dtype, "window": call.mask[:2], "packed": call.mask.offsets is not None,
        "scale": call.scale, "softcap": call.softcap, "sinks": x.sinks is not None, "gradients": grads,
    }  # fmt: skip


def _check_backend(x: Residuals, call: Call, grads: bool) -> None:
    """Raises on every rank, before any communication, if the backend cannot serve a block of any of them."""
    if dispatch.differentiable_as_it_is("flash", call.backend):
        raise ValueError(
            f"backend={call.backend!r} has no backward of its own, which ranks need: use another or 'auto'"
        )
    for block in shapes(call.cut, call.mask):
        for backward in (False, True) if grads else (False,):
            dispatch.pick("flash", _spec(x, block, call, backward), call.backend)


def _spec(x: Residuals, block: Block, call: Call, backward: bool) -> FlashSpec:
    B, H, _, D = x.q.shape
    N_Q, N_KV = block.q1 - block.q0, block.k1 - block.k0
    limited = block.left is not None or block.right is not None
    return FlashSpec(
        B, H, x.k.shape[1], N_Q, N_KV, D, x.v.shape[3], x.q.dtype, x.q.device, call.scale,
        left=block.left, right=block.right, top_left=limited and (N_Q != N_KV or block.offsets is not None),
        softcap=call.softcap, has_sinks=x.sinks is not None and block.diagonal,
        sequences=None if block.offsets is None else len(block.offsets) - 1,
        with_lse=not backward, needs_grad=backward, deterministic=backward and deterministic(),
    )  # fmt: skip


def _residuals(x: Residuals, k: Tensor, v: Tensor, block: Block) -> Residuals:
    offsets = None
    if block.offsets is not None:
        offsets = torch.tensor(block.offsets, dtype=torch.int32, device=k.device)
    rows, keys = slice(block.q0, block.q1), slice(block.k0, block.k1)
    sinks = x.sinks if block.diagonal else None
    return Residuals(x.q[:, :, rows], k[:, :, keys], v[:, :, keys], sinks, offsets, offsets)


class Shard(NamedTuple):
    """k and v of one rank in one flat tensor, as they travel."""

    flat: Tensor
    k: Tensor
    v: Tensor

    @classmethod
    def of(cls, k: Tensor, v: Tensor) -> Shard:
        return cls.opened(torch.cat([k.flatten(), v.flatten()]), k, v, k.shape[2])

    @classmethod
    def opened(cls, flat: Tensor, k: Tensor, v: Tensor, N: int) -> Shard:
        """`flat` as a shard of N tokens, otherwise like k and v."""
        (B, H, _, D), E = k.shape, v.shape[3]
        size = B * H * N * D
        return cls(flat, flat[:size].view(B, H, N, D), flat[size:].view(B, H, N, E))

    @staticmethod
    def size(k: Tensor, v: Tensor, N: int) -> int:
        B, H, _, D = k.shape
        return B * H * N * (D + v.shape[3])


def _pass_keys(held: Shard | None, k: Tensor, v: Tensor, step: int, call: Call) -> Pending:
    """Sends on the shard that came `step` ranks far, and receives the one that will have come one more."""
    (_, rank, P), sends, receives = call.ranks, [], []
    if held is not None and call.reach((rank - step) % P) > step:
        sends = [Send(held.flat, (rank + 1) % P, KEYS)]
    coming = (rank - step - 1) % P
    if step < P - 1 and call.reach(coming) > step:
        receives = [Receive(Shard.size(k, v, call.cut.lengths[coming]), (rank - 1) % P, KEYS)]
    return exchange(WHAT, call.ranks, sends, receives, k)


def _pass_sums(sums: Tensor | None, x: Residuals, like: Tensor, step: int, call: Call) -> tuple[Pending, list[str]]:
    """Sends on what was summed of dk and dv of the shard that came `step` ranks far; home, if this was its last stop.

    Also receives those of the next shard, and of the rank's own if it has been everywhere; the names say which.
    """
    (_, rank, P), sends, receives, names = call.ranks, [], [], []
    source, coming = (rank - step) % P, (rank - step - 1) % P
    if sums is not None:
        onwards = call.reach(source) > step
        sends = [Send(sums, (rank + 1) % P, SUMS) if onwards else Send(sums, source, HOME)]
    if step < P - 1 and call.reach(coming) > step:
        receives.append(Receive(Shard.size(x.k, x.v, call.cut.lengths[coming]), (rank - 1) % P, SUMS))
        names.append("next")
    if call.reach(rank) == step:
        receives.append(Receive(Shard.size(x.k, x.v, x.k.shape[2]), (rank + step) % P, HOME))
        names.append("own")
    return exchange(WHAT, call.ranks, sends, receives, like), names


def _received(pending: Pending, k: Tensor, v: Tensor, N: int) -> Shard | None:
    found = pending.wait()
    return Shard.opened(found[0], k, v, N) if found else None


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, call: Call) -> Tensor:
        x, (_, rank, P) = Residuals(q, k, v, sinks), call.ranks
        dtype = torch.promote_types(q.dtype, torch.float32)
        o = torch.empty(*q.shape[:3], v.shape[3], dtype=dtype, device=q.device)
        lse = torch.empty(q.shape[:3], dtype=dtype, device=q.device)
        begun = [(b.q0, b.q1) for b in call.blocks(rank)[:1]] == [(0, q.shape[2])]  # the first block is of all queries
        if not begun:
            o.zero_()
            lse.fill_(-torch.inf)
        held: Shard | None = Shard.of(k, v) if P > 1 else Shard(k, k, v)
        for step in range(P):
            source = (rank - step) % P
            pending = _pass_keys(held, k, v, step, call)
            for block in call.blocks(source):
                assert held is not None, "a shard travels as far as it is used"
                spec = _spec(x, block, call, backward=False)
                part = _residuals(x, held.k, held.v, block)
                o_i, lse_i = plan_of(spec, part, call.backend).forward.run(*part[:TENSORS])
                if begun:
                    o.copy_(o_i)
                    lse.copy_(lse_i)
                    begun = False
                else:
                    combine(o[:, :, block.q0 : block.q1], lse[:, :, block.q0 : block.q1], o_i, lse_i)
            held = _received(pending, k, v, call.cut.lengths[(source - 1) % P])
        out = empty_rows(q, q.shape[1], v.shape[3]).copy_(o)
        ctx.call = call
        ctx.save_for_backward(q, k, v, sinks, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor) -> tuple[Any, ...]:
        q, k, v, sinks, o, lse = ctx.saved_tensors
        call, (_, rank, P) = ctx.call, ctx.call.ranks
        local = _Gradients(Residuals(q, k, v, sinks), o, lse, tidy_rows(do), call)
        held: Shard | None = Shard.of(k, v) if P > 1 else Shard(k, k, v)
        own = lse.new_zeros(Shard.size(k, v, k.shape[2]))  # dk and dv of this rank's shard
        sums: Tensor | None = None
        passed: Pending = Pending(WHAT, call.ranks, [], [], [])
        names: list[str] = []  # of what `passed` brings
        for step in range(P):
            source = (rank - step) % P
            keys = _pass_keys(held, k, v, step, call)
            sums = None if held is None else local.of_shard(held, source)
            arrived = dict(zip(names, passed.wait(), strict=True))
            own += arrived.get("own", 0.0)
            if step == 0:
                assert sums is not None, "a rank has its own shard"
                own += sums
            else:
                if "next" in arrived:
                    assert sums is not None, "what was summed travels with its shard"
                    sums += arrived["next"]
                passed, names = _pass_sums(sums, local.x, own, step, call)
            held = _received(keys, k, v, call.cut.lengths[(source - 1) % P])
        own += dict(zip(names, passed.wait(), strict=True)).get("own", 0.0)
        _, sums_of_k, sums_of_v = Shard.opened(own, k, v, k.shape[2])
        dq = empty_rows(q, q.shape[1], q.shape[3]).copy_(local.dq)
        dk, dv = empty_rows(k, k.shape[1], k.shape[3]), empty_rows(v, v.shape[1], v.shape[3])
        dsinks = None if sinks is None else local.dsinks.to(sinks.dtype)
        return dq, dk.copy_(sums_of_k), dv.copy_(sums_of_v), dsinks, None


class _Gradients:
    """What this rank's queries add to the gradients: dq, dsinks, and dk and dv of each shard."""

    def __init__(self, x: Residuals, o: Tensor, lse: Tensor, do: Tensor, call: Call) -> None:
        self.x, self.o, self.lse, self.do, self.call = x, o, lse, do, call
        self.dq = torch.zeros(x.q.shape, dtype=lse.dtype, device=x.q.device)
        self.dsinks = lse.new_zeros(x.q.shape[1])

    def of_shard(self, held: Shard, source: int) -> Tensor:
        """dk and dv of that rank's shard, flat, in fp32 (fp64)."""
        call, N = self.call, held.k.shape[2]
        flat = self.lse.new_zeros(Shard.size(held.k, held.v, N))
        _, dk, dv = Shard.opened(flat, held.k, held.v, N)
        for block in call.blocks(source):
            rows, keys = slice(block.q0, block.q1), slice(block.k0, block.k1)
            spec = _spec(self.x, block, call, backward=True)
            part = _residuals(self.x, held.k, held.v, block)
            o, lse, do = self.o[:, :, rows], self.lse[:, :, rows].contiguous(), self.do[:, :, rows]
            dq_i, dk_i, dv_i, dsinks_i = plan_of(spec, part, call.backend).gradients(*part[:TENSORS], o, lse, do, None)
            self.dq[:, :, rows] += dq_i
            dk[:, :, keys] += dk_i
            dv[:, :, keys] += dv_i
            if dsinks_i is not None:
                self.dsinks += dsinks_i
        return flat


def combine(o: Tensor, lse: Tensor, o_i: Tensor, lse_i: Tensor) -> None:
    """Adds a block's result to o and lse, fp32 (fp64), in place; rows that see nothing have lse = -inf."""
    kernels = kernels_for(o_i)
    if kernels is not None:
        kernels.combine(o, lse, o_i, lse_i)
        return
    both = torch.logaddexp(lse, lse_i)
    pivot = both.masked_fill(both == -torch.inf, 0.0)
    o.mul_(torch.exp(lse - pivot)[..., None]).addcmul_(o_i.to(o.dtype), torch.exp(lse_i - pivot)[..., None])
    lse.copy_(both)
