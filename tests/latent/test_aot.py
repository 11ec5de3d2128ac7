"""The Triton kernels compiled, without a GPU, for each architecture we promise: they fit and do not spill."""

from __future__ import annotations

import pytest

from fulmen.hardware import TARGETS
from tests.aot import LatentCase

PROMISED = [LatentCase(arch, H=H) for arch in TARGETS for H in (16, 128)]
OPTIONS = [
    {"dtype": "float16"},
    {"dtype": "float32", "H": 16},
    {"page": 16},
    {"page": 64, "N_Q": 3, "H": 5},
    {"B": 256},  # keys are not split
    {"D": 96, "E": 64},
    {"D": 512},
]
VARIED = [LatentCase(arch, **o) for arch in (86, 90) for o in OPTIONS]


@pytest.mark.parametrize("case", PROMISED + VARIED, ids=str)
def test_fits_and_does_not_spill(case, compiler):
    launches = compiler(case)
    assert len(launches) == (1 if case.B == 256 else 2)
    for usage in launches:
        assert usage.shared <= TARGETS[case.arch].smem_bytes, usage
        assert usage.stack <= (16 if case.arch == 100 else 0), usage  # sm_100's own bookkeeping of tensor memory
