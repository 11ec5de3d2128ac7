"""Launching Triton kernels: what a call costs on the host, and the same launches for a GPU that is not here.

Triton's own launch looks at every argument anew, which takes longer than a small kernel runs. A `Ready` launch
remembers the compiled kernel and all arguments but the tensors: it serves calls whose shapes, strides and alignment
are those it was made with, which is for its owner to see to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor


class Launch(NamedTuple):
    """A kernel call that has not happened yet, so that it can also be compiled for a GPU that is not here.

    The kernel takes the tensors first, then the rest. `blocks`: for each tensor that the kernel reads through a
    descriptor, its index and the rows of a block.
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


def describe(x: Tensor, rows: int) -> TensorDescriptor:
    """Blocks of `rows` rows of a (B, heads, N, size) tensor, whole rows padded to a power of two."""
    strides = [s if n > 1 else max(x.shape[3], 8) for n, s in zip(x.shape[:3], x.stride()[:3], strict=True)]
    width = max(16, triton.next_power_of_2(x.shape[3]))
    return TensorDescriptor(x, list(x.shape), [*strides, 1], [1, 1, rows, width])


def describable(*tensors: Tensor) -> bool:
    """Whether the hardware's tensor copy can read these: whole 16-byte units, nothing empty or repeated."""
    for x in tensors:
        unit = 16 // x.element_size()
        if x.data_ptr() % 16 or x.shape[3] % unit or not x.numel():
            return False
        if any(n > 1 and (s % unit or s == 0) for n, s in zip(x.shape[:3], x.stride()[:3], strict=True)):
            return False
    return True


def aligned(tensors: tuple[Tensor | None, ...]) -> bool:
    """Whether all begin at a multiple of 16 bytes, which Triton compiles faster code for."""
    address = 0
    for x in tensors:
        if x is not None:
            address |= x.data_ptr()
    return address % 16 == 0


class Ready:
    """A launch that was made once and can be repeated with other tensors."""

    def __init__(self, launch: Launch, device: torch.device) -> None:
        self.launch = launch._replace(tensors=())
        self.device = torch.cuda.current_device() if device.index is None else device.index
        self.described = {i: describe(launch.tensors[i], rows).__dict__ for i, rows in launch.blocks.items()}  # type: ignore[arg-type]
        self.compiled: Any = None

    def __call__(self, *tensors: Tensor | None) -> None:
        launch = self.launch
        if not launch.grid:
            return
        args: Any = tensors
        if self.described:
            args = list(tensors)
            for i, facts in self.described.items():
                descriptor = TensorDescriptor.__new__(TensorDescriptor)  # checked when this was made ready
                descriptor.__dict__.update(facts, base=tensors[i])
                args[i] = descriptor
        if torch.cuda.current_device() != self.device:  # Triton launches on whichever device is current
            with torch.cuda.device(self.device):
                self._run(launch, args)
        else:
            self._run(launch, args)

    def _run(self, launch: Launch, args: Any) -> None:
        runtime = triton.knobs.runtime
        if self.compiled is None or runtime.launch_enter_hook is not None or runtime.launch_exit_hook is not None:
            self.compiled = launch.kernel[(launch.grid,)](*args, *launch.rest, **launch.options)
            return
        compiled = self.compiled
        stream = torch._C._cuda_getCurrentRawStream(self.device)
        compiled.run(
            launch.grid, 1, 1, stream, compiled.function, compiled.packed_metadata, None, None, None,
            *args, *launch.rest,
        )  # fmt: skip


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
    if device.type != "cuda":  # Triton's interpreter
        for launch in make():
            run(launch)
        return
    if not all(aligned(given) for given in tensors):  # Triton compiles for each pattern of alignment
        with torch.cuda.device(device):
            for launch in make():
                run(launch)
        return
    ready = _ready.get(key)
    if ready is None:
        if len(_ready) >= MAX_READY:
            _ready.clear()
        ready = _ready[key] = [Ready(launch, device) for launch in make()]
    for call, given in zip(ready, tensors, strict=True):
        call(*given)


def run(launch: Launch) -> None:
    """Through Triton's own launch."""
    if launch.grid:
        launch.kernel[(launch.grid,)](*launch.args, **launch.options)
