"""Softmax attention modules of Hugging Face as `GroupedQueryAttention`: its arguments, and tensors under its names.

| model_type  | what differs from Llama                                                                      |
|-------------|----------------------------------------------------------------------------------------------|
| mistral     | a window in every layer                                                                      |
| phi3        | the same; one projection for q, k and v; RoPE of a part of each head                         |
| qwen3       | windows by `layer_types`; norms of each head                                                 |
| olmo2       | norms of all heads together                                                                  |
| gemma2      | windows by `layer_types`; softcap; a scale of its own                                        |
| gemma3_text | windows and RoPE by `layer_types`; norms of each head, whose weights count from 1; own scale |
| gpt_oss     | windows by `layer_types`; sinks                                                              |
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from fulmen.layers.inputs import number, whole
from fulmen.layers.rotary import Rotary, config_head_dim, config_size, config_value

MODELS = ("llama", "mistral", "phi3", "qwen3", "olmo2", "gemma2", "gemma3_text", "gpt_oss")
NORMS = {"qwen3": "before", "gemma3_text": "before", "olmo2": "all"}
NO_BIAS = ("mistral", "phi3")  # whatever their configurations say


def arguments(config: Any, layer: int | None, own: int | None) -> dict[str, Any]:
    """The arguments of `GroupedQueryAttention` that make a layer of the model `config` describes.

    layer, own   its number, as the caller says and as the weights say
    """
    model = _model(config)
    kind = _kind(config, layer, own)
    heads = config_size(config, "num_attention_heads")
    scalar = config_value(config, "query_pre_attn_scalar", None) if model.startswith("gemma") else None
    softcap = config_value(config, "attn_logit_softcapping", None) if model == "gemma2" else None
    both_ways = bool(config_value(config, "use_bidirectional_attention", False))
    if both_ways and model != "gemma3_text":
        raise ValueError(f"config has use_bidirectional_attention, which is known of 'gemma3_text', not of {model!r}")
    return {
        "embed_dim": config_size(config, "hidden_size"),
        "num_heads": heads,
        "num_kv_heads": config_size(config, "num_key_value_heads", heads),
        "head_dim": config_head_dim(config),
        "bias": model not in NO_BIAS and bool(config_value(config, "attention_bias", False)),
        "qk_norm": NORMS.get(model),
        "norm_eps": config_value(config, "rms_norm_eps", 1e-6),
        "rope": _rotary(config, kind),
        "causal": not both_ways,
        "window": _window(config, model, kind, both_ways),
        "softcap": None if softcap is None else number("config has attn_logit_softcapping", softcap),
        "sinks": model == "gpt_oss",
        "scale": None if scalar is None else number("config has query_pre_attn_scalar", scalar) ** -0.5,
        "dropout": config_value(config, "attention_dropout", 0.0) or 0.0,
    }


def named(tensors: Mapping[str, Tensor], config: Any) -> dict[str, Tensor]:
    """The tensors under the names of `GroupedQueryAttention`; those of Phi-3's one projection are views of it."""
    model, given = _model(config), dict(tensors)
    if model == "phi3" and "qkv_proj.weight" in given:
        D, H = config_head_dim(config), config_size(config, "num_attention_heads")
        sizes = [D * H] + 2 * [D * config_size(config, "num_key_value_heads", H)]
        fused = given.pop("qkv_proj.weight")
        if fused.shape[0] != sum(sizes):
            raise ValueError(f"qkv_proj.weight has shape {tuple(fused.shape)}, must have {sum(sizes)} rows")
        given |= zip(("q_proj.weight", "k_proj.weight", "v_proj.weight"), fused.split(sizes), strict=True)
    if model == "gemma3_text":
        given |= {name: (1.0 + x.float()).to(x.dtype) for name, x in given.items() if name.endswith("norm.weight")}
    return given


def _model(config: Any) -> str:
    model = config_value(config, "model_type")
    if model not in MODELS:
        raise ValueError(f"config has model_type={model!r}: layers of {', '.join(map(repr, MODELS))} are known")
    return str(model)


def _kind(config: Any, layer: int | None, own: int | None) -> str | None:
    """The layer's entry in `layer_types`; the number counts only where entries differ."""
    kinds = config_value(config, "layer_types", None) or []
    differ = len(set(kinds)) > 1
    if layer is None and own is None and differ:
        raise ValueError("layer is missing: layers of this model differ, and these weights do not tell which they are")
    said = [kinds[n] for n in (layer, own) if type(n) is int and 0 <= n < len(kinds)]
    if differ and len(set(said)) > 1:
        raise ValueError(
            f"layer={layer!r} is of another kind (layer_types) than {own}, the layer that the weights name"
        )
    if layer is None:
        layer = own if differ and own is not None else 0
    layers = len(kinds) or config_value(config, "num_hidden_layers", None)
    layer = whole("layer", layer, 0)
    if layers is not None and layer >= whole("config has num_hidden_layers", layers):
        raise ValueError(f"layer={layer}: config has {layers} layers, which count from 0")
    return kinds[layer] if kinds else None


def _window(config: Any, model: str, kind: str | None, both_ways: bool) -> tuple[int, int | None] | None:
    everywhere = model in NO_BIAS and config_value(config, "sliding_window", None)
    if not everywhere and (kind != "sliding_attention" or model in ("llama", "olmo2")):
        return None
    size = config_size(config, "sliding_window")  # counts the token itself
    if not both_ways:
        return size - 1, None
    if isinstance(config, Mapping):  # as in a file, both sides together; an object of transformers has one side
        size = size // 2 + 1
    return size - 1, size - 1


def _rotary(config: Any, kind: str | None) -> Rotary:
    """Theirs. These modules do not put YaRN's mscale_all_dim on the softmax, as DeepSeek's do."""
    given = config_value(config, "rope_parameters", None)
    if kind is not None and isinstance(given, Mapping) and isinstance(given.get(kind), Mapping):
        names = ("head_dim", "hidden_size", "num_attention_heads", "max_position_embeddings")
        config = {name: config_value(config, name, None) for name in names} | {"rope_parameters": given[kind]}
    rope = Rotary.from_config(config)
    if rope.scaling is None or rope.softmax_factor == 1.0:
        return rope
    scaling = {k: v for k, v in rope.scaling.items() if k not in ("mscale", "mscale_all_dim")}
    return Rotary(rope.dim, base=rope.base, scaling={**scaling, "attention_factor": rope.table_factor})
