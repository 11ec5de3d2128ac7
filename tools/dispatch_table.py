"""Writes docs/dispatch.md, the tiles each architecture gets; with --check, fails if it is out of date."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from fulmen.hardware import TARGETS
from fulmen.lightning import triton as lightning
from fulmen.lightning.op import LightningSpec

PATH = Path(__file__).parent.parent / "docs" / "dispatch.md"
HEAD_DIMS = (16, 64, 128, 256)
INTRODUCTION = """\
# What each GPU runs

Made by `tools/dispatch_table.py` from the code; `make check` and the tests fail when they differ. `config` picks
tiles from the facts a device reports, so a GPU that is not listed gets the row whose facts it shares.

## Lightning attention, backends `triton` and `triton_split`

Both passes, with and without decay, D = E (else the larger one counts). An entry is the chunk length x the value
columns of a program, warps, pipeline stages.

| GPU | shared memory | D up to | bf16, fp16 | fp32 |
|---|---|---|---|---|
"""


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
    return INTRODUCTION + "".join(lines)


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
