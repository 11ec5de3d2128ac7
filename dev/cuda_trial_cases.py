"""What dev/cuda_trial.py runs, and the kernels that takes; nothing here needs a GPU."""
from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "flash"))

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
    "window 1024, H 32/8": {"B": 1, "H": 32, "H_KV": 8, "N_Q": 8192, "D": 128, "causal": True, "window": (1023, None)},
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
    if not hasattr(cfg, "consumers"):
        if not hasattr(cfg, "warps_m"):
            return f"once n{cfg.block_n} x{cfg.stages}{' grouped' * cfg.grouped}"
        return f"mma {cfg.warps_m}x{cfg.warps_n} n{cfg.block_n} s{cfg.stages}"
    return f"{cfg.rows}x{cfg.block_n}{' turns' * cfg.take_turns}{' parts' * (not cfg.together)}{' grouped' * cfg.grouped}" + f" split {cfg.splits}" * (cfg.splits > 1)


def gpu_cases():
    import test_backends

    return test_backends.GPU_CASES


def grouped_shapes():
    import test_cuda_grouped

    return test_cuda_grouped.DECODE | test_cuda_grouped.SHAPES


def grouped_configs(D: int):
    """Tiles that any options leave registers for, not grouped."""
    import test_cuda_grouped

    return test_cuda_grouped.TILES[D]


FORCED = [  # shapes on which every config of `configs` is checked, forward
    {"B": 1, "H": 2, "N_Q": 77, "N_KV": 301, "causal": True}, {"B": 1, "H": 2, "N_Q": 301, "N_KV": 77, "causal": True},
    {"B": 2, "H": 4, "H_KV": 1, "N_Q": 1000, "causal": True, "layout": "bnhd"}, {"B": 1, "H": 3, "N_Q": 2049, "N_KV": 1500},
    {"B": 2, "H": 40, "H_KV": 8, "N_Q": 1100, "causal": True},
]


GRADIENTS = ["D=64 causal", "D=128 causal", "heads 8/2", "short D=64", "window 128, causal", "softcap", "packed, causal",
             "packed, cross", "D=192 E=128", "D=256 causal", "N_Q>N_KV, bottom right"]


# ---------------------------------------------------------------------------------------------- the last run

DECODE_GROUPS, DECODE_QUERIES = (4, 8, 16), range(1, 18)


def decode(N: int, G: int, D: int) -> dict:
    return {"B": 2, "H": 2 * G, "H_KV": 2, "N_Q": N, "N_KV": 700, "D": D, "causal": True}


REPEATED = {  # 250 runs each, as `config` has it; "!": grouped whatever it says
    "decode D=128": {"B": 8, "H": 32, "H_KV": 8, "N_Q": 1, "N_KV": 3000, "D": 128},
    "decode D=64": {"B": 8, "H": 32, "H_KV": 4, "N_Q": 7, "N_KV": 3000, "D": 64, "causal": True},
    "17 queries": {"B": 8, "H": 32, "H_KV": 8, "N_Q": 17, "N_KV": 3000, "D": 128, "causal": True},
    "window, sinks": {"B": 1, "H": 64, "H_KV": 8, "N_Q": 2000, "D": 64, "causal": True, "window": (127, None), "sinks": True},
    "packed": {"H": 32, "H_KV": 4, "D": 128, "lengths_q": [1, 700, 3, 0, 40], "causal": True},
    "!causal": {"B": 2, "H": 16, "H_KV": 4, "N_Q": 4500, "D": 128, "causal": True},
    "!D=256": {"B": 2, "H": 16, "H_KV": 2, "N_Q": 700, "D": 256, "causal": True},
    "parts, full": {"B": 1, "H": 32, "N_Q": 4096, "D": 128},
    "parts, D=64": {"B": 2, "H": 32, "N_Q": 4096, "D": 64, "causal": True},
}
# B, H, H_KV, N_Q, N_KV, D and causal; beside them what is predicted: how many times as fast grouped tiles are as tiles of
# single heads. 1 where tiles are full either way; with few queries as many as there are fewer rounds of two blocks an SM,
# or as the L2 cache (5.5 TB/s) has less to read, if memory (4.25 TB/s) then bears it.
GROUPED_ROWS = [
    ((1, 32, 8, 4096, 4096, 128, True), 1.00), ((1, 32, 4, 8192, 8192, 128, True), 1.00),
    ((8, 32, 8, 4096, 4096, 128, True), 1.00), ((8, 32, 4, 8192, 8192, 128, True), 1.00),
    ((1, 32, 8, 2049, 2049, 128, False), 1.20), ((4, 32, 8, 160, 8192, 128, False), 1.00),
    *[((1, 32, 8, N, keys, 128, False), 1.0) for N in (1, 4, 16) for keys in (8192, 32768)],
    *[((16, 32, 8, N, keys, 128, False), 3.0) for N in (1, 4, 16) for keys in (8192, 32768)],
    ((16, 32, 4, 4, 8192, 64, False), 4.0), ((64, 32, 4, 1, 8192, 128, False), 6.0),
]
WINDOW_ROWS = {  # predicted: blocks of keys in a tile, plus 2, over the same grouped
    "window 128, D=64, sinks": 1.42, "window 1024, H 32/8":  1.07,
}
BEFORE = {  # what run 2 chose and what it measured over cuDNN, full and causal: now as fast as predicted, or better
    (1, 32, 32, 4096, 128): (1.010, 1.142), (2, 16, 16, 8192, 128): (1.058, 1.191), (1, 40, 8, 2048, 128): (1.024, 1.256),
    (1, 16, 16, 16384, 128): (1.063, 1.211), (4, 32, 32, 4096, 64): (1.113, 1.078), (2, 12, 12, 2048, 64): (1.099, 1.277),
}


def grouped_row(row) -> dict:
    B, H, H_KV, N_Q, N_KV, D, causal = row
    return {"B": B, "H": H, "H_KV": H_KV, "N_Q": N_Q, "N_KV": N_KV, "D": D, "causal": causal}


def final_cases(kind: str) -> list[tuple]:
    from fulmen.flash.cuda_sm90 import HEAD_DIMS

    if kind == "final_check":
        found = [("decode", G, D) for D in (128, 64) for G in DECODE_GROUPS]
        found += [("grouped", name, D, E, "bfloat16") for name in grouped_shapes() for D, E in HEAD_DIMS
                  if D > 128 or "queries, " not in name]  # those are in `decode`
        found += [("grouped", name, 128, 128, "float16") for name in ("causal", "window", "packed, cross")]
        found += [("repeated", name) for name in REPEATED] + [("strangers",), ("graph",)]
        found += [("paired", *sizes) for sizes in ((128, 128, 4), (64, 64, 4), (128, 128, 1), (192, 128, 4), (256, 256, 2))]
        return found + [("case", name, "bfloat16") for name in gpu_cases()]
    rows = [("bar", row, causal) for row in ROWS for causal in (False, True)]
    rows += [("grouped_time", row, ratio) for row, ratio in GROUPED_ROWS] + [("window_time", name) for name in WINDOW_ROWS]
    return rows + [("paired_time", row) for row in ROWS] + [("small", SMALL[i], "bfloat16") for i in (2, 4)]


def final_calls():
    """(options, dtype, tiles) of all that these run by tiles of their own; None: those of `config`."""
    import torch
    from fulmen.flash.cuda_sm90 import HEAD_DIMS

    half = torch.bfloat16
    both = lambda cfgs: [cfg._replace(grouped=grouped) for cfg in cfgs for grouped in (False, True)]
    for D in (64, 128):
        yield decode(1, 4, D), half, both(grouped_configs(D))
    for options in grouped_shapes().values():
        for D, E in HEAD_DIMS:
            for dtype in (half, torch.float16) if D == 128 else (half,):
                yield options | {"D": D, "E": E}, dtype, both(grouped_configs(D))
    for name, options in REPEATED.items():
        yield options, half, both([tile_of(options)]) if name[0] == "!" else [None]
    for row in ROWS:
        B, H, H_KV, N, D = row
        for causal in (False, True):
            yield {"B": B, "H": H, "H_KV": H_KV, "N_Q": N, "D": D, "causal": causal}, half, [None]
    for row, _ in GROUPED_ROWS:
        yield grouped_row(row), half, [None, *both(timed_configs(grouped_row(row)))]
    for name in WINDOW_ROWS:
        yield MORE[name], half, both([tile_of(MORE[name])])


def tile_of(options):
    """The tile `config` has for these options, not grouped."""
    import torch
    from fulmen import hardware
    from fulmen.flash import cuda_sm90

    return cuda_sm90.config(spec_of(options, torch.bfloat16), hardware.TARGETS[90])._replace(grouped=False)


def timed_configs(options) -> list:
    """For a row of GROUPED_ROWS: the tile of `config` and, if that is the one for few queries, the one for many."""
    cfg = tile_of(options)
    return [cfg] if cfg.consumers > 1 else [cfg, grouped_configs(options["D"])[0]]


def cases(kind: str) -> list[tuple]:
    if kind.startswith("final"):
        return final_cases(kind)
    if kind == "check":
        found = [("case", name, dtype) for name in gpu_cases() for dtype in ("bfloat16", "float16")]
        found += [("forced", D, i, j) for D in (128, 64) for i in range(len(configs(D))) for j in range(len(FORCED))]
        found += [("strangers",), ("graph",), ("repeat",), ("gradients",)]
        return found + [("case", name, "bfloat16", True) for name in GRADIENTS]  # last: Triton compiles for each
    rows = [("long", row, causal) for row in ROWS for causal in (False, True)]
    return [("host",), *[("small", size, "bfloat16") for size in SMALL], *rows, *[("more", name) for name in MORE],
            *[("small", size, "float16") for size in SMALL[:4]]]


# ---------------------------------------------------------------------------------------------- compiling


def spec_of(options, dtype):
    """Of testing.inputs, on tensors without memory."""
    import torch
    from fulmen.testing import flash as testing

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


def variants() -> list:
    """Of everything the trial runs; no GPU is needed to know."""
    import torch
    from fulmen import hardware
    from fulmen.flash import cuda, cuda_sm90, cuda_small

    hw, found = hardware.TARGETS[90], {}

    def need(spec, cfg=None, sinks=None):
        spec = spec._replace(device=torch.device("cuda", 0))
        cfg = cfg or cuda.config(spec, hw)
        found[cuda_sm90.variant(spec, cfg, sinks) if isinstance(cfg, cuda_sm90.Config) else cuda_small.variant(spec, hw, cfg)] = None

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
    for options, dtype, cfgs in final_calls():
        for cfg in cfgs:
            need(spec_of(options, dtype), cfg)
    for options, dtype in every:
        spec = spec_of(options, dtype)
        if spec.scale > 0 and cuda_sm90.lacks(spec, hw) is None:
            need(spec)
    return list(found)
