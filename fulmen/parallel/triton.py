"""What ranks add to the single-device kernels, on a GPU: each reads its operands once.

leaving, entering_gradient   the state of a rank's tokens: lightning attention's own sweep and scan, states only
merge                        (o, lse) of one more block of keys: 10 bytes an element of a 16-bit o_i, where
                             torch's operations move 26
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fulmen import hardware
from fulmen.lightning import triton as fused
from fulmen.lightning import triton_split as split
from fulmen.lightning.op import LightningSpec, Residuals

TILE = 4096  # elements of o a program merges


# ------------------------------------------------------------------------------------------------ states


def leaving(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor | None) -> Tensor:
    """As `states.leaving`, of 16-bit k and v; slopes fp32 (H,), or None."""
    spec = _spec(q, k, v, slopes)
    x = Residuals(q, k, v, slopes, None, None)
    return _state("state", spec, x, fused.Tensors(k=fused.rows_of(k, spec), v=fused.rows_of(v, spec)))


def entering_gradient(q: Tensor, do: Tensor, slopes: Tensor | None, scale: float) -> Tensor:
    """As `states.entering_gradient`, of 16-bit q and do."""
    spec = _spec(q, q, do, slopes)._replace(scale=scale)
    x = Residuals(q, q, do, slopes, None, None)
    return _state("dstate", spec, x, fused.Tensors(q=fused.rows_of(q, spec), do=fused.rows_of(do, spec)))


def _spec(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor | None) -> LightningSpec:
    B, H_KV, N, D = k.shape
    return LightningSpec(
        B, q.shape[1], H_KV, N, D, v.shape[3], k.dtype, k.device, scale=1.0, has_decay=slopes is not None
    )


def _state(sweep: str, spec: LightningSpec, x: Residuals, tensors: fused.Tensors) -> Tensor:
    """Of segments, in as many programs as the GPU holds; then over segments."""
    if not spec.N:
        return x.q.new_zeros(spec.B, spec.H, spec.D, spec.E, dtype=torch.float32)
    hw = hardware.of(spec.device)
    cfg = fused.config(spec, hw)
    cut = split.segments(spec, hw, cfg, x)
    each = split.segment_states(spec, x, cut)
    total = x.q.new_empty(spec.B, spec.H, spec.D, spec.E, dtype=torch.float32)
    states = fused.States(final=each) if sweep == "state" else fused.States(dinitial=each)
    fused.run(
        [fused.sweep(spec, cfg, (sweep,), x, tensors, states, cut), split.scan(spec, x, cut, each, None, total)],
        spec.device,
    )
    return total


# ------------------------------------------------------------------------------------------------- merge


@triton.jit
def merge_kernel(
    o_ptr, lse_ptr,  # fp32 (B, H, N, E) and (B, H, N), changed in place
    o_i_ptr, lse_i_ptr,
    o_strides, lse_strides, o_i_strides, lse_i_strides,  # of B, H and N; E lies side by side
    H, N,
    E: tl.constexpr, BLOCK_E: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(N, ROWS)
    head = tl.program_id(0) // tiles
    b = (head // H).to(tl.int64)
    h = (head % H).to(tl.int64)
    row = (tl.program_id(0) % tiles * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = tl.arange(0, BLOCK_E)
    there = row < N
    lse_at = lse_ptr + b * lse_strides[0] + h * lse_strides[1] + row * lse_strides[2]
    lse_i_at = lse_i_ptr + b * lse_i_strides[0] + h * lse_i_strides[1] + row * lse_i_strides[2]
    old = tl.load(lse_at, mask=there, other=float("-inf"))
    new = tl.load(lse_i_at, mask=there, other=float("-inf"))
    most = tl.maximum(old, new)
    pivot = tl.where(most == float("-inf"), 0.0, most)  # a row that saw nothing yet
    w_old = tl.exp(old - pivot)
    w_new = tl.exp(new - pivot)
    total = w_old + w_new
    tl.debug_barrier()  # several warps read the same lse, and one of them writes it
    tl.store(lse_at, pivot + tl.log(total), mask=there)
    share = 1.0 / tl.where(total == 0.0, 1.0, total)
    inside = there[:, None] & (column < E)[None, :]
    o_at = o_ptr + b * o_strides[0] + h * o_strides[1] + row[:, None] * o_strides[2] + column[None, :]
    o_i_at = o_i_ptr + b * o_i_strides[0] + h * o_i_strides[1] + row[:, None] * o_i_strides[2] + column[None, :]
    o = tl.load(o_at, mask=inside, other=0.0) * (w_old * share)[:, None]
    o += tl.load(o_i_at, mask=inside, other=0.0).to(tl.float32) * (w_new * share)[:, None]
    tl.store(o_at, o, mask=inside)


def merge(o: Tensor, lse: Tensor, o_i: Tensor, lse_i: Tensor) -> None:
    """As `ring.merge`, of fp32 o and lse."""
    B, H, N, E = o.shape
    if o_i.stride(3) != 1:
        o_i = o_i.contiguous()
    width = triton.next_power_of_2(E)
    rows = max(1, TILE // width)
    args = (
        *(o, lse, o_i, lse_i),
        *(tuple(x.stride()[:3]) for x in (o, lse, o_i, lse_i)),
        *(H, N, E, width, rows),
    )
    fused.run([fused.Launch(merge_kernel, B * H * triton.cdiv(N, rows), args, {"num_warps": 4})], o.device)
