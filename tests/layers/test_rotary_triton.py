"""The kernels of RoPE and of latent attention's keys: in Triton's interpreter against plain operations, on a GPU in
layers, compiled for every GPU we name."""

from __future__ import annotations

import copy

import pytest
import torch

from fulmen.hardware import TARGETS
from fulmen.layers import GroupedQueryAttention, LatentCache, MultiHeadLatentAttention, latent_triton, rotary
from fulmen.layers import rotary_triton as kernels
from fulmen.layers.projections import Projected, plain
from fulmen.layers.rotary import Rotary, apply_rotary
from fulmen.testing import FORWARD_FACTOR, GRADIENT_FACTOR, assert_close
from tests.aot import Compiler, RotaryCase

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


def compare(fast, plain, leaves, *douts):
    """`fast` against `plain` in fp64, results and gradients of all leaves, by the error of `plain` in their own dtype."""
    douts = [drawn(*shape, seed=9 + i).to(leaves[0].dtype) for i, shape in enumerate(douts)]

    def results(function, kind):
        mine = [t.detach().to(kind).requires_grad_() for t in leaves]
        outs = function(*mine)
        return [*outs, *torch.autograd.grad(outs, mine, [d.to(kind) for d in douts])]

    dtype = leaves[0].dtype
    low, exact = results(plain, dtype), results(plain, torch.float64)
    for i, (got, near, want) in enumerate(zip(results(fast, dtype), low, exact, strict=True)):
        factor = FORWARD_FACTOR if i < len(douts) else GRADIENT_FACTOR
        assert_close(f"result {i}", got, near, want, factor)


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


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("interleaved", [True, False], ids=["neighbours", "halves"])
@pytest.mark.parametrize("by_row", [True, False], ids=["positions by row", "shared"])
@pytest.mark.parametrize(("H", "nope", "dim", "E"), [(3, 16, 8, 16), (9, 24, 12, 8), (8, 5, 6, 7)])
def test_latent_q_k_v(H, nope, dim, E, by_row, interleaved, dtype) -> None:
    B, N = 2, 5
    cos, sin = tables(B, N, dim, by_row)

    def fast(q, up, row):
        q = kernels.TurnedInPlace.apply(1.0 * q, cos, sin, H, nope, interleaved)  # not a leaf, as a projection's output
        k, v = kernels.Joined.apply(up, row[..., 3:], cos, sin, H, nope, E, interleaved)
        return q.unflatten(2, (H, -1)), k, v

    def plain(q, up, row):
        q, up = q.unflatten(2, (H, -1)), up.unflatten(2, (H, -1))
        shared = plainly(row[:, :, None, 3:], cos, sin, interleaved).expand(-1, -1, H, -1)
        q = torch.cat([q[..., :nope], plainly(q[..., nope:], cos, sin, interleaved)], 3)
        return q, torch.cat([up[..., :nope], shared], 3), up[..., nope:]

    sizes = (H * (nope + dim), H * (nope + E), dim + 3)
    leaves = [drawn(B, N, size, seed=size).to(dtype) for size in sizes]
    compare(fast, plain, leaves, (B, N, H, nope + dim), (B, N, H, nope + dim), (B, N, H, E))


def test_a_cpu_takes_torchs_operations() -> None:
    cos, sin = Rotary(8)(torch.arange(3))
    assert rotary.fused(cos, sin, torch.ones(1, 2, 3, 8)) is None


def test_which_projections_are_plain() -> None:
    linear = torch.nn.Linear(2, 2)
    assert plain(linear)
    for hook in (linear.register_forward_hook, linear.register_forward_pre_hook, linear.register_full_backward_hook):
        handle = hook(lambda *arguments: None)
        assert not plain(linear)
        handle.remove()
    handle = torch.nn.modules.module.register_module_forward_hook(lambda *arguments: None)
    assert not plain(linear)
    handle.remove()
    assert plain(linear, linear)
    assert not plain(torch.nn.Sequential(linear))
    assert not plain(None)


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
@pytest.mark.parametrize(("R", "rest"), [(16, 6), (24, 0), (5, 3)])
def test_normed(R, rest, dtype, monkeypatch) -> None:
    monkeypatch.setattr(latent_triton, "PROGRAMS", 4)  # so that one takes several rows
    compare(
        lambda x, weight: latent_triton.Normed.apply(x, weight, 1e-6),
        lambda x, weight: (torch.nn.functional.rms_norm(x[..., :R], (R,), weight, 1e-6), x[..., R:]),
        [drawn(2, 5, R + rest).to(dtype), (1 + drawn(R, seed=1) / 4).to(dtype)],
        (2, 5, R),
        (2, 5, rest),
    )


# ------------------------------------------------------------------------------------------------ compiled


@pytest.fixture(scope="module")
def compiler():
    made = Compiler()
    yield made
    made.close()


@pytest.mark.parametrize("arch", sorted(TARGETS))
@pytest.mark.parametrize("interleaved", [True, False], ids=["neighbours", "halves"])
def test_compiles_without_spills(compiler, arch, interleaved) -> None:
    used = compiler(RotaryCase(arch, interleaved))
    assert len(used) == 6
    for usage in used:
        assert usage.stack == 0
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
            used, real = [], kernels.serves

            def serves(*tensors):
                used.append(allowed and real(*tensors))
                return used[-1]

            with monkeypatch.context() as patch:
                patch.setattr(kernels, "serves", serves)
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
