"""Runs of the benchmark tool draw their seeds; here they draw the same ones every time."""

from __future__ import annotations

import secrets

import pytest


@pytest.fixture(autouse=True)
def known_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secrets, "randbits", lambda bits: 1)
