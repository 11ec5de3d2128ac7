"""Slopes s of the per-head decay exp(-s), each exactly as the models that use it define them.

Every builder returns an fp32 tensor (H,) on the CPU; move it with `.to(device)`. Checkpoints depend on these
numbers, quirks included: take the builder of the model family, not the one that looks right.
"""

from __future__ import annotations

import torch

from fulmen.boundary import as_int

__all__ = ["alibi", "minimax", "ring"]


def alibi(num_heads: int) -> torch.Tensor:
    """ALiBi's geometric slopes 2^(-8 h / H), h = 1..H (TransNormerLLM, Lightning Attention).

    If H is no power of two: the slopes of the power of two below, then every other one of the power above.
    """
    num_heads = _heads(num_heads)
    below = 1 << (num_heads.bit_length() - 1)
    slopes = [2.0 ** (-8.0 * h / below) for h in range(1, below + 1)]
    slopes += [2.0 ** (-4.0 * h / below) for h in range(1, 2 * below, 2)]
    return torch.tensor(slopes[:num_heads], dtype=torch.float32)


def minimax(num_heads: int, layer: int, num_layers: int) -> torch.Tensor:
    """MiniMax-Text-01 and M1 in transformers: 2^(-8 h / H) for any H, times 1 - layer / (L - 1 + 1e-5) + 1e-5.

    `layer` counts from 0. The last layer hardly decays.
    """
    num_heads = _heads(num_heads)
    _check_layer(layer, num_layers)
    h = torch.arange(1, num_heads + 1, dtype=torch.float64)
    factor = 1 - layer / (num_layers - 1 + 1e-5) + 1e-5
    return (torch.exp2(-8.0 * h / num_heads) * factor).to(torch.float32)


def ring(num_heads: int, layer: int, num_layers: int) -> torch.Tensor:
    """Ring- and Ling-linear (Bailing MoE v2.5): ALiBi slopes times 1 - (layer - 1) / (L - 1) + 1e-5.

    `layer` counts from 0, so layer 0 decays faster than ALiBi: the published weights were trained that way.
    """
    _check_layer(layer, num_layers)
    return alibi(num_heads) * (1 - (layer - 1) / max(num_layers - 1, 1) + 1e-5)


def _heads(num_heads: int) -> int:
    if (heads := as_int(num_heads)) < 1:
        raise ValueError(f"num_heads={num_heads!r}: must be an int of at least 1")
    return heads


def _check_layer(layer: int, num_layers: int) -> None:
    if not 0 <= as_int(layer) < as_int(num_layers):
        raise ValueError(f"layer={layer}: layers count from 0 to num_layers - 1, with num_layers={num_layers}")
