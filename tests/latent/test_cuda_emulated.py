"""The CUDA kernel of latent attention, run on a CPU (tests/emulator): right, whenever copies and products happen."""

from __future__ import annotations

import pytest
import torch

import fulmen
from fulmen import dispatch
from fulmen.dispatch import Choice
from fulmen.latent import op
from fulmen.latent.policy import LatentTile
from fulmen.testing import latent as testing
from tests import emulator
from tests.emulator import ANY, EARLY, LATE, MODES, PRESSED

pytestmark = pytest.mark.skipif(emulator.COMPILER is None, reason="the emulator needs g++")

CASES = {
    "one tile": (1, {"H": 16, "N_KV": 50}),
    "two tiles": (1, {"H": 64, "N_KV": 128}),
    "three tiles": (1, {"H": 70, "N_KV": 190}),
    "lengths": (1, {"B": 5, "H": 3, "N_KV": 300, "lengths": [0, 1, 64, 65, 300]}),
    "split": (3, {"B": 4, "H": 16, "N_KV": 500, "lengths": [500, 0, 64, 129]}),
    "more splits than tiles": (9, {"B": 2, "H": 5, "N_KV": 300, "lengths": [300, 20]}),
    "many splits": (70, {"H": 5, "N_KV": 2300}),
    "causal": (1, {"B": 3, "H": 20, "N_Q": 5, "N_KV": 200, "lengths": [200, 3, 66], "causal": True}),
    "causal, split": (4, {"B": 2, "H": 5, "N_Q": 70, "N_KV": 330, "lengths": [330, 40], "causal": True}),
    "bnhd": (2, {"B": 2, "H": 6, "N_Q": 3, "N_KV": 200, "layout": "bnhd", "causal": True}),
    "pages of 16": (1, {"B": 3, "H": 16, "N_KV": 200, "lengths": [200, 17, 0], "page": 16}),
    "pages of 32, split": (2, {"B": 2, "H": 16, "N_KV": 300, "lengths": [300, 65], "page": 32}),
    "pages of 64": (1, {"B": 2, "H": 16, "N_Q": 2, "N_KV": 300, "lengths": [290, 64], "page": 64, "causal": True}),
    "pages of 256": (2, {"B": 2, "H": 16, "N_KV": 600, "lengths": [600, 257], "page": 256}),
    "pages, no lengths": (1, {"B": 2, "H": 2, "N_KV": 96, "page": 32}),
}


def attend(
    x: testing.Inputs, splits: int, mode: int, seed: int = 0, edit: emulator.Edit = None, keys: int = 32
) -> torch.Tensor:
    """o, which was compared with fp64."""
    choice = Choice("cuda", "cuda", LatentTile(keys), splits, "cuda")
    with emulator.serve("latent", mode, seed, edit) as emulated, pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(dispatch, "choose", lambda op, spec, backend: choice)
        with torch.no_grad():
            o = fulmen.latent_attention(x.q, x.kv, **x.options(), backend="cuda")
        assert emulated.launches == 1 + (splits > 1)
    testing.compare(x, o)
    return o


@pytest.mark.parametrize("mode", MODES, ids=["early", "late", "any", "pressed"])
@pytest.mark.parametrize("case", CASES)
def test_right_on_the_emulator(case, mode):
    """Tiles of 32 and 64 keys by turns."""
    splits, options = CASES[case]
    keys = 32 << (list(CASES).index(case) + mode) % 2
    x = testing.inputs(**{"D": 576, "E": 512} | options, dtype=torch.float16 if mode == LATE else torch.bfloat16)
    attend(x, splits, mode, seed=mode, keys=keys)


@pytest.mark.parametrize("seed", range(3))
def test_the_same_bits_in_any_order(seed):
    x = testing.inputs(2, 16, 1, 400, 576, 512, lengths=[400, 130], page=16, dtype=torch.bfloat16)
    assert torch.equal(attend(x, 2, ANY, seed), attend(x, 2, PRESSED, seed + 7))


MISTAKES = {
    "p is not waited for": ("    named_barrier_sync<256>(2 - consumer);", ""),
    "p is handed out before it is there": ("    store_rows(w.s, at.p, warp);\n", ""),
    "p is not fenced": ("    fence_async();\n    named_barrier_arrive<256>(1 + consumer);",
                        "    named_barrier_arrive<256>(1 + consumer);"),
    "a stage is released too early": ("a.factor);\n        wgmma_wait<1>();",
                                      "a.factor);\n"
                                      "        at.release(j - 1, consumer);\n        wgmma_wait<1>();"),
    "rows beyond the end are not zeroed": ("store_zeros(kv + i * PANEL + unit * 16);", ";"),
    "the other's maxima are not taken": ("        w.x.m[r] = m;\n", ""),
    "l of the other is left out": ("w.x.l[r] += other[row_of_lane(r)];", ";"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_found(mistake):
    """Each in one of the modes at least."""
    x = testing.inputs(2, 16, 1, 500, 576, 512, lengths=[500, 330], dtype=torch.bfloat16)
    for mode in MODES:
        try:
            attend(x, 1, mode, edit=MISTAKES[mistake])
        except AssertionError:
            return
    pytest.fail("not found")


WAIT = "key + BLOCK_N > task.length - a.n_q) wait_for_new_data();"
WRITE = """{
    char *kv = *(char *const *)&a.kv + ((long long)task.b * a.n_kv + task.length - a.n_q) * 2 * D;
    for (int i = 0; i < a.n_q * 2 * D; i++) kv[i] = kv[i + a.n_q * 2 * D];
}"""
QUERIES = "    if (APPENDED) wait_for_new_data();\n    Work w;"
TURN = """    static bool written = false;
    for (long long i = 0; !written && i < (long long)a.batch * a.h * a.n_q * D; i++) ((short *)a.q)[i] ^= 0x8000;
    written = true;
    Work w;"""
APPENDED = {
    "keys": ((WAIT, WAIT[: -len("wait_for_new_data();")] + WRITE), True),
    "keys before the wait": ((WAIT, "false) ;"), False),
    "keys of a tile that begins before them": ((WAIT, f"key + BLOCK_N > task.length) {WRITE}"), False),
    "queries": ((QUERIES, TURN), True),
}  # fmt: skip


@pytest.mark.parametrize("case", APPENDED)
def test_what_the_launch_ahead_writes_is_waited_for(case):
    """It writes the last keys of a row, which are NaN before the producer waits, or q, which has the other sign."""
    edit, right = APPENDED[case]
    x = testing.inputs(2, 16, 3, 300, 576, 512, lengths=[266, 129], causal=True, dtype=torch.bfloat16)
    q, kv = x.q.clone(), x.kv.clone()
    if case == "queries":
        q = -q
    else:
        for b, end in enumerate(x.kv_lengths.tolist()):
            kv[b, end : end + 3] = kv[b, end - 3 : end]
            kv[b, end - 3 : end] = torch.nan
    choice = Choice("cuda", "cuda", LatentTile(64), 1, "cuda")
    with emulator.serve("latent", EARLY, 0, edit), pytest.MonkeyPatch.context() as monkeypatch, torch.no_grad():
        monkeypatch.setattr(dispatch, "choose", lambda op, spec, backend: choice)
        o = op.attend(q, kv, 512, x.kv_lengths, None, None, True, None, "cuda", appended=True)
    if right:
        testing.compare(x, o)
    else:
        assert o.isnan().any()


@pytest.mark.parametrize("splits", [1, 3])
def test_appended_has_the_same_bits(splits):
    x = testing.inputs(2, 16, 2, 400, 576, 512, lengths=[400, 130], page=16, causal=True, dtype=torch.bfloat16)
    choice = Choice("cuda", "cuda", LatentTile(32), splits, "cuda")
    with emulator.serve("latent", ANY), pytest.MonkeyPatch.context() as monkeypatch, torch.no_grad():
        monkeypatch.setattr(dispatch, "choose", lambda op, spec, backend: choice)
        arguments = (x.q, x.kv, 512, x.kv_lengths, None, x.page_table, True, None, "cuda")
        assert torch.equal(op.attend(*arguments, appended=True), op.attend(*arguments))


def test_an_entry_too_many_is_noticed():
    """The last row of the page table is read beyond its end, for the part of a tile that has no keys."""
    x = testing.inputs(2, 16, 1, 200, 576, 512, page=16, dtype=torch.bfloat16)
    with pytest.raises(AssertionError, match="no tensor's"):
        attend(x, 1, ANY, edit=("if (!PAGED || key + i * BOX < task.length)", "if (true)"))
