"""Runs of the benchmark tool draw the same seeds every time, on one thread and with a small cache to empty."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

import pytest
import torch

from fulmen.bench import timing


@pytest.fixture(scope="package", autouse=True)
def small_machine() -> Iterator[None]:
    """Calls are tiny here: threads that wait for each other and overwriting 64 MB would take most of the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timing, "CPU_CACHE", 1 << 20)
        patch.setenv("OMP_NUM_THREADS", "1")  # of processes that a test starts
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        yield
        torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def known_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secrets, "randbits", lambda bits: 1)
