"""How long a sequence one device trains on: time and memory of a step over N, hybrid beside softmax only.

    python examples/long_context.py                                   # a small stack on a CPU
    python examples/long_context.py --device cuda --dim 2048 --heads 16 --layers 8 --to 1048576 --plot long.png

A pattern says which attention the blocks have, in turn: L lightning, G grouped-query softmax. N doubles until a step
does not fit, took more than --seconds, or was the last one asked for. Each block is a checkpoint, so a step keeps one
vector for each token and block. The MLP and the loss go over the tokens in parts: theirs would be the largest tensors.
"""

from __future__ import annotations

import math
import time

import click
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from fulmen.layers import GroupedQueryAttention, LightningAttention

VOCAB, PART = 1024, 32768  # tokens of a part


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


def steps(model: Stack, N: int, device: torch.device) -> tuple[float, float]:
    """Seconds and, on a GPU, GiB of a training step of N tokens; the first step, which compiles, is not counted."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    ids = torch.randint(VOCAB, (1, N), device=device)
    seconds, on_gpu = math.inf, device.type == "cuda"
    for _ in range(2):
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        model(ids).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if on_gpu:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start
    return seconds, torch.cuda.max_memory_allocated() / 2**30 if on_gpu else 0.0


def exponent(found: list[tuple[int, float, float]]) -> float:
    """p of the fit seconds ~ N^p, from a 16th of the longest N on."""
    points = [(math.log(N), math.log(seconds)) for N, seconds, _ in found if found[-1][0] <= 16 * N]
    x, y = (sum(p[i] for p in points) / len(points) for i in (0, 1))
    spread = sum((a - x) ** 2 for a, _ in points)
    return sum((a - x) * (b - y) for a, b in points) / spread if spread else math.nan


def plot(results: dict[str, list[tuple[int, float, float]]], path: str) -> None:
    import matplotlib.pyplot as plt

    measured = any(memory > 0 for rows in results.values() for _, _, memory in rows)
    labels = ("seconds a step", "GiB")[: 1 + measured]
    figure, axes = plt.subplots(1, len(labels), figsize=(4.5 * len(labels), 3.5), squeeze=False, layout="constrained")
    for column, (axis, label) in enumerate(zip(axes[0], labels, strict=True), 1):
        for pattern, rows in results.items():
            axis.plot([row[0] for row in rows], [row[column] for row in rows], marker="o", label=pattern)
        axis.set(xscale="log", yscale="log", xlabel="tokens", ylabel=label)
        axis.legend()
    figure.savefig(path)


@click.command()
@click.option("--patterns", default="L,LLLG,G", show_default=True, help="Which stacks to compare.")
@click.option("--dim", default=64, show_default=True)
@click.option("--heads", default=2, show_default=True)
@click.option("--layers", default=2, show_default=True)
@click.option("--from", "start", default=256, show_default=True, help="The shortest sequence.")
@click.option("--to", "end", default=1024, show_default=True, help="The longest.")
@click.option("--seconds", default=60.0, show_default=True, help="A pattern stops after a step that took longer.")
@click.option("--device", default="cpu", show_default=True)
@click.option("--plot", "path", help="Writes time and memory over N to this file.")
def main(
    patterns: str, dim: int, heads: int, layers: int, start: int, end: int, seconds: float, device: str,
    path: str | None,
) -> None:  # fmt: skip
    """Trains each stack on longer and longer sequences."""
    console, results = Console(), {}
    kind = torch.bfloat16 if device.startswith("cuda") else torch.float32
    table = Table("pattern", "tokens", "s a step", "tokens/s", "GiB")
    for pattern in patterns.split(","):
        model = Stack(pattern, dim, heads, layers).to(device, kind)
        rows, N = results.setdefault(pattern, []), start
        while end >= N:
            try:
                rows.append((N, *steps(model, N, torch.device(device))))
            except torch.OutOfMemoryError:
                console.print(f"{pattern}: {N:,} tokens do not fit")
                break
            _, took, memory = rows[-1]
            table.add_row(pattern, f"{N:,}", f"{took:.3f}", f"{N / took:,.0f}", f"{memory:.1f}")
            console.print(f"{pattern} {N:,} tokens: {took:.3f} s, {memory:.1f} GiB")
            N = N * 2 if took < seconds else end + 1
        console.print(f"{pattern}: time grows as N^{exponent(rows):.2f}")
    console.print(table)
    if path:
        plot(results, path)


if __name__ == "__main__":
    main()
