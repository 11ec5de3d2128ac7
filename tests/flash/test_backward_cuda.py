"""The CUDA backward compiled, without a GPU: it fits, does not spill, and its products overlap; and its policy."""

from __future__ import annotations

import re

import pytest
import torch

from fulmen import cuda, dispatch, hardware
from fulmen.flash import cuda as flash
from fulmen.flash.kernels import backward
from fulmen.flash.policy_backward import BackwardTile, backward_tile, lag, swizzle, workspace
from fulmen.flash.spec import FlashSpec
from fulmen.hardware import TARGETS
from tests import sass
from tests.flash.test_cuda import ALL, CAP, PACKED, VARIANTS_90, WINDOW, spec
from tests.pairs import marked

CALLS = [
    *[spec(2, 16, 8192, D, causal) for D in (64, 128) for causal in (False, True)],
    spec(2, 16, 8192, 64, True, torch.float16),
    *[spec(1, 16, 8192, D, True, **option) for D in (64, 128) for option in (WINDOW, PACKED, CAP, ALL)],
]
CALLS += [
    spec(1, 16, 8192, D, causal, dtype, E=E, **option)
    for D, E in ((192, 128), (256, 256))
    for causal, dtype, option in (
        (False, torch.bfloat16, {}), (True, torch.bfloat16, {}), (True, torch.float16, {}),
        *((True, torch.bfloat16, option) for option in (WINDOW, PACKED, CAP, ALL)),
    )
]  # fmt: skip
CALLS += [call._replace(deterministic=True) for call in CALLS]


def name_of(call: FlashSpec) -> str:
    options = [n for n in ("left", "right", "softcap", "sequences") if getattr(call, n) is not None]
    return " ".join([str(call.D), str(call.dtype)[6:], *options, *["deterministic"] * call.deterministic])


def check_products(call: FlashSpec, tile: BackwardTile) -> None:
    """All five of a tile, with dp or dv under way while exponentials are taken."""
    code, usage = cuda.compile_variant(backward.variants(call, tile)[1])
    assert usage.spilled == 0 or (call.sequences is not None and call.D != 192)
    assert not usage.warnings, usage.warnings  # such as products made one after the other
    assert usage.registers == 168  # of 384 threads
    assert backward.shared_bytes(call, tile) <= TARGETS[90].smem_bytes
    text = sass.disassemble(code)
    assert sass.overwritten(text) == []
    assert sass.read_early(text) == []
    loop = text[text.index("HGMMA.") : text.rindex("HGMMA.")]
    assert not re.search(r"\b(STL|LDL)\b", loop)  # packed, where a tile lies may wait outside
    each = {"s": call.D, "dp": call.E, "dv": tile.block_m, "dk": tile.block_m, "dq": 128, "last dq": 128}
    if tile.wide:
        each |= {"dq": call.D, "last dq": 0}  # 64 keys of each piece of 64 columns
    ahead = call.D // 16 if tile.overlap else 0  # s of the first tile
    assert text.count("HGMMA.") == sum(each.values()) // 16 + ahead
    assert text.count("tnspA") == (each["dq"] + each["last dq"]) // 16
    sums = 1 if not tile.wide else 4 if call.D == 256 else 3  # pieces
    assert text.count("UBLKRED") == sums
    assert text.count("UBLKCP.G.S") == sums  # the first to add stores
    if tile.wide:
        check_order(call, text)
    loops = sass.product_loops(text)
    assert len(loops) == 1 + tile.wide  # one of each consumer
    if call.softcap is None and (tile.wide or call.left is None):
        assert not any("R2UR" in line for loop in loops for line in loop)  # values moved back would cost 5 %


def check_order(call: FlashSpec, text: str) -> None:
    """The products of both consumers of backward_wide.cu, by their columns, and how many run on after a wait."""
    found: list[str] = []
    for line in text.splitlines():
        if product := re.search(r"HGMMA\.64x(\d+)x.*gsb0", line):
            found.append(product[1])
        elif wait := re.search(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x(\d+)", line):
            found.append(f"wait {wait[1]}")
    dq = "64, wait 0"
    first = ", ".join(["64, wait 0", f"{call.E}, 64, wait 1", *[dq] * (call.D // 128)])  # s; dv, s of the next tile; dq
    second = f"64, wait 0, 64, {call.D}, wait 1, 64, wait 1, wait 0"  # dp; dq, dk; dq
    assert ", ".join(found) in (f"{first}, {second}", f"{second}, {first}")


VARIANTS = {call: backward.variants(call, backward_tile(call))[1] for call in CALLS}


@pytest.mark.parametrize("call", marked(VARIANTS), ids=name_of)
def test_fits_and_overlaps(call):
    check_products(call, backward_tile(call))


@pytest.mark.parametrize("change", [{"overlap": False}, {"q_stages": 2}], ids=str)
def test_other_tiles_fit(change):
    call = spec(2, 16, 8192, 128, True)
    check_products(call, backward_tile(call)._replace(**change))


@pytest.mark.parametrize("change", [{"keep": False}], ids=str)
def test_other_wide_tiles_fit(change):
    call = spec(1, 16, 8192, 192, True, E=128)
    check_products(call, backward_tile(call)._replace(**change))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "call",
    [spec(1, 16, 8192, 64), spec(1, 16, 8192, 128, True, **ALL), spec(1, 16, 8192, 192, E=128), spec(1, 16, 8192, 256)],
    ids=name_of,
)
def test_the_prologue_does_not_spill(call, dtype):
    call = call._replace(dtype=dtype)
    for sinks in {torch.float32, dtype}:
        code, usage = cuda.compile_variant(backward.variants(call, backward_tile(call), sinks)[0])
        assert (usage.spilled, usage.warnings) == (0, ())
        assert sass.read_early(sass.disassemble(code)) == []
        assert usage.registers <= (64 if call.E < 256 else 128)  # twice the loads of a thread, half the blocks of an SM


@pytest.mark.skipif(torch.cuda.is_available(), reason="pretends that there is a GPU")
def test_served_and_explained(monkeypatch, compiled_elsewhere):
    compiled_elsewhere([*VARIANTS.values(), *VARIANTS_90.values()])
    monkeypatch.setattr(hardware, "of", lambda device: TARGETS[90])
    call = spec(2, 16, 4096, 128, True, needs_grad=True)
    choice = dispatch.choose("flash", call, "cuda")
    assert choice.backward == "cuda"
    assert choice.workspace == 4 * 2 * 16 * (4096 * (128 + 2) + 2 * 64) + 4
    assert str(choice).endswith("backward 64 queries x 128 keys, 65.0 MiB workspace")
    assert flash.supports(call) is None
    assert not str(dispatch.choose("flash", call._replace(needs_grad=False), "cuda")).count("workspace")
    few = spec(1, 40, 2048, 128, True, H_KV=8, needs_grad=True)  # 128 blocks, and the longest decides
    assert dispatch.choose("flash", few, "cuda").backward == "cudnn"
    for others in (few._replace(N_Q=4096, N_KV=4096), few._replace(H_KV=40), few._replace(right=None)):
        assert dispatch.choose("flash", others, "cuda").backward == "cuda"
    assert dispatch.choose("flash", few._replace(deterministic=True), "cuda").backward == "cuda"


@pytest.mark.skipif(torch.cuda.is_available(), reason="pretends that there is a GPU")
@pytest.mark.parametrize(("D", "E"), [(192, 128), (256, 256)])
def test_wide_heads_are_served_and_explained(monkeypatch, compiled_elsewhere, D, E):
    compiled_elsewhere([*VARIANTS.values(), *VARIANTS_90.values()])
    monkeypatch.setattr(hardware, "of", lambda device: TARGETS[90])
    call = spec(1, 16, 4096, D, True, E=E, needs_grad=True)
    assert dispatch.choose("flash", call, "cuda").backward == ("cudnn" if D == 192 else "cuda")  # which is ahead there
    changes: list[dict] = [{"right": None}, {"left": 100}, {"softcap": 20.0}, {"has_sinks": True}]
    changes += [{"deterministic": True}, {"with_lse": True}, {"sequences": 3}]
    for change in changes:
        choice = dispatch.choose("flash", call._replace(**change), "cuda")
        assert (choice.backward, choice.backward_tile.block_n) == ("cuda", 64)
        assert flash.supports(call._replace(**change)) is None
    choice = dispatch.choose("flash", call._replace(right=None), "cuda")
    assert choice.workspace == 4 * 16 * (4096 * (D + 2) + 3 * 64) + 4
    assert str(choice).endswith(f"backward 64 queries x 64 keys, {choice.workspace / 2**20:.1f} MiB workspace")
    few = spec(1, 8, 2048, D, True, E=E, H_KV=4, needs_grad=True)  # 128 blocks, and the longest decides
    assert dispatch.choose("flash", few, "cuda").backward == "cudnn"
    more = dispatch.choose("flash", few._replace(N_Q=8192, N_KV=8192), "cuda")
    assert more.backward == ("cudnn" if D == 192 else "cuda")


@pytest.mark.parametrize(
    ("call", "why"),
    [
        (spec(N=1 << 29), "up to 268435456 queries and keys"),
        (spec(B=1 << 14, H=1 << 17), "up to 1073741824 tiles of 128 keys"),
    ],
)
def test_refuses_in_words(call, why):
    assert why in backward.unsupported_reason(call)


def test_the_workspace_holds_all_tiles():
    for options in ({}, {"has_sinks": True}, {"deterministic": True}, PACKED, {"sequences": 900}):
        call = spec(2, 3, 1000, 128, **options)
        tile = backward_tile(call)
        blocks = 6 * (16 if call.sequences is None else 1000 // 64 + call.sequences)
        parts = workspace(call, tile)
        assert parts.rows == blocks * 64 * 128
        assert parts.drawn - parts.rows == blocks * 128
        assert parts.turns - parts.drawn == blocks * call.has_sinks
        assert parts.counter - parts.turns == 2 * blocks  # one for each adder
        assert parts.end - parts.counter == 1


def test_short_packed_sequences_do_not_fill_the_memory(monkeypatch):
    monkeypatch.setattr(hardware, "of", lambda device: TARGETS[90])
    packed = spec(1, 32, 65536, 64, True, needs_grad=True)
    for sequences, whose in ((None, "cuda"), (16, "cuda"), (512, "cuda"), (4096, "triton"), (65536, "triton")):
        choice = dispatch.choose("flash", packed._replace(sequences=sequences), "cuda")
        assert choice.backward == whose
        assert choice.workspace <= 2 * 4 * 32 * 65536 * 64 + 2**28
        assert ("backward triton" in str(choice)) == (whose == "triton")


def test_a_block_for_each_sm(monkeypatch):
    """Without queries no prologue clears the counter of tiles: each has its own block."""
    monkeypatch.setattr(hardware, "of", lambda device: TARGETS[90])
    monkeypatch.setattr(cuda, "Launch", lambda *args, early: args)

    def grid_and_tiles(call: FlashSpec) -> tuple[int, int, int]:
        x, tile = torch.empty(call.B, call.H, 1, call.D, dtype=call.dtype), backward_tile(call)
        _, (_, _, grid, _, _, constants) = backward.launches(call, tile, x, x, x, x, x, None)
        return grid[0], constants["works"], constants["end"]

    assert grid_and_tiles(spec(2, 16, 8192, 64)) == (132, 32 * 64, 32 * 64 + 132 + 16 * 64)
    assert grid_and_tiles(spec(1, 2, 512, 64, True)) == (16, 8, 16)
    assert grid_and_tiles(spec(2, 16, 8192, 64, N_Q=0)) == (2 * 32 * 64, 32 * 64, 2 * 32 * 64)
    assert grid_and_tiles(spec(1, 14, 8192, 128)) == (132, 14 * 64, 14 * 64 + 264)
    assert grid_and_tiles(spec(1, 16, 8192, 128, True, **WINDOW))[0] == 132


def test_dq_is_converted_a_wave_after_its_last_sum():
    hw = TARGETS[90]
    assert lag(spec(2, 16, 8192, 128, True), 2, hw) == 264
    assert lag(spec(2, 16, 8192, 128), 2, hw) == 264  # 128 tiles of two heads
    assert lag(spec(4, 32, 4096, 64), 8, hw) == 132 + 256


def test_a_fixed_order_where_it_costs_little():
    """Over any order: 0.95 to 1.03, and of the others 1.03 to 1.27, or other kernels too near."""
    gqa = {"H_KV": 8}
    for call, fixed in (
        (spec(4, 32, 2048, 128), True), (spec(1, 32, 4096, 128), True), (spec(2, 16, 8192, 128), True),
        (spec(1, 40, 4096, 128, **gqa), True), (spec(1, 40, 4096, 128, True, **gqa), True),
        (spec(4, 32, 4096, 64), True), (spec(1, 16, 2048, 128), False), (spec(2, 12, 2048, 64), False),
        (spec(1, 40, 2048, 128, **gqa), False), (spec(1, 32, 4096, 128, True), False),
        (spec(4, 32, 4096, 64, True), False), (spec(1, 16, 16384, 128), False), (spec(8, 16, 4096, 256), False),
        (spec(4, 32, 4096, 128, left=1000), False), (spec(4, 32, 4096, 128, softcap=20.0), False),
        (spec(1, 32, 4096, 128, sequences=3), False),
    ):  # fmt: skip
        assert backward_tile(call).fixed == fixed, call
        assert backward_tile(call._replace(deterministic=True)).fixed
        for order in (call, call._replace(deterministic=True)):
            macros = dict(backward.variants(order, backward_tile(order))[1].macros)
            assert macros["DETERMINISTIC"] == backward_tile(order).fixed
        assert ("fixed order" in str(backward_tile(call))) == fixed


def test_heads_at_a_time_fit_the_cache():
    hw = TARGETS[90]
    assert swizzle(spec(1, 14, 8192, 128), hw) == 2  # three would fit
    assert swizzle(spec(2, 16, 8192, 128), hw) == 8  # in a fixed order
    assert swizzle(spec(2, 16, 8192, 128, True), hw) == 16  # or the longest tile of the last two heads decides
    assert swizzle(spec(2, 16, 8192, 128, True, sequences=3), hw) == 2
    assert swizzle(spec(1, 32, 4096, 128, True), hw) == 4
    assert swizzle(spec(2, 16, 8192, 128, True, deterministic=True), hw) == 16  # which wait for each other less
    assert swizzle(spec(1, 1, 8192, 128, deterministic=True), hw) == 1
    assert swizzle(spec(1, 16, 4096, 256, True, deterministic=True), hw) == 8  # 512 tiles
    assert swizzle(spec(2, 16, 8192, 256, True, deterministic=True), hw) == 4
    assert swizzle(spec(1, 16, 4096, 256, deterministic=True), hw) == 4
    assert swizzle(spec(1, 7, 8192, 128), hw) == 1
    assert swizzle(spec(1, 16, 1 << 20, 128), hw) == 8
    assert swizzle(spec(1, 16, 4096, 128, True, H_KV=8), hw) == 4  # two would fit, and four run at once
    assert swizzle(spec(1, 40, 4096, 128, True, H_KV=8, left=100), hw) == 8
    assert swizzle(spec(1, 2, 128, 128), hw) == 2
    assert swizzle(spec(1, 2, 0, 128), hw) == 2
    assert swizzle(spec(1, 16, 4096, 256), hw) == 2  # 64 tiles a head; three would fit
    assert swizzle(spec(1, 16, 4096, 256, True), hw) == 2
