"""What layers of all kinds check, count, attend and load alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from fulmen import dispatch
from fulmen.boundary import check_offset_values, check_offsets, is_plain_eager, require_tensors
from fulmen.flash.op import flash_attention
from fulmen.layers import dropout as dropping
from fulmen.layers import weights
from fulmen.layers.cache import StateCache, TokenCache
from fulmen.layers.checks import whole
from fulmen.layers.ranks import local
from fulmen.layers.rotary import Rotary
from fulmen.layers.rows import Padding, Rows, check_mask, many_rows, one_row, packed_positions

if TYPE_CHECKING:
    from fulmen.parallel.context import ContextParallel

USUAL_N = 4096  # the call whose backend `extra_repr` tells

# -------------------------------------------------------------------------------------------- construction


def check_heads(embed_dim: int, num_heads: int, num_kv_heads: int) -> tuple[int, int, int]:
    embed_dim, num_heads = whole("embed_dim", embed_dim), whole("num_heads", num_heads)
    num_kv_heads = whole("num_kv_heads", num_kv_heads)
    if num_heads % num_kv_heads:
        raise ValueError(f"num_kv_heads={num_kv_heads} must divide num_heads={num_heads}")
    return embed_dim, num_heads, num_kv_heads


def check_backend(op: str, backend: str) -> str:
    known = dispatch.kernels(op)
    missing = dispatch._missing[op]
    if not isinstance(backend, str) or backend not in ("auto", *known, *missing):
        raise dispatch.unknown(op, backend)
    if backend in missing:
        raise NotImplementedError(f"backend={backend!r} {missing[backend]}")
    return backend


def backend_chosen(op: str, spec: Any, backend: str, N: int = USUAL_N) -> str:
    """For `extra_repr`: the backend asked for, and the one that serves `spec`, of N tokens."""
    if spec.device.type == "meta":
        return repr(backend)
    try:
        name = dispatch.pick(op, spec, backend).name
    except NotImplementedError:
        return f"{backend!r} (cannot serve it)"
    kernel = dispatch.choose(op, spec, name).kernel
    what = name if kernel == name else f"{name}, {kernel}"
    return f"{backend!r} ({what}, at N={N})" if backend == "auto" else repr(backend)


def rotary(rope: Rotary | Mapping[str, Any] | None, head_dim: int, **usual: Any) -> Rotary | None:
    """`rope` as layers take it: a Rotary, None, or a dict of its arguments, with `usual` for those it lacks."""
    if isinstance(rope, Mapping):
        rope = Rotary(**{"dim": head_dim, **usual, **rope})
    if rope is not None and not isinstance(rope, Rotary):
        raise ValueError(f"rope is a {type(rope).__name__}, must be None, a Rotary or a dict of its arguments")
    if rope is not None and rope.dim > head_dim:
        raise ValueError(f"rope turns dim={rope.dim} elements, and a head has head_dim={head_dim}")
    return rope


# ------------------------------------------------------------------------------------------------ the call


def check_call(
    embed_dim: int,
    x: Tensor,
    positions: Tensor | None,
    cache: TokenCache | StateCache | None,
    kind: type[TokenCache] | type[StateCache],
    mask: Tensor | None,
    cu_seqlens: Tensor | None,
    causal: bool = True,
    cp: ContextParallel | None = None,
) -> None:
    """One clear error for each wrong argument of a layer's call; over ranks cu_seqlens is left to the operation."""
    check_tokens("x", x, embed_dim, "embed_dim")
    B, N = x.shape[:2]
    if cp is not None:
        cp.refuse(x, mask, cache, cu_seqlens)
        require_tensors({}, {"cu_seqlens": cu_seqlens})
    if mask is not None:
        check_mask(mask, x)
    if cu_seqlens is not None and cp is None:
        if mask is not None:
            raise ValueError("mask and cu_seqlens are given together: packed sequences have no padding")
        if cache is not None:
            raise ValueError("cache and cu_seqlens are given together: a cache goes on with the rows of a batch")
        check_packed("cu_seqlens", cu_seqlens, "x", x)
    if cache is not None:
        if not isinstance(cache, kind):
            raise ValueError(f"cache is a {type(cache).__name__}, must be a {kind.__name__}")
        if not causal:
            raise ValueError("cache is given to a layer with causal=False: its earlier tokens would see later ones")
    if positions is not None:
        if not isinstance(positions, Tensor) or positions.dtype != torch.int64:
            kind_of = positions.dtype if isinstance(positions, Tensor) else type(positions).__name__
            raise ValueError(f"positions is {kind_of}, must be an int64 tensor")
        if tuple(positions.shape) not in ((N,), (B, N)):
            raise ValueError(
                f"positions has shape {tuple(positions.shape)}, must be (N,) or (B, N) of x {tuple(x.shape)}"
            )
        if positions.device != x.device:
            raise ValueError(f"positions is on {positions.device}, must be on {x.device}, where x is")


def check_kind(name: str, x: Tensor, projection: nn.Module) -> None:
    """x where the layer is and of its dtype, as far as a plain Linear tells; autocast sees to dtypes itself."""
    if type(projection) is not nn.Linear or torch.compiler.is_compiling():
        return
    weight = projection.weight
    if x.device != weight.device:
        hint = ": call to_empty(device=...) and reset_parameters()" if weight.device.type == "meta" else ""
        raise ValueError(f"{name} is on {x.device}, and the layer on {weight.device}{hint}")
    if x.dtype != weight.dtype and not torch.is_autocast_enabled(x.device.type):
        raise ValueError(f"{name} is {x.dtype}, and the layer {weight.dtype}: cast one of them, or use autocast")


def check_tokens(name: str, x: Tensor, size: int, what: str) -> None:
    if not isinstance(x, Tensor):
        raise ValueError(f"{name} is a {type(x).__name__}, must be a tensor (B, N, {what})")
    if x.ndim != 3 or x.shape[2] != size:
        raise ValueError(f"{name} has shape {tuple(x.shape)}, must be (B, N, {what}) with {what}={size}")


def check_packed(name: str, cu_seqlens: Tensor, of: str, x: Tensor) -> None:
    require_tensors({name: cu_seqlens}, {})
    check_offsets(name, cu_seqlens, x, of, along=1)
    if is_plain_eager(cu_seqlens):
        check_offset_values(name, cu_seqlens, x.shape[1])


def tokens_first(x: Tensor, mask: Tensor | None) -> tuple[Tensor, Padding | None]:
    """x with each row's tokens at the front, and what puts them back."""
    if mask is None:
        return x, None
    padding = Padding.of(mask)
    return padding.front(x), padding


def counts_of(x: Tensor, padding: Padding | None) -> Tensor:
    """int64 (B,): tokens in each row of x (B, N, ...)."""
    if padding is not None:
        return padding.counts
    return torch.full((x.shape[0],), x.shape[1], dtype=torch.int64, device=x.device)


def rotations(
    rope: Rotary,
    x: Tensor,
    positions: Tensor | None,
    cache: TokenCache | StateCache | None,
    padding: Padding | None,
    cu_seqlens: Tensor | None,
    cp: ContextParallel | None = None,
) -> tuple[Tensor, Tensor]:
    """cos and sin of x's tokens, which `padding` has brought to the front already.

    Unless told a token's position is the number of tokens before it, in its row or packed sequence, with the cache's.
    """
    B, N = x.shape[:2]
    if positions is not None:
        return rope(positions if padding is None else padding.front(positions.expand(B, N)))
    if cp is not None:
        return cp.rotations(rope, x, cu_seqlens)
    if cu_seqlens is not None:
        return rope(packed_positions(cu_seqlens, N))
    if cache is not None and cache.lengths is not None:
        return rope(cache.lengths[:, None] + torch.arange(N, device=x.device))
    return rope.span(0 if cache is None else cache.length, N, x.device)


def attend(
    q: Tensor, k: Tensor, v: Tensor, options: dropping.Options, sinks: Tensor | None, rows: Rows | None, dropout: float,
    cp: ContextParallel | None = None,
) -> Tensor:  # fmt: skip
    """Softmax attention (B, H, N, E), lying as (B, N, H, E) in memory; `sinks` are those of a layer's parameter."""
    sinks = sinks_of(sinks, q.dtype)
    if cp is not None:
        return cp.attend(q, k, v, options, sinks, None if rows is None else rows.cu_seqlens_q)
    if dropout:
        return dropping.attend(q, k, v, options, dropout, sinks, rows)
    causal, window, softcap, scale, backend = options
    if rows is None:
        return flash_attention(
            q, k, v, causal=causal, window=window, softcap=softcap, sinks=sinks, scale=scale, backend=backend
        )
    cu_seqlens_q, cu_seqlens_k = rows.offsets(q.shape[2], k.shape[2])
    o = flash_attention(
        one_row(q), one_row(k), one_row(v), causal=causal, window=window, softcap=softcap, sinks=sinks, scale=scale,
        cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, backend=backend,
    )  # fmt: skip
    return many_rows(o, q.shape[0], q.shape[2])


def sinks_of(parameter: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """This rank's heads', in a dtype `flash_attention` takes."""
    if parameter is None:
        return None
    sinks = local(parameter)
    return sinks if sinks.dtype in (dtype, torch.float32) else sinks.float()


# --------------------------------------------------------------------------------------------- weights

Layer = TypeVar("Layer", bound=nn.Module)


def loaded(
    make: Callable[..., Layer],
    tensors: Mapping[str, Tensor],
    source: object,
    device: torch.device | str | None,
    dtype: torch.dtype | None,
    like: str = "o_proj.weight",
) -> Layer:
    """A layer with these weights, or one error and no layer; where and in the dtype of tensors[like], unless told.

    source  what they are of: if it is a module in evaluation the layer is, too.
    """
    first = tensors.get(like)
    device = (None if first is None else first.device) if device is None else device
    layer = make(device="meta", dtype=first.dtype if dtype is None and first is not None else dtype)
    weights.check(layer, tensors)
    layer.to_empty(device=device or "cpu")
    layer.load_state_dict(tensors)
    return layer.train(getattr(source, "training", True))
