"""Lightning attention over ranks is that of one process; what runs on the ranks is `check_lightning.py`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

CHECKS = "check_lightning"
RANKS = [2, 4, 8]


@pytest.mark.parametrize("size", RANKS)
@pytest.mark.parametrize("cut", ["even", "uneven", "empty", "first"])
def test_values_and_gradients(on_ranks, size, cut):
    on_ranks(size, CHECKS, "values", cut=cut, B=2, H=5, N=160, D=16, E=24, decay="mixed", initial_state=True)


@pytest.mark.parametrize("cut", ["even", "uneven", "empty", "first"])
@pytest.mark.parametrize("lengths", [None, [3, 100, 41, 16], [80, 0, 80, 0]])
def test_waiting_for_states_first(on_ranks, cut, lengths):
    options = {"H": 4, "H_KV": 2, "N": 160, "D": 16, "E": 8, "decay": "mixed", "initial_state": True, "scale": 0.5}
    on_ranks(4, CHECKS, "values", cut=cut, lengths=lengths, at_once=True, **options)


@pytest.mark.parametrize("use", [["o"], ["state"]])
def test_waiting_for_states_first_without_the_rest(on_ranks, use):
    on_ranks(4, CHECKS, "values", cut="uneven", at_once=True, H=3, N=96, D=8, decay=None, use=use)


def test_who_waits():
    """Where to add is 3u of a GPU's memory traffic, and that takes longer than states travel."""
    from fulmen.parallel.lightning import waits

    def q(device: str, megabytes: int) -> Any:  # all that is looked at
        return SimpleNamespace(device=torch.device(device), numel=lambda: megabytes << 19, element_size=lambda: 2)

    assert [waits(q("cuda", size)) for size in (1, 50, 70, 1000)] == [False, False, True, True]
    assert not waits(q("cpu", 1000))


@pytest.mark.parametrize("size", RANKS)
@pytest.mark.parametrize("lengths", [[3, 100, 41, 16], [160], [1] * 160, [80, 0, 80, 0], [0, 7, 0, 0, 121, 32]])
def test_packed_sequences_cross_ranks(on_ranks, size, lengths):
    for cut in ("even", "uneven", "empty"):
        options = {"H": 4, "H_KV": 2, "D": 8, "E": 16, "decay": "mixed", "initial_state": True, "scale": 0.5}
        on_ranks(size, CHECKS, "values", cut=cut, lengths=lengths, **options)


@pytest.mark.parametrize(
    "options",
    [
        {"decay": None, "H_KV": 1},
        {"decay": "weak", "layout": "bnhd"},
        {"decay": "strong", "layout": "fused"},
        {"decay": "mixed", "use": ["o"]},
        {"decay": "mixed", "use": ["state"], "initial_state": True},
        {"decay": "mixed", "dtype": "bfloat16", "initial_state": True},
        {"decay": "weak", "dtype": "float16", "H_KV": 2},
        {"decay": "weak", "dtype": "float64"},
    ],
)
def test_options(on_ranks, options):
    on_ranks(4, CHECKS, "values", **{"H": 4, "N": 64, "D": 16, **options})


@pytest.mark.parametrize("cut", ["even", "uneven", "empty", "first"])
@pytest.mark.parametrize(
    "options",
    [
        {"decay": "token", "B": 2, "N": 160, "initial_state": True},
        {"decay": "extreme", "lengths": [3, 100, 41, 16], "initial_state": True, "scale": 0.5},
        {"decay": "token", "groups": 2, "lengths": [80, 0, 80, 0], "layout": "fused"},
        {"decay": "mixed", "groups": 1, "N": 64, "E": 24, "initial_state": True},
        {"decay": "token", "H_KV": 2, "N": 64, "dtype": "bfloat16", "use": ["o"]},
        {"decay": None, "groups": 2, "N": 64, "use": ["state"]},
    ],
)
def test_a_decay_for_each_token(on_ranks, options, cut):
    on_ranks(4, CHECKS, "values", cut=cut, **{"H": 4, "D": 16, **options})


def test_longer_than_a_piece(on_ranks):
    on_ranks(2, CHECKS, "values", H=2, N=2600, D=8, decay="mixed")


@pytest.mark.parametrize("size", RANKS)
def test_traffic_is_one_all_gather_of_states_each_way(on_ranks, size):
    for N in (16, 256):
        on_ranks(size, CHECKS, "traffic", N=N)


def test_far_ranks_are_skipped(on_ranks):
    on_ranks(8, CHECKS, "far_ranks_are_skipped")


def test_what_is_large_reaches_far(on_ranks):
    on_ranks(4, CHECKS, "what_is_large_reaches_far")


def test_parts(on_ranks):
    on_ranks(4, CHECKS, "parts")
