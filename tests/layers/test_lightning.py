"""The lightning layer: against transformers' MiniMax, against the definition of all presets, and its own ways."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import MiniMaxConfig
from transformers.models.minimax.modeling_minimax import MiniMaxCache, MiniMaxLightningAttention

from fulmen import decay
from fulmen.layers.cache import LatentCache, StateCache
from fulmen.layers.lightning import PRESETS, LightningAttention
from fulmen.layers.rotary import Rotary, apply_rotary

close = torch.testing.assert_close
MASK = torch.tensor([[0] * 5 + [1] * 16, [1] * 17 + [0] * 4, [0, 1, 1, 0] + [1] * 15 + [0] * 2], dtype=torch.bool)


def made(preset: str = "minimax", **options) -> LightningAttention:
    torch.manual_seed(0)
    layer = LightningAttention(48, 4, **{"head_dim": 16, "preset": preset, "layer": 1, "num_layers": 4, **options})
    for p in layer.parameters():
        if p.ndim == 1 and not p.is_meta:
            torch.nn.init.uniform_(p, 0.5, 1.5)
    return layer


def tokens(B: int = 2, N: int = 21, seed: int = 1) -> torch.Tensor:
    return torch.randn(B, N, 48, generator=torch.Generator().manual_seed(seed))


def minimax(layer_idx: int = 1) -> tuple[MiniMaxLightningAttention, MiniMaxConfig]:
    torch.manual_seed(0)
    config = MiniMaxConfig(
        hidden_size=48, num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_hidden_layers=4, block_size=8,
        layer_types=["linear_attention"] * 4,
    )  # fmt: skip
    module = MiniMaxLightningAttention(config, layer_idx)
    torch.nn.init.uniform_(module.norm.weight, 0.5, 1.5)
    return module, config


# ----------------------------------------------------------------------------------------------- MiniMax


@pytest.mark.parametrize("layer_idx", [0, 1, 3])
def test_minimax_outputs_and_gradients(layer_idx):
    module, config = minimax(layer_idx)
    layer = LightningAttention.from_hf(module, config)
    assert layer.layer == layer_idx
    x, dy = tokens(), tokens(seed=2)
    ours_at, theirs_at = x.clone().requires_grad_(), x.clone().requires_grad_()
    y, want = layer(ours_at), module(theirs_at, None, None)[0]
    close(y, want)
    y.backward(dy)
    want.backward(dy)
    close(ours_at.grad, theirs_at.grad)
    grads = dict(module.named_parameters())
    assert {n for n, _ in layer.named_parameters()} == set(grads)
    for name, p in layer.named_parameters():
        close(p.grad, grads[name].grad, msg=lambda m, name=name: f"{name}: {m}")


@torch.no_grad()
def test_minimax_cached_decoding():
    module, config = minimax()
    layer = LightningAttention.from_hf(module.state_dict(), config.to_dict(), layer=1)
    x, ours, hf = tokens(), StateCache(), MiniMaxCache()
    for part in x.split([9, 1, 1, 3, 7], dim=1):
        close(layer(part, cache=ours), module(part, None, None, hf)[0])
        close(ours.state, hf.get_linear_cache(1))


@torch.no_grad()
def test_minimax_left_padding():
    module, config = minimax()
    layer = LightningAttention.from_hf(module, config)
    mask = MASK[:1].expand(2, -1)
    want = module(tokens(), None, mask)[0]
    y = layer(tokens(), mask=mask)
    close(y[:, 5:], want[:, 5:])


def test_from_hf_refuses_whole():
    module, config = minimax()
    state = module.state_dict()
    assert "slope_rate" in state
    with pytest.raises(ValueError, match="layer is missing"):
        LightningAttention.from_hf(state, config)
    wrong = {n: x for n, x in state.items() if n != "norm.weight"} | {"qkv_proj.bias": torch.zeros(192)}
    wrong["out_proj.weight"] = torch.zeros(48, 63)
    message = r"missing norm.weight; unexpected qkv_proj.bias; out_proj.weight has shape \(48, 63\)"
    with pytest.raises(ValueError, match=message):
        LightningAttention.from_hf(wrong, config, layer=1)
    layer = made()
    before = copy.deepcopy(layer.state_dict())
    with pytest.raises(RuntimeError, match="took none"):
        layer.load_state_dict(wrong)
    for name, x in layer.state_dict().items():
        assert torch.equal(x, before[name])


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_weights_of_minicpm_sala(kv_heads):
    """Separate projections become one; slopes do not depend on the layer."""
    own = made("sala", num_kv_heads=kv_heads)
    q, k, v = own.qkv_proj.weight.unflatten(0, (kv_heads, -1)).split([64 // kv_heads, 16, 16], 1)
    names = {"out_proj": "o_proj", "output_gate": "z_proj", "norm": "o_norm"}
    state = {names.get(n.split(".")[0], n.split(".")[0]) + ".weight": x for n, x in own.state_dict().items()}
    del state["qkv_proj.weight"]
    state |= {f"{part}_proj.weight": x.flatten(0, 1) for part, x in zip("qkv", (q, k, v), strict=True)}
    config = {"hidden_size": 48, "num_hidden_layers": 4, "lightning_nh": 4, "lightning_nkv": kv_heads,
              "lightning_head_dim": 16, "lightning_scale": "1/sqrt(d)", "rope_theta": 10_000.0, "use_output_norm": True,
              "use_output_gate": True}  # fmt: skip
    layer = LightningAttention.from_hf(state, config, layer=3)
    close(layer(tokens()), own(tokens()))
    assert torch.equal(layer.decay, decay.alibi(4))
    assert layer.rope.dim == 16
    with pytest.raises(NotImplementedError, match="lightning_scale='d'"):
        LightningAttention.from_hf(state, config | {"lightning_scale": "d"}, layer=3)
    with pytest.raises(ValueError, match=r"missing qkv_proj\.weight"):
        LightningAttention.from_hf({n: x for n, x in state.items() if n != "v_proj.weight"}, config, layer=3)


# ------------------------------------------------------------------------------------------- definitions


def definition(layer: LightningAttention, x: torch.Tensor) -> torch.Tensor:
    """The layer written out, the attention as a matrix of (q_t . k_j) exp(-s (t - j))."""
    B, N, H, D, E = *x.shape[:2], layer.num_heads, layer.head_dim, layer.value_dim
    H_KV, group = layer.num_kv_heads, layer.num_heads // layer.num_kv_heads
    qkv = x @ layer.qkv_proj.weight.T
    if layer.qkv_proj.bias is not None:
        qkv = qkv + layer.qkv_proj.bias
    if layer.activation is not None:
        qkv = {"silu": F.silu, "relu": F.relu}[layer.activation](qkv)
    qkv = qkv.view(B, N, H_KV, group * D + D + E)
    q = qkv[..., : group * D].reshape(B, N, H, D)
    k = qkv[..., group * D : group * D + D].repeat_interleave(group, 2)
    v = qkv[..., group * D + D :].repeat_interleave(group, 2)

    def normed(t, weight, eps=1e-6):
        return t * torch.rsqrt(t.square().mean(-1, keepdim=True) + eps) * weight

    def turned(t):
        return apply_rotary(t.transpose(1, 2), *layer.rope(torch.arange(N), x.dtype), layer.rope.interleaved).transpose(
            1, 2
        )

    if layer.qk_norm == "before":
        q, k = normed(q, layer.q_norm.weight), normed(k, layer.k_norm.weight)
    if layer.rope is not None:
        q, k = turned(q), turned(k)
    if layer.qk_norm == "after":
        q, k = normed(q, layer.q_norm.weight), normed(k, layer.k_norm.weight)
    distance = (torch.arange(N)[:, None] - torch.arange(N)).double()
    s = torch.zeros(H) if layer.decay is None else layer.decay
    weight = torch.where(distance >= 0, torch.exp(-s.double()[:, None, None] * distance.clamp(min=0)), 0.0)
    o = torch.einsum("bthd,bjhd,htj,bjhe->bthe", q, k, weight.to(x.dtype), v) * layer.scale
    o = o.flatten(2)
    if layer.norm is not None:
        grouped = o.view(B, N, layer.norm.groups, -1)
        o = normed(grouped, layer.norm.weight.view(layer.norm.groups, -1)).flatten(2)
    if layer.output_gate is not None:
        o = o * torch.sigmoid(x @ layer.output_gate.weight.T)
    return layer.out_proj(o)


VARIANTS = {
    **{name: {"preset": name} for name in PRESETS},
    "shared keys": {"preset": "ring", "num_kv_heads": 2, "value_dim": 24, "bias": True},
    "bare": {"activation": None, "output_norm": None, "gate": False, "decay": None},
    "mixed": {"activation": "relu", "qk_norm": "after", "rope": {"dim": 4, "interleaved": True}, "scale": 0.3},
    "own slopes": {"decay": torch.tensor([0.0, 0.5, 2.0, 0.1]), "output_norm": 2},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_definition(variant):
    layer, x, dy = made(**VARIANTS[variant]).double(), tokens().double(), tokens(seed=2).double()
    assert layer.decay is None or layer.decay.dtype == torch.float32
    y, want = layer(x), definition(layer, x)
    close(y, want)
    got = torch.autograd.grad(y, layer.parameters(), dy)
    for a, b in zip(got, torch.autograd.grad(want, layer.parameters(), dy), strict=True):
        close(a, b)


def test_presets():
    layer = made("ring")
    assert (layer.scale, layer.activation, layer.norm.groups) == (0.25, None, 4)
    assert (layer.rope.dim, layer.rope.base, layer.rope.interleaved) == (8, 600_000.0, False)
    assert torch.equal(layer.decay, decay.ring(4, 1, 4))
    layer = made("minimax")
    assert (layer.scale, layer.activation, layer.norm.groups, layer.rope) == (1.0, "silu", 1, None)
    assert torch.equal(layer.decay, decay.minimax(4, 1, 4))
    assert torch.equal(made(decay="alibi").decay, decay.alibi(4))
    layer = made("sala")
    assert (layer.scale, layer.activation, layer.norm.groups) == (0.25, None, 1)
    assert (layer.rope.dim, layer.rope.base, layer.rope.interleaved) == (16, 10_000.0, False)
    assert torch.equal(layer.decay, decay.alibi(4))
    assert set(PRESETS) == {"minimax", "ring", "sala"}


def test_weights_of_another_layer_are_refused():
    with pytest.raises(ValueError, match="layer=0: by layer_idx or prefix these weights are of layer 3"):
        LightningAttention.from_hf({"layers.3.a.x": torch.ones(1)}, {}, layer=0, prefix="layers.3.a.")


def test_ring_weights():
    """Ring-linear's names and order: all queries, all keys, all values."""
    layer = made("ring")
    q, k, v = layer.qkv_proj.weight.view(4, 3, 16, 48).unbind(1)
    names = {"q_norm": "query_layernorm", "k_norm": "key_layernorm", "norm": "g_norm", "output_gate": "g_proj"}
    names["out_proj"] = "dense"
    state = {"query_key_value.weight": torch.cat([t.reshape(64, 48) for t in (q, k, v)])}
    state |= {f"{theirs}.weight": layer.get_parameter(f"{ours}.weight") for ours, theirs in names.items()}
    config = {
        "hidden_size": 48, "num_attention_heads": 4, "head_dim": 16, "num_hidden_layers": 4, "use_qk_norm": True,
        "partial_rotary_factor": 0.5, "rope_theta": 600_000.0, "group_norm_size": 4, "rms_norm_eps": 1e-6,
    }  # fmt: skip
    state = {f"model.layers.1.attention.{name}": x.detach() for name, x in state.items()}
    loaded = LightningAttention.from_hf(state, config, layer=1, prefix="model.layers.1.attention.")
    close(loaded(tokens()), layer(tokens()))


# --------------------------------------------------------------------------------------- caches and padding


@pytest.mark.parametrize("variant", ["minimax", "ring", "shared keys", "bare"])
@torch.no_grad()
def test_prefill_then_tokens_is_the_full_forward(variant):
    layer, x, cache = made(**VARIANTS[variant]), tokens(), StateCache()
    parts = [layer(part, cache=cache) for part in x.split([9, 1, 1, 10], dim=1)]
    close(torch.cat(parts, 1), layer(x))
    assert cache.length == 21


@pytest.mark.parametrize("preset", ["minimax", "ring"])
@torch.no_grad()
def test_rows_of_different_lengths(preset):
    """Padding on either side and in between: outputs and states as if each row stood alone."""
    layer, x, later = made(preset), tokens(B=3), tokens(B=3, N=9, seed=3)
    x = torch.where(MASK[..., None], x, torch.nan)
    cache = StateCache()
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
        alone = StateCache()
        close(y[row][seen[row]], layer(everything[row][seen[row]][None], cache=alone)[0])
        close(cache.state[row], alone.state[0])


def test_padding_has_no_gradient():
    layer, x = made(), tokens(B=3).requires_grad_()
    layer(x, mask=MASK).square().sum().backward()
    assert not x.grad[~MASK].any()
    assert x.grad[MASK].any(-1).all()


@pytest.mark.parametrize("preset", ["minimax", "ring"])
def test_packed_sequences_restart_the_state(preset):
    layer, x = made(preset), tokens(B=1, N=23)
    y = layer(x, cu_seqlens=torch.tensor([0, 7, 7, 16, 23], dtype=torch.int32))
    close(y, torch.cat([layer(part) for part in x.split([7, 9, 7], dim=1)], 1))


@torch.no_grad()
def test_reorder_reset_crop():
    layer, x, cache = made("ring"), tokens(), StateCache()
    layer(x[:, :9], cache=cache)
    cache.reorder(torch.tensor([1, 1, 0]))
    close(layer(x[[1, 1, 0], 9:10], cache=cache), layer(x[[1, 1, 0]])[:, 9:10])
    with pytest.raises(NotImplementedError, match="none can be taken out"):
        cache.crop(5)
    with pytest.raises(ValueError, match=r"states of 3 rows and 4 heads, and x has 2 rows"):
        layer(x, cache=cache)
    cache.reset()
    close(layer(x, cache=cache), layer(x))


def test_positions():
    layer, x = made("ring"), tokens()
    close(layer(x, positions=torch.arange(21).expand(2, -1)), layer(x))
    close(layer(x, positions=torch.arange(0, 42, 2)), definition_at(layer, x))


def definition_at(layer: LightningAttention, x: torch.Tensor) -> torch.Tensor:
    doubled = copy.deepcopy(layer)
    doubled.rope = Rotary(layer.rope.dim, base=layer.rope.base, scaling={"rope_type": "linear", "factor": 0.5})
    return doubled(x)


# ------------------------------------------------------------------------------------------- inside PyTorch


def test_meta_device_and_dtype():
    layer = made("ring", device="meta")
    assert all(p.is_meta for p in layer.parameters())
    assert layer.decay.is_meta
    layer.to_empty(device="cpu")
    torch.manual_seed(0)
    layer.reset_parameters()
    assert torch.equal(layer.decay, decay.ring(4, 1, 4))
    assert layer(tokens()).isfinite().all()
    with torch.device("meta"):
        assert made().decay.is_meta
    half = layer.to(torch.bfloat16)
    assert torch.equal(half.decay, decay.ring(4, 1, 4)), "slopes are not rounded"
    assert half(tokens().bfloat16()).dtype == torch.bfloat16
    assert "decay" not in layer.state_dict()


@pytest.mark.parametrize("kind", ["batch", "mask", "packed"])
def test_compile_fullgraph(kind):
    layer, x = made("ring"), tokens(B=1 if kind == "packed" else 2)
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
    layer, x, cache = made("ring"), tokens(), StateCache()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    parts = [compiled(part, cache=cache) for part in x.split([17, 1, 1, 1, 1], dim=1)]
    close(torch.cat(parts, 1), layer(x))


@pytest.mark.parametrize("preset", ["minimax", "ring"])
def test_autocast_and_checkpoint(preset):
    layer, x = made(preset), tokens()
    want = layer(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(x)
        cache = StateCache()
        with torch.no_grad():
            steps = torch.cat([layer(part, cache=cache) for part in x.split([9, 1, 11], dim=1)], 1)
    assert y.dtype == steps.dtype == torch.bfloat16
    for got in (y, steps):
        assert (got.float() - want).norm() < 0.02 * want.norm()
    grads = torch.autograd.grad(want.sum(), layer.parameters())
    again = torch.autograd.grad(checkpoint(layer, x, use_reentrant=False).sum(), layer.parameters())
    assert all(torch.equal(a, b) for a, b in zip(grads, again, strict=True))


def test_repr_tells_the_backend():
    assert "backend='auto' (eager, at N=4096)" in repr(made())
    assert "backend='reference'" in repr(made(backend="reference"))
    close(made(backend="reference")(tokens()), made()(tokens()))


@pytest.mark.gpu
def test_on_a_gpu():
    """bf16 with padding, packed and cached, against fp32 on the CPU."""
    exact, x = made("ring"), tokens(B=3)
    layer = copy.deepcopy(exact).to("cuda", torch.bfloat16)

    def same(got, want):
        assert (got.float().cpu() - want).norm() < 0.03 * want.norm()

    there = x.to("cuda", torch.bfloat16)
    same(layer(there), exact(x))
    same(layer(there, mask=MASK.cuda()), exact(x, mask=MASK))
    cu_seqlens = torch.tensor([0, 9, 21], dtype=torch.int32)
    same(layer(there[:1], cu_seqlens=cu_seqlens.cuda()), exact(x[:1], cu_seqlens=cu_seqlens))
    cache = StateCache()
    with torch.no_grad():
        same(torch.cat([layer(part, cache=cache) for part in there.split([17, 1, 1, 2], dim=1)], 1), exact(x))
    for p, want in zip(layer.parameters(), exact.parameters(), strict=True):
        (got,) = torch.autograd.grad(layer(there).float().square().mean(), p)
        same(got, torch.autograd.grad(exact(x).square().mean(), want)[0])


# --------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"preset": "mamba"}, r"preset='mamba'"),
        ({"head_dim": None, "num_heads": 5}, r"num_heads=5 must divide embed_dim=48"),
        ({"num_kv_heads": 3}, r"num_kv_heads=3 must divide num_heads=4"),
        ({"head_dim": 300}, r"head_dim=300"),
        ({"head_dim": 0}, r"head_dim=0"),
        ({"value_dim": 0}, r"value_dim=0"),
        ({"activation": "tanh"}, r"activation='tanh'"),
        ({"scale": 0.0}, r"scale=0.0"),
        ({"qk_norm": "always"}, r"qk_norm='always'"),
        ({"rope": Rotary(32)}, r"rope turns dim=32 elements"),
        ({"rope": {"dim": 5}}, r"dim=5"),
        ({"rope": 7}, r"rope is a int"),
        ({"output_norm": 3}, r"output_norm=3"),
        ({"decay": "fast"}, r"decay='fast'"),
        ({"decay": torch.ones(3)}, r"decay has shape \(3,\)"),
        ({"decay": -torch.ones(4)}, r"finite and >= 0"),
        ({"layer": 4}, r"layer=4"),
        ({"backend": "warp"}, r"backend='warp'"),
    ],
)
def test_bad_construction(options, message):
    options = {"embed_dim": 48, "num_heads": 4, "head_dim": 16, "layer": 1, "num_layers": 4, **options}
    with pytest.raises(ValueError, match=message):
        LightningAttention(**options)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"x": torch.zeros(2, 48)}, r"x has shape \(2, 48\)"),
        ({"mask": torch.ones(2, 20, dtype=torch.bool)}, r"mask has shape"),
        ({"mask": MASK[:2], "cu_seqlens": torch.tensor([0, 21], dtype=torch.int32)}, r"mask and cu_seqlens"),
        ({"cache": StateCache(), "cu_seqlens": torch.tensor([0, 21], dtype=torch.int32)}, r"cache and cu_seqlens"),
        ({"cache": LatentCache()}, r"cache is a LatentCache, must be a StateCache"),
        ({"positions": torch.zeros(2, 20, dtype=torch.int64)}, r"positions has shape"),
    ],
)
def test_bad_call(call, message):
    with pytest.raises(ValueError, match=message):
        made("ring")(**{"x": tokens(), **call})
