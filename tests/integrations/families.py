"""The families of transformers that `accelerate` serves, as tiny random models, and what was found out about each.

The tests run every check on every family; tools/models_table.py writes the same cells into docs/models.md.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import transformers

TINY: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
WINDOWS: dict[str, Any] = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
# both, so that there is no routing for a rounding to change
BOTH_EXPERTS: dict[str, Any] = {"num_local_experts": 2, "num_experts_per_tok": 2}

CHECKS = (
    "training", "generate", "beam search", "left padding", "packed", "chunked prefill", "static cache", "torch.compile",
)  # fmt: skip


class Family(NamedTuple):
    """A row of the support matrix.

    models   for whom it stands.
    served   the operations that serve its mixers.
    remains  the class of the mixers that are not replaced, or None.
    limits   the checks it does not pass, and why.
    cache    what its model calls its cache.
    """

    models: str
    config: Callable[[], Any]
    served: tuple[str, ...] = ("flash",)
    remains: str | None = None
    limits: dict[str, str] = {}  # noqa: RUF012 (never changed)
    cache: str = "past_key_values"


def _minimax() -> Any:
    kinds = ["linear_attention", "full_attention", "linear_attention"]
    return transformers.MiniMaxConfig(
        **TINY | BOTH_EXPERTS | {"num_hidden_layers": 3, "layer_types": kinds, "block_size": 4}
    )


def _bailing() -> Any:
    return transformers.BailingHybridConfig(
        vocab_size=61, hidden_size=32, intermediate_size=32, moe_intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, num_local_experts=2, num_experts_per_tok=2, n_group=1,
        topk_group=1, first_k_dense_replace=1, kv_lora_rank=16, qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=16,
        head_dim=16, layer_group_size=2, num_mtp_layers=0, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        max_position_embeddings=256,
    )  # fmt: skip


MAMBA: dict[str, Any] = {
    "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 16, "mamba_n_groups": 2, "mamba_chunk_size": 4,
}  # fmt: skip
HYBRID = {name: size for name, size in TINY.items() if name != "head_dim"}


def _mamba2() -> Any:
    return transformers.Mamba2Config(
        vocab_size=61, hidden_size=32, num_heads=8, head_dim=8, state_size=16, n_groups=2, num_hidden_layers=2,
        chunk_size=4, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip


def _bamba() -> Any:
    return transformers.BambaConfig(**HYBRID, **MAMBA, attn_layer_indices=[1])


def _granite() -> Any:
    return transformers.GraniteMoeHybridConfig(
        **HYBRID, **MAMBA, **BOTH_EXPERTS, layer_types=["mamba", "attention"], shared_intermediate_size=16
    )


def _falcon() -> Any:
    return transformers.FalconH1Config(**HYBRID, **MAMBA, mamba_d_ssm=64)


def _nemotron() -> Any:
    return transformers.NemotronHConfig(
        vocab_size=61, hidden_size=32, intermediate_size=32, layers_block_type=["mamba", "attention", "mlp"],
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, mamba_num_heads=8, mamba_head_dim=8,
        ssm_state_size=16, n_groups=2, chunk_size=4, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip


def _zamba2() -> Any:
    return transformers.Zamba2Config(
        vocab_size=61, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, n_mamba_heads=8, mamba_d_state=16, mamba_ngroups=2, chunk_size=4,
        layers_block_type=["mamba", "hybrid"], use_mem_rope=True, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip


BOTH = ("lightning", "flash")
FAMILIES = {
    "llama": Family("Llama 3", lambda: transformers.LlamaConfig(**TINY)),
    "mistral": Family("Mistral, Ministral", lambda: transformers.MistralConfig(**TINY, sliding_window=5)),
    "qwen3": Family("Qwen 3", lambda: transformers.Qwen3Config(**TINY, **WINDOWS, use_sliding_window=True)),
    "gemma2": Family("Gemma 2", lambda: transformers.Gemma2Config(
        **TINY, **WINDOWS, query_pre_attn_scalar=16, attn_logit_softcapping=2.0
    )),
    "gemma3": Family("Gemma 3, text", lambda: transformers.Gemma3TextConfig(
        **TINY, **WINDOWS, query_pre_attn_scalar=16
    )),
    "gpt_oss": Family("gpt-oss", lambda: transformers.GptOssConfig(**TINY, **WINDOWS, **BOTH_EXPERTS)),
    "phi3": Family("Phi-3, Phi-4", lambda: transformers.Phi3Config(**TINY, sliding_window=5)),
    "olmo2": Family("OLMo 2", lambda: transformers.Olmo2Config(**TINY)),
    "minimax": Family("MiniMax-Text-01, M1", _minimax, ("lightning", "flash")),
    "mamba2": Family("Mamba-2", _mamba2, ("lightning",), cache="cache_params"),
    "bamba": Family("Bamba", _bamba, BOTH),
    "granitemoehybrid": Family("Granite 4 H", _granite, BOTH),
    "falcon_h1": Family("Falcon-H1", _falcon, BOTH),
    "nemotron_h": Family("Nemotron-H", _nemotron, BOTH),
    "zamba2": Family("Zamba2", _zamba2, BOTH),
    "bailing_hybrid": Family(
        "Ling 3.0", _bailing, ("flash",), "BailingHybridDeltaAttention",
        {"packed": "its delta layers, which stay transformers' own, mix the sequences"},
    ),
}  # fmt: skip
