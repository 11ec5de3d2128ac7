"""The CUDA source of latent attention compiled, without a GPU: it fits and does not spill; its refusals, in words."""

from __future__ import annotations

import pytest
import torch

from fulmen import cuda, dispatch, hardware
from fulmen.dispatch import Choice
from fulmen.flash.kernels import combine
from fulmen.hardware import TARGETS
from fulmen.latent import cuda as latent
from fulmen.latent import policy
from fulmen.latent.kernels import latent as kernel
from fulmen.latent.policy import LatentTile
from fulmen.latent.spec import LatentSpec, Residuals, spec_of
from tests import sass

CUDA = torch.device("cuda", 0)


def spec(B=64, H=128, N_Q=1, N_KV=8192, D=576, E=512, dtype=torch.bfloat16, **options) -> LatentSpec:
    options = {"max_kv_length": N_KV} | options
    return LatentSpec(B, H, N_Q, N_KV, D, E, dtype, CUDA, D**-0.5, **options)


@pytest.mark.parametrize(("page", "dtype"), [(None, torch.bfloat16), (16, torch.bfloat16), (64, torch.float16)])
def test_fits_and_does_not_spill(page, dtype):
    for causal, splits, keys in ((False, 1, 64), (True, 4, 64), (False, 4, 32), (True, 1, 32)):
        call = spec(N_Q=1 + causal, causal=causal, page=page, dtype=dtype)
        choice = Choice("cuda", "cuda", LatentTile(keys), splits, "cuda")
        code, usage = cuda.compile_variant(kernel.variant(call, choice))
        assert (usage.spilled, usage.warnings, usage.shared) == (0, (), 0)
        assert usage.registers * kernel.THREADS <= 65_536
        text = sass.disassemble(code)
        assert sass.overwritten(text) == []
        assert sass.read_early(text) == []
        values = keys // 16  # of products p v; the first tile, any other, the other consumer's last
        assert text.count("HGMMA.") == (36 + values) + (36 + 2 * values) + values
        assert text.index("ACQBULK") < text.index("UTMALDG")  # nothing is read before the launch ahead is over
    assert TARGETS[90].smem_bytes >= kernel.SHARED_BYTES


def test_appended_waits_before_it_reads_queries():
    """Lengths, the table and older keys are read before: the kernel still fits, and q is read after a wait."""
    for splits, keys in ((8, 32), (64, 64)):
        choice = Choice("cuda", "cuda", LatentTile(keys), splits, "cuda")
        code, usage = cuda.compile_variant(kernel.variant(spec(16, 32, page=64, appended=True), choice))
        assert (usage.spilled, usage.warnings, usage.shared) == (0, (), 0)
        assert usage.registers * kernel.THREADS <= 65_536
        text = sass.disassemble(code)
        assert sass.overwritten(text) == []
        assert text.count("ACQBULK") == 2  # of the producer, and of the consumers
        assert text.index("ACQBULK") < text.index("LDGSTS")


def test_combining_fits():
    for splits in (2, 64):
        _, usage = cuda.compile_variant(combine.variant(kernel.combined_spec(spec()), splits))
        assert (usage.spilled, usage.warnings) == (0, ())


def test_few_queries_walk_keys_in_small_tiles():
    for call, keys in ((spec(64, 16), 32), (spec(16, 32), 32), (spec(1, 32), 64), (spec(64, 128), 64)):
        assert policy.choose(call, TARGETS[90], "cuda").tile.block_n == keys


@pytest.mark.parametrize(
    ("call", "splits"),
    [
        (spec(64, 128), 1), (spec(64, 16), 2), (spec(16, 32), 8), (spec(1, 32), 64), (spec(1, 128, N_KV=100), 1),
        (spec(1, 128, N_KV=1 << 20), 66), (spec(1, 16, N_KV=1 << 20), 128), (spec(1, 32, max_kv_length=1000), 8),
        (spec(0), 1), (spec(N_KV=0), 1), (spec(H=0), 1), (spec(4, 16, N_Q=4), 32),
    ],
)  # fmt: skip
def test_keys_are_split_to_fill_the_gpu(call, splits):
    assert policy.choose(call, TARGETS[90], "cuda").splits == splits


REFUSED = {
    "needs D=576 and value_dim=512, here D=96, value_dim=64": spec(D=96, E=64),
    "takes pages that divide 64 or are a multiple of it, and a page has 24 keys": spec(page=24),
    "multiplies bf16 and fp16": spec(dtype=torch.float32),
    "needs a positive scale": spec()._replace(scale=-1.0),
    "needs a CUDA GPU": spec()._replace(device=torch.device("cpu")),
    "takes up to 65535 rows and heads": spec(B=70_000),
    "queries of a row, here B=2, H=70000, N_Q=1, N_KV=8192": spec(B=2, H=70_000),
}


@pytest.mark.parametrize("why", REFUSED)
def test_refuses_in_words(why, monkeypatch):
    monkeypatch.setattr(hardware, "of", lambda device: TARGETS[90])
    assert why in latent.supports(REFUSED[why])


def test_other_gpus(monkeypatch):
    monkeypatch.setattr(hardware, "of", lambda device: TARGETS[100])
    assert latent.supports(spec()) == "needs compute capability 9.0, this GPU has 10.0"
    assert policy.order(spec(), TARGETS[100])[0] == "triton"


@pytest.mark.skipif(torch.cuda.is_available(), reason="pretends that there is a GPU")
def test_hopper_takes_it(monkeypatch):
    monkeypatch.setattr(hardware, "of", lambda device: TARGETS[90])
    assert latent.supports(spec()) is None
    assert dispatch.pick.__wrapped__("latent", spec()).name == "cuda"
    assert dispatch.pick.__wrapped__("latent", spec(D=96, E=64)).name == "triton"


@pytest.mark.skipif(torch.cuda.is_available(), reason="pretends that there is a GPU")
def test_a_cache_it_cannot_read_is_not_copied(monkeypatch):
    monkeypatch.setattr(hardware, "of", lambda device: TARGETS[90])
    q, kv = torch.zeros(2, 16, 1, 576, dtype=torch.bfloat16), torch.zeros(2, 64, 580, dtype=torch.bfloat16)[..., :576]
    for bad in (kv, kv.contiguous()[:1].expand(2, -1, -1)):
        call = spec_of(Residuals(q, bad), 512, 1.0, False, None)._replace(device=CUDA)
        assert latent.supports(call) == "needs rows of kv that begin at multiples of 16 bytes and do not repeat"
        assert dispatch.pick.__wrapped__("latent", call).name == "triton"
