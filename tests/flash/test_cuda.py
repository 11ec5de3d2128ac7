"""The CUDA sources compiled, without a GPU, for each architecture we promise: they fit and do not spill."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import torch

from fulmen import cuda, dispatch, hardware
from fulmen.flash import cuda as flash
from fulmen.flash import cuda_sm90
from fulmen.flash.op import FlashSpec
from fulmen.hardware import TARGETS

CUDA = torch.device("cuda", 0)


def spec(B=1, H=1, N=128, D=64, causal=False, dtype=torch.bfloat16, **options) -> FlashSpec:
    options = {"right": 0 if causal else None, "N_Q": N, "N_KV": N, "H_KV": H, "E": D} | options
    return FlashSpec(B=B, H=H, D=D, dtype=dtype, device=CUDA, scale=D**-0.5, **options)


# One for each row of `config`, at both ends of the ring.
SIZES = [(1, 1, 128), (1, 1, 512), (1, 12, 128), (4, 8, 128), (2, 8, 512), (32, 8, 128), (32, 8, 256), (32, 8, 512)]


@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("arch", TARGETS)
def test_small_fits_and_does_not_spill(arch, D):
    hw, seen = TARGETS[arch], set()
    for B, H, N in SIZES:
        for causal in (False, True):
            call = spec(B, H, N, D, causal)
            cfg = flash.config(call, hw)
            variant = flash.variant(call, hw, cfg)
            if variant in seen:
                continue
            seen.add(variant)
            _, usage = cuda.compile_variant(variant)
            assert usage.spilled == 0, (cfg, usage)
            assert not usage.warnings, (cfg, usage)
            assert usage.shared == 0
            assert cfg.shared(D) <= hw.smem_bytes, cfg
            assert usage.registers * cfg.threads * cfg.blocks_per_sm <= 65_536, (cfg, usage)
    assert len({v.macros for v in seen}) >= 6


@pytest.mark.parametrize("arch", ["90a", "100", "120"])
def test_small_in_fp16(arch):
    hw = TARGETS[int(arch.rstrip("a"))]
    for D in (64, 128):
        call = spec(32, 8, 256, D, dtype=torch.float16)
        _, usage = cuda.compile_variant(flash.variant(call, hw, flash.config(call, hw))._replace(arch=arch))
        assert usage.spilled == 0


@pytest.mark.parametrize(
    ("call", "why"),
    [
        (spec(N=513), "up to 512"),
        (spec(D=96), "D = E of 64 or 128"),
        (spec(D=64, E=128), "D = E of 64 or 128"),
        (spec(dtype=torch.float32), "bf16 and fp16"),
        (spec(softcap=3.0), "no softcap"),
        (spec(has_sinks=True), "no sinks"),
        (spec(left=5), "no window"),
        (spec(right=5), "no window"),
        (spec(sequences=2), "no packed sequences"),
        (spec(B=70_000), "at most 65535"),
        (spec()._replace(scale=-1.0), "positive scale"),
        (spec()._replace(device=torch.device("cpu")), "needs a CUDA GPU"),
    ],
)
def test_refuses_in_words(call, why, monkeypatch):
    monkeypatch.setattr(hardware, "of", lambda device: TARGETS[90])
    assert why in flash.supports(call)


def test_an_old_gpu(monkeypatch):
    monkeypatch.setattr(hardware, "of", lambda device: TARGETS[80]._replace(arch=75))
    assert "8.0 or later, this GPU has 7.5" in flash.supports(spec())


@pytest.mark.skipif(torch.cuda.is_available(), reason="pretends that there is a GPU")
def test_serves_and_is_not_chosen_by_itself(monkeypatch):
    monkeypatch.setattr(hardware, "of", lambda device: TARGETS[90])
    monkeypatch.setattr("fulmen.flash.sdpa.cudnn_version", lambda: 91900)
    for call in (spec(), spec(causal=True, N_KV=500), spec(causal=True, N_KV=50, top_left=True), spec(N_KV=0)):
        assert flash.supports(call) is None
        assert flash.supports(call._replace(needs_grad=True, with_lse=True)) is None
        assert dispatch.pick.__wrapped__("flash", call, "cuda").name == "cuda"
        assert dispatch.pick.__wrapped__("flash", call).name != "cuda"
    assert "16 queries x 128 keys" in flash.detail(spec())


# ------------------------------------------------------------------------------------------------- Hopper

HOPPER = {
    128: [cuda_sm90.Config(2, 128, 2, False), cuda_sm90.Config(2, 128, 2, True), cuda_sm90.Config(2, 176, 2, False)],
    64: [cuda_sm90.Config(3, 128, 2, True), cuda_sm90.Config(3, 128, 3, False), cuda_sm90.Config(2, 128, 3, True)],
}


def machine_code(code: bytes, folder: Path) -> list[str]:
    """The instructions, one a line, without addresses."""
    triton = pytest.importorskip("triton")
    (folder / "kernel.cubin").write_bytes(code)
    nvdisasm = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
    text = subprocess.run([nvdisasm, "-c", folder / "kernel.cubin"], capture_output=True, text=True, check=True).stdout
    lines = (re.sub(r"^\s*(/\*[0-9a-f]+\*/)?\s*", "", line) for line in text.splitlines())
    return [line for line in lines if line and not line.startswith(("/*", "//"))]


HOPPER_RUNS = [(D, cfg, True) for D in HOPPER for cfg in HOPPER[D]] + [(D, HOPPER[D][0], False) for D in HOPPER]


@pytest.mark.parametrize(("D", "cfg", "causal"), HOPPER_RUNS)
def test_hopper_overlaps_and_keeps_p(D, cfg, causal, tmp_path):
    """No spills, no serialised products; exponentials run while o += p v does, and p is made anew only after it."""
    code, usage = cuda.compile_variant(cuda_sm90.variant(spec(1, 16, 4096, D, causal), cfg))
    assert usage.spilled == 0
    assert not usage.warnings, usage.warnings
    assert usage.registers == 65_536 // cfg.threads // 8 * 8
    assert cfg.shared(D) <= TARGETS[90].smem_bytes
    lines = machine_code(code, tmp_path)
    assert not any(line.startswith(("STL", "LDL")) for line in lines)
    starts = [i for i, line in enumerate(lines) if re.match(r"WARPGROUP.DEPBAR.LE gsb0, 0x1", line)]
    assert len(starts) == 2  # the masked and the plain loop
    for start in starts:
        end = next(i for i in range(start, len(lines)) if re.match(r"WARPGROUP.DEPBAR.LE gsb0, 0x0", lines[i]))
        inside = " ".join(lines[start:end])
        assert inside.count("MUFU.EX2") == cfg.block_n // 2 + 2
        assert inside.count("F2FP") == 0
        reads = [re.match(r"HGMMA\S* R\d+, R(\d+), gdesc", line) for line in lines[start - 400 : start]]
        p = {int(m[1]) + i for m in reads if m for i in range(4)}
        assert len(p) == cfg.block_n // 4
        for line in lines[start:end]:
            target = re.match(r"(?:@!?U?P\d+ )?[A-Z]\S+ R(\d+)", line)
            assert target is None or int(target[1]) not in p, line
