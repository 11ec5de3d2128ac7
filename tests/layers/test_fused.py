"""The kernels of RoPE and of latent attention: in Triton's interpreter against plain operations, on a GPU in layers,
compiled for every GPU we name."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from fulmen import launch
from fulmen.boundary import is_plain_eager
from fulmen.hardware import TARGETS
from fulmen.layers import GroupedQueryAttention, LatentCache, MultiHeadLatentAttention, fused, latent, rotary
from fulmen.layers.fused import latent as latent_kernels
from fulmen.layers.fused import rotary as kernels
from fulmen.layers.fused.projections import Projected, is_plain
from fulmen.layers.rotary import Rotary, apply_rotary
from fulmen.testing import GRADIENT_FACTOR, assert_close, expected, results_of
from tests.aot_layers import RotaryCase, WideCase

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def tables(B: int, N: int, dim: int, by_row: bool) -> tuple[torch.Tensor, torch.Tensor]:
    positions = torch.arange(N, device=DEVICE)
    if by_row:
        positions = positions + 5 * torch.arange(B, device=DEVICE)[:, None]
    return Rotary(dim)(positions)


def plainly(x, cos, sin, interleaved):
    """`apply_rotary` of (B, N, H, D) without the kernels; cos and sin are the fp32 tables, whatever x is."""
    where = x.device
    x, cos, sin = (t.cpu() for t in (x, cos, sin))
    return apply_rotary(x.transpose(1, 2), cos, sin, interleaved).transpose(1, 2).to(where)


def compare(fast, plain, leaves, *douts, terms=1):
    """`fast` against `plain` in fp64, results and gradients of all leaves, by what `plain` errs in their own dtype."""
    douts = [drawn(*shape, seed=9 + i).to(leaves[0].dtype) for i, shape in enumerate(douts)]

    mine = [t.detach().requires_grad_() for t in leaves]
    wanted = expected(plain, mine, douts, terms)
    for i, got in enumerate(results_of(fast, mine, douts)):
        assert_close(f"result {i}", got, *wanted[i])


DTYPES = [torch.float32, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("interleaved", [True, False], ids=["neighbours", "halves"])
@pytest.mark.parametrize("by_row", [True, False], ids=["positions by row", "shared"])
@pytest.mark.parametrize(("H", "D", "dim"), [(3, 16, 16), (9, 24, 12), (8, 20, 6)])
def test_rotated(H, D, dim, by_row, interleaved, dtype) -> None:
    B, N = 2, 5
    cos, sin = tables(B, N, dim, by_row)
    compare(
        lambda x: [kernels.Rotated.apply(x[:, :, H:], cos, sin, interleaved)],  # a view, as of a fused projection
        lambda x: [plainly(x[:, :, H:], cos, sin, interleaved)],
        [drawn(B, N, 2 * H, D).to(dtype)],
        (B, N, H, D),
    )


def both_plainly(q, k, cos, sin, facts):
    """`RotatedBoth` in torch's operations; tables in fp32, as the kernel reads them."""
    i = torch.arange(facts.half, device=q.device)
    a, b = (2 * i, 2 * i + 1) if facts.interleaved else (i, i + facts.half)
    of_a, of_b = (a, b) if facts.each_element else (i, i)
    cos, sin = cos.float()[:, :, None], sin.float()[:, :, None]
    found = []
    for x in (q, k):
        y = x.to(torch.promote_types(x.dtype, torch.float32))
        turned = y.clone()
        turned[..., a] = y[..., a] * cos[..., of_a] - y[..., b] * sin[..., of_a]
        turned[..., b] = y[..., b] * cos[..., of_b] + y[..., a] * sin[..., of_b]
        found.append(turned.to(x.dtype))
    return found


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("interleaved", [True, False], ids=["neighbours", "halves"])
@pytest.mark.parametrize("each_element", [True, False], ids=["elements", "pairs"])
@pytest.mark.parametrize(("rows", "in_fp32"), [(1, False), (2, True)], ids=["shared", "positions by row, fp32 tables"])
@pytest.mark.parametrize(("H", "H_KV", "D", "half"), [(3, 1, 16, 8), (18, 9, 24, 6), (8, 17, 20, 3)])
def test_rotated_both(H, H_KV, D, half, rows, in_fp32, each_element, interleaved, dtype) -> None:
    """Any numbers as tables: halves may differ, and a row may be wider than what is read of it."""
    B, N = 2, 5
    facts = kernels.Pairs(half, interleaved, each_element)
    cos, sin = (drawn(rows, N, 2 * half, seed=i).to(torch.float32 if in_fp32 else dtype) for i in (5, 6))
    compare(
        lambda x, k: kernels.RotatedBoth.apply(facts, x[:, :, 1:], k.transpose(1, 2), cos, sin),
        lambda x, k: both_plainly(x[:, :, 1:], k.transpose(1, 2), cos, sin, facts),
        [drawn(B, N, H + 1, D).to(dtype), drawn(B, H_KV, N, D, seed=1).to(dtype)],
        (B, N, H, D), (B, N, H_KV, D),
    )  # fmt: skip


@pytest.fixture
def launched(monkeypatch):
    """The launches that were made; each takes the tensors it is told of, in order, as it must to be repeated."""
    made = []

    def run(make, tensors, *options):
        made.append(make(*tensors, *options))
        assert [t.data_ptr() for t in made[-1].tensors] == [t.data_ptr() for t in tensors]
        kernels_run(make, tensors, *options)

    kernels_run = kernels.run
    monkeypatch.setattr(latent_kernels, "run", run)
    return made


def expanded_plainly(q, latent, rope, weight, cos, sin, nope, interleaved):
    """`Expanded` in torch's operations."""
    D = nope + rope.shape[2]
    q = q.unflatten(2, (-1, D))
    up = (latent @ weight.T).unflatten(2, (q.shape[2], -1))
    shared = plainly(rope[:, :, None], cos, sin, interleaved).expand(-1, -1, q.shape[2], -1)
    q = torch.cat([q[..., :nope], plainly(q[..., nope:], cos, sin, interleaved)], 3)
    return q, torch.cat([up[..., :nope], shared], 3), up[..., nope:]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("interleaved", [True, False], ids=["neighbours", "halves"])
@pytest.mark.parametrize("by_row", [True, False], ids=["positions by row", "shared"])
@pytest.mark.parametrize(("H", "nope", "dim", "E"), [(3, 16, 8, 16), (35, 24, 12, 8), (8, 5, 6, 7), (1, 4, 2, 3)])
def test_latent_q_k_v(H, nope, dim, E, by_row, interleaved, dtype, launched) -> None:
    B, N, R = 2, 5, 11
    cos, sin = tables(B, N, dim, by_row)

    def fast(q, latent, row, weight):
        q = 1.0 * q  # not a leaf, as a projection's output
        q, k, v = latent_kernels.Expanded.apply(q, latent, row[..., 3:], weight, cos, sin, nope, interleaved)
        return q.unflatten(2, (H, -1)), k, v

    def plain(q, latent, row, weight):
        return expanded_plainly(q, latent, row[..., 3:], weight, cos, sin, nope, interleaved)

    sizes = {"q": (B, N, H * (nope + dim)), "latent": (B, N, R), "row": (B, N, dim + 3), "weight": (H * (nope + E), R)}
    leaves = [drawn(*size, seed=i).to(dtype) for i, size in enumerate(sizes.values())]
    compare(fast, plain, leaves, (B, N, H, nope + dim), (B, N, H, nope + dim), (B, N, H, E))
    assert len(launched) == 2


@pytest.mark.parametrize("frozen", range(4))
def test_latent_q_k_v_of_what_is_frozen(frozen, launched) -> None:
    """The gradients of the others are the same, bit for bit, and what is frozen has none."""
    B, N, H, nope, dim, E, R = 2, 5, 3, 16, 8, 12, 11
    cos, sin = tables(B, N, dim, False)
    sizes = (B, N, H * (nope + dim)), (B, N, R), (B, N, dim), (H * (nope + E), R)
    douts = [drawn(B, N, H * (nope + dim), seed=7), drawn(B, N, H, nope + dim, seed=8), drawn(B, N, H, E, seed=9)]

    def gradients(without):
        leaves = [drawn(*size, seed=i).requires_grad_(i != without) for i, size in enumerate(sizes)]
        outs = latent_kernels.Expanded.apply(1.0 * leaves[0], *leaves[1:], cos, sin, nope, True)
        torch.autograd.backward(outs, [d.clone() for d in douts])
        return [leaf.grad for leaf in leaves]

    whole, part = gradients(None), gradients(frozen)
    for i, (want, got) in enumerate(zip(whole, part, strict=True)):
        assert got is None if i == frozen else torch.equal(want, got)


@pytest.mark.parametrize(("T", "H", "nope", "dim", "E", "R", "width"), [
    (128, 1, 64, 64, 64, 256, 256), (150, 2, 128, 64, 128, 256, 128), (37, 3, 64, 64, 128, 128, 128),
])  # fmt: skip
def test_gathered_gradient(T, H, nope, dim, E, R, width) -> None:
    """dk and dv read where they lie, against the same copied side by side."""
    dk, dv = drawn(T, H, nope + dim).half(), drawn(T, H, E, seed=1).half()
    weight = (drawn(H * (nope + E), R, seed=2) * 0.05).half()
    out = torch.full((T, R), torch.nan, dtype=torch.float16, device=DEVICE)
    flat = dk.view(T, -1), dv.view(T, -1), weight, out
    assert launch.describable(*(t[None, None] for t in flat))
    launch.run(latent_kernels.gather_launch(*flat, H, nope, width))

    def side_by_side(kind):
        return torch.cat([dk[..., :nope], dv], 2).view(T, -1).to(kind) @ weight.to(kind)

    assert_close("dlatent", out, side_by_side(torch.float16), side_by_side(torch.float64), GRADIENT_FACTOR)
    if DEVICE == "cpu":  # which copies
        assert torch.equal(latent_kernels.latent_gradient(dk, dv, weight, nope), side_by_side(torch.float16))


def test_which_tiles_gather() -> None:
    hopper = TARGETS[90]
    assert latent_kernels.gather_width(4096, 1024, hopper) == 256  # 128 tiles for 132 SMs
    assert latent_kernels.gather_width(4096, 512, hopper) == 128
    assert latent_kernels.gather_width(2048, 512, hopper) is None  # half of the SMs would be idle
    assert latent_kernels.gather_width(32768, 640, hopper) == 128  # no multiple of 256
    assert latent_kernels.gather_width(32768, 512 + 64, hopper) is None
    assert latent_kernels.gather_width(4096, 1024, TARGETS[80]) is None


def test_a_cpu_takes_torchs_operations() -> None:
    cos, sin = Rotary(8)(torch.arange(3))
    assert rotary.rotary_kernels(cos, sin, torch.ones(1, 2, 3, 8)) is None


def test_which_projections_are_plain() -> None:
    linear = torch.nn.Linear(2, 2)
    assert is_plain(linear)
    for hook in (linear.register_forward_hook, linear.register_forward_pre_hook, linear.register_full_backward_hook):
        handle = hook(lambda *arguments: None)
        assert not is_plain(linear)
        handle.remove()
    handle = torch.nn.modules.module.register_module_forward_hook(lambda *arguments: None)
    assert not is_plain(linear)
    handle.remove()
    assert is_plain(linear, linear)
    assert not is_plain(torch.nn.Sequential(linear))
    assert not is_plain(None)


@pytest.mark.parametrize("bias", [True, False])
def test_projections_of_one_x(bias) -> None:
    sizes = (4, 3, 7)
    weights = [drawn(size, 6, seed=size) for size in sizes]
    biases = [drawn(size, seed=20 + size) for size in sizes] if bias else []

    def pairs(parameters):
        return list(zip(parameters[:3], parameters[3:] or (None,) * 3, strict=True))

    def fast(x, *parameters):
        return Projected.apply(x, *(p for pair in pairs(parameters) for p in pair))

    def plain(x, *parameters):
        return [torch.nn.functional.linear(x, w, b) for w, b in pairs(parameters)]

    leaves = [drawn(2, 5, 6), *weights, *biases]
    compare(fast, plain, leaves, *((2, 5, size) for size in sizes))


def test_a_projection_nothing_comes_back_to() -> None:
    x, weights = drawn(2, 5, 6).requires_grad_(), [drawn(size, 6, seed=size) for size in (4, 3, 7)]
    first, _, last = Projected.apply(x, *(p for w in weights for p in (w, None)))
    douts = drawn(2, 5, 4, seed=1), drawn(2, 5, 7, seed=2)
    (got,) = torch.autograd.grad((first, last), x, douts)
    low = douts[0] @ weights[0] + douts[1] @ weights[2]
    exact = douts[0].double() @ weights[0].double() + douts[1].double() @ weights[2].double()
    assert_close("dx", got, low, exact, GRADIENT_FACTOR)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", [((16, 6),), ((24, 0),), ((5, 3),), ((24, 0), (16, 6)), ((5, 3), (40, 1))], ids=str)
def test_normed(sizes, dtype, monkeypatch, launched) -> None:
    monkeypatch.setattr(latent_kernels, "PROGRAMS_PER_SM", 3)  # so that one takes several tiles
    monkeypatch.setattr(latent_kernels, "sm_count", lambda device: 1)
    monkeypatch.setattr(latent_kernels, "TILE", 64)  # of one row or several

    def plain(*given):
        pairs = zip(given[::2], given[1::2], sizes, strict=True)
        parts = [(torch.nn.functional.rms_norm(x[..., :R], (R,), w, 1e-6), x[..., R:]) for x, w, (R, _) in pairs]
        return [t for pair in parts for t in pair]

    leaves, douts = [], []
    for i, (R, rest) in enumerate(sizes):
        leaves += [drawn(2, 7, R + rest, seed=i).to(dtype), (1 + drawn(R, seed=5 + i) / 4).to(dtype)]
        douts += [(2, 7, R), (2, 7, rest)]
    compare(lambda *given: latent_kernels.Normed.apply((1e-6,) * len(sizes), *given), plain, leaves, *douts)
    assert len(launched) == 3


def test_norms_of_which_one_gets_no_gradient() -> None:
    leaves = [drawn(2, 7, 8).requires_grad_(), drawn(8), drawn(2, 7, 9).requires_grad_(), drawn(6).requires_grad_()]
    _, _, second, _ = latent_kernels.Normed.apply((1e-6, 1e-5), *leaves)
    second.sum().backward()
    assert not leaves[0].grad.any()
    assert leaves[1].grad is None
    assert not leaves[2].grad[..., 6:].any()
    assert leaves[3].grad.all()


# -------------------------------------------------------------------------------------- layers, interpreted


@pytest.fixture
def forced(monkeypatch, launched):
    """Latent attention takes the kernels where a GPU would, on the CPU, too."""

    def taken(module):
        def choose(*tensors):
            same = all(t.dtype == tensors[0].dtype for t in tensors)
            return module if same and is_plain_eager(*tensors) else None

        return choose

    monkeypatch.setattr(latent, "rotary_kernels", lambda cos, sin, *tensors: taken(kernels)(*tensors))
    monkeypatch.setattr(latent, "kernels_for", lambda name, *tensors: taken(latent_kernels)(*tensors))
    return launched


def small_layer(**options):
    torch.manual_seed(0)
    sizes = {"q_rank": 24, "kv_rank": 32, "nope_dim": 16, "rope_dim": 8, "value_dim": 12}
    return MultiHeadLatentAttention(48, 4, **sizes | options).to(DEVICE)


PACKED = {"cu_seqlens": torch.tensor([0, 3, 9], dtype=torch.int32, device=DEVICE)}
MASK = torch.tensor([[1, 1, 0, 1, 1, 1, 0, 1, 1]], dtype=torch.bool, device=DEVICE)


@pytest.mark.parametrize("options", [{}, {"q_rank": None, "bias": True, "sinks": True}], ids=["usual", "direct q"])
@pytest.mark.parametrize("call", [{}, PACKED, {"mask": MASK}], ids=["batch", "packed", "padded"])
@pytest.mark.parametrize("frozen", ["", "kv_b_proj", "layernorm", "q_"])
def test_a_layer_with_the_kernels(options, call, frozen, forced) -> None:
    layer = small_layer(**options)
    for name, p in layer.named_parameters():
        p.requires_grad_(not (frozen and frozen in name))
    exact = copy.deepcopy(layer).double()
    parameters = dict(layer.named_parameters())
    wanted = [name for name, p in parameters.items() if p.requires_grad]
    leaves = [drawn(1, 9, 48), *(parameters[name].detach() for name in wanted)]

    def of(module, expected):
        def results(x, *rest):
            forced.clear()
            y = torch.func.functional_call(module, dict(zip(wanted, rest, strict=True)), (x,), dict(call))
            assert bool(forced) == expected
            return [y]

        return results

    def usual(x, *rest):
        return of(exact if x.dtype == torch.float64 else layer, False)(x, *rest)

    compare(of(layer, True), unforced(usual), leaves, (1, 9, 48))


def unforced(function):
    """`function` with torch's operations."""

    def results(*given):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(latent, "rotary_kernels", lambda *tensors: None)
            patch.setattr(latent, "kernels_for", lambda *tensors: None)
            return function(*given)

    return results


def test_no_gradients_checkpoints_and_hooks(forced) -> None:
    layer, x = small_layer(), drawn(2, 9, 48)
    y = layer(x)
    assert len(forced) == 2
    with torch.no_grad():
        assert torch.equal(layer(x), y)
    grads = torch.autograd.grad(y.sum(), layer.parameters())
    again = torch.autograd.grad(checkpoint(layer, x, use_reentrant=False).sum(), layer.parameters())
    assert all(torch.equal(a, b) for a, b in zip(grads, again, strict=True))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: torch.stack([t, t], -1)[..., 0]):
        strided = layer(x)
    for a, b in zip(grads, torch.autograd.grad(strided.sum(), layer.parameters()), strict=True):
        torch.testing.assert_close(a, b)
    forced.clear()
    seen = []
    handle = layer.kv_b_proj.register_forward_hook(lambda module, inputs, output: seen.append(output))
    torch.testing.assert_close(layer(x), y)
    assert len(seen) == 1
    assert [made.kernel.__name__ for made in forced] == ["norm_kernel"]
    handle.remove()
    layer.kv_b_proj = torch.nn.Linear(32, 4 * 28, device=DEVICE)  # with a bias
    assert layer._up_weight(x) is None


def test_a_q_that_is_a_view_is_turned_elsewhere(forced) -> None:
    """torch's autograd lets no function of several results turn a view in place; a Linear with a bias returns one."""
    layer, x = small_layer(), drawn(2, 9, 48)
    layer.q_b_proj = torch.nn.Linear(24, 4 * 24, device=DEVICE)
    y = layer(x)
    assert forced[-1].kernel.__name__ == "rope_kernel"
    torch.testing.assert_close(y, unforced(layer)(x))
    y.sum().backward()


def test_autocast_casts_the_weight(forced) -> None:
    layer, x = small_layer(), drawn(2, 9, 48)
    want = layer(x)
    forced.clear()
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        y = layer(x)
    assert [made.kernel.__name__ for made in forced] == ["rope_kernel"]  # norms of fp32 weights are torch's
    assert y.dtype == torch.bfloat16
    assert (y.float() - want).norm() < 0.02 * want.norm()
    grads = torch.autograd.grad(want.sum(), layer.parameters())
    for got, exact in zip(torch.autograd.grad(y.float().sum(), layer.parameters()), grads, strict=True):
        assert got.dtype == torch.float32
        assert (got - exact).norm() < 0.05 * exact.norm()


# ------------------------------------------------------------------------------------------------ compiled


@pytest.mark.parametrize("arch", sorted(TARGETS))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_wide_and_narrow_rows_fit(compiler, arch, dtype) -> None:
    for usage in compiler(WideCase(arch, dtype)):
        assert usage.shared <= TARGETS[arch].smem_bytes, usage


@pytest.mark.parametrize("arch", sorted(TARGETS))
@pytest.mark.parametrize("interleaved", [True, False], ids=["neighbours", "halves"])
def test_compiles_without_spills(compiler, arch, interleaved) -> None:
    used = compiler(RotaryCase(arch, interleaved))
    assert len(used) == 12 + 2 * (arch == 90)
    for usage in used:
        assert usage.stack == 0
        assert usage.shared <= TARGETS[arch].smem_bytes
        if "gather" not in usage.launch:
            assert usage.registers <= 128


# ---------------------------------------------------------------------------------------------- on a GPU


def layers():
    yield MultiHeadLatentAttention(64, 5, q_rank=32, kv_rank=48, nope_dim=32, rope_dim=16, value_dim=32)
    yield MultiHeadLatentAttention(
        64, 8, kv_rank=48, nope_dim=64, rope_dim=32, value_dim=64, rope={"interleaved": False}
    )
    yield GroupedQueryAttention(64, 4, 2, head_dim=32, rope={"dim": 16}, qk_norm="before", causal=True)


@pytest.mark.gpu
@pytest.mark.parametrize("which", range(3))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_layers_with_the_kernels_err_no_more_than_without(which, dtype, monkeypatch) -> None:
    layer = list(layers())[which].to("cuda", dtype)
    layer.options = layer.options._replace(backend="eager")
    exact = copy.deepcopy(layer).double()
    x, dy = (drawn(2, 37, 64, seed=s).to(dtype) for s in (1, 2))
    for options in ({}, {"positions": torch.arange(3, 40, device="cuda")}):

        def results(module, kind, allowed, options=options):
            used, real = [], fused.serves

            def serves(*tensors):
                used.append(allowed and real(*tensors))
                return used[-1]

            with monkeypatch.context() as patch:
                patch.setattr(fused, "serves", serves)
                at = x.to(kind).requires_grad_()
                y = module(at, **options)
                found = [y, *torch.autograd.grad(y, [at, *module.parameters()], dy.to(kind))]
            assert any(used) == allowed
            return found

        truth = results(exact, torch.float64, False)
        for fast, usual, want in zip(results(layer, dtype, True), results(layer, dtype, False), truth, strict=True):
            off, allowed = ((t.double() - want).norm() for t in (fast, usual))
            assert off <= 2 * allowed + torch.finfo(dtype).eps * want.norm()


@pytest.mark.gpu
def test_padding_and_packed_sequences() -> None:
    layer = next(layers()).to("cuda", torch.bfloat16)
    x = drawn(2, 37, 64).bfloat16()
    mask = torch.ones(2, 37, dtype=torch.bool, device="cuda")
    mask[0, :7] = False
    y = layer(x, mask=mask)
    packed = torch.cat([x[0, 7:], x[1]])[None]
    same = layer(packed, cu_seqlens=torch.tensor([0, 30, 67], dtype=torch.int32, device="cuda"))[0]
    torch.testing.assert_close(same, torch.cat([y[0, 7:], y[1]]), rtol=0.02, atol=0.01)


@pytest.mark.gpu
def test_a_hook_keeps_what_it_saw() -> None:
    layer = next(layers()).to("cuda", torch.bfloat16)
    seen = []
    layer.q_b_proj.register_forward_hook(lambda module, inputs, output: seen.extend([output, output.clone()]))
    layer(drawn(2, 9, 64).bfloat16())
    assert torch.equal(*seen)


@pytest.mark.gpu
def test_backward_twice_and_caches() -> None:
    layer = next(layers()).to("cuda", torch.bfloat16)
    x = drawn(2, 9, 64).bfloat16().requires_grad_()
    y = layer(x)
    first, second = (torch.autograd.grad(y.float().square().mean(), x, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)
    cache = LatentCache()
    with torch.no_grad():
        parts = torch.cat([layer(part, cache=cache) for part in x.split([5, 4], 1)], 1)
    torch.testing.assert_close(parts, y.detach(), rtol=0.05, atol=0.02)


@pytest.mark.gpu
def test_hopper_gathers(launched) -> None:
    """A size whose tiles keep it busy: not copied, and the same again when the launch is repeated."""
    T, H, nope, dim, E, R = 4000, 2, 128, 64, 128, 1024
    dk, dv = drawn(T, H, nope + dim).bfloat16(), drawn(T, H, E, seed=1).bfloat16()
    weight = (drawn(H * (nope + E), R, seed=2) * 0.05).bfloat16()
    first, second = (latent_kernels.latent_gradient(dk, dv, weight, nope) for _ in range(2))
    both = torch.cat([dk[..., :nope], dv], 2).view(T, -1)
    assert len(launched) == 2 * (torch.cuda.get_device_capability() == (9, 0))
    assert torch.equal(first, second)
    assert_close("dlatent", first, both @ weight, both.double() @ weight.double(), GRADIENT_FACTOR)
