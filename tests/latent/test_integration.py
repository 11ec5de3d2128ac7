"""Latent attention inside PyTorch: plans, torch.compile, opcheck, autocast, CUDA graphs; what is refused, in words."""

from __future__ import annotations

import pytest
import torch

import fulmen
from fulmen import dispatch, plans
from fulmen.testing import latent as testing

CUDA_ONLY = pytest.mark.gpu


def call(x: testing.Inputs, **changes) -> torch.Tensor:
    return fulmen.latent_attention(x.q, x.kv, **x.options(), **changes)


def paged(**options) -> testing.Inputs:
    return testing.inputs(2, 4, 2, 64, lengths=[64, 20], page=16, causal=True, **options)


def test_a_repeated_call_takes_its_plan(monkeypatch):
    x = testing.inputs(2, 4, 1, 64, lengths=[64, 20])
    plans.clear()
    want = call(x)
    monkeypatch.setattr("fulmen.latent.op.check_inputs", None)  # not called again
    x.kv_lengths.copy_(torch.tensor([20, 64], dtype=torch.int32))
    x.kv.nan_to_num_()
    assert not torch.equal(call(x), want)
    testing.compare(x, call(x))


def test_options_of_other_types():
    """numpy's numbers and the like take the way without a plan's key."""
    x = testing.inputs(1, 2, 1, 40)
    want = call(x)
    got = fulmen.latent_attention(x.q, x.kv, value_dim=torch.tensor(64), max_kv_length=torch.tensor(40), scale=96**-0.5)
    assert torch.equal(got, want)


@pytest.mark.parametrize("make", [testing.inputs, paged], ids=["plain", "paged"])
def test_opcheck(make):
    x = make()
    facts = (64, 0.1, False, None, "eager")
    torch.library.opcheck(torch.ops.fulmen.latent_forward, (x.q, x.kv, x.kv_lengths, x.page_table, *facts))


@pytest.mark.parametrize("layout", ["bhnd", "bnhd"])
def test_compile_fullgraph(layout):
    x = paged(layout=layout)
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    got = compiled(x)
    assert torch.equal(got, call(x))
    assert got.stride() == call(x).stride()


def test_no_gradients():
    x = testing.inputs(1, 2, 1, 40)
    leaf = x._replace(q=x.q.clone().requires_grad_())
    with pytest.raises(NotImplementedError, match=r"latent_attention has no gradient, and q or kv requires one"):
        call(leaf)
    with torch.no_grad():
        assert torch.equal(call(leaf), call(x))
    with pytest.raises(NotImplementedError, match=r"latent_attention has no gradient"):
        torch.ops.fulmen.latent_forward(leaf.q, x.kv, None, None, 64, 0.1, False, None, "eager").sum().backward()
    with pytest.raises(NotImplementedError, match=r"no torch.func rules"):
        torch.func.grad(lambda q: call(x._replace(q=q)).sum())(x.q)


def test_the_reference_is_differentiable():
    x = testing.inputs(1, 2, 2, 12, 6, 4, lengths=[10], causal=True, dtype=torch.float64)
    x = x._replace(kv=x.kv.nan_to_num())
    assert torch.autograd.gradcheck(
        lambda q, kv: call(x._replace(q=q, kv=kv), backend="reference"), (x.q.requires_grad_(), x.kv.requires_grad_())
    )


def test_autocast():
    x = testing.inputs(1, 2, 1, 40)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = call(x)
    assert got.dtype == torch.bfloat16
    testing.compare(x._replace(q=x.q.bfloat16(), kv=x.kv.bfloat16()), got)


def test_a_negative_view():
    x = testing.inputs(1, 2, 1, 40)
    negative = x._replace(q=torch._neg_view(-x.q), kv=torch._neg_view(-x.kv))
    assert torch.equal(call(negative), call(x))


def test_explain():
    x = testing.inputs(1, 2, 1, 40)
    assert fulmen.explain("latent", x.q, x.kv, value_dim=64).endswith("auto: eager")


@CUDA_ONLY
@pytest.mark.parametrize("backend", sorted(dispatch.kernels("latent")))
def test_a_graph_is_replayed_with_other_lengths(backend):
    x = testing.inputs(3, 16, 1, 700, 576, 512, lengths=[700, 0, 64], page=64, device="cuda", dtype=torch.bfloat16)
    if (why := dispatch.kernels("latent")[backend].supports(x.spec())) is not None:
        pytest.skip(why)
    x = x._replace(kv=x.kv.nan_to_num())
    with torch.no_grad():
        for _ in range(3):
            call(x, backend=backend)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            o = call(x, backend=backend)
        for lengths in ([1, 2, 3], [700, 700, 700], [0, 0, 0], [65, 640, 1]):
            x.kv_lengths.copy_(torch.tensor(lengths, dtype=torch.int32))
            graph.replay()
            testing.compare(x, o)
            assert torch.equal(o, call(x, backend=backend))


@CUDA_ONLY
def test_nothing_synchronises():
    x = testing.inputs(3, 16, 1, 700, 576, 512, lengths=[700, 0, 64], page=64, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        call(x)
        torch.cuda.set_sync_debug_mode("error")
        try:
            call(x)
            call(x)
        finally:
            torch.cuda.set_sync_debug_mode("default")


# --------------------------------------------------------------------------------------------- bad input

Q, KV, I32 = torch.zeros(2, 3, 1, 96), torch.zeros(2, 40, 96), torch.int32
TABLE = torch.zeros(2, 1, dtype=I32)
BAD = {
    r"q is a list": {"q": [1.0]},
    r"q has 3 dimensions, must have 4": {"q": Q[0]},
    r"kv has 4 dimensions, must have 3": {"kv": KV[None]},
    r"kv has 95 columns, must have q's D=96": {"kv": KV[..., 1:]},
    r"kv has 1 rows, must have q's B=2, or a page_table": {"kv": KV[:1]},
    r"q is torch.int64": {"q": Q.long()},
    r"kv is torch.float64, must be q's": {"kv": KV.double()},
    r"kv is on meta": {"kv": KV.to("meta")},
    r"kv's last dimension must be contiguous": {"kv": torch.zeros(2, 96, 40).mT},
    r"value_dim=97: must be an int from 1 to q's D=96": {"value_dim": 97},
    r"value_dim=0": {"value_dim": 0},
    r"value_dim=64.0": {"value_dim": 64.0},
    r"kv_lengths is torch.int64, must be int32": {"kv_lengths": torch.zeros(2).long()},
    r"kv_lengths has shape \(3,\), must be \(B,\) with q's B=2": {"kv_lengths": torch.zeros(3, dtype=I32)},
    r"kv_lengths is a list": {"kv_lengths": [1, 2]},
    r"kv_lengths is on meta": {"kv_lengths": torch.zeros(2, dtype=I32, device="meta")},
    r"page_table is torch.float32": {"page_table": torch.zeros(2, 1)},
    r"page_table has shape \(2,\), must be \(B, pages": {"page_table": torch.zeros(2, dtype=I32)},
    r"a page has 8 keys, must have 16 to 256": {"page_table": TABLE, "kv": KV[:, :8]},
    r"kv has no pages": {"page_table": TABLE, "kv": KV[:0]},
    r"max_kv_length=-1": {"max_kv_length": -1},
    r"max_kv_length='long'": {"max_kv_length": "long"},
    r"causal='top_left': must be False or True": {"causal": "top_left"},
    r"scale=0": {"scale": 0},
    r"backend='fast': latent has": {"backend": "fast"},
}  # fmt: skip


@pytest.mark.parametrize("message", BAD)
def test_bad_input(message):
    arguments = {"q": Q, "kv": KV, "value_dim": 64} | BAD[message]
    with pytest.raises(ValueError, match=message):
        fulmen.latent_attention(arguments.pop("q"), arguments.pop("kv"), **arguments)
