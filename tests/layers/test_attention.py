"""The layers against their formula, written out in fp64, and against themselves: rows alone, documents alone."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from fulmen.layers import (
    GroupedQueryAttention,
    KVCache,
    LightningAttention,
    MultiHeadAttention,
    MultiHeadLatentAttention,
    MultiHeadSelfAttention,
    MultiQueryAttention,
    Rotary,
    apply_rotary,
)
from fulmen.testing import assert_close

EXACT = {"atol": 1e-10, "rtol": 0}
LAYERS = {
    "self": lambda **o: MultiHeadSelfAttention(24, 4, **o),
    "separate": lambda **o: MultiHeadAttention(24, 4, **o),
    "grouped": lambda **o: GroupedQueryAttention(24, 4, 2, **o),
    "grouped, fused": lambda **o: GroupedQueryAttention(24, 4, 2, fused_qkv=True, **o),
    "multi-query": lambda **o: MultiQueryAttention(24, 4, **o),
}
OPTIONS = {
    "full": {},
    "causal": {"causal": True, "bias": True, "head_dim": 8},
    "rope": {"causal": True, "rope": {"dim": 4}, "qk_norm": "before", "scale": 0.3},
    "window": {"window": (2, 1), "rope": {"interleaved": True}, "qk_norm": "after"},
    "sinks": {"causal": True, "window": (3, None), "softcap": 2.0, "sinks": True},
    "norm of all heads": {"causal": True, "rope": {}, "qk_norm": "all"},
}


def make(kind: str, dtype: torch.dtype = torch.float64, **options) -> GroupedQueryAttention:
    torch.manual_seed(0)
    layer = LAYERS[kind](dtype=dtype, **options)
    for name, p in layer.named_parameters():
        if "norm" in name or "sinks" in name:
            nn.init.normal_(p, mean=1.0)
    return layer


def written_out(layer: GroupedQueryAttention, x: torch.Tensor, context: torch.Tensor | None = None) -> torch.Tensor:
    """The layer by its formula, from its state_dict."""
    w = dict(layer.state_dict(keep_vars=True))
    B, N, D, c, o = *x.shape[:2], layer.head_dim, x if context is None else context, layer.options

    def project(name: str, y: torch.Tensor) -> torch.Tensor:
        z = nn.functional.linear(y, w[f"{name}_proj.weight"], w.get(f"{name}_proj.bias"))
        return z.view(B, y.shape[1], -1, D).transpose(1, 2) if name != "o" else z

    def norm(name: str, y: torch.Tensor) -> torch.Tensor:
        return y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-6) * w[f"{name}_norm.weight"]

    q, k, v = project("q", x), project("k", c), project("v", c)
    if layer.qk_norm == "before":
        q, k = norm("q", q), norm("k", k)
    if layer.qk_norm == "all":
        flat = (norm(name, y.transpose(1, 2).flatten(2)) for name, y in (("q", q), ("k", k)))
        q, k = (y.view(B, y.shape[1], -1, D).transpose(1, 2) for y in flat)
    if layer.rope is not None:
        dim = layer.rope.dim
        frequencies = layer.rope.base ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
        angles = torch.arange(N, dtype=torch.float64)[:, None] * frequencies
        cos, sin = (t.to(torch.promote_types(x.dtype, torch.float32)) for t in (angles.cos(), angles.sin()))
        q, k = (apply_rotary(y, cos, sin, layer.rope.interleaved) for y in (q, k))
    if layer.qk_norm == "after":
        q, k = norm("q", q), norm("k", k)
    k, v = (y.repeat_interleave(layer.num_heads // layer.num_kv_heads, 1) for y in (k, v))
    s = o.scale * q @ k.mT
    s = s if o.softcap is None else o.softcap * torch.tanh(s / o.softcap)
    i, j = torch.arange(s.shape[2])[:, None], torch.arange(s.shape[3])
    left, right = o.window or (None, None)
    if o.causal:
        s = s.masked_fill(j > i, -math.inf)
    if left is not None:
        s = s.masked_fill(j < i - left, -math.inf)
    if right is not None:
        s = s.masked_fill(j > i + right, -math.inf)
    if layer.sinks is not None:
        s = torch.cat([s, w["sinks"].view(1, -1, 1, 1).expand(B, -1, N, 1)], -1)
    p = s.softmax(-1)[..., : k.shape[2]]
    return project("o", (p @ v).transpose(1, 2).flatten(2))


def gradients(y: torch.Tensor, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(7)
    weight = torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y.dtype)
    return torch.autograd.grad((y * weight).sum(), inputs)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("kind", LAYERS)
def test_the_formula(kind, options):
    layer, x = make(kind, **options), torch.randn(2, 9, 24, dtype=torch.float64, requires_grad=True)
    y, want = layer(x), written_out(layer, x)
    torch.testing.assert_close(y, want, **EXACT)
    inputs = x, *layer.parameters()
    for got, exact in zip(gradients(y, *inputs), gradients(want, *inputs), strict=True):
        torch.testing.assert_close(got, exact, **EXACT)


@pytest.mark.parametrize("backend", ["eager", "sdpa", "triton", "reference"])
def test_backends_agree(backend):
    """In fp16 against fp64, by the yardstick of the formula in fp16."""
    kind = "separate" if backend == "sdpa" else "grouped"  # torch's CPU kernel shares no heads in half precision
    exact = make(kind, causal=True, rope={}, head_dim=16)
    low = copy.deepcopy(exact).half()
    ours = make(kind, causal=True, rope={}, head_dim=16, backend=backend, dtype=torch.float16)
    ours.load_state_dict(exact.state_dict())
    exact.load_state_dict(low.state_dict())
    x = torch.randn(1, 20, 24).half().requires_grad_()
    wide = x.detach().double().requires_grad_()
    results = []
    for f, layer, z in ((written_out, exact, wide), (written_out, low, x), (lambda layer, z: layer(z), ours, x)):
        y = f(layer, z)
        results.append([y.detach(), *gradients(y, z, *layer.parameters())])
    for i, (want, plain, got) in enumerate(zip(*results, strict=True)):
        assert_close(str(i), got, plain, want, factor=3.0, roundings=2.0)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("side", ["left", "right", "between"])
@pytest.mark.parametrize("kind", ["self", "grouped"])
def test_padded_rows_are_as_each_alone(kind, side, options):
    layer = make(kind, **options)
    mask = padding(side)
    x = torch.randn(4, 6, 24, dtype=torch.float64)
    x[~mask] = torch.nan  # padding may hold anything
    x.requires_grad_()
    y = layer(x, mask=mask)
    assert not y[~mask].any()
    grads = gradients(y, x, *layer.parameters())
    assert not grads[0][~mask].any()
    alone = torch.zeros_like(y)
    for b in range(4):
        if mask[b].any():
            alone[b, mask[b]] = written_out(layer, x[b, mask[b]][None])[0]
    torch.testing.assert_close(y, alone, **EXACT)
    for got, want in zip(grads, gradients(alone, x, *layer.parameters()), strict=True):
        torch.testing.assert_close(got, want, **EXACT)


def padding(side: str) -> torch.Tensor:
    mask = torch.zeros(4, 6, dtype=torch.bool)
    if side == "between":
        return torch.tensor([[1, 1, 0, 1, 0, 0], [0, 1, 0, 1, 0, 1], [1] * 6, [0] * 6], dtype=torch.bool)
    for b, n in enumerate((6, 2, 0, 5)):
        mask[b, 6 - n :] = True
    return mask if side == "left" else mask.flip(1)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("kind", ["self", "grouped"])
def test_packed_documents_never_see_each_other(kind, options):
    layer, lengths = make(kind, **options), [4, 0, 1, 6]
    x = torch.randn(1, 11, 24, dtype=torch.float64, requires_grad=True)
    cu_seqlens = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
    y = layer(x, cu_seqlens=cu_seqlens)
    alone = torch.cat([written_out(layer, part) for part in x.split(lengths, 1) if part.shape[1]], 1)
    torch.testing.assert_close(y, alone, **EXACT)
    inputs = x, *layer.parameters()
    for got, want in zip(gradients(y, *inputs), gradients(alone, *inputs), strict=True):
        torch.testing.assert_close(got, want, **EXACT)


def test_positions_are_for_rope_alone():
    layer = make("grouped", causal=True, rope={"max_positions": 50})
    x, mask = torch.randn(4, 6, 24, dtype=torch.float64), padding("left")
    torch.testing.assert_close(layer(x, positions=torch.arange(6) + 40), layer(x), atol=1e-6, rtol=0)  # fp32 angles
    positions = torch.tensor([0, 2, 4, 6, 8, 10])
    stretched = layer(x, positions)
    assert (stretched - layer(x)).abs().max() > 1e-3
    torch.testing.assert_close(layer(x, positions.expand(4, 6)), stretched, **EXACT)
    counted = (mask.cumsum(1) - 1).clamp(min=0)
    torch.testing.assert_close(layer(x, counted, mask=mask), layer(x, mask=mask), **EXACT)
    mine = make("grouped", causal=True)
    assert torch.equal(mine(x, positions), mine(x))


# --------------------------------------------------------------------------------------- cross-attention


@pytest.mark.parametrize("kind", ["separate", "grouped", "multi-query"])
def test_cross_attention(kind):
    torch.manual_seed(0)
    sizes = {"separate": (), "grouped": (2,), "multi-query": ()}[kind]
    cls = type(LAYERS[kind]())
    more = {} if kind == "multi-query" else {"context_dim": 10}
    layer = cls(24, 4, *sizes, **more, dtype=torch.float64)
    x = torch.randn(3, 5, 24, dtype=torch.float64)
    context = torch.randn(3, 7, layer.context_dim, dtype=torch.float64)
    want = written_out(layer, x, context)
    torch.testing.assert_close(layer(x, context=context), want, **EXACT)
    seen, asking = torch.rand(3, 7) < 0.5, torch.rand(3, 5) < 0.6
    seen[:, 2] = asking[:, 0] = True
    seen[2] = False  # a row of the batch with nothing to look at
    alone = torch.zeros_like(want)
    for b in range(2):
        alone[b, asking[b]] = written_out(layer, x[b, asking[b]][None], context[b, seen[b]][None])[0]
    got = layer(x, mask=asking, context=context, context_mask=seen)
    torch.testing.assert_close(got, alone, **EXACT)
    torch.testing.assert_close(layer(x, mask=asking, context=context)[asking], want[asking], **EXACT)
    assert torch.equal(layer(x, context=context, context_mask=seen)[2], torch.zeros(5, 24, dtype=torch.float64))


def test_packed_cross_attention():
    layer = make("separate")
    x, context = torch.randn(1, 6, 24, dtype=torch.float64), torch.randn(1, 9, 24, dtype=torch.float64)
    offsets = [torch.tensor(v, dtype=torch.int32) for v in ([0, 2, 6], [0, 5, 9])]
    y = layer(x, cu_seqlens=offsets[0], context=context, context_cu_seqlens=offsets[1])
    parts = [written_out(layer, x[:, :2], context[:, :5]), written_out(layer, x[:, 2:], context[:, 5:])]
    torch.testing.assert_close(y, torch.cat(parts, 1), **EXACT)


# ------------------------------------------------------------------------------------------------ dropout


@pytest.mark.parametrize("backend", ["auto", "eager", "sdpa"])
@pytest.mark.parametrize(
    ("kind", "call"),
    [
        *((kind, call) for kind in ("self", "grouped") for call in ("plain", "mask", "packed", "cache")),
        ("grouped", "context"),
    ],
)
def test_dropout_drops_nothing_else(call, kind, backend):
    """With a probability so small that no weight is dropped: every mask, as without dropout."""
    options = {} if call == "context" else {"causal": True, "window": (3, None), "rope": {}}
    if backend != "sdpa":
        options |= {"softcap": 3.0, "sinks": True}
    layer = make(kind, dropout=1e-15, backend=backend, **options)
    x = torch.randn(1 if call == "packed" else 4, 6, 24, dtype=torch.float64)
    arguments = {
        "plain": {},
        "mask": {"mask": padding("between")},
        "packed": {"cu_seqlens": torch.tensor([0, 2, 2, 6], dtype=torch.int32)},
        "cache": {"mask": padding("left")},
        "context": {"context": torch.randn(4, 3, 24, dtype=torch.float64), "mask": padding("left")},
    }[call]
    results = []
    for training in (True, False):
        layer.train(training)
        cache = KVCache() if call == "cache" else None
        more = {} if cache is None else {"cache": cache}
        plain = layer if training or backend != "sdpa" else copy.deepcopy(layer)
        if plain is not layer:
            plain.options = plain.options._replace(backend="eager")  # sdpa packs nothing
        y = [plain(x, **arguments, **more)]
        if cache is not None:
            y.append(plain(x[:, :2], cache=cache))
        results.append(torch.cat(y, 1))
    torch.testing.assert_close(*results, **EXACT)
    gradients(results[0], *layer.parameters())


@pytest.mark.parametrize("backend", ["auto", "eager", "sdpa"])
def test_dropout_keeps_the_expectation(backend):
    layer = make("grouped", dropout=0.4, backend=backend, causal=True, head_dim=8)
    x = torch.randn(1, 6, 24, dtype=torch.float64)
    with torch.no_grad():
        many = layer(x.expand(4000, 6, 24))
        want = layer.eval()(x)[0]
    spread = many.std(0) / math.sqrt(4000)
    assert spread.max() > 1e-4, "nothing was dropped"
    assert ((many.mean(0) - want).abs() <= 5 * spread + 1e-12).all()
    assert torch.equal(layer(x), layer(x))


# -------------------------------------------------------------------------------------- inside PyTorch


class Operations(TorchDispatchMode):
    """Which operators ran."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))

    def __enter__(self):
        self.seen = []
        return super().__enter__()


@pytest.mark.parametrize("kind", LAYERS)
def test_nothing_is_copied_between_projections_and_kernel(kind):
    layer = make(kind, dtype=torch.float32, backend="eager", causal=True)
    with torch.no_grad(), Operations() as operations:
        layer(torch.randn(2, 9, 24))
    before = operations.seen.index("flash_forward")
    ours = {*operations.seen[:before], operations.seen[-1]}
    assert not ours & {"clone", "copy_", "_to_copy", "contiguous", "cat"}, operations.seen
    expected = 1 if "fused" in kind or kind == "self" else 3
    assert sum(name in ("mm", "addmm", "bmm") for name in operations.seen[:before]) == expected


def test_meta_construction_and_reset_parameters():
    options = {"bias": True, "qk_norm": "before", "rope": {}, "sinks": True, "dtype": torch.float32}
    for kind in LAYERS:
        with torch.device("meta"):
            born = make(kind, **options)
        assert all(p.is_meta for p in born.parameters())
        assert born(torch.empty(2, 5, 24, device="meta")).shape == (2, 5, 24)
        born.to_empty(device="cpu")
        for seed in (1, 2):
            torch.manual_seed(seed)
            born.reset_parameters()
        torch.manual_seed(2)
        usual = LAYERS[kind](**options)
        for (name, got), want in zip(born.named_parameters(), usual.parameters(), strict=True):
            assert torch.equal(got, want), name
        x = torch.randn(2, 5, 24)
        assert torch.equal(born(x), usual(x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype):
    layer = make("grouped", dtype=torch.float32, causal=True, rope={}, qk_norm="before", sinks=True)
    x = torch.randn(2, 9, 24, requires_grad=True)
    cache = KVCache()
    with torch.autocast("cpu", dtype=dtype):
        y = layer(x)
        with torch.no_grad():
            steps = torch.cat([layer(part, cache=cache) for part in x.split(3, 1)], 1)
    assert y.dtype == steps.dtype == dtype
    assert {t.dtype for t in cache._held} == {dtype}
    torch.testing.assert_close(y.float(), layer(x), atol=0.1, rtol=0.1)
    torch.testing.assert_close(steps.float(), layer(x), atol=0.1, rtol=0.1)
    gradients(y, x, *layer.parameters())


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reentrant):
    layer = make("self", causal=True, rope={}, qk_norm="after")
    x, mask = torch.randn(4, 6, 24, dtype=torch.float64, requires_grad=True), padding("left")
    y = checkpoint(lambda x: layer(x, mask=mask), x, use_reentrant=reentrant)
    if reentrant:  # it knows no torch.autograd.grad
        generator = torch.Generator().manual_seed(7)
        (y * torch.randn(y.shape, generator=generator, dtype=torch.float64)).sum().backward()
        got = [x.grad, *(p.grad for p in layer.parameters())]
    else:
        got = gradients(y, x, *layer.parameters())
    for a, b in zip(got, gradients(layer(x, mask=mask), x, *layer.parameters()), strict=True):
        torch.testing.assert_close(a, b, **EXACT)


@pytest.mark.parametrize("kind", ["grouped", "latent", "lightning"])
def test_empty_inputs(kind):
    if kind == "grouped":
        layer = make("grouped", causal=True, rope={})
    elif kind == "latent":
        layer = MultiHeadLatentAttention(24, 4, kv_rank=8, dtype=torch.float64)
    else:
        layer = LightningAttention(24, 4, dtype=torch.float64)
    for shape in ((0, 5, 24), (2, 0, 24)):
        x = torch.empty(shape, dtype=torch.float64)
        assert layer(x).shape == shape
        assert layer(x, mask=torch.ones(shape[:2], dtype=torch.bool)).shape == shape


def test_positions_of_padding_have_no_effect():
    """Hugging Face's position_ids are mask.cumsum(1) - 1, so -1 before the first token."""
    layer, x = make("grouped", causal=True, rope={"max_positions": 6}), torch.randn(2, 6, 24, dtype=torch.float64)
    mask = torch.tensor([[False, False, True, True, True, True], [True] * 6])
    positions = mask.long().cumsum(1) - 1
    torch.testing.assert_close(layer(x, positions, mask=mask), layer(x, mask=mask), **EXACT)


def test_layers_may_share_a_rotary():
    rope = Rotary(6)
    a, b = (GroupedQueryAttention(24, 4, 2, rope=rope) for _ in range(2))
    assert a.rope is b.rope
    assert "rope" not in "".join(a.state_dict())


def test_repr_says_the_backend():
    text = repr(make("self", dtype=torch.float32, causal=True, window=(5, None)))
    for part in (
        "24, num_heads=4, num_kv_heads=4, head_dim=6",
        "causal",
        "window=(5, None)",
        "'auto' (eager, at N=4096)",
    ):
        assert part in text
    assert "'auto' (sdpa, cpu, at N=4096)" in repr(make("self", dtype=torch.float32, causal=True))
    assert "backend='eager'" in repr(make("self", backend="eager"))
    assert "backend='triton' (cannot serve it)" in repr(make("self", backend="triton"))
    assert "backend='auto', with dropout" in repr(make("self", dropout=0.1))
    with torch.device("meta"):
        assert "backend='auto'" in repr(make("self"))
