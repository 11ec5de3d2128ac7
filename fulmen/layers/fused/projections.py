"""Several projections of one x: in one launch where there are few rows, and with one sum for their gradients of x.

Without gradients `linear.py` computes all projections of a decoding step in one launch. With gradients autograd lets
each product write its own gradient of x and adds them in separate passes over memory; here every product after the
first adds to what is there, which costs next to nothing. Both ask for plain Linear modules and call others as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrize import is_parametrized

from fulmen.boundary import is_plain_eager, once_differentiable
from fulmen.layers.fused import fused_call, on_gpu

MAX_ROWS = 16  # that kernels of decoding steps multiply
MAX_ROWS_TOGETHER = 64  # if there are several weights, which BLAS multiplies one by one
DTYPES = (torch.bfloat16, torch.float16)  # in fp32 torch may multiply in TF32
MAX_WEIGHTS = 3  # of one launch
_global = torch.nn.modules.module


class Facts(NamedTuple):
    """Beside the tensors.

    activation  of the first projection
    eps         of the norm that `squares` completes
    early       whether another launch of the same step comes before, so that weights may be read before it has ended
    """

    activation: str | None = None
    eps: float = 0.0
    early: bool = False


NO_FACTS = Facts()


def has_no_hooks(*modules: nn.Module | None, kind: type[nn.Module], allowed: int = 0) -> bool:
    """Whether each is exactly of this kind and nothing keeps or changes what it takes and returns.

    allowed  how many forward hooks it may have on either side all the same
    """
    for module in modules:
        if type(module) is not kind or is_watched(module, allowed):
            return False
    return not _hooks_everything()


def _hooks_everything() -> bool:
    """Whether there are hooks on all modules, as profilers set."""
    return bool(
        _global._global_forward_hooks or _global._global_forward_pre_hooks or _global._global_backward_hooks
        or _global._global_backward_pre_hooks
    )  # fmt: skip


def is_watched(module: nn.Module, allowed: int = 0) -> bool:
    """Whether somebody wrapped its forward, or has more hooks on it than `allowed` on either side."""
    return (
        "forward" in module.__dict__
        or max(len(module._forward_hooks), len(module._forward_pre_hooks)) > allowed
        or bool(module._backward_hooks or module._backward_pre_hooks)
    )


def is_its_weights(module: nn.Module, kind: type[nn.Module], planned: bool = False) -> bool:
    """Whether a call of the module would do what its weights say: of this kind, perhaps parametrised, without hooks.

    For layers that read weights and do not call the module. Hooks on all modules, as profilers set, do not count.
    """
    known = type(module) is kind or (is_parametrized(module) and type(module).__bases__ == (kind,))
    return known and not is_watched(module, int(planned))


def is_plain(*linears: nn.Module | None, planned: bool = False) -> bool:
    """Whether each is a Linear without hooks; one that is `planned` has the hooks of a tensor-parallel plan."""
    return has_no_hooks(*linears, kind=nn.Linear, allowed=int(planned))


def are_few(x: Tensor, rows: int = MAX_ROWS) -> bool:
    """Whether x (B, N, K) has at most so many rows, on a GPU, in a dtype that steps' kernels multiply."""
    return on_gpu(x) and x.dtype in DTYPES and x.ndim == 3 and x.shape[0] * x.shape[1] <= rows


def is_step(x: Tensor, rows: int = MAX_ROWS) -> bool:
    """Whether steps' kernels may take x (B, N, K): few rows, evenly spaced, without gradients, compiler or autocast."""
    return (
        not torch.compiler.is_compiling()
        and are_few(x, rows)
        and (x.shape[1] == 1 or x.is_contiguous())
        and not torch.is_grad_enabled()
        and not torch._C._is_any_autocast_enabled()
    )


def few_rows(
    x: Tensor, *linears: nn.Module, norm: Tensor | None = None, squares: Tensor | None = None, facts: Facts = NO_FACTS
) -> tuple[Tensor, ...] | None:
    """linear(x) of each, in one launch (`linear.py`); None if its kernels do not compute these projections of x.

    norm     of two linears: the weight of an RMSNorm that the first y is about to pass. That y is multiplied by it, and
             a third result are its squares
    squares  of x, if it is such a y: completes the norm
    """
    if not is_step(x, MAX_ROWS if len(linears) == 1 or norm is not None else MAX_ROWS_TOGETHER):
        return None
    parameters = parameters_of(*linears, *[None] * (MAX_WEIGHTS - len(linears)))
    if parameters is None:
        return None
    like = () if squares is None else tuple(t for t in (x, norm, *parameters) if t is not None)  # squares: fp32
    return fused_call("linear", "linears", facts, x, norm, squares, *parameters, like=like)


def parameters_of(*linears: nn.Module | None) -> tuple[Tensor | None, ...] | None:
    """The weights, then the biases, of these Linear modules; None if a kernel must not read them instead of a call."""
    weights: list[Tensor | None] = []
    biases: list[Tensor | None] = []
    for linear in linears:
        weight = bias = None
        if linear is not None:
            parameters = linear._parameters
            weight = parameters.get("weight")
            if type(linear) is not nn.Linear or is_watched(linear) or weight is None or "bias" not in parameters:
                return None  # the last two: somebody put other tensors there
            if not weight.is_contiguous():
                return None
            bias = parameters["bias"]
        weights.append(weight)
        biases.append(bias)
    return None if _hooks_everything() else (*weights, *biases)


def project(x: Tensor, *linears: nn.Module, early: bool = False) -> Sequence[Tensor]:
    """linear(x) of each; `early` as in `Facts`."""
    found = few_rows(x, *linears, facts=Facts(early=early))
    if found is not None:
        return found
    if x.requires_grad and torch.is_grad_enabled() and len(linears) > 1 and x.is_cuda and is_plain(*linears):
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
        flat = x.reshape(-1, x.shape[-1])
        dx = None
        found: list[Tensor | None] = []
        for i, (dy, weight) in enumerate(zip(grads, weights, strict=True)):
            wants_weight, wants_bias = ctx.needs_input_grad[1 + 2 * i : 3 + 2 * i]
            if dy is None:
                found += [None, None]
                continue
            dy = dy.reshape(-1, dy.shape[-1])
            found.append(dy.T @ flat if wants_weight else None)
            found.append(dy.sum(0) if wants_bias else None)
            if ctx.needs_input_grad[0]:
                dx = dy @ weight if dx is None else dx.addmm_(dy, weight)
        return None if dx is None else dx.view(x.shape), *found
