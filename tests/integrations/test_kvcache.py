"""flash_attn_with_kvcache against its definition: append, turn, and attend row by row in fp64."""

from __future__ import annotations

import inspect
import re

import numpy as np
import pytest
import torch

from fulmen.integrations import flash_attn, kvcache
from fulmen.layers import append as appending
from fulmen.testing import assert_close
from fulmen.testing.flash import ROUNDINGS
from tests.integrations.test_flash_attn import plain

SIGNATURE = [  # of flash-attn 2.8
    "q", "k_cache", "v_cache", "k", "v", "rotary_cos", "rotary_sin", "cache_seqlens", "cache_batch_idx",
    "cache_leftpad", "block_table", "softmax_scale", "causal", "window_size", "softcap", "rotary_interleaved",
    "alibi_slopes", "num_splits", "return_softmax_lse",
]  # fmt: skip
H, H_KV, D = 4, 2, 16


def turn(x, cos, sin, position, interleaved):
    """x (H, D) at one position, pair by pair."""
    y, dim = x.clone(), 2 * cos.shape[1]
    for i in range(dim // 2):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + dim // 2)
        c, s = cos[position, i], sin[position, i]
        y[:, a], y[:, b] = x[:, a] * c - x[:, b] * s, x[:, b] * c + x[:, a] * s
    return y


class Call:
    """A call in fp64 and what it should do to caches and return."""

    def __init__(self, lengths, N_Q=2, N_NEW=2, capacity=48, page=None, rows=None, leftpad=None, dim=0, new=True,
                 interleaved=True, **options):  # fmt: skip
        torch.manual_seed(0)
        B = len(lengths)
        self.lengths, self.capacity, self.page, self.leftpad, self.options = lengths, capacity, page, leftpad, options
        self.q = torch.randn(B, N_Q, H, D, dtype=torch.float64)
        self.k, self.v = (torch.randn(B, N_NEW, H_KV, D, dtype=torch.float64) for _ in range(2))
        self.new, self.interleaved = new, interleaved
        self.rows = list(range(B)) if rows is None else rows
        shape = (max(self.rows) + 2, capacity) if page is None else (2 * B * capacity // page, page)
        self.k_cache, self.v_cache = (torch.randn(*shape, H_KV, D, dtype=torch.float64) for _ in range(2))
        self.table = None if page is None else torch.randperm(shape[0])[: B * capacity // page].view(B, -1).int()
        self.cos, self.sin = (
            (torch.randn(capacity + 8, dim // 2, dtype=torch.float64) for _ in range(2)) if dim else (None, None)
        )
        self.given_rows = rows

    def slot(self, b, n):
        """Where token n of row b lies."""
        return (self.rows[b], n) if self.page is None else (int(self.table[b, n // self.page]), n % self.page)

    def expected(self):
        k_cache, v_cache, outs, sums = self.k_cache.clone(), self.v_cache.clone(), [], []
        local = self.options.get("causal") or self.options.get("window_size", (-1, -1)) != (-1, -1)
        for b, n in enumerate(self.lengths):
            q, total = self.q[b].clone(), n
            if self.new:
                total = n + self.k.shape[1]
                for i in range(self.k.shape[1]):
                    k = self.k[b, i]
                    if self.cos is not None:
                        k = turn(k, self.cos, self.sin, n + i, self.interleaved)
                    if n + i < self.capacity:
                        k_cache[self.slot(b, n + i)], v_cache[self.slot(b, n + i)] = k, self.v[b, i]
                for i in range(len(q)):
                    if self.cos is not None:
                        q[i] = turn(q[i], self.cos, self.sin, n + (i if local else 0), self.interleaved)
            first = 0 if self.leftpad is None else self.leftpad[b]
            slots = [self.slot(b, j) for j in range(first, min(total, self.capacity))]
            k, v = (torch.stack([x[s] for s in slots])[None] for x in (k_cache, v_cache))
            o, lse = plain(q[None], k, v, **self.options)
            outs.append(o)
            sums.append(lse)
        return torch.cat(outs), torch.cat(sums), k_cache, v_cache

    def run(self, **changes):
        ints = {"cache_batch_idx": self.given_rows, "cache_leftpad": self.leftpad}
        given = {name: torch.tensor(x, dtype=torch.int32) for name, x in ints.items() if x is not None}
        if self.new:
            given |= {"k": self.k, "v": self.v, "rotary_cos": self.cos, "rotary_sin": self.sin}
        given |= {"block_table": self.table, "rotary_interleaved": self.interleaved, **self.options}
        lengths = torch.tensor(self.lengths, dtype=torch.int32)
        given |= {"q": self.q, "k_cache": self.k_cache, "v_cache": self.v_cache, "cache_seqlens": lengths}
        return flash_attn.flash_attn_with_kvcache(**{"return_softmax_lse": True} | given | changes)


def test_new_tokens_in_memory_of_any_order():
    calls = Call([5, 30]), Call([5, 30])
    turned = {name: getattr(calls[1], name).mT.contiguous().mT for name in ("q", "k", "v")}
    assert turned["q"].stride(3) != 1
    assert all(map(torch.equal, calls[0].run(), calls[1].run(**turned)))
    assert torch.equal(calls[0].k_cache, calls[1].k_cache)


CASES = {
    "append": {"lengths": [5, 30]},
    "nothing new": {"lengths": [5, 30], "new": False, "causal": True},
    "one query": {"lengths": [5, 47], "N_Q": 1, "N_NEW": 1, "causal": True},
    "empty": {"lengths": [0, 3], "causal": True},
    "beyond the capacity": {"lengths": [47, 46]},
    "turned": {"lengths": [5, 30], "dim": 16, "causal": True},
    "turned in halves": {"lengths": [5, 30], "dim": 8, "causal": True, "interleaved": False},
    "turned, queries at one position": {"lengths": [5, 30], "dim": 16},
    "turned, window": {"lengths": [5, 30], "dim": 4, "window_size": (7, 2), "interleaved": False},
    "more queries than keys": {"lengths": [5, 30], "N_Q": 4, "dim": 8},
    "rows": {"lengths": [5, 30], "rows": [3, 1], "dim": 8, "causal": True},
    "rows, copied": {"lengths": [5, 30], "rows": [2, 0], "capacity": 40},
    "leftpad": {"lengths": [25, 30], "leftpad": [3, 0], "dim": 16, "causal": True},
    "leftpad and rows": {"lengths": [25, 30], "leftpad": [3, 11], "rows": [2, 0]},
    "pages": {"lengths": [5, 30], "page": 16, "dim": 16, "causal": True},
    "pages, beyond": {"lengths": [47, 30], "page": 16, "softcap": 1.5, "softmax_scale": 0.5},
    "options": {"lengths": [15, 30], "softcap": 1.5, "softmax_scale": 0.5, "window_size": (9, -1), "causal": True},
}  # fmt: skip


def as_on_a_gpu(monkeypatch):
    """Values of lengths and rows are not looked at."""
    monkeypatch.setattr(kvcache, "_check_values", lambda *args: None)


@pytest.mark.parametrize("case", CASES)
def test_as_defined(case, monkeypatch):
    if "beyond" in case:
        as_on_a_gpu(monkeypatch)
    call = Call(**CASES[case])
    wanted = call.expected()
    o, lse = call.run()
    for got, want in zip((o, lse, call.k_cache, call.v_cache), wanted, strict=True):
        torch.testing.assert_close(got, want)
    again = Call(**CASES[case])
    assert torch.equal(again.run(return_softmax_lse=False, num_splits=3), o)


def test_lengths_as_a_number_and_none():
    for n in (0, 7):
        call, same = Call([n, n]), Call([n, n])
        for given in (n, np.int64(n)):
            for got, want in zip(call.run(), same.run(cache_seqlens=given), strict=True):
                assert torch.equal(got, want)
    call = Call([48, 48], new=False)
    for got, want in zip(call.run(), call.run(cache_seqlens=None), strict=True):
        assert torch.equal(got, want)


def test_signature():
    parameters = inspect.signature(flash_attn.flash_attn_with_kvcache).parameters
    assert list(parameters) == SIGNATURE
    assert parameters["rotary_interleaved"].default is True
    assert "flash_attn_with_kvcache" in flash_attn.__all__


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"alibi_slopes": torch.ones(4)}, NotImplementedError, "alibi_slopes"),
        ({"k": None}, ValueError, "pass both or none"),
        ({"cache_seqlens": None}, ValueError, "cache_seqlens is missing"),
        ({"cache_seqlens": 1.5}, ValueError, "cache_seqlens=1.5"),
        ({"cache_seqlens": torch.tensor([1, 2])}, ValueError, "cache_seqlens is torch.int64"),
        ({"cache_batch_idx": torch.tensor([1], dtype=torch.int32)}, ValueError, r"cache_batch_idx is .* must be int32"),
        ({"rotary_cos": torch.ones(50, 4)}, ValueError, "rotary_cos and rotary_sin"),
        ({"rotary_cos": torch.ones(50, 9), "rotary_sin": torch.ones(50, 9)}, ValueError, "head dim 16"),
        ({"k": torch.ones(2, 2, 4, 16)}, ValueError, r"k has shape \(2, 2, 4, 16\), must be"),
        ({"k": torch.ones(2, 2, 2, 16)}, ValueError, "k is torch.float32"),
        ({"num_splits": "many"}, ValueError, "num_splits"),
        ({"q": torch.ones(2, 2, 4, 32).double()}, ValueError, r"q has shape .* must be .* 16\) for k_cache"),
        ({"q": torch.ones(2, 2, 3, 16).double()}, ValueError, "q has 3 heads, must be a multiple of k_cache's 2"),
        ({"q": torch.ones(2, 2, 4, 16)}, ValueError, "q is torch.float32"),
        (
            {"k_cache": torch.ones(3, 48, 2, 16, 2).double()[..., 0]},
            ValueError,
            "k_cache's last dimension must be contig",
        ),
        ({"q": torch.ones(2, 2, 4, 16).double().to("meta")}, ValueError, "q is torch.float64 on meta, must be .* cpu"),
    ],
)
def test_errors(changes, error, words):
    call = Call([5, 30])
    before = call.k_cache.clone()
    with pytest.raises(error, match=words):
        call.run(**changes)
    assert torch.equal(call.k_cache, before)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda table: table.long(), r"block_table is torch.int64 .* must be int32 \(2, pages of a row\)"),
        (lambda table: table[:1], "block_table is torch.int32"),
        (lambda table: table[0], "block_table is torch.int32"),
        (lambda table: table.tolist(), "block_table is a list"),
        (lambda table: table - 100, r"block_table must be from 0 to \d+ for the \d+ tokens of a row: k_cache has"),
        (lambda table: table[:1, :1].expand(2, 3), "block_table must give each row pages of its own for new tokens"),
    ],
)
def test_errors_of_a_block_table(change, words):
    """Before anything is written."""
    call = Call([5, 30], page=16)
    before = call.k_cache.clone()
    with pytest.raises(ValueError, match=words):
        call.run(block_table=change(call.table))
    missing = call.table.index_fill(1, torch.tensor([2]), -1)
    for lengths in (None, np.int64(48)):
        with pytest.raises(ValueError, match="for the 48 tokens of a row"):
            call.run(block_table=missing, cache_seqlens=lengths, k=None, v=None)
    for one in (call.k_cache[:1].expand(12, -1, -1, -1), call.v_cache):
        with pytest.raises(ValueError, match=r"repeats memory|are one tensor"):
            call.run(k_cache=one)
    call.k_cache, call.v_cache = call.k_cache[:, :8], call.v_cache[:, :8]
    with pytest.raises(ValueError, match="k_cache has pages of 8 tokens, must be a multiple of 16"):
        call.run()
    assert torch.equal(call.k_cache, before[:, :8])


@pytest.mark.parametrize("way", ["torch", "kernel"])
def test_views_of_lengths_and_tables(way, request):
    """A table and lengths that are parts of larger ones, as a server keeps them."""
    if way == "kernel":
        request.getfixturevalue("interpreted")
    call, same = (Call([5, 30], page=16, dim=16) for _ in range(2))
    for each in (call, same):
        for name in ("q", "k", "v", "k_cache", "v_cache", "cos", "sin"):
            setattr(each, name, getattr(each, name).float())
    wide = torch.cat([call.table, call.table.flip(0, 1)], 1)
    lengths = torch.tensor([[5, 99], [30, 99]], dtype=torch.int32)
    view = call.run(block_table=wide[:, : call.table.shape[1]], cache_seqlens=lengths[:, 0])
    for got, want in zip((*view, call.k_cache), (*same.run(), same.k_cache), strict=True):
        torch.testing.assert_close(got, want)


def test_more_errors():
    with pytest.raises(NotImplementedError, match="cache_leftpad with block_table"):
        Call([5, 30], page=16, leftpad=[1, 2]).run()
    call = Call([5, 30])
    call.k_cache, call.v_cache = call.k_cache[:1], call.v_cache[:1]
    with pytest.raises(ValueError, match="k_cache has 1 rows"):
        call.run()
    call = Call([5, 30])
    call.q.requires_grad_()
    before = call.k_cache.clone()
    with pytest.raises(NotImplementedError, match="q requires a gradient"):
        call.run()
    assert torch.equal(call.k_cache, before)


ROOM = "a row of the cache has room for 48 tokens"


@pytest.mark.parametrize("page", [None, 16])
@pytest.mark.parametrize("as_tensor", [False, True])
def test_lengths_beyond_the_capacity(page, as_tensor):
    """On the CPU and as a number; on a GPU they are clamped."""
    for new, given, limit in ((True, 47, 46), (False, 49, 48), (True, 10_000, 46)):
        call = Call([5, 30], page=page, new=new)
        before = call.k_cache.clone()
        lengths = torch.tensor([5, given], dtype=torch.int32) if as_tensor else given
        shown = f"[5, {given}]" if as_tensor else f"[{given}]"
        more = ", and k has 2 more" if new else ""
        with pytest.raises(
            ValueError, match=re.escape(f"cache_seqlens must be from 0 to {limit}: {ROOM}{more}; got {shown}")
        ):
            call.run(cache_seqlens=lengths)
        assert torch.equal(call.k_cache, before)
        lengths = torch.tensor([5, limit], dtype=torch.int32) if as_tensor else limit
        call.run(cache_seqlens=lengths)
    with pytest.raises(ValueError, match="cache_seqlens"):
        call.run(cache_seqlens=torch.tensor([5, -1], dtype=torch.int32) if as_tensor else -1)
    with pytest.raises(ValueError, match="k has 49 tokens, and a row of the cache has room for 48"):
        Call([0, 0], N_NEW=49, page=page).run()


@pytest.mark.parametrize("page", [None, 16])
def test_a_rotary_table_has_all_positions(page):
    call = Call([5, 30], page=page, dim=8, causal=True)
    call.cos, call.sin = call.cos[:48], call.sin[:48]
    call.run()
    before = call.k_cache.clone()
    call.cos, call.sin = call.cos[:47], call.sin[:47]
    with pytest.raises(
        ValueError, match="rotary_cos and rotary_sin have 47 positions, must have the cache's capacity of 48"
    ):
        call.run()
    assert torch.equal(call.k_cache, before)


@pytest.mark.parametrize("as_tensor", [False, True])
def test_more_queries_than_new_tokens_need_more_positions(as_tensor):
    call = Call([46, 46], N_Q=4, dim=8, causal=True)
    lengths = torch.tensor([46, 46], dtype=torch.int32) if as_tensor else 46
    call.cos, call.sin = call.cos[:49], call.sin[:49]
    with pytest.raises(
        ValueError, match="rotary_cos has 49 positions, must have 50: q has 4 tokens, the first at position 46"
    ):
        call.run(cache_seqlens=lengths)
    call.run(cache_seqlens=lengths, causal=False)  # all queries at position 46


def test_leftpad_is_within_the_cache():
    call = Call([5, 30], leftpad=[5, 0])
    o, lse = call.run()
    for got, want in zip((o, lse), Call([5, 30], leftpad=[5, 0]).expected(), strict=False):
        torch.testing.assert_close(got, want)
    before = call.k_cache.clone()
    for lengths, shown, leftpad in (
        (3, "[3, 3]", [4, 0]),
        (np.int64(3), "[3, 3]", [3, -7]),
        (torch.tensor([5, 30], dtype=torch.int32), "[5, 30]", [5, 31]),
        (None, "[48, 48]", [49, 0]),
    ):
        changes = {"k": None, "v": None} if lengths is None else {}
        with pytest.raises(
            ValueError, match=re.escape(f"cache_leftpad must be from 0 to cache_seqlens, {shown}; got {leftpad}")
        ):
            call.run(cache_seqlens=lengths, cache_leftpad=torch.tensor(leftpad, dtype=torch.int32), **changes)
    assert torch.equal(call.k_cache, before)


def test_rows_of_the_cache():
    call = Call([5, 30], rows=[3, 1])  # of a cache of 5 rows
    before = call.k_cache.clone()
    for rows, words in (
        ([5, 1], r"cache_batch_idx must be from 0 to 4: k_cache has 5 rows; got \[5, 1\]"),
        ([-1, 1], r"cache_batch_idx must be from 0 to 4: k_cache has 5 rows; got \[-1, 1\]"),
        ([2, 2], r"cache_batch_idx must differ where k and v are appended; got \[2, 2\]"),
    ):
        with pytest.raises(ValueError, match=words):
            call.run(cache_batch_idx=torch.tensor(rows, dtype=torch.int32))
    assert torch.equal(call.k_cache, before)
    shared = {"cache_batch_idx": torch.tensor([2, 2], dtype=torch.int32), "k": None, "v": None}
    o, _ = call.run(**shared)  # rows that are read alone may be shared
    want = [
        plain(call.q[b, None], call.k_cache[2, None, :n], call.v_cache[2, None, :n])[0] for b, n in ((0, 5), (1, 30))
    ]
    torch.testing.assert_close(o, torch.cat(want))


def test_varlen_over_pages_and_used_lengths():
    call = Call([5, 30], page=16, new=False)
    lengths = torch.tensor(call.lengths, dtype=torch.int32)
    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32) for x in ([0, 2, 4], [0, 5, 35]))
    want, want_lse = call.run()
    q = call.q.flatten(0, 1)
    options = {"return_attn_probs": True, "block_table": call.table}
    for given in ({"cu_seqlens_k": cu_k}, {"cu_seqlens_k": cu_k, "seqused_k": lengths}):
        o, lse, _ = flash_attn.flash_attn_varlen_func(
            q, call.k_cache, call.v_cache, cu_q, max_seqlen_q=2, max_seqlen_k=48, **options, **given
        )
        torch.testing.assert_close(o.unflatten(0, (2, 2)), want)
        torch.testing.assert_close(lse.unflatten(1, (2, 2)).transpose(0, 1), want_lse)
    call = Call([5, 30], new=False)
    o = flash_attn.flash_attn_varlen_func(
        q, call.k_cache[:2], call.v_cache[:2], cu_q, cu_k, 2, 48, seqused_k=lengths
    )  # fmt: skip
    torch.testing.assert_close(o.unflatten(0, (2, 2)), call.run(return_softmax_lse=False))
    with pytest.raises(ValueError, match="k has shape"):
        flash_attn.flash_attn_varlen_func(q, q, q, cu_q, cu_k, 2, 48, seqused_k=lengths)


@pytest.mark.parametrize("case", ["turned", "pages"])
def test_compiled(case):
    call, same = Call(**CASES[case]), Call(**CASES[case])
    run = torch.compile(call.run, fullgraph=True, backend="aot_eager")
    for got, want in zip((*run(), call.k_cache), (*same.run(), same.k_cache), strict=True):
        torch.testing.assert_close(got, want)


# ------------------------------------------------------------------------------------------------ the append


def append_arguments(case, dtype=torch.float32):
    call = Call(**CASES[case])
    table = call.table if call.given_rows is None else torch.tensor(call.given_rows, dtype=torch.int32)[:, None]
    floats = (call.q, call.k, call.v, call.k_cache, call.v_cache)
    q, k, v, k_cache, v_cache = (x.to(dtype) for x in floats)
    tables = [None if x is None else x.float() for x in (call.cos, call.sin)]
    lengths = torch.tensor(call.lengths, dtype=torch.int32)
    local = bool(call.options.get("causal")) or "window_size" in call.options
    return [q, k, v, k_cache, v_cache, lengths, table, *tables, local, call.interleaved]


@pytest.mark.parametrize("case", [name for name, options in CASES.items() if options.get("new", True)])
def test_the_kernel_does_the_same(case):
    triton = pytest.importorskip("triton")
    if not triton.knobs.runtime.interpret and not torch.cuda.is_available():
        pytest.skip("needs a GPU or Triton's interpreter")
    from fulmen.launch import repeated
    from fulmen.layers.fused import append as kernels

    device = "cuda" if torch.cuda.is_available() else "cpu"
    for dtype in (torch.float32, torch.float16):
        ours, theirs = (
            [x.to(device) if isinstance(x, torch.Tensor) else x for x in append_arguments(case, dtype)]
            for _ in range(2)
        )
        turned, after = appending._append_plainly(*theirs)
        new, *out = repeated(kernels.appended, tuple(ours[9:])).run(*ours[:9])
        assert torch.equal(new, after.int())
        for got, want in ((out[0] if out else turned, turned), (ours[3], theirs[3]), (ours[4], theirs[4])):
            torch.testing.assert_close(got, want)


@pytest.mark.parametrize("case", ["append", "turned", "pages", "rows"])
def test_operator(case):
    torch.library.opcheck(torch.ops.fulmen.cache_append.default, append_arguments(case))


def test_autograd_counts_the_change_of_a_kernel(ran) -> None:
    """A backward that saved the cache before is refused, whichever way the cache was written."""
    arguments = append_arguments("pages")
    k_cache, v_cache = arguments[3:5]
    before = k_cache._version, v_cache._version
    appending.append(*arguments[:-2])
    assert ran == ["cache_append_kernel"]
    assert (k_cache._version, v_cache._version) > before
    with pytest.raises(NotImplementedError, match="cache_append has no gradient"):
        appending.append(arguments[0].requires_grad_(), *arguments[1:-2])


def test_a_page_out_of_range_is_not_written():
    arguments = append_arguments("pages")
    table, before = arguments[6], arguments[3].clone()
    table[:] = torch.where(torch.arange(table.numel()).view_as(table) % 2 == 0, -1, 10_000)
    appending._append_plainly(*arguments)
    assert torch.equal(arguments[3], before)


def rounded(case, dtype, device="cpu"):
    """The call with tensors of bf16 numbers, and what its integers are there."""
    call = Call(**CASES[case])
    for name in ("q", "k", "v", "k_cache", "v_cache", "cos", "sin"):
        if (x := getattr(call, name)) is not None:
            setattr(call, name, x.bfloat16().to(device, dtype))
    ints = {"cache_seqlens": call.lengths, "cache_batch_idx": call.given_rows, "cache_leftpad": call.leftpad}
    given = {n: torch.tensor(x, dtype=torch.int32, device=device) for n, x in ints.items() if x is not None}
    return call, given | {"block_table": None if call.table is None else call.table.to(device)}


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_on_a_gpu(case, monkeypatch):
    """Against fp64, and in a graph that is replayed with other lengths."""
    if "beyond" in case:
        as_on_a_gpu(monkeypatch)
    results = []
    for dtype, device in ((torch.bfloat16, "cuda"), (torch.bfloat16, "cpu"), (torch.float64, "cpu")):
        call, given = rounded(case, dtype, device)
        results.append([x.cpu() for x in (*call.run(**given), call.k_cache, call.v_cache)])
    for name, actual, low, exact in zip(("o", "lse", "k_cache", "v_cache"), *results, strict=True):
        assert_close(name, actual, low, exact, roundings=ROUNDINGS.get(name, 1.0))
    call, given = rounded(case, torch.bfloat16, "cuda")
    call.run(**given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o, _ = call.run(**given)
    given["cache_seqlens"].sub_(3)
    graph.replay()
    assert torch.equal(o, call.run(**given)[0])
