"""The families of transformers that `accelerate` serves, as tiny random models, and what was found out about each.

The tests run every check on every family; tools/models_table.py writes the same cells into docs/models.md.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import transformers

TINY = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
WINDOWS = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
BOTH_EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 2}  # no routing that a rounding could change

CHECKS = ("training", "generate", "beam search", "left padding", "packed", "chunked prefill", "static cache")


class Family(NamedTuple):
    """A row of the support matrix.

    models   for whom it stands.
    served   the operations that serve its mixers.
    remains  the class of the mixers that are not replaced, or None.
    limits   the checks it does not pass, and why.
    """

    models: str
    config: Callable[[], Any]
    served: tuple[str, ...] = ("flash",)
    remains: str | None = None
    limits: dict[str, str] = {}  # noqa: RUF012 (never changed)


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
    "bailing_hybrid": Family(
        "Ling 3.0", _bailing, ("flash",), "BailingHybridDeltaAttention",
        {"packed": "its delta layers, which stay transformers' own, mix the sequences"},
    ),
}  # fmt: skip
