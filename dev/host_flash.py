"""The host's time for a short call, beside torch's, in turns; then what it consists of.

    PYTHONPATH=. python3 dev/host_flash.py      # on the GPU; 20 s

A host changes its speed by half within seconds. So turns are short, and a ratio is the median of the ratios of turns that
follow each other.
"""
import statistics
import time
import torch
import fulmen
from fulmen.flash import op

F = torch.nn.functional
CALLS, ROUNDS = 100, 61


def us(call):
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(CALLS):
        call()
    return (time.perf_counter() - start) / CALLS * 1e6  # the GPU takes less: it never fills its queue


def in_turns(calls):
    for call in calls.values():
        us(call)
    times = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name, call in calls.items():
            times[name].append(us(call))
    first = next(iter(times.values()))
    return {name: (statistics.median(t), statistics.median(a / b for a, b in zip(t, first))) for name, t in times.items()}


for dtype in (torch.bfloat16, torch.float16):
    for B, H, N in ((1, 1, 128), (8, 4, 128), (32, 8, 128), (32, 8, 256)):  # of the last the GPU sets the pace, if it does
        q, k, v = (torch.randn(B, H, N, 64, device="cuda", dtype=dtype) for _ in range(3))
        calls = {"F.sdpa": lambda: F.scaled_dot_product_attention(q, k, v), "auto": lambda: fulmen.flash_attention(q, k, v)}
        calls |= {name: (lambda name=name: fulmen.flash_attention(q, k, v, backend=name)) for name in ("cuda", "triton")}
        for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
            with mode():
                t = in_turns(calls)
            print(f"{str(dtype)[6:]:8s} B{B} H{H} N{N} {mode.__name__:14s} us:",
                  ", ".join(f"{name} {x:.2f} ({ratio:.2f})" for name, (x, ratio) in t.items()), flush=True)

q, k, v = (torch.randn(1, 1, 128, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
fulmen.flash_attention(q, k, v, backend="cuda")
alike, quick = op._recent[False, None, None, None, "cuda", False][0]
launch = next(c.cell_contents for c in quick.__closure__ if type(c.cell_contents).__name__ == "Launch")
o = torch.empty_like(q)
addresses = (q.data_ptr(), k.data_ptr(), v.data_ptr(), o.data_ptr(), 0)
slot = launch.slot()
slot.config.stream = torch._C._cuda_getCurrentRawStream(0)
launch.pack(slot.bytes, slot.offset, *addresses)
new = next(c.cell_contents for c in quick.__closure__ if getattr(c.cell_contents, "__name__", "") in ("<lambda>", "empty_like"))
parts = {"the call": lambda: fulmen.flash_attention(q, k, v, backend="cuda"), "recognising": lambda: alike(q, k, v), "prepared call": lambda: quick(q, k, v),
         "empty_like": lambda: torch.empty_like(q), "a new tensor": lambda: new(q), "Launch": lambda: launch(*addresses),
         "driver": lambda: launch.run(slot.reference, launch.handle, slot.pointers, None), "nothing": lambda: None}
print("us:", ", ".join(f"{name} {x:.2f}" for name, (x, _) in in_turns(parts).items()))
