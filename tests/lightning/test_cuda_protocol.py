"""The barriers of lightning/cuda_sm90.cu, played through on a CPU in many orders: nothing hangs, nothing is overwritten
in use.

`produce`, `keep_state` and `make_outputs` are written down as the kernel has them, one step a line, and are to be
changed with it; a scheduler lets them run in random order, and copies arrive, or are read, late. A warpgroup is two
warps here. Phases count as mbarriers do (see tests/flash/test_cuda_protocol.py).
"""

from __future__ import annotations

import random

import pytest

from tests.flash.test_cuda_protocol import Barrier

WARPS = 2
EVERY = 3  # chunks between saved states: short, so that groups come up


class Meeting:
    """bar.sync of one warpgroup."""

    def __init__(self) -> None:
        self.here = self.times = 0

    def wait(self):
        mine = self.times
        self.here += 1
        if self.here == WARPS:
            self.here, self.times = 0, self.times + 1
        while self.times == mine:
            yield


class Stores:
    """Bulk stores of one thread: groups are over in order, when the copy engine has read them."""

    def __init__(self) -> None:
        self.groups: list[object] = []

    def read(self, pending: int):
        while len(self.groups) > pending:
            yield


class Block:
    def __init__(self, stages: int, outs: int, chunks: int, save: int, short: int | None, closes: bool) -> None:
        self.stages, self.outs, self.chunks, self.save, self.closes = stages, outs, chunks, save, closes
        self.short = short  # the chunk whose output is written by hand
        groups, self.order = -(-chunks // EVERY), list(range(chunks))
        if save == 2:  # Walk::chunk
            parts = [range(g * EVERY, min(chunks, (g + 1) * EVERY)) for g in reversed(range(groups))]
            self.order = [c for part in parts for c in part]
        self.full = [Barrier(1) for _ in range(stages)]
        self.empty = [Barrier(WARPS * (2 if outs else 1)) for _ in range(stages)]
        self.state_full, self.state_empty = ([Barrier(WARPS) for _ in range(2)] for _ in range(2))
        self.saved_full, self.saved_empty = Barrier(1), Barrier(WARPS)
        self.ring: list[object] = [None] * stages
        self.readers = [0] * stages
        self.saved, self.saved_readers = None, 0
        self.states = [[None] * WARPS for _ in range(2)]
        self.state_readers = [0, 0]
        self.meetings = [Meeting() for _ in range(1 + outs)]
        self.stores = [Stores() for _ in range(1 + outs)]
        self.coming: list[tuple[str, int]] = []
        self.delivered: list[int] = []

    def opens(self, n: int) -> bool:
        return self.save == 2 and self.order[n] % EVERY == 0

    def land(self, i: int) -> None:
        what, n = self.coming.pop(i)
        if what == "saved":
            assert self.saved_readers == 0, "a saved state is overwritten in use"
            self.saved = n
            self.saved_full.landed()
        else:
            assert self.readers[n % self.stages] == 0, f"stage {n % self.stages} is overwritten in use"
            self.ring[n % self.stages] = n
            self.full[n % self.stages].landed()


def until(barrier: Barrier, parity: int):
    while not barrier.over(parity):
        yield


def produce(block: Block):
    group = 0
    for n in range(block.chunks):
        if block.opens(n):
            yield from until(block.saved_empty, group % 2 ^ 1)
            block.saved_full.arrive(copies=1)
            block.coming.append(("saved", group))
            group += 1
        yield from until(block.empty[n % block.stages], n // block.stages % 2 ^ 1)
        block.full[n % block.stages].arrive(copies=1)
        block.coming.append(("rows", n))
        yield


def enter(block: Block, n: int):
    """await_full, and the rows are in use."""
    yield from until(block.full[n % block.stages], n // block.stages % 2)
    assert block.ring[n % block.stages] == n, f"chunk {n} was taken for {block.ring[n % block.stages]}"
    block.readers[n % block.stages] += 1
    yield


def leave(block: Block, n: int):
    block.readers[n % block.stages] -= 1
    block.empty[n % block.stages].arrive()
    yield


def keep_state(block: Block, warp: int):
    group, leads, stores = 0, warp == 0, block.stores[0]
    if block.chunks:
        yield from enter(block, 0)
    for n in range(block.chunks):
        if block.opens(n):
            yield from until(block.saved_full, group % 2)
            assert block.saved == group
            group += 1
            block.saved_readers += 1
            yield
            block.saved_readers -= 1
            block.saved_empty.arrive()
        if block.outs:
            if block.save == 1 and n >= 2 and (n - 2) % EVERY == 0:
                if leads:
                    yield from stores.read(0)
                yield from block.meetings[0].wait()
            yield from until(block.state_empty[n % 2], n // 2 % 2 ^ 1)
            assert block.state_readers[n % 2] == 0, "a state is overwritten in use"
            assert n % 2 not in stores.groups, "a state is overwritten while it is saved"
            block.states[n % 2][warp] = n
            yield
            block.state_full[n % 2].arrive()
            if block.save == 1 and n % EVERY == 0:
                yield from block.meetings[0].wait()
                if leads:
                    assert block.states[n % 2] == [n] * WARPS
                    stores.groups.append(n % 2)
        if n + 1 < block.chunks:
            yield from enter(block, n + 1)
        yield from leave(block, n)
    if block.save == 1 and leads:
        yield from stores.read(0)


def start_out(block: Block, n: int):
    yield from until(block.state_full[n % 2], n // 2 % 2)
    assert block.states[n % 2] == [n] * WARPS, f"the state of chunk {n} is {block.states[n % 2]}"
    block.state_readers[n % 2] += 1
    yield


def deliver(block: Block, n: int, who: int, warp: int, buffer: int):
    leads, stores, meeting = warp == 0, block.stores[1 + who], block.meetings[1 + who]
    block.state_readers[n % 2] -= 1
    block.state_empty[n % 2].arrive()
    yield from leave(block, n)
    if leads:
        yield from stores.read(1)
    yield from meeting.wait()
    assert buffer not in stores.groups, f"the output of chunk {n} overwrites one that is still being stored"
    yield
    yield from meeting.wait()
    if leads:
        by_hand = block.order[n] == block.short
        if not by_hand:
            stores.groups.append(buffer)
        elif block.closes:
            stores.groups.append(None)
        block.delivered.append(block.order[n])


def make_outputs(block: Block, who: int, warp: int):
    n, buffer = who, 0
    if n >= block.chunks:
        return
    yield from enter(block, n)
    while n + block.outs < block.chunks:
        yield from start_out(block, n)
        yield from enter(block, n + block.outs)
        yield from deliver(block, n, who, warp, buffer)
        buffer ^= 1
        n += block.outs
    yield from start_out(block, n)
    yield from deliver(block, n, who, warp, buffer)
    if warp == 0:
        yield from block.stores[1 + who].read(0)


def play(seed: int, stages: int, outs: int, chunks: int, save: int, short: int | None = None, closes: bool = True):
    chance = random.Random(seed)
    block = Block(stages, outs, chunks, save, short, closes)
    running = [produce(block), *(keep_state(block, warp) for warp in range(WARPS))]
    running += [make_outputs(block, who, warp) for who in range(outs) for warp in range(WARPS)]
    late = chance.choice([0.02, 0.3])  # how often something that is on its way arrives
    for _ in range(100_000):
        if not running:
            break
        busy = [s for s in block.stores if s.groups]
        if busy and chance.random() < late / 4:
            chance.choice(busy).groups.pop(0)
        elif block.coming and chance.random() < late:
            block.land(chance.randrange(len(block.coming)))
        elif next(one := chance.choice(running), "end") == "end":
            running.remove(one)
    assert not running, "it hangs"
    assert sorted(block.delivered) == (list(range(chunks)) if outs else [])
    return block


def play_many(times: int, *args, **options) -> None:
    for seed in range(times):
        play(seed, *args, **options)


@pytest.mark.parametrize(
    ("stages", "outs", "save"),
    [(6, 2, 0), (6, 2, 1), (5, 2, 2), (4, 1, 0), (8, 0, 0), (6, 0, 0), (3, 2, 2), (2, 1, 1)],
)
def test_nothing_hangs_or_is_overwritten(stages, outs, save):
    """What `config` chooses, and the fewest stages that do: 1 + OUTS."""
    for seed in range(60):
        chunks = random.Random(seed).choice([0, 1, 2, 3, 5, 8, 13, 19])
        play(seed, stages, outs, chunks, save)


@pytest.mark.parametrize(("stages", "outs"), [(5, 2), (4, 1)])
def test_a_chunk_written_by_hand_amid_others(stages, outs):
    """dq of packed sequences takes its last chunk, the short one, first or among the first. If no group is closed for
    it, waiting until one group is left does not wait for the store before it, from the buffer that comes next."""
    chunks = 2 * EVERY + 3
    play_many(60, stages, outs, chunks, 2, short=chunks - 1)
    with pytest.raises(AssertionError, match="still being stored"):
        play_many(400, stages, outs, chunks, 2, short=chunks - 1, closes=False)


def test_too_few_stages_are_seen():
    """With OUTS stages an output would wait for the wrong phase, or for ever."""
    with pytest.raises(AssertionError):
        play_many(100, 2, 2, 13, 0)
