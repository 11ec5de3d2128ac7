"""The Triton kernels compiled, without a GPU, for each architecture we promise: they fit and do not spill.

What each architecture picks is the table docs/internals/dispatch.md; tests/tools/test_dispatch_table.py compares it.
"""

from __future__ import annotations

import pytest

from fulmen.hardware import TARGETS
from tests.aot import Case

# The promise of the README: every head size class, both passes, decay or not, everywhere.
PROMISED = [
    Case(arch, pass_, D, decay=decay)
    for arch in TARGETS for D in (64, 128, 256)
    for pass_ in ("forward", "backward") for decay in (True, False)
]  # fmt: skip

# What else changes the generated code, once each: on the smallest shared memory and on wgmma.
OPTIONS = [
    {"dtype": "float16", "D": 128},
    {"dtype": "float32", "D": 64},
    {"dtype": "float32", "D": 128},
    {"dtype": "float32", "D": 256},
    {"D": 64, "E": 128},
    {"D": 80, "E": 48, "decay": False},
    {"D": 128, "E": 256, "states": True},
    {"H_KV": 8, "D": 128},
    {"layout": "fused", "D": 128},
    {"states": True, "D": 128},
    {"packed": True, "states": True, "D": 64},
    {"per_token": True, "D": 64},
    {"per_token": True, "D": 64, "dtype": "float32", "packed": True, "states": True},
    {"per_token": True, "D": 128},
    {"per_token": True, "D": 128, "packed": True, "states": True},
    {"per_token": True, "D": 128, "E": 64, "groups": 8},
    {"per_token": True, "backend": "triton_split", "B": 1, "H": 16, "N": 65536, "D": 64, "packed": True},
    {"backend": "triton_split", "B": 1, "H": 8, "N": 65536, "D": 64},
    {"backend": "triton_split", "B": 1, "H": 16, "N": 65536, "D": 128, "packed": True},
    {"backend": "triton_split", "B": 1, "H": 8, "N": 65536, "D": 128, "states": True},
    {"backend": "triton_split", "B": 1, "H": 40, "N": 4096, "D": 64, "states": True},  # few segments: another scan
]  # fmt: skip
VARIED = [Case(arch, pass_, **o) for arch in (86, 90) for o in OPTIONS for pass_ in ("forward", "backward")]


@pytest.mark.parametrize("case", PROMISED, ids=str)
def test_fits_and_does_not_spill(case, compiler):
    launches = compiler(case)
    assert launches
    for usage in launches:
        assert usage.shared <= TARGETS[case.arch].smem_bytes, usage
        assert usage.stack == 0, usage


# On wgmma, D = 128 with a constant decay uses all 255 registers; the addresses of states, or of rows whose strides
# differ, cost it a few more. fp32 multiplies on the CUDA cores, with whole rows in registers: at D = 256 that spills,
# and is slow.
@pytest.mark.parametrize("case", VARIED, ids=str)
def test_variants_fit_and_spill_at_most_a_few_registers(case, compiler):
    launches = compiler(case)
    assert len(launches) >= (3 if case.backend == "triton_split" else 1)
    for usage in launches:
        assert usage.shared <= TARGETS[case.arch].smem_bytes, usage
        if case.dtype == "float32" and case.D >= 128:
            assert usage.stack <= (64 if case.D == 128 else 2048), usage
        else:
            few = 16 if (case.arch, case.D, case.per_token) == (90, 128, False) else 0
            assert usage.stack <= few, usage
