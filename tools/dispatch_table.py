"""Writes docs/internals/dispatch.md, what each GPU runs, from `policy.py`; with --check, fails if it is out of date."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from fulmen.flash import policy as flash
from fulmen.flash.kernels import backward
from fulmen.flash.spec import PACKABLE_GROUPS, FlashSpec
from fulmen.hardware import TARGETS
from fulmen.latent import policy as latent
from fulmen.latent.spec import LatentSpec
from fulmen.lightning import policy as lightning
from fulmen.lightning.cuda import backward_sweeps, backward_tile
from fulmen.lightning.kernels import sweep
from fulmen.lightning.spec import LightningSpec

PATH = Path(__file__).parent.parent / "docs" / "internals" / "dispatch.md"
HEAD_DIMS = (16, 64, 128, 256)
GRADIENT = ", with the decay's gradient"
INTRODUCTION = """\
# What each GPU runs

Made by `tools/dispatch_table.py` from `policy.py` of each operation; `make check` and the tests fail when they differ.
A policy picks tiles from the facts a device reports, so a GPU that is not listed gets the row whose facts it shares.
Measurements stand beside the rows in the code. `fulmen.explain(...)` prints the choice for one call.

## Lightning attention, backends `triton` and `triton_split`

Both passes, with and without decay, D = E (else the larger one counts). An entry is the chunk length x the value
columns of a program, warps, pipeline stages.

| GPU | shared memory | D up to | bf16, fp16 | a decay for each token | fp32 |
|---|---|---|---|---|---|
"""


LIGHTNING_CUDA = """
## Lightning attention, backend `cuda`

Compute capability 9.0, bf16, the sizes below, H_KV = H or fewer heads of q and k: there `auto` takes it. D 128 and E 64
are served with a decay for each token only. Chunks have {chunk} rows. Stages are the chunks in flight in shared memory.
Beside the warpgroups for outputs, one keeps the state and one loads. Saved states are {rows} rows apart, in bf16; with
a decay for each token all sizes write them, every {tokens} rows. Where sequences are split, a launch gathers the states
of segments first; at D = 128 and a constant decay these are kept for the backward, in fp32.

| D, E | decays of | launch | stages | warpgroups for outputs | threads | shared memory | saved states |
|---|---|---|---|---|---|---|---|
"""
FLASH = """
## Softmax attention, backend `triton`

bf16 and fp16, causal or not. An entry is the rows a program owns x the rows it takes at a time, warps, pipeline stages.

| GPU | shared memory | D, E up to | forward | dq | dk, dv |
|---|---|---|---|---|---|
"""
AUTO = """
## Softmax attention, `auto`

On compute capability 9.0 the first row that fits; "full" is from {head} queries a head and {full:,} in all on. If the
backend cannot serve the call, the next of sdpa, triton, eager follows. On other GPUs torch's kernels come first, as
nothing was measured there, and on CPUs, where they are fused; eager, plain PyTorch, serves the options they lack.

| call | first |
|---|---|
| decoding (below) | cuda or sdpa |
| less than {small:g} FLOP, no gradients, plain, D = E of 64 or 128, up to {few} keys ({square} if N_Q = N_KV) | cuda |
| less than {small:g} FLOP | triton |
| no gradients, plain, up to {keys64} keys (D = E = 64) or {keys128} (D = E = 128) | cuda |
| window, softcap, sinks or packed sequences | cuda if full, else triton |
| plain | the table below; cuda only if full, else sdpa |

Plain calls have no option but `causal`. Decoding is up to {queries} queries over a longer cache, without gradients. It
never takes cuDNN, which builds a plan for every new shape; sdpa is FlashAttention-2 there. Calls with options, or with
more queries than that, are served the same way where keys are split over blocks.

| options | keys | heads | first |
|---|---|---|---|
| window, softcap or sinks | any | up to {rows} queries of a GQA group together | cuda |
| plain | over {few} | a GQA group of {groups} | cuda |
| plain, several queries, causal from the last key | over {few} | any | cuda |
| plain | over {few} | other groups, or a head dim that cuda lacks | sdpa |

All other plain calls follow this table. At D = 128, without a mask or GQA and below {long} keys, "full" is from
{many:,} queries in all on.

| D, E up to | mask | keys from | first |
|---|---|---|---|
"""
BACKWARD = """
## Softmax attention, the backward of `cuda`

On compute capability 9.0. Stages are tiles of q and of do in flight. `explain` adds "fixed order" where dq is summed in
one (`policy_backward.fixed_order`). cuDNN's follows instead for causal calls at D = 192, and where causal heads share k
and v and have no more tiles of keys than there are SMs (twice as many at D = 256), if it serves the call: no option but
`causal`, no gradient of lse, not in deterministic mode. Triton's follows where packed sequences would need too large a
workspace.

| D, E | backward | tile | stages | shared memory |
|---|---|---|---|---|
"""

LATENT = """
## Latent attention

`auto` takes `cuda` on compute capability 9.0 where it serves the call, else `triton`. A block of `cuda` owns {rows}
queries, of any heads, and takes {keys} keys at a time, or half as many where {rows} queries are all and keys many. An
entry of `triton` is the same, with warps and stages.

| GPU | shared memory | up to 16 queries and heads | more | fp32 |
|---|---|---|---|---|
"""


def latent_lines() -> list[str]:
    lines = [LATENT.format(rows=latent.CUDA_ROWS, keys=latent.CUDA_KEYS)]
    for hw in TARGETS.values():
        spec = LatentSpec(16, 16, 1, 8192, 576, 512, torch.bfloat16, torch.device("cuda"), 1.0, max_kv_length=8192)
        specs = (spec, spec._replace(H=128), spec._replace(dtype=torch.float32))
        picked = [str(latent.choose(each, hw, "triton").tile) for each in specs]
        lines.append(f"| {hw.name} | {hw.smem_bytes:,} B | {' | '.join(picked)} |\n")
    return lines


def flash_lines() -> list[str]:
    lines = [FLASH]
    for hw in TARGETS.values():
        for D in (64, 128, 256):
            spec = FlashSpec(2, 16, 16, 8192, 8192, D, D, torch.bfloat16, torch.device("cuda"), 1.0)
            tiles = flash.choose(spec, hw, "triton").tile
            picked = [str(getattr(tiles, pass_)) for pass_ in flash.PASSES]
            lines.append(f"| {hw.name} | {hw.smem_bytes:,} B | {D} | {' | '.join(picked)} |\n")
    limits = {f"keys{D}": keys for D, keys in flash.SHORT_KEYS.items()}
    limits |= {"few": flash.SMALL_KEYS, "square": flash.SQUARE_KEYS, "rows": flash.FEW_ROWS}
    limits |= {
        "queries": flash.DECODE_QUERIES,
        "head": flash.FULL_QUERIES,
        "long": flash.LONG_KEYS,
        "many": flash.MANY_QUERIES,
    }
    groups = " or ".join(", ".join(map(str, (1, *PACKABLE_GROUPS))).rsplit(", ", 1))
    lines.append(AUTO.format(small=flash.SMALL_FLOPS, full=flash.FULL, groups=groups, **limits))
    for r in flash.ROWS:
        lines.append(f"| {r.D} | {'causal' if r.causal else 'full'} | {r.keys} | {r.first} |\n")
    lines.append(BACKWARD)
    for D, E in flash.SM90_HEAD_DIMS:
        spec = FlashSpec(2, 16, 16, 8192, 8192, D, E, torch.bfloat16, torch.device("cuda"), 1.0, needs_grad=True)
        choice = flash.choose(spec, TARGETS[90], "cuda")
        tile = choice.backward_tile._replace(fixed=False)
        size = backward.shared_bytes(spec, tile)
        lines.append(f"| {D}, {E} | {choice.backward} | {tile} | {tile.q_stages}, {tile.o_stages} | {size:,} B |\n")
    return lines


def lightning_cuda_lines() -> list[str]:
    rows = {"rows": lightning.SAVED_ROWS, "tokens": lightning.TOKEN_ROWS}
    lines = [LIGHTNING_CUDA.format(chunk=sweep.CHUNK, **rows)]
    for per_token, sizes in (False, lightning.SWEEP_TILES), (True, lightning.TOKEN_TILES):
        for D, E in sizes:
            spec = LightningSpec(4, 32, 32, 8192, D, E, torch.bfloat16, torch.device("cuda"), per_token=per_token)
            for words, names, tile in sweep_launches(spec):
                products = words.endswith(GRADIENT)
                cost = f"{sweep.threads(tile)} | {sweep.shared_bytes(spec, tile, names, products):,} B"
                saved = ("none", "written", "read")[tile.save]
                decay = "tokens" if per_token else "heads"
                lines.append(f"| {D}, {E} | {decay} | {words} | {tile.stages} | {tile.outs} | {cost} | {saved} |\n")
    return lines


def sweep_launches(spec: LightningSpec) -> Iterator[tuple[str, tuple[str, ...], lightning.SweepTile]]:
    """What each launch of backend `cuda` is for, its sweeps and its tile."""
    tiles = lightning.choose(spec, TARGETS[90], "cuda").tile
    yield "forward", ("o",), tiles.forward
    yield "forward with gradients", ("o",), tiles.training
    for products in (False, True)[: 1 + spec.per_token]:
        for names in backward_sweeps(spec, spec.D == 64, products and tiles.gradient[0].pair):
            words = ", ".join(names) + (GRADIENT if products else "")
            yield words, names, backward_tile(tiles, names, products)
    for names in backward_sweeps(spec, spec.D == 64) if tiles.silu else ():
        yield ", ".join(names) + ", times silu's slope", names, tiles.silu
    yield "states of segments", ("state",), tiles.state


def render() -> str:
    lines = []
    for hw in TARGETS.values():
        for D in HEAD_DIMS:
            picked = []
            for dtype, per_token in ((torch.bfloat16, False), (torch.bfloat16, True), (torch.float32, False)):
                spec = LightningSpec(4, 32, 32, 8192, D, D, dtype, torch.device("cuda"), per_token=per_token)
                picked.append(str(lightning.choose(spec, hw, "triton").tile))
            lines.append(f"| {hw.name} | {hw.smem_bytes:,} B | {D} | {' | '.join(picked)} |\n")
    return INTRODUCTION + "".join([*lines, *lightning_cuda_lines(), *flash_lines(), *latent_lines()])


def main(arguments: list[str]) -> int:
    if arguments not in ([], ["--check"]):
        print("usage: dispatch_table.py [--check]")
        return 2
    text = render()
    if not arguments:
        PATH.parent.mkdir(parents=True, exist_ok=True)
        PATH.write_text(text, encoding="utf-8")
    elif not PATH.exists() or PATH.read_text(encoding="utf-8") != text:
        print(f"{PATH} is out of date: run tools/dispatch_table.py and commit the difference")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
