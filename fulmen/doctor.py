"""What this machine is and what runs on it: `python -m fulmen doctor`."""

from __future__ import annotations

import importlib.metadata
import platform

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import fulmen
from fulmen import cuda, dispatch, hardware


def examine(console: Console | None = None) -> None:
    """Prints versions, the facts of each device, and each backend with the reason where it cannot serve."""
    console = console or Console()
    devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    devices = devices or [torch.device("cpu")]
    console.print(_versions())
    console.print(_devices(devices))
    for device in devices:
        console.print(_backends(device))


def _triton_version() -> str:
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _versions() -> Table:
    table = Table(title="versions", show_header=False)
    table.add_row("python", platform.python_version())
    table.add_row("torch", torch.__version__)
    table.add_row("cuda (torch's)", torch.version.cuda or "none: a CPU build")
    table.add_row("triton", _triton_version())
    table.add_row("native kernels", escape(cuda.describe()))
    table.add_row("fulmen", fulmen.__version__)
    return table


def _devices(devices: list[torch.device]) -> Table:
    table = Table(title="devices")
    for column in ("device", "name", "arch", "SMs or threads", "shared memory", "L2"):
        table.add_column(column)
    for device in devices:
        facts = hardware.of(device)
        if facts.arch == 0:
            table.add_row(str(device), facts.name, "-", str(facts.sm_count), "-", "-")
        else:
            smem, l2 = f"{facts.smem_bytes:,} B", f"{facts.l2_bytes / 2**20:.0f} MiB"
            table.add_row(str(device), escape(facts.name), f"sm_{facts.arch}", str(facts.sm_count), smem, l2)
    return table


def _backends(device: torch.device) -> Table:
    """In the order `backend="auto"` tries them."""
    table = Table(title=f"backends on {device}, in the order of choice")
    for column in ("operation", "backend", "available", "why not"):
        table.add_column(column)
    for op in dispatch.OPS:
        for name, reason in dispatch.report(op, device):
            usable = "[green]yes[/]" if reason is None else "[yellow]no[/]"
            table.add_row(op, name, usable, escape(reason or ""))
    return table
