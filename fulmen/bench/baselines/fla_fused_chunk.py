"""flash-linear-attention's fused chunked kernels, where that is installed."""

from __future__ import annotations

from typing import Any

import torch

from fulmen.bench.baselines.fla_chunk import COMPUTES, call, refuses, version

__all__ = ["COMPUTES", "attend", "refuses", "version"]


def attend(x: Any) -> torch.Tensor:
    return call("fused_chunk_simple_gla", x)
