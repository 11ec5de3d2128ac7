"""The backend `flash_attn` without the package: a stand-in with its signatures, which computes with `eager`.

What is tested is ours: the layout, the arguments and the limits. The stand-in takes what flash-attn 2.8 takes.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

import pytest
import torch

import fulmen.flash
from fulmen import dispatch, hardware, plans
from fulmen.flash import eager
from fulmen.flash.spec import FlashSpec, Residuals
from fulmen.testing import flash as testing
from tests.flash.test_options import BY_ADDRESS, OTHER

CUDA = torch.device("cuda", 0)


def spec_of(q, k, scale, causal, left, right, softcap) -> FlashSpec:
    (B, N_Q, H, D), (_, N_KV, H_KV, _) = q.shape, k.shape
    right = 0 if causal else right
    left, right = (None if side < 0 else side for side in (left, right))
    return FlashSpec(B, H, H_KV, N_Q, N_KV, D, D, q.dtype, q.device, scale, left, right, softcap=softcap or None)


def turned(*tensors):
    return [t.transpose(1, 2) for t in tensors]


def _flash_attn_forward(
    q, k, v, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes,
    return_softmax,
):  # fmt: skip
    assert (dropout_p, alibi_slopes, return_softmax) == (0.0, None, False)
    assert all(x.data_ptr() % 16 == 0 and x.stride(3) == 1 for x in (q, k, v))
    spec = spec_of(q, k, softmax_scale, causal, window_size_left, window_size_right, softcap)
    o, lse = eager.forward(spec, Residuals(*turned(q, k, v)))
    return o.transpose(1, 2), lse, torch.empty(0), torch.zeros(2, dtype=torch.int64)


def _flash_attn_backward(
    dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal, window_size_left,
    window_size_right, softcap, alibi_slopes, deterministic, rng_state=None,
):  # fmt: skip
    assert (dropout_p, alibi_slopes, deterministic, rng_state) == (0.0, None, True, None)
    assert all(x.data_ptr() % 16 == 0 and x.stride(3) == 1 for x in (dout, q, k, v, out, dq, dk, dv))
    spec = spec_of(q, k, softmax_scale, causal, window_size_left, window_size_right, softcap)
    q, k, v, out, dout = turned(q, k, v, out, dout)
    for given, made in zip(
        (dq, dk, dv), eager.backward(spec, Residuals(q, k, v), out, softmax_lse, dout, None)[:3], strict=True
    ):
        given.copy_(made.transpose(1, 2))
    return torch.empty(0)


@pytest.fixture
def backend(monkeypatch):
    """The backend's module, imported over the stand-in; everything is put back afterwards."""
    package, interface = ModuleType("flash_attn"), ModuleType("flash_attn.flash_attn_interface")
    interface._flash_attn_forward = _flash_attn_forward
    interface._flash_attn_backward = _flash_attn_backward
    package.flash_attn_interface = interface
    dispatch.kernels("flash")  # everything else is loaded
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    monkeypatch.setitem(sys.modules, "flash_attn.flash_attn_interface", interface)
    monkeypatch.delitem(sys.modules, "fulmen.flash.flash_attn", raising=False)
    monkeypatch.setattr(fulmen.flash, "flash_attn", None, raising=False)
    monkeypatch.setattr(dispatch, "_kernels", dispatch._kernels | {"flash": dict(dispatch._kernels["flash"])})
    monkeypatch.setattr(dispatch, "_missing", dispatch._missing | {"flash": {}})
    dispatch.pick.cache_clear()
    module = importlib.import_module("fulmen.flash.flash_attn")
    yield module
    sys.modules.pop("fulmen.flash.flash_attn")
    dispatch.pick.cache_clear()
    plans.clear()


CASES = {
    "full": {},
    "heads": {"H": 4, "H_KV": 2},
    "bnhd": {"layout": "bnhd", "B": 2},
    "fused": {"layout": "fused", "B": 2},
    "causal": {"causal": True},
    "N_Q<N_KV": {"N_Q": 30, "N_KV": 70, "causal": True},
    "N_Q=1": {"N_Q": 1, "N_KV": 70, "causal": True, "H": 4, "H_KV": 1},
    "N_Q>N_KV": {"N_Q": 70, "N_KV": 30},
    "window": {"N_Q": 30, "N_KV": 70, "window": (20, 5)},
    "window, left": {"window": (20, None)},
    "window, right": {"window": (None, 5)},
    "window, causal": {"window": (9, None), "causal": True},
    "softcap": {"softcap": 2.0, "scale": 0.7},
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_layout_and_arguments(backend, case, monkeypatch):
    """The same as `eager` in every bit, through the ordinary call, on a CPU that passes for a GPU."""
    monkeypatch.setattr(backend, "supports", lambda spec: None)
    kernel = dispatch.kernels("flash")["flash_attn"]._replace(supports=lambda spec: None)
    monkeypatch.setitem(dispatch._kernels["flash"], "flash_attn", kernel)
    x = testing.inputs(**{"D": 16} | CASES[case], dtype=torch.float16)
    got, want = (testing.evaluate(testing.backend(b, with_lse=False), x, ("o",)) for b in ("flash_attn", "eager"))
    for name in ("o", "dq", "dk", "dv"):
        a, b = getattr(got, name), getattr(want, name)
        assert torch.equal(a, b), name
        assert a.stride() == b.stride(), name
    lse = testing.backend("flash_attn")(x)[1]
    assert torch.equal(lse, testing.backend("eager")(x)[1])
    assert lse.is_contiguous()


def test_what_the_kernels_cannot_load_is_copied(backend):
    x = testing.inputs(2, 2, 40, 16, dtype=torch.float16)
    wide = x.q.new_full((2, 2, 40, 17), 3.0)
    odd = x._replace(q=wide[..., 1:].copy_(x.q), v=x.v[:1].expand_as(x.v))
    o, _ = backend.forward(x.spec(), Residuals(odd.q, odd.k, odd.v))
    assert torch.equal(o, eager.forward(x.spec(), Residuals(odd.q, odd.k, odd.v))[0])


def spec(**changes) -> FlashSpec:
    plain = FlashSpec(1, 2, 2, 64, 64, 16, 16, torch.bfloat16, CUDA, 0.25, needs_grad=True)
    return plain._replace(**changes)


@pytest.mark.parametrize(
    "field", [f for f in FlashSpec._fields if f not in {*BY_ADDRESS, *["B", "H", "H_KV", "N_Q", "N_KV", "E"]}]
)
def test_a_fact_reaches_the_package_or_is_refused(backend, field, monkeypatch):
    """As in test_options.py. Shapes, dtype and scale are passed as they are, and gradients are asked for in order."""
    monkeypatch.setattr(hardware, "of", lambda device: hardware.TARGETS[90])
    changed = spec(N_KV=96)._replace(**{field: OTHER[field]})
    same = backend.supports(changed) is None and backend.mask(changed) == backend.mask(spec())
    assert same == (field in {"dtype", "scale", "deterministic", "page"})


SENTENCES = [
    (spec(device=torch.device("cpu")), 90, "flash-attn needs a CUDA GPU, and the device is cpu"),
    (spec(), 75, "flash-attn needs compute capability 8.0 or later, this GPU has 7.5"),
    (spec(dtype=torch.float32), 90, "flash-attn computes in bf16 and fp16, and q is float32"),
    (spec(E=24), 90, "flash-attn needs E = D, here D=16, E=24"),
    (spec(D=20, E=20), 90, "flash-attn needs a head dim that is a multiple of 8, here D=20"),
    (spec(has_sinks=True), 90, "flash-attn has no sinks"),
    (spec(sequences=2), 90,
     "flash-attn needs the longest packed sequence on the host, which would synchronise the GPU"),
    (spec(with_lse=True), 90, "flash-attn has no gradient of lse"),
    (spec(scale=-1.0), 90, "flash-attn takes a row's maximum before it scales, so scale must be positive"),
    (spec(N_Q=0), 90, "flash-attn is not asked about empty tensors"),
    (spec(B=70_000), 90, "flash-attn takes at most 65535 batches and heads, here B=70000, H=2"),
    (spec(N_Q=32, right=0, top_left=True), 90,
     "flash-attn counts from the last key, and this call from the first: N_Q=32, N_KV=64"),
    (spec(N_KV=32, right=0), 90,
     "flash-attn masks otherwise where queries stand before the first key: N_Q=64, N_KV=32"),
]  # fmt: skip


@pytest.mark.parametrize(("asked", "arch", "sentence"), SENTENCES)
def test_supports_sentences(backend, asked, arch, sentence, monkeypatch):
    facts = hardware.TARGETS[90]._replace(arch=arch)
    monkeypatch.setattr(hardware, "of", lambda device: facts)
    assert backend.supports(asked) == sentence


@pytest.mark.parametrize("asked", [spec(), spec(with_lse=True, needs_grad=False), spec(left=3, right=0, softcap=2.0),
                                   spec(N_Q=128), spec(N_Q=1, right=0)])  # fmt: skip
def test_supports(backend, asked, monkeypatch):
    monkeypatch.setattr(hardware, "of", lambda device: hardware.TARGETS[80])
    assert backend.supports(asked) is None


def test_an_old_package_is_named(monkeypatch):
    package, interface = ModuleType("flash_attn"), ModuleType("flash_attn.flash_attn_interface")
    package.flash_attn_interface = interface
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    monkeypatch.setitem(sys.modules, "flash_attn.flash_attn_interface", interface)
    monkeypatch.delitem(sys.modules, "fulmen.flash.flash_attn", raising=False)
    with pytest.raises(ImportError, match=r"flash_attn_interface has no _flash_attn_forward"):
        importlib.import_module("fulmen.flash.flash_attn")


def test_without_the_package_the_reason_is_in_the_table():
    if importlib.util.find_spec("flash_attn") is not None:
        pytest.skip("the package is installed")
    q = torch.randn(1, 2, 8, 16)
    assert "flash_attn  cannot be imported: No module named 'flash_attn'" in fulmen.explain("flash", q, q, q)
    with pytest.raises(NotImplementedError, match="backend='flash_attn' cannot serve this call: cannot be imported"):
        fulmen.flash_attention(q, q, q, backend="flash_attn")
