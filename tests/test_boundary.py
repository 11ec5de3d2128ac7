"""Where results get their memory."""

from __future__ import annotations

import pytest
import torch

from fulmen import boundary


def is_torchs(new) -> bool:
    return getattr(new, "func", None) is torch.empty_strided


def test_new_tensors_on_a_cpu_are_torchs():
    x = torch.zeros(2, 3).T
    assert is_torchs(boundary.allocator(x))
    assert (boundary.allocator(x)().shape, boundary.allocator(x)().stride()) == (x.shape, x.stride())


@pytest.mark.gpu
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3)])
def test_new_tensors_are_as_empty_like_makes_them(mode, order):
    x = torch.zeros(2, 3, 5, 8, device="cuda", dtype=torch.float16).permute(order)
    with mode():
        x = x.clone()
        new, usual = boundary.allocator(x)(), torch.empty_like(x)
    if hasattr(torch._C._dynamo.guards, "_empty_strided_cuda"):
        assert not is_torchs(boundary.allocator(x))
    for fact in (lambda t: t.shape, torch.Tensor.stride, torch.Tensor.is_inference):
        assert fact(new) == fact(usual)
    assert (new.dtype, new.device, new.requires_grad) == (usual.dtype, usual.device, usual.requires_grad)
    assert new.data_ptr() != usual.data_ptr()


@pytest.mark.gpu
def test_new_tensors_while_another_gpu_is_current(monkeypatch):
    x = torch.zeros(2, 3, device="cuda")
    with monkeypatch.context() as changed:
        changed.setattr(torch._C, "_cuda_getDevice", lambda: 1)
        new = boundary.allocator(x)
    monkeypatch.setattr(torch._C._dynamo.guards, "_empty_strided_cuda", None, raising=False)  # it has been kept
    assert new().device == x.device


@pytest.mark.gpu
def test_new_tensors_without_the_fast_way(monkeypatch):
    x = torch.zeros(2, 3, device="cuda")
    with monkeypatch.context() as changed:
        changed.delattr(torch._C._dynamo.guards, "_empty_strided_cuda", raising=False)
        assert is_torchs(boundary.allocator(x))
    monkeypatch.setattr(
        torch._C._dynamo.guards, "_empty_strided_cuda", lambda size, *rest: torch.zeros(1), raising=False
    )
    assert is_torchs(boundary.allocator(x))
