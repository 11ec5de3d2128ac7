"""How fast? The times of dev/cuda_trial.py; one function for each kind of case."""
from __future__ import annotations

import time

from cuda_trial_cases import BEFORE, MORE, WINDOW_ROWS, configs, grouped_row, small_configs, tag, tile_of, timed_configs


def interleaved(calls: dict, rounds: int = 21) -> dict:
    """ms, the median of each over rounds in which all take turns, the L2 cache flushed before each."""
    import torch

    flush = torch.empty(256 << 20, dtype=torch.int8, device="cuda")
    for call in calls.values():
        call()
    events = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            flush.zero_()
            a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            a.record()
            call()
            b.record()
            events[name].append((a, b))
    torch.cuda.synchronize()
    return {name: sorted(a.elapsed_time(b) for a, b in pairs)[rounds // 2] for name, pairs in events.items()}


def report(text: str, median: dict, base: str, flops: float, chosen: str = "") -> None:
    print(text, " ".join(f"{'*' * (n == chosen)}{n} {flops / t / 1e9:.0f} ({median[base] / t:.3f})" for n, t in median.items()))


def long_times(row, causal: bool) -> None:
    import torch
    from fulmen import hardware
    from fulmen.flash import cuda, sdpa
    from fulmen.flash.op import Residuals
    from fulmen.testing import flash as testing

    B, H, H_KV, N, D = row
    q = torch.randn(B, H, N, D, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(B, H_KV, N, D, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    spec, tensors = testing.Inputs(q, k, v, None, None, None, causal, None, None, None, q, q).spec(), Residuals(q, k, v)
    calls = {"cudnn": lambda: sdpa.forward(spec, tensors, implementation="cudnn")}
    for cfg in configs(D):
        calls[tag(cfg)] = lambda cfg=cfg: cuda.forward(spec, tensors, cfg)
    flops = 4 * B * H * N * N * D * (0.5 if causal else 1.0)
    text = f"B{B} H{H}/{H_KV} N{N} D{D} {'causal' if causal else 'full'} TFLOP/s (over cuDNN):"
    report(text, interleaved(calls), "cudnn", flops, tag(cuda.config(spec, hardware.of(spec.device))))


def more_times(name: str) -> None:
    import torch
    from fulmen.flash import cuda, sdpa
    from fulmen.flash import triton as triton_
    from fulmen.flash.op import Residuals
    from fulmen.testing import flash as testing

    x = testing.inputs(**MORE[name], dtype=torch.bfloat16, device="cuda")
    spec, tensors = x.spec(), Residuals(x.q, x.k, x.v, x.sinks, x.cu_seqlens_q, x.cu_seqlens_q)
    calls = {"triton": lambda: triton_.forward(spec, tensors), "cuda": lambda: cuda.forward(spec, tensors)}
    if sdpa.supports(spec) is None:
        calls["cudnn"] = lambda: sdpa.forward(spec, tensors, implementation="cudnn")
    median = interleaved(calls)
    print(f"{name}, us:", " ".join(f"{n} {t * 1e3:.1f} ({median['triton'] / t:.2f})" for n, t in median.items()), cuda.detail(spec))


def graph_of(call, calls: int = 20):
    import torch

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    return graph


def small_times(size, dtype: str) -> None:
    """us of device time a call, 20 in a CUDA graph, graphs in turns."""
    import torch
    from fulmen import hardware
    from fulmen.flash import cuda, sdpa
    from fulmen.flash import triton as triton_
    from fulmen.flash.op import Residuals
    from fulmen.testing import flash as testing

    B, H, N = size
    x = testing.inputs(B, H, N, 64, dtype=getattr(torch, dtype), device="cuda")
    spec, tensors = x.spec(), Residuals(x.q, x.k, x.v)
    calls = {"FA2": lambda: sdpa.forward(spec, tensors, implementation="flash"),
             "cuDNN": lambda: sdpa.forward(spec, tensors, implementation="cudnn"), "triton": lambda: triton_.forward(spec, tensors)}
    chosen = cuda.config(spec, hardware.of(spec.device))
    for cfg in dict.fromkeys([chosen, *small_configs(N)]):
        calls[tag(cfg)] = lambda cfg=cfg: cuda.forward(spec, tensors, cfg)
    graphs = {name: graph_of(call) for name, call in calls.items()}
    times = {name: [] for name in graphs}
    for _ in range(21):
        for name, graph in graphs.items():
            a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            a.record()
            graph.replay()
            b.record()
            b.synchronize()
            times[name].append(a.elapsed_time(b) * 50)
    median = {name: sorted(t)[10] for name, t in times.items()}
    print(f"B{B} H{H} N{N} {dtype} us (over FA2):",
          " ".join(f"{'*' * (n == tag(chosen))}{n} {t:.2f} ({t / median['FA2']:.2f})" for n, t in median.items()))


def host() -> None:
    """us of host time a call in a Python loop, and its parts."""
    import torch
    import fulmen
    from fulmen.flash import op
    from torch.nn import functional as F

    def loop(call, n: int = 300) -> float:
        for _ in range(50):
            call()
        best = 1e9
        for _ in range(7):
            torch.cuda.synchronize()
            a = time.perf_counter()
            for _ in range(n):
                call()
            best = min(best, (time.perf_counter() - a) / n * 1e6)
        torch.cuda.synchronize()
        return best

    for B, H, N in ((1, 1, 128), (2, 64, 256)):  # the first in cuda_small.cu, the second in cuda_sm90.cu
        q, k, v = (torch.randn(B, H, N, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
        base = loop(lambda: F.scaled_dot_product_attention(q, k, v))
        text = f"host us a call, B{B} H{H} N{N}: F.sdpa {base:.2f}"
        for name in ("triton", "cuda", "auto"):
            t = loop(lambda: fulmen.flash_attention(q, k, v, backend=name))
            text += f"  {name} {t:.2f} ({t / base:.2f})"
        plan = next(p for p in op._plans.values() if p.kernel.name == "cuda" and p.spec.N_Q == N and p.quick is not None)
        text += f"  quick {loop(lambda: plan.quick(q, k, v)):.2f}  empty_like {loop(lambda: torch.empty_like(q)):.2f}"
        text += f"  _plain {loop(lambda: op._plain(q, k, v)):.2f}"
        cells = [c.cell_contents for c in plan.quick.__closure__]
        launch = next((c for c in cells if type(c).__name__ == "Launch"), None)
        if launch is not None:
            o = torch.empty_like(q)
            a = (q.data_ptr(), k.data_ptr(), v.data_ptr(), o.data_ptr(), 0)
            slot = launch.slot()
            slot.config.stream = torch._C._cuda_getCurrentRawStream(0)
            launch.pack(slot.bytes, slot.offset, *a)
            text += f"  Launch {loop(lambda: launch(*a)):.2f}  driver {loop(lambda: launch.run(slot.reference, launch.handle, slot.pointers, None)):.2f}"
        fast = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)
        if fast is not None:
            text += f"  _empty_strided_cuda {loop(lambda: fast(tuple(q.shape), q.stride(), q.dtype)):.2f}"
        with torch.no_grad():
            text += f"  no_grad: F.sdpa {loop(lambda: F.scaled_dot_product_attention(q, k, v)):.2f} cuda {loop(lambda: fulmen.flash_attention(q, k, v, backend='cuda')):.2f}"
        print(text)


# ---------------------------------------------------------------------------------------------- the last run


def several(spec, tensors, cfgs, fa2: bool = True) -> dict:
    """cuDNN, FlashAttention-2 and triton where they serve, and cuda with these tiles."""
    from fulmen.flash import cuda, sdpa
    from fulmen.flash import triton as triton_

    calls = {}
    for name, which in (("cudnn", "cudnn"), ("FA2", "flash")):
        if sdpa.supports(spec) is None and sdpa.lacks(spec, which) is None and (fa2 or which == "cudnn"):
            calls[name] = lambda which=which: sdpa.forward(spec, tensors, implementation=which)
    if spec.N_Q <= 256 or spec.left is not None:
        calls["triton"] = lambda: triton_.forward(spec, tensors)
    for cfg in dict.fromkeys(cfgs):
        calls[tag(cfg)] = lambda cfg=cfg: cuda.forward(spec, tensors, cfg)
    return calls


def made(options):
    import torch
    from fulmen.flash.op import Residuals
    from fulmen.testing import flash as testing

    B, H, N_Q, D = (options[n] for n in ("B", "H", "N_Q", "D"))
    H_KV, N_KV = options.get("H_KV", H), options.get("N_KV", N_Q)
    q = torch.randn(B, H, N_Q, D, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(B, H_KV, N_KV, D, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    sinks = torch.randn(H, device="cuda") if options.get("sinks") else None
    x = testing.Inputs(q, k, v, sinks, None, None, options.get("causal", False), options.get("window"), None, None, q, q)
    return x.spec(), Residuals(q, k, v, sinks)


def bar_times(row, causal: bool) -> None:
    """What `config` chooses now; "before": what it chose in run 2."""
    from fulmen import hardware
    from fulmen.flash import cuda, cuda_sm90

    B, H, H_KV, N, D = row
    spec, tensors = made({"B": B, "H": H, "H_KV": H_KV, "N_Q": N, "D": D, "causal": causal})
    chosen = cuda.config(spec, hardware.of(spec.device))
    before = {
        128: cuda_sm90.Config(2, 176, 2) if N >= 4096 or not causal else cuda_sm90.Config(2, 128, 2, True),
        64: cuda_sm90.Config(3, 128, 2, take_turns=not (causal and N >= 4096)),
    }[D]
    calls = several(spec, tensors, [chosen, before])
    flops = 4 * B * H * N * N * D * (0.5 if causal else 1.0)
    text = f"B{B} H{H}/{H_KV} N{N} D{D} {'causal' if causal else 'full'} TFLOP/s (over cuDNN; predicted {BEFORE[row][causal]:.3f}):"
    report(text, interleaved(calls), "cudnn", flops, tag(chosen))


def grouped_times(row, ratio: float) -> None:
    from fulmen import hardware
    from fulmen.flash import cuda

    options = grouped_row(row)
    spec, tensors = made(options)
    cfgs = timed_configs(options)
    chosen = cuda.config(spec, hardware.of(spec.device))
    median = interleaved(several(spec, tensors, [cfg._replace(grouped=g) for cfg in cfgs for g in (False, True)]))
    name = tag(cfgs[0])
    got = median[name] / median[tag(cfgs[0]._replace(grouped=True))]
    moved = (tensors.k.numel() + tensors.v.numel()) * 2 / 1e9
    print(f"B{spec.B} H{spec.H}/{spec.H_KV} N{spec.N_Q}/{spec.N_KV} D{spec.D}{' causal' * bool(row[6])}, grouped {got:.2f} times as fast "
          f"(predicted {ratio:.2f}), us (TB/s of k and v):",
          " ".join(f"{'*' * (n == tag(chosen))}{n} {t * 1e3:.1f} ({moved / t:.2f})" for n, t in median.items()))


def window_times(name: str) -> None:
    from fulmen import hardware
    from fulmen.flash import cuda

    spec, tensors = made(MORE[name])
    cfg, chosen = tile_of(MORE[name]), cuda.config(spec, hardware.of(spec.device))
    median = interleaved(several(spec, tensors, [cfg, cfg._replace(grouped=True)]))
    got = median[tag(cfg)] / median[tag(cfg._replace(grouped=True))]
    print(f"{name}, grouped {got:.2f} times as fast (predicted {WINDOW_ROWS[name]:.2f}), us:",
          " ".join(f"{'*' * (n == tag(chosen))}{n} {t * 1e3:.1f}" for n, t in median.items()))


def paired_times(row) -> None:
    """Forward and backward through autograd, causal: auto (cuda's forward, cuDNN's backward) against cuDNN alone."""
    import torch
    import fulmen

    B, H, H_KV, N, D = row
    _, (q, k, v, *_) = made({"B": B, "H": H, "H_KV": H_KV, "N_Q": N, "D": D})
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    do = torch.randn_like(q)

    def both(backend: str):
        return lambda: torch.autograd.grad(fulmen.flash_attention(q, k, v, causal=True, backend=backend), (q, k, v), do)

    median = interleaved({name: both(name) for name in ("sdpa", "cuda", "auto")})
    gain = 1 - 1 / BEFORE[row][1]  # of the forward, which is a quarter to a third of both
    print(f"B{B} H{H}/{H_KV} N{N} D{D} causal, forward and backward, us (over sdpa; predicted {1 / (1 - gain * 0.28):.3f}):",
          " ".join(f"{n} {t * 1e3:.1f} ({median['sdpa'] / t:.3f})" for n, t in median.items()))


TIMES = {"long": long_times, "more": more_times, "small": small_times, "host": host, "bar": bar_times,
         "grouped_time": grouped_times, "window_time": window_times,
         "paired_time": paired_times}
