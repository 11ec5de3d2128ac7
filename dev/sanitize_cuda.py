"""compute-sanitizer --tool memcheck python3 dev/sanitize_cuda.py: small calls of every kind, the backend `cuda`."""
import torch
from fulmen import flash_attention


def call(NQ, NK, D, E, H=4, HK=2, B=2, lens=None, dtype=torch.bfloat16, **kw):
    B = 1 if lens else B
    mk = lambda h, n, d: torch.randn(B, h, n, d, device="cuda", dtype=dtype)
    q, k, v = mk(H, NQ, D), mk(HK, NK, D), mk(HK, NK, E)
    if lens:
        kw |= {n: torch.tensor(x, dtype=torch.int32, device="cuda") for n, x in zip(("cu_seqlens_q", "cu_seqlens_k"), lens)}
    o = flash_attention(q, k, v, backend="cuda", **kw)
    torch.cuda.synchronize()
    assert torch.isfinite(o).all()


for D, E in ((64, 64), (128, 128), (256, 256), (192, 128)):
    call(777, 777, D, E, causal=True)
    call(700, 801, D, E)
    call(601, 700, D, E, causal=True, window=(100, None), softcap=20.0, sinks=torch.randn(4, device="cuda"))
    call(1, 1000, D, E, causal=True)
    call(700, 700, D, E, lens=([0, 100, 100, 693, 700], [0, 40, 141, 600, 700]), causal=True)
    call(700, 700, D, E, lens=([0, 100, 100, 693, 999], [0, 40, -5, 600, 700]))  # wrong ends stay inside
    call(3, 2500, D, E, 4, 1, 1, causal=True)  # keys split
    call(200, 3000, D, E, 2, 2, 1, causal=True, window=(2000, None), softcap=20.0, sinks=torch.randn(2, device="cuda"))
for D in (64, 128):  # the short kernels
    for B, H, N in ((1, 1, 128), (8, 4, 128), (32, 8, 100), (32, 8, 249), (2, 4, 333), (4, 8, 57), (4, 8, 73), (8, 8, 153), (8, 8, 185)):
        call(N, N, D, D, H, max(1, H // 2), B)
        call(N, N + 7, D, D, H, max(1, H // 2), B, causal=True, dtype=torch.float16)
    call(300, 77, D, D, 8, 4, 4)
    for N in (57, 77, 100, 150, 185, 250):  # with query heads of a group together
        call(9, N, D, D, 32, 8, 16, causal=True)
    call(300, 120, D, D, 8, 4, 4, causal=True)  # rows that see no key
    call(500, 256, D, D, 8, 8, 4, causal=True)
print("done")
