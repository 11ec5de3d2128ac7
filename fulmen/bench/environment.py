"""Where and with what was measured: the device, versions, the commit, NVML's facts, and the device's ceilings.

Nothing is changed: clocks, power limits and persistence stay as they are.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import re
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import torch

import fulmen
from fulmen import hardware
from fulmen.bench import Refused, floors
from fulmen.bench.timing import Timer

PACKAGE = Path(fulmen.__file__).parent
THROTTLE = {
    0x4: "SW power cap", 0x8: "HW slowdown", 0x10: "sync boost", 0x20: "SW thermal slowdown",
    0x40: "HW thermal slowdown", 0x80: "HW power brake", 0x100: "display clocks",
}  # fmt: skip

# By the name we record it under: NVML's function less nvmlDeviceGet, its argument, our unit.
TEMPERATURE = ("Temperature", 0, 1)
STATE = {"power_w": ("PowerUsage", None, 1e-3), "temperature_c": TEMPERATURE}
FACTS = {
    "clock_sm_max_mhz": ("MaxClockInfo", "NVML_CLOCK_SM", 1.0),
    "clock_memory_max_mhz": ("MaxClockInfo", "NVML_CLOCK_MEM", 1.0),
    "memory_bus_bits": ("MemoryBusWidth", None, 1),
    "power_limit_w": ("EnforcedPowerLimit", None, 1e-3),
    "temperature_c": TEMPERATURE,
}


class Nvml:
    """NVML through pynvml, for one GPU; every answer is None where it or the driver does not give one."""

    def __init__(self, device: torch.device) -> None:
        self.nvml: Any = None
        if device.type == "cuda":
            with contextlib.suppress(Exception):  # pynvml has an error of its own for each way a driver can be missing
                import pynvml  # type: ignore[import-not-found, import-untyped, unused-ignore]

                pynvml.nvmlInit()
                self.handle = self._find(pynvml, torch.cuda.current_device() if device.index is None else device.index)
                self.nvml = pynvml

    @staticmethod
    def _find(pynvml: Any, index: int) -> Any:
        """By UUID: CUDA_VISIBLE_DEVICES renumbers torch's devices and not NVML's."""
        uuid = getattr(torch.cuda.get_device_properties(index), "uuid", None)
        with contextlib.suppress(pynvml.NVMLError):
            if uuid is not None:
                return pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        return pynvml.nvmlDeviceGetHandleByIndex(index)

    def ask(self, name: str, argument: str | int | None = None, unit: float = 1) -> Any:
        """What nvmlDeviceGet`name` says; text names one of NVML's constants."""
        with contextlib.suppress(Exception):  # not supported on this GPU, or in this container
            constant = getattr(self.nvml, argument) if isinstance(argument, str) else argument
            answer = getattr(self.nvml, f"nvmlDeviceGet{name}")(self.handle, *([] if constant is None else [constant]))
            return answer * unit if isinstance(answer, int | float) else answer
        return None

    def known(self, questions: Mapping[str, tuple[str, str | int | None, float]]) -> dict[str, Any]:
        found = {name: self.ask(*question) for name, question in questions.items()}
        return {name: value for name, value in found.items() if value is not None}

    def clock_mhz(self) -> float | None:
        return self.ask("ClockInfo", "NVML_CLOCK_SM", 1.0)

    def throttle(self) -> list[str]:
        """Why the clock is below what it could be; [] where nothing holds it back or nobody says."""
        names = ("CurrentClocksEventReasons", "CurrentClocksThrottleReasons")
        bits = next((bits for bits in map(self.ask, names) if bits is not None), 0)
        return [word for bit, word in THROTTLE.items() if bits & bit]

    def state(self, throttled: list[str]) -> dict[str, Any]:
        """What a cell records: throttle reasons, those of before among them, power, temperature."""
        if self.nvml is None:
            return {}
        return {"throttle": sorted({*throttled, *self.throttle()})} | self.known(STATE)

    def facts(self) -> dict[str, Any]:
        if self.nvml is None:
            return {}
        driver: Any = "unknown"
        processes = self.ask("ComputeRunningProcesses")
        with contextlib.suppress(Exception):
            driver = self.nvml.nvmlSystemGetDriverVersion()
        others = {} if processes is None else {"other_processes": max(0, len(processes) - 1)}  # one of them is us
        text = driver.decode() if isinstance(driver, bytes) else str(driver)
        return {"driver": text, "throttle": self.throttle()} | self.known(FACTS) | others


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


def facts(device: torch.device, nvml: Nvml, timer: Timer) -> dict[str, Any]:
    hw = hardware.of(device)
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
    return found | nvml.facts()


def cpu_name() -> str:
    with contextlib.suppress(OSError):
        if found := re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE):
            return found[1].strip()
    return platform.processor() or platform.machine()


# ---------------------------------------------------------------------------------------------- the commit
def git(*arguments: str) -> tuple[bool, str]:
    """Whether git did it, and what it says."""
    try:
        done = subprocess.run(["git", *arguments], cwd=PACKAGE, capture_output=True, text=True, errors="replace")
    except OSError as error:
        return False, f"git cannot be run ({error.strerror})"
    return done.returncode == 0, done.stdout if done.returncode == 0 else done.stderr


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
def ceilings(device: torch.device, timer: Timer, known: dict[str, Any]) -> dict[str, float]:
    """What this device reaches, a matrix product and a copy on random data, and what it cannot exceed."""
    found: dict[str, float] = {}
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
