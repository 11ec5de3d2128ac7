"""Latent attention in CUDA C++, for Hopper: D = 576, value_dim = 512, bf16 and fp16. kernels/ has the source.

Rows start at multiples of 16 bytes and do not repeat: such a q is copied first, such a kv refused. NVRTC compiles the
source at the first call (`fulmen.cuda`), in seconds, and the result is kept on disk.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fulmen import cuda, dispatch, hardware
from fulmen.boundary import empty_rows, no_gradient, rows_aligned
from fulmen.cuda.launch import address
from fulmen.dispatch import Choice, register
from fulmen.flash.kernels import combine
from fulmen.latent.kernels import latent
from fulmen.latent.spec import LatentSpec, Residuals
from fulmen.plans import allocator


def supports(spec: LatentSpec) -> str | None:
    if spec.device.type != "cuda":
        return f"needs a CUDA GPU, and the device is {spec.device}"
    if spec.dtype not in (torch.bfloat16, torch.float16):
        return f"multiplies bf16 and fp16, and q is {spec.dtype}"
    hw = hardware.of(spec.device)
    if hw.arch != 90:
        return f"needs compute capability 9.0, this GPU has {hw.arch / 10}"
    if spec.scale < 0:
        return f"needs a positive scale, and it is {spec.scale}"
    if not spec.aligned:
        return "needs rows of kv that begin at multiples of 16 bytes and do not repeat"
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


def forward(spec: LatentSpec, x: Residuals, choice: Choice | None = None) -> Tensor:
    o = empty_rows(x.q, spec.H, spec.E)
    if not spec.N_KV:
        return o.zero_()
    if not rows_aligned(x.q):
        x = x._replace(q=x.q.clone(memory_format=torch.contiguous_format))
    latent.launcher(spec, choice or chosen(spec), x, o)(*map(address, (*x, o)))
    return o


def prepare(spec: LatentSpec, x: Residuals) -> Callable[..., Tensor] | None:
    """The forward of calls with these shapes and strides at the least cost for the host."""
    if not spec.N_KV or not rows_aligned(x.q):
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
