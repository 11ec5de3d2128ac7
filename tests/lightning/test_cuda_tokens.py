"""The CUDA backend with a decay for each token, without a GPU: compiled, and what it launches.

Its results are checked on the emulator (test_cuda_emulated.py) and on a GPU (test_token_decay.py).
"""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor

import pytest

from fulmen import cuda as build
from fulmen.hardware import TARGETS
from fulmen.lightning import cuda, policy
from fulmen.lightning.kernels import sweep
from tests import sass
from tests.lightning.cuda_calls import spec
from tests.pairs import covering_variants

# Bytes of code in loops, cold parts of them included; from 46 KB on sweeps are slow: docs/notes/lightning-cuda.md
HOT = 34 * 1024
HOT_PAIR = 42 * 1024  # dv and dk from one block have loops for either
SHAPES = {"D=64": (64, 64, None), "D=128": (128, 128, None), "D=128 E=64": (128, 64, 2)}


def launches(D, E, groups, packed):
    """Every variant a call may launch: (spec, tile, names of the sweeps, whether it writes products)."""
    call = spec(1, 4, 4096, D, True, E=E, groups=groups, per_token=True, sequences=packed)
    tiles = policy.choose(call, TARGETS[90], "cuda").tile
    found = [(call, tiles.forward, ("o",), False), (call, tiles.training, ("o",), False)]
    found += [(call, tiles.state, (name,), False) for name in ("state", "dstate")]
    for products in (False, True):
        joined = products and tiles.gradient[0].pair
        for names in cuda.backward_sweeps(call, D == 64, joined):
            found.append((call, cuda.backward_tile(tiles, names, products), names, products))
    return found


def kernels():
    """Every variant, with its launch."""
    every = itertools.product(SHAPES.values(), (None, 4))
    return {sweep.variant(*launch): launch for shape, packed in every for launch in launches(*shape, packed)}


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.nightly)], ids=["pairs", "every"])
def test_fits_and_does_not_spill(every):
    found = {}
    for variant, launch in kernels().items():
        found[variant] = launch[1]
        assert sweep.shared_bytes(*launch) <= TARGETS[90].smem_bytes
        assert dict(variant.macros)["TOKENS"] == 1
    check_code(found, every)


def check_code(found, every):
    """Compiles variants, given with their tiles, and reads their code: every one, or those with each pair of macros."""
    if not every:
        found = {variant: found[variant] for variant in covering_variants(list(found))}
    with ThreadPoolExecutor(2) as pool:  # the compiler runs without Python's lock
        for (variant, tile), (code, usage) in zip(found.items(), pool.map(build.compile_variant, found), strict=True):
            assert usage.spilled == 0, variant
            assert usage.registers * sweep.threads(tile) <= 65_536, variant
            text = sass.disassemble(code)
            assert not usage.warnings, variant
            assert "STL" not in text, variant
            assert sass.overwritten(text) == [], variant
            assert sass.read_early(text) == [], variant
            assert sass.hot_bytes(text) <= (HOT_PAIR if tile.pair else HOT), variant


def test_every_launch_is_asked_for_in_supports(h200, monkeypatch):
    asked = []
    monkeypatch.setattr(build, "problem", lambda variant, device, shared: asked.append(variant))
    for shape in SHAPES.values():
        for call, tile, names, products in launches(*shape, None):
            asked.clear()
            assert cuda.supports(call) is None
            if not products and names != ("dstate",):
                assert sweep.variant(call, tile, names) in asked


def test_it_saves_states_for_the_gradient(h200):
    """(heads, slots, E, D), at any D: where the sum that is the decay's gradient begins anew."""
    for D, E, groups in SHAPES.values():
        call = spec(2, 4, 1100, D, True, E=E, groups=groups, per_token=True)
        assert cuda.saves(call) == (8, 5, E, D)
        assert cuda.tiles_of(call).training.save == 1
        assert cuda.saves(call._replace(B=1, sequences=5)) == (4, 4 + 5, E, D)
