"""A decoding step of lightning attention for the benchmark; the package describes the names.

A step changes its states, and the benchmark repeats a call with the same arguments. So the timed states are a fixed
point: with keep = exp(-s) = 1 - 2^-j the step S <- keep S + k v^T maps 2^j k v^T to itself. k and v have four
significant bits, which makes this exact in fp32 and in bf16. So the plain step reads and writes every state, and no bit
changes. The small problem has random states and the slopes of `decay.alibi`. Its call works on a copy of the states,
which is compared, too.

N is the number of tokens of a step, `state_dtype` that of the pool.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fulmen import decay
from fulmen.bench.adapters import Call, Heads, dtype_of, empty, makers, normal, shapes
from fulmen.bench.cases import DTYPES
from fulmen.bench.gate import Problem
from fulmen.step.op import lightning_step
from fulmen.step.spec import MAX_TOKENS, StepSpec, Tensors
from fulmen.testing import Expected
from fulmen.testing import step as testing

KEYS: dict[str, Any] = {
    "B": 64, "H": 64, "H_KV": None, "N": 1, "D": 128, "E": None, "dtype": "auto", "state_dtype": "float32",
    "grad": False,
}  # fmt: skip


class Inputs(NamedTuple):
    call: testing.Inputs
    copied: bool  # the call works on a copy of the states and returns it


def complete(case: dict[str, Any]) -> dict[str, Any]:
    done = KEYS | case
    state_dtype = DTYPES.get(done["state_dtype"], done["state_dtype"])
    if state_dtype not in ("float32", "bfloat16"):
        raise ValueError(f"state_dtype={done['state_dtype']}: must be fp32 or bf16")
    if done["N"] > MAX_TOKENS:
        raise ValueError(f"N={done['N']}: a step takes 1 to {MAX_TOKENS} tokens")
    if done["grad"]:
        raise ValueError("grad=yes: a step has no gradient")
    return done | {"H_KV": done["H_KV"] or done["H"], "E": done["E"] or done["D"], "state_dtype": state_dtype}


def function(case: dict[str, Any]) -> str:
    return "a decoding step of linear attention with decay"


def small_case(case: dict[str, Any]) -> dict[str, Any]:
    return case | {"B": 3, "H": 2 * (case["H"] // case["H_KV"]), "H_KV": 2}


def drawn(
    case: dict[str, Any], device: torch.device, seed: int, fully: bool = False, one_head: int | None = None
) -> Problem:
    generator = torch.Generator(device).manual_seed(seed)
    q, k, v, o = (normal(shape, dtype_of(case), generator) for shape in shapes(case))
    if one_head is None:
        slopes = decay.alibi(case["H"]).to(device)
        state = normal((case["B"], case["H"], case["D"], case["E"]), torch.float32, generator)
    else:
        k, v, slopes, state = fixed_point(k, v, case["H"])
    state = state.to(getattr(torch, case["state_dtype"]))
    x = testing.Inputs(q, k, v, slopes, state, None, None, None, 1.0)
    heads = Heads.of(q, k, one_head)

    def expected() -> dict[str, Expected]:
        if heads.whole:
            return testing.expected(x)
        part: dict[str, Any] = {name: heads.pick(name, getattr(x, name)) for name in ("q", "k", "v", "state")}
        part["decay"] = slopes[heads.head * heads.group : (heads.head + 1) * heads.group]
        return {"o": testing.expected(x._replace(**part))["o"]}

    constants = {"q": q, "k": k, "v": v, "decay": slopes, "state": state}
    douts = {"o": o, "state": torch.zeros_like(state)} if heads.whole else {"o": o}
    return Problem(Inputs(x, heads.whole), {}, douts, expected, constants, heads.pick)


def fixed_point(k: Tensor, v: Tensor, H: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """k and v (every token the first one), slopes and states that a step leaves as they are."""
    k, v = (x[:, :, :1].to(torch.float8_e4m3fn).to(x.dtype).repeat(1, 1, x.shape[2], 1) for x in (k, v))
    power = 2.0 ** (1 + torch.arange(H, device=k.device, dtype=torch.float64) % 8)
    keys, values = (x[:, :, 0].float().repeat_interleave(H // x.shape[1], dim=1) for x in (k, v))
    state = (keys * power.float()[:, None])[:, :, :, None] * values[:, :, None, :]
    return k, v, -torch.log1p(-1 / power).float(), state


problem, small = makers(drawn, small_case)


def attend(backend: str) -> Callable[[Inputs], Any]:
    def step(given: Inputs) -> Any:
        x = given.call
        if given.copied:
            return testing.evaluate(x, backend)[:2]
        return lightning_step(x.q, x.k, x.v, x.decay, x.state, backend=backend)

    return step


def attend_fully(backend: str) -> None:
    return None


def spec(case: dict[str, Any], device: torch.device) -> StepSpec:
    B, H, H_KV, T, D, E = (case[key] for key in ("B", "H", "H_KV", "N", "D", "E"))
    state_dtype = getattr(torch, case["state_dtype"])
    return StepSpec(B, H, H_KV, T, D, E, dtype_of(case), device, state_dtype, slots=B, has_decay=True)


def without_data(case: dict[str, Any], fully: bool) -> Call:
    q, k, v, _ = empty(case)
    slopes = torch.empty(case["H"], device=q.device)
    state = q.new_empty(case["B"], case["H"], case["D"], case["E"], dtype=getattr(torch, case["state_dtype"]))
    return spec(case, q.device), Tensors(q, k, v, slopes, state, None, None, None, None), lambda o: ()
