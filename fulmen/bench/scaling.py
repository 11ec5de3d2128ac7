"""`fulmen bench scaling`: one sequence on 1, 2, 4, ... ranks: time, bytes each rank moves, speedup and efficiency.

The processes are started once: gloo and one thread each on CPUs, NCCL and one GPU each otherwise. Calls on different
numbers of ranks are interleaved, so that other load on the machine hits all alike. One rank is the single-device
operation, without a group. Every way is proven right on a small case before it is timed. Bytes are counted where
tensors are passed to torch.distributed, on the rank that moves most. `cpu_ms` is the CPU time of the busiest rank's
process, which other processes disturb less than the clock.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import multiprocessing
import os
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import ProcessRaisedException, start_processes

from fulmen import decay, parallel
from fulmen.bench import Refused, environment
from fulmen.flash.op import flash_attention
from fulmen.lightning.op import lightning_attention
from fulmen.parallel import groups

WAYS = ("lightning", "ring", "zigzag", "ulysses")


@dataclass(frozen=True)
class Scaling:
    """What is measured."""

    ways: tuple[str, ...] = ("lightning", "zigzag")
    ranks: tuple[int, ...] = (1, 2)
    tokens: tuple[int, ...] = (4096, 16384)
    B: int = 1
    H: int = 8
    D: int = 64
    samples: int = 15
    device: str = "cpu"
    dtype: str = "float32"

    def check(self) -> None:
        wrong = [way for way in self.ways if way not in WAYS]
        most, gpus = max(self.ranks), torch.cuda.device_count() if self.device == "cuda" else 2**30
        if wrong or not self.ways:
            raise Refused(f"--way {', '.join(wrong)}: must be of {', '.join(WAYS)}")
        if 1 not in self.ranks or min(self.ranks) < 1:
            raise Refused(f"--ranks {self.ranks}: one rank must be among them, to compare with")
        if most > gpus:
            raise Refused(f"--ranks {most}: here are {gpus} GPUs, and each has one")
        for N, P in itertools.product(self.tokens, self.ranks):
            if N % (2 * P):
                raise Refused(f"--tokens {N} cannot be cut for {P} ranks: it must be a multiple of {2 * P}")
        if "ulysses" in self.ways and any(self.H % P for P in self.ranks):
            raise Refused(f"--way ulysses: {self.H} heads cannot be shared out to {self.ranks} ranks")


def measure(scaling: Scaling, out: Path) -> list[dict[str, Any]]:
    """Runs it and writes one line of JSON for the machine and one for each way, number of tokens and of ranks."""
    scaling.check()
    if out.exists():
        raise Refused(f"--out {out} exists, and results are never overwritten")
    with tempfile.TemporaryDirectory() as folder:
        try:
            multiprocessing.set_forkserver_preload([__name__])  # on CPUs torch is imported once, not by every rank
            method = "forkserver" if scaling.device == "cpu" else "spawn"
            start_processes(_rank, (scaling, folder), nprocs=max(scaling.ranks), start_method=method)
        except ProcessRaisedException as error:
            said = re.search(r"Refused: (.*)", str(error))
            raise Refused(said[1] if said else str(error)) from None
        rows = json.loads((Path(folder) / "rows.json").read_text(encoding="utf-8"))
    out.parent.mkdir(parents=True, exist_ok=True)
    name = environment.cpu_name() if scaling.device == "cpu" else torch.cuda.get_device_name()
    head = {
        "record": "scaling", "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "commit": environment.commit(),
        "torch": torch.__version__, "device": name, "cores": os.cpu_count(), "load": os.getloadavg(),
        **asdict(scaling),
    }  # fmt: skip
    out.write_text("".join(json.dumps(x) + "\n" for x in (head, *rows)), encoding="utf-8")
    return rows


def render(rows: list[dict[str, Any]], console: Any) -> None:
    from rich.table import Table

    table = Table("way", "N", "ranks", "ms", "best", "CPU ms", "speedup", "efficiency", "MB fwd", "MB bwd")
    for row in rows:
        forward, backward = (f"{row[key] / 1e6:.2f}" for key in ("bytes_forward", "bytes_backward"))
        table.add_row(
            *(str(row[key]) for key in ("way", "tokens", "ranks")),
            *(f"{row[key]:.1f}" for key in ("median_ms", "best_ms", "cpu_ms")),
            f"{row['speedup']:.2f}", f"{100 * row['efficiency']:.0f} %", forward, backward,
        )  # fmt: skip
    console.print(table)


# ---------------------------------------------------------------------------------- inside the processes
def _rank(rank: int, scaling: Scaling, folder: str) -> None:
    if scaling.device == "cuda":
        torch.cuda.set_device(rank)
    else:
        torch.set_num_threads(1)
    backend, size = "nccl" if scaling.device == "cuda" else "gloo", max(scaling.ranks)
    dist.init_process_group(backend, init_method=f"file://{folder}/meeting", rank=rank, world_size=size)
    # every process takes part in making each group, also of those it is not in
    parts = {P: dist.new_group(list(range(P))) for P in scaling.ranks}
    rows = []
    for way in scaling.ways:
        for P, group in parts.items():
            if rank < P:
                _prove(way, P, group, scaling)
        for N in scaling.tokens:
            rows += _case(way, N, parts, scaling)
    if rank == 0:
        (Path(folder) / "rows.json").write_text(json.dumps(rows), encoding="utf-8")
    dist.destroy_process_group()


def _device(scaling: Scaling) -> torch.device:
    return torch.device("cuda", dist.get_rank()) if scaling.device == "cuda" else torch.device("cpu")


def _call(way: str, P: int, group: Any, H: int, device: torch.device) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    if way == "lightning":
        slopes = decay.alibi(H).to(device)
        if P == 1:
            return lambda q, k, v: lightning_attention(q, k, v, slopes)
        return lambda q, k, v: parallel.lightning_attention(q, k, v, slopes, group=group)
    if P == 1:
        return functools.partial(flash_attention, causal=True)
    if way == "ulysses":
        return functools.partial(parallel.ulysses_attention, group=group, causal=True)
    shards = "zigzag" if way == "zigzag" else "contiguous"
    return functools.partial(parallel.ring_attention, group=group, causal=True, shards=shards)


def _prove(way: str, P: int, group: Any, scaling: Scaling) -> None:
    """Outputs and gradients of the ranks are, up to rounding, those of one, on a small case; both in fp64 on a CPU."""
    device, dtype = _device(scaling), torch.float64 if scaling.device == "cpu" else torch.float32
    generator = torch.Generator().manual_seed(0)
    whole = [torch.randn(1, scaling.H, 64 * P, 16, generator=generator).to(device, dtype) for _ in range(4)]
    cut: dict[str, Any] = {"dim": 2, "shards": "zigzag" if way == "zigzag" else "contiguous"}
    found = []
    for ranks in (1, P):
        q, k, v, do = (x if ranks == 1 else parallel.shard(x, group, **cut) for x in whole)
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        o = _call(way, ranks, group, scaling.H, device)(*leaves)
        grads = torch.autograd.grad(o, leaves, do)
        found.append([x if ranks == 1 else parallel.unshard(x, group, **cut) for x in (o.detach(), *grads)])
    for name, one, many in zip(("o", "dq", "dk", "dv"), *found, strict=True):
        error = float((many - one).norm() / one.norm())
        if not error < 1e4 * torch.finfo(dtype).eps:
            raise Refused(f"{way} on {P} ranks: {name} is off by {error:.1e}, nothing is timed")


def _case(way: str, N: int, parts: dict[int, Any], scaling: Scaling) -> list[dict[str, Any]]:
    rank, device, dtype = dist.get_rank(), _device(scaling), getattr(torch, scaling.dtype)
    found: dict[int, list[tuple[float, ...]]] = {P: [] for P in parts}  # ms, CPU ms, bytes forward and backward
    for sample in range(-2, scaling.samples):  # the first two warm up
        for P, group in parts.items():
            if rank < P:
                shape = (scaling.B, scaling.H, N // P, scaling.D)
                *qkv, do = (torch.randn(shape, device=device, dtype=dtype) for _ in range(4))
                leaves = [x.requires_grad_() for x in qkv]
                measured = _timed(_call(way, P, group, scaling.H, device), leaves, do, group)
                found[P] += [measured] if sample >= 0 else []
            dist.barrier()  # the others wait, idle
    rows = []
    for P, group in parts.items():
        if rank >= P:
            continue
        times, busy, forward, backward = zip(*found[P], strict=True)
        most = torch.tensor([statistics.median(busy), forward[-1], backward[-1]], dtype=torch.float64, device=device)
        dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
        rows.append({
            "record": "row", "way": way, "tokens": N, "ranks": P, "median_ms": statistics.median(times),
            "best_ms": min(times), "cpu_ms": float(most[0]), "bytes_forward": int(most[1]),
            "bytes_backward": int(most[2]), "samples_ms": times,
        })  # fmt: skip
    if rank:
        return []
    alone = next(row["median_ms"] for row in rows if row["ranks"] == 1)
    return [row | {"speedup": (gain := alone / row["median_ms"]), "efficiency": gain / row["ranks"]} for row in rows]


def _timed(call: Any, leaves: list[Tensor], do: Tensor, group: Any) -> tuple[float, ...]:
    """Of a forward and a backward until the last rank is done: ms, CPU ms, and the bytes of either."""

    def clocks() -> tuple[float, float]:
        if do.is_cuda:
            torch.cuda.synchronize()
        dist.barrier(group=group)
        return time.perf_counter(), time.process_time()

    with _counted() as count:
        begin = clocks()
        o = call(*leaves)
        forward = sum(count)
        o.backward(do)
        wall, busy = (1e3 * (b - a) for a, b in zip(begin, clocks(), strict=True))
    return wall, busy, forward, sum(count) - forward


@contextlib.contextmanager
def _counted() -> Iterator[list[int]]:
    """Bytes of what this rank hands to torch.distributed: gathered buffers, messages sent, all-to-all's input."""
    count: list[int] = []

    def counted(module: Any, name: str, moved: Callable[..., int]) -> Any:
        true = getattr(module, name)

        def call(*args: Any, **more: Any) -> Any:
            count.append(moved(*args))
            return true(*args, **more)

        return patch.object(module, name, call)

    def sent(steps: Sequence[Any]) -> int:
        return sum(step.tensor.nbytes for step in steps if step.op is dist.isend)

    with (
        counted(groups, "_all_gather", lambda every, *_: every.nbytes),
        counted(dist, "batch_isend_irecv", sent),
        counted(dist, "all_to_all_single", lambda out, given, *_: given.nbytes),
    ):
        yield count
