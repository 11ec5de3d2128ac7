"""Lightning attention as the benchmark sees it; see the package."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fulmen import decay, dispatch, hardware
from fulmen.bench.adapters import dtype_of, head_of, normal, refusal, shapes, size_of, small_case
from fulmen.bench.gate import Problem
from fulmen.bench.resources import Native
from fulmen.lightning.op import LightningSpec, lightning_attention, lightning_attention_with_state
from fulmen.testing import lightning as testing

KEYS: dict[str, Any] = {
    "B": 1, "H": 8, "H_KV": None, "N": 1024, "D": 64, "E": None, "dtype": "auto", "causal": True, "decay": True,
}  # fmt: skip
ROWS = 2048  # of the attention matrix that are written out at a time to check the timed shape


def complete(case: dict[str, Any]) -> dict[str, Any]:
    done = KEYS | case
    if not done["causal"]:
        raise ValueError("lightning attention is causal")
    return done | {"H_KV": done["H_KV"] or done["H"], "E": done["E"] or done["D"]}


def function(case: dict[str, Any]) -> str:
    return "causal linear attention with decay" if case["decay"] else "causal linear attention"


def problem(case: dict[str, Any], device: torch.device, seed: int) -> Problem:
    generator = torch.Generator(device).manual_seed(seed)
    dtype = dtype_of(case)
    q, k, v, do = (normal(shape, dtype, generator) for shape in shapes(case))
    slopes = decay.alibi(case["H"]).to(device) if case["decay"] else None
    x = testing.Inputs(q, k, v, slopes, 1.0, None, None, do, q.new_zeros(0))
    return as_problem(x, ("o",), one_head=seed)


def small(case: dict[str, Any], device: torch.device, seed: int, fully: bool = False) -> Problem:
    case = small_case(case)
    x = testing.inputs(
        case["B"], case["H"], case["N"], case["D"], E=case["E"], H_KV=case["H_KV"], dtype=dtype_of(case), device=device,
        decay=decay.alibi(case["H"]).to(device) if case["decay"] else None, initial_state=fully, seed=seed,
    )  # fmt: skip
    return as_problem(x, ("o", "state") if fully else ("o",))


def as_problem(x: testing.Inputs, use: tuple[str, ...], one_head: int | None = None) -> Problem:
    names = ["q", "k", "v"] + (["initial_state"] if x.initial_state is not None else [])
    leaves = {name: getattr(x, name).requires_grad_() for name in names}
    x = x._replace(**leaves)
    group = x.q.shape[1] // x.k.shape[1]
    b, h = head_of(one_head or 0, x.k.shape[0], x.k.shape[1])

    def pick(name: str, y: Tensor) -> Tensor:
        each = 1 if name in ("k", "v", "dk", "dv") else group
        return y if one_head is None else y[b : b + 1, h * each : (h + 1) * each]

    def expected() -> dict[str, Any]:
        part: dict[str, Any] = {name: pick(name, getattr(x, name)).detach() for name in ("q", "k", "v", "do")}
        if one_head is not None:
            s = None if x.decay is None else x.decay[h * group : (h + 1) * group]
            found = testing.expected(x._replace(**part, decay=s), use, rows=ROWS)
        else:
            found = testing.expected(x, use)
        renamed = {"dinitial": "dinitial_state"}
        return {renamed.get(name, name): wanted for name, wanted in found.items()}

    douts = {"o": x.do, "state": x.dstate}
    constants = {} if x.decay is None else {"decay": x.decay}
    return Problem(x, leaves, {name: douts[name] for name in use}, expected, constants, pick)


def attend(backend: str) -> Callable[[testing.Inputs], Tensor]:
    return lambda x: lightning_attention(x.q, x.k, x.v, x.decay, **x.options(), backend=backend)


def attend_fully(backend: str) -> Callable[[testing.Inputs], tuple[Tensor, Tensor]]:
    return lambda x: lightning_attention_with_state(x.q, x.k, x.v, x.decay, **x.options(), backend=backend)


def spec(case: dict[str, Any], device: torch.device) -> LightningSpec:
    B, H, H_KV, N, D, E = (case[key] for key in ("B", "H", "H_KV", "N", "D", "E"))
    return LightningSpec(B, H, H_KV, N, D, E, dtype_of(case), device, has_decay=case["decay"])


def refuses(case: dict[str, Any], device: torch.device, backend: str) -> str | None:
    return None if backend == "auto" else refusal("lightning", spec(case, device), backend)


def chosen(case: dict[str, Any], device: torch.device, backend: str) -> str:
    return dispatch.pick("lightning", spec(case, device), backend).name


def launches(case: dict[str, Any], hw: hardware.Hardware, backend: str, pass_: str, fully: bool = False) -> list[Any]:
    if backend == "cuda":
        return native_launches(case, hw, pass_, fully)
    if not backend.startswith("triton"):
        return []
    import importlib

    from fulmen.lightning import policy
    from fulmen.lightning.op import Residuals, empty_states
    from fulmen.lightning.triton import Gradients

    module = importlib.import_module(f"fulmen.lightning.{backend}")
    make = functools.partial(torch.empty, dtype=dtype_of(case), device="meta")
    q, k, v, o = (make(shape) for shape in shapes(case))
    slopes = torch.empty(case["H"], device="meta") if case["decay"] else None
    state = empty_states(q, case["B"], case["E"]) if fully else None
    call = spec(case, q.device)._replace(has_initial_state=fully, with_final_state=fully)
    x = Residuals(q, k, v, slopes, state, None)
    tile = policy.choose(call, hw, backend).tile
    forward = module.forward_launches(call, tile, x, o, state) if pass_ != "backward" else []
    if pass_ == "forward":
        return forward
    return forward + module.backward_launches(call, tile, x, o, state, Gradients.empty(call, x), state)


def native_launches(case: dict[str, Any], hw: hardware.Hardware, pass_: str, fully: bool) -> list[Any]:
    """Those of backend cuda, with gradients: what it saves, it saves. Between segments a scan of triton_split's."""
    from fulmen.lightning import cuda, policy, triton_split
    from fulmen.lightning.kernels import sweep
    from fulmen.lightning.op import Residuals

    call = spec(case, torch.device("cuda"))._replace(has_initial_state=fully, with_final_state=fully)
    if hw.arch != 90 or call.D != call.E or call.D not in (64, 128) or call.H != call.H_KV:
        return []
    tiles, saves = policy.choose(call, hw, "cuda").tile, cuda.saves(call) is not None
    none = torch.empty(0, device="meta")
    x = Residuals(none, none, none, none if call.has_decay else None, None, None)
    cut = cuda.segments(call, tiles.forward_split, x)

    def native(what: str, sweeps: int) -> Native:
        tile = getattr(tiles, what)
        pieces = sweep.pieces(call, cut) - (cut.whole if what == "state" else 0)
        blocks = pieces * sweeps * (call.D // 64)
        shared = sweep.shared_bytes(call, tile)
        return Native(sweep.variant(call, tile), blocks, sweep.threads(tile), shared, tile.stages)

    def gather() -> list[Any]:
        """The states that enter segments."""
        if cut.number == 1:
            return []
        return [native("state", 1), triton_split.scan(call, x, cut, none, None, None)]

    forward = [*gather(), native("training" if saves else "forward", 1)] if pass_ != "backward" else []
    if pass_ == "forward":
        return forward
    together = saves and call.D == 64
    last = [native("backward", 3)] if together else [native("backward", 2), native("backward", 1)]
    return [*forward, *([] if saves else gather()), *gather(), *last]


def floors(case: dict[str, Any]) -> dict[str, int]:
    q, k, v, o = shapes(case)
    dtype = dtype_of(case)
    given = size_of(dtype, q, k, v)
    return {"inputs": given + 4 * case["H"] * case["decay"], "output": size_of(dtype, o), "gradients": given}
