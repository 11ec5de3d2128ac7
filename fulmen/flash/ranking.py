"""Which backend of softmax attention is the fastest, as measured: what "auto" goes by.

Times are medians in ms, forward / backward, of one run on an H200 (torch 2.11, cuDNN 9.19, Triton 3.6, bf16; fp16 is
taken to be the same), from results/h200/flash.jsonl: triton, then sdpa with the implementation it pins. A row holds for
its head dims and from its number of keys on, up to the next row's. Where nothing was measured torch comes first.
"""

from __future__ import annotations

from typing import NamedTuple

from fulmen import hardware
from fulmen.flash.op import FlashSpec

SMALL = 8e9  # multiplications and additions; below, the host takes longer: 14 us a call with triton, 35 with sdpa


class Row(NamedTuple):
    arch: int
    D: int  # up to here
    keys: int  # from here on
    causal: bool
    grad: bool
    first: str


ROWS = [
    #   arch  D keys causal grad   first         triton          sdpa
    Row(90, 64, 0, True, False, "sdpa"),  # N 512: 0.030, 0.026 (cuDNN); 2048: 0.053, 0.050; 4096: 0.653, 0.634
    Row(90, 64, 0, True, True, "sdpa"),  # 2048: 0.053 / 0.145, 0.050 / 0.140; 4096: 0.653 / 1.98, 0.634 / 1.77
    Row(90, 64, 0, False, False, "sdpa"),  # 512: 0.034, 0.029; 2048: 0.067, 0.063
    Row(90, 64, 4096, False, False, "triton"),  # 4096: 1.132, 1.136
    Row(90, 64, 0, False, True, "sdpa"),  # 2048: 0.067 / 0.183, 0.063 / 0.173; 4096: 1.13 / 3.29, 1.14 / 2.98
    Row(90, 128, 0, True, False, "sdpa"),  # D 80, 2048: 0.176, 0.150; D 128, 4096: 0.311, 0.266; 16384: 2.03, 1.73
    Row(90, 128, 0, True, True, "sdpa"),  # 4096: 0.311 / 0.887, 0.266 / 0.758; 16384: 2.03 / 5.67, 1.73 / 4.67
    Row(90, 128, 0, False, False, "sdpa"),  # 4096: 0.538, 0.414; 16384: 4.07, 3.19
    Row(90, 128, 0, False, True, "sdpa"),  # 4096: 0.538 / 1.58, 0.414 / 1.22; 16384: 4.07 / 11.8, 3.19 / 9.10
    Row(90, 256, 0, True, False, "sdpa"),  # 4096: 0.607, 0.458; D 192, E 128: 0.527, 0.325
    Row(90, 256, 0, True, True, "sdpa"),  # 4096: 0.607 / 3.14, 0.458 / 1.83; D 192, E 128: 0.527 / 2.19, 0.325 / 1.07
    Row(90, 256, 0, False, False, "sdpa"),  # 4096: 1.03, 0.756; D 192, E 128: 0.918, 0.527
    Row(90, 256, 0, False, True, "sdpa"),  # 4096: 1.03 / 5.36, 0.756 / 3.33; D 192, E 128: 0.918 / 4.14, 0.527 / 2.98
]


def first(spec: FlashSpec) -> str:
    """The backend measured to be the fastest for calls like this."""
    arch = hardware.of(spec.device).arch
    if arch == 90 and 2 * spec.B * spec.H * spec.N_Q * spec.N_KV * (spec.D + spec.E) < SMALL:
        return "triton"  # B1 H8 N128 D64: 0.007 / 0.014 against cuDNN's 0.008 / 0.017
    causal, size = spec.right is not None, max(spec.D, spec.E)
    rows = [r for r in ROWS if (r.arch, r.causal, r.grad) == (arch, causal, spec.needs_grad) and size <= r.D]
    rows = [r for r in rows if r.D == rows[0].D and r.keys <= spec.N_KV]
    return max(rows, key=lambda r: r.keys).first if rows else "sdpa"


ORDER = ("sdpa", "triton", "flash_attn", "eager", "reference")  # after the first
CPU_ORDER = ("sdpa", "eager", "reference", "triton", "flash_attn")  # Triton's interpreter: only if asked for by name


def rank(name: str, spec: FlashSpec) -> float:
    if spec.device.type != "cuda":
        return float(CPU_ORDER.index(name))
    return -1.0 if name == first(spec) else float(ORDER.index(name))
