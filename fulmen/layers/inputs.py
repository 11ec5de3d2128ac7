"""What a layer is given: arguments checked by name, and a batch as rows of tokens.

`whole`, `number`, `choice`, `flag` and `factory` check single arguments of layers, of a `Rotary` and of caches; numpy's
scalars count as numbers. `Inputs.of` checks a call and finds out where each token of x stands:

* **Packed sequences** (`cu_seqlens`): B is 1 and sequences lie end to end along N.
* **Padding** (`mask`): each row's tokens are brought to the front (`Padding.front`) and put back after the layer's work
  (`Padding.back`). This serves padding on either side and in between, and reads no value on the host.

Attention over rows of different lengths is one packed call over the rows laid end to end. A row's padding becomes two
more sequences: queries without keys, whose output is zero, and keys without queries, which nobody sees.

    row 0 | a b c . . |  row 1 | d e . . . |      queries, and as many keys
    q:       (a b c)  (. .)  ()       (d e)  (. . .)  ()
    k:       (a b c)  ()     (. .)    (d e)  ()       (. . .)
"""

from __future__ import annotations

import contextlib
import math
import numbers
import operator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from fulmen import dispatch
from fulmen.boundary import autocasts, check_offset_values, check_offsets, is_plain_eager, require_tensors

if TYPE_CHECKING:
    from fulmen.layers.cache import RecurrentCache, TokenCache
    from fulmen.layers.pool import Pool
    from fulmen.layers.rotary import Rotary
    from fulmen.layers.weights import AttentionLayer
    from fulmen.parallel.context import ContextParallel

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
USUAL_N = 4096  # tokens of the call whose backend a layer's repr names

# ------------------------------------------------------------------------------------- single arguments


def whole(name: str, value: Any, low: int | None = 1, high: int | None = None) -> int:
    """`value` as an int in these limits; numpy's integers are ints, a bool is not."""
    found = value
    if not isinstance(value, int):
        with contextlib.suppress(TypeError):
            found = operator.index(value)
    if (
        not isinstance(found, int)
        or isinstance(found, bool)
        or (low is not None and found < low)
        or (high is not None and found > high)
    ):
        limits = "" if low is None else f" of at least {low}" if high is None else f" from {low} to {high}"
        raise ValueError(f"{name}={value!r}: must be an int{limits}")
    return found


def number(name: str, value: Any, zero: bool = False) -> float:
    """`value` as a positive finite float, or 0 where `zero` allows it."""
    found = float(value) if not isinstance(value, bool) and isinstance(value, numbers.Real) else math.nan
    if not (0 < found < math.inf or (zero and found == 0)):
        raise ValueError(f"{name}={value!r}: must be {'0 or ' if zero else ''}a positive finite number")
    return found


def choice(name: str, value: Any, *allowed: Any) -> Any:
    """`value` if it is one of `allowed`, type included: 1 is not True."""
    if not any(isinstance(value, type(a)) and value == a for a in allowed):
        *others, last = map(repr, allowed)
        raise ValueError(f"{name}={value!r}: must be {', '.join(others)} or {last}")
    return value


def flag(name: str, value: Any) -> bool:
    return choice(name, value, False, True)


def factory(device: Any, dtype: Any) -> dict[str, Any]:
    """The device and dtype of a layer's parameters, as keyword arguments."""
    if dtype is not None:
        choice("dtype", dtype, *DTYPES)
    return {"device": device, "dtype": dtype}


def check_heads(embed_dim: int, num_heads: int, num_kv_heads: int) -> tuple[int, int, int]:
    embed_dim, num_heads = whole("embed_dim", embed_dim), whole("num_heads", num_heads)
    num_kv_heads = whole("num_kv_heads", num_kv_heads)
    if num_heads % num_kv_heads:
        raise ValueError(f"num_kv_heads={num_kv_heads} must divide num_heads={num_heads}")
    return embed_dim, num_heads, num_kv_heads


def check_backend(op: str, backend: str) -> str:
    if isinstance(backend, str) and (backend == "auto" or backend in dispatch.kernels(op)):
        return backend
    why = dict(dispatch.report(op, torch.device("cpu")))  # those that cannot be imported, too
    if not isinstance(backend, str) or backend not in why:
        raise dispatch.unknown(op, backend)
    raise NotImplementedError(f"backend={backend!r} {why[backend]}")


def backend_chosen(op: str, spec: Any, backend: str, N: int = USUAL_N) -> str:
    """For a layer's repr: the backend asked for and, if that is "auto", the one that serves `spec` of N tokens."""
    if spec.device.type == "meta":
        return repr(backend)
    try:
        name = dispatch.pick(op, spec, backend).name
    except NotImplementedError:
        return f"{backend!r} (cannot serve it)"
    kernel = dispatch.choose(op, spec, name).kernel
    what = name if kernel == name else f"{name}, {kernel}"
    return f"{backend!r} ({what}, at N={N})" if backend == "auto" else repr(backend)


# -------------------------------------------------------------------------------------- tensors of a call


def check_tokens(name: str, x: Tensor, size: int, what: str) -> None:
    if not isinstance(x, Tensor):
        raise ValueError(f"{name} is a {type(x).__name__}, must be a tensor (B, N, {what})")
    if x.is_nested:
        raise ValueError(f"{name} is a nested tensor: pack its sequences along N and give cu_seqlens")
    if x.ndim != 3 or x.shape[2] != size:
        raise ValueError(f"{name} has shape {tuple(x.shape)}, must be (B, N, {what}) with {what}={size}")


def check_kind(name: str, x: Tensor, projection: nn.Module) -> None:
    """x must be on the layer's device and of its dtype, as far as a plain Linear tells; autocast sees to dtypes."""
    if type(projection) is not nn.Linear or torch.compiler.is_compiling():
        return
    check_device(name, x, projection.weight)
    check_dtype(name, x, projection.weight)


def check_device(name: str, x: Tensor, weight: Tensor, of: str = "the layer") -> None:
    if x.device != weight.device:
        hint = ": call to_empty(device=...) and reset_parameters()" if weight.device.type == "meta" else ""
        raise ValueError(f"{name} is on {x.device}, and {of} on {weight.device}{hint}")


def check_dtype(name: str, x: Tensor, weight: Tensor, of: str = "the layer") -> None:
    if x.dtype != weight.dtype and not autocasts(x):
        raise ValueError(f"{name} is {x.dtype}, and {of} {weight.dtype}: cast one of them, or use autocast")


def check_mask(mask: Tensor, x: Tensor, name: str = "mask") -> None:
    """The padding mask of x (B, N, ...)."""
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        got = mask.dtype if isinstance(mask, Tensor) else f"a {type(mask).__name__}"
        raise ValueError(f"{name} is {got}, must be a bool tensor, True for a token and False for padding")
    if mask.shape != x.shape[:2]:
        raise ValueError(f"{name} has shape {tuple(mask.shape)}, must be (B, N) = {tuple(x.shape[:2])}")
    if mask.device != x.device:
        raise ValueError(f"{name} is on {mask.device}, must be on {x.device}, where its tokens are")


def check_packed(name: str, cu_seqlens: Tensor, of: str, x: Tensor) -> None:
    require_tensors({name: cu_seqlens}, {})
    check_offsets(name, cu_seqlens, x, of, along=1)
    if is_plain_eager(cu_seqlens):
        check_offset_values(name, cu_seqlens, x.shape[1])


def _check_positions(positions: Tensor, x: Tensor) -> None:
    B, N = x.shape[:2]
    if not isinstance(positions, Tensor) or positions.dtype != torch.int64:
        got = positions.dtype if isinstance(positions, Tensor) else type(positions).__name__
        raise ValueError(f"positions is {got}, must be an int64 tensor")
    if tuple(positions.shape) not in ((N,), (B, N)):
        raise ValueError(f"positions has shape {tuple(positions.shape)}, must be (N,) or (B, N) of x {tuple(x.shape)}")
    if positions.device != x.device:
        raise ValueError(f"positions is on {positions.device}, must be on {x.device}, where x is")


def check_causal(name: str, causal: bool) -> None:
    if not causal:
        raise ValueError(f"{name} is given to a layer with causal=False: its earlier tokens would see later ones")


def _check_cache(layer: AttentionLayer, cache: Any, B: int, causal: bool) -> None:
    pooled = layer.pool_type is not None and isinstance(cache, layer.pool_type)
    if not pooled and not isinstance(cache, layer.cache_type):
        kinds = " or a ".join(kind.__name__ for kind in (layer.cache_type, layer.pool_type) if kind is not None)
        raise ValueError(f"cache is a {type(cache).__name__}, must be a {kinds}")
    check_causal("cache", causal)
    if pooled:
        return
    cache.sync()
    if cache.lengths is not None and cache.lengths.shape[0] != B:
        raise ValueError(
            f"cache holds {cache.lengths.shape[0]} rows, and x has B={B}: call reset() before another batch"
        )


def _check_pooled(layer: AttentionLayer, pool: Pool, x: Tensor, positions: Tensor | None, mask: Tensor | None) -> None:
    if mask is not None or positions is not None:
        given = "mask" if mask is not None else "positions"
        raise ValueError(f"{given} is given with a pool: Sequences.step says how many tokens the rows have, and where")
    if torch.is_grad_enabled():
        raise ValueError("a pool is written in place, without gradients: call the layer under torch.no_grad()")
    if layer.dropout and layer.training:
        raise ValueError(f"dropout={layer.dropout} with a pool: it drops no weights; call the layer's eval()")
    pool.sequences.check_call(*x.shape[:2])


class Inputs(NamedTuple):
    """The checked arguments of a layer's call.

    x        (B, N, embed_dim), each row's tokens first.
    padding  where the tokens were; None: every column is a token.
    """

    x: Tensor
    positions: Tensor | None
    cache: TokenCache | RecurrentCache | Pool | None
    padding: Padding | None
    cu_seqlens: Tensor | None
    cp: ContextParallel | None

    @classmethod
    def of(
        cls, layer: AttentionLayer, x: Tensor, positions: Tensor | None, cache: Any, mask: Tensor | None,
        cu_seqlens: Tensor | None, projection: nn.Module, causal: bool = True,
    ) -> Inputs:  # fmt: skip
        """Raises one clear error for a wrong argument; over ranks cu_seqlens is left to the operation."""
        check_tokens("x", x, layer.embed_dim, "embed_dim")
        if layer.cp is not None:
            layer.cp.refuse(x, mask, cache, cu_seqlens)
            require_tensors({}, {"cu_seqlens": cu_seqlens})
        if mask is not None:
            check_mask(mask, x)
        if cu_seqlens is not None and layer.cp is None:
            if mask is not None:
                raise ValueError("mask and cu_seqlens are given together: packed sequences have no padding")
            if cache is not None:
                raise ValueError("cache and cu_seqlens are given together: a cache goes on with the rows of a batch")
            check_packed("cu_seqlens", cu_seqlens, "x", x)
        if cache is not None:
            _check_cache(layer, cache, x.shape[0], causal)
        if positions is not None:
            _check_positions(positions, x)
        check_kind("x", x, projection)
        if cache is not None:
            cache.check_writer(layer)
        if layer.pool_type is not None and isinstance(cache, layer.pool_type):
            _check_pooled(layer, cache, x, positions, mask)
        padding = None if mask is None else Padding.of(mask)
        return cls(x if padding is None else padding.front(x), positions, cache, padding, cu_seqlens, layer.cp)

    @property
    def counts(self) -> Tensor | None:
        """int64 (B,): tokens in each row; None: N in all of them."""
        return None if self.padding is None else self.padding.counts

    @property
    def rows(self) -> Rows | None:
        """What x's tokens see of x."""
        if self.cu_seqlens is not None:
            return Packed(self.cu_seqlens, self.cu_seqlens)
        return None if self.padding is None else Counts(self.padding.counts, self.padding.counts)

    def rotations(self, rope: Rotary) -> tuple[Tensor, Tensor]:
        """cos and sin of x's tokens.

        Without `positions` a token's position is the number of tokens before it in its row or packed sequence, those in
        the cache included.
        """
        (B, N), device, dtype = self.x.shape[:2], self.x.device, self.x.dtype
        if self.positions is not None:
            given = self.positions if self.padding is None else self.padding.front(self.positions.expand(B, N))
            return rope(given, dtype)
        if self.cp is not None:
            return self.cp.rotations(rope, self.x, self.cu_seqlens)
        if self.cu_seqlens is not None:
            return rope(packed_positions(torch.arange(N, device=device), self.cu_seqlens), dtype)
        if self.cache is not None and self.cache.lengths is not None:
            return rope(self.cache.lengths[:B, None].long() + torch.arange(N, device=device), dtype)
        return rope.span(0 if self.cache is None else self.cache.length, N, device, dtype)

    def back(self, y: Tensor) -> Tensor:
        """y (B, N, ...) with its tokens where they were in x, and zeros for padding."""
        return y if self.padding is None else self.padding.back(y)


# ---------------------------------------------------------------------------------------- rows of tokens


class Padding(NamedTuple):
    """Which columns of a batch are tokens."""

    mask: Tensor  # bool (B, N): True for a token
    order: Tensor  # int64 (B, N): the column that comes to each place
    places: Tensor  # int64 (B, N): the place each column goes to
    counts: Tensor  # int64 (B,): tokens in each row

    @classmethod
    def of(cls, mask: Tensor) -> Padding:
        counts = mask.sum(1)
        places = torch.where(mask, mask.cumsum(1), counts[:, None] + (~mask).cumsum(1)) - 1
        columns = torch.arange(mask.shape[1], device=mask.device).expand_as(places)
        return cls(mask, torch.zeros_like(places).scatter(1, places, columns), places, counts)

    def front(self, x: Tensor) -> Tensor:
        """x (B, N, ...) with each row's tokens first, in their order, and zeros for padding, whatever it held."""
        return _taken(self._zeroed(x), self.order)

    def back(self, y: Tensor) -> Tensor:
        """y (B, N, ...) with its tokens where they were, and zeros for padding."""
        return self._zeroed(_taken(y, self.places))

    def _zeroed(self, x: Tensor) -> Tensor:
        keep = self.mask.view(*self.mask.shape, *[1] * (x.ndim - 2))
        return torch.where(keep, x, torch.zeros((), dtype=x.dtype, device=x.device))


def _taken(x: Tensor, index: Tensor) -> Tensor:
    return x.take_along_dim(index.view(*index.shape, *[1] * (x.ndim - 2)), dim=1)


class Counts(NamedTuple):
    """Row b's first q[b] queries see its first k[b] keys, int64 (B,) each; causality limits them further."""

    q: Tensor
    k: Tensor

    def offsets(self, N_Q: int, N_KV: int) -> tuple[Tensor, Tensor]:
        """cu_seqlens_q and cu_seqlens_k of the rows laid end to end: see the top of the file."""
        row = torch.arange(self.q.shape[0], device=self.q.device)
        q_row, k_row = row * N_Q, row * N_KV
        q_end, k_end = q_row + self.q, k_row + self.k
        cu_seqlens_q = torch.stack([q_end, q_row + N_Q, q_row + N_Q], 1).flatten()
        cu_seqlens_k = torch.stack([k_end, k_end, k_row + N_KV], 1).flatten()
        pad = nn.functional.pad
        return pad(cu_seqlens_q, (1, 0)).to(torch.int32), pad(cu_seqlens_k, (1, 0)).to(torch.int32)

    def keys_of_queries(self, query: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of queries 0 to N_Q - 1: the key each stands at, the first key it may see and the one after the last.

        int64 (B or 1, N_Q) each, counted within the row, or through all packed sequences.
        """
        q, k = self.q[:, None], self.k[:, None]
        end = torch.where(query < q, k, 0)  # padding sees nothing
        return query + k - q, torch.zeros_like(end), end


class Packed(NamedTuple):
    """Packed sequences, as `flash_attention` takes their offsets: each one's queries see its keys."""

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor

    def offsets(self, N_Q: int, N_KV: int) -> tuple[Tensor, Tensor]:
        return self.cu_seqlens_q, self.cu_seqlens_k

    def keys_of_queries(self, query: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """As `Counts.keys_of_queries`."""
        sequence = _sequence_of(query, self.cu_seqlens_q)
        first, end = self.cu_seqlens_k[sequence].long(), self.cu_seqlens_k[sequence + 1].long()
        position = query - self.cu_seqlens_q[sequence + 1] + end
        return position[None], first[None], end[None]


Rows = Counts | Packed


def full_counts(x: Tensor, counts: Tensor | None) -> Tensor:
    """`counts`, or N for each row of x (B, N, ...)."""
    if counts is not None:
        return counts
    return torch.full((x.shape[0],), x.shape[1], dtype=torch.int64, device=x.device)


def _sequence_of(token: Tensor, cu_seqlens: Tensor) -> Tensor:
    """The packed sequence of each token."""
    return torch.searchsorted(cu_seqlens.contiguous(), token, right=True) - 1


def sequences_of(N: int, cu_seqlens: Tensor) -> Tensor:
    """int32 (N,): the packed sequence of each token."""
    return _sequence_of(torch.arange(N, device=cu_seqlens.device), cu_seqlens).to(torch.int32)


def packed_positions(token: Tensor, cu_seqlens: Tensor) -> Tensor:
    """int64, as `token`: each token's place in its own packed sequence."""
    return token - cu_seqlens[_sequence_of(token, cu_seqlens)]


def one_row(x: Tensor) -> Tensor:
    """(B, H, N, D) to (1, H, B * N, D); a view where a token's heads lie together in memory, else a copy."""
    return x.transpose(0, 1).flatten(1, 2)[None]


def many_rows(x: Tensor, B: int, N: int) -> Tensor:
    """(1, H, B * N, E) to (B, H, N, E), a view."""
    return x[0].unflatten(1, (B, N)).transpose(0, 1)
