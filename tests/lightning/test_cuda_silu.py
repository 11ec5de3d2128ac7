"""Gradients of x, where q, k and v are silu(x), from the CUDA sweeps: on the emulator against fp64, and compiled."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from fulmen import cuda as build
from fulmen.hardware import TARGETS
from fulmen.layers.fused import lightning as kernels
from fulmen.layers.lightning import LightningAttention
from fulmen.lightning import cuda, op, policy
from fulmen.lightning.kernels import sweep
from fulmen.lightning.op import Into, lightning_attention_into
from fulmen.testing import assert_close, expected, results_of
from fulmen.testing import lightning as testing
from tests import emulator
from tests.emulator import ANY, LATE, MODES, PRESSED
from tests.layers.test_fused import compare, drawn
from tests.layers.test_fused_lightning import plainly
from tests.lightning.cuda_calls import spec
from tests.lightning.test_cuda_tokens import check_code

emulated = pytest.mark.skipif(emulator.COMPILER is None, reason="the emulator needs g++")
CASES = {
    "D=64": {"N": 200, "D": 64, "decay": None},
    "D=64 decay": {"N": 333, "D": 64, "B": 2},
    "D=64 groups": {"H": 1, "N": 1000, "D": 64},  # two of saved states, the second not full
    "D=64 packed": {"D": 64, "lengths": [0, 1, 70, 0, 129]},
    "D=128": {"N": 200, "D": 128, "decay": None},
    "D=128 decay": {"N": 333, "D": 128},
    "D=128 long": {"H": 1, "N": 600, "D": 128},
    "D=128 one": {"H": 1, "N": 1, "D": 128},
    "D=128 packed": {"H": 1, "D": 128, "lengths": [100, 0, 65]},
}
SPLIT = {
    "D=64": {"H": 1, "N": 1100, "D": 64},
    "D=128": {"H": 2, "N": 1030, "D": 128},
    "packed": {"H": 1, "D": 64, "lengths": [700, 0, 600]},
}


def parts_of(x, facts):
    """q, k and v, (B, N, heads, size), of a projection's output."""
    return x.unflatten(2, (facts.H, -1)).split([facts.D, facts.D, facts.E], 3)


class Around:
    """In place of the kernels around the attention: Triton's interpreter cuts bf16 off."""

    def __init__(self):
        self.launched = []

    def __call__(self, make, tensors, *options):
        self.launched.append(make.__name__)
        parts = functools.partial(parts_of, facts=options[0])
        if make is kernels.heads_launch:
            for of, part in zip(parts(tensors[0]), tensors[1:4], strict=True):
                part.copy_(F.silu(of.float()))
        else:
            for of, d, part in zip(parts(tensors[0]), tensors[1:4], parts(tensors[4]), strict=True):
                of = of.float().requires_grad_()
                with torch.enable_grad():
                    part.copy_(torch.autograd.grad(F.silu(of), of, d.float())[0])


class Call:
    def __init__(self, H=2, D=64, decay="mixed", B=1, device="cpu", **options):
        given = testing.inputs(B, H, D=D, decay=decay, dtype=torch.bfloat16, device=device, **options)
        self.decay, self.cu, N = given.decay, given.cu_seqlens, given.q.shape[2]
        self.facts = kernels.Heads(H, H, D, D, "silu", None, 0.0, False)
        draw = torch.Generator().manual_seed(5)
        # some large, where silu has no slope on one side
        self.x = 3 * torch.randn(given.q.shape[0], N, 3 * H * D, generator=draw)
        self.do = torch.randn(given.q.shape, generator=draw).bfloat16().to(device)
        self.x = self.x.bfloat16().to(device).requires_grad_()

    def fused(self, x):
        place = kernels.ProjectionGradient(self.facts[:4], x, silu=True)
        q, k, v = (t.transpose(1, 2) for t in kernels.Prepared.apply(self.facts, x, None, None, None, None, place))
        return [lightning_attention_into(Into(place, x), q, k, v, self.decay, 1.0, self.cu, "cuda")]

    def plain(self, x):
        parts = parts_of(x, self.facts)
        q, k, v = (F.silu(t).transpose(1, 2) for t in parts)
        none = x.new_empty(1, q.shape[1], 0, 0)
        return [testing._plain(testing.Inputs(q, k, v, self.decay, 1.0, None, self.cu, none, none))[0]]

    def gradient(self, y, **options):
        return torch.autograd.grad(y, self.x, self.do, **options)[0]

    def check(self):
        N = self.x.shape[1]
        wanted = expected(self.plain, [self.x], [self.do], terms=N)
        for name, got, want in zip(("o", "dx"), results_of(self.fused, [self.x], [self.do]), wanted, strict=True):
            assert_close(name, got, *want)


@pytest.fixture
def around(monkeypatch):
    found = Around()
    monkeypatch.setattr(kernels, "run", found)
    return found


@pytest.fixture
def serving(around):
    return emulator.serve


@emulated
@pytest.mark.parametrize("mode", MODES, ids=["early", "late", "any", "pressed"])
@pytest.mark.parametrize("case", CASES)
def test_right_on_the_emulator(case, mode, serving):
    options = CASES[case]
    with serving("lightning", mode) as machine:
        Call(**options).check()
        assert machine.launches == (2 if options["D"] == 64 else 3)


@emulated
@pytest.mark.parametrize("mode", [ANY, PRESSED], ids=["any", "pressed"])
@pytest.mark.parametrize("case", SPLIT)
def test_a_split_sequence(case, mode, serving):
    with serving("lightning", mode):
        Call(**SPLIT[case]).check()


WRONG = r" error \d|not finite|not zero"
MISTAKES = {
    "slopes released before they are read": (
        "D=64 groups", "activate(at, n);\n            release(at.empty + n % STAGES * 8);",
        "release(at.empty + n % STAGES * 8);\n            activate(at, n);", PRESSED, f"{WRONG}|more arrivals|all wait",
    ),
    "slopes not waited for": ("D=128 decay", "at.await_slopes(n);", "", ANY, f"{WRONG}|all wait"),
    "x not waited for": ("D=64", "at.await_full(n);\n#pragma unroll 2", "#pragma unroll 2", LATE, WRONG),
    "slopes not fenced": (
        "D=64 groups", "        fence_async();              // the copy engine writes the next rows there\n", "", ANY,
        "no fence followed",
    ),
    "slopes of half the rows": ("D=64", "i < PANEL; i += 16 * 96", "i < PANEL / 2; i += 16 * 96", ANY, WRONG),
    "x of another gradient": ("D=64 decay", ": product.rows,", ": x.product[0].rows,", ANY, WRONG),
    "another tile of x": (
        "D=128 decay", "full, 64 * w.tile, row, head, w.b);", "full, 0, row, head, w.b);", ANY, WRONG,
    ),
    "rows of x of which nobody waits for the bytes": (
        "D=128 decay", "RING_ROWS && !fourth ? STAGE - PANEL : STAGE", "STAGE - PANEL", ANY, f"{WRONG}|bytes",
    ),
    "the slope of the sigmoid": ("D=64 decay", "s * fmaf(x, 1.0f - s, 1.0f)", "s * (1.0f - s)", ANY, WRONG),
}  # fmt: skip


@emulated
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_noticed(mistake, serving):
    case, passage, instead, mode, said = MISTAKES[mistake]

    def often():
        for seed in range(8):
            with serving("lightning", mode, seed, (passage, instead)):
                Call(**CASES[case]).check()

    with pytest.raises(AssertionError, match=said):
        often()


@emulated
def test_every_way_to_the_gradient(around):
    """The same bits again, from a checkpoint, and where saved tensors come back as others, or in a row of their own."""

    def shifted(t):
        if t.dtype != torch.bfloat16:
            return t
        return torch.cat([t.new_zeros(1), t.reshape(-1)])[1:].view(t.shape)

    call = Call(**CASES["D=64 decay"])
    with emulator.serve("lightning", ANY):
        (y,) = call.fused(call.x)
        want = call.gradient(y, retain_graph=True)
        assert torch.equal(call.gradient(y), want)
        assert torch.equal(call.gradient(checkpoint(lambda x: call.fused(x)[0], call.x, use_reentrant=False)), want)
        for unpack in (torch.clone, shifted):
            with torch.autograd.graph.saved_tensors_hooks(lambda t: t, unpack):
                (y,) = call.fused(call.x)
            assert torch.equal(call.gradient(y), want)
    assert set(around.launched) == {"heads_launch"}


@emulated
def test_gradients_without_buffers(around, monkeypatch):
    """Of a backward that is not plain and eager, or cannot take x: the activation has a backward of its own."""
    call, own = Call(**CASES["D=64 decay"]), ["heads_launch", "heads_backward_launch"]
    with emulator.serve("lightning", ANY):
        found = call.gradient(*call.fused(call.x), create_graph=True)
        assert around.launched == own
        monkeypatch.setattr(op, "_takes_silu", lambda plan: False)
        assert torch.equal(call.gradient(*call.fused(call.x)), found)
        assert around.launched == 2 * own
        call.check()


@emulated
@pytest.mark.parametrize("in_place", [False, True], ids=["new", "in place"])
def test_a_gradient_that_a_hook_changes_raises(in_place, around):
    """The slope must not be applied twice."""

    def change(dk):
        return (dk.mul_(2), None)[1] if in_place else 2 * dk

    call = Call(**CASES["D=64 decay"])
    with emulator.serve("lightning", ANY):
        place = kernels.ProjectionGradient(call.facts[:4], call.x, silu=True)
        parts = kernels.Prepared.apply(call.facts, call.x, None, None, None, None, place)
        q, k, v = (t.transpose(1, 2) for t in parts)
        k.register_hook(change)
        y = lightning_attention_into(Into(place, call.x), q, k, v, call.decay, 1.0, None, "cuda")
        with pytest.raises(RuntimeError, match="a hook changed the gradient of q, k or v"):
            call.gradient(y)


@emulated
def test_two_backwards_of_one_graph_at_a_time(around):
    """One runs between the attention's backward and the projection's of the other, as threads would have it."""
    call, inner = Call(**CASES["D=64 decay"]), []

    def another(*args):
        if not inner:
            inner.append(None)
            inner[0] = call.gradient(y, retain_graph=True)

    with emulator.serve("lightning", ANY):
        (y,) = call.fused(call.x)
        want = call.gradient(y, retain_graph=True)
        y.grad_fn.register_hook(another)
        assert torch.equal(call.gradient(y), want)
        assert torch.equal(inner[0], want)
    assert set(around.launched) == {"heads_launch"}


ON_GPU = CASES | {f"split {name}": options for name, options in SPLIT.items()}


@pytest.mark.gpu
@pytest.mark.parametrize("case", ON_GPU)
def test_right_on_a_gpu(case):
    """By the prepared backwards of repeated calls, too, and always the same bits."""
    call = Call(**ON_GPU[case], device="cuda")
    for _ in range(3):
        call.check()
    first = call.gradient(*call.fused(call.x))
    for _ in range(20):
        assert torch.equal(call.gradient(*call.fused(call.x)), first)


@pytest.mark.gpu
@pytest.mark.parametrize("D", [64, 128])
def test_a_layer_on_a_gpu(D, monkeypatch):
    """All gradients of a layer whose activation has no backward of its own."""
    torch.manual_seed(0)
    layer, plain = (
        LightningAttention(512, 512 // D, head_dim=D, num_layers=2, backend=backend).to("cuda")
        for backend in ("cuda", "eager")
    )
    parameters, run, launched = dict(layer.named_parameters()), kernels.run, []
    monkeypatch.setattr(kernels, "run", lambda make, *given: (launched.append(make.__name__), run(make, *given)))

    def of(module):
        return lambda x, *given: [torch.func.functional_call(module, dict(zip(parameters, given, strict=True)), (x,))]

    leaves = [drawn(2, 700, 512), *(p.detach() for p in parameters.values())]
    leaves = [t.bfloat16() for t in leaves]
    for _ in range(3):
        compare(of(layer), lambda *given: plainly(of(plain), *given), leaves, (2, 700, 512))
    assert set(launched) == {"heads_launch", "gate_launch", "gate_backward_launch", "sum_launch"}


def launches(call):
    tile = policy.choose(call, TARGETS[90], "cuda").tile.silu
    return [(tile, names) for names in cuda.backward_sweeps(call, call.D == 64)]


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.nightly)], ids=["pairs", "every"])
def test_fits_and_does_not_spill(every):
    found = {}
    for D, decay, packed in itertools.product((64, 128), (False, True), (None, 4)):
        call = spec(1, 4, 4096, D, decay, sequences=packed)
        for tile, names in launches(call):
            variant = sweep.variant(call, tile, names)
            assert dict(variant.macros)["SILU"] == 1
            assert sweep.shared_bytes(call, tile, names) <= TARGETS[90].smem_bytes
            found[variant] = tile
    check_code(found, every)


def test_every_launch_is_asked_for(h200, monkeypatch):
    asked = []
    monkeypatch.setattr(build, "problem", lambda variant, device, shared: asked.append(variant))
    for D in (64, 128):
        asked.clear()
        call = spec(1, 4, 4096, D, True)
        assert cuda.takes_silu(call)
        assert asked == [sweep.variant(call, tile, names) for tile, names in launches(call)]
    assert not cuda.takes_silu(spec(1, 4, 4096, 64, True, per_token=True))
    monkeypatch.setattr(build, "problem", lambda variant, device, shared: "no room")
    assert not cuda.takes_silu(spec(1, 8, 4096, 64, True))
