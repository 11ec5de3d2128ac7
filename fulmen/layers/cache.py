"""Caches: what a layer keeps between the calls of a generation. Keys and values, latents, or a state.

    cache = KVCache()                     # one for each layer
    y = layer(prompt, cache=cache)        # then token by token: y = layer(token, cache=cache)

`KVCache` and `LatentCache` hold tokens. Without `max_length` they grow, by doubling; with it they are allocated once,
at the first call, and never move. `append` returns everything there is, as views. Under autograd a growing cache
concatenates instead of writing in place; a preallocated one refuses.

**Rows of different lengths.** Each row of the batch may have its own number of tokens. A layer that is given a padding
mask brings the tokens of x to the front and tells `append` how many there are (`counts`). A row's tokens lie without
gaps at the start of its memory, whichever side was padded, and the next ones are written right after. `lengths` (B,) is
on the device; it is None as long as all rows have `length` tokens. `length` is on the host: the most any row can have.
So nothing synchronises.

**Steps in a CUDA graph.** A preallocated cache counts its tokens on the device, too, in `ends` (B,), which never moves.
A decoding step reads nothing else, so that it can be captured. Replays change `ends` and the memory alone. Once a step
was captured, `crop`, `reorder` and calls of the layer first take `length` and `lengths` from `ends` (`sync`), for which
the host waits.

**One cache for each layer.** A cache refuses a layer other than the one that wrote its tokens. An empty cache (new,
after `reset` or `crop(0)`) takes any layer. A copy of the layer may continue with the cache, and a copy of the cache
takes any layer until it is written. Compiled calls do not check: layers that share a graph would need one each.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from fulmen.boundary import is_capturing, is_plain_eager, require_tensors
from fulmen.layers.inputs import whole

if TYPE_CHECKING:
    from typing_extensions import Self

    from fulmen.layers.weights import AttentionLayer


class End(NamedTuple):
    """How many tokens of a cache's memory count, and that memory."""

    length: int
    lengths: Tensor | None
    held: tuple[Tensor, ...]


class Step(NamedTuple):
    """Where a decoding step reads and writes tokens. All of it is on the device, so that the step can be captured.

    memory  tensors (B, capacity, ...), or (pages, page, ...) with a table
    begin   int32 (B,): tokens of each row before the step
    end     int32 (B,): and after it
    table   None, or int32 (B, pages of a row); -1, as in all of an empty row: no page, and nothing is written
    limit   the most tokens a row can have
    """

    memory: tuple[Tensor, ...]
    begin: Tensor
    end: Tensor
    table: Tensor | None
    limit: int

    def positions(self, N: int) -> Tensor:
        """int64 (B, N): where the step's tokens stand, for RoPE; those beyond the limit are not written."""
        place = self.begin.long()[:, None] + torch.arange(N, device=self.begin.device)
        return place.clamp(max=self.limit - 1)


class Written:
    """A cache that knows the layer that wrote its tokens; see the top of the file."""

    length: int
    writer: int | None = None  # the layer's number; None: nobody, or not known

    def __getstate__(self) -> dict[str, Any]:
        """Of a copy, or in a file: where that is read layers have other numbers."""
        return {name: value for name, value in self.__dict__.items() if name != "writer"}

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        new = self.__class__.__new__(self.__class__)
        with outside_inference():
            new.__dict__.update(copy.deepcopy(self.__getstate__(), memo))
        return new

    def sync(self) -> None:
        """Brings `length` and `lengths` up to what is counted on the device, if anything is."""

    def check_writer(self, layer: AttentionLayer) -> None:
        if torch.compiler.is_compiling() or self.writer in (None, layer.number):
            return
        raise ValueError(
            f"cache holds {self.length} tokens of another layer: give each layer a cache of its own, or call reset() "
            "before another layer takes it (one with the same weights can go on with a copy.deepcopy of it)"
        )

    def _note_writer(self, layer: AttentionLayer | None) -> None:
        if layer is not None and not torch.compiler.is_compiling():
            self.writer = layer.number if self.length else None


class TokenCache(Written):
    """Tensors (B, N, ...) that grow along N together; see the top of the file."""

    def __init__(self, max_length: int | None = None) -> None:
        self.max_length = None if max_length is None else whole("max_length", max_length)
        self.length = 0
        self.lengths: Tensor | None = None
        self.ends: Tensor | None = None
        self.captured = False  # whether a graph may have changed `ends`
        self._held: tuple[Tensor, ...] = ()

    @property
    def capacity(self) -> int:
        """Tokens there is memory for."""
        return self._held[0].shape[1] if self._held else 0

    def reset(self) -> None:
        """Drops every token; a preallocated cache keeps its memory for a batch of the same kind."""
        self.length, self.lengths, self.writer = 0, None, None
        if self.max_length is None:
            self._held = ()
        self._count()

    def sync(self) -> None:
        """Takes `length` and `lengths` from the device, after replays of a captured step; the host waits for it."""
        if torch.compiler.is_compiling() or not self.captured or self.ends is None or is_capturing(self.ends.device):
            return
        ends = self.ends.clamp_(max=self.max_length).tolist()  # tokens beyond it were dropped
        self.length = max(ends, default=0)
        self.lengths = self.ends.long() if len(set(ends)) > 1 else None

    def crop(self, length: int) -> None:
        """Keeps the first `length` tokens of each row; if negative, drops that many of each row's last ones."""
        self.sync()
        length = whole("length", length, low=None)
        if not -self.length <= length <= self.length:
            raise ValueError(f"length={length}: the cache has {self.length} tokens")
        lengths = self.lengths
        if lengths is not None:
            lengths = (lengths + length if length < 0 else lengths.clamp(max=length)).clamp(min=0)
        self.advance(End(self.length + length if length < 0 else length, lengths, self._held))

    def reorder(self, indices: Tensor | Sequence[int]) -> None:
        """Row i becomes what row indices[i] was, as in beam search; there may be more or fewer rows than before."""
        self.sync()
        indices = _checked_indices(indices, self._held[0] if self.length else None)
        if not self.length:
            return
        with outside_inference():
            moved = tuple(t[:, : self.length].index_select(0, indices) for t in self._held)
            lengths = None if self.lengths is None else self.lengths.index_select(0, indices)
            stays = self.max_length is not None and indices.shape[0] == self._held[0].shape[0]
            if self.max_length is not None and not stays:
                moved = tuple(_room(t, self.max_length) for t in moved)
            if stays:  # memory that a captured step reads
                for t, new in zip(self._held, moved, strict=True):
                    t[:, : self.length] = new
            else:
                self._held = moved
            self.lengths = lengths
        self._count()

    def advance(self, end: End, layer: AttentionLayer | None = None) -> None:
        """Makes the tokens last offered part of the cache; `layer` is the one that wrote them, if any."""
        self.length, self.lengths, self._held = end
        if not self.length:
            self.lengths = self.writer = None  # no row has any
        self._note_writer(layer)
        self._count()

    def at(self, *new: Tensor) -> Step:
        """Where a preallocated cache takes tokens like `new` (B, N, ...), in a step that the host does not count."""
        N = new[0].shape[1]
        held = self._memory(new, self.length + N)
        assert self.ends is not None
        return Step(held, self.ends, self.ends + N, None, held[0].shape[1])

    def extend(self, N: int, counts: Tensor | None, layer: AttentionLayer) -> None:
        """Counts N tokens more, or counts[b] in row b, which were written where `at` said."""
        assert self.ends is not None
        self.ends.add_(N if counts is None else counts)
        if not torch.compiler.is_compiling() and is_capturing(self.ends.device):
            self.captured = True  # and nothing is written before the first replay
            return
        if counts is not None or self.lengths is not None:
            self.lengths = self.ends.long()
        self.length += N
        self._note_writer(layer)

    def _count(self) -> None:
        """Brings `ends` up to `length` and `lengths`."""
        if self.max_length is None or not self._held:
            return
        held = self._held[0]
        if self.ends is None or self.ends.shape[0] != held.shape[0] or self.ends.device != held.device:
            with outside_inference():
                self.ends = torch.empty(held.shape[0], dtype=torch.int32, device=held.device)
        if self.lengths is None:
            self.ends.fill_(self.length)
        else:
            self.ends.copy_(self.lengths)

    def _offer(self, new: tuple[Tensor, ...], counts: Tensor | None) -> tuple[tuple[Tensor, ...], End]:
        """Writes new (B, N, ...) after the cache's tokens; they count from the call of `advance` with the end on.

        Returns all tokens (the whole memory where rows differ in length) and the end.
        """
        N = new[0].shape[1]
        end = self.length + N
        held = self._memory(new, end)
        if torch.is_grad_enabled() and any(t.requires_grad for t in (*new, *held)):
            held = self._concatenated(held, new)
        else:
            if not held or end > held[0].shape[1]:
                held = self._grown(held, new, end)
            self._write(held, new)
        if counts is None and self.lengths is None:
            return tuple(t[:, :end] for t in held), End(end, None, held)
        return held, End(end, _counted_on(self.length, self.lengths, N, counts), held)

    def _memory(self, new: tuple[Tensor, ...], end: int) -> tuple[Tensor, ...]:
        """The memory that holds the tokens and takes new ones; an empty cache drops memory that does not fit."""
        if self.max_length is not None:
            if end > self.max_length:
                raise ValueError(
                    f"the cache is too small: it has {self.length} tokens of max_length={self.max_length}, and "
                    f"{end - self.length} more come"
                )
            if torch.is_grad_enabled() and any(t.requires_grad for t in new):
                raise NotImplementedError(
                    "a preallocated cache is written in place, which autograd cannot follow: generate under "
                    "torch.no_grad() or torch.inference_mode(), or let the cache grow (max_length=None)"
                )
        for held, t in zip(self._held, new, strict=False):
            same_rows = held.shape[:1] + held.shape[2:] == t.shape[:1] + t.shape[2:]
            if same_rows and held.dtype == t.dtype and held.device == t.device:
                continue
            if not self.length:
                return ()
            if not same_rows:
                raise ValueError(
                    f"the cache holds {_brief(held)} and is given {_brief(t)}: same batch and heads are needed; "
                    "call reset() before another batch"
                )
            raise ValueError(
                f"the cache holds {held.dtype} on {held.device} and is given {t.dtype} on {t.device}; call reset() "
                "before another batch"
            )
        return self._held

    def _grown(self, held: tuple[Tensor, ...], new: tuple[Tensor, ...], end: int) -> tuple[Tensor, ...]:
        size = self.max_length or max(end, 2 * held[0].shape[1] if held else 0)
        with outside_inference():
            return tuple(_room(t[:, : self.length].detach(), size) for t in held or [t[:, :0] for t in new])

    def _write(self, held: tuple[Tensor, ...], new: tuple[Tensor, ...]) -> None:
        N = new[0].shape[1]
        if self.lengths is None:
            for t, more in zip(held, new, strict=True):
                t[:, self.length : self.length + N] = more
            return
        rows, columns = self._places(N)
        for t, more in zip(held, new, strict=True):
            t[rows, columns] = more

    def _concatenated(self, held: tuple[Tensor, ...], new: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """As `_write`, but not in place: autograd follows it."""
        N = new[0].shape[1]
        old = [t[:, : self.length] for t in held or [t[:, :0] for t in new]]
        joined = tuple(torch.cat([a, b], 1) for a, b in zip(old, new, strict=True))
        if self.lengths is None:
            return joined
        return tuple(a.index_put(self._places(N), b) for a, b in zip(joined, new, strict=True))

    def _places(self, N: int) -> tuple[Tensor, Tensor]:
        assert self.lengths is not None
        row = torch.arange(self.lengths.shape[0], device=self.lengths.device)
        return row[:, None], self.lengths[:, None] + torch.arange(N, device=row.device)


class KVCache(TokenCache):
    """Keys and values of one layer."""

    def append(self, k: Tensor, v: Tensor, counts: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """k (B, H_KV, N, D), v (B, H_KV, N, E): the next tokens, rotated already. Returns all k and v.

        counts  int64 (B,): only the first counts[b] of row b's N tokens are tokens. From then on rows differ in length,
                `lengths` tells how many tokens of what is returned count, and all the cache's memory is returned.
        """
        _check_new("k", "v", "(B, H_KV, N, D) and (B, H_KV, N, E)", 4, k, v, counts)
        self.sync()
        k, v, end = self.offer(k, v, counts)
        self.advance(end)
        return k, v

    def offer(self, k: Tensor, v: Tensor, counts: Tensor | None = None) -> tuple[Tensor, Tensor, End]:
        """As `append`, but the cache changes with `advance(end)` only: a call that fails in between leaves it as is."""
        (k, v), end = self._offer((k.transpose(1, 2), v.transpose(1, 2)), counts)
        return k.transpose(1, 2), v.transpose(1, 2), end


class LatentCache(TokenCache):
    """Latents and rotated keys of one latent-attention layer, side by side in one tensor (B, N, R + P)."""

    def append(self, latent: Tensor, k_rope: Tensor, counts: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """latent (B, N, R), k_rope (B, N, P): the next tokens. Returns all of both; `counts` as in `KVCache`."""
        _check_new("latent", "k_rope", "(B, N, R) and (B, N, P)", 3, latent, k_rope, counts)
        self.sync()
        kv, end = self.offer(torch.cat([latent, k_rope], 2), counts)
        self.advance(end)
        return kv[..., : latent.shape[2]], kv[..., latent.shape[2] :]

    def offer(self, kv: Tensor, counts: Tensor | None = None) -> tuple[Tensor, End]:
        """As `KVCache.offer`, of [latent | k_rope] (B, N, R + P)."""
        (kv,), end = self._offer((kv,), counts)
        return kv, end


class RecurrentCache(Written):
    """States (B, H, D, E) in fp32, fp64 of fp64 inputs, and how many tokens went into them."""

    captured_how = ""  # what to do instead of a call that cannot be captured

    def __init__(self) -> None:
        self.state: Tensor | None = None
        self.length = 0
        self.lengths: Tensor | None = None  # (B,), where rows differ

    def update(self, state: Tensor, N: int, counts: Tensor | None = None, layer: AttentionLayer | None = None) -> None:
        """Sets the state after N more tokens, or counts[b] more in row b; `layer` computed it, if one did."""
        if self.length and not torch.compiler.is_compiling() and is_capturing(state.device):
            raise NotImplementedError(
                f"a {type(self).__name__} in a CUDA graph: every replay would start from the same state; "
                f"{self.captured_how}"
            )
        if counts is not None or self.lengths is not None:
            self.lengths = _counted_on(self.length, self.lengths, N, counts)
        self.state, self.length = state, self.length + N
        self._note_writer(layer)

    def check_state(self, x: Tensor) -> None:
        """Raises if the state, if there is one, cannot go on with an x of this dtype and device."""
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        if self.state is not None and (self.state.dtype != wide or self.state.device != x.device):
            raise ValueError(
                f"cache holds states in {self.state.dtype} on {self.state.device}, and x, {x.dtype} on {x.device}, "
                f"needs {wide} there: call reset() before a batch of another kind"
            )

    def reset(self) -> None:
        self.state, self.length, self.lengths, self.writer = None, 0, None, None

    def reorder(self, indices: Tensor | Sequence[int]) -> None:
        """Row i becomes what row indices[i] was."""
        indices = _checked_indices(indices, self.state)
        state, lengths = (None if t is None else t.index_select(0, indices) for t in (self.state, self.lengths))
        self.state, self.lengths = state, lengths

    def crop(self, length: int) -> None:
        if whole("length", length, low=None) == self.length:
            return
        raise NotImplementedError(
            f"crop({length}): a state is a decayed sum over all {self.length} tokens, of which none can be taken out; "
            "keep a copy of the state from before, or start again with reset()"
        )


class StateCache(RecurrentCache):
    """The state of one lightning layer, fp32 (B, H, D, E), and how many tokens went into it."""

    captured_how = "use a pool, by new_pool()"


class MambaCache(RecurrentCache):
    """The state of one Mamba-2 layer, and the last inputs of its convolution, (B, taps - 1, channels).

    A step of one token updates both in place, so that it can be captured in a CUDA graph; replays are not counted.
    """

    captured_how = "capture steps of one token, without gradients or a mask"

    def __init__(self) -> None:
        super().__init__()
        self.conv: Tensor | None = None

    def update(
        self, state: Tensor, N: int, counts: Tensor | None = None, layer: AttentionLayer | None = None,
        conv: Tensor | None = None,
    ) -> None:  # fmt: skip
        """As `RecurrentCache.update`; conv: the convolution's last inputs after these tokens."""
        super().update(state, N, counts, layer)
        self.conv = conv

    def count(self, N: int, layer: AttentionLayer) -> None:
        """Counts N tokens that were taken in in place; not while a graph is captured, when nothing runs."""
        assert self.state is not None
        if not torch.compiler.is_compiling() and is_capturing(self.state.device):
            return
        if self.lengths is not None:
            self.lengths = self.lengths + N
        self.length += N
        self._note_writer(layer)

    def reset(self) -> None:
        super().reset()
        self.conv = None

    def reorder(self, indices: Tensor | Sequence[int]) -> None:
        conv = None if self.conv is None else self.conv.index_select(0, _checked_indices(indices, self.conv))
        super().reorder(indices)
        self.conv = conv


def _check_new(name: str, other: str, shapes: str, ndim: int, x: Tensor, y: Tensor, counts: Tensor | None) -> None:
    """The two tensors that `append` is given, of such names and shapes, and counts."""
    are_tensors = isinstance(x, Tensor) and isinstance(y, Tensor)
    if not are_tensors:
        require_tensors({name: x, other: y}, {})
    if not x.ndim == y.ndim == ndim or x.shape[:-1] != y.shape[:-1]:
        raise ValueError(f"{name} has shape {tuple(x.shape)} and {other} {tuple(y.shape)}, must be {shapes}")
    if y.dtype != x.dtype or y.device != x.device:
        raise ValueError(f"{other} is {y.dtype} on {y.device}, must be {x.dtype} on {x.device}, as {name}")
    if counts is not None:
        _check_counts(counts, name, x)


def _check_counts(counts: Tensor, name: str, x: Tensor) -> None:
    """How many tokens of x (B, ..., N, .) count; the values on the CPU only."""
    require_tensors({"counts": counts}, {})
    B, N = x.shape[0], x.shape[-2]
    if counts.dtype != torch.int64 or tuple(counts.shape) != (B,) or counts.device != x.device:
        raise ValueError(
            f"counts is {counts.dtype} {tuple(counts.shape)} on {counts.device}, must be torch.int64 (B,) = ({B},) on "
            f"{x.device}"
        )
    if counts.device.type == "cpu" and is_plain_eager(counts) and B:
        low, high = (int(n) for n in torch.aminmax(counts))
        if low < 0 or high > N:
            raise ValueError(f"counts are {low} to {high}: must be 0 to N={N}, the tokens of {name} {tuple(x.shape)}")


def _counted_on(length: int, lengths: Tensor | None, N: int, counts: Tensor | None) -> Tensor:
    """Tokens of each row after N more, or counts[b] more; for rows that differ before or after."""
    if lengths is not None:
        return lengths + (N if counts is None else counts)
    assert counts is not None, "rows that were and stay alike are not counted"
    return counts + length


def _checked_indices(indices: Tensor | Sequence[int], held: Tensor | None) -> Tensor:
    """`indices` as a tensor on the device of `held`; that the rows exist is checked on the CPU only."""
    if isinstance(indices, list | tuple):
        numbers = [whole(f"indices[{i}]", index, low=None) for i, index in enumerate(indices)]
        indices = torch.tensor(numbers, dtype=torch.int64, device=None if held is None else held.device)
    if not isinstance(indices, Tensor):
        raise ValueError(f"indices is a {type(indices).__name__}, must be a tensor or a list of ints")
    if indices.ndim != 1 or indices.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"indices is {indices.dtype} {tuple(indices.shape)}, must be int64 or int32 (rows,)")
    if held is None:
        return indices
    if indices.device != held.device:
        raise ValueError(f"indices is on {indices.device}, must be on {held.device}, where the cache is")
    if indices.device.type == "cpu" and is_plain_eager(indices) and indices.numel():
        low, high = (int(x) for x in torch.aminmax(indices))
        if low < 0 or high >= held.shape[0]:
            raise ValueError(f"indices are {low} to {high}: the cache has rows 0 to {held.shape[0] - 1}")
    return indices


def _room(x: Tensor, size: int) -> Tensor:
    """A copy of x (B, N, ...) with `size` tokens, zero after its own: unused memory must hold no NaN."""
    out = x.new_zeros(x.shape[0], size, *x.shape[2:])
    out[:, : x.shape[1]] = x
    return out


def _brief(x: Tensor) -> str:
    return f"(B={x.shape[0]}, N, {', '.join(map(str, x.shape[2:]))})"


def outside_inference() -> contextlib.AbstractContextManager[object]:
    """For allocations: memory made in inference mode cannot be written outside of it."""
    if torch.compiler.is_compiling() or not torch.is_inference_mode_enabled():
        return contextlib.nullcontext()
    return torch.inference_mode(False)
