"""The CUDA backward on a GPU: against fp64, from poisoned memory, the same bits, several streams, autograd."""

from __future__ import annotations

import pytest
import torch

from fulmen import dispatch, hardware, plans
from fulmen.flash import cuda as flash
from fulmen.flash.spec import FlashSpec, Residuals
from fulmen.testing import flash as testing

pytestmark = pytest.mark.gpu

BF16 = {"dtype": torch.bfloat16}
LENGTHS = {"lengths_q": [700, 1, 0, 450, 130], "lengths_k": [300, 1, 5, 1700, 130]}
ALL = {"causal": True, "window": (200, None), "softcap": 3.0, "sinks": True, "H_KV": 1}
CASES = {
    "full": {"N_Q": 700},
    "causal": {"N_Q": 1111, "causal": True},
    "full, three waves": {"N_Q": 1300, "H": 40},  # blocks convert dq of others from the third on
    "causal, three waves": {"N_Q": 1300, "H": 40, "causal": True},
    "one query": {"N_Q": 1, "N_KV": 333},
    "no queries": {"N_Q": 0, "N_KV": 70},
    "no keys": {"N_Q": 70, "N_KV": 0},
    "more keys": {"N_Q": 300, "N_KV": 901, "causal": True, "H_KV": 1},
    "fewer keys": {"N_Q": 900, "N_KV": 333, "causal": True},
    "top left": {"N_Q": 500, "N_KV": 900, "causal": "top_left", "H_KV": 2},
    "window": {"N_Q": 999, "window": (100, 0)},
    "both sides": {"N_Q": 801, "window": (70, 300), "layout": "bnhd"},
    "softcap": {"N_Q": 500, "softcap": 3.0, "causal": True, "layout": "fused"},
    "sinks": {"N_Q": 513, "sinks": True, "causal": True, "H_KV": 2},
    "all": {"N_Q": 700, "N_KV": 900, **ALL},
    "packed": {**LENGTHS, "causal": True},
    "packed full": {**LENGTHS, "H_KV": 2},
    "packed, all": {**LENGTHS, **ALL},
    "packed, short": {"lengths_q": [1, 2, 0, 3] * 100, "causal": True},
}
WIDTHS = {64: 64, 128: 128, 192: 128, 256: 256}  # D, E


def inputs(D: int, **options) -> testing.Inputs:
    return testing.inputs(D=D, E=WIDTHS[D], device="cuda", **options)


def served(x: testing.Inputs) -> FlashSpec:
    """The call's spec; a skip unless this backward serves it."""
    call = x.spec(with_lse=True, needs_grad=True)
    if hardware.of(call.device).arch != 90 or (why := flash.supports(call)) is not None:
        pytest.skip("for Hopper" if hardware.of(call.device).arch != 90 else why)
    assert dispatch.choose("flash", call, "cuda").backward == "cuda"
    return call


@pytest.mark.parametrize("deterministic", [False, True], ids=["any order", "fixed order"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("D", WIDTHS)
@pytest.mark.parametrize("case", CASES)
def test_against_fp64(case, D, dtype, deterministic, monkeypatch):
    """Twice: the second call's launches are prepared. Results and workspace are NaN before."""
    x = inputs(D, dtype=dtype, **{"H": 4, **CASES[case]})
    served(x)
    assert torch.empty(5, device="cuda").isnan().all()
    monkeypatch.setattr(plans, "deterministic", lambda: deterministic)  # torch's own would refuse the oracle
    for use in (("o", "lse"), ("o", "lse"), ("o",)):
        testing.check(x, "cuda", use)


@pytest.mark.parametrize("D", WIDTHS)
@pytest.mark.parametrize("case", ["fewer keys", "all", "packed, all", "packed, short"])
def test_poisoned_memory(case, D, monkeypatch):
    """Every number of a result is written, and none of the workspace is read before it is."""
    x = inputs(D, **BF16, **{"H": 4, **CASES[case]})
    call = served(x)
    cu_k = x.cu_seqlens_q if x.cu_seqlens_k is None else x.cu_seqlens_k
    tensors = Residuals(x.q, x.k, x.v, x.sinks, x.cu_seqlens_q, cu_k)
    for deterministic in (False, True):
        call = call._replace(deterministic=deterministic)
        o, lse = flash.forward(call, tensors)
        found = []
        for value in (0.0, torch.nan, 1e30):
            for module, name in ((flash.backward_kernel, "empty_workspace"), (flash, "empty_gradients")):
                make = getattr(module, name)

                def filled(*args, make=make, value=value):
                    made = make(*args)
                    for t in made if isinstance(made, tuple) else (made,):
                        t.fill_(value)
                    return made

                monkeypatch.setattr(module, name, filled)
            found.append(flash.backward(call, tensors, o, lse, x.do, x.dlse))
            monkeypatch.undo()
        for other in found[1:]:
            for name, a, b in zip(("dq", "dk", "dv", "dsinks"), found[0], other, strict=True):
                if a is not None and (deterministic or name != "dq"):
                    assert torch.equal(a, b), name
                assert a is None or b.isfinite().all(), name


@pytest.mark.slow
@pytest.mark.parametrize("D", WIDTHS)
@pytest.mark.parametrize("case", ["causal", "full", "fewer keys", "window", "all", "packed, all", "packed full"])
def test_same_bits_in_250_runs(case, D):
    torch.use_deterministic_algorithms(True)
    x = inputs(D, **BF16, **{"B": 1 if "packed" in case else 3, "H": 16, **CASES[case]})
    served(x)
    attend = testing.backend("cuda")
    first = testing.evaluate(attend, x)
    for _ in range(250):
        for name, a, b in zip(first._fields, first, testing.evaluate(attend, x), strict=True):
            assert a is None or torch.equal(a, b), name


@pytest.mark.parametrize("D", WIDTHS)
def test_several_streams_at_once(D):
    """Each call has a workspace of its own."""
    torch.use_deterministic_algorithms(True)
    calls = [inputs(D, B=2, H=8, N_Q=1500, causal=True, seed=seed, **BF16) for seed in range(4)]
    served(calls[0])
    attend = testing.backend("cuda")
    wanted = [testing.evaluate(attend, x) for x in calls]
    streams = [torch.cuda.Stream() for _ in calls]
    torch.cuda.synchronize()
    for _ in range(20):
        found = []
        for x, stream in zip(calls, streams, strict=True):
            with torch.cuda.stream(stream):
                found.append(testing.evaluate(attend, x))
        torch.cuda.synchronize()
        for want, got in zip(wanted, found, strict=True):
            assert all(map(torch.equal, want[:5], got[:5]))


OPTIONS = {
    "causal": {"causal": True},
    "heads": {"causal": True, "H_KV": 16},
    "window": {"causal": True, "window": (300, None)},
    "softcap, sinks": {"causal": True, "softcap": 20.0, "sinks": True},
    "packed": {"lengths_q": [1000, 0, 1, 1047], "causal": True},
}


@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("options", OPTIONS)
def test_auto_takes_it(options, D):
    """From end to end, with the gradient of lse."""
    x = testing.inputs(**{"H": 32, "N_Q": 2048, "D": D, **OPTIONS[options], **BF16, "device": "cuda"})
    call = served(x)
    assert dispatch.pick("flash", call).name == "cuda"
    for use in (("o",), ("o", "lse")):
        testing.check(x, "auto", use)
