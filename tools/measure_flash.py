"""Measure softmax attention on this GPU against torch's SDPA in the same run, after proving it right.

    PYTHONPATH=. python3 tools/measure_flash.py --out build/flash.jsonl     (on the GPU)
    python tools/measure_flash.py --render build/flash.jsonl > build/flash.md

Each case is first compared with fp64 (one head group, outputs and all gradients); a wrong one gets no time. Then all
competitors are timed in shuffled rounds: L2 is overwritten, a spacer kernel lets the host run ahead, two events bracket
the call. All samples are kept. FA2 and cuDNN are torch's scaled_dot_product_attention with that backend pinned; the
others are backends of `fulmen.flash_attention`. TFLOP/s count 4 B H N^2 D forward, half of it causal, and 2.5 times
that backward, whatever a kernel really computes. The host's time is a loop of small calls without a pause.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import random
import time
from pathlib import Path
from statistics import median
from typing import Any

from measure_lightning import environment, sample

SHAPES = [  # B, H, H_KV, N, D, E; the first six carry the bars
    (2, 12, 12, 2048, 64, 64),
    (1, 32, 32, 4096, 128, 128),
    (1, 40, 8, 2048, 128, 128),
    (2, 16, 16, 8192, 128, 128),
    (4, 32, 32, 4096, 64, 64),
    (1, 16, 16, 16384, 128, 128),
    (1, 8, 8, 128, 64, 64),
    (8, 16, 16, 512, 64, 64),
    (8, 16, 16, 512, 128, 128),
    (4, 16, 4, 1024, 128, 128),
    (2, 16, 16, 4096, 256, 256),
    (1, 32, 32, 4096, 192, 128),
    (2, 32, 32, 2048, 80, 80),
]
BARS = 6
ROUNDS = 20
HOST_CALLS = 300


def competitors(q: Any, k: Any, v: Any, causal: bool) -> dict[str, Any]:
    """Name -> call; those that cannot serve the case are left out."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    import fulmen

    def sdpa(backend: Any) -> Any:
        def call() -> Any:
            with sdpa_kernel(backend):
                return scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])

        return call

    calls = {"FA2": sdpa(SDPBackend.FLASH_ATTENTION), "cuDNN": sdpa(SDPBackend.CUDNN_ATTENTION)}
    for name in ("triton", "sdpa", "auto"):
        calls[name] = functools.partial(fulmen.flash_attention, q, k, v, causal=causal, backend=name)
    served = {}
    for name, call in calls.items():
        try:
            call()
            served[name] = call
        except (RuntimeError, NotImplementedError) as error:
            print(f"  {name}: {str(error).splitlines()[0][:150]}", flush=True)
    return served


def check(q: Any, k: Any, v: Any, do: Any, causal: bool, o: Any, grads: Any) -> dict[str, float]:
    """Relative error of the last head of k and v, and its queries, against fp64; raises if not of bf16's size."""
    import torch

    import fulmen

    group = q.shape[1] // k.shape[1]
    rows = slice(None) if q.shape[2] <= 4096 else slice(q.shape[2] - 512, None)  # fp64 needs all of a row's memory

    def one(x: Any, heads: int) -> Any:
        return x[-1:, -heads:].detach().double()

    exact = [one(q, group).requires_grad_(), one(k, 1).requires_grad_(), one(v, 1).requires_grad_()]
    few = [exact[0][:, :, rows], exact[1], exact[2]]  # causal is bottom-right: the last queries
    ref = fulmen.flash_attention(*few, causal=causal, backend="reference")
    errors = {"o": ((one(o, group)[:, :, rows] - ref).norm() / ref.norm()).item()}
    if rows == slice(None):
        wanted = torch.autograd.grad(ref, exact, one(do, group))
        for name, got, want, heads in zip(("dq", "dk", "dv"), grads, wanted, (group, 1, 1), strict=True):
            errors[name] = ((one(got, heads) - want).norm() / want.norm()).item()
    for name, error in errors.items():
        if not error < 2**-7:
            raise AssertionError(f"{name} is wrong: relative error {error:.2e}")
    return errors


def peak_bytes(call: Any, leaves: tuple[Any, ...], do: Any) -> int:
    """Peak of forward + backward above what was there before."""
    import torch

    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    torch.autograd.grad(call(), leaves, do)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def measure_case(shape: tuple[int, ...], causal: bool) -> list[dict[str, Any]]:
    import torch

    import fulmen

    B, H, H_KV, N, D, E = shape
    torch.manual_seed(sum(shape))
    sizes = ((H, D), (H_KV, D), (H_KV, E), (H, E))
    q, k, v, do = (torch.randn(B, h, N, d, device="cuda", dtype=torch.bfloat16) for h, d in sizes)
    leaves = tuple(x.requires_grad_() for x in (q, k, v))
    flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    rows: dict[str, dict[str, Any]] = {}
    timed: dict[tuple[str, str], Any] = {}
    for name, call in competitors(q, k, v, causal).items():
        o = call()
        errors = check(q, k, v, do, causal, o, torch.autograd.grad(o, leaves, do, retain_graph=True))
        chosen = fulmen.explain("flash", q, k, v, causal=causal).split("\n")[-1] if name == "auto" else name
        rows[name] = {
            "kind": "case", "shape": shape, "dtype": "bfloat16", "causal": causal, "competitor": name,
            "chosen": chosen, "errors": errors, "peak_bytes": peak_bytes(call, leaves, do),
            "forward_ms": [], "backward_ms": [],
        }  # fmt: skip
        timed[name, "forward_ms"] = torch.no_grad()(call)
        timed[name, "backward_ms"] = functools.partial(torch.autograd.grad, o, leaves, do, retain_graph=True)
    for turn in range(ROUNDS + 3):
        for (name, what), fn in random.sample(list(timed.items()), len(timed)):
            ms = sample(fn, flush)
            if turn >= 3:
                rows[name][what].append(ms)
    return list(rows.values())


def host_cost() -> dict[str, Any]:
    """Microseconds of one small call in a loop, B1 H1 N128 D64: the host's work, as the GPU needs less."""
    import torch

    import fulmen

    q, k, v = (torch.randn(1, 1, 128, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    calls: dict[str, Any] = {
        "F.scaled_dot_product_attention": functools.partial(torch.nn.functional.scaled_dot_product_attention, q, k, v)
    }
    for name in ("auto", "triton", "sdpa"):
        calls[f"fulmen {name}"] = functools.partial(fulmen.flash_attention, q, k, v, backend=name)
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(13):
        for name, call in calls.items():
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(HOST_CALLS):
                call()
            us = (time.perf_counter() - begin) / HOST_CALLS * 1e6
            torch.cuda.synchronize()
            if turn >= 3:
                samples[name].append(us)
    return {"kind": "host", "microseconds": samples}


def flops(row: dict[str, Any]) -> float:
    B, H, _, N, D, E = row["shape"]
    return 2 * B * H * N * N * (D + E) * (0.5 if row["causal"] else 1.0)


def geomean(values: list[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values)) if values else math.nan


def render(path: Path) -> str:
    records = [json.loads(line) for line in path.read_text().splitlines()]
    env = next(r for r in records if r["kind"] == "environment")
    lines = [
        f"# Softmax attention on one {env['gpu']}",
        "",
        f"Made by `tools/measure_flash.py --render` from `{path.name}`: torch {env['torch']}, triton {env['triton']}, "
        f"{env['time']}, bf16, medians of {ROUNDS} shuffled rounds with cold L2, TFLOP/s (4 B H N^2 D forward, half of "
        "it causal, 2.5 times that backward). FA2 and cuDNN are torch's SDPA with that backend pinned. x FA2: how many "
        "times as fast. Peak: memory above the inputs, forward and backward, over FA2's. auto is named after "
        "its choice for calls that need gradients.",
        "",
        "| B H H_KV N D E | mask | kernel | forward | x FA2 | backward | x FA2 | peak | error o, dq, dk, dv |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    cases: dict[Any, dict[str, Any]] = {}
    for r in (r for r in records if r["kind"] == "case"):
        cases.setdefault((tuple(r["shape"]), r["causal"]), {})[r["competitor"]] = r
    for (shape, causal), rows in cases.items():
        for r in rows.values():
            fwd, bwd = (flops(r) * f / median(r[w]) / 1e9 for f, w in ((1, "forward_ms"), (2.5, "backward_ms")))
            base = rows.get("FA2")
            ratios = [f"{median(base[w]) / median(r[w]):.2f}" if base else "" for w in ("forward_ms", "backward_ms")]
            peak = f"{r['peak_bytes'] / base['peak_bytes']:.2f}" if base else ""
            lines.append(
                f"| {' '.join(map(str, shape))} | {'causal' if causal else 'full'} | {r['chosen']} | {fwd:.0f} | "
                f"{ratios[0]} | {bwd:.0f} | {ratios[1]} | {peak} | "
                f"{' '.join(f'{e:.1e}' for e in r['errors'].values())} |"
            )
    lines += ["", *summary(cases)]
    host = next(r for r in records if r["kind"] == "host")["microseconds"]
    lines += ["", "Host, B1 H1 N128 D64, microseconds a call: "]
    lines[-1] += ", ".join(f"{name} {median(us):.1f}" for name, us in host.items()) + "."
    return "\n".join(lines)


def summary(cases: dict[Any, dict[str, Any]]) -> list[str]:
    """The figures the bars are about, over the first rows."""
    rows = [r for (shape, _), r in cases.items() if shape in SHAPES[:BARS]]
    lines = []
    for what in ("forward_ms", "backward_ms"):
        ratios = [median(r["FA2"][what]) / median(r["triton"][what]) for r in rows]
        best = [min(median(r[n][what]) for n in r if n != "auto") for r in rows]
        auto = [median(r["auto"][what]) / b for r, b in zip(rows, best, strict=True)]
        lines.append(
            f"Over the {len(rows)} rows of the bars, {what.removesuffix('_ms')}: triton {geomean(ratios):.2f} times as "
            f"fast as FA2 (geometric mean; least {min(ratios):.2f}); auto at most {max(auto) - 1:.1%} slower than the "
            "best kernel.  "
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="measure, and write JSON lines here")
    parser.add_argument("--render", type=Path, metavar="JSONL", help="print results as Markdown")
    parser.add_argument("--bars", action="store_true", help="only the rows that carry the bars")
    args = parser.parse_args()
    if args.render:
        print(render(args.render))
        return
    if args.out is None:
        parser.error("--out or --render is needed")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with args.out.open("w") as f:
        host = host_cost()
        for record in (environment(ROUNDS), host):
            f.write(json.dumps(record) + "\n")
        print({n: round(median(us), 1) for n, us in host["microseconds"].items()}, flush=True)
        for shape in SHAPES[:BARS] if args.bars else SHAPES:
            for causal in (True, False):
                rows = measure_case(shape, causal)
                for row in rows:
                    f.write(json.dumps(row) + "\n")
                f.flush()
                times = {r["competitor"]: (median(r["forward_ms"]), median(r["backward_ms"])) for r in rows}
                print(shape, causal, {n: f"{a:.3f} {b:.3f}" for n, (a, b) in times.items()}, flush=True)


if __name__ == "__main__":
    main()
