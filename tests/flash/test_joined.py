"""The backward of `triton` in one launch, as small calls on Hopper have it."""

from __future__ import annotations

import pytest
import torch

from fulmen import dispatch, plans
from fulmen.flash import policy
from fulmen.flash import triton as module
from fulmen.hardware import TARGETS
from fulmen.testing import flash as testing
from tests.flash.test_backends import CASES

NAMES = (
    "B=0", "N_Q=0", "N_KV=0, sinks", "N=1", "N=113", "D=80", "D=16 E=48", "heads 4/2", "heads 6/2, sinks", "bnhd",
    "fused, heads, causal", "N_Q<N_KV, top left", "masked rows, sinks", "masked rows, heads, softcap", "window 16 15",
    "window, N_Q>N_KV", "sinks, all", "packed, causal, heads", "packed, cross", "packed, everything",
    "packed, all empty",
)  # fmt: skip


@pytest.fixture
def joined(monkeypatch):
    """Every call of `triton` takes one launch."""
    choose = policy.triton_tiles
    monkeypatch.setattr(
        policy, "triton_tiles", lambda spec, hw: choose(spec, hw)._replace(joined=policy.JOINED_TILES[64][0])
    )
    for forget in (plans.clear, dispatch.pick.cache_clear, dispatch._choose.cache_clear):
        forget()
    yield
    for forget in (plans.clear, dispatch.pick.cache_clear, dispatch._choose.cache_clear):
        forget()


@pytest.mark.parametrize("name", NAMES)
def test_gradients(name, joined, monkeypatch):
    kernels = []
    launches = module.backward_launches

    def seen(*args):
        kernels.extend(found := launches(*args))
        return found

    monkeypatch.setattr(module, "backward_launches", seen)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = testing.inputs(**CASES[name], dtype=torch.float16, device=device)
    testing.check(x, "triton")
    assert [launch.kernel for launch in kernels] == [module.flash_backward_joined_kernel]


def spec_for(**options):
    x = testing.inputs(**({"B": 1, "H": 4, "N_Q": 128, "D": 64, "device": "meta"} | options))
    return x.spec(needs_grad=True)


def test_only_small_calls_on_hopper_are_joined():
    hopper = TARGETS[90]
    assert policy.triton_tiles(spec_for(), hopper).joined == policy.JOINED_TILES[64][0]
    assert policy.triton_tiles(spec_for(D=128), hopper).joined == policy.JOINED_TILES[128][0]
    for options, hw in (({"D": 256}, hopper), ({"B": 8, "H": 16, "N_Q": 2048}, hopper), ({}, TARGETS[80])):
        assert policy.triton_tiles(spec_for(**options), hw).joined is None
