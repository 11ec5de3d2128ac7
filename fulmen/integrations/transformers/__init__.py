"""Hugging Face transformers on fulmen's kernels.

    accelerated = fulmen.integrations.transformers.accelerate(model)     # every mixer that can be served
    accelerated.undo()

    fulmen.integrations.transformers.register()                          # softmax attention by name alone
    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="fulmen")

| file | what it serves |
|---|---|
| attention.py | softmax attention, through transformers' attention and mask interfaces |
| fused.py | projections and RoPE around it |
| lightning.py, cache.py | the lightning layer of MiniMax, and its model's cache |
| mamba2.py | the Mamba-2 mixers |
| simple_gla.py | the linear layers of Ring and Ling, through the functions of fla they call |
| packing.py | tells layers of packed sequences |
| models.py | `accelerate`: finds these in a model |
"""

from fulmen.integrations.transformers.attention import register, unregister
from fulmen.integrations.transformers.models import Accelerated, accelerate

__all__ = ["Accelerated", "accelerate", "register", "unregister"]
