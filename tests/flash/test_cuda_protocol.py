"""The Hopper kernel's barriers, played through on a CPU in many orders: nothing hangs, nothing is overwritten in use.

Producer and consumers are written down as cuda_sm90.cu has them, one step a line; a scheduler lets them run in random
order, and copies arrive late. Phases count as mbarriers do: a wait for parity p passes once the phase with that parity
is over.
"""

from __future__ import annotations

import random

import pytest


class Barrier:
    """An mbarrier: `count` arrivals end a phase; so many bytes, here copies, must have come as well."""

    def __init__(self, count: int) -> None:
        self.count = self.left = count
        self.copies = 0
        self.phase = 0

    def arrive(self, copies: int = 0) -> None:
        self.left -= 1
        self.copies += copies
        assert self.left >= 0
        self.turn()

    def landed(self) -> None:
        self.copies -= 1
        self.turn()

    def turn(self) -> None:
        if self.left == 0 and self.copies == 0:
            self.phase += 1
            self.left = self.count

    def over(self, parity: int) -> bool:
        return self.phase % 2 != parity


class Place:
    def __init__(self, stages: int) -> None:
        self.at = self.parity = 0
        self.stages = stages

    def next(self) -> None:
        self.at += 1
        if self.at == self.stages:
            self.at, self.parity = 0, self.parity ^ 1


class Block:
    """One block: what lies in shared memory, who uses it, and the barriers."""

    def __init__(self, consumers: int, stages: int, warps: int) -> None:
        self.consumers, self.stages, self.warps = consumers, stages, warps
        self.full = {("q", c): Barrier(1) for c in range(consumers)}
        self.empty = {("q", c): Barrier(warps) for c in range(consumers)}
        for ring in "kv":
            self.full |= {(ring, i): Barrier(1) for i in range(stages)}
            self.empty |= {(ring, i): Barrier(warps * consumers) for i in range(stages)}
        self.holds: dict[tuple[str, int], object] = {}
        self.on_the_way: list[tuple[tuple[str, int], object]] = []
        self.readers: dict[tuple[str, int], int] = dict.fromkeys(self.full, 0)

    def land(self, i: int) -> None:
        place, what = self.on_the_way.pop(i)
        assert self.readers[place] == 0, f"{place} is overwritten in use"
        self.holds[place] = what
        self.full[place].landed()


def fetch(block: Block, place: tuple[str, int], parity: int, what: object):
    while not block.empty[place].over(parity ^ 1):
        yield
    block.full[place].arrive(copies=1)
    block.on_the_way.append((place, what))
    yield


def produce(block: Block, tiles: list[int]):
    k, v, parity = Place(block.stages), Place(block.stages), 0
    for tile, blocks in enumerate(tiles):
        if blocks == 0:
            continue
        row = blocks - 1
        yield from fetch(block, ("k", k.at), k.parity, (tile, row))
        k.next()
        for c in range(block.consumers):
            yield from fetch(block, ("q", c), parity, (tile, c))
        parity ^= 1
        while row > 0:
            yield from fetch(block, ("k", k.at), k.parity, (tile, row - 1))
            k.next()
            yield from fetch(block, ("v", v.at), v.parity, (tile, row))
            v.next()
            row -= 1
        yield from fetch(block, ("v", v.at), v.parity, (tile, 0))
        v.next()


def use(block: Block, place: tuple[str, int], parity: int, what: object):
    while not block.full[place].over(parity):
        yield
    assert block.holds.get(place) == what, f"{place} holds {block.holds.get(place)}, not {what}"
    block.readers[place] += 1
    yield


def give_back(block: Block, place: tuple[str, int]):
    block.readers[place] -= 1
    block.empty[place].arrive()
    yield


def consume(block: Block, consumer: int, tiles: list[int], done: list[int]):
    """One warp. Warps of a consumer may drift apart further here than products let them on the GPU."""
    k, v, parity = Place(block.stages), Place(block.stages), 0
    for tile, blocks in enumerate(tiles):
        if blocks:
            yield from use(block, ("q", consumer), parity, (tile, consumer))
            parity ^= 1
            key = blocks - 1
            yield from use(block, ("k", k.at), k.parity, (tile, key))
            yield from give_back(block, ("k", k.at))
            k.next()
            while key > 0:
                yield from use(block, ("k", k.at), k.parity, (tile, key - 1))
                yield from use(block, ("v", v.at), v.parity, (tile, key))
                yield from give_back(block, ("k", k.at))
                k.next()
                yield from give_back(block, ("v", v.at))
                v.next()
                key -= 1
            yield from give_back(block, ("q", consumer))
            yield from use(block, ("v", v.at), v.parity, (tile, 0))
            yield from give_back(block, ("v", v.at))
            v.next()
        done[consumer] += 1


@pytest.mark.parametrize(("consumers", "stages"), [(1, 2), (2, 2), (3, 2), (3, 3)])
def test_nothing_hangs_or_is_overwritten(consumers, stages):
    for seed in range(40):
        chance = random.Random(seed)
        tiles = [chance.choice([0, 1, 1, 2, 3, 7]) for _ in range(chance.randint(1, 9))]
        block = Block(consumers, stages, warps=2)
        done = [0] * consumers
        running = [produce(block, tiles)] + [consume(block, c, tiles, done) for c in range(consumers) for _ in range(2)]
        for _ in range(200_000):
            if not running:
                break
            if block.on_the_way and chance.random() < 0.3:
                block.land(chance.randrange(len(block.on_the_way)))
                continue
            one = chance.choice(running)
            if next(one, "end") == "end":
                running.remove(one)
        assert not running, "it hangs"
        assert done == [2 * len(tiles)] * consumers
        assert not block.on_the_way
