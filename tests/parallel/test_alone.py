"""One rank by itself: over gloo on a CPU, and over NCCL on the one GPU there is, which two NCCL ranks cannot share."""

from __future__ import annotations

import pytest

WAYS = [
    pytest.param({"device": "cpu", "transport": "gloo"}, id="gloo"),
    pytest.param({"device": "cuda", "transport": "nccl"}, id="nccl", marks=pytest.mark.gpu),
]


@pytest.mark.parametrize("way", WAYS)
def test_transport(on_ranks, way):
    on_ranks(1, "check_alone", "transport", **way)


@pytest.mark.parametrize("way", WAYS)
def test_values(on_ranks, way):
    """By the tolerances of one device: the checks of several ranks, of which here is one."""
    on_gpu = way["device"] == "cuda"
    dtype = {"dtype": "bfloat16" if on_gpu else "float32"}
    on_ranks(1, "check_lightning", "values", H=2, N=100, D=32, decay="mixed", **dtype, **way)
    options = {"H": 4, "H_KV": 2, "N_Q": 100, "D": 64, "causal": True, "backend": "triton" if on_gpu else "eager"}
    for kind in ({"way": "ring"}, {"way": "ring", "shards": "zigzag"}, {"way": "ulysses"}):
        on_ranks(1, "check_softmax", "values", **kind, **options, **dtype, **way)


@pytest.mark.parametrize("way", WAYS)
def test_training_follows_one_process(on_ranks, way):
    on_ranks(1, "check_layers", "training", pattern="LGM", tp=1, cp=1, **way)


@pytest.mark.parametrize("way", WAYS)
def test_a_checkpoint_is_saved_and_loaded(on_ranks, way, tmp_path):
    on_ranks(1, "check_alone", "checkpoint", folder=str(tmp_path), **way)
