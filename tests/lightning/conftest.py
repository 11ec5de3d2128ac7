"""The GPU that calls of the CUDA backend are made for."""

from __future__ import annotations

import pytest

from fulmen import hardware
from fulmen.hardware import TARGETS


@pytest.fixture
def h200(monkeypatch):
    monkeypatch.setattr(hardware, "of", lambda device: TARGETS[90])
