"""Ring and Ulysses attention over ranks is that of one process; what runs on the ranks is `check_softmax.py`."""

from __future__ import annotations

import pytest

CHECKS = "check_softmax"
RANKS = [2, 4, 8]
SHARDS = ["contiguous", "zigzag"]


@pytest.mark.parametrize("size", RANKS)
@pytest.mark.parametrize("shards", SHARDS)
@pytest.mark.parametrize("causal", [False, True])
def test_ring(on_ranks, size, shards, causal):
    on_ranks(size, CHECKS, "values", way="ring", shards=shards, causal=causal, B=2, H=4, H_KV=2, N_Q=96, D=16)


@pytest.mark.parametrize("shards", SHARDS)
@pytest.mark.parametrize(
    "options",
    [
        {"window": [9, None]},
        {"window": [30, 3], "causal": False},
        {"softcap": 2.0, "sinks": True},
        {"lengths_q": [1, 40, 3, 0, 84]},
        {"lengths_q": [64, 30, 34], "window": [20, None], "sinks": True},
        {"D": 24, "E": 16, "H_KV": 4},
        {"dtype": "bfloat16", "layout": "bnhd"},
        {"dtype": "float16", "layout": "fused", "sinks": True},
        {"scale": 0.3, "D": 192, "E": 128, "H_KV": 4},
    ],
)
def test_ring_options(on_ranks, shards, options):
    on_ranks(
        4, CHECKS, "values", **{"way": "ring", "shards": shards, "causal": True, "H": 4, "H_KV": 1, "N_Q": 128, "D": 16}
        | options
    )  # fmt: skip


@pytest.mark.parametrize("causal", [False, True])
def test_ring_with_uneven_shards(on_ranks, causal):
    for lengths in ([40, 1, 0, 23], [0, 0, 64, 0]):
        on_ranks(4, CHECKS, "values", way="ring", lengths=lengths, causal=causal, N_Q=64)


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
def test_ring_backends(on_ranks, backend):
    on_ranks(2, CHECKS, "values", way="ring", backend=backend, causal=True, N_Q=64)


def test_ring_with_triton(on_ranks):
    on_ranks(2, CHECKS, "values", way="ring", backend="triton", causal=True, N_Q=48, D=16, dtype="float16")


@pytest.mark.parametrize("size", RANKS)
@pytest.mark.parametrize("heads", [(8, 8), (8, 1), (16, 2)])
def test_ulysses(on_ranks, size, heads):
    options = {"H": heads[0], "H_KV": heads[1], "N_Q": 48, "D": 16, "E": 8, "B": 2, "causal": True}
    on_ranks(size, CHECKS, "values", way="ulysses", **options)


@pytest.mark.parametrize(
    "options",
    [
        {"window": [9, 2]},
        {"softcap": 2.0, "sinks": True},
        {"lengths_q": [1, 40, 3, 0, 20], "causal": True},
        {"lengths": [40, 1, 0, 23], "causal": True},
        {"lengths": [40, 1, 0, 23], "causal": True, "H_KV": 1},
        {"D": 192, "E": 128},
        {"dtype": "bfloat16", "layout": "fused", "H_KV": 2},
        {"backend": "eager"},
        {"backend": "reference", "causal": True},
    ],
)
def test_ulysses_options(on_ranks, options):
    on_ranks(4, CHECKS, "values", **{"way": "ulysses", "H": 8, "N_Q": 64, "D": 16} | options)


@pytest.mark.parametrize("size", RANKS)
def test_ring_traffic(on_ranks, size):
    for causal in (False, True):
        for shards in SHARDS:
            on_ranks(size, CHECKS, "ring_traffic", causal=causal, shards=shards)
    on_ranks(size, CHECKS, "ring_traffic", causal=True, shards="contiguous", window=[5, None])


def test_ulysses_traffic(on_ranks):
    on_ranks(4, CHECKS, "ulysses_traffic")


def test_a_ring_keeps_no_remote_keys(on_ranks):
    on_ranks(4, CHECKS, "memory")


@pytest.mark.parametrize("size", [2, 4])
def test_blocks(on_ranks, size):
    on_ranks(size, CHECKS, "blocks_are_the_mask")
