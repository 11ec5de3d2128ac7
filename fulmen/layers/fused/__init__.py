"""Fused operations of the layers: what lies between their products on a GPU, in one pass over memory.

Each replaces several PyTorch operations in plain eager mode; compilers, modes, transforms and other devices take the
PyTorch operations themselves. `projections` adds up gradients inside products; the other files hold Triton kernels,
`linear` those of products of few rows.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from fulmen import hardware, plans
from fulmen.boundary import is_plain_eager


def serves(*tensors: Tensor) -> bool:
    """Whether the Triton kernels take these tensors."""
    first = tensors[0]
    return (
        first.is_cuda
        and first.dtype in (torch.bfloat16, torch.float16, torch.float32)
        and are_alike(*tensors)
        and is_plain_eager(*tensors)
        and torch.autograd.forward_ad._current_level < 0
        and not any(x.is_neg() for x in tensors)
        and hardware.of(first.device).arch >= 80
    )


def are_alike(*tensors: Tensor) -> bool:
    """Whether all have the first one's dtype and device, and contiguous rows that are not empty."""
    dtype, device = tensors[0].dtype, tensors[0].device
    return all(x.dtype == dtype and x.device == device and x.stride(-1) == 1 and x.numel() > 0 for x in tensors)


def are_readable(*tensors: Tensor) -> bool:
    """Whether kernels get the numbers of all these by their addresses: on one device, none stored as its negative."""
    return all(x.device == tensors[0].device and not x.is_neg() for x in tensors)


def kernels_for(module: str, *tensors: Tensor) -> Any:
    """`fulmen.layers.fused.<module>` if its kernels take these tensors, else None."""
    if not serves(*tensors):
        return None
    try:
        return importlib.import_module(f"fulmen.layers.fused.{module}")
    except ImportError:  # no Triton
        return None


def saved(ctx: Any) -> tuple[Any, ...]:
    """The tensors that a forward saved, contiguous as they were: hooks of saved tensors may hand back other strides."""
    return tuple(x if x is None else x.resolve_neg().contiguous() for x in ctx.saved_tensors)


def saved_rows(ctx: Any) -> tuple[Any, ...]:
    """As `saved`, but what is (B, N, ...) may be slices of rows, at equal distances, as it was."""
    return tuple(x if x is None or in_rows(x) else x.resolve_neg().contiguous() for x in ctx.saved_tensors)


def in_rows(x: Tensor) -> bool:
    """Whether x (B, N, ...) has what follows its first two dimensions side by side, and rows at equal distances."""
    if x.ndim < 3 or x.is_neg():
        return False
    size = 1
    for n, stride in zip(x.shape[:1:-1], x.stride()[:1:-1], strict=True):
        if n > 1 and stride != size:
            return False
        size *= n
    return x.stride(-1) == 1 and (x.shape[0] == 1 or x.stride(0) == x.shape[1] * x.stride(1))


def on_gpu(x: Tensor) -> bool:
    return x.is_cuda


def fused_call(
    module: str, name: str, options: Any, *tensors: Tensor | None, like: tuple[Tensor, ...] = ()
) -> tuple[Tensor, ...] | None:
    """The outputs of the fused operation `name` of a module here, without gradients; None if its kernels do not serve.

    The operation is a function of options and tensors that returns empty outputs and the launch that fills them, whose
    tensors are these, then the outputs. Repeated calls hit a plan (`fulmen.plans`).

    like  the tensors that must have the first one's dtype; all unless given
    """
    if torch.compiler.is_compiling() or tensors[0] is None or not on_gpu(tensors[0]):
        return None
    which, given = plans.given(tensors)
    key = (which, module, name, options)
    plan = plans.find(key, given)
    if plan is None:
        served = is_plain_eager(*given) and are_readable(*given)
        kernels = kernels_for(module, *(like or given)) if served else None
        if kernels is None:
            return None
        from fulmen.launch import repeated  # after Triton is known to be there

        forward = repeated(getattr(kernels, name), options)
        plan = plans.keep(key, given, plans.Plan(None, forward, lambda: forward, (), False))
    found: tuple[Tensor, ...] = plan.forward.run(*tensors)
    return found
