"""The Triton kernels of decoding steps compiled, without a GPU, for each architecture: no spills, no large memory."""

from __future__ import annotations

import pytest

from fulmen.hardware import TARGETS
from tests.aot import StepCase

PROMISED = [
    StepCase(arch, T, D, state=state)
    for arch in TARGETS for T, D in ((1, 64), (1, 128), (8, 128), (1, 256)) for state in ("float32", "bfloat16")
]  # fmt: skip
OPTIONS = [
    {"T": 4, "draft": True},
    {"T": 8, "draft": True, "state": "bfloat16"},
    {"D": 80, "E": 48, "H": 6, "H_KV": 2},
    {"dtype": "float32", "slots": False},
    {"dtype": "float16", "decay": False, "B": 1},
    {"draft": True, "early": True},
    {"draft": True, "early": True, "state": "bfloat16"},
    {"early": True},
    {"draft": True, "early": True, "gated": True, "B": 16},
    {"T": 8, "gated": True, "E": 48},
]
VARIED = [StepCase(arch, **options) for arch in (86, 90) for options in OPTIONS]


@pytest.mark.parametrize("case", PROMISED + VARIED, ids=str)
def test_fits_and_does_not_spill(case, compiler):
    launches = compiler(case)
    assert len(launches) == 1 + case.draft
    for usage in launches:
        assert usage.shared <= 8192, usage  # only o crosses threads
        assert usage.stack == 0, usage
