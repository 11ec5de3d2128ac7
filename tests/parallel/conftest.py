"""One group of processes for each number of ranks, kept from test to test."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

_spec = importlib.util.spec_from_file_location("fulmen_test_ranks", Path(__file__).parent / "ranks.py")
ranks = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(ranks)


@pytest.fixture(scope="session")
def nursery():
    """nursery("cpu"): the process that groups on that device are forked from."""
    started = {}

    def of(device: str) -> ranks.Nursery:
        if device not in started:
            started[device] = ranks.Nursery(device)
        return started[device]

    yield of
    for process in started.values():
        process.close()


@pytest.fixture(scope="session")
def _pools(nursery):
    pools = {}
    yield pools
    for pool in pools.values():
        pool.close()


@pytest.fixture
def on_ranks(_pools, nursery):
    """on_ranks(4, "check_lightning", "values", ...) calls that function on 4 ranks; any error on any of them fails."""

    def run(size: int, module: str, function: str, transport: str = "gloo", **arguments) -> None:
        key = size, arguments.get("device", "cpu"), transport
        pool = _pools.get(key) or ranks.Pool(nursery(key[1]), size, transport=transport)
        _pools[key] = pool
        wrong = pool.run(module, function, **arguments)
        if any(wrong):
            _pools.pop(key).close()
            told = dict.fromkeys(text for text in wrong if text)
            pytest.fail("\n".join(f"rank {wrong.index(text)}: {text}" for text in told), pytrace=False)

    return run


@pytest.fixture
def new_pool(nursery):
    """new_pool(size, timeout): a group of processes for one test."""
    pools = []

    def start(size: int, timeout: float):
        pools.append(ranks.Pool(nursery("cpu"), size, timeout))
        return pools[-1]

    yield start
    for pool in pools:
        pool.close()
