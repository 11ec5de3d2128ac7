"""The CUDA kernels of softmax attention, run on a CPU (tests/emulator): right, whenever copies and products happen."""

from __future__ import annotations

import functools

import pytest
import torch

import fulmen
from fulmen import dispatch
from fulmen.dispatch import Choice
from fulmen.flash.kernels import combine
from fulmen.flash.policy import SingleTile, Sm90Tile, SmallTile
from fulmen.flash.spec import Residuals
from fulmen.testing import flash as testing
from tests import emulator
from tests.emulator import ANY, EARLY, LATE, MODES, PRESSED
from tests.flash.test_cuda import launched_with

pytestmark = pytest.mark.skipif(emulator.COMPILER is None, reason="the emulator needs g++")


def launched(kind: type, *fields: int, splits: int = 1, **options: int) -> Choice:
    return launched_with(kind(*fields, **options), splits)


S, O, G = (functools.partial(launched, kind) for kind in (SmallTile, SingleTile, Sm90Tile))
FULL = {"H_KV": 1, "N_KV": 150, "causal": True, "window": (40, None), "softcap": 3.0, "sinks": True}
PACKED = {"lengths_q": [70, 1, 0, 45], "lengths_k": [30, 1, 5, 170], "causal": True}
BLIND = {"N_Q": 150, "N_KV": 40, "causal": True}  # rows that see no key
SHORT = {
    "16x128": (S(1, 4, 128, 1), 64, {"N_Q": 70, "N_KV": 99}),
    "16x128 blind": (S(1, 4, 128, 1), 64, BLIND),
    "32x128": (S(2, 2, 128, 1), 64, {"N_Q": 128, "causal": True}),
    "64x64 once": (S(4, 1, 64, 1), 64, {"N_Q": 64, "N_KV": 50, "H_KV": 1}),
    "64x128": (S(4, 1, 128, 1, 4), 64, {"N_Q": 128, "causal": True}),
    "64x128 blind": (S(4, 1, 128, 1, 4), 64, BLIND),
    "64x64": (S(4, 1, 64, 4), 64, {"N_Q": 129, "N_KV": 300}),
    "128x64": (S(8, 1, 64, 2), 64, {"N_Q": 130, "causal": True}),
    "D=128 16x64": (S(1, 4, 64, 2), 128, {"N_Q": 33, "N_KV": 170, "causal": True}),
    "D=128 32x64": (S(2, 2, 64, 2), 128, {"N_Q": 129, "H_KV": 1}),
    "D=128 64x64 blind": (S(4, 1, 64, 2), 128, BLIND),
}
ONCE = {
    "128": (O(128), 64, {"N_Q": 150, "N_KV": 99}),
    "128 causal": (O(128), 64, {"N_Q": 128, "causal": True, "H_KV": 1}),
    "128 blind": (O(128), 64, BLIND),
    "64": (O(64), 64, {"N_Q": 64, "N_KV": 50}),
    "64 top left": (O(64), 64, {"N_Q": 90, "N_KV": 33, "causal": "top_left"}),
    "80": (O(80), 64, {"N_Q": 99, "N_KV": 77}),
    "2x80": (O(80, 2), 64, {"N_Q": 160, "causal": True}),
    "2x128": (O(128, 2, 3), 64, {"N_Q": 250, "causal": True}),
    "2x128 blind": (O(128, 2, 3), 64, {**BLIND, "N_Q": 350, "N_KV": 200}),
    "4x64": (O(64, 4, 3), 64, {"N_Q": 70, "N_KV": 200}),
    "128 grouped": (O(128, pack_gqa=True), 64, {"H": 8, "H_KV": 2, "N_Q": 37, "N_KV": 99}),
    "64 grouped": (O(64, pack_gqa=True), 64, {"H": 16, "H_KV": 1, "N_Q": 9, "N_KV": 60, "causal": True, "B": 2}),
    "2x80 grouped": (O(80, 2, 4, True), 64, {"H": 4, "H_KV": 2, "N_Q": 150, "causal": True}),
    "grouped blind": (O(128, pack_gqa=True), 64, {**BLIND, "H": 4, "H_KV": 1}),
    "D=128 grouped": (O(128, 1, 2, True), 128, {"H": 64, "H_KV": 1, "N_Q": 3, "N_KV": 100, "causal": True}),
    "D=128": (O(128, 1, 2), 128, {"N_Q": 99, "N_KV": 120, "causal": True}),
    "D=128 80": (O(80, 1, 3), 128, {"N_Q": 70, "N_KV": 77}),
    "D=128 2x64": (O(64, 2, 2), 128, {"N_Q": 99, "N_KV": 128}),
}
HOPPER = {
    "64x128": (G(1, 128, 2, blocks_per_sm=2), 64, {"N_Q": 70, "N_KV": 299}),
    "64x128 packed": (G(1, 128, 2, blocks_per_sm=2), 64, PACKED),
    "128x128": (G(2, 128, 2), 64, {"N_Q": 270, "N_KV": 300, "causal": True}),
    "128x128 parts": (G(2, 128, 2, swizzle=1), 64, {"N_Q": 130, "B": 2}),
    "192x128 turns": (G(3, 128, 2, True), 64, {"N_Q": 400, "causal": True}),
    "192x128 blind": (G(3, 128, 2), 64, BLIND),
    "128x128 full": (G(2, 128, 2), 64, FULL),
    "128x128 grouped": (G(2, 128, 2, pack_gqa=True), 64, {"H": 4, "H_KV": 1, "N_Q": 77, "causal": True}),
    "D=128 64x80": (G(1, 80, 2, blocks_per_sm=2), 128, {"N_Q": 99, "N_KV": 333, "causal": True}),
    "D=128 packed": (G(2, 128, 2), 128, PACKED),
    "D=128 128x176": (G(2, 176, 2), 128, {"N_Q": 200, "N_KV": 400}),
    "D=128 grouped": (G(2, 128, 2, pack_gqa=True), 128, {**PACKED, "H": 4, "H_KV": 2, "sinks": True}),
    "D=192": (G(2, 128, 2), 192, {"E": 128, "N_Q": 150, "causal": True}),
    "D=256": (G(2, 80, 2), 256, {"N_Q": 100, "N_KV": 180, "causal": True}),
    "D=256 full": (G(2, 80, 2), 256, FULL),
    "heads as queries": (
        G(1, 128, 2, blocks_per_sm=2), 64,
        {"H": 10, "H_KV": 2, "N_Q": 1, "N_KV": 299, "causal": True, "softcap": 3.0, "layout": "bnhd"},
    ),
    "heads not as queries": (
        G(1, 128, 2, blocks_per_sm=2), 64, {"H": 10, "H_KV": 2, "N_Q": 1, "N_KV": 299, "causal": "top_left"},
    ),
}  # fmt: skip
SPLIT = {
    "64x128": (G(1, 128, 2, blocks_per_sm=2, splits=3), 64, {"N_Q": 5, "N_KV": 700}),
    "64x128 causal": (G(1, 128, 2, blocks_per_sm=2, splits=4), 64, {"N_Q": 70, "N_KV": 555, "causal": True}),
    "64x128 grouped": (
        G(1, 128, 2, blocks_per_sm=2, pack_gqa=True, splits=5), 64, {"H": 8, "H_KV": 2, "N_Q": 3, "N_KV": 900},
    ),
    "all": (G(2, 128, 2, splits=2), 64, {**FULL, "N_KV": 400}),
    "many": (G(1, 128, 2, blocks_per_sm=2, splits=20), 64, {"H": 1, "N_Q": 2, "N_KV": 2600, "sinks": True}),
    "blind": (G(1, 128, 2, blocks_per_sm=2, splits=2), 64, {"N_Q": 350, "N_KV": 300, "causal": True}),
    "D=128 64x80": (
        G(1, 80, 2, blocks_per_sm=2, splits=7), 128, {"N_Q": 2, "N_KV": 600, "causal": True, "sinks": True},
    ),
    "D=128 more than there are": (G(1, 80, 2, blocks_per_sm=2, splits=6), 128, {"N_Q": 9, "N_KV": 250}),
    "D=192": (G(2, 128, 2, splits=3), 192, {"E": 128, "N_Q": 40, "N_KV": 500, "B": 2}),
    "D=256": (G(2, 80, 2, splits=3), 256, {"N_Q": 20, "N_KV": 400, "causal": True}),
}  # fmt: skip
# Over a cache; NaN lies beyond its lengths and in pages that are not used.
CACHE = {
    "64x128": (G(1, 128, 2, blocks_per_sm=2), 64, {"kv_lengths": [300, 1, 0, 128], "capacity": 300}),
    "64x128 grouped": (
        G(1, 128, 2, blocks_per_sm=2, pack_gqa=True, splits=3), 64,
        {"kv_lengths": [300, 0, 129, 500], "capacity": 400, "H": 8, "N_Q": 2, "causal": True, "sinks": True},
    ),
    "D=128 64x80": (
        G(1, 80, 2, blocks_per_sm=2, pack_gqa=True, splits=4), 128,
        {"kv_lengths": [300, 79, 0], "capacity": 320, "H": 4, "H_KV": 1, "max_kv_length": 250},
    ),
    "D=128 chunk": (
        G(2, 128, 2), 128, {"kv_lengths": [200, 30], "capacity": 256, "N_Q": 140, "causal": True, "window": (50, None)},
    ),
    "packed": (
        G(2, 128, 2, pack_gqa=True, splits=2), 64,
        {"kv_lengths": [300, 9, 0, 40], "capacity": 300, "lengths_q": [70, 1, 3, 0], "causal": True, "H": 4},
    ),
    "heads as queries": (
        G(2, 128, 2, splits=2), 64, {"kv_lengths": [300, 1, 0], "capacity": 304, "page": 16, "H": 72, "H_KV": 1},
    ),
    "D=256": (G(2, 80, 2, splits=2), 256, {"kv_lengths": [170, 5], "capacity": 170, "softcap": 3.0, "N_Q": 3}),
    "pages of 16": (
        G(1, 64, 3, blocks_per_sm=2, pack_gqa=True, splits=3), 128,
        {"kv_lengths": [300, 1, 0, 97], "capacity": 304, "page": 16, "H": 4, "H_KV": 1, "N_Q": 2, "causal": True},
    ),
    "pages of 48": (G(2, 128, 2), 64, {"kv_lengths": [144, 300], "capacity": 336, "page": 48, "N_Q": 3, "sinks": True}),
    "pages of 64": (
        G(1, 128, 2, blocks_per_sm=2, pack_gqa=True), 64,
        {"kv_lengths": [300, 64, 200], "capacity": 320, "page": 64, "H": 16, "layout": "bnhd"},
    ),
    "pages of 256": (G(2, 64, 2, splits=2), 256, {"kv_lengths": [300, 256], "capacity": 512, "page": 256}),
    "pages, packed": (
        G(1, 64, 3, blocks_per_sm=2, pack_gqa=True, splits=2), 128,
        {"kv_lengths": [300, 9, 0, 40], "capacity": 320, "page": 32, "lengths_q": [3, 1, 3, 0], "causal": True, "H": 4},
    ),
}  # fmt: skip
CASES = {f"short {n}": c for n, c in SHORT.items()} | {f"once {n}": c for n, c in ONCE.items()}
CASES |= {f"hopper {n}": c for n, c in HOPPER.items()} | {f"split {n}": c for n, c in SPLIT.items()}
CASES |= {f"cache {n}": c for n, c in CACHE.items()}


def inputs(D: int, options: dict, dtype: torch.dtype) -> testing.Inputs:
    given = {"H": 2, **options}
    if "kv_lengths" in given:
        return testing.cache_inputs(D=D, dtype=dtype, **{"N_Q": 1, "H_KV": 2} | given)
    return testing.inputs(D=D, dtype=dtype, **({"N_Q": 150} | given if "lengths_q" not in given else given))


def attend(
    choice: Choice, x: testing.Inputs, mode: int, seed: int = 0, edit: emulator.Edit = None, sm_count: int = 132
) -> tuple[torch.Tensor, torch.Tensor]:
    """o and lse, which were compared with fp64."""
    with emulator.serve("flash", mode, seed, edit, sm_count) as emulated, pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(dispatch, "choose", lambda op, spec, backend: choice)
        with torch.no_grad():
            o, lse = fulmen.flash_attention_with_lse(x.q, x.k, x.v, **x.options(), backend="cuda")
        assert emulated.launches == 1 + (choice.splits > 1)
    testing.compare(x, testing.Outputs(o, lse, None, None, None, None))
    return o, lse


@pytest.mark.parametrize("mode", MODES, ids=["early", "late", "any", "pressed"])
@pytest.mark.parametrize("case", CASES)
def test_right_on_the_emulator(case, mode):
    choice, D, options = CASES[case]
    dtype = torch.float16 if len(case) % 4 == 1 else torch.bfloat16
    attend(choice, inputs(D, options, dtype), mode, seed=len(case))


CASES_OF_EACH = [
    "short 16x128",
    "short 64x128 blind",
    "once 2x128",
    "hopper 192x128 turns",
    "hopper D=128 packed",
    "split all",
    "cache pages of 16",
]


@pytest.mark.parametrize("case", CASES_OF_EACH)
def test_the_same_bits_in_every_order(case):
    choice, D, options = CASES[case]
    x = inputs(D, options, torch.bfloat16)
    results = [attend(choice, x, ANY, seed) for seed in range(5)]
    for o, lse in results[1:]:
        assert torch.equal(o, results[0][0])
        assert torch.equal(lse, results[0][1])


@pytest.mark.parametrize("case", [name for name in CASES if name.startswith(("split", "cache"))])
def test_few_blocks_take_all_parts(case):
    choice, D, options = CASES[case]
    attend(choice, inputs(D, options, torch.bfloat16), ANY, sm_count=1)


def test_rows_before_the_first_sequence_are_not_written():
    """If cu_seqlens do not begin at 0, which nobody checks on a GPU."""
    choice, D, options = CASES["hopper D=128 grouped"]
    x = inputs(D, options, torch.bfloat16)
    o, lse = attend(choice, x, ANY)
    q, k, v = (torch.cat([torch.full_like(t[:, :, :1], 3.0).repeat_interleave(260, 2), t], 2) for t in (x.q, x.k, x.v))
    y = x._replace(q=q, k=k, v=v, cu_seqlens_q=x.cu_seqlens_q + 260, cu_seqlens_k=x.cu_seqlens_k + 260)
    with emulator.serve("flash", ANY), pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(dispatch, "choose", lambda op, spec, backend: choice)
        forward = dispatch.kernels("flash")["cuda"].forward
        cu = (y.cu_seqlens_q, y.cu_seqlens_k)
        found, of_rows = forward(y.spec(with_lse=True), Residuals(q, k, v, y.sinks, *cu))
    assert torch.equal(found[:, :, 260:], o)
    assert torch.equal(of_rows[:, :, 260:], lse)
    assert found[:, :, :260].isnan().all()
    assert (of_rows[:, :, :260] == -torch.inf).all()  # they have no part in the sinks' gradients


def test_entries_out_of_range_are_clamped():
    choice, D, options = CASES["cache pages of 16"]
    x = inputs(D, options, torch.bfloat16)
    used = torch.nn.functional.pad(x.page_table[:, 1:], (1, 0), value=10_000)
    last = used[1:2, :1].clamp(0, x.k.shape[0] - 1).long()
    for t in (x.k, x.v):
        t[last] = torch.randn(t[last].shape).to(t.dtype)
    attend(choice, x._replace(page_table=used), ANY)


MASKS = [(None, None), (None, 0), (100, 0), (7, 30), (300, None), (0, 0), (None, 50)]


@pytest.mark.parametrize("window", MASKS)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("causal", [False, "top_left"])
@pytest.mark.parametrize("swizzle", [0, 1, 3])
def test_every_query_sees_all_its_keys(window, packed, causal, swizzle):
    """Of blocks that take several tiles each, from the first to the last and back."""
    lengths = {"lengths_q": [130, 0, 1, 260], "lengths_k": [20, 7, 0, 300]}
    sizes = lengths if packed else {"B": 2, "N_Q": 300, "N_KV": 200}
    x = testing.inputs(H=2, D=64, window=window, causal=causal, dtype=torch.bfloat16, **sizes)
    attend(G(2, 128, 2, swizzle=swizzle), x, ANY, sm_count=3)


@pytest.mark.parametrize("case", ["split 64x128", "split D=128 64x80"])
def test_a_combine_of_many_rows(case, monkeypatch):
    """Two sides instead of eight."""
    monkeypatch.setattr(combine, "MANY_BLOCKS", 0)
    choice, D, options = CASES[case]
    attend(choice, inputs(D, options, torch.bfloat16), ANY, 1)


WRONG = r" error \d|not finite|not zero"
# What the emulator must notice: a case, a passage, what stands there instead, in which mode, and what is said.
MISTAKES = {
    "q not waited for": ("short 64x128 blind", "if (!blocks) {", "if (false) {", ANY, f"{WRONG}|on their way"),
    "v not waited for": (
        "short 32x128", "if (SINGLE_BLOCK) {\n            cp_async_wait<0>();", "if (SINGLE_BLOCK) {", LATE, WRONG,
    ),
    "a row too many": ("short 16x128", "left > 0 ? 16 : 0", "16", EARLY, "no tensor's"),
    "a row too many, out": ("short D=128 16x64", "if (m0 + r < a.n_q)", "if (true)", EARLY, "outside a tensor"),
    "not for wgmma to see": (
        "once 128", "cp_async_wait<PENDING>();\n    fence_async();", "cp_async_wait<PENDING>();", EARLY, WRONG,
    ),
    "v not waited for, at once": (
        "once 80", "await_copies<2 * (PARTS - PART) - 2>();", "await_copies<2 * (PARTS - PART) - 1>();", LATE, WRONG,
    ),
    "a row too many, at once": ("once 64", "from, left > 0", "from, true", EARLY, "no tensor's"),
    "a query too many": ("once 128 grouped", "position < a.n_q);", "true);", EARLY, "no tensor's"),
    "a row too many, at once, out": (
        "once D=128", "const bool there = position < a.n_q;", "const bool there = true;", EARLY, "outside a tensor",
    ),
    "not a row too many to end with": (
        "once 2x128 blind", "cp_async_wait<0>();                 // for keys that no row sees", "", LATE,
        "on their way",
    ),
    "a part of the keys twice": (
        "split 64x128", "first += before * BLOCK_N;", "first += max(0, before - 1) * BLOCK_N;", EARLY, WRONG,
    ),
    "parts put together as they are": ("split D=256", "exp2_(found[j].x - pivot)", "1.0f", EARLY, WRONG),
    "sums read before they are there": (
        "split D=128 64x80", "partial[threadIdx.x] = y;\n    __syncthreads();", "partial[threadIdx.x] = y;", ANY, WRONG,
    ),
    "k not waited for": (
        "hopper 64x128", "at.k.wait(k);", ";", LATE, f"{WRONG}|all wait|more arrivals",
    ),
    "p made too early": (
        "hopper 128x128", "wgmma_wait<0>();\n    pin(w.s);",
        "to_operand(w.p, w.s);\n    wgmma_wait<0>();\n    pin(w.s);", LATE, WRONG,
    ),
    "a stage never released": (
        "hopper 128x128", "if (reports) at.v.release(v);", "", EARLY, "all wait",
    ),
    "values beyond the length": (
        "cache 64x128", "if (RAGGED && key", "if (PACKED && key", EARLY, WRONG,
    ),
    "sums of a split without keys": (
        "cache 64x128 grouped", "if (weight == 0.0f) continue;", "", EARLY, WRONG,
    ),
    "the page of the block before": (
        "cache pages of 64", "here = next;", "", EARLY, WRONG,
    ),
    "a lane that waits for a stage that is refilled": (
        "hopper 128x128", "__syncwarp();                   // no lane", "// no lane", EARLY, "all wait",
    ),
    "keys that are seen left out": (
        "hopper 128x128", "end - key <= 64", "end - key <= 100", EARLY, WRONG,
    ),
    "an entry too many": (
        "cache pages of 48", "min(key / PAGE, a.row_pages - 1)", "key / PAGE", EARLY, "no tensor's",
    ),
    "a stage released too early": (
        "hopper D=128 64x80", "wgmma_wait<1>();\n    pin(w.s);\n    if (reports) at.k.release(k);",
        "if (reports) at.k.release(k);\n    wgmma_wait<1>();\n    pin(w.s);", PRESSED, WRONG,
    ),
}  # fmt: skip


def often(mistake: str) -> None:
    case, passage, instead, mode, _ = MISTAKES[mistake]
    choice, D, options = CASES[case]
    for seed in range(8):
        attend(choice, inputs(D, options, torch.bfloat16), mode, seed, (passage, instead))


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_noticed(mistake):
    with pytest.raises(AssertionError, match=MISTAKES[mistake][-1]):
        often(mistake)
