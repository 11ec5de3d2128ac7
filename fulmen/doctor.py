"""What this machine is and what runs on it: `python -m fulmen doctor`. Plain text; needs torch only."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Sequence

import torch

import fulmen
from fulmen import cuda, dispatch, hardware


def examine() -> None:
    """Prints versions, the facts of each device, and each backend with the reason where it cannot serve."""
    devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())] or [torch.device("cpu")]
    show("versions", versions())
    show("devices", [("device", "name", "arch", "SMs or threads", "shared memory", "L2"), *map(facts, devices)])
    for device in devices:
        rows = [
            (op, name, "yes" if reason is None else "no", reason or note(op, name))
            for op in dispatch.OPS
            for name, reason in dispatch.report(op, device)
        ]
        heading = f'backends on {device}, in the order backend="auto" tries them'
        show(heading, [("operation", "backend", "available", "why not"), *rows])


def note(op: str, name: str) -> str:
    return dispatch.ONLY_BY_NAME if dispatch.differentiable_as_it_is(op, name) else ""


def show(title: str, rows: Sequence[tuple[str, ...]]) -> None:
    """Prints rows in columns as wide as their widest entry."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    print(title)
    for row in rows:
        print("  " + "  ".join(word.ljust(width) for word, width in zip(row, widths, strict=True)).rstrip())
    print()


def versions() -> list[tuple[str, str]]:
    try:
        triton = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        triton = "not installed"
    return [
        ("python", platform.python_version()),
        ("torch", torch.__version__),
        ("cuda (torch's)", torch.version.cuda or "none: a CPU build"),
        ("triton", triton),
        ("native kernels", cuda.describe()),
        ("fulmen", fulmen.__version__),
    ]


def facts(device: torch.device) -> tuple[str, ...]:
    hw = hardware.of(device)
    if hw.arch == 0:
        return str(device), hw.name, "-", str(hw.sm_count), "-", "-"
    smem, l2 = f"{hw.smem_bytes:,} B", f"{hw.l2_bytes / 2**20:.0f} MiB"
    return str(device), hw.name, f"sm_{hw.arch}", str(hw.sm_count), smem, l2
