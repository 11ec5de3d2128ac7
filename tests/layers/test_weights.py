"""Weights of other libraries' layers: the same outputs, gradients and decoding; and nothing half-loaded."""

from __future__ import annotations

import copy
import functools
import importlib
import pickle

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    DynamicCache,
    Gemma2Config,
    Gemma3TextConfig,
    Gemma3TextModel,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    Olmo2Config,
    Phi3Config,
    Qwen3Config,
)
from transformers.models.llama.modeling_llama import LlamaAttention
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

from fulmen.layers import (
    GroupedQueryAttention,
    KVCache,
    LightningAttention,
    MultiHeadAttention,
    MultiHeadLatentAttention,
    MultiHeadSelfAttention,
    MultiQueryAttention,
)

EXACT = {"atol": 1e-10, "rtol": 0}
SIZES = {"hidden_size": 32, "num_attention_heads": 4, "max_position_embeddings": 64, "attn_implementation": "sdpa"}
YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 8}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
WINDOW = {"sliding_window": 4, "num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
MODELS = {
    "llama": LlamaConfig(**SIZES, num_key_value_heads=2),
    "llama, bias": LlamaConfig(**SIZES, num_key_value_heads=4, attention_bias=True, rope_parameters=LLAMA3),
    "llama, yarn": LlamaConfig(**SIZES, num_key_value_heads=1, head_dim=16, rope_parameters=YARN),
    "llama, mscale": LlamaConfig(
        **SIZES, num_key_value_heads=2, rope_parameters={**YARN, "mscale": 0.8, "mscale_all_dim": 0.6}
    ),
    "qwen3": Qwen3Config(**SIZES, num_key_value_heads=2, head_dim=16),
    "qwen3, window": Qwen3Config(
        **SIZES, num_key_value_heads=2, head_dim=8, use_sliding_window=True, sliding_window=4, max_window_layers=0,
        num_hidden_layers=2,
    ),
    "mistral": MistralConfig(**SIZES, num_key_value_heads=2, sliding_window=4),
    "mistral, no window": MistralConfig(**SIZES, num_key_value_heads=2, sliding_window=None),
    "phi3": Phi3Config(
        **SIZES, num_key_value_heads=2, sliding_window=4, pad_token_id=0,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
    ),
    "olmo2": Olmo2Config(**SIZES, num_key_value_heads=2),
    "gemma2": Gemma2Config(
        **SIZES | {"attn_implementation": "eager"}, num_key_value_heads=2, head_dim=16, query_pre_attn_scalar=10,
        attn_logit_softcapping=2.0, **WINDOW,
    ),
    "gemma3": Gemma3TextConfig(
        **SIZES, num_key_value_heads=2, head_dim=16, query_pre_attn_scalar=10, **WINDOW,
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            "full_attention": {"rope_type": "linear", "rope_theta": 500.0, "factor": 8.0},
        },
    ),
    "gpt_oss": GptOssConfig(**SIZES | {"attn_implementation": "eager"}, num_key_value_heads=2, head_dim=16, **WINDOW),
}  # fmt: skip


def close(config) -> dict[str, float]:
    """Norms, and the softmax of eager attention, round to fp32, whatever x is."""
    return EXACT if config.model_type in ("llama", "mistral", "phi3") else {"atol": 1e-5, "rtol": 1e-5}


class Theirs:
    """A module of transformers, called as ours are: causal, in its window, with a cache."""

    def __init__(self, config, layer: int = 0) -> None:
        torch.manual_seed(0)
        name = config.model_type.removesuffix("_text")
        modeling = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
        prefix = type(config).__name__.removesuffix("Config").removesuffix("Text")
        attention, rotary = (getattr(modeling, prefix + part) for part in ("Attention", "RotaryEmbedding"))
        self.module, self.rotary = attention(config, layer_idx=layer).double(), rotary(config)
        if config.model_type == "gemma3_text":
            self.rotary = functools.partial(self.rotary, layer_type=config.layer_types[layer])
        for name, p in self.module.named_parameters():
            nn.init.normal_(p, mean=float("norm" in name), std=0.3)
        self.cache, self.halves = DynamicCache(), config.model_type == "gpt_oss"  # its tables are of half the width
        everywhere = config.sliding_window if config.model_type in ("mistral", "phi3") else None
        self.window = getattr(self.module, "sliding_window", everywhere)
        self.rope = GroupedQueryAttention.from_hf(self.module, config, layer=layer).rope

    def __call__(self, x: torch.Tensor, cached: bool = False) -> torch.Tensor:
        B, N = x.shape[:2]
        start = self.cache.get_seq_length() if cached else 0
        positions = torch.arange(start, start + N).expand(B, N)
        twice = 1 if self.halves else 2
        cos, sin = (torch.cat(twice * [t], -1) for t in self.rope(positions, torch.float64))
        for ours, theirs in zip((cos, sin), self.rotary(x.float(), positions), strict=True):  # theirs are fp32 at best
            torch.testing.assert_close(ours.float(), theirs, atol=3e-6, rtol=0)
        i, j = positions[0, :, None], torch.arange(start + N)
        hidden = j > i
        if self.window:
            hidden |= j <= i - self.window
        mask = torch.zeros(1, 1, N, start + N, dtype=x.dtype).masked_fill(hidden, -torch.inf)
        cache = self.cache if cached else None
        return self.module(x, position_embeddings=(cos, sin), attention_mask=mask, past_key_values=cache)[0]


@pytest.mark.parametrize("config", MODELS.values(), ids=MODELS)
def test_hugging_face_outputs_and_gradients(config):
    theirs = Theirs(config)
    ours = GroupedQueryAttention.from_hf(theirs.module, config)
    assert ours.o_proj.weight.dtype == torch.float64
    x, weight = torch.randn(2, 2, 11, 32, dtype=torch.float64)
    x.requires_grad_()
    y, want = ours(x), theirs(x)
    torch.testing.assert_close(y, want, **close(config))
    got, exact = (
        dict(zip(["x", *(n for n, _ in named)], grads, strict=True))
        for z, named in ((y, list(ours.named_parameters())), (want, list(theirs.module.named_parameters())))
        for grads in [torch.autograd.grad((z * weight).sum(), [x, *(p for _, p in named)])]
    )
    if "qkv_proj.weight" in exact:  # Phi-3's
        got["qkv_proj.weight"] = torch.cat([got.pop(f"{part}_proj.weight") for part in "qkv"])
    assert got.keys() == exact.keys()
    for name in got:
        torch.testing.assert_close(got[name], exact[name], **close(config))


@torch.no_grad()
@pytest.mark.parametrize("name", ["gemma2", "gemma3", "gpt_oss"])
def test_hugging_face_layers_without_a_window(name):
    theirs = Theirs(MODELS[name], layer=1)
    ours = GroupedQueryAttention.from_hf(theirs.module, MODELS[name])  # the module knows its place, as a prefix does
    state = {f"model.layers.1.self_attn.{key}": value for key, value in theirs.module.state_dict().items()}
    again = GroupedQueryAttention.from_hf(state, MODELS[name], prefix="model.layers.1.self_attn.")
    assert ours.options == again.options
    x = torch.randn(2, 11, 32, dtype=torch.float64)
    torch.testing.assert_close(ours(x), theirs(x), **close(MODELS[name]))


@torch.no_grad()
def test_hugging_face_layers_that_see_both_ways():
    """Against a whole model, which makes the masks. A configuration holds one side of the window, its dict both."""
    torch.manual_seed(0)
    config = Gemma3TextConfig(
        **SIZES, num_key_value_heads=2, head_dim=16, vocab_size=61, intermediate_size=32, pad_token_id=0,
        sliding_window=6, layer_types=WINDOW["layer_types"], num_hidden_layers=2, use_bidirectional_attention=True,
    )  # fmt: skip
    model, seen = Gemma3TextModel(config).double(), {}
    for i, layer in enumerate(model.layers):
        nn.init.normal_(layer.self_attn.v_proj.weight)
        layer.self_attn.register_forward_hook(
            lambda module, args, kwargs, out, i=i: seen.update({i: (kwargs["hidden_states"], out[0])}), with_kwargs=True
        )
    model(torch.randint(1, 61, (2, 20)))
    for i, window in enumerate([(3, 3), None]):
        module, (x, want) = model.layers[i].self_attn, seen[i]
        for given in (config, config.to_dict()):
            ours = GroupedQueryAttention.from_hf(module, given, layer=i)
            assert (ours.options.window, ours.options.causal) == (window, False)
            torch.testing.assert_close(ours(x), want, **close(config))
    with pytest.raises(
        ValueError, match="use_bidirectional_attention, which is known of 'gemma3_text', not of 'gemma2'"
    ):
        GroupedQueryAttention.from_hf({}, {**MODELS["gemma2"].to_dict(), "use_bidirectional_attention": True}, layer=0)


@pytest.mark.parametrize("config", MODELS.values(), ids=MODELS)
@torch.no_grad()
def test_hugging_face_cached_decoding(config):
    theirs = Theirs(config)
    ours, cache = GroupedQueryAttention.from_hf(theirs.module, config), KVCache()
    for part in torch.randn(2, 14, 32, dtype=torch.float64).split([6, 1, 1, 4, 1, 1], 1):
        torch.testing.assert_close(ours(part, cache=cache), theirs(part, cached=True), **close(config))


def test_hugging_face_state_dicts_and_configs_as_dicts():
    config = MODELS["llama, bias"]
    theirs = Theirs(config)
    model = nn.ModuleDict({"layers": nn.ModuleList([nn.ModuleDict({"self_attn": theirs.module})])})
    x = torch.randn(1, 5, 32, dtype=torch.float64)
    for cls in (GroupedQueryAttention, MultiHeadAttention, MultiHeadSelfAttention):
        ours = cls.from_hf(model.state_dict(), config.to_dict(), prefix="layers.0.self_attn.")
        torch.testing.assert_close(ours(x), theirs(x), **EXACT)
    cast = MultiHeadSelfAttention.from_hf(theirs.module, config, dtype=torch.bfloat16, backend="eager")
    assert cast.qkv_proj.weight.dtype == torch.bfloat16
    assert cast.options.backend == "eager"


def test_hugging_face_dropout_and_windows_are_taken_over():
    config = Qwen3Config(**SIZES, num_key_value_heads=2, attention_dropout=0.1)
    assert GroupedQueryAttention.from_hf(Qwen3Attention(config, 0), config).dropout == 0.1
    layers = [
        GroupedQueryAttention.from_hf(Theirs(config, layer=i).module, config)
        for config in (MODELS["qwen3"], MODELS["qwen3, window"])
        for i in range(2)
    ]
    assert [layer.options.window for layer in layers] == [None, None, (3, None), (3, None)]


# ------------------------------------------------------------------------------- torch.nn.MultiheadAttention


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("cls", [MultiHeadAttention, MultiHeadSelfAttention, GroupedQueryAttention])
def test_torch_multihead_attention(cls, causal, bias):
    theirs = nn.MultiheadAttention(24, 4, bias=bias, batch_first=True, dtype=torch.float64)
    if bias:
        nn.init.normal_(theirs.in_proj_bias)
        nn.init.normal_(theirs.out_proj.bias)
    ours = cls.from_torch(theirs, causal=causal)
    x = torch.randn(2, 7, 24, dtype=torch.float64)
    padding = torch.zeros(2, 7, dtype=torch.bool)
    padding[1, 5:] = True
    hidden = torch.ones(7, 7, dtype=torch.bool).triu(1) if causal else None
    want = theirs(x, x, x, attn_mask=hidden, key_padding_mask=padding, need_weights=False)[0]
    torch.testing.assert_close(ours(x, mask=~padding)[~padding], want[~padding], **EXACT)
    again = cls.from_torch(theirs.state_dict(), 4, causal=causal)
    assert torch.equal(again(x), ours(x))


def test_torch_multihead_attention_with_a_context():
    theirs = nn.MultiheadAttention(24, 4, batch_first=True, kdim=10, vdim=10, dtype=torch.float64, dropout=0.2).eval()
    ours = MultiHeadAttention.from_torch(theirs)
    assert not ours.training
    assert (ours.context_dim, ours.dropout) == (10, 0.2)
    x, context = torch.randn(2, 7, 24, dtype=torch.float64), torch.randn(2, 5, 10, dtype=torch.float64)
    padding = torch.zeros(2, 5, dtype=torch.bool)
    padding[0, 3:] = True
    want = theirs(x, context, context, key_padding_mask=padding, need_weights=False)[0]
    torch.testing.assert_close(ours(x, context=context, context_mask=~padding), want, **EXACT)


# --------------------------------------------------------------------------------------- saving and loading


def test_a_fused_projection_is_saved_as_three_and_loaded_from_three(tmp_path):
    options = {"bias": True, "qk_norm": "before", "sinks": True}
    fused, plain = MultiHeadSelfAttention(24, 4, **options), MultiHeadAttention(24, 4, **options)
    assert sorted(fused.state_dict()) == sorted(plain.state_dict())
    plain.load_state_dict(fused.state_dict())
    x = torch.randn(2, 5, 24)
    torch.testing.assert_close(plain(x), fused(x))
    nn.init.normal_(plain.q_proj.weight)
    fused.load_state_dict(plain.state_dict())
    torch.testing.assert_close(plain(x), fused(x))
    assert fused.state_dict()["k_proj.weight"].data_ptr() != fused.qkv_proj.weight.data_ptr()
    assert fused.state_dict()["q_proj.weight"].data_ptr() == fused.qkv_proj.weight.data_ptr()  # no copy
    save_file(fused.state_dict(), tmp_path / "x.safetensors")
    torch.save(fused.state_dict(), tmp_path / "x.pt")
    for loaded in (load_file(tmp_path / "x.safetensors"), torch.load(tmp_path / "x.pt")):
        other = MultiHeadSelfAttention(24, 4, **options)
        other.load_state_dict(loaded)
        assert torch.equal(other(x), fused(x))
    with torch.device("meta"):
        born = MultiHeadSelfAttention(24, 4, **options)
    born.load_state_dict(loaded, assign=True)
    assert torch.equal(born(x), fused(x))


def test_models_of_layers_save_and_load():
    def model() -> nn.Module:
        return nn.ModuleList([MultiHeadSelfAttention(24, 4), nn.Linear(3, 3), GroupedQueryAttention(24, 4, 2)])

    a, b = model(), model()
    assert not b.load_state_dict(a.state_dict()).missing_keys
    for p, q in zip(a.parameters(), b.parameters(), strict=True):
        assert torch.equal(p, q)


KINDS = {
    "fused": lambda: MultiHeadSelfAttention(24, 4),
    "separate": lambda: MultiHeadAttention(24, 4),
    "latent": lambda: MultiHeadLatentAttention(24, 4, kv_rank=8, nope_dim=6, rope_dim=4, value_dim=6),
    "lightning": lambda: LightningAttention(24, 4, layer=1, num_layers=3),
}


def wrong_weights(
    state: dict[str, torch.Tensor], lost: str = "v_proj.weight"
) -> dict[str, tuple[dict[str, torch.Tensor], str]]:
    last, good = list(state)[-1], tuple(list(state.values())[-1].shape)
    bad = (*good[:-1], good[-1] + 1)
    return {
        "missing": ({k: v for k, v in state.items() if k != lost}, f"missing {lost}"),
        "unexpected": ({**state, "rotary.inv_freq": torch.zeros(3)}, "unexpected rotary.inv_freq"),
        "shape": ({**state, last: torch.zeros(bad)}, f"{last} has shape {bad}, must be {good}"),
        "kind": ({**state, last: 3}, f"{last} is a int, must be a tensor"),
    }


@pytest.mark.parametrize(
    ("fault", "nested"),
    [("missing", False), ("unexpected", False), ("shape", False), ("shape", True), ("kind", False), ("kind", True)],
)
@pytest.mark.parametrize("kind", KINDS)
def test_wrong_weights_leave_a_layer_as_it_was(nested, kind, fault):
    layer = KINDS[kind]()
    state = {name: torch.randn_like(x) for name, x in layer.state_dict().items()}
    bad, message = wrong_weights(state, list(state)[-2])[fault]
    before = {name: x.clone() for name, x in layer.state_dict().items()}
    module = nn.ModuleDict({"attention": layer}) if nested else layer
    bad = {f"attention.{name}": x for name, x in bad.items()} if nested else bad
    with pytest.raises(RuntimeError) as error:
        module.load_state_dict(bad)
    assert message in str(error.value)
    assert "took none" in str(error.value)
    assert ("at 'attention'" in str(error.value)) == nested
    for name, x in layer.state_dict().items():
        assert torch.equal(x, before[name]), name


@pytest.mark.parametrize("nothing", [None, [1]])
def test_what_is_no_state_dict_is_refused_as_torch_does(nothing):
    for strict in (True, False):
        with pytest.raises(TypeError, match="Expected state_dict to be dict-like"):
            MultiHeadAttention(24, 4).load_state_dict(nothing, strict=strict)


def test_loading_without_strictness_takes_what_fits():
    layer = MultiHeadAttention(24, 4)
    state = {"q_proj.weight": torch.randn(24, 24), "else": torch.zeros(1)}
    result = layer.load_state_dict(state, strict=False)
    assert result.unexpected_keys == ["else"]
    assert "k_proj.weight" in result.missing_keys
    assert torch.equal(layer.q_proj.weight, state["q_proj.weight"])
    with pytest.raises(RuntimeError, match="took none"):
        layer.load_state_dict({"q_proj.weight": torch.zeros(1)}, strict=False)


@pytest.mark.parametrize("nested", [False, True])
def test_a_fused_layer_takes_what_fits_and_tells_what_is_missing_by_its_name(nested):
    layer = MultiHeadSelfAttention(24, 4, bias=True)
    before = {name: x.clone() for name, x in layer.state_dict().items()}
    module, prefix = (nn.ModuleDict({"a": layer}), "a.") if nested else (layer, "")
    given = {f"{prefix}{name}": torch.randn_like(x) for name, x in before.items() if name[:2] in ("k_", "o_")}
    result = module.load_state_dict(given, strict=False)
    assert not result.unexpected_keys
    missing = {f"{part}_proj.{kind}" for part in "qv" for kind in ("weight", "bias")}
    assert {name.removeprefix(prefix) for name in result.missing_keys} == missing
    for name, x in layer.state_dict().items():
        assert torch.equal(x, before[name] if name in missing else given[prefix + name])
    with pytest.raises(RuntimeError, match=r"(?i)missing.*q_proj\.weight"):
        module.load_state_dict(given)
    assert set(module.load_state_dict({}, strict=False).missing_keys) == {prefix + name for name in before}
    with torch.device("meta"):
        born = MultiHeadSelfAttention(24, 4)
    with pytest.raises(RuntimeError, match="a fused projection without memory needs q, k and v"):
        born.load_state_dict({"q_proj.weight": torch.zeros(24, 24)}, strict=False, assign=True)


@pytest.mark.parametrize("way", ["to_empty", "assign", "assign, nested"])
@pytest.mark.parametrize("kind", KINDS)
def test_layers_built_without_memory_are_loaded(kind, way):
    theirs, x = KINDS[kind](), torch.randn(2, 5, 24)
    with torch.device("meta"):
        ours = KINDS[kind]()
    if way == "to_empty":
        ours.to_empty(device="cpu").load_state_dict(theirs.state_dict())
    elif way == "assign":
        ours.load_state_dict(theirs.state_dict(), assign=True)
    else:
        nn.ModuleList([ours]).load_state_dict(nn.ModuleList([theirs]).state_dict(), assign=True)
    assert torch.equal(ours(x), theirs(x))


@pytest.mark.parametrize("kind", KINDS)
def test_copies_load_for_themselves(kind):
    layer, x = KINDS[kind](), torch.randn(2, 5, 24)
    want, other = layer(x), KINDS[kind]()
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        twin.load_state_dict(other.state_dict())
        assert torch.equal(twin(x), other(x))
        assert torch.equal(layer(x), want)


@pytest.mark.parametrize("fault", ["missing", "unexpected", "shape"])
def test_from_hf_refuses_wrong_weights(fault):
    config = LlamaConfig(hidden_size=24, num_attention_heads=4, num_key_value_heads=4)
    bad, message = wrong_weights(LlamaAttention(config, 0).state_dict())[fault]
    with pytest.raises(ValueError, match="these weights are not those of GroupedQueryAttention") as error:
        GroupedQueryAttention.from_hf(bad, config)
    assert message in str(error.value)


def test_layers_that_are_alike_may_have_any_number():
    """Of a model cut down, or of weights that stand behind the layers that the configuration counts."""
    config = LlamaConfig(**{**SIZES, "num_hidden_layers": 2})
    module = LlamaAttention(config, 4)
    for given in ({}, {"layer": 1}):
        assert GroupedQueryAttention.from_hf(module, config, **given).num_heads == config.num_attention_heads
    state = {f"model.layers.2.self_attn.{name}": x for name, x in module.state_dict().items()}
    assert GroupedQueryAttention.from_hf(state, config, prefix="model.layers.2.self_attn.").head_dim > 0


@pytest.mark.parametrize("as_dict", [False, True])
def test_configurations_of_other_models(as_dict):
    config = MODELS["llama"]
    state, config = LlamaAttention(config, 0).state_dict(), config.to_dict() if as_dict else config
    for layer, given, lacks in (
        (LightningAttention, {"layer": 0}, "lightning_head_dim"),
        (MultiHeadLatentAttention, {}, "qk_rope_head_dim"),
    ):
        says = f"^config has model_type='llama' and no '{lacks}': from_hf knows .*; accelerate"
        with pytest.raises(NotImplementedError, match=says):
            layer.from_hf(state, config, **given)


def test_other_wrong_sources():
    config = MODELS["llama"]
    changed = functools.partial(dict, config.to_dict())
    state = LlamaAttention(config, 0).state_dict()
    minimax, torch_layer = {"qkv_proj.weight": torch.zeros(3, 3)}, nn.MultiheadAttention(24, 4)
    faults = [
        (lambda: GroupedQueryAttention.from_hf(state, {"model_type": "t5"}), "model_type='t5'"),
        (lambda: GroupedQueryAttention.from_hf(state, {}), "config has no 'model_type'"),
        (lambda: GroupedQueryAttention.from_hf(3, config), "a int, must be a module or its state_dict"),
        (lambda: GroupedQueryAttention.from_hf(state, config, prefix="model."), "starts with prefix='model.'"),
        (lambda: GroupedQueryAttention.from_hf(state, MODELS["qwen3"]), "missing q_norm.weight"),
        (lambda: GroupedQueryAttention.from_hf(state, MODELS["qwen3, window"], layer=2), "config has 2 layers"),
        (lambda: GroupedQueryAttention.from_hf(state, config, layer=32), "layer=32: config has 32 layers"),
        (lambda: GroupedQueryAttention.from_hf(state, config, layer="x"), "layer='x': must be an int"),
        (
            lambda: GroupedQueryAttention.from_hf(state, MODELS["gemma2"]),
            "layer is missing: layers of this model differ",
        ),
        (
            lambda: GroupedQueryAttention.from_hf(Theirs(MODELS["gemma2"]).module, MODELS["gemma2"], layer=1),
            "another kind",
        ),
        (lambda: GroupedQueryAttention.from_hf(dict.fromkeys(state, 1), config), "q_proj.weight is a int"),
        (lambda: GroupedQueryAttention.from_hf(state, config, dtype="bfloat16"), "dtype='bfloat16'"),
        (lambda: GroupedQueryAttention.from_hf(state, changed(hidden_size=None)), "config has hidden_size=None"),
        (lambda: GroupedQueryAttention.from_hf(state, changed(num_attention_heads=0)), "num_attention_heads=0"),
        (lambda: GroupedQueryAttention.from_hf(state, changed(rope_parameters="x")), "rope_parameters='x'"),
        (lambda: MultiHeadLatentAttention.from_hf(state, {"qk_rope_head_dim": None}), "qk_rope_head_dim=None"),
        (lambda: LightningAttention.from_hf(minimax, changed(hidden_size=None), layer=0), "hidden_size=None"),
        (lambda: LightningAttention.from_hf(minimax, changed(hidden_act="silu"), layer="x"), "layer='x'"),
        (lambda: MultiHeadSelfAttention.from_hf(state, config), "use GroupedQueryAttention"),
        (lambda: MultiQueryAttention.from_hf(state, config), "num_kv_heads=2, and MultiQueryAttention one"),
        (lambda: MultiHeadAttention.from_torch(torch_layer.state_dict()), "num_heads is missing"),
        (lambda: MultiHeadAttention.from_torch(torch_layer, 3), "the module has 4"),
        (lambda: MultiHeadAttention.from_torch(nn.Linear(3, 3)), "must be a torch.nn.MultiheadAttention"),
        (lambda: MultiHeadAttention.from_torch(state, 4), "these weights are not"),
        (lambda: MultiHeadAttention.from_torch({"in_proj_weight": torch.zeros(4, 4)}, 4), "3 * embed_dim rows"),
        (lambda: MultiHeadAttention.from_torch({"in_proj_weight": torch.zeros(6, 2)}, 4), "missing o_proj.weight"),
        (lambda: MultiHeadAttention.from_torch(nn.MultiheadAttention(24, 4, kdim=5, vdim=6)), "kdim=5 and vdim=6"),
        (lambda: MultiHeadSelfAttention.from_torch(nn.MultiheadAttention(24, 4, kdim=5, vdim=5)), "takes no context"),
        (lambda: MultiHeadAttention.from_torch(nn.MultiheadAttention(24, 4, add_bias_kv=True)), "add_bias_kv"),
        (lambda: MultiHeadAttention.from_torch(nn.MultiheadAttention(24, 4, add_zero_attn=True)), "add_zero_attn"),
    ]
    for call, message in faults:
        with pytest.raises(ValueError, match=r".") as error:
            call()
        assert message in str(error.value)
