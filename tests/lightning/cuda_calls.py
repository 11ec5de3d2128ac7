"""Calls of the CUDA backend as an H200 would see them; the fixture `h200` is in conftest.py."""

from __future__ import annotations

import torch

from fulmen.lightning.spec import LightningSpec

CUDA = torch.device("cuda", 0)


def spec(B=1, H=1, N=512, D=64, decay=False, **changes) -> LightningSpec:
    return LightningSpec(B, H, H, N, D, D, torch.bfloat16, CUDA, has_decay=decay)._replace(**changes)
