"""Fused operations of the layers: what lies between their products on a GPU, in one pass over memory.

Each replaces several PyTorch operations in plain eager mode; compilers, modes, transforms and other devices take the
PyTorch operations themselves. `rotary`, `latent`, `lightning` and `sums` hold Triton kernels; `projections` adds up
gradients inside products.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from fulmen import hardware
from fulmen.boundary import is_plain_eager


def serves(*tensors: Tensor) -> bool:
    """Whether the Triton kernels take these tensors."""
    first = tensors[0]
    return (
        first.is_cuda
        and first.dtype in (torch.bfloat16, torch.float16, torch.float32)
        and all(x.dtype == first.dtype and x.stride(-1) == 1 and x.numel() > 0 for x in tensors)
        and is_plain_eager(*tensors)
        and torch.autograd.forward_ad._current_level < 0
        and not any(x.is_neg() for x in tensors)
        and hardware.of(first.device).arch >= 80
    )


def kernels_for(module: str, *tensors: Tensor) -> Any:
    """`fulmen.layers.fused.<module>` if its kernels take these tensors, else None."""
    if not serves(*tensors):
        return None
    try:
        return importlib.import_module(f"fulmen.layers.fused.{module}")
    except ImportError:  # no Triton
        return None
