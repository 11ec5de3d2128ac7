"""A decoding step of a whole layer on a pool for the benchmark: `layer_step_gqa`, `_mla` and `_lightning`.

The call is layer(x, cache=pool) for the last of N tokens of every row. The benchmark repeats it, so it must change no
bit: that token's keys, values or latents are in the pool already, and states belong to `Sequences(drafts=True)` with
nothing accepted, so that a call reads and writes them and they stay as they are.

Results are compared with the same step of the same layer on a CPU, in fp64 and, for the tolerance, in its own dtype: of
all rows, or of one row of the timed shape.
"""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fulmen.bench.adapters import Attend, Case, Operation, Source, dtype_of
from fulmen.bench.adapters.flash import flash_cache
from fulmen.bench.adapters.latent import latent
from fulmen.bench.adapters.layer import filled
from fulmen.bench.adapters.step import step
from fulmen.bench.gate import Problem
from fulmen.layers import (
    GroupedQueryAttention,
    LightningAttention,
    MultiHeadLatentAttention,
    Sequence,
    Sequences,
)
from fulmen.testing import Expected

KEYS: Case = {"B": 1, "N": 8192, "N_Q": 1, "page": 64, "dtype": "auto", "causal": True, "grad": False}


class Inputs(NamedTuple):
    x: Tensor
    layer: nn.Module
    pool: Any


class LayerStep(Operation):
    attention: Operation  # the operation over the pool
    words: str

    def complete(self, case: Case) -> Case:
        done = super().complete(case)
        return done | {"hidden": done["hidden"] or done["H"] * done["E"]}

    def check(self, case: Case) -> None:
        if case["N_Q"] != 1 or not case["causal"]:
            raise ValueError("N_Q and causal: a step of a layer is of one token, and causal")

    def function(self, case: Case) -> str:
        return f"a decoding step of a {self.words}"

    def made(self, case: Case, device: torch.device, dtype: torch.dtype) -> Any:
        """The layer."""
        raise NotImplementedError

    def sizes_within(self, case: Case) -> Case:
        """What the case of the attention has instead of the layer's own."""
        return {}

    def within(self, case: Case) -> tuple[Operation, Case]:
        own = {key: case[key] for key in self.attention.KEYS if key in case}
        return self.attention, self.attention.complete(own | self.sizes_within(self.KEYS | case))

    def small_case(self, case: Case) -> Case:
        return self.complete(super().small_case(case))

    def drawn(self, case: Case, source: Source, fully: bool = False) -> Problem:
        dtype, B, device = dtype_of(case), case["B"], source.device
        layer = filled(self.made(case, device, dtype), source)
        sequences, rows = served(case, B, device)
        x, do = (source.normal((B, 1, case["hidden"]), dtype) for _ in range(2))
        given = Inputs(x, layer, layer.new_pool(sequences))  # type: ignore[operator]
        for t in given.pool.memory:
            t.copy_(source.normal(tuple(t.shape), torch.float32))
        compared = list(range(B)) if source.whole else [random.Random(source.seed).randrange(B)]
        with torch.no_grad():
            layer(x, cache=given.pool)

        @torch.no_grad()
        def expected() -> dict[str, Expected]:
            kinds = (dtype, torch.float64)
            low, exact = (torch.cat([self.alone(case, given, rows, b, kind) for b in compared]) for kind in kinds)
            return {"o": Expected(low, exact)}

        constants = {"x": x, **dict(layer.named_parameters())}
        constants |= {f"memory {i}": t for i, t in enumerate(given.pool.memory)}
        return Problem(given, {}, {"o": do}, expected, constants, lambda name, y: y[compared])

    def alone(self, case: Case, given: Inputs, rows: list[Sequence], b: int, dtype: torch.dtype) -> Tensor:
        """y (1, 1, hidden) of row b on the CPU in this dtype."""
        cpu = torch.device("cpu")
        layer = self.made(case, cpu, dtype)
        layer.load_state_dict({name: t.to(cpu, dtype) for name, t in given.layer.state_dict().items()})
        sequences, (row,) = served(case, 1, cpu)
        pool = layer.new_pool(sequences)
        for mine, theirs in zip(pool.memory, given.pool.memory, strict=True):
            mine[places(row, pool)] = theirs[places(rows[b], pool)].to(cpu, mine.dtype)
        y: Tensor = layer(given.x[b : b + 1].to(cpu, dtype), cache=pool)
        return y.to(given.x.device)

    def attend(self, backend: str) -> Attend:
        return lambda given: given.layer(given.x, cache=given.pool)


def served(case: Case, B: int, device: torch.device) -> tuple[Sequences, list[Sequence]]:
    """B sequences of N tokens, of which the layers compute the last."""
    N, page = case["N"], case["page"]
    sequences = Sequences(B, N, pages=B * -(-N // page), page_size=page, slots=B, drafts=True, device=device)
    rows = [sequences.new() for _ in range(B)]
    if N > 1:
        sequences.step(rows, N - 1)
        for row in rows:
            row.drafted = 0  # a short prompt, too, is in the states
    sequences.step(rows, 1)
    sequences.stepped = []  # a pool of states refuses a second call of the same step
    return sequences, rows


def places(row: Sequence, pool: Any) -> Any:
    """Where a sequence's tokens or state are in the pool's memory."""
    return row.pages if hasattr(pool, "at") else row.slot


# --------------------------------------------------------------------------------------------- three layers


class GroupedQueryStep(LayerStep):
    """With RoPE."""

    KEYS = KEYS | {"H": 32, "H_KV": 8, "D": 128, "E": None, "hidden": None}
    attention, words = flash_cache, "grouped-query attention layer, softmax attention"

    def check(self, case: Case) -> None:
        super().check(case)
        if case["E"] != case["D"]:
            raise ValueError(f"E={case['E']}: must be D={case['D']}")

    def made(self, case: Case, device: torch.device, dtype: torch.dtype) -> Any:
        sizes = (case["hidden"], case["H"], case["H_KV"])
        return GroupedQueryAttention(*sizes, head_dim=case["D"], rope={}, causal=True, device=device, dtype=dtype)


class LatentStep(LayerStep):
    """D = E + what RoPE turns; `rank` and `q_rank` are the sizes of the latents of keys and of queries."""

    KEYS = KEYS | {"H": 32, "H_KV": None, "D": 192, "E": 128, "hidden": None, "rank": 512, "q_rank": 1536}
    attention, words = latent, "latent attention layer, softmax attention"

    def check(self, case: Case) -> None:
        super().check(case)
        H, H_KV, D, E = (case[key] for key in ("H", "H_KV", "D", "E"))
        if H_KV != H or not E < D:
            raise ValueError(f"H_KV={H_KV} must be H, and E={E} less than D={D}, by what RoPE turns")

    def small_case(self, case: Case) -> Case:
        return super().small_case(case) | {"rank": 64, "q_rank": 48}

    def made(self, case: Case, device: torch.device, dtype: torch.dtype) -> Any:
        E, turned = case["E"], case["D"] - case["E"]
        sizes = {"kv_rank": case["rank"], "q_rank": case["q_rank"], "nope_dim": E, "rope_dim": turned, "value_dim": E}
        return MultiHeadLatentAttention(case["hidden"], case["H"], **sizes, absorb=True, device=device, dtype=dtype)

    def sizes_within(self, case: Case) -> Case:
        return {"H_KV": 1, "D": case["rank"] + case["D"] - case["E"], "E": case["rank"]}


class LightningStep(LayerStep):
    """Of the preset minimax."""

    KEYS = KEYS | {
        "N": 1, "H": 32, "H_KV": None, "D": 128, "E": None, "hidden": None, "gate": True, "state_dtype": "float32",
    }  # fmt: skip
    attention, words = step, "lightning layer, linear attention with decay"

    def complete(self, case: Case) -> Case:
        return super().complete(case) | {"state_dtype": "float32"}

    def check(self, case: Case) -> None:
        super().check(case)
        if case["state_dtype"] not in ("float32", "fp32"):
            raise ValueError(f"state_dtype={case['state_dtype']}: must be fp32, that of a layer's pool")

    def made(self, case: Case, device: torch.device, dtype: torch.dtype) -> Any:
        sizes = {"num_kv_heads": case["H_KV"], "head_dim": case["D"], "value_dim": case["E"]}
        return LightningAttention(case["hidden"], case["H"], **sizes, gate=case["gate"], device=device, dtype=dtype)

    def sizes_within(self, case: Case) -> Case:
        return {"N": 1}


layer_step_gqa, layer_step_mla, layer_step_lightning = GroupedQueryStep(), LatentStep(), LightningStep()
