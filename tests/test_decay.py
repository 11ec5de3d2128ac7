"""Slopes against numbers written by hand: checkpoints depend on each of them."""

from __future__ import annotations

import pytest
import torch

from fulmen import decay

EIGHT = [1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64, 1 / 128, 1 / 256]


def same(slopes: torch.Tensor, numbers: list[float]) -> bool:
    return slopes.dtype == torch.float32 and torch.allclose(slopes, torch.tensor(numbers), rtol=3e-7, atol=0)


def test_alibi_powers_of_two():
    assert same(decay.alibi(8), EIGHT)
    assert same(decay.alibi(1), [1 / 256])
    assert same(decay.alibi(2), [1 / 16, 1 / 256])
    sixteen = decay.alibi(16)
    assert same(sixteen[:4], [0.70710678, 0.5, 0.35355339, 0.25])
    assert same(sixteen[-1:], [0.00390625])
    assert same(decay.alibi(64)[:3], [0.91700404, 0.84089642, 0.77110541])
    assert same(decay.alibi(64)[-2:], [0.0042597956, 0.00390625])


def test_alibi_between_powers_of_two():
    """The 8 of the power below, then the 1st, 3rd, 5th, 7th of 16."""
    assert same(decay.alibi(12), [*EIGHT, 0.70710678, 0.35355339, 0.17677670, 0.08838835])
    assert same(decay.alibi(3), [1 / 16, 1 / 256, 1 / 4])
    assert decay.alibi(80).shape == (80,)
    assert same(decay.alibi(80)[64:66], [0.95760328, 0.87812608])


def test_minimax():
    """80 layers, 64 heads: factor 1.00001 in the first, about 1e-5 in the last. No power-of-two rule."""
    assert same(decay.minimax(8, 0, 80), [1.00001 * s for s in EIGHT])
    assert same(decay.minimax(8, 40, 80)[:2], [0.24684048, 0.12342024])
    assert same(decay.minimax(8, 79, 80)[:1], [5.0632911e-06])
    assert same(decay.minimax(12, 0, 2)[:3], [0.62996683, 0.39685421, 0.25000250])
    assert same(decay.minimax(8, 0, 1), [1.00001 * s for s in EIGHT])


def test_ring():
    """Layers count from -1 in the factor, a quirk of the published weights: the first layer exceeds ALiBi."""
    assert same(decay.ring(8, 0, 32), [(1 + 1 / 31 + 1e-5) * s for s in EIGHT])
    assert same(decay.ring(8, 0, 32)[:1], [0.51613403])
    assert same(decay.ring(8, 1, 32), [1.00001 * s for s in EIGHT])
    assert same(decay.ring(8, 31, 32)[:1], [0.01613403])
    assert same(decay.ring(12, 17, 33)[8:9], [0.35356046])
    assert same(decay.ring(8, 0, 1), [2.00001 * s for s in EIGHT])


@pytest.mark.parametrize("heads", [1, 2, 7, 12, 40, 64, 96])
def test_slopes_are_non_negative_one_per_head(heads):
    for slopes in (decay.alibi(heads), decay.minimax(heads, 23, 24), decay.ring(heads, 23, 24)):
        assert slopes.shape == (heads,)
        assert slopes.device.type == "cpu"
        assert bool((slopes > 0).all())


@pytest.mark.parametrize("heads", [0, -3, 4.0, None])
def test_no_heads(heads):
    for build in (decay.alibi, lambda h: decay.minimax(h, 0, 2), lambda h: decay.ring(h, 0, 2)):
        with pytest.raises(ValueError, match=f"num_heads={heads}"):
            build(heads)


@pytest.mark.parametrize("layer", [-1, 24, 100])
@pytest.mark.parametrize("build", [decay.minimax, decay.ring])
def test_no_such_layer(build, layer):
    with pytest.raises(ValueError, match=f"layer={layer}.*num_layers=24"):
        build(8, layer, 24)
