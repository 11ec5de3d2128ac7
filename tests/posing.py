"""A GPU that is not here: the host's side of a call, from Python to the driver, without kernels.

Tensors on the CPU pose as a GPU's, Triton compiles nothing, and the driver notes what it is told to launch. So a
machine without a GPU shows whether a repeated call, which takes prepared launches, asks for what the first one did;
whether the host waits for the GPU in between; and what fails in Python that only a GPU's tensors reach. `install`
changes torch for the whole process: it is for `fresh_process`.
"""

from __future__ import annotations

import ctypes
import itertools
import struct
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget

from fulmen.hardware import TARGETS

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")
STREAM = 77
ADDRESS = 1 << 40  # no number that a kernel is given is as large as an address
FACTORIES = (
    "arange", "as_tensor", "empty", "empty_like", "empty_strided", "full", "ones", "ones_like", "rand", "randint",
    "randn", "tensor", "zeros", "zeros_like",
)  # fmt: skip
METHODS = ("__neg__", "clone", "contiguous", "new_empty", "new_full", "new_tensor", "new_zeros", "to")
READS = ("__bool__", "__float__", "__index__", "__int__", "cpu", "item", "nonzero", "numpy", "tolist")


class Launched(NamedTuple):
    """One launch: `triton` if it went through Triton's own launcher. Arguments are bytes, or facts of a descriptor."""

    kernel: str
    grid: tuple[int, ...]
    threads: int
    early: bool
    triton: bool
    stream: int
    arguments: list[Any]

    def said(self, names: dict[int, str]) -> tuple[Any, ...]:
        """Addresses as names, or in the order in which they occur."""
        seen: dict[int, str] = {}

        def word(value: int) -> Any:
            return value if value < ADDRESS else names.get(value) or seen.setdefault(value, f"#{len(seen)}")

        def part(x: Any) -> Any:
            if not isinstance(x, bytes):
                return word(x[0]), x[1:]
            return [word(w) for (w,) in struct.iter_unpack("=Q", x.ljust(-len(x) // 8 * -8, b"\0"))]

        return *self[:4], self.stream, [part(x) for x in self.arguments]


launched: list[Launched] = []
handles = itertools.count(1)
parameters: dict[int, tuple[str, list[int]]] = {}  # of kernels by handle: names, and the sizes of what they take
waits: list[str] = []  # what made the host wait for the GPU
living: list[Any] = []  # what has an address of its own until the call is over


def kernel(name: str, sizes: list[int]) -> int:
    handle = next(handles)
    parameters[handle] = name, sizes
    return handle


# ------------------------------------------------------------------------------------------------- the driver


class Library:
    """Instead of libcuda."""

    def cuLaunchKernelEx(self, config: Any, handle: Any, pointers: Any, extra: Any) -> int:
        name, sizes = parameters[handle.value]
        given = [ctypes.string_at(at, size) for at, size in zip(pointers, sizes, strict=True)]
        asked = config._obj
        one = Launched(name, tuple(asked.grid), asked.block[0], bool(asked.attribute_count), False, asked.stream, given)
        launched.append(one)
        return 0

    def cuFuncGetParamInfo(self, handle: Any, index: Any, offset: Any, size: Any) -> int:
        sizes = parameters[handle.value][1]
        if index.value >= len(sizes):
            return 1
        offset._obj.value, size._obj.value = 0, sizes[index.value]
        return 0

    def cuTensorMapEncodeTiled(
        self, to: Any, dtype: int, rank: int, at: Any, sizes: Any, strides: Any, box: Any, *rest: Any
    ) -> int:
        facts = struct.pack("=QII", at.value, dtype, rank) + bytes(sizes) + bytes(strides) + bytes(box)
        ctypes.memmove(to.value, facts.ljust(128, b"\0")[:128], 128)
        return 0


class Compiled:
    """A kernel of Triton's that nobody compiled."""

    def __init__(self, source: Any, options: dict[str, Any]) -> None:
        from fulmen.launch import CODES, leaves

        types = tuple(source.signature.values())
        self.types = [kind for kind, _ in leaves(types, types) if kind != "constexpr"]
        sizes = [8 if kind[0] == "*" else struct.calcsize("=" + CODES.get(kind, "Q")) for kind in self.types]
        self.src, self.name = source, source.fn.__name__
        self.function = kernel(self.name, [*sizes, 8, 8])  # two more for scratch memory
        self.metadata = SimpleNamespace(
            num_ctas=1, num_warps=options["num_warps"], shared=0, launch_pdl=options.get("launch_pdl", False)
        )
        self.packed_metadata, self.launch_metadata = None, lambda *args: None

    def run(self, x: int, y: int, z: int, stream: int, function: int, *args: Any) -> None:
        from fulmen.launch import CODES, leaves

        values = args[4:]  # behind metadata and hooks
        types = tuple(self.src.signature.values())
        given = [pair for pair in leaves(types[: len(values)], tuple(values)) if pair[0] != "constexpr"]
        assert [kind for kind, _ in given] == self.types, f"{self.name} takes {self.types}, is given {given}"
        found: list[Any] = []
        for kind, value in given:
            if kind.startswith("tensordesc"):
                found.append((value.base.data_ptr(), *value.shape, *value.strides, *value.block_shape))
            elif kind[0] == "*":
                found.append(struct.pack("=Q", value.data_ptr() if isinstance(value, Tensor) else value or 0))
            else:
                found.append(struct.pack("=" + CODES[kind], value))
        scratch = [] if any(isinstance(one, tuple) for one in found) else [bytes(8), bytes(8)]
        early, threads = bool(self.metadata.launch_pdl), 32 * self.metadata.num_warps
        launched.append(Launched(self.name, (x, y, z), threads, early, True, stream, found + scratch))


class Driver:
    """Instead of Triton's."""

    utils = SimpleNamespace(get_device_properties=lambda device: {"max_shared_mem": 232_448})

    def __init__(self, arch: int) -> None:
        self.arch = arch

    def get_current_target(self) -> Any:
        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return STREAM


# ------------------------------------------------------------------------------------------------------ torch


class Current:
    """torch.cuda.device, of the one there is."""

    def __init__(self, *device: Any) -> None: ...

    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> None: ...


def on_cpu(make: Callable[..., Any]) -> Callable[..., Any]:
    """`make`, which makes what is asked for on the GPU on the CPU."""

    def kept(x: Any) -> Any:
        return CPU if isinstance(x, torch.device) or (isinstance(x, str) and x.startswith("cuda")) else x

    def made(*args: Any, **options: Any) -> Any:
        living.append(make(*map(kept, args), **{name: kept(x) for name, x in options.items()}))
        return living[-1]

    return made


def waited(name: str, read: Callable[..., Any]) -> Callable[..., Any]:
    """`read`, which a GPU's tensor would make the host wait for."""

    def noted(x: Tensor, *args: Any, **options: Any) -> Any:
        waits.append(name)
        return read(x, *args, **options)

    return noted


def install(arch: int) -> None:
    """From here on every tensor is on a GPU of this architecture."""
    from fulmen import cuda
    from fulmen import launch as of_triton
    from fulmen.cuda import launch as native
    from fulmen.cuda import tensor_map

    facts = TARGETS[arch]
    where: Any = Tensor
    where.device, where.is_cuda = property(lambda x: GPU), property(lambda x: True)
    for name in METHODS:
        setattr(Tensor, name, on_cpu(getattr(Tensor, name)))
    for name in READS:
        setattr(Tensor, name, waited(name, getattr(Tensor, name)))
    where.pin_memory = where.cuda = lambda x: x
    for name in FACTORIES:
        setattr(torch, name, on_cpu(getattr(torch, name)))

    properties = SimpleNamespace(
        major=arch // 10, minor=arch % 10, multi_processor_count=facts.sm_count, name=facts.name,
        shared_memory_per_block_optin=facts.smem_bytes, L2_cache_size=facts.l2_bytes,
    )  # fmt: skip
    torch.cuda.device = Current  # type: ignore[assignment, misc]
    torch.cuda.is_available = lambda: True
    torch.cuda.is_current_stream_capturing = lambda: False  # type: ignore[assignment]
    torch.cuda.current_device = lambda: 0
    torch.cuda.get_device_properties = lambda *device: properties  # type: ignore[assignment]
    torch.cuda.synchronize = lambda *device: waits.append("synchronize")
    torch._C._cuda_getDevice = lambda: 0
    torch._C._dynamo.guards._empty_strided_cuda = (  # type: ignore[attr-defined]
        lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype)
    )

    library = Library()
    native.library = tensor_map.library = lambda: library  # type: ignore[assignment]
    native.load = lambda variant, device, shared: kernel(variant.kernel, [variant.arguments.size])
    cuda.problem = native.problem = lambda variant, device, shared: None
    for module in (native, of_triton):
        module.raw_stream, module.current_device = lambda device: STREAM, lambda: 0
    triton.runtime.driver.set_active(Driver(arch))
    triton.compiler.compile = lambda source, target, options: Compiled(source, options)


# -------------------------------------------------------------------------------------------------- repeating


def repeated(call: Callable[..., Iterable[Tensor]], inputs: Callable[[], dict[str, Tensor]]) -> str:
    """Calls three times, with `inputs()` as they are then, and says what is wrong; nothing if all is well.

    The first call is checked, the second is prepared, the third has other tensors. What `call` returns has names, too.
    """
    rounds, ways = [], []
    for _ in range(3):
        given = inputs()
        launched.clear()
        waits.clear()
        living.clear()
        results = call(**given)
        named = given | {f"result {i}": x for i, x in enumerate(results)}
        names = {x.data_ptr(): name for name, x in named.items()}
        rounds.append([one.said(names) for one in launched])
        ways.append([one.kernel for one in launched if one.triton])
    first, _, last = rounds
    if len(first) != len(last):
        return f"launches {[one[0] for one in first]}, then {[one[0] for one in last]}"
    for one, other in zip(first, last, strict=True):
        if one != other:
            return f"{one}\nis, once prepared,\n{other}"
    if waits:
        return f"the host waits for the GPU: {waits}"
    return f"through Triton's launcher once prepared: {ways[2]}" if ways[2] else ""
