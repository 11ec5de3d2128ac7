"""The CUDA sources compiled, without a GPU, for each architecture we promise: they fit and do not spill."""

from __future__ import annotations

import itertools
import re

import pytest
import torch

from fulmen import cuda, dispatch, hardware
from fulmen.dispatch import Choice
from fulmen.flash import cuda as flash
from fulmen.flash import policy
from fulmen.flash.kernels import single_tile, small
from fulmen.flash.kernels import sm90 as sm90_kernel
from fulmen.flash.policy import SingleTile, Sm90Tile, SmallTile
from fulmen.flash.spec import FlashSpec, Residuals
from fulmen.hardware import TARGETS
from fulmen.testing import flash as testing
from tests import sass
from tests.pairs import covering_variants, marked

CUDA = torch.device("cuda", 0)


def spec(B=1, H=1, N=128, D=64, causal=False, dtype=torch.bfloat16, **options) -> FlashSpec:
    options = {"right": 0 if causal else None, "N_Q": N, "N_KV": N, "H_KV": H, "E": D} | options
    return FlashSpec(B=B, H=H, D=D, dtype=dtype, device=CUDA, scale=D**-0.5, **options)


def chosen(call: FlashSpec) -> Choice:
    return policy.choose(call, TARGETS[90], "cuda")


def unsplit(call: FlashSpec) -> Sm90Tile | SmallTile | SingleTile:
    assert chosen(call).splits == 1, call
    return chosen(call).tile


def detail(choice: Choice) -> str:
    return f"{choice.kernel}, {choice.tile}"


def launched_with(tile: Sm90Tile | SmallTile | SingleTile, splits: int = 1) -> Choice:
    return Choice("cuda", tile.kernel, tile, splits, "triton")


def sizes(sms: int) -> list[tuple[int, int, int]]:
    """(B, H, N): one for each row of `small_tile`, with one block of keys, and at both ends of the ring."""
    few = [(1, 1, N) for N in (64, 128, 512)]
    for rows in (32, 64, 128):  # as many heads as give every SM a block of that many queries
        few += [(1, max(1, sms * rows // N), N) for N in (64, 128, 256, 512)]
    return [*few, *((32, 8, N) for N in (64, 128, 256, 512))]


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.nightly)], ids=["pairs", "every"])
@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("arch", TARGETS)
def test_small_fits_and_does_not_spill(arch, D, every):
    hw, seen = TARGETS[arch], {}
    for (B, H, N), causal in itertools.product(sizes(hw.sm_count), (False, True)):
        call = spec(B, H, N, D, causal)
        tile = policy.small_tile(call, hw)
        choice = launched_with(tile)
        variant = small.variant(call, hw, choice)
        seen.setdefault(variant, (call, tile, choice))
    tiles = {(m["WARPS_M"], m["WARPS_N"], m["STAGES"] == 1) for m in (dict(v.macros) for v in seen)}
    assert tiles >= {(m, n, once) for m, n in ((1, 4), (2, 2), (4, 1)) for once in (False, True)}
    for variant in seen if every else covering_variants(list(seen)):
        call, tile, choice = seen[variant]
        _, usage = cuda.compile_variant(variant)
        assert usage.spilled == 0, (tile, usage)
        assert not usage.warnings, (tile, usage)
        assert usage.shared == 0
        assert small.shared_bytes(call, choice) <= hw.smem_bytes, tile
        assert usage.registers * small.threads(choice) * tile.blocks_per_sm <= 65_536, (tile, usage)


SHARED = {"H": 32, "H_KV": 8, "N_Q": 24}


def single_tiles(D: int) -> list[tuple[FlashSpec, SingleTile]]:
    """Every tile of single_tile.cu that is chosen, with a call that takes it."""
    every = itertools.product((1, 8, 64), (64, 80, 128, 150, 192, 256), (False, True))
    calls = [spec(B, 8, N, D, causal) for B, N, causal in every]
    calls += [spec(64, N_KV=call.N_KV, D=D, causal=call.right == 0, **SHARED) for call in calls]
    found = {(chosen(call), call.right): call for call in calls}
    return [(call, choice.tile) for (choice, _), call in found.items() if choice.kernel == "single_tile"]


def test_which_tiles_there_are_of_all_keys_at_once():
    O = SingleTile
    narrow, wide = (
        [O(64), O(80), O(128), O(80, 2), O(64, 3), O(128, 2, 3), O(64, 4, 3)],
        [O(64), O(80, 1, 3), O(128, 1, 2)],
    )
    assert {tile for _, tile in single_tiles(64)} == {*narrow, *(tile._replace(pack_gqa=True) for tile in narrow)}
    assert {tile for _, tile in single_tiles(128)} == {*wide, *(tile._replace(pack_gqa=True) for tile in wide)}


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("D", [64, 128])
def test_all_keys_at_once_fit_and_do_not_spill(D, dtype):
    for call, tile in single_tiles(D):
        choice = launched_with(tile)
        code, usage = cuda.compile_variant(single_tile.variant(call._replace(dtype=dtype), TARGETS[90], choice))
        assert usage.spilled == 0, (tile, usage)
        assert not usage.warnings, (tile, usage)  # such as products made one after the other
        assert usage.registers * single_tile.threads(choice) * tile.blocks_per_sm <= 65_536, (tile, usage)
        assert (single_tile.shared_bytes(call, choice) + 1024) * tile.blocks_per_sm <= 228 * 1024, tile
        text = sass.disassemble(code)
        assert sass.overwritten(text) == []
        assert text.count("HGMMA.") == tile.stages * (D + tile.block_n) // 16
        for what in ("BAR.SYNC", "FENCE.VIEW.ASYNC", "WARPGROUP.ARRIVE"):  # before q k^T and before p v
            assert text.count(what) == 2 * tile.stages, what
        assert 0 < text.index("ACQBULK") < text.index("LDGSTS")  # nothing is read before the launch ahead is over
        assert text.count("MUFU.EX2") == tile.stages * tile.block_n // 2 + 2 * (tile.stages - 1)


def test_odd_groups_share_no_tile(monkeypatch):
    monkeypatch.setattr(hardware, "of", lambda device: TARGETS[90])
    for H in (8, 24, 1024):
        call = spec(64, H, H_KV=8, N_Q=1, N_KV=100)
        assert not getattr(chosen(call).tile, "pack_gqa", False)
        with pytest.raises(ValueError, match="cannot share tiles"):
            single_tile.launch_of(call, launched_with(SingleTile(128, pack_gqa=True)), 4 * ((0, 0, 0),))


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True, "top_left"])
@pytest.mark.parametrize("D", [64, 128])
def test_all_keys_at_once_on_a_gpu(D, causal):
    """Right in every tile, on rows and keys that do not fill it, and the same bits every time."""
    for tile in dict.fromkeys(tile for _, tile in single_tiles(D)):
        N_KV = tile.block_n * tile.stages - 3
        for N_Q, dtype in ((N_KV, torch.bfloat16), (201, torch.float16), (5, torch.bfloat16)):
            x = testing.inputs(2, 8, N_Q, D, H_KV=2, N_KV=N_KV, causal=causal, dtype=dtype, device="cuda")
            call, tensors = x.spec(with_lse=True), Residuals(x.q, x.k, x.v)
            if (why := flash.supports(call)) is not None or hardware.of(call.device).arch != 90:
                pytest.skip(why or "for Hopper")
            o, lse = flash.forward(call, tensors, launched_with(tile))
            testing.compare(x, testing.Outputs(o, lse, None, None, None, None))
            for _ in range(25):
                again = flash.forward(call, tensors, launched_with(tile))
                assert torch.equal(again[0], o)
                assert torch.equal(again[1], lse)


@pytest.mark.parametrize("arch", ["90a", "100", "120"])
def test_small_in_fp16(arch):
    hw = TARGETS[int(arch.rstrip("a"))]
    for D in (64, 128):
        call = spec(32, 8, 256, D, dtype=torch.float16)
        choice = launched_with(policy.small_tile(call, hw))
        _, usage = cuda.compile_variant(small.variant(call, hw, choice)._replace(arch=arch))
        assert usage.spilled == 0


@pytest.mark.parametrize(
    ("arch", "call", "why"),
    [
        (80, spec(N=513), "up to 512"),
        (80, spec(D=96), "D = E of 64 or 128"),
        (80, spec(D=64, E=128), "D = E of 64 or 128"),
        (80, spec(softcap=3.0), "no softcap"),
        (80, spec(has_sinks=True), "no sinks"),
        (100, spec(left=5), "no window"),
        (120, spec(right=5), "no window"),
        (80, spec(sequences=2), "no packed sequences"),
        (80, spec(B=70_000), "at most 65535"),
        (90, spec(D=96), "needs D/E of 64/64, 128/128, 192/128, 256/256, here 96/96"),
        (90, spec(D=128, E=64), "here 128/64"),
        (90, spec(N=1 << 29), "up to 268435456 queries and keys"),
        (90, spec(B=1 << 16, H=1 << 15), "up to 1073741824 tiles"),
        (90, spec(dtype=torch.float32), "bf16 and fp16"),
        (90, spec()._replace(scale=-1.0), "positive scale"),
        (90, spec()._replace(device=torch.device("cpu")), "needs a CUDA GPU"),
    ],
)
def test_refuses_in_words(arch, call, why, monkeypatch):
    monkeypatch.setattr(hardware, "of", lambda device: TARGETS[arch])
    assert why in flash.supports(call)


def test_an_old_gpu(monkeypatch):
    monkeypatch.setattr(hardware, "of", lambda device: TARGETS[80]._replace(arch=75))
    assert "8.0 or later, this GPU has 7.5" in flash.supports(spec())


@pytest.mark.skipif(torch.cuda.is_available(), reason="pretends that there is a GPU")
def test_serves_on_an_older_gpu(monkeypatch):
    monkeypatch.setattr(hardware, "of", lambda device: TARGETS[80])
    for call in (spec(), spec(causal=True, N_KV=500), spec(causal=True, N_KV=50, top_left=True), spec(N_KV=0)):
        assert flash.supports(call) is None
        assert flash.supports(call._replace(needs_grad=True, with_lse=True)) is None
        assert dispatch.pick.__wrapped__("flash", call, "cuda").name == "cuda"
        assert dispatch.pick.__wrapped__("flash", call).name != "cuda"  # not measured there
    assert detail(dispatch.choose("flash", spec(), "cuda")) == "small, 16 queries x 128 keys"


# ---------------------------------------------------------------------------------------------- gradients


def backward_of(call: FlashSpec) -> str:
    return dispatch.choose("flash", call, "cuda").backward


def test_whose_gradients(monkeypatch):
    """Our own. Where few causal heads share k and v, and for causal 192/128: cuDNN's for what it can say, and while
    nobody asks for the same bits every time."""
    monkeypatch.setattr(hardware, "of", lambda device: TARGETS[90])
    limits = ({"with_lse": True}, {"deterministic": True}, {"softcap": 3.0}, {"left": 5}, {"N_KV": 5000}, PACKED)
    for D, E in policy.SM90_HEAD_DIMS:
        call = spec(2, 16, 4096, D, True, E=E, needs_grad=True)
        assert backward_of(call) == ("cudnn" if D == 192 else "cuda")
        for options in ({"right": None, "H_KV": 4}, *limits):
            assert backward_of(call._replace(**options)) == "cuda", options
        few = call._replace(B=1, H_KV=2, H=16)
        assert backward_of(few) == "cudnn"
        for options in ({"right": None}, {"H": 2, "N_Q": 700}, *limits):
            assert backward_of(few._replace(**options)) == "cuda", options
        monkeypatch.setattr(hardware, "of", lambda device: TARGETS[90]._replace(cudnn=0))
        assert backward_of(few) == "cuda"
        monkeypatch.setattr(hardware, "of", lambda device: TARGETS[90])
    monkeypatch.setattr(hardware, "of", lambda device: TARGETS[80])
    assert backward_of(spec(N=128, needs_grad=True)) != "cuda"


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["bhnd", "bnhd", "fused"])
@pytest.mark.parametrize(("D", "E"), policy.SM90_HEAD_DIMS)
def test_gradients_from_our_forward_by_cudnn(D, E, layout):
    """Few causal heads that share k and v."""
    x = testing.inputs(1, 32, 1024, D, E=E, H_KV=2, causal=True, layout=layout, dtype=torch.bfloat16, device="cuda")
    call = x.spec(needs_grad=True)
    if (why := flash.supports(call)) is not None or backward_of(call) != "cudnn":
        pytest.skip(why or "cuDNN does not serve this")
    testing.check(x, "cuda", ("o",))


def test_one_block_takes_no_more_keys_than_it_has(monkeypatch):
    monkeypatch.setattr(hardware, "of", lambda device: TARGETS[90])
    for tile in (SmallTile(4, 1, 128, 1), SingleTile(64, 2)):
        with pytest.raises(ValueError, match=r"64 queries x 128 keys at once, and there are 129"):
            flash.KERNELS[tile.kernel].launch_of(spec(N=129), launched_with(tile), 4 * ((0, 0, 0),))


@pytest.mark.gpu
@pytest.mark.parametrize(("B", "N_KV"), [(1, 0), (1, 40), (8, 100), (32, 100), (32, 200)])
def test_short_rows_without_keys_are_zero(B, N_KV):
    """Their outputs go through the shared memory that their queries are on their way to."""
    x = testing.inputs(B, 8, 128 + N_KV, 64, N_KV=N_KV, causal=True, dtype=torch.bfloat16, device="cuda")
    call, tensors = x.spec(), Residuals(x.q, x.k, x.v)
    if (why := flash.supports(call)) is not None:
        pytest.skip(why)
    tile = policy.small_tile(call, hardware.of(x.q.device))
    for choice in {launched_with(tile), dispatch.choose("flash", call, "cuda")}:
        for _ in range(20):
            o, _ = flash.forward(call, tensors, choice)
            assert not o[:, :, :128].any()
    testing.check(x, "cuda", ("o",))


# ------------------------------------------------------------------------------------------------- Hopper

WINDOW = {"left": 100}
PACKED = {"sequences": 5}
CAP = {"softcap": 20.0}
ALL = WINDOW | PACKED | CAP | {"has_sinks": True}


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (spec(), "small, 16 queries x 128 keys"),
        (spec(N=64), "single_tile, 64 queries x 64 keys"),
        (spec(B=32, H=8, N=128), "single_tile, 64 queries x 128 keys"),
        (spec(B=32, H=8, N=256, causal=True), "single_tile, 64 queries x 256 keys"),
        (spec(B=32, H=8, N=257, causal=True), "sm90, 128 queries x 128 keys"),
        (spec(B=32, H=8, N=100, **CAP), "sm90, 128 queries x 128 keys"),
        (spec(B=2, H=10, N_Q=4096, N_KV=77), "single_tile, 64 queries x 80 keys"),
        (spec(B=64, H=32, N_Q=1, N_KV=100), "small, 16 queries x 128 keys"),
        (spec(B=32, H=8, N=128, D=128), "sm90, 128 queries x 128 keys"),
        (spec(B=8, H=4, N=256, D=128), "sm90, 64 queries x 80 keys"),
        (spec(B=32, H=8, N=512), "sm90, 192 queries x 128 keys"),
        (spec(N=2048), "sm90, 128 queries x 128 keys"),  # one head leaves SMs idle
        (spec(H=24, N=2048), "sm90, 192 queries x 128 keys"),
        (spec(N=2048, **CAP), "sm90, 128 queries x 128 keys"),
        (spec(N=100, **PACKED), "sm90, 64 queries x 128 keys"),
        (spec(N=1000, **PACKED), "sm90, 192 queries x 128 keys"),
        (spec(N=4096, D=128, causal=True), "sm90, 128 queries x 176 keys"),
        (spec(N=2048, D=128, causal=True), "sm90, 128 queries x 128 keys"),
        (spec(N=2048, D=128), "sm90, 128 queries x 176 keys"),
        (spec(N=8192, D=128, causal=True, **WINDOW), "sm90, 128 queries x 128 keys"),
        (spec(N=1000, D=192, E=128), "sm90, 128 queries x 128 keys"),
        (spec(N=1000, D=256), "sm90, 128 queries x 80 keys"),
    ],
)
def test_tiles_by_shape(call, words):
    assert detail(chosen(call)) == words


def test_what_was_measured_is_taken():
    """The best measured, or what differs from it by less than 1 %."""
    choose = lambda N, D, causal: unsplit(spec(2, 16, N, D, causal))  # noqa: E731
    for N in (2048, 4096, 8192, 16384):
        assert choose(N, 128, False) == Sm90Tile(2, 176, 2, swizzle=1)
        swizzles = {2048: 0, 4096: 8, 8192: 4, 16384: 2}  # two waves of tiles
        assert choose(N, 128, True) == Sm90Tile(2, 128 if N == 2048 else 176, 2, swizzle=swizzles[N])
    for causal in (False, True):
        assert choose(2048, 64, causal) == Sm90Tile(3, 128, 2, take_turns=True, swizzle=int(not causal))
        of_many = unsplit(spec(4, 32, 4096, 64, causal))
        assert of_many == Sm90Tile(3, 128, 2, swizzle=24 if causal else 1)


def test_what_was_measured_of_many_heads_and_few_tokens_is_taken():
    """(B, H, N, D, causal), and the tile that was the fastest or within 3 % of it."""
    two, three = Sm90Tile(2, 128, 2, swizzle=1), Sm90Tile(3, 128, 2, True, swizzle=1)
    two_all, three_all = two._replace(swizzle=0), three._replace(swizzle=0)
    one, half = Sm90Tile(1, 128, 2, blocks_per_sm=2), Sm90Tile(1, 80, 2, blocks_per_sm=2)
    best = {
        (32, 8, 384, 64, False): three, (32, 8, 512, 64, False): three,
        (32, 8, 1024, 64, False): three, (4, 16, 384, 64, False): three, (4, 16, 512, 64, False): two,
        (4, 16, 1024, 64, False): three, (8, 4, 384, 64, True): one,
        (8, 4, 512, 64, False): one._replace(swizzle=1), (32, 8, 1024, 64, True): two._replace(swizzle=66),
        (32, 8, 2048, 64, True): three._replace(swizzle=48),
        (32, 8, 512, 64, True): two_all, (4, 16, 1024, 64, True): two_all, (4, 16, 2048, 64, True): three_all,
        (32, 8, 256, 128, False): two, (32, 8, 512, 128, False): two, (32, 8, 512, 128, True): two._replace(swizzle=66),
        (32, 8, 1024, 128, False): two, (8, 4, 768, 128, False): two,
        (32, 8, 2048, 128, True): two._replace(swizzle=19),
        (32, 8, 2048, 128, False): Sm90Tile(2, 176, 2, swizzle=1), (4, 16, 512, 128, True): two_all,
        (4, 16, 2048, 128, True): two._replace(swizzle=16), (1, 64, 4096, 128, True): Sm90Tile(2, 176, 2, swizzle=8),
        (8, 4, 2048, 128, True): two_all, (1, 40, 8192, 64, True): Sm90Tile(3, 128, 2, swizzle=13),
        (1, 16, 512, 128, True): half, (1, 1, 1024, 128, True): half, (1, 16, 1024, 128, False): two,
        (1, 16, 512, 128, False): half._replace(swizzle=1), (8, 4, 384, 128, True): half,
        (8, 4, 256, 128, False): half._replace(swizzle=1), (8, 4, 512, 128, False): two,
        (1, 16, 256, 128, True): SmallTile(2, 2, 64, 2),
        (1, 1, 256, 128, False): SmallTile(1, 4, 64, 2),
    }  # fmt: skip
    for case, tile in best.items():
        assert chosen(spec(*case)).tile == tile, case


def test_what_was_measured_of_few_keys_is_taken():
    """(B, H, N, D, causal), and the tile that was the fastest or within 5 % of it."""
    S, O = SmallTile, SingleTile
    best = {
        (1, 1, 64, 64, False): O(64), (64, 16, 64, 64, False): O(64), (1, 16, 77, 64, False): O(80),
        (32, 8, 77, 64, False): O(80), (1, 1, 128, 64, False): S(1, 4, 128, 1), (4, 4, 128, 64, True): S(1, 4, 128, 1),
        (8, 4, 128, 64, True): O(128), (32, 8, 128, 64, False): O(128), (64, 16, 128, 64, True): O(128),
        (1, 8, 150, 64, False): S(1, 4, 128, 2), (4, 16, 150, 64, True): O(80, 2), (32, 8, 192, 64, False): O(64, 3),
        (1, 8, 256, 64, True): S(1, 4, 128, 2), (1, 16, 256, 64, False): S(1, 4, 128, 2),
        (1, 24, 256, 64, False): O(128, 2, 3), (4, 16, 256, 64, True): O(128, 2, 3),
        (32, 8, 256, 64, False): O(128, 2, 3), (32, 8, 256, 64, True): O(64, 4, 3), (16, 8, 200, 64, True): O(64, 4, 3),
        (1, 16, 64, 128, True): O(64), (32, 8, 64, 128, False): O(64), (4, 16, 77, 128, False): O(80, 1, 3),
        (1, 16, 128, 128, False): S(1, 4, 128, 1), (4, 16, 128, 128, True): O(128, 1, 2),
        (8, 16, 128, 128, False): O(128, 1, 2),
        (10, 16, 128, 128, False): Sm90Tile(2, 128, 2, swizzle=1),
    }  # fmt: skip
    for case, tile in best.items():
        assert unsplit(spec(*case)) == tile, case
    for N_Q, N_KV, D, tile in ((4096, 77, 64, O(80)), (4096, 128, 64, O(128)), (2048, 256, 64, O(128, 2, 3))):
        assert unsplit(spec(8, 8, D=D, N_Q=N_Q, N_KV=N_KV)) == tile
    few = ((16, 64, S(1, 4, 128, 1)), (32, 64, O(128)), (1, 128, S(1, 4, 128, 1)), (32, 128, O(128, 1, 2)))
    for N_Q, D, tile in few:
        assert unsplit(spec(64, 32, D=D, N_Q=N_Q, N_KV=100)) == tile
    packed = {  # B, group, N_Q, N_KV, D, and the best or within 6 % of it
        (1, 4, 1, 100, 64): S(1, 4, 128, 1), (4, 4, 1, 100, 64): S(1, 4, 128, 1),
        (16, 4, 1, 100, 64): O(128, pack_gqa=True),
        (64, 4, 32, 100, 64): O(128, pack_gqa=True), (64, 4, 64, 64, 64): O(64),
        (8, 4, 1, 60, 64): O(64, pack_gqa=True),
        (64, 8, 4, 60, 128): O(64, pack_gqa=True), (8, 4, 1, 250, 64): S(1, 4, 128, 2),
        (64, 4, 16, 250, 64): O(128, 2, 3, True), (16, 8, 150, 150, 64): O(80, 2, 4, True),
        (16, 4, 1, 100, 128): O(128, 1, 2, True), (64, 4, 32, 100, 128): O(128, 1, 2, True),
        (64, 4, 16, 100, 128): Sm90Tile(1, 80, 2, blocks_per_sm=2, swizzle=1, pack_gqa=True),
        (64, 4, 16, 250, 128): Sm90Tile(1, 80, 2, blocks_per_sm=2, swizzle=1, pack_gqa=True),
    }  # fmt: skip
    for (B, group, N_Q, N_KV, D), tile in packed.items():
        call = spec(B, 32, D=D, H_KV=32 // group, N_Q=N_Q, N_KV=N_KV)
        assert unsplit(call) == tile, call


def instructions(text: str) -> list[str]:
    """One a line, without addresses."""
    lines = (re.sub(r"^\s*(/\*[0-9a-f]+\*/)?\s*", "", line) for line in text.splitlines())
    return [line for line in lines if line and not line.startswith(("/*", "//"))]


# The calls whose speed we promise, then the other sizes, each option, and for each size all options at once.
RUNS_90 = [
    *[spec(1, 16, N, D, causal) for N in (2048, 4096) for D in (64, 128) for causal in (False, True)],
    spec(32, 8, 256, 64),
    spec(1, 16, 4096, 128, True, torch.float16),
    spec(1, 16, 4096, 192, True, E=128),
    spec(1, 16, 4096, 256, True),
    *[spec(1, 16, 4096, 128, True, **option) for option in (WINDOW, PACKED, CAP)],
    spec(1, 16, 4096, 64, False, **PACKED),
    *[spec(16, 32, 1, D, H_KV=8, N_KV=8192) for D in (64, 128, 256)],  # decoding, pack GQA
    *[spec(1, 32, 1, D, H_KV=8, N_KV=8192) for D in (64, 128, 256)],  # the same, keys split
    spec(1, 8, 512, 128, True, N_KV=8192),
    *[spec(8, 32, 4, D, True, H_KV=4, N_KV=8192, dtype=torch.float16) for D in (64, 128)],
    spec(8, 32, 40, 128, True, H_KV=8, N_KV=8192),
    spec(1, 64, 8192, 64, True, H_KV=8, **WINDOW, has_sinks=True),
    *[spec(1, 16, N, D, True, H_KV=4, N_KV=4096, **ALL) for D in (64, 128) for N in (16, 200)],
    *[spec(1, 16, 4096, D, True, E=E, **ALL) for D, E in policy.SM90_HEAD_DIMS],
    *[spec(B, 32, 1, D, H_KV=8, N_KV=8192, has_kv_lengths=True) for B in (1, 16) for D in (64, 128, 256)],
    *[spec(1, 32, 1, 128, H_KV=8, N_KV=8192, has_kv_lengths=True, page=page) for page in (16, 64, 256)],
    *[spec(16, 32, 4, D, True, H_KV=8, N_KV=8192, has_kv_lengths=True, page=16) for D in (64, 128, 256)],
    *[spec(4, 16, 2048, D, True, E=E, N_KV=8192, has_kv_lengths=True, page=64, **ALL)
      for D, E in policy.SM90_HEAD_DIMS],
    spec(4, 16, 2048, 64, True, N_KV=8192, has_kv_lengths=True, page=16),
]  # fmt: skip
# One option at a time in wide heads, whose pairs of macros others have.
WIDE_90 = [
    *[spec(1, 16, 4096, D, True, E=E, **option)
      for D, E in ((192, 128), (256, 256)) for option in (WINDOW, CAP, {"has_sinks": True})],
    spec(1, 16, 4096, 192, True, E=128, **PACKED),
]  # fmt: skip


def sm90(call: FlashSpec) -> Choice:
    tile = policy.sm90_tile(call, TARGETS[90])
    return launched_with(tile, policy.splits(call, tile, TARGETS[90]))


def name_of(call: FlashSpec) -> str:
    options = [n for n in ("left", "right", "softcap", "sequences", "page") if getattr(call, n) is not None]
    options += ["cache"] * call.has_kv_lengths
    packed = sm90(call).tile.pack_gqa
    words = [call.D, call.E, call.N_Q, call.N_KV, call.dtype, *options, *["sinks"] * call.has_sinks]
    return " ".join(map(str, [*words, *["pack GQA"] * packed]))


VARIANTS_90 = {call: sm90_kernel.variant(call, TARGETS[90], sm90(call)) for call in RUNS_90 + WIDE_90}
CALLS_90 = marked({call: VARIANTS_90[call] for call in RUNS_90})
CALLS_90 += [pytest.param(call, marks=pytest.mark.nightly) for call in WIDE_90]


@pytest.mark.parametrize("call", CALLS_90, ids=name_of)
def test_hopper_overlaps_and_keeps_p(call):
    """No spills, no serialised products; exponentials run while o += p v does, and p is made anew only after it."""
    choice = sm90(call)
    tile = choice.tile
    code, usage = cuda.compile_variant(VARIANTS_90[call])
    assert usage.spilled == 0
    assert not usage.warnings, usage.warnings
    assert usage.registers == 65_536 // (sm90_kernel.threads(choice) * tile.blocks_per_sm) // 8 * 8
    assert sm90_kernel.shared_bytes(call, choice) <= TARGETS[90].smem_bytes // tile.blocks_per_sm
    text = sass.disassemble(code)
    assert sass.overwritten(text) == []
    assert sass.read_early(text) == []
    lines = instructions(text)
    assert not any(line.startswith(("STL", "LDL")) for line in lines)
    starts = [i for i, line in enumerate(lines) if re.match(r"WARPGROUP.DEPBAR.LE gsb0, 0x1", line)]
    narrow = [width for width in (64, 128) if width < tile.block_n and tile.consumers > 1 and tile.block_n >= 128]
    narrow = narrow if call.softcap is None else []
    assert len(starts) == len(narrow) + (3 if call.left is not None else 2)  # the masked loops and the plain one
    widths = []
    for start in starts:
        end = next(i for i in range(start, len(lines)) if re.match(r"WARPGROUP.DEPBAR.LE gsb0, 0x0", lines[i]))
        inside = " ".join(lines[start:end])
        reads = [re.match(r"HGMMA\S* R\d+, R(\d+), gdesc", line) for line in lines[start - 400 : start]]
        p = {int(m[1]) + i for m in reads if m for i in range(4)}
        widths.append(4 * len(p))
        if widths[-1] == tile.block_n:  # not once a tile, as the narrow ones
            assert inside.count("MUFU.EX2") == tile.block_n // 2 * (1 if call.softcap is None else 2) + 2
            assert inside.count("F2FP") == 0
        for line in lines[start:end]:
            target = re.match(r"(?:@!?U?P\d+ )?[A-Z]\S+ R(\d+)", line)
            assert target is None or int(target[1]) not in p, line
    assert sorted(widths) == sorted(narrow + [tile.block_n] * (len(starts) - len(narrow)))


def test_sinks_in_the_dtype_of_q():
    call = spec(1, 4, 1000, 128, True, has_sinks=True)
    for dtype in (torch.bfloat16, torch.float16):
        variant = sm90_kernel.variant(call._replace(dtype=dtype), TARGETS[90], sm90(call), dtype)
        assert ("SINKS", 2) in variant.macros
        assert cuda.compile_variant(variant)[1].spilled == 0
