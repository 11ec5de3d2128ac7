"""Without a GPU the Triton kernels run in Triton's interpreter, chosen here before anything imports triton.

Tests that need the real compiler start a process of their own: see `tests/aot.py`.
"""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)  # the workers are the parallelism


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def poisoned():
    """torch.empty and its kin hand out NaN (integers: their maximum), so that an output nobody wrote is seen.

    PyTorch's own switch: it also reaches allocations made in C++ and inside compiled graphs. It is armed by
    deterministic mode, whose complaints about other operations are not our business.
    """
    was = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = was
