"""Tensor parallelism: under a layer's `tp_plan` several ranks compute what one process does."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("checks", ["check_plans_softmax", "check_plans_latent"])
def test_ranks_compute_what_one_process_does(on_ranks, checks, ranks):
    on_ranks(ranks, checks, "every_layer")
