"""flash-attn's functions against softmax attention written out in fp64, with that package's layout and alignment."""

from __future__ import annotations

import inspect

import numpy as np
import pytest
import torch

from fulmen.integrations import flash_attn

SHARED = ["dropout_p", "softmax_scale", "causal", "window_size", "softcap", "alibi_slopes", "deterministic"]
OFFSETS = ["cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"]
SIGNATURES = {  # of flash-attn 2.8
    "flash_attn_func": ["q", "k", "v", *SHARED, "return_attn_probs"],
    "flash_attn_kvpacked_func": ["q", "kv", *SHARED, "return_attn_probs"],
    "flash_attn_qkvpacked_func": ["qkv", *SHARED, "return_attn_probs"],
    "flash_attn_varlen_func": ["q", "k", "v", *OFFSETS, *SHARED, "return_attn_probs", "block_table", "seqused_k"],
    "flash_attn_varlen_kvpacked_func": ["q", "kv", *OFFSETS, *SHARED, "return_attn_probs"],
    "flash_attn_varlen_qkvpacked_func": ["qkv", "cu_seqlens", "max_seqlen", *SHARED, "return_attn_probs"],
}
DEFAULTS = {
    "dropout_p": 0.0, "softmax_scale": None, "causal": False, "window_size": (-1, -1), "softcap": 0.0,
    "alibi_slopes": None, "deterministic": False, "return_attn_probs": False, "block_table": None,
    "seqused_k": None,
}  # fmt: skip
OPTIONS = [
    {},
    {"causal": True},
    {"softmax_scale": 0.5, "softcap": 1.5},
    {"window_size": (2, 1)},
    {"window_size": (3, -1)},
    {"window_size": (2, 4), "causal": True},  # causal takes the right side away
]


def plain(q, k, v, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0):
    """(o, lse) of (B, N, H, D) tensors: one query after the other, in the package's words."""
    N_Q, H, D = q.shape[1:]
    N_KV, group = k.shape[1], H // k.shape[2]
    left, right = window_size
    outs, sums = [], []
    for i in range(N_Q):
        at = i + N_KV - N_Q
        first = 0 if left < 0 else max(0, at - left)
        last = at if causal else N_KV - 1 if right < 0 else at + right
        keys = slice(first, max(first, min(last, N_KV - 1) + 1))
        k_i, v_i = (x[:, keys].repeat_interleave(group, dim=2) for x in (k, v))
        s = torch.einsum("bhd,bnhd->bhn", q[:, i], k_i) * (D**-0.5 if softmax_scale is None else softmax_scale)
        s = softcap * torch.tanh(s / softcap) if softcap else s
        sums.append(torch.logsumexp(s, 2))
        outs.append(torch.einsum("bhn,bnhd->bhd", torch.softmax(s, 2), v_i))
    return torch.stack(outs, 1), torch.stack(sums, 2)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def make(*shape):
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures_are_the_package_s(name):
    parameters = inspect.signature(getattr(flash_attn, name)).parameters
    assert list(parameters) == SIGNATURES[name]
    assert {n: p.default for n, p in parameters.items() if n in DEFAULTS} == {
        n: d for n, d in DEFAULTS.items() if n in parameters
    }


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("N_Q", [1, 5, 7])
def test_dense(options, N_Q):
    q, k, v = make(2, N_Q, 4, 8), make(2, 7, 2, 8), make(2, 7, 2, 8)
    o, lse, probs = flash_attn.flash_attn_func(q, k, v, **options, return_attn_probs=True)
    exact, exact_lse = plain(q, k, v, **options)
    assert probs is None
    torch.testing.assert_close(o, exact, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(lse, exact_lse, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(flash_attn.flash_attn_func(q, k, v, **options), o, rtol=1e-10, atol=1e-10)
    do = torch.randn_like(o)
    for got, want in zip(torch.autograd.grad(o, (q, k, v), do), torch.autograd.grad(exact, (q, k, v), do), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_packed_is_one_by_one(options):
    q, k, v = make(11, 4, 8), make(16, 2, 8), make(16, 2, 8)
    ends_q, ends_k = [0, 3, 4, 4, 11], [0, 6, 7, 9, 16]
    cu_q, cu_k = torch.tensor(ends_q, dtype=torch.int32), torch.tensor(ends_k, dtype=torch.int32)
    o, lse, _ = flash_attn.flash_attn_varlen_func(q, k, v, cu_q, cu_k, 7, 7, **options, return_attn_probs=True)
    assert (o.shape, lse.shape) == ((11, 4, 8), (4, 11))
    do = torch.randn_like(o)
    grads = torch.autograd.grad(o, (q, k, v), do)
    want = [torch.zeros_like(x) for x in (q, k, v)]
    for a, b, c, d in zip(ends_q, ends_q[1:], ends_k, ends_k[1:], strict=False):
        if a == b:
            continue
        part = (q[None, a:b], k[None, c:d], v[None, c:d])
        exact, exact_lse = plain(*part, **options)
        torch.testing.assert_close(o[a:b], exact[0], rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(lse[:, a:b], exact_lse[0], rtol=1e-10, atol=1e-10)
        for x, g in zip(want, torch.autograd.grad(exact, (q, k, v), do[None, a:b]), strict=True):
            x += g
    for got, exact in zip(grads, want, strict=True):
        torch.testing.assert_close(got, exact, rtol=1e-9, atol=1e-10)


def test_memory_of_any_order():
    """As flash-attn, which copies what its kernels cannot read."""
    q, k, v = make(2, 5, 4, 8), make(2, 7, 2, 8), make(2, 7, 2, 8)
    strided = [x.detach().mT.contiguous().mT for x in (q, k, v)]
    assert all(x.stride(3) != 1 for x in strided)
    assert torch.equal(flash_attn.flash_attn_func(*strided, softcap=-1.0), flash_attn.flash_attn_func(q, k, v))
    cu_q, cu_k = (torch.tensor([0, n, 2 * n], dtype=torch.int32) for n in (5, 7))
    got, want = (
        flash_attn.flash_attn_varlen_func(*(x.flatten(0, 1) for x in given), cu_q, cu_k, 5, 7)
        for given in (strided, (q, k, v))
    )
    assert torch.equal(got, want)


@pytest.mark.parametrize(
    ("table", "lengths", "words"),
    [
        ([[0, 7]], [20], "block_table must be from 0 to 1"),
        ([[-1, 1]], [20], "block_table must be from 0 to 1"),
        ([[0, 1]], [40], "seqused_k must give lengths from 0 to 32"),
        (None, [17], "seqused_k must give lengths from 0 to 16"),
    ],
)
def test_what_is_read_of_a_cache_is_there(table, lengths, words):
    q, pages = torch.randn(1, 4, 8), torch.randn(2 if table else 1, 16, 2, 8)
    cu, lengths = torch.tensor([0, 1], dtype=torch.int32), torch.tensor(lengths, dtype=torch.int32)
    table = None if table is None else torch.tensor(table, dtype=torch.int32)
    with pytest.raises(ValueError, match=words):
        flash_attn.flash_attn_varlen_func(q, pages, pages, cu, None, 1, 32, block_table=table, seqused_k=lengths)


def test_packed_arguments_are_the_separate_ones():
    q, kv, qkv = make(2, 5, 4, 8), make(2, 5, 2, 2, 8), make(2, 5, 3, 4, 8)
    options = (0.0, 0.3, True, (2, -1), 1.5)
    same = {"rtol": 0, "atol": 0}
    torch.testing.assert_close(
        flash_attn.flash_attn_kvpacked_func(q, kv, *options),
        flash_attn.flash_attn_func(q, kv[:, :, 0], kv[:, :, 1], *options), **same,
    )  # fmt: skip
    torch.testing.assert_close(
        flash_attn.flash_attn_qkvpacked_func(qkv, *options),
        flash_attn.flash_attn_func(*qkv.unbind(2), *options), **same,
    )  # fmt: skip
    cu = torch.tensor([0, 4, 10], dtype=torch.int32)
    rows = (cu, cu, 6, 6, *options)
    q, kv, qkv = (x.flatten(0, 1) for x in (q, kv, qkv))
    torch.testing.assert_close(
        flash_attn.flash_attn_varlen_kvpacked_func(q, kv, *rows),
        flash_attn.flash_attn_varlen_func(q, kv[:, 0], kv[:, 1], *rows), **same,
    )  # fmt: skip
    torch.testing.assert_close(
        flash_attn.flash_attn_varlen_qkvpacked_func(qkv, cu, 6, *options),
        flash_attn.flash_attn_varlen_func(*qkv.unbind(1), *rows), **same,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"dropout_p": 0.1}, "dropout_p=0.1"),
        ({"alibi_slopes": torch.ones(4)}, "alibi_slopes"),
    ],
)
def test_what_is_lacking_raises(options, sentence):
    q, cu = make(5, 4, 8), torch.tensor([0, 5], dtype=torch.int32)
    with pytest.raises(NotImplementedError, match=sentence):
        flash_attn.flash_attn_varlen_func(q, q, q, cu, cu, 5, 5, **options)
    with pytest.raises(NotImplementedError, match=sentence):
        flash_attn.flash_attn_func(q[None], q[None], q[None], **options)


@pytest.mark.parametrize("lacks", ["cu_seqlens_q", "cu_seqlens_k"])
def test_offsets_are_given(lacks):
    q, cu = make(5, 4, 8), torch.tensor([0, 2, 5], dtype=torch.int32)
    offsets = {"cu_seqlens_q": cu, "cu_seqlens_k": cu} | {lacks: None}
    given = (*offsets.values(), 3, 3)
    says = rf"^{lacks} is None, must be int32 offsets \(sequences \+ 1,\)"
    with pytest.raises(ValueError, match=says):
        flash_attn.flash_attn_varlen_func(q, q, q, *given)
    with pytest.raises(ValueError, match=says):
        flash_attn.flash_attn_varlen_kvpacked_func(q, torch.stack([q, q], 1), *given)
    with pytest.raises(ValueError, match=r"^cu_seqlens is None"):
        flash_attn.flash_attn_varlen_qkvpacked_func(torch.stack([q, q, q], 1), None, 3)
    with pytest.raises(ValueError, match=r"^cu_seqlens_q is None"):
        flash_attn.flash_attn_varlen_func(q, q[None], q[None], None, None, 5, 5, seqused_k=cu[1:2])


def test_lists_name_the_argument():
    q, cu = make(5, 4, 8), torch.tensor([0, 5], dtype=torch.int32)
    given = q.tolist()
    for call, name in (
        (lambda: flash_attn.flash_attn_func([given], q[None], q[None]), "q"),
        (lambda: flash_attn.flash_attn_kvpacked_func(q[None], [given]), "kv"),
        (lambda: flash_attn.flash_attn_varlen_func(given, q, q, cu, cu, 5, 5, deterministic=True), "q"),
        (lambda: flash_attn.flash_attn_varlen_func(q, q, q, cu, cu.tolist(), 5, 5), "cu_seqlens_k"),
        (lambda: flash_attn.flash_attn_varlen_func(q, q, q, cu, [0, 5], 5, 5, block_table=cu[None]), "cu_seqlens_k"),
        (lambda: flash_attn.flash_attn_varlen_func(q, q, q, cu, None, 5, 5, seqused_k=[5]), "seqused_k"),
        (lambda: flash_attn.flash_attn_with_kvcache(q[None], [given], q[None]), "k_cache"),
        (lambda: flash_attn.flash_attn_with_kvcache(q[None], q[None], q[None], rotary_cos=given), "rotary_cos"),
    ):
        with pytest.raises(ValueError, match=f"^{name} is a list, must be a torch.Tensor"):
            call()


def test_wrong_shapes_name_the_argument():
    q = make(5, 4, 8)
    with pytest.raises(ValueError, match=r"q has shape \(5, 4, 8\), must have 4 dimensions"):
        flash_attn.flash_attn_func(q, q, q)
    with pytest.raises(ValueError, match=r"kv has shape \(1, 5, 4, 8\), must be"):
        flash_attn.flash_attn_kvpacked_func(q[None], q[None])
    with pytest.raises(ValueError, match="window_size"):
        flash_attn.flash_attn_func(q[None], q[None], q[None], window_size=(1,))
    for wrong in (None, 3, (1, 2, 3), ("a", 1), (1.5, 0), (None, 1)):
        with pytest.raises(ValueError, match="window_size"):
            flash_attn.flash_attn_func(q[None], q[None], q[None], window_size=wrong)
    with pytest.raises(ValueError, match=r"softcap=.*must be a number"):
        flash_attn.flash_attn_func(q[None], q[None], q[None], softcap=[1.0])


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
def test_nested_tensors_are_refused(layout):
    q = torch.nested.nested_tensor([torch.randn(3, 2, 8), torch.randn(4, 2, 8)], layout=layout)
    with pytest.raises(ValueError, match="q is a nested tensor: use flash_attn_varlen_func"):
        flash_attn.flash_attn_func(q, q, q)


@pytest.mark.parametrize(
    "options",
    [
        {"window_size": (np.int64(2), np.int32(-1))},
        {"window_size": (torch.tensor(2), torch.tensor(-1))},
        {"window_size": [2, -1]},
        {"window_size": torch.tensor([2, -1])},
        {"window_size": (2, -1), "softmax_scale": np.float32(0.5), "softcap": np.float64(1.5)},
        {"window_size": (2, -1), "softmax_scale": torch.tensor(0.5), "softcap": torch.tensor(1.5)},
    ],
    ids=str,
)
def test_numbers_of_numpy_and_of_cpu_tensors(options):
    q = make(1, 5, 4, 8)
    same = {"window_size": (2, -1)}
    if "softcap" in options:
        same |= {"softmax_scale": 0.5, "softcap": 1.5}
    got, want = (flash_attn.flash_attn_func(q, q, q, **given) for given in (options, same))
    torch.testing.assert_close(got, want, rtol=0, atol=0)


@pytest.mark.parametrize("options", [{"window_size": (1, 0)}, {"softcap": 1.0}, {"softmax_scale": 1.0}], ids=str)
def test_numbers_on_another_device_are_refused(options):
    """On a GPU reading them would synchronise; the meta device stands for it."""
    q, (name, value) = make(1, 5, 4, 8), *options.items()
    there = torch.tensor(value, device="meta")
    for given in (there, tuple(there)) if name == "window_size" else (there,):
        with pytest.raises(ValueError, match=rf"{name}.* is a tensor on meta, which the host would wait for"):
            flash_attn.flash_attn_func(q, q, q, **{name: given})
