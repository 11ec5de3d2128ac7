"""Softmax attention over ranks, seen from one of them; `test_softmax.py` runs these."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.tensor.debug import CommDebugMode

from fulmen import parallel
from fulmen.parallel import groups
from fulmen.testing import flash as testing


def across(way: str, shards: str = "contiguous", lengths=None, backend: str = "auto"):
    """`flash_attention` of the whole, computed by all ranks; every rank has the whole result."""
    world = dist.group.WORLD
    attend = parallel.ring_attention if way == "ring" else parallel.ulysses_attention
    more = {"shards": shards} if way == "ring" else {}
    cut = {"shards": shards, "lengths": lengths}

    def call(x):
        q, k, v = (parallel.shard(t, world, dim=2, **cut) for t in (x.q, x.k, x.v))
        options = x.options()
        options["cu_seqlens"] = options.pop("cu_seqlens_q")
        del options["cu_seqlens_k"]
        o = attend(q, k, v, group=world, lengths=lengths, backend=backend, **more, **options)
        return parallel.unshard(o, world, dim=2, **cut), None

    return call


def results(x, *args):
    """Gradients are of each rank's tokens: their sum is the whole's."""
    out = testing.evaluate(across(*args), x, ("o",))
    for value in (out.dq, out.dk, out.dv, out.dsinks):
        if value is not None:
            dist.all_reduce(value)
    return out


def values(way: str, shards: str = "contiguous", lengths=None, backend: str = "auto", dtype="float32", **options):
    x = testing.inputs(**options, dtype=getattr(torch, dtype))
    actual, again = (results(x, way, shards, lengths, backend) for _ in range(2))
    for name, value in actual._asdict().items():
        assert value is None or torch.equal(value, getattr(again, name)), f"{name} is not the same the second time"
    if dist.get_rank() == 0:
        wanted = testing.expected(x, ("o",))
        for name, value in actual._asdict().items():
            if value is not None:
                testing.assert_close(name, value, *wanted[name])


def ring_traffic(causal: bool, shards: str, window=None) -> None:
    """Each shard of k and v is sent on as often as somebody behind needs it, unexpanded, and so are its gradients."""
    P, rank, world = dist.get_world_size(), dist.get_rank(), dist.group.WORLD
    B, H, H_KV, D, E, n = 1, 4, 2, 8, 4, 8
    x = testing.inputs(B=B, H=H, H_KV=H_KV, N_Q=n * P, D=D, E=E)
    q, k, v = (parallel.shard(t, world, dim=2, shards=shards).clone().requires_grad_() for t in (x.q, x.k, x.v))
    sent = []
    plain = dist.batch_isend_irecv

    def counting(steps):
        sent.extend((s.tag, s.tensor.numel() * s.tensor.element_size()) for s in steps if s.op is dist.isend)
        return plain(steps)

    groups.dist.batch_isend_irecv = counting
    try:
        with CommDebugMode() as mode:
            o = parallel.ring_attention(q, k, v, group=world, causal=causal, shards=shards, window=window)
            forward, sent[:] = list(sent), []
            o.sum().backward()
    finally:
        groups.dist.batch_isend_irecv = plain
    assert not mode.get_comm_counts(), "a ring has no collectives"
    size = B * H_KV * n * (D + E) * 4
    if window is not None:  # keys of the rank before, and no others
        hops = int(rank < P - 1)
        assert forward == [(1, size)] * hops
        return
    # a contiguous causal shard j is of use to the P - 1 - j ranks behind it: this rank passes on those before it
    hops = P - 1 if shards == "zigzag" or not causal else (rank + 1 if rank < P - 1 else 0)
    assert forward == [(1, size)] * hops, forward
    keys = [b for tag, b in sent if tag == 1]
    sums = [b for tag, b in sent if tag != 1]
    assert keys == [size] * hops, sent
    assert sums == [size] * (P - 1 if hops == P - 1 and (shards == "zigzag" or not causal) else rank), sent


def ulysses_traffic() -> None:
    """Two all-to-alls each way."""
    P, world = dist.get_world_size(), dist.group.WORLD
    x = testing.inputs(H=8, H_KV=2, N_Q=8 * P, D=8)
    q, k, v = (parallel.shard(t, world, dim=2).clone().requires_grad_() for t in (x.q, x.k, x.v))
    with CommDebugMode() as forward:
        o = parallel.ulysses_attention(q, k, v, group=world, causal=True)
    with CommDebugMode() as backward:
        o.sum().backward()
    for mode in (forward, backward):
        assert mode.get_comm_counts() == {torch.ops.c10d.alltoall_base_: 2}, mode.get_comm_counts()


def memory() -> None:
    """What a ring keeps for the backward is of the rank's own tokens."""
    P, world = dist.get_world_size(), dist.group.WORLD
    n, D = 16, 8
    q, k, v = (torch.randn(1, 2, n, D).requires_grad_() for _ in range(3))
    kept = []

    def pack(t):
        kept.append(t.numel())
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        parallel.ring_attention(q, k, v, group=world, causal=True)
    assert sum(kept) == 4 * 2 * n * D + 2 * n, (kept, P)


def blocks_are_the_mask() -> None:
    """Every pair of tokens that see each other is in exactly one block, and no other is."""
    from fulmen.parallel.blocks import Mask, blocks
    from fulmen.parallel.shards import Cut

    P, generator = dist.get_world_size(), torch.Generator().manual_seed(dist.get_rank())

    def draw(low, high):
        return int(torch.randint(low, high, (), generator=generator))

    for _ in range(150):
        zigzag = draw(0, 2) == 1
        n = 2 * draw(0, 4)
        lengths = (n,) * P if zigzag else tuple(draw(0, 6) for _ in range(P))
        cut = Cut("zigzag" if zigzag else "contiguous", lengths)
        left = None if draw(0, 2) else draw(0, 12)
        right = (None, 0, draw(0, 12))[draw(0, 3)]
        ends = sorted(draw(0, cut.total + 1) for _ in range(draw(0, 4)))
        offsets = (0, *ends, cut.total) if draw(0, 2) else None
        t = torch.arange(cut.total)
        seen = torch.ones(cut.total, cut.total, dtype=torch.bool)
        seen &= t[None] >= t[:, None] - (cut.total if left is None else left)
        seen &= t[None] <= t[:, None] + (cut.total if right is None else right)
        if offsets is not None:
            sequence = torch.searchsorted(torch.tensor(offsets[1:]), t, right=True)
            seen &= sequence[:, None] == sequence[None]
        count = torch.zeros_like(seen, dtype=torch.int64)
        for rank in range(P):
            at_q = cut.positions(rank)
            for source in range(P):
                at_k = cut.positions(source)
                for b in blocks(cut, Mask(left, right, offsets), rank, source):
                    i, j = torch.arange(b.q1 - b.q0)[:, None], torch.arange(b.k1 - b.k0)[None]
                    far = cut.total
                    see = (j >= i - (far if b.left is None else b.left)) & (
                        j <= i + (far if b.right is None else b.right)
                    )
                    if b.offsets is not None:
                        of = torch.searchsorted(torch.tensor(b.offsets[1:]), i.flatten(), right=True)
                        see &= of[:, None] == of[None]
                    rows, columns = at_q[b.q0 : b.q1], at_k[b.k0 : b.k1]
                    count[rows[:, None], columns[None]] += see
        assert torch.equal(count, seen.long()), (cut, left, right, offsets)
