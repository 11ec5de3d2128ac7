"""The CUDA backward of softmax attention, run on a CPU (tests/emulator): right, whenever copies and products happen."""

from __future__ import annotations

import functools

import pytest
import torch

from fulmen import dispatch
from fulmen.dispatch import Choice
from fulmen.flash.policy import BackwardTile
from fulmen.flash.spec import Residuals
from fulmen.testing import flash as testing
from tests import emulator
from tests.emulator import ANY, EARLY, LATE, MODES, PRESSED

pytestmark = pytest.mark.skipif(emulator.COMPILER is None, reason="the emulator needs g++")

T64, T128 = BackwardTile(128), BackwardTile(64)
STAGED = {"staged": True}
PLAIN = {"H": 1, "N_Q": 150}
PACKED = {"lengths_q": [70, 1, 0, 45, 130], "lengths_k": [30, 1, 5, 170, 130], "causal": True}
ALL = {"H_KV": 1, "N_KV": 150, "causal": True, "window": (40, None), "softcap": 3.0, "sinks": True}
CASES = {  # D, how the tile differs, the call
    "64": (64, {}, PLAIN),
    "64 causal": (64, {}, {"H": 1, "N_Q": 300, "causal": True}),
    "64 more keys": (64, {}, {"N_Q": 70, "N_KV": 299, "causal": True, "H_KV": 1}),
    "64 fewer keys": (64, {}, {"N_Q": 270, "N_KV": 100, "causal": True}),
    "64 top left": (64, STAGED, {"N_Q": 130, "N_KV": 270, "causal": "top_left"}),
    "64 packed": (64, {}, PACKED),
    "64 all": (64, {}, ALL),
    "64 not ahead": (64, {"ahead": False, "q_stages": 2}, {"N_Q": 200, "H_KV": 1, "causal": True}),
    "128": (128, {}, PLAIN),
    "128 causal": (128, {}, {"H": 1, "N_Q": 300, "causal": True}),
    "128 GQA": (128, STAGED, {"H": 4, "H_KV": 2, "N_Q": 99, "N_KV": 140, "causal": True, "B": 2}),
    "128 fewer keys": (128, {}, {"N_Q": 270, "N_KV": 100, "causal": True}),
    "128 packed": (128, {}, {**PACKED, "H": 4, "H_KV": 2, "sinks": True}),
    "128 packed full": (128, STAGED, {**PACKED, "causal": False}),
    "128 window": (128, {}, {"N_Q": 330, "window": (70, 30)}),
    "128 softcap": (128, {}, {**PLAIN, "softcap": 2.0}),
    "128 all": (128, {}, ALL),
    "128 not ahead": (128, {"ahead": False, "q_stages": 2}, {"N_Q": 200, "H_KV": 1, "causal": True}),
}


def inputs(D: int, options: dict, dtype: torch.dtype = torch.bfloat16, **more: object) -> testing.Inputs:
    return testing.inputs(D=D, dtype=dtype, **{"H": 2, **options, **more})


@functools.cache
def results_of_forward(x_key: tuple) -> tuple[torch.Tensor, torch.Tensor]:
    case, dtype, use = x_key
    D, _, options = CASES[case]
    exact = testing.reference(inputs(D, options, dtype), use)
    return exact.o.to(dtype), exact.lse.float()


def gradients(
    case: str, mode: int, seed: int = 0, edit: emulator.Edit = None, use: tuple[str, ...] = ("o", "lse"),
    dtype: torch.dtype = torch.bfloat16, deterministic: bool = False,
) -> testing.Outputs:  # fmt: skip
    """Compared with fp64."""
    D, tile, options = CASES[case]
    x = inputs(D, options, dtype)
    o, lse = results_of_forward((case, dtype, use))
    spec = x.spec(needs_grad=True, with_lse="lse" in use)._replace(deterministic=deterministic)
    chosen = BackwardTile(128 if D == 64 else 64)._replace(**tile)
    if deterministic:
        chosen = chosen._replace(staged=True)
    choice = Choice("cuda", "sm90", None, 1, "cuda", chosen)
    tensors = Residuals(x.q, x.k, x.v, x.sinks, x.cu_seqlens_q, x.cu_seqlens_k)
    if x.cu_seqlens_q is not None and x.cu_seqlens_k is None:
        tensors = tensors._replace(cu_seqlens_k=x.cu_seqlens_q)
    with emulator.serve("flash", mode, seed, edit) as emulated, pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(dispatch, "choose", lambda op, spec, backend: choice)
        found = dispatch.kernels("flash")["cuda"].backward(
            spec, tensors, o, lse, x.do, x.dlse if "lse" in use else None
        )
        assert emulated.launches == 3
    outputs = testing.Outputs(o, lse, *found)
    testing.compare(x, outputs, use)
    return outputs


@pytest.mark.parametrize("mode", MODES, ids=["early", "late", "any", "pressed"])
@pytest.mark.parametrize("case", CASES)
def test_right_on_the_emulator(case, mode):
    dtype = torch.float16 if len(case) % 4 == 1 else torch.bfloat16
    gradients(case, mode, len(case), dtype=dtype, use=("o",) if len(case) % 3 == 0 else ("o", "lse"))
