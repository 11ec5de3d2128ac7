"""flash-linear-attention's chunked kernels, where that is installed."""

from __future__ import annotations

from typing import Any

import torch

from fulmen.bench.baselines import absent, version_of

COMPUTES = "lightning"


def version() -> str:
    return version_of("flash-linear-attention", "fla-core")


def refuses(case: dict[str, Any], device: torch.device) -> str | None:
    if case["H"] != case["H_KV"]:
        return f"needs as many heads of k and v as of q, here H={case['H']}, H_KV={case['H_KV']}"
    if device.type != "cuda":
        return f"kernels for GPUs, and the device is {device}"
    return absent("fla", "flash-linear-attention")


def attend(x: Any) -> torch.Tensor:
    return call("chunk_simple_gla", x)


def call(name: str, x: Any) -> torch.Tensor:
    """One of the package's functions, by its name."""
    from fla.ops import simple_gla  # type: ignore[import-not-found, unused-ignore]

    q, k, v = (y.transpose(1, 2) for y in (x.q, x.k, x.v))
    o, _ = getattr(simple_gla, name)(q, k, v, g_gamma=None if x.decay is None else -x.decay, scale=x.scale)
    return o.transpose(1, 2)
