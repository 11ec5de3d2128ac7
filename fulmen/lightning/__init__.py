"""Linear attention with per-head decay. `op.py` tells the story; each other file is a backend."""

from fulmen.lightning.op import lightning_attention, lightning_attention_with_state, lightning_attn_func

__all__ = ["lightning_attention", "lightning_attention_with_state", "lightning_attn_func"]
