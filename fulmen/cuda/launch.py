"""Loads kernels and launches them through the driver, on torch's current stream, without synchronisation.

A `Launch` repeats a call with other tensors. It packs what the call brings into a block of arguments that was written
once, and makes one call of the driver.
"""

from __future__ import annotations

import ctypes
import functools
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
    """The driver itself, for what every call does: past the wrappers it costs the host half."""
    return ctypes.CDLL("libcuda.so.1")


def take_context(device: int) -> None:
    """Makes torch's context on `device` that of this thread. torch's own set_device may leave it at that where the
    device seems to be current already, as it does in a new thread."""
    context = ctypes.c_void_p()
    if library().cuDevicePrimaryCtxRetain(ctypes.byref(context), device) == 0:  # kept, as torch keeps it
        library().cuCtxSetCurrent(context)


class Slot:
    """The arguments of one call on its way to the driver, which copies them before it answers."""

    def __init__(self, config: LaunchConfig, arguments: bytes) -> None:
        self.config = config
        self.bytes = ctypes.create_string_buffer(arguments + bytes(64), len(arguments) + 64)
        start = ctypes.addressof(self.bytes)
        self.offset = -start % 64  # where tensor maps want to begin
        ctypes.memmove(start + self.offset, arguments, len(arguments))
        self.start = start + self.offset
        self.pointers = (ctypes.c_void_p * 1)(self.start)
        self.reference = ctypes.byref(config)


class Launch:
    """A kernel call that can be repeated: only the first fields of its arguments are left to give.

    `constants` are the values of the other fields, the last ones, by name. With `early` the kernel waits for the one
    ahead of it in the stream by itself (griddepcontrol.wait), so it may start as that one ends. Safe to call from
    several threads.
    """

    def __init__(
        self, variant: Variant, device: torch.device, grid: tuple[int, int, int], threads: int, shared: int,
        constants: dict[str, Any], early: bool = False,
    ) -> None:  # fmt: skip
        self.variant, self.device = variant, device_index(device)
        self.handle = ctypes.c_void_p(load(variant, self.device, shared))
        self.grid, self.threads, self.shared = grid, threads, shared
        self.empty = 0 in grid
        self.front, self.arguments = variant.arguments.bind(constants)
        self.pack = self.front.pack_into
        self.packed: dict[tuple[int, ...], bytes] = {}
        self.attribute = LaunchAttribute(PROGRAMMATIC_LAUNCH, 0, (ctypes.c_uint * 16)(1))
        self.early = early
        self.slots: list[Slot] = []
        self.run = library().cuLaunchKernelEx

    def slot(self) -> Slot:
        config = LaunchConfig(
            self.grid, (self.threads, 1, 1), self.shared, None, ctypes.addressof(self.attribute), int(self.early)
        )
        return Slot(config, self.arguments)

    def __call__(self, *front: float | bytes) -> None:
        if self.empty:
            return
        try:
            slot = self.slots.pop()
        except IndexError:  # the first call, or a call in another thread is under way
            slot = self.slot()
        self.pack(slot.bytes, slot.offset, *front)
        slot.config.stream = raw_stream(self.device)
        if current_device() != self.device or self.run(slot.reference, self.handle, slot.pointers, None):
            self.recover(slot)
        self.slots.append(slot)

    def at(self, addresses: tuple[int, ...], front: Callable[[tuple[int, ...]], Iterable[float | bytes]]) -> None:
        """As a call with `front(addresses)`, which is packed once for the same addresses."""
        if self.empty:
            return
        packed = self.packed.get(addresses)
        if packed is None:
            if len(self.packed) >= MAX_PACKED:
                self.packed.clear()
            packed = self.packed[addresses] = self.front.pack(*front(addresses))
        try:
            slot = self.slots.pop()
        except IndexError:
            slot = self.slot()
        ctypes.memmove(slot.start, packed, len(packed))
        slot.config.stream = raw_stream(self.device)
        if current_device() != self.device or self.run(slot.reference, self.handle, slot.pointers, None):
            self.recover(slot)
        self.slots.append(slot)

    def recover(self, slot: Slot) -> None:
        """Launches where another device is current, or where this thread had no context."""
        with torch.cuda.device(self.device):
            status = self.run(slot.reference, self.handle, slot.pointers, None)
        if status == INVALID_CONTEXT:
            take_context(self.device)
            status = self.run(slot.reference, self.handle, slot.pointers, None)
        if status:
            raise RuntimeError(f"the launch of {self.variant.kernel} fails: CUDA error {status}")
