"""Tensor parallelism of softmax attention: each rank has some of the heads.

    q_proj                  rows of the weight are shared out (torch's ColwiseParallel)
    k_proj, v_proj          the same, if there are heads of k and v for every rank; else every rank computes all of them
                            and takes the one its queries read, and gradients are summed over ranks
    qkv_proj                the same as three: a rank has its rows of q, k and v
    o_proj                  columns are shared out, and the results summed (RowwiseParallel)
    q_norm, k_norm, sinks   norms are everywhere, sinks shared out

x comes in and y goes out whole on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from fulmen.layers.ranks import HeadwiseNorm, replace_parameters, summed_gradient

if TYPE_CHECKING:
    from fulmen.layers.attention import GroupedQueryAttention


def plan(layer: GroupedQueryAttention) -> dict[str, ParallelStyle]:
    """See `GroupedQueryAttention.tp_plan`."""
    styles: dict[str, ParallelStyle] = {"": Layer(), "o_proj": RowwiseParallel()}
    if layer.fused_qkv:
        styles["qkv_proj"] = FusedHeads([layer.num_heads, layer.num_kv_heads, layer.num_kv_heads])
    else:
        keys = KeyHeads(layer.num_heads, layer.num_kv_heads)
        styles |= {"q_proj": ColwiseParallel(), "k_proj": keys, "v_proj": keys}
    if layer.qk_norm is not None:
        styles |= {"q_norm": HeadwiseNorm(by_heads=True), "k_norm": HeadwiseNorm(by_heads=True)}
    return styles


def check_ranks(layer: GroupedQueryAttention, ranks: int) -> None:
    heads, kv_heads = layer.num_heads, layer.num_kv_heads
    if heads % ranks:
        raise ValueError(f"num_heads={heads} cannot be shared out evenly to {ranks} ranks")
    if kv_heads % ranks and ranks % kv_heads:
        raise ValueError(f"num_kv_heads={kv_heads} and {ranks} ranks: one must divide the other")
    if layer.fused_qkv and kv_heads % ranks:
        raise ValueError(f"num_kv_heads={kv_heads} with fused_qkv cannot be shared out evenly to {ranks} ranks")


class Layer(ParallelStyle):
    """Of the layer itself: checks the heads, and shares out the sinks."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.check_ranks(device_mesh.size())  # type: ignore[operator]
        replace_parameters(module, device_mesh, Shard(0), self.src_data_rank)
        return module


class KeyHeads(ParallelStyle):
    """Of the projection to keys or values."""

    def __init__(self, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.heads, self.kv_heads = heads, kv_heads

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        ranks = device_mesh.size()
        if self.kv_heads % ranks == 0:
            style = ColwiseParallel()
            style.src_data_rank = self.src_data_rank
            return style._apply(module, device_mesh)
        mine = device_mesh.get_local_rank() * self.kv_heads // ranks

        def everywhere(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
            replace_parameters(module, mesh, Replicate(), self.src_data_rank)

        def into(module: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
            return DTensor.from_local(inputs[0], mesh, [Replicate()], run_check=False)

        def out_of(module: nn.Module, output: Any, mesh: DeviceMesh) -> Any:
            whole = summed_gradient(output.to_local(), mesh)
            return whole.unflatten(-1, (self.kv_heads, -1))[..., mine, :]

        return distribute_module(module, device_mesh, everywhere, into, out_of)


class FusedHeads(ColwiseParallel):
    """Of the projection to q, k and v at once: a rank's rows are its heads of q, then of k, then of v.

    The DTensor is sharded by rows, and its global view has the ranks' rows one after the other: not the order of one
    rank. state_dict does not show it: `split_rows` and `join_rows` work on each rank's own rows.
    """

    def __init__(self, heads: Sequence[int]) -> None:
        super().__init__()
        self.heads = list(heads)

    def _partition_linear_fn(self, name: str, module: nn.Module, device_mesh: DeviceMesh) -> None:
        module.heads_mesh = device_mesh  # type: ignore[assignment]
        for kind, x in list(module.named_parameters(recurse=False)):
            parts = [t.chunk(device_mesh.size()) for t in split_rows(x.detach(), self.heads)]
            ordered = torch.cat([t for rank in zip(*parts, strict=True) for t in rank])
            spread = distribute_tensor(ordered, device_mesh, [Shard(0)], src_data_rank=self.src_data_rank)
            module.register_parameter(kind, nn.Parameter(spread, requires_grad=x.requires_grad))


def split_rows(fused: Tensor, heads: Sequence[int], mesh: DeviceMesh | None = None) -> list[Tensor]:
    """q, k and v of a fused weight or bias, views; of a DTensor, three DTensors.

    mesh  the ranks each of which has its own heads' rows (`FusedHeads`), if there are any. Without them a DTensor has
          the rows in order, as under FSDP, and is gathered.
    """
    sizes = [fused.shape[0] * h // sum(heads) for h in heads]
    if not isinstance(fused, DTensor):
        return list(fused.split(sizes))
    if mesh is None:
        everywhere = fused.redistribute(placements=[Replicate()] * fused.device_mesh.ndim)
        return list(everywhere.split(sizes))
    _one_kind(fused)
    parts = split_rows(fused.to_local(), heads)
    return [DTensor.from_local(t, fused.device_mesh, [Shard(0)], run_check=False) for t in parts]


def join_rows(parts: Sequence[Tensor], like: Tensor, mesh: DeviceMesh | None = None) -> Tensor:
    """The fused weight or bias of q, k and v; a DTensor if `like` is one, whatever they are. `mesh` as above."""
    if not isinstance(like, DTensor) or mesh is None:
        whole = torch.cat([t.full_tensor() if isinstance(t, DTensor) else t for t in parts])
        if not isinstance(like, DTensor):
            return whole
        return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)
    _one_kind(like)
    spread = [
        t if isinstance(t, DTensor) else distribute_tensor(t, mesh, [Shard(0)], src_data_rank=None) for t in parts
    ]
    own = torch.cat([t.redistribute(mesh, [Shard(0)]).to_local() for t in spread])
    return DTensor.from_local(own, mesh, [Shard(0)], run_check=False)


def _one_kind(fused: DTensor) -> None:
    if fused.device_mesh.ndim > 1:
        raise NotImplementedError(
            "fused_qkv under tensor parallelism and FSDP at once cannot be saved or loaded: the rows of q, k and v lie "
            "in pieces on the ranks; use fused_qkv=False"
        )
