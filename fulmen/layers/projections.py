"""Several projections of one x, whose gradients of x are added up inside the products.

Left to autograd, each product writes a gradient of x of its own, and separate passes over memory add them. Here the
second product and those after it add to what the first one wrote, which costs it next to nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from fulmen.boundary import is_plain_eager

_global = torch.nn.modules.module


def unseen(*modules: nn.Module | None, kind: type[nn.Module], hooks: int = 0) -> bool:
    """Whether each is of this kind and nothing more, so that nobody sees, keeps or changes what it takes and returns;
    but for as many hooks on either side."""
    for module in modules:
        if (
            type(module) is not kind
            or max(len(module._forward_hooks), len(module._forward_pre_hooks)) > hooks
            or module._backward_hooks
            or module._backward_pre_hooks
        ):
            return False
    return not (
        _global._global_forward_hooks or _global._global_forward_pre_hooks or _global._global_backward_hooks
        or _global._global_backward_pre_hooks
    )  # fmt: skip


def plain(*linears: nn.Module | None, planned: bool = False) -> bool:
    """Whether each is an unseen Linear. planned: under a tensor-parallel plan, whose one hook on either side is no more
    than that."""
    return unseen(*linears, kind=nn.Linear, hooks=int(planned))


def project(x: Tensor, *linears: nn.Module) -> list[Tensor]:
    """linear(x) of each."""
    if x.requires_grad and torch.is_grad_enabled() and len(linears) > 1 and x.is_cuda and plain(*linears):
        parameters: list[Any] = [p for linear in linears for p in (linear.weight, linear.bias)]
        if (
            is_plain_eager(x, *parameters)
            and all(p is None or p.dtype == x.dtype for p in parameters)
            and not torch._C._is_any_autocast_enabled()
            and torch.autograd.forward_ad._current_level < 0
        ):
            return list(Projected.apply(x, *parameters))
    return [linear(x) for linear in linears]


class Projected(torch.autograd.Function):
    """x and, of each projection, its weight and its bias or None -> the projections."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *parameters: Tensor | None) -> tuple[Tensor, ...]:
        weights, biases = parameters[::2], parameters[1::2]
        ctx.save_for_backward(x, *weights)
        ctx.set_materialize_grads(False)
        return tuple(F.linear(x, w, b) for w, b in zip(weights, biases, strict=True))  # type: ignore[arg-type]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        x, *weights = ctx.saved_tensors
        flat = x.flatten(0, -2)
        dx = None
        found: list[Tensor | None] = []
        for i, (dy, weight) in enumerate(zip(grads, weights, strict=True)):
            wants_weight, wants_bias = ctx.needs_input_grad[1 + 2 * i : 3 + 2 * i]
            if dy is None:
                found += [None, None]
                continue
            dy = dy.flatten(0, -2)
            found.append(dy.T @ flat if wants_weight else None)
            found.append(dy.sum(0) if wants_bias else None)
            if ctx.needs_input_grad[0]:
                dx = dy @ weight if dx is None else dx.addmm_(dy, weight)
        return None if dx is None else dx.view(x.shape), *found
