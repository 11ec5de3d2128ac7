"""Layers of latent and lightning attention and of Mamba-2 under their tensor-parallel plan; `test_plans.py` runs these.

Each case is a layer computed by this process alone and, from the same weights, by all ranks: outputs, gradients of the
input and of every parameter, and tokens generated with a cache must be the same.
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

from fulmen.layers import latent
from fulmen.layers.fused import rotary as kernels
from fulmen.layers.latent import MultiHeadLatentAttention
from fulmen.layers.lightning import LightningAttention
from fulmen.layers.mamba import Mamba2, _shared
from fulmen.layers.tensor_parallel import split_rows

LATENT = {"kv_rank": 16, "nope_dim": 8, "rope_dim": 4, "value_dim": 12}
INTERPRETED = "latent, with the kernels"
CASES = {
    "latent": lambda: MultiHeadLatentAttention(24, 4, **LATENT, q_rank=20, bias=True, sinks=True),
    "latent, q direct": lambda: MultiHeadLatentAttention(24, 4, **LATENT),
    INTERPRETED: lambda: MultiHeadLatentAttention(24, 4, **LATENT, q_rank=20),
    "minimax": lambda: LightningAttention(24, 4, head_dim=8, layer=1, num_layers=3, bias=True),
    "minimax, shared keys": lambda: LightningAttention(24, 8, num_kv_heads=4, head_dim=8, layer=1, num_layers=3),
    "ring": lambda: LightningAttention(24, 4, head_dim=8, preset="ring", layer=1, num_layers=3),
    "ring, 2 groups": lambda: LightningAttention(24, 4, head_dim=8, preset="ring", output_norm=2),
    "mamba2": lambda: Mamba2(24, 8, head_dim=6, state_size=8, num_groups=4, bias=True),
    "mamba2, norm in groups": lambda: Mamba2(24, 8, head_dim=6, state_size=8, num_groups=4, norm_groups=4),
}


def randomized(layer: nn.Module, seed: int) -> nn.Module:
    """Norm weights and sinks that are not all alike."""
    generator = torch.Generator().manual_seed(seed)
    for p in layer.parameters():
        if p.ndim == 1:
            p.data = torch.rand(p.shape, generator=generator) + 0.5
    return layer


def generated(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    cache = layer.cache_type()
    with torch.no_grad():
        return torch.cat([layer(x[:, :5], cache=cache), *(layer(t, cache=cache) for t in x[:, 5:].split(1, 1))], 1)


def gradients(layer: nn.Module) -> dict[str, torch.Tensor]:
    """Whole, and with the rows in their order."""
    found = {n: p.grad.full_tensor() if isinstance(p, DTensor) else p.grad for n, p in layer.named_parameters()}
    for n, rows in _shared(layer) if isinstance(layer, Mamba2) else ():
        found[n] = torch.cat([t.full_tensor() for t in split_rows(layer.get_parameter(n).grad, rows, layer.mesh)])
    return found


def compare(name: str, mesh) -> None:
    torch.manual_seed(0)
    alone = randomized(CASES[name](), 1)
    shared = copy.deepcopy(alone)
    parallelize_module(shared, mesh, shared.tp_plan())
    x = torch.randn(2, 9, 24)
    assert name != INTERPRETED or shared._up_weight(x) is not None, "a plan's own hooks are no reason to go another way"
    dy = torch.randn(2, 9, 24)
    results = []
    for layer in (alone, shared):
        at = x.clone().requires_grad_()
        y = layer(at)
        y.backward(dy)
        results.append({"y": y.detach(), "x": at.grad, "generated": generated(layer, x), **gradients(layer)})
    assert all(isinstance(p, DTensor) for p in shared.parameters()), f"{name}: optimizers do not mix kinds of tensors"
    for key, want in results[0].items():
        torch.testing.assert_close(results[1][key], want, msg=lambda m, key=key: f"{name}, {key}: {m}")
    if isinstance(shared, Mamba2):
        saved = {n: t.detach().clone() for n, t in shared.state_dict().items()}
        for n, t in alone.state_dict().items():
            got = saved[n].full_tensor() if isinstance(saved[n], DTensor) else saved[n]
            torch.testing.assert_close(got, t, msg=lambda m, n=n: f"{name}, {n} as saved: {m}")
        for p in shared.parameters():
            torch.nn.init.zeros_(p)
        shared.load_state_dict(saved)
        torch.testing.assert_close(shared(x), alone(x))
    torch.nn.utils.clip_grad_norm_(shared.parameters(), 1.0)
    torch.optim.AdamW(shared.parameters(), foreach=True).step()


def refusals(mesh) -> None:
    layer = MultiHeadLatentAttention(24, 3, **LATENT)
    with pytest.raises(ValueError, match=r"num_heads=3 cannot be shared out evenly"):
        parallelize_module(layer, mesh, layer.tp_plan())
    layer = LightningAttention(24, 4, head_dim=6, output_norm=3)
    before = layer.decay.clone()
    with pytest.raises(ValueError, match=r"output_norm=3 groups cannot be shared out"):
        parallelize_module(layer, mesh, layer.tp_plan())
    one_group = Mamba2(24, 8, head_dim=6)
    with pytest.raises(ValueError, match=r"num_groups=1 cannot be shared out evenly"):
        parallelize_module(one_group, mesh, one_group.tp_plan())
    assert torch.equal(layer.decay, before), "a refused plan changes nothing"
    assert not any(isinstance(p, DTensor) for p in layer.parameters())


def every_layer() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for name in CASES:
        with pytest.MonkeyPatch.context() as monkeypatch:
            if name == INTERPRETED:  # as if on a GPU
                monkeypatch.setattr(latent, "rotary_kernels", lambda *tensors: kernels)
            compare(name, mesh)
    refusals(mesh)
