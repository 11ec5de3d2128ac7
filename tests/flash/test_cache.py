"""Softmax attention over a cache: lengths on the device, pages, and what may lie beyond them."""

from __future__ import annotations

import pytest
import torch

import fulmen
from fulmen import dispatch, hardware
from fulmen.flash import policy, triton_cache
from fulmen.flash.policy_cache import CacheTile
from fulmen.flash.spec import Residuals
from fulmen.launch import run
from fulmen.testing import flash as testing

BACKENDS = sorted(dispatch.kernels("flash"))
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


def case(kv_lengths, capacity, **options):
    return {"kv_lengths": kv_lengths, "capacity": capacity, "H": 2, "N_Q": 1, "D": 16} | options


CASES = {
    "decoding": case([70, 1, 0, 128], 128),
    "beyond the capacity": case([500, -3, 64], 64),
    "bounded": case([70, 10, 90], 128, max_kv_length=80),
    "heads 4/2": case([70, 33], 100, H=4, H_KV=2),
    "heads 6/2": case([70, 33], 100, H=6, H_KV=2, N_Q=3, causal=True),
    "heads 24/1": case([70, 33], 100, H=24, H_KV=1),
    "a draft": case([70, 3, 0, 2], 100, N_Q=4, causal=True),
    "a chunk": case([70, 150], 160, N_Q=70, causal=True, H_KV=1),
    "not causal": case([70, 3], 100, N_Q=5),
    "window": case([70, 20, 0], 100, N_Q=5, window=(17, 0), causal=True),
    "window both sides": case([70, 20, 1], 100, N_Q=9, window=(17, 3)),
    "softcap": case([70, 20], 100, softcap=2.0, scale=1.0),
    "sinks": case([70, 0], 100, sinks=True),
    "everything": case(
        [70, 1, 0, 90], 100, H=6, H_KV=2, N_Q=3, E=24, sinks=True, softcap=4.0, window=(40, 1), layout="bnhd"
    ),
    "bnhd": case([70, 33], 100, layout="bnhd"),
    "no capacity": case([0, 5], 0),
    "no queries": case([3, 5], 10, N_Q=0),
    "packed": case([70, 9, 5, 33], 80, lengths_q=[3, 0, 1, 20], causal=True),
    "packed, heads": case([70, 9, 0, 33], 80, lengths_q=[3, 1, 1, 20], H=4, H_KV=2, sinks=True, window=(9, None)),
    "pages of 16": case([70, 1, 0, 128], 128, page=16),
    "pages of 48": case([70, 144], 144, page=48, H=4, H_KV=2, N_Q=3, causal=True),
    "pages of 64": case([70, 200, 64], 256, page=64, N_Q=2, causal=True),
    "pages of 256": case([70, 300], 512, page=256, layout="bnhd", sinks=True),
    "pages, bounded": case([70, 90], 128, page=32, max_kv_length=75),
    "pages, everything": case(
        [70, 1, 0, 90], 96, page=16, H=6, H_KV=2, N_Q=3, E=24, sinks=True, softcap=4.0, window=(40, 0), causal=True,
    ),
    "pages, packed": case([70, 9, 5, 33], 80, page=16, lengths_q=[3, 0, 1, 20], causal=True, H=4, H_KV=2),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_against_fp64(backend, dtype, case):
    x = testing.cache_inputs(**CASES[case], dtype=DTYPES[dtype])
    if (why := dispatch.kernels("flash")[backend].supports(x.spec(with_lse=True))) is not None:
        pytest.skip(why)
    o, lse = testing.backend(backend)(x)
    testing.compare(x, testing.Outputs(o, lse, None, None, None, None))
    assert torch.equal(testing.backend(backend, with_lse=False)(x)[0], o)


@pytest.mark.parametrize("splits", [2, 3, 20])
@pytest.mark.parametrize("case", ["decoding", "everything", "a chunk", "pages, everything", "pages, packed", "sinks"])
def test_split_keys_in_triton(case, splits, monkeypatch):
    """Also in more parts than a row has keys."""
    x = testing.cache_inputs(**CASES[case], dtype=torch.float16)
    choice = policy.choose(x.spec(), hardware.TARGETS[90], "triton")
    monkeypatch.setattr(dispatch, "choose", lambda op, spec, backend: choice._replace(splits=splits))
    if (why := dispatch.kernels("flash")["triton"].supports(x.spec(with_lse=True))) is not None:
        pytest.skip(why)
    o, lse = testing.backend("triton")(x)
    testing.compare(x, testing.Outputs(o, lse, None, None, None, None))


@pytest.mark.skipif(torch.cuda.is_available(), reason="for Triton's interpreter")
def test_rows_before_the_first_sequence_lead_nowhere():
    """Nobody checks on a GPU that cu_seqlens_q begins at 0."""
    x = testing.cache_inputs([20, 30], 32, lengths_q=[4, 4], H=6, H_KV=2, D=16, dtype=torch.float32)
    want = call(x)
    q = torch.cat([torch.full((1, 6, 32, 16), torch.nan), x.q], 2)
    whole = torch.full((q.numel() + 8192,), 7.0)
    o = whole[4096:-4096].view_as(q)
    shifted = Residuals(q, x.k, x.v, None, x.cu_seqlens_q + 32, None, x.kv_lengths, None)
    spec = x.spec()._replace(N_Q=40)
    for launch in triton_cache.launches(spec, CacheTile(16, 32, 4, 1), 1, shifted, o, None, None):
        run(launch)
    torch.testing.assert_close(o[:, :, 32:], want)
    assert (whole[:4096] == 7).all()
    assert (whole[-4096:] == 7).all()


@pytest.mark.skipif(torch.cuda.is_available(), reason="pretends that there is a GPU")
def test_a_cache_that_cuda_cannot_read_is_not_copied(monkeypatch):
    monkeypatch.setattr(hardware, "of", lambda device: hardware.TARGETS[90])
    x = testing.cache_inputs([700, 33], 1000, H=8, H_KV=2, N_Q=1, D=64, dtype=torch.bfloat16)
    wide = torch.nn.functional.pad(x.k, (0, 4))[..., :64]
    for k, aligned in ((x.k, True), (wide, False), (x.k[:1].expand(2, -1, -1, -1), False)):
        spec = x._replace(k=k).spec()._replace(device=torch.device("cuda", 0))
        assert spec.aligned is aligned
        assert dispatch.pick.__wrapped__("flash", spec).name == ("cuda" if aligned else "triton")
        why = dispatch.kernels("flash")["cuda"].supports(spec)
        assert (why or "") in "needs a cache whose rows begin at multiples of 16 bytes and do not repeat"


def call(x: testing.Inputs, **changes):
    return fulmen.flash_attention(x.q, x.k, x.v, **x.options() | changes)


@pytest.fixture
def x() -> testing.Inputs:
    return testing.cache_inputs(**CASES["heads 4/2"], dtype=torch.float32)


@pytest.fixture
def paged() -> testing.Inputs:
    return testing.cache_inputs(**CASES["pages of 16"], dtype=torch.float32)


def test_no_rows():
    q, k = torch.empty(0, 2, 3, 16), torch.empty(0, 1, 8, 16)
    lengths = torch.empty(0, dtype=torch.int32)
    assert fulmen.flash_attention(q, k, k, kv_lengths=lengths).shape == q.shape
    table = torch.empty(0, 2, dtype=torch.int32)
    assert fulmen.flash_attention(q, torch.empty(5, 1, 16, 16), torch.empty(5, 1, 16, 16), kv_lengths=lengths,
                                  page_table=table).shape == q.shape  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kv_lengths": None, "max_kv_length": 5}, "need kv_lengths"),
        ({"kv_lengths": None, "page_table": torch.zeros(2, 3, dtype=torch.int32)}, "need kv_lengths"),
        ({"kv_lengths": [70, 33]}, "kv_lengths is a list"),
        ({"kv_lengths": torch.tensor([70, 33])}, "kv_lengths is torch.int64, must be int32"),
        ({"kv_lengths": torch.zeros(3, dtype=torch.int32)}, r"kv_lengths has shape \(3,\), must be \(2,\)"),
        ({"kv_lengths": torch.zeros(2, dtype=torch.int32, device="meta")}, "kv_lengths is on meta"),
        ({"cu_seqlens_k": torch.zeros(3, dtype=torch.int32)}, "cu_seqlens_k packs keys"),
        ({"causal": "top_left"}, "aligned to the end"),
        ({"max_kv_length": -1}, "max_kv_length=-1: must be"),
        ({"max_kv_length": 2.5}, "max_kv_length=2.5: must be"),
        ({"page_table": torch.zeros(2, 3, dtype=torch.int32)}, "pages of 100 rows, must be a multiple of 16"),
        ({"backend": "nobody"}, "backend='nobody'"),
        ({"backend": 3}, "backend=3"),
    ],
)
def test_errors(x, changes, words):
    with pytest.raises(ValueError, match=words):
        call(x, **changes)


@pytest.mark.parametrize(
    ("table", "words"),
    [
        (torch.zeros(4, 3), "page_table is torch.float32, must be int32"),
        (torch.zeros(3, 3, dtype=torch.int32), r"page_table has shape \(3, 3\), must be \(4, pages of a row\)"),
        (torch.zeros(4, dtype=torch.int32), r"page_table has shape \(4,\), must be"),
        (torch.zeros(4, 3, dtype=torch.int32, device="meta"), "page_table is on meta"),
    ],
)
def test_errors_of_a_page_table(paged, table, words):
    with pytest.raises(ValueError, match=words):
        call(paged, page_table=table)


def test_errors_of_rows(x, paged):
    with pytest.raises(ValueError, match="k must have 2 rows, one for each of kv_lengths, or a page_table"):
        call(x._replace(k=x.k[:1]))
    with pytest.raises(ValueError, match="v must share B=2 and N=100"):
        call(x._replace(v=x.v[:1]))
    with pytest.raises(ValueError, match="page_table names pages, and k has none"):
        call(paged._replace(k=paged.k[:0], v=paged.v[:0]))


def test_gradients_are_refused(x):
    for name in ("q", "k", "v"):
        leaf = getattr(x, name).clone().requires_grad_()
        with pytest.raises(NotImplementedError, match="a cache has no gradients"):
            call(x._replace(**{name: leaf}))
        with torch.no_grad():
            assert call(x._replace(**{name: leaf})).isfinite().all()
    with pytest.raises(NotImplementedError, match="a cache has no gradients"):
        call(x, sinks=torch.zeros(4, requires_grad=True))


@pytest.mark.parametrize("way", ["operator", "vmap"])
def test_gradients_are_refused_where_they_cannot_be_seen(x, way):
    q = x.q.clone().requires_grad_()
    if way == "vmap":
        o = torch.func.vmap(lambda q: call(x._replace(q=q)))(q[None])
    else:
        tensors = q, x.k, x.v, None, None, x.kv_lengths, None
        o, _ = torch.ops.fulmen.flash_cache_forward(*tensors, *testing.operator_facts("flash_cache_forward"))
    with pytest.raises(NotImplementedError, match="a cache has no gradient"):
        o.sum().backward()


def test_who_does_not_serve_says_why(x):
    for backend, words in {"sdpa": "kv_lengths", "flash_attn": "kv_lengths|cannot be imported"}.items():
        with pytest.raises(NotImplementedError, match=words):
            call(x, backend=backend)


def test_a_length_changes_and_nothing_else(x):
    """The same call, of which a plan is kept, with other lengths in the same tensor."""
    k, v = (torch.randn(t.shape) for t in (x.k, x.v))
    for n in (1, 100, 0, 37):
        x.kv_lengths.fill_(n)
        wanted = fulmen.flash_attention(x.q, k[:, :, :n], v[:, :, :n])
        torch.testing.assert_close(call(x._replace(k=k, v=v)), wanted)


@pytest.mark.parametrize("entry", [-1, 1 << 30])
@pytest.mark.parametrize("backend", ["reference", "eager", "triton"])
def test_entries_out_of_range_are_clamped(backend, entry):
    x = testing.cache_inputs([40, 40], 48, page=16, D=16, dtype=torch.float16)
    k, v = (torch.randn(t.shape).half() for t in (x.k, x.v))
    x.page_table[:, 1] = entry
    x = x._replace(k=k, v=v)
    o, lse = testing.backend(backend)(x)
    testing.compare(x, testing.Outputs(o, lse, None, None, None, None))


def test_rows_may_share_pages():
    x = testing.cache_inputs([40, 40], 48, page=16, H=2, N_Q=1, D=16)
    x.page_table[1] = x.page_table[0]
    o = call(x._replace(q=x.q[:1].expand(2, -1, -1, -1)))
    assert torch.equal(o[0], o[1])


@pytest.mark.parametrize("case", ["heads 4/2", "pages of 16", "packed", "pages, everything"])
def test_compiled(case):
    x = testing.cache_inputs(**CASES[case])

    @torch.compile(fullgraph=True, backend="aot_eager")
    def run(x):
        return fulmen.flash_attention_with_lse(x.q, x.k, x.v, **x.options())

    for actual, wanted in zip(run(x), fulmen.flash_attention_with_lse(x.q, x.k, x.v, **x.options()), strict=True):
        assert torch.equal(actual, wanted)


def test_few_graphs_serve_pages_of_any_size():
    counter = torch._dynamo.testing.CompileCounter()
    run = torch.compile(call, fullgraph=True, dynamic=True, backend=counter)
    for page in (16, 32, 48):
        x = testing.cache_inputs([40, 20], 96, page=page, H=2, N_Q=2, D=16)
        assert torch.equal(run(x), call(x))
    assert counter.frame_count <= 2


@pytest.mark.parametrize("with_lse", [False, True])
@pytest.mark.parametrize("case", ["heads 4/2", "pages of 16", "packed", "everything"])
def test_operator(case, with_lse):
    x = testing.cache_inputs(**CASES[case])
    options = {"right": 0, "with_lse": with_lse, "max_kv_length": x.max_kv_length}
    facts = testing.operator_facts("flash_cache_forward", **options)
    tensors = (x.q, x.k, x.v, x.sinks, x.cu_seqlens_q, x.kv_lengths, x.page_table)
    torch.library.opcheck(torch.ops.fulmen.flash_cache_forward, (*tensors, *facts))


def test_explained(x, paged):
    for y in (x, paged):
        assert "eager" in fulmen.explain("flash", y.q, y.k, y.v, **y.options())


# ------------------------------------------------------------------------------------------------- on a GPU

GPU_CASES = {
    "decoding": case([3000, 1, 0, 777, 9000], 3000, H=32, H_KV=8, D=128),
    "D=64, sinks": case([3000, 3, 0], 4000, H=16, H_KV=2, D=64, N_Q=3, causal=True, sinks=True),
    "D=256, window": case([700, 64], 1000, H=8, H_KV=2, D=256, N_Q=2, causal=True, window=(300, None)),
    "192/128, softcap": case([700, 64], 1000, H=8, D=192, E=128, softcap=20.0),
    "a chunk": case([900, 300], 1024, H=8, H_KV=2, D=128, N_Q=200, causal=True),
    "packed": case([900, 300, 0, 50], 1024, H=8, H_KV=2, D=128, lengths_q=[1, 70, 0, 3], causal=True),
    "groups of 5": case([900, 30], 1000, H=10, H_KV=2, D=80),
    "bounded": case([900, 30], 1000, H=8, D=64, max_kv_length=500, layout="bnhd"),
    "pages of 16": case([3000, 1, 0, 777], 3008, page=16, H=32, H_KV=8, D=128),
    "pages of 48": case([1000, 1, 0, 777], 1008, page=48, H=8, D=64, N_Q=5, causal=True),
    "pages of 64, bnhd": case([1000, 64, 777], 1024, page=64, H=32, H_KV=8, D=128, N_Q=4, causal=True, layout="bnhd"),
    "pages of 256, packed": case([900, 64, 777], 1024, page=256, H=32, H_KV=8, D=128, lengths_q=[1, 4, 9], sinks=True),
    "pages of 16, D=256": case([300, 700], 704, page=16, H=16, H_KV=2, D=256),
}  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("case", GPU_CASES)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("backend", ["cuda", "triton", "eager"])
def test_on_a_gpu(backend, dtype, case):
    """Right, the same bits every time, and without a look at the device's numbers."""
    x = testing.cache_inputs(**GPU_CASES[case], dtype=DTYPES[dtype], device="cuda")
    if (why := dispatch.kernels("flash")[backend].supports(x.spec(with_lse=True))) is not None:
        pytest.skip(why)
    attend = testing.backend(backend)
    o, lse = attend(x)
    testing.compare(x, testing.Outputs(o, lse, None, None, None, None))
    torch.cuda.set_sync_debug_mode("error")
    try:
        results = [attend(x) for _ in range(10)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for again in results:
        assert torch.equal(again[0], o)
        assert torch.equal(again[1], lse)


@pytest.mark.gpu
@pytest.mark.parametrize("page", [None, 16, 64])
@pytest.mark.parametrize("backend", ["cuda", "triton"])
def test_lengths_change_between_replays(backend, page):
    options = case([3000, 1, 0, 777], 3008, page=page, H=32, H_KV=8, D=128)
    x = testing.cache_inputs(**options, dtype=torch.bfloat16, device="cuda")
    if (why := dispatch.kernels("flash")[backend].supports(x.spec())) is not None:
        pytest.skip(why)
    x = x._replace(k=torch.randn_like(x.k), v=torch.randn_like(x.v))
    for _ in range(3):
        call(x, backend=backend)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = call(x, backend=backend)
    for lengths in ([1, 3008, 70, 0], [3000, 3001, 3002, 9999], [0, 0, 0, 0]):
        x.kv_lengths.copy_(torch.tensor(lengths, dtype=torch.int32))
        graph.replay()
        assert torch.equal(o, call(x, backend=backend))
        assert bool(o.any()) == any(lengths)
