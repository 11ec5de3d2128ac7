"""The tables of docs/parallel.md: bytes moved, balance of a ring, and plans for 8 and 1,024 GPUs, simulated.

    python tools/parallel_plans.py            writes them into the page, between its "begin" and "end" comments
    python tools/parallel_plans.py --check    fails if the page says something else

The simulation is arithmetic on the schedule the code runs: the blocks of `fulmen.parallel.blocks` for a ring, step by
step, each as long as its slowest rank or message; a gather of states against the local work it travels behind. What it
takes for granted is in `H200`, `NODE` and `NETWORK`; nothing here was measured on more than one GPU.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

from fulmen.parallel.blocks import Block, Mask, blocks, reach
from fulmen.parallel.shards import Cut

PATH = Path(__file__).parent.parent / "docs" / "parallel.md"
CAUSAL = Mask(None, 0, None)


class Chip(NamedTuple):
    """What one GPU does, in bf16."""

    products: float  # FLOP/s of projections
    softmax: tuple[float, float]  # FLOP/s forward, backward
    copy: float  # bytes/s
    lightning: tuple[float, float]  # share of that, of 4u forward and 7u backward
    memory: float  # bytes


class Shape(NamedTuple):
    """A model of equal layers, each with attention and an MLP."""

    layers: int
    dim: int
    H: int
    H_KV: int
    D: int
    layer_weights: float  # parameters of a layer
    N: int

    @property
    def weights(self) -> float:
        return self.layers * self.layer_weights


H200 = Chip(600e12, (516e12, 450e12), 4.2e12, (0.74, 0.45), 141e9)  # products: assumed; the rest: measured on an H200
NODE, NETWORK = 450e9, 50e9  # bytes/s each way of one GPU: NVLink 4, and one 400 Gbit/s port
SMALL = Shape(32, 4096, 32, 8, 128, 218e6, 1 << 20)
LARGE = Shape(80, 8192, 64, 8, 128, 856e6, 1 << 20)

# --------------------------------------------------------------------------------------------------- bytes


def states(P: int, B: int, H: int, D: int, E: int) -> int:
    """Lightning, each way: what a rank gathers."""
    return P * B * H * D * E * 4


def keys(B: int, H_KV: int, n: int, D: int, E: int, size: int = 2) -> int:
    """k and v of a shard of n tokens."""
    return B * H_KV * n * (D + E) * size


def ring(P: int, shard: int, size: int = 2) -> tuple[int, int]:
    """Bytes the busiest rank sends forward and backward: keys and, in the backward, fp32 sums of their gradients."""
    return (P - 1) * shard, (P - 1) * (shard + shard * 4 // size)


def ulysses(P: int, B: int, H: int, H_KV: int, n: int, D: int, E: int, size: int = 2) -> tuple[int, int]:
    """Bytes a rank sends forward and backward: q, k, v one way and o back; heads of k and v at least one a rank."""
    each = B * n * (H * (D + E) + max(H_KV, P) * (D + E)) * size
    return each * (P - 1) // P, each * (P - 1) // P


def all_reduce(P: int, size: int) -> int:
    """Bytes a rank sends in a ring all-reduce."""
    return 2 * size * (P - 1) // P


# ---------------------------------------------------------------------------------------------- simulation


def pairs(block: Block) -> int:
    """How many (query, key) of a block see each other."""
    m, n = block.q1 - block.q0, block.k1 - block.k0
    if block.right is None:
        return m * n
    full = max(m - (n - block.right), 0)  # rows that see every key
    return full * n + sum(min(i + block.right + 1, n) for i in range(m - full))


def ring_seconds(cut: Cut, flop: float, rate: float, message: float) -> tuple[float, float]:
    """Seconds of a causal ring, and those of its products alone if they were shared out evenly.

    flop     of one pair, rate FLOP/s, message: seconds a shard takes to the next rank, behind the work of a step.
    """
    P = len(cut.lengths)
    total, work = 0.0, 0
    for step in range(P):
        counts = [sum(map(pairs, blocks(cut, CAUSAL, rank, (rank - step) % P))) for rank in range(P)]
        sends = any(reach(cut, CAUSAL, source) > step for source in range(P))
        total += max(max(counts) * flop / rate, message if sends else 0.0)
        work += sum(counts)
    return total, work * flop / rate / P


class Plan(NamedTuple):
    """Seconds of one layer's forward on each rank, and what it holds."""

    tp: int
    cp: int
    dp: int
    tokens: int
    held: float  # weights, gradients and optimizer, bytes
    inputs: float  # of every layer, kept for the backward, bytes
    dense: float
    sums: float
    lightning: float
    gather_bytes: int
    gather: float
    ring: float
    ring_even: float
    ring_bytes: int
    message: float


def plan(shape: Shape, tp: int, cp: int, dp: int, chip: Chip, inner: float, outer: float) -> Plan:
    """tp is inside a node (`inner` bytes/s); cp too, where tp * cp ranks fit into it, else it takes `outer`."""
    n, H, H_KV, D = shape.N // cp, shape.H // tp, max(shape.H_KV // tp, 1), shape.D
    link = inner if tp * cp <= 8 else outer
    u = n * H * D * 2
    # a rank that is neither first nor last: states of k and v, the local pass, and what came in added to o
    local = (2 * u + 4 * u / chip.lightning[0] + 3 * u) / chip.copy
    gather = states(cp, 1, H, D, D)
    shard = keys(1, H_KV, n, D, D)
    small = 64  # tokens a rank: the schedule is the same, and the seconds go with their square
    cut = Cut("zigzag", (small,) * cp)
    steps, even = ring_seconds(cut, 4 * H * D * (n / small) ** 2, chip.softmax[0], shard / link)
    return Plan(
        tp, cp, dp, n,
        16 * shape.weights / (tp * cp * dp), shape.layers * n * shape.dim * 2.0,
        2 * shape.layer_weights * n / tp / chip.products, 2 * all_reduce(tp, n * shape.dim * 2) / inner,
        local, gather if cp > 1 else 0, gather * (cp - 1) / cp / link,
        steps, even, ring(cp, shard)[0], shard / link,
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------- tables


def bytes_table() -> list[str]:
    P, B, H, H_KV, D, n = 8, 1, 32, 8, 128, 131_072
    shard = keys(B, H_KV, n, D, D)
    latent = keys(B, H, n, 192, 128)
    rows = [
        ("lightning", "P B H D E x 4", (states(P, B, H, D, D),) * 2),
        ("ring", "(P - 1) B H_KV n (D + E) x 2; backward x 3", ring(P, shard)),
        ("ring, MLA 192 / 128", "(P - 1) B H n (D + E) x 2; backward x 3", ring(P, latent)),
        ("Ulysses", "(P - 1) / P x B n (H + max(H_KV, P)) (D + E) x 2", ulysses(P, B, H, H_KV, n, D, D)),
        ("tensor parallel", "2 (P - 1) / P x B n dim x 2, for each o_proj", (all_reduce(P, n * 4096 * 2),) * 2),
    ]
    lines = ["| | a rank moves, bytes | forward | backward |", "|---|---|---|---|"]
    return lines + [f"| {name} | {rule} | {_mb(f)} | {_mb(b)} |" for name, rule, (f, b) in rows]


def balance_table() -> list[str]:
    lines = ["| ranks | contiguous | zigzag |", "|---|---|---|"]
    for P in (2, 4, 8, 16, 64):
        shares = []
        for kind in ("contiguous", "zigzag"):
            total, even = ring_seconds(Cut(kind, (64,) * P), 1.0, 1.0, 0.0)
            shares.append(f"{100 * even / total:.0f} %")
        lines.append(f"| {P} | {shares[0]} | {shares[1]} |")
    return lines


def plans_table(shape: Shape, meshes: list[tuple[int, int, int]]) -> list[str]:
    lines = [
        "| tp x cp x dp | tokens a rank | weights, optimizer | layer inputs | dense | tp sums | lightning | its states "
        "| softmax | its keys |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for mesh in meshes:
        p = plan(shape, *mesh, H200, NODE, NETWORK)
        fits = "" if p.held + p.inputs < 0.8 * H200.memory else " (too much)"
        lines.append(
            f"| {p.tp} x {p.cp} x {p.dp} | {p.tokens:,} | {p.held / 1e9:.1f} GB | {p.inputs / 1e9:.0f} GB{fits} "
            f"| {_ms(p.dense)} | {_ms(p.sums) if p.tp > 1 else '-'} | {_ms(p.lightning)} "
            f"| {f'{_mb(p.gather_bytes)}, {_ms(p.gather)}' if p.cp > 1 else '-'} "
            f"| {_ms(p.ring)} ({100 * p.ring_even / p.ring:.0f} %) "
            f"| {f'{_mb(p.ring_bytes)}, {_ms(p.message)} a step' if p.cp > 1 else '-'} |"
        )
    return lines


def _mb(count: float) -> str:
    return f"{count / 1e6:,.1f} MB" if count < 1e9 else f"{count / 1e9:,.2f} GB"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.2f} ms" if seconds < 0.1 else f"{1e3 * seconds:,.0f} ms"


TABLES = {
    "bytes": bytes_table,
    "balance": balance_table,
    "eight": lambda: plans_table(SMALL, [(1, 8, 1), (2, 4, 1), (4, 2, 1), (8, 1, 1)]),
    "thousand": lambda: plans_table(LARGE, [(8, 8, 16), (8, 16, 8), (4, 32, 8), (2, 64, 8), (1, 128, 8)]),
}


def render(page: str) -> str:
    """The page with its tables made anew."""
    for name, table in TABLES.items():
        begin, end = f"<!-- begin {name} -->\n", f"<!-- end {name} -->"
        head, found, rest = page.partition(begin)
        _, closed, tail = rest.partition(end)
        if not found or not closed:
            raise ValueError(f"the page has no {begin.strip()} ... {end}")
        page = head + begin + "\n".join(table()) + "\n" + end + tail
    return page


def main(arguments: list[str]) -> int:
    page = PATH.read_text(encoding="utf-8")
    if arguments == ["--check"]:
        if render(page) != page:
            print(f"{PATH} is out of date: python tools/parallel_plans.py")
            return 1
        return 0
    if arguments:
        print(__doc__)
        return 2
    PATH.write_text(render(page), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
