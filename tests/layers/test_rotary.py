"""RoPE: against the formula, against Hugging Face's tables, and what must not happen to the frequencies."""

from __future__ import annotations

import copy
import math
import weakref

import numpy as np
import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from fulmen.layers import Rotary, apply_rotary, rotary

YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}
SCALINGS = {
    "none": None,
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": YARN,
    "yarn, betas": {**YARN, "beta_fast": 16, "beta_slow": 2, "truncate": False},
    "yarn, attention_factor": {**YARN, "attention_factor": 1.5},
    "yarn, mscales": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.7},
}  # fmt: skip


def config(scaling, **more) -> LlamaConfig:
    rope = {"rope_theta": 5000.0, **(scaling or {"rope_type": "default"})}
    return LlamaConfig(
        hidden_size=128, num_attention_heads=4, head_dim=32, max_position_embeddings=512, rope_parameters=rope, **more
    )


@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS)
def test_tables_are_those_of_hugging_face(scaling):
    positions = torch.tensor([[0, 1, 2, 300, 511], [7, 6, 5, 4, 3]])
    cos, sin = LlamaRotaryEmbedding(config(scaling))(torch.empty(0), positions)
    ours = Rotary(32, base=5000.0, scaling=scaling)
    for got, theirs in zip(ours(positions), (cos, sin), strict=True):
        assert got.dtype == torch.float32
        torch.testing.assert_close(got, theirs[..., :16], atol=3e-5, rtol=0)  # an ulp of a frequency, 500 positions on
    from_config = Rotary.from_config(config(scaling))
    assert torch.equal(from_config(positions)[0], ours(positions)[0])


@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS)
def test_tables_of_fp64_layers_are_exact(scaling):
    """Against the formula in Python's floats, whose frequencies are found from the angle of position 1."""
    rope, positions = Rotary(32, base=5000.0, scaling=scaling), torch.tensor([0, 1, 2, 300, 511])
    low, high = rope(positions), rope(positions, torch.float64)
    for fp32, fp64 in zip(low, high, strict=True):
        assert fp64.dtype == torch.float64
        torch.testing.assert_close(fp32.double(), fp64, atol=3e-5, rtol=0)
    angles = torch.atan2(high[1][1], high[0][1])
    if scaling is None:
        want = torch.tensor([5000.0 ** (-2 * i / 32) for i in range(16)], dtype=torch.float64)
        torch.testing.assert_close(angles, want, atol=1e-15, rtol=1e-14)
    for n, position in enumerate(positions.tolist()):
        for table, function in zip(high, (math.cos, math.sin), strict=True):
            want = [rope.table_factor * function(position * angle) for angle in angles.tolist()]
            torch.testing.assert_close(table[n], torch.tensor(want, dtype=torch.float64), atol=1e-12, rtol=0)
    for got, want in zip(rope.span(0, 3, torch.device("cpu"), torch.float64), high, strict=True):
        assert torch.equal(got, want[:3])


def test_softmax_factor_is_deepseeks():
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import yarn_apply_mscale

    for scaling in (YARN, SCALINGS["yarn, mscales"]):
        assert Rotary(32, scaling=scaling).softmax_factor == pytest.approx(yarn_apply_mscale(scaling, 1.0))
    assert Rotary(32, scaling=YARN).softmax_factor == 1.0
    assert Rotary(32, scaling=SCALINGS["yarn, mscales"]).softmax_factor > 1.0


def test_yarn_takes_its_factor_from_max_positions():
    scaling = {key: value for key, value in YARN.items() if key != "factor"}
    ours = Rotary(32, scaling=scaling, max_positions=512)
    assert torch.equal(ours(torch.arange(9))[0], Rotary(32, scaling=YARN)(torch.arange(9))[0])


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("D", [16, 24])
@pytest.mark.parametrize("batched", [False, True])
def test_pairs_turn_by_their_angle(interleaved, D, batched):
    """As a product of complex numbers; elements past dim stay."""
    x = torch.randn(2, 3, 5, D, dtype=torch.float64)
    positions = torch.randint(100, (2, 5)) if batched else torch.randint(100, (5,))
    cos, sin = Rotary(16)(positions)
    a, b = (x[..., :16:2], x[..., 1:16:2]) if interleaved else (x[..., :8], x[..., 8:16])
    turn = torch.complex(cos.double(), sin.double())
    z = torch.complex(a, b) * (turn[:, None] if batched else turn)
    want = torch.stack([z.real, z.imag], -1).flatten(-2) if interleaved else torch.cat([z.real, z.imag], -1)
    got = apply_rotary(x, cos, sin, interleaved)
    torch.testing.assert_close(got, torch.cat([want, x[..., 16:]], -1), atol=1e-13, rtol=0)
    assert got.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("interleaved", [False, True])
def test_products_depend_on_distances_alone(interleaved):
    q, k = torch.randn(2, 1, 1, 6, 16, dtype=torch.float64)
    rope = Rotary(16, interleaved=interleaved)
    near, far = (rope(torch.arange(6) + shift) for shift in (0, 1000))
    a, b = (apply_rotary(q, *t, interleaved) @ apply_rotary(k, *t, interleaved).mT for t in (near, far))
    torch.testing.assert_close(a, b, atol=1e-3, rtol=0)  # fp32 angles of 1000 radians


def test_low_precision_is_rounded_once():
    x = torch.randn(1, 2, 50, 16).bfloat16()
    tables = Rotary(16)(torch.arange(50))
    assert torch.equal(apply_rotary(x, *tables), apply_rotary(x.float(), *tables).bfloat16())


def test_gradients():
    x = torch.randn(1, 2, 3, 6, dtype=torch.float64, requires_grad=True)
    cos, sin = (t.double() for t in Rotary(4)(torch.arange(3)))
    for interleaved in (False, True):
        assert torch.autograd.gradcheck(lambda x, i=interleaved: apply_rotary(x, cos, sin, i), x)


def test_a_span_is_a_slice_of_a_table_that_is_kept():
    rope, cpu = Rotary(8, base=500.0), torch.device("cpu")
    for start, N in ((0, 5), (3, 40), (2040, 20), (0, 5000)):
        for got, want in zip(rope.span(start, N, cpu), rope(torch.arange(start, start + N)), strict=True):
            assert torch.equal(got, want)
    a, b = rope.span(0, 7, cpu), rope.span(0, 7, cpu)
    assert a[0].data_ptr() == b[0].data_ptr()
    assert torch.equal(rope.span(np.int64(0), np.int32(7), cpu)[0], a[0])


def test_a_table_outlives_longer_ones():
    """A captured graph reads it at every replay."""
    rope, cpu = Rotary(8), torch.device("cpu")
    table = weakref.ref(rope.span(0, 7, cpu)[0]._base)
    rope.span(0, 5000, cpu)
    assert table() is not None


def test_a_table_of_a_capture_is_not_kept(monkeypatch):
    """It holds nothing before the first replay."""
    rope, cpu = Rotary(8), torch.device("cpu")
    with monkeypatch.context() as patch:
        patch.setattr(rotary, "is_capturing", lambda device: True)
        captured = rope.span(2, 5, cpu)[0]
    assert torch.equal(captured, rope.span(2, 5, cpu)[0])
    assert captured.untyped_storage().data_ptr() != rope.span(2, 5, cpu)[0].untyped_storage().data_ptr()


def test_tables_made_in_inference_mode_serve_training():
    rope, x = Rotary(8), torch.randn(1, 1, 4, 8, requires_grad=True)
    with torch.inference_mode():
        rope.span(0, 4, torch.device("cpu"))
        rope(torch.arange(4))
    apply_rotary(x, *rope.span(0, 4, torch.device("cpu"))).sum().backward()
    apply_rotary(x, *rope(torch.arange(4))).sum().backward()


def test_frequencies_survive_casts_copies_and_the_meta_device():
    exact = Rotary(16)(torch.arange(9))[0]
    with torch.device("meta"):
        born = Rotary(16)
    for rope in (
        Rotary(16).bfloat16(),
        Rotary(16).half(),
        copy.deepcopy(Rotary(16)),
        born,
        born.to_empty(device="cpu"),
    ):
        assert torch.equal(rope(torch.arange(9))[0], exact)
        assert torch.equal(rope.span(0, 9, torch.device("cpu"))[0], exact)
        assert not rope.state_dict()
        assert not list(rope.buffers())
    assert Rotary(16).to("meta")(torch.arange(9, device="meta"))[0].shape == (9, 8)


def test_repr():
    rope = Rotary(16, interleaved=True, scaling=SCALINGS["linear"], max_positions=99)
    for part in ("dim=16", "base=10000", "interleaved", "linear", "max_positions=99"):
        assert part in repr(rope)


def test_rows_that_share_their_positions(interpreted):
    """Tables of one row for several: a kernel would read beyond them."""
    x, rope = torch.randn(3, 2, 5, 8), Rotary(8)
    cos, sin = rope(torch.arange(5)[None])
    turned = apply_rotary(x, cos, sin)
    torch.testing.assert_close(turned, torch.cat([apply_rotary(row[None], cos, sin) for row in x]))
    assert interpreted.count("turn_kernel") == 4
    for wrong in (cos[:, :4], cos.expand(2, 5, 4), cos[None], torch.cat([cos, cos], 1)):
        with pytest.raises(ValueError, match=r"cos has shape .* must be \(N, dim / 2\) or \(B, N, dim / 2\)"):
            apply_rotary(x, wrong, wrong)
    with pytest.raises(ValueError, match="sin has shape"):
        apply_rotary(x, cos[0], sin)


def test_tables_that_no_kernel_reads(interpreted):
    """Of another device or dtype: PyTorch's operations say what is wrong with them, or take them."""
    x, rope = torch.randn(1, 2, 5, 8), Rotary(8)
    cos, sin = rope(torch.arange(5))
    want = apply_rotary(x, cos, sin)
    interpreted.clear()
    torch.testing.assert_close(apply_rotary(x, cos, sin.double()), want.double(), check_dtype=False)
    with pytest.raises(RuntimeError, match="device"):
        apply_rotary(x, cos.to("meta"), sin.to("meta"))
    with pytest.raises(RuntimeError, match="device"):
        apply_rotary(x, cos, sin.to("meta"))
    assert interpreted == []
