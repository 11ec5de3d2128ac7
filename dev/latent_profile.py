"""Where latent attention's time goes beside its products: kernels by name, and tiles of those of rotary_triton.

    PYTHONPATH=. python3 dev/latent_profile.py
"""
import statistics
import torch
from torch.profiler import ProfilerActivity, profile
from fulmen.bench.adapters import layer
from fulmen.layers import rotary_triton as kernels
from fulmen import launch

dev = torch.device("cuda", 0)
cache = torch.empty(256 << 20, dtype=torch.int8, device="cuda")


def timeit(f, reps=15):
    f(); f()
    ts = []
    for _ in range(reps):
        cache.zero_(); torch.cuda._sleep(600000)
        s, e = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        s.record(); f(); e.record(); e.synchronize()
        ts.append(s.elapsed_time(e))
    return 1e3 * statistics.median(ts)


for more in ({"layer": "mla", "B": 1, "N": 4096, "H": 64, "D": 192, "E": 128, "rank": 1024},
             {"layer": "mha", "B": 1, "N": 4096, "H": 32, "D": 128}):
    case = layer.complete(more | {"dtype": "bfloat16"})
    p = layer.problem(case, dev, 1)
    f = layer.attend("auto")
    leaves = list(p.leaves.values())
    for _ in range(3):
        torch.autograd.grad(f(p.x), leaves, p.douts["o"])
    for what in ("forward", "backward"):
        y = f(p.x)
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            if what == "forward":
                f(p.x)
            else:
                torch.autograd.grad(y, leaves, p.douts["o"])
            torch.cuda.synchronize()
        print(more["layer"], what)
        for e in sorted((e for e in seen.events() if e.device_type.name == "CUDA"), key=lambda e: e.time_range.start):
            print(f"   {e.time_range.elapsed_us():8.1f} us  {e.name[:110]}")
B, N, H, nope, dim, E = 1, 4096, 64, 128, 64, 128
r = lambda *s: torch.randn(s, device="cuda", dtype=torch.bfloat16)
q, k, v, up, rope = r(B, N, H, nope + dim), r(B, N, H, nope + dim), r(B, N, H, E), r(B, N, H * (nope + E)), r(B, N, dim)
c = torch.randn(N, dim // 2, device="cuda")
part = q[..., nope:]
for heads in (8, 16, 32, 64):
    for warps in (2, 4, 8):
        kernels.HEADS, kernels.WARPS = heads, {"num_warps": warps}
        ls = [kernels.turn_launch(part, part, c, c, 1.0, True, 0), kernels.turn_launch(q, k, c, c, 1.0, True, nope), kernels.join_launch(up, rope, k, c, c, nope, E, True), kernels.unjoin_launch(k, v, up, rope, c, c, nope, True)]
        print(heads, warps, "turn in place, turn, join, unjoin us:", *(f"{timeit(lambda l=l: launch.run(l)):.1f}" for l in ls), flush=True)
