"""What an attack on softmax attention found, so that it stays found."""

from __future__ import annotations

import sys

import pytest
import torch

from fulmen import flash_attention, flash_attention_with_lse
from fulmen.launch import facts_of
from fulmen.testing import flash as testing

BACKENDS = ("eager", "triton")
BEYOND = [(None, 2**31 - 1), (2**31 - 1, None), (2**31, None), (None, sys.maxsize), (10**4, 60)]


def rows(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a.double(), b.double(), atol=5e-3, rtol=5e-3)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("window", BEYOND)
@pytest.mark.parametrize("sizes", [(20, 30), (30, 20)])
def test_a_window_beyond_everything_hides_nothing(backend, window, sizes):
    N_Q, N_KV = sizes
    q, k, v = (rows(1, 2, n, 16, seed=n + i).requires_grad_() for i, n in enumerate((N_Q, N_KV, N_KV)))
    do = rows(1, 2, N_Q, 16, seed=9)
    wide = flash_attention(q, k, v, window=window, backend=backend)
    plain = flash_attention(q, k, v, backend=backend)
    assert torch.equal(wide, plain)
    for a, b in zip(*(torch.autograd.grad(o, (q, k, v), do) for o in (wide, plain)), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("softcap", [0.5, 30.0, 1e4, 1e6, 1e30])
def test_a_softcap_of_any_size(backend, softcap):
    q, k, v = (rows(1, 2, 40, 16, seed=i) for i in range(3))
    got = flash_attention(q, k, v, softcap=softcap, backend=backend)
    close(got, flash_attention(q.double(), k.double(), v.double(), softcap=softcap, backend="reference"))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_sink_of_minus_infinity_is_none(backend):
    q, k, v = (rows(1, 2, n, 16, seed=n + i).requires_grad_() for i, n in enumerate((60, 40, 40)))
    sinks = torch.tensor([-torch.inf, 0.3], requires_grad=True)
    o, lse = flash_attention_with_lse(q, k, v, sinks=sinks, causal=True, backend=backend)
    assert (lse[0, 0, :20] == -torch.inf).all()
    assert not o[0, 0, :20].any()
    (dsinks,) = torch.autograd.grad(o, sinks, rows(1, 2, 60, 16, seed=5))
    assert dsinks.isfinite().all()
    assert dsinks[0] == 0


@pytest.mark.parametrize("backend", ["eager", "sdpa", "triton"])
def test_vmap_keeps_what_the_backward_needs(backend):
    q = rows(3, 2, 2, 20, 16).requires_grad_()
    k = rows(2, 2, 20, 16, seed=1)
    o = torch.func.vmap(lambda a: flash_attention(a, k, k, backend=backend))(q)
    o.float().sum().backward()
    one_by_one = q.detach().clone().requires_grad_()
    torch.stack([flash_attention(a, k, k, backend=backend).float().sum() for a in one_by_one]).sum().backward()
    close(q.grad, one_by_one.grad)


@pytest.mark.parametrize("backend", ["eager", "sdpa", "triton"])
def test_negated_views(backend):
    q, k, v = (rows(1, 2, 20, 16, seed=i) for i in range(3))
    lazily = flash_attention(torch._neg_view(q), k, v, backend=backend)
    assert torch.equal(lazily, flash_attention(-q, k, v, backend=backend))


@pytest.mark.parametrize("options", [{"window": (True, None)}, {"window": (1.0, None)}, {"scale": 0.5 + 0j}])
def test_checks_do_not_depend_on_calls_before(options):
    q = rows(1, 2, 20, 16)
    flash_attention(q, q, q, window=(1, None))
    flash_attention(q, q, q, scale=0.5)
    with pytest.raises(ValueError, match=next(iter(options))):
        flash_attention(q, q, q, **options)


@pytest.mark.parametrize("options", [{"scale": [1]}, {"window": ([1], None)}, {"causal": [1]}, {"softcap": "a"}])
def test_options_of_strange_types(options):
    q = rows(1, 2, 20, 16)
    with pytest.raises(ValueError, match=next(iter(options))):
        flash_attention(q, q, q, **options)


def test_offsets_without_a_sequence():
    q = rows(1, 2, 20, 16)
    with pytest.raises(ValueError, match="no sequence, but N=20"):
        flash_attention(q, q, q, cu_seqlens_q=torch.zeros(1, dtype=torch.int32))


def test_what_is_remembered_of_a_descriptor_holds_no_tensor():
    facts = facts_of(rows(1, 2, 20, 16), 64)
    assert "block_shape" in facts
    assert not any(isinstance(value, torch.Tensor) for value in facts.values())


def test_eager_fp16_with_a_large_scale():
    q, k, v = (rows(1, 2, 20, 16, seed=i) for i in range(3))
    assert flash_attention(q, k, v, scale=1e5, backend="eager").isfinite().all()


def test_a_forward_that_kept_no_lse_has_no_backward():
    q = rows(1, 2, 20, 16).requires_grad_()
    o, _ = torch.ops.fulmen.flash_forward(q, q, q, None, None, None, *testing.operator_facts("flash_forward"))
    with pytest.raises(RuntimeError, match="needs_grad=False"):
        o.sum().backward()


def test_sinks_of_another_dtype_than_autocast():
    """As q, k and v they may have any."""
    q, k, v = (rows(1, 2, 20, 16, seed=i) for i in range(3))
    sinks = rows(2).requires_grad_()
    want = flash_attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), sinks=sinks.float())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        o = flash_attention(q, k, v, sinks=sinks)
    assert torch.equal(o, want)
    o.backward(torch.ones_like(o))
    assert sinks.grad.dtype == torch.float16
