"""Tile ladder of the lightning sweep kernel on a GPU: every candidate is checked against fp64, then timed.

    PYTHONPATH=. python3 dev/ladder_lightning.py

Prints, per shape and pass, the share of the copy bandwidth over the ideal bytes (4u forward, 7u backward).
What was learnt stands in `dev/ladder_lightning.md`.
"""

import time

import torch
import triton

from fulmen import hardware
from fulmen.lightning import reference, triton_split
from fulmen.lightning import triton as fused
from fulmen.lightning.op import Residuals, spec_of
from fulmen.lightning.triton import Config

DEV = torch.device("cuda")


def bench(fn):
    return triton.testing.do_bench(fn, warmup=15, rep=60, return_mode="median")


def copy_bandwidth():
    src = torch.empty(1 << 30, dtype=torch.uint8, device=DEV).random_()
    dst = torch.empty_like(src)
    return 2 * src.numel() / bench(lambda: dst.copy_(src)) * 1e3


class Case:
    def __init__(self, B, H, N, D, dtype, decay, plan=fused):
        make = lambda: torch.randn(B, H, N, D, device=DEV, dtype=dtype)
        self.q, self.k, self.v, self.do, self.o, self.dq, self.dk, self.dv = (make() for _ in range(8))
        self.decay = torch.rand(H, device=DEV) * 0.1 if decay else None
        self.spec = spec_of(self.q, self.k, self.v, self.decay)
        self.plan, self.hw = plan, hardware.of(DEV)

    def launches(self, pass_):
        x = Residuals(self.q, self.k, self.v, self.decay, None, None)
        if pass_ == "forward":
            return self.plan.forward_launches(self.spec, self.hw, x, self.o, None)
        grads = fused.Gradients(self.dq, self.dk, self.dv)
        return self.plan.backward_launches(self.spec, self.hw, x, self.do, None, grads, None)

    def run(self, pass_):
        fused.run(self.launches(pass_), DEV)

    def error(self, pass_):
        """Relative error of head (0, 0) against fp64."""
        part = [x[:1, :1].double().requires_grad_() for x in (self.q, self.k, self.v)]
        s = None if self.decay is None else self.decay[:1]
        o, _ = reference.attend(lambda *a: reference.chunked(*a, C=256), *part, s)
        grads = torch.autograd.grad(o, part, self.do[:1, :1].double())
        pairs = [(self.o, o)] if pass_ == "forward" else zip((self.dq, self.dk, self.dv), grads, strict=True)
        return max(((a[:1, :1].double() - b).norm() / b.norm()).item() for a, b in pairs)


def ladder(shape, dtype, decays, forward, backward, groups=(None,)):
    bw = copy_bandwidth()
    print(f"## {shape} {dtype} copy {bw / 1e12:.2f} TB/s", flush=True)
    config, sweeps = fused.config, fused.backward_sweeps
    for decay in decays:
        case = Case(*shape, dtype, decay)
        u = case.q.numel() * case.q.element_size()
        for pass_, cfgs, units in (("forward", forward, 4), ("backward", backward, 7)):
            for cfg in cfgs:
                for group in groups if pass_ == "backward" else (None,):
                    fused.config = lambda *_, cfg=cfg: Config(*cfg)
                    fused.backward_sweeps = sweeps if group is None else lambda *_, group=group: group
                    try:
                        t0 = time.time()
                        case.run(pass_)
                        torch.cuda.synchronize()
                        first = time.time() - t0
                        err = case.error(pass_)
                        ms = bench(lambda: case.run(pass_))
                        share = 100 * units * u / (ms * 1e-3) / bw
                        print(f"{'decay' if decay else 'none '} {pass_:8s} {cfg} {group or ''} {ms:.4f} ms"
                              f" {share:.1f} %  err {err:.1e} first {first:.1f} s", flush=True)  # fmt: skip
                    except Exception as e:
                        print(pass_, cfg, type(e).__name__, str(e)[:80], flush=True)
    fused.config, fused.backward_sweeps = config, sweeps


def split():
    for plan in (fused, triton_split):
        for decay in (True, False):
            case = Case(1, 8, 65536, 64, torch.bfloat16, decay, plan)
            case.run("forward"), case.run("backward")
            times = [bench(lambda p=p: case.run(p)) for p in ("forward", "backward")]
            print(
                plan.__name__, "1 8 65536 64", decay, times, case.error("forward"), case.error("backward"), flush=True
            )


def host():
    """Where the host's time goes, per call."""
    import cProfile
    import pstats

    import fulmen

    q, k, v = (torch.randn(1, 8, 512, 64, device=DEV, dtype=torch.bfloat16).requires_grad_() for _ in range(3))
    do, s = torch.randn_like(q), torch.rand(8, device=DEV)

    def timed(fn, n=300):
        for _ in range(20):
            fn()
        torch.cuda.synchronize()
        t0 = time.perf_counter()
        for _ in range(n):
            fn()
        return (time.perf_counter() - t0) / n * 1e6

    o = fulmen.lightning_attention(q, k, v, s)
    back = lambda: torch.autograd.grad(o, (q, k, v), do, retain_graph=True)
    with torch.no_grad():
        print("host us: forward, no grad", timed(lambda: fulmen.lightning_attention(q, k, v, s)))
    print("host us: forward, grad", timed(lambda: fulmen.lightning_attention(q, k, v, s)), "backward", timed(back))
    sdpa = lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    print("host us: sdpa forward", timed(sdpa))
    for fn in (lambda: fulmen.lightning_attention(q, k, v, s), back):
        profile = cProfile.Profile()
        profile.runcall(lambda fn=fn: [fn() for _ in range(300)])
        pstats.Stats(profile).sort_stats("tottime").print_stats(14)


if __name__ == "__main__":
    host()
    wide = [(32, 64, 8, 2), (32, 64, 4, 2), (32, 64, 4, 3), (32, 64, 4, 4), (16, 64, 4, 3), (16, 64, 4, 4)]
    ladder((1, 32, 8192, 256), torch.bfloat16, (True, False), wide, wide)
    ladder(
        (4, 32, 4096, 64), torch.float32, (True,), [(16, 32, 4, 2), (16, 64, 4, 2)], [(16, 32, 4, 2), (16, 64, 4, 2)]
    )
    ladder((2, 32, 4096, 128), torch.float32, (True,), [(16, 32, 4, 2)], [(16, 32, 4, 2)])
    split()
