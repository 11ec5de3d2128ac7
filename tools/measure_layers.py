r"""What a layer costs beyond its projections and its attention kernel, and the report of the suite `layers`.

    PYTHONPATH=. python3 tools/measure_layers.py --out build/layers-parts.jsonl               (on the GPU)
    python tools/measure_layers.py --render build/layers.jsonl build/layers-parts.jsonl \
        tests/bench/data/003.csv > build/layers.md

The parts: every projection as one nn.Linear product on an input of its own, and `flash_attention` of q, k, v that lie
as projections leave them; forward and gradients of all of it, one after the other on the stream, timed as one call in
turns with the layer (cold L2, host hidden, 80 rounds). What the layer takes longer is norms, RoPE, joining q and k,
and sums of gradients.
"""

from __future__ import annotations

import argparse
import csv
import functools
import json
import math
import random
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

ROUNDS = 80
PASSES = ("forward", "backward", "total")


def parts_of(case: dict[str, Any], device: Any) -> tuple[Callable[[], list[Any]], list[Any], list[Any]]:
    """(the forward of all parts, what asks for gradients, what comes back to the results)"""
    import torch
    from torch.nn import functional as F

    import fulmen
    from fulmen.bench import floors
    from fulmen.bench.adapters import dtype_of

    def random_(*shape: int) -> Any:
        return torch.randn(shape, device=device, dtype=dtype_of(case))

    B, N, H, H_KV, D, E = (case[key] for key in ("B", "N", "H", "H_KV", "D", "E"))
    sizes = floors.projections_of(case)
    if case["layer"] == "mhsa":  # one product
        sizes = [(sizes[0][0], sum(out for _, out in sizes[:3])), sizes[3]]
    pairs = [(random_(B, N, a).requires_grad_(), (random_(b, a) * a**-0.5).requires_grad_()) for a, b in sizes]
    q, k, v = (random_(B, N, h, d).requires_grad_() for h, d in ((H, D), (H_KV, D), (H_KV, E)))
    douts = [random_(B, N, b) for _, b in sizes] + [random_(B, N, H, E).transpose(1, 2)]

    def forward() -> list[Any]:
        made = [F.linear(x, w) for x, w in pairs]
        o = fulmen.flash_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), causal=case["causal"])
        return [*made, o]

    return forward, [t for pair in pairs for t in pair] + [q, k, v], douts


def one_result(attend: Callable[[Any], Any], x: Any) -> list[Any]:
    return [attend(x)]


def calls(forward: Callable[[], list[Any]], leaves: list[Any], douts: list[Any]) -> dict[str, Callable[[], Any]]:
    import torch

    outs = forward()
    return {
        "forward": forward,
        "backward": lambda: torch.autograd.grad(outs, leaves, douts, retain_graph=True),
        "total": lambda: torch.autograd.grad(forward(), leaves, douts),
    }


def measure(out: Path, only: str | None) -> None:
    import torch

    from fulmen.bench import cases, competitors, environment
    from fulmen.bench.adapters import layer
    from fulmen.bench.group import Machine

    device = environment.device_of("cuda")
    machine = Machine.of(device)
    machine.burn_in()
    with out.open("w", encoding="utf-8") as file:
        about = environment.facts(device, machine.nvml, machine.timer)
        file.write(json.dumps({"environment": about, "commit": environment.commit(), "rounds": ROUNDS}) + "\n")
        for line in cases.read("layers"):
            case = competitors.complete(line, device)
            if only is not None and case["layer"] != only:
                continue
            problem = layer.problem(case, device, 1)
            forward = functools.partial(one_result, layer.attend("auto"), problem.x)
            whole = calls(forward, list(problem.leaves.values()), [problem.douts["o"]])
            entries = {"layer": whole, "parts": calls(*parts_of(case, device))}
            times: dict[str, list[float]] = {f"{who} {name}": [] for who in entries for name in PASSES}
            for round_ in range(ROUNDS + 3):
                for name in random.sample(PASSES, len(PASSES)):
                    for who in random.sample(list(entries), len(entries)):  # side by side: clocks move with the power
                        sample = machine.timer.sample(entries[who][name], spacer_ms=1.0)
                        if round_ >= 3:
                            times[f"{who} {name}"].append(sample.ms)
            file.write(json.dumps({"case": case, "samples_ms": times}) + "\n")
            print(describe(case), *(f"{name} {overhead(times, name)}" for name in PASSES), flush=True)
            del problem, whole, entries
            torch.cuda.empty_cache()


# -------------------------------------------------------------------------------------------------- report


def overhead(times: dict[str, list[float]], name: str) -> str:
    """The layer over its parts: the median over rounds, and between which of them it lies in 19 of 20 cases."""
    shares = sorted(a / b - 1 for a, b in zip(times[f"layer {name}"], times[f"parts {name}"], strict=True))
    n = len(shares)
    rank = max(int(n / 2 - 0.98 * n**0.5), 0)  # of the binomial distribution's 2.5 %
    return f"{median(shares):+.1%} ({shares[rank]:+.1%} to {shares[n - 1 - rank]:+.1%})"


def describe(case: dict[str, Any]) -> str:
    more = [f"H_KV={case['H_KV']}"] if case["layer"] == "gqa" else []
    more += [f"rank={case['rank']}"] if case["rank"] else []
    size = f"D={case['D']}" if case["D"] == case["E"] else f"D={case['D']}/{case['E']}"
    return " ".join([f"{case['layer']} B={case['B']} N={case['N']} H={case['H']}", *more, size])


def geometric_mean(x: list[float]) -> float:
    return math.exp(sum(map(math.log, x)) / len(x))


def render(
    results: Path, parts: Path | None, claims: Path | None, write: Callable[[str], Any] = sys.stdout.write
) -> None:
    from fulmen.bench import schema

    read = schema.read([results])
    run = list(read.runs.values())[-1]
    table: dict[str, dict[tuple[str, str], float]] = {}
    chosen: dict[str, str] = {}
    for cell in read.cells:
        if cell.status == "ok" and cell.cache == "cold":
            at = describe(cell.case)
            table.setdefault(at, {})[cell.competitor, cell.pass_] = cell.stats["median"]
            if cell.competitor == "fulmen auto":
                chosen[at] = cell.backend
    names = {
        "fulmen eager": "eager",
        "fulmen triton": "triton",
        "fulmen auto": "auto",
        "sdpa-layer": "nn.Linear + SDPA",
    }
    known = run.environment
    write(
        f"# Attention layers on one {known['device']}\n\nMade by `tools/measure_layers.py --render` from "
        f"`{results.name}`: torch {known['torch']}, {run.time}, bf16, causal, milliseconds, cold L2, every "
        "parameter's gradient proved "
        "right before the first time was taken. The shapes and the rows are those of the report this suite comes from "
        '(its "PyTorch" is `eager`, its "Flash" the best kernel, `auto`); "nn.Linear + SDPA" is the same layer written '
        "without us, SDPA pinned to cuDNN. mla: both latents have size rank, D is with what RoPE turns.\n\n"
        f"| layer | pass | {' | '.join(names.values())} | auto x eager | auto x SDPA | auto took |\n"
        f"|{'---|' * (len(names) + 5)}\n"
    )
    gains: dict[str, list[float]] = {p: [] for p in PASSES}
    against: list[float] = []
    for at, cells in table.items():
        for p in PASSES:
            times = [cells.get((who, p)) for who in names]
            words = ["-" if t is None else f"{t:.3f}" for t in times]
            auto, eager, plain = cells["fulmen auto", p], cells["fulmen eager", p], cells["sdpa-layer", p]
            gains[p].append(eager / auto)
            against += [plain / auto] if p == "total" else []
            write(f"| {at} | {p} | {' | '.join(words)} | {eager / auto:.2f} | {plain / auto:.3f} | {chosen[at]} |\n")
    write("\n`auto` over `eager`, geometric mean and least: ")
    write(", ".join(f"{p} {geometric_mean(x):.2f} and {min(x):.2f}" for p, x in gains.items()) + ".\n")
    write(f"`auto` over nn.Linear + SDPA on cuDNN, total: geometric mean {geometric_mean(against):.3f}, ")
    write(f"least {min(against):.3f}.\n")
    if parts is not None:
        write_parts(parts, write)
    if claims is not None:
        write_claims(claims, table, write)


def write_parts(parts: Path, write: Callable[[str], Any]) -> None:
    write(
        f"\n## Beyond projections and attention kernel\n\nFrom `{parts.name}`: the layer (`auto`) over its parts, see "
    )
    write("`tools/measure_layers.py`.\n\n| layer | parts, total ms | layer, total ms | forward | backward | total |\n")
    write("|---|---|---|---|---|---|\n")
    about, *rows = parts.read_text().splitlines()
    for text in rows:
        row = json.loads(text)
        times = {name: median(x) for name, x in row["samples_ms"].items()}
        shares = " | ".join(overhead(row["samples_ms"], p) for p in PASSES)
        write(f"| {describe(row['case'])} | {times['parts total']:.3f} | {times['layer total']:.3f} | {shares} |\n")
    if note := json.loads(about).get("note"):
        write(f"\n{note}\n")


def write_claims(claims: Path, table: dict[str, dict[tuple[str, str], float]], write: Callable[[str], Any]) -> None:
    """The report's own times, on an A100, beside what an A100 could do at its rated 312 TFLOP/s, and beside ours."""
    from fulmen.bench import floors

    sheet = floors.gpu("A100-SXM4-40GB")
    assert sheet is not None
    rated = floors.of_gpu(sheet, "bf16").flops_rated
    assert rated is not None
    with claims.open() as file:
        rows = list(csv.DictReader(file))
    ours = {tuple(at.split()[:4]): cells for at, cells in table.items()}
    write(
        "\n## What becomes of the report's claims\n\nIts times are of an A100. It does not say whether its layers were "
        "causal, so the floor counts a causal mask, and of mla the attention alone: less work than any layer does. A "
        "time below its floor was not measured of the operation.\n\n"
        "| layer | pass | claimed Triton ms | least on an A100 | claimed Triton x PyTorch | measured triton x eager | "
        "claimed Flash x PyTorch | measured auto x eager |\n"
        f"|{'---|' * 8}\n"
    )
    impossible, flash_wins = 0, 0
    for row in rows:
        pass_, kind = row["Pass"].lower(), row["label"].lower()
        case: dict[str, Any] = {k: int(row[k]) for k in ("B", "N", "H", "H_KV", "D")} | {
            "dtype": "bf16",
            "causal": True,
        }
        case |= {"D": 192, "E": 128} if kind == "mla" else {}
        work = floors.of_case("flash" if kind == "mla" else "layer", "softmax", case, pass_)
        assert work is not None
        least = 1e3 * work.flops / rated
        torch_, triton, flash = (float(row[name]) for name in ("PyTorch (ms)", "Triton (ms)", "Flash (ms)"))
        cells = ours[kind, f"B={row['B']}", f"N={row['N']}", f"H={row['H']}"]
        eager, best = cells["fulmen eager", pass_], cells["fulmen auto", pass_]
        below = triton < least
        impossible += below
        flash_wins += flash < torch_ and best < eager
        write(
            f"| {kind} B={row['B']} N={row['N']} H={row['H']} | {pass_} | "
            f"{triton:.3f}{' (impossible)' if below else ''} | {least:.3f} | {torch_ / triton:.2f} | "
            f"{eager / cells['fulmen triton', pass_]:.2f} | {torch_ / flash:.2f} | {eager / best:.2f} |\n"
        )
    write(
        "\n- *Flash is faster than PyTorch, forward, backward and in total*: holds in "
        f"{flash_wins} of {len(rows)} rows.\n"
        f"- *Triton's backward is 4 to 17 times as fast*: no. {impossible} of the {len(rows) // 3} backward times lie "
        "below what an A100 could do; that Triton path had no backward, so that one product of it was timed. The other "
        "figures of its column are no better founded. Ours has a backward, and what it gains is in the table.\n"
        "- *Triton is the best choice for a backward*: does not hold; where cuDNN can serve a call it is faster.\n"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", help="one kind of layer")
    parser.add_argument("--render", type=Path, nargs="+")
    given = parser.parse_args()
    if given.out:
        measure(given.out, given.only)
    elif given.render:
        render(given.render[0], *[*given.render[1:], None, None][:2])
    else:
        parser.error("--out or --render")
