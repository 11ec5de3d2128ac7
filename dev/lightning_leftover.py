"""Heads left over after whole rounds of blocks: in segments, or each in one block (backend cuda, in ms).

    PYTHONPATH=. python3 dev/lightning_leftover.py
"""
import torch
import fulmen
from fulmen.lightning import cuda
from fulmen.lightning.op import spec_of
from timing import timeit

src = torch.empty(1 << 29, dtype=torch.int8, device="cuda"); dst = torch.empty_like(src)
bw = 2 * src.numel() / timeit(lambda: dst.copy_(src))
rows = [(3, 50, 5000, 64), (1, 136, 8192, 64), (2, 75, 8192, 64), (4, 40, 8192, 64), (2, 86, 8192, 64), (3, 99, 4096, 64),
        (1, 70, 8192, 128), (1, 80, 8192, 128), (1, 88, 4096, 128)]
print(f"copy {bw / 1e9:.2f} TB/s; ms and share of it: forward (4u), forward that saves, backward (7u)")
for shape in rows:
    q, k, v, do = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    q, k, v = (t.requires_grad_() for t in (q, k, v))
    u = q.numel() * 2
    for slopes in (fulmen.decay.alibi(shape[1]).cuda(), None):
        call = lambda: fulmen.lightning_attention(q, k, v, slopes, backend="cuda")
        outs = {}
        for worth in (1 << 30, 2, 1 << 30, 2):  # twice: what drifts shows
            cuda.WORTH_CUTTING = dict.fromkeys(cuda.WORTH_CUTTING, worth)
            cut = cuda.cut_of(spec_of(q, k, v, slopes))
            with torch.no_grad():
                f = timeit(call, 21)
            t, o = timeit(call, 21), call()
            b = timeit(lambda: torch.autograd.grad(o, (q, k, v), do, retain_graph=True), 21)
            outs[worth] = [o.detach(), *torch.autograd.grad(o, (q, k, v), do)]
            print(f"{str(shape):20s} {'decay' if slopes is not None else 'none':5s} whole {cut.whole:3d} of {shape[0] * shape[1]:3d}, {cut.number} segments: "
                  + ", ".join(f"{x * 1e3:7.1f} us {n * u / x / bw:6.1%}" for x, n in ((f, 4), (t, 4), (b, 7))), flush=True)
        one, two = outs.values()
        print("    differ by", *(f"{((a.float() - b.float()).norm() / a.float().norm()).item():.1e}" for a, b in zip(one, two)), flush=True)
