"""The least an operation can cost: FLOP and bytes of a pass, bytes of memory; and the most that a GPU can do.

A time below `flops / FLOP/s` or below `bytes / (B/s)` is no measurement of the operation, whatever the kernel. So the
counts here are minima over all known algorithms, exact where they can be:

    softmax   forward   2 pairs (D + E)           pairs: what the mask lets through, counted exactly
              backward  4 pairs (D + E)           four products; those who recompute the scores need 2 pairs D more
    linear    forward   4 N D E                   the recurrence, or the quadratic form where N is so short that it wins
              backward  8 N D E                   dq, dk, dv and the reversed state, with the forward's states saved
    decoding                                      a step of linear attention reads and writes its states, too;
                                                  a latent cache is read once: its first E columns are the values
    layers    forward   2 tokens in out           for each projection; a decoding step reads its cache, too;
                                                  a training step is `training`
              backward  twice that                less the gradient of the layer's own input, which may not be wanted

`usual` is the work as papers and other tools count it (backward 5/2 of the forward, forward and backward each moving
their own tensors): TFLOP/s and efficiencies come from it, verdicts of impossibility from the minimum. Heads of k and v
are counted once, however many query heads share them.

Ceilings are dense: SMs x FLOP/clk/SM x clock. Numbers with "sparsity" are twice that and hold for no attention.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

PASSES = ("forward", "backward", "total")
ITEMSIZE = {"fp64": 8, "fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2, "fp8": 1}
DTYPES = {
    "bf16": "bf16|bfloat16", "fp16": "fp16|float16|half|f16", "tf32": "tf32", "fp32": "fp32|float32|float|f32",
    "fp64": "fp64|float64|double|f64", "fp8": "fp8.*|float8.*|e4m3.*|e5m2.*|f8",
}  # fmt: skip
Case = Mapping[str, Any]


def dtype_name(dtype: object) -> str | None:
    """fp64, fp32, tf32, bf16, fp16 or fp8, for the many ways in which people write them."""
    text = re.sub(r"[^a-z0-9]", "", str(dtype).lower().rpartition(".")[2])
    return next((name for name, pattern in DTYPES.items() if re.fullmatch(pattern, text)), None)


def family(op: str, function: str = "") -> str | None:
    """ "softmax" or "linear", from the words for what is computed, or else from the operation's name."""
    for text in (function.lower(), op.lower()):
        if re.search(r"softmax|flash|sdpa|scaled.dot|^latent$", text):
            return "softmax"
        if re.search(r"linear|lightning|retention|recurren|^step$", text):
            return "linear"
    return None


# ------------------------------------------------------------------------------------------------ a case's sizes
class Shape(NamedTuple):
    """The sizes of a case, all above 0."""

    B: int
    N_Q: int
    N_KV: int
    H: int
    H_KV: int
    D: int
    E: int
    itemsize: int
    kv: int  # elements of k and v, for a token and head

    @property
    def queries(self) -> int:
        return self.B * self.N_Q

    @property
    def keys(self) -> int:
        return self.B * self.N_KV

    @classmethod
    def of(cls, case: Case, op: str = "") -> Shape | None:
        """None where the case does not say enough."""
        B, N_Q, N_KV, H = _int(case, "B"), _int(case, "N_Q", "N"), _int(case, "N_KV", "N", "N_Q"), _int(case, "H")
        D, size = _int(case, "D"), ITEMSIZE.get(dtype_name(case.get("dtype", "")) or "")
        if not (B and N_Q and N_KV and H and D and size):
            return None
        E, H_KV = _int(case, "E") or D, _int(case, "H_KV") or H
        shape = cls(B, N_Q, N_KV, H, H_KV, D, E, size, D if op == "latent" else D + E)
        return shape if min(shape) > 0 else None


def _int(case: Case, *names: str) -> int | None:
    for name in names:
        value = case.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool) and value == value // 1 and value < 2**40:
            return int(value)
    return None


def pairs(N_Q: int, N_KV: int, causal: bool, window: int | None = None) -> int:
    """How many queries and keys see each other. Under a causal mask the last query sees the last key; a window hides
    keys that are farther before a query's position."""
    last, hidden = min(N_Q, N_KV), 0
    if window is not None:  # the last query does not see N_KV - 1 - window keys, the one before it one less
        first, most = (max(0, n - 1 - window) for n in (N_KV - N_Q, N_KV))
        hidden = most * (most + 1) // 2 - first * (first + 1) // 2
    return (last * (N_KV - last) + last * (last + 1) // 2 if causal else N_Q * N_KV) - hidden


def projections_of(case: Case) -> list[tuple[int, int]]:
    """(in, out) of a layer's projections, the output's last; [] where the case says too little.

    Latent attention: q down and up, k and v down (with the D - E elements of k that RoPE turns) and up; the latents
    have size `rank`, that of the queries `q_rank` if given. A lightning layer has a `gate`, too.
    """
    H, D = _int(case, "H"), _int(case, "D")
    if not H or not D:
        return []
    E, hidden, rank = _int(case, "E") or D, _int(case, "hidden"), _int(case, "rank")
    if rank:
        hidden, q_rank = hidden or H * E, _int(case, "q_rank") or rank
        return [(hidden, q_rank), (q_rank, H * D), (hidden, rank + D - E), (rank, 2 * H * E), (H * E, hidden)]
    hidden, H_KV = hidden or H * D, _int(case, "H_KV") or H
    gate = [(hidden, H * E)] if case.get("gate") is True or case.get("layer") in ("minimax", "ring") else []
    return [(hidden, H * D), (hidden, H_KV * D), (hidden, H_KV * E), *gate, (H * E, hidden)]


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


def computed(function: str, case: Case) -> Case:
    """The case, if `function` is what a competitor makes of it: a stack of softmax attention has no other blocks."""
    return {**case, "pattern": "G"} if "pattern" in case and "linear" not in function else case


def of_case(op: str, function: str, case: Case, pass_: str) -> Work | None:
    """The floor of one pass of a benchmark case; None where the operation is not known or the case says too little."""
    shape, kind = Shape.of(case, op), family(op, function)
    if shape is None or kind is None or pass_ not in PASSES:
        return None
    if op == "train":
        return training(shape, computed(function, case), pass_)
    work = attention(kind, shape, case, pass_)
    if not op.startswith("layer"):
        return work
    whole = layer(pass_, work, shape, projections_of(case))
    if not op.startswith("layer_step"):
        return whole
    read, written = cache_bytes(shape, case)
    reads, writes = whole.reads + read, whole.writes + written
    return dataclasses.replace(whole, reads=reads, writes=writes, usual_bytes=reads + writes)


def attention(kind: str, shape: Shape, case: Case, pass_: str) -> Work:
    """Softmax attention, or linear attention with or without decay; of states only those of a decoding step count."""
    shape = shape if kind == "softmax" else shape._replace(N_KV=shape.N_Q)
    B, N, H, D, E, states = shape.B, shape.N_Q, shape.H, shape.D, shape.E, state_bytes(shape, case)
    seen = pairs(N, shape.N_KV, case.get("causal", True) is not False, _int(case, "window"))
    forward = 2.0 * B * H * seen * (D + E)
    if kind == "linear":
        steps = 4.0 * B * H * N * D * E
        forward = steps if states else min(steps, forward)
    flops = forward * {"forward": 1, "backward": 2, "total": 3}[pass_]
    recomputed = 0.5 * forward if kind == "softmax" and pass_ != "forward" else 0.0
    grads, o = tensors(shape, case)
    given = grads - unseen(shape, case)
    reads, writes, usual = {
        "forward": (given, o, given + o),
        "backward": (given + o, grads, given + grads + o),  # reads dO, as large as o
        "total": (given + o, o + grads, 2 * given + grads + 2 * o),
    }[pass_]
    return Work(flops, reads + states, writes + states, flops + recomputed, usual + 2 * states)


def tensors(shape: Shape, case: Case) -> tuple[float, float]:
    """Bytes of q, k, v and the decays of tokens, and of o. With `groups` q and k have so many heads, and v has H."""
    B, N, H, D, E = shape.B, shape.N_Q, shape.H, shape.D, shape.E
    given = B * N * H * D + shape.keys * shape.H_KV * shape.kv
    if groups := _int(case, "groups"):
        given = B * N * (2 * groups * D + H * E)
    decays = 4.0 * B * N * H if case.get("per_token") is True else 0.0
    return float(shape.itemsize * given) + decays, float(shape.itemsize * B * N * H * E)


def unseen(shape: Shape, case: Case) -> float:
    """Bytes of the keys and values that a window hides from every query."""
    window = _int(case, "window")
    seen = shape.N_KV if window is None else min(shape.N_KV, shape.N_Q + window)
    return float(shape.itemsize * shape.B * (shape.N_KV - seen) * shape.H_KV * shape.kv)


def state_bytes(shape: Shape, case: Case) -> float:
    """Of the states that a decoding step reads and writes, which a case with a `state_dtype` is."""
    size = ITEMSIZE.get(dtype_name(case.get("state_dtype", "")) or "", 0)
    return float(size * shape.B * shape.H * shape.D * shape.E)


def cache_bytes(shape: Shape, case: Case) -> tuple[float, float]:
    """(read, written) of the cache or the states by a decoding step of a layer; a latent cache serves all heads."""
    if states := state_bytes(shape, case):
        return states, states
    rank = _int(case, "rank")
    width = rank + shape.D - shape.E if rank else shape.H_KV * (shape.D + shape.E)
    return float(shape.itemsize * shape.keys * width), 0.0


def layer(pass_: str, within: Work, shape: Shape, sizes: list[tuple[int, int]]) -> Work:
    """A layer: the attention `within`, and projections, the last of which makes the output while others read the input.

    Only the input, the output and the weights need cross the memory bus; everything between could stay on the chip.
    """
    tokens = shape.queries
    products = [2.0 * tokens * a * b for a, b in sizes]
    forward, last = sum(products), products[-1]
    weights = float(shape.itemsize * sum(a * b for a, b in sizes))
    x, y = (float(shape.itemsize * tokens * width) for width in (sizes[0][0], sizes[-1][1]))
    least, usual, reads, writes = {
        "forward": (forward, forward, x + weights, y),
        "backward": (forward + last, 2 * forward, x + y + weights, weights),
        "total": (2 * forward + last, 3 * forward, x + y + weights, y + weights),
    }[pass_]
    return Work(within.flops + least, reads, writes, within.usual_flops + usual, within.usual_bytes + reads + writes)


def parameters(shape: Shape, case: Case) -> tuple[int, int]:
    """How many elements the matrices of a stack have, and its embedding, which multiplies nothing."""
    dim, vocab, layers = shape.H * shape.D, _int(case, "vocab") or 0, _int(case, "layers") or 0
    pattern, mlp = str(case.get("pattern") or "L"), 3 * dim * (-(-8 * dim // 3 // 32) * 32)
    each = {"L": 5 * dim * dim, "G": 2 * dim * dim + 2 * dim * shape.H_KV * shape.D}
    blocks = sum(mlp + each.get(pattern[i % len(pattern)], 0) for i in range(layers))
    return blocks + vocab * dim, vocab * dim


def training(shape: Shape, case: Case, pass_: str) -> Work:
    """A stack of layers. Usual are 6 FLOP for each parameter and token, whose products are the minimum.

    Parameters are read by forward and backward, and their gradients written; AdamW reads these, parameters and both of
    its states, and writes the last three.
    """
    matrices, embedding = parameters(shape, case)
    passes, moved = {"forward": (1, (1, 0)), "backward": (2, (1, 1)), "total": (3, (6, 4))}[pass_]
    reads, writes = (float(shape.itemsize * matrices * each) for each in moved)
    products = 2.0 * passes * shape.queries * matrices
    return Work(products, reads, writes, products * (1 + embedding / matrices), reads + writes)


def memory(op: str, case: Case, pass_: str = "total") -> dict[str, float] | None:
    """The least memory of a call: inputs, output, gradients, saved, peak. None where the case does not say enough.

    The peak of a call with gradients holds inputs, output and gradients; dO may be one number, expanded. The inputs of
    a layer are its x and its weights.
    """
    shape = Shape.of(case, op)
    if shape is None or not (op.startswith("layer") or op == "train" or family(op)):
        return None
    given, made = tensors(shape, case)
    if op.startswith("layer") and (sizes := projections_of(case)):
        given = float(shape.itemsize * (shape.queries * sizes[0][0] + sum(a * b for a, b in sizes)))
        made = float(shape.itemsize * shape.queries * sizes[-1][1])
    elif op == "train":
        given, made = (float(shape.itemsize * count) for count in (sum(parameters(shape, case)), shape.queries))
    given += state_bytes(shape, case)
    least = {"inputs": given, "output": made, "gradients": given, "saved": 0.0}
    return least | {"peak": given + made + (given if pass_ != "forward" else 0.0)}


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

# Sources: NVIDIA's data sheets and architecture white papers; the highest clock is the driver's. A test compares
# SMs x tensor x boost with the data sheets' dense 16-bit peaks.
GPUS = (
    Gpu("V100", r"v100", 70, 1024, 80, 1530, 1530, 900, 6),
    Gpu("T4", r"\bt4\b", 75, 1024, 40, 1590, 1590, 320, 4),
    Gpu("A100 40GB", r"a100.*40 ?gb", 80, 2048, 108, 1410, 1410, 1555, 40),
    Gpu("A100 80GB PCIe", r"a100.*(80 ?gb.*pcie|pcie.*80 ?gb)", 80, 2048, 108, 1410, 1410, 1935, 40),
    Gpu("A100 80GB SXM", r"a100|a800", 80, 2048, 108, 1410, 1410, 2039, 40),
    Gpu("A30", r"\ba30\b", 80, 2048, 56, 1440, 1440, 933, 24),
    Gpu("A10", r"\ba10g?\b", 86, 1024, 72, 1695, 1710, 600, 6),
    Gpu("A40", r"\ba40\b", 86, 1024, 84, 1740, 1740, 696, 6),
    Gpu("RTX A6000", r"a6000", 86, 1024, 84, 1800, 2100, 768, 6),
    Gpu("RTX 3090 Ti", r"3090 ?ti", 86, 512, 84, 1860, 2130, 1008, 6),
    Gpu("RTX 3090", r"3090", 86, 512, 82, 1695, 2100, 936, 6),
    Gpu("L4", r"\bl4\b", 89, 1024, 58, 2040, 2040, 300, 48),
    Gpu("L40S", r"\bl40s?\b", 89, 1024, 142, 2520, 2520, 864, 96),  # an L40, rated at half, too: the safe side
    Gpu("RTX 6000 Ada", r"6000 ?ada", 89, 1024, 142, 2505, 3105, 960, 96),
    Gpu("RTX 4090", r"4090", 89, 512, 128, 2520, 3105, 1008, 72),
    Gpu("H100 PCIe", r"h100.*pcie", 90, 4096, 114, 1620, 1755, 2039, 50),
    Gpu("H100 NVL", r"h100.*nvl", 90, 4096, 132, 1545, 1980, 3938, 60),
    Gpu("GH200", r"gh200", 90, 4096, 132, 1830, 1980, 4900, 60),  # 144 GB; with 96 GB 4,000 GB/s
    Gpu("H200", r"h200", 90, 4096, 132, 1830, 1980, 4800, 60),
    Gpu("H100 SXM", r"h100|h800", 90, 4096, 132, 1830, 1980, 3350, 50),
    Gpu("B200", r"g?b200", 100, 8192, 148, 1860, 1980, 8000, 126),
    Gpu("RTX PRO 6000", r"pro 6000", 120, 1024, 188, 2617, 3090, 1792, 128),
    Gpu("RTX 5090", r"5090", 120, 512, 170, 2407, 3090, 1792, 96),
)


def gpu(name: object) -> Gpu | None:
    """The data sheet of a GPU by its name; the fastest variant where the name leaves several."""
    text = re.sub(r"[-_()/]+", " ", str(name).lower())
    return next((g for g in GPUS if re.search(g.pattern, text)), None)


def rate(arch: int, dtype: str, geforce: bool = False) -> tuple[float, float] | None:
    """FLOP per clock and SM: (what no kernel exceeds, what one that keeps the precision of its name reaches).

    The first allows fp16 accumulation where that is faster, and TF32 for fp32. None: not known.
    """
    if arch not in TENSOR:
        return None
    full = TENSOR[arch]
    tensor = GEFORCE.get(arch, full) if geforce else full
    if dtype == "fp16":
        return full, tensor
    if dtype == "bf16":
        return (tensor, tensor) if arch >= 80 else None
    if dtype == "fp8":
        return (2 * full, 2 * tensor) if arch >= 89 else None
    shader = SHADER.get(arch, 256)
    if dtype in ("tf32", "fp32"):
        tf32 = max(tensor / 2, shader) if arch >= 80 else shader
        return tf32, tf32 if dtype == "tf32" else shader
    return (FP64.get(arch, 4), FP64.get(arch, 4)) if dtype == "fp64" else None


class Limits(NamedTuple):
    """Ceilings in FLOP/s and B/s; None: not known."""

    flops_hard: float | None  # what no kernel passes
    bytes_hard: float | None
    flops_reached: float | None  # by a matrix product or a copy on this machine, or else what the data sheet says
    bytes_reached: float | None
    l2_bytes: float = 0.0
    measured: bool = False  # those reached were measured
    gpu: bool = True

    def floor_ms(self, flops: float, size: float, reached: bool = False) -> float | None:
        """Milliseconds for so much work at the hard ceilings, or at those reached; None where neither is known."""
        F, W = (self.flops_reached, self.bytes_reached) if reached else (self.flops_hard, self.bytes_hard)
        return max((1e3 * amount / top for amount, top in ((flops, F), (size, W)) if top), default=None)


def of_gpu(sheet: Gpu, dtype: str) -> Limits:
    """The ceilings of a GPU of which only the name is known."""
    per_clock = rate(sheet.arch, dtype, geforce=sheet.tensor == GEFORCE.get(sheet.arch))
    hard, rated = (None, None) if per_clock is None else (sheet.sms * 1e6 * each for each in per_clock)
    memory = sheet.gb_s * 1e9
    return Limits(hard and hard * sheet.max_mhz, memory, rated and rated * sheet.boost_mhz, memory, sheet.l2_mb * 2**20)


def of_device(arch: int, sm_count: int, clock_max_mhz: float, name: str, dtype: str) -> float | None:
    """FLOP/s that a device at hand cannot pass: from what it says of itself and never from a table of names."""
    per_clock = rate(arch, dtype, geforce="geforce" in name.lower())
    return None if per_clock is None else sm_count * per_clock[0] * clock_max_mhz * 1e6
