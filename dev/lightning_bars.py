"""The rows of issue 6's table with `auto`: share of a copy's bandwidth over 4u forward and 7u backward.

    PYTHONPATH=. python3 dev/lightning_bars.py
"""
import gc
import random
import torch
import fulmen
from fulmen.hardware import TARGETS
from fulmen.lightning import triton as fused
from fulmen.lightning.op import Residuals, spec_of
from fulmen import dispatch
from timing import timeit

src = torch.empty(1 << 29, dtype=torch.int8, device="cuda"); dst = torch.empty_like(src)
bw = 2 * src.numel() / timeit(lambda: dst.copy_(src))
random.seed(1)
lengths = [random.randint(100, 30000) for _ in range(16)]
rows = [((4, 32, 8192, 64), None), ((2, 32, 8192, 128), None), ((1, 64, 4096, 128), None), ((1, 16, 32768, 128), None),
        ((1, 8, 65536, 64), None), ((3, 50, 5000, 64), None), ((1, 16, sum(lengths), 128), lengths)]
print(f"copy {bw / 1e9:.2f} TB/s; share of it over 4u forward (without gradients, and with) and 7u backward; peak of both in u")
for shape, packed in rows:
    cu = None if packed is None else torch.tensor([0, *packed], device="cuda").cumsum(0).int()
    q, k, v, do = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    q, k, v = (t.requires_grad_() for t in (q, k, v))
    u = q.numel() * 2
    for slopes in (fulmen.decay.alibi(shape[1]).cuda(), None):
        for name in ("auto", "triton", "triton_split"):
            spec = spec_of(q, k, v, slopes, cu_seqlens=cu)
            took = dispatch.pick("lightning", spec, name).name
            if name != "auto" and name != min(("triton", "triton_split"), key=lambda n: dispatch.kernels("lightning")[n].rank(spec)):
                continue
            call = lambda: fulmen.lightning_attention(q, k, v, slopes, cu_seqlens=cu, backend=name)
            with torch.no_grad():
                f = timeit(call)
            t, o = timeit(call), call()
            b = timeit(lambda: torch.autograd.grad(o, (q, k, v), do, retain_graph=True))
            o = None
            gc.collect()  # what a call left behind would be taken for its own
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated() - 4 * u
            torch.autograd.grad(call(), (q, k, v), do)
            peak = (torch.cuda.max_memory_allocated() - before) / u
            print(f"{str(shape) + (' packed' if packed else ''):28s} {'decay' if slopes is not None else 'none':5s} {name:12s} {took:12s}"
                  f" fwd {4 * u / f / bw:6.1%} {4 * u / t / bw:6.1%} bwd {7 * u / b / bw:6.1%} peak {peak:.2f}u", flush=True)

# Tiles for GPUs with 101,376 bytes of shared memory (sm_86, sm_89, sm_120), on this one: a proxy.
for shape in ((4, 32, 8192, 64), (2, 32, 8192, 128)):
    q, k, v, do = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    u = q.numel() * 2
    for slopes in (fulmen.decay.alibi(shape[1]).cuda(), None):
        spec, x = spec_of(q, k, v, slopes), Residuals(q, k, v, slopes, None, None)
        run = {pass_: (lambda *a, at=at: at(a[0], TARGETS[89], *a[2:])) for pass_, at in (("f", fused.forward_launches), ("b", fused.backward_launches))}
        f = timeit(lambda: fused.run_forward(run["f"], spec, x))
        b = timeit(lambda: fused.run_backward(run["b"], spec, x, do, None))
        print(f"{shape} {'decay' if slopes is not None else 'none'} triton with the tiles of sm_89, {fused.config(spec, TARGETS[89])}:"
              f" fwd {4 * u / f / bw:6.1%} bwd {7 * u / b / bw:6.1%}", flush=True)
