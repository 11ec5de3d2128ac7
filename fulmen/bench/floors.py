"""The least an operation can cost: FLOP and bytes of a pass, bytes of memory; and the most that a GPU can do.

A time below `flops / FLOP/s` or below `bytes / (B/s)` is no measurement of the operation, whatever the kernel. So the
counts here are minima over all known algorithms, exact where they can be:

    softmax   forward   2 pairs (D + E)           pairs: what the mask lets through, counted exactly
              backward  4 pairs (D + E)           four products; those who recompute the scores need 2 pairs D more
    linear    forward   4 N D E                   the recurrence, or the quadratic form where N is so short that it wins
              backward  8 N D E                   dq, dk, dv and the reversed state, with the forward's states saved
    layers    forward   2 tokens in out           for each projection
              backward  twice that                less the gradient of the layer's own input, which may not be wanted

`usual` is the work as papers and other tools count it (backward 5/2 of the forward, forward and backward each moving
their own tensors): TFLOP/s and efficiencies are made from that, verdicts of impossibility from the minimum. Heads of k
and v are counted once, however many query heads share them.

Ceilings are dense: SMs x FLOP/clk/SM x clock. Numbers with "sparsity" are twice that and hold for no attention.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

PASSES = ("forward", "backward", "total")
ITEMSIZE = {"fp64": 8, "fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2, "fp8": 1}


def dtype_name(dtype: object) -> str | None:
    """fp64, fp32, tf32, bf16, fp16 or fp8, for the many ways in which people write them."""
    return _dtype_name(str(dtype))


@functools.lru_cache(maxsize=1024)
def _dtype_name(dtype: str) -> str | None:
    text = re.sub(r"[^a-z0-9]", "", dtype.lower().rpartition(".")[2])
    patterns = {
        "bf16": "bf16|bfloat16", "fp16": "fp16|float16|half|f16", "tf32": "tf32", "fp32": "fp32|float32|float|f32",
        "fp64": "fp64|float64|double|f64", "fp8": "fp8.*|float8.*|e4m3.*|e5m2.*|f8",
    }  # fmt: skip
    return next((name for name, pattern in patterns.items() if re.fullmatch(pattern, text)), None)


# -------------------------------------------------------------------------------------------------- work


@dataclass(frozen=True)
class Work:
    """What one pass must do at least, and what it is usually said to do."""

    flops: float
    reads: float  # bytes
    writes: float
    usual_flops: float
    usual_bytes: float

    @property
    def bytes(self) -> float:
        return self.reads + self.writes

    def on_dram(self, l2_bytes: float, cold: bool) -> float:
        """Bytes that must cross the memory bus though a cache of `l2_bytes` keeps what was written last, and, if the
        cache is not cold, holds as much of the inputs as fits."""
        reads = self.reads if cold else max(0.0, self.reads - l2_bytes)
        return reads + max(0.0, self.writes - l2_bytes)


class Mask(NamedTuple):
    """Query i stands at i (top_left) or i + N_KV - N_Q and sees keys from `left` before to `right` after it."""

    left: int | None = None
    right: int | None = None
    top_left: bool = False


FULL = Mask()


@functools.lru_cache(maxsize=4096)
def _seen(N_Q: int, N_KV: int, mask: Mask) -> tuple[int, int]:
    """(pairs the mask lets through, keys that some query sees)"""
    if N_Q <= 0 or N_KV <= 0:
        return 0, 0
    position = np.arange(N_Q, dtype=np.int64) + (0 if mask.top_left else N_KV - N_Q)
    first = np.zeros_like(position) if mask.left is None else np.clip(position - mask.left, 0, None)
    last = np.full_like(position, N_KV - 1) if mask.right is None else np.clip(position + mask.right, None, N_KV - 1)
    count = np.clip(last - first + 1, 0, None)
    if not count.any():
        return 0, 0
    return int(count.sum()), int(last[count > 0].max() - first[count > 0].min() + 1)


def pairs(N_Q: int, N_KV: int, left: int | None = None, right: int | None = None, top_left: bool = False) -> int:
    """How many (query, key) pairs a mask lets through; causal is right=0."""
    return _seen(N_Q, N_KV, Mask(left, right, top_left))[0]


def _attention_bytes(pass_: str, q: float, kv: float, kv_read: float, o: float) -> tuple[float, float, float]:
    """(reads, writes, usual traffic) from the bytes of q, of k and v, of the part of them that is read, and of o."""
    if pass_ == "forward":
        return q + kv_read, o, q + kv_read + o
    if pass_ == "backward":
        return q + kv_read + o, q + kv, q + kv_read + o + q + kv  # reads dO, as large as o
    return q + kv_read + o, o + q + kv, 2 * (q + kv_read + o) + q + kv


def softmax(
    pass_: str, *, B: int, H: int, N_Q: int, N_KV: int, D: int, dtype: str,
    H_KV: int | None = None, E: int | None = None, mask: Mask = FULL, sequences: Iterable[int] | None = None,
) -> Work:  # fmt: skip
    """Softmax attention; `sequences`: the lengths of packed ones, in place of B, N_Q and N_KV."""
    H_KV, E, size = H_KV or H, E or D, ITEMSIZE[dtype]
    if sequences is not None:
        lengths = list(sequences)
        seen = [_seen(n, n, mask) for n in lengths]
        inside, keys = sum(s[0] for s in seen), sum(s[1] for s in seen)
        queries = all_keys = sum(lengths)
    else:
        inside, keys = (B * x for x in _seen(N_Q, N_KV, mask))
        queries, all_keys = B * N_Q, B * N_KV
    product = 2.0 * H * inside
    forward, backward, usual_backward = product * (D + E), product * 2 * (D + E), product * 2.5 * (D + E)
    flops = {"forward": forward, "backward": backward, "total": forward + backward}[pass_]
    usual = {"forward": forward, "backward": usual_backward, "total": forward + usual_backward}[pass_]
    kv, kv_read = (float(size * H_KV * n * (D + E)) for n in (all_keys, keys))
    rows = float(size * H * queries)
    reads, writes, usual_bytes = _attention_bytes(pass_, rows * D, kv, kv_read, rows * E)
    return Work(flops, reads, writes, usual, usual_bytes)


def linear(
    pass_: str, *, B: int, H: int, N: int, D: int, dtype: str,
    H_KV: int | None = None, E: int | None = None, causal: bool = True,
) -> Work:  # fmt: skip
    """Linear attention with or without decay; any state that enters or leaves is left out."""
    H_KV, E, size = H_KV or H, E or D, ITEMSIZE[dtype]
    inside = N * (N + 1) / 2 if causal else float(N) * N
    forward = B * H * min(4.0 * N * D * E, 2 * inside * (D + E))
    flops = forward * {"forward": 1, "backward": 2, "total": 3}[pass_]
    kv = float(size * B * H_KV * N * (D + E))
    reads, writes, usual = _attention_bytes(pass_, float(size * B * H * N * D), kv, kv, float(size * B * H * N * E))
    return Work(flops, reads, writes, flops, usual)


def projection_sizes(
    hidden: int, H: int, H_KV: int, D: int, E: int | None = None, out: int | None = None
) -> list[tuple[int, int]]:
    """(in, out) of the projections of q, k, v and of the output: three and one."""
    E = E or D
    return [(hidden, H * D), (hidden, H_KV * D), (hidden, H_KV * E), (H * E, out or hidden)]


def latent_sizes(hidden: int, H: int, D: int, E: int, rank: int) -> list[tuple[int, int]]:
    """(in, out) of the projections of latent attention, whose latents both have size `rank` and whose RoPE turns D - E
    elements: of q down and up, of k and v down (with what RoPE turns of k) and up, and of the output."""
    return [(hidden, rank), (rank, H * D), (hidden, rank + D - E), (rank, 2 * H * E), (H * E, hidden)]


def layer(pass_: str, attention: Work, tokens: int, sizes: list[tuple[int, int]], dtype: str) -> Work:
    """A layer: its attention, and projections of which the last makes the output and the others read the input.

    Only the input, the output and the weights need cross the memory bus; everything between could stay on the chip.
    """
    size = ITEMSIZE[dtype]
    products = [2.0 * tokens * a * b for a, b in sizes]
    forward, last = sum(products), products[-1]
    minimum = {"forward": forward, "backward": forward + last, "total": 2 * forward + last}[pass_]
    usual = forward * {"forward": 1, "backward": 2, "total": 3}[pass_]
    weights = float(size * sum(a * b for a, b in sizes))
    x, y = float(size * tokens * sizes[0][0]), float(size * tokens * sizes[-1][1])
    reads = {"forward": x + weights, "backward": x + y + weights, "total": x + y + weights}[pass_]
    writes = {"forward": y, "backward": weights, "total": y + weights}[pass_]
    return Work(
        attention.flops + minimum, reads, writes,
        attention.usual_flops + usual, attention.usual_bytes + reads + writes,
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------ memory


def memory(family: str, case: Mapping[str, Any], pass_: str = "total") -> dict[str, float] | None:
    """The least memory of a call, by kind: inputs, output, gradients, peak. None where the case does not say enough.

    The peak of a call with gradients holds inputs, output and gradients; dO may be one number, expanded. `family` is
    softmax, linear or layer, whose inputs are its x and its weights.
    """
    shape = _Shape.of(case)
    if shape is None or family not in ("softmax", "linear", "layer"):
        return None
    rows, keys = (shape.total, shape.total) if shape.total else (shape.B * shape.N_Q, shape.B * shape.N_KV)
    inputs = rows * shape.H * shape.D + keys * shape.H_KV * (shape.D + shape.E)
    output = rows * shape.H * shape.E
    if family == "layer":
        sizes = projections_of(case)
        inputs, output = rows * sizes[0][0] + sum(a * b for a, b in sizes), rows * sizes[-1][1]
    given, made = (float(ITEMSIZE[shape.dtype] * count) for count in (inputs, output))
    least = {"inputs": given, "output": made, "gradients": given, "saved": 0.0}
    return least | {"peak": given + made + (given if pass_ != "forward" else 0.0)}


# ------------------------------------------------------------------------------------- from a case to its floor


class _Shape(NamedTuple):
    B: int
    H: int
    H_KV: int
    N_Q: int
    N_KV: int
    D: int
    E: int
    dtype: str
    total: int  # tokens of packed sequences, or 0

    @classmethod
    def of(cls, case: Mapping[str, Any]) -> _Shape | None:
        dtype = dtype_name(case.get("dtype", ""))
        lengths = _lengths(case)
        N_Q = _int(case, "N_Q", "N")
        N_KV = _int(case, "N_KV", "N") or N_Q
        H, D = _int(case, "H"), _int(case, "D")
        if lengths is not None:
            N_Q = N_KV = max(lengths, default=0)
        if dtype is None or H is None or D is None or N_Q is None or N_KV is None:
            return None
        B = _int(case, "B")
        if B is None and lengths is None:
            return None
        E, H_KV = _int(case, "E") or D, _int(case, "H_KV") or H
        shape = cls(B or 1, H, H_KV, N_Q, N_KV, D, E, dtype, sum(lengths) if lengths is not None else 0)
        return shape if min(shape[:-2]) > 0 else None


def _int(case: Mapping[str, Any], *names: str) -> int | None:
    for name in names:
        value = case.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool) and value == value // 1 and value < 2**40:
            return int(value)
    return None


def _lengths(case: Mapping[str, Any]) -> list[int] | None:
    lengths = case.get("lengths", case.get("sequences"))
    if not isinstance(lengths, list | tuple) or not all(type(n) is int and 0 <= n < 2**31 for n in lengths):
        return None
    return list(lengths)


def mask_of(case: Mapping[str, Any]) -> Mask:
    """The mask that `causal` and `window` describe, in the words of `fulmen.flash_attention`. A case that says nothing
    of `causal` is taken for causal, which is less work."""
    causal, window = case.get("causal", True), case.get("window")
    left = right = None
    if isinstance(window, list | tuple) and len(window) == 2:
        left, right = (w if type(w) is int and w >= 0 else None for w in window)
    left, right = _int(case, "left") if left is None else left, _int(case, "right") if right is None else right
    top_left = causal in ("top_left", "top-left") or case.get("top_left") is True
    return Mask(left, 0 if causal else right, top_left)


def family(op: str, function: str = "") -> str | None:
    """ "softmax" or "linear", from the words for what is computed, or else from the operation's name."""
    for text in (function.lower(), op.lower()):
        if re.search(r"softmax|flash|sdpa|scaled.dot", text):
            return "softmax"
        if re.search(r"linear|lightning|retention|recurren", text):
            return "linear"
    return None


def of_case(op: str, function: str, case: Mapping[str, Any], pass_: str) -> Work | None:
    """The floor of one pass of a benchmark case; None where the operation is not known or the case says too little."""
    shape, kind = _Shape.of(case), family(op, function)
    if shape is None or kind is None or pass_ not in PASSES:
        return None
    lengths = _lengths(case)
    if kind == "softmax":
        attention = softmax(
            pass_, B=shape.B, H=shape.H, H_KV=shape.H_KV, N_Q=shape.N_Q, N_KV=shape.N_KV, D=shape.D, E=shape.E,
            dtype=shape.dtype, mask=mask_of(case), sequences=lengths,
        )  # fmt: skip
    else:
        B, N = (1, shape.total) if lengths is not None else (shape.B, shape.N_Q)
        causal = case.get("causal", True) is not False
        attention = linear(
            pass_, B=B, H=shape.H, H_KV=shape.H_KV, N=N, D=shape.D, E=shape.E, dtype=shape.dtype, causal=causal
        )
    if not op.startswith("layer"):
        return attention
    sizes = projections_of(case)
    if not sizes:
        return attention
    return layer(pass_, attention, shape.total or shape.B * shape.N_Q, sizes, shape.dtype)


def projections_of(case: Mapping[str, Any]) -> list[tuple[int, int]]:
    """(in, out) of a layer's projections, as the case says or implies; none where it says too little."""
    given = case.get("projections")
    if given is not None:
        return [(a, b) for a, b in given] if _are_sizes(given) else []
    H, D = _int(case, "H"), _int(case, "D")
    if not H or not D:
        return []
    E, hidden, rank = _int(case, "E") or D, _int(case, "hidden", "model"), _int(case, "rank")
    if rank:
        return latent_sizes(hidden or H * E, H, D, E, rank)
    return projection_sizes(hidden or H * D, H, _int(case, "H_KV") or H, D, E, _int(case, "out"))


def _are_sizes(sizes: object) -> bool:
    return (
        isinstance(sizes, list | tuple)
        and len(sizes) > 0
        and all(isinstance(s, list | tuple) and len(s) == 2 and all(type(x) is int and x > 0 for x in s) for s in sizes)
    )


# ---------------------------------------------------------------------------------------------- ceilings


class Gpu(NamedTuple):
    """What a data sheet says. `tensor`: dense FLOP per clock and SM, 16-bit operands, fp32 accumulation."""

    name: str
    pattern: str  # of the name, lower case, first match wins
    arch: int
    tensor: int
    sms: int
    boost_mhz: float  # at which the data sheet's peak is stated
    max_mhz: float  # the highest the driver allows (nvidia-smi -q -d CLOCK)
    gb_s: float
    l2_mb: float  # MiB


# FLOP per clock and SM, dense, 16-bit operands, fp32 accumulation: NVIDIA's architecture white papers (V100, A100,
# GA102, Ada, H100, Blackwell); GeForce cards run fp32 accumulation at half the rate of the professional cards.
TENSOR = {70: 1024, 75: 1024, 80: 2048, 86: 1024, 89: 1024, 90: 4096, 100: 8192, 103: 8192, 120: 1024}
GEFORCE = {75: 512, 86: 512, 89: 512, 120: 512}
SHADER = {70: 128, 75: 128, 80: 128}  # fp32 without tensor cores; 256 since sm_86
FP64 = {70: 64, 80: 128, 90: 256, 100: 128}  # with tensor cores from sm_80 on; 4 on the rest

# Peaks below each line: SMs x tensor x boost, against the data sheet's dense bf16/fp16 figure.
GPUS = (
    # NVIDIA V100 data sheet: 125 TFLOP/s (SXM2), 900 GB/s; 6 MB L2 (white paper).
    Gpu("V100", r"v100", 70, 1024, 80, 1530, 1530, 900, 6),
    # NVIDIA T4 data sheet: 65 TFLOP/s, 320 GB/s.
    Gpu("T4", r"\bt4\b", 75, 1024, 40, 1590, 1590, 320, 4),
    # NVIDIA A100 data sheet: 312 TFLOP/s; 1,555 GB/s (40 GB), 1,935 (80 GB PCIe), 2,039 (80 GB SXM); 40 MB L2.
    Gpu("A100 40GB", r"a100.*40 ?gb", 80, 2048, 108, 1410, 1410, 1555, 40),
    Gpu("A100 80GB PCIe", r"a100.*(80 ?gb.*pcie|pcie.*80 ?gb)", 80, 2048, 108, 1410, 1410, 1935, 40),
    Gpu("A100 80GB SXM", r"a100|a800", 80, 2048, 108, 1410, 1410, 2039, 40),
    # NVIDIA A30 data sheet: 165 TFLOP/s, 933 GB/s.
    Gpu("A30", r"\ba30\b", 80, 2048, 56, 1440, 1440, 933, 24),
    # NVIDIA A10 data sheet: 125 TFLOP/s, 600 GB/s.
    Gpu("A10", r"\ba10g?\b", 86, 1024, 72, 1695, 1710, 600, 6),
    # NVIDIA A40 data sheet: 149.7 TFLOP/s, 696 GB/s.
    Gpu("A40", r"\ba40\b", 86, 1024, 84, 1740, 1740, 696, 6),
    # NVIDIA RTX A6000 data sheet: 154.8 TFLOP/s, 768 GB/s; driver's limit 2,100 MHz (NVIDIA forum, thread 203772).
    Gpu("RTX A6000", r"a6000", 86, 1024, 84, 1800, 2100, 768, 6),
    # NVIDIA GA102 white paper: RTX 3090 71 TFLOP/s, 936 GB/s; RTX 3090 Ti 80 TFLOP/s, 1,008 GB/s.
    Gpu("RTX 3090 Ti", r"3090 ?ti", 86, 512, 84, 1860, 2130, 1008, 6),
    Gpu("RTX 3090", r"3090", 86, 512, 82, 1695, 2100, 936, 6),
    # NVIDIA L4 data sheet: 121 TFLOP/s (242 with sparsity), 300 GB/s; 7,424 cores = 58 SMs, 48 MB L2.
    Gpu("L4", r"\bl4\b", 89, 1024, 58, 2040, 2040, 300, 48),
    # NVIDIA L40S data sheet: 362 TFLOP/s, 864 GB/s. An L40, rated at half, is taken for one: the safe side.
    Gpu("L40S", r"\bl40s?\b", 89, 1024, 142, 2520, 2520, 864, 96),
    # NVIDIA RTX 6000 Ada data sheet: 364 TFLOP/s, 960 GB/s.
    Gpu("RTX 6000 Ada", r"6000 ?ada", 89, 1024, 142, 2505, 3105, 960, 96),
    # NVIDIA Ada white paper: RTX 4090 165.2 TFLOP/s, 1,008 GB/s, 72 MB L2; driver's limit 3,105 MHz.
    Gpu("RTX 4090", r"4090", 89, 512, 128, 2520, 3105, 1008, 72),
    # NVIDIA H100 data sheet: PCIe 756 TFLOP/s and 2,000 GB/s, SXM 989 and 3,350, NVL 835 and 3,938; 50 MB L2. The data
    # sheet's peaks are at 1,620 and 1,830 MHz, the driver allows 1,755 and 1,980.
    Gpu("H100 PCIe", r"h100.*pcie", 90, 4096, 114, 1620, 1755, 2039, 50),
    Gpu("H100 NVL", r"h100.*nvl", 90, 4096, 132, 1545, 1980, 3938, 60),
    # NVIDIA GH200 data sheet: 990 TFLOP/s, 4,000 GB/s (96 GB) or 4,900 (144 GB).
    Gpu("GH200", r"gh200", 90, 4096, 132, 1830, 1980, 4900, 60),
    # NVIDIA H200 data sheet: 989 TFLOP/s, 4,800 GB/s; 60 MB L2 by torch, 1,980 MHz by the driver (our measurements).
    Gpu("H200", r"h200", 90, 4096, 132, 1830, 1980, 4800, 60),
    Gpu("H100 SXM", r"h100|h800", 90, 4096, 132, 1830, 1980, 3350, 50),
    # NVIDIA B200 data sheet (DGX B200): 2.25 PFLOP/s, 8,000 GB/s (7,672 by bus width and clock); 126 MB L2.
    Gpu("B200", r"g?b200", 100, 8192, 148, 1860, 1980, 8000, 126),
    # NVIDIA RTX PRO 6000 Blackwell data sheet: 504 TFLOP/s, 1,792 GB/s, 128 MB L2.
    Gpu("RTX PRO 6000", r"pro 6000", 120, 1024, 188, 2617, 3090, 1792, 128),
    # NVIDIA RTX Blackwell white paper: RTX 5090 209.5 TFLOP/s, 1,792 GB/s, 96 MB L2; driver's limit 3,090 MHz.
    Gpu("RTX 5090", r"5090", 120, 512, 170, 2407, 3090, 1792, 96),
)  # fmt: skip


def gpu(name: object) -> Gpu | None:
    """The data sheet of a GPU by its name; the fastest variant where the name leaves several."""
    return _gpu(str(name))


@functools.lru_cache(maxsize=1024)
def _gpu(name: str) -> Gpu | None:
    text = re.sub(r"[-_()/]+", " ", name.lower())
    return next((g for g in GPUS if re.search(g.pattern, text)), None)


class Rate(NamedTuple):
    """FLOP per clock and SM: what no kernel exceeds, and what one that keeps the precision of its name reaches."""

    hard: float
    rated: float


def rate(arch: int, dtype: str, geforce: bool = False) -> Rate | None:
    """`hard` allows fp16 accumulation where that is faster, and TF32 for fp32; None for an unknown architecture."""
    if arch not in TENSOR:
        return None
    full = TENSOR[arch]
    tensor = GEFORCE.get(arch, full) if geforce else full
    if dtype == "fp16":
        return Rate(full, tensor)
    if dtype == "bf16":
        return Rate(tensor, tensor) if arch >= 80 else None
    if dtype == "fp8":
        return Rate(2 * full, 2 * tensor) if arch >= 89 else None
    shader = SHADER.get(arch, 256)
    if dtype in ("tf32", "fp32"):
        tf32 = max(tensor / 2, shader) if arch >= 80 else shader
        return Rate(tf32, tf32 if dtype == "tf32" else shader)
    return Rate(FP64.get(arch, 4), FP64.get(arch, 4)) if dtype == "fp64" else None


class Ceilings(NamedTuple):
    """FLOP/s and B/s: hard ones no kernel passes, rated ones of the data sheet. None: not known."""

    flops_hard: float | None = None
    flops_rated: float | None = None
    bytes_hard: float | None = None
    l2_bytes: float | None = None


def of_gpu(sheet: Gpu, dtype: str) -> Ceilings:
    """The ceilings of a GPU of which only the name is known."""
    per_clock = rate(sheet.arch, dtype, geforce=sheet.tensor == GEFORCE.get(sheet.arch))
    hard = rated = None
    if per_clock is not None:
        hard = sheet.sms * per_clock.hard * sheet.max_mhz * 1e6
        rated = sheet.sms * per_clock.rated * sheet.boost_mhz * 1e6
    return Ceilings(hard, rated, sheet.gb_s * 1e9, sheet.l2_mb * 2**20)


def of_device(arch: int, sm_count: int, clock_max_mhz: float, name: str, dtype: str) -> float | None:
    """FLOP/s that a device at hand cannot pass: from what it says of itself and never from a table of names."""
    per_clock = rate(arch, dtype, geforce="geforce" in name.lower())
    return None if per_clock is None else sm_count * per_clock.hard * clock_max_mhz * 1e6
