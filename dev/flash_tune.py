"""python dev/flash_tune.py: compiles all configurations in parallel, checks and times each against SDPA's FA2 and cuDNN."""
import sys, os, time, statistics, concurrent.futures as cf
sys.path.insert(0, os.path.dirname(__file__))
import torch

SHAPES = {128: (2, 16, 16, 8192, 128), 64: (4, 32, 32, 4096, 64)}


def tensors(B, H, HK, N, D):
    g = torch.Generator(device="cuda").manual_seed(0)
    mk = lambda h: torch.randn(B, h, N, D, device="cuda", dtype=torch.bfloat16, generator=g)
    return mk(H), mk(HK), mk(HK), mk(H)


def launch(job, t, only_compile=False):
    import flash_trial as ft
    D, kind, phases, causal, c = job
    q, k, v, do, o, lse, lse2, delta, dq, dk, dv = t
    if kind == "fwd":
        a, g, op = ft.fwd_args(q, k, v, o, lse, causal, c)
        f = ft.trial_fwd
    else:
        a, g, op = ft.bwd_args(q, k, v, do, dq, dk, dv, lse2, delta, causal, c, phases)
        f = ft.trial_bwd
    if only_compile:
        f.warmup(*a, grid=g, **op)
    else:
        f[g](*a, **op)


def everything(shape):
    q, k, v, do = tensors(*shape)
    B, H, HK, N, D = shape
    vec = lambda: torch.empty(B, H, N, device="cuda")
    return (q, k, v, do, torch.empty_like(q), vec(), vec(), vec(), torch.empty_like(q), torch.empty_like(k), torch.empty_like(v))


def compile_one(jobs):
    t = {}
    for job in jobs:
        try:
            if job[0] not in t:
                t[job[0]] = everything((1, 2, 2, 8192, job[0]))
            s = SHAPES[job[0]]
            launch(job, t[job[0]], True)
        except Exception as e:
            print("compile", job, type(e).__name__, str(e)[:100], flush=True)


def timeit(f, reps=12):
    cache = timeit.cache
    f(); f()
    ts = []
    for _ in range(reps):
        cache.zero_()
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(200000)
        a.record(); f(); b.record(); b.synchronize()
        ts.append(a.elapsed_time(b))
    return statistics.median(ts)


def main(jobs):
    jobs = list(jobs)
    start = time.time()
    n = 14
    with cf.ProcessPoolExecutor(n, mp_context=__import__("multiprocessing").get_context("spawn")) as ex:
        list(ex.map(compile_one, [jobs[i::n] for i in range(n)]))
    print(f"compiled {len(jobs)} in {time.time() - start:.0f} s", flush=True)
    timeit.cache = torch.empty(256 << 20, dtype=torch.int8, device="cuda")
    import flash_trial as ft
    import triton
    aten = torch.ops.aten
    for D in (128, 64):
        shape = SHAPES[D]
        B, H, HK, N, _ = shape
        t = everything(shape)
        q, k, v, do, o, lse, lse2, delta, dq, dk, dv = t
        for causal in (True, False):
            fl = 4 * B * H * N * N * D * (0.5 if causal else 1) / 1e9
            ref = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False)
            fa2f = timeit(lambda: aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False))
            bw = lambda: aten._scaled_dot_product_flash_attention_backward(do, q, k, v, ref[0], ref[1], None, None, N, N, 0.0, causal, ref[6], ref[7])
            rg = bw()
            fa2b = timeit(bw)
            cu = aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal, False)
            cuf = timeit(lambda: aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal, False))
            cub = timeit(lambda: aten._scaled_dot_product_cudnn_attention_backward(do, q, k, v, cu[0], cu[1], cu[6], cu[7], None, None, None, N, N, 0.0, causal))
            ft.trial_pre[(triton.cdiv(N, 64) * B * H,)](ref[0], do, ref[1], delta, lse2, ft.st(q), ft.st(do), H, N, D, 64, D, num_warps=4)
            pre = timeit(lambda: ft.trial_pre[(triton.cdiv(N, 64) * B * H,)](ref[0], do, ref[1], delta, lse2, ft.st(q), ft.st(do), H, N, D, 64, D, num_warps=4))
            print(f"== D{D} causal={causal} FA2 fwd {fa2f:.3f} ({fl/fa2f:.0f}) bwd {fa2b:.3f} ({2.5*fl/fa2b:.0f}); cuDNN {cuf:.3f} ({fl/cuf:.0f}) {cub:.3f} ({2.5*fl/cub:.0f}); pre {pre:.3f}", flush=True)
            rows = []
            for job in jobs:
                if job[0] != D or job[3] != causal:
                    continue
                kind = job[1]
                try:
                    for x in (o, dq, dk, dv):
                        x.fill_(float("nan"))
                    launch(job, t)
                    got = {"fwd": [(o, ref[0])], "dkdv": [(dk, rg[1]), (dv, rg[2])], "dq": [(dq, rg[0])], "both": list(zip((dq, dk, dv), rg))}[kind]
                    err = max(((a.float() - b.float()).norm() / b.float().norm()).item() for a, b in got)
                    ms = timeit(lambda: launch(job, t))
                    rows.append((kind, ms, err, job[4]))
                except Exception as e:
                    print("run", job, type(e).__name__, str(e)[:100], flush=True)
            for kind, ms, err, c in sorted(rows, key=lambda r: (r[0], r[1])):
                name = " ".join(f"{a}={b}" for a, b in c.items() if not (kind == "dkdv" and a in ("m2", "n2")) and not (kind == "dq" and a in ("m1", "n1")))
                extra = f"{fl/ms:.0f} TF {fa2f/ms:.2f}x" if kind == "fwd" else f"{fl*{'dkdv':2.0,'dq':1.5,'both':3.5}[kind]/ms:.0f} raw"
                print(f"{kind:5s} {ms:.3f} ms {extra} err {err:.1e} {name}", flush=True)


if __name__ == "__main__":
    from flash_configs import jobs
    main(jobs())
