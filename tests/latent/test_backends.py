"""Every registered backend of latent attention against fp64.

A new file in fulmen/latent/ is tested here with no other edit. What a backend does not support is a skip with its own
sentence. On a CPU the Triton kernels are interpreted. Unused keys and pages are NaN throughout (`fulmen.testing`).
"""

from __future__ import annotations

import pytest
import torch

import fulmen
from fulmen import dispatch, hardware
from fulmen.dispatch import Choice
from fulmen.latent.policy import TritonTile
from fulmen.testing import latent as testing

BACKENDS = sorted(dispatch.kernels("latent"))
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
LENGTHS = [0, 1, 31, 32, 33, 113]
CASES = {
    "B=0": {"B": 0},
    "no heads": {"H": 0},
    "N_Q=0": {"N_Q": 0},
    "N_KV=0": {"N_KV": 0, "lengths": [0]},
    "one": {"H": 1, "N_KV": 1},
    "no lengths": {"B": 2, "H": 5, "N_KV": 70},
    "lengths": {"B": 6, "H": 4, "N_KV": 113, "lengths": LENGTHS},
    "many heads": {"H": 40, "N_KV": 50},
    "several queries": {"B": 6, "H": 3, "N_Q": 3, "N_KV": 113, "lengths": LENGTHS},
    "causal": {"B": 6, "H": 3, "N_Q": 3, "N_KV": 113, "lengths": LENGTHS, "causal": True},
    "causal, no lengths": {"H": 2, "N_Q": 40, "N_KV": 35, "causal": True},
    "causal, one query": {"B": 2, "H": 2, "N_KV": 40, "causal": True, "lengths": [40, 7]},
    "bnhd": {"B": 2, "H": 3, "N_Q": 2, "N_KV": 70, "layout": "bnhd", "causal": True},
    "pages of 16": {"B": 3, "H": 4, "N_KV": 113, "lengths": [113, 0, 40], "page": 16},
    "pages of 24": {"B": 3, "H": 4, "N_KV": 113, "lengths": [113, 12, 48], "page": 24},
    "pages of 64": {"B": 3, "H": 4, "N_Q": 2, "N_KV": 150, "lengths": [150, 64, 65], "page": 64, "causal": True},
    "pages of 256": {"B": 2, "H": 4, "N_KV": 300, "lengths": [300, 1], "page": 256},
    "pages, no lengths": {"B": 2, "H": 4, "N_KV": 64, "page": 32},
    "scale": {"N_KV": 50, "scale": 0.7},
    "negative scale": {"N_KV": 50, "scale": -0.5},
    "D=E": {"N_KV": 50, "D": 64, "E": 64},
    "odd sizes": {"N_KV": 50, "D": 37, "E": 23, "lengths": [40]},
    "E=1": {"N_KV": 50, "D": 5, "E": 1},
    "DeepSeek-V3": {"B": 2, "H": 16, "N_KV": 100, "D": 576, "E": 512, "lengths": [100, 33]},
}


def served(x: testing.Inputs, backend: str) -> None:
    """Skips what `backend` does not serve."""
    if (why := dispatch.kernels("latent")[backend].supports(x.spec())) is not None:
        pytest.skip(why)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES)
def test_right(case, backend, dtype):
    x = testing.inputs(**CASES[case], dtype=DTYPES[dtype])
    served(x, backend)
    testing.check(x, backend)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES)
def test_right_on_a_gpu(case, backend, dtype):
    x = testing.inputs(**CASES[case], dtype=DTYPES[dtype], device="cuda")
    served(x, backend)
    o = testing.check(x, backend)
    for _ in range(10):
        with torch.no_grad():
            assert torch.equal(fulmen.latent_attention(x.q, x.kv, **x.options(), backend=backend), o)


@pytest.mark.parametrize("parts", [1, 2, 3, 7])
@pytest.mark.parametrize("tile", [(16, 16), (16, 32), (32, 16)])
def test_split_keys_in_triton(tile, parts, monkeypatch):
    """Whatever the tile and the number of splits, more than there are blocks of keys included."""
    choice = Choice("triton", "triton", TritonTile(*tile, 4, 2), parts, "triton")
    monkeypatch.setattr(dispatch, "choose", lambda op, spec, backend: choice)
    x = testing.inputs(5, 3, 8, 90, 48, 32, lengths=[90, 0, 16, 17, 64], causal=True, dtype=torch.float16)
    served(x, "triton")
    testing.check(x, "triton")
    testing.check(testing.inputs(2, 3, 1, 90, 48, 32, page=16, lengths=[90, 5], dtype=torch.float16), "triton")


@pytest.mark.parametrize("backend", BACKENDS)
def test_lengths_and_pages_are_clamped(backend):
    """What is out of range is taken for the nearest that is not; no foreign memory is read."""
    x = testing.inputs(3, 4, 1, 64, lengths=[64, 0, 64], page=16, dtype=torch.float16)
    served(x, backend)
    pool = x.kv.nan_to_num()
    wild = x._replace(kv=pool, kv_lengths=torch.tensor([1 << 30, -5, 64], dtype=torch.int32))
    tame = x._replace(kv=pool, page_table=x.page_table.clone())
    wild.page_table[0, 1], wild.page_table[2, 0] = -7, 1 << 30
    tame.page_table[0, 1], tame.page_table[2, 0] = 0, pool.shape[0] - 1
    assert torch.equal(testing.check(wild, backend), testing.check(tame, backend))


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_may_share_pages(backend):
    x = testing.inputs(2, 4, 1, 64, lengths=[64, 64], page=16, dtype=torch.float16)
    served(x, backend)
    x.page_table[1, :2] = x.page_table[0, :2]
    testing.check(x, backend)


def test_max_kv_length_decides_speed_alone():
    hw = hardware.TARGETS[90]
    x = testing.inputs(2, 4, 1, 4096, lengths=[4096, 100])
    policy = dispatch.policy("latent")
    for most in (None, 0, 64, 1000, 1 << 30):
        spec = x._replace(max_kv_length=most).spec()
        assert spec.max_kv_length == min(4096 if most is None else most, 4096)
        assert policy.choose(spec, hw, "triton").splits >= 1
        testing.check(x._replace(max_kv_length=most), "eager")
    assert policy.choose(x.spec(), hw, "triton").splits > 1


def test_triton_splits_by_max_kv_length(monkeypatch):
    """Rows longer than max_kv_length are still right."""
    monkeypatch.setattr(hardware, "of", lambda device: hardware.TARGETS[90])
    x = testing.inputs(2, 4, 1, 300, lengths=[300, 100], max_kv_length=70, dtype=torch.float16)
    served(x, "triton")
    testing.check(x, "triton")
