"""torch's scaled_dot_product_attention, FlashAttention-2 and nothing else."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from fulmen import hardware
from fulmen.bench.baselines.sdpa import attend, version

__all__ = ["COMPUTES", "attend", "pinned", "refuses", "version"]

COMPUTES = "flash"


def refuses(case: dict[str, Any], device: torch.device) -> str | None:
    if device.type != "cuda":
        return f"a kernel for CUDA GPUs, and the device is {device}"
    from fulmen.bench.adapters import flash
    from fulmen.flash.sdpa import unsupported_reason

    return unsupported_reason(flash.spec(flash.complete(case), device), hardware.of(device), "flash")


def pinned() -> AbstractContextManager[None]:
    return sdpa_kernel(SDPBackend.FLASH_ATTENTION)
