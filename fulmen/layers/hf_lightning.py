"""Lightning attention modules of Hugging Face as `LightningAttention`: its arguments, and tensors under its names."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fulmen.layers.inputs import number
from fulmen.layers.rotary import Rotary, check_model, config_head_dim, config_size, config_value

MINIMAX_BUFFERS = ("slope_rate", "query_decay", "key_decay", "diagonal_decay")
RING_NAMES = {
    "query_key_value": "qkv_proj",
    "dense": "out_proj",
    "g_proj": "output_gate",
    "g_norm": "norm",
    "query_layernorm": "q_norm",
    "key_layernorm": "k_norm",
}
SALA_NAMES = {"o_proj": "out_proj", "z_proj": "output_gate", "o_norm": "norm"}
SALA_SCALES = {"1/sqrt(d)": -0.5, "1/d": -1.0, None: 0.0}


def converted(tensors: dict[str, Tensor], config: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The arguments of a layer of MiniMax, Ring (Bailing) or MiniCPM-SALA, told apart by names, and its tensors."""
    if "query_key_value.weight" in tensors:
        options = _ring_options(config)
        tensors = _from_ring(tensors, options["num_heads"], options["head_dim"])
    elif "q_proj.weight" in tensors:
        options = _sala_options(config)
        tensors = _from_sala(tensors, options)
    else:
        options = _minimax_options(config)
    return options, {name: x for name, x in tensors.items() if name not in MINIMAX_BUFFERS}


def _minimax_options(config: Any) -> dict[str, Any]:
    return {
        "embed_dim": config_size(config, "hidden_size"),
        "num_heads": config_size(config, "num_attention_heads"),
        "head_dim": config_head_dim(config),
        "activation": config_value(config, "hidden_act"),
        "preset": "minimax",
    }


def _ring_options(config: Any) -> dict[str, Any]:
    head_dim = config_head_dim(config)
    bias = bool(config_value(config, "use_bias", False))
    if bias != bool(config_value(config, "use_qkv_bias", False)):
        raise NotImplementedError("config has use_bias and use_qkv_bias differ: the layer has one bias for both")
    part = number("config has partial_rotary_factor", config_value(config, "partial_rotary_factor", 1.0))
    turned = int(head_dim * part)
    return {
        "embed_dim": config_size(config, "hidden_size"),
        "num_heads": config_size(config, "num_attention_heads"),
        "head_dim": head_dim,
        "preset": "ring",
        "activation": "silu" if config_value(config, "linear_silu", False) else None,
        "qk_norm": "before" if config_value(config, "use_qk_norm", True) else None,
        "rope": Rotary.from_config(config, turned) if config_value(config, "linear_rope", True) else None,
        "output_norm": config_value(config, "group_norm_size", 1),
        "norm_eps": config_value(config, "rms_norm_eps", 1e-6),
        "bias": bias,
    }


def _from_ring(tensors: dict[str, Tensor], heads: int, head_dim: int) -> dict[str, Tensor]:
    """Our names, and q, k, v of one head after the other instead of all q, all k, all v."""
    renamed = {}
    for name, x in tensors.items():
        part, dot, rest = name.partition(".")
        if part == "query_key_value" and x.shape[0] == 3 * heads * head_dim:
            x = x.unflatten(0, (3, heads, head_dim)).transpose(0, 1).flatten(0, 2)
        renamed[RING_NAMES.get(part, part) + dot + rest] = x
    return renamed


def _sala_options(config: Any) -> dict[str, Any]:
    check_model(config, "lightning_head_dim", "MiniMax, Ring (Bailing) and MiniCPM-SALA")
    head_dim = config_size(config, "lightning_head_dim")
    scale = config_value(config, "lightning_scale", None)
    if scale not in SALA_SCALES:
        known = ", ".join(map(repr, SALA_SCALES))
        raise NotImplementedError(f"config has lightning_scale={scale!r}: must be one of {known}")
    return {
        "embed_dim": config_size(config, "hidden_size"),
        "num_heads": config_size(config, "lightning_nh"),
        "num_kv_heads": config_size(config, "lightning_nkv"),
        "head_dim": head_dim,
        "preset": "sala",
        "scale": head_dim ** SALA_SCALES[scale],
        "qk_norm": "before" if config_value(config, "qk_norm", True) else None,
        "rope": Rotary.from_config(config, head_dim) if config_value(config, "lightning_use_rope", True) else None,
        "output_norm": 1 if config_value(config, "use_output_norm", False) else None,
        "gate": bool(config_value(config, "use_output_gate", False)),
        "norm_eps": config_value(config, "rms_norm_eps", 1e-6),
        "bias": bool(config_value(config, "attention_bias", False)),
    }


def _from_sala(tensors: dict[str, Tensor], options: dict[str, Any]) -> dict[str, Tensor]:
    """Our names, and one projection: for each head of k and v its queries, its key and its value."""
    parts = [f"{name}_proj" for name in "qkv"]
    renamed = {}
    for name, x in tensors.items():
        part, dot, rest = name.partition(".")
        if part not in parts:
            renamed[SALA_NAMES.get(part, part) + dot + rest] = x
    for kind in ("weight", "bias"):
        found = [tensors.get(f"{part}.{kind}") for part in parts]
        if all(x is not None and x.shape[0] % options["num_kv_heads"] == 0 for x in found):
            heads = [x.unflatten(0, (options["num_kv_heads"], -1)) for x in found if x is not None]
            renamed[f"qkv_proj.{kind}"] = torch.cat(heads, 1).flatten(0, 1)
    return renamed
