"""Made-up results of the right magnitude, for the tests of the report; nothing here was measured.

Times follow a small model (bytes or FLOP over what an H200 reaches, plus a launch), the noise is a seeded random walk,
and every kind of row that the tool can write occurs: wrong, out of memory, unsupported, withheld, flagged.

    python tests/bench/sample_results.py run.jsonl [second.jsonl]
"""

from __future__ import annotations

import math
import random
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fulmen.bench import schema

LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768)
LAUNCH_MS = 0.008
BYTES, FLOPS = 4.25e12, 790e12
LINEAR = "causal linear attention with decay"
SOFTMAX = "causal softmax attention"
# name: (function, share of the byte ceiling forward and backward, or of the FLOP ceiling for softmax, bytes saved in u)
LIGHTNING = {
    "fulmen triton": (LINEAR, 0.92, 0.63, 0.0),
    "fulmen triton_split": (LINEAR, 0.80, 0.52, 0.12),
    "fla fused_chunk": (LINEAR, 0.66, 0.33, 0.25),
    "fla chunk": (LINEAR, 0.39, 0.26, 4.2),
    "lightning-attention-2": (LINEAR, 0.35, 0.07, 0.25),
    "sdpa-fa2": (SOFTMAX, 0.38, 0.32, 0.1),
    "sdpa-cudnn": (SOFTMAX, 0.55, 0.51, 0.1),
}
FLASH = {
    "fulmen triton": (SOFTMAX, 0.61, 0.52, 0.02),
    "sdpa-fa2": (SOFTMAX, 0.40, 0.36, 0.02),
    "sdpa-cudnn": (SOFTMAX, 0.68, 0.61, 0.02),
    "flash-attn 4": (SOFTMAX, 0.77, 0.73, 0.02),
}


def run(run_id: str = "2026-11-15-h200", **changes: Any) -> schema.Run:
    values: dict[str, Any] = {
        "run_id": run_id,
        "time": "2026-11-15T06:00:00+00:00",
        "command": "fulmen bench run lightning flash --out run.jsonl",
        "environment": {
            "device": "NVIDIA H200",
            "arch": 90,
            "sm_count": 132,
            "l2_bytes": 62914560,
            "memory_bytes": 150109880320,
            "driver": "580.95.05",
            "cuda": "13.0",
            "torch": "2.11.0+cu130",
            "triton": "3.6.0",
            "python": "3.12.3",
            "cpu": "Intel Xeon Platinum 8480+, 16 cores",
            "power_limit_w": 700,
            "throttle": [],
        },
        "commit": {"sha": "16cc5a6f0b0d6c2e4b1b7a6d9e0f1a2b3c4d5e6f", "dirty": True, "diff": "9f2ac41e"},
        "ceilings": {
            "flops_hard": 1070.4e12,
            "flops_nominal": 989.4e12,
            "flops_measured": FLOPS,
            "bytes_hard": 4.89e12,
            "bytes_measured": BYTES,
            "clock_max_mhz": 1980.0,
        },
    }
    return schema.Run(**{**values, **changes})


def floors(function: str, case: dict[str, Any], pass_: str) -> tuple[float, float]:
    """FLOP and bytes that the pass needs at the least."""
    B, H, N, D = (case[x] for x in "BHND")
    u = 2.0 * B * H * N * D
    softmax = function == SOFTMAX
    forward = 2.0 * B * H * N * N * D if softmax else 4.0 * B * H * N * D * D
    flops = {"forward": forward, "backward": 2.5 * forward if softmax else 2 * forward}
    size = {"forward": 4 * u, "backward": 7 * u}
    if pass_ == "total":
        return sum(flops.values()), sum(size.values())
    return flops[pass_], size[pass_]


def ideal_ms(function: str, case: dict[str, Any], pass_: str, shares: tuple[float, float]) -> float:
    """What the model says a kernel takes: its share of the ceiling that binds it."""
    if pass_ == "total":
        return sum(ideal_ms(function, case, p, shares) for p in ("forward", "backward"))
    flops, size = floors(function, case, pass_)
    share = shares[0] if pass_ == "forward" else shares[1]
    return LAUNCH_MS + 1e3 * max(size / BYTES, flops / FLOPS) / share


def stats(samples: list[float]) -> dict[str, Any]:
    ordered, n = sorted(samples), len(samples)
    middle = statistics.median(ordered)
    half = 0.98 * math.sqrt(n)
    at = lambda x: ordered[min(n - 1, max(0, round(x)))]  # noqa: E731
    return {
        "median": middle,
        "low": at(n / 2 - half - 1),
        "high": at(n / 2 + half),
        "p20": at(0.2 * (n - 1)),
        "p80": at(0.8 * (n - 1)),
        "min": ordered[0],
        "mad": statistics.median(abs(x - middle) for x in ordered),
        "n": n,
        "stop": "interval",
    }


def memory(case: dict[str, Any], pass_: str, saved: float) -> dict[str, dict[str, float]]:
    B, H, N, D = (case[x] for x in "BHND")
    u = 2.0 * B * H * N * D
    backward = pass_ != "forward"
    parts = {
        "inputs": (3 * u, 3 * u),
        "output": (u, u),
        "saved": (saved * u, 0.0),
        "workspace_forward": (0.02 * u, 0.0),
        "workspace_backward": (0.3 * saved * u if backward else 0.0, 0.0),
        "gradients": (4 * u if backward else 0.0, 4 * u if backward else 0.0),
    }
    parts["peak"] = (sum(x for x, _ in parts.values()), sum(x for _, x in parts.values()))
    return {name: {"bytes": size, "floor": floor} for name, (size, floor) in parts.items()}


def correctness(rng: random.Random, pass_: str) -> dict[str, dict[str, Any]]:
    names = {"forward": ("o",), "backward": ("dq", "dk", "dv"), "total": ("o", "dq", "dk", "dv")}[pass_]
    found = {}
    for name in names:
        error, bound = rng.uniform(2.2e-3, 2.9e-3), 6.1e-3 if name == "o" else 9.0e-3
        found[name] = {"error": error, "bound": bound, "max_abs": 9 * error, "ok": True}
    return found


def cell(
    rng: random.Random, run_id: str, suite: str, name: str, competitor: tuple[str, float, float, float],
    case: dict[str, Any], pass_: str, samples: int = 40, slower: float = 1.0,
) -> schema.Cell:  # fmt: skip
    function, forward, backward, saved = competitor
    middle = slower * ideal_ms(function, case, pass_, (forward, backward))
    clocks, clock = [], 1905.0
    for _ in range(samples):
        clock = min(1980.0, max(1710.0, clock + rng.gauss(0, 12)))
        clocks.append(round(clock / 15) * 15.0)
    times = [middle * (1 + abs(rng.gauss(0, 0.004)) + 0.03 * (rng.random() < 0.02)) for _ in clocks]
    flops, size = floors(function, case, pass_)
    floor = 1e3 * max(flops / FLOPS, size / BYTES)
    flags = []
    if name.startswith("sdpa") and suite == "lightning":
        flags.append({"flag": "ANOTHER-FUNCTION", "why": "softmax attention computes another function than linear"})
    if floor < 0.02 and pass_ == "forward":
        flags.append(
            {"flag": "HOST-BOUND", "why": f"device {middle * 0.6:.4f} ms, call {middle:.4f} ms: the host waits"}
        )
    binds = "bytes" if size / BYTES > flops / FLOPS else "FLOP"
    arithmetic = f"{flops:.3g} FLOP at 790 TFLOP/s and {size:.3g} B at 4.25 TB/s: {floor:.4f} ms, {binds} bind"
    shape = ",".join(f"{k}={v}" for k, v in case.items())
    return schema.Cell(
        run_id=run_id, suite=suite, op="flash" if function == SOFTMAX else "lightning", function=function,
        case=dict(case), competitor=name, pass_=pass_, backend=name.split()[-1], version="0.6.0", samples_ms=times,
        clocks_mhz=clocks, stats=stats(times), device_ms=middle * 0.98, host_ms=middle + 0.02,
        memory=memory(case, pass_, saved), correctness=correctness(rng, pass_),
        audit={"flops": flops, "bytes": size, "floor_ms": floor, "efficiency": floor / middle,
               "arithmetic": arithmetic, "flags": flags},
        resources=[{"kernel": f"{suite}_{pass_}_kernel", "registers": 168, "shared": 106496, "stack": 0,
                    "occupancy": 0.25}] if name.startswith("fulmen") else [],
        seed=rng.randrange(2**31), command=f"fulmen bench run {suite} --only '{name}' --case {shape} --pass {pass_}",
    )  # fmt: skip


def spoil(cells: list[schema.Cell]) -> None:
    """Every status and most flags, somewhere."""

    def gone(c: schema.Cell, status: str, reason: str) -> None:
        c.status, c.reason, c.samples_ms, c.clocks_mhz, c.stats = status, reason, [], [], {}
        c.device_ms = c.host_ms = None

    for c in cells:
        N, wide = c.case["N"], c.case["D"] == 128
        if c.competitor == "fla chunk" and N == 32768 and wide and c.pass_ != "forward":
            gone(c, "oom", "torch.OutOfMemoryError: tried to allocate 16.0 GiB, 11.2 GiB free")
        elif c.competitor == "lightning-attention-2" and wide and N >= 16384:
            gone(c, "unsupported", "head dimension 128 needs 262,144 B of shared memory, the device has 232,448")
        elif c.competitor == "fulmen triton_split" and N == 2048 and c.pass_ == "backward" and not wide:
            gone(c, "failed", "dk: error 4.1e-02, bound 9.0e-03")
            c.correctness["dk"] = {"error": 4.1e-2, "bound": 9.0e-3, "max_abs": 0.71, "ok": False}
        elif c.competitor == "fla fused_chunk" and N == 1024 and c.pass_ == "backward" and c.suite == "lightning":
            gone(c, "withheld", "0.004 ms is 3.9 times faster than the hardware allows")
            c.audit["arithmetic"] = (
                "117 MB of dq, dk, dv, do, q, k, v at 4.89 TB/s: at least 0.024 ms; reported 0.004 ms"
            )
            c.audit["flags"] = [{"flag": "IMPOSSIBLE", "why": c.audit["arithmetic"]}]
        elif c.competitor == "sdpa-cudnn" and N == 32768 and c.pass_ == "total" and wide:
            gone(c, "timeout", "stopped after 60 s")
        elif c.competitor == "sdpa-fa2" and N == 16384:
            c.audit["flags"].append({"flag": "THROTTLED", "why": "SM clock 1,410 MHz, 71 % of the maximum"})
        elif c.competitor == "fla fused_chunk" and N == 4096:
            c.audit["flags"].append({"flag": "NOISY", "why": "the 95 % interval is 4.2 % of the median wide"})
        elif c.competitor == "fulmen triton_split" and N == 1024 and c.pass_ == "forward":
            c.audit["flags"].append({"flag": "WARM-L2", "why": "33 MB of data in a 60 MB cache"})
        elif c.competitor == "fla chunk" and N == 1024 and c.pass_ == "total":
            why = "forward 0.081 + backward 0.215 is not 0.241 ms"
            c.audit["flags"].append({"flag": "INCONSISTENT", "why": why})


def make(
    *, samples: int = 40, seed: int = 0, run_id: str = "2026-11-15-h200", slower: dict[str, float] | None = None,
    repeat: int = 1, **changes: Any,
) -> schema.Results:  # fmt: skip
    """The results of one run; `slower` multiplies the times of a competitor, `repeat` adds further shapes."""
    rng = random.Random(seed)
    record = run(run_id, **changes)
    cells: list[schema.Cell] = []
    common = {"dtype": "bfloat16", "causal": True}
    for i in range(repeat):
        shapes: list[tuple[str, dict[str, Any], dict[str, tuple[str, float, float, float]]]] = [
            ("lightning", {"B": 4 + i, "H": 32, "D": 64, **common, "decay": True}, LIGHTNING),
            ("lightning", {"B": 2 + i, "H": 32, "D": 128, **common, "decay": True}, LIGHTNING),
            ("flash", {"B": 1 + i, "H": 32, "H_KV": 8, "D": 128, **common}, FLASH),
        ]
        for suite, shape, competitors in shapes:
            for n in LENGTHS:
                case = {"N": n, **shape}
                for pass_ in schema.PASSES:
                    for name, competitor in competitors.items():
                        factor = (slower or {}).get(name, 1.0)
                        cells.append(cell(rng, run_id, suite, name, competitor, case, pass_, samples, factor))
    spoil(cells)
    return schema.Results({run_id: record}, cells)


def hostile() -> schema.Results:
    """Text that a careless page would run, in every field that carries text."""
    evil = '</script><img src=x onerror="window.hacked=1"><script>window.hacked=1</script>'
    results = make(samples=12)
    record = next(iter(results.runs.values()))
    record.environment[evil] = evil
    record.command = evil
    keep = [c for c in results.cells if c.suite == "flash"]
    for c in keep[:40]:
        c.competitor = evil + c.competitor
        c.reason, c.backend, c.version, c.command, c.function = evil, evil, evil, evil, evil
        c.case[evil] = evil
        c.audit["flags"] = [{"flag": evil, "why": evil}]
        c.audit["arithmetic"] = evil
        c.correctness = {evil: {"error": 1.0, "bound": 0.5, "max_abs": 1.0, "ok": False}}
        c.resources = [{"kernel": evil, "registers": evil}]
    keep[3].status, keep[4].competitor = "failed", '=HYPERLINK("http://x")'
    keep[5].suite = "../../" + evil
    return schema.Results(results.runs, keep)


def lines(results: schema.Results) -> Iterator[str]:
    for record in (*results.runs.values(), *results.cells):
        yield schema.dumps(record) + "\n"


def save(results: schema.Results, path: Path) -> Path:
    path.write_text("".join(lines(results)), encoding="utf-8")
    return path


if __name__ == "__main__":
    save(make(), Path(sys.argv[1]))
    if len(sys.argv) > 2:
        changed = make(seed=1, run_id="2026-11-16-h200", slower={"fulmen triton": 0.93, "fla chunk": 1.04})
        save(changed, Path(sys.argv[2]))
