"""Softmax attention in CUDA C++.

policy.py chooses the kernel and its tile; kernels/ has the sources and their launchers. The backward, from the same o
and lse, is our own where policy.py says so, else cuDNN's where `sdpa` has it, else that of `triton`.

    sm90          for Hopper: D/E of 64/64, 128/128, 192/128 and 256/256, every option, also over a cache; `combine`
                  follows where keys are split
    small         up to 512 queries and keys, D = E of 64 or 128, causal or full, from compute capability 8.0 on; on
                  Hopper up to 256 keys of queries that do not fill the GPU
    single_tile   for Hopper: up to 256 keys of any number of queries, else as `small`
    backward      for Hopper, every option: D = E of 64 or 128; in backward_wide.cu D = E of 256, and D 192 with E 128

All copy 16 bytes at a time: inputs whose rows do not start at such addresses are copied first, and for TMA, which sm90
loads with, those that repeat (stride 0). A cache is never copied: such a call is refused.

NVRTC compiles a source at the first call that needs it (`fulmen.cuda`), in seconds, and the result is kept on disk.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fulmen import cuda, dispatch, hardware
from fulmen.boundary import empty_rows, rows_aligned
from fulmen.cuda.launch import address
from fulmen.dispatch import Choice, register
from fulmen.flash import sdpa, triton
from fulmen.flash.kernels import backward as backward_kernel
from fulmen.flash.kernels import combine, single_tile, sm90, small
from fulmen.flash.spec import FlashSpec, Residuals, empty_outputs, heads_as_queries
from fulmen.plans import allocator

KERNELS: dict[str, Any] = {"sm90": sm90, "small": small, "single_tile": single_tile}


def supports(spec: FlashSpec) -> str | None:
    if spec.device.type != "cuda":
        return f"needs a CUDA GPU, and the device is {spec.device}"
    if spec.dtype not in (torch.bfloat16, torch.float16):
        return f"multiplies bf16 and fp16, and q is {spec.dtype}"
    hw = hardware.of(spec.device)
    if hw.arch < 80:
        return f"needs compute capability 8.0 or later, this GPU has {hw.arch / 10}"
    if spec.scale < 0:
        return f"needs a positive scale, and it is {spec.scale}"
    if (why := (sm90 if hw.arch == 90 else small).unsupported_reason(spec, hw)) is not None:
        return why
    if not spec.aligned:
        return "needs a cache whose rows begin at multiples of 16 bytes and do not repeat"
    choice = chosen(spec)
    if spec.needs_grad and choice.backward == "triton" and (why := triton.supports(spec)) is not None:
        return f"has triton's backward, which {why}"
    kernel, call = KERNELS[choice.kernel], heads_as_queries(spec)
    why = cuda.problem(kernel.variant(call, hw, choice), spec.device, kernel.shared_bytes(call, choice))
    if why is None and choice.splits > 1:
        why = cuda.problem(combine.variant(call, choice.splits), spec.device, combine.SHARED_BYTES)
    if why is None and choice.backward == "cuda" and spec.needs_grad:
        why = backward_problem(spec, choice)
    return why


def backward_problem(spec: FlashSpec, choice: Choice) -> str | None:
    tile = choice.backward_tile
    shared = (backward_kernel.PROLOGUE_SHARED, backward_kernel.shared_bytes(spec, tile))
    for variant, size in zip(backward_kernel.variants(spec, tile), shared, strict=True):
        if (why := cuda.problem(variant, spec.device, size)) is not None:
            return why
    return backward_kernel.unsupported_reason(spec)


def chosen(spec: FlashSpec) -> Choice:
    return dispatch.choose("flash", spec, "cuda")


def launcher(spec: FlashSpec, choice: Choice, x: Residuals, o: Tensor) -> Callable[..., None]:
    call = heads_as_queries(spec)
    if call is not spec:
        x, o = x._replace(q=x.q[:, :, 0].unflatten(1, (call.H, -1))), o[:, :, 0].unflatten(1, (call.H, -1))
    launch: Callable[..., None] = KERNELS[choice.kernel].launcher(call, choice, x, o)
    return launch


def forward(spec: FlashSpec, x: Residuals, choice: Choice | None = None) -> tuple[Tensor, Tensor | None]:
    choice = choice or chosen(spec)
    o, lse = empty_outputs(spec, x)
    for name in ("q", "k", "v"):
        if not rows_aligned(getattr(x, name), KERNELS[choice.kernel].TAKES_REPEATS):
            x = x._replace(**{name: getattr(x, name).clone(memory_format=torch.contiguous_format)})
    others = x[3:] if spec.has_kv_lengths else x[3:6]
    launcher(spec, choice, x, o)(*map(address, (*x[:3], o, lse, *others)))
    return o, lse


def prepare(spec: FlashSpec, x: Residuals) -> Callable[..., tuple[Tensor, Tensor | None]] | None:
    """The forward of calls with these shapes and strides at the least cost for the host."""
    choice = chosen(spec)
    if spec.has_sinks and spec.sequences is not None:  # whose lse is filled first
        return None
    if not all(rows_aligned(t, KERNELS[choice.kernel].TAKES_REPEATS) for t in x[:3]):
        return None
    o, lse = empty_outputs(spec, x)
    launch, new_o, new_lse = launcher(spec, choice, x, o), allocator(o), None if lse is None else allocator(lse)

    def plain(q: Tensor, k: Tensor, v: Tensor, _s: None, _q: None, _k: None) -> tuple[Tensor, None]:
        o = new_o()
        launch(q.data_ptr(), k.data_ptr(), v.data_ptr(), o.data_ptr(), 0, 0, 0, 0)
        return o, None

    if lse is None and all(t is None for t in x[3:]):  # the shortest calls
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
    choice = chosen(spec)
    if choice.backward == "cudnn":
        return sdpa.backward(spec, x, o, lse, do, dlse, "cudnn")
    if choice.backward == "triton":
        return triton.backward(spec, x, o, lse, do, dlse)
    for name in ("q", "k", "v"):
        if not rows_aligned(getattr(x, name)):
            x = x._replace(**{name: getattr(x, name).clone(memory_format=torch.contiguous_format)})
    o, do = (t if rows_aligned(t) else t.clone(memory_format=torch.contiguous_format) for t in (o, do))
    dq, dk, dv = empty_gradients(spec, x)
    work = backward_kernel.empty_workspace(spec, choice.backward_tile)
    launch = backward_kernel.launcher(spec, choice.backward_tile, x, o, do, dq, dk, dv)
    launch(tuple(map(address, (*x[:6], o, lse, do, dlse, work, dq, dk, dv))))
    if x.sinks is None:
        return dq, dk, dv, None
    return dq, dk, dv, backward_kernel.sinks_gradient(spec, choice.backward_tile, x.sinks, work)


def empty_gradients(spec: FlashSpec, x: Residuals) -> tuple[Tensor, Tensor, Tensor]:
    return empty_rows(x.q, spec.H, spec.D), empty_rows(x.k, spec.H_KV, spec.D), empty_rows(x.v, spec.H_KV, spec.E)


def prepare_backward(
    spec: FlashSpec, x: Residuals, o: Tensor, lse: Tensor, do: Tensor, dlse: Tensor | None
) -> Callable[..., tuple[Tensor, Tensor, Tensor, Tensor | None]] | None:
    """The backward of calls with these shapes and strides at the least cost for the host."""
    choice = chosen(spec)
    if choice.backward == "cudnn":
        return sdpa.prepare_backward(spec, x, o, lse, do, dlse, "cudnn")
    if choice.backward == "triton":
        return triton.prepare_backward(spec, x, o, lse, do, dlse)
    if not all(rows_aligned(t) for t in (*x[:3], o, do)):
        return None
    results, tile = empty_gradients(spec, x), choice.backward_tile
    launch = backward_kernel.launcher(spec, tile, x, o, do, *results)
    made = (backward_kernel.empty_workspace(spec, tile), *results)
    new_work, new_dq, new_dk, new_dv = (allocator(t) for t in made)

    def again(
        q: Tensor, k: Tensor, v: Tensor, sinks: Any, cu_q: Any, cu_k: Any, o: Tensor, lse: Tensor, do: Tensor, dlse: Any
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        work, dq, dk, dv = new_work(), new_dq(), new_dk(), new_dv()
        launch((
            q.data_ptr(), k.data_ptr(), v.data_ptr(), address(sinks), address(cu_q), address(cu_k), o.data_ptr(),
            lse.data_ptr(), do.data_ptr(), address(dlse), work.data_ptr(), dq.data_ptr(), dk.data_ptr(), dv.data_ptr(),
        ))  # fmt: skip
        dsinks = None if sinks is None else backward_kernel.sinks_gradient(spec, tile, sinks, work)
        return dq, dk, dv, dsinks

    return again


register(
    "flash",
    "cuda",
    supports=supports,
    forward=forward,
    backward=backward,
    prepare=prepare,
    prepare_backward=prepare_backward,
)
