"""Lightning attention over ranks, seen from one of them; `test_lightning.py` runs these."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.tensor.debug import CommDebugMode

from fulmen import parallel
from fulmen.parallel import groups, lightning
from fulmen.parallel.shards import Cut
from fulmen.testing import lightning as testing


def cut_for(kind: str, N: int) -> list[int] | None:
    P = dist.get_world_size()
    if kind == "even":
        return None
    if kind == "first":  # all tokens on the first rank
        return [N] + [0] * (P - 1)
    parts = [N * (i + 1) ** 2 // (P * (P + 1) * (2 * P + 1) // 6) for i in range(P)]
    parts[P // 2] = 0 if kind == "empty" else parts[P // 2]
    parts[-1] += N - sum(parts)
    return parts


def across(lengths=None, backend: str = "auto", group=None):
    """`lightning_attention_with_state` of the whole, computed by all ranks; every rank has the whole result."""
    group = group or dist.group.WORLD

    def attend(x):
        q, k, v = (parallel.shard(t, group, dim=2, lengths=lengths) for t in (x.q, x.k, x.v))
        decay = x.decay
        if decay is not None and decay.ndim == 3:
            decay = parallel.shard(decay, group, dim=2, lengths=lengths)
        o, state = parallel.lightning_attention_with_state(
            q, k, v, decay, group=group, lengths=lengths, backend=backend, **x.options()
        )
        return parallel.unshard(o, group, dim=2, lengths=lengths), state

    return attend


def summed(out):
    """Gradients and states are of each rank's tokens: their sum is the whole's."""
    for name in ("state", "dq", "dk", "dv", "dinitial", "ddecay"):
        value = getattr(out, name)
        if value is not None:
            dist.all_reduce(value)
    return out


def values(
    cut: str = "even", backend: str = "auto", use=("o", "state"), dtype: str = "float32", at_once: bool | None = None,
    **options,
) -> None:  # fmt: skip
    """`at_once`: whether ranks wait for states before they compute; None: as they would."""
    if at_once is not None:
        lightning.waits = lambda q: at_once
    x = testing.inputs(**options, dtype=getattr(torch, dtype))
    if x.decay is not None and x.decay.ndim == 3:
        x = x._replace(decay=x.decay.requires_grad_())
    lengths = cut_for(cut, x.q.shape[2])
    actual = summed(testing.evaluate(across(lengths, backend), x, use))
    again = summed(testing.evaluate(across(lengths, backend), x, use))
    for name, value in actual._asdict().items():
        assert value is None or torch.equal(value, getattr(again, name)), f"{name} is not the same the second time"
    if dist.get_rank() == 0:
        for name, wanted in testing.expected(x, use).items():
            if dtype == "float64":  # the yardstick is fp64 itself: as many roundings as a sum has terms
                wanted = wanted._replace(roundings=x.q.shape[2])
            testing.assert_close(name, getattr(actual, name), *wanted)


def traffic(N: int) -> None:
    """One all-gather each way, of world_size states, whatever N is."""
    P, (B, H, D, E) = dist.get_world_size(), (2, 3, 16, 8)
    x = testing.inputs(B=B, H=H, N=N, D=D, E=E, decay="mixed")
    q, k, v = (parallel.shard(t, dist.group.WORLD, dim=2).clone().requires_grad_() for t in (x.q, x.k, x.v))
    sizes = []
    plain = groups._all_gather

    def counting(output, given, *args, **kwargs):
        sizes.append((output.numel() * output.element_size(), output.dtype))
        return plain(output, given, *args, **kwargs)

    groups._all_gather = counting
    try:
        with CommDebugMode() as forward:
            o = parallel.lightning_attention(q, k, v, x.decay, group=dist.group.WORLD)
        with CommDebugMode() as backward:
            o.sum().backward()
    finally:
        groups._all_gather = plain
    for mode in (forward, backward):
        assert mode.get_comm_counts() == {torch.ops.c10d._allgather_base_: 1}, mode.get_comm_counts()
    assert sizes == [(P * B * H * D * E * 4, torch.float32)] * 2, sizes


def far_ranks_are_skipped() -> None:
    """What has decayed to nothing (2^-60) is not read: NaN in it is not seen, forward or backward."""
    P, rank, N = dist.get_world_size(), dist.get_rank(), 64
    decay = torch.full((2,), 0.7)  # exp(-0.7 * 64) = 2^-65
    generator = torch.Generator().manual_seed(rank)
    q, k, v = torch.randn(3, 1, 2, N, 8, generator=generator)
    if rank == 0:
        k = k * torch.nan
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    o = parallel.lightning_attention(*leaves, decay, group=dist.group.WORLD)
    do = torch.ones_like(o) * (torch.nan if rank == P - 1 else 1.0)
    o.backward(do)
    assert o.isfinite().all() == (rank not in (0, 1)), "rank 1 is next to the NaN, rank 2 is 64 tokens away"
    if 2 <= rank < P - 2:
        assert all(t.grad.isfinite().all() for t in leaves)
    if rank == P - 2:
        assert not leaves[2].grad.isfinite().all()


def what_is_large_reaches_far() -> None:
    """Little is left of a state 64 tokens on, 2^-24, and that counts where it was large, or is all there is."""
    x = testing.inputs(1, 4, 64 * dist.get_world_size(), 8, decay=torch.full((4,), 0.26), dtype=torch.float64)
    x.v[:, :, :64] *= 1e6
    x.v[:, :, 64:] = 0.0
    actual = testing.evaluate(across(), x, ("o",))
    if dist.get_rank() == 0:
        exact = testing.expected(x, ("o",))["o"].exact
        for first in range(0, x.q.shape[2], 64):
            mine, right = actual.o[:, :, first : first + 64], exact[:, :, first : first + 64]
            assert float((mine - right).norm() / right.norm()) < 1e-10, first


def parts() -> None:
    """`part_of` says of every rank what a look at each token says."""
    from fulmen.parallel.lightning import part_of

    P = dist.get_world_size()
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(200):
        lengths = torch.randint(0, 5, (P,), generator=generator).tolist()
        total = sum(lengths)
        ends = sorted(torch.randint(0, total + 1, (3,), generator=generator).tolist()) if total else [0, 0, 0]
        offsets = [0, *ends, total]
        sequence = [s for s in range(4) for _ in range(offsets[s], offsets[s + 1])]
        owner = [r for r in range(P) for _ in range(lengths[r])]
        for rank in range(P):
            part = part_of(Cut("contiguous", tuple(lengths)), rank, offsets)
            tokens = [t for t in range(total) if owner[t] == rank]
            own = sorted({sequence[t] for t in tokens})
            assert list(part.own) == own
            assert part.begins == tuple(owner[offsets[s]] == rank for s in own)
            assert part.ends == tuple(owner[offsets[s + 1] - 1] == rank for s in own)
            first = {owner[t] for t in range(total) if own and sequence[t] == own[0] and t < tokens[0]}
            last = {owner[t] for t in range(total) if own and sequence[t] == own[-1] and t > tokens[-1]}
            assert {j for j, _ in part.before} == first
            assert {j for j, _ in part.behind} == last
            for j, distance in part.before:
                assert distance == tokens[0] - 1 - max(t for t in range(total) if owner[t] == j)
            for j, distance in part.behind:
                assert distance == min(t for t in range(total) if owner[t] == j) - tokens[-1] - 1
