"""Pools: the memory of one layer for all sequences that are being served. A layer takes a pool as its `cache`.

    served = Sequences(rows=64, max_length=8192, pages=4096, slots=128, device="cuda")
    pools = [layer.new_pool(served) for layer in layers]
    ...
    served.step([a, b, None], 1)                                # in every step, before the layers are called
    y = layer(x, cache=pool)                                    # x (rows, 1, embed_dim)

A pool holds memory, `Sequences` says which of it a row has. Row b of x has the tokens that `Sequences.step` announced
for row b; an empty row's y is of no use. All rows have as many tokens. Tensors keep their shapes and addresses, and
nothing is read on the host, so that a step can be captured in a CUDA graph and replayed while sequences come and go.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fulmen import dispatch
from fulmen.boundary import is_capturing
from fulmen.layers.cache import Step, outside_inference
from fulmen.layers.fused import fused_call
from fulmen.layers.sequences import Sequences, Uncopied
from fulmen.lightning.op import lightning_attention_with_state
from fulmen.step.op import stepped
from fulmen.step.spec import MAX_STEP_TOKENS

if TYPE_CHECKING:
    from typing_extensions import Self

    from fulmen.layers.rotary import Rotary
    from fulmen.layers.weights import AttentionLayer

_note_change = torch._C._increment_version  # so that autograd refuses a backward that saved an earlier state


class Pool(Uncopied):
    """What all pools do; `Sequences` calls the three last methods where a pool has such memory."""

    writer: int | None = None  # the number of the layer that uses it

    def __init__(self, sequences: Sequences, *memory: Tensor) -> None:
        self.sequences, self.memory = sequences, memory
        here, there = memory[0].device, sequences.table.device
        if here != there:
            raise ValueError(f"a pool on {here} of sequences on {there}: give Sequences(..., device={str(here)!r})")
        sequences.register(self)

    def of(self, layer: AttentionLayer) -> Self:
        """This pool, for `layer` alone."""
        self.writer = layer.number
        return self

    def check_writer(self, layer: AttentionLayer) -> None:
        if not torch.compiler.is_compiling() and self.writer not in (None, layer.number):
            raise ValueError("cache is the pool of another layer: give each layer one of its own, by new_pool()")

    @property
    def lengths(self) -> Tensor:
        """int32 (rows,): tokens of each row before the step that `Sequences.step` announced."""
        return self.sequences.lengths

    def copy_page(self, source: int, target: int) -> None:
        pass

    def copy_slot(self, source: int, target: int) -> None:
        pass

    def clear_slot(self, slot: int) -> None:
        pass


class PagedPool(Pool):
    """Pages of tokens: tensors (pages, page_size, ...)."""

    def __init__(self, sequences: Sequences, *memory: Tensor) -> None:
        if not sequences.pages:
            raise ValueError("sequences has pages=0, and this layer keeps tokens: give Sequences(..., pages=)")
        super().__init__(sequences, *memory)

    @property
    def capacity(self) -> int:
        """Tokens a row can have."""
        return self.sequences.max_length

    def copy_page(self, source: int, target: int) -> None:
        for x in self.memory:
            x[target] = x[source]

    def at(self, *new: Tensor) -> Step:
        """Where the tokens like `new` (B, N, ...) that `Sequences.step` announced are read and written."""
        check_held(self.memory, new)
        lengths, ends, _, _, table = self.sequences.first(new[0].shape[0])
        return Step(self.memory, lengths, ends, table, self.capacity)

    def fused(
        self, chain: str, facts: Any, *tensors: Tensor | None, like: tuple[Tensor | None, ...]
    ) -> tuple[Tensor, ...] | None:
        """What a chain of `fused/steps.py` makes of these tensors and of the pages, which it writes to; or None.

        like  as in `fused_call`, without the pages
        """
        x = tensors[0]
        assert x is not None
        begin, _, _, _, table = self.sequences.first(x.shape[0])
        same = tuple(t for t in (*like, *self.memory) if t is not None)
        found = fused_call("steps", chain, facts, *tensors, *self.memory, begin, table, like=same)
        if found is not None:
            _note_change(self.memory)
        return found


def check_held(memory: tuple[Tensor, ...], new: tuple[Tensor, ...]) -> None:
    """Raises unless pages of a pool hold tokens like `new` (B, N, ...)."""
    for held, x in zip(memory, new, strict=True):
        if (held.shape[2:], held.dtype, held.device) != (x.shape[2:], x.dtype, x.device):
            raise ValueError(
                f"the pool holds {held.dtype} {tuple(held.shape[2:])} of a token on {held.device}, and the layer "
                f"has {x.dtype} {tuple(x.shape[2:])} on {x.device}: make the pool by new_pool() when the layer has "
                "its final dtype, device and heads, and call it without autocast"
            )


class KVPool(PagedPool):
    """Keys and values: k (pages, H_KV, page_size, D) and v (pages, H_KV, page_size, E)."""

    def __init__(
        self, sequences: Sequences, num_kv_heads: int, head_dim: int, value_dim: int | None = None, *,
        device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        shape, value_dim = (sequences.pages, num_kv_heads, sequences.page_size), value_dim or head_dim
        self.k, self.v = (_zeros(*shape, size, device=device, dtype=dtype) for size in (head_dim, value_dim))
        super().__init__(sequences, self.k.transpose(1, 2), self.v.transpose(1, 2))  # as `Step` takes them


class LatentPool(PagedPool):
    """Latents and rotated keys side by side: kv (pages, page_size, R + P)."""

    def __init__(
        self, sequences: Sequences, size: int, *, device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        shape = (sequences.pages, sequences.page_size, size)
        super().__init__(sequences, _zeros(*shape, device=device, dtype=dtype))


class StatePool(Pool):
    """States (slots + 1, H, D, E), fp32 or bf16, one for each living sequence and one that empty rows write to.

    If `sequences` has drafts it also keeps the last tokens' k and v, as `lightning_step` takes them: they enter the
    state at the next step, as far as `Sequences.crop` has not taken them back.
    """

    def __init__(
        self, sequences: Sequences, num_heads: int, num_kv_heads: int, head_dim: int, value_dim: int, *,
        device: torch.device | str | None = None, dtype: torch.dtype | None = None,
        state_dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        if state_dtype is None:
            state_dtype = torch.float64 if dtype == torch.float64 else torch.float32
        if not sequences.slot_count:
            raise ValueError("sequences has slots=0, and this layer keeps states: give Sequences(..., slots=)")
        slots, tokens = sequences.slot_count + 1, (num_kv_heads, MAX_STEP_TOKENS)
        self.state = _zeros(slots, num_heads, head_dim, value_dim, device=device, dtype=state_dtype)
        self.draft: tuple[Tensor, Tensor] | None = None
        if sequences.drafts:
            k = _zeros(slots, *tokens, head_dim, device=device, dtype=dtype)
            self.draft = k, _zeros(slots, *tokens, value_dim, device=device, dtype=dtype)
        self._served = 0  # the last step whose tokens the states have
        super().__init__(sequences, self.state, *(self.draft or ()))

    def copy_slot(self, source: int, target: int) -> None:
        for x in self.memory:
            x[target] = x[source]

    def clear_slot(self, slot: int) -> None:
        for x in self.memory:
            x[slot] = 0

    def attend(self, q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, scale: float, backend: str) -> Tensor:
        """o (B, H, N, E) of the tokens that `Sequences.step` announced; the states take them in.

        backend  of `lightning_attention`. Up to 8 tokens are a `lightning_step`, by its backend of that name or "auto".
        """
        counted = self._counted(q)
        if q.shape[2] <= MAX_STEP_TOKENS:
            o = self._step(q, k, v, decay, scale, backend if backend in dispatch.kernels("step") else "auto")
        else:
            _, _, slots, accepted, _ = self.sequences.first(q.shape[0])
            o = self._attend(q, k, v, decay, scale, backend, slots, accepted)
        if counted:
            self._served = self.sequences.steps
        return o

    def fused(
        self, chain: str, facts: Any, *tensors: Tensor | None, like: tuple[Tensor | None, ...]
    ) -> tuple[Tensor, ...] | None:
        """What a chain of `fused/steps.py` makes of these tensors and of the states, which take its tokens in; or None.

        like  as in `fused_call`
        """
        x, (k, v) = tensors[0], self.draft or (None, None)
        assert x is not None
        counted = self._counted(x)
        _, _, slots, accepted, _ = self.sequences.first(x.shape[0])
        pool = (self.state, slots, k, v, None if k is None else accepted)
        same = tuple(t for t in like if t is not None)
        found = fused_call("steps", chain, facts, *tensors, *pool, like=same)
        if found is not None:
            _note_change(self.memory)
            if counted:
                self._served = self.sequences.steps
        return found

    def _counted(self, q: Tensor) -> bool:
        """Whether the host sees this call; raises if it is the second of one step."""
        served = self.sequences
        counted = not torch.compiler.is_compiling() and not is_capturing(q.device)
        if counted and served.stepped and self._served == served.steps:
            raise ValueError("the layer was called twice after one Sequences.step: its states have the tokens already")
        return counted

    def _step(self, q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, scale: float, backend: str) -> Tensor:
        _, _, slots, accepted, _ = self.sequences.first(q.shape[0])
        return stepped(  # early: the layer's projection came before, and writes no state
            q, k, v, decay, self.state, slots=slots, draft=self.draft,
            accepted=None if self.draft is None else accepted, scale=scale, backend=backend, early=True,
        )  # fmt: skip

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, scale: float, backend: str, slots: Tensor,
        accepted: Tensor,
    ) -> Tensor:  # fmt: skip
        rows = torch.where(slots < 0, self.state.shape[0] - 1, slots).long()
        state = self.state[rows].to(torch.promote_types(self.state.dtype, torch.float32))
        if self.draft is not None:
            state = _taken_in(state, self.draft[0][rows], self.draft[1][rows], accepted, decay)
        o, state = lightning_attention_with_state(q, k, v, decay, initial_state=state, scale=scale, backend=backend)
        self.state[rows] = state.to(self.state.dtype)
        return o


def _taken_in(state: Tensor, k: Tensor, v: Tensor, accepted: Tensor, decay: Tensor | None) -> Tensor:
    """state (B, H, D, E) after the first accepted[b] of k (B, H_KV, T, D) and v (B, H_KV, T, E)."""
    group = state.shape[1] // k.shape[1]
    slope = torch.zeros(state.shape[1], device=state.device) if decay is None else decay.flatten().to(state.dtype)
    count = accepted.clamp(0, k.shape[2])[:, None, None]
    age = count - 1 - torch.arange(k.shape[2], device=k.device)  # (B, 1, T): of each token, at the last one
    taken = (age >= 0)[..., None]
    k, v = (torch.where(taken, x, 0.0).repeat_interleave(group, 1).to(state.dtype) for x in (k, v))  # others: NaN
    weight = torch.exp(-slope[:, None] * age.clamp(min=0))
    return state * torch.exp(-slope[:, None] * count)[..., None] + (k * weight[..., None]).mT @ v


def _zeros(*shape: int, device: torch.device | str | None, dtype: torch.dtype | None) -> Tensor:
    with outside_inference():
        return torch.zeros(shape, device=device, dtype=dtype)


def check_positions_of(rope: Rotary | None, sequences: Sequences) -> None:
    """Raises if sequences may grow beyond the positions of `rope`."""
    if rope is not None and rope.max_positions is not None and rope.max_positions < sequences.max_length:
        raise ValueError(f"max_length={sequences.max_length} of Sequences: RoPE has max_positions={rope.max_positions}")
