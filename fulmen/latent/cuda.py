"""Latent attention in CUDA C++, for Hopper: D = 576, value_dim = 512, bf16 and fp16. kernels/ has the source.

Rows of q and kv that do not start at multiples of 16 bytes, or that repeat, are copied first. NVRTC compiles the source
at the first call (`fulmen.cuda`), in seconds, and the result is kept on disk.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fulmen import cuda, dispatch, hardware
from fulmen.boundary import empty_rows, no_gradient
from fulmen.dispatch import Choice, register
from fulmen.flash.kernels import combine
from fulmen.latent.kernels import latent
from fulmen.latent.spec import LatentSpec, Residuals
from fulmen.plans import allocator


def supports(spec: LatentSpec) -> str | None:
    if spec.device.type != "cuda":
        return f"needs a CUDA GPU, and q is on {spec.device}"
    if spec.dtype not in (torch.bfloat16, torch.float16):
        return f"multiplies bf16 and fp16, and q is {spec.dtype}"
    hw = hardware.of(spec.device)
    if hw.arch != 90:
        return f"needs compute capability 9.0, this GPU has {hw.arch / 10}"
    if spec.scale < 0:
        return f"needs a positive scale, and it is {spec.scale}"
    if (why := latent.unsupported_reason(spec)) is not None:
        return why
    choice = chosen(spec)
    why = cuda.problem(latent.variant(spec, choice), spec.device, latent.SHARED_BYTES)
    if why is None and choice.splits > 1:
        why = cuda.problem(
            combine.variant(latent.combined_spec(spec), choice.splits), spec.device, combine.SHARED_BYTES
        )
    return why


def chosen(spec: LatentSpec) -> Choice:
    return dispatch.choose("latent", spec, "cuda")


def readable(x: Tensor) -> bool:
    """Whether rows start at multiples of 16 bytes and do not repeat."""
    unit = 16 // x.element_size()
    return x.data_ptr() % 16 == 0 and all(
        n <= 1 or (s % unit == 0 and s != 0) for n, s in zip(x.shape[:-1], x.stride()[:-1], strict=True)
    )


def address(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


def forward(spec: LatentSpec, x: Residuals, choice: Choice | None = None) -> Tensor:
    o = empty_rows(x.q, spec.H, spec.E)
    if not spec.N_KV:
        return o.zero_()
    for name in ("q", "kv"):
        if not readable(getattr(x, name)):
            x = x._replace(**{name: getattr(x, name).clone(memory_format=torch.contiguous_format)})
    latent.launcher(spec, choice or chosen(spec), x, o)(*map(address, (*x, o)))
    return o


def prepare(spec: LatentSpec, x: Residuals) -> Callable[..., Tensor] | None:
    """The forward of calls with these shapes and strides at the least cost for the host."""
    if not spec.N_KV or not readable(x.q) or not readable(x.kv):
        return None
    o = empty_rows(x.q, spec.H, spec.E)
    launch, new_o = latent.launcher(spec, chosen(spec), x, o), allocator(o)

    def again(q: Tensor, kv: Tensor, lengths: Tensor | None, table: Tensor | None) -> Tensor:
        o = new_o()
        launch(q.data_ptr(), kv.data_ptr(), address(lengths), address(table), o.data_ptr())
        return o

    return again


register(
    "latent",
    "cuda",
    supports=supports,
    forward=forward,
    backward=no_gradient("latent_attention"),
    prepare=prepare,
)
