"""Inputs, oracles and a derived tolerance, for tests, benchmarks and users who bring a backend.

One module for each operation, `fulmen.testing.lightning` and `fulmen.testing.flash`, with the same verbs: `inputs`
makes the arguments of a call, `evaluate` runs it with all gradients, `reference` does so in fp64, `low_precision` in
the plainest way, and `check` compares. This file holds what they share.

No tolerance is typed. The yardstick is what a plain user would get: the formula written out with ordinary PyTorch
operations in the inputs' own dtype. A backend may err `factor` times as much as that, plus one rounding of the result:

    |actual - exact| <= factor * |low - exact| + u * |exact|      in the largest element, and in the 2-norm

with u half the spacing of the dtype, factor 2 for results and 3 for gradients. NaN and Inf never pass.

A result in fp32 has no more digits than the sums it is made of, and how much of a sum a plain product loses depends on
the CPU's matrix library. So in fp32 a sum of K terms is allowed sqrt(K / 16) roundings (`carried_roundings`), not one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

FORWARD_FACTOR = 2.0
GRADIENT_FACTOR = 3.0
NORMS = (("largest", math.inf), ("2-norm", 2.0))


class Expected(NamedTuple):
    """One tensor's exact value (fp64), what the plain computation makes of it, and how much more a backend may err.

    terms  what is rounded, where that is larger than the result: the terms of a difference that cancels.
    """

    low: Tensor
    exact: Tensor
    factor: float = FORWARD_FACTOR
    roundings: float = 1.0
    terms: Tensor | None = None

    def bound(self, order: float, dtype: torch.dtype) -> float:
        """How far, in this norm, a result in `dtype` may be off; see the top of the file."""
        plain, size = (float(torch.linalg.vector_norm(y, order)) for y in (self.low.double() - self.exact, self.exact))
        if self.terms is not None:
            size = max(size, float(torch.linalg.vector_norm(self.terms, order)))
        return self.factor * plain + self.roundings * torch.finfo(dtype).eps / 2 * size


def carried_roundings(terms: int) -> float:
    """Of a sum that is carried in the result's own digits over so many terms, 16 at a time."""
    return math.sqrt(math.ceil(max(terms, 1) / 16))


def results_of(
    formula: Callable[..., Any], arguments: Sequence[Any], douts: Sequence[Tensor], dtype: torch.dtype | None = None
) -> list[Tensor]:
    """A formula's results, then the gradients of all arguments that require one, in `dtype` or in their own."""
    own = [_cast(t, dtype) for t in arguments]
    given = formula(*own)
    outs = tuple(given) if isinstance(given, list | tuple) else (given,)
    if not (leaves := [t for t in own if isinstance(t, Tensor) and t.requires_grad]):
        return list(outs)
    back = [dout.to(o.dtype) for dout, o in zip(douts, outs, strict=True)]
    return [*(o.detach() for o in outs), *torch.autograd.grad(outs, leaves, back, materialize_grads=True)]


def _cast(t: Any, dtype: torch.dtype | None) -> Any:
    if not isinstance(t, Tensor):
        return t
    new = t.detach().to(dtype) if dtype is not None and t.is_floating_point() else t.detach().clone()
    return new.requires_grad_(t.requires_grad)


def expected(
    formula: Callable[..., Any], arguments: Sequence[Any], douts: Sequence[Tensor], terms: int = 1
) -> list[Expected]:
    """What `results_of` a backend must be where the formula is the plain computation; `terms`: of its longest sum."""
    low, exact = (results_of(formula, arguments, douts, dtype) for dtype in (None, torch.float64))
    factors = [FORWARD_FACTOR] * len(douts) + [GRADIENT_FACTOR] * (len(exact) - len(douts))
    roundings = [carried_roundings(terms) if y.dtype == torch.float32 else 1.0 for y in low]
    return [Expected(*one) for one in zip(low, exact, factors, roundings, strict=True)]


def rows(
    B: int, heads: int, N: int, size: int, *, dtype: torch.dtype, device: str | torch.device,
    layout: str = "bhnd", generator: torch.Generator | None = None,
) -> Tensor:  # fmt: skip
    """A normal (B, heads, N, size) tensor; "bnhd" is one allocated as (B, N, heads, size) and transposed."""
    shape = (B, heads, N, size) if layout == "bhnd" else (B, N, heads, size)
    x = normal(shape, generator, device).to(dtype)
    return x if layout == "bhnd" else x.transpose(1, 2)


def fused_rows(
    B: int, heads: Sequence[int], N: int, sizes: Sequence[int], *, dtype: torch.dtype,
    device: str | torch.device, generator: torch.Generator | None = None,
) -> list[Tensor]:  # fmt: skip
    """q, k, v as views of the one (B, N, features) tensor a fused projection returns."""
    widths = [h * size for h, size in zip(heads, sizes, strict=True)]
    x = normal((B, N, sum(widths)), generator, device).to(dtype)
    parts = x.split(widths, dim=2)
    return [p.unflatten(2, (h, size)).transpose(1, 2) for p, h, size in zip(parts, heads, sizes, strict=True)]


def normal(shape: tuple[int, ...], generator: torch.Generator | None, device: str | torch.device) -> Tensor:
    """Drawn on the CPU, so that a seed means the same numbers on every device."""
    if torch.device(device).type == "meta":
        return torch.empty(shape, device=device)
    return torch.randn(shape, generator=generator).to(device)


def assert_close(
    name: str,
    actual: Tensor,
    low: Tensor,
    exact: Tensor,
    factor: float = FORWARD_FACTOR,
    roundings: float = 1.0,
    terms: Tensor | None = None,
) -> None:
    """`actual` errs at most `factor` times as much as `low`, plus `roundings`; see the top of the file.

    terms  what is rounded, where that is larger than the result: the terms of a difference that cancels.
    """
    assert actual.shape == exact.shape, f"{name} has shape {tuple(actual.shape)}, want {tuple(exact.shape)}"
    if not exact.numel():
        return
    for what, y in ((name, actual), ("the plain computation of it", low)):
        assert y.isfinite().all(), f"{what} is not finite: {int((~y.isfinite()).sum())} of {y.numel()} elements"
    error = (actual.double() - exact).abs()
    wanted = Expected(low, exact, factor, roundings, terms)
    for norm, order in NORMS:
        got, plain, size = (float(torch.linalg.vector_norm(y, order)) for y in (error, low.double() - exact, exact))
        bound = wanted.bound(order, actual.dtype)
        if not got <= bound:  # also when NaN
            flat = error.nan_to_num(math.inf).argmax()
            at = tuple(int(i) for i in torch.unravel_index(flat, error.shape))
            raise AssertionError(
                f"{name} {tuple(actual.shape)} {actual.dtype}: {norm} error {got:.3e} > {bound:.3e} = "
                f"{factor:g} * {plain:.3e} (plain {low.dtype}) + {roundings:.3g} roundings of {size:.3e}; at {at}: "
                f"{float(actual[at]):.6g}, exact {float(exact[at]):.6g}, plain {float(low[at]):.6g}"
            )
