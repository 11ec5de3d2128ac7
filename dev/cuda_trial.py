"""Backend `cuda` on a GPU, in one call of about a minute: is it right, and how fast?

    python3 dev/cuda_trial.py                   everything; results also in $OUT
    python3 dev/cuda_trial.py --only check      or `time`
    python3 dev/cuda_trial.py --final           what is new since run 2, in 95 s: grouped heads, other tiles, gradients
    python3 dev/cuda_trial.py --sanitize        small calls, for compute-sanitizer; --sanitizer prints its command lines
    python3 dev/cuda_trial.py --compile         no GPU: fills $FULMEN_CACHE_DIR, or build/cuda_cache
    python3 dev/cuda_trial.py --ncu             the command line that profiles one launch of the kernel
    python3 dev/cuda_trial.py --one             what that command runs

All variants are compiled first, as many at a time as there are cores. Then the parent starts two processes, `check` and
`time`. A process tells each case before it runs; one that is silent for 20 s, or dies, is replaced by another that starts
at the case after. Only one works on the GPU at a time. Times are medians of 21 rounds in which all candidates take turns.
What is run: cuda_trial_cases.py; how: cuda_trial_checks.py and cuda_trial_times.py.
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


# -------------------------------------------------------------------------------------------------- child


def label(case: tuple) -> str:
    return " ".join(str(part).replace("torch.", "") for part in case)


def child(kind: str, first: int, until: float) -> int:
    started = time.time()
    import torch

    torch.cuda.init()
    from cuda_trial_cases import cases
    from cuda_trial_checks import CHECKS
    from cuda_trial_times import TIMES
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
                said = (CHECKS | TIMES)[case[0]](*case[1:])
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


def compile_all() -> int:
    from cuda_trial_cases import variants
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


# -------------------------------------------------------------------------------------------------- tools

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


SANITIZER = """\
compute-sanitizer --tool memcheck --report-api-errors no python3 dev/cuda_trial.py --sanitize > $OUT/cuda_memcheck.txt 2>&1
compute-sanitizer --tool racecheck python3 dev/cuda_trial.py --sanitize > $OUT/cuda_racecheck.txt 2>&1"""


def sanitize() -> int:
    """Tensors are made on the CPU: no kernel but ours runs, so the tools have little to watch."""
    import torch
    from cuda_trial_cases import gpu_cases, grouped_configs  # noqa: F401  (finds the tests)
    from fulmen.flash import cuda
    from fulmen.flash.op import Residuals
    from fulmen.testing import flash as testing

    tiny = [{"B": 1, "H": 4, "H_KV": 1, "N_Q": 3, "N_KV": 170, "causal": True}, {"B": 1, "H": 4, "H_KV": 2, "N_Q": 77, "causal": True},
            {"H": 4, "H_KV": 1, "lengths_q": [1, 0, 40], "lengths_k": [90, 5, 33], "causal": True, "window": (20, None), "sinks": True}]
    for D, E in ((64, 64), (128, 128), (192, 128), (256, 256)):
        for options in tiny:
            x = testing.inputs(D=D, E=E, **options, dtype=torch.bfloat16)
            offsets = x.cu_seqlens_q, x.cu_seqlens_k
            tensors = Residuals(*(None if t is None else t.cuda() for t in (x.q, x.k, x.v, x.sinks, *offsets)))
            spec = x.spec(with_lse=True)._replace(device=tensors.q.device)
            for cfg in grouped_configs(D):
                for grouped in (False, True):
                    o, lse = cuda.forward(spec, tensors, cfg._replace(grouped=grouped))
                    assert bool(torch.isfinite(o.cpu()).all()), (D, options, cfg)
                    print(D, E, options, cfg._replace(grouped=grouped), flush=True)
    print("done")
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", choices=["check", "time"])
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--ncu", action="store_true")
    parser.add_argument("--one", action="store_true")
    parser.add_argument("--final", action="store_true")
    parser.add_argument("--sanitize", action="store_true")
    parser.add_argument("--sanitizer", action="store_true")
    parser.add_argument("--seconds", type=float)
    parser.add_argument("--child")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--until", type=float, default=0.0)
    a = parser.parse_args()
    if a.ncu:
        print(NCU)
        sys.exit(0)
    if a.sanitizer:
        print(SANITIZER)
        sys.exit(0)
    if a.one or a.sanitize:
        sys.exit(one() if a.one else sanitize())
    if a.compile:
        sys.exit(compile_all())
    if a.child:
        sys.exit(child(a.child, a.first, a.until))
    began = time.time()
    compile_all()
    kinds = [a.only] if a.only else ["time", "check"]
    kinds = [f"final_{kind}" for kind in kinds] if a.final else kinds
    seconds = a.seconds or (90.0 if a.final else 65.0)  # and 5 more before what is still running is ended
    sys.exit(parent(kinds, seconds - (time.time() - began)))
