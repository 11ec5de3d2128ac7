"""The base of all layers, and their weights: loaded whole or not at all, from Hugging Face's and torch's modules.

Layers' parameters have Hugging Face's names. A fused projection is one parameter, `qkv_proj.weight`, and three in a
state_dict, `q_proj.weight`, `k_proj.weight` and `v_proj.weight`: views of it when saved, concatenated when loaded.

`load_state_dict` of torch copies what fits and then complains about the rest. A layer here checks first: if anything is
missing, unexpected or of another shape, nothing is copied. As part of a model a layer is not told whether the load is
strict, so there it checks shapes alone.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.overrides import is_tensor_like

from fulmen.layers.tensor_parallel import join_rows, split_rows

if TYPE_CHECKING:
    from fulmen.layers.attention import GroupedQueryAttention
    from fulmen.layers.cache import RecurrentCache, TokenCache
    from fulmen.layers.pool import Pool
    from fulmen.layers.sequences import Sequences
    from fulmen.parallel.context import ContextParallel

PARTS = ("q_proj", "k_proj", "v_proj")
_numbers = itertools.count()


class AttentionLayer(nn.Module):
    """A layer that takes all weights it is given or, if any is wrong, none.

    number  tells layers apart, for their caches; a copy has the same.
    mesh    the ranks that share its heads, if they do.
    cp      the ranks that share x's tokens, if they do.
    """

    cache_type: ClassVar[type[TokenCache] | type[RecurrentCache]]
    pool_type: ClassVar[type[Pool] | None]
    embed_dim: int
    dropout: float = 0.0
    number: int | None = None
    mesh: DeviceMesh | None = None
    cp: ContextParallel | None = None

    def __init__(self) -> None:
        super().__init__()
        self.number = next(_numbers)
        self.register_load_state_dict_pre_hook(_check_first)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """As torch's, but if anything is wrong with the weights none is loaded."""
        if isinstance(state_dict, Mapping):  # torch tells what else it is
            refuse(self, state_dict, strict)
        return super().load_state_dict(state_dict, strict, assign)

    def new_pool(self, sequences: Sequences) -> Pool:
        """A pool of many sequences, for this layer."""
        raise NotImplementedError(
            f"{type(self).__name__} has no pool of many sequences: give each batch a {self.cache_type.__name__}()"
        )

    def check_ranks(self, ranks: int) -> None:
        """Raises if its heads cannot be shared out to so many ranks."""
        raise NotImplementedError

    def take_heads(self, mesh: DeviceMesh) -> None:
        """Called by its plan: from here on this rank computes its share of the heads."""
        self.mesh = mesh


# --------------------------------------------------------------------------------------- state_dict hooks


def save_separately(layer: GroupedQueryAttention) -> None:
    """Makes state_dict hold q, k and v of a fused projection as three tensors, and load_state_dict take them."""
    layer.register_state_dict_post_hook(_split)
    layer.register_load_state_dict_pre_hook(_join)


def _split(layer: Any, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    sizes = [layer.num_heads, layer.num_kv_heads, layer.num_kv_heads]
    for kind in ("weight", "bias"):
        fused = state_dict.pop(f"{prefix}qkv_proj.{kind}", None)
        if fused is not None:
            for part, x in zip(PARTS, split_rows(fused, sizes, layer.mesh), strict=True):
                state_dict[f"{prefix}{part}.{kind}"] = x


def _join(
    layer: Any, state_dict: dict[str, Any], prefix: str, metadata: Any, strict: bool, missing: list[str],
    unexpected: list[str], errors: list[str],
) -> None:  # fmt: skip
    """What is missing of q, k and v is reported by its name, and stays as it is."""
    sizes = [layer.num_heads, layer.num_kv_heads, layer.num_kv_heads]
    for kind, own in layer.qkv_proj.named_parameters(recurse=False):
        fused, names = f"{prefix}qkv_proj.{kind}", [f"{prefix}{part}.{kind}" for part in PARTS]
        if fused in state_dict:
            continue
        lacking = [name for name in names if name not in state_dict]
        missing += lacking
        given = {name: state_dict.pop(name) for name in names if name not in lacking}
        if lacking and given and own.is_meta:
            errors.append(f"{', '.join(lacking)}: a fused projection without memory needs q, k and v")
            given = {}
        if not given:
            state_dict[fused] = own
            continue
        parts = dict(zip(names, split_rows(own.detach(), sizes, layer.mesh), strict=True)) | given
        state_dict[fused] = join_rows(list(parts.values()), own, layer.mesh)


def _check_first(layer: Any, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
    given = {name.removeprefix(prefix): x for name, x in state_dict.items() if name.startswith(prefix)}
    refuse(layer, given, strict=False, where=prefix.removesuffix("."))


def refuse(layer: nn.Module, given: Mapping[str, Tensor], strict: bool, where: str = "") -> None:
    """For load_state_dict: one error, of torch's kind, if the layer should not take these weights."""
    wrong = differences(layer, given, strict)
    if wrong:
        name = type(layer).__name__ + (f" at {where!r}" if where else "")
        raise RuntimeError(f"{name} cannot take these weights, and took none: {'; '.join(wrong)}")


def differences(layer: nn.Module, given: Mapping[str, Tensor], strict: bool = True) -> list[str]:
    """In words, how `given` is not the layer's state_dict."""
    own = layer.state_dict()
    wrong = []
    if strict:
        missing, unexpected = [n for n in own if n not in given], [n for n in given if n not in own]
        wrong += [f"missing {', '.join(missing)}"] if missing else []
        wrong += [f"unexpected {', '.join(unexpected)}"] if unexpected else []
    for name in own:
        if name not in given:
            continue
        if not is_tensor_like(given[name]):
            wrong.append(f"{name} is a {type(given[name]).__name__}, must be a tensor")
        elif given[name].shape != own[name].shape:
            wrong.append(f"{name} has shape {tuple(given[name].shape)}, must be {tuple(own[name].shape)}")
    return wrong


Layer = TypeVar("Layer", bound=nn.Module)


def loaded(
    make: Callable[..., Layer],
    tensors: Mapping[str, Tensor],
    source: object,
    device: torch.device | str | None,
    dtype: torch.dtype | None,
    like: str = "o_proj.weight",
) -> Layer:
    """A layer with these weights, or one error and no layer; device and dtype are those of tensors[like] unless given.

    source  what they are of: if it is a module in evaluation the layer is, too.
    """
    first = tensors.get(like)
    device = (None if first is None else first.device) if device is None else device
    layer = make(device="meta", dtype=first.dtype if dtype is None and first is not None else dtype)
    wrong = differences(layer, tensors)
    if wrong:
        raise ValueError(f"these weights are not those of {type(layer).__name__}: {'; '.join(wrong)}")
    layer.to_empty(device=device or "cpu")
    layer.load_state_dict(tensors)
    return layer.train(getattr(source, "training", True))


def tensors_of(module_or_state_dict: nn.Module | Mapping[str, Tensor], prefix: str = "") -> dict[str, Tensor]:
    """The tensors under `prefix`, by the rest of their names."""
    state = module_or_state_dict
    state = state.state_dict() if isinstance(state, nn.Module) else state
    if not isinstance(state, Mapping):
        raise ValueError(f"weights are a {type(state).__name__}, must be a module or its state_dict")
    found = {name.removeprefix(prefix): x for name, x in state.items() if name.startswith(prefix)}
    if not found:
        raise ValueError(f"no weight's name starts with prefix={prefix!r}; got {', '.join(list(state)[:4])}, ...")
    for name, x in found.items():
        if not is_tensor_like(x):
            raise ValueError(f"the weight {prefix + name} is a {type(x).__name__}, must be a tensor")
    return found


def layer_of(module_or_state_dict: nn.Module | Mapping[str, Tensor], prefix: str) -> int | None:
    """The number of the layer, from 0, as the module or the prefix says; None if neither does."""
    named = re.findall(r"(?:^|\.)layers\.(\d+)(?=\.)", prefix)
    own = getattr(module_or_state_dict, "layer_idx", None)
    return int(named[-1]) if named else own if type(own) is int else None


# ------------------------------------------------------------------------------ torch.nn.MultiheadAttention


def from_multihead_attention(
    module_or_state_dict: nn.Module | Mapping[str, Tensor], num_heads: int | None
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The arguments of `GroupedQueryAttention` and our names' tensors of torch's layer."""
    dropout = 0.0
    if isinstance(module_or_state_dict, nn.Module):
        if not isinstance(module_or_state_dict, nn.MultiheadAttention):
            got = type(module_or_state_dict).__name__
            raise ValueError(f"from_torch is given a {got}, must be a torch.nn.MultiheadAttention or its state_dict")
        if module_or_state_dict.add_zero_attn:
            raise ValueError("add_zero_attn=True of torch.nn.MultiheadAttention is not supported")
        if num_heads not in (None, module_or_state_dict.num_heads):
            raise ValueError(f"num_heads={num_heads}: the module has {module_or_state_dict.num_heads}")
        num_heads, dropout = module_or_state_dict.num_heads, module_or_state_dict.dropout
    if num_heads is None:
        raise ValueError("num_heads is missing: a state_dict of torch.nn.MultiheadAttention does not tell it")
    given = tensors_of(module_or_state_dict)
    if "bias_k" in given or "bias_v" in given:
        raise ValueError("add_bias_kv=True of torch.nn.MultiheadAttention is not supported")
    ours: dict[str, Tensor] = {}
    for name, x in given.items():
        kind = name.rsplit("_", 1)[-1]
        if name in ("in_proj_weight", "in_proj_bias"):
            if x.shape[0] % 3:
                raise ValueError(f"{name} has shape {tuple(x.shape)}, must have 3 * embed_dim rows")
            ours |= {f"{part}.{kind}": t for part, t in zip(PARTS, x.chunk(3), strict=True)}
        elif name in ("q_proj_weight", "k_proj_weight", "v_proj_weight"):
            ours[f"{name[0]}_proj.weight"] = x
        else:
            ours[name.replace("out_proj.", "o_proj.")] = x
    lacking = [f"{part}.weight" for part in (*PARTS, "o_proj") if f"{part}.weight" not in ours]
    if lacking:
        raise ValueError(f"these weights are not those of torch.nn.MultiheadAttention: missing {', '.join(lacking)}")
    context = ours["k_proj.weight"].shape[1]
    if ours["v_proj.weight"].shape[1] != context:
        raise ValueError(f"kdim={context} and vdim={ours['v_proj.weight'].shape[1]}: k and v are of one context here")
    embed_dim = ours["o_proj.weight"].shape[0]
    arguments = {
        "embed_dim": embed_dim, "num_heads": num_heads, "num_kv_heads": num_heads, "context_dim": context,
        "bias": "q_proj.bias" in ours, "dropout": dropout,
    }  # fmt: skip
    return arguments, ours
