"""Tensor parallelism, where a layer's own arithmetic crosses ranks; what `tp_plan` of MLA and lightning is made of.

Each rank holds some of the heads. Projections to and from heads are torch's ColwiseParallel and RowwiseParallel. That
leaves three cases, and two sums over ranks:

    a weight or activation all heads share   the same on every rank; its gradient is the sum over ranks
    a norm over all heads                    its squares are summed over ranks, forward and backward
    slopes and other facts per head          each rank takes its part

A parameter under a plan is a DTensor, also where every rank holds all of it: optimizers do not mix the two kinds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle


def local(x: Tensor) -> Tensor:
    """What of x lies on this rank."""
    return x.to_local() if isinstance(x, DTensor) else x


def summed_gradient(x: Tensor, mesh: DeviceMesh | None) -> Tensor:
    """x, the same on every rank and used for other heads on each: its gradient is summed over ranks."""
    if mesh is None:
        return x
    return DTensor.from_local(x, mesh, [Replicate()], run_check=False).to_local(grad_placements=[Partial()])


def sum_over_ranks(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """The sum of the ranks' x; each rank goes on to use it for its own heads."""
    total = DTensor.from_local(x, mesh, [Partial()], run_check=False).redistribute(placements=[Replicate()])
    return total.to_local(grad_placements=[Partial()])


class RMSNorm(nn.RMSNorm):
    """torch's, in x's dtype also under autocast, and for one shared by the heads of several ranks.

    mesh  the ranks over which x is sharded by heads, if it is; set by `HeadwiseNorm`.
    """

    mesh: DeviceMesh | None = None

    def forward(self, x: Tensor) -> Tensor:
        weight = summed_gradient(local(self.weight), self.mesh).to(x.dtype)
        return nn.functional.rms_norm(x, tuple(self.normalized_shape), weight, self.eps).to(x.dtype)


class HeadsNorm(nn.Module):
    """RMSNorm of each of `groups` equal parts of the last dimension, which holds all heads' outputs.

    mesh  the ranks over which the last dimension is sharded, if it is; set by `ShardedHeadsNorm`.
    """

    mesh: DeviceMesh | None = None

    def __init__(
        self, features: int, groups: int, eps: float, *, device: Any = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.features, self.groups, self.eps = features, groups, eps
        self.weight = nn.Parameter(torch.empty(features, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def check_ranks(self, ranks: int) -> None:
        """A rank's features must be whole groups or part of one."""
        here, size = self.features // ranks, self.features // self.groups
        if here % size and size % here:
            raise ValueError(
                f"output_norm={self.groups} groups cannot be shared out to {ranks} ranks: a rank's {here} features "
                f"would hold parts of several groups of {size}"
            )

    def extra_repr(self) -> str:
        return f"{self.features}, groups={self.groups}, eps={self.eps}"

    def forward(self, x: Tensor) -> Tensor:
        weight, size = local(self.weight).to(x.dtype), self.features // self.groups
        if x.shape[-1] % size == 0:  # whole groups
            parts = x.unflatten(-1, (-1, size))
            return nn.functional.rms_norm(parts, (size,), None, self.eps).flatten(-2) * weight
        assert self.mesh is not None, "only a shard holds part of a group"
        exact = x.to(torch.promote_types(x.dtype, torch.float32))
        group = self.mesh.get_local_rank() * x.shape[-1] // size
        squares = nn.functional.pad(exact.square().sum(-1, keepdim=True), (group, self.groups - 1 - group))
        mean = sum_over_ranks(squares, self.mesh)[..., group : group + 1] / size
        return (exact * torch.rsqrt(mean + self.eps)).to(x.dtype) * weight


def check_shares(heads: int, what: str, ranks: int) -> None:
    if heads % ranks:
        raise ValueError(f"{what}={heads} cannot be shared out evenly to {ranks} ranks")


class Heads(ParallelStyle):
    """Of the layer itself: checks that its heads can be shared out, and calls `take` with the mesh."""

    def __init__(self, heads: int, what: str, take: Callable[[nn.Module, DeviceMesh], None]) -> None:
        super().__init__()
        self.heads, self.what, self.take = heads, what, take

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        check_shares(self.heads, self.what, device_mesh.size())
        self.take(module, device_mesh)
        return module


class Replicated(ParallelStyle):
    """Of a Linear every rank computes in full."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def into(module: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
            return DTensor.from_local(inputs[0], mesh, [Replicate()], run_check=False)

        def out_of(module: nn.Module, output: Any, mesh: DeviceMesh) -> Any:
            return output.to_local()

        return distribute_module(module, device_mesh, self._everywhere, into, out_of)

    def _everywhere(self, name: str, module: nn.Module, mesh: DeviceMesh) -> None:
        replace_parameters(module, mesh, Replicate(), self.src_data_rank)


class HeadwiseNorm(ParallelStyle):
    """Of an `RMSNorm` of single heads or of an activation they share: the weight is everywhere.

    by_heads  whether its input is sharded by heads, so that a rank sees part of its gradient only
    """

    def __init__(self, by_heads: bool) -> None:
        super().__init__()
        self.by_heads = by_heads

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, RMSNorm)
        replace_parameters(module, device_mesh, Replicate(), self.src_data_rank)
        module.mesh = device_mesh if self.by_heads else None
        return module


class ShardedHeadsNorm(ParallelStyle):
    """Of a `HeadsNorm`: each rank holds its heads' weights."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, HeadsNorm)
        module.check_ranks(device_mesh.size())
        replace_parameters(module, device_mesh, Shard(0), self.src_data_rank)
        module.mesh = device_mesh
        return module


def replace_parameters(module: nn.Module, mesh: DeviceMesh, placement: Replicate | Shard, source: int | None) -> None:
    for name, x in list(module.named_parameters(recurse=False)):
        spread = distribute_tensor(x.detach(), mesh, [placement], src_data_rank=source)
        module.register_parameter(name, nn.Parameter(spread, requires_grad=x.requires_grad))
