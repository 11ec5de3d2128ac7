from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from fulmen import hardware


def test_cpu_has_arch_0():
    facts = hardware.of(torch.device("cpu"))
    assert (facts.arch, facts.smem_bytes, facts.name) == (0, 0, "cpu")
    assert facts.sm_count == torch.get_num_threads()


def test_targets_are_the_architectures_we_promise():
    """Opt-in shared memory of a block, by NVIDIA's tables: 163, 99, 99, 227, 227 and 99 KiB."""
    limits = {arch: facts.smem_bytes for arch, facts in hardware.TARGETS.items()}
    assert limits == {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
    assert all(arch == facts.arch for arch, facts in hardware.TARGETS.items())


def test_facts_come_from_the_device_and_are_asked_once(monkeypatch):
    asked = []

    def properties(index):
        asked.append(index)
        return SimpleNamespace(
            major=12, minor=1, multi_processor_count=48, shared_memory_per_block_optin=101_376,
            L2_cache_size=24 << 20, name="GB10",
        )  # fmt: skip

    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    hardware._cuda.cache_clear()
    try:
        assert hardware.of(torch.device("cuda", 3)) == hardware.Hardware(
            121, 48, 101_376, 24 << 20, "GB10", torch.backends.cudnn.version() or 0
        )
        assert hardware.of(torch.device("cuda", 3)).arch == 121
        assert asked == [3]
        hardware.of(torch.device("cuda"))
        assert asked == [3, 1]
    finally:
        hardware._cuda.cache_clear()


@pytest.mark.gpu
def test_this_gpu():
    facts = hardware.of(torch.device("cuda"))
    assert facts.arch >= 70
    assert facts.smem_bytes >= 48 << 10
    assert facts.sm_count > 0
    if facts.arch in hardware.TARGETS:
        assert facts.smem_bytes == hardware.TARGETS[facts.arch].smem_bytes
