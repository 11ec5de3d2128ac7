"""What a decoding step runs: the backend and its tile.

Everything here is data or a pure function of (spec, hw), as in `fulmen.lightning.policy`.
"""

from __future__ import annotations

from typing import NamedTuple

from fulmen.dispatch import Choice
from fulmen.hardware import Hardware
from fulmen.step.spec import StepSpec


class StepTile(NamedTuple):
    """Of backend `triton`."""

    block_v: int  # value columns of a program
    num_warps: int

    def __str__(self) -> str:
        return f"{self.block_v} columns, {self.num_warps} warps"


def order(spec: StepSpec, hw: Hardware) -> tuple[str, ...]:
    """Backends in the order "auto" tries them."""
    if spec.device.type != "cuda":  # triton would be interpreted
        return "eager", "triton", "reference"
    return "triton", "eager", "reference"


def triton_tile(spec: StepSpec, hw: Hardware) -> StepTile:
    """Whole columns, 32 elements of the state a thread. The same for every batch, as what bf16 rounds together decides
    its bits."""
    columns = 4096 // max(16, 1 << (spec.D - 1).bit_length())
    return StepTile(min(max(columns, 16), 64), 4)


def choose(spec: StepSpec, hw: Hardware, backend: str = "auto") -> Choice:
    """What `backend` runs for a call it serves; "auto": the backend to try first."""
    if backend == "auto":
        return choose(spec, hw, order(spec, hw)[0])
    tile = triton_tile(spec, hw) if backend == "triton" else None
    return Choice(backend, backend, tile, 1, backend)
