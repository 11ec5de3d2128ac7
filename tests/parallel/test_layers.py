"""Layers and the hybrid example over meshes of processes; what runs on the ranks is `check_layers.py`."""

from __future__ import annotations

import pytest

CHECKS = "check_layers"
LAYERS = ["grouped", "window", "self", "latent", "minimax", "ring"]


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_on_4_ranks(on_ranks, name):
    for tp, cp in ((2, 2), (1, 4), (4, 1)):
        on_ranks(4, CHECKS, "layer", name=name, tp=tp, cp=cp)
    on_ranks(4, CHECKS, "layer", name=name, tp=1, cp=4, packed=True)


def test_a_layer_on_8_ranks(on_ranks):
    for name in ("grouped", "minimax"):
        on_ranks(8, CHECKS, "layer", name=name, tp=2, cp=4)


@pytest.mark.parametrize("name", ["grouped", "self", "latent"])
def test_other_ways_of_softmax(on_ranks, name):
    on_ranks(4, CHECKS, "layer", name=name, tp=2, cp=2, softmax="ulysses")
    on_ranks(4, CHECKS, "layer", name=name, tp=2, cp=2, shards="zigzag")
    on_ranks(4, CHECKS, "layer", name=name, tp=1, cp=4, softmax="ulysses", packed=True)


def test_refusals(on_ranks):
    on_ranks(4, CHECKS, "refusals")


def test_a_model_is_made_parallel_once(on_ranks):
    on_ranks(4, CHECKS, "twice")


@pytest.mark.parametrize(("pattern", "tp", "cp"), [("LGM", 2, 2), ("LG", 1, 2)])
def test_training_follows_one_process(on_ranks, pattern, tp, cp):
    on_ranks(4, CHECKS, "training", pattern=pattern, tp=tp, cp=cp, checkpointing=tp == 1)


def test_a_shared_weight_stays_shared(on_ranks):
    on_ranks(4, CHECKS, "tied")


def test_compiled_layers(on_ranks):
    on_ranks(2, CHECKS, "compiled")


def test_checkpoints_go_from_mesh_to_mesh(on_ranks, tmp_path):
    on_ranks(4, CHECKS, "checkpoint", folder=str(tmp_path))


def test_a_fused_projection_is_saved_in_order(on_ranks, tmp_path):
    on_ranks(2, CHECKS, "fused_checkpoint", folder=str(tmp_path))
