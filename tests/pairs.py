"""Fewer cases, in which every pair of option values still occurs: most mistakes need no more than two."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Mapping, Sequence


def pairs(case: Mapping[str, Hashable]) -> set[tuple[Hashable, ...]]:
    """Every two options with their values; of a case with one option, that."""
    return set(itertools.combinations(sorted(case.items()), min(2, len(case))))


def covering(cases: Sequence[Mapping[str, Hashable]]) -> list[int]:
    """Which of these cases have every pair that occurs in any of them.

    Greedy: always the case with the most pairs that are still missing, of equals the first.
    """
    of = [pairs(case) for case in cases]
    missing, chosen = set().union(*of), []
    while missing:
        best = max(range(len(cases)), key=lambda i: len(of[i] & missing))
        chosen.append(best)
        missing -= of[best]
    return sorted(chosen)
