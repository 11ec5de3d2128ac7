"""The kernels ranks call on a GPU, each against fp64; without a GPU in Triton's interpreter, at small shapes."""

from __future__ import annotations

import pytest
import torch

from fulmen import decay as slopes_of
from fulmen.hardware import TARGETS
from fulmen.parallel import ring, states
from fulmen.testing import FORWARD_FACTOR, Expected, assert_close
from tests.aot import RanksCase

triton = pytest.importorskip("fulmen.parallel.triton")

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
DTYPES = [torch.float16, torch.bfloat16] if CUDA else [torch.float16]  # the interpreter has no bf16 products
SHAPES = [  # B, H, H_KV, N, D, E
    (1, 2, 2, 70, 16, 16), (2, 4, 2, 33, 16, 32), (1, 1, 1, 1, 16, 16), (1, 3, 1, 130, 24, 40),
]  # fmt: skip
LARGE = [(1, 16, 16, 5000, 64, 64), (2, 8, 2, 4097, 128, 128), (1, 5, 5, 3001, 128, 64)]
pytestmark = pytest.mark.gpu if CUDA else []


def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float32).to(DEVICE, dtype)


def decay_of(kind: str, H: int) -> torch.Tensor | None:
    return {"none": None, "alibi": slopes_of.alibi(H).to(DEVICE)}.get(kind, torch.full((H,), 5.0, device=DEVICE))


def weights(slopes: torch.Tensor | None, H: int, exponents: torch.Tensor) -> torch.Tensor:
    """lambda^t, fp64 (H, N, 1)."""
    s = torch.zeros(H, device=DEVICE) if slopes is None else slopes
    return torch.exp(-s.double()[:, None] * exponents.double())[..., None]


def expected(a: torch.Tensor, b: torch.Tensor, w: torch.Tensor, scale: float = 1.0) -> Expected:
    """sum_t scale w_t a_t^T b_t; the yardstick rounds the decayed rows of b to their dtype, as any kernel has to that
    multiplies in it."""
    each = w.shape[0] // a.shape[1]
    wide = a.repeat_interleave(each, 1), b.repeat_interleave(each, 1)
    exact = scale * wide[0].double().mT @ (wide[1].double() * w)
    low = scale * wide[0].float().mT @ (wide[1].double() * w).to(b.dtype).float()
    return Expected(low, exact, FORWARD_FACTOR)


@pytest.mark.parametrize("kind", ["none", "alibi", "fast"])
@pytest.mark.parametrize("shape", SHAPES + LARGE if CUDA else SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_states_against_fp64(dtype: torch.dtype, shape: tuple[int, ...], kind: str) -> None:
    torch.manual_seed(0)
    B, H, H_KV, N, D, E = shape
    slopes = decay_of(kind, H)
    known = (0.0,) * H if slopes is None else tuple(slopes.tolist())
    q, do = drawn(B, H, N, D, dtype=dtype), drawn(B, H, N, E, dtype=dtype)
    k, v = drawn(B, H_KV, N + 3, D, dtype=dtype)[:, :, 3:], drawn(B, H_KV, N, E, dtype=dtype)
    decay = states.Decay.of(slopes, known, q)
    t = torch.arange(N, device=DEVICE)
    M, dS = triton.leaving(q, k, v, decay.in_fp32()), triton.entering_gradient(q, do, decay.in_fp32(), 0.5)
    assert_close("M", M, *expected(k, v, weights(slopes, H, N - 1 - t)))
    assert_close("dS", dS, *expected(q, do, weights(slopes, H, t + 1), 0.5))
    if CUDA:
        assert torch.equal(states.leaving(q, k, v, decay), M), "the kernels are used, and the same bits come out"
        assert torch.equal(states.entering_gradient(q, do, decay, 0.5), dS)


def sums(rows: torch.Tensor, x: torch.Tensor, matrix: torch.Tensor, w: torch.Tensor, scale: float) -> Expected:
    """rows_t + scale sum over heads that share x of w_t x_t matrix; the yardstick computes in fp32 and rounds once."""
    each = w.shape[0] // x.shape[1]
    wide = x.repeat_interleave(each, 1)

    def total(dtype: torch.dtype) -> torch.Tensor:
        products = w.to(dtype) * (wide.to(dtype) @ matrix.to(dtype))
        return rows.to(dtype) + scale * products.unflatten(1, (x.shape[1], -1)).sum(2)

    return Expected(total(torch.float32).to(rows.dtype), total(torch.float64), FORWARD_FACTOR)


@pytest.mark.parametrize("size", [1.0, 1e6], ids=["", "beyond fp16"])
@pytest.mark.parametrize("kind", ["none", "alibi", "fast"])
@pytest.mark.parametrize("shape", SHAPES + LARGE if CUDA else [*SHAPES, (1, 2, 1, 40, 160, 136)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_a_state_adds_against_fp64(dtype: torch.dtype, shape: tuple[int, ...], kind: str, size: float) -> None:
    torch.manual_seed(0)
    B, H, H_KV, N, D, E = shape
    slopes = decay_of(kind, H)
    known = (0.0,) * H if slopes is None else tuple(slopes.tolist())
    q, k, v = drawn(B, H, N, D, dtype=dtype), drawn(B, H_KV, N, D, dtype=dtype), drawn(B, H_KV, N, E, dtype=dtype)
    o = drawn(B, N + 2, H, E, dtype=dtype).transpose(1, 2)[:, :, 1:-1]  # rows before and behind are not ours
    dk, dv = drawn(B, H_KV, N, D, dtype=dtype), drawn(B, H_KV, N, E, dtype=dtype)
    S = drawn(B, H, D, E) * size
    t = torch.arange(N, device=DEVICE)
    near, far = weights(slopes, H, t + 1), weights(slopes, H, N - 1 - t)
    wanted = sums(o, q, S, near, 0.5 / size), sums(dk, v, S.mT / size, far, 1.0), sums(dv, k, S / size, far, 1.0)
    decay = states.Decay.of(slopes, known, q)
    outside = o._base.clone()
    copies = o.clone(), dk.clone(), dv.clone()
    triton.add_entering(o, q, S, decay.in_fp32(), 0.5 / size)
    triton.add_leaving_gradient(dk, dv, k, v, S / size, decay.in_fp32())
    for name, actual, expected in zip(("o", "dk", "dv"), (o, dk, dv), wanted, strict=True):
        assert_close(name, actual, *expected)
    assert torch.equal(o._base[:, [0, -1]], outside[:, [0, -1]])
    if CUDA:
        states.add_entering(copies[0], q, S, decay, 0.5 / size)
        states.add_leaving_gradient(*copies[1:], k, v, S / size, decay)
        for a, b in zip(copies, (o, dk, dv), strict=True):
            assert torch.equal(a, b), "the kernels are used, and the same bits come out"


def parts(B: int, H: int, N: int, E: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """o, lse, and a block's, where rows lie as in (B, N, H, E); some saw nothing in the one, the other, or both."""
    o, lse = drawn(B, H, N + 2, E)[:, :, 1:-1], drawn(B, H, N + 2)[:, :, 1:-1] * 20
    o_i, lse_i = drawn(B, N, H, E, dtype=dtype).transpose(1, 2), drawn(B, H, N) * 20
    lse[:, :, 0::5], lse_i[:, :, 1::5] = -torch.inf, -torch.inf
    lse[:, :, 2::5], lse_i[:, :, 2::5] = -torch.inf, -torch.inf
    for x, y in ((o, lse), (o_i, lse_i)):
        x.masked_fill_((y == -torch.inf)[..., None], 0.0)
    return o, lse, o_i, lse_i


@pytest.mark.parametrize("shape", [(1, 2, 5, 16), (2, 3, 67, 24), (1, 1, 130, 128), *([(2, 16, 5001, 128)] * CUDA)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_combine_against_fp64(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    o, lse, o_i, lse_i = parts(*shape, dtype)
    exact = [x.double() for x in (o, lse)]
    ring.combine(*exact, o_i.double(), lse_i.double())
    plain = [x.clone() for x in (o, lse)]
    ring.combine(*plain, o_i.float(), lse_i)
    triton.combine(o, lse, o_i, lse_i)
    assert torch.equal(lse == -torch.inf, exact[1] == -torch.inf)
    for x in (o, lse, plain[1], exact[1]):
        x.masked_fill_(x == -torch.inf, 0.0)
    assert_close("o", o, plain[0], exact[0], FORWARD_FACTOR)
    assert_close("lse", lse, plain[1], exact[1], FORWARD_FACTOR)


def test_merging_keeps_what_is_not_its_own() -> None:
    """Rows before and behind a block, and columns of padding, stay as they are."""
    whole, logs = torch.zeros(1, 2, 40, 24, device=DEVICE), torch.zeros(1, 2, 40, device=DEVICE)
    o_i, lse_i = drawn(1, 2, 20, 24, dtype=torch.float16), drawn(1, 2, 20)
    triton.combine(whole[:, :, 7:27], logs[:, :, 7:27], o_i, lse_i)
    assert not whole[:, :, :7].any()
    assert not whole[:, :, 27:].any()
    assert not logs[:, :, :7].any()
    assert whole[:, :, 7:27].all()


def test_on_a_cpu_torch_does_it() -> None:
    x = torch.zeros(1, 1, 4, 16, dtype=torch.bfloat16)
    assert states.kernels_for(x) is None
    assert states.kernels_for(x.float()) is None


COMPILED = [RanksCase(arch, D) for arch in TARGETS for D in (64, 256)]
COMPILED += [RanksCase(86, 128, 4), RanksCase(86, 256, 4), RanksCase(90, 128, 4, "float16")]


@pytest.mark.skipif(CUDA, reason="what a GPU compiles it also runs, above")
@pytest.mark.parametrize("case", COMPILED, ids=str)
def test_compiled_for_every_gpu(case, compiler) -> None:
    found = compiler(case)
    assert len(found) == 4
    for usage in found:
        assert usage.shared <= TARGETS[case.arch].smem_bytes, (case, usage)
        assert usage.stack == 0, (case, usage)
