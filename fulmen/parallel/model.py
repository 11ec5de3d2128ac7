"""`apply_parallel`: heads and tokens of a model's attention layers shared out to the ranks of a mesh.

Tensor parallelism follows each module's own `tp_plan()` (torch's parallel styles); modules without one keep all their
parameters on every rank. Context parallelism gives each attention layer its group of ranks. Every layer is checked,
without communication, before anything of the model is changed.
"""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

from fulmen.layers.attention import GroupedQueryAttention
from fulmen.layers.latent import MultiHeadLatentAttention
from fulmen.layers.lightning import LightningAttention
from fulmen.layers.mamba import Mamba2
from fulmen.layers.tensor_parallel import Replicated
from fulmen.parallel.context import SOFTMAX, ContextParallel
from fulmen.parallel.shards import _check_kind

Attention = GroupedQueryAttention | MultiHeadLatentAttention | LightningAttention | Mamba2


def apply_parallel(
    model: nn.Module,
    mesh: DeviceMesh,
    tp: str | None = "tp",
    cp: str | None = "cp",
    *,
    softmax: str = "ring",
    shards: str = "contiguous",
) -> nn.Module:
    """The model itself, its heads shared out over the mesh's dimension `tp` and its tokens over `cp`.

    tp       a name among the mesh's dimensions, or None. Attention layers, and modules that have a `tp_plan()` of their
             own, are shared out; all other parameters become the same DTensor on every rank, as optimizers need it.
    cp       a name, or None. The model is then called with this rank's tokens (`shard`), as many as on every other
             rank; positions are counted through the whole sequence. Models with a `Mamba2` are refused. Gradients of
             parameters are those of this rank's tokens: average them with `fully_shard` over a mesh that has this
             dimension.
    softmax  how softmax layers see other ranks' tokens: "ring" or "ulysses".
    shards   "contiguous", or "zigzag" for models that have no lightning layer.

    Call it once, before `fully_shard`. Every rank must have the same weights, or rank 0 of each `tp` group the right
    ones.
    """
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh is a {type(mesh).__name__}, must be a DeviceMesh with named dimensions")
    if tp is not None and tp == cp:
        raise ValueError(f"tp and cp are both {tp!r}: heads and tokens need a dimension of the mesh each, or None")
    for name in (tp, cp):
        if name is not None and name not in (mesh.mesh_dim_names or ()):
            raise ValueError(f"the mesh has dims {mesh.mesh_dim_names}, and no {name!r}: name another, or None")
    if softmax not in SOFTMAX:
        raise ValueError(f"softmax={softmax!r}: must be one of {', '.join(map(repr, SOFTMAX))}")
    _check_kind(shards)
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, Attention)}
    if not layers:
        raise ValueError(f"{type(model).__name__} has no attention layer of fulmen.layers")
    _check_once(layers, tp, cp)
    heads = 1 if tp is None else mesh[tp].size()
    tokens = 1 if cp is None else mesh[cp].size()
    if tp is not None:
        _check_plans(model, heads)
    if cp is not None:
        for name, layer in layers.items():
            _check_layer(name, layer, heads, tokens, softmax, shards)
    if tp is not None:
        _share_heads(model, mesh[tp])
    if cp is not None:
        for layer in layers.values():
            layer.cp = ContextParallel(mesh[cp].get_group(), softmax, shards, cp)
    return model


def _check_once(layers: dict[str, Attention], tp: str | None, cp: str | None) -> None:
    """Heads that are shared out are not shared out again, and neither are tokens."""
    for name, layer in layers.items():
        meshes = [p.device_mesh for p in layer.parameters() if isinstance(p, DTensor)]
        if not (tp is not None and meshes) and not (cp is not None and layer.cp is not None):
            continue
        found = [f"weights over mesh dims {meshes[0].mesh_dim_names}"] if meshes else []
        found += [f"tokens over mesh dim {layer.cp.dim!r}"] if layer.cp is not None else []
        raise ValueError(
            f"the model is already parallel: {name or type(layer).__name__} has {' and '.join(found)}. A model is made "
            "parallel once, with tp and cp in one call and before fully_shard: build it again, and call this once"
        )


def _check_plans(model: nn.Module, ranks: int) -> None:
    for name, module in model.named_modules():
        if isinstance(module, Attention) or hasattr(module, "check_ranks"):
            try:
                module.check_ranks(ranks)
            except ValueError as error:
                raise ValueError(f"{name or type(module).__name__}: {error}") from None
        held = [p for p, x in module.named_parameters(recurse=False) if not isinstance(x, DTensor)]
        if held and any(True for _ in module.children()) and not hasattr(module, "tp_plan"):
            raise ValueError(
                f"{name} has parameters of its own ({', '.join(held)}) beside modules: give it a tp_plan()"
            )


def _check_layer(name: str, layer: Attention, heads: int, tokens: int, softmax: str, shards: str) -> None:
    """What a layer's call over so many ranks would say."""
    if isinstance(layer, Mamba2):
        raise ValueError(
            f"{name} is a Mamba2 layer, which does not cut its tokens over ranks: pass cp=None, and use tp or data "
            "parallelism"
        )
    if isinstance(layer, LightningAttention):
        if shards != "contiguous":
            raise ValueError(
                f"{name} is a lightning layer, which takes consecutive tokens: shards must be 'contiguous'"
            )
        return
    if layer.dropout:
        raise ValueError(f"{name} has dropout={layer.dropout}: no kernel over ranks drops weights")
    if softmax == "ulysses":
        own = layer.num_heads // heads
        kv = own if isinstance(layer, MultiHeadLatentAttention) else max(layer.num_kv_heads // heads, 1)
        if own % tokens or (kv % tokens and tokens % kv):
            raise ValueError(
                f"{name} has {own} heads of q and {kv} of k and v on a rank, which softmax='ulysses' cannot share out "
                f"to {tokens} ranks: use 'ring'"
            )
        if shards != "contiguous":
            raise ValueError("softmax='ulysses' takes consecutive tokens: shards must be 'contiguous'")


def _share_heads(model: nn.Module, mesh: DeviceMesh) -> None:
    for module in list(model.modules()):
        if hasattr(module, "tp_plan"):
            parallelize_module(module, mesh, module.tp_plan())  # type: ignore[operator]
    made: dict[nn.Parameter, nn.Parameter] = {}  # of weights that several modules share one is made
    for module in list(model.modules()):
        rest = {name: x for name, x in module.named_parameters(recurse=False) if not isinstance(x, DTensor)}
        if rest:
            Replicated()._apply(module, mesh)
        for name, old in rest.items():
            module.register_parameter(name, made.setdefault(old, getattr(module, name)))
