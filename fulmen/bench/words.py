"""Statuses and flags in plain language: the same sentences in the page, the Markdown and the plots."""

from __future__ import annotations

from typing import NamedTuple


class Word(NamedTuple):
    """severity: "good"; "note" explains; "care": read the number with care; "bad": there is none, or do not use it."""

    severity: str
    short: str
    sentence: str


STATUSES = {
    "ok": Word("good", "measured", "Output and gradients agreed with fp64 first; then it was timed."),
    "failed": Word("bad", "wrong", "Failed the check against fp64, or raised an error. A wrong kernel gets no time."),
    "withheld": Word("bad", "withheld", "The audit found the number impossible on this hardware, so it is not shown."),
    "oom": Word("note", "no memory", "The device ran out of memory."),
    "unsupported": Word("note", "no support", "The implementation says that it cannot do this case, and why."),
    "timeout": Word("note", "too slow", "It was stopped at its time limit."),
    "interrupted": Word("note", "stopped", "The run was interrupted before this cell was finished."),
    "skipped": Word("note", "skipped", "It was not tried; the reason says why."),
}
FLAGGED = Word("care", "read with care", "Measured, but with a flag that changes how the number is to be read.")
KINDS = {"ok": STATUSES["ok"], "flagged": FLAGGED, **STATUSES}

FLAGS = {
    "IMPOSSIBLE": Word("bad", "impossible", "Faster than the hardware can move the bytes or do the arithmetic."),
    "INCONSISTENT": Word("bad", "inconsistent", "Forward and backward together do not make the total."),
    "SIDE-STREAM": Word("bad", "side stream", "Work ran outside the timed region, on another stream."),
    "SUSPECT": Word("care", "suspect", "Faster than the best this machine was measured to do; possible, but unlikely."),
    "WARM-L2": Word("care", "warm cache", "The data fits into the L2 cache, so the time says little about memory."),
    "HOST-BOUND": Word("care", "host-bound", "The host was the bottleneck: the time is of launches, not of computing."),
    "THROTTLED": Word("care", "throttled", "The device lowered its clock while this was measured."),
    "NOISY": Word("care", "noisy", "The samples spread too far for a close comparison."),
    "ANOTHER-FUNCTION": Word("note", "another function", "Computes something else: a choice of model, not of kernel."),
    "UNAUDITED": Word("note", "not audited", "No floor is known for this operation, so the number was not checked."),
}


def flag(name: str) -> Word:
    return FLAGS.get(name, Word("care", name.lower(), "A word that this version of fulmen does not know."))
