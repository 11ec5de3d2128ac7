"""Times tile choices of fulmen/flash/triton.py, pass by pass: PYTHONPATH=. python3 dev/flash_tiles.py (on the GPU)."""
import sys, time, statistics, concurrent.futures as cf, multiprocessing as mp
import torch

SHAPES = [(4, 32, 32, 4096, 64, 64), (2, 12, 12, 2048, 64, 64), (2, 16, 16, 8192, 128, 128), (1, 32, 32, 4096, 128, 128),
          (1, 40, 8, 2048, 128, 128), (2, 16, 16, 4096, 256, 256), (1, 32, 32, 4096, 192, 128)]
C = {
    ("forward", 64): [(64, 128, 4, 2), (64, 128, 4, 3), (64, 64, 4, 3), (64, 64, 4, 4), (128, 128, 8, 3)],
    ("forward", 128): [(64, 64, 4, 3), (64, 64, 4, 4), (128, 64, 4, 2), (128, 64, 8, 3), (128, 128, 8, 3)],
    ("forward", 256): [(64, 64, 4, 2), (128, 64, 8, 2), (64, 32, 4, 3), (64, 64, 8, 2), (128, 32, 8, 3)],
    ("dq", 64): [(64, 64, 4, 3), (128, 64, 8, 3), (64, 64, 4, 4), (64, 128, 4, 2)],
    ("dq", 128): [(128, 64, 8, 3), (64, 64, 4, 2), (64, 64, 4, 3)],
    ("dq", 256): [(64, 64, 8, 2), (64, 32, 4, 2), (64, 64, 4, 1), (128, 32, 8, 2)],
    ("dkdv", 64): [(64, 128, 4, 2), (64, 64, 4, 3), (64, 64, 4, 2), (128, 64, 8, 3), (64, 64, 4, 4)],
    ("dkdv", 128): [(64, 64, 4, 2), (128, 64, 8, 3), (128, 64, 8, 2), (64, 32, 4, 3)],
    ("dkdv", 256): [(64, 32, 8, 2), (64, 64, 8, 2), (64, 64, 8, 1), (64, 32, 8, 3)],
}


def setup(shape, causal):
    from fulmen.flash import triton as ft
    from fulmen.flash.op import FlashSpec, Residuals
    B, H, HK, N, D, E = shape
    mk = lambda h, d, dt=torch.bfloat16: torch.randn(B, h, N, d, device="cuda", dtype=dt)
    q, k, v, o, do = mk(H, D), mk(HK, D), mk(HK, E), mk(H, E), mk(H, E)
    lse = torch.randn(B, H, N, device="cuda") + 9
    spec = FlashSpec(B, H, HK, N, N, D, E, torch.bfloat16, q.device, D**-0.5, None, 0 if causal else None, needs_grad=True)
    x = Residuals(q, k, v)
    return ft, spec, x, o, do, lse


def launch_of(ft, spec, x, o, do, lse, pass_, c, hpp=None):
    from fulmen import hardware
    orig = ft.config
    ft.config = lambda s, h, p: ft.Config(*c)
    try:
        hw = hardware.of(x.q.device)
        if pass_ == "forward":
            return ft.forward_launch(spec, hw, x, o, lse)
        h = hpp or ft.heads_summed(spec, hw)
        heads = spec.H // h
        dt = torch.float32 if h < spec.group else torch.bfloat16
        dk = torch.empty(spec.B, heads, spec.N_KV, spec.D, device="cuda", dtype=dt)
        dv = torch.empty(spec.B, heads, spec.N_KV, spec.E, device="cuda", dtype=dt)
        y = ft.Backward(o, lse, do, None, torch.randn_like(lse), torch.empty_like(x.q), dk, dv)
        return ft.backward_launches(spec, hw, x, y)[0 if pass_ == "dq" else 1]
    finally:
        ft.config = orig


def jobs():
    for shape in SHAPES:
        size = {64: 64, 128: 128, 192: 256, 256: 256}[shape[4]]
        for causal in (True, False):
            for pass_ in ("forward", "dq", "dkdv"):
                for c in C[pass_, size]:
                    yield shape, causal, pass_, c, None
                if pass_ == "dkdv" and shape[1] != shape[2]:
                    for hpp in (1, shape[1] // shape[2]):
                        for c in C[pass_, size][:3]:
                            yield shape, causal, pass_, c, hpp


def compile_some(js):
    for shape, causal, pass_, c, hpp in js:
        try:
            l = launch_of(*setup(shape, causal), pass_, c, hpp)
            l.kernel.warmup(*l.args, grid=(l.grid,), **l.options)
        except Exception as e:
            print(shape, causal, pass_, c, type(e).__name__, str(e)[:80], flush=True)


def timeit(f, cache, reps=10):
    f(); f()
    ts = []
    for _ in range(reps):
        cache.zero_()
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(300000)
        a.record(); f(); b.record(); b.synchronize()
        ts.append(a.elapsed_time(b))
    return statistics.median(ts)


def main():
    from fulmen.launch import run
    js = list(jobs())
    t = time.time()
    with cf.ProcessPoolExecutor(14, mp_context=mp.get_context("spawn")) as ex:
        list(ex.map(compile_some, [js[i::14] for i in range(14)]))
    print(f"compiled {len(js)} in {time.time() - t:.0f} s", flush=True)
    cache = torch.empty(256 << 20, dtype=torch.int8, device="cuda")
    last, out = None, {}
    for shape, causal, pass_, c, hpp in js:
        if last != (shape, causal):
            state, last = setup(shape, causal), (shape, causal)
        try:
            l = launch_of(*state, pass_, c, hpp)
            ms = timeit(lambda: run(l), cache)
        except Exception as e:
            ms = float("nan")
        out.setdefault((shape, causal, pass_), []).append((ms, c, hpp))
    for (shape, causal, pass_), rows in out.items():
        print(shape[0], *shape[1:], "causal" if causal else "full", pass_, " ".join(f"{c}{'h%d' % h if h else ''}:{ms:.3f}".replace(" ", "") for ms, c, h in sorted(rows)), flush=True)


if __name__ == "__main__":
    main()
