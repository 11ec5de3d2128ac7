"""The one place that asks a device what it is.

Kernels pick their tiles from these facts and never from a GPU's name. `TARGETS` holds the same facts for
the architectures we compile for ahead of time, where no device can be asked.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch


class Hardware(NamedTuple):
    arch: int  # compute capability, 90 for sm_90; 0 for a CPU
    sm_count: int
    smem_bytes: int  # shared memory one block may opt in to
    l2_bytes: int
    name: str
    cudnn: int = 0  # version of the cuDNN that torch loads, 91900 for 9.19.0; 0: none


# One representative of each architecture; shared memory is the architecture's own limit.
TARGETS: dict[int, Hardware] = {
    80: Hardware(80, 108, 166_912, 40 << 20, "sm_80 (A100)", 91_900),
    86: Hardware(86, 84, 101_376, 6 << 20, "sm_86 (A6000)", 91_900),
    89: Hardware(89, 128, 101_376, 72 << 20, "sm_89 (RTX 4090)", 91_900),
    90: Hardware(90, 132, 232_448, 50 << 20, "sm_90 (H100, H200)", 91_900),
    100: Hardware(100, 148, 232_448, 126 << 20, "sm_100 (B200)", 91_900),
    120: Hardware(120, 170, 101_376, 96 << 20, "sm_120 (RTX 5090)", 91_900),
}


@functools.lru_cache
def _cuda(index: int) -> Hardware:
    p = torch.cuda.get_device_properties(index)
    return Hardware(
        arch=p.major * 10 + p.minor,
        sm_count=p.multi_processor_count,
        smem_bytes=p.shared_memory_per_block_optin,  # type: ignore[attr-defined]  # missing in torch's stub
        l2_bytes=p.L2_cache_size,
        name=p.name,
        cudnn=torch.backends.cudnn.version() or 0,
    )


def of(device: torch.device) -> Hardware:
    """Facts of `device`; asked once per device. A device that is no CUDA GPU has arch 0."""
    if device.type != "cuda":
        return Hardware(0, torch.get_num_threads(), 0, 0, device.type)
    index = device.index if device.index is not None else torch.cuda.current_device()
    return _cuda(index)
