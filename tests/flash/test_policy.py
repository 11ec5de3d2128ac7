"""What "auto" takes: the fastest measured, and what that leaves where it cannot serve."""

from __future__ import annotations

import itertools

import pytest
import torch

from fulmen import dispatch, hardware
from fulmen.flash import policy
from fulmen.flash.spec import FlashSpec


def spec(N=4096, D=128, *, B=2, E=None, causal=True, grad=True, dtype=torch.bfloat16, **others) -> FlashSpec:
    device = torch.device("cuda", 0)
    return FlashSpec(
        B, 16, 16, N, N, D, E or D, dtype, device, D**-0.5, right=0 if causal else None, needs_grad=grad, **others
    )


@pytest.fixture(params=["chosen", pytest.param("compiled", marks=pytest.mark.nightly)])
def hopper(request, monkeypatch):
    """What a policy takes, believed to compile, or compiled, too."""
    monkeypatch.setattr(hardware, "of", lambda device: hardware.TARGETS[90])
    if request.param == "chosen":
        monkeypatch.setattr("fulmen.cuda.problem", lambda *args: None)
    dispatch.pick.cache_clear()
    yield
    dispatch.pick.cache_clear()


@pytest.mark.parametrize(
    ("asked", "choice"),
    [
        (spec(), "cuda"),
        (spec(causal=False), "cuda"),
        (spec(N=1024, B=4), "cuda"),
        (spec(N=512, B=8), "sdpa"),
        (spec(N=1024, B=4, causal=False), "sdpa"),
        (spec(grad=False), "cuda"),
        (spec(causal=False, grad=False), "cuda"),
        (spec(N=2048, B=4, causal=False, grad=False), "sdpa"),
        (spec(N=2048, B=4, causal=False, grad=False)._replace(H_KV=4), "cuda"),
        (spec(N=2048, B=16, causal=False, grad=False), "cuda"),
        (spec(D=64, N=1024, B=4, grad=False), "cuda"),
        (spec(N=8192, causal=False, grad=False), "cuda"),
        (spec(D=64, grad=False), "cuda"),
        (spec(D=64, causal=False, grad=False), "cuda"),
        (spec(D=64, N=2048, B=4, causal=False, grad=False), "cuda"),
        (spec(D=64, N=1024, B=4, causal=False, grad=False), "sdpa"),
        (spec(D=48, grad=False), "sdpa"),  # cuda has no such head dim
        (spec(N=8192, causal=False, grad=False)._replace(N_Q=100, B=64), "sdpa"),  # not enough queries for a tile
        (spec(grad=False)._replace(B=1, H=1, H_KV=1, N_Q=16384, N_KV=16384), "sdpa"),  # nor for a GPU
        (spec(grad=False, softcap=30.0), "cuda"),
        (spec(grad=False, sequences=3), "cuda"),
        (spec(D=96, grad=False, softcap=30.0), "triton"),  # cuda has no such head dim
        (spec(grad=False, softcap=30.0)._replace(N_Q=100), "cuda"),  # keys are split
        (spec(grad=False, softcap=30.0, B=8)._replace(N_Q=100), "triton"),
        (spec(D=256, grad=False), "cuda"),
        (spec(D=192, E=128, causal=False, grad=False), "cuda"),
        (spec(D=64, N=128, B=1, grad=False), "cuda"),
        (spec(D=64, N=128, B=1), "triton"),
        (spec(D=64, N=300, B=1, grad=False), "cuda"),
        (spec(N=512, B=1, grad=False), "cuda"),
        (spec(N=600, B=1, grad=False), "triton"),  # not compared
        (spec(N=512, B=1, grad=False)._replace(N_Q=1), "cuda"),
        (spec(N=600, B=1, grad=False)._replace(N_Q=300), "triton"),  # not compared
        (spec(N=8192, B=1, grad=False)._replace(N_Q=1, H_KV=4), "cuda"),  # keys are split
        (spec(N=8192, B=1, causal=False, grad=False)._replace(N_Q=1, H_KV=4), "cuda"),
        (spec(N=8192, B=32, causal=False, grad=False)._replace(N_Q=1, H_KV=4), "cuda"),  # too many heads for that
        (spec(N=1000, B=32, causal=False, grad=False)._replace(N_Q=1, H_KV=4), "cuda"),
        (spec(N=4000, B=32, causal=False, grad=False)._replace(N_Q=1, H_KV=4), "cuda"),
        (spec(N=8192, B=1, causal=False, grad=False)._replace(N_Q=1, H=28, H_KV=4), "cuda"),  # 7 heads as queries
        (spec(N=8192, B=1, causal=False, grad=False)._replace(N_Q=2, H=28, H_KV=4), "sdpa"),  # 7 heads share no tile
        (spec(N=1 << 17, B=64, causal=False, grad=False)._replace(N_Q=1, H_KV=4), "cuda"),  # too large for cuDNN
        (spec(N=8192, B=1, grad=False, dtype=torch.float32)._replace(N_Q=1), "sdpa"),
        (spec(N=8192, B=32, grad=False)._replace(N_Q=2, H_KV=4), "cuda"),  # which torch cannot be asked for
        (spec(N=8192, B=32, grad=False)._replace(N_Q=1, H_KV=4), "cuda"),  # it sees all keys
        (spec(N=8192, B=4, D=80, causal=False, grad=False)._replace(N_Q=1), "sdpa"),  # cuda has no such head dim
        (spec(N=16384, B=1, causal=False, grad=False)._replace(N_Q=512, H=8, H_KV=8), "cuda"),
        (spec(N=8192, B=1)._replace(N_Q=1, H_KV=4), "triton"),
        (spec(N=8192, B=1, grad=False, softcap=30.0)._replace(N_Q=1, H_KV=4), "cuda"),
        (spec(N=8192, B=16, grad=False, has_sinks=True)._replace(N_Q=1, H_KV=4), "cuda"),
        (spec(N=300, B=1, grad=False, left=100)._replace(N_Q=1, H_KV=4), "cuda"),
        (spec(N=8192, B=1, grad=False, sequences=4)._replace(N_Q=4, H_KV=4), "triton"),  # not compared
        (spec(N=250, B=64, grad=False)._replace(N_Q=1, H_KV=4), "cuda"),
        (spec(D=256, N=250, B=4, grad=False)._replace(N_Q=1, H_KV=4), "cuda"),
        (spec(D=256, N=250, B=64, grad=False)._replace(N_Q=1, H_KV=4), "sdpa"),  # more than a wave of heads
        (spec(D=64, N=77, causal=False, grad=False)._replace(N_Q=4096), "cuda"),
        (spec(D=64, N=77, B=64, causal=False, grad=False)._replace(N_Q=16384), "cuda"),  # few keys, much to do
        (spec(D=64, N=256, B=64, causal=False, grad=False)._replace(N_Q=16384), "sdpa"),
        (spec(N=77, B=64, causal=False, grad=False)._replace(N_Q=4096), "cuda"),
        (spec(N=128, B=64, causal=False, grad=False)._replace(N_Q=4096), "sdpa"),
        (spec(D=64, N=77, B=64, causal=False)._replace(N_Q=16384), "sdpa"),
        (spec(N=128, B=1, D=96, grad=False), "triton"),
        (spec(N=128, B=1, grad=False, softcap=30.0), "triton"),
        (spec(N=128, B=1), "triton"),  # small: the host is what costs
        (spec(D=192, E=128), "cuda"),
        (spec(D=96), "sdpa"),  # cuda has no such head dim
        (spec(left=1024), "cuda"),  # SDPA has no window; the backward is triton's
        (spec(causal=False)._replace(right=7), "cuda"),  # nor one to the right
        (spec(N=100, B=1, causal=False, grad=False)._replace(right=7), "triton"),  # nor have the short kernels
        (spec(softcap=30.0), "cuda"),
        (spec(has_sinks=True), "cuda"),
        (spec(sequences=3), "cuda"),
        (spec(D=80, left=1024), "triton"),  # cuda has no such head dim
        (spec(N=512, B=64, softcap=30.0), "triton"),  # not enough queries for its tiles
        (spec(deterministic=True), "cuda"),  # with triton's backward; FlashAttention-2 would serve it, slower
        (spec(D=96, deterministic=True), "triton"),
        (spec(D=64, E=32, dtype=torch.float32), "sdpa"),
        (spec(dtype=torch.float32, softcap=30.0), "eager"),
    ],
)
def test_auto_on_hopper(asked, choice, hopper):
    assert dispatch.pick("flash", asked).name == choice


@pytest.mark.parametrize(
    ("asked", "choice"),
    [
        (spec(N=100, B=1, grad=False)._replace(N_Q=1), "triton"),  # the host is what costs
        (spec(D=64, N=77, B=1, causal=False, grad=False)._replace(N_Q=4096), "triton"),
        (spec(N=8192, B=1, causal=False, grad=False)._replace(N_Q=1), "sdpa"),  # 24 us, triton 99
        (spec(N=8192, B=1, grad=False)._replace(N_Q=2), "triton"),  # which torch cannot be asked for
        (spec(softcap=30.0), "triton"),
        (spec(), "sdpa"),
    ],
)
def test_without_its_compiler_cuda_leaves_the_next_best(asked, choice, hopper, monkeypatch):
    assert policy.order(asked, hardware.TARGETS[90])[0] == "cuda"
    kernel = dispatch.kernels("flash")["cuda"]
    monkeypatch.setitem(dispatch._kernels["flash"], "cuda", kernel._replace(supports=lambda call: "no compiler"))
    assert dispatch.pick("flash", asked).name == choice


def test_an_unmeasured_gpu_gets_torch_first(monkeypatch):
    monkeypatch.setattr(hardware, "of", lambda device: hardware.TARGETS[80])
    dispatch.pick.cache_clear()
    assert policy.order(spec(), hardware.TARGETS[80])[0] == "sdpa"
    assert dispatch.pick("flash", spec()).name == "sdpa"
    assert dispatch.pick("flash", spec(left=5)).name == "triton"
    dispatch.pick.cache_clear()


def test_every_backend_has_a_place():
    names = {*dispatch.kernels("flash"), "flash_attn"}
    assert names == set(policy.ORDER) == set(policy.CPU_ORDER)


def test_rows_are_found_for_every_call():
    for causal in (True, False):
        for size in (64, 128, 256):
            rows = [r for r in policy.ROWS if (r.D, r.causal) == (size, causal)]
            assert min(r.keys for r in rows) == 0
            assert all(r.first in ("sdpa", "triton", "cuda") for r in rows)


@pytest.mark.parametrize("row", [r for r in policy.ROWS if r.keys])
def test_a_row_has_an_effect(row):
    call = spec(row.keys, row.D, B=policy.MANY_QUERIES // row.keys, causal=row.causal)
    assert policy.order(call, hardware.TARGETS[90])[0] == row.first


@pytest.mark.parametrize("N_Q", [1, 4, 64])
@pytest.mark.parametrize("group", [1, 4, 5, 8, 128])
@pytest.mark.parametrize("D", [64, 80, 128, 256])
def test_decoding_never_takes_cudnn(hopper, monkeypatch, D, group, N_Q):
    """cuDNN builds a plan for every new shape, and a cache has a new one at every step."""
    monkeypatch.setattr("fulmen.cuda.problem", lambda *variant: None)  # compiles nothing
    for B, N in itertools.product((1, 16, 128), (128, 1000, 4096, 8192, 131_072)):
        asked = spec(N, D, B=B, causal=False, grad=False)._replace(H=group * 2, H_KV=2, N_Q=N_Q)
        chosen = dispatch.choose("flash", asked, dispatch.pick("flash", asked).name)
        assert chosen.kernel != "cudnn" or N_Q >= N, chosen
