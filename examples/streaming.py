"""Lightning attention over a sequence that arrives in parts: the state carries it on, and its size never grows.

python examples/streaming.py
"""

import torch

import fulmen

device = "cuda" if torch.cuda.is_available() else "cpu"
B, H, N, D = 1, 8, 1000, 64

q, k, v = (torch.randn(B, H, N, D, device=device) for _ in range(3))
decay = fulmen.decay.alibi(H).to(device)
whole = fulmen.lightning_attention(q, k, v, decay)

state, parts = None, []
for begin, end in [(0, 700), (700, 900), *((t, t + 1) for t in range(900, N))]:  # a prompt, a part, single tokens
    part = slice(begin, end)
    o, state = fulmen.lightning_attention_with_state(
        q[:, :, part], k[:, :, part], v[:, :, part], decay, initial_state=state
    )
    parts.append(o)

error = (torch.cat(parts, dim=2) - whole).abs().max() / whole.abs().max()
print(f"{len(parts)} parts, state {tuple(state.shape)} in {state.dtype}, relative difference {error:.1e}")
assert error < 1e-4
