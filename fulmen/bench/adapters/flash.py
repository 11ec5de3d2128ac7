"""Softmax attention for the benchmark; the package describes the names."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fulmen import dispatch, hardware
from fulmen.bench.adapters import Heads, dtype_of, normal, shapes, small_case
from fulmen.bench.gate import Problem
from fulmen.bench.kernels import Native
from fulmen.flash.op import flash_attention, flash_attention_with_lse
from fulmen.flash.spec import FlashSpec
from fulmen.testing import Expected
from fulmen.testing import flash as testing

KEYS: dict[str, Any] = {
    "B": 1, "H": 8, "H_KV": None, "N": 1024, "N_Q": None, "D": 64, "E": None, "dtype": "auto", "causal": True,
}  # fmt: skip
LAST_QUERIES = 512  # what is checked of a timed shape whose attention matrix does not fit
MATRICES = 16  # fp64 (N, N) alive at once while a gradient is checked


def complete(case: dict[str, Any]) -> dict[str, Any]:
    """A case has N_Q only where it differs from N, the number of keys."""
    done = KEYS | case
    if done["N_Q"] in (None, done["N"]):
        del done["N_Q"]
    return done | {"H_KV": done["H_KV"] or done["H"], "E": done["E"] or done["D"]}


def function(case: dict[str, Any]) -> str:
    return "causal softmax attention" if case["causal"] else "softmax attention"


def problem(case: dict[str, Any], device: torch.device, seed: int) -> Problem:
    generator = torch.Generator(device).manual_seed(seed)
    dtype = dtype_of(case)
    q, k, v, do = (normal(shape, dtype, generator) for shape in shapes(case))
    dlse = torch.zeros(0, dtype=torch.float64 if dtype == torch.float64 else torch.float32, device=device)
    x = testing.Inputs(q, k, v, None, None, None, case["causal"], None, None, None, do, dlse)
    return as_problem(x, ("o",), one_head=seed)


def small(case: dict[str, Any], device: torch.device, seed: int, fully: bool = False) -> Problem:
    case = small_case(case)
    x = testing.inputs(
        case["B"], case["H"], case.get("N_Q", case["N"]), case["D"], E=case["E"], H_KV=case["H_KV"], N_KV=case["N"],
        dtype=dtype_of(case), device=device, causal=case["causal"], seed=seed,
    )  # fmt: skip
    return as_problem(x, ("o", "lse") if fully else ("o",))


def as_problem(x: testing.Inputs, use: tuple[str, ...], one_head: int | None = None) -> Problem:
    leaves = {name: getattr(x, name).requires_grad_() for name in ("q", "k", "v")}
    x = x._replace(**leaves)
    heads = Heads.of(x.q, x.k, one_head)
    matrices = MATRICES * heads.group * x.q.shape[2] * x.k.shape[2] * 8
    if one_head is not None and matrices > free_bytes(x.q.device) // 2:
        heads = heads._replace(last=LAST_QUERIES)

    def expected() -> dict[str, Expected]:
        part: dict[str, Any] = {name: heads.pick(name, getattr(x, name)).detach() for name in ("q", "k", "v", "do")}
        part["dlse"] = x.dlse if x.dlse.numel() else part["q"].new_zeros(part["q"].shape[:3], dtype=x.dlse.dtype)
        found = testing.expected(x._replace(**part), use)
        kept = {"o"} if heads.last else set(found) - (set() if "lse" in use else {"lse"})
        return {name: wanted for name, wanted in found.items() if name in kept}

    douts = {"o": x.do, "lse": x.dlse}
    return Problem(x, leaves, {name: douts[name] for name in use}, expected, pick=heads.pick)


def free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # torch's, and free
        return torch.cuda.mem_get_info(device)[0] + kept
    return 8 << 30


def attend(backend: str) -> Callable[[testing.Inputs], Tensor]:
    return lambda x: flash_attention(x.q, x.k, x.v, causal=x.causal, backend=backend)


def attend_fully(backend: str) -> Callable[[testing.Inputs], tuple[Tensor, Tensor]] | None:
    if backend in ("sdpa", "flash_attn", "auto"):  # no gradient of lse; what auto takes is gated under its own name
        return None
    return lambda x: flash_attention_with_lse(x.q, x.k, x.v, causal=x.causal, backend=backend)


def spec(case: dict[str, Any], device: torch.device) -> FlashSpec:
    B, H, H_KV, N, D, E = (case[key] for key in ("B", "H", "H_KV", "N", "D", "E"))
    call = FlashSpec(B, H, H_KV, case.get("N_Q", N), N, D, E, dtype_of(case), device, D**-0.5)
    return call._replace(right=0 if case["causal"] else None, needs_grad=bool(case.get("grad", True)))


def launches(case: dict[str, Any], hw: hardware.Hardware, backend: str, pass_: str, fully: bool = False) -> list[Any]:
    name = backend.partition(" ")[0]  # of "cuda (...)", as `chosen` says it
    if name not in ("triton", "cuda"):
        return []
    from fulmen.flash import policy
    from fulmen.flash import triton as module
    from fulmen.flash.spec import Residuals

    make = functools.partial(torch.empty, dtype=dtype_of(case), device="meta")
    q, k, v, o = (make(shape) for shape in shapes(case))
    lse = torch.empty(q.shape[:3], device="meta")
    call, x = spec(case, q.device)._replace(with_lse=fully), Residuals(q, k, v)
    tiles = policy.choose(call, hw, "triton").tile
    forward: list[Any] = []
    if pass_ != "backward":
        kept = lse if call.wants_lse else None
        forward = native_forward(call, hw) if name == "cuda" else [module.forward_launch(call, tiles, x, o, kept)]
    if pass_ == "forward" or not call.needs_grad or (name == "cuda" and cudnn_goes_back(call)):
        return forward
    kind = torch.float32 if tiles.heads_summed < call.group else q.dtype
    heads = call.H // tiles.heads_summed
    dk, dv = (torch.empty(t.shape[0], heads, *t.shape[2:], dtype=kind, device="meta") for t in (k, v))
    y = module.Backward(o, lse, o, lse if fully else None, lse, q, dk, dv)
    return forward + module.backward_launches(call, tiles, x, y)


def cudnn_goes_back(call: FlashSpec) -> bool:
    """Whether the backward of backend cuda is cuDNN's, of which we know no launches; else it is triton's."""
    on_gpu = call._replace(device=torch.device("cuda"))
    return torch.cuda.is_available() and dispatch.choose("flash", on_gpu, "cuda").backward == "cudnn"


def native_forward(call: FlashSpec, hw: hardware.Hardware) -> list[Native]:
    """The launch of backend cuda, or both where keys are split."""
    from fulmen.flash import cuda, policy
    from fulmen.flash.kernels import combine

    choice = policy.choose(call, hw, "cuda")
    kernel = cuda.KERNELS[choice.kernel]
    blocks, shared = math.prod(kernel.grid(call, hw, choice)), kernel.shared_bytes(call, choice)
    one = Native(kernel.variant(call, hw, choice), blocks, kernel.threads(choice), shared, choice.tile.stages)
    if choice.splits == 1:
        return [one]
    rows = call.B * call.H * call.N_Q
    return [one, Native(combine.variant(call), rows, combine.THREADS, combine.SHARED_BYTES, 1)]
