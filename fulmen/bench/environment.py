"""Where and with what was measured: the device, versions, the commit, and the device's ceilings."""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

import fulmen
from fulmen import hardware
from fulmen.bench import Refused, floors
from fulmen.bench.timing import Timer

PACKAGE = Path(fulmen.__file__).parent


def device_of(name: str | None) -> torch.device:
    """The device asked for, or the GPU if there is one."""
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise Refused(f"--device {name}: must be cpu, cuda or cuda:1") from None
    if device.type not in ("cpu", "cuda"):
        raise Refused(f"--device {name}: the benchmark runs on cpu and cuda")
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise Refused(f"--device {name}: torch sees no CUDA GPU here (see `fulmen doctor`)")
        device = torch.device("cuda", device.index or 0)
        if device.index >= torch.cuda.device_count():
            raise Refused(f"--device {name}: there are {torch.cuda.device_count()} GPUs, counted from 0")
        torch.cuda.set_device(device)
    return device


def facts(timer: Timer) -> dict[str, Any]:
    device, hw = timer.device, hardware.of(timer.device)
    found: dict[str, Any] = {
        "device": cpu_name() if device.type == "cpu" else hw.name, "kind": device.type, "arch": hw.arch,
        "cpu": cpu_name(), "threads": torch.get_num_threads(), "platform": platform.platform(),
        "python": platform.python_version(), "torch": torch.__version__, "triton": None,
        "fulmen": fulmen.__version__, "l2_bytes": timer.l2_bytes,
    }  # fmt: skip
    with contextlib.suppress(ImportError):
        import triton

        found["triton"] = triton.__version__
    if device.type == "cuda":
        found |= {
            "sm_count": hw.sm_count, "smem_bytes": hw.smem_bytes, "cuda": torch.version.cuda,
            "memory_bytes": torch.cuda.get_device_properties(device).total_memory,
            "cudnn": torch.backends.cudnn.version(), "event_overhead_ms": timer.overhead_ms(),
        }  # fmt: skip
    elif hasattr(os, "getloadavg"):
        found["load"] = os.getloadavg()[0]
    return found | timer.nvml.facts()


def cpu_name() -> str:
    with contextlib.suppress(OSError):
        if found := re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE):
            return found[1].strip()
    return platform.processor() or platform.machine()


# ---------------------------------------------------------------------------------------------- the commit
def git(*arguments: str) -> tuple[bool, str]:
    """Whether git did it, and what it prints; or why not, in a line."""
    try:
        done = subprocess.run(["git", *arguments], cwd=PACKAGE, capture_output=True, text=True, errors="replace")
    except OSError as error:
        return False, f"git cannot be run ({error.strerror})"
    errors = done.stderr.strip().splitlines() or [""]
    return done.returncode == 0, done.stdout if done.returncode == 0 else errors[0 if "dubious" in errors[0] else -1]


def commit() -> dict[str, Any]:
    """sha, dirty, diff: a hash of what is not committed; source: one of the package's files, also without git.

    In a tree that `git archive` made, git has written the commit into a file.
    """
    tracked, _ = git("ls-files", "--error-unmatch", str(PACKAGE / "__init__.py"))  # else the repository is not ours
    (found, sha), (compared, diff) = git("rev-parse", "HEAD"), git("diff", "HEAD", "--", str(PACKAGE))
    if not (found and compared and tracked):
        return {"sha": archived(), "dirty": None, "diff": None, "source": source_hash()}
    shortened = hashlib.sha256(diff.encode()).hexdigest()[:16] if diff else ""
    return {"sha": sha.strip(), "dirty": bool(diff), "diff": shortened, "source": source_hash()}


def archived(tree: Path | None = None) -> str | None:
    """The commit that `git archive` wrote into a tree, this one unless another is given."""
    path = (tree or PACKAGE.parent) / ".git_archival.txt"
    found = re.fullmatch(r"[0-9a-f]{40}", path.read_text().strip()) if path.is_file() else None
    return found[0] if found else None


def source_hash() -> str:
    """Of what is measured, and not of what measures it."""
    total = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*")):
        if path.suffix in (".py", ".cu", ".cuh") and "bench" not in path.relative_to(PACKAGE).parts:
            total.update(str(path.relative_to(PACKAGE)).encode() + b"\0" + path.read_bytes())
    return total.hexdigest()[:16]


# ------------------------------------------------------------------------------------------------ ceilings
def ceilings(timer: Timer, known: dict[str, Any]) -> dict[str, float]:
    """What this device reaches, a matrix product and a copy on random data, and what it cannot exceed."""
    device, found = timer.device, dict[str, float]()
    for dtype, name in ((torch.bfloat16, "bf16"), (torch.float16, "fp16"), (torch.float32, "fp32")):
        if timer.cuda or dtype == torch.float32:
            n = 1024 if not timer.cuda else 4096 if dtype == torch.float32 else 8192
            a, b, c = (torch.randn(n, n, device=device).to(dtype) for _ in range(3))
            product = lambda a=a, b=b, c=c: torch.mm(a, b, out=c)  # noqa: E731
            found[f"flops_measured_{name}"] = reached(timer, 2 * n**3, product)
    found["flops_measured"] = max(found.values())
    size = 1 << (30 if timer.cuda else 27)
    source, target = (torch.randint(0, 255, (size,), dtype=torch.uint8, device=device) for _ in range(2))
    found["bytes_measured"] = reached(timer, 2 * size, lambda: target.copy_(source))
    if not timer.cuda:
        return found
    clock, memory, bits = (known.get(k) for k in ("clock_sm_max_mhz", "clock_memory_max_mhz", "memory_bus_bits"))
    if memory and bits:
        found["bytes_hard"] = 2 * memory * 1e6 * bits / 8
    sheet = floors.gpu(known["device"])
    if sheet is not None and (rated := floors.of_gpu(sheet, "bf16").flops_reached) is not None:
        found["flops_nominal"] = rated
    if clock:
        found["clock_max_mhz"] = clock
        hard = floors.of_device(known["arch"], known["sm_count"], clock, known["device"], "bf16")
        found |= {} if hard is None else {"flops_hard": float(hard)}
    return found


def reached(timer: Timer, amount: float, work: Callable[[], Any]) -> float:
    """FLOP or bytes a second."""
    for _ in range(3):
        work()
    return amount / median(timer.sample(work, cold=False).ms for _ in range(12)) * 1e3
