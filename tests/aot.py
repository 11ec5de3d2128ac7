"""Compiles a backend's launches for GPUs that are not here, and says what they take.

Tests run under Triton's interpreter, which replaces `triton.jit` for the whole process, so the compiler lives
in a process of its own: `Compiler()` starts this file as a program that answers each case with one line.
"""

from __future__ import annotations

import functools
import gc
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]


def name_of(case: Any) -> str:
    """A test's name for it: GPU, pass, head dim and what is not the default."""
    named = list(zip(case._fields, case, strict=True))[3:]
    odd = [f"{name}={value}" for name, value in named if value != case._field_defaults[name]]
    return "-".join([f"sm_{case.arch}", case.pass_, f"D={case.D}", *odd])


class Case(NamedTuple):
    """A call of lightning attention as a target GPU would see it; the defaults are a benchmark shape."""

    arch: int
    pass_: str
    D: int = 64
    E: int | None = None
    decay: bool = True
    dtype: str = "bfloat16"
    H_KV: int | None = None
    states: bool = False
    packed: bool = False
    layout: str = "bhnd"
    backend: str = "triton"
    B: int = 4
    H: int = 32
    N: int = 8192
    per_token: bool = False
    groups: int | None = None

    __str__ = name_of


class FlashCase(NamedTuple):
    """The same for softmax attention."""

    arch: int
    pass_: str
    D: int = 64
    E: int | None = None
    causal: bool = True
    left: int | None = None
    softcap: float | None = None
    sinks: bool = False
    dtype: str = "bfloat16"
    H_KV: int = 16
    packed: bool = False
    B: int = 2
    H: int = 16
    N: int = 8192

    __str__ = name_of


class StepCase(NamedTuple):
    """A decoding step of lightning attention; a draft adds the kernel that stores it."""

    arch: int
    T: int = 1
    D: int = 128
    E: int | None = None
    state: str = "float32"
    draft: bool = False
    slots: bool = True
    decay: bool = True
    dtype: str = "bfloat16"
    B: int = 64
    H: int = 64
    H_KV: int | None = None
    early: bool = False
    gated: bool = False

    def __str__(self) -> str:
        return "-".join(f"{n}={v}" for n, v in zip(self._fields, self, strict=True) if v != self._field_defaults.get(n))


class LatentCase(NamedTuple):
    """The same for attention over a latent cache."""

    arch: int
    pass_: str = "forward"
    D: int = 576
    E: int = 512
    H: int = 128
    N_Q: int = 1
    page: int | None = None
    dtype: str = "bfloat16"
    B: int = 4
    N: int = 8192

    __str__ = name_of


class CacheCase(NamedTuple):
    """Softmax attention over a cache, with split keys and without."""

    arch: int
    pass_: str = "cache"
    D: int = 128
    E: int | None = None
    H_KV: int = 8
    N_Q: int = 1
    page: int | None = None
    packed: bool = False
    left: int | None = None
    softcap: float | None = None
    sinks: bool = False
    dtype: str = "bfloat16"
    B: int = 4
    H: int = 32

    __str__ = name_of


class RanksCase(NamedTuple):
    """What ranks call beside lightning attention's own kernels: `fulmen.parallel.triton`."""

    arch: int
    D: int = 64
    group: int = 1
    dtype: str = "bfloat16"


class Usage(NamedTuple):
    """What one compiled launch takes. `stack` > 0 means registers spilled to memory."""

    launch: str
    shared: int
    stack: int
    registers: int


class Compiler:
    """The other process."""

    def __init__(self) -> None:
        env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
        env |= {"PYTHONPATH": str(ROOT), "TRITON_DISABLE_LINE_INFO": "1"}  # which costs a tenth of the time
        self.process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
        )

    def __call__(self, case: Any) -> list[Usage]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(json.dumps([type(case).__name__, *case]), file=self.process.stdin, flush=True)
        answer = json.loads(self.process.stdout.readline() or '{"error": "the compiling process died"}')
        assert "error" not in answer, answer["error"]
        return [Usage(*usage) for usage in answer["usage"]]

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


# -------------------------------------------------------------------------------- inside the other process


def pretend(arch: int) -> None:
    """Modules that ask what the device can do are told of a GPU of this architecture."""
    from fulmen.hardware import TARGETS
    from fulmen.layers.fused import decode, lightning, linear, sums
    from fulmen.step import triton as step

    for module in (decode, lightning, linear, step):
        module.starts_early = lambda device: arch >= 90
    for module in (linear, sums):
        module.shared_memory = lambda device: TARGETS[arch].smem_bytes


def launches(case: Case) -> list[Any]:
    import importlib

    import torch

    from fulmen.hardware import TARGETS
    from fulmen.lightning import policy
    from fulmen.lightning.spec import Residuals, empty_output, spec_of
    from fulmen.lightning.triton import Gradients, token_gradient
    from fulmen.testing import lightning as testing

    module = importlib.import_module(f"fulmen.lightning.{case.backend}")
    x = testing.inputs(
        case.B, case.H, case.N, case.D, E=case.E, H_KV=case.H_KV, groups=case.groups,
        dtype=getattr(torch, case.dtype), device="meta", layout=case.layout, initial_state=case.states,
        lengths=[case.N // 4] * 4 if case.packed else None,
    )  # fmt: skip
    decay = torch.empty(case.H, device="meta") if case.decay else None
    if case.per_token:
        decay = x.q.new_empty(x.q.shape[0], case.H, case.N, dtype=torch.float32)
    spec = spec_of(x.q, x.k, x.v, decay, **x.options(), with_final_state=case.states)
    state = torch.empty_like(x.dstate) if case.states else None
    saved = Residuals(x.q, x.k, x.v, decay, x.initial_state, x.cu_seqlens)
    tile = policy.choose(spec, TARGETS[case.arch], case.backend).tile
    if case.pass_ == "forward":
        return module.forward_launches(spec, tile, saved, empty_output(spec, saved), state).launches
    dstate = x.dstate if case.states else None
    one = getattr(tile, "sweep", tile)
    grads = Gradients.empty(spec, saved, (one.chunk, one.block_v) if case.per_token else None)
    found = module.backward_launches(spec, tile, saved, x.do, dstate, grads, state).launches
    return (
        [*found, token_gradient(spec, saved, grads, torch.empty_like(decay), case.states)] if case.per_token else found
    )


def flash_launches(case: FlashCase) -> list[Any]:
    import torch

    from fulmen.flash import policy
    from fulmen.flash import triton as module
    from fulmen.flash.spec import FlashSpec, Residuals
    from fulmen.hardware import TARGETS

    E, B, dtype = case.E or case.D, 1 if case.packed else case.B, getattr(torch, case.dtype)

    def rows(heads: int, size: int) -> Any:
        return torch.empty(B, heads, case.N, size, dtype=dtype, device="meta")

    q, k, v, o = rows(case.H, case.D), rows(case.H_KV, case.D), rows(case.H_KV, E), rows(case.H, E)
    lse = torch.empty(q.shape[:3], device="meta")
    ends = torch.empty(5, dtype=torch.int32, device="meta") if case.packed else None
    x = Residuals(q, k, v, torch.empty(case.H, device="meta") if case.sinks else None, ends, ends)
    spec = FlashSpec(
        B, case.H, case.H_KV, case.N, case.N, case.D, E, dtype, q.device, case.D**-0.5, case.left,
        0 if case.causal else None, False, case.softcap, case.sinks, 4 if case.packed else None, False, True,
    )  # fmt: skip
    tiles = policy.choose(spec, TARGETS[case.arch], "triton").tile
    if case.pass_ == "forward":
        return [module.forward_launch(spec, tiles, x, o, lse)]
    dk, dv = torch.empty_like(k), torch.empty_like(v)
    return module.backward_launches(spec, tiles, x, module.Backward(o, lse, o, None, lse, q, dk, dv))


def step_launches(case: StepCase) -> list[Any]:
    import torch

    from fulmen.hardware import TARGETS
    from fulmen.step import policy
    from fulmen.step import triton as module
    from fulmen.step.spec import MAX_STEP_TOKENS, Tensors, spec_of

    B, H, H_KV, T, D, E = case.B, case.H, case.H_KV or case.H, case.T, case.D, case.E or case.D
    make = functools.partial(torch.empty, device="meta")
    rows, ints = functools.partial(make, dtype=getattr(torch, case.dtype)), make(B, dtype=torch.int32)
    draft = rows(B, H_KV, MAX_STEP_TOKENS, D), rows(B, H_KV, MAX_STEP_TOKENS, E), ints
    x = Tensors(
        rows(B, H, T, D), rows(B, H_KV, T, D), rows(B, H_KV, T, E), make(H) if case.decay else None,
        make(B, H, D, E, dtype=getattr(torch, case.state)), ints if case.slots else None,
        *(draft if case.draft else (None, None, None)),
    )  # fmt: skip
    if case.gated:
        x = x._replace(gate=rows(B, H, T, E), weight=rows(H * E))
    spec = spec_of(x, 1.0)._replace(early=case.early, gated=case.gated)
    tile = policy.choose(spec, TARGETS[case.arch], "triton").tile
    return module.launches(spec, tile, x, rows(B, H, T, E), module.empty_squares(spec, tile))


def latent_launches(case: LatentCase) -> list[Any]:
    import torch

    from fulmen.hardware import TARGETS
    from fulmen.latent import policy
    from fulmen.latent import triton as module
    from fulmen.latent.spec import LatentSpec, Residuals

    B, H, N_Q, N, D, E, page = case.B, case.H, case.N_Q, case.N, case.D, case.E, case.page
    dtype, make = getattr(torch, case.dtype), functools.partial(torch.empty, device="meta")
    table = None if page is None else make(B, N // page, dtype=torch.int32)
    kv = make(*((B, N) if page is None else (2 * B * N // page, page)), D, dtype=dtype)
    x = Residuals(make(B, H, N_Q, D, dtype=dtype), kv, make(B, dtype=torch.int32), table)
    spec = LatentSpec(B, H, N_Q, N, D, E, dtype, kv.device, D**-0.5, N_Q > 1, True, N, page)
    choice = policy.choose(spec, TARGETS[case.arch], "triton")
    o = make(B, H, N_Q, E, dtype=dtype)
    return module.forward_launches(spec, choice, x, o, module.workspace(spec, choice.splits))


def cache_launches(case: CacheCase) -> list[Any]:
    import torch

    from fulmen.flash import policy
    from fulmen.flash import triton_cache as module
    from fulmen.flash.spec import Residuals, spec_of
    from fulmen.hardware import TARGETS

    E, B, N, dtype = case.E or case.D, 1 if case.packed else case.B, 8192, getattr(torch, case.dtype)

    def rows(B: int, heads: int, N: int, size: int) -> Any:
        return torch.empty(B, heads, N, size, dtype=dtype, device="meta")

    def ints(*shape: int) -> Any:
        return torch.empty(shape, dtype=torch.int32, device="meta")

    cache = (case.B, case.H_KV, N) if case.page is None else (1000, case.H_KV, case.page)
    table = None if case.page is None else ints(case.B, N // case.page)
    x = Residuals(
        rows(B, case.H, case.N_Q, case.D), rows(*cache, case.D), rows(*cache, E),
        torch.empty(case.H, device="meta") if case.sinks else None, ints(case.B + 1) if case.packed else None, None,
        ints(case.B), table,
    )  # fmt: skip
    spec = spec_of(x, case.D**-0.5, case.left, 0, False, case.softcap, True, False)
    o, lse = rows(B, case.H, case.N_Q, E), torch.empty(B, case.H, case.N_Q, device="meta")
    tile = policy.choose(spec, TARGETS[case.arch], "triton").tile
    split = module.launches(spec, tile, 5, x, o, lse, module.empty_parts(spec, 5, x.q.device))
    return [*module.launches(spec, tile, 1, x, o, lse, None), *split]


def ranks_launches(case: RanksCase) -> list[Any]:
    import torch

    from fulmen.parallel import triton as module

    H, N, D = 16, 65536, case.D
    make = functools.partial(torch.empty, device="meta")
    rows = functools.partial(make, dtype=getattr(torch, case.dtype))
    q, k, state, slopes = rows(1, H, N, D), rows(1, H // case.group, N, D), make(1, H, D, D), make(H)
    return [
        module.add_product(q, q, state, slopes, 1.0, backwards=False),
        module.add_product(k, k, state.mT, slopes, 1.0, backwards=True),
        module.add_product(k, k, state, None, 1.0, backwards=True),
        module.combine_launch(make(1, H, N, D), make(1, H, N), q, make(1, H, N)),
    ]


def compile(launch: Any, arch: int) -> Any:
    """What running `launch` would compile on a GPU of `arch`: same arguments, same specialisation."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, make_backend
    from triton.runtime.jit import create_function_from_signature

    kernel, options = launch.kernel, launch.options
    target = GPUTarget("cuda", arch, 32)
    backend = make_backend(target)
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    packed = kernel._pack_args(backend, options, *bind(*launch.args, debug=False, **options))
    parsed, signature, constants, attributes = packed
    source = ASTSource(kernel, signature, constants, attributes)
    return triton.compile(source, target=target, options=parsed.__dict__)


def check_order(launch: Any, compiled: Any) -> None:
    """The kernel takes its parameters in the order in which `fulmen.launch` sends them past Triton."""
    from fulmen.launch import leaves

    if launch.blocks:
        return
    (taken,) = re.findall(r"tt\.func public @\w+\((.*?)\) attributes", compiled.asm["ttir"], re.DOTALL)
    types = tuple(compiled.src.signature.values())
    sent = [kind.replace("fp", "f").replace("u", "i") for kind, _ in leaves(types, types) if kind != "constexpr"]
    sent = [f"!tt.ptr<{kind[1:]}>" if kind[0] == "*" else kind for kind in sent]
    assert re.findall(r"%[\w.$]+: (!tt\.ptr<\w+>|\w+)", taken) == sent, f"{launch.kernel.__name__}: {taken}"


def usage(launch: Any, compiled: Any) -> Usage:
    import triton

    check_order(launch, compiled)
    cuobjdump = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [cuobjdump, "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", text)
    assert found, text
    registers, stack, _, local = map(int, found.groups())
    sweeps = next((a for a in launch.args if isinstance(a, tuple) and a and isinstance(a[0], str)), ())
    return Usage(f"{launch.kernel.__name__}{list(sweeps)}", compiled.metadata.shared, stack + local, registers)


LAUNCHES: dict[Any, Any] = {
    Case: launches,
    FlashCase: flash_launches,
    StepCase: step_launches,
    LatentCase: latent_launches,
    CacheCase: cache_launches,
    RanksCase: ranks_launches,
}


def serve() -> None:
    import torch.fx.experimental.symbolic_shapes  # noqa: F401  (as operations on meta tensors do)

    from tests import aot_layers, carries

    carries.watch()
    gc.freeze()  # what modules make at import stays
    gc.set_threshold(100_000)
    made = {case.__name__: (case, described) for case, described in (LAUNCHES | aot_layers.LAUNCHES).items()}
    for line in sys.stdin:
        kind, *fields = json.loads(line)
        case = made[kind][0](*fields)
        pretend(case.arch)
        try:
            todo = made[kind][1](case)
            answer: dict[str, Any] = {"usage": [usage(launch, compile(launch, case.arch)) for launch in todo]}
        except Exception as error:
            answer = {"error": f"{case}: {type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    serve()
