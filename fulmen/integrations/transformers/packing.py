"""Packed sequences as transformers announces them: by `cu_seq_lens_q`, or by `position_ids` that start over.

Only the model's forward sees whether there is a padding mask or a cache. So `announce`, a pre-hook of that forward,
reads `position_ids` there, once, and hands the layers a view of that tensor with the offsets on it. The view belongs
to one forward: a layer that is computed again by gradient checkpointing finds its offsets there, whatever came between.
Where the model inside is not given `position_ids`, `leave` puts the offsets on the tokens instead.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from torch import Tensor

from fulmen.boundary import check_offset_values

NAME = "fulmen_offsets"
TOKENS = "fulmen_tokens"  # an argument of layers: see `tell_tokens`


def by_name(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """What a forward of the model is given."""
    if not args:
        return kwargs
    names = ("input_ids",) if len(args) == 1 else _parameters(type(module).forward)
    return {**dict(zip(names, args, strict=False)), **kwargs}


@functools.lru_cache
def _parameters(forward: Any) -> tuple[str, ...]:
    return tuple(inspect.signature(forward).parameters)[1:]


def announce(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A forward pre-hook. As in transformers' own masks, a padding mask or a cache means that nothing is packed.

    In training a model would make a cache unless told otherwise, and mix the sequences: if they are packed it is told.
    Synchronises if there are `position_ids` and neither mask nor cache, on a GPU, as transformers does.
    """
    given = by_name(module, args, kwargs)
    positions = given.get("position_ids")
    if positions is None:
        return None
    untold = module.training and given.get("use_cache") is None and not _has_cache(given)
    packed = given.get("attention_mask") is None and (untold or not will_cache(module, given))
    starts = starts_of(positions) if packed else None
    if starts is None and not hasattr(positions, NAME):
        return None
    args, kwargs = (args, kwargs) if len(args) < 2 else ((), given)
    kwargs = {**kwargs, "position_ids": _marked(positions, starts)}
    return args, {**kwargs, "use_cache": False} if starts is not None and untold else kwargs


@torch.compiler.disable
def _marked(positions: Tensor, starts: Tensor | None) -> Tensor:
    view = positions.view(positions.shape)
    setattr(view, NAME, starts)
    return view


def leave_cache(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A forward pre-hook of models with layers that keep a state, which belongs to one sequence.

    With several in `cu_seq_lens_q` the model makes no cache; if it is given one, or told to make one, this raises.
    """
    given = by_name(module, args, kwargs)
    offsets = given.get("cu_seq_lens_q")
    if not isinstance(offsets, Tensor) or offsets.numel() <= 2:
        return None
    if _has_cache(given) or given.get("use_cache"):
        raise ValueError(
            f"cu_seq_lens_q packs {offsets.numel() - 1} sequences in a row, and a cache keeps one state for a row: "
            "pass use_cache=False, and no cache"
        )
    args, kwargs = (args, kwargs) if len(args) < 2 else ((), given)
    return args, {**kwargs, "use_cache": False}


def check_mask(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """A forward pre-hook of models with layers that keep a state, which are given the mask as it is."""
    given = by_name(module, args, kwargs)
    mask, tokens = given.get("attention_mask"), tokens_of(given)
    if not isinstance(mask, Tensor) or tokens is None:
        return
    B, N = tokens.shape[:2]
    fits = mask.ndim == 2 and mask.shape[0] == B and (mask.shape[1] >= N if _has_cache(given) else mask.shape[1] == N)
    if not fits:
        raise ValueError(
            f"attention_mask has shape {tuple(mask.shape)}, and there are (B, N) = {(B, N)} new tokens: give the model "
            "a padding mask of B rows with a column for every token, those in the cache included"
        )


def tell_tokens(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A forward pre-hook of the same models: in a decoding step, which rows bring a token, bool (B, 1), as `TOKENS`.

    transformers hands layers no mask of one token. Nothing is told if every row brings one, which takes a
    synchronisation if the mask is on a GPU; without one, where a graph is made, layers are told always.
    """
    given = by_name(module, args, kwargs)
    mask, tokens = given.get("attention_mask"), tokens_of(given)
    if not isinstance(mask, Tensor) or tokens is None or tokens.shape[1] != 1:
        return None
    last = mask[:, -1:].to(device=tokens.device, dtype=torch.bool)
    if not _makes_graph(last) and bool(last.all()):
        return None
    args, kwargs = (args, kwargs) if len(args) < 2 else ((), given)
    return args, {**kwargs, TOKENS: last}


def _makes_graph(x: Tensor) -> bool:
    return torch.compiler.is_compiling() or (x.is_cuda and torch.cuda.is_current_stream_capturing())


def tokens_of(given: dict[str, Any]) -> Tensor | None:
    """What the model was given: ids (B, N), or embeddings."""
    return next((given[name] for name in ("input_ids", "inputs_embeds") if given.get(name) is not None), None)


def takes_positions(module: Any) -> bool:
    return "position_ids" in _parameters(type(module).forward)


def leave(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """A forward pre-hook of a model around one that it does not hand position_ids on to: offsets go with the tokens."""
    given = by_name(module, args, kwargs)
    tokens = tokens_of(given)
    if tokens is None:
        return
    told = announce(module, (), given)
    starts = offsets(tokens, given if told is None else told[1])
    if starts is not None or hasattr(tokens, NAME):
        setattr(tokens, NAME, starts)


def taken(tokens: Tensor, given: dict[str, Any]) -> Tensor | None:
    """The offsets that `leave` left for this call, or those of `given`."""
    left: Tensor | None = getattr(tokens, NAME, None)
    if left is None:
        return offsets(tokens, given)
    setattr(tokens, NAME, None)  # another call may bring the same tokens without
    return left


def will_cache(module: Any, given: dict[str, Any]) -> bool:
    """Whether a forward of the model with these arguments has a cache, be it one that it makes."""
    if _has_cache(given):
        return True
    use_cache = given.get("use_cache")
    wanted = getattr(module.config, "use_cache", False) if use_cache is None else use_cache
    return bool(wanted) and not (module.training and getattr(module, "gradient_checkpointing", False))


def _has_cache(given: dict[str, Any]) -> bool:
    return given.get("past_key_values") is not None or given.get("cache_params") is not None


@torch.compiler.disable
def starts_of(positions: Tensor) -> Tensor | None:
    """int32 offsets of the sequences, rows laid end to end: one starts with a row, or where positions do not go on.

    None: one in each row.
    """
    if positions.ndim != 2 or positions.shape[1] == 1:
        return None
    starts = torch.ones_like(positions, dtype=torch.bool)
    starts[:, 1:] = positions.diff(dim=1) != 1
    if not bool(starts[:, 1:].any()):
        return None
    return torch.nn.functional.pad(starts.flatten().nonzero()[:, 0], (0, 1), value=starts.numel()).to(torch.int32)


def offsets(x: Tensor, kwargs: dict[str, Any]) -> Tensor | None:
    """int32 offsets of the sequences packed in x (B, N, ...), its rows laid end to end; None: one in each row.

    kwargs  what transformers passes to a layer.
    """
    given = kwargs.get("cu_seq_lens_q")
    if given is not None:
        if not isinstance(given, Tensor) or given.ndim != 1 or given.is_floating_point():
            got = tuple(given.shape) if isinstance(given, Tensor) else type(given).__name__
            raise ValueError(f"cu_seq_lens_q is {got}, must be a tensor of integers, (sequences + 1,)")
        if x.shape[0] != 1:
            raise ValueError(f"cu_seq_lens_q packs sequences along N, so B must be 1; got {tuple(x.shape)}")
        if not torch.compiler.is_compiling():
            check_offset_values("cu_seq_lens_q", given, x.shape[1])
        return given.to(torch.int32)
    for name in ("position_ids", "seq_idx"):  # (B or 1, N)
        told = kwargs.get(name)
        found: Tensor | None = None if told is None else getattr(told, NAME, None)
        if told is not None and found is not None:
            return found if told.shape[0] == x.shape[0] else _for_each_row(found, x)
    return None


def _for_each_row(found: Tensor, x: Tensor) -> Tensor:
    """Offsets for all rows of x, which are packed alike."""
    row = torch.arange(x.shape[0], device=x.device, dtype=torch.int32)[:, None] * x.shape[1]
    return torch.nn.functional.pad((row + found[:-1]).flatten(), (0, 1), value=x.shape[0] * x.shape[1])
