"""Mamba-2's scan inside the CUDA sweeps: step sizes, skip and gate, by `fulmen.layers.scan`.

On the emulator, and on a GPU, every output and gradient against fp64; what is launched; what is compiled.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from types import SimpleNamespace

import pytest
import torch

from fulmen import cuda as build
from fulmen import dispatch
from fulmen.boundary import is_plain_eager
from fulmen.hardware import TARGETS
from fulmen.layers import scan as mamba
from fulmen.layers.fused import mamba as kernels
from fulmen.lightning import cuda, policy
from fulmen.lightning.kernels import sweep
from fulmen.lightning.spec import Residuals, spec_of
from fulmen.testing import assert_close, carried_roundings, expected, results_of
from fulmen.testing import lightning as testing
from tests import emulator
from tests.emulator import ANY, LATE, MODES, PRESSED
from tests.lightning.cuda_calls import spec
from tests.lightning.test_cuda_tokens import check_code
from tests.lightning.test_token_decay import fast_tokens

SOFTPLUS = mamba.Steps(True, 0.0, torch.inf)
STATE, P = 128, 64  # D and E
emulated = pytest.mark.skipif(emulator.COMPILER is None, reason="the emulator needs g++")
CASES = {
    "plain": {"N": 150, "D": False},
    "D": {"N": 333, "H": 4, "groups": 2, "initial": True},
    "z": {"N": 130, "rows": 2, "z": True},
    "long": {"N": 600, "H": 2, "groups": 1, "z": True, "initial": True},
    "one": {"N": 1, "H": 1, "groups": 1},
    "no groups": {"N": 70, "H": 2, "groups": 2},
    "packed": {"lengths": [65, 0, 1, 70], "z": True, "initial": True},
    "zero steps": {"N": 200, "dt": "zero"},
    "large steps": {"N": 200, "dt": "large"},
    "seq": {"N": 140, "seq": True, "z": True},
    "norm": {"N": 130, "z": True, "norm": True},
}


def drawn(*shape, seed=0, device="cpu"):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device)


class Call:
    """Arguments of a scan, as slices of projections; `leaves` are what gradients are asked of."""

    def __init__(
        self, N=0, rows=1, H=2, groups=1, D=True, z=False, initial=False, lengths=None, dt=None, seq=False, norm=False,
        device="cpu", P=P,
    ):  # fmt: skip
        N = N or sum(lengths)
        self.sizes, self.device = (rows, N, H, P, groups), device
        self.has_z, self.has_norm = z, norm
        self.cu = None
        if lengths is not None:
            ends = [0, *itertools.accumulate(lengths)]
            self.cu = torch.tensor([ends, ends], dtype=torch.int32, device=device).T.contiguous()[:, 0]
        self.seq = (torch.arange(N, device=device) // 50)[None].expand(rows, -1) if seq else None
        width = H * P + 2 * groups * STATE
        make = lambda *shape, seed: drawn(*shape, seed=seed, device=device)  # noqa: E731
        states = rows if lengths is None else len(lengths)
        step = make(rows, N, H, seed=2)
        step = {None: step - 2, "zero": step - 200 * (step > 0), "large": 40 * step.abs()}[dt]
        of_heads = torch.stack([-make(H, seed=3).abs() - 0.1, make(H, seed=4)])
        self.leaves = {
            "xBC": make(rows, N, width, seed=0).bfloat16(),
            "dt": step if device == "cpu" else step.bfloat16(),  # Triton's interpreter cuts bf16 off
            "of_heads": of_heads.bfloat16(),
            "D": make(H, seed=5).bfloat16() if D else None,
            "z": make(rows, N, H * P + 8, seed=1).bfloat16() if z else None,
            "weight": make(H * P, seed=6).bfloat16() if norm else None,
            "initial": make(states, H, STATE, P, seed=7) if initial else None,
        }  # fmt: skip
        self.leaves = {name: t for name, t in self.leaves.items() if t is not None}
        self.douts = [make(rows, N, H, P, seed=8).bfloat16(), make(states, H, STATE, P, seed=9)]

    def scan(self, backend, *leaves):
        """y and the last states; `backend` is a name or a function in its place."""
        of = dict(zip(self.leaves, leaves, strict=True))
        _, _, H, P, groups = self.sizes
        ends = (0, H * P, H * P + groups * STATE, H * P + 2 * groups * STATE)
        x, B, C = (of["xBC"][:, :, i:j] for i, j in itertools.pairwise(ends))
        x, B, C = x.unflatten(2, (H, P)), B.unflatten(2, (groups, STATE)), C.unflatten(2, (groups, STATE))
        A, bias = (of["of_heads"][i] for i in range(2))
        A = A.to(torch.promote_types(A.dtype, torch.float32))
        z = of["z"][:, :, 8:].unflatten(2, (H, P)) if self.has_z else None
        norm = mamba.Norm(of["weight"], 1, 1e-5) if self.has_norm else None
        given = (x, of["dt"], A, B, C, of.get("D"), z, bias, SOFTPLUS)
        if callable(backend):
            return backend(*given, self.seq, of.get("initial"), self.cu, norm)
        return mamba.scan(
            *given, seq=self.seq, initial_state=of.get("initial"), cu_seqlens=self.cu, norm=norm, backend=backend
        )


def plain(x, dt, A, B, C, D, z, bias, steps, seq, initial, cu, norm):
    """As one would write it, in the dtype of x."""
    v, decay = mamba._values(x, dt, A, bias, steps, seq)
    q, k, v = (t.transpose(1, 2) for t in (C, B, v))
    none = x.new_empty(1, x.shape[2], 0, 0)
    o, state = testing._plain(testing.Inputs(q, k, v, decay, 1.0, initial, cu, none, none))
    return mamba._outputs(o.transpose(1, 2), x, D, z, norm).to(x.dtype), state


def check(call: Call, backend: str = "cuda") -> None:
    """y without gradients, then y, the states and all gradients.

    That of A is a sum over all rows. Rows between two saved states share the rounding of a state's product, so theirs
    add up; those of other rows are independent. `test_summed_over_tokens` is about heads that forget within a chunk.
    """
    given, N = [t.requires_grad_() for t in call.leaves.values()], call.sizes[1]
    wanted = expected(lambda *leaves: call.scan(plain, *leaves), given, call.douts, terms=N)
    names = ["y", "state", *(f"d{name}" for name in call.leaves)]
    of_heads = names.index("dof_heads")
    shared, apart = carried_roundings(min(N, policy.TOKEN_ROWS)) ** 2, math.sqrt(math.ceil(N / policy.TOKEN_ROWS))
    wanted[of_heads] = wanted[of_heads]._replace(roundings=shared * apart)
    with torch.no_grad():
        alone = call.scan(backend, *given)
    for name, got, want in zip(names[:2], alone, wanted, strict=False):
        assert_close(f"{name} without gradients", got, *want)
    found = results_of(lambda *leaves: call.scan(backend, *leaves), given, call.douts)
    for name, got, want in zip(names, found, wanted, strict=True):
        assert_close(name, got, *want)


@contextlib.contextmanager
def serving(mode=ANY, seed=0, edit=None, around=None):
    """The emulator serves scans as an H200 would. Step sizes are made in Triton's interpreter, z and norm by torch: the
    interpreter cuts bf16 off."""
    around = around or SimpleNamespace(
        Scanned=kernels.Scanned, scanned=kernels.scanned, Outputs=SimpleNamespace(apply=outputs)
    )
    with pytest.MonkeyPatch.context() as patch, emulator.serve("lightning", mode, seed, edit) as machine:
        patch.setattr(mamba, "kernels_for", lambda name, *given: around if is_plain_eager(*given) else None)
        yield machine


def outputs(groups, eps, u, x, D, z, weight):
    assert x is None
    assert D is None
    norm = None if weight is None else mamba.Norm(weight, groups, eps)
    return mamba._outputs(u, u, None, z, norm).to(u.dtype)


@emulated
@pytest.mark.parametrize("mode", MODES, ids=["early", "late", "any", "pressed"])
@pytest.mark.parametrize("case", CASES)
def test_right_on_the_emulator(case, mode):
    with serving(mode) as machine:
        check(Call(**CASES[case]))
        assert machine.launches == 4  # o twice, then dv and dk, and dq


SPLIT = {
    "one row": {"N": 1100, "initial": True},
    "z": {"N": 1030, "z": True, "D": False},
    "packed": {"lengths": [700, 0, 600], "z": True},
}


@emulated
@pytest.mark.parametrize("mode", [ANY, PRESSED], ids=["any", "pressed"])
@pytest.mark.parametrize("case", SPLIT)
def test_a_split_sequence(case, mode):
    with serving(mode) as machine:
        check(Call(**SPLIT[case]))
        assert machine.launches == 8  # a state before each of two o; before dv and dk, and dq, both states


class Inside(torch.autograd.Function):
    """Lightning attention of v = dt x by step sizes that are powers of 2, so that dt x is exact."""

    @staticmethod
    def forward(ctx, q, k, v, decay, initial, cu_seqlens):
        sizes = 2.0 ** (torch.arange(decay.numel()).view(decay.shape) % 7 - 4).to(decay)
        x = (v / sizes[..., None]).to(v.dtype)
        call = spec_of(q, k, x, decay, initial_state=initial, cu_seqlens=cu_seqlens, with_final_state=True)
        call = call._replace(steps=True)
        kernel = dispatch.pick("lightning", call, "cuda")
        saved = q.new_empty(kernel.saves(call))
        given = Residuals(q, k, x, decay.contiguous(), initial, cu_seqlens, saved, sizes)
        ctx.kernel, ctx.call = kernel, call
        ctx.save_for_backward(*given)
        return kernel.forward(call, given)

    @staticmethod
    def backward(ctx, do, dstate):
        given = Residuals(*ctx.saved_tensors)
        ddecay, of_steps = torch.empty_like(given.decay), torch.empty(2, *given.decay.shape, device=do.device)
        *grads, dinitial = ctx.kernel.backward(ctx.call, given, do, dstate, ddecay, of_steps)
        dq, dk, dx = grads
        exact = (given.v.double() * (dx / given.steps[..., None].to(dx.dtype)).double()).sum(-1)
        assert_close("x . dv", of_steps[0], exact.to(dx.dtype), exact, roundings=8.0)
        assert_close("x . do", of_steps[1], of_steps[1], (given.v.double() * do.double()).sum(-1), roundings=8.0)
        return dq, dk, (dx / given.steps[..., None]).to(dx.dtype), ddecay, dinitial, None


def attend_inside(x: testing.Inputs):
    return Inside.apply(x.q, x.k, x.v, x.decay, x.initial_state, x.cu_seqlens)


EXACT = {
    "batch": {"B": 2, "H": 2, "groups": 1, "N": 200, "initial_state": True},
    "long": {"H": 2, "groups": 1, "N": 600, "layout": "bnhd"},
    "packed": {"H": 2, "groups": 2, "lengths": [65, 0, 70], "decay": "extreme"},
}


@emulated
@pytest.mark.parametrize("case", EXACT)
def test_step_sizes_as_exact_products(case):
    """With all that `testing.check` asks of the attention of dt x, above all the decay's gradient."""
    options = {"decay": "token", **EXACT[case]}
    x = testing.inputs(D=STATE, E=P, dtype=torch.bfloat16, **options)
    x = x._replace(decay=x.decay.requires_grad_())
    with emulator.serve("lightning", ANY):
        actual = testing.evaluate(attend_inside, x)
    for name, wanted in testing.expected(x).items():
        assert_close(name, getattr(actual, name), *wanted)


@emulated
@pytest.mark.parametrize("rate", [0.3, 1.3])
def test_summed_over_tokens(rate):
    """The gradient of Mamba-2's A, whose heads forget a state within a chunk."""
    x = fast_tokens(D=STATE, E=P, groups=2, rate=rate)
    with emulator.serve("lightning", ANY):
        testing.check_summed(x, testing.evaluate(attend_inside, x).ddecay)


WRONG = r" error \d|not finite|not zero"
# What the emulator must notice: a case, a passage, what stands there instead, in which mode, and what is said.
MISTAKES = {
    "columns without step sizes": ("D", "kept * times : 0.0f", "kept : 0.0f", ANY, WRONG),
    "a state without step sizes": ("D", "until * size[i]", "until", ANY, WRONG),
    "step sizes of the chunk before": ("D", "size[i] = next_steps[i];", "size[i] = next_steps[1 - i];", ANY, WRONG),
    "a state's gradient with step sizes": (
        "D",
        "w.reverse ? since : STEPS",
        "w.reverse ? since * size[i] : STEPS",
        ANY,
        WRONG,
    ),
    "dk's state without them": ("D", "into[row] * at.step_sizes(n)[row]", "into[row]", ANY, WRONG),
    "dk's rows taken for its columns": (
        "D",
        "{steps[row], steps[row + 8]}, warp",
        "{steps[row + 8], steps[row]}, warp",
        ANY,
        WRONG,
    ),
    "the skip of half the rows": (
        "D",
        "here[0] = fmaf(skip, low(two[i]), here[0])",
        "if (i % 2) here[0] = fmaf(skip, low(two[i]), here[0])",
        ANY,
        WRONG,
    ),
    "dx without its skip": ("D", "fmaf(skip, high(g[i]), here[1] * size[i % 2])", "here[1] * size[i % 2]", ANY, WRONG),
    "dx without dt": (
        "D",
        "fmaf(skip, low(g[i]), here[0] * size[i % 2])",
        "fmaf(skip, low(g[i]), here[0])",
        ANY,
        WRONG,
    ),
    "x . dv after it is dx": (
        "D",
        "of_dv[i] = fmaf(here[1], high(x[i])",
        "of_dv[i] = fmaf(here[1] * size[i % 2], high(x[i])",
        ANY,
        WRONG,
    ),
    "x . do of half the columns": (
        "D",
        "fmaf(high(g[i]), high(x[i]), fmaf(low(g[i])",
        "fmaf(0.0f, high(x[i]), fmaf(low(g[i])",
        ANY,
        WRONG,
    ),
    "sums stored as another chunk's": (
        "D",
        "at.step_sums[stage], w",
        "at.step_sums[(stage + 1) % STAGES], w",
        ANY,
        WRONG,
    ),
    "a stage released before x is added": (
        "long",
        "else add_skip(at.c(n));\n            release(at.empty + n % STAGES * 8);",
        "else release(at.empty + n % STAGES * 8), add_skip(at.c(n));\n"
        "            if (DX) release(at.empty + n % STAGES * 8);",
        PRESSED,
        WRONG,
    ),
    "a stage released before dx is made": (
        "long",
        "if constexpr (DX) make_dx(at, n);",
        "if constexpr (DX) { release(at.empty + n % STAGES * 8); make_dx(at, n); return; }",
        PRESSED,
        f"{WRONG}|more arrivals|all wait",
    ),
    "a gate that has not come yet": (
        "z",
        "mbarrier_wait(at.rows_full + 8 * who, parity);",
        "",
        LATE,
        f"{WRONG}|more arrivals|has ended",
    ),
    "a gate that comes while another is in use": (
        "long",
        "named_barrier_sync<128>(2 + who);\n        if (next) load_rows(x, at, w, *next);",
        "if (next) load_rows(x, at, w, *next);\n        named_barrier_sync<128>(2 + who);",
        PRESSED,
        WRONG,
    ),
    "a gate of the chunk before": (
        "long",
        "parity ^= OUT_ROWS;",
        "parity ^= DOTS;",
        LATE,
        f"{WRONG}|more arrivals|all wait",
    ),
    "a sigmoid for silu": ("z", "return x * sigmoid(x);", "return sigmoid(x);", ANY, WRONG),
}


@emulated
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_noticed(mistake):
    case, passage, instead, mode, said = MISTAKES[mistake]

    def often():
        for seed in range(8):
            with serving(mode, seed, (passage, instead)):
                check(Call(**CASES[case]))

    with pytest.raises(AssertionError, match=said):
        often()


# ------------------------------------------------------------------------------------------------ the host


def scan_spec(**changes):
    call = spec(1, 4, 4096, STATE, True, E=P, groups=2, per_token=True, steps=True)
    return call._replace(**changes)


def launches(call):
    """Every variant a call may launch: tile, names of the sweeps, whether it writes products."""
    tiles = policy.choose(call, TARGETS[90], "cuda").tile
    found = [(tiles.forward, ("o",), False), (tiles.state, ("state",), False)]
    if not call.gated:
        found += [(tiles.training, ("o",), False)]
        sweeps = cuda.backward_sweeps(call, False, joined=True)
        found += [(cuda.backward_tile(tiles, names, True), names, True) for names in sweeps]
    return found


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.nightly)], ids=["pairs", "every"])
def test_fits_and_does_not_spill(every):
    found = {}
    for packed, gated, groups in itertools.product((None, 4), (False, True), (None, 2)):
        call = scan_spec(sequences=packed, gated=gated, groups=groups)
        for tile, names, products in launches(call):
            variant = sweep.variant(call, tile, names, products)
            found[variant] = tile
            assert sweep.shared_bytes(call, tile, names, products) <= TARGETS[90].smem_bytes
            assert dict(variant.macros)["STEPS"] == 1
    check_code(found, every)


@pytest.mark.parametrize("gated", [False, True])
def test_every_launch_is_asked_for_in_supports(gated, h200, monkeypatch):
    asked = {}
    monkeypatch.setattr(build, "problem", lambda variant, device, shared: asked.__setitem__(variant, shared))
    call = scan_spec(gated=gated)
    assert cuda.supports(call) is None
    for tile, names, products in launches(call):
        assert asked.pop(sweep.variant(call, tile, names, products)) == sweep.shared_bytes(call, tile, names, products)
    assert not asked


def test_who_takes_step_sizes(h200, monkeypatch):
    """cuda, at the shape it is written for; a caller with another way finds nobody elsewhere."""
    monkeypatch.setattr(build, "problem", lambda *args: None)
    assert {name: why is None for name, why in dispatch.reasons("lightning", scan_spec()).items()} == {
        "cuda": True, "triton": False, "triton_split": False, "eager": False, "reference": False,
    }  # fmt: skip
    assert dispatch.find("lightning", scan_spec()).name == "cuda"
    assert dispatch.find("lightning", scan_spec(), "cuda").name == "cuda"
    assert dispatch.find("lightning", scan_spec(), "triton") is None
    others = {"D": 64, "groups": None}, {"E": STATE}, {"scale": 0.5}, {"dtype": torch.float16}, {"aligned": False}
    for other in others:
        assert dispatch.find("lightning", scan_spec(**other)) is None
    assert "step sizes with D 128, E 64" in cuda.supports(scan_spec(E=STATE))
    dispatch.find.cache_clear()


@emulated
def test_what_is_saved():
    """Of tensors as large as x only x: no dt x, no o."""
    call = Call(N=300, H=4, groups=1)
    given = [t.requires_grad_() for t in call.leaves.values()]
    _, N, H, P, _ = call.sizes
    kept = {}

    def pack(t):
        kept[t.untyped_storage().data_ptr()] = t
        return t

    with serving(), torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        call.scan("cuda", *given)
    large = [t for t in kept.values() if t.numel() >= N * H * P // 2 and t.dtype == torch.bfloat16]
    slots = policy.slots_of(scan_spec(H=H, H_KV=H, N=N)) * H
    assert sorted(t.untyped_storage().nbytes() for t in large) == sorted([given[0].nbytes, slots * STATE * P * 2])


@emulated
@pytest.mark.parametrize(
    ("backend", "of_each", "inside"),
    [("cuda", False, True), ("auto", False, True), ("eager", False, False), ("cuda", True, False)],
)
@torch.no_grad()
def test_when_it_is_inside(backend, of_each, inside, monkeypatch):
    """A backend by name that takes no step sizes, or D of each feature, are served as ever."""
    call, ran, run = Call(N=70), [], kernels.run
    monkeypatch.setattr(kernels, "scanned", lambda *args: ran.append("inside") or (None, args[2], None))
    monkeypatch.setattr(kernels, "run", lambda *args: ran.append("around") or run(*args))
    if of_each:
        call.leaves["D"] = call.leaves["D"][:, None].expand(-1, P)
    with serving(around=kernels):
        call.scan(backend, *call.leaves.values())
    assert ran == (["inside"] if inside else [] if of_each else ["around", "around"])


# ------------------------------------------------------------------------------------------------ on a GPU


GPU_CASES = {
    "no z": {"N": 777, "rows": 2, "H": 16, "groups": 1, "initial": True},
    "z": {"N": 1000, "rows": 2, "H": 16, "groups": 8, "z": True},
    "no D": {"N": 300, "H": 40, "groups": 8, "D": False},
    "norm": {"N": 513, "H": 16, "groups": 2, "z": True, "norm": True},
    "split": {"N": 4095, "H": 2, "groups": 1, "z": True, "initial": True},
    "packed": {"lengths": [1, 0, 63, 64, 65, 300, 0, 513, 1], "H": 40, "groups": 8, "z": True, "initial": True},
    "packed, split": {"lengths": [1, 700, 0, 64, 513, 0, 3000, 1], "z": True},
    "zero steps": {"N": 600, "H": 16, "dt": "zero", "z": True},
    "large steps": {"N": 600, "H": 16, "dt": "large"},
    "seq": {"N": 700, "H": 16, "seq": True, "z": True},
}


@pytest.fixture
def inside(monkeypatch):
    """How often the scan was inside the attention; skips where no GPU takes it."""
    call = scan_spec(device=torch.device("cuda", torch.cuda.current_device()))
    why = dispatch.reasons("lightning", call)["cuda"]
    if why is not None:
        pytest.skip(why)
    found, scanned = [], kernels.scanned
    monkeypatch.setattr(kernels, "scanned", lambda *args: found.append(args[0].spec) or scanned(*args))
    return found


@pytest.mark.gpu
@pytest.mark.parametrize("case", GPU_CASES)
def test_right_on_gpu(case, inside):
    options = GPU_CASES[case]
    check(Call(**options, device="cuda"), "auto")
    assert [one.gated for one in inside] == [options.get("z", False) and case != "norm", False]


@pytest.mark.gpu
@pytest.mark.parametrize("case", GPU_CASES)
def test_twenty_runs_are_one(case, inside):
    """Also of the calls after the second, whose launches are prepared."""
    torch.use_deterministic_algorithms(False)
    call = Call(**GPU_CASES[case], device="cuda")
    given = [t.requires_grad_() for t in call.leaves.values()]
    first = results_of(lambda *leaves: call.scan("cuda", *leaves), given, call.douts)
    with torch.no_grad():
        alone = call.scan("cuda", *given)[0].clone()
    for i in range(20):
        again = results_of(lambda *leaves: call.scan("cuda", *leaves), given, call.douts)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True)), i
        with torch.no_grad():
            assert torch.equal(call.scan("cuda", *given)[0], alone), i
    assert len(inside) == 42


@pytest.mark.gpu
def test_no_numbers_stay_in_their_sequence_and_z_in_its_row(inside):
    call = Call(**GPU_CASES["packed"], device="cuda")
    ends = call.cu.tolist()
    with torch.no_grad():
        clean = call.scan("cuda", *call.leaves.values())[0]
        for name in ("xBC", "dt", "z"):
            spoilt = {n: t.clone() for n, t in call.leaves.items()}
            spoilt[name][:, ends[5] : ends[6]] = float("nan")
            dirty = call.scan("cuda", *spoilt.values())[0]
            assert torch.equal(dirty[:, : ends[5]], clean[:, : ends[5]]), name
            assert torch.equal(dirty[:, ends[6] :], clean[:, ends[6] :]), name


@pytest.mark.gpu
@pytest.mark.parametrize("case", ["no z", "z"])
def test_saved_tensors_that_come_back_otherwise(case, inside):
    """Kept on the host meanwhile, slices come back as tensors of their own."""
    call = Call(**GPU_CASES[case], device="cuda")
    given = [t.requires_grad_() for t in call.leaves.values()]
    want = results_of(lambda *leaves: call.scan("cuda", *leaves), given, call.douts)
    with torch.autograd.graph.save_on_cpu():
        got = results_of(lambda *leaves: call.scan("cuda", *leaves), given, call.douts)
    assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))
