"""The CUDA backend, without a GPU: compiled, and its host's decisions. Walks are in test_cuda_walks.py.

Its results are checked beside the other backends', in test_backends.py and test_integration.py.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch

from fulmen import cuda as build
from fulmen import dispatch, hardware
from fulmen.boundary import aligned
from fulmen.hardware import TARGETS
from fulmen.launch import Launch, run_all
from fulmen.lightning import cuda, policy, triton_split
from fulmen.lightning import triton as fused
from fulmen.lightning.kernels import sweep
from fulmen.lightning.spec import LightningSpec, Residuals, spec_of
from fulmen.testing import lightning as testing
from tests import sass
from tests.lightning.cuda_calls import CUDA, spec
from tests.pairs import covering_variants

PASSES = ("forward", "training", "backward", "state")
HW = TARGETS[90]


def tiles_of(call: LightningSpec) -> policy.SweepTiles:
    return policy.choose(call, HW, "cuda").tile


def tile_of(call: LightningSpec, pass_: str) -> policy.SweepTile:
    return getattr(tiles_of(call), pass_)


# ---------------------------------------------------------------------------------------------- compiled


class Made(NamedTuple):
    tile: policy.SweepTile
    D: int
    usage: build.Usage
    sass: str


def kernels() -> dict[build.Variant, tuple[policy.SweepTile, int]]:
    """What the policy chooses, with tile and D."""
    found = {}
    for D, decay, packed in itertools.product((64, 128), (False, True), (None, 4)):
        for B, H, N in ((1, 128, 8192), (1, 8, 65536)):  # in one piece, and split
            call = spec(B, H, N, D, decay, sequences=packed)
            for tile in (tile_of(call, what) for what in PASSES):
                found[sweep.variant(call, tile)] = tile, D
    return found


@pytest.fixture(scope="module", params=["pairs", pytest.param("every", marks=pytest.mark.nightly)])
def made(request):
    """What the policy chooses, compiled once: 28 variants, or those of them with every pair of macros."""
    found = kernels()
    assert len(found) >= 20
    if request.param == "pairs":
        found = {variant: found[variant] for variant in covering_variants(list(found))}

    def compiled(variant: build.Variant) -> Made:
        code, usage = build.compile_variant(variant)
        return Made(*found[variant], usage, sass.disassemble(code))

    with ThreadPoolExecutor(2) as pool:  # the compiler runs without Python's lock
        return dict(zip(found, pool.map(compiled, found), strict=True))


def test_every_variant_is_there(made):
    for name, values in {"DECAY": {0, 1}, "PACKED": {0, 1}, "HEAD_DIM": {64, 128}, "OUTS": {0, 1, 2}}.items():
        assert {dict(v.macros)[name] for v in made} == values


def test_fits(made):
    """Also the registers that warpgroups trade among themselves: as many as the launch has."""
    for variant, (tile, D, usage, _) in made.items():
        assert usage.shared == 0
        assert sweep.shared_bytes(spec(D=D), tile) <= TARGETS[90].smem_bytes == 232_448, variant
        assert usage.registers * sweep.threads(tile) <= 65_536, variant
        assert sweep.threads(tile) <= 1024


def test_no_spills_no_serialised_products(made):
    for variant, (_, _, usage, text) in made.items():
        assert usage.spilled == 0, (variant, usage)
        assert not usage.warnings, (variant, usage)
        assert "STL" not in text, variant
        assert "HGMMA" in text, variant


def test_no_register_is_overwritten_while_a_product_reads_it(made):
    """Where outputs are made, at least their products have an operand in registers."""
    for variant, (tile, _, _, text) in made.items():
        assert not tile.outs or sass.PRODUCT.search(text), variant
        assert sass.overwritten(text) == [], variant


def test_nothing_is_read_before_the_kernel_ahead_is_over(made):
    for variant, (*_, text) in made.items():
        assert sass.read_early(text) == [], variant


def test_blocks_of_a_head_share_without_a_fence_of_the_whole_gpu(made):
    """Which the compiler takes for granted wherever blocks of a cluster tell each other something, and which costs more
    than sharing gains."""
    assert {dict(v.macros)["SHARE"] for v in made} == {0, 1}
    for variant, (tile, _, _, text) in made.items():
        assert ("MULTICAST" in text) == tile.share, variant
        assert "MEMBAR.ALL.GPU" not in text, variant


# ------------------------------------------------------------------------------------------ what the host says


@pytest.mark.parametrize(
    ("call", "arch", "why"),
    [
        (spec(dtype=torch.float16), 90, "multiplies bf16, and q is torch.float16"),
        (spec(dtype=torch.float32), 90, "multiplies bf16, and q is torch.float32"),
        (spec(device=torch.device("cpu")), 90, "needs a CUDA GPU, and the device is cpu"),
        (spec(), 80, "needs compute capability 9.0, this GPU has 8.0"),
        (spec(), 100, "needs compute capability 9.0, this GPU has 10.0"),
        (spec(D=96), 90, "needs D = E of 64 or 128, here D=96, E=96"),
        (spec(E=128), 90, "needs D = E of 64 or 128, here D=64, E=128"),
        (spec(D=256), 90, "needs D = E of 64 or 128, here D=256, E=256"),
        (spec(D=64, E=128, per_token=True), 90, "needs D = E of 64 or 128, or D 128 and E 64, here D=64, E=128"),
        (spec(H=4, H_KV=2), 90, "needs as many heads of k and v as of q, here H=4, H_KV=2"),
        (spec(N=2**30 + 1), 90, "takes 1 to 1073741824 rows of at least one head, here B=1, H=1, N=1073741825"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_refuses_in_words(call, arch, why, monkeypatch):
    monkeypatch.setattr(hardware, "of", lambda device: TARGETS[arch])
    assert cuda.supports(call) == why


@pytest.mark.parametrize("D", [64, 128])
def test_serves(D, h200, monkeypatch, compiled_elsewhere):
    """And says what would serve; a compiler that fails is the reason why not."""
    compiled_elsewhere(kernels())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for call in (spec(4, 32, 8192, D), spec(1, 8, 65536, D, sequences=4)):
        assert cuda.supports(call) is None
    assert "warpgroups for outputs" in str(dispatch.choose("lightning", spec(D=D), "cuda"))
    asked = []
    monkeypatch.setattr(build, "problem", lambda variant, device, shared: asked.append(variant) or "no compiler")
    assert cuda.supports(spec(D=D)) == "no compiler"
    assert len(asked) == 1


def test_every_pass_is_asked_for_in_supports(h200, monkeypatch):
    """What a call may launch must have been compiled before it is promised."""
    asked = []
    monkeypatch.setattr(build, "problem", lambda variant, device, shared: asked.append(variant))
    for D, (B, H, N, sequences) in itertools.product(
        (64, 128), ((4, 32, 8192, None), (1, 8, 65536, None), (1, 8, 65536, 4))
    ):
        asked.clear()
        call = spec(B, H, N, D, True, sequences=sequences)
        assert cuda.supports(call) is None
        needed = [what for what in PASSES if what != "state" or policy.cuda_segments(call, HW, "forward") > 1]
        assert {sweep.variant(call, tile_of(call, what)) for what in needed} <= set(asked)


@pytest.mark.parametrize(
    ("call", "number"),
    [
        (spec(4, 32, 8192), 1),
        (spec(1, 67, 8192), 1),  # 132 SMs: there is no second block for every one
        (spec(1, 66, 8192), 2),
        (spec(1, 66, 8192, 128), 1),  # whose heads are two blocks each
        (spec(1, 8, 65536), 16),
        (spec(1, 8, 65536, 128), 8),
        (spec(1, 1, 1 << 20), 132),
        (spec(1, 1, 1023), 1),  # no segment is shorter than 512 rows
        (spec(1, 1, 1024), 2),
        (spec(1, 1, 0), 1),
        (spec(1, 0, 4096), 8),
        (spec(1, 132, 8192), 1),
        (spec(3, 50, 5000), 7),  # 132 in one round of blocks, 18 left over
        (spec(3, 50, 1500), 2),
        (spec(3, 50, 1000), 1),
        (spec(4, 40, 8192), 4),  # 28 left over
        (spec(2, 85, 8192), 1),  # 38: no more than a quarter of the SMs
        (spec(2, 139, 8192, 128), 4),  # 4 rounds and 14 heads of two blocks
        (spec(1, 88, 8192, 128), 3),  # 22
        (spec(1, 89, 8192, 128), 1),
        (spec(1, 150, 8192, sequences=1), 1),
        (spec(1, 8, 65536, sequences=4), 128),
        (spec(1, 8, 65536, sequences=9), 1),  # enough of them for 16 blocks
        (spec(1, 8, 600, sequences=4), 1),
    ],
)
def test_segments(call, number):
    assert policy.cuda_segments(call, HW, "forward") == number
    measured = {4: 1}.get(number, number) if call.D == 64 and policy.whole_waves(call, HW) else number
    assert policy.cuda_segments(call, HW, "backward") == measured  # of four segments it is slower


def test_splits():
    """Whole groups of SAVED_ROWS rows, no more segments than asked for, none of them empty."""
    heads = 1, 3, 40, 100, 132, 150, 270, 400
    for N, H, D in itertools.product((0, 1, 511, 1023, 1024, 1025, 4095, 65536, 10**6 + 1), heads, (64, 128)):
        cut = tiles_of(spec(1, H, N, D)).forward_split
        if cut.number == 1:
            assert (cut.rows, cut.whole) == (max(N, 1), 0)
            continue
        assert cut.whole * (D // 64) % 132 == 0
        assert 0 < (H - cut.whole) * (D // 64) < 132
        assert cut.rows % policy.SAVED_ROWS == 0
        assert (cut.number - 1) * cut.rows < N <= cut.number * cut.rows
        assert cut.number <= policy.cuda_segments(spec(1, H, N, D), HW, "forward")
        packed = tiles_of(spec(1, H, N, D, sequences=1)).forward_split
        assert packed.number == (N // packed.rows + 1 if packed.number > 1 else 1)


def test_saves(h200):
    assert cuda.saves(spec(4, 32, 8192)) == (128, 16, 64, 64)
    assert cuda.saves(spec(4, 32, 8193)) == (128, 17, 64, 64)
    assert cuda.saves(spec(4, 32, 0)) == (128, 0, 64, 64)
    assert cuda.saves(spec(1, 32, 8192, sequences=5)) == (32, 21, 64, 64)
    assert cuda.saves(spec(4, 32, 8192, 128)) is None
    assert cuda.saves(spec(1, 8, 65536, 128)) == (8 * 8, 128, 256)  # fp32 states, as twice as many bf16
    assert cuda.saves(spec(1, 70, 8192, 128)) == (4 * 16, 128, 256)  # of 4 heads, 66 are in one piece
    u = 4 * 32 * 8192 * 64
    assert torch.Size(cuda.saves(spec(4, 32, 8192))).numel() == u / 8


class Launched(NamedTuple):
    names: tuple[str, ...]
    tile: policy.SweepTile
    saved: bool
    not_last: bool


@pytest.fixture
def launched(h200, monkeypatch):
    """What a call would launch, in order; nothing is."""
    found: list[object] = []

    def launch(spec, tile, names, x, tensors, states, cut, not_cut=None, only_cut=False, not_last=False, tokens=()):
        for name in names:
            one = sweep.SWEEPS[name]
            needed = [one.a, one.b, one.c] + ([one.out] if tile.outs else [])
            assert set(needed) <= set(tensors)
        assert aligned(*tensors.values())
        of_call = Launched(names, tile, sweep.SAVED in tensors, not_last)
        return SimpleNamespace(run=lambda: found.append(of_call))

    monkeypatch.setattr(cuda, "launch", launch)
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    monkeypatch.setattr(Launch, "run", lambda one: found.append(one.kernel.__name__))
    return found


def call_of(B, H, N, D, sequences=None, states=False, saved=False):
    x = testing.inputs(B, H, N, D, dtype=torch.bfloat16, initial_state=states, lengths=sequences)
    call = spec_of(x.q, x.k, x.v, **x.options(), with_final_state=states)._replace(device=CUDA)
    shape = cuda.saves(call) if saved else None
    kept = None if shape is None else x.q.new_empty(shape)
    return call, Residuals(x.q, x.k, x.v, None, x.initial_state, x.cu_seqlens, kept), x


def names_of(launched: list) -> list:
    return [one if isinstance(one, str) else one.names for one in launched]


SCAN, SEGMENT_OFFSETS = "lightning_scan_kernel", "lightning_segment_offsets_kernel"


def test_launches_of_one_piece(launched):
    call, x, given = call_of(1, 70, 600, 64, saved=True)
    cuda.OPERATIONS.forward(call, x)
    cuda.OPERATIONS.backward(call, x, given.do, None)
    assert names_of(launched) == [("o",), ("dv", "dk", "dq")]
    assert [one.tile.save for one in launched] == [1, 2]
    assert all(one.saved for one in launched)
    launched.clear()
    call, x, given = call_of(1, 70, 600, 64)
    cuda.OPERATIONS.forward(call, x)
    cuda.OPERATIONS.backward(call, x, given.do, None)
    assert names_of(launched) == [("o",), ("dv", "dk"), ("dq",)]
    assert launched[0].tile.save == 0
    assert not any(one.saved for one in launched)


@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("states", [False, True])
def test_launches_of_segments(D, states, launched):
    """The state of the last segment is gathered where it is asked for: as the final state, as dinitial."""
    call, x, given = call_of(1, 2, 2000, D, states=states, saved=True)
    cuda.OPERATIONS.forward(call, x)
    assert names_of(launched) == [("state",), SCAN, ("o",)]
    assert launched[0].not_last is not states
    launched.clear()
    cuda.OPERATIONS.backward(call, x, given.do, None)
    last = [("dv", "dk", "dq")] if D == 64 else [("dv", "dk"), ("dq",)]
    assert names_of(launched) == [("dstate",), SCAN, *last]
    assert launched[0].not_last is not states
    launched.clear()
    cuda.OPERATIONS.backward(call, x._replace(saved=None), given.do, None)
    assert names_of(launched) == [("state",), SCAN, ("dstate",), SCAN, ("dv", "dk"), ("dq",)]
    assert launched[0].not_last


def test_launches_of_packed_segments(launched):
    call, x, given = call_of(1, 2, 0, 64, sequences=[700, 0, 1300], saved=True)
    cuda.OPERATIONS.forward(call, x)
    cuda.OPERATIONS.backward(call, x, given.do, None)
    assert names_of(launched) == [
        SEGMENT_OFFSETS,
        ("state",),
        SCAN,
        ("o",),
        SEGMENT_OFFSETS,
        ("dstate",),
        SCAN,
        ("dv", "dk", "dq"),
    ]


def strided(shape, strides, offset=0):
    store = torch.zeros(
        offset + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + 1, dtype=torch.bfloat16
    )
    return store.as_strided(shape, strides, offset)


@pytest.mark.parametrize(
    ("shape", "strides", "offset", "good"),
    [
        ((2, 3, 70, 64), (13440, 4480, 64, 1), 0, True),
        ((2, 3, 70, 64), (13440, 64, 192, 1), 0, True),  # bnhd
        ((2, 3, 70, 64), (40320, 64, 576, 1), 192, True),  # a part of a fused projection
        ((2, 3, 70, 64), (13440, 4480, 64, 1), 4, False),  # begins in the middle of 16 bytes
        ((2, 3, 70, 64), (14070, 4690, 67, 1), 0, False),  # so do its rows
        ((2, 3, 70, 64), (13444, 4480, 64, 1), 0, False),
        ((2, 3, 70, 64), (0, 4480, 64, 1), 0, False),  # expanded
        ((2, 3, 70, 64), (192, 64, 0, 1), 0, False),
        ((1, 1, 70, 64), (7, 0, 64, 1), 0, True),  # of one, no stride matters
    ],
)
def test_aligned(shape, strides, offset, good):
    x, fine = strided(shape, strides, offset), strided((1, 1, 1, 64), (64, 64, 64, 1))
    assert x.data_ptr() % 16 == 2 * offset % 16
    assert aligned(x) is good
    assert aligned(fine, x, fine) is good


def test_what_the_copy_engine_does_not_take(h200, monkeypatch):
    monkeypatch.setattr(build, "problem", lambda *args: None)
    good = torch.zeros(1, 2, 200, 64, dtype=torch.bfloat16)
    wide = torch.zeros(1, 2, 200, 67, dtype=torch.bfloat16)[..., :64]
    for i in range(3):
        tensors = [wide if i == j else good for j in range(3)]
        call = spec_of(*tensors)._replace(device=CUDA, aligned=aligned(*tensors))  # asked on a GPU only
        assert cuda.supports(call) == "needs rows of q, k and v that begin at multiples of 16 bytes and do not repeat"
    assert cuda.supports(spec_of(good, good, good)._replace(device=CUDA)) is None
    assert "takes 1 to" in cuda.supports(spec(1, 2, 0))


def test_a_gradient_that_the_copy_engine_does_not_take_is_copied(launched):
    call, x, _ = call_of(1, 2, 2000, 64)
    cuda.OPERATIONS.backward(call, x, torch.zeros(1, 2, 2000, 67, dtype=torch.bfloat16)[..., :64], None)
    assert any(isinstance(one, Launched) and "dv" in one.names for one in launched)  # with tensors that are aligned


# ------------------------------------------------------------------------------------------------ arguments

u64, i64, f32, i32 = ctypes.c_uint64, ctypes.c_int64, ctypes.c_float, ctypes.c_int32


class SweepArgs(ctypes.Structure):
    """struct Sweep of sweep.cu."""

    _fields_ = [
        ("out", u64), ("out_b", i64), ("out_h", i64), ("out_n", i64), ("enters", u64), ("leaves", u64),
        ("first_enters", u64), ("first_leaves", u64),
        ("enters_times", f32), ("leaves_times", f32), ("a", i32), ("b", i32), ("c", i32), ("to", i32),
        ("reverse", i32), ("swapped", i32), ("saved", i32), ("pad", i32 * 3),
    ]  # fmt: skip


class ProductArgs(ctypes.Structure):
    _fields_ = [
        ("out", u64), ("anchors", u64), ("entered", u64), ("rows", i32), ("pad", ctypes.c_char * 4),
    ]  # fmt: skip


class Args(ctypes.Structure):
    """struct Args, which the compiler pads to a multiple of the 64 bytes tensor maps begin at."""

    _fields_ = [
        ("map", ctypes.c_char * 128 * sweep.MAPS), ("sweep", SweepArgs * 3), ("decay", u64), ("cu", u64),
        ("segment_offsets", u64),
        ("h", i32), ("n", i32), ("segment", i32), ("segments", i32), ("sweeps", i32), ("scale", f32),
        ("not_last", i32), ("zero", i32), ("whole", i32), ("start", i32),
        ("group", i32 * sweep.MAPS), ("decay_b", u64), ("decay_h", u64), ("decay_n", u64), ("keeps", u64),
        ("saved", u64), ("slots", i32), ("pad", i32), ("product", ProductArgs * 3),
        ("steps", u64), ("skip", u64), ("x_dv", u64), ("x_do", u64),
    ]  # fmt: skip


def test_arguments_as_the_kernel_reads_them(h200, monkeypatch):
    """The sizes are asserted by the compiler as well, which was given the sources above."""
    assert ctypes.sizeof(SweepArgs) == sweep.SWEEP.size == 112
    front = sweep.ARGUMENTS.packer()
    assert front.size == ctypes.sizeof(Args)
    assert sweep.ARGUMENTS.size == -(-front.size // 64) * 64 == 2048
    packed: list[bytes] = []
    pack = SimpleNamespace(at=lambda addresses, values: packed.append(front.pack(*values(addresses))))
    monkeypatch.setattr(sweep, "launch_of", lambda *args: pack)
    monkeypatch.setattr(build, "tensor_maps", lambda x, rows: lambda address: bytes([x.shape[2] % 251]) * 128)
    call, x, given = call_of(1, 3, 700, 64, states=True)
    call = call._replace(scale=0.5)
    tensors = {
        sweep.Q: x.q,
        sweep.K: x.k,
        sweep.V: x.v,
        sweep.DO: given.do,
        sweep.OUT: x.q,
        sweep.DK: x.k,
        sweep.DV: x.v,
    }
    states = sweep.States(x.initial_state, None, given.dstate, x.initial_state)
    cut = cuda.segments(call, tiles_of(call).backward_split, x)
    cuda.launch(call, tile_of(call, "backward"), ("dv", "dk"), x, tensors, states, cut, not_last=True).run()
    args = Args.from_buffer_copy(packed[0])
    dv, dk, none = args.sweep
    assert (dv.out, dk.out, none.out) == (x.v.data_ptr(), x.k.data_ptr(), 0)
    assert (dv.out_b, dv.out_h, dv.out_n) == tuple(2 * s for s in x.v.stride()[:3])
    assert (dv.a, dv.b, dv.c, dv.to, dv.reverse, dv.swapped, dv.saved) == (
        sweep.K,
        sweep.Q,
        sweep.DO,
        sweep.DV,
        1,
        0,
        0,
    )
    assert (dk.a, dk.b, dk.c, dk.to, dk.reverse, dk.swapped, dk.saved) == (
        sweep.V,
        sweep.DO,
        sweep.Q,
        sweep.DK,
        1,
        1,
        0,
    )
    assert dv.enters == dk.enters == given.dstate.data_ptr()
    assert (dv.leaves, dk.leaves) == (x.initial_state.data_ptr(), 0)  # one of them says it
    assert (dv.enters_times, dv.leaves_times) == (2.0, 0.5)
    assert (args.h, args.n, args.segment, args.segments, args.sweeps, args.scale) == (3, 700, 700, 1, 2, 0.5)
    assert (args.not_last, args.zero, args.cu, args.segment_offsets) == (1, 0, 0, 0)
    assert (args.whole, args.start) == (0, 0)
    assert (dv.first_enters, dv.first_leaves) == (0, 0)


def test_states_of_heads_in_one_piece_and_of_segments(h200, monkeypatch):
    """135 heads: 132 in one piece, with the call's states, and 3 in segments, with theirs."""
    sent: list[tuple[int, Args]] = []

    def launch_of(variant, device, blocks, threads, shared):
        def at(addresses, values):
            packed = sweep.ARGUMENTS.packer().pack(*values(addresses))
            sent.append((blocks, Args.from_buffer_copy(packed)))

        return SimpleNamespace(at=at)

    monkeypatch.setattr(sweep, "launch_of", launch_of)
    monkeypatch.setattr(build, "tensor_maps", lambda x, rows: lambda address: bytes(128))
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    monkeypatch.setattr(Launch, "run", lambda one: None)
    call, x, given = call_of(1, 135, 1100, 64, states=True, saved=True)
    _, final = cuda.OPERATIONS.forward(call, x)
    *_, dinitial = cuda.OPERATIONS.backward(call, x, given.do, given.dstate)
    (n, gathers), (m, makes), (dn, dgathers), (dm, dmakes) = sent
    assert (n, m, dn, dm) == (3 * 2, 132 + 3 * 2, 3 * 2, 3 * (132 + 3 * 2))
    assert all((args.whole, args.segment, args.segments) == (132, 1024, 2) for _, args in sent)
    assert [args.start for _, args in sent] == [132, 0, 132, 0]
    o = makes.sweep[0]
    assert (o.first_enters, o.first_leaves) == (x.initial_state.data_ptr(), final.data_ptr())
    assert (o.enters, o.leaves) == (gathers.sweep[0].leaves, 0)
    assert gathers.sweep[0].enters == 0
    dv, dk, dq = dmakes.sweep
    assert dv.enters == dk.enters == dgathers.sweep[0].leaves
    assert (dv.first_enters, dk.first_enters) == 2 * (given.dstate.data_ptr(),)
    assert (dv.first_leaves, dk.first_leaves, dv.leaves) == (dinitial.data_ptr(), 0, 0)
    assert (dq.first_enters, dq.enters) == (x.initial_state.data_ptr(), 0)  # of segments, saved ones


@pytest.mark.parametrize(
    ("shape", "pass_", "names"),
    [
        ((4, 32, 8192, 64), "total", ["training", "backward"]),
        ((4, 32, 8192, 64), "forward", ["training"]),
        ((4, 32, 8192, 128), "total", ["training", "backward", "backward"]),
        ((1, 8, 65536, 64), "total", ["state", SCAN, "training", "state", SCAN, "backward"]),
        ((1, 8, 65536, 128), "backward", ["state", SCAN, "backward", "backward"]),
        ((1, 8, 65536, 96), "total", []),
    ],
)
def test_what_a_benchmark_asks_the_resources_of(shape, pass_, names, h200):
    """As many launches as `forward` and `backward` make, of the same variants."""
    from fulmen.bench.adapters.attention import lightning as adapter
    from fulmen.bench.kernels import launches

    B, H, N, D = shape
    case = adapter.complete({"B": B, "H": H, "N": N, "D": D, "dtype": "bfloat16"})
    found = launches("lightning", case, TARGETS[90], "cuda", pass_)
    call = adapter.spec(case, CUDA)
    assert len(found) == len(names)
    for launch, name in zip(found, names, strict=True):
        if name == SCAN:
            assert launch.kernel.__name__ == SCAN
        else:
            assert launch.variant == sweep.variant(call, tile_of(call, name))
            assert launch.threads == sweep.threads(tile_of(call, name))
            assert 0 < launch.shared <= TARGETS[90].smem_bytes
            assert launch.grid[0] % (B * H * (D // 64)) == 0
    assert not launches("lightning", case, TARGETS[80], "cuda", pass_)


def test_a_scan_leaves_out_heads_in_one_piece():
    """As one of the heads that are left, on their own."""
    call = spec(2, 3, 1500, decay=True, device=torch.device("cpu"), with_final_state=True)
    decay = torch.tensor([0.0, 1e-3, 0.1])
    x = Residuals(torch.empty(0, dtype=torch.bfloat16), None, None, decay, None, None)
    torch.manual_seed(0)
    added, initial = torch.randn(6, 3, 64, 64), torch.randn(2, 3, 64, 64)
    all_, final = added.clone(), torch.empty_like(initial)
    cut = fused.Segments(512, 3)
    run_all([triton_split.scan(call, x, cut, all_, initial, final)], call.device)
    for n in (1, 4):
        some, last = added[n:].clone(), torch.full_like(final, -7.0)
        run_all([triton_split.scan(call, x, cut._replace(whole=n), some, initial, last)], call.device)
        assert torch.equal(some, all_[n:])
        assert torch.equal(last.flatten(0, 1)[n:], final.flatten(0, 1)[n:])
        assert (last.flatten(0, 1)[:n] == -7).all()
