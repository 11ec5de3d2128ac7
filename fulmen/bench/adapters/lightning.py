"""Lightning attention for the benchmark; the package describes the names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fulmen import decay
from fulmen.bench.adapters import Call, Heads, dtype_of, empty, makers, normal, shapes, small_case
from fulmen.bench.gate import Problem
from fulmen.lightning.op import lightning_attention, lightning_attention_with_state
from fulmen.lightning.spec import LightningSpec, Residuals, empty_states
from fulmen.testing import Expected
from fulmen.testing import lightning as testing

KEYS: dict[str, Any] = {
    "B": 1, "H": 8, "H_KV": None, "N": 1024, "D": 64, "E": None, "dtype": "auto", "causal": True, "decay": True,
}  # fmt: skip
LEAVES = ("q", "k", "v", "initial_state")
ROWS = 2048  # of the attention matrix that are written out at a time to check the timed shape


def complete(case: dict[str, Any]) -> dict[str, Any]:
    done = KEYS | case
    if not done["causal"]:
        raise ValueError("lightning attention is causal")
    return done | {"H_KV": done["H_KV"] or done["H"], "E": done["E"] or done["D"]}


def function(case: dict[str, Any]) -> str:
    return "causal linear attention with decay" if case["decay"] else "causal linear attention"


def drawn(
    case: dict[str, Any], device: torch.device, seed: int, fully: bool = False, one_head: int | None = None
) -> Problem:
    generator = torch.Generator(device).manual_seed(seed)
    q, k, v, do = (normal(shape, dtype_of(case), generator) for shape in shapes(case))
    exact, state = torch.promote_types(q.dtype, torch.float32), (case["B"], case["H"], case["D"], case["E"])
    initial, dstate = (normal(state, exact, generator) if fully else None for _ in range(2))
    slopes = decay.alibi(case["H"]).to(device) if case["decay"] else None
    x = testing.Inputs(q, k, v, slopes, 1.0, initial, None, do, q.new_zeros(0) if dstate is None else dstate)
    return as_problem(x, fully, one_head)


def as_problem(x: testing.Inputs, fully: bool = False, one_head: int | None = None) -> Problem:
    q, k, slopes = x.q, x.k, x.decay
    leaves = {name: t.requires_grad_() for name, t in x._asdict().items() if name in LEAVES and t is not None}
    heads = Heads.of(q, k, one_head)

    def expected() -> dict[str, Expected]:
        if heads.whole:
            found = testing.expected(x, ("o", "state") if fully else ("o",))
        else:
            part: dict[str, Any] = {name: heads.pick(name, getattr(x, name)).detach() for name in ("q", "k", "v", "do")}
            of_heads = slice(heads.head * heads.group, (heads.head + 1) * heads.group)
            part["decay"] = None if slopes is None else slopes[of_heads]
            found = testing.expected(x._replace(**part), ("o",), rows=ROWS)
        return {"dinitial_state" if name == "dinitial" else name: wanted for name, wanted in found.items()}

    douts = {"o": x.do, "state": x.dstate} if fully else {"o": x.do}
    return Problem(x, leaves, douts, expected, {} if slopes is None else {"decay": slopes}, heads.pick)


problem, small = makers(drawn, small_case)


def attend(backend: str) -> Callable[[testing.Inputs], Tensor]:
    return lambda x: lightning_attention(x.q, x.k, x.v, x.decay, **x.options(), backend=backend)


def attend_fully(backend: str) -> Callable[[testing.Inputs], tuple[Tensor, Tensor]]:
    return lambda x: lightning_attention_with_state(x.q, x.k, x.v, x.decay, **x.options(), backend=backend)


def spec(case: dict[str, Any], device: torch.device) -> LightningSpec:
    B, H, H_KV, N, D, E = (case[key] for key in ("B", "H", "H_KV", "N", "D", "E"))
    return LightningSpec(B, H, H_KV, N, D, E, dtype_of(case), device, has_decay=case["decay"])


def without_data(case: dict[str, Any], fully: bool) -> Call:
    q, k, v, do = empty(case)
    slopes = torch.empty(case["H"], device=q.device) if case["decay"] else None
    call = spec(case, q.device)._replace(has_initial_state=fully, with_final_state=fully)
    initial = empty_states(call) if fully else None
    return call, Residuals(q, k, v, slopes, initial, None), lambda o, state: (do, state)
