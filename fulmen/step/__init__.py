"""Decoding steps of lightning attention on a pool of states. `op.py` tells the story; each other file is a backend."""

from fulmen.step.op import lightning_step

__all__ = ["lightning_step"]
