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
    """64 elements of a state for each thread; 32 where tokens are many, which need registers, too.

    The batch does not count, so that the bits of a row do not depend on the others. H64 D128 on an H200, share of a
    copy: fp32 B16 97 %, B64 and B256 95 %, B1 7.7 us; two tokens 90 %, four 87 %; bf16 B64 85 %.
    """
    rows = max(16, 1 << (spec.D - 1).bit_length())
    few = spec.T == 1 or (spec.T == 2 and not spec.has_draft)
    return StepTile(min(max((8192 if few else 4096) // rows, 16), 64), 4)


def choose(spec: StepSpec, hw: Hardware, backend: str = "auto") -> Choice:
    """What `backend` runs for a call it serves; "auto": the backend to try first."""
    if backend == "auto":
        return choose(spec, hw, order(spec, hw)[0])
    tile = triton_tile(spec, hw) if backend == "triton" else None
    return Choice(backend, backend, tile, 1, backend)
