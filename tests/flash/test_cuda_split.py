"""Keys of few tiles, shared by several blocks of the Hopper kernel: when, and, on a GPU, results."""

from __future__ import annotations

import functools

import pytest
import torch

import fulmen
from fulmen import cuda, dispatch, hardware
from fulmen.flash import cuda as flash
from fulmen.flash import policy
from fulmen.flash.kernels import combine
from fulmen.hardware import TARGETS
from fulmen.testing import flash as testing
from tests import sass
from tests.flash.test_cuda import PACKED, sm90, spec


def test_keys_are_split_where_that_was_faster():
    """(B, H, H_KV, N_Q, N_KV, D), and in how many parts; 1: not at all."""
    measured = {
        (1, 32, 8, 1, 512, 128): 4, (1, 32, 8, 1, 300, 128): 1, (1, 32, 8, 1, 1024, 128): 7,
        (1, 32, 8, 1, 2048, 128): 13,
        (1, 32, 8, 1, 8192, 128): 15, (1, 32, 8, 1, 131072, 128): 16, (1, 32, 32, 1, 8192, 128): 4,
        (4, 32, 8, 1, 8192, 128): 4, (8, 32, 8, 1, 32768, 128): 2, (16, 32, 8, 1, 8192, 128): 1,
        (1, 32, 8, 64, 32768, 128): 8, (1, 32, 8, 256, 32768, 128): 2, (1, 8, 8, 512, 8192, 128): 4,
        (1, 64, 8, 1, 32768, 64): 32, (1, 16, 16, 1, 8192, 64): 16, (1, 16, 16, 128, 4096, 64): 8,
        (2, 8, 8, 512, 4096, 64): 2,
        (4, 16, 2, 1, 16384, 256): 16, (1, 4, 4, 2048, 2048, 128): 1, (1, 2, 2, 4096, 4096, 64): 2,
    }  # fmt: skip
    for (B, H, H_KV, N_Q, N_KV, D), parts in measured.items():
        call = spec(B, H, D=D, H_KV=H_KV, N_Q=N_Q, N_KV=N_KV)
        assert sm90(call).splits == parts, call


def test_what_is_not_split():
    one = {"B": 1, "H": 8, "D": 128, "N_Q": 1, "N_KV": 8192}
    assert sm90(spec(**one)).splits > 1
    seen = ({"causal": True, "left": 100}, {"left": 127}, {"N_Q": 64, "causal": True, "top_left": True})  # few keys
    for change in (*seen, PACKED, {"H": 67}, {"N_KV": 0}, {"N_Q": 0}, {"B": 0}):
        assert sm90(spec(**one | change)).splits == 1, change


SPLIT = {
    "decoding": {"B": 1, "H": 32, "H_KV": 8, "N_Q": 1, "N_KV": 3001, "D": 128},
    "D=64": {"B": 2, "H": 16, "H_KV": 16, "N_Q": 3, "N_KV": 2000, "D": 64, "causal": True},
    "D=256": {"B": 1, "H": 16, "H_KV": 2, "N_Q": 2, "N_KV": 2500, "D": 256},
    "192/128": {"B": 1, "H": 8, "H_KV": 8, "N_Q": 5, "N_KV": 3000, "D": 192, "E": 128, "causal": True},
    "a chunk": {"B": 1, "H": 8, "H_KV": 8, "N_Q": 300, "N_KV": 5000, "D": 128, "causal": True},
    "one head": {"B": 1, "H": 1, "H_KV": 1, "N_Q": 3000, "N_KV": 3000, "D": 64, "causal": True},
    "blind": {"B": 1, "H": 2, "H_KV": 2, "N_Q": 2200, "N_KV": 2000, "D": 64, "causal": True},
    "sinks": {"B": 1, "H": 64, "H_KV": 8, "N_Q": 1, "N_KV": 4000, "D": 64, "causal": True, "sinks": True},
    "all": {"B": 1, "H": 8, "H_KV": 4, "N_Q": 7, "N_KV": 4000, "D": 128, "window": (3000, None), "softcap": 5.0,
            "sinks": True, "causal": True},
}  # fmt: skip


def test_these_are_split():
    for case, options in SPLIT.items():
        call = testing.inputs(**options, dtype=torch.bfloat16).spec()
        assert policy.choose(call, TARGETS[90], "cuda").splits > 1, case


@pytest.mark.gpu
@pytest.mark.parametrize("case", SPLIT)
def test_split_keys_by_turns_on_a_gpu(case):
    """With other results before, which are in the memory that parts of the keys go through."""
    x = testing.inputs(**SPLIT[case], dtype=torch.bfloat16, device="cuda")
    if (why := flash.supports(x.spec())) is not None or hardware.of(x.q.device).arch != 90:
        pytest.skip(why or "for Hopper")
    v, other = x.v.clone(), -x.v
    with torch.no_grad():
        attend = functools.partial(fulmen.flash_attention, x.q, x.k, **x.options(), backend="cuda")
        o = attend(v)
        for i in range(50):
            assert torch.equal(attend(other if i % 2 else v), -o if i % 2 else o)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            later = attend(x.v)
        for values in (other, v):
            x.v.copy_(values)
            graph.replay()
            assert torch.equal(later, -o if values is other else o)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", SPLIT)
def test_split_keys_on_a_gpu(case, dtype):
    """Right, the same bits every time, and in a graph; gradients from lse as it was combined."""
    options = SPLIT[case]
    x = testing.inputs(**options, dtype=dtype, device="cuda")
    call = x.spec(with_lse=True)
    if (why := flash.supports(call)) is not None or hardware.of(call.device).arch != 90:
        pytest.skip(why or "for Hopper")
    assert dispatch.choose("flash", call, "cuda").splits > 1
    attend = functools.partial(fulmen.flash_attention_with_lse, x.q, x.k, x.v, **x.options(), backend="cuda")
    with torch.no_grad():
        o, lse = attend()
        testing.compare(x, testing.Outputs(o, lse, None, None, None, None))
        for _ in range(25):
            again = attend()
            assert torch.equal(again[0], o)
            assert torch.equal(again[1], lse)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            later = attend()
        later[0].zero_()
        graph.replay()
        assert torch.equal(later[0], o)
        plain = fulmen.flash_attention(x.q, x.k, x.v, **x.options(), backend="cuda")
        assert torch.equal(plain, o)
        assert torch.equal(fulmen.flash_attention(x.q, x.k, x.v, **x.options(), backend="cuda"), o)  # prepared
    testing.check(x, "cuda")


@pytest.mark.parametrize("sinks", [None, "fp32", "own"])
@pytest.mark.parametrize("splits", [2, 264])
@pytest.mark.parametrize("E", [64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_combining_fits(dtype, E, splits, sinks):
    call = spec(D=E, dtype=dtype, has_sinks=sinks is not None)
    sinks_dtype = {None: None, "fp32": torch.float32, "own": dtype}[sinks]
    code, usage = cuda.compile_variant(combine.variant(call, splits, sinks_dtype))
    assert (usage.spilled, usage.warnings) == (0, ())
    assert usage.registers <= 64
    if E == 128:
        assert sass.read_early(sass.disassemble(code)) == []
