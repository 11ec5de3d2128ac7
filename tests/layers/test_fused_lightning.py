"""The lightning layer's kernels: in Triton's interpreter in layers against torch's operations and fp64, what they save,
compiled for every GPU we name."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from fulmen.boundary import is_plain_eager, once_differentiable
from fulmen.hardware import TARGETS
from fulmen.layers import StateCache, lightning
from fulmen.layers.fused import lightning as kernels
from fulmen.layers.lightning import LightningAttention
from fulmen.lightning.op import Into, lightning_attention_into
from tests.aot_layers import LayerCase
from tests.layers.test_fused import DEVICE, DTYPES, compare, drawn

WIDTH, H, D = 48, 4, 16
LAYERS = {
    "minimax": {},
    "ring": {"preset": "ring"},
    "bias": {"bias": True, "output_norm": 2},
    "fewer keys": {"preset": "ring", "num_kv_heads": 2, "value_dim": 24, "bias": True},
    "one key": {"num_kv_heads": 1, "value_dim": 5, "output_norm": 4},
    "norm after": {"preset": "ring", "qk_norm": "after", "rope": {"interleaved": True, "dim": 6}},
    "norm alone": {"preset": "ring", "rope": None, "output_norm": 1},
    "rope alone": {"preset": "ring", "qk_norm": None, "rope": {"dim": D}, "output_norm": None},
    "relu": {"preset": "ring", "activation": "relu", "gate": False},
    "gelu": {"activation": "gelu", "qk_norm": "after", "rope": {"dim": 4}, "num_kv_heads": 2},
    "one head": {"preset": "ring", "num_kv_heads": 1, "rope": None},
}
PACKED = {"cu_seqlens": torch.tensor([0, 3, 3, 9], dtype=torch.int32, device=DEVICE)}
PADDED = {"mask": torch.tensor([[1, 1, 0, 1, 1, 1, 0, 1, 1]], dtype=torch.bool, device=DEVICE)}
PLACED = {"positions": torch.arange(2, 20, 2, device=DEVICE)[None]}
CALLS = {"batch": {}, "packed": PACKED, "padded": PADDED, "positions": PLACED}


def made(kind: str = "minimax", **options) -> LightningAttention:
    torch.manual_seed(0)
    layer = LightningAttention(WIDTH, H, **{"head_dim": D, "layer": 1, "num_layers": 4, **LAYERS[kind], **options})
    for p in layer.parameters():
        if p.ndim == 1:
            torch.nn.init.uniform_(p, 0.5, 1.5)
    return layer.to(DEVICE)


@pytest.fixture
def launched(monkeypatch):
    """The layer takes the kernels where a GPU would, on the CPU, too; their launches, by name."""
    found = []

    def run(make, tensors, *options):
        launch = make(*tensors, *options)
        assert [t.data_ptr() for t in launch.tensors] == [t.data_ptr() for t in tensors], "so it can be repeated"
        found.append(launch.kernel.__name__)
        kernels_run(make, tensors, *options)

    def chosen(name, *tensors):
        same = all(t.dtype == tensors[0].dtype for t in tensors)
        return kernels if same and is_plain_eager(*tensors) else None

    kernels_run = kernels.run
    monkeypatch.setattr(kernels, "run", run)
    monkeypatch.setattr(lightning, "kernels_for", chosen)
    monkeypatch.setattr(kernels, "HEAD_PROGRAMS_PER_SM", 3)  # so that one takes several tokens
    monkeypatch.setattr(kernels, "sm_count", lambda device: 1)
    monkeypatch.setattr(kernels, "programs_for", lambda size, groups, rows, device: 2)
    monkeypatch.setattr(kernels, "TILE", 2 * D)  # and several tiles of heads
    return found


def plainly(function, *args, **options):
    """With torch's operations."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lightning, "kernels_for", lambda *args: None)
        return function(*args, **options)


def expected_launches(kind: str) -> list[str]:
    options = LAYERS[kind]
    gated = options.get("gate", True) or options.get("output_norm", 1) is not None
    return ["heads_kernel", *(["gate_kernel"] if gated else [])]


CASES = [(kind, "batch", dtype) for kind in LAYERS for dtype in DTYPES]
CASES += [
    (kind, call, torch.float32) for kind in ("minimax", "ring", "fewer keys") for call in CALLS if call != "batch"
]


@pytest.mark.parametrize(("kind", "call", "dtype"), CASES, ids=str)
def test_outputs_and_all_gradients(kind, call, dtype, launched) -> None:
    """Against fp64, by what torch's operations err in the same dtype."""
    layer = made(kind).to(dtype)
    exact, parameters = copy.deepcopy(layer).double(), dict(layer.named_parameters())

    def of(x, *given):
        module = exact if x.dtype == torch.float64 else layer
        named = dict(zip(parameters, given, strict=True))
        return [torch.func.functional_call(module, named, (x,), dict(CALLS[call]))]

    def fast(*given):
        launched.clear()
        found = of(*given)
        assert launched == expected_launches(kind)
        return found

    leaves = [drawn(1, 9, WIDTH).to(dtype), *(p.detach() for p in parameters.values())]
    compare(fast, lambda *given: plainly(of, *given), leaves, (1, 9, WIDTH))


@pytest.mark.parametrize("kind", ["minimax", "ring"])
def test_no_second_derivative(kind, launched) -> None:
    """Nor a part of one: every parameter's gradient of a gradient has paths through the kernels."""
    layer, x = made(kind), drawn(1, 9, WIDTH).requires_grad_()
    (g,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    torch.testing.assert_close(g, torch.autograd.grad(layer(x).square().sum(), x)[0], rtol=0, atol=0)
    for p in (x, *layer.parameters()):
        with pytest.raises(NotImplementedError, match="no second derivative"):
            torch.autograd.grad(g.sum(), p, retain_graph=True)
    again = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
    assert torch.equal(torch.autograd.grad(again.square().sum(), x, create_graph=True)[0], g)


def test_gradients_of_many_directions_at_once() -> None:
    """Of a Function in torch's operations, as a projection: `is_grads_batched` runs its backward under vmap."""

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w):
            ctx.save_for_backward(x, w)
            return x * w

        @staticmethod
        @once_differentiable
        def backward(ctx, dy):
            x, w = ctx.saved_tensors
            return dy * w, dy * x

    x, w = (torch.randn(3, requires_grad=True) for _ in range(2))
    (jacobian,) = torch.autograd.grad(Product.apply(x, w), x, torch.eye(3), is_grads_batched=True, create_graph=True)
    assert torch.equal(jacobian, torch.diag(w.detach()))


@pytest.mark.parametrize("kind", ["minimax", "ring"])
def test_what_is_saved(kind, launched) -> None:
    """In u, the bytes of q: x, the projection's output (3), q, k and, if activated, v, o, the gate and out_proj's
    input; nothing twice. Parameters, tables and norms are small."""
    layer, N = LightningAttention(64, 4, preset=kind, num_layers=2, device=DEVICE), 40
    x, kept = drawn(2, N, 64).requires_grad_(), {}
    tables = [] if layer.rope is None else layer.rope.span(0, N, x.device)
    u, own = 2 * N * 64 * 4, {t.untyped_storage().data_ptr() for t in (*layer.parameters(), *tables)}

    def pack(t):
        kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = layer(x)
    units = [size / u for at, size in kept.items() if at not in own and size >= u / 2]
    assert sorted(units) == [1] * (3 if kind == "minimax" else 2) + [1] * 4 + [3]
    assert y.shape == x.shape
    assert x.untyped_storage().data_ptr() in kept


@pytest.mark.parametrize("kind", ["minimax", "ring"])
def test_hooks_that_hand_back_other_strides(kind, launched) -> None:
    layer, x = made(kind), drawn(2, 9, WIDTH)
    want = torch.autograd.grad(layer(x).square().sum(), layer.parameters())
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: torch.stack([t, t], -1)[..., 0]):
        y = layer(x).square().sum()
    for got, wanted in zip(torch.autograd.grad(y, layer.parameters()), want, strict=True):
        torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["ring", "fewer keys", "norm alone", "norm after", "one head"])
def test_dv_is_written_to_its_place(kind, dtype, launched, monkeypatch) -> None:
    """By the attention's backward, into the projection's gradient; the same bits as of a dv that is copied there."""
    backend = "auto" if DEVICE == "cuda" else "triton"
    layer = made(kind, backend=backend).to(dtype)
    x, leaves = drawn(2, 9, WIDTH).to(dtype).requires_grad_(), [*layer.parameters()]
    taken, take = [], kernels.ProjectionGradient.take

    def gradients(y):
        found = torch.autograd.grad(y, [x, *leaves], drawn(2, 9, WIDTH, seed=7).to(dtype), retain_graph=True)
        return found

    def recorded(place, *grads):
        taken.append(take(place, *grads))
        assert not place.pending
        return taken[-1]

    monkeypatch.setattr(kernels.ProjectionGradient, "take", recorded)
    y = layer(x)
    first, second = gradients(y), gradients(y)
    assert [dx is not None for dx in taken] == [True, True]
    monkeypatch.setattr(kernels.ProjectionGradient, "take", lambda place, *grads: None)
    copied = gradients(layer(x))
    for a, b, c in zip(first, second, copied, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c)


def test_another_dv_is_copied_to_its_place(launched) -> None:
    """One that a hook changed, a sum of two uses of v, or none at all."""
    facts = kernels.Heads(H, H, D, D, None, "before", 1e-6, False)
    qkv, weights = drawn(2, 9, 3 * H * D).requires_grad_(), [torch.ones(D, device=DEVICE, requires_grad=True)] * 2

    def gradient(use, place):
        q, k, v = kernels.Prepared.apply(facts, qkv, *weights, None, None, place)
        return torch.autograd.grad(use(*(t.transpose(1, 2) for t in (q, k, v)), place), qkv)[0]

    def attended(q, k, v, place):
        options = {"scale": 1.0, "cu_seqlens": None, "backend": "triton"}
        return lightning_attention_into(Into(place or unplaced, qkv), q, k, v, None, **options)

    def twice(q, k, v, place):
        return (attended(q, k, v, place) * v).sum()

    def doubled(q, k, v, place):
        v.register_hook(lambda dv: 2 * dv)
        return attended(q, k, v, place).square().sum()

    unplaced = kernels.ProjectionGradient(facts[:4], qkv)
    for use in (twice, doubled, lambda q, k, v, place: (q * k).sum()):
        got = gradient(use, kernels.ProjectionGradient(facts[:4], qkv))
        assert torch.equal(got, gradient(use, None))
        assert got.isfinite().all()


@pytest.mark.nightly
@pytest.mark.parametrize("frozen", ["qkv_proj", "norm", "output_gate", "out_proj"])
@pytest.mark.parametrize("kind", ["minimax", "ring"])
def test_frozen_parameters(kind, frozen, launched) -> None:
    """The gradients of the others are the same, bit for bit, and what is frozen has none."""
    layer, x = made(kind), drawn(2, 9, WIDTH)

    def gradients():
        layer.zero_grad()
        layer(x).square().sum().backward()
        return {name: p.grad for name, p in layer.named_parameters()}

    whole = gradients()
    for name, p in layer.named_parameters():
        p.requires_grad_(frozen not in name)
    for name, got in gradients().items():
        assert got is None if frozen in name else torch.equal(got, whole[name])


@pytest.mark.parametrize("kind", ["minimax", "ring", "fewer keys"])
def test_caches_checkpoints_and_no_gradients(kind, launched) -> None:
    layer, x, cache = made(kind), drawn(2, 9, WIDTH), StateCache()
    y = layer(x)
    with torch.no_grad():
        assert torch.equal(layer(x), y)
        parts = torch.cat([layer(part, cache=cache) for part in x.split([5, 1, 3], dim=1)], 1)
    torch.testing.assert_close(parts, y)
    grads = torch.autograd.grad(y.sum(), layer.parameters())
    again = torch.autograd.grad(checkpoint(layer, x, use_reentrant=False).sum(), layer.parameters())
    assert all(torch.equal(a, b) for a, b in zip(grads, again, strict=True))


@pytest.mark.parametrize("kind", ["minimax", "ring"])
def test_autocast(kind, launched) -> None:
    """Norms keep their fp32 weights, and so their gradients."""
    layer, x = made(kind), drawn(2, 9, WIDTH)
    want = plainly(layer, x)
    with torch.autocast(DEVICE, dtype=torch.float16):
        y = layer(x)
    assert y.dtype == torch.float16
    assert launched == expected_launches(kind)
    assert (y.float() - want).norm() < 0.02 * want.norm()
    grads = torch.autograd.grad(want.sum(), layer.parameters())
    for got, exact in zip(torch.autograd.grad(y.float().sum(), layer.parameters()), grads, strict=True):
        assert got.dtype == torch.float32
        assert (got - exact).norm() < 0.05 * exact.norm()


def test_autocast_of_a_projection_in_another_dtype(launched) -> None:
    """dv is then of another dtype than the projection's gradient, and copied there."""
    layer, x = made("ring", backend="triton"), drawn(2, 9, WIDTH).requires_grad_()
    layer.qkv_proj.register_forward_hook(lambda module, given, out: out.float())
    want = torch.autograd.grad(plainly(layer, x).sum(), x)[0]
    with torch.autocast(DEVICE, dtype=torch.float16):
        y = layer(x)
    got = torch.autograd.grad(y.float().sum(), x)[0]
    assert (got - want).norm() < 0.05 * want.norm()


@pytest.mark.parametrize("name", ["q_norm", "norm"])
def test_a_norm_with_a_hook_is_called(name, launched) -> None:
    layer, x, seen = made("ring"), drawn(2, 9, WIDTH), []
    y = layer(x)
    handle = layer.get_submodule(name).register_forward_hook(lambda *args: seen.append(args))
    launched.clear()
    torch.testing.assert_close(layer(x), y)
    assert len(seen) == 1
    assert len(launched) == 1
    handle.remove()


def test_compilers_take_torchs_operations(launched) -> None:
    layer, x = made("ring"), drawn(2, 9, WIDTH)
    want = layer(x)
    launched.clear()
    torch.testing.assert_close(torch.compile(layer, fullgraph=True, backend="aot_eager")(x), want)
    assert not launched


@pytest.mark.parametrize("arch", sorted(TARGETS))
@pytest.mark.parametrize("preset", ["minimax", "ring"])
def test_compiles_without_spills(compiler, arch, preset) -> None:
    for options in ((16, 128), (64, 128), (32, 64, True)):
        used = compiler(LayerCase(arch, preset, *options))
        assert len(used) == 4
        for usage in used:
            assert usage.stack == 0
            assert usage.shared <= TARGETS[arch].smem_bytes


@pytest.mark.parametrize("name", ["q_norm", "norm"])
def test_a_norm_whose_weight_is_a_view(name, launched) -> None:
    layer, x = made("ring"), drawn(2, 9, WIDTH)
    module = layer.get_submodule(name)
    torch.nn.init.uniform_(module.weight, 0.5, 1.5)
    y = layer(x)
    module.weight = torch.nn.Parameter(torch.stack([module.weight.detach(), torch.zeros_like(module.weight)], 1)[:, 0])
    assert not module.weight.is_contiguous()
    torch.testing.assert_close(layer(x), y)
    with torch.no_grad():
        torch.testing.assert_close(layer(x), y)


@pytest.mark.gpu
@pytest.mark.parametrize("call", ["batch", "packed"])
@pytest.mark.parametrize("backend", ["cuda", "triton", "triton_split"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_dv_in_its_place_on_a_gpu(head_dim, backend, call, monkeypatch) -> None:
    """The bits of a dv that is copied there, also by the prepared backwards of repeated calls."""
    layer = LightningAttention(256, 4, preset="ring", head_dim=head_dim, num_layers=2, backend=backend)
    layer = layer.to("cuda", torch.bfloat16)
    x = drawn(1, 700, 256).bfloat16().requires_grad_()
    ends = torch.tensor([0, 130, 130, 333, 700], dtype=torch.int32, device="cuda")
    options = {"cu_seqlens": ends} if call == "packed" else {}

    def gradients():
        return torch.autograd.grad(layer(x, **options), [x, *layer.parameters()], drawn(1, 700, 256, seed=3).bfloat16())

    found = [gradients() for _ in range(4)]
    monkeypatch.setattr(kernels.ProjectionGradient, "take", lambda place, *grads: None)
    for some in found:
        for got, want in zip(some, gradients(), strict=True):
            assert torch.equal(got, want)
