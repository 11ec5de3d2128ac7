"""Loads kernels and launches them through the driver, on torch's current stream, without synchronisation.

A `Repeatable` repeats a call with other tensors. It packs what the call brings into a block of arguments that was
written once, and makes one call of the driver. `Launch` is that of a native kernel; Triton's kernels are launched the
same way (`fulmen.launch`).
"""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Callable, Iterable
from typing import Any

import torch

from fulmen.cuda.compile import Unavailable, Variant, cubin, cubin_or_reason

INVALID_CONTEXT = 201  # CUDA's number for "this thread has no context yet"
MAX_PACKED = 64  # calls whose arguments are remembered by address
PROGRAMMATIC_LAUNCH = 6  # the launch attribute: may start before the kernel ahead in the stream has finished

raw_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # missing in builds without CUDA
current_device: Any = getattr(torch._C, "_cuda_getDevice", None)


def address(x: torch.Tensor | None) -> int:
    """As kernels take a tensor that may be missing."""
    return 0 if x is None else x.data_ptr()


@functools.lru_cache
def driver() -> Any:
    try:
        from cuda.bindings import driver as module
    except ImportError as error:
        raise Unavailable(f"needs the package cuda-bindings ({error}): pip install 'fulmen[cuda]'") from error
    return module


def call(name: str, *args: Any) -> Any:
    """One function of the driver."""
    try:
        status, *rest = getattr(driver(), name)(*args)
    except RuntimeError as error:  # the library is looked for at the first call
        raise Unavailable(f"the CUDA driver cannot be reached: {error}") from error
    if int(status) != 0:
        raise Unavailable(f"the CUDA driver refuses: {name} answers {status.name}")
    return rest[0] if len(rest) == 1 else rest


@functools.lru_cache(maxsize=1024)
def loaded_or_reason(variant: Variant, device: int, shared: int) -> int | str:
    try:
        code = cubin(variant)
        with torch.cuda.device(device):
            torch.cuda.current_stream().query()  # makes torch's context the current one
            function = call("cuModuleGetFunction", call("cuModuleLoadData", code), variant.kernel.encode())
            limit = driver().CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            call("cuFuncSetAttribute", function, limit, shared)
    except Unavailable as error:
        return str(error)
    return int(function)


def load(variant: Variant, device: int, shared: int) -> int:
    """The driver's handle of the kernel on `device`, allowed `shared` bytes of shared memory."""
    loaded = loaded_or_reason(variant, device, shared)
    if isinstance(loaded, str):
        raise Unavailable(loaded)
    return loaded


def problem(variant: Variant, device: torch.device, shared: int) -> str | None:
    """Why the kernel cannot be compiled or, where there is a GPU, loaded."""
    code = cubin_or_reason(variant)
    if isinstance(code, str):
        return code
    if not torch.cuda.is_available():
        return None
    loaded = loaded_or_reason(variant, device_index(device), shared)
    return loaded if isinstance(loaded, str) else None


def device_index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


class LaunchAttribute(ctypes.Structure):
    _fields_ = [("id", ctypes.c_uint), ("padding", ctypes.c_uint), ("value", ctypes.c_uint * 16)]


class LaunchConfig(ctypes.Structure):
    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("attribute_count", ctypes.c_uint),
    ]


@functools.lru_cache
def library() -> Any:
    """libcuda through ctypes, for what every call does: half of what the bindings cost the host."""
    return ctypes.CDLL("libcuda.so.1")


def take_context(device: int) -> None:
    """Makes torch's context on `device` that of this thread. torch's own set_device may leave it at that where the
    device seems to be current already, as it does in a new thread."""
    context = ctypes.c_void_p()
    if library().cuDevicePrimaryCtxRetain(ctypes.byref(context), device) == 0:  # kept, as torch keeps it
        library().cuCtxSetCurrent(context)


class Block:
    """A block of arguments where the driver reads it: `offsets` say where its parameters begin."""

    __slots__ = ("bytes", "offset", "pointers")

    def __init__(self, arguments: bytes, offsets: tuple[int, ...]) -> None:
        self.bytes = ctypes.create_string_buffer(arguments + bytes(64), len(arguments) + 64)
        start = ctypes.addressof(self.bytes)
        self.offset = -start % 64  # where tensor maps want to begin
        ctypes.memmove(start + self.offset, arguments, len(arguments))
        self.pointers = (ctypes.c_void_p * len(offsets))(*[start + self.offset + at for at in offsets])


class Slot:
    """One call on its way to the driver, which copies arguments before it answers."""

    __slots__ = ("block", "config", "reference")

    def __init__(self, config: LaunchConfig, block: Block) -> None:
        self.config, self.block = config, block
        self.reference = ctypes.byref(config)


class Repeatable:
    """A kernel call that can be repeated: only the first bytes of its arguments are left to give.

    handle     the kernel, as the driver knows it; `name` is for errors
    front      packs what a call brings into the first bytes of `arguments`
    offsets    where the kernel's parameters begin in them
    early      the kernel waits for the one ahead of it in the stream by itself (griddepcontrol.wait), so it may start
               as that one ends

    Safe to call from several threads.
    """

    owner: Any = None  # of the handle, if it would unload the kernel

    def __init__(
        self, name: str, handle: int, device: int, grid: tuple[int, int, int], threads: int, shared: int,
        front: struct.Struct, arguments: bytes, offsets: tuple[int, ...] = (0,), early: bool = False,
    ) -> None:  # fmt: skip
        self.name, self.handle, self.device = name, ctypes.c_void_p(handle), device
        self.grid, self.threads, self.shared, self.early = grid, threads, shared, early
        self.empty = 0 in grid
        self.front, self.arguments, self.offsets = front, arguments, offsets
        self.pack = front.pack_into
        self.packed: dict[tuple[int, ...], Block] = {}
        self.attribute = LaunchAttribute(PROGRAMMATIC_LAUNCH, 0, (ctypes.c_uint * 16)(1))
        self.slots: list[Slot] = []
        self.run = library().cuLaunchKernelEx

    def slot(self) -> Slot:
        config = LaunchConfig(
            self.grid, (self.threads, 1, 1), self.shared, None, ctypes.addressof(self.attribute), int(self.early)
        )
        return Slot(config, Block(self.arguments, self.offsets))

    def __call__(self, *front: float | bytes) -> None:
        if self.empty:
            return
        try:
            slot = self.slots.pop()
        except IndexError:  # the first call, or a call in another thread is under way
            slot = self.slot()
        block = slot.block
        self.pack(block.bytes, block.offset, *front)
        slot.config.stream = raw_stream(self.device)
        if current_device() != self.device or self.run(slot.reference, self.handle, block.pointers, None):
            self.recover(slot, block)
        self.slots.append(slot)

    def at(self, addresses: tuple[int, ...], front: Callable[[tuple[int, ...]], Iterable[float | bytes]]) -> None:
        """As a call with `front(addresses)`, which is packed once for the same addresses."""
        if self.empty:
            return
        block = self.packed.get(addresses)
        if block is None:
            if len(self.packed) >= MAX_PACKED:
                self.packed.clear()
            first = self.front.pack(*front(addresses))
            block = self.packed[addresses] = Block(first + self.arguments[len(first) :], self.offsets)
        try:
            slot = self.slots.pop()
        except IndexError:
            slot = self.slot()
        slot.config.stream = raw_stream(self.device)
        if current_device() != self.device or self.run(slot.reference, self.handle, block.pointers, None):
            self.recover(slot, block)
        self.slots.append(slot)

    def recover(self, slot: Slot, block: Block) -> None:
        """Launches where another device is current, or where this thread had no context."""
        with torch.cuda.device(self.device):
            status = self.run(slot.reference, self.handle, block.pointers, None)
        if status == INVALID_CONTEXT:
            take_context(self.device)
            status = self.run(slot.reference, self.handle, block.pointers, None)
        if status:
            raise RuntimeError(f"the launch of {self.name} fails: CUDA error {status}")


class Launch(Repeatable):
    """A call of one of our native kernels. `constants` are the values of its last fields, by name."""

    def __init__(
        self, variant: Variant, device: torch.device, grid: tuple[int, int, int], threads: int, shared: int,
        constants: dict[str, Any], early: bool = False,
    ) -> None:  # fmt: skip
        self.variant, index = variant, device_index(device)
        handle, bound = load(variant, index, shared), variant.arguments.bind(constants)
        super().__init__(variant.kernel, handle, index, grid, threads, shared, *bound, early=early)


def parameter_sizes(handle: int) -> list[int] | None:
    """The sizes of a kernel's parameters; None if the driver is too old to say, or another than we know."""
    try:
        ask = library().cuFuncGetParamInfo
    except (OSError, AttributeError):
        return None
    sizes: list[int] = []
    at, size = ctypes.c_size_t(), ctypes.c_size_t()
    while ask(ctypes.c_void_p(handle), ctypes.c_size_t(len(sizes)), ctypes.byref(at), ctypes.byref(size)) == 0:
        sizes.append(size.value)
    return sizes
