"""Launching Triton kernels: what a call costs on the host, and the same launches for a GPU that is not here.

Triton's own launch looks at every argument anew, which takes longer than a small kernel runs. A `Ready` launch
remembers the compiled kernel and all arguments but the tensors. Its caller guarantees the shapes, strides and alignment
that it was made with. It calls the driver itself, as native kernels do
(`fulmen.cuda.launch`), where it knows the kernel's parameters.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Callable, Iterator, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from fulmen import hardware
from fulmen.boundary import rows_aligned
from fulmen.cuda.launch import Repeatable, parameter_sizes
from fulmen.hardware import TARGETS
from fulmen.plans import Repeated, allocator
from fulmen.tiles import padded

runtime = triton.knobs.runtime
current_device: Any = getattr(torch._C, "_cuda_getDevice", None)
raw_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # missing in builds without CUDA


def unsupported_device(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why Triton's kernels cannot run there; None: they can."""
    if device.type == "cuda":
        arch = hardware.of(device).arch
        return None if arch >= 80 else f"needs compute capability 8.0 or later, this GPU has {arch / 10}"
    if device.type == "cpu" and runtime.interpret:
        return "Triton's interpreter has no bf16 products" if dtype == torch.bfloat16 else None
    return f"needs a CUDA GPU (or, to test, Triton's interpreter), and the device is {device}"


def starts_early(device: torch.device) -> bool:
    """Whether kernels there may start before the one before them has ended: Hopper and later."""
    return device.type == "cuda" and hardware.of(device).arch >= 90


def shared_memory(device: torch.device) -> int:
    """The most bytes of shared memory a program may have; without a GPU the least of all `TARGETS`."""
    return hardware.of(device).smem_bytes if device.type == "cuda" else min(hw.smem_bytes for hw in TARGETS.values())


def sm_count(device: torch.device) -> int:
    """Multiprocessors of the GPU; without one those of an H200."""
    return hardware.of(device).sm_count if device.type == "cuda" else TARGETS[90].sm_count


def starting(early: bool) -> dict[str, int]:
    """The option of a launch with which it starts early; its kernel must wait (`gdc_wait`) before it reads results."""
    return {"launch_pdl": True} if early else {}


class Launch(NamedTuple):
    """A kernel call that has not happened yet, so that it can also be compiled for a GPU that is not here.

    The kernel takes the tensors first, then the rest; `Ready` repeats it with other tensors. What is not repeated has
    all arguments in `rest`. `blocks`: for each tensor that the kernel reads through a descriptor, its index and the
    rows of a block.
    """

    kernel: Any
    grid: int
    tensors: tuple[Tensor | None, ...]
    rest: tuple[Any, ...]
    options: dict[str, int]
    blocks: dict[int, int] = {}  # noqa: RUF012  (a NamedTuple's default, never changed)

    @property
    def args(self) -> tuple[Any, ...]:
        """What Triton's launch takes."""
        tensors: list[Any] = list(self.tensors)
        for i, rows in self.blocks.items():
            tensors[i] = describe(tensors[i], rows)
        return (*tensors, *self.rest)


class Chain(NamedTuple):
    """Launches that follow each other: an operation of several kernels, with one plan.

    work  tensors that one launch writes for a later one; the tensors of a launch may be views of these
    """

    work: tuple[Tensor, ...]
    launches: tuple[Launch, ...]


def describe(x: Tensor, rows: int) -> TensorDescriptor:
    """Blocks of `rows` rows of a (B, heads, N, size) tensor, whole rows padded to a power of two."""
    strides = [s if n > 1 else max(x.shape[3], 8) for n, s in zip(x.shape[:3], x.stride()[:3], strict=True)]
    return TensorDescriptor(x, list(x.shape), [*strides, 1], [1, 1, rows, padded(x.shape[3])])


def facts_of(x: Tensor, rows: int) -> dict[str, Any]:
    """A descriptor but for its tensor, which must not live as long as what is remembered here."""
    return {name: value for name, value in vars(describe(x, rows)).items() if name != "base"}


def describable(*tensors: Tensor) -> bool:
    """Whether TMA can read these: whole 16-byte units, nothing empty or repeated."""
    return all(x.numel() and x.shape[3] % (16 // x.element_size()) == 0 and rows_aligned(x) for x in tensors)


class Ready:
    """A compiled launch that can be repeated with other tensors, each at a multiple of 16 bytes.

    Making it runs nothing: a kernel may change its arguments.
    """

    def __init__(self, launch: Launch, device: torch.device) -> None:
        self.device = torch.cuda.current_device() if device.index is None else device.index
        self.described = {i: facts_of(launch.tensors[i], rows) for i, rows in launch.blocks.items()}  # type: ignore[arg-type]
        self.grid, self.rest = launch.grid, launch.rest
        self.slow = launch._replace(tensors=())
        self.direct: Repeatable | None = None
        with torch.cuda.device(self.device):  # `run` loads the kernel where it is read
            self.compiled: Any = compiled(launch)
            if self.grid:
                self.run = self.compiled.run
                self.start = (self.compiled.function, self.compiled.packed_metadata, None, None, None)
                self.direct = past_triton(self.compiled, launch, self.device)

    def __call__(self, *tensors: Tensor | None) -> None:
        if is_hooked():
            run_all([self.slow._replace(tensors=tensors)], torch.device("cuda", self.device))
        elif self.direct is not None:
            self.direct(*[0 if x is None else x.data_ptr() for x in tensors])
        else:
            self.through_triton([self.argument(i, x) for i, x in enumerate(tensors)])

    def at(self, *addresses: int) -> None:
        """The same of tensors at these addresses, 0 for None: without descriptors, and not for one who `is_hooked`."""
        if self.direct is not None:
            self.direct(*addresses)
        else:
            self.through_triton([x or None for x in addresses])

    def argument(self, i: int, x: Tensor | None) -> Any:
        """A tensor as Triton takes it: a descriptor, or an address."""
        if i not in self.described:
            return None if x is None else x.data_ptr()
        descriptor = TensorDescriptor.__new__(TensorDescriptor)  # checked when this was made ready
        descriptor.__dict__.update(self.described[i], base=x)
        return descriptor

    def through_triton(self, args: list[Any]) -> None:
        if not self.grid:
            return
        if current_device() != self.device:  # Triton launches on whichever device is current
            with torch.cuda.device(self.device):
                self.through_triton(args)
        else:
            self.run(self.grid, 1, 1, raw_stream(self.device), *self.start, *args, *self.rest)


CODES = {"i1": "?", "i8": "b", "i16": "h", "i32": "i", "i64": "q", "u1": "?", "u8": "B", "u16": "H", "u32": "I",
         "u64": "Q", "fp32": "f", "fp64": "d"}  # fmt: skip


def leaves(types: Any, values: Any) -> Iterator[tuple[str, Any]]:
    """The types and values of a kernel's arguments, tuples taken apart."""
    if isinstance(types, tuple):
        for inner, value in zip(types, values, strict=True):
            yield from leaves(inner, value)
    else:
        yield types, values


def past_triton(compiled: Any, launch: Launch, device: int) -> Repeatable | None:
    """The launch as one call of the driver: Triton's own takes all arguments apart at every call.

    None where parameters are not what we expect, or where Triton does more: descriptors, scratch memory, clusters.
    """
    facts, types = compiled.metadata, tuple(compiled.src.signature.values())
    more = ("global_scratch_size", "profile_scratch_size", "launch_cooperative_grid")
    if launch.blocks or getattr(facts, "num_ctas", 1) != 1 or any(getattr(facts, name, 0) for name in more):
        return None
    given = (*range(len(launch.tensors)), *launch.rest)  # a tensor is the place of its address
    missing = types[len(given) :]
    if len(types) < len(given) or any(kind != "constexpr" for kind, _ in leaves(missing, missing)):
        return None
    found = [(kind, value) for kind, value in leaves(types[: len(given)], given) if kind != "constexpr"]
    if any(kind not in CODES and kind[0] != "*" for kind, _ in found):
        return None
    block, offsets = bytes(8 * len(launch.tensors)), []
    for kind, value in found:
        if kind[0] == "*":
            offsets.append(8 * value)
        else:
            offsets.append(len(block))
            block += struct.pack("=" + CODES[kind], value).ljust(8, b"\0")
    sizes = [8 if kind[0] == "*" else struct.calcsize("=" + CODES[kind]) for kind, _ in found]
    asked = parameter_sizes(compiled.function)
    if asked is None or asked[: len(sizes)] != sizes or any(size != 8 for size in asked[len(sizes) :]):
        return None
    offsets += [len(block)] * (len(asked) - len(sizes))  # scratch memory, of which there is none
    direct = Repeatable(
        compiled.name, compiled.function, device, (launch.grid, 1, 1), 32 * facts.num_warps, facts.shared,
        struct.Struct(f"={len(launch.tensors)}Q"), block + bytes(8), tuple(offsets),
        early=bool(getattr(facts, "launch_pdl", False)),
    )  # fmt: skip
    direct.owner = compiled  # Triton 3.9 unloads a kernel that nobody holds
    return direct


def hooked(enter: Any, leave: Any) -> bool:
    """Whether somebody, a profiler, wants to hear of launches."""
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


def is_hooked() -> bool:
    return hooked(runtime.launch_enter_hook, runtime.launch_exit_hook)


def aligned(tensors: Sequence[Tensor | None]) -> bool:
    """Whether all begin at multiples of 16 bytes, for which Triton compiles faster code."""
    return not any(x is not None and x.data_ptr() % 16 for x in tensors)


_ready: dict[Any, list[Ready]] = {}
MAX_READY = 4096


def repeat(
    key: Any,
    device: torch.device,
    tensors: Sequence[tuple[Tensor | None, ...]],
    make: Callable[[], list[Launch]],
) -> None:
    """Runs the launches `make` describes, each on its tensors, in order.

    `key` stands for everything about them but the tensors' addresses: with the same key, what was compiled serves.
    """
    if device.type != "cuda" or runtime.interpret or not all(map(aligned, tensors)):
        run_all(make(), device)  # Triton compiles for each pattern of alignment
        return
    ready = _ready.get(key)
    if ready is None:
        if len(_ready) >= MAX_READY:
            _ready.clear()
        ready = _ready[key] = [Ready(launch, device) for launch in make()]
    for call, given in zip(ready, tensors, strict=True):
        call(*given)


def repeated(describe: Callable[..., tuple[tuple[Tensor, ...], Launch | Chain]], options: Any) -> Repeated:
    """Runs what `describe(options, *tensors)` returns: empty outputs, and a launch or a chain that fills them.

    Launches take these tensors, outputs and work; of the last two also views. A repeated call looks at addresses alone.
    """

    def general(*tensors: Any) -> tuple[Tensor, ...]:
        outputs, launch = describe(options, *tensors)
        run_all(chain_of(launch).launches, tensors[0].device)
        return outputs

    def prepare(*tensors: Any) -> Callable[..., tuple[Tensor, ...]] | None:
        device = tensors[0].device
        if device.type != "cuda" or runtime.interpret:
            return None
        given = [x if x is None else x.detach() for x in tensors]  # told apart, even if one tensor is given twice
        outputs, launch = describe(options, *given)
        chain, count = chain_of(launch), len(outputs)
        every = (None, *given, *outputs, *chain.work)
        places, shifts = places_of(chain, every, len(every) - count - len(chain.work))
        ready = [Ready(one, device) for one in chain.launches]
        calls = [(one.direct or one.at, itemgetter(*at)) for one, at in zip(ready, places, strict=True)]
        make = [allocator(x) for x in (*outputs, *chain.work)]

        def again(*tensors: Any) -> tuple[Tensor, ...]:
            if is_hooked():
                return general(*tensors)
            made = [new() for new in make]
            at = [0 if x is None else x.data_ptr() for x in (None, *tensors, *made)]
            for i, shift in shifts:
                at.append(at[i] + shift)
            for launch, addresses in calls:
                launch(*addresses(at))
            return tuple(made[:count])

        return again

    return Repeated(general, prepare)


def chain_of(launch: Launch | Chain) -> Chain:
    return launch if isinstance(launch, Chain) else Chain((), (launch,))


def places_of(chain: Chain, every: Sequence[Tensor | None], made: int) -> tuple[list[list[int]], list[tuple[int, int]]]:
    """Where each launch finds its tensors among `every`, of which those from the index `made` on may have views.

    A view comes behind the last of them. For each the second result has the tensor it is of, and its bytes from there.
    """
    memory = {x.untyped_storage()._cdata: i for i, x in enumerate(every) if x is not None and i >= made}
    shifts: list[tuple[int, int]] = []

    def place(x: Tensor | None) -> int:
        for i, other in enumerate(every):
            if x is other:
                return i
        assert x is not None
        i = memory[x.untyped_storage()._cdata]
        shift = x.data_ptr() - every[i].data_ptr()  # type: ignore[union-attr]
        if not shift:
            return i
        shifts.append((i, shift))
        return len(every) + len(shifts) - 1

    return [[place(x) for x in launch.tensors] for launch in chain.launches], shifts


def run_all(launches: Sequence[Launch], device: torch.device) -> None:
    """In order, on `device`: Triton itself launches on whichever is current."""
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        for launch in launches:
            run(launch)


def run(launch: Launch) -> None:
    """Through Triton's own launch."""
    if launch.grid:
        launch.kernel[(launch.grid,)](*launch.args, **launch.options)


def compiled(launch: Launch) -> Any:
    """The kernel that `run` would launch; None if it would not."""
    return launch.kernel.warmup(*launch.args, grid=(launch.grid,), **launch.options) if launch.grid else None
