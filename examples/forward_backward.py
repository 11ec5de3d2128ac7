"""Softmax and lightning attention, forward and backward, and which backend served the calls.

python examples/forward_backward.py
"""

import torch

import fulmen

device = "cuda" if torch.cuda.is_available() else "cpu"
dtype = torch.bfloat16 if device == "cuda" else torch.float32
B, H, N, D = 2, 8, 512, 64

q, k, v = (torch.randn(B, H, N, D, device=device, dtype=dtype, requires_grad=True) for _ in range(3))

o = fulmen.flash_attention(q, k, v, causal=True)
dq, dk, dv = torch.autograd.grad(o, (q, k, v), torch.randn_like(o))
print("softmax attention:", tuple(o.shape), "dq of norm", f"{dq.norm():.1f}")

decay = fulmen.decay.alibi(H).to(device)  # one slope for each head
o = fulmen.lightning_attention(q, k, v, decay)
dq, dk, dv = torch.autograd.grad(o, (q, k, v), torch.randn_like(o))
print("lightning attention:", tuple(o.shape), "dq of norm", f"{dq.norm():.1f}")

print(fulmen.explain("flash", q, k, v, causal=True))
print(fulmen.explain("lightning", q, k, v, decay))
