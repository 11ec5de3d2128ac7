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

from fulmen import decay
from fulmen.bench import floors
from fulmen.bench.adapters import dtype_of, flash, layer, lightning, makers, normal
from fulmen.bench.gate import Formula, Problem
from fulmen.testing import flash as softmax
from fulmen.testing import lightning as linear

BACKENDS_OF, KEYS, small_case = layer.BACKENDS_OF, layer.KEYS, layer.small_case
complete, spec, attend_fully, without_data = layer.complete, layer.spec, layer.attend_fully, layer.without_data


def function(case: dict[str, Any]) -> str:
    return f"parts of a {layer.function(case)}"


def drawn(
    case: dict[str, Any], device: torch.device, seed: int, fully: bool = False, one_head: int | None = None
) -> Problem:
    """The products, and attention of q, k, v as projections leave them, (B, N, H, D); both in one problem."""
    generator = torch.Generator(device).manual_seed(seed)
    made = functools.partial(normal, dtype=dtype_of(case), generator=generator)
    B, N, H, H_KV, D, E = (case[key] for key in ("B", "N", "H", "H_KV", "D", "E"))
    sizes = floors.projections_of(case)
    if case["layer"] in ("mhsa", *layer.LIGHTNING):  # q, k and v are one product
        sizes = [(sizes[0][0], sum(out for _, out in sizes[:3])), *sizes[3:]]
    pairs = [t.requires_grad_() for a, b in sizes for t in (made((B, N, a)), made((b, a)) * a**-0.5)]
    names = [f"{name}{i}" for i in range(len(sizes)) for name in "xw"]
    first = Formula(products, output="y").problem(pairs, pairs, names, seed)
    q, k, v, do = (made((B, N, h, d)).transpose(1, 2) for h, d in ((H, D), (H_KV, D), (H_KV, E), (H, E)))
    do, nothing = do.contiguous(), torch.zeros(0, device=device)
    if case["layer"] in layer.LIGHTNING:
        slopes = decay.alibi(H).to(device)
        second = lightning.as_problem(linear.Inputs(q, k, v, slopes, 1.0, None, None, do, nothing), one_head=one_head)
    else:
        x = softmax.Inputs(q, k, v, None, None, None, case["causal"], None, None, None, do, nothing)
        second = flash.as_problem(x, ("o",), one_head)

    def pick(name: str, y: Tensor) -> Tensor:
        return second.pick(name, y) if name.removeprefix("d") in ("q", "k", "v", "o") else y

    return Problem(
        (pairs, second.x), first.leaves | second.leaves, first.douts | second.douts,
        lambda: first.expected() | second.expected(), second.constants, pick,
    )  # fmt: skip


problem, small = makers(drawn, small_case)


def products(*pairs: Tensor) -> list[Tensor]:
    return [F.linear(x, w) for x, w in zip(pairs[::2], pairs[1::2], strict=True)]


def attend(backend: str) -> Callable[[Any], list[Tensor]]:
    def parts(given: Any) -> list[Tensor]:
        attention = lightning if isinstance(given[1], linear.Inputs) else flash
        return [*products(*given[0]), attention.attend(backend)(given[1])]

    return parts
