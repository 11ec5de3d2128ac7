"""Lightning Attention 2 as its authors' package has it, where that is installed."""

from __future__ import annotations

from typing import Any

import torch

from fulmen.bench.baselines import absent, version_of

COMPUTES = "lightning"


def version() -> str:
    return version_of("lightning-attn", "lightning_attn")


def refuses(case: dict[str, Any], device: torch.device) -> str | None:
    if case["H"] != case["H_KV"]:
        return f"needs as many heads of k and v as of q, here H={case['H']}, H_KV={case['H_KV']}"
    if device.type != "cuda":
        return f"a kernel for CUDA GPUs, and the device is {device}"
    return absent("lightning_attn", "lightning-attention")


def attend(x: Any) -> torch.Tensor:
    from lightning_attn.ops import lightning_attn_func  # type: ignore[import-not-found, unused-ignore]

    slopes = torch.zeros(x.q.shape[1], device=x.q.device) if x.decay is None else x.decay
    return lightning_attn_func(x.q, x.k, x.v, slopes.view(-1, 1, 1))
