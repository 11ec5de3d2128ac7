"""Sequences of different lengths in one call, without padding: softmax and lightning attention.

python examples/packed.py
"""

import torch

import fulmen

device = "cuda" if torch.cuda.is_available() else "cpu"
dtype = torch.bfloat16 if device == "cuda" else torch.float32
lengths = [100, 1, 250, 49]
H, D = 8, 64

q, k, v = (torch.randn(1, H, sum(lengths), D, device=device, dtype=dtype) for _ in range(3))
cu_seqlens = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32, device=device)
decay = fulmen.decay.alibi(H).to(device)

softmax = fulmen.flash_attention(q, k, v, causal=True, cu_seqlens_q=cu_seqlens)
linear, states = fulmen.lightning_attention_with_state(q, k, v, decay, cu_seqlens=cu_seqlens)
print("one state for each sequence:", tuple(states.shape))

tolerance = 1e-4 if dtype == torch.float32 else 3e-2
for i, (begin, end) in enumerate(zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True)):
    alone = [x[:, :, begin:end] for x in (q, k, v)]  # the same, one by one
    for packed, single in (
        (softmax, fulmen.flash_attention(*alone, causal=True)),
        (linear, fulmen.lightning_attention(*alone, decay)),
    ):
        error = (packed[:, :, begin:end] - single).abs().max() / single.abs().max()
        assert error < tolerance, (i, float(error))
print(f"{len(lengths)} sequences agree with single calls")
