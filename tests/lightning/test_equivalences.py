"""Different ways to the same numbers: oracles, segments, packing, heads, interfaces, backends."""

from __future__ import annotations

import pytest
import torch

import fulmen
from fulmen import dispatch
from fulmen.lightning import policy
from fulmen.lightning.spec import spec_of
from fulmen.testing import lightning as testing

BACKENDS = sorted(dispatch.kernels("lightning"))
EVERYTHING = {"E": 24, "H_KV": 2, "decay": "mixed", "scale": 0.5, "initial_state": True}


def serving(*xs: testing.Inputs, backend: str) -> str:
    """`backend`, or a skip with its own sentence."""
    for x in xs:
        why = dispatch.reasons("lightning", spec_of(x.q, x.k, x.v, x.decay, **x.options()))[backend]
        if why is not None:
            pytest.skip(why)
    return backend


def assert_equal(a: testing.Outputs, b: testing.Outputs, terms: int) -> None:
    """Up to the rounding of sums of `terms` products, the only thing that may differ."""
    for name, x, y in zip(a._fields, a, b, strict=True):
        assert (x is None) == (y is None), name
        if x is not None:
            assert x.shape == y.shape, name
            bound = terms * torch.finfo(x.dtype).eps * y.abs().max()
            assert (x - y).abs().max() <= bound, f"{name}: {(x - y).abs().max():.3e} > {bound:.3e}"


def run(x: testing.Inputs, backend: str) -> testing.Outputs:
    return testing.evaluate(testing.backend(backend), x)


@pytest.fixture
def split(monkeypatch):
    if not torch.cuda.is_available():
        monkeypatch.setattr(policy, "MIN_SEGMENT", 16)
        monkeypatch.setattr(policy, "PROGRAMS_PER_SM", 1000)
    dispatch._choose.cache_clear()
    yield
    dispatch._choose.cache_clear()


@pytest.mark.parametrize("lengths", [None, [40, 0, 1, 59]], ids=["batch", "packed"])
@pytest.mark.parametrize("decay", [None, "mixed"])
@pytest.mark.parametrize("other", ["recurrent", "chunked"])
def test_oracles_agree(other, decay, lengths):
    """The chunk length of `chunked` is 16, so 100 rows also have a short last chunk."""
    x = testing.inputs(2, 4, 100, 16, **EVERYTHING | {"decay": decay}, lengths=lengths)
    assert_equal(testing.reference(x, oracle=other), testing.reference(x, oracle="quadratic"), terms=100)


@pytest.mark.parametrize("decay", [None, "mixed"])
def test_eager_is_exact_in_fp64(decay):
    x = testing.inputs(1, 4, 200, 16, **EVERYTHING | {"decay": decay}, dtype=torch.float64)
    assert_equal(run(x, "eager"), testing.reference(x), terms=200)


@pytest.mark.parametrize("panel_bytes", [1, 3 * 4 * 4 * 64 * 64])
def test_eager_panels(panel_bytes, monkeypatch):
    """One chunk a panel, and three: panels only bound memory."""
    from fulmen.lightning import eager

    x = testing.inputs(1, 4, 500, 16, **EVERYTHING, dtype=torch.float64)
    whole = run(x, "eager")
    monkeypatch.setattr(eager, "PANEL_BYTES", panel_bytes)
    assert len(eager.panels(0, 500, 4)) > 2
    assert_equal(run(x, "eager"), whole, terms=500)


@pytest.mark.parametrize("backend", BACKENDS)
def test_segments_with_passed_state_are_the_whole(backend, split):
    """Cut where no chunk ends; the gradients flow through the states."""
    x = testing.inputs(1, 2, 90, 16, decay="mixed", scale=0.5, initial_state=True)
    serving(x, backend=backend)

    def in_segments(x: testing.Inputs):
        os, state = [], x.initial_state
        for begin, end in ((0, 37), (37, 38), (38, 38), (38, 90)):
            q, k, v = (y[:, :, begin:end] for y in (x.q, x.k, x.v))
            o, state = testing.backend(backend)(x._replace(q=q, k=k, v=v, initial_state=state))
            os.append(o)
        return torch.cat(os, dim=2), state

    assert_equal(testing.evaluate(in_segments, x), run(x, backend), terms=90)


@pytest.mark.parametrize("backend", BACKENDS)
def test_packed_is_one_by_one(backend, split):
    lengths = [40, 0, 1, 29]
    x = testing.inputs(H=4, D=16, lengths=lengths, **EVERYTHING)
    serving(x, backend=backend)
    packed = run(x, backend)
    begin = 0
    for i, length in enumerate(lengths):
        part = slice(begin, begin + length)
        alone = x._replace(**{n: getattr(x, n)[:, :, part] for n in ("q", "k", "v", "do")}, cu_seqlens=None)
        alone = alone._replace(**{n: getattr(x, n)[i : i + 1] for n in ("initial_state", "dstate")})
        rows = {n: getattr(packed, n)[:, :, part] for n in ("o", "dq", "dk", "dv")}
        states = {n: getattr(packed, n)[i : i + 1] for n in ("state", "dinitial")}
        if length:
            assert_equal(packed._replace(**rows, **states), run(alone, backend), terms=40)
        else:
            torch.testing.assert_close(states["state"], x.initial_state[i : i + 1], rtol=0, atol=0)
            torch.testing.assert_close(states["dinitial"], x.dstate[i : i + 1], rtol=1e-6, atol=0)
        begin += length


@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")  # NaN, in Triton's interpreter
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("decay", [None, "mixed"])
@pytest.mark.parametrize(("name", "bad"), [("k", torch.nan), ("k", torch.inf), ("v", torch.nan), ("v", torch.inf)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_not_finite_reaches_no_earlier_chunk(backend, name, bad, decay, device, split):
    """Chunks divide 64 rows. `reference` is exact to the row, and so is `eager` in k."""
    N, row, D, dtype = (100, 70, 16, torch.float32) if device == "cpu" else (8192, 7000, 64, torch.bfloat16)
    x = testing.inputs(1, 2, N, D, decay=decay, device=device, dtype=dtype)
    forward = testing.backend(serving(x, backend=backend))
    spoilt = getattr(x, name).clone()
    spoilt[:, :, row, 3] = bad
    clean, o = forward(x)[0], forward(x._replace(**{name: spoilt}))[0]
    first = row if (backend, name) in {("reference", "k"), ("reference", "v"), ("eager", "k")} else row // 64 * 64
    assert torch.equal(o[:, :, :first], clean[:, :, :first])
    assert not o[:, :, row].isfinite().all(2).any()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_backends_agree(device, split):
    """fp32 on each backend that serves it, against eager."""
    x = testing.inputs(1, 4, 70, 16, **EVERYTHING, device=device)
    eager = run(x, "eager")
    why = dispatch.reasons("lightning", spec_of(x.q, x.k, x.v, x.decay, **x.options()))
    others = [name for name, reason in why.items() if reason is None and name != "eager"]
    assert {"triton", "triton_split"} <= set(others)
    for other in others:
        assert_equal(run(x, other), eager, terms=70)


@pytest.mark.parametrize("backend", BACKENDS)
def test_decay_shapes(backend):
    x = testing.inputs(1, 3, 40, 16, decay="mixed")
    serving(x, backend=backend)
    flat = fulmen.lightning_attention(x.q, x.k, x.v, x.decay, backend=backend)
    cube = fulmen.lightning_attention(x.q, x.k, x.v, x.decay.view(3, 1, 1), backend=backend)
    assert torch.equal(flat, cube)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("variant", ["chunk_loop", "parallel"])
@pytest.mark.parametrize("decay", [None, "mixed"])
def test_lightning_attn_func(variant, decay, device):
    x = testing.inputs(1, 2, 600, 64, decay=decay, device=device)
    s = None if decay is None else x.decay.view(2, 1, 1)
    backend = {"cpu": "eager", "cuda": {"chunk_loop": "triton", "parallel": "triton_split"}[variant]}[device]
    got = fulmen.lightning_attn_func(x.q, x.k, x.v, s, variant=variant)
    assert torch.equal(got, fulmen.lightning_attention(x.q, x.k, x.v, x.decay, backend=backend))
    if variant == "chunk_loop":
        assert torch.equal(got, fulmen.lightning_attn_func(x.q, x.k, x.v, s))  # the default


@pytest.mark.parametrize("backend", BACKENDS)
def test_shared_heads_are_expanded_heads(backend, split):
    """Head h of q reads head h // group of k and v; dk and dv are the sums over the group."""
    x = testing.inputs(1, 4, 70, 16, **EVERYTHING)
    serving(x, backend=backend)

    def expanded(x: testing.Inputs):
        k, v = (y.repeat_interleave(2, dim=1) for y in (x.k, x.v))
        return testing.backend(backend)(x._replace(k=k, v=v))

    assert_equal(run(x, backend), testing.evaluate(expanded, x), terms=70)


@pytest.mark.parametrize("backend", BACKENDS)
def test_scale_is_a_factor_of_the_output_only(backend):
    x = testing.inputs(1, 2, 40, 16, decay="mixed", initial_state=True)
    serving(x, backend=backend)
    o, state = testing.backend(backend)(x)
    o4, state4 = testing.backend(backend)(x._replace(scale=-4.0))
    assert torch.equal(o4, -4.0 * o)
    assert torch.equal(state4, state)


@pytest.mark.parametrize("backend", BACKENDS)
def test_with_state_returns_the_same_output(backend):
    x = testing.inputs(1, 2, 40, 16, decay="mixed")
    serving(x, backend=backend)
    o = fulmen.lightning_attention(x.q, x.k, x.v, x.decay, backend=backend)
    assert torch.equal(o, testing.backend(backend)(x)[0])
