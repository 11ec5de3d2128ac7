"""Softmax attention in CUDA C++, forward; the backward, from the same o and lse, is cuDNN's where `sdpa` has it, else
that of `triton`. policy.py chooses the kernel and its tile.

    cuda_sm90.cu    for Hopper: D/E of 64/64, 128/128, 192/128 and 256/256, every option
    cuda_merge.cu   combines what several of its blocks have of one row's keys
    cuda_small.cu   up to 512 queries and keys, D = E of 64 or 128, causal or full, from compute capability 8.0 on; on
                    Hopper up to 256 keys of queries that do not fill the GPU
    cuda_once.cu    for Hopper: up to 256 keys of any number of queries, else as cuda_small.cu

All copy 16 bytes at a time: inputs whose rows do not start at such addresses are copied first, and for the copy engine
that cuda_sm90.cu works with those that repeat (stride 0). Sources are
compiled by NVRTC at the first call that needs them (`fulmen.cuda`), in seconds, and kept on disk.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fulmen import cuda, dispatch, hardware
from fulmen.boundary import allocator
from fulmen.dispatch import Choice, register
from fulmen.flash import cuda_sm90, cuda_small, sdpa, triton
from fulmen.flash.spec import FlashSpec, Residuals, empty_outputs


def supports(spec: FlashSpec) -> str | None:
    if spec.device.type != "cuda":
        return f"needs a CUDA GPU, and q is on {spec.device}"
    if spec.dtype not in (torch.bfloat16, torch.float16):
        return f"multiplies bf16 and fp16, and q is {spec.dtype}"
    hw = hardware.of(spec.device)
    if hw.arch < 80:
        return f"needs compute capability 8.0 or later, this GPU has {hw.arch / 10}"
    if spec.scale < 0:
        return f"needs a positive scale, and it is {spec.scale}"
    if (why := (cuda_sm90 if hw.arch == 90 else cuda_small).unsupported_reason(spec, hw)) is not None:
        return why
    choice = chosen(spec)
    if spec.needs_grad and choice.backward == "triton" and (why := triton.supports(spec)) is not None:
        return f"has triton's backward, which {why}"
    if choice.kernel == "sm90":
        why = cuda.problem(cuda_sm90.variant(spec, choice), spec.device, cuda_sm90.shared_bytes(spec, choice.tile))
        if why is None and choice.splits > 1:
            why = cuda.problem(cuda_sm90.merge_variant(spec), spec.device, cuda_sm90.MERGE_BYTES)
        return why
    return cuda.problem(cuda_small.variant(spec, hw, choice), spec.device, cuda_small.shared_bytes(spec, choice))


def chosen(spec: FlashSpec) -> Choice:
    return dispatch.choose("flash", spec, "cuda")


def readable(x: Tensor, repeats: bool) -> bool:
    """Whether rows start at multiples of 16 bytes and, unless they may, do not repeat."""
    unit = 16 // x.element_size()
    return x.data_ptr() % 16 == 0 and all(
        n <= 1 or (s % unit == 0 and (repeats or s != 0)) for n, s in zip(x.shape[:3], x.stride()[:3], strict=True)
    )


def launcher(spec: FlashSpec, choice: Choice, x: Residuals, o: Tensor) -> Callable[..., None]:
    return (cuda_sm90 if choice.kernel == "sm90" else cuda_small).launcher(spec, choice, x, o)


def address(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


def forward(spec: FlashSpec, x: Residuals, choice: Choice | None = None) -> tuple[Tensor, Tensor | None]:
    choice = choice or chosen(spec)
    o, lse = empty_outputs(spec, x)
    for name in ("q", "k", "v"):
        if not readable(getattr(x, name), repeats=choice.kernel != "sm90"):
            x = x._replace(**{name: getattr(x, name).clone(memory_format=torch.contiguous_format)})
    launcher(spec, choice, x, o)(*map(address, (*x[:3], o, lse, *x[3:])))
    return o, lse


def prepare(spec: FlashSpec, x: Residuals) -> Callable[..., tuple[Tensor, Tensor | None]] | None:
    """The forward of calls with these shapes and strides at the least cost for the host."""
    choice = chosen(spec)
    if spec.has_sinks and spec.sequences is not None:  # whose lse is filled first
        return None
    if not all(readable(t, choice.kernel != "sm90") for t in x[:3]):
        return None
    o, lse = empty_outputs(spec, x)
    launch, new_o, new_lse = launcher(spec, choice, x, o), allocator(o), None if lse is None else allocator(lse)

    def plain(q: Tensor, k: Tensor, v: Tensor, *_: None) -> tuple[Tensor, None]:
        o = new_o()
        launch(q.data_ptr(), k.data_ptr(), v.data_ptr(), o.data_ptr(), 0, 0, 0, 0)
        return o, None

    if lse is None and x[3:] == (None, None, None):  # the shortest calls
        return plain

    def again(q: Tensor, k: Tensor, v: Tensor, *others: Tensor | None) -> tuple[Tensor, Tensor | None]:
        o = new_o()
        lse = None if new_lse is None else new_lse()
        launch(q.data_ptr(), k.data_ptr(), v.data_ptr(), o.data_ptr(), address(lse), *map(address, others))
        return o, lse

    return again


def backward(
    spec: FlashSpec, x: Residuals, o: Tensor, lse: Tensor, do: Tensor, dlse: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    if chosen(spec).backward == "cudnn":
        return sdpa.backward(spec, x, o, lse, do, dlse, "cudnn")
    return triton.backward(spec, x, o, lse, do, dlse)


def prepare_backward(
    spec: FlashSpec, x: Residuals, o: Tensor, lse: Tensor, do: Tensor, dlse: Tensor | None
) -> Callable[..., tuple[Tensor, Tensor, Tensor, Tensor | None]] | None:
    if chosen(spec).backward == "cudnn":
        return sdpa.prepare_backward(spec, x, o, lse, do, dlse, "cudnn")
    return triton.prepare_backward(spec, x, o, lse, do, dlse)


register(
    "flash",
    "cuda",
    supports=supports,
    forward=forward,
    backward=backward,
    prepare=prepare,
    prepare_backward=prepare_backward,
)
