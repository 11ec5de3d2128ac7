"""Pages and slots of sequences: what is shared, copied, taken back and refused."""

from __future__ import annotations

import copy
import pickle
import random
from typing import Any

import pytest
import torch

from fulmen.layers import LightningAttention
from fulmen.layers.sequences import PoolFull, Sequence, Sequences


class Memory:
    """A pool that keeps each token's name, by page and place, and each slot's tokens."""

    def __init__(self, served: Sequences) -> None:
        self.served = served
        self.pages = [["?"] * served.page_size for _ in range(served.pages)]
        self.slots: list[list[str]] = [["?"] for _ in range(served.slot_count)]
        served.register(self)

    def copy_page(self, source: int, target: int) -> None:
        self.pages[target] = list(self.pages[source])

    def copy_slot(self, source: int, target: int) -> None:
        self.slots[target] = list(self.slots[source])

    def clear_slot(self, slot: int) -> None:
        self.slots[slot] = []

    def write(self, names: list[list[str] | None]) -> None:
        """One step, by what is on the device alone, as a layer does it."""
        served = self.served
        for row, new in enumerate(names):
            begin, end, slot = int(served.lengths[row]), int(served.ends[row]), int(served.slots[row])
            assert end - begin == len(new or [])
            for place, name in enumerate(new or [], begin):
                page = int(served.table[row, place // served.page_size])
                self.pages[page][place % served.page_size] = name
            if new:
                self.slots[slot] = self.slots[slot][:begin] + new

    def read(self, sequence: Sequence) -> list[str]:
        size = self.served.page_size
        return [self.pages[sequence.pages[i // size]][i % size] for i in range(sequence.length)]


def facts(served: Sequences) -> tuple[object, ...]:
    return served.free_pages, served.free_slots, list(served._users), served.table.tolist(), served.lengths.tolist()


@pytest.mark.parametrize("seed", range(50))
def test_random_schedules(seed: int) -> None:
    """Twenty steps each: arrive, extend, fork, reject, leave. What is read is what was written, and nothing leaks."""
    draw = random.Random(seed)
    served = Sequences(rows=4, max_length=200, pages=30, page_size=16, slots=6, drafts=True)
    memory, living, name = Memory(served), {}, 0
    for _ in range(60):
        action = draw.choice(["new", "step", "step", "step", "fork", "crop", "free"])
        before = facts(served)
        try:
            if action == "new":
                living[served.new()] = []
            elif action == "fork" and living:
                parent = draw.choice(list(living))
                living[served.fork(parent)] = list(living[parent])
            elif action == "free" and living:
                sequence = draw.choice(list(living))
                served.free(sequence)
                del living[sequence]
            elif action == "crop" and living:
                sequence = draw.choice(list(living))
                length = sequence.length - draw.randint(0, sequence.drafted)
                served.crop(sequence, length)
                del living[sequence][length:]
            elif action == "step" and living:
                rows = [s if draw.random() < 0.8 else None for s in draw.sample(list(living), min(len(living), 4))]
                tokens = draw.choice([1, 2, 8, 9, 40])
                if any(s is not None and s.length + tokens > 200 for s in rows):
                    continue
                served.step(rows, tokens)
                names: list[list[str] | None] = []
                for s in rows:
                    names.append(None if s is None else [str(name := name + 1) for _ in range(tokens)])
                    if s is not None:
                        living[s] += names[-1]
                memory.write(names)
        except PoolFull:
            assert facts(served) == before
        for sequence, tokens_of in living.items():
            assert memory.read(sequence) == tokens_of
            assert memory.slots[sequence.slot][: sequence.length] == tokens_of
        assert len({s.slot for s in living}) == len(living)
    for sequence in living:
        served.free(sequence)
    assert (served.free_pages, served.free_slots) == (30, 6)


def test_a_full_pool_says_so_and_loses_nothing() -> None:
    served = Sequences(rows=2, max_length=64, pages=3, page_size=16, slots=2)
    a, b = served.new(), served.new()
    with pytest.raises(PoolFull, match="slots=2 are taken"):
        served.new()
    served.step([a], 33)
    before = facts(served)
    with pytest.raises(PoolFull, match=r"1 pages are needed .* and 0 of 3 are free"):
        served.step([a, b], 1)
    assert facts(served) == before
    assert (a.length, b.length, b.pages) == (33, 0, [])


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda s, a: s.step([a, a]), "given twice"),
        (lambda s, a: s.step([a], 100), "max_length=64"),
        (lambda s, a: s.step([a, None, None]), "rows=2"),
        (lambda s, a: s.step([3]), "sequence is a int"),
        (lambda s, a: s.crop(a, 0), "the last 0 are a draft"),
        (lambda s, a: (s.free(a), s.step([a])), "was freed"),
        (lambda s, a: Sequences(2, 64, pages=8, page_size=16, slots=4).free(a), "of another Sequences"),
        (lambda s, a: Sequences(1, 8, page_size=24), "multiple of 16"),
    ],
)
def test_bad_input(act: object, message: str) -> None:
    served = Sequences(rows=2, max_length=64, pages=8, page_size=16, slots=4)
    a = served.new()
    served.step([a], 3)
    with pytest.raises(ValueError, match=message):
        act(served, a)  # type: ignore[operator]


class Broken(Memory):
    """A pool whose copies fail, as of memory that cannot be written."""

    def copy_page(self, source: int, target: int) -> None:
        raise RuntimeError("cannot copy")

    copy_slot = copy_page


def test_a_call_that_fails_leaves_the_books_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    served = Sequences(rows=2, max_length=64, pages=8, page_size=16, slots=4)
    a = served.new()
    served.step([a], 20)
    b = served.fork(a)
    before = facts(served)
    broken = Broken(served)
    with pytest.raises(RuntimeError, match="cannot copy"):
        served.step([b], 20)
    with pytest.raises(RuntimeError, match="cannot copy"):
        served.fork(a)
    assert facts(served) == before
    assert (b.length, b.pages) == (20, a.pages)
    del broken
    with monkeypatch.context() as patch:
        patch.setattr(served, "_send", lambda target, source: {}[target])
        with pytest.raises(KeyError):
            served.step([b], 20)
    assert facts(served) == before
    assert (b.length, b.pages) == (20, a.pages)
    served.step([b], 20)
    served.free(a)
    served.free(b)
    assert (served.free_pages, served.free_slots) == (8, 4)


def test_a_row_names_its_own_pages_alone() -> None:
    """Not those of the sequence that was there before."""
    served = Sequences(rows=1, max_length=64, pages=8, page_size=16)
    a = served.new()
    served.step([a], 64)
    served.free(a)
    b = served.new()
    served.step([b], 20)
    assert served.table.tolist() == [[*b.pages, -1, -1]]


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_copies_are_refused(copied: Any) -> None:
    served = Sequences(rows=2, max_length=64, pages=8, page_size=16, slots=4)
    pool = LightningAttention(32, 2).new_pool(served)
    for x in (served, served.new(), pool):
        with pytest.raises(TypeError, match=f"a {type(x).__name__} cannot be copied or pickled"):
            copied(x)


def test_tensors_keep_their_addresses() -> None:
    served = Sequences(rows=2, max_length=64, pages=8, page_size=16, slots=4, drafts=True)
    kept = (served.table, served.lengths, served.ends, served.slots, served.accepted)
    addresses = [t.data_ptr() for t in kept]
    a = served.new()
    served.step([None, a], 20)
    served.step([a, None], 2)
    served.crop(a, 21)
    served.step([a], 1)
    assert [
        t.data_ptr() for t in (served.table, served.lengths, served.ends, served.slots, served.accepted)
    ] == addresses
    assert served.lengths.tolist() == [21, 0]
    assert served.ends.tolist() == [22, 0]
    assert served.slots.tolist() == [a.slot, -1]
    assert served.accepted.tolist() == [1, 0]
    assert served.table.dtype == served.lengths.dtype == torch.int32
