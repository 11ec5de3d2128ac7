"""Where and with what was measured: the device, versions, the commit, NVML's facts, and the device's ceilings.

Nothing is changed: clocks, power limits and persistence stay as they are.
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
from fulmen.bench import floors
from fulmen.bench.timing import Timer

PACKAGE = Path(fulmen.__file__).parent
THROTTLE = {
    0x4: "SW power cap", 0x8: "HW slowdown", 0x10: "sync boost", 0x20: "SW thermal slowdown",
    0x40: "HW thermal slowdown", 0x80: "HW power brake", 0x100: "display clocks",
}  # fmt: skip


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
        """What NVML's function says; `args` that are text name its constants."""
        if self.nvml is None:
            return None
        try:
            constants = (getattr(self.nvml, arg) if isinstance(arg, str) else arg for arg in args)
            return getattr(self.nvml, name)(self.handle, *constants)
        except Exception:  # not supported on this GPU, or in this container
            return None

    def clock_mhz(self) -> float | None:
        value = self.ask("nvmlDeviceGetClockInfo", "NVML_CLOCK_SM")
        return None if value is None else float(value)

    def throttle(self) -> list[str]:
        """Why the clock is below what it could be; [] where nothing holds it back or nobody says."""
        names = ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons")
        bits = next((bits for bits in map(self.ask, names) if bits is not None), 0)
        return [word for bit, word in THROTTLE.items() if bits & bit]

    def state(self, throttled: list[str]) -> dict[str, Any]:
        """What a cell records: throttle reasons, those of before among them, power, temperature."""
        if self.nvml is None:
            return {}
        power, temperature = self.ask("nvmlDeviceGetPowerUsage"), self.ask("nvmlDeviceGetTemperature", 0)
        found = {"power_w": None if power is None else power / 1e3, "temperature_c": temperature}
        known = {name: value for name, value in found.items() if value is not None}
        return {"throttle": sorted({*throttled, *self.throttle()})} | known

    def facts(self) -> dict[str, Any]:
        if self.nvml is None:
            return {}
        try:
            driver = self.nvml.nvmlSystemGetDriverVersion()
        except Exception:
            driver = "unknown"
        limit, processes = (self.ask(f"nvmlDeviceGet{x}") for x in ("EnforcedPowerLimit", "ComputeRunningProcesses"))
        sm, memory = (self.ask("nvmlDeviceGetMaxClockInfo", f"NVML_CLOCK_{x}") for x in ("SM", "MEM"))
        found = {
            "driver": driver.decode() if isinstance(driver, bytes) else str(driver),
            "clock_sm_max_mhz": None if sm is None else float(sm),
            "clock_memory_max_mhz": None if memory is None else float(memory),
            "memory_bus_bits": self.ask("nvmlDeviceGetMemoryBusWidth"),
            "power_limit_w": None if limit is None else limit / 1e3,
            "temperature_c": self.ask("nvmlDeviceGetTemperature", 0),
            "other_processes": None if processes is None else max(0, len(processes) - 1),  # one of them is us
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
    commands = (("rev-parse", "HEAD"), ("diff", "HEAD", "--", str(PACKAGE)))
    tracked, _ = git("ls-files", "--error-unmatch", str(PACKAGE / "__init__.py"))  # else the repository is not ours
    (found, sha), (compared, diff) = (git(*command) for command in commands)
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
