"""Variants of lightning/cuda_sm90.cu by macros, side by side: right, then timed.   PYTHONPATH=. python3 dev/lightning_variants.py [ncu]"""
import sys
from concurrent.futures import ThreadPoolExecutor
import torch
import fulmen
from fulmen import cuda as build
from fulmen.lightning import cuda, triton as fused
from fulmen.lightning.op import Residuals, spec_of
from timing import timeit

TRIALS = {"now": {}}
plain, extra = cuda.variant, {}
cuda.variant = lambda spec, cfg: (lambda v: v._replace(macros=v.macros + tuple(extra.items())))(plain(spec, cfg))
ROWS = [(2, 32, 8192, 128), (1, 64, 4096, 128), (1, 16, 32768, 128), (1, 70, 8192, 128), (4, 32, 8192, 64)]
dev = torch.device("cuda", 0)


def variants():
    global extra
    for e in TRIALS.values():
        extra = e
        for D in (64, 128):
            for decay in (True, False):
                for shape in ((4, 32, 8192, D), (1, 8, 65536, D)):
                    q = torch.empty(shape, dtype=torch.bfloat16, device=dev if torch.cuda.is_available() else "meta")
                    spec = spec_of(q, q, q, torch.empty(shape[1], device=q.device) if decay else None)
                    for what in ("forward", "training", "backward", "state"):
                        yield cuda.variant(spec, cuda.config(spec, what))


if __name__ == "__main__":
    if not torch.cuda.is_available():
        import fulmen.hardware as h; h.of = lambda d: h.TARGETS[90]
    with ThreadPoolExecutor(16) as pool:
        print(len(list(pool.map(build.cubin, dict.fromkeys(variants())))), "variants")
    if not torch.cuda.is_available():
        raise SystemExit
    src = torch.empty(1 << 29, dtype=torch.int8, device="cuda"); dst = torch.empty_like(src)
    bw = 2 * src.numel() / timeit(lambda: dst.copy_(src))
    for shape in ROWS[:1] if sys.argv[1:] else ROWS:
        q, k, v, do = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(4))
        u = q.numel() * 2
        for s in (fulmen.decay.alibi(shape[1]).cuda(), None):
            spec = spec_of(q, k, v, s)
            x = Residuals(q, k, v, s, None, None)
            if sys.argv[1:]:
                extra = {}
                x = x._replace(saved=q.new_empty(cuda.saves(spec)))
                cuda.forward(spec, x); cuda.backward(spec, x, do, None)
                torch.cuda.synchronize()
                continue
            spec32, x32 = spec._replace(dtype=torch.float32), Residuals(q.float(), k.float(), v.float(), s, None, None)
            want = (fused.run_forward(fused.forward_launches, spec32, x32)[0], *fused.run_backward(fused.backward_launches, spec32, x32, do.float(), None)[:3])
            for name, extra in TRIALS.items():
                saved = x._replace(saved=q.new_empty(cuda.saves(spec))) if cuda.saves(spec) else x
                got = (cuda.forward(spec, saved)[0], *cuda.backward(spec, saved, do, None)[:3])
                errors = [((a.float() - b).norm() / b.norm()).item() for a, b in zip(got, want)]
                f, t, b = (timeit(g, 15) for g in (lambda: cuda.forward(spec, x), lambda: cuda.forward(spec, saved), lambda: cuda.backward(spec, saved, do, None)))
                print(f"{str(shape):20s} {'decay' if s is not None else 'none':5s} {name:18s} fwd {4 * u / f / bw:6.1%} {4 * u / t / bw:6.1%} bwd {7 * u / b / bw:6.1%}  "
                      + " ".join(f"{e:.1e}" for e in errors) + (" WRONG" if max(errors) > 4e-3 else ""), flush=True)
