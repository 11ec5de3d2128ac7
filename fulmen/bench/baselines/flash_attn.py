"""FlashAttention-2 as its authors' package has it, where that is installed."""

from __future__ import annotations

from typing import Any

import torch

from fulmen.bench.baselines import absent, version_of

COMPUTES = "flash"


def version() -> str:
    return version_of("flash-attn")


def refuses(case: dict[str, Any], device: torch.device) -> str | None:
    if case["dtype"] not in ("bfloat16", "float16"):
        return f"computes in bf16 and fp16, and the case is {case['dtype']}"
    if case["D"] != case["E"]:
        return f"needs E = D, here D={case['D']}, E={case['E']}"
    if device.type != "cuda":
        return f"a kernel for CUDA GPUs, and the device is {device}"
    return absent("flash_attn", "flash-attn")


def attend(x: Any) -> torch.Tensor:
    from flash_attn import flash_attn_func  # type: ignore[import-not-found, unused-ignore]

    q, k, v = (y.transpose(1, 2) for y in (x.q, x.k, x.v))
    return flash_attn_func(q, k, v, causal=bool(x.causal)).transpose(1, 2)
