"""Tiles for short calls: the kernel's own time (CUPTI) and the time between two events, with what the L2 cache holds.

    PYTHONPATH=. python3 dev/flash_short.py              # about 120 s on an H200; the chosen tile is starred
    PYTHONPATH=. python3 dev/flash_short.py --few        # few heads at D = 128, causal parts of 40 to 128 heads; 45 s
    PYTHONPATH=. python3 dev/flash_short.py --once       # up to 384 keys in shared memory at once; 110 s
    PYTHONPATH=. python3 dev/flash_short.py --shared     # the same with heads that share keys; 45 s
    PYTHONPATH=. python3 dev/flash_short.py --decode     # few queries, many keys, split over blocks; 80 s; with --heads one to four heads alone
    PYTHONPATH=. python3 dev/flash_short.py --compile    # the kernels alone, without a GPU

dirty: L2 holds what was written before, as in the bench tool; clean: what was read; warm: the call's own tensors. Tiles
that share a kernel with the one before find its instructions in the SMs, which is worth 0.5 us.
"""
import collections
import statistics
import sys
from concurrent.futures import ThreadPoolExecutor
import torch
from torch.profiler import ProfilerActivity, profile
from cuda_trial_cases import tag
from fulmen import cuda as build, hardware
from fulmen.flash import cuda, cuda_sm90, sdpa, triton
from fulmen.flash.cuda_sm90 import Config as G
from fulmen.flash.cuda_small import Config as S, Once as O, variant as small_variant
from fulmen.flash.op import Residuals
from fulmen.testing import flash as testing

ROUNDS = 25
COMPILE = "--compile" in sys.argv
hw = hardware.TARGETS[90] if COMPILE else hardware.of(torch.device("cuda", 0))
FEW = [S(1, 4, 128, 1), S(1, 4, 128, 2), S(2, 2, 128, 1), S(2, 2, 64, 2), S(4, 1, 128, 1), S(4, 1, 64, 2)]
MANY = [S(4, 1, 128, 1, 4), S(8, 1, 128, 1, 2), S(4, 1, 64, 2, 4), S(4, 1, 32, 2, 3), S(8, 1, 64, 2, 2), G(2, 128, 2)]


def cases():
    """B, H, N, D, causal, dtype, what L2 holds, tiles beside the chosen one."""
    for state in ("dirty", "clean", "warm"):
        for dtype in (torch.bfloat16, torch.float16):
            yield 32, 8, 128, 64, False, dtype, state, MANY
            yield 8, 4, 128, 64, False, dtype, state, FEW
            yield 1, 1, 128, 64, False, dtype, state, FEW
    for B, H in ((32, 8), (4, 16), (8, 4)):
        for D in (64, 128):
            for N in (256, 384, 512, 1024, 2048):
                tiles = [G(2, 128, 2), G(3, 128, 2, True)] if D == 64 else [G(2, 128, 2), G(2, 176, 2)]
                tiles += [c._replace(together=False) for c in tiles] + ([G(1, 128, 2, blocks_per_sm=2)] if D == 64 else [])
                for causal in (False, True):
                    yield B, H, N, D, causal, torch.bfloat16, "dirty", tiles
    for H in (1, 4, 16):  # few heads: which kernel, and whether `auto` should take it or triton
        for D in (64, 128):
            for N in (64, 128, 256, 512):
                yield 1, H, N, D, N > 128, torch.bfloat16, "dirty", [S(4, 1, 64, 2), G(1, 128 if D == 64 else 80, 2, blocks_per_sm=2), G(2, 128, 2)]


def few():
    """Few heads at D = 128, half tiles; causal parts dealt out evenly, over all heads at once."""
    for B, H in ((1, 1), (1, 16), (8, 4), (4, 16)):
        for N in (256, 384, 512, 768, 1024):
            half = G(1, 80, 2, blocks_per_sm=2)
            for causal in (False, True):
                yield B, H, N, 128, causal, torch.bfloat16, "dirty", [half, G(2, 128, 2), half._replace(together=False)]
    for H in (40, 48, 56, 64, 72, 80, 96, 128):
        for N, D, tile in ((1024, 128, G(2, 128, 2)), (2048, 128, G(2, 128, 2)), (4096, 128, G(2, 176, 2)), (8192, 128, G(2, 176, 2)),
                           (2048, 64, G(3, 128, 2, True)), (4096, 64, G(3, 128, 2)), (8192, 64, G(3, 128, 2))):
            yield 1, H, N, D, True, torch.bfloat16, "dirty", [tile, tile._replace(together=False)]


def once():
    """Few keys: all in shared memory at once, in products of a warpgroup, beside the other two kernels."""
    bf16, big = torch.bfloat16, [G(1, 128, 2, blocks_per_sm=2), G(2, 128, 2), G(3, 128, 2, True)]
    for dtype in (bf16, torch.float16):
        yield 32, 8, 128, 64, False, dtype, "dirty", [O(128)]
    for B, H, N in ((2, 10, (4096, 77)), (2, 20, (1024, 77)), (8, 8, (4096, 77)), (8, 8, (16384, 77)), (1, 16, 77), (32, 8, 77)):
        yield B, H, N, 64, False, bf16, "dirty", [O(80), O(64, 2), O(128), S(1, 4, 128, 1), *big[1:]]
    for B, H, N in ((8, 8, (4096, 128)), (8, 8, (16384, 128)), (32, 8, (1024, 128)), (8, 8, (1024, 256)), (8, 8, (2048, 256)), (8, 8, (4096, 256))):
        yield B, H, N, 64, False, bf16, "dirty", ([O(128)] if N[1] == 128 else [O(128, 2, 3), O(64, 4, 3)]) + big
    for N, tiles in ((150, [O(80, 2), O(64, 3), O(128, 2, 3)]), (192, [O(64, 3), O(128, 2, 3)])):
        for B, H in ((4, 16), (32, 8)):
            for causal in (False, True):
                yield B, H, N, 64, causal, bf16, "dirty", tiles
    for H in (1, 4, 8, 12, 16, 24):
        for causal in (False, True):
            yield 1, H, 256, 64, causal, bf16, "dirty", [O(128, 2, 3), O(64, 4, 3), S(1, 4, 128, 2), S(2, 2, 64, 4)]
    yield 1, 8, 150, 64, False, bf16, "dirty", [O(80, 2), O(128, 2, 3), S(1, 4, 128, 2), S(2, 2, 64, 3)]
    yield 1, 1, 64, 64, False, bf16, "dirty", [O(64), S(1, 4, 64, 2), S(1, 4, 128, 1)]
    for B, H, N in ((2, 10, (4096, 77)), (2, 20, (1024, 77)), (8, 8, (4096, 77)), (32, 8, 77), (1, 1, 77), (1, 16, 77), (4, 16, 77)):
        yield B, H, N, 128, False, bf16, "dirty", [O(80, 1, 3), O(128, 1, 2), S(1, 4, 128, 1), G(1, 80, 2, blocks_per_sm=2), G(2, 128, 2)]
    for B, H, N in ((10, 16, 128), (12, 16, 128), (16, 16, 128), (8, 8, (1024, 64)), (8, 8, (4096, 64)), (8, 8, (1024, 128))):
        yield B, H, N, 128, False, bf16, "dirty", [O(64, 1, 4)] * (N[1] == 64 if isinstance(N, tuple) else 0) + [O(128, 1, 2), G(1, 80, 2, blocks_per_sm=2), G(2, 128, 2)]
    for D in (64, 128):
        for B, H, N in ((64, 32, (1, 100)), (64, 32, (1, 64)), (64, 32, (16, 100)), (64, 32, (32, 100))):
            yield B, H, N, D, False, bf16, "dirty", [O(128, 1, 4 if D == 64 else 2), O(64, 2, 4 if D == 64 else 2), S(1, 4, 128, 1), S(2, 2, 128, 1), G(1, 80, 2, blocks_per_sm=2)] + [O(64)] * (N[1] == 64)


def shared():
    """Few keys that query heads share: all heads of a group in one tile, or each in its own."""
    for D in (64, 128):
        more, fewer = (4, 3) if D == 64 else (2, 1)
        big = G(1, 128 if D == 64 else 80, 2, blocks_per_sm=2, grouped=True)
        for B, H, N in ((1, (32, 8), (1, 100)), (4, (32, 8), (1, 100)), (16, (32, 8), (1, 100)), (64, (32, 8), (1, 100)), (64, (32, 8), (16, 100)), (64, (32, 8), (32, 100)),
                        (8, (64, 8), 100), (64, (32, 8), (1, 60)), (8, (32, 8), (1, 60)), (64, (32, 4), (4, 60)), (64, (32, 8), 64), (16, (32, 8), (48, 77))):
            n = 64 if (N if isinstance(N, int) else N[1]) <= 64 else 128
            tiles = [O(n, 1, 4 if n == 64 else more), O(n, 1, 4 if n == 64 else more, True), S(1, 4, 128, 1), big]
            yield B, H, N, D, False, torch.bfloat16, "dirty", tiles
        for B, H, N in ((1, (32, 8), (1, 250)), (8, (32, 8), (1, 250)), (64, (32, 8), (1, 250)), (64, (32, 8), (16, 250)), (16, (32, 4), 150), (64, (16, 2), (8, 200)), (16, (32, 8), 250)):
            tiles = [O(128, 2, 3), O(128, 2, 3, True), O(64, 4, 3, True), S(1, 4, 128, 2)] if D == 64 else [O(64, 4, 1, True), S(1, 4, 64, 2)]
            yield B, H, N, D, N == 250, torch.bfloat16, "dirty", [*tiles, big]


def decode():
    """Few queries and many keys, split over blocks or not. With splits "kernels" counts the second kernel's wait for the first: read events."""
    plain = [
        (1, (32, 8), (1, 512), 128), (1, (32, 8), (1, 1024), 128), (1, (32, 8), (1, 2048), 128), (1, (32, 8), (1, 8192), 128), (1, (32, 8), (1, 32768), 128), (1, (32, 8), (1, 131072), 128),
        (1, 32, (1, 8192), 128), (4, (32, 8), (1, 2048), 128), (4, (32, 8), (1, 8192), 128), (8, (32, 8), (1, 8192), 128), (8, (32, 8), (1, 32768), 128), (16, (32, 8), (1, 8192), 128), (1, (32, 8), (4, 8192), 128),
        (1, (32, 8), (64, 32768), 128), (1, (32, 8), (256, 32768), 128), (1, 8, (512, 8192), 128), (1, (64, 8), (1, 32768), 64), (1, 16, (1, 8192), 64),
        (1, 16, (128, 4096), 64), (2, 8, (512, 4096), 64), (4, (16, 2), (1, 16384), 256), (1, 4, 4096, 128), (1, 2, 4096, 64),
    ]
    heads = [(1, 1, n, D, {"causal": True}) for n, D in ((1024, 128), (1024, 64), (2048, 128), (4096, 128), (4096, 64))]  # as many queries
    heads += [(1, 2, 1024, 128), (1, 2, 1024, 64), (1, 4, 2048, 64, {"causal": True}), (1, 4, 1024, 64, {"causal": True}), (1, 1, 600, 128)]
    sinks, cap = {"causal": True, "sinks": True}, {"causal": True, "softcap": 30.0}
    options = [
        (1, (64, 8), (1, 8192), 64, sinks), (8, (64, 8), (1, 8192), 64, sinks), (1, (64, 8), (1, 8192), 64, {**sinks, "window": (127, None)}), (16, (64, 8), (1, 8192), 64, {**sinks, "window": (127, None)}),
        (1, (32, 8), (1, 8192), 128, cap), (1, (16, 8), (1, 8192), 256, {**cap, "window": (4095, None)}), (8, (16, 8), (1, 8192), 256, cap), (1, (32, 8), (1, 1024), 128, cap), (1, (32, 8), (1, 300), 128, cap),
    ]
    for B, H, N, D, *more in heads if "--heads" in sys.argv else plain + heads + options:
        given = more[0] if more else {}
        x = testing.inputs(B, H[0] if isinstance(H, tuple) else H, 1, D, H_KV=H[1] if isinstance(H, tuple) else H, N_KV=N if isinstance(N, int) else N[1], dtype=torch.bfloat16, device="cpu", **given)
        spec = x.spec()._replace(N_Q=N if isinstance(N, int) else N[0])
        one = cuda_sm90.config(spec, hw)._replace(splits=1)
        room = hw.sm_count // max(1, cuda_sm90.tiles(spec, one) * cuda_sm90.heads(spec, one))
        yield B, H, N, D, given.get("causal", False), torch.bfloat16, "dirty", [one] + [one._replace(splits=s) for s in (room // 2, 2 * room) if 1 < s <= 264 and spec.plain], given


def variant(spec, cfg):
    return cuda_sm90.variant(spec, cfg) if isinstance(cfg, G) else small_variant(spec, hw, cfg)


def name_of(cfg):
    return tag(cfg) + f" b{cfg.blocks_per_sm}"


def measure(label, calls, state, chosen):
    base = next(iter(calls))  # FA2, or triton where it has no such option
    exact, alive = calls[base]().float(), {}
    for name, call in calls.items():
        error = ((call().float() - exact).norm() / exact.norm()).item()
        if error < 1e-2:
            alive[name] = call
        else:
            print("  WRONG", name, error)
    cache = torch.zeros(64 << 20, dtype=torch.int32, device="cuda")
    fill = {"dirty": cache.zero_, "clean": cache.max, "warm": lambda: None}[state]
    events, order = collections.defaultdict(list), []
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(ROUNDS):
            for name, call in alive.items():
                fill()
                torch.cuda._sleep(150_000)
                a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                a.record()
                call()
                b.record()
                events[name].append((a, b))
                order.append(name)
        torch.cuda.synchronize()
    own, at = collections.defaultdict(float), -1
    for e in sorted((e for e in seen.events() if e.device_type.name == "CUDA"), key=lambda e: e.time_range.start):
        if "spin" in e.name or "sleep" in e.name.lower():  # what lies between two sleeps belongs to one call
            at += 1
        elif at >= 0 and not any(s in e.name for s in ("FillFunctor", "Memset", "reduce")):
            own[at] += e.time_range.elapsed_us()
    device = {n: statistics.median(own[i] for i, name in enumerate(order) if name == n) for n in alive}
    between = {n: statistics.median(1e3 * a.elapsed_time(b) for a, b in t) for n, t in events.items()}
    first = [n for n in ("FA2", "cuDNN", chosen) if n in alive]
    shown = first + sorted((n for n in alive if n not in first), key=device.get)
    print(label, state, f"us of kernels (over {base}) / between events:", ", ".join(
        f"{'*' * (n == chosen)}{n} {device[n]:.2f} ({device[n] / device[base]:.2f}) / {between[n]:.2f}" for n in shown), flush=True)


def main():
    modes = {"--few": few, "--once": once, "--shared": shared, "--decode": decode}
    for B, H, N, D, causal, dtype, state, tiles, *more in next((modes[a] for a in sys.argv if a in modes), cases)():
        N_Q, N_KV = N if isinstance(N, tuple) else (N, N)
        H, H_KV = H if isinstance(H, tuple) else (H, H)
        options = {"causal": causal} | (more[0] if more else {})
        x = testing.inputs(B, H, N_Q, D, H_KV=H_KV, N_KV=N_KV, dtype=dtype, device="cpu" if COMPILE else "cuda", **options)
        spec, tensors = x.spec(), Residuals(x.q, x.k, x.v, x.sinks)
        chosen = cuda.config(spec, hw)
        tiles = list(dict.fromkeys([chosen, *tiles]))
        with ThreadPoolExecutor(16) as pool:
            list(pool.map(lambda c: build.cubin(variant(spec, c)), tiles))
        if any(getattr(c, "splits", 1) > 1 for c in tiles):
            build.cubin(cuda_sm90.merge_variant(spec))
        if COMPILE:
            continue
        calls = {}
        if spec.plain:
            calls = {"FA2": lambda: sdpa.forward(spec, tensors, implementation="flash")[0], "cuDNN": lambda: sdpa.forward(spec, tensors, implementation="cudnn")[0]}
        if N_Q <= 512 or "--once" in sys.argv:
            calls["triton"] = lambda: triton.forward(spec, tensors)[0]
        calls |= {name_of(c): lambda c=c: cuda.forward(spec, tensors, c)[0] for c in tiles}
        label = f"B{B} H{H}/{H_KV} N{N_Q}x{N_KV} D{D} {'causal' if causal else 'full'}" + "".join(f" {n}={v}" for n, v in options.items() if n != "causal")
        measure(f"{label} {str(dtype)[6:]}", calls, state, name_of(chosen))


if __name__ == "__main__":
    main()
