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
    """`apply_rotary` of (B, N, H, D) without the kernels."""
    if x.is_cuda:
        return apply_rotary(x.cpu().transpose(1, 2), cos.cpu(), sin.cpu(), interleaved).transpose(1, 2).to(x.device)
    return apply_rotary(x.transpose(1, 2), cos, sin, interleaved).transpose(1, 2)


@pytest.mark.parametrize("interleaved", [True, False], ids=["neighbours", "halves"])
@pytest.mark.parametrize("by_row", [True, False], ids=["positions by row", "shared"])
@pytest.mark.parametrize(("H", "D", "dim"), [(3, 16, 16), (9, 24, 12), (8, 20, 6)])
def test_rotated(H, D, dim, by_row, interleaved) -> None:
    B, N = 2, 5
    x = drawn(B, N, 2 * H, D)[:, :, H:].requires_grad_()  # a view, as of a fused projection
    dy = drawn(B, N, H, D, seed=1)
    cos, sin = tables(B, N, dim, by_row)
    y, want = kernels.Rotated.apply(x, cos, sin, interleaved), plainly(x, cos, sin, interleaved)
    torch.testing.assert_close(y, want)
    torch.testing.assert_close(*(torch.autograd.grad(out, x, dy)[0] for out in (y, want)))


@pytest.mark.parametrize("interleaved", [True, False], ids=["neighbours", "halves"])
@pytest.mark.parametrize("by_row", [True, False], ids=["positions by row", "shared"])
@pytest.mark.parametrize(("H", "nope", "dim", "E"), [(3, 16, 8, 16), (9, 24, 12, 8), (8, 5, 6, 7)])
def test_latent_q_k_v(H, nope, dim, E, by_row, interleaved) -> None:
    B, N = 2, 5
    w = drawn(H * (nope + dim), 6).requires_grad_()
    up, row = drawn(B, N, H * (nope + E), seed=1).requires_grad_(), drawn(B, N, dim + 3, seed=2).requires_grad_()
    cos, sin = tables(B, N, dim, by_row)
    x, rope = drawn(B, N, 6, seed=3), row[..., 3:]
    outs = []
    for fast in (True, False):
        q = x @ w.T
        if fast:
            q = kernels.TurnedInPlace.apply(q, cos, sin, H, nope, interleaved).unflatten(2, (H, -1))
            k, v = kernels.Joined.apply(up, rope, cos, sin, H, nope, E, interleaved)
        else:
            q = q.unflatten(2, (H, -1))
            q = torch.cat([q[..., :nope], plainly(q[..., nope:], cos, sin, interleaved)], 3)
            both = up.unflatten(2, (H, -1))
            shared = plainly(rope[:, :, None], cos, sin, interleaved).expand(-1, -1, H, -1)
            k, v = torch.cat([both[..., :nope], shared], 3), both[..., nope:]
        grads = torch.autograd.grad([q, k, v], [w, up, row], [drawn(*t.shape, seed=4) for t in (q, k, v)])
        outs.append((q, k, v, *grads))
    for got, want in zip(*outs, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


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
    x = drawn(2, 5, 6).requires_grad_()
    linears = [torch.nn.Linear(6, size, bias=bias, device=DEVICE) for size in (4, 3, 7)]
    parameters = [p for linear in linears for p in (linear.weight, linear.bias)]
    ours, want = Projected.apply(x, *parameters), [linear(x) for linear in linears]
    leaves = [x, *(p for p in parameters if p is not None)]
    douts = [drawn(2, 5, size, seed=size) for size in (4, 3, 7)]
    for got, exact in zip(ours, want, strict=True):
        torch.testing.assert_close(got, exact)
    for got, exact in zip(*(torch.autograd.grad(outs, leaves, douts) for outs in (ours, want)), strict=True):
        torch.testing.assert_close(got, exact)
    ours = Projected.apply(x, *parameters)  # of one of them, nothing comes back
    want = linears[0](x), linears[2](x)
    pairs = (torch.autograd.grad(outs, x, [douts[0], douts[2]])[0] for outs in ((ours[0], ours[2]), want))
    torch.testing.assert_close(*pairs)


@pytest.mark.parametrize(("R", "rest"), [(16, 6), (24, 0), (5, 3)])
def test_normed(R, rest, monkeypatch) -> None:
    monkeypatch.setattr(latent_triton, "PROGRAMS", 4)  # so that one takes several rows
    x = drawn(2, 5, R + rest).requires_grad_()
    weight = (1 + drawn(R, seed=1) / 4).requires_grad_()
    outs = latent_triton.Normed.apply(x, weight, 1e-6)
    want = torch.nn.functional.rms_norm(x[..., :R], (R,), weight, 1e-6), x[..., R:]
    douts = [drawn(2, 5, R, seed=2), drawn(2, 5, rest, seed=3)]
    for got, exact in zip(outs, want, strict=True):
        torch.testing.assert_close(got, exact)
    for got, exact in zip(*(torch.autograd.grad(o, [x, weight], douts) for o in (outs, want)), strict=True):
        torch.testing.assert_close(got, exact, rtol=1e-4, atol=1e-5)


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
