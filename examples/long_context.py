"""How long a sequence one device trains on: time and memory of a step over N, hybrid beside softmax only.

    python examples/long_context.py                                   # a small stack on a CPU
    python examples/long_context.py --device cuda --dim 2048 --heads 16 --layers 8 --to 1048576 --plot long.png

A pattern says which attention the blocks have, in turn: L lightning, G grouped-query softmax. N doubles until a step
does not fit, took more than --seconds, or was the last one asked for. Each block is a checkpoint, so a step keeps one
vector for each token and block. The MLP and the loss go over the tokens in parts: theirs would be the largest tensors.

Each length has a step that is not timed. Times are medians of the steps that fit into two seconds, at most 7 and at
least one. The exponent comes from lengths whose steps take at least twice as long as a step of 16 tokens: shorter
steps are launches and the optimizer. There is none if times of equal steps differ by a quarter. Memory is the peak of a
step, on a GPU.
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
import time
from pathlib import Path
from typing import NamedTuple

import click
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fulmen
from fulmen.layers import GroupedQueryAttention, LightningAttention

VOCAB, PART = 1024, 32768  # tokens of a part
REPEATS, ENOUGH = 7, 2.0  # timed steps of a length: at most so many, and no more after so many seconds
STEADY = 0.25  # the largest spread of times that an exponent is computed from
FEW = 16  # tokens of a step that is all overhead


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, kind: str, dim: int, heads: int, layer: int, layers: int) -> None:
        super().__init__()
        self.attention: nn.Module
        if kind == "L":
            self.attention = LightningAttention(dim, heads, layer=layer, num_layers=layers)
        else:
            self.attention = GroupedQueryAttention(dim, heads, heads, causal=True, rope={"base": 1e6})
        hidden = -(-8 * dim // 3 // 128) * 128
        self.norms = nn.ModuleList(nn.RMSNorm(dim) for _ in range(2))
        self.up, self.down = nn.Linear(dim, 2 * hidden, bias=False), nn.Linear(hidden, dim, bias=False)

    def mlp(self, x: Tensor) -> Tensor:
        gate, up = self.up(self.norms[1](x)).chunk(2, -1)
        return self.down(F.silu(gate) * up)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norms[0](x))
        parts = [part + checkpoint(self.mlp, part, use_reentrant=False) for part in x.split(PART, 1)]
        return torch.cat(parts, 1) if len(parts) > 1 else parts[0]


class Stack(nn.Module):
    """Tokens (1, N) to the mean loss of each next token."""

    def __init__(self, pattern: str, dim: int, heads: int, layers: int) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, dim), nn.Linear(dim, VOCAB, bias=False)
        kinds = [pattern[i % len(pattern)] for i in range(layers)]
        self.blocks = nn.ModuleList(Block(kind, dim, heads, i, layers) for i, kind in enumerate(kinds))

    def loss(self, x: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(self.head(x).flatten(0, 1).float(), target.flatten(), reduction="sum")

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        pairs = zip(x[:, :-1].split(PART, 1), ids[:, 1:].split(PART, 1), strict=True)
        return torch.stack([checkpoint(self.loss, *pair, use_reentrant=False) for pair in pairs]).sum() / ids.shape[1]


class Row(NamedTuple):
    """What a step of N tokens took."""

    N: int
    seconds: float
    memory: float | None = None  # GiB, on a GPU
    spread: float = 0.0  # between the quartiles of the timed steps, over their median


def measure(model: Stack, N: int, device: torch.device) -> Row:
    """The median training step of N tokens; the first step, which compiles, is not counted."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    ids = torch.randint(VOCAB, (1, N), device=device)
    on_gpu, times = device.type == "cuda", []
    while len(times) < 2 or (len(times) <= REPEATS and sum(times[1:]) < ENOUGH):
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(device)
        start = time.perf_counter()
        model(ids).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if on_gpu:
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    memory = torch.cuda.max_memory_allocated(device) / 2**30 if on_gpu else None
    low, middle, high = statistics.quantiles(times[1:], n=4, method="inclusive") if times[2:] else times[1:] * 3
    return Row(N, middle, memory, (high - low) / middle)


def growth(rows: list[Row], overhead: float) -> str:
    """How time grows: p of the fit seconds ~ N^p from a 16th of the longest N on, or why there is none."""
    rows = [row for row in rows if rows[-1].N <= 16 * row.N and row.seconds >= 2 * overhead]
    if len(rows) < 3:
        return f"no exponent, as fewer than three lengths took at least {2 * overhead:.3f} s, twice the overhead"
    if any(a.seconds >= b.seconds for a, b in itertools.pairwise(rows)):
        return "no exponent, as a longer sequence took less time: is the machine busy?"
    if max(row.spread for row in rows) > STEADY:
        return "no exponent, as steps of one length took different times: is the machine busy?"
    points = [(math.log(row.N), math.log(row.seconds)) for row in rows]
    x, y = (sum(p[i] for p in points) / len(points) for i in (0, 1))
    power = sum((a - x) * (b - y) for a, b in points) / sum((a - x) ** 2 for a, _ in points)
    return f"time grows as N^{power:.2f}"


def plot(results: dict[str, list[Row]], path: Path) -> None:
    import matplotlib.pyplot as plt

    measured = any(row.memory is not None for rows in results.values() for row in rows)
    labels = ("seconds a step", "GiB")[: 1 + measured]
    figure, axes = plt.subplots(1, len(labels), figsize=(4.5 * len(labels), 3.5), squeeze=False, layout="constrained")
    for column, (axis, label) in enumerate(zip(axes[0], labels, strict=True), 1):
        for pattern, rows in results.items():
            axis.plot([row.N for row in rows], [row[column] for row in rows], marker="o", label=pattern)
        axis.set_xscale("log", base=2)
        axis.set(yscale="log", xlabel="tokens", ylabel=label)
        axis.legend()
    figure.savefig(path)


def usable(_: click.Context, __: click.Parameter, device: str) -> torch.device:
    try:
        torch.empty(0, device=device)
    except (AssertionError, RuntimeError) as error:
        raise click.BadParameter(f"{device}: {error}") from None
    if torch.device(device).type not in ("cpu", "cuda"):
        raise click.BadParameter(f"{device}: steps are timed on cpu and cuda alone")
    return torch.device(device)


def check(patterns: list[str], dim: int, heads: int, layers: int) -> None:
    for pattern in patterns:
        if not pattern or set(pattern) - set("LG"):
            raise click.UsageError(f"--patterns {','.join(patterns)!r}: a pattern is letters L and G, not {pattern!r}")
        if set(pattern[:layers]) != set(pattern):
            raise click.UsageError(
                f"pattern {pattern} in --layers {layers} is {pattern[:layers]}: give it --layers {len(pattern)} or more"
            )
    if len(set(patterns)) < len(patterns):
        raise click.UsageError(f"--patterns {','.join(patterns)} names a pattern twice")
    if dim % (2 * heads):
        raise click.UsageError(f"--dim {dim} in --heads {heads}: heads need an even number of elements each")


@click.command(context_settings={"show_default": True})
@click.option("--patterns", default="L,LLLG,G", help="Which stacks to compare.")
@click.option("--dim", type=click.IntRange(1), default=64)
@click.option("--heads", type=click.IntRange(1), default=2)
@click.option("--layers", type=click.IntRange(1), default=4)
@click.option("--from", "start", type=click.IntRange(2), default=512, help="The shortest sequence.")
@click.option("--to", "end", type=click.IntRange(2), default=4096, help="The longest.")
@click.option(
    "--seconds", type=click.FloatRange(0), default=60.0, help="A pattern stops after a step that took longer."
)
@click.option("--device", default="cpu", callback=usable)
@click.option(
    "--plot", "path", type=click.Path(dir_okay=False, path_type=Path), help="A file for time and memory over N."
)
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="A file that gets a JSON line for each N.")
def main(
    patterns: str, dim: int, heads: int, layers: int, start: int, end: int, seconds: float, device: torch.device,
    path: Path | None, out: Path | None,
) -> None:  # fmt: skip
    """Trains each stack on longer and longer sequences."""
    names = [pattern.strip() for pattern in patterns.split(",")]
    check(names, dim, heads, layers)
    if start > end:
        raise click.UsageError(f"--from {start} is longer than --to {end}")
    for name, file in {"--plot": path, "--out": out}.items():
        if file is not None and not file.parent.is_dir():
            raise click.UsageError(f"{name} {file}: there is no folder {file.parent}")
    console, on_gpu, results = Console(), device.type == "cuda", {}
    facts = {"dim": dim, "heads": heads, "layers": layers, "torch": torch.__version__, "fulmen": fulmen.__version__}
    facts["device"] = torch.cuda.get_device_name(device) if on_gpu else "cpu"
    table = Table("pattern", "tokens", "s a step", "tokens/s", *["GiB"] * on_gpu)
    if not on_gpu:
        console.print("Memory is measured on a GPU only.")
    for pattern in names:
        model = Stack(pattern, dim, heads, layers).to(device, torch.bfloat16 if on_gpu else torch.float32)
        overhead = measure(model, FEW, device).seconds
        rows, N = results.setdefault(pattern, []), start
        while end >= N:
            try:
                rows.append(measure(model, N, device))
            except torch.OutOfMemoryError:
                console.print(f"{pattern}: {N:,} tokens do not fit")
                break
            if out:
                with out.open("a", encoding="utf-8") as lines:
                    lines.write(json.dumps({"pattern": pattern, **rows[-1]._asdict(), **facts}) + "\n")
            _, took, memory, _ = rows[-1]
            gib = [] if memory is None else [f"{memory:.1f}"]
            table.add_row(pattern, f"{N:,}", f"{took:.3f}", f"{N / took:,.0f}", *gib)
            console.print(f"{pattern} {N:,} tokens: {took:.3f} s" + "".join(f", {x} GiB" for x in gib))
            N = N * 2 if took < seconds else end + 1
        console.print(f"{pattern}: {growth(rows, overhead)}")
    console.print(table)
    if path:
        plot(results, path)


if __name__ == "__main__":
    main()
