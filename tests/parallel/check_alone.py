"""A group of one rank: every call goes the way of several, as far as one process can. `test_alone.py` runs these."""

from __future__ import annotations

import torch
import torch.distributed as dist

from fulmen import parallel
from fulmen.parallel import groups


def transport(device: str) -> None:
    """What `groups` takes for granted of a transport: its timeout, where tensors lie, collectives in the background."""
    ranks = groups.ranks_of(dist.group.WORLD)
    assert (ranks.rank, ranks.size) == (0, 1)
    assert groups.timeout_of(ranks.group).total_seconds() > 1
    where = torch.device(device, 0) if device == "cuda" else torch.device(device)
    assert groups.through_host(ranks, where) == (device != "cpu" and dist.get_backend() == "gloo")
    own = torch.randn(2, 3, 4, 5, device=where)
    every = torch.empty(1, *own.shape, device=where)
    work = groups._all_gather(every.view(-1), own.view(-1), group=ranks.group, async_op=True)
    assert torch.equal(groups.Pending("a check", ranks, [work], [every], [own]).wait()[0][0], own)
    out = torch.empty_like(own)
    dist.all_to_all_single(out, own, [2], [2], group=ranks.group)
    assert torch.equal(out, own)
    dist.barrier()


def checkpoint(device: str, folder: str) -> None:
    """A model of one rank is saved and loaded."""
    from check_layers import build, full

    _, _, shared, _, _ = build("LG", 1, 1, fsdp=True, device=device)
    parallel.save(f"{folder}/alone", shared)
    _, _, other, _, _ = build("LG", 1, 1, fsdp=True, seed=1, device=device)
    parallel.load(f"{folder}/alone", other)
    for a, b in zip(shared.parameters(), other.parameters(), strict=True):
        assert torch.equal(full(a), full(b))
