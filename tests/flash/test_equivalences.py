"""Different ways to the same numbers: packing, heads, masks, panels, implementations."""

from __future__ import annotations

import pytest
import torch

import fulmen
from fulmen import dispatch
from fulmen.flash import eager, sdpa
from fulmen.flash.spec import Residuals
from fulmen.testing import flash as testing

BACKENDS = sorted(dispatch.kernels("flash"))
FP32 = torch.float32


def run(x: testing.Inputs, backend: str) -> testing.Outputs:
    """o, lse and gradients of both, of o alone where the backend has no more; a skip with its sentence if it cannot."""
    kernel = dispatch.kernels("flash")[backend]
    if kernel.supports(x.spec(with_lse=True, needs_grad=True)) is None:
        return testing.evaluate(testing.backend(backend), x)
    if (why := kernel.supports(x.spec(needs_grad=True))) is not None:
        pytest.skip(why)
    return testing.evaluate(testing.backend(backend, with_lse=False), x, ("o",))


def dtype_of(backend: str) -> torch.dtype:
    """fp32 where the backend has it."""
    x = testing.inputs()
    return FP32 if dispatch.kernels("flash")[backend].supports(x.spec(needs_grad=True)) is None else torch.float16


def assert_equal(a: testing.Outputs, b: testing.Outputs, terms: int) -> None:
    """Up to the rounding of sums of `terms` products, the only thing that may differ."""
    for name, x, y in zip(a._fields, a, b, strict=True):
        assert (x is None) == (y is None), name
        if x is None or not x.numel():
            continue
        assert x.shape == y.shape, name
        assert torch.equal(x == -torch.inf, y == -torch.inf), name
        x, y = (t.masked_fill(t == -torch.inf, 0.0) for t in (x, y))
        bound = terms * torch.finfo(x.dtype).eps * y.abs().max()
        assert (x - y).abs().max() <= bound, f"{name}: {(x - y).abs().max():.3e} > {bound:.3e}"


@pytest.mark.parametrize("options", [{}, {"causal": True, "window": (5, None)}, {"causal": "top_left", "sinks": True}],
                         ids=["full", "bottom right, window", "top left, sinks"])  # fmt: skip
@pytest.mark.parametrize("backend", BACKENDS)
def test_packed_is_one_by_one(backend, options):
    """Mixed and empty sequences, q and k of different lengths."""
    lengths_q, lengths_k = [20, 0, 9, 5], [11, 4, 17, 0]
    x = testing.inputs(H=2, H_KV=1, E=24, lengths_q=lengths_q, lengths_k=lengths_k, **options, dtype=dtype_of(backend))
    packed = run(x, backend)
    rows, keys, dsinks = 0, 0, 0.0
    for n_q, n_k in zip(lengths_q, lengths_k, strict=True):
        q, k = slice(rows, rows + n_q), slice(keys, keys + n_k)
        alone = x._replace(cu_seqlens_q=None, cu_seqlens_k=None)
        alone = alone._replace(**{n: getattr(x, n)[:, :, q] for n in ("q", "do", "dlse")})
        alone = run(alone._replace(**{n: getattr(x, n)[:, :, k] for n in ("k", "v")}), backend)
        part = {n: getattr(packed, n)[:, :, q] for n in ("o", "lse", "dq")}
        part |= {n: getattr(packed, n)[:, :, k] for n in ("dk", "dv")}
        assert_equal(packed._replace(**part, dsinks=alone.dsinks), alone, terms=20)
        rows, keys = rows + n_q, keys + n_k
        dsinks = dsinks + (0.0 if alone.dsinks is None else alone.dsinks)
    if packed.dsinks is not None:
        torch.testing.assert_close(packed.dsinks, dsinks, rtol=1e-5, atol=1e-3 if x.q.dtype != FP32 else 1e-5)


@pytest.mark.filterwarnings("ignore:invalid value encountered")  # NaN, in Triton's interpreter
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize(("name", "lengths"), [("k", None), ("k", [30, 40]), ("v", [30, 40])])
@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_not_finite_and_not_seen_has_no_effect(backend, name, lengths, bad):
    """Keys that a mask hides, and other sequences. A hidden row of v may be multiplied by zero, which docs say."""
    options = {"lengths_q": lengths, "lengths_k": lengths} if lengths else {"B": 1, "N_Q": 70}
    x = testing.inputs(H=2, D=16, causal=True, dtype=dtype_of(backend), **options)
    why = dispatch.kernels("flash")[backend].supports(x.spec())
    if why is not None:
        pytest.skip(why)
    spoilt = getattr(x, name).clone()
    spoilt[:, :, 50, 3] = bad
    clean, o = (testing.backend(backend, with_lse=False)(y)[0] for y in (x, x._replace(**{name: spoilt})))
    first = 50 if name == "k" else lengths[0]
    assert torch.equal(o[:, :, :first], clean[:, :, :first])


@pytest.mark.parametrize("heads", [(4, 2), (3, 1)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_shared_heads_are_expanded_heads(backend, heads):
    """Head h of q reads head h // group of k and v; dk and dv are the sums over the group."""
    H, H_KV = heads
    x = testing.inputs(1, H, 40, 16, H_KV=H_KV, N_KV=50, causal="top_left", dtype=dtype_of(backend))
    shared = run(x, backend)
    group = H // H_KV
    k, v = (y.repeat_interleave(group, dim=1) for y in (x.k, x.v))
    apart = run(x._replace(k=k, v=v), backend)
    dk, dv = (y.float().unflatten(1, (H_KV, group)).sum(2).to(y.dtype) for y in (apart.dk, apart.dv))
    assert_equal(shared, apart._replace(dk=dk, dv=dv), terms=50 if x.q.dtype == FP32 else 4)


# Two spellings of one mask: N_Q, N_KV, options, options.
SAME_MASK = {
    "True is bottom_right": (20, 33, {"causal": True}, {"causal": "bottom_right"}),
    "square: alignments agree": (33, 33, {"causal": True}, {"causal": "top_left"}),
    "causal is a window": (20, 33, {"causal": True}, {"window": (None, 0)}),
    "causal allows none after": (33, 33, {"causal": True, "window": (7, 9)}, {"causal": True, "window": (7, 0)}),
    "window beyond both ends": (20, 33, {"window": (33, 33)}, {}),
    "one query sees all": (1, 33, {"causal": True}, {}),
    "lists are windows": (20, 33, {"window": [3, 4]}, {"window": (3, 4)}),
}  # fmt: skip


@pytest.mark.parametrize("what", SAME_MASK)
@pytest.mark.parametrize("backend", BACKENDS)
def test_masks_with_two_spellings(backend, what):
    N_Q, N_KV, first, second = SAME_MASK[what]
    make = {"N_Q": N_Q, "N_KV": N_KV, "dtype": dtype_of(backend)}
    a, b = (run(testing.inputs(**make, **options), backend) for options in (first, second))
    assert_equal(a, b, terms=33 if make["dtype"] == FP32 else 2)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_sink_is_a_key_without_a_value(backend):
    """One more key, whose logit is the sink and whose value is zero."""
    x = testing.inputs(1, 1, 40, 16, N_KV=50, sinks=True, dtype=dtype_of(backend))
    unit = torch.zeros(1, 1, 1, 32, dtype=x.q.dtype)
    unit[..., 16] = 1.0
    q, k = (torch.nn.functional.pad(y, (0, 16)) + 0 for y in (x.q, x.k))
    q = q + unit
    key = unit * (x.sinks / 0.25).to(q.dtype)
    value = x.v.new_zeros(1, 1, 1, 16)
    sunk = run(x, backend)
    longer = x._replace(q=q, k=torch.cat([k, key], 2), v=torch.cat([x.v, value], 2), sinks=None, scale=0.25)
    longer = longer._replace(v=torch.nn.functional.pad(longer.v, (0, 16)), do=torch.nn.functional.pad(x.do, (0, 16)))
    other = run(longer, backend)
    for name in ("o", "dq", "dk", "dv"):
        got, want = getattr(sunk, name), getattr(other, name)[:, :, : getattr(sunk, name).shape[2], :16]
        bound = (50 if got.dtype == FP32 else 8) * torch.finfo(got.dtype).eps * want.abs().max()
        assert (got - want).abs().max() <= bound, name


@pytest.mark.parametrize("backend", BACKENDS)
def test_with_lse_returns_the_same_output(backend):
    x = testing.inputs(1, 2, 40, 16, causal=True, dtype=dtype_of(backend))
    if (why := dispatch.kernels("flash")[backend].supports(x.spec(with_lse=True))) is not None:
        pytest.skip(why)
    o = fulmen.flash_attention(x.q, x.k, x.v, **x.options(), backend=backend)
    assert torch.equal(o, testing.backend(backend)(x)[0])


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (30, 10), "sinks": True, "softcap": 3.0}],
                         ids=["full", "causal", "everything"])  # fmt: skip
@pytest.mark.parametrize("panel_bytes", [1, 4 * 4 * 100 * 7])
def test_eager_panels(panel_bytes, options, monkeypatch):
    """One query a panel, and seven: panels only bound memory."""
    x = testing.inputs(1, 4, 60, 16, N_KV=100, H_KV=2, **options, dtype=torch.float64)
    whole = run(x, "eager")
    monkeypatch.setattr(eager, "PANEL_BYTES", panel_bytes)
    assert len(list(eager.panels(x.spec(), Residuals(x.q, x.k, x.v)))) > 2
    assert_equal(run(x, "eager"), whole, terms=100)


@pytest.mark.parametrize("options", [{}, {"causal": True, "window": (9, 3)}, {"sinks": True, "softcap": 2.0}])
def test_eager_is_exact_in_fp64(options):
    x = testing.inputs(1, 4, 70, 16, N_KV=50, H_KV=2, E=24, **options, dtype=torch.float64)
    assert_equal(run(x, "eager"), testing.reference(x), terms=70)


@pytest.mark.parametrize("causal", [False, "top_left"])
@pytest.mark.parametrize("shape", [(40, 40), (40, 70), (70, 40)])
def test_sdpa_is_sdpa(shape, causal):
    """What `sdpa` pins on a CPU is what torch runs there."""
    x = testing.inputs(1, 2, shape[0], 16, N_KV=shape[1], causal=causal)
    if causal and shape[0] == shape[1]:
        x = x._replace(causal=True)
    assert sdpa.chosen(x.spec()) == "cpu"
    want = torch.nn.functional.scaled_dot_product_attention(x.q, x.k, x.v, is_causal=bool(causal))
    assert torch.equal(fulmen.flash_attention(x.q, x.k, x.v, causal=x.causal, backend="sdpa"), want)
