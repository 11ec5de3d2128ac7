"""Trial of lightning/cuda_sm90.cu: right first, then timed beside the Triton sweeps in the same run.

    PYTHONPATH=. python3 dev/lightning_cuda.py [check | tune | ncu]      on the GPU; `tune` times it over its tiles
"""
import random
from concurrent.futures import ThreadPoolExecutor
import statistics
import sys
import torch
import fulmen
from fulmen import cuda as build, hardware
from fulmen.lightning import cuda, reference, triton as fused, triton_split as split
from fulmen.lightning.op import Residuals, spec_of

MODE = sys.argv[1] if sys.argv[1:] else "all"
EXTRA = {64: [(5, 2), (6, 2), (7, 2)], 128: [(4, 1)]}  # stages, outs


def variants():
    for D in (64, 128):
        for B, H in ((4, 32), (1, 8)):
            q = torch.empty(B, H, 8192, D, dtype=torch.bfloat16, device="cuda")
            for decay in (torch.empty(H, device="cuda"), None):
                for cu in (None, torch.empty(17, dtype=torch.int32, device="cuda")):
                    spec = spec_of(q[:1] if cu is not None else q, q, q, decay, cu_seqlens=cu)
                    configs = [cuda.config(spec, w) for w in ("forward", "training", "backward", "state")]
                    if cu is None and MODE == "tune":
                        configs += [cuda.Config(*e, save) for e in EXTRA[D] for save in (0, 2)]
                    for cfg in configs:
                        if cfg.shared(D) <= 232448:
                            yield cuda.variant(spec, cfg)


with ThreadPoolExecutor(16) as pool:
    list(pool.map(build.cubin, dict.fromkeys(variants())))
dev = torch.device("cuda", 0)
cache = torch.empty(256 << 20, dtype=torch.int8, device="cuda")


def timeit(f, reps=11):
    f(); f()
    ts = []
    for _ in range(reps):
        cache.zero_(); torch.cuda._sleep(1_000_000)
        s, e = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        s.record(); f(); e.record(); e.synchronize()
        ts.append(s.elapsed_time(e))
    return statistics.median(ts)


def error(got, want):
    return ((got.double() - want).norm() / want.norm()).item()


def check(B, H, N, D, slopes, lengths=None, states=False, layout="bhnd", forced=None):
    """Relative error of each result against the Triton backend in fp32 of the same bf16 inputs."""
    torch.manual_seed(N + D)
    def draw():
        t = torch.randn(B, N, H, D, device=dev) if layout == "bnhd" else torch.randn(B, H, N, D, device=dev)
        return (t.transpose(1, 2) if layout == "bnhd" else t).bfloat16()
    q, k, v, do = (draw() for _ in range(4))
    cu = None if lengths is None else torch.tensor([0, *lengths], device=dev).cumsum(0).int()
    count = B if lengths is None else len(lengths)
    init = torch.randn(count, H, D, D, device=dev) if states else None
    dstate = torch.randn(count, H, D, D, device=dev) if states else None
    x = Residuals(q, k, v, slopes, init, cu)
    spec = spec_of(q, k, v, slopes, scale=0.5, initial_state=init, cu_seqlens=cu, with_final_state=states)
    spec32 = spec._replace(dtype=torch.float32)
    x32 = Residuals(q.float(), k.float(), v.float(), slopes, init, cu)
    ref = (*fused.run_forward(fused.forward_launches, spec32, x32), *fused.run_backward(fused.backward_launches, spec32, x32, do.float(), dstate))
    tri = (*fused.run_forward(fused.forward_launches, spec, x), *fused.run_backward(fused.backward_launches, spec, x, do, dstate))
    worst = {}
    shape = cuda.saves(spec)
    for training in (False, True) if shape else (False,):
        x = x._replace(saved=q.new_empty(shape) if training else None)
        mine = (*cuda.forward(spec, x), *cuda.backward(spec, x, do, dstate))
        torch.cuda.synchronize()
        for name, got, near, want in zip(("o", "state", "dq", "dk", "dv", "dinitial"), mine, tri, ref):
            if want is None:
                continue
            e, t = error(got, want.double()), error(near, want.double())
            worst[name + ("'" if training else "")] = f"{e:.1e}/{t:.1e}" + ("" if e < 2 * t + 1e-6 else " WRONG")
    print("check", (B, H, N, D), "decay" if slopes is not None else "none", "packed" if lengths else "", "states" if states else "", layout, worst, flush=True)


slopes = fulmen.decay.alibi
if MODE in ("all", "check"):
    for D in (64, 128):
        check(2, 3, 1000, D, slopes(3).to(dev))
        check(2, 80, 777, D, slopes(80).to(dev), states=True, layout="bnhd")
        check(1, 4, 2500, D, slopes(4).to(dev), states=True)
        check(1, 8, 4095, D, None, states=True)
        check(1, 3, 1500, D, slopes(3).to(dev), lengths=[1, 300, 64, 0, 700, 435], states=True)
        check(1, 3, 1500, D, torch.tensor([0.0, 3.0, 40.0], device=dev), states=True)
if MODE == "check":
    raise SystemExit

src = torch.empty(1 << 29, dtype=torch.int8, device="cuda"); dst = torch.empty_like(src)
bw = 2 * src.numel() / timeit(lambda: dst.copy_(src))
print(f"copy {bw / 1e9:.2f} TB/s")
random.seed(1)
lengths = [random.randint(100, 30000) for _ in range(16)]
rows = [((4, 32, 8192, 64), None), ((2, 32, 8192, 128), None), ((1, 64, 4096, 128), None), ((1, 16, 32768, 128), None),
        ((1, 8, 65536, 64), None), ((3, 50, 5000, 64), None), ((1, 16, sum(lengths), 128), lengths)]
hw = hardware.of(dev)
for shape, packed in rows:
    cu = None if packed is None else torch.tensor([0, *packed], device="cuda").cumsum(0).int()
    q, k, v, do = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    u = q.numel() * 2
    for s in (slopes(shape[1]).cuda(), None):
        spec = spec_of(q, k, v, s, cu_seqlens=cu)
        x = Residuals(q, k, v, s, None, cu)
        name = f"{shape} {'packed' if packed else ''} {'decay' if s is not None else 'none'}"
        def line(what, f, b):
            print(f"{name:34s} {what:40s} fwd {4 * u / timeit(f) / bw:6.1%}  bwd {7 * u / timeit(b) / bw:6.1%}", flush=True)
        shaped = cuda.saves(spec)
        trained = x._replace(saved=q.new_empty(shaped)) if shaped else x
        forward, backward = lambda: cuda.forward(spec, x), lambda: cuda.backward(spec, trained, do, None)
        cuda.forward(spec, trained)
        if MODE == "ncu":
            if s is not None and shape[2] == 8192:
                forward(); backward()
            continue
        if MODE == "all":
            tri = split if split.rank(spec) < fused.rank(spec) else fused
            line("triton", lambda: fused.run_forward(tri.forward_launches, spec, x), lambda: fused.run_backward(tri.backward_launches, spec, x, do, None))
        line("cuda", forward, backward)
        if shaped:
            line("cuda, training forward, nothing saved", lambda: cuda.forward(spec, trained), lambda: cuda.backward(spec, x, do, None))
        if MODE == "tune" and packed is None:
            plain = cuda.config
            for extra in EXTRA[shape[3]]:
                cuda.config = lambda spec, what: plain(spec, what) if what == "state" else cuda.Config(*extra, plain(spec, what).save)
                if cuda.config(spec, "backward").shared(shape[3]) <= 232448:
                    line(f"stages {extra[0]} outs {extra[1]}", forward, backward)
            cuda.config = plain
        if shape[1] in (8, 16) and packed is None:
            from torch.profiler import ProfilerActivity, profile
            with profile(activities=[ProfilerActivity.CUDA]) as seen:
                forward(); backward(); torch.cuda.synchronize()
            print("   ", *(f"{e.name[:24]} {e.time_range.elapsed_us():.0f}" for e in sorted((e for e in seen.events() if e.device_type.name == "CUDA"), key=lambda e: e.time_range.start)))
