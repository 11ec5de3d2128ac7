"""Ranks that call differently, die or ask for what cannot be: one clear error on every rank, and no hang."""

from __future__ import annotations

import pytest

CHECKS = "check_failures"
WAYS = ["lightning", "ring", "ulysses"]


@pytest.fixture
def on_short_ranks(new_pool):
    """As on_ranks, on a group of its own that waits 3 s; returns what each rank said."""

    def run(size: int, function: str, **arguments) -> list[str | None]:
        return new_pool(size, 3.0).run(CHECKS, function, **arguments)

    return run


@pytest.mark.parametrize("way", WAYS)
def test_different_calls(on_ranks, way):
    on_ranks(4, CHECKS, "different_calls", way=way)


@pytest.mark.parametrize("way", WAYS)
def test_refused_before_any_communication(on_ranks, way):
    on_ranks(4, CHECKS, "refused_alone", way=way)


@pytest.mark.parametrize(
    ("way", "when"), [("lightning", "before"), ("lightning", "forward"), ("ring", "backward"), ("ulysses", "backward")]
)
def test_a_rank_dies(on_short_ranks, way, when):
    *others, dead = on_short_ranks(3 if way == "ring" else 2, "a_rank_dies", way=way, when=when)
    assert others == [None] * len(others), others
    assert dead == "the process ended with 7"


def test_a_shape_seen_before(on_short_ranks):
    assert on_short_ranks(2, "a_shape_seen_before", way="lightning") == [None, None]


def test_a_rank_dies_saving(on_short_ranks, tmp_path):
    first, dead = on_short_ranks(2, "a_rank_dies_saving", folder=str(tmp_path))
    assert first is None, first
    assert dead == "the process ended with 7"


def test_saving_in_two_places(on_ranks, tmp_path):
    on_ranks(2, CHECKS, "saving_in_two_places", folder=str(tmp_path))


def test_loading_another_model(on_ranks, tmp_path):
    on_ranks(2, CHECKS, "loading_another_model", folder=str(tmp_path))


def test_a_dtype_that_is_not_moved(on_ranks):
    on_ranks(2, CHECKS, "a_dtype_that_is_not_moved")


@pytest.mark.parametrize("way", ["lightning", "ring", "ulysses"])
def test_no_second_derivative(on_ranks, way):
    on_ranks(2, CHECKS, "no_second_derivative", way=way)


def test_one_rank(on_ranks):
    on_ranks(2, CHECKS, "one_rank")


def test_groups(on_ranks):
    on_ranks(4, CHECKS, "groups")
