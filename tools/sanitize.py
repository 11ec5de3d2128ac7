"""Runs small calls of every kernel under NVIDIA's compute-sanitizer and counts what it finds. Needs a GPU.

    PYTHONPATH=. python3 tools/sanitize.py                               memcheck of every operation
    PYTHONPATH=. python3 tools/sanitize.py lightning --tool racecheck    one operation, another tool

Each operation runs in its own process, on odd shapes that reach every kernel and option; its output goes to
build/sanitize/. The exit status is 1 if the sanitizer found anything or a process failed.
"""

from __future__ import annotations

import argparse
import itertools
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from fulmen.integrations.mamba import mamba_chunk_scan_combined
from fulmen.testing import flash as softmax
from fulmen.testing import latent as latents
from fulmen.testing import step as steps
from fulmen.testing.lightning import check, inputs

BF16 = torch.bfloat16
LOGS = Path(__file__).resolve().parents[1] / "build" / "sanitize"
SUMMARY = re.compile(r"SUMMARY: (\d+) (?:error|hazard)")
PAIRS = ((64, 64), (128, 128), (256, 256), (192, 128))  # D, E
EVERYTHING: dict[str, Any] = {"causal": True, "softcap": 20.0, "sinks": True}
PACKED: dict[str, Any] = {"B": 1, "lengths_q": [100, 0, 593, 7], "lengths_k": [40, 101, 459, 100]}
WRONG = [0, 100, 100, 693, 999], [0, 40, -5, 600, 700]  # cu_seqlens of q and k that lead out of the tensors


def flash(backend: str, *sizes: int, H_KV: int = 2, wrong: bool = False, dtype: Any = BF16, **options: Any) -> None:
    """One call and its gradients; `sizes` are B, H, N_Q, D."""
    x = softmax.inputs(*sizes, H_KV=H_KV, dtype=dtype, device="cuda", **options)
    if wrong:
        ends = torch.tensor(WRONG, dtype=torch.int32, device="cuda")
        x = x._replace(cu_seqlens_q=ends[0], cu_seqlens_k=ends[1])
    attend = softmax.backend(backend)
    found = softmax.evaluate(attend, x)
    if backend == "cuda" and not wrong:
        torch.use_deterministic_algorithms(True)
        softmax.evaluate(attend, x)
        torch.use_deterministic_algorithms(False)
    assert wrong or all(torch.isfinite(t).all() for t in (found.o, *found[2:]) if t is not None)


def every_option(backend: str, D: int, E: int) -> None:
    for N_Q, N_KV in ((777, 777), (700, 801), (1, 1000), (301, 200)):  # in the last, rows see no key
        flash(backend, 2, 4, N_Q, D, E=E, N_KV=N_KV, causal=N_Q != 700)
    flash(backend, 2, 4, 601, D, E=E, N_KV=700, window=(100, None), **EVERYTHING)
    flash(backend, D=D, E=E, H=4, causal=True, **PACKED)
    flash(backend, D=D, E=E, H=4, wrong=True, **PACKED)
    flash(backend, 1, 4, 3, D, E=E, N_KV=2500, H_KV=1, causal=True)  # from here `cuda` splits keys
    flash(backend, 1, 2, 200, D, E=E, N_KV=3000, window=(2000, None), **EVERYTHING)


def flash_cuda() -> None:
    for D, E in PAIRS:
        every_option("cuda", D, E)
    for D in (64, 128):
        for B, H, *lengths in ((1, 1, 128), (8, 4, 128), (32, 8, 100, 249), (2, 4, 333), (8, 8, 57, 73, 153, 185)):
            for N in lengths:
                flash("cuda", B, H, N, D, H_KV=max(1, H // 2))
                flash("cuda", B, H, N, D, N_KV=N + 7, H_KV=max(1, H // 2), causal=True, dtype=torch.float16)
        for N in (57, 77, 100, 150, 185, 250):
            flash("cuda", 16, 32, 9, D, N_KV=N, H_KV=8, causal=True)  # packed query heads
            flash("cuda", 4, 8, 300, D, N_KV=N, H_KV=8, causal=True)


def flash_triton() -> None:
    for D, E in (*PAIRS, (80, 40)):
        every_option("triton", D, E)
        flash("triton", 2, 4, 2001, D, E=E, causal=True)  # TMA starts at 8 GFLOP
        flash("triton", 2, 4, 2001, D, E=E, N_KV=2100, window=(100, None), **EVERYTHING)


def lightning() -> None:
    for decay in ("mixed", None):
        for dtype in (BF16, torch.float16):
            x: dict[str, Any] = {"dtype": dtype, "device": "cuda", "decay": decay}
            for N, backend in ((333, "triton"), (1333, "triton_split")):
                check(inputs(B=2, H=4, N=N, D=48, E=80, H_KV=2, initial_state=True, **x), backend)
            check(inputs(B=1, H=2, N=200, D=64, lengths=[0, 1, 70, 0, 129], layout="bnhd", **x), "triton")
        for D in (64, 128):
            x = {"D": D, "dtype": BF16, "device": "cuda", "decay": decay}
            check(inputs(B=2, H=40, N=333, initial_state=True, **x), "cuda")
            check(inputs(B=1, H=2, N=1500, layout="bnhd", **x), "cuda")
            check(inputs(B=1, H=2, N=700, lengths=[0, 1, 70, 0, 629], **x), "cuda")
            check(inputs(B=1, H=135, N=1100, initial_state=True, **x), "cuda")  # three heads beyond a whole wave


def scan() -> None:
    """Mamba-2's, inside the attention on Hopper: one piece, split and packed, without gradients and with them."""
    made: dict[str, Any] = {"dtype": BF16, "device": "cuda"}
    for H, N, ends in ((40, 333, None), (2, 1500, None), (2, 700, [0, 0, 1, 71, 71, 700])):
        x, z = (torch.randn(1, N, H, 64, **made) for _ in range(2))
        k, q = (torch.randn(1, N, 1, 128, **made) for _ in range(2))
        dt, A, D = torch.rand(1, N, H, **made), -torch.rand(H, device="cuda"), torch.ones(H, device="cuda")
        cu = None if ends is None else torch.tensor(ends, device="cuda")
        for gate, grad in itertools.product((None, z), (False, True)):
            leaves = [t.requires_grad_(grad) for t in (x, dt, A, k, q, D)]
            y: Any = mamba_chunk_scan_combined(x, dt, A, k, q, D=D, z=gate, cu_seqlens=cu)
            found = torch.autograd.grad(y.float().square().mean(), leaves) if grad else (y,)
            assert all(torch.isfinite(t).all() for t in found)


def latent() -> None:
    for backend in ("cuda", "triton"):
        for page, lengths in ((None, [700, 65, 0]), (16, [700, 17, 1 << 30]), (64, [-1, 640, 64])):
            x = latents.inputs(
                3, 16, 3, 700, 576, 512, page=page, lengths=lengths, causal=True, dtype=BF16, device="cuda"
            )
            latents.check(x._replace(kv=x.kv.nan_to_num()), backend)
        latents.check(latents.inputs(140, 16, 1, 200, 576, 512, dtype=BF16, device="cuda"), backend)  # not split


def cache() -> None:
    """Softmax attention over a cache; some entries of page tables lead out of it."""
    for backend, D in itertools.product(("cuda", "triton"), (64, 128, 256)):
        for page, lengths in ((None, [700, 65, 0]), (16, [700, 17, 1 << 30]), (64, [-1, 640, 64])):
            for heads, N_Q in ((8, 3), (10, 1)):
                x = softmax.cache_inputs(
                    kv_lengths=lengths, capacity=704, page=page, H=heads, H_KV=2, N_Q=N_Q, D=D, causal=True, dtype=BF16,
                    device="cuda",
                )  # fmt: skip
                if x.page_table is not None:
                    x.page_table[0, 1], x.page_table[1, 0] = 1 << 30, -7
                softmax.backend(backend)(x)


def step() -> None:
    for state, T in itertools.product((torch.float32, BF16), (1, 8)):
        x: dict[str, Any] = {"B": 3, "H": 4, "H_KV": 2, "T": T, "dtype": BF16, "state_dtype": state, "device": "cuda"}
        for D, E in ((128, 128), (80, 21)):
            steps.check(steps.inputs(D=D, E=E, slots=(4, -1, 1 << 30), pool=5, decay="mixed", **x), "triton")
            steps.check(steps.inputs(D=D, E=E, draft=True, accepted=(0, 99, -5), **x), "triton")


OPERATIONS = {
    "flash-cuda": flash_cuda, "flash-triton": flash_triton, "cache": cache, "lightning": lightning, "scan": scan,
    "latent": latent, "step": step,
}  # fmt: skip


def sanitize(operation: str, tool: str) -> str | None:
    """What is wrong, or None."""
    command = ["compute-sanitizer", "--tool", tool]
    if tool == "memcheck":  # cuda.bindings asks for functions the driver may lack, which counts as an API error
        command += ["--report-api-errors", "no"]
    command += [sys.executable, __file__, operation, "--direct"]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    LOGS.mkdir(parents=True, exist_ok=True)
    (LOGS / f"{operation}-{tool}.txt").write_text(done.stdout)
    counts = [int(n) for n in SUMMARY.findall(done.stdout)]
    failed = f"failed with exit status {done.returncode}" if done.returncode or not counts else None
    return f"{sum(counts)} found" if any(counts) else failed


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("operation", nargs="?", choices=OPERATIONS, help="all of them unless given")
    parser.add_argument("--tool", choices=("memcheck", "racecheck", "initcheck", "synccheck"), default="memcheck")
    parser.add_argument("--direct", action="store_true", help="the calls alone, without the sanitizer")
    chosen = parser.parse_args()
    names = [chosen.operation] if chosen.operation else OPERATIONS
    found = {name: OPERATIONS[name]() if chosen.direct else sanitize(name, chosen.tool) for name in names}
    print("\n".join(f"{name}: {what or 'nothing found'}" for name, what in found.items()))
    return int(any(found.values()))


if __name__ == "__main__":
    sys.exit(main())
