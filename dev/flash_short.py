"""Tiles for short calls with a cold L2: the kernel's own time (CUPTI), and the time between two events.

    PYTHONPATH=. python3 dev/flash_short.py              # about 40 s on an H200; the chosen tile is starred, the 8 fastest shown
    PYTHONPATH=. python3 dev/flash_short.py --compile    # the kernels alone, without a GPU
"""
import collections
import statistics
import sys
from concurrent.futures import ThreadPoolExecutor
import torch
from torch.profiler import ProfilerActivity, profile
from cuda_trial_cases import tag
from fulmen import cuda as build, hardware
from fulmen.flash import cuda, cuda_small, cuda_sm90, sdpa
from fulmen.flash.op import Residuals
from fulmen.testing import flash as testing

SHAPES = [(1, 1, 128), (8, 4, 128), (32, 8, 128), (32, 8, 256), (32, 8, 512)]
ROUNDS = 25
COMPILE = "--compile" in sys.argv
hw = hardware.TARGETS[90] if COMPILE else hardware.of(torch.device("cuda", 0))


def candidates(N):
    found = [cuda_small.Config(m, n, b, s, bps) for m, n in ((1, 4), (2, 2), (4, 2), (4, 1), (8, 1)) for b in (32, 64, 128)
             for s in {1, 2, max(2, -(-N // b))} for bps in (1, 2, 3) if s <= 4 and s * b <= 2 * max(N, 128)]
    found += [cuda_sm90.Config(c, b, s, blocks_per_sm=bps) for c, bps in ((1, 1), (1, 2), (1, 3), (2, 1), (2, 2), (3, 1))
              for b in (64, 128) for s in (2, 3)]
    return found


def compiled(spec, cfg):
    small = isinstance(cfg, cuda_small.Config)
    shared = cfg.shared(64) if small else cfg.shared(64, 64)
    if shared * cfg.blocks_per_sm > 227_000 or cfg.threads * cfg.blocks_per_sm > 2048:
        return None
    variant = cuda_small.variant(spec, hw, cfg) if small else cuda_sm90.variant(spec, cfg)
    try:
        build.cubin(variant)
    except build.Unavailable:
        return None
    return cfg


for B, H, N in SHAPES:
    for dtype in (torch.bfloat16, torch.float16) if N < 512 else (torch.bfloat16,):
        x = testing.inputs(B, H, N, 64, dtype=dtype, device="cpu" if COMPILE else "cuda")
        spec, tensors = x.spec(), Residuals(x.q, x.k, x.v)
        chosen = cuda.config(spec, hw)
        with ThreadPoolExecutor(16) as pool:
            tiles = [c for c in pool.map(lambda c: compiled(spec, c), dict.fromkeys([chosen, *candidates(N)])) if c]
        if COMPILE:
            print(B, H, N, dtype, len(tiles), "tiles")
            continue
        name_of = lambda c: tag(c) + f" b{c.blocks_per_sm}" + (f" s{c.stages}" if not hasattr(c, "warps_m") else "")
        calls = {"FA2": lambda: sdpa.forward(spec, tensors, implementation="flash")[0], "cuDNN": lambda: sdpa.forward(spec, tensors, implementation="cudnn")[0]}
        calls |= {name_of(c): lambda c=c: cuda.forward(spec, tensors, c)[0] for c in tiles}
        exact, alive = calls["FA2"]().float(), {}
        for name, call in calls.items():
            try:
                error = ((call().float() - exact).norm() / exact.norm()).item()
            except Exception as why:
                print("  refused", name, str(why)[:60])
                continue
            if error < 1e-2:
                alive[name] = call
            else:
                print("  WRONG", name, error)
        flush = torch.empty(256 << 20, dtype=torch.int8, device="cuda")
        events, order = collections.defaultdict(list), []
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            for _ in range(ROUNDS):
                for name, call in alive.items():
                    flush.zero_()
                    torch.cuda._sleep(60_000)
                    a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                    a.record()
                    call()
                    b.record()
                    events[name].append((a, b))
                    order.append(name)
            torch.cuda.synchronize()
        kernels = [e for e in sorted((e for e in seen.events() if e.device_type.name == "CUDA"), key=lambda e: e.time_range.start)]
        own, at = collections.defaultdict(list), -1
        for e in kernels:  # what lies between two sleeps belongs to one call
            if "spin" in e.name or "sleep" in e.name.lower():
                at += 1
            elif at >= 0 and not any(s in e.name for s in ("FillFunctor", "Memset", "elementwise")):
                own[order[at]].append(e.time_range.elapsed_us())
        device = {n: statistics.median(t) for n, t in own.items()}
        between = {n: statistics.median(1e3 * a.elapsed_time(b) for a, b in t) for n, t in events.items()}
        best = sorted((n for n in alive if n not in ("FA2", "cuDNN") and n in device), key=device.get)[:8]
        shown = ["FA2", "cuDNN", *dict.fromkeys([name_of(chosen), *best])]
        print(f"B{B} H{H} N{N} {str(dtype)[6:]}, us kernel (over FA2) / between events, {len(alive)} tiles:",
              ", ".join(f"{'*' * (n == name_of(chosen))}{n} {device.get(n, float('nan')):.2f} ({device.get(n, float('nan')) / device['FA2']:.2f}) / {between[n]:.2f}" for n in shown), flush=True)
