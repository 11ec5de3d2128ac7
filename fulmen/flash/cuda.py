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
from fulmen.boundary import allocator, empty_rows
from fulmen.dispatch import Choice, register
from fulmen.flash import cuda_sm90, cuda_small, sdpa, triton
from fulmen.flash.op import FlashSpec, Residuals, empty_lse


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


def forward(spec: FlashSpec, x: Residuals, choice: Choice | None = None) -> tuple[Tensor, Tensor | None]:
    choice = choice or chosen(spec)
    o = empty_rows(x.q, spec.H, spec.E)
    lse = empty_lse(x.q) if spec.wants_lse else None
    if lse is not None and spec.has_sinks and spec.sequences is not None:
        lse.fill_(-torch.inf)  # rows of no sequence: they have no part in the sinks' gradients
    for name in ("q", "k", "v"):
        if not readable(getattr(x, name), repeats=choice.kernel != "sm90"):
            x = x._replace(**{name: getattr(x, name).clone(memory_format=torch.contiguous_format)})
    (cuda_sm90 if choice.kernel == "sm90" else cuda_small).run(spec, choice, x, o, lse)
    return o, lse


def backward(
    spec: FlashSpec, x: Residuals, o: Tensor, lse: Tensor, do: Tensor, dlse: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    if chosen(spec).backward == "cudnn":
        return sdpa.backward(spec, x, o, lse, do, dlse, "cudnn")
    return triton.backward(spec, x, o, lse, do, dlse)


def prepare(spec: FlashSpec, x: Residuals) -> Callable[[Tensor, Tensor, Tensor], tuple[Tensor, None] | None] | None:
    """As in triton.py: the forward of calls like this one at the least cost for the host."""
    choice = chosen(spec)
    o = empty_rows(x.q, spec.H, spec.E)
    if spec.wants_lse or spec.has_sinks or spec.sequences is not None or torch.empty_like(x.q).shape != o.shape:
        return None
    if torch.empty_like(x.q).stride() != o.stride():
        return None
    if not all(readable(t, choice.kernel != "sm90") for t in x[:3]):
        return None
    empty_like = allocator(o)
    if choice.kernel == "sm90":
        again = cuda_sm90.repeat(spec, choice, x, o)
        if again is None:
            return None
        launch: Callable[..., None] = again
        rest: tuple[int, ...] = ()
    else:
        launch, rest = cuda_small.launch_of(spec, choice, cuda_small.strides(x.q, x.k, x.v, o)), (0,)

    def quick(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, None] | None:
        a, b, c = q.data_ptr(), k.data_ptr(), v.data_ptr()
        if (a | b | c) & 15:
            return None
        o = empty_like(q)
        launch(a, b, c, o.data_ptr(), *rest)
        return o, None

    return quick


register("flash", "cuda", supports=supports, forward=forward, backward=backward, prepare=prepare)
