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

from fulmen.layers.cache import Step
from fulmen.layers.sequences import MAX_DRAFT, Sequences
from fulmen.lightning.op import lightning_attention_with_state
from fulmen.step.op import lightning_step

if TYPE_CHECKING:
    from fulmen.layers.rotary import Rotary
    from fulmen.layers.weights import AttentionLayer


class Pool:
    """What all pools do; `Sequences` calls the three methods below where a pool has such memory."""

    writer: int | None = None  # the number of the layer that uses it

    def __init__(self, sequences: Sequences) -> None:
        self.sequences = sequences
        sequences.register(self)

    def check_writer(self, layer: AttentionLayer) -> None:
        if torch.compiler.is_compiling():
            return
        if self.writer is None:
            self.writer = layer.number
        elif self.writer != layer.number:
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
    """Pages of tokens, and one more, which empty rows write to and nobody reads."""

    memory: tuple[Tensor, ...]

    def __init__(self, sequences: Sequences) -> None:
        super().__init__(sequences)
        if not sequences.pages:
            raise ValueError("sequences has pages=0, and this layer keeps tokens: give Sequences(..., pages=)")

    def copy_page(self, source: int, target: int) -> None:
        for x in self.memory:
            x[target] = x[source]

    def at(self, *new: Tensor) -> Step:
        """Where the tokens like `new` (B, N, ...) that `Sequences.step` announced are read and written."""
        B, N = new[0].shape[:2]
        self.sequences.check_call(B, N)
        lengths, ends, _, _, table = self.sequences.first(B)
        return Step(self.memory, lengths, ends, table, self.sequences.max_length)


class KVPool(PagedPool):
    """Keys and values: k (pages + 1, H_KV, page_size, D) and v (pages + 1, H_KV, page_size, E)."""

    def __init__(
        self, sequences: Sequences, num_kv_heads: int, head_dim: int, value_dim: int | None = None, *,
        device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__(sequences)
        shape = (sequences.pages + 1, num_kv_heads, sequences.page_size)
        k = torch.zeros(*shape, head_dim, device=device, dtype=dtype)
        v = torch.zeros(*shape, head_dim if value_dim is None else value_dim, device=device, dtype=dtype)
        self.memory = (k.transpose(1, 2), v.transpose(1, 2))  # as `Step` takes them


class LatentPool(PagedPool):
    """Latents and rotated keys side by side: kv (pages + 1, page_size, R + P)."""

    def __init__(
        self, sequences: Sequences, size: int, *, device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__(sequences)
        self.memory = (torch.zeros(sequences.pages + 1, sequences.page_size, size, device=device, dtype=dtype),)


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
        super().__init__(sequences)
        if state_dtype is None:
            state_dtype = torch.float64 if dtype == torch.float64 else torch.float32
        if not sequences.slot_count:
            raise ValueError("sequences has slots=0, and this layer keeps states: give Sequences(..., slots=)")
        slots, tokens = sequences.slot_count + 1, (num_kv_heads, MAX_DRAFT)
        self.state = torch.zeros(slots, num_heads, head_dim, value_dim, device=device, dtype=state_dtype)
        self.draft: tuple[Tensor, Tensor] | None = None
        if sequences.drafts:
            k = torch.zeros(slots, *tokens, head_dim, device=device, dtype=dtype)
            self.draft = k, torch.zeros(slots, *tokens, value_dim, device=device, dtype=dtype)
        self.memory = (self.state, *(self.draft or ()))

    def copy_slot(self, source: int, target: int) -> None:
        for x in self.memory:
            x[target] = x[source]

    def clear_slot(self, slot: int) -> None:
        for x in self.memory:
            x[slot] = 0

    def attend(self, q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, scale: float, backend: str) -> Tensor:
        """o (B, H, N, E) of the tokens that `Sequences.step` announced; the states take them in."""
        B, N = q.shape[0], q.shape[2]
        served = self.sequences
        served.check_call(B, N)
        _, _, slots, accepted, _ = served.first(B)
        if N <= MAX_DRAFT:
            options: Any = {} if self.draft is None else {"draft": self.draft, "accepted": accepted}
            return lightning_step(q, k, v, decay, self.state, slots=slots, scale=scale, **options)
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
    k, v = (x.repeat_interleave(group, 1).to(state.dtype) for x in (k, v))
    slope = torch.zeros(state.shape[1], device=state.device) if decay is None else decay.flatten().to(state.dtype)
    count = accepted.clamp(0, k.shape[2])[:, None, None]
    age = count - 1 - torch.arange(k.shape[2], device=k.device)  # (B, 1, T): of each token, at the last one
    weight = torch.where(age >= 0, torch.exp(-slope[:, None] * age.clamp(min=0)), 0.0)
    return state * torch.exp(-slope[:, None] * count)[..., None] + (k * weight[..., None]).mT @ v


def check_positions_of(rope: Rotary | None, sequences: Sequences) -> None:
    """Raises if sequences may grow beyond the positions of `rope`."""
    if rope is not None and rope.max_positions is not None and rope.max_positions < sequences.max_length:
        raise ValueError(f"max_length={sequences.max_length} of Sequences: RoPE has max_positions={rope.max_positions}")
