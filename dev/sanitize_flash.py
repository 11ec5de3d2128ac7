"""compute-sanitizer --tool memcheck python3 dev/sanitize_flash.py: small calls of every kind, both passes."""
import torch
from fulmen import flash_attention
from fulmen.flash import triton as ft

def call(NQ, NK, D, E, H=4, HK=2, lens=None, dtype=torch.bfloat16, **kw):
    B = 1 if lens else 2
    mk = lambda h, n, d: torch.randn(B, h, n, d, device="cuda", dtype=dtype, requires_grad=True)
    q, k, v = mk(H, NQ, D), mk(HK, NK, D), mk(HK, NK, E)
    if lens:
        kw |= {n: torch.tensor(x, dtype=torch.int32, device="cuda") for n, x in zip(("cu_seqlens_q", "cu_seqlens_k"), lens)}
    o = flash_attention(q, k, v, backend="triton", **kw)
    torch.autograd.grad(o, (q, k, v), torch.randn_like(o))
    torch.cuda.synchronize()

for flops in (8e9, 0):  # pointers, then the copy engine
    ft.TMA_FLOPS = flops
    for D, E in ((64, 64), (128, 128), (256, 256), (192, 128), (80, 40)):
        call(333, 333, D, E, causal=True)
    call(200, 301, 64, 64)
    call(301, 200, 64, 64, causal=True)
    call(500, 500, 128, 128, causal=True, window=(100, None), softcap=20.0, sinks=torch.randn(4, device="cuda"))
call(300, 310, 64, 64, lens=([0, 100, 100, 293, 300], [0, 40, 141, 300, 310]), causal=True)
call(300, 310, 128, 128, lens=([0, 100, 100, 293, 999], [0, 40, -5, 300, 310]))  # wrong ends stay inside
call(1, 1000, 128, 128, causal=True)
print("done")
