"""Which rows each block of the CUDA backend takes, and in which order: the arithmetic of sweep.cu, in Python."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from fulmen.launch import run_all
from fulmen.lightning import cuda, triton_split
from fulmen.lightning.kernels import sweep
from fulmen.lightning.policy import SAVED_ROWS
from fulmen.lightning.spec import Residuals
from tests.lightning.cuda_calls import spec

EVERY, C = SAVED_ROWS // sweep.CHUNK, sweep.CHUNK


class Walk:
    """Walk of sweep.cu in Python: `find`, then `chunk`, `row`, `left`, `opens_group`; line by line, so that what is
    shown of it here holds there. To be changed with it."""

    def __init__(self, block, spec, cut, sweeps, saved=False, cu=None, not_last=False, start=0):
        packed = spec.sequences is not None
        segment_offsets = None if cut.segment_offsets is None else cut.segment_offsets.tolist()
        segments = spec.states if segment_offsets is not None else cut.number
        self.tokens, tiles = spec.per_token, sweep.sizes(spec, sweeps)[1] // 64
        self.tile, pid = block % tiles, block // tiles
        self.sweep, self.number = sweeps[pid % len(sweeps)], pid // len(sweeps) + start
        self.reverse = sweep.SWEEPS[self.sweep].reverse
        self.grouped = saved and self.sweep == "dq"
        self.backwards = self.sweep in ("state", "dstate") and not spec.has_decay  # OUTS = 0
        self.whole = self.number < cut.whole
        segment, begin, end = 0, 0, spec.N
        if packed and segment_offsets is not None:
            self.h, sequence, beyond = self.number % spec.H, 0, segments
            while beyond - sequence > 1:
                middle = (sequence + beyond) // 2
                if segment_offsets[middle] <= self.number // spec.H:
                    sequence = middle
                else:
                    beyond = middle
            segment = self.number // spec.H - segment_offsets[sequence]
        else:
            unit = self.number
            if not self.whole:
                self.number -= cut.whole
                segment = self.number % segments
                unit = cut.whole + self.number // segments
            self.h = unit % spec.H
            sequence = unit // spec.H
        self.b = 0 if packed else sequence
        if packed:
            begin = min(max(cu[sequence], 0), spec.N)
            end = min(max(cu[sequence + 1], begin), spec.N)
        skip = segment * cut.rows
        if self.tokens and self.reverse and not self.whole:
            skip = (-(-(end - begin) // cut.rows) - 1) * cut.rows - skip
        self.length = max(0, min(end - begin - skip, spec.N if self.whole else cut.rows))
        last = skip == 0 if self.tokens and self.reverse else begin + skip + cut.rows >= end
        if (not_last and last) or skip < 0:
            self.length = 0
        self.chunks = (self.length + C - 1) // C
        self.first = end - skip if self.reverse and not self.tokens else begin + skip
        self.slot = skip // (EVERY * C)
        self.head = self.b * spec.H + self.h
        if packed:
            self.slot += begin // (EVERY * C) + sequence
            self.head = self.h

    def chunk(self, n):
        if self.backwards:
            return self.chunks - 1 - n
        if not self.grouped:
            return n
        groups = (self.chunks + EVERY - 1) // EVERY
        top = self.chunks - (groups - 1) * EVERY
        if n < top:
            return (groups - 1) * EVERY + n
        return (groups - 2 - (n - top) // EVERY) * EVERY + (n - top) % EVERY

    def place(self, n):
        return self.chunks - 1 - self.chunk(n) if self.tokens and self.reverse else self.chunk(n)

    def ends_first(self):
        return self.reverse and not self.tokens

    def row(self, n):
        return self.first - (self.chunk(n) + 1) * C if self.ends_first() else self.first + self.place(n) * C

    def partial(self):
        if self.length % C == 0:
            return -1
        return (
            0
            if self.backwards or (self.tokens and self.reverse)
            else (self.chunks - 1) % EVERY
            if self.grouped
            else self.chunks - 1
        )

    def left(self, n):
        return self.length - self.place(n) * C

    def own_rows(self, n):
        """The rows that `deliver` writes: all, or from the side where the sequence goes on."""
        left = min(self.left(n), C)
        first = self.ends_first()
        return range(self.row(n) + (C - left if first else 0), self.row(n) + (C if first else left))


def walks(spec, names, lengths=None, saved=False):
    """Every block of a launch, with the cut and the segment_offsets that the host makes."""
    cu = None if lengths is None else [0, *itertools.accumulate(lengths)]
    offsets = None if cu is None else torch.tensor(cu, dtype=torch.int32)
    x = Residuals(torch.empty(0, dtype=torch.bfloat16), None, None, None, None, offsets)
    tiles = cuda.tiles_of(spec)
    cut = cuda.segments(spec, tiles.forward_split if names[0] in ("o", "state") else tiles.backward_split, x)
    run_all(triton_split.find_segment_offsets(spec, x, cut), torch.device("cpu"))
    start = cut.whole if names[0] in ("state", "dstate") else 0
    blocks = (sweep.segment_count(spec, cut) - start) * len(names) * (sweep.sizes(spec, names)[1] // 64)
    return [Walk(i, spec, cut, names, saved, cu, start=start) for i in range(blocks)], cut


def random_lengths(seed: int) -> list[int]:
    chance = random.Random(seed)
    sizes = [0, 1, 63, 64, 65, 511, 512, 513, 1024, chance.randint(1, 3000), chance.randint(1, 6000)]
    return [chance.choice(sizes) for _ in range(chance.randint(1, 9))]


CUTS = {
    "one piece": (spec(2, 70, 777), None),
    "one row": (spec(2, 3, 1), None),
    "whole groups": (spec(1, 80, 1024), None),
    "split": (spec(2, 3, 4095), None),
    "split evenly": (spec(1, 2, 4096, 128), None),
    "split, short last": (spec(1, 3, 1025, 128), None),
    "split what is left over": (spec(5, 27, 1100), None),
    "split what is left over, D=128": (spec(3, 23, 1600, 128), None),
    "packed": (spec(1, 40), [1, 300, 64, 0, 700, 435, 0]),
    "packed, split": (spec(1, 2), [1, 300, 64, 0, 1700, 435, 0]),
    "packed, split, D=128": (spec(1, 2, D=128), [0, 5000, 0, 0, 513, 1]),
    **{f"random {i}": (spec(1, (1, 2, 30)[i % 3]), random_lengths(i)) for i in range(12)},
}
CUTS |= {  # the same with a decay for each token, which cuts both ways at the same rows
    f"{name}, tokens": (call._replace(has_decay=True, per_token=True), lengths)
    for name, (call, lengths) in CUTS.items()
}


@pytest.mark.parametrize("saved", [False, True], ids=["", "saved"])
@pytest.mark.parametrize("case", CUTS)
def test_every_row_is_visited_once(case, saved, h200):
    call, lengths = CUTS[case]
    if lengths is not None:
        call = call._replace(N=sum(lengths), sequences=len(lengths))
    if not call.N:
        pytest.skip("no rows")
    for names in (("o",), ("dv", "dk", "dq") if saved else ("dv", "dk"), ("state",)):
        found, cut = walks(call, names, lengths, saved)
        assert (cut.number > 1) == ("split" in case or cuda.tiles_of(call).forward_split.number > 1)
        seen: dict[tuple, torch.Tensor] = {}  # how often, row by row
        for w in found:
            assert 0 <= w.number < (cut.whole or call.B * call.H * cut.number * (call.sequences or 1))
            assert sorted(map(w.chunk, range(w.chunks))) == list(range(w.chunks))
            assert not w.chunks or w.partial() in ([n for n in range(w.chunks) if w.left(n) < C] or [-1])
            opens = 0  # as keep_state counts it
            for n in range(w.chunks):
                assert w.left(n) > 0
                assert (n == opens) == (w.chunk(n) % EVERY == 0) or not w.grouped
                if n == opens:
                    opens = n + EVERY if n else (w.chunks - 1) % EVERY + 1
                rows, key = w.own_rows(n), (w.sweep, w.tile, w.b, w.h)
                assert 0 <= rows.start < rows.stop <= call.N
                if key not in seen:
                    seen[key] = torch.zeros(call.N, dtype=torch.int32)
                seen[key][rows.start : rows.stop] += 1
        skipped = cut.whole if names == ("state",) else 0
        assert len(seen) == len(names) * (call.D // 64) * (call.B * call.H - skipped)
        assert torch.stack(list(seen.values())).eq(1).all()


@pytest.mark.parametrize("case", [name for name, (call, _) in CUTS.items() if call.D == 64])
def test_saved_states_do_not_collide_and_are_found_again(case, h200):
    """A slot for every (head, group of EVERY chunks): what the forward writes there, dq reads for the same rows."""
    call, lengths = CUTS[case]
    if lengths is not None:
        call = call._replace(N=sum(lengths), sequences=len(lengths))
    if not call.N:
        pytest.skip("no rows")
    heads, slots, *_ = cuda.saves(call)
    written: dict[tuple[int, int], tuple[int, int, int]] = {}
    for w in walks(call, ("o",), lengths)[0]:
        for n in range(0, w.chunks, EVERY):  # keep_state: w.slot + n / EVERY
            place = w.head, w.slot + n // EVERY
            assert place not in written
            assert 0 <= place[0] < heads
            assert 0 <= place[1] < slots
            written[place] = w.b, w.h, w.row(n)
    read = {}
    for w in walks(call, ("dv", "dk", "dq"), lengths, saved=True)[0]:
        if w.sweep == "dq":
            opened = None
            for n in range(w.chunks):
                if w.chunk(n) % EVERY == 0:  # opens_group: w.slot + w.chunk(n) / EVERY
                    opened = w.head, w.slot + w.chunk(n) // EVERY
                    assert opened not in read
                    read[opened] = w.b, w.h, w.row(n)
                assert opened == (w.head, w.slot + w.chunk(n) // EVERY)  # a chunk is in the group that is open
    assert read == written


@pytest.mark.parametrize("case", [name for name in CUTS if "split" in name])
def test_only_the_last_segments_are_left_out(case, h200):
    """not_last: of every sequence that has rows the segment that is walked last, in either direction."""
    call, lengths = CUTS[case]
    cu = None if lengths is None else [0, *itertools.accumulate(lengths)]
    if lengths is not None:
        call = call._replace(N=sum(lengths), sequences=len(lengths))
    for name in ("state", "dstate"):
        found, cut = walks(call, (name,), lengths)
        short = [Walk(i, call, cut, (name,), cu=cu, not_last=True, start=cut.whole) for i in range(len(found))]
        missing = [w for w, less in zip(found, short, strict=True) if w.length != less.length]
        sequences = call.B if lengths is None else sum(n > 0 for n in lengths)
        assert len(missing) == (sequences * call.H - cut.whole) * (call.D // 64)
        ends = set() if cu is None else set(cu)
        for w in missing:
            edge = w.first - w.length if w.ends_first() else w.first if w.reverse else w.first + w.length
            assert edge in ({0} if w.reverse else {call.N}) | ends


def test_wrong_offsets_stay_in_the_tensor(h200):
    """Clamped: whatever cu_seqlens says, no row beyond N is touched, no state beyond those there are."""
    for wrong in ([0, 5000, 1000, 2000], [-7, 300, 100, 9999], [2000, 0, 2000, 0], [0, 2**31 - 1, -(2**31), 7]):
        call = spec(1, 2, 2000, sequences=3)
        x = Residuals(torch.empty(0), None, None, None, None, torch.tensor(wrong, dtype=torch.int32))
        cut = cuda.segments(call, cuda.tiles_of(call).forward_split, x)
        run_all(triton_split.find_segment_offsets(call, x, cut), torch.device("cpu"))
        _, slots, *_ = cuda.saves(call)
        for block in range(call.H * cut.number):
            w = Walk(block, call, cut, ("o",), cu=wrong)
            for n in range(w.chunks):
                assert all(0 <= row < call.N for row in w.own_rows(n))
                assert 0 <= w.slot + n // EVERY < slots
