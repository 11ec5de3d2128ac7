"""How often the forward saves a state (D = 64): the saving forward, the backward, both, and what dq loses.

    PYTHONPATH=. python3 dev/lightning_saved.py
"""
import torch
import fulmen
from fulmen.lightning import cuda, triton as fused
from fulmen.lightning.op import Residuals, spec_of
from timing import timeit

src = torch.empty(1 << 29, dtype=torch.int8, device="cuda"); dst = torch.empty_like(src)
bw = 2 * src.numel() / timeit(lambda: dst.copy_(src))
print(f"copy {bw / 1e9:.2f} TB/s; share of it over 4u, 4u (saving), 7u; us of saving forward + backward; error of dq against fp32")
for shape in ((4, 32, 8192, 64), (4, 32, 32768, 64), (3, 50, 5000, 64), (1, 8, 65536, 64)):
    q, k, v, do = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    u = q.numel() * 2
    for s in (fulmen.decay.alibi(shape[1]).cuda(), None):
        spec, x = spec_of(q, k, v, s), Residuals(q, k, v, s, None, None)
        want = fused.run_backward(fused.backward_launches, spec._replace(dtype=torch.float32), Residuals(q.float(), k.float(), v.float(), s, None, None), do.float(), None)[0] if shape[2] < 20000 else None
        t = timeit(lambda: fused.run_forward(fused.forward_launches, spec, x), 21)
        print(f"{str(shape):20s} {'decay' if s is not None else 'none':5s} triton fwd {4 * u / t / bw:6.1%}")
        for rows in (512, 1024, 2048, 512, 1024, 2048):
            cuda.SAVED_ROWS = rows
            saved = x._replace(saved=q.new_empty(cuda.saves(spec)))
            f, t, b = (timeit(g, 21) for g in (lambda: cuda.forward(spec, x), lambda: cuda.forward(spec, saved), lambda: cuda.backward(spec, saved, do, None)))
            dq = cuda.backward(spec, saved, do, None)[0]
            error = float("nan") if want is None else ((dq.float() - want).norm() / want.norm()).item()
            print(f"    every {rows:4d}: {4 * u / f / bw:6.1%} {4 * u / t / bw:6.1%} {7 * u / b / bw:6.1%} {1e3 * (t + b):8.1f} us  {error:.2e}", flush=True)
