"""The kernels of Mamba-2's convolution and of what lies around its scan: in Triton's interpreter against torch's
operations and fp64, what is saved, compiled for every GPU we name."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from fulmen import launch
from fulmen.boundary import is_plain_eager
from fulmen.hardware import TARGETS
from fulmen.layers import scan as mamba
from fulmen.layers.fused import conv, state_update
from fulmen.layers.fused import mamba as kernels
from tests.aot_layers import ScanCase
from tests.layers.test_fused import DEVICE, DTYPES, compare, drawn

MODULES = {"conv": conv, "mamba": kernels}
B, N, H, P, G, D = 2, 37, 6, 8, 2, 16


@pytest.fixture
def fused(monkeypatch):
    """The kernels serve where a GPU's would, on the CPU, too; their launches, by name."""
    found = []

    def run(make, tensors, *options):
        launch = make(*tensors, *options)
        for one, other in zip(launch.tensors, tensors, strict=True):
            assert one is other, "so it can be repeated"
        found.append(launch.kernel.__name__)
        kernels_run(make, tensors, *options)

    kernels_run = kernels.run
    for module in MODULES.values():
        monkeypatch.setattr(module, "run", run)
    monkeypatch.setattr(mamba, "kernels_for", lambda name, *given: MODULES[name] if is_plain_eager(*given) else None)
    monkeypatch.setattr(conv, "BACK_TOKENS", 16)
    monkeypatch.setattr(kernels, "programs_for", lambda size, groups, rows, device: 5)
    return found


def plainly(function, *args):
    """With torch's operations."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mamba, "kernels_for", lambda *args: None)
        patch.setattr(mamba, "fused_call", lambda *args, **like: None)
        return function(*args)


def sequences(lengths=(3, 20, N - 23)) -> torch.Tensor:
    row = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    return torch.stack([row, row.flip(0) * 0 + (torch.arange(N) > 30)]).to(torch.int32).to(DEVICE)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("channels", "taps", "silu", "packed", "before"),
    [(40, 4, True, False, False), (300, 4, True, True, False), (24, 2, False, False, True), (24, 3, True, False, True)],
)
def test_convolution(channels, taps, silu, packed, before, dtype, fused) -> None:
    seq = sequences() if packed else None
    early = drawn(B, taps - 1, channels, seed=3).to(dtype) if before else None

    def of(x, weight, bias):
        x = x[:, :, 8:]  # a slice of a projection
        return [mamba.convolve(x, weight, bias, silu, seq, None if early is None else early.to(x.dtype))]

    def fast(*given):
        fused.clear()
        y = of(*given)
        assert fused == ["conv_kernel"]
        return y

    leaves = [drawn(B, N, channels + 8), drawn(channels, taps, seed=1), drawn(channels, seed=2)]
    compare(fast, lambda *given: plainly(of, *given), [t.to(dtype) for t in leaves], (B, N, channels))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("length", [12, 300])
def test_convolution_as_compiled(length, packed, dtype) -> None:
    """As a GPU runs it, not the interpreter: within a tile of tokens, and over several."""
    channels = 384
    seq = (torch.arange(length, device="cuda") // 7).to(torch.int32).expand(B, -1) if packed else None

    def of(x, weight, bias):
        return [mamba.convolve(x[:, :, 8:], weight, bias, True, seq)]

    leaves = [drawn(B, length, channels + 8), drawn(channels, 4, seed=1), drawn(channels, seed=2)]
    assert mamba.kernels_for("conv", *(t.to(dtype) for t in leaves)) is conv
    compare(of, lambda *given: plainly(of, *given), [t.to(dtype) for t in leaves], (B, length, channels))


@pytest.mark.parametrize("length", [3, 4])
@torch.no_grad()
def test_convolution_step(length, ran) -> None:
    """Token by token as a whole, whatever else the state remembers; its memory may lie either way."""
    x, weight, bias = drawn(B, N, 40), drawn(40, 4, seed=1), drawn(40, seed=2)
    want = mamba.convolve(x, weight, bias, True)
    state = torch.zeros(B, length, 40, device=DEVICE).mT if length == 3 else torch.zeros(B, 40, 4, device=DEVICE)
    other = state.clone()
    for t in range(N):
        y = mamba.convolve_step(x[:, t], weight, bias, state, True)
        torch.testing.assert_close(y, want[:, t], rtol=1e-5, atol=1e-5)
        plainly(mamba.convolve_step, x[:, t], weight, bias, other, True)
        assert torch.equal(state, other)
    assert DEVICE != "cpu" or ran == ["conv_kernel"] + ["conv_step_kernel"] * N


OPTIONS = {
    "all": {},
    "no z": {"z": False},
    "no D": {"D": False},
    "no bias": {"bias": False, "z": False, "D": False},
    "limit": {"steps": (True, 0.3, 0.9)},
    "no softplus": {"steps": (False, 1 / 300, 4 / 3)},  # which no step size is: its gradient there depends on torch
    "norm": {"groups": 1},
    "norm in groups": {"groups": 3, "D": False},
    "packed": {"packed": True, "groups": 2},
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_outputs_and_all_gradients(name, dtype, fused) -> None:
    """Of the whole scan, against fp64, by what torch's operations err in the same dtype."""
    options = OPTIONS[name]
    seq, groups = sequences() if options.get("packed") else None, options.get("groups")
    with_z, with_d, with_bias = (options.get(part, True) for part in ("z", "D", "bias"))

    def of(joined, z, dt, of_heads, weight):
        A, bias, Dw = of_heads.unbind()  # one leaf: a sum of few numbers may be right by chance
        x, k, q = joined.split([H * P, G * D, G * D], 2)  # as the convolution's output
        gate = z[:, :, 8:].unflatten(2, (H, P)) if with_z else None
        y, _ = mamba.scan(
            x.unflatten(2, (H, P)), dt, A.to(torch.promote_types(A.dtype, torch.float32)), k.unflatten(2, (G, D)),
            q.unflatten(2, (G, D)), Dw if with_d else None, gate, bias if with_bias else None,
            mamba.Steps(*options.get("steps", (True, 0.0, torch.inf))), seq=seq,
            norm=None if groups is None else mamba.Norm(weight, groups, 1e-5), backend="eager",
        )  # fmt: skip
        return [y]

    def fast(*given):
        fused.clear()
        y = of(*given)
        after = ["outputs_kernel"] if with_z or with_d or groups else []
        assert fused == ["values_kernel", *after]
        return y

    of_heads = torch.stack([-drawn(H, seed=3).abs() - 0.1, drawn(H, seed=4), drawn(H, seed=5)])
    leaves = [drawn(B, N, H * P + 2 * G * D), drawn(B, N, H * P + 8, seed=1), drawn(B, N, H, seed=2), of_heads,
              drawn(H * P, seed=6)]  # fmt: skip
    used = [True, with_z, True, True, groups is not None]
    leaves = [t.to(dtype) for t in leaves]

    def chosen(function):
        def call(*given):
            left = iter(given)
            return function(*(next(left) if use else t for use, t in zip(used, leaves, strict=True)))

        return call

    mine = [t for use, t in zip(used, leaves, strict=True) if use]
    compare(chosen(fast), chosen(lambda *given: plainly(of, *given)), mine, (B, N, H, P), terms=B * N)


@pytest.mark.parametrize("first", ["x", "dt", "k", "q", "z"])
def test_memory_that_begins_with_tokens(first, fused) -> None:
    """An argument (B, N, ...) with the memory of (N, B, ...)."""
    names = {"x": (H, P), "dt": (H,), "k": (H, D), "q": (H, D), "z": (H, P)}  # with a group a head, o lies as q does
    leaves = [drawn(N, B, *shape, seed=seed).transpose(0, 1) for seed, shape in enumerate(names.values())]
    leaves = [t if name == first else t.contiguous() for name, t in zip(names, leaves, strict=True)]
    A, Dw, steps = -drawn(H, seed=6).abs(), drawn(H, seed=7), mamba.Steps(True, 0.0, torch.inf)

    def of(x, dt, k, q, z):
        return [mamba.scan(x, dt, A, k, q, Dw.to(x.dtype), z, None, steps, backend="eager")[0]]

    compare(of, lambda *given: plainly(of, *given), leaves, (B, N, H, P), terms=B * N)
    assert ("outputs_kernel" in fused) == (first not in ("x", "z"))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_no_second_derivative_of_the_skip(dtype, fused, monkeypatch) -> None:
    """Whose cast is what the kernel reads. The plan of a backend that takes step sizes is y = D x here."""

    class Kernel:
        needs_grad, spec = True, SimpleNamespace(with_final_state=False, gated=False)
        forward = SimpleNamespace(run=lambda *x: (x[2] * x[8][:, None, None].to(x[2].dtype), None, None))

        @staticmethod
        def gradients(q, k, v, decay, initial, cu_seqlens, saved, sizes, skip, gate, do, dstate, ddecay, of_steps):
            ddecay.zero_()
            of_steps.zero_()
            return torch.zeros_like(q), torch.zeros_like(k), do * skip[:, None, None].to(v.dtype), None

    monkeypatch.setattr(mamba, "_inside", lambda *given: Kernel)
    x, skip = drawn(B, N, H, P).to(dtype).requires_grad_(), drawn(H, seed=4).to(dtype).requires_grad_()
    dt, k, q = (drawn(B, N, *shape, seed=1).to(dtype) for shape in ((H,), (G, D), (G, D)))
    y, _ = mamba.scan(x, dt, -torch.ones(H, device=DEVICE), k, q, skip, None, None, mamba.Steps(True, 0.0, torch.inf))
    (g,) = torch.autograd.grad(y.float().sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        torch.autograd.grad(g.float().sum() + skip.float().sum(), skip)


@pytest.mark.parametrize("name", ["all", "no bias", "limit", "no softplus", "packed"])
def test_step_sizes_alone(name, fused) -> None:
    """Where the attention applies them: sizes and decays, and all that follows from the gradients of both."""
    steps = mamba.Steps(*OPTIONS[name].get("steps", (True, 0.0, torch.inf)))
    seq, tokens, heads = sequences() if name == "packed" else None, N, 37
    dt, A, bias = drawn(B, tokens, heads + 3)[:, :, 3:], -drawn(heads, seed=1).abs(), drawn(heads, seed=2)
    bias = None if name == "no bias" else bias
    sizes, decay = (torch.empty(B, heads, tokens, device=DEVICE) for _ in range(2))
    kernels.run(kernels.steps_launch, (dt, A, bias, seq, sizes, decay), steps)
    leaves = [t.detach().double().requires_grad_() for t in (dt, A, *([] if bias is None else [bias]))]
    exact = mamba.step_sizes(leaves[0], leaves[2] if bias is not None else None, steps)
    x = torch.ones(B, tokens, heads, 1, dtype=torch.float64, device=DEVICE)
    v, exact_decay = mamba._values(x, leaves[0], leaves[1], leaves[2] if bias is not None else None, steps, seq)
    torch.testing.assert_close(sizes.double(), exact.transpose(1, 2), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(decay.double(), exact_decay, rtol=1e-5, atol=1e-5)

    ddecay, of_steps = drawn(B, heads, tokens, seed=3), drawn(2, B, heads, tokens, seed=4)
    ddt, sums = (
        torch.empty_like(dt),
        torch.empty(kernels.steps_grid(dt)[1], 3, heads, dtype=torch.float64, device=DEVICE),
    )
    kernels.run(kernels.steps_backward_launch, (dt, A, bias, ddecay, of_steps, ddt, sums), steps)
    grads = torch.autograd.grad(
        [v, exact_decay], leaves, [of_steps[0].mT.double()[..., None], ddecay.double()], materialize_grads=True
    )
    found = [ddt, *sums.sum(0)]
    for got, wanted in zip(found, grads, strict=False):
        torch.testing.assert_close(got.double(), wanted, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found[3], of_steps[1].double().sum((0, 2)), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("gated", [False, True])
def test_what_is_saved(gated, fused) -> None:
    """Of tensors as large as x: x and v = dt x; with z also z and o. Nothing twice."""
    x, z, dt = (drawn(1, 40, *shape, seed=len(shape)).requires_grad_() for shape in ((4, 64), (4, 64), (4,)))
    k, q, A = drawn(1, 40, 1, 16), drawn(1, 40, 1, 16, seed=1), -torch.rand(4, device=DEVICE)
    kept, size = {}, x.untyped_storage().nbytes()

    def pack(t):
        kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        steps = mamba.Steps(True, 0.0, torch.inf)
        mamba.scan(x, dt, A, k, q, torch.ones(4, device=DEVICE), z if gated else None, None, steps, backend="eager")
    assert [nbytes for nbytes in kept.values() if nbytes >= size] == [size] * (4 if gated else 2)


@pytest.mark.parametrize("arch", sorted(TARGETS))
@pytest.mark.parametrize("sizes", [(64, 64, 1), (128, 64, 1), (80, 128, 8)], ids=str)
def test_compiles_without_spills(compiler, arch, sizes) -> None:
    for usage in compiler(ScanCase(arch, *sizes)):
        assert usage.stack == 0, usage
        assert usage.shared <= TARGETS[arch].smem_bytes


@pytest.fixture
def as_hardware(monkeypatch):
    """In the interpreter max and min drop a NaN where the hardware's plain instructions do."""
    if DEVICE == "cpu":
        from triton.runtime.interpreter import InterpreterBuilder

        for name, of in {"create_maxnumf": np.fmax, "create_minnumf": np.fmin}.items():
            monkeypatch.setattr(InterpreterBuilder, name, lambda self, a, b, of=of: self.binary_op(a, b, of))


@pytest.mark.parametrize("steps", [(True, 0.0, torch.inf), (True, 0.1, 0.9), (False, -torch.inf, torch.inf)], ids=str)
def test_a_step_size_that_is_nan_stays_nan(steps, fused, as_hardware) -> None:
    steps = mamba.Steps(*steps)
    x, dt, A = drawn(1, 5, 2, 4), drawn(1, 5, 2, seed=1), -drawn(2, seed=2).abs()
    dt[0, 3, 1] = torch.nan
    v, decay, _ = kernels.Values.apply(steps, x, dt, A, None, None, None)
    wrong = torch.zeros(1, 5, 2, dtype=torch.bool, device=DEVICE)
    wrong[0, 3, 1] = True
    assert torch.equal(v.isnan(), wrong[..., None].expand_as(v))
    assert torch.equal(decay.isnan(), wrong.transpose(1, 2))
    for shared in (True, False):
        state, given = torch.zeros(5, 2, 4, 3, device=DEVICE), dt[0, :, :, None].expand(5, 2, 4)
        given = given if shared else given.contiguous()
        k, q = (torch.ones(5, 1, 3, device=DEVICE) for _ in range(2))
        of_heads = A[:, None, None].expand(2, 4, 3)
        (y,), one = state_update.updated(
            (steps, False), state, x[0], given, of_heads, k, q, None, None, None, None
        )  # fmt: skip
        launch.run(one)
        assert torch.equal(y.isnan(), wrong[0, ..., None].expand_as(y))
        assert torch.equal(state.isnan(), wrong[0, ..., None, None].expand_as(state))


@pytest.mark.parametrize("taps", [2, 3])
def test_a_convolution_sees_no_more_than_its_taps(taps, fused) -> None:
    """NaN, and in the backward what comes of it, reaches as many tokens as there are taps."""
    x, weight, bias = drawn(1, 9, 8), drawn(8, taps, seed=1), drawn(8, seed=2)
    x[0, 4], bias[3] = torch.nan, torch.inf
    y = mamba.convolve(x, weight, bias, False)
    assert y[0, :, :3].isnan().any(1).nonzero()[:, 0].tolist() == list(range(4, 4 + taps))
    x.nan_to_num_().requires_grad_()
    dy = torch.ones_like(x)
    dy[0, 4] = torch.nan
    (dx,) = torch.autograd.grad(mamba.convolve(x, weight, bias, False), x, dy)
    assert dx[0].isnan().any(1).nonzero()[:, 0].tolist() == list(range(5 - taps, 5))


def apart(t):
    """The same numbers, none beside another."""
    return torch.stack([t, t + 1], -1)[..., 0]


def test_hooks_that_hand_back_other_strides(fused) -> None:
    """What is saved comes back as such hooks, of offloading or compression, make it."""
    seq = sequences()

    def of(joined, z, dt, of_heads, weight, taps, bias):
        A, dt_bias, Dw = of_heads.unbind()
        mixed = mamba.convolve(joined[:, :, 4:], taps, bias, True, seq)
        x, k, q = mixed.split([H * P, G * D, G * D], 2)
        y, _ = mamba.scan(
            x.unflatten(2, (H, P)), dt, A, k.unflatten(2, (G, D)), q.unflatten(2, (G, D)), Dw, z.unflatten(2, (H, P)),
            dt_bias, mamba.Steps(True, 0.0, torch.inf), norm=mamba.Norm(weight, 2, 1e-5), backend="eager",
        )  # fmt: skip
        return y.square().sum()

    of_heads = torch.stack([-drawn(H, seed=3).abs() - 0.1, drawn(H, seed=4), drawn(H, seed=5)])
    channels = H * P + 2 * G * D
    leaves = [drawn(B, N, channels + 4), drawn(B, N, H * P, seed=1), drawn(B, N, H, seed=2), of_heads,
              drawn(H * P, seed=6), drawn(channels, 4, seed=7), drawn(channels, seed=8)]  # fmt: skip
    leaves = [t.requires_grad_() for t in leaves]
    want = torch.autograd.grad(of(*leaves), leaves)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, apart):
        loss = of(*leaves)
    for got, wanted in zip(torch.autograd.grad(loss, leaves), want, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4 * float(wanted.abs().max()))


@torch.no_grad()
def test_a_step_reads_what_its_tensors_say(ran) -> None:
    """Not the memory of one that is stored as its negative, nor that of another device."""
    x, dt, A, k = drawn(B, H, P), drawn(B, H, seed=1), -drawn(H, seed=2).exp(), drawn(B, G, D, seed=3)
    steps, states = mamba.Steps(True, 0.0, torch.inf), torch.zeros(2, B, H, P, D, device=DEVICE)
    want = mamba.scan_step(states[0], x, dt, A, k, k, None, None, None, steps)
    assert "state_update_kernel" in ran
    y = mamba.scan_step(states[1], x, torch._neg_view(-dt), A, k, k, None, None, None, steps)
    torch.testing.assert_close(y, want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(states[1], states[0], rtol=1e-5, atol=1e-5)
    given = (states[0], x, dt, A.to("meta"), k, k, None, None, None, None)
    assert mamba.fused_call("state_update", "updated", (steps, False), *given, like=(x,)) is None
