"""The CUDA kernels on a GPU, in one call of less than a minute: are they right, and how fast?

    python3 dev/cuda_trial.py                   both kernels; results also in $OUT
    python3 dev/cuda_trial.py --only sm90       one of them
    python3 dev/cuda_trial.py --compile         no GPU: fills build/cuda_cache, for a machine with the same NVRTC

The parent starts one process for each kernel. A process tells each case before it runs; one that is silent for 10 s, or
dies, is replaced by another that starts at the case after. Only one works on the GPU at a time.
"""
from __future__ import annotations

import argparse
import fcntl
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("FULMEN_CACHE_DIR", str(ROOT / "build" / "cuda_cache"))
LOCK = "/tmp/fulmen_cuda_trial.lock"
SILENCE = 10.0

# ------------------------------------------------------------------------------------------------- parent


def parent(names: list[str], seconds: float) -> int:
    out = open(Path(os.environ.get("OUT", "/tmp")) / "cuda_trial.txt", "w")
    started = time.time()
    lines: queue.Queue = queue.Queue()
    alive: dict[str, dict] = {}

    def say(text: str) -> None:
        print(text, flush=True)
        out.write(text + "\n")
        out.flush()

    def start(name: str, first: int) -> None:
        command = [sys.executable, "-u", __file__, "--child", name, "--first", str(first), "--until", str(started + seconds)]
        p = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True)
        alive[name] = {"p": p, "heard": time.time(), "case": first - 1, "what": "start", "waits": True,
                       "starts": alive.get(name, {}).get("starts", 0) + 1}

        def listen() -> None:
            for line in p.stdout:
                lines.put((name, p, line.rstrip("\n")))
            lines.put((name, p, None))

        threading.Thread(target=listen, daemon=True).start()

    def again(name: str, why: str) -> None:
        state = alive[name]
        say(f"[{name}] !!! {why} in case {state['case']}: {state['what']}")
        if state["starts"] < 6 and time.time() - started < seconds - 12 and state["case"] >= 0:
            start(name, state["case"] + 1)
        else:
            del alive[name]

    for name in names:
        start(name, 0)
    while alive:
        try:
            name, p, line = lines.get(timeout=0.5)
        except queue.Empty:
            name = None
        if name is not None and name in alive and alive[name]["p"] is p:
            state = alive[name]
            state["heard"] = time.time()
            if line is None:
                code = p.wait()
                if code == 0:
                    del alive[name]
                else:
                    again(name, f"died with code {code}")
            elif line.startswith("@case "):
                _, number, state["what"] = line.split(" ", 2)
                state["case"], state["waits"] = int(number), False
            elif line == "@wait":
                state["waits"] = True
            else:
                say(f"[{name}] {line}")
        for name, state in list(alive.items()):
            late = time.time() - started > seconds + 5
            if late or time.time() - state["heard"] > (45 if state["waits"] else SILENCE):
                try:
                    os.killpg(state["p"].pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
                if late:
                    say(f"[{name}] !!! out of time in case {state['case']}: {state['what']}")
                    del alive[name]
                else:
                    again(name, "HANG, killed")
    say(f"[trial] {time.time() - started:.1f} s")
    return 0


# ---------------------------------------------------------------------------------------------- the cases


def sm90_configs(D: int):
    from fulmen.flash.cuda_sm90 import Config

    if D == 128:
        return [Config(2, 128, 2, False), Config(2, 128, 2, True), Config(2, 176, 2, False)]
    return [Config(3, 128, 2, True), Config(3, 128, 2, False), Config(2, 128, 3, True), Config(3, 128, 3, False)]


def small_configs(D: int, N: int):
    from fulmen.flash.cuda import Config

    s = 2 if N <= 128 else 4
    if D == 64:
        return [Config(1, 4, 128, 2), Config(1, 2, 128, 2), Config(2, 4, 128, 2), Config(2, 2, 64, s), Config(4, 1, 64, s),
                Config(4, 2, 128, 2), Config(8, 1, 64, s, 2), Config(8, 1, 64, s, 1), Config(16, 1, 64, s, 1), Config(8, 1, 32, 4, 2)]
    return [Config(1, 4, 64, 2), Config(2, 2, 64, 2), Config(4, 1, 64, 2), Config(8, 1, 64, 2), Config(4, 1, 32, 4)]


SHAPES = [  # B, H, H_KV, N_Q, N_KV, causal, layout
    (1, 1, 1, 128, 128, False, "bhnd"),
    (1, 1, 1, 64, 128, False, "bhnd"),
    (1, 2, 2, 256, 256, True, "bhnd"),
    (2, 4, 2, 200, 200, True, "bnhd"),
    (1, 2, 1, 1, 300, True, "bhnd"),
    (2, 2, 2, 77, 301, True, "fused"),
    (1, 2, 2, 301, 77, True, "bhnd"),
    (1, 2, 2, 301, 77, "top_left", "bhnd"),
    (1, 2, 2, 77, 301, "top_left", "bhnd"),
    (3, 5, 5, 512, 512, False, "bnhd"),
    (32, 8, 8, 256, 256, False, "bhnd"),
    (1, 1, 1, 300, 1, False, "bhnd"),
]
LONG = [
    (1, 2, 2, 1024, 1024, False, "bhnd"),
    (2, 4, 1, 1000, 1000, True, "bnhd"),
    (1, 3, 3, 2049, 1500, True, "bhnd"),
    (1, 3, 3, 700, 1900, True, "fused"),
    (2, 16, 16, 2048, 2048, True, "bhnd"),
    (2, 40, 8, 1100, 1100, True, "bnhd"),
]


def cases(kernel: str) -> list[tuple]:
    """(kind, ...) in the order they are run: the plainest first."""
    import torch

    bf16, fp16 = torch.bfloat16, torch.float16
    found: list[tuple] = []
    if kernel == "small":
        for D in (64, 128):
            for dtype in (bf16, fp16):
                found += [("check", None, D, dtype, shape) for shape in SHAPES]
            for cfg in small_configs(D, 256):
                found += [("check", cfg, D, bf16, SHAPES[i]) for i in (2, 5, 9)]
        found += [("extras",)] + [("small times", dtype, size) for dtype in (bf16, fp16)
                                  for size in ((1, 1, 128), (8, 4, 128), (32, 8, 128), (32, 8, 256))]
        return found + [("small times", bf16, (32, 8, 512)), ("host",)]
    for D in (128, 64):
        configs = sm90_configs(D)
        found += [("check", configs[0], D, bf16, shape) for shape in SHAPES + LONG]
        found += [("check", configs[0], D, fp16, SHAPES[i]) for i in (0, 3, 9)]
        found += [("check", cfg, D, bf16, shape) for cfg in configs[1:] for shape in [SHAPES[0], SHAPES[5], SHAPES[6], *LONG[1:5]]]
    found += [("extras",)]
    rows = [(1, 32, 32, 4096, 128), (2, 16, 16, 8192, 128), (4, 32, 32, 4096, 64), (1, 40, 8, 2048, 128), (2, 12, 12, 2048, 64), (1, 16, 16, 16384, 128)]
    return found + [("long times", row, causal) for row in rows for causal in (False, True)]


def run_kernel(kernel: str, spec, x, cfg):
    from fulmen import hardware
    from fulmen.flash import cuda as small
    from fulmen.flash import cuda_sm90 as sm90
    from fulmen.flash.op import empty_lse
    from fulmen.boundary import empty_rows

    if kernel == "sm90":
        return sm90.forward(spec, x, cfg)
    if cfg is None:
        return small.forward(spec, x)
    o, lse = empty_rows(x.q, spec.H, spec.E), empty_lse(x.q)
    launch = small.small_launch(spec, hardware.of(spec.device), cfg, tuple(small.strides(x.q, x.k, x.v, o)), True)
    launch(x.q.data_ptr(), x.k.data_ptr(), x.v.data_ptr(), o.data_ptr(), lse.data_ptr())
    return o, lse


def check(kernel: str, cfg, D: int, dtype, shape) -> str | None:
    """None, or what is wrong and where."""
    import torch
    from fulmen.flash import reference
    from fulmen.flash.op import Residuals
    from fulmen.testing import flash as testing

    B, H, H_KV, N_Q, N_KV, causal, layout = shape
    x = testing.inputs(B, H, N_Q, D, N_KV=N_KV, H_KV=H_KV, dtype=dtype, device="cuda", causal=causal, layout=layout)
    spec = x.spec(with_lse=True)
    tensors = Residuals(x.q, x.k, x.v)
    torch.utils.deterministic.fill_uninitialized_memory = True  # NaN where nobody writes
    torch.use_deterministic_algorithms(True, warn_only=True)
    o, lse = run_kernel(kernel, spec, tensors, cfg)
    torch.use_deterministic_algorithms(False)
    torch.cuda.synchronize()
    exact_o, exact_lse = reference.attend(spec, x.q.double(), x.k.double(), x.v.double(), None)
    low_o, low_lse = testing._plain(x)
    blind = exact_lse == -torch.inf
    told = []
    if not torch.equal(lse == -torch.inf, blind):
        told.append(f"lse is -inf in the wrong rows: {int(((lse == -torch.inf) != blind).sum())}, first {first_index((lse == -torch.inf) != blind)}")
    exponent = float(exact_lse.masked_fill(blind, 0.0).abs().max())
    fine = torch.finfo(torch.float32).eps / torch.finfo(dtype).eps
    for name, got, low, exact, roundings in (
        ("lse", lse, low_lse, exact_lse, 4.0),
        ("o", o, low_o, exact_o, 1.0 + fine * 4.0 * exponent),
    ):
        hidden = blind if name == "lse" else blind[..., None]
        got, low, exact = (y.masked_fill(hidden, 0.0) if name == "lse" else y for y in (got, low, exact))
        try:
            testing.assert_close(name, got, low, exact, testing.FORWARD_FACTOR, roundings)
        except AssertionError as error:
            told.append(f"{str(error)[:300]}\n      {pattern(got, exact)}")
    if told:
        told.append(autopsy(kernel, cfg, D, dtype))
    return "\n      ".join(told) or None


def first_index(wrong) -> tuple:
    return tuple(int(i) for i in wrong.nonzero()[0]) if bool(wrong.any()) else ()


def pattern(got, exact) -> str:
    """Where elements are wrong: the first, how many, which rows and columns, NaN or not, a common factor."""
    import torch

    got = got.double()
    wrong = ~((got - exact).abs() <= 0.05 * exact.abs() + 0.02)
    if not bool(wrong.any()):
        return "no element is far off"
    at = first_index(wrong)
    rows = wrong.any(-1).any(0).any(0).nonzero().flatten().tolist() if wrong.ndim == 4 else wrong.any(0).any(0).nonzero().flatten().tolist()
    text = f"{int(wrong.sum())} of {wrong.numel()} far off, NaN {int(got.isnan().sum())}; first {at}: {float(got[at]):.5g} for {float(exact[at]):.5g}; rows {brief(rows)}"
    if wrong.ndim == 4:
        text += f"; columns {brief(wrong.any(0).any(0).any(0).nonzero().flatten().tolist())}; heads {brief(wrong.any(-1).any(-1).flatten().nonzero().flatten().tolist())}"
    ratio = (got / exact)[wrong & (exact.abs() > 0.02) & got.isfinite()]
    if ratio.numel():
        text += f"; got / exact median {float(ratio.median()):.4g} from {float(ratio.min()):.4g} to {float(ratio.max()):.4g}"
    return text


def brief(x: list[int]) -> str:
    """Runs of consecutive numbers."""
    runs, text = [], []
    for i in x:
        if runs and i == runs[-1][1] + 1:
            runs[-1][1] = i
        else:
            runs.append([i, i])
    text = [f"{a}-{b}" if b > a else f"{a}" for a, b in runs[:10]]
    return f"({len(x)}) " + " ".join(text) + (" ..." if len(runs) > 10 else "")


_dissected: set = set()


def autopsy(kernel: str, cfg, D: int, dtype) -> str:
    """Inputs that tell one fault from another; once for each configuration."""
    import torch
    from fulmen.flash.op import Residuals
    from fulmen.testing import flash as testing

    if (cfg, D) in _dissected:
        return "(autopsy above)"
    _dissected.add((cfg, D))
    told = ["autopsy, N_Q = N_KV = 128:"]
    x = testing.inputs(1, 1, 128, D, dtype=dtype, device="cuda")
    spec = x.spec(with_lse=True)
    key = torch.arange(128, device="cuda", dtype=torch.float32)[:, None].expand(128, D)
    column = torch.arange(D, device="cuda", dtype=torch.float32)[None, :].expand(128, D)
    zero, one = torch.zeros_like(x.q), torch.ones_like(x.q)
    eye = torch.zeros(1, 1, 128, D, device="cuda", dtype=dtype)
    for i in range(128):
        eye[0, 0, i, i % D] = 1.0
    like = lambda y: y.to(dtype)[None, None].contiguous()

    def go(name, q, k, v, exact):
        o, lse = run_kernel(kernel, spec, Residuals(q, k, v), cfg)
        torch.cuda.synchronize()
        bad = ~((o[0, 0].double() - exact).abs() <= 0.03 * exact.abs() + 0.03)
        text = "right" if not bool(bad.any()) else f"WRONG in {int(bad.sum())}: rows {brief(bad.any(1).nonzero().flatten().tolist())} columns {brief(bad.any(0).nonzero().flatten().tolist())}; row 0: {[round(float(y), 3) for y in o[0, 0, 0, :12]]} for {[round(float(y), 3) for y in exact[0, :12]]}; row 9: {[round(float(y), 3) for y in o[0, 0, 9, :6]]}; lse 0..3 {[round(float(y), 3) for y in lse[0, 0, :4]]}"
        told.append(f"{name}: {text}")

    ones = torch.ones(128, D, device="cuda", dtype=torch.float64)
    go("uniform weights, v = 1 (sums)", zero, zero, one, ones)
    go("uniform weights, v = column / 64 (columns of o)", zero, zero, like(column / 64), column.double() / 64)
    go("uniform weights, v = key / 64 (all keys once)", zero, zero, like(key / 64), ones * 63.5 / 64)
    half = like((key < 64).float())
    go("uniform weights, v = 1 for keys < 64", zero, zero, half, ones * 0.5)
    exact = torch.stack([torch.softmax((eye[0, 0].double() * 16) @ eye[0, 0].double()[i] * 16 * D**-0.5, 0) @ (key.double() / 64) for i in range(128)])
    go("query i picks keys = i mod D, v = key / 64 (rows of s and p)", eye * 16, eye * 16, like(key / 64), exact)
    return "\n        ".join(told)


# -------------------------------------------------------------------------------------------------- times


def graph_time(call, calls: int = 20, replays: int = 20) -> float:
    """us of device time a call, many in one CUDA graph, the least of some replays."""
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
    times = []
    for _ in range(replays):
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record()
        graph.replay()
        b.record()
        b.synchronize()
        times.append(a.elapsed_time(b) * 1e3 / calls)
    return sorted(times)[len(times) // 2]


def small_times(dtype, size) -> None:
    import torch
    from fulmen import hardware
    from fulmen.flash import cuda as small
    from fulmen.flash import sdpa
    from fulmen.flash import triton as triton_
    from fulmen.flash.op import Residuals
    from fulmen.testing import flash as testing

    B, H, N = size
    x = testing.inputs(B, H, N, 64, dtype=dtype, device="cuda")
    spec, tensors = x.spec(), Residuals(x.q, x.k, x.v)
    o = torch.empty_like(x.q)
    hw = hardware.of(spec.device)
    fa2 = graph_time(lambda: sdpa.forward(spec, tensors, implementation="flash"))
    cudnn = graph_time(lambda: sdpa.forward(spec, tensors, implementation="cudnn"))
    tri = graph_time(lambda: triton_.forward(spec, tensors))
    text = f"B{B} H{H} N{N} {str(dtype)[6:]}: FA2 {fa2:.2f}  cuDNN {cudnn:.2f}  triton {tri:.2f} |"
    chosen = small.config(spec, hw)
    for cfg in dict.fromkeys([chosen, *small_configs(64, N)]):
        for early in (True, False):
            try:
                launch = small.small_launch(spec, hw, cfg, tuple(small.strides(x.q, x.k, x.v, o)), early)
                t = graph_time(lambda: launch(x.q.data_ptr(), x.k.data_ptr(), x.v.data_ptr(), o.data_ptr(), 0))
                name = f"{cfg.warps_m}x{cfg.warps_n} n{cfg.block_n} s{cfg.stages} b{cfg.blocks_per_sm}"
                text += f" {'*' if cfg == chosen else ''}{name}{'' if early else ' late'} {t:.2f} ({t / fa2:.2f})"
            except Exception as error:
                text += f" {cfg}: {type(error).__name__}: {error}"
    print(text)


def host() -> None:
    """us of host time a call in a Python loop, B1 H1 N128 D64, and its parts."""
    import torch
    import fulmen
    from fulmen.flash import op
    from torch.nn import functional as F

    q, k, v = (torch.randn(1, 1, 128, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))

    def loop(call, n: int = 400) -> float:
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

    text = "host us a call:"
    text += f" F.sdpa {loop(lambda: F.scaled_dot_product_attention(q, k, v)):.2f}"
    for name in ("triton", "cuda"):
        text += f"  fulmen {name} {loop(lambda: fulmen.flash_attention(q, k, v, backend=name)):.2f}"
    plan = next(p for p in op._plans.values() if p.kernel.name == "cuda")
    cells = {c.cell_contents.__class__.__name__: c.cell_contents for c in plan.quick.__closure__}
    launch = cells["Launch"]
    o = torch.empty_like(q)
    a = (q.data_ptr(), k.data_ptr(), v.data_ptr(), o.data_ptr(), 0)
    slot = launch.slot()
    slot.config.stream = torch._C._cuda_getCurrentRawStream(0)
    launch.pack(slot.bytes, slot.offset, *a)
    text += f"  quick {loop(lambda: plan.quick(q, k, v)):.2f}  Launch {loop(lambda: launch(*a)):.2f}"
    text += f"  driver {loop(lambda: launch.run(slot.reference, launch.handle, slot.pointers, None)):.2f}  empty_like {loop(lambda: torch.empty_like(q)):.2f}"
    with torch.no_grad():
        text += f"  no_grad: F.sdpa {loop(lambda: F.scaled_dot_product_attention(q, k, v)):.2f} cuda {loop(lambda: fulmen.flash_attention(q, k, v, backend='cuda')):.2f}"
    print(text)


def long_times(row, causal: bool) -> None:
    import torch
    from fulmen.flash import sdpa, cuda_sm90
    from fulmen.flash.op import Residuals
    from fulmen.testing import flash as testing

    B, H, H_KV, N, D = row
    q = torch.randn(B, H, N, D, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(B, H_KV, N, D, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    x = testing.Inputs(q, k, v, None, None, None, causal, None, None, None, q, q)
    spec, tensors = x.spec(), Residuals(q, k, v)
    flush = torch.empty(256 << 20, dtype=torch.int8, device="cuda")
    calls = {"cudnn": lambda: sdpa.forward(spec, tensors, implementation="cudnn")}
    for cfg in sm90_configs(D):
        calls[f"{cfg.consumers}x64 n{cfg.block_n} s{cfg.stages}{' turns' if cfg.take_turns else ''}"] = lambda cfg=cfg: cuda_sm90.forward(spec, tensors, cfg)
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    for _ in range(9):
        for name, call in calls.items():
            flush.zero_()
            a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            a.record()
            call()
            b.record()
            b.synchronize()
            times[name].append(a.elapsed_time(b))
    flops = 4 * B * H * N * N * D * (0.5 if causal else 1.0)
    median = {name: sorted(t)[len(t) // 2] for name, t in times.items()}
    text = f"B{B} H{H}/{H_KV} N{N} D{D} {'causal' if causal else 'full'} TFLOP/s:"
    print(text, "  ".join(f"{name} {flops / t / 1e9:.0f} ({median['cudnn'] / t:.2f})" for name, t in median.items()))


def extras(kernel: str) -> None:
    """Repeats bit for bit, and for `small` gradients, views, streams and graphs through the public call."""
    import torch
    from fulmen.flash.op import Residuals
    from fulmen.testing import flash as testing

    for D in (64, 128):
        N = 500 if kernel == "small" else 1500
        for causal in (False, True):
            x = testing.inputs(4, 8, N, D, H_KV=4, dtype=torch.bfloat16, device="cuda", causal=causal)
            spec = x.spec(with_lse=True)
            cfg = sm90_configs(D)[0] if kernel == "sm90" else None
            want = run_kernel(kernel, spec, Residuals(x.q, x.k, x.v), cfg)
            differ = 0
            for _ in range(250):
                got = run_kernel(kernel, spec, Residuals(x.q, x.k, x.v), cfg)
                differ += not (torch.equal(got[0], want[0]) and torch.equal(got[1], want[1]))
            print(f"250 runs, D={D} causal={causal}: {differ} differ")
    if kernel == "small":
        x = testing.inputs(2, 4, 300, 64, H_KV=2, dtype=torch.bfloat16, device="cuda", causal=True)
        testing.check(x, "cuda")
        print("gradients through triton's backward: right")
        wide = {n: x.q.new_full((*getattr(x, n).shape[:3], 65), 3.0)[..., 1:].copy_(getattr(x, n)) for n in ("q", "k", "v")}
        testing.check(x._replace(**wide), "cuda")
        print("views that are not aligned: right")
        testing.check(x._replace(q=x.q[:1].expand_as(x.q), v=x.v[:, :, :1].expand_as(x.v)), "cuda")
        print("broadcast views: right")
        import fulmen
        print(fulmen.explain("flash", x.q, x.k, x.v, causal=True).splitlines()[1:])


# -------------------------------------------------------------------------------------------------- child


def label(case: tuple) -> str:
    return " ".join(str(part).replace("torch.", "") for part in case)


def child(kernel: str, first: int, until: float) -> int:
    started = time.time()
    import torch

    torch.cuda.init()
    from fulmen import cuda, dispatch

    dispatch.kernels("flash")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {cuda.describe()}, {time.time() - started:.1f} s to start")
    lock = open(LOCK, "w")
    passed = failed = 0
    todo = cases(kernel)
    holding = False
    for number, case in enumerate(todo):
        if number < first:
            continue
        if time.time() > until:
            print(f"out of time before case {number} of {len(todo)}")
            break
        timing = "times" in case[0] or case[0] == "host"
        if not holding:
            print("@wait")
            fcntl.flock(lock, fcntl.LOCK_EX)
            holding = True
        print(f"@case {number} {label(case)}")
        if case[0] == "check" and case[1] is not None and kernel == "small" and case[1].shared(case[2]) > 232_448:
            continue
        try:
            if case[0] == "check":
                wrong = check(kernel, *case[1:])
                passed, failed = passed + (wrong is None), failed + (wrong is not None)
                if wrong is not None and failed <= 12:
                    print(f"WRONG {label(case)}\n      {wrong}")
            elif case[0] == "extras":
                print(f"checks: {passed} right, {failed} wrong")
                extras(kernel)
            elif case[0] == "small times":
                small_times(*case[1:])
            elif case[0] == "long times":
                long_times(*case[1:])
            else:
                host()
        except Exception as error:
            failed += 1
            text = "".join(traceback.format_exception(error)[-3:])
            print(f"ERROR {label(case)}: {text.strip()[-700:]}")
            if "CUDA error" in str(error) or "CUDA driver" in str(error) or "launch failure" in str(error):
                return 3  # this context is lost
        if not timing:
            fcntl.flock(lock, fcntl.LOCK_UN)
            holding = False
    print(f"done: {passed} right, {failed} wrong")
    return 0


def compile_all() -> int:
    """Every variant of the trial, with the NVRTC at hand, into the cache; no GPU."""
    import torch
    from fulmen import cuda, hardware
    from fulmen.flash import cuda as small
    from fulmen.flash import cuda_sm90 as sm90
    from fulmen.flash.op import FlashSpec

    hw, found = hardware.TARGETS[90], set()

    def spec(D, dtype, shape):
        B, H, H_KV, N_Q, N_KV, causal, _ = shape
        return FlashSpec(B, H, H_KV, N_Q, N_KV, D, D, dtype, torch.device("cuda", 0), 1.0, right=0 if causal else None)

    for case in cases("small") + cases("sm90"):
        if case[0] == "check":
            s = spec(*case[2:])
            if isinstance(case[1], sm90.Config):
                found.add(sm90.variant(s, case[1]))
            else:
                found.add(small.variant(s, hw, case[1] or small.config(s, hw)))
        elif case[0] == "small times":
            B, H, N = case[2]
            s = spec(64, case[1], (B, H, H, N, N, False, ""))
            found |= {small.variant(s, hw, cfg) for cfg in (small.config(s, hw), *small_configs(64, N))}
        elif case[0] == "long times":
            B, H, H_KV, N, D = case[1]
            found |= {sm90.variant(spec(D, torch.bfloat16, (B, H, H_KV, N, N, case[2], "")), cfg) for cfg in sm90_configs(D)}
        elif case[0] == "extras":
            for D in (64, 128):
                for causal in (False, True):
                    for shape in ((4, 8, 4, 500, 500, causal, ""), (2, 4, 2, 300, 300, causal, "")):
                        s = spec(D, torch.bfloat16, shape)
                        found.add(small.variant(s, hw, small.config(s, hw)))
    print(cuda.describe(), f"{len(found)} variants")
    for variant in sorted(found):
        started = time.time()
        cuda.cubin(variant)
        if time.time() - started > 0.05:
            print(f"{time.time() - started:.2f} s {variant}")
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", choices=["small", "sm90"])
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--seconds", type=float, default=52.0)
    parser.add_argument("--child")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--until", type=float, default=0.0)
    a = parser.parse_args()
    if a.compile:
        sys.exit(compile_all())
    if a.child:
        sys.exit(child(a.child, a.first, a.until))
    sys.exit(parent([a.only] if a.only else ["small", "sm90"], a.seconds))
