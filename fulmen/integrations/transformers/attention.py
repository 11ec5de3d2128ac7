"""Softmax attention in transformers: the attention implementation `fulmen` and its mask function.

transformers makes one mask per forward and kind of layer and hands it to every layer. `make_mask` reads off what the
mask is made of (causal, window, padding, packed sequences, a static cache's unused tail) and returns a `Mask`;
`attend` turns that into one call of `flash_attention`. No (N_Q, N_KV) tensor is ever made. What causal, window and
sequence boundaries cannot say raises.

A mask says for how many queries and keys it was made. transformers takes these numbers from one layer's cache, and in
hybrid models that may be a layer without keys (MiniMax's first). `attend` compares them with the tensors it is given:
if they differ it makes the mask again for its own keys, or raises if the padding mask does not describe them.

Rows with padding become sequences of one packed call, without a host synchronisation and without moving tokens: the
padding between two rows' tokens is covered by a sequence of queries without keys (their output is zero) and one of
keys without queries (nothing sees them).

    row 0 | . . a b c |  row 1 | d e f . . |      queries, and as many keys
    q:       (. .)      ()   (a b c)  ()       ()   (d e f)  (. .)  ()
    k:       ()      (. .)   (a b c)  ()       ()   (d e f)  ()     (. .)
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import re
from collections.abc import Callable, Iterable
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fulmen.boundary import needs_gradient
from fulmen.flash.op import flash_attention
from fulmen.flash.spec import MAX_HEAD_DIM
from fulmen.integrations.transformers import packing
from fulmen.integrations.transformers.forward import code_of
from fulmen.layers.inputs import Counts, check_backend, many_rows, one_row

__all__ = ["register", "unregister"]

Window = tuple[int | None, int | None]

BIASES = {"position_bias", "relative_position_bias", "matrix_bd"}  # of positions: T5, Swin, Parakeet
SELECTORS = ("indexer", "skip_topk", "compressor", "prepare_dynamic_mask")  # of sparse attention
MAKES_MASKS = re.compile(r"create_\w*masks?(_for_generate)?")  # of transformers.masking_utils

BLOCKS = "blocks of tokens that see ahead, as images do"

_registered: set[str] = set()


def register(name: str = "fulmen", *, backend: str = "auto") -> None:
    """Makes `attn_implementation=name` known to transformers; `backend` is `flash_attention`'s."""
    attention, masks = _interfaces()
    if not isinstance(name, str):
        raise ValueError(f"name={name!r}: must be a string")
    if name not in _registered and (name in attention or name in masks or name == "eager"):
        raise ValueError(f"name={name!r} is an attention implementation already; choose another name")
    if "flash" in name or "|" in name:
        raise ValueError(f"name={name!r}: transformers gives names with 'flash' or '|' a meaning of their own")
    attention.register(name, functools.partial(attend, backend=check_backend("flash", backend)))
    masks.register(name, make_mask)
    _registered.add(name)


def unregister(name: str = "fulmen") -> None:
    """Takes back `register(name)`. Models that still use the name get transformers' own KeyError."""
    if name not in _registered:
        raise ValueError(f"name={name!r} is not registered by fulmen; registered: {sorted(_registered) or 'none'}")
    for interface in _interfaces():
        del type(interface)._global_mapping[name]  # transformers has no public way back
    _registered.remove(name)


def matches(module: torch.nn.Module) -> bool:
    """Whether the module's forward calls transformers' attention interface."""
    code = code_of(module)
    return code is not None and "ALL_ATTENTION_FUNCTIONS" in code.co_names


def unsupported_reason(module: torch.nn.Module) -> str | None:
    """Why the module's attention cannot be served, or None."""
    code = code_of(module)
    if any(getattr(module, name, None) is not None for name in SELECTORS):
        return "it chooses or compresses its keys, and makes masks of its own for that"
    if code is not None and BIASES & {*code.co_varnames, *code.co_names}:
        return "it adds biases of positions, which flash_attention does not take"
    if not hasattr(getattr(module, "config", None), "_attn_implementation_internal"):
        return "it has no config of transformers, by which its attention is chosen"
    if getattr(module.config, "use_bidirectional_attention", None) is True and not getattr(module, "is_causal", True):
        return "its config has use_bidirectional_attention, by which transformers adds to a causal mask"
    dims = [getattr(module, name, None) for name in ("head_dim", "qk_head_dim", "v_head_dim")]
    largest = max((dim for dim in dims if isinstance(dim, int)), default=0)
    return None if largest <= MAX_HEAD_DIM else f"its head dim {largest} is above {MAX_HEAD_DIM}"


def model_reason(model: Any) -> str | None:
    """Why no attention of this model can be served, or None."""
    flags = [getattr(model, f"_supports_{name}", True) for name in ("sdpa", "flash_attn", "attention_backend")]
    if not any(flags):
        return f"transformers says that {type(model).__name__} works with eager attention alone"
    code = code_of(model)
    if code is not None and "finfo" in code.co_names and not any(map(MAKES_MASKS.fullmatch, code.co_names)):
        return f"{type(model).__name__} makes its masks itself, instead of asking for those of its attention"
    return None


def switch(configs: Iterable[Any], backend: str) -> Callable[[], None]:
    """Makes all attention modules with these configs attend with fulmen; returns what undoes it."""
    name = f"fulmen_accelerate_{backend.removeprefix('flash_')}"  # a name of its own: users register theirs
    register(name, backend=backend)
    configs = list(configs)
    for config in configs:
        other = _switched[id(config)].name if id(config) in _switched else name
        if other != name:
            raise ValueError(
                f"backend={backend!r}: the model shares its config with one that is accelerated as {other!r}, and the "
                "config says which attention runs; build each model with a config of its own, copy.deepcopy(config)"
            )
    for config in configs:
        held = _switched.setdefault(id(config), Switched(config, config._attn_implementation_internal, name))
        held.models += 1
        config._attn_implementation_internal = name

    def undo() -> None:
        for config in configs:
            held = _switched[id(config)]
            held.models -= 1
            if not held.models:
                config._attn_implementation_internal = _switched.pop(id(config)).before

    return undo


@dataclasses.dataclass
class Switched:
    """A config that says "fulmen", until the last of the accelerated models that share it is undone."""

    config: Any
    before: Any
    name: str
    models: int = 0


_switched: dict[int, Switched] = {}  # by the config's id


def _interfaces() -> tuple[Any, Any]:
    """transformers' tables of attention functions and of mask functions."""
    try:
        modeling = importlib.import_module("transformers.modeling_utils")
        masking = importlib.import_module("transformers.masking_utils")
        known = {"q_length", "kv_length", "q_offset", "kv_offset"} <= set(
            inspect.signature(masking.sdpa_mask).parameters
        )
        tables = modeling.ALL_ATTENTION_FUNCTIONS, masking.ALL_MASK_ATTENTION_FUNCTIONS
    except (ImportError, AttributeError) as error:
        raise ImportError(f"fulmen.integrations.transformers needs transformers >= 5: {error}") from error
    if not known:
        raise ImportError(
            "this transformers' mask functions take other arguments than fulmen knows; 5.17, 5.22 and 5.23 work"
        )
    return tables


# -------------------------------------------------------------------------------------------- the mask


@dataclasses.dataclass(frozen=True)
class Mask:
    """What a layer's attention needs to know beside its tensors."""

    causal: bool
    window: Window | None = None
    keys: int | None = None  # how many leading keys there are; the rest is a cache's unused tail
    cu_seqlens_q: Tensor | None = None  # the batch's rows are sequences of one packed call
    cu_seqlens_k: Tensor | None = None
    lengths: Tensor | None = None  # int32 (B,): of a static cache, how many leading keys a row has
    order_q: Tensor | None = None  # (B, N): tokens first, where padding stands between tokens
    order_k: Tensor | None = None
    plain: bool = False  # nothing but causal, for any number of keys
    packed: bool = False  # by position_ids; a compiled model makes such masks of one sequence, too
    sizes: tuple[int, int, int] | None = dataclasses.field(default=None, compare=False)  # (B, N_Q, N_KV); None: any
    made_of: tuple[Any, Tensor] | None = dataclasses.field(default=None, compare=False)  # mask function, padding mask

    # transformers takes a mask that was made ahead of the forward (static caches) for a tensor

    @property
    def ndim(self) -> int:
        return 4

    @property
    def shape(self) -> tuple[int, ...]:
        return (1, 1, 1, 1)

    def contiguous(self) -> Mask:
        return self


PLAIN = Mask(causal=True, plain=True)


class Pattern(NamedTuple):
    """What a mask function of transformers is made of."""

    causal: bool
    left: int | None
    right: int | None
    sequence_ids: Tensor | None  # (B, N): each token's packed sequence

    @property
    def windowed(self) -> bool:
        return self.left is not None or self.right is not None

    @property
    def positional(self) -> bool:
        """Whether it matters where a query stands."""
        return self.causal or self.windowed


class Rows(NamedTuple):
    """A mask's sizes and pattern. Query i of a row stands at key `start` + i, as keys are counted in this call."""

    B: int
    N_Q: int
    N_KV: int
    start: int | Tensor
    causal: bool
    left: int | None
    right: int | None
    device: torch.device
    keys: int | None = None  # N_KV, if it leaves out a cache's unused tail

    @property
    def window(self) -> Window | None:
        return None if self.left is None and self.right is None else (self.left, self.right)

    @property
    def positional(self) -> bool:
        """Whether it matters where a query stands."""
        return self.causal or self.window is not None


@torch.compiler.disable(reason="fulmen's mask function reads values on the host: compile the model's layers instead")
def make_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | Mask | None = None,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> Mask:
    """transformers' mask interface. Reads values, so it synchronises, once, if there is a padding mask or packing."""
    if isinstance(attention_mask, Mask):  # made ahead of the forward
        return attention_mask
    pattern = _pattern(mask_function, q_length, kv_length + kv_offset)
    mask = _mask(batch_size, q_length, kv_length, q_offset, kv_offset, pattern, attention_mask, torch.device(device))
    if mask is None:
        return PLAIN
    if not (pattern.positional or mask.cu_seqlens_q is not None):
        return mask
    made_of = None if attention_mask is None else (mask_function, attention_mask)
    return dataclasses.replace(mask, sizes=(batch_size, q_length, kv_length), made_of=made_of)


def _mask(
    B: int, N_Q: int, N_KV: int, q_offset: int | Tensor, kv_offset: int, pattern: Pattern,
    attention_mask: Tensor | None, device: torch.device,
) -> Mask | None:  # fmt: skip
    """None for a plain causal mask of any number of keys, without padding anywhere."""
    start, keys = q_offset - kv_offset, None
    if pattern.causal and 1 < N_Q < N_KV:
        start = int(start)  # synchronises if it is a tensor: a prompt that goes on in a static cache
        keys = start + N_Q if start + N_Q < N_KV else None
    N_KV = keys or N_KV
    left, right = (None if w is None or w >= N_KV - 1 else w for w in (pattern.left, pattern.right))
    rows = Rows(B, N_Q, N_KV, start, pattern.causal, left, right, device, keys)
    if pattern.sequence_ids is not None:
        return _packed(rows, pattern.sequence_ids)
    if right is not None and start + N_Q != N_KV:
        raise NotImplementedError("a window on both sides of queries in a cache: use attn_implementation='sdpa'")
    if attention_mask is None:
        mask = _unpadded(rows)
    else:
        if attention_mask.ndim != 2:
            raise ValueError(
                f"attention_mask has shape {tuple(attention_mask.shape)}: 'fulmen' takes a (B, N) padding mask; for "
                "other masks use attn_implementation='sdpa' or 'eager'"
            )
        rows_given, columns = attention_mask.shape
        known = q_offset + N_Q if pattern.causal and isinstance(q_offset, int) else 0
        if rows_given != B or columns < known:
            raise ValueError(
                f"attention_mask has shape {tuple(attention_mask.shape)}: it needs B={B} rows and a column for every "
                f"token, those in the cache included{f', {known} here' if known else ''}"
            )
        mask = _padded(rows, attention_mask.to(device=device, dtype=torch.bool), kv_offset)
    return Mask(pattern.causal) if mask is None and pattern.windowed else mask


@functools.lru_cache
def _known_parts() -> dict[CodeType, str]:
    """The functions transformers builds masks of. Those it makes on the fly share the code of any other so made."""
    masking = importlib.import_module("transformers.masking_utils")
    nothing = torch.zeros(1, 1, dtype=torch.long)
    made = {
        "and": masking.and_masks(),
        "or": masking.or_masks(),
        BLOCKS: masking.blockwise_overlay(nothing),
        "causal": masking.causal_mask_function,
        "bidirectional": masking.bidirectional_mask_function,
        "window": masking.sliding_window_overlay(1),
        "window on both sides": masking.sliding_window_bidirectional_overlay(1),
        "chunks": masking.chunked_overlay(1, nothing),
        "packed": masking.packed_sequence_mask_function(nothing),
    }
    if hasattr(masking, "remap_positions_for_packed_sequence"):  # from 5.23 on
        made["positions"] = masking.remap_positions_for_packed_sequence(masking.causal_mask_function, nothing)
    return {function.__code__: name for name, function in made.items()}


def _kind(part: Any) -> tuple[str | None, list[Any]]:
    """Which of the known parts it is, and what it captured, by name, alphabetically."""
    code = getattr(part, "__code__", None)
    captured = [cell.cell_contents for cell in getattr(part, "__closure__", None) or ()]
    return (_known_parts().get(code) if code is not None else None), captured


def _adds_nothing(part: Any, N_Q: int) -> bool:
    """Whether it is blocks (images) of which there are none, or one query, which has nothing ahead."""
    kind, captured = _kind(part)
    return kind == BLOCKS and (N_Q == 1 or not bool((captured[0] >= 0).any()))


def _unknown(part: Any) -> NotImplementedError:
    kind = _kind(part)[0]
    name = getattr(part, "__qualname__", repr(part)) if kind in (None, "or") else kind
    return NotImplementedError(
        f"'fulmen' attends causally or fully, in windows, with padding or packed sequences; this model's mask also has "
        f"{name!r}: use attn_implementation='sdpa' or 'eager'"
    )


def _pattern(mask_function: Any, N_Q: int, kv_end: int) -> Pattern:
    """Raises if there is anything else in the mask function. Synchronises once for blocks of tokens on a GPU."""
    causal, left, right, sequence_ids = False, None, None, None
    parts = [mask_function]
    while parts:
        part = parts.pop()
        kind, captured = _kind(part)
        if kind == "and":
            parts.extend(captured[0])
        elif kind == "or":
            united = [one for one in captured[0] if not _adds_nothing(one, N_Q)]
            if len(united) != 1:
                raise _unknown(next((one for one in united if _kind(one)[0] == BLOCKS), part))
            parts.extend(united)
        elif kind == "positions":  # within packed sequences, where positions go on by one as keys do
            parts.append(captured[0])
        elif kind == "causal":
            causal = True
        elif kind == "window":
            left = int(captured[0]) - 1
        elif kind == "window on both sides":
            left = right = int(captured[0])
        elif kind == "packed":
            sequence_ids = captured[0]
        elif kind == "chunks" and kv_end <= captured[0]:  # one chunk: no limit
            continue
        elif kind != "bidirectional":
            raise _unknown(part)
    return Pattern(causal, left, right, sequence_ids)


def _unpadded(rows: Rows) -> Mask | None:
    """Every token counts; of a static cache, those up to the last query."""
    if not rows.positional:
        return Mask(causal=False)
    start = rows.start
    if rows.N_Q == 1 and (isinstance(start, Tensor) or start + 1 < rows.N_KV):
        # a decoding step in a static cache, of constant shapes: it may be compiled, so the length stays on the device
        lengths = torch.zeros(rows.B, dtype=torch.int32, device=rows.device) + start + 1
        return Mask(rows.causal, rows.window, lengths=lengths.to(torch.int32))
    if not isinstance(start, Tensor) and start + rows.N_Q > rows.N_KV:
        raise ValueError(
            f"past_key_values has room for {rows.N_KV} tokens, and this call brings tokens {start} to "
            f"{start + rows.N_Q - 1}: make a larger cache"
        )
    if start + rows.N_Q != rows.N_KV:
        raise NotImplementedError(
            f"{rows.N_Q} queries from position {start} of {rows.N_KV} keys: use attn_implementation='sdpa'"
        )
    if rows.window is None and rows.keys is None and rows.N_Q in (1, rows.N_KV):
        return None
    return Mask(rows.causal, rows.window, rows.keys)


def _padded(rows: Rows, padding: Tensor, kv_offset: int) -> Mask | None:
    """`padding` (B, N): True for a token; its columns from kv_offset on are the keys."""
    seen = padding[:, kv_offset : kv_offset + rows.N_KV]
    seen = torch.nn.functional.pad(seen, (0, rows.N_KV - seen.shape[1]))
    column = torch.arange(rows.N_KV, device=seen.device)
    end_of_all = torch.full_like(column[:1], rows.N_KV)
    if rows.positional:  # what comes after the last query is no token yet
        end_of_all = (end_of_all * 0 + rows.start + rows.N_Q).clamp(max=rows.N_KV)
        seen = seen & (column < end_of_all)
    count = seen.sum(1)
    end = torch.where(seen, column + 1, 0).amax(1)
    first = torch.where(seen, column, rows.N_KV).amin(1).minimum(end)
    facts = torch.stack([(count == end_of_all).all(), (count == end - first).all(), padding.all()])
    # the one synchronisation of a forward; transformers' sdpa mask has it, too
    no_padding, no_gaps, none_anywhere = facts.tolist()
    if no_padding:
        return _unpadded(rows) or (None if none_anywhere else Mask(rows.causal))
    if no_gaps:
        return _sequences(rows, first, end)
    if rows.left is not None:
        if rows.N_Q > 1 or not rows.causal:
            raise NotImplementedError(
                "attention_mask has padding between tokens, across which 'fulmen' cannot count a sliding window: pad "
                "on the left, or use attn_implementation='sdpa'"
            )
        seen = seen & (column >= rows.start - rows.left)  # one query: its window is a matter of keys alone
        rows, count = rows._replace(left=None), seen.sum(1)
    order_k, order_q = _tokens_first(seen), None
    q_count = torch.full_like(count, rows.N_Q)
    if rows.positional:
        asking = seen.gather(1, (torch.arange(rows.N_Q, device=seen.device) + rows.start).expand(rows.B, -1))
        order_q, q_count = _tokens_first(asking), asking.sum(1)
    zero = torch.zeros_like(count)
    offsets = _packed_offsets(rows, zero, q_count, zero, count)
    return Mask(rows.causal, None, rows.keys, *offsets, order_q=order_q, order_k=order_k)


def _tokens_first(seen: Tensor) -> Tensor:
    return torch.argsort((~seen).to(torch.uint8), dim=1, stable=True)


def _sequences(rows: Rows, first: Tensor, end: Tensor) -> Mask:
    """Row b's tokens are keys first[b] to end[b] and the queries that stand there; (B,) each."""
    q_first, q_end = torch.zeros_like(first), torch.full_like(first, rows.N_Q)
    if rows.positional:
        q_first, q_end = (first - rows.start).clamp(0, rows.N_Q), (end - rows.start).clamp(0, rows.N_Q)
    return Mask(rows.causal, rows.window, rows.keys, *_packed_offsets(rows, q_first, q_end, first, end))


def _packed_offsets(rows: Rows, q_first: Tensor, q_end: Tensor, first: Tensor, end: Tensor) -> tuple[Tensor, Tensor]:
    """cu_seqlens_q and cu_seqlens_k of three sequences per row and two at the end: see the top of the file."""
    row = torch.arange(rows.B, device=first.device)
    q_first, q_end = q_first + row * rows.N_Q, q_end + row * rows.N_Q
    first, end = first + row * rows.N_KV, end + row * rows.N_KV
    zero = first.new_zeros(1)
    before = torch.cat([zero, end[:-1]])
    q_total, k_total = zero + rows.B * rows.N_Q, zero + rows.B * rows.N_KV
    cu_seqlens_q = torch.cat([zero, torch.stack([q_first, q_first, q_end], 1).flatten(), q_total, q_total])
    cu_seqlens_k = torch.cat([zero, torch.stack([before, first, end], 1).flatten(), end[-1:], k_total])
    return cu_seqlens_q.to(torch.int32), cu_seqlens_k.to(torch.int32)


def _packed(rows: Rows, sequence_ids: Tensor) -> Mask:
    """Several sequences in a row of the batch, which transformers finds by their position_ids."""
    starts = torch.ones_like(sequence_ids, dtype=torch.bool)
    starts[:, 1:] = sequence_ids[:, 1:] != sequence_ids[:, :-1]
    total = starts.numel()
    cu_seqlens = torch.nn.functional.pad(starts.flatten().nonzero()[:, 0], (0, 1), value=total).to(torch.int32)
    return Mask(rows.causal, rows.window, None, cu_seqlens, cu_seqlens, packed=True)


# ------------------------------------------------------------------------------------------- attention


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Mask | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    backend: str = "auto",
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: q, k, v (B, heads, N, head dim) to (B, N, H, E), and no weights."""
    _refuse(attention_mask, dropout, kwargs)
    if s_aux is not None and s_aux.dtype not in (query.dtype, torch.float32):
        s_aux = s_aux.float()
    options: dict[str, Any] = {"sinks": s_aux, "backend": backend}
    options["softcap"] = float(softcap) if softcap else None  # numbers of a configuration may be numpy's
    options["scale"] = None if scaling is None else float(scaling)
    crosses = "Cross" in type(module).__name__  # its keys are another sequence's
    mask = None if attention_mask is None else _fitting(attention_mask, query, key)
    if mask is None:  # the model made none
        causal = bool(getattr(module, "is_causal", not crosses) if is_causal is None else is_causal)
        mask = _plain_mask(query, key, causal, sliding_window, kwargs)
    elif mask.plain:
        mask = _plain_mask(query, key, True, None, kwargs)
    told = mask.packed and kwargs.get("cu_seq_lens_q") is not None
    if (mask.cu_seqlens_q is None or told) and not crosses:
        mask = _with_packed(mask, query, kwargs)
    options |= {"causal": mask.causal, "window": mask.window}
    if mask.keys is not None:
        key, value = key[:, :, : mask.keys], value[:, :, : mask.keys]
    if mask.lengths is not None and needs_gradient((query, key, value, s_aux)):  # attention over a cache has none
        ones = torch.ones_like(mask.lengths)
        offsets = Counts(ones.long(), mask.lengths.long()).offsets(1, key.shape[2])
        mask = dataclasses.replace(mask, cu_seqlens_q=offsets[0], cu_seqlens_k=offsets[1], lengths=None)
    if mask.cu_seqlens_q is None:
        o = flash_attention(query, key, value, kv_lengths=mask.lengths, **options)
    else:
        options |= {"cu_seqlens_q": mask.cu_seqlens_q, "cu_seqlens_k": mask.cu_seqlens_k}
        q, k, v = _reordered(query, mask.order_q), _reordered(key, mask.order_k), _reordered(value, mask.order_k)
        o = many_rows(flash_attention(one_row(q), one_row(k), one_row(v), **options), query.shape[0], query.shape[2])
        if mask.order_q is not None:
            o = _reordered(o, torch.argsort(mask.order_q, dim=1))
    return o.transpose(1, 2).contiguous(), None


def _fitting(mask: Mask, q: Tensor, k: Tensor) -> Mask:
    """The mask for these queries and keys: see the top of the file."""
    sizes = (q.shape[0], q.shape[2], k.shape[2])
    if mask.sizes is None or mask.sizes == sizes:
        return mask
    (B, N_Q, N_KV), (function, padding) = sizes, mask.made_of or (None, None)
    if padding is not None and padding.shape == (B, N_KV) and mask.sizes[:2] == (B, N_Q):
        return make_mask(B, N_Q, N_KV, N_KV - N_Q, 0, function, padding, k.device)
    raise NotImplementedError(
        f"attention_mask was made for (B, N_Q, N_KV) = {mask.sizes}, and this layer has {sizes}: transformers measured "
        "another layer's cache, so 'fulmen' cannot tell padding from tokens; use batches without padding"
    )


def _reordered(x: Tensor, order: Tensor | None) -> Tensor:
    return x if order is None else torch.take_along_dim(x, order[:, None, :, None], dim=2)


def _plain_mask(q: Tensor, k: Tensor, causal: bool, sliding_window: int | None, kwargs: dict[str, Any]) -> Mask:
    """Without padding: causal or not, in any number of keys."""
    N_Q, N_KV = q.shape[2], k.shape[2]
    window = None
    if sliding_window is not None and sliding_window < N_KV:
        if not causal:
            raise ValueError("attention_mask is missing: sliding_window alone does not say how far a query sees ahead")
        window = (int(sliding_window) - 1, None)
    if causal and N_Q not in (1, N_KV) and kwargs.get("cu_seq_lens_q") is None:
        raise ValueError(
            f"attention_mask is missing: {N_Q} causal queries and {N_KV} keys do not say where the queries stand"
        )
    return Mask(causal, window)


def _with_packed(mask: Mask, q: Tensor, kwargs: dict[str, Any]) -> Mask:
    """The mask within each of the packed sequences that the model was told of, if its mask function was not."""
    starts = packing.offsets(q.transpose(1, 2), kwargs)
    if starts is None:
        return mask
    ends = kwargs.get("cu_seq_lens_k")
    ends = starts if ends is None else ends.to(torch.int32)
    return dataclasses.replace(mask, cu_seqlens_q=starts, cu_seqlens_k=ends)


def _refuse(attention_mask: Any, dropout: float, kwargs: dict[str, Any]) -> None:
    if attention_mask is not None and not isinstance(attention_mask, Mask):
        got = tuple(attention_mask.shape) if isinstance(attention_mask, Tensor) else type(attention_mask).__name__
        raise NotImplementedError(
            f"attention_mask {got} is not one that 'fulmen' made: give the model a (B, N) padding mask or None, or use "
            "attn_implementation='sdpa' or 'eager' for masks of your own"
        )
    if dropout:
        raise NotImplementedError(
            f"dropout={dropout}: 'fulmen' has no attention dropout. A model's modules read it from the config when "
            "they are built: build it with attention_dropout=0, or set module.attention_dropout = 0.0 on each of them; "
            "or use attn_implementation='sdpa'"
        )
    for name, instead in _UNSUPPORTED.items():
        x = kwargs.get(name)
        if x is not None and x is not False:
            raise NotImplementedError(f"{name} is not supported by 'fulmen': use attn_implementation={instead}")


_UNSUPPORTED = {
    "output_attentions": "'eager'",
    "position_bias": "'sdpa' or 'eager'",
    "head_mask": "'eager'",
    "cache": "'sdpa' (paged caches)",
    "block_table": "'flash_attention_2' (paged caches)",
    "indices": "'eager' (sparse attention)",
    "block_indices": "'eager' (sparse attention)",
}
