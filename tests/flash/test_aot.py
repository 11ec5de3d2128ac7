"""The Triton kernels compiled, without a GPU, for each architecture we promise: they fit and spill little."""

from __future__ import annotations

import pytest

from fulmen.hardware import TARGETS
from tests.aot import CacheCase, FlashCase

# The promise of the README: every head size class, both passes, causal or not, everywhere.
PROMISED = [
    FlashCase(arch, pass_, D, causal=causal)
    for arch in TARGETS for D in (64, 128, 256)
    for pass_ in ("forward", "backward") for causal in (True, False)
]  # fmt: skip

# What else changes the generated code, once each: on the smallest shared memory and on wgmma.
OPTIONS = [
    {"dtype": "float16", "D": 128},
    {"D": 80},
    {"D": 192, "E": 128},
    {"H_KV": 4, "D": 128},
    {"left": 512, "D": 64},
    {"left": 512, "D": 128},
    {"softcap": 50.0, "D": 128},
    {"sinks": True, "D": 64, "left": 128},
    {"packed": True, "D": 64},
    {"packed": True, "D": 128},
    {"packed": True, "D": 256},
    {"N": 256, "D": 128},  # too small for the copy engine
]  # fmt: skip
VARIED = [FlashCase(arch, pass_, **o) for arch in (86, 90) for o in OPTIONS for pass_ in ("forward", "backward")]


@pytest.mark.parametrize("case", PROMISED, ids=str)
def test_fits_and_does_not_spill(case, compiler):
    launches = compiler(case)
    assert len(launches) == (1 if case.pass_ == "forward" else 2)
    for usage in launches:
        assert usage.shared <= TARGETS[case.arch].smem_bytes, usage
        # sm_100 keeps a few bytes of stack for its own bookkeeping of tensor memory; dk, dv at D = 256 on sm_90 spill
        # when causal, and are a quarter faster than tiles that do not
        spills = {100: 16, 90: 144 if (case.D, case.causal) == (256, True) else 0}
        assert usage.stack <= spills.get(case.arch, 0), usage


# With pointers (packed, small) and with masks on both sides dk, dv at D = 128 take more than 255 registers.
@pytest.mark.parametrize("case", VARIED, ids=str)
def test_variants_fit_and_spill_at_most_a_few_registers(case, compiler):
    for usage in compiler(case):
        assert usage.shared <= TARGETS[case.arch].smem_bytes, usage
        assert usage.stack <= 256, usage


CACHES = [CacheCase(arch) for arch in TARGETS]
CACHES += [
    CacheCase(arch, **options)
    for arch in (86, 90)
    for options in (
        {"D": 64, "page": 256}, {"D": 256}, {"page": 16}, {"packed": True, "page": 16, "N_Q": 40},
        {"softcap": 50.0, "left": 512, "sinks": True, "N_Q": 64}, {"D": 192, "E": 128, "H": 24},
        {"D": 256, "N_Q": 64, "page": 48}, {"D": 80, "dtype": "float16", "H_KV": 32},
    )
]  # fmt: skip


@pytest.mark.parametrize("case", CACHES, ids=str)
def test_over_a_cache_fits_and_does_not_spill(case, compiler):
    launches = compiler(case)
    assert len(launches) == 3
    for usage in launches:
        assert usage.shared <= TARGETS[case.arch].smem_bytes, usage
        assert usage.stack <= (16 if case.arch == 100 else 0), usage
