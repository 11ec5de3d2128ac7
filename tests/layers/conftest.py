"""Decoding steps take their kernels in Triton's interpreter, where a GPU would take them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fulmen import launch, plans
from fulmen.boundary import is_plain_eager
from fulmen.layers import fused, latent
from fulmen.layers.fused import projections


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Fused operations without gradients use their kernels on the CPU and in fp32, too; names of those that ran."""
    names: list[str] = []
    run, repeated = launch.run, launch.repeated

    def in_order(describe: Any, options: Any) -> Any:
        """A launch that is repeated takes the call's tensors, then the outputs."""

        def described(options: Any, *tensors: torch.Tensor | None) -> Any:
            outputs, one = describe(options, *tensors)
            given = (*tensors, *outputs)
            assert all(a is None or a is b for a, b in zip(given, one.tensors, strict=False))
            assert len(given) <= len(one.tensors)
            return outputs, one

        return repeated(described, options)

    def noted(one: launch.Launch) -> None:
        names.append(one.kernel.__name__)
        run(one)

    def serves(*tensors: torch.Tensor) -> bool:
        same = all(t.dtype == tensors[0].dtype and t.stride(-1) == 1 and t.numel() > 0 for t in tensors)
        return same and tensors[0].dtype in (torch.float32, torch.float16) and is_plain_eager(*tensors)

    monkeypatch.setattr(launch, "run", noted)
    monkeypatch.setattr(launch, "repeated", in_order)
    monkeypatch.setattr(fused, "serves", serves)
    for module in (fused, projections, latent):
        monkeypatch.setattr(module, "on_gpu", lambda x: True)
    monkeypatch.setattr(projections, "DTYPES", (torch.float32, torch.float16))
    plans.clear()
    return names


@pytest.fixture
def interpreted(ran: list[str]) -> list[str]:
    """The same for tests with tensors on the CPU."""
    if torch.cuda.is_available():
        pytest.skip("Triton's interpreter is for machines without a GPU")
    return ran
