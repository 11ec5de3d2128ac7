"""The Triton kernels compiled, without a GPU, for each architecture we promise: they fit and do not spill.

`golden_configs.txt` holds what each architecture picks. After an intended change, from the repository's root:

    .venv/bin/python -m tests.lightning.test_aot
"""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from fulmen import testing
from fulmen.hardware import TARGETS
from fulmen.lightning.op import spec_of
from fulmen.lightning.triton import config
from tests.aot import Case, Compiler

GOLDEN = Path(__file__).with_name("golden_configs.txt")

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
    {"D": 64, "E": 128},
    {"D": 80, "E": 48, "decay": False},
    {"D": 128, "E": 256, "states": True},
    {"H_KV": 8, "D": 128},
    {"layout": "fused", "D": 128},
    {"states": True, "D": 128},
    {"packed": True, "states": True, "D": 64},
    {"backend": "triton_split", "B": 1, "H": 8, "N": 65536, "D": 64},
    {"backend": "triton_split", "B": 1, "H": 8, "N": 65536, "D": 128, "states": True},
]  # fmt: skip
VARIED = [Case(arch, pass_, **o) for arch in (86, 90) for o in OPTIONS for pass_ in ("forward", "backward")]


@pytest.fixture(scope="session")
def compiler():
    process = Compiler()
    yield process
    process.close()


@pytest.mark.parametrize("case", PROMISED + VARIED, ids=str)
def test_fits_and_does_not_spill(case, compiler):
    launches = compiler(case)
    assert launches
    if case.backend == "triton_split":
        assert len(launches) >= 3
    for usage in launches:
        assert usage.shared <= TARGETS[case.arch].smem_bytes, usage
        assert usage.stack == 0, usage


# Three tf32 products to each fp32 one hold more than a thread's registers when a row has 256 numbers; no tile
# avoids that. Seen are both kinds of failure: a stack of kilobytes, and ptxas giving up (32 registers).
FP32_WIDE = [Case(arch, "forward", 256, dtype="float32") for arch in (86, 90)]


@pytest.mark.parametrize("case", FP32_WIDE, ids=str)
def test_wide_fp32_spills_little(case, compiler):
    for usage in compiler(case):
        assert usage.shared <= TARGETS[case.arch].smem_bytes, usage
        assert usage.stack < 1024, usage


def table() -> str:
    """What `config` picks, one line for each arch, dtype, head size, pass and decay."""
    lines = []
    for arch, hw in TARGETS.items():
        for dtype, D in itertools.product((torch.bfloat16, torch.float32), (16, 64, 128, 256)):
            x = testing.inputs(4, 32, 8192, D, dtype=dtype, device="meta")
            for decay, pass_ in itertools.product((True, False), ("forward", "backward")):
                picked = config(spec_of(x.q, x.k, x.v)._replace(has_decay=decay), hw, pass_)
                key = f"sm_{arch:<3} {str(dtype)[6:]:<8} D={D:<3} {'decay' if decay else '-':<5} {pass_:<8}"
                lines.append("  ".join([key, *(f"{name}={value}" for name, value in picked._asdict().items())]))
    return "\n".join(lines) + "\n"


def test_golden_configs():
    assert table() == GOLDEN.read_text(), "an intended change? regenerate as in this file's docstring"


if __name__ == "__main__":
    GOLDEN.write_text(table())
