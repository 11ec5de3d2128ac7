"""The CUDA kernels of lightning attention, run on a CPU (tests/emulator): results, states and all gradients against
fp64, whenever copies and products happen."""

from __future__ import annotations

import pytest
import torch

from fulmen import dispatch
from fulmen.lightning.spec import Residuals, spec_of
from fulmen.testing import lightning as testing
from tests import emulator
from tests.emulator import ANY, LATE, MODES, PRESSED
from tests.lightning.test_token_decay import fast_tokens

pytestmark = pytest.mark.skipif(emulator.COMPILER is None, reason="the emulator needs g++")
CASES = {
    "D=64": {"N": 200, "D": 64},
    "D=64 decay": {"N": 333, "D": 64, "decay": "mixed", "initial_state": True},
    "D=64 groups": {"H": 1, "N": 1000, "D": 64, "decay": "mixed"},  # two of saved states, the second not full
    "D=64 bnhd": {"N": 130, "D": 64, "layout": "bnhd", "B": 2},
    "D=64 packed": {"D": 64, "lengths": [0, 1, 70, 0, 129], "decay": "mixed"},
    "D=64 packed groups": {"H": 1, "D": 64, "lengths": [700, 200]},
    "D=64 packed none": {"D": 64, "lengths": [64, 3, 190]},
    "D=128": {"N": 200, "D": 128},
    "D=128 long": {"H": 1, "N": 600, "D": 128},
    "D=128 decay": {"N": 333, "D": 128, "decay": "mixed", "initial_state": True},
    "D=128 one": {"H": 1, "N": 1, "D": 128, "decay": "mixed"},
    "D=128 packed": {"H": 1, "D": 128, "lengths": [100, 0, 65], "decay": "mixed"},
    "D=64 token": {"N": 333, "D": 64, "decay": "token", "initial_state": True},
    "D=64 extreme": {"B": 2, "N": 130, "D": 64, "decay": "extreme", "layout": "bnhd"},
    "D=64 token, packed": {"D": 64, "lengths": [0, 1, 70, 0, 129], "decay": "token"},
    "D=64 token, groups": {"H": 1, "N": 1000, "D": 64, "decay": "token"},
    "D=128 token": {"N": 200, "D": 128, "decay": "token", "initial_state": True},
    "D=128 token, long": {"H": 1, "N": 600, "D": 128, "decay": "token"},
    "D=128 E=64 token": {"H": 4, "groups": 2, "N": 150, "D": 128, "E": 64, "decay": "token", "layout": "fused"},
    "D=128 E=64 long": {"H": 2, "groups": 1, "N": 600, "D": 128, "E": 64, "decay": "token", "initial_state": True},
    "D=128 E=64 packed": {"H": 2, "groups": 1, "D": 128, "E": 64, "lengths": [65, 0, 70], "decay": "extreme"},
}
SPLIT = {  # over blocks, and how many launches that takes
    "D=64": ({"H": 1, "N": 1100, "D": 64, "initial_state": True}, 4),
    "D=64 decay": ({"H": 1, "N": 1600, "D": 64, "decay": "mixed"}, 4),
    "D=128": ({"H": 1, "N": 1100, "D": 128}, 5),
    "D=128 decay": ({"H": 2, "N": 1030, "D": 128, "decay": "mixed", "initial_state": True}, 5),
    "packed": ({"H": 1, "D": 64, "lengths": [700, 0, 600], "decay": "mixed"}, 4),
    "D=64 token": ({"H": 1, "N": 1100, "D": 64, "decay": "token", "initial_state": True}, 4),
    "D=128 token": ({"H": 1, "N": 1100, "D": 128, "decay": "token", "initial_state": True}, 6),
    "D=128 E=64 token": (
        {"H": 2, "groups": 1, "N": 1100, "D": 128, "E": 64, "decay": "token", "initial_state": True},
        6,
    ),
    "packed token": ({"H": 1, "D": 64, "lengths": [700, 0, 600], "decay": "token"}, 4),
    "packed extreme": ({"H": 1, "D": 64, "lengths": [700, 0, 600], "decay": "extreme"}, 4),
    "left over": ({"B": 3, "H": 3, "N": 1100, "D": 64, "decay": "mixed", "initial_state": True}, 4),
}


def drawn(options: dict) -> testing.Inputs:
    """Inputs; a decay for each token requires its gradient."""
    x = testing.inputs(**options, dtype=torch.bfloat16)
    return x if x.decay is None or x.decay.ndim == 1 else x._replace(decay=x.decay.requires_grad_())


def check(options: dict, mode: int, seed: int = 0, edit: emulator.Edit = None) -> testing.Outputs:
    with emulator.serve("lightning", mode, seed, edit) as emulated:
        result = testing.check(drawn({"H": 2, **options}), "cuda")
        assert emulated.launches == (2 if options["D"] == 64 else 3)
    return result


@pytest.mark.parametrize("mode", MODES, ids=["early", "late", "any", "pressed"])
@pytest.mark.parametrize("case", CASES)
def test_right_on_the_emulator(case, mode):
    check(CASES[case], mode)


@pytest.mark.parametrize("mode", [ANY, PRESSED], ids=["any", "pressed"])
@pytest.mark.parametrize("case", SPLIT)
def test_a_split_sequence(case, mode):
    options, launches = SPLIT[case]
    with emulator.serve("lightning", mode, sm_count=8 if case == "left over" else 132) as emulated:
        testing.check(drawn(options), "cuda")
        assert emulated.launches == launches


@pytest.mark.parametrize(
    "options",
    [
        {"D": 64},
        {"D": 64, "H": 1, "lengths": [300, 1, 0, 70]},
        {"D": 128, "H": 1, "N": 300},  # a cluster, and the state's part in registers of its own
        {"D": 128, "E": 64, "groups": 2},
    ],
    ids=["D=64", "packed", "D=128", "D=128 E=64"],
)
def test_summed_over_tokens(options):
    """A factor of each head's decay, as Mamba-2's A: heads that forget a state within a chunk."""
    x = fast_tokens(**options)
    with emulator.serve("lightning", ANY):
        testing.check_summed(x, testing.evaluate(testing.backend("cuda"), x).ddecay)


@pytest.mark.parametrize(
    "edit",
    [
        ("w.slot) * EVERY + place;", "w.slot) * EVERY + place / EVERY * EVERY;"),
        ("if (at.decay(n).keep < BEGINS) {", "if (false) {"),
        ("part[0] * since[0]", "part[0]"),
        ("row + 8 < left ?", "false ?"),
        ("of_state += __shfl_xor_sync(~0u, of_state, bit);", ""),
    ],
    ids=["stored as another chunk's", "left out", "not decayed", "half of the rows", "not summed"],
)
@pytest.mark.parametrize("D", [64, 128])
def test_a_mistake_about_what_enters_a_chunk_is_noticed(D, edit):
    x = fast_tokens(D=D, N=300, rate=0.3)
    with emulator.serve("lightning", ANY, edit=edit), pytest.raises(AssertionError, match="sums over tokens"):
        testing.check_summed(x, testing.evaluate(testing.backend("cuda"), x).ddecay)


def test_a_decay_that_is_no_number_shows():
    """From its row on. On a GPU nobody reads decays before the kernel does."""
    x = drawn({"H": 1, "N": 200, "D": 64, "decay": "token"})
    spec = spec_of(x.q, x.k, x.v, x.decay, **x.options())
    decay = x.decay.detach().clone()
    decay[0, 0, 70] = torch.nan
    with emulator.serve("lightning", ANY):
        o, _ = dispatch.kernels("lightning")["cuda"].forward(spec, Residuals(x.q, x.k, x.v, decay, None, None))
    assert o[0, 0].isnan().any(1).tolist() == [row >= 70 for row in range(200)]


@pytest.mark.parametrize("case", ["D=64 decay", "D=128 decay"])
def test_the_same_bits_in_every_order(case):
    first, *others = (check(CASES[case], ANY, seed) for seed in range(5))
    for other in others:
        for name, a, b in zip(first._fields, first, other, strict=True):
            assert a is None or torch.equal(a, b), name


WRONG = r" error \d|not finite|not zero"
# What the emulator must notice: a case, a passage, what stands there instead, in which mode, and what is said.
MISTAKES = {
    "a block of a cluster ends first": (
        "D=128", "for (int n = w.chunks; n < w.chunks + STAGES; n++) at.await_empty(n);", ";", ANY, "has ended",
    ),
    "a state not fenced": (
        "D=64", "store_rows(y.state, state, y.warp);\n            fence_async();",
        "store_rows(y.state, state, y.warp);", LATE, WRONG,
    ),
    "an output not fenced": (
        "D=64", "store_rows(out, from, warp);\n        fence_async();", "store_rows(out, from, warp);", LATE, WRONG,
    ),
    "an output's buffer used again too early": (
        "D=64 groups", "if (leads) tma_store_wait_read<BUFFERS - 1>();", "", LATE, WRONG,
    ),
    "the one buffer of a wide output used again too early": (
        "D=128 E=64 long", "tma_store_wait_read<BUFFERS - 1>();", "tma_store_wait_read<1>();", LATE, WRONG,
    ),
    "half of a wide output's products": (
        "D=128 E=64 token", "j < 8 * WIDTH; j += 2", "j < 8; j += 2", ANY, WRONG,
    ),
    "registers a wide product reads": (
        "D=128 E=64 token",
        "            wgmma_wait<0>();\n            pin(y.out);\n            keep_alive(y.q, x.zero);\n",
        "            y.q[0] = 0;\n", LATE, WRONG,
    ),
    "a buffer that was written by hand is not counted": (
        "D=64 packed groups", "if (leads) tma_store_commit();  // an empty group", "// ", LATE, WRONG,
    ),
    "c read before it came": ("D=64 decay", "mbarrier_wait(at.full + 8 * stage, parity);", "", LATE, WRONG),
    "a stage released too early": (
        "D=128 long", "wgmma_wait<0>();\n        pin(y.state);\n        release(free);",
        "release(free);\n        wgmma_wait<0>();\n        pin(y.state);", PRESSED, WRONG,
    ),
    "registers a product reads": (
        "D=64 decay", "fetch(n + 1, next);", "fetch(n + 1, c);", LATE, WRONG,
    ),
    "products with rows that did not come yet": (
        "D=128 token", "mbarrier_wait(at.rows_full + 8 * who, parity);", "", LATE,
        f"{WRONG}|more arrivals",
    ),
    "a stage released before its rows are read": (
        "D=64 token, groups",
        "multiply_output(at, n);\n"
        "            release(at.empty + n % STAGES * 8);",
        "release(at.empty + n % STAGES * 8);\n"
        "            multiply_output(at, n);",
        PRESSED, WRONG,
    ),
    "products written before they are there": (
        "D=64 token", "        at.await_empty(n);\n        if (products && n >= STAGES)",
        "        if (products && n >= STAGES)", LATE, f"{WRONG}|more arrivals",
    ),
    "products of the last chunks left out": (
        "D=64 token", "n < w.chunks + (products ? STAGES : 0)", "n < w.chunks", ANY, WRONG,
    ),
    "a place counted wrong between groups": (
        "D=64 token, groups", "at += group - end;", "at += group - end + 1;", ANY, "below 0",
    ),
    "rows that come while others are in use": (
        "D=128 token, long",
        "named_barrier_sync<128>(2 + who);\n        if (next) load_rows(x, at, w, *next);",
        "if (next) load_rows(x, at, w, *next);\n        named_barrier_sync<128>(2 + who);",
        PRESSED, f"{WRONG}|all wait",
    ),
    "bits that have decayed between other rows": (
        "D=64 token", "d.since[row + 8]}", "d.since[row + 7]}", ANY, WRONG,
    ),
    "a row below 0 stored": (
        "D=64", "if (left >= C || !(PACKED || reverse(w))) {", "if (true) {", LATE, "below 0",
    ),
    "a stage free when one of two outputs is made": (
        "D=128 E=64 long", "(JOINED ? 12 : OUTS ? 8 : 4)", "(OUTS ? 8 : 4)", PRESSED, "all wait|more arrivals",
    ),
    "a state replaced when one of two outputs is made": (
        "D=128 E=64 long", "JOINED ? 8 : 4)", "4)", PRESSED, "all wait|more arrivals",
    ),
    "the one published state replaced before it was read": (
        "D=128 long", "else if (n) mbarrier_wait(at.state_empty + 8 * (turn ^ 1), (n - 1) / 2 % 2);", "",
        PRESSED, f"{WRONG}|more arrivals|all wait",
    ),
    "dk from the state as dv reads it": (
        "D=128 E=64 token", "b + j * 16 * 128 / 16, j > 0);", "b + j * 2, j > 0);", ANY, WRONG,
    ),
    "products of dk with v": (
        "D=128 E=64 token", "return DK ? at.a(n) : at.rows(n);", "return at.rows(n);", ANY, WRONG,
    ),
}  # fmt: skip


def often(mistake: str) -> None:
    case, passage, instead, mode, _ = MISTAKES[mistake]
    for seed in range(8):
        check(CASES[case], mode, seed, (passage, instead))


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_noticed(mistake):
    with pytest.raises(AssertionError, match=MISTAKES[mistake][-1]):
        often(mistake)
