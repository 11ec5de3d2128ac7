from __future__ import annotations

import itertools
from types import SimpleNamespace

from tests.pairs import covering, covering_variants, marked, pairs


def test_every_pair_occurs_in_fewer_cases() -> None:
    options = {"dtype": "abc", "case": range(7), "decay": (None, 1.0), "packed": (False, True)}
    cases = [dict(zip(options, values, strict=True)) for values in itertools.product(*options.values())]
    chosen = [cases[i] for i in covering([pairs(case) for case in cases])]
    assert 21 <= len(chosen) <= 28, "of 84; dtype and case alone have 21 pairs"
    for (a, some), (b, others) in itertools.combinations(options.items(), 2):
        assert {(case[a], case[b]) for case in chosen} == set(itertools.product(some, others))


def test_a_case_with_a_pair_of_its_own_stays() -> None:
    cases = [{"a": 1, "b": 1, "c": 1}, {"a": 1, "b": 2, "c": 1}, {"a": 1, "b": 1, "c": 1}, {"a": 2, "b": 2, "c": 2}]
    assert covering([pairs(case) for case in cases]) == [0, 1, 3]


def test_every_tile_and_every_pair_of_other_macros_is_compiled() -> None:
    tiles, flags = ((64, 2), (128, 2), (128, 3)), ("CAUSAL", "PACKED", "BF16")
    variants = [
        SimpleNamespace(macros=(("BLOCK_N", n), ("STAGES", stages), *zip(flags, values, strict=True)))
        for (n, stages), values in itertools.product(tiles, itertools.product((0, 1), repeat=3))
    ]
    chosen = [dict(variant.macros) for variant in covering_variants(variants)]
    assert len(chosen) < 8
    assert {(macros["BLOCK_N"], macros["STAGES"]) for macros in chosen} == set(tiles)
    for a, b in itertools.combinations(flags, 2):
        assert {(macros[a], macros[b]) for macros in chosen} == set(itertools.product((0, 1), repeat=2))


def test_one_call_of_each_chosen_kernel_is_not_nightly() -> None:
    kernels = [SimpleNamespace(macros=(("A", a), ("B", b), ("C", c))) for a, b, c in ((0, 0, 0), (0, 0, 1), (1, 1, 1))]
    hashable = dict(zip("xyz", map(Kernel, kernels), strict=True))
    calls = {**hashable, "again": hashable["x"]}
    assert [(one.values[0], bool(one.marks)) for one in marked(calls)] == [
        ("x", False), ("y", False), ("z", False), ("again", True),
    ]  # fmt: skip


class Kernel:
    """A variant that hashes by what it is."""

    def __init__(self, of: SimpleNamespace) -> None:
        self.macros = of.macros
