"""Sequences that are being served: which rows, pages and slots they have. Pools of all layers share one `Sequences`.

    served = Sequences(rows=64, max_length=8192, pages=4096, page_size=64, slots=128, device="cuda")
    a = served.new()
    served.step([a], 512)                # the next call of the layers appends 512 tokens to `a`, in row 0
    served.step([a, b, None], 1)         # then one token to each of two rows; row 2 is empty
    c = served.fork(a)                   # shares a's pages; the first write to a shared page copies it
    served.crop(a, a.length - 1)         # takes the last token back
    served.free(a)

All bookkeeping is on the host. A step reads `table`, `lengths`, `ends`, `slots` and `accepted`, tensors on the device
whose shapes and addresses never change, so that a captured CUDA graph serves sequences that come and go. A sequence
takes a slot when it is made and pages when a step needs them. If there are too few, `PoolFull` is raised. A call that
raises, for whatever reason, leaves the books as they were.

A step, then the layers, then whatever else happens to its sequences: where they were forked, cropped or freed in
between, the layers refuse the call. Compiled calls and replays of a graph are not checked.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from collections.abc import Sequence as Several
from typing import Any, Protocol

import torch
from torch import Tensor

from fulmen.flash.spec import is_page
from fulmen.layers.cache import outside_inference
from fulmen.layers.inputs import flag, whole
from fulmen.step.spec import MAX_STEP_TOKENS


class PoolFull(RuntimeError):
    """There are too few free pages or slots; nothing has changed."""


class Pool(Protocol):
    """A pool of one layer: it copies and clears what `Sequences` tells it to."""

    def copy_page(self, source: int, target: int) -> None: ...

    def copy_slot(self, source: int, target: int) -> None: ...

    def clear_slot(self, slot: int) -> None: ...


class Uncopied:
    """Raises if it is copied or pickled: `Sequences`, their pools and their sequences name each other's memory."""

    __slots__ = ()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            f"a {type(self).__name__} cannot be copied or pickled: Sequences and pools share memory on the device; "
            "Sequences.fork copies a sequence"
        )


class Sequence(Uncopied):
    """The tokens of one request: `length` of them, in `pages`; its states are in `slot`."""

    __slots__ = ("__weakref__", "drafted", "length", "owner", "pages", "slot")

    def __init__(self, owner: Sequences, slot: int) -> None:
        self.owner = owner
        self.length = 0
        self.drafted = 0  # how many of its last tokens are a draft: its state has not taken them in
        self.pages: list[int] = []  # replaced, never changed: others hold this list, too
        self.slot = slot  # -1: none; -2: freed

    def __repr__(self) -> str:
        return f"Sequence(length={self.length}, pages={self.pages}, slot={self.slot})"


class Sequences(Uncopied):
    """Rows, pages and slots of sequences that are being served, shared by the pools of all layers.

    `step` announces tokens, then every layer is called once, then sequences are forked, cropped or freed.

    rows        how many sequences a step serves at most
    max_length  tokens a sequence may have
    pages       how many there are for keys and values or latents; 0: no layer needs them
    page_size   tokens of a page: a multiple of 16 up to 256
    slots       how many there are for states, one for each living sequence; 0: no layer needs them
    drafts      keeps the tokens of a step of at most 8 out of the states until the next step, so that `crop` can take
                them back: for speculative decoding
    """

    def __init__(
        self,
        rows: int,
        max_length: int,
        *,
        pages: int = 0,
        page_size: int = 64,
        slots: int = 0,
        drafts: bool = False,
        device: torch.device | str | None = None,
    ) -> None:
        self.rows, self.max_length = whole("rows", rows), whole("max_length", max_length)
        self.page_size, self.pages = whole("page_size", page_size), whole("pages", pages, 0)
        if not is_page(self.page_size):
            raise ValueError(f"page_size={page_size}: must be a multiple of 16 from 16 to 256")
        self.slot_count, self.drafts = whole("slots", slots, 0), flag("drafts", drafts)
        self._free_pages = list(range(self.pages))[::-1]
        self._free_slots = list(range(self.slot_count))[::-1]
        self._users = [0] * self.pages  # sequences that hold each page
        self._pools: weakref.WeakSet[Pool] = weakref.WeakSet()
        width = -(-self.max_length // self.page_size) if self.pages else 0
        self._shown: list[list[int]] = [[]] * self.rows  # the pages each row of `table` names
        room = -(-self.rows // 4) * 4  # each of the four begins at a multiple of 16 bytes, as prepared launches need
        with outside_inference():
            self._table = torch.full((self.rows, width), -1, dtype=torch.int32, device="cpu")
            facts = torch.tensor([0, 0, -1, 0], dtype=torch.int32, device="cpu")
            self.table = self._table.to(device, copy=True)  # (rows, pages of a row); -1: none
            self._on_device = facts[:, None].repeat(1, room).to(device)
            self.lengths, self.ends, self.slots, self.accepted = self._on_device[:, : self.rows].unbind()
        self._first: dict[int, tuple[Tensor, ...]] = {}
        self.announced = 0, 0  # rows and tokens of the last step
        self.stepped: list[Sequence] = []  # its sequences
        self.steps = 0  # how many there were

    # ------------------------------------------------------------------------------------------ sequences

    @property
    def free_pages(self) -> int:
        return len(self._free_pages)

    @property
    def free_slots(self) -> int:
        return len(self._free_slots)

    def register(self, pool: Pool) -> None:
        """A pool that copies pages and slots when a sequence is forked; held weakly."""
        self._pools.add(pool)

    def new(self) -> Sequence:
        """An empty sequence."""
        return self._made(lambda pool, slot: pool.clear_slot(slot))

    def fork(self, sequence: Sequence) -> Sequence:
        """A sequence with the same tokens. Pages are shared until one of the two writes to them; a state is copied."""
        self._check(sequence)
        twin = self._made(lambda pool, slot: pool.copy_slot(sequence.slot, slot))
        twin.length, twin.drafted, twin.pages = sequence.length, sequence.drafted, sequence.pages
        for page in twin.pages:
            self._users[page] += 1
        self._end_step(sequence)
        return twin

    def crop(self, sequence: Sequence, length: int) -> None:
        """Keeps the first `length` tokens.

        With slots only drafted tokens can go: a state cannot forget.
        """
        self._check(sequence)
        length = whole("length", length, 0, sequence.length)
        dropped = sequence.length - length
        if self.slot_count and dropped > sequence.drafted:
            raise ValueError(
                f"length={length}: of the sequence's {sequence.length} tokens the last {sequence.drafted} are a draft, "
                "and a state cannot forget others; Sequences(drafts=True) keeps those of a step of up to 8 tokens"
            )
        sequence.length, sequence.drafted = length, max(sequence.drafted - dropped, 0)
        keep = -(-length // self.page_size)
        self._release(sequence.pages[keep:])
        sequence.pages = sequence.pages[:keep]
        self._end_step(sequence)

    def free(self, sequence: Sequence) -> None:
        """Gives back the pages and the slot; the sequence must not be used again."""
        self._check(sequence)
        self._release(sequence.pages)
        if self.slot_count:
            self._free_slots.append(sequence.slot)
        sequence.pages, sequence.slot, sequence.length = [], -2, 0
        self._end_step(sequence)

    # ----------------------------------------------------------------------------------------------- steps

    def step(self, sequences: Several[Sequence | None], tokens: int = 1) -> None:
        """The next call of every layer appends `tokens` tokens to each of `sequences`, its rows; None: an empty row.

        Takes the pages for them and writes what the layers read to the device, without waiting for it.
        """
        tokens = whole("tokens", tokens)
        self._check_rows(sequences, tokens)
        living = [s for s in sequences if s is not None]
        pages, taken = self._pages_for(living, tokens)
        room = self._on_device.shape[1]
        facts = [[0] * room, [0] * room, [-1] * room, [0] * room]
        changed: dict[int, list[int]] = {}
        for row, sequence in enumerate([*sequences, *[None] * (self.rows - len(sequences))]):
            named = [] if sequence is None else pages[sequence]
            if named != self._shown[row]:
                changed[row] = named
            if sequence is not None:
                facts[0][row], facts[1][row] = sequence.length, sequence.length + tokens
                facts[2][row], facts[3][row] = sequence.slot, sequence.drafted
        self._send(self._on_device, torch.tensor(facts, dtype=torch.int32, device="cpu"))
        if changed:
            self._show(changed)
        del self._free_pages[len(self._free_pages) - len(taken) :]  # nothing below raises
        for page in taken:
            self._users[page] = 1
        for sequence in living:
            old = len(sequence.pages)
            if old and sequence.pages[-1] != pages[sequence][old - 1]:
                self._release(sequence.pages[-1:])
            sequence.pages = pages[sequence]
            sequence.length += tokens
            sequence.drafted = tokens if self.drafts and tokens <= MAX_STEP_TOKENS else 0
        self.announced, self.stepped, self.steps = (len(sequences), tokens), living, self.steps + 1

    def check_call(self, B: int, N: int) -> None:
        """Raises if x (B, N, ...) is not what `step` announced. Compiled calls and replays of a graph are not asked."""
        if torch.compiler.is_compiling():
            return
        rows, tokens = self.announced
        if not (rows <= B <= self.rows and tokens == N):
            raise ValueError(
                f"x has B={B}, N={N}, and step announced {tokens} tokens in {rows} of rows={self.rows}: call step "
                "before the layers and give them those rows, and fork, crop or free its sequences after them"
            )

    def first(self, B: int) -> tuple[Tensor, ...]:
        """lengths, ends, slots, accepted and table of the first B rows: views that are kept."""
        found = self._first.get(B)
        if found is None:
            every = (self.lengths, self.ends, self.slots, self.accepted, self.table)
            found = tuple(x[:B] for x in every)
            if not torch.compiler.is_compiling():
                self._first[B] = found
        return found

    def _end_step(self, sequence: Sequence) -> None:
        """Cancels the announced step if the sequence is part of it."""
        if sequence in self.stepped:
            self.announced = 0, 0

    def _show(self, changed: dict[int, list[int]]) -> None:
        """Writes the pages of these rows to the device; -1 after them, so that nothing is written there."""
        table = self._table.clone()
        for row, pages in changed.items():
            table[row] = -1
            table[row, : len(pages)] = torch.tensor(pages, dtype=torch.int32, device="cpu")
        self._send(self.table, table)
        self._table = table
        for row, pages in changed.items():
            self._shown[row] = pages

    def _send(self, target: Tensor, source: Tensor) -> None:
        if target.device.type == "cuda":
            source = source.pin_memory()  # a copy: the source may change while the transfer is under way
        target.copy_(source, non_blocking=True)

    def _check_rows(self, sequences: Several[Sequence | None], tokens: int) -> None:
        if isinstance(sequences, Sequence):
            raise ValueError("sequences is one Sequence: pass a list of them")
        if len(sequences) > self.rows:
            raise ValueError(f"{len(sequences)} sequences are to be served, and there are rows={self.rows}")
        seen: set[int] = set()
        for sequence in sequences:
            if sequence is None:
                continue
            self._check(sequence)
            if id(sequence) in seen:
                raise ValueError(f"{sequence} is given twice: fork it to go on in two ways")
            seen.add(id(sequence))
            if sequence.length + tokens > self.max_length:
                raise ValueError(
                    f"{tokens} more tokens for a sequence of {sequence.length}: max_length={self.max_length}"
                )

    def _pages_for(self, sequences: list[Sequence], tokens: int) -> tuple[dict[Sequence, list[int]], list[int]]:
        """Pages of every sequence with its next tokens, and those of them that are free; copies shared ones.

        A sequence shares pages with its forks. The one it will write to is replaced by a copy.
        """
        if not self.pages:
            return {sequence: [] for sequence in sequences}, []
        missing = {s: -(-(s.length + tokens) // self.page_size) - len(s.pages) for s in sequences}
        leaving: dict[int, int] = {}  # how many sequences exchange each page for a copy
        shared: set[Sequence] = set()
        for sequence in sequences:
            if sequence.length % self.page_size:
                last = sequence.pages[-1]
                if self._users[last] - leaving.get(last, 0) > 1:
                    leaving[last] = leaving.get(last, 0) + 1
                    shared.add(sequence)
        needed = sum(missing.values()) + len(shared)
        if needed > len(self._free_pages):
            raise PoolFull(
                f"{needed} pages are needed for {tokens} more tokens of {len(sequences)} sequences, and "
                f"{len(self._free_pages)} of {self.pages} are free: free or crop sequences first"
            )
        taken = self._free_pages[: -needed - 1 : -1]  # the last ones
        free, found = iter(taken), {}
        for sequence, count in missing.items():
            pages = sequence.pages
            if sequence in shared:
                pages = [*pages[:-1], next(free)]
                for pool in self._pools:
                    pool.copy_page(sequence.pages[-1], pages[-1])
            found[sequence] = pages + [next(free) for _ in range(count)] if count else pages
        return found, taken

    def _made(self, fill: Callable[[Pool, int], None]) -> Sequence:
        """An empty sequence, whose slot `fill` has prepared in every pool."""
        if not self.slot_count:
            return Sequence(self, -1)
        if not self._free_slots:
            raise PoolFull(f"all slots={self.slot_count} are taken: free a sequence first")
        for pool in self._pools:
            fill(pool, self._free_slots[-1])
        return Sequence(self, self._free_slots.pop())

    def _release(self, pages: list[int]) -> None:
        for page in pages:
            self._users[page] -= 1
            if not self._users[page]:
                self._free_pages.append(page)

    def _check(self, sequence: Sequence) -> None:
        if not isinstance(sequence, Sequence):
            raise ValueError(f"sequence is a {type(sequence).__name__}, must come from Sequences.new() or fork()")
        if sequence.owner is not self:
            raise ValueError("the sequence is of another Sequences, whose pages and slots are others")
        if sequence.slot == -2:
            raise ValueError("the sequence was freed: make a new one with new()")
