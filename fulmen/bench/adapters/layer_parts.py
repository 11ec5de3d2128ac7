"""What a layer is made of, each part on inputs of its own: every projection as one product, and the attention kernel.

Timed in turns with the layer it shows what the layer adds: norms, RoPE, joining q and k, sums of gradients.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fulmen.bench import floors
from fulmen.bench.adapters import dtype_of, layer, normal
from fulmen.bench.gate import Formula, Problem
from fulmen.flash.op import flash_attention

BACKENDS_OF, KEYS = layer.BACKENDS_OF, layer.KEYS
complete, spec, launches, attend_fully = layer.complete, layer.spec, layer.launches, layer.attend_fully


def function(case: dict[str, Any]) -> str:
    return f"parts of a {layer.function(case)}"


def problem(case: dict[str, Any], device: torch.device, seed: int) -> Problem:
    return drawn(case, device, seed, "eager")


def small(case: dict[str, Any], device: torch.device, seed: int, fully: bool = False) -> Problem:
    return drawn(layer.shrunk(case), device, seed, "reference")


def drawn(case: dict[str, Any], device: torch.device, seed: int, exactly: str) -> Problem:
    """Arguments x, w of each product, then q, k, v as projections leave them: (B, N, H, D)."""
    generator = torch.Generator(device).manual_seed(seed)
    B, N, H, H_KV, D, E = (case[key] for key in ("B", "N", "H", "H_KV", "D", "E"))
    sizes = floors.projections_of(case)
    if case["layer"] == "mhsa":  # q, k and v are one product
        sizes = [(sizes[0][0], sum(out for _, out in sizes[:3])), sizes[3]]
    made = functools.partial(normal, dtype=dtype_of(case), generator=generator)
    products = [t for a, b in sizes for t in (made((B, N, a)), made((b, a)) * a**-0.5)]
    x = [t.requires_grad_() for t in (*products, made((B, N, H, D)), made((B, N, H_KV, D)), made((B, N, H_KV, E)))]
    names = [f"{name}{i}" for i in range(len(sizes)) for name in "xw"] + ["q", "k", "v"]
    return Formula(functools.partial(parts, exactly, case["causal"])).problem((case["causal"], x), x, names, seed)


def parts(backend: str, causal: bool, *x: Tensor) -> list[Tensor]:
    *products, q, k, v = x
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    pairs = zip(products[::2], products[1::2], strict=True)
    return [*(F.linear(a, w) for a, w in pairs), flash_attention(q, k, v, causal=causal, backend=backend)]


def attend(backend: str) -> Callable[[Any], list[Tensor]]:
    return lambda given: parts(backend, given[0], *given[1])
