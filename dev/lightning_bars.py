"""The rows of issue 6's table with `auto`: share of a copy's bandwidth over 4u forward and 7u backward.

    PYTHONPATH=. python3 dev/lightning_bars.py
"""
import os
import random
import torch
import fulmen
from fulmen.lightning.op import spec_of
from fulmen import dispatch
from timing import timeit

WARM = os.environ.get('WARM')
src = torch.empty(1 << 29, dtype=torch.int8, device="cuda"); dst = torch.empty_like(src)
bw = 2 * src.numel() / timeit(lambda: dst.copy_(src))
random.seed(1)
lengths = [random.randint(100, 30000) for _ in range(16)]
rows = [((4, 32, 8192, 64), None), ((2, 32, 8192, 128), None), ((1, 64, 4096, 128), None), ((1, 16, 32768, 128), None),
        ((1, 8, 65536, 64), None), ((3, 50, 5000, 64), None), ((1, 16, sum(lengths), 128), lengths)]
for shape, packed in rows:
    if WARM and WARM != str(rows.index((shape, packed))):
        continue
    cu = None if packed is None else torch.tensor([0, *packed], device="cuda").cumsum(0).int()
    q, k, v, do = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    q, k, v = (t.requires_grad_() for t in (q, k, v))
    u = q.numel() * 2
    for slopes in (fulmen.decay.alibi(shape[1]).cuda(), None):
        names = ["auto"] if packed is None else ["triton", "triton_split"]
        for name in names:
            call = lambda: fulmen.lightning_attention(q, k, v, slopes, cu_seqlens=cu, backend=name)
            took = dispatch.pick("lightning", spec_of(q, k, v, slopes, cu_seqlens=cu), name).name
            o = call()
            f, b = timeit(call), timeit(lambda: torch.autograd.grad(o, (q, k, v), do, retain_graph=True))
            print(shape, "packed" if packed else "", "decay" if slopes is not None else "none", name, took, f"fwd {4*u/f/bw:.1%} bwd {7*u/b/bw:.1%}", flush=True)
