"""Where and with what was measured: the device, versions, the commit, NVML's view, and what the device can do at most.

Nothing here changes anything: clocks, power limits and persistence stay as they are.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import subprocess
from pathlib import Path
from statistics import median
from typing import Any

import torch

import fulmen
from fulmen import hardware
from fulmen.bench.timing import Timer

PACKAGE = Path(fulmen.__file__).parent


class Nvml:
    """NVML through pynvml, for one GPU; every answer is None where it or the driver does not give one."""

    def __init__(self, device: torch.device) -> None:
        self.nvml: Any = None
        if device.type != "cuda":
            return
        try:
            import pynvml  # type: ignore[import-not-found, import-untyped, unused-ignore]

            pynvml.nvmlInit()
            index = device.index if device.index is not None else torch.cuda.current_device()
            self.handle = self._find(pynvml, index)
            self.nvml = pynvml
        except Exception:  # pynvml has its own hierarchy of errors, one more for each way a driver can be missing
            self.nvml = None

    @staticmethod
    def _find(pynvml: Any, index: int) -> Any:
        """By UUID: CUDA_VISIBLE_DEVICES renumbers torch's devices and not NVML's."""
        uuid = getattr(torch.cuda.get_device_properties(index), "uuid", None)
        if uuid is not None:
            try:
                return pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
            except pynvml.NVMLError:
                pass
        return pynvml.nvmlDeviceGetHandleByIndex(index)

    def ask(self, name: str, *args: Any) -> Any:
        if self.nvml is None:
            return None
        try:
            return getattr(self.nvml, name)(self.handle, *args)
        except Exception:  # not supported on this GPU, or in this container
            return None

    def clock_mhz(self) -> float | None:
        value = self.ask("nvmlDeviceGetClockInfo", self.nvml.NVML_CLOCK_SM) if self.nvml else None
        return None if value is None else float(value)

    def max_mhz(self, clock: str) -> float | None:
        value = self.ask("nvmlDeviceGetMaxClockInfo", getattr(self.nvml, clock)) if self.nvml else None
        return None if value is None else float(value)

    def power_w(self) -> float | None:
        value = self.ask("nvmlDeviceGetPowerUsage")
        return None if value is None else value / 1e3

    def power_limit_w(self) -> float | None:
        value = self.ask("nvmlDeviceGetEnforcedPowerLimit")
        return None if value is None else value / 1e3

    def temperature_c(self) -> float | None:
        return self.ask("nvmlDeviceGetTemperature", 0)

    def throttle(self) -> list[str]:
        """Why the clock is below what it could be, in NVML's names; [] where nothing holds it back or nobody says."""
        for name in ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons"):
            bits = self.ask(name)
            if bits is not None:
                break
        if not bits:
            return []
        reasons = {
            0x4: "SW power cap", 0x8: "HW slowdown", 0x10: "sync boost", 0x20: "SW thermal slowdown",
            0x40: "HW thermal slowdown", 0x80: "HW power brake", 0x100: "display clocks",
        }  # fmt: skip
        return [word for bit, word in reasons.items() if bits & bit]

    def other_processes(self) -> int | None:
        """How many others compute on this GPU; one of them is us, by whatever number a container knows us."""
        found = self.ask("nvmlDeviceGetComputeRunningProcesses")
        return None if found is None else max(0, len(found) - 1)

    def facts(self) -> dict[str, Any]:
        if self.nvml is None:
            return {}
        try:
            driver = self.nvml.nvmlSystemGetDriverVersion()
        except Exception:
            driver = "unknown"
        found = {
            "driver": driver.decode() if isinstance(driver, bytes) else str(driver),
            "clock_sm_max_mhz": self.max_mhz("NVML_CLOCK_SM"),
            "clock_memory_max_mhz": self.max_mhz("NVML_CLOCK_MEM"),
            "memory_bus_bits": self.ask("nvmlDeviceGetMemoryBusWidth"),
            "power_limit_w": self.power_limit_w(),
            "temperature_c": self.temperature_c(),
            "other_processes": self.other_processes(),
        }
        return {name: value for name, value in found.items() if value is not None} | {"throttle": self.throttle()}


def device_of(name: str | None) -> torch.device:
    """The device asked for, or the GPU if there is one; raises ValueError in words."""
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"--device {name}: must be cpu, cuda or cuda:1") from None
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"--device {name}: the benchmark runs on cpu and cuda")
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise ValueError(f"--device {name}: torch sees no CUDA GPU here (see `fulmen doctor`)")
        device = torch.device("cuda", device.index or 0)
        if device.index >= torch.cuda.device_count():
            raise ValueError(f"--device {name}: there are {torch.cuda.device_count()} GPUs, counted from 0")
        torch.cuda.set_device(device)
    return device


def facts(device: torch.device, nvml: Nvml, timer: Timer) -> dict[str, Any]:
    hw = hardware.of(device)
    try:
        import triton

        triton_version = triton.__version__
    except ImportError:
        triton_version = None
    found: dict[str, Any] = {
        "device": cpu_name() if device.type == "cpu" else hw.name, "kind": device.type, "arch": hw.arch,
        "cpu": cpu_name(), "threads": torch.get_num_threads(), "platform": platform.platform(),
        "python": platform.python_version(), "torch": torch.__version__, "triton": triton_version,
        "fulmen": fulmen.__version__, "l2_bytes": timer.l2_bytes,
    }  # fmt: skip
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {
            "sm_count": hw.sm_count, "smem_bytes": hw.smem_bytes, "memory_bytes": properties.total_memory,
            "cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version(),
            "event_overhead_ms": timer.overhead_ms(),
        }  # fmt: skip
    elif hasattr(os, "getloadavg"):
        found["load"] = os.getloadavg()[0]
    return found | nvml.facts()


def cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


# ---------------------------------------------------------------------------------------------- the commit


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], cwd=PACKAGE, capture_output=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.decode(errors="replace") if done.returncode == 0 else None


def commit() -> dict[str, Any]:
    """sha, dirty, diff: a hash of what is not committed; source: one of the package's files, also without git.

    In a tree that `git archive` made, git has written the commit into a file.
    """
    sha, diff = _git("rev-parse", "HEAD"), _git("diff", "HEAD", "--", str(PACKAGE))
    tracked = _git("ls-files", "--error-unmatch", str(PACKAGE / "__init__.py")) is not None
    if sha is None or diff is None or not tracked:  # no repository, or not ours
        return {"sha": archived(), "dirty": None, "diff": None, "source": source_hash()}
    return {
        "sha": sha.strip(), "dirty": bool(diff), "diff": hashlib.sha256(diff.encode()).hexdigest()[:16] if diff else "",
        "source": source_hash(),
    }  # fmt: skip


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
        if device.type == "cuda" or dtype == torch.float32:
            found[f"flops_measured_{name}"] = _product(device, timer, dtype)
    found["flops_measured"] = max(found.values())
    found["bytes_measured"] = _copy(device, timer)
    if device.type != "cuda":
        return found
    clock, memory, bits = (known.get(k) for k in ("clock_sm_max_mhz", "clock_memory_max_mhz", "memory_bus_bits"))
    if clock:
        found["clock_max_mhz"] = clock
    if memory and bits:
        found["bytes_hard"] = 2 * memory * 1e6 * bits / 8
    try:
        from fulmen.bench import floors
    except ImportError:
        return found
    sheet = floors.gpu(known["device"])
    if sheet is not None:
        rated = floors.of_gpu(sheet, "bf16")
        found |= {} if rated.flops_rated is None else {"flops_nominal": rated.flops_rated}
    hard = floors.of_device(known["arch"], known["sm_count"], clock, known["device"], "bf16") if clock else None
    return found if hard is None else found | {"flops_hard": float(hard)}


def _product(device: torch.device, timer: Timer, dtype: torch.dtype) -> float:
    n = 8192 if device.type == "cuda" and dtype != torch.float32 else 4096 if device.type == "cuda" else 1024
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    c = torch.empty_like(a)
    for _ in range(3):
        torch.mm(a, b, out=c)
    return 2 * n**3 / median(timer.sample(lambda: torch.mm(a, b, out=c), cold=False).ms for _ in range(12)) * 1e3


def _copy(device: torch.device, timer: Timer) -> float:
    size = 1 << (30 if device.type == "cuda" else 27)
    source = torch.randint(0, 255, (size,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    for _ in range(2):
        target.copy_(source)
    return 2 * size / median(timer.sample(lambda: target.copy_(source), cold=False).ms for _ in range(10)) * 1e3
