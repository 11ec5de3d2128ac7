"""Lightning attention for the benchmark; the package describes the names."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fulmen import decay, hardware
from fulmen.bench.adapters import Heads, dtype_of, normal, shapes, small_case
from fulmen.bench.gate import Problem
from fulmen.bench.kernels import Native
from fulmen.lightning.op import lightning_attention, lightning_attention_with_state
from fulmen.lightning.spec import LightningSpec
from fulmen.testing import Expected
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
    heads = Heads.of(x.q, x.k, one_head)

    def expected() -> dict[str, Expected]:
        if heads.whole:
            found = testing.expected(x, use)
        else:
            part: dict[str, Any] = {name: heads.pick(name, getattr(x, name)).detach() for name in ("q", "k", "v", "do")}
            of_heads = slice(heads.head * heads.group, (heads.head + 1) * heads.group)
            part["decay"] = None if x.decay is None else x.decay[of_heads]
            found = testing.expected(x._replace(**part), use, rows=ROWS)
        renamed = {"dinitial": "dinitial_state"}
        return {renamed.get(name, name): wanted for name, wanted in found.items()}

    douts = {"o": x.do, "state": x.dstate}
    constants = {} if x.decay is None else {"decay": x.decay}
    return Problem(x, leaves, {name: douts[name] for name in use}, expected, constants, heads.pick)


def attend(backend: str) -> Callable[[testing.Inputs], Tensor]:
    return lambda x: lightning_attention(x.q, x.k, x.v, x.decay, **x.options(), backend=backend)


def attend_fully(backend: str) -> Callable[[testing.Inputs], tuple[Tensor, Tensor]]:
    return lambda x: lightning_attention_with_state(x.q, x.k, x.v, x.decay, **x.options(), backend=backend)


def spec(case: dict[str, Any], device: torch.device) -> LightningSpec:
    B, H, H_KV, N, D, E = (case[key] for key in ("B", "H", "H_KV", "N", "D", "E"))
    return LightningSpec(B, H, H_KV, N, D, E, dtype_of(case), device, has_decay=case["decay"])


def launches(case: dict[str, Any], hw: hardware.Hardware, backend: str, pass_: str, fully: bool = False) -> list[Any]:
    if backend == "cuda":
        return native_launches(case, hw, pass_, fully)
    if not backend.startswith("triton"):
        return []
    import importlib

    from fulmen.lightning import policy
    from fulmen.lightning.spec import Residuals, empty_states
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
    from fulmen.lightning.spec import Residuals

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
