"""Fewer cases, in which every pair of option values still occurs: most mistakes need no more than two."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import pytest


def pairs(options: Mapping[str, Any]) -> set[Hashable]:
    """Every two options with their values."""
    return set(itertools.combinations(sorted((name, repr(value)) for name, value in options.items()), 2))


def covering(cases: Sequence[set[Hashable]]) -> list[int]:
    """Which of these cases have every fact that any of them has.

    Greedy: always the case with the most facts that are still missing, of equals the first; then without those whose
    facts the others have.
    """
    missing, chosen = set().union(*cases), []
    while missing:
        best = max(range(len(cases)), key=lambda i: len(cases[i] & missing))
        chosen.append(best)
        missing -= cases[best]
    times = collections.Counter(fact for i in chosen for fact in cases[i])
    for i in list(chosen):
        if all(times[fact] > 1 for fact in cases[i]):
            chosen.remove(i)
            times.subtract(cases[i])
    return sorted(chosen)


SIZES = {"CONSUMERS", "BLOCK_N", "STAGES", "BLOCKS_PER_SM", "BOX", "TAKE_TURNS", "TILES", "VALUE_DIM"}


def covering_variants(variants: Sequence[Any]) -> list[Any]:
    """Of compiled kernels those with every pair of macros, but each tile and each size of a page only once."""

    def facts(variant: Any) -> set[Hashable]:
        macros = dict(variant.macros)
        flags = {name: value for name, value in macros.items() if name not in SIZES}
        flags["PAGE"] = macros.get("PAGE", 0) > 0
        tile = tuple(sorted((name, value) for name, value in macros.items() if name in SIZES))
        return pairs(flags) | {(macros.get("HEAD_DIM"), tile), ("PAGE", macros.get("PAGE"))}

    return [variants[i] for i in covering([facts(variant) for variant in variants])]


def marked(variants: Mapping[Any, Any]) -> list[Any]:
    """Calls, with the kernel that each takes, as parameters of a test: nightly, but for one call of each kernel that
    `covering_variants` chooses."""
    chosen, parameters = set(covering_variants(list(dict.fromkeys(variants.values())))), []
    for call, variant in variants.items():
        parameters.append(pytest.param(call, marks=[] if variant in chosen else [pytest.mark.nightly]))
        chosen.discard(variant)
    return parameters
