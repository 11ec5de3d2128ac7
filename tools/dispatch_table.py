"""Writes docs/dispatch.md, the tiles each architecture gets; with --check, fails if it is out of date."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from fulmen.flash import ranking
from fulmen.flash import triton as flash
from fulmen.flash.op import FlashSpec
from fulmen.hardware import TARGETS
from fulmen.lightning import cuda as lightning_cuda
from fulmen.lightning import triton as lightning
from fulmen.lightning.op import LightningSpec

PATH = Path(__file__).parent.parent / "docs" / "dispatch.md"
HEAD_DIMS = (16, 64, 128, 256)
INTRODUCTION = """\
# What each GPU runs

Made by `tools/dispatch_table.py` from the code; `make check` and the tests fail when they differ. `config` picks
tiles from the facts a device reports, so a GPU that is not listed gets the row whose facts it shares. Backends `cuda`
ask for a compute capability.

## Lightning attention, backends `triton` and `triton_split`

Both passes, with and without decay, D = E (else the larger one counts). An entry is the chunk length x the value
columns of a program, warps, pipeline stages.

| GPU | shared memory | D up to | bf16, fp16 | fp32 |
|---|---|---|---|---|
"""


LIGHTNING_CUDA = """
## Lightning attention, backend `cuda`

Compute capability 9.0, bf16, D = E of 64 or 128, H_KV = H: there `auto` takes it. Chunks of {chunk} rows, with and
without decay, packed or not. "Chunks ahead" are those the ring in shared memory holds; beside the warpgroups that
make outputs one keeps the state and one copies. Saved states are {rows} rows apart, in bf16; where the sequence is
split, states of segments are gathered first (at D = 128 those are kept for the backward, in fp32).

| D, E | pass | chunks ahead | warpgroups for outputs | threads | shared memory | saved states |
|---|---|---|---|---|---|---|
"""
FLASH = """
## Softmax attention, backend `triton`

bf16 and fp16, causal or not. An entry is the rows a program owns x the rows it takes at a time, warps, pipeline stages.

| GPU | shared memory | D, E up to | forward | dq | dk, dv |
|---|---|---|---|---|---|
"""
RANKING = """
## Softmax attention, `auto`

On a compute capability with rows below, the backend measured to be the fastest; then sdpa, triton, eager, whichever
serves the call. cuda is taken from 1024 queries a head and {full} in all on, also where options (window, softcap,
sinks, packed sequences) leave triton as the only other one. Calls of less than
{small:g} FLOP forward go to triton, as the host takes longer than the GPU, and without gradients, up to 256 queries and
keys with D = E = 64, to cuda. Elsewhere torch's kernels come first, as nothing was measured. The measurements stand
beside the rows in `fulmen/flash/ranking.py`.

| compute capability | D, E up to | keys from | mask | gradients | first |
|---|---|---|---|---|---|
"""


def flash_lines() -> list[str]:
    lines = [FLASH]
    for hw in TARGETS.values():
        for D in (64, 128, 256):
            spec = FlashSpec(2, 16, 16, 8192, 8192, D, D, torch.bfloat16, torch.device("cuda"), 1.0)
            picked = [
                f"{c.own} x {c.walk}, {c.num_warps} warps, {c.num_stages} stages"
                for c in (flash.config(spec, hw, pass_) for pass_ in flash.PASSES)
            ]
            lines.append(f"| {hw.name} | {hw.smem_bytes:,} B | {D} | {' | '.join(picked)} |\n")
    lines.append(RANKING.format(small=ranking.SMALL, full=ranking.FULL))
    for r in ranking.ROWS:
        mask, grad = "causal" if r.causal else "full", "yes" if r.grad else "no"
        lines.append(f"| {r.arch / 10} | {r.D} | {r.keys} | {mask} | {grad} | {r.first} |\n")
    return lines


def lightning_cuda_lines() -> list[str]:
    lines = [LIGHTNING_CUDA.format(chunk=lightning_cuda.CHUNK, rows=lightning_cuda.SAVED_ROWS)]
    passes = {
        "forward": "forward",
        "training": "forward with gradients",
        "backward": "backward",
        "state": "states of segments",
    }
    for D in (64, 128):
        spec = LightningSpec(4, 32, 32, 8192, D, D, torch.bfloat16, torch.device("cuda"))
        for what, words in passes.items():
            cfg = lightning_cuda.config(spec, what)
            saved = ("none", "written", "read")[cfg.save]
            lines.append(
                f"| {D} | {words} | {cfg.stages} | {cfg.outs} | {cfg.threads} | {cfg.shared(D):,} B | {saved} |\n"
            )
    return lines


def tiles(config: lightning.Config) -> str:
    return f"{config.chunk} x {config.block_v}, {config.num_warps} warps, {config.num_stages} stages"


def render() -> str:
    lines = []
    for hw in TARGETS.values():
        for D in HEAD_DIMS:
            picked = []
            for dtype in (torch.bfloat16, torch.float32):
                spec = LightningSpec(4, 32, 32, 8192, D, D, dtype, torch.device("cuda"))
                picked.append(tiles(lightning.config(spec, hw)))
            lines.append(f"| {hw.name} | {hw.smem_bytes:,} B | {D} | {' | '.join(picked)} |\n")
    return INTRODUCTION + "".join([*lines, *lightning_cuda_lines(), *flash_lines()])


def main(arguments: list[str]) -> int:
    if arguments not in ([], ["--check"]):
        print("usage: dispatch_table.py [--check]")
        return 2
    text = render()
    if not arguments:
        PATH.parent.mkdir(exist_ok=True)
        PATH.write_text(text, encoding="utf-8")
    elif not PATH.exists() or PATH.read_text(encoding="utf-8") != text:
        print(f"{PATH} is out of date: run tools/dispatch_table.py and commit the difference")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
