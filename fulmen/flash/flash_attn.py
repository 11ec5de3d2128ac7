"""The flash-attn package (FlashAttention-2), where it is installed: for comparison, and for what SDPA cannot say.

Its kernels take (B, N, H, D), which here are transposed views, and -1 where a window has no limit; their causal and
window masks count from the last query and key, as ours do by default. Inputs whose rows do not start at multiples of 16
bytes, or that repeat rows by a stride of 0, are copied. The backward is asked for its deterministic form.
"""

from __future__ import annotations

import torch
from flash_attn import flash_attn_interface as package  # type: ignore[import-not-found, unused-ignore]
from torch import Tensor

from fulmen import hardware
from fulmen.boundary import empty_rows
from fulmen.dispatch import register
from fulmen.flash.sdpa import MAX_GRID, loadable, ordered_like
from fulmen.flash.spec import FlashSpec, Residuals

for name in ("_flash_attn_forward", "_flash_attn_backward"):
    if not hasattr(package, name):
        raise ImportError(f"flash_attn.flash_attn_interface has no {name}, version 2.7 or later has")


def supports(spec: FlashSpec) -> str | None:
    if spec.device.type != "cuda":
        return f"flash-attn needs a CUDA GPU, and the device is {spec.device.type}"
    arch = hardware.of(spec.device).arch
    if arch < 80:
        return f"flash-attn needs compute capability 8.0 or later, this GPU has {arch / 10}"
    if spec.dtype not in (torch.bfloat16, torch.float16):
        return f"flash-attn computes in bf16 and fp16, and q is {str(spec.dtype).removeprefix('torch.')}"
    if spec.D != spec.E:
        return f"flash-attn needs E = D, here D={spec.D}, E={spec.E}"
    if spec.D % 8:
        return f"flash-attn needs a head dim that is a multiple of 8, here D={spec.D}"
    if spec.has_sinks:
        return "flash-attn has no sinks"
    if spec.has_kv_lengths:
        return "flash-attn's kernels over a cache (kv_lengths) are not called here: cuda and triton serve it"
    if spec.sequences is not None:
        return "flash-attn needs the longest packed sequence on the host, which would synchronise the GPU"
    if spec.with_lse and spec.needs_grad:
        return "flash-attn has no gradient of lse"
    if spec.scale < 0:
        return "flash-attn takes a row's maximum before it scales, so scale must be positive"
    if 0 in (spec.B, spec.H, spec.N_Q, spec.N_KV):
        return "flash-attn is not asked about empty tensors"
    if max(spec.B, spec.H) > MAX_GRID:
        return f"flash-attn takes at most {MAX_GRID} batches and heads, here B={spec.B}, H={spec.H}"
    if spec.top_left:
        return f"flash-attn counts from the last key, and this call from the first: N_Q={spec.N_Q}, N_KV={spec.N_KV}"
    if spec.N_Q > spec.N_KV and (spec.left, spec.right) != (None, None):
        return f"flash-attn masks otherwise where queries stand before the first key: N_Q={spec.N_Q}, N_KV={spec.N_KV}"
    return None


def mask(spec: FlashSpec) -> tuple[bool, int, int, float]:
    """The package's arguments causal, window_size_left, window_size_right and softcap."""
    left, right = (-1 if side is None else side for side in (spec.left, spec.right))
    return spec.right == 0, left, right, 0.0 if spec.softcap is None else spec.softcap


def as_bnhd(x: Tensor) -> Tensor:
    return loadable(x).transpose(1, 2)


def forward(spec: FlashSpec, x: Residuals) -> tuple[Tensor, Tensor]:
    q, k, v = as_bnhd(x.q), as_bnhd(x.k), as_bnhd(x.v)
    o, lse, *_ = package._flash_attn_forward(q, k, v, 0.0, spec.scale, *mask(spec), None, False)
    return ordered_like(x.q, o.transpose(1, 2)), lse[:, :, : spec.N_Q].contiguous()


def backward(
    spec: FlashSpec, x: Residuals, o: Tensor, lse: Tensor, do: Tensor, dlse: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, None]:
    assert dlse is None, "supports() refuses calls whose lse has a gradient"
    dq, dk, dv = (empty_rows(t, t.shape[1], t.shape[3]) for t in (x.q, x.k, x.v))
    package._flash_attn_backward(
        as_bnhd(do), as_bnhd(x.q), as_bnhd(x.k), as_bnhd(x.v), as_bnhd(o), lse,
        dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2), 0.0, spec.scale, *mask(spec), None, True,
    )  # fmt: skip
    return dq, dk, dv, None


register("flash", "flash_attn", supports=supports, forward=forward, backward=backward)
