"""The local kernels that ranks call, on one GPU: right against fp64, and how long beside their byte floors.

    PYTHONPATH=. python3 dev/parallel_kernels.py --out build/parallel_kernels.jsonl      # about 40 s on an H200
    PYTHONPATH=. python3 dev/parallel_kernels.py --cpu                                   # the checks alone, here

Per rank, B = 1, H = 16: `leaving` and `entering_gradient` (the state pre-passes, forward and backward), `add_entering`
and `add_leaving_gradient` (what other ranks' states add), `combined` (the scan over the states of 8 and 64 ranks),
`merge` (o and lse of one more block of a ring). Where our own kernel serves, torch's operations stand beside it. A
floor is every operand once over the copy bandwidth of the same run; with decay, only tokens whose weight is above
2^-60 count. L2 is cold, times are medians of events with a spacer ahead of them.
"""
from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from fulmen import decay as slopes_of  # noqa: E402
from fulmen import flash_attention_with_lse, hardware, lightning_attention  # noqa: E402
from fulmen.bench import environment  # noqa: E402
from fulmen.bench.timing import Timer  # noqa: E402
from fulmen.parallel import ring, states  # noqa: E402

H, SAMPLES = 16, 11
ROWS: list[dict] = []


class by_torch:
    """Our kernels put aside, so that torch's operations do it."""

    def __enter__(self):
        self.kept = states._kernels
        states._kernels = lambda: None

    def __exit__(self, *_):
        states._kernels = self.kept


def emit(row: dict) -> None:
    ROWS.append(row)
    if row["record"] == "check":
        say = "ok" if row["ok"] else "WRONG"
        print(f"{say:<6} {row['what']:<22} {row['case']:<52} error {row['error']:.2e}, allowed {row['bound']:.2e}", flush=True)
    elif row["record"] == "time":
        print(f"{row['what']:<21} {row['by']:<6} {row['case']:<30} {row['ms']:9.4f} ms, floor {row['floor_ms']:8.4f}, "
              f"{100 * row['share']:5.1f} %", flush=True)


# ------------------------------------------------------------------------------------------------ right?


def check(what: str, case: str, actual: torch.Tensor, low: torch.Tensor, exact: torch.Tensor) -> None:
    """As in fulmen.testing: twice the error of the plain computation, and a rounding of the result, in the 2-norm."""
    error, plain, size = (float(torch.linalg.vector_norm(x)) for x in (actual.double() - exact, low.double() - exact, exact))
    bound = 2 * plain + torch.finfo(actual.dtype).eps / 2 * size
    emit({"record": "check", "what": what, "case": case, "error": error / size, "bound": bound / size, "ok": error <= bound})


def weights(slopes, heads: int, exponents: torch.Tensor) -> torch.Tensor:
    s = torch.zeros(heads, device=exponents.device) if slopes is None else slopes
    return torch.exp(-s.double()[:, None] * exponents.double())[..., None]


def decayed(slopes, q: torch.Tensor) -> states.Decay:
    known = (0.0,) * q.shape[1] if slopes is None else tuple(slopes.tolist())
    return states.Decay.of(slopes, known, q)


def checks(device: torch.device, dtype: torch.dtype) -> None:
    plain_shape = (1, 4, 4, 1000, 64, 64)  # each shape and dtype costs seconds of compiling
    shapes = [(2, 4, 2, 333, 128, 64), (1, 3, 3, 1, 64, 64), plain_shape] if dtype != torch.float16 else [plain_shape]
    for heads_of, some in (("alibi", shapes), ("none", [(1, 2, 1, 4097, 64, 128), plain_shape] if len(shapes) > 1 else [])):
        for B, heads, heads_kv, N, D, E in some:
            torch.manual_seed(N)
            case = f"B{B} H{heads}/{heads_kv} N{N} D{D} E{E} {dtype}".replace("torch.", "") + f", {heads_of}"
            slopes = None if heads_of == "none" else slopes_of.alibi(heads).to(device)
            q, do, k, v = (torch.randn(B, h, N, s, device=device).to(dtype) for h, s in ((heads, D), (heads, E), (heads_kv, D), (heads_kv, E)))
            S = torch.randn(B, heads, D, E, device=device)
            decay, t = decayed(slopes, q), torch.arange(N, device=device)
            until, after = weights(slopes, heads, N - 1 - t), weights(slopes, heads, t + 1)
            wide = [x.repeat_interleave(heads // heads_kv, 1) for x in (k, v)]
            K, V, Q, DO = (x.double() for x in (*wide, q, do))

            def plain(x: torch.Tensor) -> torch.Tensor:
                """Rounded as what a kernel multiplies in the inputs' dtype; products and sums are in fp32."""
                return x.to(dtype).float()

            check("leaving", case, states.leaving(q, k, v, decay), plain(K).mT @ plain(V * until), K.mT @ (V * until))
            check("entering_gradient", case, states.entering_gradient(q, do, decay, 0.5),
                  0.5 * (plain(Q).mT @ plain(DO * after)), 0.5 * (Q.mT @ (DO * after)))
            o, w = torch.randn(B, heads, N, E, device=device).to(dtype), 0.5 * after
            exact, low = o.double() + w * (Q @ S.double()), (o.float() + w.float() * (Q.float() @ S)).to(dtype)
            states.add_entering(o, q, S, decay, 0.5)
            check("add_entering", case, o, low, exact)
            dk, dv = torch.randn_like(k), torch.randn_like(v)

            def summed(x: torch.Tensor) -> torch.Tensor:
                return x.unflatten(1, (heads_kv, -1)).sum(2)

            wanted = []
            for grad, x, right in ((dk, V, S.mT), (dv, K, S)):
                exact = grad.double() + summed(until * (x @ right.double()))
                wanted.append(((grad.float() + summed(until.float() * (x.float() @ right))).to(dtype), exact))
            states.add_leaving_gradient(dk, dv, k, v, S, decay)
            for name, grad, (low, exact) in zip(("dk", "dv"), (dk, dv), wanted):
                check("add_leaving_gradient", f"{case}, {name}", grad, low, exact)
            every = torch.randn(8, B, heads, D, E, device=device)
            sources = [(r, (6 - r) * 5) for r in range(7)]
            w = [weights(slopes, heads, torch.tensor([d], device=device)) for _, d in sources]
            exact = sum(every[r].double() * x for (r, _), x in zip(sources, w))
            low = torch.zeros_like(every[0])
            for (r, _), x in zip(sources, w):
                low += every[r] * x.float()
            check("combined", case + ", 8 ranks", states.combined(every, sources, decay), low, exact)
    for P, N, D in ((4, 1000, 64), (3, 333, 128)) if dtype != torch.float16 else ():  # the whole way of several ranks, one after the other
        whole(P, N, D, device, dtype)
        rings(P, N, D, device, dtype)


def whole(P: int, N: int, D: int, device: torch.device, dtype: torch.dtype) -> None:
    """Lightning attention of P ranks with N tokens each, by what a rank calls, against fp64 of all of it."""
    torch.manual_seed(P)
    heads, slopes = 4, slopes_of.alibi(4).to(device)
    q, k, v = (torch.randn(1, heads, P * N, D, device=device).to(dtype) for _ in range(3))
    exact = lightning_attention(q.double(), k.double(), v.double(), slopes, backend="eager")
    low = lightning_attention(q, k, v, slopes, backend="eager")
    part = lambda x, r: x[:, :, r * N : (r + 1) * N]  # noqa: E731
    decay = decayed(slopes, q)
    every = torch.stack([states.leaving(part(q, r), part(k, r), part(v, r), decay) for r in range(P)])
    found = []
    for r in range(P):
        o = lightning_attention(part(q, r), part(k, r), part(v, r), slopes)
        S = states.combined(every, [(j, (r - 1 - j) * N) for j in range(r)], decay) if r else None
        if S is not None:
            states.add_entering(o, part(q, r), S, decay, 1.0)
        found.append(o)
    check("lightning over ranks", f"{P} ranks, N{N} D{D} each, alibi", torch.cat(found, 2), low, exact)


def rings(P: int, N: int, D: int, device: torch.device, dtype: torch.dtype) -> None:
    """Softmax attention of one rank's queries over P blocks of keys, merged."""
    torch.manual_seed(P)
    q = torch.randn(1, 4, N, D, device=device).to(dtype)
    k, v = (torch.randn(1, 2, P * N, D, device=device).to(dtype) for _ in range(2))
    K, V = (x.double().repeat_interleave(2, 1) for x in (k, v))
    s = q.double() @ K.mT * D**-0.5
    exact, exact_lse = s.softmax(-1) @ V, s.logsumexp(-1)
    low_s = (q @ k.repeat_interleave(2, 1).mT * D**-0.5).float()  # in the inputs' own dtype, as fulmen.testing has it
    low, low_lse = (low_s.softmax(-1).to(dtype).float() @ V.float()).to(dtype), low_s.logsumexp(-1)
    o, lse = torch.zeros(1, 4, N, D, device=device), torch.full((1, 4, N), -torch.inf, device=device)
    for r in range(P):
        keys = slice(r * N, (r + 1) * N)
        ring.merge(o, lse, *flash_attention_with_lse(q, k[:, :, keys], v[:, :, keys]))
    check("ring of merges", f"{P} blocks, N{N} D{D}, o", o.to(dtype), low, exact)
    check("ring of merges", f"{P} blocks, N{N} D{D}, lse", lse, low_lse, exact_lse)


# ------------------------------------------------------------------------------------------------- fast?


def timed(timer: Timer, ceiling: float, what: str, by: str, case: str, floor: float, work, **facts) -> None:
    """`floor`: bytes."""
    for _ in range(2):
        work()
    samples = [timer.sample(work, spacer_ms=0.5).ms for _ in range(SAMPLES)]
    ms, floor_ms = statistics.median(samples), 1e3 * floor / ceiling
    emit({"record": "time", "what": what, "by": by, "case": case, "ms": ms, "floor_ms": floor_ms, "share": floor_ms / ms,
          "bytes": floor, "samples_ms": samples, **facts})


def both(name: str, work, *given):
    """(who, the call) of our kernel, if it serves, and of torch's operations."""
    found = [("torch", lambda: set_aside(work))]
    return [("ours", work), *found] if states.kernels_for(*given) is not None else found


def set_aside(work):
    with by_torch():
        return work()


def times(device: torch.device, timer: Timer, ceiling: float, until: float) -> None:
    for D in (64, 128):
        for N in (16_384, 65_536, 131_072):
            for kind in ("none", "alibi"):
                if time.monotonic() > until:
                    print("out of time: the rest is not measured")
                    return
                slopes = None if kind == "none" else slopes_of.alibi(H).to(device)
                x = torch.randn(4, 1, H, N, D, device=device, dtype=torch.bfloat16)
                q, k, v, do = x
                S, decay = torch.randn(1, H, D, D, device=device), decayed(slopes, x[0])
                reach = [N if s == 0 else min(N, math.ceil(60 * math.log(2) / s)) for s in decay.known]
                u = sum(reach) * D * 2  # bytes of one tensor, as far as a state reaches
                state = S.numel() * 4
                case, facts = f"N{N} D{D} {kind}", {"N": N, "D": D, "H": H, "decay": kind}
                work = {
                    "leaving": (2 * u + state, lambda: states.leaving(q, k, v, decay)),
                    "entering_gradient": (2 * u + state, lambda: states.entering_gradient(q, do, decay, 1.0)),
                    "add_entering": (3 * u + state, lambda: states.add_entering(do, q, S, decay, 1e-3)),
                    "add_leaving_gradient": (6 * u + state, lambda: states.add_leaving_gradient(q, do, k, v, S, decay)),
                }
                for what, (floor, call) in work.items():
                    for by, chosen in both(what, call, k, v):
                        timed(timer, ceiling, what, by, case, floor, chosen, **facts)
                del x, q, k, v, do
            o, lse = torch.randn(1, H, N, D, device=device), torch.randn(1, H, N, device=device)
            o_i, lse_i = o.bfloat16(), torch.randn(1, H, N, device=device)
            floor = o.numel() * (8 + 2) + lse.numel() * 12
            for by, call in both("merge", lambda: ring.merge(o, lse, o_i, lse_i), o_i):
                timed(timer, ceiling, "merge", by, f"N{N} D{D}", floor, call, N=N, D=D, H=H)
            del o, lse, o_i, lse_i
        for P in (8, 64):
            every = torch.randn(P, 1, H, D, D, device=device)
            for kind in ("none", "alibi"):
                decay = decayed(None if kind == "none" else slopes_of.alibi(H).to(device), torch.empty(1, H, 1, D, device=device))
                sources = [(r, (P - 2 - r) * 16_384) for r in range(P - 1)]  # the last rank reads all before it
                read = sum(math.exp(-decay.least * d) >= states.NOTHING[torch.float32] for _, d in sources)
                floor = (read + 1) * every[0].numel() * 4
                timed(timer, ceiling, "combined", "torch", f"{P} ranks D{D} {kind}, reads {read}", floor,
                      lambda: states.combined(every, sources, decay), ranks=P, D=D, H=H, decay=kind)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--cpu", action="store_true", help="check only, in fp32 and on the CPU")
    parser.add_argument("--seconds", type=float, default=60.0, help="no measurement is begun after these")
    chosen = parser.parse_args()
    begin = time.monotonic()
    device = torch.device("cpu") if chosen.cpu else torch.device("cuda", 0)
    for dtype in (torch.float32,) if chosen.cpu else (torch.bfloat16, torch.float16, torch.float32):
        checks(device, dtype)
    wrong = [row for row in ROWS if not row["ok"]]
    print(f"{len(ROWS)} checks, {len(wrong)} wrong; {time.monotonic() - begin:.1f} s", flush=True)
    if not chosen.cpu:
        timer = Timer(device)
        ceiling = environment._copy(device, timer)
        ROWS.insert(0, {
            "record": "parallel_kernels", "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "commit": environment.commit(),
            "device": hardware.of(device).name, "torch": torch.__version__, "copy_bytes_per_s": ceiling,
        })
        print(f"copy {ceiling / 1e12:.2f} TB/s; share: of the copy's bandwidth, counting the floor's bytes", flush=True)
        with torch.no_grad():
            times(device, timer, ceiling, begin + chosen.seconds)
    if chosen.out is not None:
        chosen.out.parent.mkdir(parents=True, exist_ok=True)
        chosen.out.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    print(f"{time.monotonic() - begin:.1f} s", flush=True)
    return len(wrong)


if __name__ == "__main__":
    sys.exit(min(main(), 100))
