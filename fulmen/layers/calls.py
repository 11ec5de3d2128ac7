"""What latent and lightning attention check, count and load alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from fulmen import dispatch
from fulmen.boundary import check_offset_values, check_offsets, unwatched
from fulmen.layers import weights
from fulmen.layers.cache import LatentCache, StateCache
from fulmen.layers.rotary import Rotary
from fulmen.layers.rows import Padding, check_mask, packed_positions

USUAL_N = 4096  # the call whose backend `extra_repr` tells

# -------------------------------------------------------------------------------------------- construction


def check_heads(embed_dim: int, num_heads: int, num_kv_heads: int | None = None) -> None:
    for name, value in (("embed_dim", embed_dim), ("num_heads", num_heads), ("num_kv_heads", num_kv_heads)):
        if value is not None and (not isinstance(value, int) or value < 1):
            raise ValueError(f"{name}={value!r}: must be an int of at least 1")
    if num_kv_heads is not None and num_heads % num_kv_heads:
        raise ValueError(f"num_kv_heads={num_kv_heads} must divide num_heads={num_heads}")


def check_size(name: str, value: int, limit: int | None = None) -> int:
    if not isinstance(value, int) or value < 1 or (limit is not None and value > limit):
        raise ValueError(f"{name}={value!r}: must be an int from 1" + ("" if limit is None else f" to {limit}"))
    return value


def check_backend(op: str, backend: str) -> str:
    if backend != "auto" and backend not in (known := sorted(dispatch.kernels(op))):
        raise ValueError(f"backend={backend!r}: {op} has {', '.join(known)}, or 'auto'")
    return backend


def backend_chosen(op: str, spec: Any, backend: str) -> str:
    """For `extra_repr`: the backend asked for, and the one that serves `spec`."""
    if spec.device.type == "meta":
        return repr(backend)
    try:
        name = dispatch.pick(op, spec, backend).name
    except NotImplementedError:
        return f"{backend!r} (cannot serve it)"
    detail = dispatch.details(op, spec).get(name)
    what = name if detail is None else f"{name}, {detail}"
    return f"{backend!r} ({what}, at N={USUAL_N})" if backend == "auto" else repr(backend)


def rotary(rope: Rotary | Mapping[str, Any] | None, dim: int, **usual: Any) -> Rotary | None:
    """`rope` as layers take it: a Rotary, None, or a dict of its arguments, `dim` and `usual` unless it has them."""
    if isinstance(rope, Mapping):
        rope = Rotary(**{"dim": dim, **usual, **rope})
    if rope is not None and not isinstance(rope, Rotary):
        raise ValueError(f"rope is a {type(rope).__name__}, must be None, a Rotary or a dict of its arguments")
    return rope


# ------------------------------------------------------------------------------------------------ the call


def check_call(
    embed_dim: int,
    x: Tensor,
    positions: Tensor | None,
    cache: LatentCache | StateCache | None,
    kind: type[LatentCache] | type[StateCache],
    mask: Tensor | None,
    cu_seqlens: Tensor | None,
) -> None:
    """One clear error for each wrong argument of a layer's call."""
    if not isinstance(x, Tensor) or x.ndim != 3 or x.shape[2] != embed_dim:
        got = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(f"x must be a tensor (B, N, embed_dim={embed_dim}); got {got}")
    B, N = x.shape[:2]
    if mask is not None:
        check_mask(mask, x)
    if cu_seqlens is not None:
        if mask is not None:
            raise ValueError("mask and cu_seqlens are given together: packed sequences have no padding")
        if cache is not None:
            raise ValueError("cache and cu_seqlens are given together: a cache goes on with the rows of a batch")
        check_offsets("cu_seqlens", cu_seqlens, x)
        if unwatched(cu_seqlens):
            check_offset_values("cu_seqlens", cu_seqlens, N)
    if cache is not None and not isinstance(cache, kind):
        raise ValueError(f"cache is a {type(cache).__name__}, must be a {kind.__name__}")
    if positions is not None:
        if not isinstance(positions, Tensor) or positions.dtype != torch.int64:
            kind_of = positions.dtype if isinstance(positions, Tensor) else type(positions).__name__
            raise ValueError(f"positions is {kind_of}, must be an int64 tensor")
        if positions.shape not in ((N,), (B, N)):
            raise ValueError(
                f"positions has shape {tuple(positions.shape)}, must be (N,) or (B, N) of x {tuple(x.shape)}"
            )


def rotations(
    rope: Rotary,
    x: Tensor,
    positions: Tensor | None,
    cache: LatentCache | StateCache | None,
    padding: Padding | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """cos and sin of x's tokens, which `padding` has brought to the front already.

    Unless told a token's position is the number of tokens before it, in its row or packed sequence, with the cache's.
    """
    B, N = x.shape[:2]
    if positions is not None:
        return rope(positions if padding is None else padding.front(positions.expand(B, N)))
    if cu_seqlens is not None:
        return rope(packed_positions(cu_seqlens, N))
    if cache is not None and cache.lengths is not None:
        return rope(cache.lengths[:, None] + torch.arange(N, device=x.device))
    return rope.span(0 if cache is None else cache.length, N, x.device)


def zero_padding(x: Tensor, mask: Tensor) -> Tensor:
    """x (B, N, ...) with zeros, whatever was there, where the mask is False."""
    keep = mask.view(*mask.shape, *[1] * (x.ndim - 2))
    return torch.where(keep, x, torch.zeros((), dtype=x.dtype, device=x.device))


# --------------------------------------------------------------------------------------------- weights

Layer = TypeVar("Layer", bound=nn.Module)


def loaded(
    make: Callable[..., Layer],
    tensors: Mapping[str, Tensor],
    device: torch.device | str | None,
    dtype: torch.dtype | None,
    like: str,
) -> Layer:
    """A layer with these weights, or one error and no layer; where and in the dtype of tensors[like], unless told."""
    first = tensors.get(like)
    device = (None if first is None else first.device) if device is None else device
    layer = make(device="meta", dtype=first.dtype if dtype is None and first is not None else dtype)
    weights.check(layer, tensors)
    layer.to_empty(device=device or "cpu")
    layer.reset_parameters()  # type: ignore[operator]  # what is no parameter, too
    layer.load_state_dict(tensors)
    return layer
