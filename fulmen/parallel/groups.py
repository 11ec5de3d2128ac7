"""Ranks that work on one sequence: their group, checks that they call alike, and transport with clear errors.

If one rank called with other shapes than the rest, the others would hang or read wrong data. So each new combination of
shapes and options is compared once, through the group's store: no collective, and none of the data. Every rank raises
the same error. Repeated calls skip the comparison.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _get_process_group_store

Group = ProcessGroup | DeviceMesh


class Ranks(NamedTuple):
    """A process group, this process's place in it, and its size."""

    group: ProcessGroup
    rank: int
    size: int


def ranks_of(group: Group) -> Ranks:
    """The ranks of a process group or one-dimensional mesh that holds this process; raises for anything else."""
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(
                f"group is a mesh of dims {group.mesh_dim_names or group.shape}, must have one: mesh['cp']"
            )
        group = group.get_group()
    if not isinstance(group, ProcessGroup):
        raise ValueError(f"group is a {type(group).__name__}, must be a process group or a one-dimensional DeviceMesh")
    rank = dist.get_rank(group)
    if rank < 0:
        raise ValueError("group does not hold this process")
    return Ranks(group, rank, dist.get_world_size(group))


class _History:
    """What the ranks of a group have agreed on, and how many comparisons they have made."""

    def __init__(self) -> None:
        self.agreed: set[Any] = set()
        self.compared = 0


_histories: WeakKeyDictionary[ProcessGroup, _History] = WeakKeyDictionary()


def agree(what: str, ranks: Ranks, facts: dict[str, Any]) -> None:
    """Raises on every rank if they do not all call `what` with the same `facts`; see the top of the file."""
    if ranks.size == 1:
        return
    history = _histories.get(ranks.group)
    if history is None:
        history = _histories[ranks.group] = _History()
        if "nccl" in dist.get_backend(ranks.group):  # its first message must be everyone's, and a ring's may not be
            dist.barrier(group=ranks.group)
    key = (what, *facts.items())
    if key in history.agreed:
        return
    store, turn = _get_process_group_store(ranks.group), history.compared
    history.compared += 1
    names = [f"fulmen/{turn}/{rank}" for rank in range(ranks.size)]
    store.set(names[ranks.rank], "\n".join([what, *(f"{name}={value}" for name, value in facts.items())]))
    limit = timeout_of(ranks.group)
    try:
        store.wait(names, limit)
    except RuntimeError as error:
        late = [rank for rank, name in enumerate(names) if not store.check([name])]
        raise RuntimeError(
            f"{what} on rank {ranks.rank}: rank {', '.join(map(str, late))} of {ranks.size} did not come to compare "
            f"shapes within {limit.total_seconds():g} s: it died, or calls something else"
        ) from error
    told = [text.decode().split("\n") for text in store.multi_get(names)]
    if turn:
        store.delete_key(f"fulmen/{turn - 1}/{ranks.rank}")  # everyone has read it: all are here
    if any(other != told[0] for other in told):
        raise ValueError(_difference(what, told))
    history.agreed.add(key)


def _difference(what: str, told: list[list[str]]) -> str:
    rows = max(len(lines) for lines in told)
    for row in range(rows):
        seen: dict[str, list[int]] = {}
        for rank, lines in enumerate(told):
            seen.setdefault(lines[row] if row < len(lines) else "nothing more", []).append(rank)
        if len(seen) > 1:
            parts = (f"{fact} on rank {_brief(ranks)}" for fact, ranks in seen.items())
            return f"{what}: ranks do not call alike: {'; '.join(parts)}"
    return f"{what}: ranks do not call alike"


def _brief(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks if len(ranks) <= 8 else [*ranks[:8], "..."]))


def timeout_of(group: ProcessGroup) -> timedelta:
    """How long the group's collectives wait for a rank."""
    device = group._device_types[0]
    return group._get_backend(device).options._timeout


@contextlib.contextmanager
def communicating(what: str, ranks: Ranks) -> Iterator[None]:
    """Turns an error of the transport into one that says where and why."""
    try:
        yield
    except RuntimeError as error:
        if "Invalid scalar type" in str(error):
            raise TypeError(f"{what}: the group's transport does not move this dtype ({error})") from error
        raise RuntimeError(
            f"{what} on rank {ranks.rank} of {ranks.size}: communication failed; a rank died, did not make the same "
            f"call (or its backward) within {timeout_of(ranks.group).total_seconds():g} s, or has other shapes: {error}"
        ) from error


# ------------------------------------------------------------------------------------------------ transport

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # the older name


def through_host(ranks: Ranks, device: torch.device) -> bool:
    """Whether tensors of this device go through host memory: gloo moves nothing else."""
    return device.type != "cpu" and ranks.group._get_backend(device).name() == "gloo"


class Pending:
    """Messages in flight: `wait` returns the tensors received."""

    def __init__(self, what: str, ranks: Ranks, works: list[Any], coming: list[Tensor], keep: list[Tensor]) -> None:
        self.what, self.ranks, self.works, self.coming = what, ranks, works, coming
        self.keep = keep  # what is sent must live until it has been
        self.device: torch.device | None = None

    def wait(self) -> list[Tensor]:
        with communicating(self.what, self.ranks):
            for work in self.works:
                work.wait()
        self.works, self.keep = [], []
        return self.coming if self.device is None else [x.to(self.device) for x in self.coming]


def all_gather(what: str, own: Tensor, ranks: Ranks) -> Pending:
    """Gathers the ranks' tensors, contiguous and of one shape, into one of shape (ranks, *shape)."""
    if ranks.size == 1:
        return Pending(what, ranks, [], [own[None]], [])
    staged = through_host(ranks, own.device)
    mine = own.cpu() if staged else own
    every = mine.new_empty(ranks.size, *mine.shape)
    with communicating(what, ranks):
        work = _all_gather(every.view(-1), mine.view(-1), group=ranks.group, async_op=True)
    pending = Pending(what, ranks, [work], [every], [mine])
    pending.device = own.device if staged else None
    return pending


class Send(NamedTuple):
    """A flat tensor for a rank; `tag` tells kinds of messages between the same two apart."""

    x: Tensor
    rank: int
    tag: int


class Receive(NamedTuple):
    """So many elements from a rank."""

    size: int
    rank: int
    tag: int


def exchange(what: str, ranks: Ranks, sends: list[Send], receives: list[Receive], like: Tensor) -> Pending:
    """All at once, in the background; of `like`'s dtype and device."""
    staged = through_host(ranks, like.device)
    where = torch.device("cpu") if staged else like.device
    going = [x.cpu() if staged else x for x, _, _ in sends]
    coming = [torch.empty(size, dtype=like.dtype, device=where) for size, _, _ in receives]
    steps = [
        *(
            dist.P2POp(dist.isend, x, group=ranks.group, group_peer=m.rank, tag=m.tag)
            for x, m in zip(going, sends, strict=True)
        ),
        *(
            dist.P2POp(dist.irecv, x, group=ranks.group, group_peer=m.rank, tag=m.tag)
            for x, m in zip(coming, receives, strict=True)
        ),
    ]
    with communicating(what, ranks):
        works = dist.batch_isend_irecv(steps) if steps else []
    pending = Pending(what, ranks, works, coming, going)
    pending.device = like.device if staged else None
    return pending


def all_to_all(what: str, x: Tensor, out_sizes: list[int], in_sizes: list[int], ranks: Ranks) -> Tensor:
    """x (rows, ...): its first in_sizes[0] rows go to rank 0, and so on; out_sizes[j] rows come from rank j."""
    if ranks.size == 1:
        return x
    staged = through_host(ranks, x.device)
    given = (x.cpu() if staged else x).contiguous()
    out = given.new_empty(sum(out_sizes), *given.shape[1:])
    with communicating(what, ranks):
        dist.all_to_all_single(out, given, out_sizes, in_sizes, group=ranks.group)
    return out.to(x.device) if staged else out
