"""Tensor parallelism: what the layers' `tp_plan` is made of, where torch's parallel styles do not suffice.

Each rank holds some of the heads; x comes in and y goes out whole on every rank. Projections to heads share out the
rows of their weight (torch's ColwiseParallel), those from heads the columns (RowwiseParallel, which sums the results).
What is left:

    a weight or activation all heads share   the same on every rank; its gradient is the sum over ranks
    a norm over all heads                    its squares are summed over ranks, forward and backward
    slopes, sinks                            each rank takes those of its heads
    fewer heads of k and v than ranks        every rank computes all of them and takes the one its queries read
    a fused projection                       a rank has its rows of q, of k and of v; of Mamba-2 of z, x, B, C and dt

A parameter under a plan is a DTensor, also where every rank holds all of it: optimizers do not mix the two kinds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle


def local(x: Tensor) -> Tensor:
    """The part of x on this rank."""
    return x.to_local() if isinstance(x, DTensor) else x


def ranks_of(mesh: DeviceMesh | None) -> int:
    """How many ranks share a layer's heads."""
    return 1 if mesh is None else mesh.size()


def summed_gradient(x: Tensor, mesh: DeviceMesh | None) -> Tensor:
    """x, the same on every rank and used for other heads on each: its gradient is summed over ranks."""
    if mesh is None:
        return x
    return DTensor.from_local(x, mesh, [Replicate()], run_check=False).to_local(grad_placements=[Partial()])


def sum_over_ranks(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """The sum of the ranks' x; each rank goes on to use it for its own heads."""
    total = DTensor.from_local(x, mesh, [Partial()], run_check=False).redistribute(placements=[Replicate()])
    return total.to_local(grad_placements=[Partial()])


def check_shares(heads: int, what: str, ranks: int) -> None:
    if heads % ranks:
        raise ValueError(f"{what}={heads} cannot be shared out evenly to {ranks} ranks")


def replace_parameters(module: nn.Module, mesh: DeviceMesh, placement: Replicate | Shard, source: int | None) -> None:
    for name, x in list(module.named_parameters(recurse=False)):
        spread = distribute_tensor(x.detach(), mesh, [placement], src_data_rank=source)
        module.register_parameter(name, nn.Parameter(spread, requires_grad=x.requires_grad))


# -------------------------------------------------------------------------------------------------- norms


class RMSNorm(nn.RMSNorm):
    """torch's, in x's dtype also under autocast, and for one shared by the heads of several ranks.

    mesh  the ranks over which x is sharded by heads, if it is; set by `HeadwiseNorm`.
    """

    mesh: DeviceMesh | None = None

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.rms_norm(x, tuple(self.normalized_shape), self.weight_for(x), self.eps).to(x.dtype)

    def weight_for(self, x: Tensor) -> Tensor:
        """The weight as x's features on this rank take it, contiguous and differentiable."""
        return summed_gradient(local(self.weight), self.mesh).to(x.dtype).contiguous()


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

    def weight_for(self, x: Tensor) -> Tensor:
        """As `RMSNorm.weight_for`."""
        return local(self.weight).to(x.dtype).contiguous()

    def groups_in(self, x: Tensor) -> int | None:
        """How many groups x's features are; None: part of one."""
        size = self.features // self.groups
        return None if x.shape[-1] % size else x.shape[-1] // size

    def forward(self, x: Tensor) -> Tensor:
        weight, size = self.weight_for(x), self.features // self.groups
        if self.groups_in(x) is not None:
            parts = x.unflatten(-1, (-1, size))
            return nn.functional.rms_norm(parts, (size,), None, self.eps).flatten(-2) * weight
        assert self.mesh is not None, "only a shard holds part of a group"
        exact = x.to(torch.promote_types(x.dtype, torch.float32))
        group = self.mesh.get_local_rank() * x.shape[-1] // size
        squares = nn.functional.pad(exact.square().sum(-1, keepdim=True), (group, self.groups - 1 - group))
        mean = sum_over_ranks(squares, self.mesh)[..., group : group + 1] / size
        return (exact * torch.rsqrt(mean + self.eps)).to(x.dtype) * weight


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


# ----------------------------------------------------------------------------------- layers and projections


class Heads(ParallelStyle):
    """Of an attention layer: checks its heads, shares out its own parameters (the sinks) and tells it the mesh."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.check_ranks(device_mesh.size())  # type: ignore[operator]
        replace_parameters(module, device_mesh, Shard(0), self.src_data_rank)
        module.take_heads(device_mesh)  # type: ignore[operator]
        return module


class Replicated(ParallelStyle):
    """Of a module every rank computes in full: all tensors that it takes and returns are the same everywhere."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(module, device_mesh, self._everywhere, self._into, self._out_of)

    def _everywhere(self, name: str, module: nn.Module, mesh: DeviceMesh) -> None:
        replace_parameters(module, mesh, Replicate(), self.src_data_rank)

    def _into(self, module: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
        def everywhere(x: Any) -> Any:
            return DTensor.from_local(x, mesh, [Replicate()], run_check=False) if isinstance(x, Tensor) else x

        return tuple(map(everywhere, inputs))

    def _out_of(self, module: nn.Module, output: Any, mesh: DeviceMesh) -> Any:
        return tuple(map(local, output)) if isinstance(output, tuple) else output.to_local()


class KeyHeads(Replicated):
    """Of the projection to keys or values: shared out if there is a head for every rank."""

    def __init__(self, kv_heads: int) -> None:
        super().__init__()
        self.kv_heads = kv_heads

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if self.kv_heads % device_mesh.size():
            return super()._apply(module, device_mesh)
        style = ColwiseParallel()
        style.src_data_rank = self.src_data_rank
        return style._apply(module, device_mesh)

    def _out_of(self, module: nn.Module, output: Any, mesh: DeviceMesh) -> Any:
        every = summed_gradient(output.to_local(), mesh).unflatten(-1, (self.kv_heads, -1))
        return every[..., mesh.get_local_rank() * self.kv_heads // mesh.size(), :]


class FusedHeads(ColwiseParallel):
    """Of the projection to q, k and v at once: a rank's rows are its heads of q, then of k, then of v.

    The DTensor is sharded by rows. Its global view has the ranks' rows one after the other, which is not the order of
    one rank; `split_rows` and `join_rows` hide that from state_dict.
    """

    def __init__(self, heads: Sequence[int]) -> None:
        super().__init__()
        self.heads = list(heads)

    def _partition_linear_fn(self, name: str, module: nn.Module, device_mesh: DeviceMesh) -> None:
        share_rows(module, device_mesh, self.heads, self.src_data_rank)


class FusedRows(ParallelStyle):
    """Of a module whose parameters the layer reads itself: rows shared out as those of `FusedHeads`."""

    def __init__(self, rows: Sequence[int]) -> None:
        super().__init__()
        self.rows = list(rows)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        share_rows(module, device_mesh, self.rows, self.src_data_rank)
        return module


def share_rows(module: nn.Module, mesh: DeviceMesh, parts: Sequence[int], source: int | None) -> None:
    """Gives each rank its share of every part of the parameters' rows, one part after the other."""
    for kind, x in list(module.named_parameters(recurse=False)):
        shares = [t.chunk(mesh.size()) for t in split_rows(x.detach(), parts)]
        ordered = torch.cat([t for rank in zip(*shares, strict=True) for t in rank])
        spread = distribute_tensor(ordered, mesh, [Shard(0)], src_data_rank=source)
        module.register_parameter(kind, nn.Parameter(spread, requires_grad=x.requires_grad))


def split_rows(fused: Tensor, heads: Sequence[int], mesh: DeviceMesh | None = None) -> list[Tensor]:
    """q, k and v of a fused weight or bias, views; of a DTensor, three DTensors.

    mesh  the ranks that share out the rows by heads (`FusedHeads`), if any. Without them a DTensor has the rows in
          order, as under FSDP, and is gathered.
    """
    sizes = [fused.shape[0] * h // sum(heads) for h in heads]
    if not isinstance(fused, DTensor):
        return list(fused.split(sizes))
    if mesh is None:
        everywhere = fused.redistribute(placements=[Replicate()] * fused.device_mesh.ndim)
        return list(everywhere.split(sizes))
    _check_one_mesh_dim(fused)
    parts = split_rows(fused.to_local(), heads)
    return [DTensor.from_local(t, fused.device_mesh, [Shard(0)], run_check=False) for t in parts]


def join_rows(parts: Sequence[Tensor], like: Tensor, mesh: DeviceMesh | None = None) -> Tensor:
    """The fused weight or bias of q, k and v; a DTensor if `like` is one, whatever they are. `mesh` as above."""
    if not isinstance(like, DTensor) or mesh is None:
        whole = torch.cat([t.full_tensor() if isinstance(t, DTensor) else t for t in parts])
        if not isinstance(like, DTensor):
            return whole
        return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)
    _check_one_mesh_dim(like)
    spread = [
        t if isinstance(t, DTensor) else distribute_tensor(t, mesh, [Shard(0)], src_data_rank=None) for t in parts
    ]
    own = torch.cat([t.redistribute(mesh, [Shard(0)]).to_local() for t in spread])
    return DTensor.from_local(own, mesh, [Shard(0)], run_check=False)


def _check_one_mesh_dim(fused: DTensor) -> None:
    if fused.device_mesh.ndim > 1:
        raise NotImplementedError(
            "fused_qkv under tensor parallelism and FSDP at once cannot be saved or loaded: the rows of q, k and v lie "
            "in pieces on the ranks; use fused_qkv=False"
        )
