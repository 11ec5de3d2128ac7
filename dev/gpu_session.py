"""The benchmark tool's jobs on a GPU, one after the other, from this tree; everything goes to $OUT (or build/session).

    python3 dev/gpu_session.py suites again compare base resume     # 6.5 min on an H200, kernels to compile included
    python3 dev/gpu_session.py small layers tune parallel           # 5.5 min
    python3 dev/gpu_session.py tests bars sanitize                  # 10 min
    python3 dev/gpu_session.py --list                               # what the stages do and how long they take

Results name their commit, and `base` needs another one, so send a small clone, and a folder in case git stays behind:

    git clone --depth 20 file://$PWD build/clone && git rev-parse HEAD > build/clone/.git_archival.txt
    mkdir build/base && git archive HEAD~1 fulmen .git_archival.txt | tar -x -C build/base

and run it in build/clone. `base` measures against --base; without it against HEAD~1, or without git against ../base.
A stage that fails or outlasts its limit does not end the session; the exit status is the number of those.
"""
from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OUT = Path(os.environ.get("OUT") or ROOT / "build" / "session").resolve()
CHECKS = OUT / "checks"  # packed into one file at the end: few files come back from a lent machine
ENV = os.environ | {
    "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", "COLUMNS": "160",
    "FULMEN_CACHE_DIR": os.environ.get("FULMEN_CACHE_DIR") or str(ROOT / "build" / "cuda_cache"),
    "GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "safe.directory", "GIT_CONFIG_VALUE_0": "*",  # files of another user
}
BENCH = [sys.executable, "-m", "fulmen", "bench"]


def say(text: str) -> None:
    print(text, flush=True)
    with (OUT / "session.log").open("a") as log:
        log.write(text + "\n")


def start(command: list) -> subprocess.Popen:
    """SIGINT as usual, also where the shell that started us has it ignored: the tool is interrupted by it."""
    say("$ " + " ".join(map(str, command)))
    return subprocess.Popen(
        [str(c) for c in command], cwd=ROOT, env=ENV, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def run(*command, into: Path | None = None, show: int = 15, limit: float = 300) -> int:
    """Runs it, all of its output in `into` (or the log) and its last lines here; -1: it took longer than `limit`."""
    process = start(list(command))
    try:
        text, _ = process.communicate(timeout=limit)
        code = process.returncode
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)  # keeps what is done
        try:
            text, _ = process.communicate(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            text, _ = process.communicate()
        code = -1
    if into is not None:
        into.write_text(text)
    lines = text.rstrip().splitlines()
    say("\n".join(lines[-show:]))
    return code


def records(path: Path) -> list[dict]:
    """Whole lines of a file that may still be written."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def tell(path: Path) -> None:
    """What a results file holds."""
    counts: dict = {}
    for r in records(path):
        if r["kind"] == "run":
            say(f"{path.name}: commit {r['commit']['sha']}, source {r['commit']['source']}, {r['environment']['device']}")
        else:
            key = f"{r['competitor']} ({r['status']})"
            counts[key] = counts.get(key, 0) + 1
    say("  " + ", ".join(f"{n} {key}" for key, n in sorted(counts.items())))


# ------------------------------------------------------------------------------------------------- stages


def measure(name: str, *suites: str, limit: float) -> int:
    out = OUT / f"{name}.jsonl"
    code = run(*BENCH, "run", *suites, "--out", out, show=4, limit=limit)
    tell(out)
    return code


def suites(_) -> int:
    return measure("suites", "lightning", "flash", limit=300)


def again(_) -> int:
    return measure("suites-again", "lightning", "flash", limit=240)


def compare(_) -> int:
    return run(*BENCH, "compare", OUT / "suites.jsonl", OUT / "suites-again.jsonl", into=OUT / "suites-compare.txt", show=3)


def small(_) -> int:
    return measure("flash-small", "flash-small", "--kernels", limit=180)


def decode(_) -> int:
    return measure("flash-decode", "flash-decode", limit=180)


def layers(_) -> int:
    return measure("layers", "layers", limit=240)


def tune(chosen) -> int:
    codes = []
    for op in ("lightning", "flash"):
        part = CHECKS / f"tune-{op}.txt"
        command = [sys.executable, "-m", "fulmen", "tune", op, "--seconds", chosen.seconds / 2]
        codes.append(run(*command, into=part, show=60, limit=chosen.seconds / 2 + 60))
    return max(map(abs, codes))


def base(chosen) -> int:
    ref = chosen.base
    if ref is None:
        known = subprocess.run(["git", "rev-parse", "HEAD~1"], cwd=ROOT, env=ENV, capture_output=True)
        ref = "HEAD~1" if known.returncode == 0 else str(ROOT.parent / "base")
    shape = ["--shape", "B=2,H=12,N=2048,D=64,causal=yes", "--backend", "triton", "--baseline", "none"]
    code = run(*BENCH, "run", "flash", *shape, "--out", CHECKS / "base.jsonl", "--base", ref, show=20, limit=180)
    for path in (CHECKS / "base.jsonl", CHECKS / "base.base.jsonl"):
        if path.exists():
            tell(path)
    say("and a base that is not there, in one sentence:")
    wrong = run(*BENCH, "run", "flash", *shape, "--out", CHECKS / "none.jsonl", "--base", "no-such-thing", show=3)
    return code or int(wrong != 1)


def resume(_) -> int:
    """Interrupts a run after its first cells, goes on, and looks whether what was measured before stayed."""
    out = CHECKS / "resume.jsonl"
    command = [*BENCH, "run", "flash-small", "--dtype", "bf16", "--seconds", "0.3", "--out", out]
    process, begin = start(command), time.monotonic()
    while process.poll() is None and time.monotonic() - begin < 120:
        if any(r["kind"] == "cell" for r in records(out)):
            process.send_signal(signal.SIGINT)
            break
        time.sleep(0.05)
    try:
        said = process.communicate(timeout=60)[0].rstrip().splitlines()
    except subprocess.TimeoutExpired:
        process.kill()
        say("resume: the interrupted run does not end")
        return 1
    say("\n".join(said[-2:]))
    before = [r for r in records(out) if r["kind"] == "cell" and r["status"] == "ok"]
    code = run(*command, "--resume", show=3, limit=180)
    found = records(out)
    after = {r["config_hash"]: r for r in found if r["kind"] == "cell"}
    runs = sum(r["kind"] == "run" for r in found)
    kept = all(after[r["config_hash"]]["samples_ms"] == r["samples_ms"] for r in before)
    left = [r for r in after.values() if r["status"] == "interrupted"]
    say(f"resume: exit {process.returncode} (130 is right), {len(before)} cells before, {len(after)} after, {runs} run, "
        f"{'kept' if kept else 'LOST'} what was done, {len(left)} still interrupted")
    once_more = run(*command, "--resume", show=3, limit=120)
    right = process.returncode == 130 and kept and not left and runs == 1 and 0 < len(before) < len(after)
    return code or once_more or int(not right)


def parallel(_) -> int:
    return run(sys.executable, "dev/parallel_kernels.py", "--out", OUT / "parallel_kernels.jsonl", show=80, limit=120)


def test(which: str, workers: int, log: str) -> int:
    command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider", "-W", "ignore", "-n", workers, "-m", which]
    command += ["--durations=12", "-o", "faulthandler_timeout=100", "tests"]  # a test that hangs is named
    return run(*command, into=OUT / log, show=25, limit=340)


def tests(_) -> int:
    return test("gpu and not slow", 14, "test-gpu.log")


def slow(_) -> int:
    """They take much memory, so by themselves."""
    return test("gpu and slow", 3, "test-gpu-slow.log")


def host(_) -> int:
    return run(sys.executable, "dev/host_flash.py", into=OUT / "host_flash.txt", show=30, limit=60)


def bars(_) -> int:
    return run(sys.executable, "dev/lightning_bars.py", into=OUT / "lightning_bars.txt", show=40, limit=120)


def leftover(_) -> int:
    return run(sys.executable, "dev/lightning_leftover.py", into=OUT / "lightning_leftover.txt", show=8, limit=60)


def short(_) -> int:
    return run(sys.executable, "dev/flash_short.py", into=OUT / "flash_short.txt", show=20, limit=200)


def few(_) -> int:
    return run(sys.executable, "dev/flash_short.py", "--few", into=OUT / "flash_few.txt", show=5, limit=120)


def once(_) -> int:
    one = run(sys.executable, "dev/flash_short.py", "--once", into=OUT / "flash_once.txt", show=5, limit=160)
    return one | run(sys.executable, "dev/flash_short.py", "--shared", into=OUT / "flash_shared.txt", show=5, limit=100)


def saved(_) -> int:
    return run(sys.executable, "dev/lightning_saved.py", into=OUT / "lightning_saved.txt", show=60, limit=60)


def parts(_) -> int:
    return run(sys.executable, "tools/measure_layers.py", "--out", OUT / "layers-parts.jsonl", limit=160)


def sanitize(_) -> int:
    """Of softmax attention's CUDA kernels, and of every kernel of lightning attention."""
    tool = ["compute-sanitizer", "--tool", "memcheck", "--report-api-errors", "no", sys.executable]
    one = run(*tool, "dev/cuda_trial.py", "--sanitize", into=CHECKS / "cuda_memcheck.txt", show=4, limit=90)
    one |= run(*tool, "dev/sanitize_cuda.py", into=CHECKS / "cuda_memcheck-all.txt", show=4, limit=90)
    return one | run(*tool, "dev/sanitize_lightning.py", into=CHECKS / "lightning_memcheck.txt", show=4, limit=120)


STAGES = {  # what, and about how many seconds on an H200
    "suites": (suites, "lightning and flash, all kernels to compile", 170),
    "again": (again, "the same, compiled", 140),
    "compare": (compare, "the two against each other", 5),
    "small": (small, "flash-small", 75),
    "decode": (decode, "flash-decode", 60),
    "layers": (layers, "layers", 150),
    "tune": (tune, "fulmen tune lightning and flash, --seconds in all", 80),
    "base": (base, "this tree against --base, at one case", 45),
    "resume": (resume, "a run that is interrupted and goes on", 60),
    "parallel": (parallel, "the kernels that ranks call: right, and how fast", 40),
    "bars": (bars, "lightning attention at the shapes of its bars", 50),
    "leftover": (leftover, "lightning attention of heads that fill the SMs once and a bit", 20),
    "short": (short, "tiles for short calls and for many heads, L2 cold", 120),
    "few": (few, "tiles for few heads, parts of many", 45),
    "once": (once, "tiles for few keys", 130),
    "host": (host, "the host's time for a short call", 15),
    "saved": (saved, "how often lightning attention saves a state", 20),
    "parts": (parts, "what layers cost beyond their parts", 85),
    "sanitize": (sanitize, "memcheck of our CUDA kernels", 130),
    "tests": (tests, "all GPU tests but the slow ones", 230),
    "slow": (slow, "these", 135),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("stages", nargs="*", help=f"of {', '.join(STAGES)}")
    parser.add_argument("--seconds", type=float, default=60, help="for tuning, in all")
    parser.add_argument("--base", help="a commit, or a folder with another tree")
    parser.add_argument("--list", action="store_true")
    chosen = parser.parse_args()
    unknown = [name for name in chosen.stages if name not in STAGES]
    if unknown:
        parser.error(f"no stage {', '.join(unknown)}; there are {', '.join(STAGES)}")
    if chosen.list or not chosen.stages:
        for name, (_, what, seconds) in STAGES.items():
            print(f"{name:<9} {seconds:>4} s  {what}")
        return 0
    CHECKS.mkdir(parents=True, exist_ok=True)
    failed = []
    for name in chosen.stages:
        say(f"\n=== {name}")
        begin = time.monotonic()
        try:
            code = STAGES[name][0](chosen)
        except Exception as error:  # a stage's accident must not cost the others
            say(f"{type(error).__name__}: {error}")
            code = 1
        say(f"=== {name}: {time.monotonic() - begin:.1f} s" + (f", FAILED ({code})" if code else ""))
        failed += [name] if code else []
        with tarfile.open(OUT / "checks.tar.gz", "w:gz") as packed:
            packed.add(CHECKS, "checks")
    for path in CHECKS.iterdir():
        path.unlink()
    CHECKS.rmdir()
    say(f"failed: {', '.join(failed) or 'nothing'}")
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())
