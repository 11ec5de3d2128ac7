"""Layers of softmax attention under their tensor-parallel plan; `test_plans.py` runs these.

Every rank compares with the layer computed whole: outputs, gradients of x and of every parameter, decoding with a
cache, padding, and what state_dict saves and loads.
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

from fulmen.layers import (
    GroupedQueryAttention,
    KVCache,
    MultiHeadAttention,
    MultiHeadSelfAttention,
    MultiQueryAttention,
)

EXACT = {"atol": 1e-10, "rtol": 0}
ROPE = {"causal": True, "rope": {}, "qk_norm": "before"}
CASES = {
    "self": lambda: MultiHeadSelfAttention(24, 4, bias=True, **ROPE),
    "self, sinks": lambda: MultiHeadSelfAttention(24, 4, causal=True, sinks=True),
    "separate": lambda: MultiHeadAttention(24, 4, causal=True, bias=True, sinks=True),
    "grouped by 4": lambda: GroupedQueryAttention(24, 8, 4, head_dim=6, **ROPE),
    "grouped by 2": lambda: GroupedQueryAttention(24, 8, 2, head_dim=6, bias=True, sinks=True, **ROPE),
    "grouped, fused": lambda: GroupedQueryAttention(24, 8, 4, head_dim=6, fused_qkv=True, **ROPE),
    "norm of all heads": lambda: GroupedQueryAttention(24, 8, 4, head_dim=6, causal=True, rope={}, qk_norm="all"),
    "multi-query": lambda: MultiQueryAttention(24, 4, bias=True, **ROPE),
}


def check(name: str, mesh) -> None:
    torch.manual_seed(0)
    whole = CASES[name]().double()
    for p in whole.parameters():
        torch.nn.init.normal_(p, std=0.4)
    x, weight = torch.randn(2, 3, 7, 24, dtype=torch.float64)
    mask = torch.rand(3, 7) < 0.7
    shared = parallelize_module(copy.deepcopy(whole), mesh, whole.tp_plan())
    assert all(isinstance(p, DTensor) for p in shared.parameters()), "optimizers do not mix DTensors and tensors"
    saved = {n: full(t) for n, t in shared.state_dict().items()}
    for n, t in whole.state_dict().items():
        torch.testing.assert_close(saved[n], t, **EXACT, msg=f"{n} as saved")
    for arguments in ({}, {"mask": mask}):
        results = []
        for layer in (whole, shared):
            z = x.clone().requires_grad_()
            y = layer(z, **arguments)
            (y * weight).sum().backward()
            grads = {n: full(p.grad) for n, p in layer.named_parameters()}
            if layer.fused_qkv:  # a rank's rows are its own heads: back to the order of the whole
                grads |= {f"qkv_proj.{k}": as_whole(layer, k) for k in ("weight", "bias") if f"qkv_proj.{k}" in grads}
            results.append({"y": y.detach(), "x": z.grad, **grads})
            layer.zero_grad()
        for key, want in results[0].items():
            torch.testing.assert_close(results[1][key], want, **EXACT, msg=lambda m, key=key: f"{key}: {m}")
    with torch.no_grad():
        cache = KVCache()
        y = torch.cat([shared(part, cache=cache) for part in x.split([4, 1, 2], 1)], 1)
        torch.testing.assert_close(y, whole(x), **EXACT)
    other = parallelize_module(copy.deepcopy(whole), mesh, whole.tp_plan())
    for p in other.parameters():
        torch.nn.init.zeros_(p)
    other.load_state_dict(shared.state_dict())
    torch.testing.assert_close(other(x), whole(x), **EXACT)
    shared(x).sum().backward()
    torch.nn.utils.clip_grad_norm_(shared.parameters(), 1.0)
    torch.optim.AdamW(shared.parameters()).step()


def as_whole(layer: MultiHeadSelfAttention, kind: str) -> torch.Tensor:
    from fulmen.layers.tensor_parallel import split_rows

    grad = getattr(layer.qkv_proj, kind).grad
    sizes = [layer.num_heads, layer.num_kv_heads, layer.num_kv_heads]
    return torch.cat(
        [full(t) for t in split_rows(grad, sizes, grad.device_mesh if isinstance(grad, DTensor) else None)]
    )


def full(x: torch.Tensor) -> torch.Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def refusals(mesh) -> None:
    """Heads that cannot be shared out raise before anything is changed."""
    wrong = {
        "num_heads=3 cannot be shared out": MultiHeadAttention(24, 3),
        f"num_kv_heads=3 and {mesh.size()} ranks": GroupedQueryAttention(24, 12, 3),
        "num_kv_heads=1 with qk_norm='all'": GroupedQueryAttention(24, 4, 1, qk_norm="all"),
        "num_kv_heads=1 with fused_qkv": GroupedQueryAttention(24, 4, 1, fused_qkv=True),
    }
    for message, layer in wrong.items():
        with pytest.raises(ValueError, match=message):
            parallelize_module(layer, mesh, layer.tp_plan())
        assert not any(isinstance(p, DTensor) for p in layer.parameters())


def every_layer() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for name in CASES:
        check(name, mesh)
    refusals(mesh)
