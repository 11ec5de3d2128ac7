"""torch's scaled_dot_product_attention, with the implementation chosen by `policy.py` and not by torch.

The aten operators beneath it are called directly, so that o and lse come out and the backward starts from q, k, v, o,
lse and do, like that of every backend:

    cudnn      cuDNN's kernels, the fastest of the four from Hopper on
    flash      FlashAttention-2 as torch carries it
    efficient  the memory-efficient kernels, the only ones for fp32 on a GPU
    cpu        torch's flash kernel for CPUs

All support full attention and causal attention aligned top-left. A window or an alignment that comes to the same is
served, too. Their lse are brought to one form: fp32
(B, H, N_Q), as the operators of `op.py` promise it (cuDNN has (B, H, N_Q, 1), efficient a multiple of 32 rows, the CPU
(B, N_Q, H) memory). For the same reason results in another memory order than their input's are copied: gradients on
the CPU and everything of `efficient` where q, k, v are not (B, N, H, D) in memory. On a GPU inputs whose rows do not
start at multiples of 16 bytes, or that repeat rows by a stride of 0, are copied: the kernels load 16 bytes at a time.

On a GPU dq is summed in no fixed order, so its last bits change from run to run; `torch.use_deterministic_algorithms`
helps `flash` and `efficient`, not `cudnn`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fulmen import dispatch, hardware
from fulmen.boundary import empty_rows, rows_aligned
from fulmen.dispatch import register
from fulmen.flash.spec import FlashSpec, Residuals

aten = torch.ops.aten

ON_CUDA = ("cudnn", "flash", "efficient")  # fastest first
NAMES = (*ON_CUDA, "cpu")

LSE_ALIGNMENT = 32  # rows of lse the memory-efficient kernels read at a time
MAX_GRID = 65_535
MIN_CUDNN = 91_501  # before, wrong where N is no multiple of 128


# ---------------------------------------------------------------------------------------------- supports


def is_causal(spec: FlashSpec) -> bool | None:
    """The argument `is_causal` that says this call's mask; None: SDPA cannot say it."""
    first = 0 if spec.top_left else spec.N_KV - spec.N_Q  # the first query's position
    if spec.left is not None and spec.left < first + spec.N_Q - 1:
        return None
    if spec.right is None or spec.right >= spec.N_KV - 1 - first:
        return False
    return True if spec.right == 0 and first == 0 else None


def supports(spec: FlashSpec) -> str | None:
    if (why := unsupported_options(spec)) is not None:
        return why
    hw = hardware.of(spec.device)
    if spec.device.type == "cpu":
        return unsupported_reason(spec, hw, "cpu")
    reasons = {name: unsupported_reason(spec, hw, name) for name in ON_CUDA}
    if None in reasons.values():
        return None
    return "; ".join(f"{name}: {reason}" for name, reason in reasons.items())


def unsupported_options(spec: FlashSpec) -> str | None:
    """Why none of the implementations can serve a call, whatever the hardware."""
    if spec.device.type not in ("cpu", "cuda"):
        return f"torch's SDPA has these operators for CPU and CUDA, and q is on {spec.device.type}"
    if spec.has_kv_lengths:
        return "SDPA takes no lengths of a cache (kv_lengths): it would attend to all of the capacity"
    if spec.sequences is not None:
        return "SDPA takes no packed sequences (cu_seqlens)"
    if spec.has_sinks:
        return "SDPA has no sinks"
    if spec.softcap is not None:
        return "SDPA has no softcap"
    if spec.with_lse and spec.needs_grad:
        return "SDPA's backward has no gradient of lse"
    if spec.scale < 0:
        return "SDPA's kernels mask and take the maximum before they scale, so scale must be positive"
    if 0 in (spec.B, spec.H, spec.N_Q, spec.N_KV):
        return "SDPA's kernels refuse empty tensors"
    if is_causal(spec) is None:
        if spec.left is None and spec.right == 0:
            return (
                "SDPA's is_causal counts from the first query and key, "
                f"and this call from the last: N_Q={spec.N_Q}, N_KV={spec.N_KV}"
            )
        return "SDPA has no window"
    return None


def unsupported_reason(spec: FlashSpec, hw: hardware.Hardware, implementation: str) -> str | None:
    """Why one implementation cannot serve a call whose options SDPA has."""
    D, E = spec.D, spec.E
    dtype, half = str(spec.dtype).removeprefix("torch."), spec.dtype in (torch.bfloat16, torch.float16)
    if implementation == "cpu":
        if D != E:
            return f"torch's CPU kernel needs E = D, here D={D}, E={E}"
        if half and spec.group > 1 and spec.needs_grad:
            return f"torch's CPU kernel adds the gradients of heads that share k and v in {dtype}"
        return None
    if not (half or (spec.dtype == torch.float32 and implementation == "efficient")):
        return f"does not compute in {dtype}"
    if max(spec.B, spec.H) > MAX_GRID:
        return f"takes at most {MAX_GRID} batches and heads, here B={spec.B}, H={spec.H}"
    if D % 8 or E % 8:
        return f"needs head dims that are multiples of 8, here D={D}, E={E}"
    if implementation == "cudnn":
        return _cudnn_reason(spec, hw)
    if implementation == "flash":
        return _flash_reason(spec, hw.arch)
    if spec.H != spec.H_KV:
        return "would need k and v expanded to q's heads"
    if hw.arch < 80 and spec.dtype == torch.bfloat16:
        return f"needs compute capability 8.0 or later for bf16, this GPU has {hw.arch / 10}"
    return None


def _cudnn_reason(spec: FlashSpec, hw: hardware.Hardware) -> str | None:
    D, E, arch = spec.D, spec.E, hw.arch
    if arch < 90:
        return f"is taken from compute capability 9.0 on, this GPU has {arch / 10}"
    if spec.deterministic:
        return "adds dq up in no fixed order, and torch.use_deterministic_algorithms is on"
    if hw.cudnn < MIN_CUDNN:
        return f"needs cuDNN 9.15.1 or later, here {hw.cudnn}"
    if max(D, E) > 128 and not (arch == 90 and (D == E or (D, E) == (192, 128))):
        return f"needs head dims up to 128 (on Hopper D = E up to 256, or D=192 with E=128), here D={D}, E={E}"
    if spec.N_KV == 1:
        return "needs more than one key"
    if max(spec.H * spec.N_Q, spec.H_KV * spec.N_KV) * spec.B * max(D, E) >= 2**31:
        return "has 32-bit strides, and a tensor has 2^31 elements or more"
    return None


def _flash_reason(spec: FlashSpec, arch: int) -> str | None:
    if arch < 80:
        return f"needs compute capability 8.0 or later, this GPU has {arch / 10}"
    if spec.D != spec.E:
        return f"needs E = D, here D={spec.D}, E={spec.E}"
    if is_causal(spec) and spec.N_Q != spec.N_KV:
        return f"aligns causal attention to the last key, here N_Q={spec.N_Q}, N_KV={spec.N_KV}"
    if spec.needs_grad and 192 < spec.D <= 224 and (86 <= arch <= 89 or arch >= 120):
        return f"lacks a backward for D={spec.D} on this GPU's shared memory"
    return None


def chosen(spec: FlashSpec) -> str:
    """Which of the four serves `spec`: "cudnn", "flash", "efficient" or "cpu"."""
    name = dispatch.choose("flash", spec, "sdpa").kernel
    if name not in NAMES:
        raise NotImplementedError(supports(spec))
    return name


# ------------------------------------------------------------------------------------------ memory order


def ordered_like(x: Tensor, y: Tensor) -> Tensor:
    """y, in the memory order of x's rows that `op.py` promises: itself, or a copy."""
    order = (0, 1, 2) if x.is_contiguous() else sorted(range(3), key=x.stride, reverse=True)
    step, good = y.shape[3], y.stride(3) == 1
    for dim in reversed(order):
        good &= y.shape[dim] == 1 or y.stride(dim) == step
        step *= y.shape[dim]
    return y if good else empty_rows(x, y.shape[1], y.shape[3]).copy_(y)


def loadable(x: Tensor) -> Tensor:
    """x, or a copy if its rows do not start at multiples of 16 bytes or share memory."""
    return x if rows_aligned(x) else x.clone(memory_format=torch.contiguous_format)


def rows_first(x: Tensor) -> Tensor:
    """x in (B, N, H, D) memory, the only order the memory-efficient backward reads o and do in."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


@functools.lru_cache
def no_dropout(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The random state the backwards ask for and, without dropout, do not read."""
    return torch.zeros(2, dtype=dtype, device=device), torch.zeros((), dtype=dtype, device=device)


# --------------------------------------------------------------------------------------------- the calls


def forward(spec: FlashSpec, x: Residuals, implementation: str | None = None) -> tuple[Tensor, Tensor | None]:
    which, causal, q = implementation or chosen(spec), bool(is_causal(spec)), x.q
    wants_lse = spec.wants_lse
    if which == "cpu":
        o, lse = aten._scaled_dot_product_flash_attention_for_cpu.default(q, x.k, x.v, 0.0, causal, scale=spec.scale)
        return ordered_like(q, o), lse.contiguous() if wants_lse else None
    q, k, v = loadable(q), loadable(x.k), loadable(x.v)
    if which == "cudnn":
        o, lse, *_ = aten._scaled_dot_product_cudnn_attention.default(
            q, k, v, None, wants_lse, 0.0, causal, False, scale=spec.scale
        )
    elif which == "flash":
        o, lse, *_ = aten._scaled_dot_product_flash_attention.default(q, k, v, 0.0, causal, False, scale=spec.scale)
    elif which == "efficient":
        o, lse, *_ = aten._scaled_dot_product_efficient_attention.default(
            q, k, v, None, wants_lse, 0.0, causal, scale=spec.scale
        )
    else:
        raise ValueError(f"implementation={which!r}: must be one of {', '.join(NAMES)}")
    o = ordered_like(x.q, o)
    return o, lse.view(spec.B, spec.H, -1)[:, :, : spec.N_Q].contiguous() if wants_lse else None


def backward(
    spec: FlashSpec,
    x: Residuals,
    o: Tensor,
    lse: Tensor,
    do: Tensor,
    dlse: Tensor | None,
    implementation: str | None = None,
) -> tuple[Tensor, Tensor, Tensor, None]:
    assert dlse is None, "supports() refuses calls whose lse has a gradient"
    which, causal, scale = implementation or chosen(spec), bool(is_causal(spec)), spec.scale
    if which == "cpu":
        dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward.default(
            do, x.q, x.k, x.v, o, lse, 0.0, causal, scale=scale
        )
        return ordered_like(x.q, dq), ordered_like(x.k, dk), ordered_like(x.v, dv), None
    q, k, v, do = loadable(x.q), loadable(x.k), loadable(x.v), loadable(do)
    if which == "cudnn":
        seed, offset = no_dropout(q.device, torch.int64)
        o, do = ordered_like(q, o), ordered_like(q, do)  # torch keeps its graph by the strides of q, k, v
        dq, dk, dv = aten._scaled_dot_product_cudnn_attention_backward.default(
            do, q, k, v, o, lse[..., None], seed, offset, None, None, None, spec.N_Q, spec.N_KV, 0.0, causal,
            scale=scale,
        )  # fmt: skip
    elif which == "flash":
        seed, offset = no_dropout(q.device, torch.uint64)
        dq, dk, dv = aten._scaled_dot_product_flash_attention_backward.default(
            do, q, k, v, o, lse, None, None, spec.N_Q, spec.N_KV, 0.0, causal, seed, offset, scale=scale
        )
    elif which == "efficient":
        seed, offset = no_dropout(q.device, torch.int64)
        lse = torch.nn.functional.pad(lse, (0, -spec.N_Q % LSE_ALIGNMENT), value=math.inf)  # exp(s - inf) = 0
        dq, dk, dv, _ = aten._scaled_dot_product_efficient_attention_backward.default(
            rows_first(do), q, k, v, None, rows_first(o), lse, seed, offset, 0.0, [True, True, True, False], causal,
            scale=scale,
        )  # fmt: skip
    else:
        raise ValueError(f"implementation={which!r}: must be one of {', '.join(NAMES)}")
    return ordered_like(x.q, dq), ordered_like(x.k, dk), ordered_like(x.v, dv), None


def prepare_backward(
    spec: FlashSpec,
    x: Residuals,
    o: Tensor,
    lse: Tensor,
    do: Tensor,
    dlse: Tensor | None,
    implementation: str | None = None,
) -> Callable[..., tuple[Tensor, Tensor, Tensor, None]] | None:
    """cuDNN's backward of calls with these shapes and strides at the least cost for the host."""
    which = implementation or chosen(spec)
    if which != "cudnn" or dlse is not None or any(loadable(t) is not t for t in (*x[:3], do)):
        return None
    if ordered_like(x.q, o) is not o or ordered_like(x.q, do) is not do:
        return None
    run, causal = aten._scaled_dot_product_cudnn_attention_backward.default, bool(is_causal(spec))
    seed, offset = no_dropout(x.q.device, torch.int64)
    good = [empty_rows(t, t.shape[1], t.shape[3]).stride() for t in x[:3]]

    def again(
        q: Tensor, k: Tensor, v: Tensor, _s: Any, _q: Any, _k: Any, o: Tensor, lse: Tensor, do: Tensor, _l: Any
    ) -> tuple[Tensor, Tensor, Tensor, None]:
        dq, dk, dv = run(
            do, q, k, v, o, lse.unsqueeze(-1), seed, offset, None, None, None, spec.N_Q, spec.N_KV, 0.0, causal,
            scale=spec.scale,
        )  # fmt: skip
        if [dq.stride(), dk.stride(), dv.stride()] != good:
            dq, dk, dv = ordered_like(q, dq), ordered_like(k, dk), ordered_like(v, dv)
        return dq, dk, dv, None

    return again


register("flash", "sdpa", supports=supports, forward=forward, backward=backward, prepare_backward=prepare_backward)
