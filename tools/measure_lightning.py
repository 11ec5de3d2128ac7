"""Measure lightning attention on this GPU against a device copy in the same run, after proving it right.

    PYTHONPATH=. python3 tools/measure_lightning.py --out build/lightning.jsonl     (on the GPU)
    python tools/measure_lightning.py --render build/lightning.jsonl > build/lightning.md

Each case is first compared with fp64 (one head, outputs and all gradients); a wrong one gets no time. Then the
public calls and the copy are timed in shuffled rounds: L2 is overwritten, a spacer kernel lets the host run ahead,
two events bracket the call. All samples are kept. u is one (B, H, N, D) tensor; the ideal traffic is 4u forward
(q, k, v, o) and 7u backward (q, k, v, dO, dq, dk, dv).
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

SHAPES: list[tuple[tuple[int, ...], list[str]]] = [  # (B, H, N, D), backends; the first two carry the bars
    ((4, 32, 8192, 64), ["auto"]),
    ((2, 32, 8192, 128), ["auto"]),
    ((4, 32, 32768, 64), ["auto"]),
    ((1, 64, 4096, 128), ["auto"]),
    ((1, 16, 32768, 128), ["triton", "triton_split"]),
    ((1, 8, 65536, 64), ["triton", "triton_split"]),
    ((3, 50, 5000, 64), ["auto"]),
    ((4, 32, 1024, 64), ["auto"]),
    ((1, 32, 8192, 256), ["auto"]),
]
ROUNDS = 40
COLD = """
import time, torch, fulmen
q, k, v = (torch.randn(4, 32, 1024, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
do, s = torch.randn_like(q), fulmen.decay.alibi(32).cuda()
torch.cuda.synchronize(); t0 = time.perf_counter()
o = fulmen.lightning_attention(q, k, v, s); torch.cuda.synchronize(); t1 = time.perf_counter()
o.backward(do); torch.cuda.synchronize(); t2 = time.perf_counter()
print(t1 - t0, t2 - t0)
"""


def environment(rounds: int) -> dict[str, object]:
    import torch
    import triton

    digest = hashlib.sha256()  # of what ran: a copy of a work tree may carry an older commit's name
    for path in sorted(Path("fulmen").rglob("*.py")):
        digest.update(path.read_bytes())
    driver = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], capture_output=True, text=True
    ).stdout.strip()
    return {
        "kind": "environment", "schema": 1, "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__,
        "cuda": torch.version.cuda, "driver": driver, "python": sys.version.split()[0],
        "source": digest.hexdigest()[:16], "rounds": rounds,
    }  # fmt: skip


def cold_start() -> dict[str, object]:
    """First call in a fresh process with an empty Triton cache."""
    with tempfile.TemporaryDirectory() as cache:
        env = {**os.environ, "TRITON_CACHE_DIR": cache, "PYTHONPATH": "."}
        out = subprocess.run([sys.executable, "-c", COLD], capture_output=True, text=True, env=env, check=True)
    forward, both = map(float, out.stdout.split())
    return {"kind": "cold", "first_forward_s": forward, "first_forward_backward_s": both}


def check(q: Any, k: Any, v: Any, do: Any, s: Any, o: Any, grads: Any) -> dict[str, float]:
    """Relative error of one head against fp64; raises if it is not of bf16's size."""
    import torch

    from fulmen.lightning import reference

    b, h = q.shape[0] - 1, q.shape[1] - 1

    def one(x: Any) -> Any:
        return x[b : b + 1, h : h + 1].detach().double()

    chunked = functools.partial(reference.chunked, C=512)

    exact = [one(x).requires_grad_() for x in (q, k, v)]
    ref, _ = reference.attend(chunked, exact[0], exact[1], exact[2], None if s is None else s[h : h + 1])
    wanted = (ref, *torch.autograd.grad(ref, exact, one(do)))
    errors = {}
    for name, got, want in zip(("o", "dq", "dk", "dv"), (o, *grads), wanted, strict=True):
        errors[name] = ((one(got) - want).norm() / want.norm()).item()
        if not errors[name] < 2**-8:
            raise AssertionError(f"{name} is wrong: relative error {errors[name]:.2e}")
    return errors


def peak_bytes(call: Any, q: Any, k: Any, v: Any, do: Any) -> int:
    """Peak of forward + backward, inputs and dO counted, nothing else alive."""
    import torch

    torch.cuda.synchronize()
    others = torch.cuda.memory_allocated() - sum(x.numel() * x.element_size() for x in (q, k, v, do))
    torch.cuda.reset_peak_memory_stats()
    torch.autograd.grad(call(), (q, k, v), do)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - others


def sample(fn: Any, flush: Any) -> float:
    import torch

    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    flush.zero_()
    torch.cuda._sleep(4_000_000)  # about 2 ms
    start.record()
    fn()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def measure_case(shape: tuple[int, ...], backends: list[str], decay: bool) -> list[dict[str, Any]]:
    import torch

    import fulmen

    torch.manual_seed(sum(shape))
    q, k, v, do = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    for x in (q, k, v):
        x.requires_grad_()
    s = fulmen.decay.alibi(shape[1]).cuda() if decay else None
    u = q.numel() * q.element_size()
    rows: list[dict[str, Any]] = []
    timed: dict[tuple[str | None, str], Any] = {}
    source = torch.randint(0, 255, (1 << 30,), dtype=torch.uint8, device="cuda")
    target, flush = torch.empty_like(source), torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    for backend in backends:
        call = functools.partial(fulmen.lightning_attention, q, k, v, s, backend=backend)
        o = call()
        errors = check(q, k, v, do, s, o, torch.autograd.grad(o, (q, k, v), do, retain_graph=True))
        row: dict[str, Any] = {
            "kind": "case", "shape": shape, "dtype": "bfloat16", "decay": decay, "backend": backend,
            "chosen": fulmen.explain("lightning", q, k, v, s).split()[-1] if backend == "auto" else backend,
            "u_bytes": u, "errors": errors, "peak_bytes": peak_bytes(call, q, k, v, do),
            "forward_ms": [], "backward_ms": [], "copy_ms": [], "copy_bytes": 2 * source.numel(),
        }  # fmt: skip
        rows.append(row)
        timed[backend, "forward_ms"] = torch.no_grad()(call)
        timed[backend, "backward_ms"] = functools.partial(torch.autograd.grad, o, (q, k, v), do, retain_graph=True)
    timed[None, "copy_ms"] = functools.partial(target.copy_, source)
    by_name = {row["backend"]: row for row in rows}
    for turn in range(ROUNDS + 3):
        for (name, what), fn in random.sample(list(timed.items()), len(timed)):
            ms = sample(fn, flush)
            for row in rows if name is None else [by_name[name]]:
                if turn >= 3:
                    row[what].append(ms)
    return rows


def shares(row: dict[str, Any]) -> tuple[float, float, float, float]:
    bandwidth = row["copy_bytes"] / median(row["copy_ms"])
    fwd, bwd = median(row["forward_ms"]), median(row["backward_ms"])
    return fwd, 4 * row["u_bytes"] / fwd / bandwidth, bwd, 7 * row["u_bytes"] / bwd / bandwidth


def render(path: Path) -> str:
    records = [json.loads(line) for line in path.read_text().splitlines()]
    env = next(r for r in records if r["kind"] == "environment")
    lines = [
        f"# Lightning attention on one {env['gpu']}",
        "",
        f"Made by `tools/measure_lightning.py --render` from `{path.name}`: torch {env['torch']}, triton "
        f"{env['triton']}, {env['time']}, bf16, medians of {env['rounds']} shuffled rounds with cold L2. A share is "
        "the ideal traffic (4u forward, 7u backward) over the time, against a 1 GiB device copy in the same rounds. "
        "Peak memory counts q, k, v, o, dO, dq, dk, dv: 8u at the least.",
        "",
        "| B H N D | decay | backend | forward ms | share | backward ms | share | peak / u | error o, dq, dk, dv |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for r in (r for r in records if r["kind"] == "case"):
        fwd, fs, bwd, bs = shares(r)
        chosen = r["chosen"] if r["backend"] != "auto" else f"auto: {r['chosen']}"
        errors = " ".join(f"{e:.1e}" for e in r["errors"].values())
        lines.append(
            f"| {' '.join(map(str, r['shape']))} | {'yes' if r['decay'] else 'no'} | {chosen} | {fwd:.3f} |"
            f" {fs:.0%} | {bwd:.3f} | {bs:.0%} | {r['peak_bytes'] / r['u_bytes']:.2f} | {errors} |"
        )
    copies = [r["copy_bytes"] / median(r["copy_ms"]) / 1e9 for r in records if r["kind"] == "case"]
    cold = next(r for r in records if r["kind"] == "cold")
    lines += [
        "",
        f"Device copy: {min(copies):.2f} to {max(copies):.2f} TB/s. First call with an empty Triton cache: forward "
        f"{cold['first_forward_s']:.1f} s, forward and backward {cold['first_forward_backward_s']:.1f} s.",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="measure, and write JSON lines here")
    parser.add_argument("--render", type=Path, metavar="JSONL", help="print results as Markdown")
    args = parser.parse_args()
    if args.render:
        print(render(args.render))
        return
    if args.out is None:
        parser.error("--out or --render is needed")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with args.out.open("w") as f:
        for record in (environment(ROUNDS), cold_start()):
            f.write(json.dumps(record) + "\n")
        for shape, backends in SHAPES:
            for decay in (True, False):
                for row in measure_case(shape, backends, decay):
                    f.write(json.dumps(row) + "\n")
                    f.flush()
                    fwd, fs, bwd, bs = shares(row)
                    print(shape, decay, row["backend"], f"{fwd:.3f} ms {fs:.1%}  {bwd:.3f} ms {bs:.1%}", flush=True)


if __name__ == "__main__":
    main()
