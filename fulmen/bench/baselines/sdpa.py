"""torch's scaled_dot_product_attention, choosing for itself."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

COMPUTES = "flash"


def version() -> str:
    return torch.__version__


def refuses(case: dict[str, Any], device: torch.device) -> str | None:
    if case["causal"] and "N_Q" in case:
        return f"is_causal counts from the first query and key, ours from the last: N_Q={case['N_Q']}, N={case['N']}"
    return None


def attend(x: Any) -> torch.Tensor:
    return scaled_dot_product_attention(
        x.q, x.k, x.v, is_causal=bool(x.causal), enable_gqa=x.q.shape[1] != x.k.shape[1]
    )
