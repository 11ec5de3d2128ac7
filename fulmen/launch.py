"""Launching Triton kernels: what a call costs on the host, and the same launches for a GPU that is not here.

Triton's own launch looks at every argument anew, which takes longer than a small kernel runs. A `Ready` launch
remembers the compiled kernel and all arguments but the tensors. Its caller guarantees the shapes, strides and alignment
that it was made with. It calls the driver itself, as native kernels do
(`fulmen.cuda.launch`), where it knows the kernel's parameters.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
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

    The kernel takes `tensors` first, then `rest`, where more of them may be, in tuples too. `blocks`: for each tensor
    that the kernel reads through a descriptor, its index and the rows of a block.
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

    @property
    def given(self) -> tuple[Tensor | None, ...]:
        """All tensors, as `Ready` takes others in their place."""
        return (*self.tensors, *tensors_of(self.rest))

    def run(self) -> None:
        """Through Triton's own launch."""
        if self.grid:
            self.kernel[(self.grid,)](*self.args, **self.options)

    def ready(self, device: torch.device) -> Callable[..., None]:
        """The same as a function of the addresses of what is `given`."""
        one = Ready(self, device)
        return one.direct or one.at


class Chain(NamedTuple):
    """Launches that follow each other: an operation of several kernels, with one plan.

    work      tensors that one launch writes for a later one; the tensors of a launch may be views of these
    launches  Triton's, or others that know what they are `given`, how to `run` and to get `ready`
    """

    work: tuple[Tensor, ...]
    launches: tuple[Any, ...]


def tensors_of(values: tuple[Any, ...]) -> Iterator[Tensor]:
    for x in values:
        if isinstance(x, Tensor):
            yield x
        elif isinstance(x, tuple):
            yield from tensors_of(x)


class Place(int):
    """In the arguments of a launch: which of the tensors it is given."""


def placed(values: Any, places: Iterator[int]) -> Any:
    """`values` with places instead of tensors."""
    if isinstance(values, Tensor):
        return Place(next(places))
    if isinstance(values, tuple):
        return getattr(values, "_make", tuple)(placed(x, places) for x in values)
    return values


def filled(values: Any, tensors: Sequence[Any]) -> Any:
    """The reverse."""
    if isinstance(values, Place):
        return tensors[values]
    if isinstance(values, tuple):
        return getattr(values, "_make", tuple)(filled(x, tensors) for x in values)
    return values


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
        self.grid, self.first = launch.grid, len(launch.tensors)
        self.rest = placed(launch.rest, itertools.count(self.first))
        self.slow = launch._replace(tensors=(), rest=())
        self.direct: Repeatable | None = None
        with torch.cuda.device(self.device):  # `run` loads the kernel where it is read
            self.compiled: Any = compiled(launch)
            if self.grid:
                self.run = self.compiled.run
                self.start = (self.compiled.function, self.compiled.packed_metadata, None, None, None)
                self.direct = past_triton(self.compiled, launch, self.device)

    def __call__(self, *tensors: Tensor | None) -> None:
        if is_hooked():
            launch = self.slow._replace(tensors=tensors[: self.first], rest=filled(self.rest, tensors))
            run_all([launch], torch.device("cuda", self.device))
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
            given = (*args[: self.first], *filled(self.rest, args))
            self.run(self.grid, 1, 1, raw_stream(self.device), *self.start, *given)


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
    count = itertools.count(len(launch.tensors))
    given = (*range(len(launch.tensors)), *placed(launch.rest, count))  # a tensor is the place of its address
    tensors = len(launch.given)
    missing = types[len(given) :]
    if len(types) < len(given) or any(kind != "constexpr" for kind, _ in leaves(missing, missing)):
        return None
    found = [(kind, value) for kind, value in leaves(types[: len(given)], given) if kind != "constexpr"]
    if any(kind not in CODES and kind[0] != "*" for kind, _ in found):
        return None
    block, offsets = bytes(8 * tensors), []
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
        struct.Struct(f"={tensors}Q"), block + bytes(8), tuple(offsets),
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


Described = tuple[tuple[Any, ...], Launch | Chain]  # empty outputs, and what fills them


def repeated(describe: Callable[..., Described], options: Any) -> Repeated:
    """Runs what `describe(options, *tensors)` returns."""

    def general(*tensors: Any) -> tuple[Any, ...]:
        return results_of(describe(options, *tensors), tensors[0].device)

    def prepare(*tensors: Any) -> Callable[..., tuple[Any, ...]] | None:
        return prepared(functools.partial(describe, options), tensors)

    return Repeated(general, prepare)


def results_of(described: Described, device: torch.device) -> tuple[Any, ...]:
    """The outputs, filled."""
    outputs, launch = described
    run_all(chain_of(launch).launches, device)
    return outputs


def prepared(
    describe: Callable[..., Described], tensors: Sequence[Tensor | None]
) -> Callable[..., tuple[Any, ...]] | None:
    """The results of `describe(*tensors)` for tensors like these, at the least cost.

    Launches take these tensors, outputs and work, or views of them; an output may be None or one of the tensors. A call
    allocates and computes addresses alone. None if there is no GPU, or if a view could be of several tensors.
    """
    device = next(x.device for x in tensors if x is not None)
    if device.type != "cuda" or runtime.interpret:
        return None
    given = [x if x is None else x.detach() for x in tensors]  # told apart, even if one tensor is given twice
    outputs, launch = describe(*given)
    chain, known = chain_of(launch), {id(x) for x in (None, *given)}
    new = [x for x in (*outputs, *chain.work) if id(x) not in known]
    every = (None, *given, *new)
    found = places_of(chain, every)
    if found is None:
        return None
    calls = [(one.ready(device), picked(at)) for one, at in zip(chain.launches, found[0], strict=True)]
    make, shifts = [allocator(x) for x in new], found[1]
    results = picked([next(i for i, x in enumerate(every) if x is y) for y in outputs])
    triton_hears = any(isinstance(one, Launch) for one in chain.launches)

    def again(*tensors: Any) -> tuple[Any, ...]:
        if triton_hears and is_hooked():
            return results_of(describe(*tensors), device)
        every = (None, *tensors, *[new() for new in make])
        at = [0 if x is None else x.data_ptr() for x in every]
        for i, shift in shifts:
            at.append(at[i] + shift)
        for launch, addresses in calls:
            launch(*addresses(at))
        return results(every)

    return again


def picked(places: list[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """A function of a sequence: what it has at these places."""
    return itemgetter(*places) if len(places) > 1 else lambda every: tuple(every[i] for i in places)


def chain_of(launch: Launch | Chain) -> Chain:
    return launch if isinstance(launch, Chain) else Chain((), (launch,))


def places_of(chain: Chain, every: Sequence[Tensor | None]) -> tuple[list[list[int]], list[tuple[int, int]]] | None:
    """Where each launch finds its tensors among `every`; None if one is a view of memory that several of these share.

    A view comes behind the last of them. For each the second result has the tensor it is of, and its bytes from there.
    """
    shifts: list[tuple[int, int]] = []

    def place(x: Tensor | None) -> int | None:
        for i, other in enumerate(every):
            if x is other:
                return i
        assert x is not None
        memory = x.untyped_storage()._cdata
        i, *others = [i for i, y in enumerate(every) if y is not None and y.untyped_storage()._cdata == memory]
        if others:
            return None
        shift = x.data_ptr() - every[i].data_ptr()  # type: ignore[union-attr]
        if not shift:
            return i
        shifts.append((i, shift))
        return len(every) + len(shifts) - 1

    places = [[place(x) for x in launch.given] for launch in chain.launches]
    return None if any(None in each for each in places) else (places, shifts)  # type: ignore[return-value]


def run_all(launches: Sequence[Any], device: torch.device) -> None:
    """In order, on `device`: Triton itself launches on whichever is current."""
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        for launch in launches:
            run(launch)


def run(launch: Any) -> None:
    launch.run()


def compiled(launch: Launch) -> Any:
    """The kernel that `run` would launch; None if it would not."""
    return launch.kernel.warmup(*launch.args, grid=(launch.grid,), **launch.options) if launch.grid else None
