"""Measuring: `fulmen bench`, and `verify_and_time` for a kernel of your own; see docs/bench.md."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fulmen.bench.verify import Outcome, verify_and_time

__all__ = ["Outcome", "Refused", "verify_and_time"]


class Refused(Exception):
    """What was asked for cannot be done: why, in words for the user."""


def __getattr__(name: str) -> Any:  # so that results can be read where there is no torch
    if name not in __all__:
        raise AttributeError(f"module 'fulmen.bench' has no attribute {name!r}")
    from fulmen.bench import verify

    return getattr(verify, name)
