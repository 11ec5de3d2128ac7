"""Layers with their caches: prompts of different lengths in one batch, then token by token.

python examples/layer_cache.py
"""

import torch
from torch import Tensor, nn

from fulmen.layers import GroupedQueryAttention, KVCache, LightningAttention, StateCache


class Block(nn.Module):
    """A lightning layer and a softmax layer, each with a cache of its own kind."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.linear = LightningAttention(dim, 4, preset="minimax", layer=0, num_layers=2)
        self.softmax = GroupedQueryAttention(dim, 8, 2, causal=True, rope={"base": 10_000.0})

    def forward(self, x: Tensor, caches: tuple[StateCache, KVCache], mask: Tensor | None = None) -> Tensor:
        x = x + self.linear(x, cache=caches[0], mask=mask)
        return x + self.softmax(x, cache=caches[1], mask=mask)


torch.manual_seed(0)
block = Block(64).eval()
x = torch.randn(2, 30, 64)
mask = torch.ones(2, 20, dtype=torch.bool)
mask[0, :8] = False  # the first prompt has 12 tokens, padded on the left; the second has 20

with torch.inference_mode():
    caches = StateCache(), KVCache(max_length=64)  # allocated once
    block(x[:, :20], caches, mask)
    steps = [block(x[:, t : t + 1], caches) for t in range(20, 30)]
    print("rows of the cache hold", caches[1].lengths.tolist(), "tokens")

    alone = StateCache(), KVCache()  # the first row, without padding, all tokens at once
    whole = block(x[:1, 8:], alone)
error = (torch.cat(steps, dim=1)[:1] - whole[:, 12:]).abs().max()
print(f"step by step and at once differ by {error:.1e}")
assert error < 1e-4
