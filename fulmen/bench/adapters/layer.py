"""Whole attention layers for the benchmark; the package describes the names.

The call is layer(x); x and every parameter get a gradient. All results are compared whole: at the timed shape with the
eager layer in fp64, whose memory is bounded, at the gate's small shape with the reference.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fulmen.bench import adapters
from fulmen.bench.adapters import Call, dtype_of, normal
from fulmen.bench.gate import Formula, Problem
from fulmen.layers import (
    GroupedQueryAttention,
    LightningAttention,
    MultiHeadAttention,
    MultiHeadLatentAttention,
    MultiHeadSelfAttention,
    MultiQueryAttention,
)

KEYS: dict[str, Any] = {
    "layer": "mhsa", "B": 1, "N": 1024, "H": 8, "H_KV": None, "D": 64, "E": None, "hidden": None, "rank": 0,
    "dtype": "auto", "causal": True,
}  # fmt: skip
WORDS = {
    "mhsa": "multi-head self-attention layer (fused projections)",
    "mha": "multi-head attention layer (separate projections)",
    "gqa": "grouped-query attention layer",
    "mqa": "multi-query attention layer",
    "mla": "multi-head latent attention layer",
    "minimax": "lightning attention layer as in MiniMax-Text-01",
    "ring": "lightning attention layer as in Ring-linear 2.0",
}
LIGHTNING = ("minimax", "ring")
SMALL_RANK = 64


def complete(case: dict[str, Any]) -> dict[str, Any]:
    """mla: D = E + what RoPE turns, `rank` is the size of both latents; others: H * D = hidden unless given."""
    done = KEYS | case
    kind, H = done["layer"], done["H"]
    if kind not in WORDS:
        raise ValueError(f"layer={kind}: must be one of {', '.join(WORDS)}")
    if bool(done["rank"]) != (kind == "mla"):
        raise ValueError(f"layer={kind} with rank={done['rank']}: mla has a rank, and the others none")
    if kind == "mla" and not (done["E"] and done["E"] < done["D"]):
        raise ValueError(f"layer=mla: E={done['E']} must be less than D={done['D']}, by as much as RoPE turns")
    if kind != "mla" and done["E"] not in (None, done["D"]):
        raise ValueError(f"layer={kind}: E={done['E']} must be D={done['D']}")
    usual = {"mqa": 1, "gqa": None}.get(kind, H)
    H_KV = done["H_KV"] or usual
    if H_KV is None or (usual is not None and usual != H_KV):
        raise ValueError(f"layer={kind}: H_KV={done['H_KV']} must be {'given' if usual is None else usual}")
    E = done["E"] or done["D"]
    return done | {"H_KV": H_KV, "E": E, "hidden": done["hidden"] or H * E}


def function(case: dict[str, Any]) -> str:
    return f"{WORDS[case['layer']]}, {within(case).function(within_case(case))}"


def backends_of(case: dict[str, Any]) -> str:
    return "lightning" if case.get("layer") in LIGHTNING else "flash"


BACKENDS_OF = backends_of


def within(case: dict[str, Any]) -> Any:
    """The adapter of the attention within."""
    return adapters.of(backends_of(case))


def within_case(case: dict[str, Any]) -> dict[str, Any]:
    """The call of the attention within."""
    known = {key: case[key] for key in within(case).KEYS if key in case}
    whole: dict[str, Any] = within(case).complete(known | {"grad": case.get("grad", True)})
    return whole


class Inputs(NamedTuple):
    x: Tensor
    layer: nn.Module
    twins: dict[str, nn.Module]  # the same parameters, other backends

    def on(self, backend: str) -> nn.Module:
        if backend not in self.twins:
            self.twins[backend] = twin = copy.copy(self.layer)
            if isinstance(twin, LightningAttention):
                twin.backend = backend
            else:
                twin.options = self.layer.options._replace(backend=backend)  # type: ignore[operator, union-attr]
        return self.twins[backend]


def made(case: dict[str, Any], device: torch.device, dtype: torch.dtype, backend: str) -> nn.Module:
    hidden, H, D, E = (case[key] for key in ("hidden", "H", "D", "E"))
    options: dict[str, Any] = {"backend": backend, "device": device, "dtype": dtype}
    kind, rank = case["layer"], case["rank"]
    if kind in LIGHTNING:
        return LightningAttention(hidden, H, head_dim=D, preset=kind, num_layers=2, **options)
    options["causal"] = case["causal"]
    if kind == "mla":
        sizes = {"q_rank": rank, "kv_rank": rank, "nope_dim": E, "rope_dim": D - E, "value_dim": E}
        return MultiHeadLatentAttention(hidden, H, **sizes, **options)
    options["head_dim"] = D
    if kind == "gqa":
        return GroupedQueryAttention(hidden, H, case["H_KV"], **options)
    return {"mhsa": MultiHeadSelfAttention, "mha": MultiHeadAttention, "mqa": MultiQueryAttention}[kind](
        hidden, H, **options
    )


def filled(layer: nn.Module, generator: torch.Generator) -> nn.Module:
    """Every parameter drawn: matrices so that a product keeps the size of what it multiplies, scales around 1."""
    with torch.no_grad():
        for p in layer.parameters():
            drawn = normal(tuple(p.shape), torch.float32, generator)
            p.copy_(drawn * p.shape[1] ** -0.5 if p.ndim == 2 else 1 + drawn / 4)
    return layer


def small_case(case: dict[str, Any]) -> dict[str, Any]:
    """As of any operation, and with a small rank."""
    case = adapters.small_case(case) | {"hidden": None, "rank": min(case["rank"], SMALL_RANK)}
    if case["layer"] == "mqa":
        case |= {"H": case["H"] // case["H_KV"], "H_KV": 1}
    return complete(case)


def drawn(
    case: dict[str, Any], device: torch.device, seed: int, fully: bool = False, one_head: int | None = None
) -> Problem:
    generator = torch.Generator(device).manual_seed(seed)
    x = normal((case["B"], case["N"], case["hidden"]), dtype_of(case), generator).requires_grad_()
    layer = filled(made(case, device, dtype_of(case), "eager"), generator)
    parameters = dict(layer.named_parameters())

    def formula(x: Tensor, *weights: Tensor) -> Tensor:
        backend = "reference" if x.dtype == torch.float64 and one_head is None else "eager"
        values = dict(zip(parameters, weights, strict=True))
        y: Tensor = functional_call(made(case, device, x.dtype, backend), values, (x,))
        return y

    arguments = (x, *parameters.values())
    return Formula(formula).problem(Inputs(x, layer, {}), arguments, ["x", *parameters], seed)


problem, small = adapters.makers(drawn, small_case)


def attend(backend: str) -> Callable[[Inputs], Tensor]:
    return lambda p: p.on(backend)(p.x)


def attend_fully(backend: str) -> None:
    return None


def spec(case: dict[str, Any], device: torch.device) -> Any:
    return within(case).spec(within_case(case), device)


def without_data(case: dict[str, Any], fully: bool) -> Call:
    call: Call = within(case).without_data(within_case(case), fully)
    return call
