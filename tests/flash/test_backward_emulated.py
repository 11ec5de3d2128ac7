"""The CUDA backward of softmax attention, run on a CPU (tests/emulator): right, whenever copies and products happen."""

from __future__ import annotations

from collections.abc import Collection

import pytest
import torch

from fulmen import dispatch
from fulmen.dispatch import Choice
from fulmen.flash.kernels import backward
from fulmen.flash.policy_backward import BackwardTile, backward_tile
from fulmen.flash.spec import Residuals
from fulmen.testing import flash as testing
from tests import emulator
from tests.emulator import ANY, EARLY, LATE, MODES, PRESSED

pytestmark = pytest.mark.skipif(emulator.COMPILER is None, reason="the emulator needs g++")

PLAIN = {"H": 1, "N_Q": 150}
PACKED = {"lengths_q": [70, 1, 0, 45, 130], "lengths_k": [30, 1, 5, 170, 130], "causal": True}
ALL = {"H_KV": 1, "N_KV": 150, "causal": True, "window": (40, None), "softcap": 3.0, "sinks": True}
CASES = {  # D, how the tile differs, the call
    "64": (64, {}, PLAIN),
    "64 causal": (64, {}, {"H": 1, "N_Q": 300, "causal": True}),
    "64 more keys": (64, {}, {"N_Q": 70, "N_KV": 299, "causal": True, "H_KV": 1}),
    "64 fewer keys": (64, {}, {"N_Q": 270, "N_KV": 100, "causal": True}),
    "64 top left": (64, {}, {"N_Q": 130, "N_KV": 270, "causal": "top_left"}),
    "64 packed": (64, {}, PACKED),
    "64 packed, no keys": (64, {}, {"lengths_q": [70, 50], "lengths_k": [60, 0]}),
    "64 all": (64, {}, ALL),
    "64 two stages": (64, {"q_stages": 2}, {"N_Q": 200, "H_KV": 1, "causal": True}),
    "128": (128, {}, PLAIN),
    "128 causal": (128, {}, {"H": 1, "N_Q": 300, "causal": True}),
    "128 GQA": (128, {}, {"H": 4, "H_KV": 2, "N_Q": 99, "N_KV": 140, "causal": True, "B": 2}),
    "128 fewer keys": (128, {}, {"N_Q": 270, "N_KV": 100, "causal": True}),
    "128 packed": (128, {}, {**PACKED, "H": 4, "H_KV": 2, "sinks": True}),
    "128 packed full": (128, {}, {**PACKED, "causal": False}),
    "128 window": (128, {}, {"N_Q": 330, "window": (70, 30)}),
    "128 top left": (128, {}, {"N_Q": 300, "N_KV": 130, "window": (40, None), "causal": "top_left", "H_KV": 1}),
    "128 softcap": (128, {}, {**PLAIN, "softcap": 2.0}),
    "128 all": (128, {}, ALL),
    "128 two stages": (128, {"q_stages": 2}, PACKED),
    "128 no overlap": (128, {"overlap": False, "q_stages": 2}, {"N_Q": 200, "H_KV": 1, "causal": True}),
    "192": (192, {}, PLAIN),
    "192 causal": (192, {}, {"H": 1, "N_Q": 300, "causal": True}),
    "192 more keys": (192, {}, {"N_Q": 70, "N_KV": 299, "causal": True, "H_KV": 1}),
    "192 top left": (192, {}, {"N_Q": 130, "N_KV": 270, "causal": "top_left"}),
    "192 packed": (192, {}, {**PACKED, "H": 4, "H_KV": 2, "sinks": True}),
    "192 packed, no keys": (192, {}, {"lengths_q": [70, 50], "lengths_k": [60, 0]}),
    "192 softcap": (192, {}, {**PLAIN, "softcap": 2.0}),
    "192 all": (192, {}, ALL),
    "192 other stages": (192, {"q_stages": 2, "o_stages": 1, "keep": False}, PACKED),
    "256": (256, {}, PLAIN),
    "256 causal": (256, {}, {"H": 1, "N_Q": 300, "causal": True}),
    "256 GQA": (256, {}, {"H": 4, "H_KV": 2, "N_Q": 99, "N_KV": 140, "causal": True, "B": 2}),
    "256 fewer keys": (256, {}, {"N_Q": 270, "N_KV": 100, "causal": True}),
    "256 packed": (256, {}, {**PACKED, "H": 4, "H_KV": 2, "sinks": True}),
    "256 packed full": (256, {}, {**PACKED, "causal": False}),
    "256 window": (256, {}, {"N_Q": 330, "window": (70, 30)}),
    "256 top left": (256, {}, {"N_Q": 300, "N_KV": 130, "window": (40, None), "causal": "top_left", "H_KV": 1}),
    "256 softcap": (256, {}, {**PLAIN, "softcap": 2.0}),
    "256 all": (256, {}, ALL),
}
OFTEN = ("192 causal", "192 packed", "256 GQA", "256 all")
WIDTHS = [64, 128, pytest.param(192, marks=pytest.mark.nightly), 256]


def sampled(cases: Collection[str], often: Collection[str] = OFTEN) -> list:
    """As parameters of a test. Those of wide heads are nightly, but for a few."""
    nightly = [case.startswith(("192", "256", "wide")) and case not in often for case in cases]
    return [pytest.param(x, marks=pytest.mark.nightly) if y else x for x, y in zip(cases, nightly, strict=True)]


def inputs(D: int, options: dict, dtype: torch.dtype = torch.bfloat16, **more: object) -> testing.Inputs:
    return testing.inputs(D=D, E=128 if D == 192 else D, dtype=dtype, **{"H": 2, **options, **more})


def launched(
    x: testing.Inputs, o: torch.Tensor, lse: torch.Tensor, tile: BackwardTile, mode: int, seed: int = 0,
    edit: emulator.Edit = None, use: tuple[str, ...] = ("o", "lse"), deterministic: bool = False, sm_count: int = 132,
    together: int = 1,
) -> testing.Outputs:  # fmt: skip
    spec = x.spec(needs_grad=True, with_lse="lse" in use)._replace(deterministic=deterministic)
    choice = Choice("cuda", "sm90", None, 1, "cuda", tile._replace(fixed=deterministic))
    cu_k = x.cu_seqlens_q if x.cu_seqlens_k is None else x.cu_seqlens_k
    tensors = Residuals(x.q, x.k, x.v, x.sinks, x.cu_seqlens_q, cu_k)
    emulation = emulator.serve("flash", mode, seed, edit, sm_count, together)
    with emulation as emulated, pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(dispatch, "choose", lambda op, spec, backend: choice)
        found = dispatch.kernels("flash")["cuda"].backward(
            spec, tensors, o, lse, x.do, x.dlse if "lse" in use else None
        )
        assert emulated.launches == bool(spec.N_Q) + bool(spec.N_KV)
    return testing.Outputs(o, lse, *found)


def gradients(
    case: str, mode: int, seed: int = 0, edit: emulator.Edit = None, use: tuple[str, ...] = ("o", "lse"),
    dtype: torch.dtype = torch.bfloat16, deterministic: bool = False, sm_count: int = 132,
    together: int = 1,
) -> testing.Outputs:  # fmt: skip
    """Compared with fp64."""
    D, tile, options = CASES[case]
    x = inputs(D, options, dtype)
    exact = testing.reference(x, use)
    o, lse = exact.o.to(dtype), exact.lse.float()
    chosen = backward_tile(x.spec()._replace(deterministic=deterministic))._replace(**tile)
    outputs = launched(x, o, lse, chosen, mode, seed, edit, use, deterministic, sm_count, together)
    testing.compare(x, outputs, use)
    return outputs


@pytest.mark.parametrize("mode", MODES, ids=["early", "late", "any", "pressed"])
@pytest.mark.parametrize("case", sampled(CASES))
def test_right_on_the_emulator(case, mode):
    dtype = torch.float16 if len(case) % 4 == 1 else torch.bfloat16
    gradients(case, mode, len(case), dtype=dtype, use=("o",) if len(case) % 3 == 0 else ("o", "lse"))


@pytest.mark.parametrize(
    "case",
    sampled([
        "64 causal", "64 packed", "128", "128 GQA", "128 packed full", "128 window", "192", "192 packed", "256",
        "256 GQA", "256 packed full", "256 window",
    ], ["256 GQA"]),
)  # fmt: skip
def test_blocks_convert_dq_of_others(case):
    """On one SM, two blocks before; else, in calls as small as these, after all others."""
    gradients(case, ANY, sm_count=1)
    gradients(case, LATE, sm_count=1, deterministic=True)


@pytest.mark.parametrize(
    "case",
    sampled([
        "64 causal", "64 packed", "64 fewer keys", "128", "128 all", "128 GQA", "128 window", "128 fewer keys",
        "128 top left", "192 all", "192 top left", "256", "256 GQA", "256 window", "256 fewer keys",
    ]),
)  # fmt: skip
def test_deterministic_sums_are_right_and_the_same(case):
    """Every block waits for its turn, which must have come: blocks run in the order they start in."""
    first, *others = (gradients(case, mode, seed, deterministic=True) for seed, mode in enumerate((ANY, LATE, ANY)))
    for other in others:
        for mine, yours in zip(first[2:5], other[2:5], strict=True):
            assert torch.equal(mine, yours)


SEVERAL = [
    "64 causal", "64 packed", "64 top left", "128", "128 GQA", "128 packed", "128 window", "128 all",
    "192 causal", "192 packed", "192 top left", "256", "256 GQA", "256 packed", "256 window", "256 all",
]  # fmt: skip


@pytest.mark.parametrize("mode", MODES, ids=["early", "late", "any", "pressed"])
@pytest.mark.parametrize("case", sampled(SEVERAL, ["192 packed"]))
def test_blocks_at_the_same_time(case, mode):
    """Each takes several tiles, while others add to the same sums, and converts dq of others."""
    for deterministic in (False, True):
        gradients(case, mode, len(case), deterministic=deterministic, sm_count=2, together=2)
    gradients(case, mode, 1, sm_count=3, together=3)


@pytest.mark.parametrize("case", sampled(["64 causal", "128 GQA", "128 window", "192 top left", "256 GQA"]))
def test_a_block_that_starts_last(case):
    """Two run to their end before the third starts: nobody waits for it, and nothing is left for it."""
    gradients(case, ANY, sm_count=3, together=2, deterministic=True)


def check_beside_nan(D: int, edit: emulator.Edit = None) -> None:
    """Gradients of sequences that rows of NaN follow."""
    lengths = {"lengths_q": [70, 45], "lengths_k": [30, 100]}
    x = inputs(D, lengths, causal=True)
    exact = testing.reference(x)
    tile = backward_tile(x.spec())
    right = launched(x, exact.o.to(x.q.dtype), exact.lse.float(), tile, ANY)

    def longer(t: torch.Tensor) -> torch.Tensor:
        return torch.cat([t, torch.full_like(t, torch.nan)], 2)

    y = x._replace(**{name: longer(getattr(x, name)) for name in ("q", "k", "v", "do", "dlse")})
    outputs = launched(y, longer(exact.o.to(x.q.dtype)), longer(exact.lse.float()), tile, ANY, edit=edit)
    for mine, yours in zip(right[2:5], outputs[2:5], strict=True):
        assert torch.equal(mine, yours[:, :, : mine.shape[2]])


@pytest.mark.parametrize("D", WIDTHS)
def test_rows_of_no_sequence_do_not_matter(D):
    """They may hold anything: tiles that reach beyond a sequence read them."""
    check_beside_nan(D)


@pytest.mark.parametrize("rows", ["<M, D>", "<M, E>", "<N, SIZE>"], ids=["q", "do", "k and v"])
@pytest.mark.parametrize("D", WIDTHS[2:])
def test_rows_of_no_sequence_are_noticed(D, rows):
    with pytest.raises(AssertionError):
        check_beside_nan(D, (f") zero_rows{rows}", f" && false) zero_rows{rows}"))


def test_o_is_read_in_units_of_16_bytes(monkeypatch):
    """As a hook of saved tensors may hand it back, its rows do not begin at multiples of them."""
    x = inputs(64, PLAIN)
    exact = testing.reference(x, ("o",))
    o = torch.nn.functional.pad(exact.o.to(x.q.dtype), (0, 4))[..., :-4]
    launcher, read = backward.launcher, []
    monkeypatch.setattr(backward, "launcher", lambda *args: read.append(args[3].stride(2)) or launcher(*args))
    found = launched(x, o, exact.lse.float(), backward_tile(x.spec()), ANY, use=("o",))
    testing.compare(x, found, ("o",))
    assert read == [64]


@pytest.mark.parametrize("D", WIDTHS)
def test_wrong_offsets_lead_nowhere(D):
    """Nobody checks them on a GPU: gradients may be anything, but lie inside."""
    x = inputs(D, PACKED)
    exact = testing.reference(x)
    ends = torch.tensor([[0, 70, 60, 200, 246, 999], [0, 30, -5, 300, 206, 400]], dtype=torch.int32)
    wrong = x._replace(cu_seqlens_q=ends[0], cu_seqlens_k=ends[1])
    launched(wrong, exact.o.to(x.q.dtype), exact.lse.float(), backward_tile(x.spec()), ANY)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("D", WIDTHS)
@pytest.mark.parametrize("ends", [(0, 384, 0, 0, 384), (0, 200, 0, 384, 384)], ids=["last", "first"])
def test_nobody_waits_forever_for_wrong_offsets(ends, D, causal, deterministic):
    """Of the tiles of keys of a sequence the search gives the last, or the first, to another."""
    x = inputs(D, {"lengths_q": [70, 30, 30, 30], "lengths_k": [384, 0, 0, 0], "causal": causal, "H": 1})
    exact = testing.reference(x)
    wrong = x._replace(cu_seqlens_k=torch.tensor(ends, dtype=torch.int32))
    launched(wrong, exact.o.to(x.q.dtype), exact.lse.float(), backward_tile(x.spec()), ANY, deterministic=deterministic)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("D", WIDTHS)
def test_rows_before_the_first_sequence_do_not_matter(D, deterministic):
    """cu_seqlens that do not begin at 0: neither gradients of rows in a sequence nor the sinks' see those rows."""
    x = inputs(D, {"lengths_q": [140, 45], "lengths_k": [130, 100], "causal": True, "sinks": True})
    exact = testing.reference(x)
    right = launched(x, exact.o.to(x.q.dtype), exact.lse.float(), backward_tile(x.spec()), ANY)

    def after(t: torch.Tensor) -> torch.Tensor:
        return torch.cat([torch.full_like(t[:, :, :1], 3.0).repeat_interleave(260, 2), t], 2)

    y = x._replace(**{name: after(getattr(x, name)) for name in ("q", "k", "v", "do", "dlse")})
    y = y._replace(cu_seqlens_q=x.cu_seqlens_q + 260, cu_seqlens_k=x.cu_seqlens_k + 260)
    o, lse = after(exact.o.to(x.q.dtype)), after(exact.lse.float())
    found = launched(y, o, lse, backward_tile(x.spec()), ANY, deterministic=deterministic)
    testing.compare(x, testing.Outputs(right.o, right.lse, *(t[:, :, 260:] for t in found[2:5]), found.dsinks))


@pytest.mark.parametrize("D", [128, 192])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("N_Q", "N_KV"), [(0, 70), (70, 0)])
def test_without_queries_or_keys(N_Q, N_KV, deterministic, D):
    x = inputs(D, {"N_Q": N_Q, "N_KV": N_KV})
    o, lse = torch.zeros_like(x.do), torch.full(x.q.shape[:3], -torch.inf)
    found = launched(x, o, lse, backward_tile(x.spec()), ANY, deterministic=deterministic)
    assert not any(g.any() for g in found[2:5])


WRONG = r" error \d|not finite|not zero"
DV_IS_MADE = """            wgmma_wait<0>();
            dv_is_made();"""
DK_IS_MADE = """        wgmma_wait<0>();
        pin(w.dk);
        pin(w.ds);
"""
RELEASE_Q = "        if (reports) at.q.release(before);\n"
READ = "const Told told = *reinterpret_cast<const Told *>(shared + (at.tile - at.k));\n"
TELL = "        __syncwarp();\n        if (threadIdx.x % 32 == 0) mbarrier_arrive(at.heard);\n"
HEAR, HEARD_EARLY = f"{READ}{TELL}", f"{TELL}__syncwarp();\n{READ}"
# What the emulator must notice: a case, a passage, what stands there instead, in which mode, and what is said.
MISTAKES = {
    "do not waited for": ("64 causal", "at.o.wait(o);", ";", LATE, f"{WRONG}|all wait|has ended|more arrivals"),
    "q not waited for": ("128 causal", "at.q.wait(q);", ";", LATE, f"{WRONG}|all wait|has ended|more arrivals"),
    "k not waited for": (
        "64 causal", "mbarrier_wait(at.k_full, parity);", "", LATE, f"{WRONG}|all wait|more arrivals",
    ),
    "v not waited for": ("128", "mbarrier_wait(at.v_full, parity);", "", LATE, f"{WRONG}|more arrivals"),
    "ds not for wgmma to see": (
        "128", "\"r\"(ds[2 * j + 3]) : \"memory\");\n    }\n    fence_async();",
        "\"r\"(ds[2 * j + 3]) : \"memory\");\n    }", EARLY, WRONG,
    ),
    "no barrier of the consumers": (
        "64 causal", "if (!first) named_barrier_sync<256>(", "if (!first) named_barrier_arrive<256>(", ANY,
        f"{WRONG}|all wait",
    ),
    "a turn never handed on": ("128", "named_barrier_arrive<256>(TURN + 1 - consumer);", ";", ANY, "all wait"),
    "a turn handed on after the last tile": (
        "128 GQA", "(consumer == 0 || walk.left > 1)", "true", ANY, "all wait|more arrivals|has ended",
    ),
    "two buffers of ds": ("128 causal", "ds == at.ds + 2 * DS_BYTES ?", "ds == at.ds + DS_BYTES ?", PRESSED, WRONG),
    "do released too early": (
        "128 causal", DV_IS_MADE, "dv_is_made();\nwgmma_wait<0>();", PRESSED, WRONG,
    ),
    "q released too early": (
        "128 no overlap", DK_IS_MADE + RELEASE_Q, RELEASE_Q + DK_IS_MADE, PRESSED, WRONG,
    ),
    "q never released": ("64 two stages", RELEASE_Q, "", EARLY, "all wait"),
    "dq overwritten while it is added": (
        "128 GQA", "named_barrier_sync<160>(EMPTY + consumer);",
        "named_barrier_arrive<160>(EMPTY + consumer);", LATE, f"{WRONG}|all wait",
    ),
    "k and v of the next tile too early": (
        "128 GQA", "mbarrier_wait(empty, ~before & 1);", "", PRESSED, WRONG,
    ),
    "k released before the last dq": (
        "64 causal", "wgmma_wait<0>();\n    pin(dq);\n    if (reports) mbarrier_arrive(at.k_empty);",
        "if (reports) mbarrier_arrive(at.k_empty);\nwgmma_wait<0>();\npin(dq);", PRESSED, WRONG,
    ),
    "v released before the last dp": (
        "128 GQA", "        at.o.wait(o);\n",
        "at.o.wait(o); if (walk.left == 1 && reports) mbarrier_arrive(at.v_empty);\n", PRESSED,
        f"{WRONG}|more arrivals",
    ),
    "v never released": (
        "128 causal", "else if (reports) mbarrier_arrive(at.v_empty);", "", ANY, "all wait",
    ),
    "k and v of the tile before": ("64 causal", "told.loaded & 1", "0", LATE, f"{WRONG}|all wait|more arrivals"),
    "the last q of a tile never released": (
        "128 causal", "        if (reports) at.q.release(before);\n    }\n    float dq", "    }\n    float dq", ANY,
        "all wait",
    ),
    "a tile told before all have heard": (
        "64 causal", "mbarrier_wait(at.heard, parity ^ 1);", "", ANY, f"{WRONG}|all wait|more arrivals|no tensor's",
    ),
    "a tile read after it is heard": (
        "64 causal", HEAR, HEARD_EARLY, ANY, f"{WRONG}|all wait|more arrivals|no tensor's|different products",
    ),
    "the counter of tiles": ("128 causal", "*a.counter = 0;", "*a.counter = 1;", ANY, f"{WRONG}|all wait"),
    "a key too many": ("128 GQA", "if (g + 8 * r < rows)", "if (true)", EARLY, "outside a tensor"),
    "a query too many": ("64", "tile.n_q - row", "64", EARLY, "outside"),
    "the first to add does not store": ("64 causal", "if (turn) bulk_add", "if (true) bulk_add", EARLY, WRONG),
    "a sum passed on before it is made": (
        "128 causal", "if (now) bulk_wait<0>();\n            else if (count == 1) bulk_wait<1>();\n"
        "            else bulk_wait<2>();", "", LATE, WRONG,
    ),
    "the last to add never heard of": (
        "64", "tile.last_tile(a, from) - tile.first_tile(a, from) + 1", "tile.n_kv", EARLY, "for a block that starts",
    ),
    "a share of other queries": ("128", "share(n + 1, queries", "share(n, queries", EARLY, WRONG),
    "no zeros before the first key": ("128 fewer keys", "position + M - 1 + a.right < 0", "false", EARLY, WRONG),
    "no zeros after the last key": ("128 top left", "position - a.left >= n_kv", "false", EARLY, WRONG),
    "no zeros without keys": ("64 packed, no keys", "n_kv == 0 || ", "", EARLY, WRONG),
    "the diagonal hidden": ("64 causal", "at < see.first[r]", "at <= see.first[r]", EARLY, WRONG),
    "a mask too few": ("128 window", "LEFT && m > all_to", "LEFT && m > all_to + M", EARLY, WRONG),
    "no gradient of lse": ("128", "if (a.dlse) delta -= a.dlse[at];", "", EARLY, WRONG),
    "the cap's slope": ("128 softcap", "y[c] * (1.0f - x * x)", "y[c]", EARLY, WRONG),
    "the sink's weight": ("128 all", "exp2_(sink - lse) * delta", "exp2_(sink) * delta", EARLY, WRONG),
    "heads of a group in one place": ("128 GQA", "slot += a.slots;", "slot += 0;", EARLY, "no tensor's"),
}  # fmt: skip
WAITED = f"{WRONG}|all wait|has ended|more arrivals"
WIDE_DV_IS_MADE = "        wgmma_wait<1>();\n        pin(p);\n        pin(dv);\n"
WIDE_DP_IS_MADE = "        wgmma_wait<0>();\n        pin(dp);\n        pin(kept);\n"
WIDE_DK_IS_MADE = "        wgmma_wait<1>();\n        pin(ds);\n        pin(dk);\n"
RELEASE_O, RELEASE_OTHER_Q = (f"        if (reports) at.{x}.release(x.{x});\n" for x in "oq")
WIDE = {
    "wide: do not waited for": ("256 causal", "at.o.wait(x.o);", ";", LATE, WAITED),
    "wide: q not waited for": ("192 causal", "at.q.wait(x.q);", ";", LATE, WAITED),
    "wide: keys not waited for": ("256 causal", "mbarrier_wait(full, parity);", "", LATE, WAITED),
    "wide: p not waited for": (
        "192 causal", "named_barrier_sync<256>(WEIGHTS);", "named_barrier_arrive<256>(WEIGHTS);", ANY, WAITED,
    ),
    "wide: ds not waited for": (
        "256 causal", "named_barrier_sync<256>(GRADIENTS);", "named_barrier_arrive<256>(GRADIENTS);", ANY, WAITED,
    ),
    "wide: do released before dv": (
        "256 causal", WIDE_DV_IS_MADE + RELEASE_O, RELEASE_O + WIDE_DV_IS_MADE, PRESSED, WRONG,
    ),
    "wide: do released before dp": (
        "192 other stages", WIDE_DP_IS_MADE + RELEASE_O, RELEASE_O + WIDE_DP_IS_MADE, PRESSED, WRONG,
    ),
    "wide: q released before dk": (
        "256 causal", WIDE_DK_IS_MADE + RELEASE_OTHER_Q, RELEASE_OTHER_Q + WIDE_DK_IS_MADE, PRESSED, WRONG,
    ),
    "wide: q never released": ("192 causal", RELEASE_OTHER_Q, "", EARLY, "all wait"),
    "wide: dq overwritten while it is added": (
        "256", "named_barrier_sync<160>(EMPTY + ", "named_barrier_arrive<160>(EMPTY + ", LATE, WAITED,
    ),
    "wide: two pieces in one buffer": (
        "256", "return piece < BUFFERS ? piece", "return piece < 1 ? piece", ANY, WAITED,
    ),
    "wide: other columns kept": ("192", "PANEL, d % 4 * 2,", "PANEL, d % 4,", EARLY, WRONG),
    "wide: columns of another piece": ("192", "at.k + piece * N * 128", "at.k + N * 128", EARLY, WRONG),
    "wide: sums of another piece": ("256", "PIECES + from + i;", "PIECES + from;", EARLY, WRONG),
    "wide: a buffer freed before it is read": (
        "256", "of_next = TWO || adder == 0 || adder + 1 == ADDERS;", "of_next = true;", LATE, WAITED,
    ),
    "wide: a sum passed on before it is made": (
        "256 causal", "if (now) bulk_wait<0>();\n            else if", "if (now) ;\n            else if", LATE, WRONG,
    ),
    "wide: k released before the last dq": (
        "256 GQA", "        named_barrier_sync<256>(GRADIENTS);",
        "if (walk.left == 0 && reports) mbarrier_arrive(at.k_empty);\nnamed_barrier_sync<256>(GRADIENTS);", PRESSED,
        f"{WRONG}|more arrivals",
    ),
    "wide: v released before the last dp": (
        "256 GQA", "        fresh(dp);\n",
        "fresh(dp); if (walk.left == 1 && reports) mbarrier_arrive(at.v_empty);\n", PRESSED, WAITED,
    ),
    "wide: v never released": (
        "192 causal", "if (walk.left == 0 && reports) mbarrier_arrive(at.v_empty);", "", ANY, "all wait",
    ),
    "wide: ds not for wgmma to see": (
        "256", "\"r\"(ds[2 * j + 3]) : \"memory\");\n    }\n    fence_async();",
        "\"r\"(ds[2 * j + 3]) : \"memory\");\n    }", EARLY, WRONG,
    ),
    "wide: the cap's slope": ("256 softcap", "SOFTCAP ? pack(", "false ? pack(", EARLY, WRONG),
    "wide: lse for delta": ("192", "x.q.stage) + M", "x.q.stage)", EARLY, WRONG),
    "wide: a mask too few": ("256 window", "LEFT && m > all_to", "LEFT && m > all_to + M", EARLY, WRONG),
}  # fmt: skip
MISTAKES |= WIDE
NOTICED_OFTEN = [
    f"wide: {what}" for what in (
        "p not waited for", "ds not waited for", "do released before dp", "sums of another piece", "lse for delta",
        "the cap's slope", "v never released",
    )
]  # fmt: skip
assert set(NOTICED_OFTEN) < set(WIDE)


def often(mistake: str) -> None:
    case, passage, instead, mode, _ = MISTAKES[mistake]
    for seed in range(8):
        gradients(case, mode, seed, (passage, instead))


@pytest.mark.parametrize("mistake", sampled(MISTAKES, NOTICED_OFTEN))
def test_a_mistake_is_noticed(mistake):
    with pytest.raises(AssertionError, match=MISTAKES[mistake][-1]):
        often(mistake)


@pytest.mark.parametrize(
    ("case", "passage", "instead", "words"),
    [
        ("128 causal", "tile = t / size;", "tile = a.tiles - 1 - t / size;", "for a block that starts later"),
        ("64 causal", "wait_for_turn(a.turns + part, turn)", "wait_for_turn(a.turns + part, 1)", "comes after its"),
        ("128 window", "max(own, (m + shift - a.left) / N)", "own", "for a block that starts later"),
        ("256 causal", "wait_for_turn(a.turns + part, turn)", "wait_for_turn(a.turns + part, 1)", "comes after its"),
    ],
    ids=["later blocks first", "any order", "tiles of keys that are not seen", "any order of wide heads"],
)  # fmt: skip
def test_a_mistake_of_the_fixed_order_is_noticed(case, passage, instead, words):
    with pytest.raises(AssertionError, match=words):
        gradients(case, EARLY, edit=(passage, instead), deterministic=True)
