"""What our kernels take of a multiprocessor, from the compiled binary: registers, shared memory, spills, and how many
of its warps can run at once. No GPU is needed: a binary can be made for one that is not here."""

from __future__ import annotations

import functools
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from fulmen import hardware


class Multiprocessor(NamedTuple):
    """What one holds; CUDA programming guide, table of technical specifications."""

    warps: int
    blocks: int
    shared: int
    registers: int = 65536


MULTIPROCESSORS = {
    80: Multiprocessor(64, 32, 167_936), 86: Multiprocessor(48, 16, 102_400), 89: Multiprocessor(48, 24, 102_400),
    90: Multiprocessor(64, 32, 233_472), 100: Multiprocessor(64, 32, 233_472), 120: Multiprocessor(48, 24, 102_400),
}  # fmt: skip
RESERVED_SHARED = 1024  # of each block, for the system
REGISTERS_AT_ONCE = 256  # a warp gets multiples of this


class Native(NamedTuple):
    """A launch of a kernel of ours in CUDA C++, as far as its resources go."""

    variant: Any  # fulmen.cuda.Variant
    grid: int
    threads: int
    shared: int
    stages: int


def occupancy(arch: int, registers: int, shared: int, warps: int) -> float | None:
    """The share of a multiprocessor's warps that fit; None for an architecture we have no table of."""
    sm = MULTIPROCESSORS.get(arch)
    if sm is None or warps < 1:
        return None
    per_warp = -(-registers * 32 // REGISTERS_AT_ONCE) * REGISTERS_AT_ONCE
    fitting = [sm.blocks, sm.warps // warps, sm.shared // (shared + RESERVED_SHARED)]
    if per_warp:
        fitting.append(sm.registers // per_warp // warps)
    return min(fitting) * warps / sm.warps


def compiled(launch: Any, arch: int) -> Any:
    """What running `launch` would compile on a GPU of `arch`; from Triton's cache where it has been run."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, make_backend
    from triton.runtime.jit import create_function_from_signature

    target = GPUTarget("cuda", arch, 32)
    backend = make_backend(target)
    bind = create_function_from_signature(launch.kernel.signature, launch.kernel.params, backend)
    bound = bind(*launch.args, debug=False, **launch.options)
    options, signature, constants, attributes = launch.kernel._pack_args(backend, launch.options, *bound)
    source = ASTSource(launch.kernel, signature, constants, attributes)
    return triton.compile(source, target=target, options=options.__dict__)


@functools.lru_cache(maxsize=512)
def counts(binary: bytes) -> tuple[int, int]:
    """(registers a thread, bytes of stack a thread: what was spilled), by the cuobjdump that Triton carries."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", text)
    if found is None:
        raise RuntimeError(f"cuobjdump said {text[:200]!r}")
    registers, stack, local = map(int, found.groups())
    return registers, stack + local


def of_launches(launches: list[Any], hw: hardware.Hardware) -> list[dict[str, Any]]:
    """One record a launch; [] where Triton does not compile here (its interpreter stands in for it)."""
    import triton

    if triton.knobs.runtime.interpret:
        return []
    rows = []
    for launch in launches:
        if isinstance(launch, Native):
            rows.append(of_native(launch, hw))
            continue
        kernel = compiled(launch, hw.arch)
        try:
            registers, stack = counts(kernel.asm["cubin"])
        except (OSError, subprocess.CalledProcessError):  # no such tool here: the driver knows, if there is one
            kernel._init_handles()
            registers, stack = kernel.n_regs, kernel.n_spills
        shared, warps = kernel.metadata.shared, kernel.metadata.num_warps
        rows.append({
            "kernel": kernel.metadata.name, "registers": registers, "shared": shared, "stack": stack, "warps": warps,
            "stages": kernel.metadata.num_stages, "programs": launch.grid,
            "occupancy": occupancy(hw.arch, registers, shared, warps),
        })  # fmt: skip
    return rows


def of_native(launch: Native, hw: hardware.Hardware) -> dict[str, Any]:
    """The same of a kernel in CUDA C++; its shared memory is what the launch asks for."""
    from fulmen import cuda

    registers, stack = counts(cuda.cubin(launch.variant))
    warps = launch.threads // 32
    return {
        "kernel": launch.variant.kernel, "registers": registers, "shared": launch.shared, "stack": stack,
        "warps": warps, "stages": launch.stages, "programs": launch.grid,
        "occupancy": occupancy(hw.arch, registers, launch.shared, warps),
    }  # fmt: skip
