"""Multi-head latent attention: against transformers' DeepSeek-V3, and its two ways against each other."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from transformers import DeepseekV3Config, DynamicCache
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention, DeepseekV3RotaryEmbedding

from fulmen.layers.cache import KVCache, LatentCache
from fulmen.layers.latent import MultiHeadLatentAttention
from fulmen.layers.rotary import Rotary

close = torch.testing.assert_close
SIZES = {"kv_rank": 32, "nope_dim": 16, "rope_dim": 8, "value_dim": 12}
YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32, "mscale": 1.0,
    "mscale_all_dim": 0.7, "beta_fast": 32, "beta_slow": 1,
}  # fmt: skip
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}


def made(**options) -> MultiHeadLatentAttention:
    torch.manual_seed(0)
    return MultiHeadLatentAttention(48, 4, **{"q_rank": 24, **SIZES, **options})


def tokens(B: int = 2, N: int = 21, seed: int = 1) -> torch.Tensor:
    return torch.randn(B, N, 48, generator=torch.Generator().manual_seed(seed))


def deepseek(q_rank: int | None = 24, rope: dict = PLAIN, interleaved: bool = True, bias: bool = True):
    """transformers' module, its configuration, and a function that calls it as a model does."""
    torch.manual_seed(0)
    config = DeepseekV3Config(
        hidden_size=48, num_attention_heads=4, num_key_value_heads=4, q_lora_rank=q_rank, kv_lora_rank=32,
        qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=12, rope_parameters=dict(rope), rope_interleave=interleaved,
        attention_bias=bias, max_position_embeddings=128,
    )  # fmt: skip
    config._attn_implementation = "eager"
    module = DeepseekV3Attention(config, 0)
    for norm in (module.q_a_layernorm, module.kv_a_layernorm):
        if norm is not None:
            torch.nn.init.uniform_(norm.weight, 0.5, 1.5)
    turn = DeepseekV3RotaryEmbedding(config)

    def call(x, cache=None):
        B, N = x.shape[:2]
        start = 0 if cache is None else cache.get_seq_length()
        positions = torch.arange(start, start + N).expand(B, N)
        mask = torch.full((N, start + N), -torch.inf).triu(1 + start)[None, None]
        return module(x, turn(x, positions), mask, past_key_values=cache)[0]

    return module, config, call


# ------------------------------------------------------------------------------------------- DeepSeek-V3


@pytest.mark.parametrize("interleaved", [True, False], ids=["interleaved", "halves"])
@pytest.mark.parametrize("rope", [PLAIN, YARN], ids=["rope", "yarn"])
@pytest.mark.parametrize("q_rank", [24, None], ids=["low-rank q", "direct q"])
def test_deepseek_outputs_and_gradients(q_rank, rope, interleaved):
    module, config, theirs = deepseek(q_rank, rope, interleaved)
    layer = MultiHeadLatentAttention.from_hf(module, config)
    x, dy = tokens(), tokens(seed=2)
    ours_at, theirs_at = x.clone().requires_grad_(), x.clone().requires_grad_()
    y, want = layer(ours_at), theirs(theirs_at)
    close(y, want)
    y.backward(dy)
    want.backward(dy)
    close(ours_at.grad, theirs_at.grad)
    grads = dict(module.named_parameters())
    assert {n for n, _ in layer.named_parameters()} == set(grads)
    for name, p in layer.named_parameters():
        close(p.grad, grads[name].grad, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("absorb", [True, False, "auto"])
@pytest.mark.parametrize("rope", [PLAIN, YARN], ids=["rope", "yarn"])
@torch.no_grad()
def test_deepseek_cached_decoding(rope, absorb):
    module, config, theirs = deepseek(rope=rope)
    layer = MultiHeadLatentAttention.from_hf(module.state_dict(), config.to_dict())
    layer.absorb = absorb
    x, ours, hf = tokens(), LatentCache(), DynamicCache()
    for part in x.split([7, 1, 1, 1, 6, 5], dim=1):
        close(layer(part, cache=ours), theirs(part, hf))
    latent, k_rope = ours.append(torch.zeros(2, 0, 32), torch.zeros(2, 0, 8))
    close(latent, hf.layers[0].keys[:, 0])
    assert latent.shape == (2, 21, 32)
    assert k_rope.shape == (2, 21, 8)


def test_deepseek_own_names_and_prefix():
    module, config, theirs = deepseek(bias=False)
    names = {
        "q_a_proj": "wq_a", "q_a_layernorm": "q_norm", "q_b_proj": "wq_b", "kv_a_proj_with_mqa": "wkv_a",
        "kv_a_layernorm": "kv_norm", "kv_b_proj": "wkv_b", "o_proj": "wo",
    }  # fmt: skip
    state = {"layers.0.attn." + names[n.split(".")[0]] + ".weight": x for n, x in module.state_dict().items()}
    state["layers.0.ffn.w1"] = torch.zeros(1)
    layer = MultiHeadLatentAttention.from_hf(state, config, prefix="layers.0.attn.")
    close(layer(tokens()), theirs(tokens()))


def test_a_module_in_evaluation_makes_a_layer_in_evaluation():
    module, config, _ = deepseek()
    assert not MultiHeadLatentAttention.from_hf(module.eval(), config).training
    assert MultiHeadLatentAttention.from_hf(module.train(), config).training


def test_wrong_weights_are_refused_whole():
    module, config, _ = deepseek()
    state = module.state_dict()
    wrong = {n: x for n, x in state.items() if n != "o_proj.bias"} | {"o_proj.scale": torch.ones(1)}
    wrong["kv_b_proj.weight"] = torch.zeros(3, 3)
    with pytest.raises(ValueError, match=r"missing o_proj.bias; unexpected o_proj.scale; kv_b_proj.weight has shape"):
        MultiHeadLatentAttention.from_hf(wrong, config)
    layer = made(bias=True)
    before = copy.deepcopy(layer.state_dict())
    with pytest.raises(RuntimeError, match="took none"):
        layer.load_state_dict(wrong)
    for name, x in layer.state_dict().items():
        assert torch.equal(x, before[name])


# --------------------------------------------------------------------------------------- caches and padding


OPTIONS = [{}, {"window": (5, None)}, {"softcap": 2.0, "sinks": True}, {"q_rank": None, "bias": True}]


@pytest.mark.parametrize("options", OPTIONS, ids=["plain", "window", "softcap and sinks", "bias"])
@pytest.mark.parametrize("absorb", [True, False])
def test_prefill_then_tokens_is_the_full_forward(options, absorb):
    layer, x = made(absorb=absorb, **options), tokens()
    if layer.sinks is not None:
        torch.nn.init.normal_(layer.sinks)
    for cache in (LatentCache(), LatentCache(max_length=21)):
        with torch.no_grad():
            parts = [layer(part, cache=cache) for part in x.split([9, 1, 1, 10], dim=1)]
        close(torch.cat(parts, 1), layer(x))


def test_auto_counts_multiplications():
    """DeepSeek-V3's sizes: a token is absorbed, a long prompt is expanded."""
    layer = MultiHeadLatentAttention(64, 2, device="meta")
    assert layer._absorbs(1, 4096)
    assert layer._absorbs(64, 4096)
    assert not layer._absorbs(512, 4096)
    assert not layer._absorbs(4096, 4096)


@pytest.mark.parametrize("absorb", [True, False])
def test_gradients_through_a_cache(absorb):
    """The absorbed way is differentiable, and gives the same gradients."""
    layer, x, dy = made(absorb=absorb, sinks=True), tokens(), tokens(seed=2)
    layer(x).backward(dy)
    want = {n: p.grad.clone() for n, p in layer.named_parameters()}
    layer.zero_grad()
    cache = LatentCache()
    torch.cat([layer(part, cache=cache) for part in x.split([9, 1, 11], dim=1)], 1).backward(dy)
    for name, p in layer.named_parameters():
        close(p.grad, want[name], atol=2e-5, rtol=1e-4, msg=lambda m, name=name: f"{name}: {m}")


MASK = torch.tensor([[0] * 5 + [1] * 16, [1] * 17 + [0] * 4, [0, 1, 1, 0] + [1] * 15 + [0] * 2], dtype=torch.bool)


@pytest.mark.parametrize("absorb", [True, False])
def test_rows_of_different_lengths(absorb):
    """Padding on either side and in between: each row as if alone, prompt, tokens and a longer piece."""
    layer, x, later = made(absorb=absorb), tokens(B=3), tokens(B=3, N=9, seed=3)
    x = torch.where(MASK[..., None], x, torch.nan)
    cache = LatentCache()
    with torch.no_grad():
        y = layer(x, mask=MASK, cache=cache)
        close(y, layer(x, mask=MASK))
        alive = torch.tensor([[True], [False], [True]])
        steps = [
            layer(later[:, :1], cache=cache),
            layer(later[:, 1:2], cache=cache, mask=alive),
            layer(later[:, 2:], cache=cache),
        ]
        y = torch.cat([y, *steps], 1)
    seen = torch.cat([MASK, torch.ones(3, 1, dtype=torch.bool), alive, torch.ones(3, 7, dtype=torch.bool)], 1)
    assert not y[~seen].any()
    everything = torch.cat([x, later], 1)
    for row in range(3):
        close(y[row][seen[row]], layer(everything[row][seen[row]][None])[0])


def test_packed_sequences():
    layer, x = made(), tokens(B=1, N=23)
    cu_seqlens = torch.tensor([0, 7, 7, 16, 23], dtype=torch.int32)
    y = layer(x, cu_seqlens=cu_seqlens)
    close(y, torch.cat([layer(part) for part in x.split([7, 9, 7], dim=1)], 1))


def test_positions_and_reorder():
    layer, x = made(), tokens()
    close(layer(x, positions=torch.arange(21)), layer(x))
    moved = layer(x, positions=torch.arange(21) + 100)
    close(moved, layer(x), atol=1e-4, rtol=1e-4)  # only distances count
    cache = LatentCache()
    with torch.no_grad():
        layer(x[:, :9], cache=cache)
        cache.reorder(torch.tensor([1, 1, 0]))
        close(layer(x[[1, 1, 0], 9:10], cache=cache), layer(x[[1, 1, 0]])[:, 9:10])
        cache.crop(5)
        close(layer(x[[1, 1, 0], 5:], cache=cache), layer(x[[1, 1, 0]])[:, 5:])


# ------------------------------------------------------------------------------------------- inside PyTorch


def test_dropout():
    layer, x = made(dropout=0.5, backend="eager"), tokens()
    assert not torch.equal(layer(x), layer(x))
    want = made()(x)
    close(layer.eval()(x), want)
    with pytest.raises(ValueError, match=r"dropout=0.5 with backend='triton'"):
        made(dropout=0.5, backend="triton")


def test_full_attention_is_not_causal():
    layer, x = made(causal=False), tokens()
    assert not torch.allclose(layer(x)[:, 0], made()(x)[:, 0])
    with pytest.raises(ValueError, match="causal=False"):
        layer(x, cache=LatentCache())


def test_meta_device():
    layer = made(device="meta", sinks=True)
    assert all(p.is_meta for p in layer.parameters())
    assert "backend='auto'" in repr(layer)
    layer.to_empty(device="cpu")
    torch.manual_seed(0)
    layer.reset_parameters()
    assert all(p.isfinite().all() for p in layer.parameters())
    assert layer(tokens()).isfinite().all()


@pytest.mark.parametrize("kind", ["batch", "mask", "packed"])
def test_compile_fullgraph(kind):
    layer, x = made(), tokens(B=1 if kind == "packed" else 2)
    options = {
        "batch": {},
        "mask": {"mask": MASK[:2]},
        "packed": {"cu_seqlens": torch.tensor([0, 9, 21], dtype=torch.int32)},
    }[kind]
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    y, want = compiled(x, **options), layer(x, **options)
    close(y, want)
    got = torch.autograd.grad(y.square().sum(), layer.parameters())
    for a, b in zip(got, torch.autograd.grad(want.square().sum(), layer.parameters()), strict=True):
        close(a, b)


@torch.no_grad()
def test_compiled_decoding():
    layer, x, cache = made(), tokens(), LatentCache(max_length=21)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    parts = [compiled(part, cache=cache) for part in x.split([17, 1, 1, 1, 1], dim=1)]
    close(torch.cat(parts, 1), layer(x))


def test_autocast_and_checkpoint():
    layer, x = made(), tokens()
    want = layer(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(x)
        cache = LatentCache()
        with torch.no_grad():
            steps = torch.cat([layer(part, cache=cache) for part in x.split([9, 1, 11], dim=1)], 1)
    assert y.dtype == steps.dtype == torch.bfloat16
    for got in (y, steps):
        assert (got.float() - want).norm() < 0.02 * want.norm()
    grads = torch.autograd.grad(want.sum(), layer.parameters())
    again = torch.autograd.grad(checkpoint(layer, x, use_reentrant=False).sum(), layer.parameters())
    assert all(torch.equal(a, b) for a, b in zip(grads, again, strict=True))


def test_dtypes():
    x = tokens()
    for dtype in (torch.bfloat16, torch.float64):
        layer = made().to(dtype)
        assert layer(x.to(dtype)).dtype == dtype
    assert "backend='auto' (eager, at N=4096)" in repr(layer)
    assert "backend='eager'" in repr(made(backend="eager"))


@pytest.mark.gpu
def test_on_a_gpu():
    """bf16 with padding, packed and cached, against fp32 on the CPU."""
    exact, x = made(value_dim=16), tokens(B=3)  # GPU kernels take multiples of 8
    layer = copy.deepcopy(exact).to("cuda", torch.bfloat16)

    def same(got, want):
        assert (got.float().cpu() - want).norm() < 0.03 * want.norm()

    there = x.to("cuda", torch.bfloat16)
    same(layer(there), exact(x))
    same(layer(there, mask=MASK.cuda()), exact(x, mask=MASK))
    cu_seqlens = torch.tensor([0, 9, 21], dtype=torch.int32)
    same(layer(there[:1], cu_seqlens=cu_seqlens.cuda()), exact(x[:1], cu_seqlens=cu_seqlens))
    cache = LatentCache()
    with torch.no_grad():
        same(torch.cat([layer(part, cache=cache) for part in there.split([17, 1, 1, 2], dim=1)], 1), exact(x))
    for p, want in zip(layer.parameters(), exact.parameters(), strict=True):
        (got,) = torch.autograd.grad(layer(there).float().square().mean(), p)
        same(got, torch.autograd.grad(exact(x).square().mean(), want)[0])


# --------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_rank": 0}, r"kv_rank=0"),
        ({"nope_dim": 250}, r"nope_dim \+ rope_dim=258"),
        ({"value_dim": 300}, r"value_dim=300"),
        ({"rope_dim": 7}, r"rope_dim=7: RoPE turns pairs, so rope_dim must be an even number"),
        ({"rope_dim": 7, "rope": {"dim": 6}}, r"rope_dim=7"),
        ({"rope": Rotary(16)}, r"rope turns dim=16 elements, must be rope_dim=8"),
        ({"rope": "yes"}, r"rope is a str"),
        ({"absorb": "sometimes"}, r"absorb='sometimes'"),
        ({"absorb": True, "dropout": 0.1}, r"dropout=0.1 with absorb=True"),
        ({"backend": "fastest"}, r"backend='fastest'"),
        ({"window": 5}, r"window=5"),
        ({"softcap": -1.0}, r"softcap=-1.0"),
        ({"causal": "top_left"}, r"causal='top_left'"),
    ],
)
def test_bad_construction(options, message):
    with pytest.raises(ValueError, match=message):
        made(**options)


def test_bad_heads():
    with pytest.raises(ValueError, match="num_heads=0"):
        MultiHeadLatentAttention(48, 0, **SIZES)


CALLS = [
    ({"x": torch.zeros(2, 21, 47)}, r"x has shape \(2, 21, 47\), must be \(B, N, embed_dim\) with embed_dim=48"),
    ({"x": [1.0]}, r"x is a list, must be a tensor"),
    ({"mask": torch.ones(2, 21)}, r"mask is torch.float32"),
    ({"mask": MASK}, r"mask has shape"),
    ({"cu_seqlens": torch.tensor([0, 21], dtype=torch.int32)}, r"B must be 1"),
    ({"x": tokens(B=1), "cu_seqlens": torch.tensor([0, 20], dtype=torch.int32)}, r"must end at N=21"),
    ({"mask": MASK[:2], "cu_seqlens": torch.tensor([0, 21], dtype=torch.int32)}, r"mask and cu_seqlens"),
    ({"cache": LatentCache(), "cu_seqlens": torch.tensor([0, 21], dtype=torch.int32)}, r"cache and cu_seqlens"),
    ({"cache": KVCache()}, r"cache is a KVCache, must be a LatentCache"),
    ({"positions": torch.arange(20)}, r"positions has shape \(20,\)"),
    ({"positions": torch.arange(21.0)}, r"positions is torch.float32"),
]


@pytest.mark.parametrize(("call", "message"), CALLS, ids=[m for _, m in CALLS])
def test_bad_call(call, message):
    with pytest.raises(ValueError, match=message):
        made()(**{"x": tokens(), **call})


@torch.no_grad()
def test_bad_cache():
    layer, x = made(), tokens()
    with pytest.raises(ValueError, match="too small"):
        layer(x, cache=LatentCache(max_length=20))
    cache = LatentCache()
    layer(x, cache=cache)
    with pytest.raises(ValueError, match="batch"):
        layer(x[:1], cache=cache)
