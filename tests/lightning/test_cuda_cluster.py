"""The two blocks of a cluster in lightning/cuda_sm90.cu (SHARE), played through on a CPU in many orders.

Each copies half of a and b for both, so a place is full when both halves and the own c have landed, and empty when the
warps of both blocks have said so; what is said to the other block arrives late. Nothing may hang, be overwritten in
use, or reach a block that has ended. The roles are those of tests/lightning/test_cuda_protocol.py, without saved states
and stores, which stay within a block; they are to be changed with the kernel.
"""

from __future__ import annotations

import random

import pytest

from tests.flash.test_cuda_protocol import Barrier

WARPS = 2  # of a warpgroup
ROLES = 1 + 2 * WARPS  # a producer, the state's warps, the output's warps


class Block:
    def __init__(self, stages: int, tellers: int) -> None:
        self.full = [Barrier(1) for _ in range(stages)]
        self.empty = [Barrier(tellers * 2 * WARPS) for _ in range(stages)]
        self.state_full, self.state_empty = ([Barrier(WARPS) for _ in range(2)] for _ in range(2))
        self.ring: list[dict[str, int]] = [{} for _ in range(stages)]
        self.readers = [0] * stages
        self.running = ROLES


class Cluster:
    """`tells`: who hears that a place is empty; `tail`: the producer waits for the last of it."""

    def __init__(self, stages: int, chunks: int, tells: str = "both", tail: bool = True) -> None:
        self.stages, self.chunks, self.tells, self.tail = stages, chunks, tells, tail
        self.blocks = [Block(stages, 2 if tells == "both" else 1) for _ in range(2)]
        self.coming: list[tuple[int, int, str]] = []  # to which block, of which chunk, what: a copy, or "empty"

    def arrive(self, i: int) -> None:
        to, n, what = self.coming.pop(i)
        block, at = self.blocks[to], n % self.stages
        assert block.running, "something reaches a block that has ended"
        if what == "empty":
            block.empty[at].arrive()
            return
        assert block.readers[at] == 0, "overwritten in use"
        block.ring[at][what] = n
        block.full[at].landed()

    def produce(self, me: int):
        block, stages = self.blocks[me], self.stages
        for n in range(self.chunks):
            yield from until(block.empty[n % stages], n // stages % 2 ^ 1)
            block.full[n % stages].arrive(copies=3)
            self.coming += [(to, n, f"half {me}") for to in range(2)]
            self.coming.append((me, n, "c"))
            yield
        for n in range(self.chunks, self.chunks + stages) if self.tail else ():
            yield from until(block.empty[n % stages], n // stages % 2 ^ 1)

    def enter(self, me: int, n: int):
        block, at = self.blocks[me], n % self.stages
        yield from until(block.full[at], n // self.stages % 2)
        assert block.ring[at] == {"half 0": n, "half 1": n, "c": n}, f"chunk {n} was taken for {block.ring[at]}"
        block.readers[at] += 1
        yield

    def leave(self, me: int, n: int):
        self.blocks[me].readers[n % self.stages] -= 1
        self.coming += [(to, n, "empty") for to in range(2) if self.tells == "both" or to == me]
        yield

    def keep_state(self, me: int):
        block = self.blocks[me]
        if self.chunks:
            yield from self.enter(me, 0)
        for n in range(self.chunks):
            yield from until(block.state_empty[n % 2], n // 2 % 2 ^ 1)
            yield
            block.state_full[n % 2].arrive()
            if n + 1 < self.chunks:
                yield from self.enter(me, n + 1)
            yield from self.leave(me, n)

    def make_outputs(self, me: int):
        block = self.blocks[me]
        if self.chunks:
            yield from self.enter(me, 0)
        for n in range(self.chunks):
            yield from until(block.state_full[n % 2], n // 2 % 2)
            yield
            if n + 1 < self.chunks:
                yield from self.enter(me, n + 1)
            block.state_empty[n % 2].arrive()
            yield from self.leave(me, n)


def until(barrier: Barrier, parity: int):
    while not barrier.over(parity):
        yield


def play(seed: int, stages: int, chunks: int, **options) -> None:
    chance = random.Random(seed)
    cluster = Cluster(stages, chunks, **options)
    kinds = [cluster.produce, *[cluster.keep_state] * WARPS, *[cluster.make_outputs] * WARPS]
    running = [(i, kind(i)) for i in range(2) for kind in kinds]
    soon = chance.choice((0.02, 0.1, 0.4))
    for _ in range(300_000):
        if not running and not cluster.coming:
            return
        if cluster.coming and (not running or chance.random() < soon):
            cluster.arrive(chance.randrange(len(cluster.coming)))
            continue
        i, role = one = chance.choice(running)
        if next(role, "over") == "over":
            running.remove(one)
            cluster.blocks[i].running -= 1
    raise AssertionError("it hangs")


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("chunks", [0, 1, 2, 3, 4, 5, 9, 13])
def test_in_any_order(stages, chunks):
    for seed in range(40):
        play(seed, stages, chunks)


@pytest.mark.parametrize(
    ("options", "why"),
    [({"tail": False}, "reaches a block that has ended"), ({"tells": "own"}, "overwritten in use|hangs|was taken for")],
)
def test_finds_what_is_wrong(options, why):
    """Without these it would prove nothing."""

    def often() -> None:
        for seed in range(200):
            play(seed, 4, 9, **options)

    with pytest.raises(AssertionError, match=why):
        often()
