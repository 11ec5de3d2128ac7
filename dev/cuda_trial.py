"""Backend `cuda` on a GPU, in one call of about a minute: is it right, and how fast?

    python3 dev/cuda_trial.py                   everything; results also in $OUT
    python3 dev/cuda_trial.py --only check      or `time`
    python3 dev/cuda_trial.py --compile         no GPU: fills $FULMEN_CACHE_DIR, or build/cuda_cache
    python3 dev/cuda_trial.py --ncu             the command line that profiles one launch of the kernel
    python3 dev/cuda_trial.py --one             what that command runs

All variants are compiled first, as many at a time as there are cores. Then the parent starts two processes, `check` and
`time`. A process tells each case before it runs; one that is silent for 20 s, or dies, is replaced by another that starts
at the case after. Only one works on the GPU at a time. Times are medians of 21 rounds in which all candidates take turns.
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
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("FULMEN_CACHE_DIR", str(ROOT / "build" / "cuda_cache"))
LOCK = "/tmp/fulmen_cuda_trial.lock"
SILENCE = 20.0

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

ROWS = [  # B, H, H_KV, N, D: those of shared/h200.md
    (1, 32, 32, 4096, 128), (2, 16, 16, 8192, 128), (1, 40, 8, 2048, 128), (1, 16, 16, 16384, 128),
    (4, 32, 32, 4096, 64), (2, 12, 12, 2048, 64),
]
SMALL = [(1, 1, 128), (8, 4, 128), (32, 8, 128), (32, 8, 256), (32, 8, 512)]
MORE = {  # rows that are not in h200.md, against triton and, where it can, cuDNN
    "D=256 causal": {"B": 1, "H": 32, "H_KV": 2, "N_Q": 4096, "D": 256, "causal": True},
    "D=256": {"B": 1, "H": 16, "N_Q": 4096, "D": 256},
    "192/128 causal": {"B": 1, "H": 32, "N_Q": 4096, "D": 192, "E": 128, "causal": True},
    "192/128": {"B": 1, "H": 32, "N_Q": 4096, "D": 192, "E": 128},
    "window 1024": {"B": 1, "H": 32, "N_Q": 8192, "D": 128, "causal": True, "window": (1023, None)},
    "window 128, D=64, sinks": {"B": 1, "H": 64, "H_KV": 8, "N_Q": 8192, "D": 64, "causal": True, "window": (127, None), "sinks": True},
    "softcap": {"B": 1, "H": 32, "N_Q": 4096, "D": 128, "causal": True, "softcap": 30.0},
    "packed 8 x 1024": {"H": 32, "D": 128, "causal": True, "lengths_q": [1024] * 8},
    "packed, uneven": {"H": 32, "D": 128, "causal": True, "lengths_q": [100, 3000, 17, 1500, 700, 2500, 1, 374]},
    "D=64 N=512, H 256": {"B": 32, "H": 8, "N_Q": 512, "D": 64},
    "D=128 N=512, H 256": {"B": 32, "H": 8, "N_Q": 512, "D": 128},
    "D=128 N=1024 causal": {"B": 8, "H": 16, "N_Q": 1024, "D": 128, "causal": True},
}


def configs(D: int):
    """For the rows of h200.md: the first run's known-good tiles with heads in parts, then what is new."""
    from fulmen.flash.cuda_sm90 import Config

    if D == 128:
        return [Config(2, 176, 2, together=False), Config(2, 176, 2), Config(2, 160, 2), Config(2, 128, 2, True), Config(2, 128, 2)]
    return [Config(3, 128, 2, together=False), Config(3, 128, 2), Config(3, 128, 2, True), Config(2, 128, 2, True), Config(1, 128, 2, blocks_per_sm=2)]


def small_configs(N: int):
    from fulmen.flash import cuda_sm90, cuda_small

    s = 2 if N <= 128 else 4
    return [cuda_small.Config(4, 2, 128, 2), cuda_small.Config(4, 1, 64, s), cuda_small.Config(8, 1, 64, s, 2),
            cuda_sm90.Config(1, 128, 2, blocks_per_sm=2), cuda_sm90.Config(2, 128, 2)]


def tag(cfg) -> str:
    if hasattr(cfg, "warps_m"):
        return f"mma {cfg.warps_m}x{cfg.warps_n} n{cfg.block_n} s{cfg.stages}"
    return f"{cfg.rows}x{cfg.block_n}{' turns' * cfg.take_turns}{' parts' * (not cfg.together)}"


def gpu_cases():
    sys.path.insert(0, str(ROOT / "tests" / "flash"))
    import test_backends

    return test_backends.GPU_CASES


FORCED = [  # shapes on which every config of `configs` is checked, forward
    {"B": 1, "H": 2, "N_Q": 77, "N_KV": 301, "causal": True}, {"B": 1, "H": 2, "N_Q": 301, "N_KV": 77, "causal": True},
    {"B": 2, "H": 4, "H_KV": 1, "N_Q": 1000, "causal": True, "layout": "bnhd"}, {"B": 1, "H": 3, "N_Q": 2049, "N_KV": 1500},
    {"B": 2, "H": 40, "H_KV": 8, "N_Q": 1100, "causal": True},
]


GRADIENTS = ["D=64 causal", "D=128 causal", "heads 8/2", "short D=64", "window 128, causal", "softcap", "packed, causal",
             "packed, cross", "D=192 E=128", "D=256 causal", "N_Q>N_KV, bottom right"]


def cases(kind: str) -> list[tuple]:
    if kind == "check":
        found = [("case", name, dtype) for name in gpu_cases() for dtype in ("bfloat16", "float16")]
        found += [("forced", D, i, j) for D in (128, 64) for i in range(len(configs(D))) for j in range(len(FORCED))]
        found += [("strangers",), ("graph",), ("repeat",), ("gradients",)]
        return found + [("case", name, "bfloat16", True) for name in GRADIENTS]  # last: Triton compiles for each
    rows = [("long", row, causal) for row in ROWS for causal in (False, True)]
    return [("host",), *[("small", size, "bfloat16") for size in SMALL], *rows, *[("more", name) for name in MORE],
            *[("small", size, "float16") for size in SMALL[:4]]]


# ------------------------------------------------------------------------------------------------- checks


def compare(x, o, lse) -> None:
    """Against fp64, with the tolerance of the tests."""
    import torch
    from fulmen.flash import reference
    from fulmen.flash.op import Residuals
    from fulmen.testing import flash as testing

    torch.cuda.synchronize()
    y = x.to(torch.float64)
    offsets = x.cu_seqlens_q, x.cu_seqlens_q if x.cu_seqlens_k is None else x.cu_seqlens_k
    exact_o, exact_lse = reference.forward(y.spec(), Residuals(y.q, y.k, y.v, y.sinks, *offsets))
    low_o, low_lse = testing._plain(x)
    blind = exact_lse == -torch.inf
    assert torch.equal(lse == -torch.inf, blind), "lse is -inf in the wrong rows"
    exponent = float(exact_lse.masked_fill(blind, 0.0).abs().max()) if lse.numel() else 0.0
    fine = torch.finfo(torch.float32).eps / torch.finfo(x.q.dtype).eps
    hide = lambda z: z.masked_fill(blind, 0.0)
    testing.assert_close("lse", hide(lse), hide(low_lse), hide(exact_lse), testing.FORWARD_FACTOR, 4.0)
    testing.assert_close("o", o, low_o, exact_o, testing.FORWARD_FACTOR, 1.0 + fine * 4.0 * exponent)


def check_case(name: str, dtype: str, gradients: bool = False) -> str | None:
    """Through the public call, NaN where nobody writes: o and lse, or with triton's backward all gradients, too."""
    import torch
    from fulmen.flash import cuda
    from fulmen.testing import flash as testing

    x = testing.inputs(**gpu_cases()[name], dtype=getattr(torch, dtype), device="cuda")
    if (why := cuda.supports(x.spec(with_lse=True, needs_grad=gradients))) is not None:
        return f"skip: {why}"
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        if gradients:
            testing.check(x, "cuda", ("o", "lse"))
        else:
            with torch.no_grad():
                compare(x, *testing.backend("cuda")(x))
    finally:
        torch.use_deterministic_algorithms(False)
    return None


def check_forced(D: int, i: int, j: int) -> None:
    import torch
    from fulmen.flash import cuda
    from fulmen.flash.op import Residuals
    from fulmen.testing import flash as testing

    x = testing.inputs(D=D, **FORCED[j], dtype=torch.bfloat16, device="cuda")
    compare(x, *cuda.forward(x.spec(with_lse=True), Residuals(x.q, x.k, x.v), configs(D)[i]))


def check_strangers() -> None:
    """What lies beyond the end of a sequence, or of all, is never used: it may be NaN."""
    import torch
    import fulmen
    from fulmen.testing import flash as testing

    for D, E in ((64, 64), (128, 128), (192, 128), (256, 256)):
        for causal in (False, True):
            x = testing.inputs(1, 2, D=D, E=E, lengths_q=[70, 300, 5, 200], causal=causal, dtype=torch.bfloat16, device="cuda")
            want = fulmen.flash_attention(x.q, x.k, x.v, cu_seqlens_q=x.cu_seqlens_q, causal=causal, backend="cuda")
            part = slice(70, 370)
            k, v = x.k.clone(), x.v.clone()
            k[:, :, :70] = v[:, :, :70] = k[:, :, 370:] = v[:, :, 370:] = float("nan")
            got = fulmen.flash_attention(x.q, k, v, cu_seqlens_q=x.cu_seqlens_q, causal=causal, backend="cuda")
            assert torch.equal(got[:, :, part], want[:, :, part]), (D, causal, int(got[:, :, part].isnan().sum()))
            pages = torch.full((1, 2, 600, D), float("nan"), device="cuda", dtype=torch.bfloat16)
            pages[:, :, :300] = x.k[:, :, :300]
            got = fulmen.flash_attention(x.q[:, :, :300], pages[:, :, :300], x.v[:, :, :300], causal=causal, backend="cuda")
            assert not bool(got.isnan().any()), (D, causal, "a view")


def check_graph() -> None:
    import torch
    import fulmen
    from fulmen.testing import flash as testing

    x = testing.inputs(1, 4, D=128, lengths_q=[500, 0, 1, 1547], causal=True, dtype=torch.bfloat16, device="cuda")
    call = lambda: fulmen.flash_attention(x.q, x.k, x.v, cu_seqlens_q=x.cu_seqlens_q, causal=True, backend="cuda")
    graph = torch.cuda.CUDAGraph()
    call()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    call()
    torch.cuda.set_sync_debug_mode("default")
    with torch.cuda.graph(graph):
        captured = call()
    x.cu_seqlens_q.copy_(torch.tensor([0, 0, 3, 1900, 2048]))
    x.q.normal_()
    graph.replay()
    assert torch.equal(captured, call())


def check_repeat() -> None:
    import torch
    import fulmen
    from fulmen.testing import flash as testing

    for D, E in ((64, 64), (128, 128), (192, 128), (256, 256)):
        for options in ({"N_Q": 1500, "causal": True}, {"N_Q": 1500}, {"lengths_q": [700, 1, 799], "causal": True, "window": (200, None), "sinks": True}):
            x = testing.inputs(4, 8, D=D, E=E, H_KV=4, dtype=torch.bfloat16, device="cuda", **options)
            call = lambda: fulmen.flash_attention_with_lse(x.q, x.k, x.v, **x.options(), backend="cuda")
            want = call()
            differ = sum(not (torch.equal(a, want[0]) and torch.equal(b, want[1])) for a, b in (call() for _ in range(250)))
            assert not differ, (D, options, f"{differ} of 250 runs differ")


def check_gradients() -> None:
    """Larger calls with gradients, against triton, which has the same backward."""
    import torch
    from fulmen.testing import flash as testing

    for D in (64, 128):
        x = testing.inputs(2, 16, 4096, D, H_KV=4, causal=True, dtype=torch.bfloat16, device="cuda")
        a, b = (testing.evaluate(testing.backend(name), x) for name in ("cuda", "triton"))
        for name in ("o", "lse", "dq", "dk", "dv"):
            far = float((getattr(a, name).float() - getattr(b, name).float()).abs().max() / getattr(b, name).float().abs().max())
            assert far < 0.02, (D, name, far)


# -------------------------------------------------------------------------------------------------- times


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


# -------------------------------------------------------------------------------------------------- child


def label(case: tuple) -> str:
    return " ".join(str(part).replace("torch.", "") for part in case)


RUN = {"case": check_case, "forced": check_forced, "strangers": check_strangers, "graph": check_graph, "repeat": check_repeat,
       "gradients": check_gradients, "long": long_times, "more": more_times, "small": small_times, "host": host}


def child(kind: str, first: int, until: float) -> int:
    started = time.time()
    import torch

    torch.cuda.init()
    from fulmen import cuda, dispatch

    dispatch.kernels("flash")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {cuda.describe()}, {time.time() - started:.1f} s to start")
    right = wrong = skipped = 0
    todo = cases(kind)
    with open(LOCK, "w") as lock:
        for number, case in enumerate(todo):
            if number < first:
                continue
            if time.time() > until:
                print(f"out of time before case {number} of {len(todo)}")
                break
            print("@wait")
            fcntl.flock(lock, fcntl.LOCK_EX)
            print(f"@case {number} {label(case)}")
            try:
                said = RUN[case[0]](*case[1:])
                skipped += said is not None
                right += said is None
            except Exception as error:
                wrong += 1
                if wrong <= 20:
                    print(f"WRONG {label(case)}: {''.join(traceback.format_exception(error)[-2:]).strip()[-900:]}")
                if "CUDA error" in str(error) or "CUDA driver" in str(error) or "launch failure" in str(error):
                    return 3  # this context is lost
            torch.cuda.synchronize()
            fcntl.flock(lock, fcntl.LOCK_UN)
    print(f"done: {right} right, {wrong} wrong, {skipped} refused")
    return 0


# ---------------------------------------------------------------------------------------------- compiling


def compile_one(variant) -> tuple[float, str]:
    from fulmen import cuda

    started = time.time()
    try:
        cuda.cubin(variant)
    except cuda.Unavailable as error:
        return time.time() - started, f"{variant}: {error}"
    return time.time() - started, ""


def variants() -> list:
    """Of everything the trial runs; no GPU is needed to know."""
    import torch
    from fulmen import hardware
    from fulmen.flash import cuda, cuda_sm90, cuda_small
    from fulmen.testing import flash as testing

    hw, found = hardware.TARGETS[90], {}

    def need(spec, cfg=None, sinks=None):
        spec = spec._replace(device=torch.device("cuda", 0))
        cfg = cfg or cuda.config(spec, hw)
        found[cuda_small.variant(spec, hw, cfg) if isinstance(cfg, cuda_small.Config) else cuda_sm90.variant(spec, cfg, sinks)] = None

    def spec_of(options, dtype):
        """Of testing.inputs, on tensors without memory."""
        o = dict(options)
        D, H = o.get("D", 16), o.get("H", 2)
        q_, k_ = (sum(o[n]) if o.get(n) is not None else None for n in ("lengths_q", "lengths_k"))
        N_Q = q_ if q_ is not None else o.get("N_Q", 64)
        N_KV = k_ if k_ is not None else N_Q if o.get("N_KV") is None else o["N_KV"]
        new = lambda heads, N, size: torch.empty(o.get("B", 1) if q_ is None else 1, heads, N, size, dtype=dtype, device="meta")
        H_KV = o.get("H_KV") or H
        cu = [None if o.get(n) is None else torch.empty(len(o[n]) + 1, dtype=torch.int32, device="meta") for n in ("lengths_q", "lengths_k")]
        sinks = torch.empty(H, device="meta") if o.get("sinks") else None
        q, k, v = new(H, N_Q, D), new(H_KV, N_KV, D), new(H_KV, N_KV, o.get("E") or D)
        return testing.Inputs(q, k, v, sinks, *cu, o.get("causal", False), o.get("window"), o.get("softcap"), o.get("scale"), q, q).spec()

    for row in ROWS:
        B, H, H_KV, N, D = row
        for causal in (False, True):
            for cfg in configs(D):
                need(spec_of({"B": B, "H": H, "H_KV": H_KV, "N_Q": N, "D": D, "causal": causal}, torch.bfloat16), cfg)
    for B, H, N in [*SMALL, (2, 64, 256)]:
        for dtype in (torch.bfloat16, torch.float16):
            for cfg in [None, *small_configs(N)]:
                need(spec_of({"B": B, "H": H, "N_Q": N, "D": 64}, dtype), cfg)
    every = [(o, d) for o in gpu_cases().values() for d in (torch.bfloat16, torch.float16)] + [(o, torch.bfloat16) for o in MORE.values()]
    for D, E in cuda_sm90.HEAD_DIMS:
        every += [({"D": D, "E": E, "N_Q": N, "causal": causal}, torch.bfloat16) for causal in (False, True) for N in (300, 1500)]
        every += [({"D": D, "E": E, "lengths_q": [700, 1, 799], "causal": causal}, torch.bfloat16) for causal in (False, True)]
        every += [({"D": D, "E": E, "lengths_q": [700, 1, 799], "causal": True, "window": (200, None), "sinks": True}, torch.bfloat16)]
    for options, dtype in every:
        spec = spec_of(options, dtype)
        if spec.scale > 0 and cuda_sm90.lacks(spec) is None:
            need(spec)
    return list(found)


def compile_all() -> int:
    from fulmen import cuda

    started = time.time()
    todo = variants()
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        told = list(pool.map(compile_one, todo))
    for _, why in told:
        if why:
            print("WRONG", why)
    print(f"{cuda.describe()}; {len(todo)} variants in {time.time() - started:.1f} s, the longest {max(t for t, _ in told):.1f} s", flush=True)
    return 0


NCU = """\
ncu --clock-control none --launch-skip 2 --launch-count 1 -k regex:flash_sm90 --section SpeedOfLight --section WarpStateStats \\
    --section InstructionStats python3 dev/cuda_trial.py --one
(B2 H16 N8192 D128 causal, bf16; the third launch. Add --section MemoryWorkloadAnalysis for L2.)"""


def one() -> int:
    import torch
    import fulmen

    q, k, v = (torch.randn(2, 16, 8192, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    for _ in range(4):
        fulmen.flash_attention(q, k, v, causal=True, backend="cuda")
    torch.cuda.synchronize()
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", choices=["check", "time"])
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--ncu", action="store_true")
    parser.add_argument("--one", action="store_true")
    parser.add_argument("--seconds", type=float, default=65.0)
    parser.add_argument("--child")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--until", type=float, default=0.0)
    a = parser.parse_args()
    if a.ncu:
        print(NCU)
        sys.exit(0)
    if a.one:
        sys.exit(one())
    if a.compile:
        sys.exit(compile_all())
    if a.child:
        sys.exit(child(a.child, a.first, a.until))
    began = time.time()
    compile_all()
    sys.exit(parent([a.only] if a.only else ["time", "check"], a.seconds - (time.time() - began)))
