"""Native kernels: sources that include only each other, compiled when needed, kept on disk, launched by the driver.

A `Variant` is one kernel of one source for one architecture, with the macros it is compiled with. `cubin` compiles it
with NVRTC, which needs no GPU, no nvcc and no C++ compiler; the result is kept in the cache folder under the hash of
everything it was made from, so the next process reads it in a millisecond. `load` brings it to a device, and a `Launch`
repeats a call with other tensors: it packs their addresses into a block of arguments that was written once, and makes
one call of the driver, on torch's current stream, without synchronisation.

NVRTC and the driver are reached through cuda.bindings (the extra `fulmen[cuda]`). What cannot be compiled or loaded
raises `Unavailable`, whose message is for a backend to pass on as the reason why it cannot serve.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import re
import struct
import tempfile
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch

PACKAGE = Path(__file__).parent
OPTIONS = ("--std=c++17", "--ptxas-options=-v")
INVALID_CONTEXT = 201  # CUDA's number for "this thread has no context yet"
PROGRAMMATIC_LAUNCH = 6  # the launch attribute: may start before the kernel ahead in the stream has finished

raw_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # missing in builds without CUDA
current_device: Any = getattr(torch._C, "_cuda_getDevice", None)


class Unavailable(RuntimeError):
    """A kernel that cannot be had here, and why."""


class Variant(NamedTuple):
    source: str  # below the package, "flash/cuda_small.cu"
    kernel: str
    arch: str  # "80", "90a"
    macros: tuple[tuple[str, int], ...]

    @property
    def options(self) -> tuple[str, ...]:
        return (f"--gpu-architecture=sm_{self.arch}", *OPTIONS, *(f"-D{name}={value}" for name, value in self.macros))


# ---------------------------------------------------------------------------------------------- compiling


@functools.lru_cache
def nvrtc() -> tuple[Any, tuple[int, int]]:
    """The compiler and its version."""
    try:
        from cuda.bindings import nvrtc as module
    except ImportError as error:
        raise Unavailable(f"needs the package cuda-bindings ({error}): pip install 'fulmen[cuda]'") from error
    try:
        status, *version = module.nvrtcVersion()
    except Exception as error:  # the library is looked for at the first call
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise Unavailable(f"NVRTC cannot be loaded ({reason[0]}): pip install 'fulmen[cuda]' brings it") from error
    if int(status) != 0:
        raise Unavailable(f"NVRTC does not answer: {status.name}")
    return module, (version[0], version[1])


def compile_now(text: str, name: str, options: tuple[str, ...]) -> tuple[bytes, str]:
    """The machine code of a source, and what the compiler said."""
    module, version = nvrtc()

    def ask(function: Any, *args: Any) -> Any:
        status, *rest = function(*args)
        if int(status) != 0:
            raise Unavailable(f"NVRTC {version[0]}.{version[1]} fails in {function.__name__}: {status.name}")
        return rest[0] if rest else None

    program = ask(module.nvrtcCreateProgram, text.encode(), name.encode(), 0, [], [])
    try:
        (status,) = module.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
        said = bytearray(ask(module.nvrtcGetProgramLogSize, program))
        ask(module.nvrtcGetProgramLog, program, said)
        log = said.decode(errors="replace").strip("\0\n ")
        if int(status) != 0:
            first = next((line for line in log.splitlines() if "error" in line), status.name).strip()
            raise Unavailable(f"NVRTC {version[0]}.{version[1]} cannot compile {name}: {first}")
        code = bytearray(ask(module.nvrtcGetCUBINSize, program))
        ask(module.nvrtcGetCUBIN, program, code)
    finally:
        module.nvrtcDestroyProgram(program)
    return bytes(code), log


class Usage(NamedTuple):
    """What a compiled kernel takes, as the assembler reports it."""

    registers: int
    spilled: int  # bytes
    shared: int  # bytes, beside what is asked for at launch
    warnings: tuple[str, ...]


def usage(log: str) -> Usage:
    registers = re.search(r"Used (\d+) registers", log)
    if registers is None:
        raise ValueError(f"the assembler did not report: {log}")
    shared = re.search(r"(\d+) bytes smem", log)
    spilled = sum(map(int, re.findall(r"(\d+) bytes spill", log)))
    told = tuple(
        line.strip() for line in log.splitlines() if re.search(r"warning|serializ|C75\d\d", line, re.IGNORECASE)
    )
    return Usage(int(registers[1]), spilled, int(shared[1]) if shared else 0, told)


def text_of(source: str) -> str:
    """A source with the files of the package that it includes, by their path below the package, in their places."""
    text = (PACKAGE / source).read_text("utf-8")
    return re.sub(r'^#include "(.+)"$', lambda found: text_of(found[1]).rstrip(), text, flags=re.MULTILINE)


def compile_variant(variant: Variant) -> tuple[bytes, Usage]:
    """Compiled here and now, past the cache: for tests and tuning."""
    code, log = compile_now(text_of(variant.source), variant.source, variant.options)
    return code, usage(log)


# -------------------------------------------------------------------------------------------------- cache


def cache_folder() -> Path:
    """$FULMEN_CACHE_DIR, or `fulmen` in $XDG_CACHE_HOME, or in ~/.cache."""
    if chosen := os.environ.get("FULMEN_CACHE_DIR"):
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "fulmen"


def cache_file(variant: Variant, text: str) -> Path:
    """Named by the hash of all the machine code depends on."""
    _, version = nvrtc()
    everything = repr((text, variant.kernel, variant.options, version))
    return cache_folder() / f"{variant.kernel}.sm_{variant.arch}.{hashlib.sha256(everything.encode()).hexdigest()[:32]}"


def read(file: Path) -> bytes | None:
    """The machine code kept in `file`; None if there is none or it is damaged."""
    try:
        content = file.read_bytes()
    except OSError:
        return None
    digest, code = content[:32], content[32:]
    return code if hashlib.sha256(code).digest() == digest else None


def keep(file: Path, code: bytes) -> None:
    """Other processes see the whole file or none: it gets its name when it is complete."""
    temporary = None
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=file.parent, prefix=".")
        with os.fdopen(handle, "wb") as stream:
            stream.write(hashlib.sha256(code).digest() + code)
        os.replace(temporary, file)
    except OSError as error:
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
        warnings.warn(f"compiled kernels are not kept, each process compiles anew: {error}", stacklevel=2)


@functools.lru_cache(maxsize=1024)
def _made(variant: Variant) -> bytes | str:
    """The machine code, or the reason why there is none: neither is asked for twice in a process."""
    try:
        text = text_of(variant.source)
        file = cache_file(variant, text)
        code = read(file)
        if code is None:
            code, _ = compile_now(text, variant.source, variant.options)
            keep(file, code)
    except (Unavailable, OSError, RuntimeError) as error:  # RuntimeError: there is no home
        return str(error)
    return code


def cubin(variant: Variant) -> bytes:
    made = _made(variant)
    if isinstance(made, str):
        raise Unavailable(made)
    return made


# ------------------------------------------------------------------------------------------ driver, launch


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
def _loaded(variant: Variant, device: int, shared: int) -> int | str:
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
    loaded = _loaded(variant, device, shared)
    if isinstance(loaded, str):
        raise Unavailable(loaded)
    return loaded


def problem(variant: Variant, device: torch.device, shared: int) -> str | None:
    """Why the kernel cannot be compiled or, where there is a GPU, loaded."""
    made = _made(variant)
    if isinstance(made, str):
        return made
    if not torch.cuda.is_available():
        return None
    loaded = _loaded(variant, device_index(device), shared)
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


DATA_TYPES = {torch.float16: 6, torch.float32: 7, torch.bfloat16: 9}  # CUtensorMapDataType
SWIZZLE_128, PROMOTE_256 = 3, 3  # CUtensorMapSwizzle, CUtensorMapL2promotion


@functools.lru_cache(maxsize=8192)
def tensor_map(
    dtype: torch.dtype, address: int, sizes: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...]
) -> bytes:
    """What the tensor copy engine (TMA) needs to know of a tensor, innermost dimension first; strides in bytes, without
    that of the innermost. Boxes lie in shared memory with rows of 128 bytes, swizzled, and zeros beyond the end.
    """
    rank = len(sizes)
    buffer = ctypes.create_string_buffer(192)
    start = -ctypes.addressof(buffer) % 64
    whole, part = ctypes.c_uint64 * rank, ctypes.c_uint32 * rank
    encode = functools.partial(
        library().cuTensorMapEncodeTiled, ctypes.c_void_p(ctypes.addressof(buffer) + start), DATA_TYPES[dtype], rank,
        ctypes.c_void_p(address), whole(*sizes), (ctypes.c_uint64 * (rank - 1))(*strides), part(*box),
        part(*[1] * rank), 0, SWIZZLE_128, PROMOTE_256, 0,
    )  # fmt: skip
    status = encode()
    if status == INVALID_CONTEXT:  # as in a thread of autograd's that has not used the GPU yet
        take_context(torch.cuda.current_device())
        status = encode()
    if status:
        raise ValueError(f"TMA cannot read sizes {sizes} with strides {strides} in boxes of {box}: CUDA error {status}")
    return buffer.raw[start : start + 128]


MAX_ADDRESSES = 256  # that tensors of one shape are remembered by


class TensorMaps:
    """The maps of tensors (B, heads, N, size) of one shape, by their address.

    A box is 64 columns of `rows` positions of a head or, with a group, of rows / group positions of all its heads.
    """

    def __init__(
        self, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...], rows: int, group: int = 1
    ) -> None:
        B, heads, N, size = shape
        step_b, step_h, step_n = strides[:3]
        dims = [(N, step_n, rows // group), (heads // group, step_h * group, 1), (B, step_b, 1)]
        if group > 1:
            dims.insert(0, (group, step_h, group))
        sizes, steps, box = zip(*dims, strict=True)
        apart = tuple(dtype.itemsize * (step if n > 1 else size) for n, step in zip(sizes, steps, strict=True))
        self.facts = dtype, (size, *sizes), apart, (64, *box)
        self.known: dict[int, bytes] = {}

    def __call__(self, address: int) -> bytes:
        known = self.known.get(address)
        if known is None:
            dtype, sizes, strides, box = self.facts
            known = tensor_map(dtype, address, sizes, strides, box)
            if len(self.known) >= MAX_ADDRESSES:
                self.known = {}
            self.known[address] = known
        return known


def tensor_maps(x: torch.Tensor, rows: int, group: int = 1) -> TensorMaps:
    """The maps of tensors like `x`."""
    return TensorMaps(x.dtype, x.shape, x.stride(), rows, group)


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
    """A kernel call that can be repeated: everything but the front of its one argument is known.

    The kernel takes one struct by value, which begins with what a call brings, packed as `layout` says (in the words of
    the module struct: "5Q" for five addresses); `rest` are the bytes after that. With
    `early` the kernel waits for the one ahead of it in the stream by itself (griddepcontrol.wait), so it may start as
    that one ends. Safe to call from several threads.
    """

    def __init__(
        self, variant: Variant, device: torch.device, grid: tuple[int, int, int], threads: int, shared: int,
        layout: str, rest: bytes, early: bool = False,
    ) -> None:  # fmt: skip
        self.variant, self.device = variant, device_index(device)
        self.handle = ctypes.c_void_p(load(variant, self.device, shared))
        self.grid, self.threads, self.shared = grid, threads, shared
        self.empty = 0 in grid
        self.front = struct.Struct(layout)
        self.rest = bytes(self.front.size) + rest
        self.packed: dict[tuple[int, ...], bytes] = {}
        self.attribute = LaunchAttribute(PROGRAMMATIC_LAUNCH, 0, (ctypes.c_uint * 16)(1))
        self.early = early
        self.slots: list[Slot] = []
        self.run = library().cuLaunchKernelEx

    def slot(self) -> Slot:
        config = LaunchConfig(
            self.grid, (self.threads, 1, 1), self.shared, None, ctypes.addressof(self.attribute), int(self.early)
        )
        return Slot(config, self.rest)

    def __call__(self, *front: float | bytes) -> None:
        if self.empty:
            return
        slot = self.slots.pop() if self.slots else self.slot()
        self.front.pack_into(slot.bytes, slot.offset, *front)
        self.submit(slot)

    def at(self, addresses: tuple[int, ...], front: Callable[[tuple[int, ...]], Iterable[float | bytes]]) -> None:
        """As a call with `front(addresses)`, which is packed once for the same addresses."""
        if self.empty:
            return
        packed = self.packed.get(addresses)
        if packed is None:
            if len(self.packed) >= MAX_ADDRESSES:
                self.packed.clear()
            packed = self.packed[addresses] = self.front.pack(*front(addresses))
        slot = self.slots.pop() if self.slots else self.slot()
        ctypes.memmove(slot.start, packed, len(packed))
        self.submit(slot)

    def submit(self, slot: Slot) -> None:
        slot.config.stream = raw_stream(self.device)
        if current_device() == self.device:
            status = self.run(slot.reference, self.handle, slot.pointers, None)
        else:
            with torch.cuda.device(self.device):
                status = self.run(slot.reference, self.handle, slot.pointers, None)
        if status == INVALID_CONTEXT:
            take_context(self.device)
            status = self.run(slot.reference, self.handle, slot.pointers, None)
        self.slots.append(slot)
        if status:
            raise RuntimeError(f"the launch of {self.variant.kernel} fails: CUDA error {status}")


# ------------------------------------------------------------------------------------------------- doctor


def describe() -> str:
    """One line for `fulmen doctor`."""
    try:
        _, version = nvrtc()
    except Unavailable as error:
        return str(error)
    try:
        folder = cache_folder()
    except RuntimeError as error:
        return f"NVRTC {version[0]}.{version[1]}; nothing is kept: {error}"
    return f"NVRTC {version[0]}.{version[1]}, keeps kernels in {folder}"
