"""Two gloo processes on one GPU: the kernels a rank calls, with states and keys carried through the host."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("options", [{"decay": "mixed"}, {"decay": "weak", "lengths": [100, 60, 352]}])
def test_lightning(on_ranks, options, at_once):
    more = {"device": "cuda", "dtype": "bfloat16", "at_once": at_once}
    on_ranks(2, "check_lightning", "values", H=4, N=512, D=64, **more, **options)


@pytest.mark.parametrize("shards", ["contiguous", "zigzag"])
def test_ring(on_ranks, shards):
    options = {"H": 4, "H_KV": 2, "N_Q": 512, "D": 64, "causal": True, "backend": "triton"}
    on_ranks(2, "check_softmax", "values", way="ring", shards=shards, device="cuda", dtype="bfloat16", **options)


def test_ring_with_latent_attentions_heads(on_ranks):
    options = {"H": 2, "N_Q": 256, "D": 192, "E": 128, "causal": True, "backend": "triton"}
    on_ranks(2, "check_softmax", "values", way="ring", device="cuda", dtype="bfloat16", **options)


def test_ulysses(on_ranks):
    options = {"H": 4, "H_KV": 1, "N_Q": 512, "D": 64, "causal": True, "backend": "triton"}
    on_ranks(2, "check_softmax", "values", way="ulysses", device="cuda", dtype="bfloat16", **options)
