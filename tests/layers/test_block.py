"""Residual sum and norm, gated MLP, loss of the head: their kernels in Triton's interpreter against torch's operations
and fp64, in modules, and compiled for every GPU we name."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from fulmen.boundary import is_plain_eager
from fulmen.hardware import TARGETS
from fulmen.layers import AddNorm, GatedMLP, block, linear_cross_entropy
from fulmen.layers.fused import are_alike
from fulmen.layers.fused import block as kernels
from tests.aot_layers import BlockCase
from tests.layers.test_fused import DEVICE, DTYPES, compare, drawn

ACTIVATIONS = {"silu": F.silu, "gelu": F.gelu, "relu": F.relu}


@pytest.fixture
def launched(monkeypatch):
    """Modules take the kernels where a GPU would, on the CPU, too, in several tiles; their launches, by name."""
    found = []

    def run(make, tensors, *options):
        found.append(make(*tensors, *options).kernel.__name__)
        kernels_run(make, tensors, *options)

    def chosen(name, *tensors):
        same = all(t.dtype == tensors[0].dtype for t in tensors)
        return kernels if same and is_plain_eager(*tensors) else None

    kernels_run = kernels.run
    monkeypatch.setattr(kernels, "run", run)
    monkeypatch.setattr(block, "kernels_for", chosen)
    for name, size in (("BLOCK", 64), ("COLUMNS", 16), ("programs_for", lambda size, groups, rows, device: 3)):
        monkeypatch.setattr(kernels, name, size)
    return found


def plain_sum_and_norm(x, y, weight):
    return [x + y, F.rms_norm(x + y, (x.shape[-1],), weight, 1e-6)]


@pytest.mark.parametrize("used", ["both", "norm", "sum"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sum_and_norm(dtype, used, launched) -> None:
    part = {"both": slice(0, 2), "norm": slice(1, 2), "sum": slice(0, 1)}[used]

    def fast(x, y, weight):
        norm = AddNorm(40, 1e-6).to(DEVICE)
        return list(torch.func.functional_call(norm, {"weight": weight}, (x, y)))[part]

    leaves = [drawn(2, 5, 40).to(dtype), drawn(2, 5, 40, seed=1).to(dtype), drawn(40, seed=2).to(dtype)]
    shapes = [(2, 5, 40)] * 2
    if used == "sum":
        x, y, _ = (t.requires_grad_() for t in leaves)
        for grad in torch.autograd.grad(fast(*leaves)[0].sum(), (x, y)):
            assert torch.equal(grad, torch.ones_like(x))
    else:
        compare(fast, lambda *given: plain_sum_and_norm(*given)[part], leaves, *shapes[part])
    assert launched[0] == "add_norm_kernel"


def test_without_a_sum_or_a_fused_norm() -> None:
    norm, x = AddNorm(24, 1e-6), torch.randn(3, 24)
    found, normed = norm(x)
    assert found is x
    assert torch.equal(normed, F.rms_norm(x, (24,), norm.weight, 1e-6))
    y = torch.randn(3, 24)
    for a, b in zip(norm(x, y), plain_sum_and_norm(x, y, norm.weight), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gated_mlp(dtype, activation, launched) -> None:
    mlp = GatedMLP(24, 40, activation=activation, bias=True).to(DEVICE)
    parameters = dict(mlp.named_parameters())

    def fast(x, *given):
        return [torch.func.functional_call(mlp, dict(zip(parameters, given, strict=True)), (x,))]

    def plain(x, gate, gate_bias, up, up_bias, down, down_bias):
        h = ACTIVATIONS[activation](F.linear(x, gate, gate_bias)) * F.linear(x, up, up_bias)
        return [F.linear(h, down, down_bias)]

    leaves = [drawn(2, 5, 24).to(dtype), *(p.detach().to(dtype) for p in parameters.values())]
    compare(fast, plain, leaves, (2, 5, 24))
    assert launched[:2] == ["gated_kernel", "gated_backward_kernel"]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_linear_cross_entropy(dtype, launched) -> None:
    """A target of -100 has neither a loss nor a gradient."""
    targets = torch.tensor([0, 36, -100, 17, 16, 5, 3], device=DEVICE)

    def plain(x, weight):
        logits = F.linear(x, weight)
        return [F.cross_entropy(logits if logits.dtype == torch.float64 else logits.float(), targets, reduction="none")]

    leaves = [drawn(7, 24).to(dtype), drawn(37, 24, seed=1).to(dtype)]
    compare(lambda x, weight: [linear_cross_entropy(x, weight, targets)], plain, leaves, (7,))
    assert launched[:2] == ["loss_kernel", "loss_backward_kernel"]
    assert linear_cross_entropy(*leaves, targets)[2] == 0


def test_logits_far_from_zero(launched) -> None:
    x, weight = torch.eye(2, 4, device=DEVICE), torch.tensor([[300.0, -300, 0, 0], [299, -1e4, 0, 0]], device=DEVICE).T
    targets = torch.tensor([0, 1], device=DEVICE)
    found = linear_cross_entropy(x, weight.T.contiguous(), targets)
    want = F.cross_entropy(x @ weight, targets, reduction="none")
    torch.testing.assert_close(found, want)


def test_hooks_that_hand_back_other_strides(launched) -> None:
    mlp, norm, x = GatedMLP(24, 40).to(DEVICE), AddNorm(24, 1e-6).to(DEVICE), drawn(2, 5, 24)
    targets, parameters = torch.tensor([3] * 10, device=DEVICE), [*mlp.parameters(), *norm.parameters()]

    def loss():
        _, y = norm(x, mlp(x))
        return linear_cross_entropy(y.flatten(0, 1), mlp.gate.weight, targets).sum()

    want = torch.autograd.grad(loss(), parameters)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: torch.stack([t, t], -1)[..., 0]):
        hooked = loss()
    for a, b in zip(torch.autograd.grad(hooked, parameters), want, strict=True):
        torch.testing.assert_close(a, b)


def test_compiled_with_torchs_operations(launched) -> None:
    mlp, norm, x = GatedMLP(24, 40).to(DEVICE), AddNorm(24, 1e-6).to(DEVICE), drawn(2, 5, 24)
    targets = torch.tensor([3] * 10, device=DEVICE)

    def f(x):
        _, y = norm(x, mlp(x))
        return linear_cross_entropy(y.flatten(0, 1), mlp.gate.weight, targets)

    want = f(x)
    launched.clear()
    torch.testing.assert_close(torch.compile(f, fullgraph=True, backend="aot_eager")(x), want)
    assert not launched


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="activation='tanh': must be 'silu', 'relu' or 'gelu'"):
        GatedMLP(8, 16, activation="tanh")
    with pytest.raises(ValueError, match="hidden_dim"):
        GatedMLP(8, 0)
    with pytest.raises(ValueError, match="hidden_dim=6 cannot be shared out evenly to 4 ranks"):
        GatedMLP(8, 6).check_ranks(4)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"x": torch.zeros(2, 3, 4)}, r"x has shape \(2, 3, 4\) and weight \(5, 4\), must be \(tokens, size\)"),
        ({"weight": torch.zeros(5, 3)}, r"weight \(5, 3\), must be"),
        ({"targets": torch.zeros(2, dtype=torch.int64)}, r"targets is torch.int64 \(2,\) on cpu, must be .*\(3,\)"),
        ({"targets": torch.zeros(3)}, "targets is torch.float32"),
        ({"targets": [0, 1, 2]}, "targets is a list, must be a torch.Tensor"),
        ({"x": [0.0]}, "x is a list, must be a torch.Tensor"),
        ({"x": torch.zeros(3, 4).bfloat16()}, "x is torch.bfloat16, and weight torch.float32: cast one of them"),
        ({"weight": torch.zeros(5, 4, device="meta")}, "x is on cpu, and weight on meta"),
        ({"targets": torch.tensor([0, 178, -1])}, r"targets must be 0 to V - 1 = 4, or -100 .*; 2 of 3 .*\[178, -1\]"),
    ],
)
def test_bad_tensors_of_a_loss(changes, says) -> None:
    given = {"x": torch.zeros(3, 4), "weight": torch.zeros(5, 4), "targets": torch.zeros(3, dtype=torch.int64)}
    with pytest.raises(ValueError, match=says):
        linear_cross_entropy(**given | changes)


def test_tokens_without_a_loss_are_no_bad_targets() -> None:
    targets = torch.tensor([-100, 4, 0])
    assert linear_cross_entropy(torch.zeros(3, 4), torch.zeros(5, 4), targets)[0] == 0


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (
            lambda: GatedMLP(8, 16)(torch.zeros(2, 3, 4)),
            r"x has shape \(2, 3, 4\), .* \(..., embed_dim\) with embed_dim=8",
        ),
        (lambda: GatedMLP(8, 16)([0.0]), r"x is a list, must be a tensor \(..., embed_dim\)"),
        (lambda: GatedMLP(8, 16)(torch.zeros(())), r"x has shape \(\), must be a tensor \(..., embed_dim\)"),
        (
            lambda: GatedMLP(8, 16)(torch.zeros(2, 8).bfloat16()),
            "x is torch.bfloat16, and the layer torch.float32: cast",
        ),
        (
            lambda: GatedMLP(8, 16, device="meta")(torch.zeros(2, 8)),
            "x is on cpu, and the layer on meta: call to_empty",
        ),
        (lambda: AddNorm(8, 1e-6)(torch.zeros(2, 4)), r"x has shape \(2, 4\), .* with normalized_shape=\(8,\)"),
        (lambda: AddNorm(8, 1e-6)(*[torch.zeros(2, 4)] * 2), r"x has shape \(2, 4\), .* with normalized_shape=\(8,\)"),
        (lambda: AddNorm(8, 1e-6)([0.0]), r"x is a list, must be a tensor \(..., normalized_shape\)"),
        (lambda: AddNorm(8, 1e-6)(torch.zeros(2, 8), [0.0]), r"y is a list, must have that of x, \(2, 8\)"),
        (lambda: AddNorm(8, 1e-6)(torch.zeros(2, 8).long()), "x is torch.int64, must be a floating-point tensor"),
        (lambda: AddNorm(8, 1e-6)(torch.zeros(2, 8, device="meta")), "x is on meta, and the layer on cpu"),
        (lambda: AddNorm(8)(torch.zeros(2, 8), torch.zeros(2, 8, device="meta")), "y is on meta, and x on cpu"),
    ],
)
def test_bad_tensors_of_modules(call, says) -> None:
    with pytest.raises(ValueError, match=says):
        call()


def test_modules_on_the_meta_device() -> None:
    with torch.device("meta"):
        mlp, norm, x, targets = GatedMLP(8, 16), AddNorm(8, 1e-6), torch.zeros(3, 8), torch.zeros(3).long()
        _, y = norm(x, mlp(x))
        assert linear_cross_entropy(y, mlp.gate.weight, targets).shape == (3,)
    mlp.to_empty(device="cpu").reset_parameters()
    assert all(parameter.abs().max() <= 8**-0.5 for parameter in mlp.parameters())


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
def test_autocast_and_mixed_dtypes_are_no_bad_tensors() -> None:
    """A norm in fp32 takes bf16, as nn.RMSNorm does."""
    x, targets = torch.randn(3, 8).bfloat16(), torch.tensor([0, 1, -100])
    assert AddNorm(8, 1e-6)(x, x)[1].dtype == torch.bfloat16
    mlp = GatedMLP(8, 16)
    with torch.autocast("cpu", torch.bfloat16):
        losses = linear_cross_entropy(mlp(x), mlp.gate.weight, targets)
    assert losses.dtype == torch.float32


def test_a_target_beyond_the_logits_is_nan(launched) -> None:
    x, weight, targets = drawn(2, 4), drawn(5, 4), torch.tensor([5, 1], device=DEVICE)
    assert linear_cross_entropy(x, weight, targets).isnan().tolist() == [True, False]


@pytest.mark.parametrize("arch", sorted(TARGETS))
def test_compiles_without_spills(compiler, arch) -> None:
    for sizes in ((2048, 32000), (8192, 128_256)):
        used = compiler(BlockCase(arch, *sizes))
        assert len(used) == 6
        for usage in used:
            assert usage.stack == 0
            assert usage.shared <= TARGETS[arch].smem_bytes


@pytest.mark.parametrize("activation", ["silu", "gelu", "relu"])
def test_nan_stays_nan(activation, launched, monkeypatch) -> None:
    """As in torch's operations, though the hardware's plain maximum drops it."""
    if DEVICE == "cpu":
        from triton.runtime.interpreter import InterpreterBuilder

        monkeypatch.setattr(InterpreterBuilder, "create_maxnumf", lambda self, a, b: self.binary_op(a, b, np.fmax))
    gate, up = drawn(2, 3, 40).requires_grad_(), drawn(2, 3, 40, seed=1).requires_grad_()
    with torch.no_grad():
        gate[0, 1, 7] = torch.nan
    h = block.block_kernels(gate, up).Gated.apply(activation, gate, up)
    want = block.ACTIVATIONS[activation](gate) * up
    torch.testing.assert_close(h, want, equal_nan=True)
    of = [torch.autograd.grad(y, (gate, up), torch.ones_like(y)) for y in (h, want)]
    torch.testing.assert_close(*of, equal_nan=True)


def test_tensors_of_two_devices_reach_no_kernel() -> None:
    """Kernels get addresses: PyTorch's operations are left to say what is wrong."""
    x = torch.ones(2, 8)
    assert are_alike(x, x + 1)
    assert not any(are_alike(x, y) for y in (x.to("meta"), x.double(), x.T.contiguous().T, x[:0]))
