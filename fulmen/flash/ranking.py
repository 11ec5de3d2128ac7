"""Which backend of softmax attention is the fastest, as measured: what "auto" goes by.

Times are medians in ms, forward / backward, of one run on an H200 (torch 2.11, cuDNN 9.19, Triton 3.6, bf16; fp16 is
taken to be the same), from results/h200/flash.jsonl: triton, then sdpa with the implementation it pins. A row holds for
its head dims and from its number of keys on, up to the next row's. Where nothing was measured torch comes first.

Rows of cuda: TFLOP/s of cuda and cuDNN in one run on the same GPU, with queries enough to fill it, from
results/h200/cuda_trial-2.txt. Its backward is cuDNN's wherever cuDNN would serve the call, so that with gradients it
is ahead by as much time as without, and else triton's.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from fulmen import hardware
from fulmen.flash import cuda_sm90
from fulmen.flash.op import FlashSpec

SMALL = 8e9  # multiplications and additions; below, the host takes longer: 15 us a call with triton, 39 with sdpa
FULL = 32_768  # queries of all heads together; with fewer, cuda's tiles do not fill the GPU


class Row(NamedTuple):
    arch: int
    D: int  # up to here
    keys: int  # from here on
    causal: bool
    grad: bool
    first: str


ROWS = [
    #   arch  D keys causal grad   first         triton          sdpa
    Row(90, 64, 0, True, False, "sdpa"),  # N 512: 0.030, 0.026 (cuDNN); 2048: 0.053, 0.050; 4096: 0.652, 0.632
    Row(90, 64, 1024, True, False, "cuda"),  # 1024: 233, 190 (32 heads), 313, 320 (256); 2048: 323, 253; 4096: 467, 433
    Row(90, 64, 0, True, True, "sdpa"),  # 2048: 0.053 / 0.147, 0.050 / 0.139; 4096: 0.652 / 1.97, 0.632 / 1.76
    Row(90, 64, 1024, True, True, "cuda"),
    Row(90, 64, 0, False, False, "sdpa"),  # 512: 0.035, 0.029; 2048: 0.066, 0.063
    Row(90, 64, 2048, False, False, "cuda"),  # 2048: 440, 400; 4096: 466, 419
    Row(90, 64, 0, False, True, "sdpa"),  # 2048: 0.066 / 0.183, 0.063 / 0.172; 4096: 1.14 / 3.28, 1.14 / 3.01
    Row(90, 64, 2048, False, True, "cuda"),
    Row(90, 128, 0, True, False, "sdpa"),  # D 80, 2048: 0.177, 0.149; D 128, 4096: 0.309, 0.265; 16384: 2.00, 1.70
    Row(
        90, 128, 1024, True, False, "cuda"
    ),  # 1024: 399, 353 (64 heads), 431, 425 (256); 2048: 527, 420; 4096: 607, 531; 8192: 618, 519; 16384: 655, 541
    Row(90, 128, 0, True, True, "sdpa"),  # 4096: 0.309 / 0.887, 0.265 / 0.757; 16384: 2.00 / 5.60, 1.70 / 4.61
    Row(90, 128, 1024, True, True, "cuda"),
    Row(90, 128, 0, False, False, "sdpa"),  # 4096: 0.534, 0.410; 16384: 4.05, 3.15
    Row(90, 128, 2048, False, False, "cuda"),  # 2048: 624, 609; 4096: 675, 668; 8192: 625, 590; 16384: 641, 603
    Row(90, 128, 0, False, True, "sdpa"),  # 4096: 0.534 / 1.58, 0.410 / 1.21; 16384: 4.05 / 11.7, 3.15 / 9.04
    Row(90, 128, 2048, False, True, "cuda"),
    Row(90, 256, 0, True, False, "sdpa"),  # 4096: 0.607, 0.454; D 192, E 128: 0.526, 0.324
    Row(90, 256, 4096, True, False, "cuda"),  # ms, cuda and cuDNN: 0.364, 0.448; D 192, E 128: 0.263, 0.320
    Row(90, 256, 0, True, True, "sdpa"),  # 4096: 0.607 / 3.14, 0.454 / 1.81; D 192, E 128: 0.526 / 2.19, 0.324 / 1.07
    Row(90, 256, 4096, True, True, "cuda"),
    Row(90, 256, 0, False, False, "sdpa"),  # 4096: 1.03, 0.747; D 192, E 128: 0.916, 0.524
    Row(90, 256, 4096, False, False, "cuda"),  # 0.358, 0.380; D 192, E 128: 0.495, 0.522
    Row(90, 256, 0, False, True, "sdpa"),  # 4096: 1.03 / 5.38, 0.747 / 3.33; D 192, E 128: 0.916 / 4.16, 0.524 / 2.98
    Row(90, 256, 4096, False, True, "cuda"),
]


def first(spec: FlashSpec) -> str:
    """The backend measured to be the fastest for calls like this."""
    return _first(spec, hardware.of(spec.device))


@functools.lru_cache(maxsize=4096)
def _first(spec: FlashSpec, hw: hardware.Hardware) -> str:
    arch = hw.arch
    plain = spec.plain and spec.right in (None, 0)
    if arch == 90 and not spec.needs_grad and (name := of_few_queries(spec, plain, hw)) is not None:
        return name
    if arch == 90 and 2 * spec.B * spec.H * spec.N_Q * spec.N_KV * (spec.D + spec.E) < SMALL:
        if plain and not spec.needs_grad and short(spec):
            return "cuda"
        return "triton"  # B1 H8 N128 D64: 0.007 / 0.014 against cuDNN's 0.008 / 0.017
    if arch == 90 and plain and not spec.needs_grad and few_keys(spec):
        return "cuda"
    full = spec.N_Q >= 1024 and spec.B * spec.H * spec.N_Q >= FULL
    if arch == 90 and not plain:  # sdpa has no options, so triton is the other one, and the backward triton's
        return "cuda" if full else "triton"  # ms: window 0.243, 0.323; softcap 0.360, 0.491; packed 0.361, 0.403
    causal, size = spec.right is not None, max(spec.D, spec.E)
    rows = [r for r in ROWS if (r.arch, r.causal, r.grad) == (arch, causal, spec.needs_grad) and size <= r.D]
    rows = [r for r in rows if r.D == rows[0].D and r.keys <= spec.N_KV]
    name = max(rows, key=lambda r: r.keys).first if rows else "sdpa"
    if name == "cuda" and not causal and size == 128 and spec.N_KV < 4096 and spec.group == 1:
        full = (
            full and spec.B * spec.H * spec.N_Q >= 8 * FULL
        )  # us, N 2048, cuda and cuDNN: 64 heads 222, 215; 256 897, 914
    return "sdpa" if name == "cuda" and not full else name


def short(spec: FlashSpec) -> bool:
    """Whether cuda was measured to be ahead of triton in a short call, or within 2 %; us on the GPU, cuda and triton:
    D = 64, B1 H1 N128 2.7, 3.8; N512 6.5, 8.6; B4 H16 N256 7.0, 8.3; B32 H8 N128 8.4, 11.9; 4096 x 256, B8 H8 53, 65
    D = 128, B1 H1 N128 3.5, 5.0; N512 8.5, 9.6; B8 H4 N256 8.9, 8.8; B4 H16 N256 11.4, 11.6; 1024 x 128, B8 H8 18, 29;
    B64 H32/8, 1 x 250 25, 65
    """
    if spec.D != spec.E or spec.D not in (64, 128):
        return False
    most = 512 if spec.N_Q == spec.N_KV else 256
    return most >= spec.N_KV


def of_few_queries(spec: FlashSpec, plain: bool, hw: hardware.Hardware) -> str | None:
    """Between cuda, whose blocks share keys, and torch's kernels; us between events, cuda, FA2, cuDNN and triton:
    D = 128, H32/8, B1 1 x 1024 11, 16, 13, 18; 1 x 8192 21, 31, 24, 99; 1 x 32768 48, 58, 51, 377;
    64 x 32768 68, 144, 383, 334; B4 1 x 8192 48, 56, 50, 105; B8 79, 84, 80, 145; but 1 x 32768 274, 261, 257, 537
    With options, cuda and triton: D 64, H64/8, sinks, 1 x 8192 16, 101; D 128, H32/8, softcap 24, 246; 1 x 300 12, 16
    """
    few = spec.N_Q * spec.group <= 64
    least = spec.B * spec.H_KV * spec.N_Q * spec.group / 192  # tiles: splits are for half as many as there are SMs
    if not spec.N_Q or spec.sequences is not None or not (few or 2 * least <= hw.sm_count):
        return None
    if spec.dtype not in (torch.bfloat16, torch.float16) or spec.scale < 0 or cuda_sm90.lacks(spec, hw) is not None:
        return None
    cfg = cuda_sm90.config(spec, hw)
    if not plain:
        return "cuda" if few or cfg.splits > 1 else None
    if spec.N_KV <= 256:
        return None
    if not few:
        return "cuda" if cfg.splits > 1 else None
    ahead = cfg.splits > 2 or (8192 if cfg.splits == 2 else 1024) >= spec.N_KV
    shared = cfg.grouped or spec.group == 1  # else each head reads its keys for itself: not measured
    large = spec.B * spec.H_KV * spec.N_KV * max(spec.D, spec.E) >= 2**31  # for cuDNN
    aligned = spec.right is not None and spec.N_Q > 1  # to the last key, which torch cannot say
    return "cuda" if (ahead and shared) or large or aligned else "sdpa"


def few_keys(spec: FlashSpec) -> bool:
    """Whether cuda was measured to be ahead of cuDNN in a long call of few keys, or within 2 %; us, cuda and cuDNN:
    D = 64, B8 H8, 16384 x 77 106, 139; 16384 x 128 120, 129; B64 H16 N128, which has less to do, 23.2, 22.7
    D = 128, B8 H8, 4096 x 64 40, 50; 4096 x 77 48, 50; but 1024 x 128 18.2, 16.4
    """
    most = {64: 128, 128: 80}.get(spec.D, -1)
    return spec.D == spec.E and most >= spec.N_KV


ORDER = ("sdpa", "triton", "flash_attn", "eager", "reference", "cuda")  # after the first
# Triton's interpreter: only if asked for by name
CPU_ORDER = ("sdpa", "eager", "reference", "triton", "flash_attn", "cuda")


def second(spec: FlashSpec) -> str:
    """What comes next where cuda comes first, as it may not be there: its compiler is an extra."""
    work = 2 * spec.B * spec.H * spec.N_Q * spec.N_KV * (spec.D + spec.E)
    decodes = spec.N_Q * spec.group <= 64 and spec.N_KV > 256
    return "sdpa" if spec.plain and (decodes or work >= SMALL) else "triton"


def rank(name: str, spec: FlashSpec) -> float:
    if spec.device.type != "cuda":
        return float(CPU_ORDER.index(name))
    best = first(spec)
    if name == best:
        return -2.0
    return -1.0 if best == "cuda" and name == second(spec) else float(ORDER.index(name))
