"""Lightning attention of a sequence that is cut over ranks: one all-gather of states forward, one backward.

Each rank has some consecutive tokens. One state sums up all tokens before them, so only states are communicated
(LASP-2, with decay). With M_j what rank j's tokens add to the state,

    S_r = sum_{j<r} lambda^(tokens between j and r) M_j      o = local attention + scale lambda^(t+1) q S_r
    G_r = sum_{j>r} lambda^(tokens between r and j) dS_j     dk, dv = local gradients + those of the leaving state

A rank computes M (dS) and starts the all-gather. It then computes its local attention, by any backend, while the states
are in flight, and adds what came from other ranks. Where that addition would take longer than the all-gather, it waits
first and starts its local attention from the received state: see `waits`. Every rank knows from `lengths` and
`cu_seqlens` which of the received states belong to its first, or last, sequence and how far away they are; nothing else
is communicated.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from fulmen import dispatch
from fulmen.boundary import check_offset_values, once_differentiable
from fulmen.lightning.plan import count_residuals, plan_of
from fulmen.lightning.spec import Residuals, check_inputs, check_values, spec_of
from fulmen.parallel import states
from fulmen.parallel.groups import Group, Ranks, agree, all_gather, ranks_of
from fulmen.parallel.shards import Cut, cut_of_shards

WHAT = "fulmen.parallel.lightning_attention"


@_disable_dynamo  # unlike torch.compiler.disable, imports no compiler here
def lightning_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None = None,
    *,
    group: Group,
    lengths: Sequence[int] | None = None,
    scale: float = 1.0,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """`fulmen.lightning_attention` of a sequence that is cut over the ranks of `group`: this rank's part of o.

    q, k, v        this rank's tokens, consecutive ones; the first rank has the first.
    decay          as there; (B, H, N) is of this rank's tokens.
    group          a process group, or a DeviceMesh of one dimension.
    lengths        tokens on each rank; None: as many on every rank as here, which is compared once for each new N. Give
                   them if they differ between ranks, or change from call to call.
    initial_state  of the whole, (B or sequences, H, D, E), the same on every rank or None on all. It is read, and has
                   a gradient, on the rank where its sequence begins; elsewhere its gradient is zero.
    cu_seqlens     of the whole, the same on every rank: sequences may cross ranks. Its values are needed on the host.
    backend        of the local work; "reference" has no backward to be called here.

    Forward and backward each make one all-gather of fp32 (B, H, D, E), whatever N is: all ranks have to call both.
    """
    return _attend(q, k, v, decay, group, lengths, scale, initial_state, cu_seqlens, backend)[0]


@_disable_dynamo  # unlike torch.compiler.disable, imports no compiler here
def lightning_attention_with_state(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None = None,
    *,
    group: Group,
    lengths: Sequence[int] | None = None,
    scale: float = 1.0,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """As `lightning_attention`, and the states after the sequences' last tokens, fp32 (B or sequences, H, D, E).

    A state is on the rank that has its sequence's last token (without cu_seqlens: the last rank that has any) and zero
    on the others, so that the sum over ranks is the whole.
    """
    return _attend(q, k, v, decay, group, lengths, scale, initial_state, cu_seqlens, backend)


# ------------------------------------------------------------------------------------- who has which tokens


class Part(NamedTuple):
    """The sequences on a rank; all of it follows from `lengths` and `cu_seqlens`.

    bounds   of the sequences here, in local tokens
    own      their numbers
    begins   which of them have their first token here;  ends  their last
    before   (rank, tokens between) of ranks with earlier tokens of the first sequence here
    behind   (rank, tokens between) of ranks with later tokens of the last sequence here
    """

    bounds: tuple[int, ...]
    own: tuple[int, ...]
    begins: tuple[bool, ...]
    ends: tuple[bool, ...]
    before: tuple[tuple[int, int], ...]
    behind: tuple[tuple[int, int], ...]


def part_of(cut: Cut, rank: int, offsets: Sequence[int]) -> Part:
    """`offsets` of the whole: [0, total] where there is one sequence."""
    starts = [0, *itertools.accumulate(cut.lengths)]
    begin, end = starts[rank], starts[rank + 1]
    if begin == end:  # a rank without tokens: nothing comes in, nothing goes out
        return Part((0,), (), (), (), (), ())
    first = bisect.bisect_right(offsets, begin) - 1
    last = bisect.bisect_left(offsets, end) - 1
    own = tuple(i for i in range(first, last + 1) if offsets[i] < offsets[i + 1])
    bounds = (0, *(min(offsets[i + 1], end) - begin for i in own))
    others = [j for j in range(len(cut.lengths)) if cut.lengths[j]]
    before = [(j, begin - starts[j + 1]) for j in others if j < rank and starts[j + 1] > offsets[first]]
    behind = [(j, starts[j] - end) for j in others if j > rank and starts[j] < offsets[last + 1]]
    begins = tuple(offsets[i] >= begin for i in own)
    ends = tuple(offsets[i + 1] <= end for i in own)
    return Part(bounds, own, begins, ends, tuple(before), tuple(behind))


def owners_of_empty(cut: Cut, offsets: Sequence[int]) -> dict[int, int]:
    """The rank of each sequence without tokens, whose state is the initial one: the one where it would begin."""
    starts = list(itertools.accumulate(cut.lengths, initial=0))[:-1]
    empty = (i for i in range(len(offsets) - 1) if offsets[i] == offsets[i + 1])
    return {i: bisect.bisect_right(starts, offsets[i]) - 1 for i in empty}


# ------------------------------------------------------------------------------------------------ the call


class Call(NamedTuple):
    """What is no tensor."""

    ranks: Ranks
    part: Part
    empty: tuple[int, ...]  # sequences without tokens that are this rank's: their last state is the initial one
    scale: float
    backend: str
    sequences: int | None  # of the whole; None: not packed
    slopes: tuple[float, ...]  # on the host

    @property
    def first(self) -> slice:
        """Which of the local states are of the first sequence; not packed, there is one sequence in all rows."""
        return slice(None) if self.sequences is None else slice(0, 1)

    @property
    def last(self) -> slice:
        return slice(None) if self.sequences is None else slice(-1, None)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, group: Group, lengths: Sequence[int] | None, scale: float,
    initial_state: Tensor | None, cu_seqlens: Tensor | None, backend: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    ranks = ranks_of(group)
    x = check_inputs(q, k, v, decay, scale, initial_state, cu_seqlens)
    cut = cut_of_shards(x.q.shape[2], ranks, "contiguous", lengths)
    offsets, sequences = [0, cut.total], None
    if x.cu_seqlens is not None:
        on_host = x.cu_seqlens.cpu()
        check_offset_values("cu_seqlens", on_host, cut.total)
        offsets = on_host.tolist()
        sequences = len(offsets) - 1
    check_values(x.decay, None, x.q.shape[2])
    empty = tuple(i for i, rank in owners_of_empty(cut, offsets).items() if rank == ranks.rank)
    H = max(x.q.shape[1], x.v.shape[1])
    tokens = (x.decay is not None and x.decay.ndim == 3) or x.q.shape[1] < H
    slopes = () if tokens else states.host_values(decay, H)
    call = Call(ranks, part_of(cut, ranks.rank, offsets), empty, float(scale), backend, sequences, slopes)
    _check_backend(x, call)
    agree(WHAT, ranks, _facts(x, cut, call))
    with torch.autocast(x.q.device.type, enabled=False):
        if tokens:
            from fulmen.parallel.tokens import TokenLightning

            return TokenLightning.apply(x.q, x.k, x.v, every_token(x, H), x.initial_state, call)
        return _Lightning.apply(x.q, x.k, x.v, x.decay, x.initial_state, call)


def every_token(x: Residuals, H: int) -> Tensor:
    """The decay of each token, (B, H, N): a constant one, or none, is expanded."""
    if x.decay is not None and x.decay.ndim == 3:
        return x.decay
    slopes = x.q.new_zeros(H, dtype=torch.float32) if x.decay is None else x.decay
    return slopes[:, None].expand(x.q.shape[0], H, x.q.shape[2])


def _facts(x: Residuals, cut: Cut, call: Call) -> dict[str, Any]:
    B, H, _, D = x.q.shape
    grads = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in x)
    return {
        "tokens": cut.lengths, "B": B, "heads": H, "k heads": x.k.shape[1], "v heads": x.v.shape[1], "D": D,
        "E": x.v.shape[3], "dtype": x.q.dtype, "decay": None if x.decay is None else x.decay.ndim, "scale": call.scale,
        "packed": call.sequences is not None, "initial_state": x.initial_state is not None, "gradients": grads,
    }  # fmt: skip


def _check_backend(x: Residuals, call: Call) -> None:
    """Raises before any communication if the backend cannot serve the local work."""
    if dispatch.differentiable_as_it_is("lightning", call.backend):
        raise ValueError(
            f"backend={call.backend!r} has no backward of its own, which ranks need: use another or 'auto'"
        )
    local = local_work(x, x.initial_state, call)
    for with_state in (True, False):
        dispatch.pick("lightning", local_spec(local, call, with_state), call.backend)


def local_work(x: Residuals, initial: Tensor | None, call: Call) -> Residuals:
    """The residuals of the local work; `initial` of the sequences here."""
    bounds = None
    if call.sequences is not None and len(call.part.own) != 1:
        bounds = torch.tensor(call.part.bounds, dtype=torch.int32, device=x.q.device)
    return Residuals(x.q, x.k, x.v, x.decay, initial, bounds)


def local_spec(x: Residuals, call: Call, with_state: bool) -> Any:
    return spec_of(
        *x[:4], scale=call.scale, initial_state=x.initial_state, cu_seqlens=x.cu_seqlens, with_final_state=with_state
    )


# ---------------------------------------------------------------------------- states of the whole and local ones


def of_local(whole: Tensor | None, which: Sequence[bool], call: Call) -> Tensor | None:
    """The rows of the sequences here, zero where not `which`; None: nothing is given, or nothing is of them."""
    if whole is None or not any(which):
        return None
    if call.sequences is None:
        return whole
    rows = whole[list(call.part.own)]
    if not all(which):
        rows = rows * torch.tensor(which, device=rows.device)[:, None, None, None]
    return rows


def of_whole(
    local: Tensor | None, which: Sequence[bool], empty: Tensor | None, shape: Sequence[int], like: Tensor, call: Call
) -> Tensor:
    """The reverse: zeros but for the sequences here that are `which`, and for empty ones, which have `empty`'s rows."""
    whole = like.new_zeros(shape)
    if local is not None and any(which):
        if call.sequences is None:
            whole.copy_(local)
        else:
            own = [i for i, yes in zip(call.part.own, which, strict=True) if yes]
            whole[own] = local[torch.tensor(which, device=local.device)]
    if empty is not None and call.empty:
        rows = slice(None) if call.sequences is None else list(call.empty)
        whole[rows] = empty[rows]
    return whole


# ------------------------------------------------------------------------------------------ forward and backward


def _leaving(x: Residuals, own: Tensor | None, decay: states.Decay, call: Call) -> Tensor:
    """What this rank's last sequence adds to the state, if a later rank continues it."""
    if not call.part.behind:
        return states.zero_states(x.q.shape[0], x.q, x.v.shape[3])
    begin, N = call.part.bounds[-2], x.q.shape[2]
    M = states.leaving(x.q, x.k[:, :, begin:], x.v[:, :, begin:], decay)
    if own is not None:
        M += own[call.last] * decay.power(N - begin, M)
    return M


TRAVEL = 60e-6  # seconds, about: an all-gather of states between the GPUs of a machine
BANDWIDTH = 3e12  # bytes a second, about, of a GPU's memory


def waits(q: Tensor) -> bool:
    """Whether adding received states (3u of memory traffic forward, 6u backward) takes longer than the all-gather."""
    return q.device.type == "cuda" and 3 * q.numel() * q.element_size() > TRAVEL * BANDWIDTH


def _states_here(x: Residuals, call: Call) -> tuple[int, ...]:
    """The shape of the states of the sequences here."""
    count = x.q.shape[0] if call.sequences is None else len(call.part.own)
    return count, x.q.shape[1], x.q.shape[3], x.v.shape[3]


def plus(rows: Tensor | None, added: Tensor | None, which: slice, like: tuple[int, ...]) -> Tensor | None:
    """States, or None for zeros, with `added` to those that are `which`."""
    if added is None:
        return rows
    rows = added.new_zeros(like) if rows is None else rows.clone()
    rows[which] += added
    return rows


class _Lightning(torch.autograd.Function):
    """See the top of the file. In the backward the state that entered is an initial state like any other."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        q, k, v, slopes, initial_state, call = inputs
        x = Residuals(q, k, v, slopes, None, None)
        part, decay = call.part, states.Decay.of(slopes, call.slopes, q)
        initial = of_local(initial_state, part.begins, call)
        travelling = all_gather(WHAT, _leaving(x, initial, decay, call), call.ranks)
        at_once, here = waits(q), _states_here(x, call)
        if at_once:
            every = travelling.wait()[0]
            initial = plus(initial, states.combined(every, part.before, decay), call.first, here)
        local = local_work(x, initial, call)
        o, left = q.new_empty(*q.shape[:3], v.shape[3]), states.zero_states(0, q, v.shape[3])
        if part.own:
            spec = local_spec(local, call, True)
            o, left, _ = plan_of(spec, local, call.backend).forward.run(*local[:6])
        if not at_once:
            every = travelling.wait()[0]
            entered = states.combined(every, part.before, decay)
            if entered is not None:
                n = part.bounds[1]
                states.add_entering(o[:, :, :n], x.q[:, :, :n], entered, decay, call.scale)
                left[call.first] += entered * decay.power(n, entered)
                initial = plus(initial, entered, call.first, here)
        ctx.call, ctx.shape = call, (call.sequences or x.q.shape[0], *every.shape[2:])
        ctx.has_initial = initial_state is not None
        ctx.set_materialize_grads(False)
        given = initial_state if ctx.needs_input_grad[4] else None  # for `once_differentiable`
        ctx.save_for_backward(x.q, x.k, x.v, x.decay, initial, given)
        return o, of_whole(left, part.ends, initial_state, ctx.shape, every, call)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor | None, dfinal: Tensor | None) -> tuple[Any, ...]:
        call, part = ctx.call, ctx.call.part
        q, k, v, slopes, initial, _ = ctx.saved_tensors
        x = Residuals(q, k, v, slopes, None, None)
        decay = states.Decay.of(slopes, call.slopes, q)
        if do is None:  # only the state was used
            do = x.q.new_zeros(*x.q.shape[:3], x.v.shape[3])
        elif do.stride(3) != 1:  # autograd hands over expanded gradients, as of o.sum()
            do = do.contiguous()
        dleft = of_local(dfinal, part.ends, call)
        travelling = all_gather(WHAT, _entering_gradient(x, do, dleft, decay, call), call.ranks)
        at_once = waits(q)
        if at_once:
            every = travelling.wait()[0]
            here = _states_here(x, call)
            dleft = plus(dleft, states.combined(every, part.behind, decay), call.last, here)
        dq, dk, dv, dinitial = torch.zeros_like(x.q), torch.zeros_like(x.k), torch.zeros_like(x.v), None
        if part.own:
            local = local_work(x, initial, call)
            spec = local_spec(local, call, dleft is not None)
            dleft = None if dleft is None else dleft.contiguous()
            dq, dk, dv, dinitial = plan_of(spec, local, call.backend).gradients(
                *local[: count_residuals(spec)], do, dleft
            )
        G = None  # or what is left to add
        if not at_once:
            every = travelling.wait()[0]
            G = states.combined(every, part.behind, decay)
        if G is not None:
            begin, N = part.bounds[-2], x.q.shape[2]
            dk_, dv_, k_, v_ = (t[:, :, begin:] for t in (dk, dv, k, v))
            states.add_leaving_gradient(dk_, dv_, k_, v_, G, decay)
            if dinitial is not None:
                dinitial[call.last] += G * decay.power(N - begin, G)
        dwhole = None
        if ctx.has_initial:
            dwhole = of_whole(dinitial, part.begins, dfinal, ctx.shape, every, call)
        return dq, dk, dv, None, dwhole, None


def _entering_gradient(x: Residuals, do: Tensor, dleft: Tensor | None, decay: states.Decay, call: Call) -> Tensor:
    """The gradient of the state that entered, if it came from earlier ranks."""
    if not call.part.before:
        return states.zero_states(x.q.shape[0], x.q, x.v.shape[3])
    n = call.part.bounds[1]
    dS = states.entering_gradient(x.q[:, :, :n], do[:, :, :n], decay, call.scale)
    if dleft is not None:
        dS += dleft[call.first] * decay.power(n, dS)
    return dS
