"""fla's functions, token by token in fp64 from their definitions."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from fulmen.integrations import fla

B, T, H, D, E = 2, 37, 4, 16, 8
ENDS = [0, 5, 5, 24, 37]


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64)


@pytest.fixture
def qkv():
    torch.manual_seed(0)
    return drawn(B, T, H, D), drawn(B, T, H, D), drawn(B, T, H, E)


def recurrent(q, k, v, g, scale=None, state=None):
    """g (B, T, H): o, final state."""
    q, scale = q.double(), q.shape[3] ** -0.5 if scale is None else scale
    S = torch.zeros(q.shape[0], *q.shape[2:], v.shape[3], dtype=torch.float64) if state is None else state.double()
    o = []
    for t in range(q.shape[1]):
        S = g[:, t].double().exp()[..., None, None] * S + k[:, t].double()[..., None] * v[:, t].double()[..., None, :]
        o.append(scale * torch.einsum("bhd,bhde->bhe", q[:, t], S))
    return torch.stack(o, 1), S


def close(got, want):
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-4 * float(want.abs().max()))


@pytest.mark.parametrize("call", [fla.chunk_simple_gla, fla.fused_recurrent_simple_gla])
@pytest.mark.parametrize("scale", [None, 0.5])
def test_simple_gla(qkv, call, scale):
    g, state = torch.nn.functional.logsigmoid(torch.randn(B, T, H)), torch.randn(B, H, D, E)
    o, final = call(*qkv, g, scale=scale, initial_state=state, output_final_state=True)
    want, last = recurrent(*qkv, g, scale, state)
    assert o.shape == (B, T, H, E)
    close(o, want)
    close(final, last)
    assert call(*qkv, g)[1] is None
    turned = call(*qkv, g, scale=scale, initial_state=state.mT, output_final_state=True, state_v_first=True)
    assert torch.equal(turned[0], o)
    assert torch.equal(turned[1], final.mT)


def test_gradients(qkv):
    g = torch.nn.functional.logsigmoid(torch.randn(B, T, H)).requires_grad_()
    leaves = [x.requires_grad_() for x in qkv]
    do = torch.randn(B, T, H, E, dtype=torch.float64)
    got = torch.autograd.grad(fla.chunk_simple_gla(*leaves, g)[0], [*leaves, g], do)
    want = torch.autograd.grad(recurrent(*leaves, g)[0], [*leaves, g], do)
    for a, b in zip(got, want, strict=True):
        close(a, b.double())


def test_packed(qkv):
    q, k, v = (x[:1] for x in qkv)
    g, ends = -torch.rand(1, T, H), torch.tensor(ENDS)  # int64, as fla has it
    o, final = fla.chunk_simple_gla(q, k, v, g, output_final_state=True, cu_seqlens=ends)
    for i, (a, b) in enumerate(itertools.pairwise(ENDS)):
        if a < b:
            want, last = recurrent(q[:, a:b], k[:, a:b], v[:, a:b], g[:, a:b])
            close(o[:, a:b], want)
            close(final[i : i + 1], last)


def test_constant_decays(qkv):
    h = torch.arange(H, dtype=torch.float64)
    ways = {
        "lightning": (lambda: fla.chunk_lightning_attn(*qkv, 3, 12), -(8 / H * (1 - 3 / 12)) * h),
        "retention": (lambda: fla.chunk_retention(*qkv), torch.log(1 - 2.0 ** (-5 - h))),
        "gamma": (lambda: fla.chunk_simple_gla(*qkv, g_gamma=-h), -h),
        "none": (lambda: fla.chunk_linear_attn(*qkv, normalize=False), 0 * h),
    }
    for name, (call, gamma) in ways.items():
        o, final = call()
        assert final is None, name
        close(o, recurrent(*qkv, gamma.expand(B, T, H))[0])


@pytest.mark.parametrize("packed", [False, True])
def test_normalised(packed):
    torch.manual_seed(0)
    rows = 1 if packed else B
    q, k = (torch.rand(rows, T, H, D, dtype=torch.float64) for _ in range(2))
    v, ends = torch.randn(rows, T, H, E, dtype=torch.float64), torch.tensor(ENDS) if packed else None
    o, (S, z) = fla.chunk_linear_attn(q, k, v, output_final_state=True, cu_seqlens=ends)
    assert z.shape == (4 if packed else B, 1, H, D)
    for i, (a, b) in enumerate(itertools.pairwise(ENDS) if packed else [(0, T)]):
        if a < b:
            zs = k[:, a:b].cumsum(1)
            want, last = recurrent(q[:, a:b], k[:, a:b], v[:, a:b], torch.zeros(rows, b - a, H))
            close(o[:, a:b], want / (D**-0.5 * (q[:, a:b] * zs).sum(-1, keepdim=True) + 1e-10))
            close(z[i : i + 1] if packed else z, zs[:, -1:])
            close(S[i : i + 1] if packed else S, last)
    if not packed:  # in two parts
        first, state = fla.chunk_linear_attn(q[:, :20], k[:, :20], v[:, :20], output_final_state=True)
        second, _ = fla.chunk_linear_attn(q[:, 20:], k[:, 20:], v[:, 20:], initial_state=state)
        close(torch.cat([first, second], 1), o)


def test_functions_that_differ_in_name_and_signature(qkv):
    g, h = -torch.rand(B, T, H), torch.arange(H, dtype=torch.float64)
    retention, slopes = torch.log(1 - 2.0 ** (-5 - h)), -(8 / H * (1 - 3 / 12)) * h
    ways = {
        "simple_gla": ([fla.fused_chunk_simple_gla, fla.parallel_simple_gla], (g,), g),
        "retention": (
            [fla.fused_chunk_retention, fla.fused_recurrent_retention, fla.parallel_retention],
            (),
            retention,
        ),
        "lightning": ([fla.fused_recurrent_lightning_attn], (3, 12), slopes),
        "linear": ([fla.fused_recurrent_linear_attn], (), 0 * h),
    }
    for name, (calls, more, decay) in ways.items():
        for call in calls:
            o, final = call(*qkv, *more)
            assert final is None, name
            close(o, recurrent(*qkv, decay.expand(B, T, H))[0])
    normed = fla.chunk_linear_attn(*qkv, output_final_state=True)
    for call in (fla.fused_chunk_linear_attn, fla.fused_recurrent_linear_attn):
        again = call(*qkv, output_final_state=True, normalize=True)
        assert torch.equal(again[0], normed[0])
        assert all(map(torch.equal, again[1], normed[1]))


@pytest.mark.parametrize("ends", [None, ENDS])
def test_from_the_last_token_to_the_first(qkv, ends):
    """Each sequence turned round, its own state with it, and gradients through it."""
    q, k, v = (x[: B if ends is None else 1].requires_grad_() for x in qkv)
    g, bounds = -torch.rand(q.shape[0], T, H), [(0, T)] if ends is None else list(itertools.pairwise(ends))
    state = torch.randn(B if ends is None else len(bounds), H, D, E, dtype=torch.float64)
    options = {"initial_state": state, "cu_seqlens": None if ends is None else torch.tensor(ends)}
    o, final = fla.fused_recurrent_simple_gla(q, k, v, g, output_final_state=True, reverse=True, **options)
    parts = []
    for i, (a, b) in enumerate(bounds):
        own = slice(None) if ends is None else slice(i, i + 1)
        turned = [x[:, a:b].flip(1) for x in (q, k, v, g)]
        want, last = recurrent(*turned, None, state[own]) if a < b else (torch.zeros(1, 0, H, E), state[own])
        if a < b:
            close(o[:, a:b], want.flip(1))
        close(final[own], last)
        parts.append(want.flip(1))
    do = torch.randn_like(o)
    got, want = (torch.autograd.grad(x, (q, k, v), do) for x in (o, torch.cat(parts, 1)))
    for a, b in zip(got, want, strict=True):
        close(a, b)


def test_the_other_functions_from_last_to_first(qkv):
    turn = lambda x: x.flip(1)  # noqa: E731
    turned, h = [turn(x) for x in qkv], torch.arange(H, dtype=torch.float64)
    gamma = {"retention": torch.log(1 - 2.0 ** (-5 - h)), "lightning": -(8 / H * (1 - 3 / 12)) * h, "linear": 0 * h}
    calls = {"retention": (fla.fused_recurrent_retention, ()),
             "lightning": (fla.fused_recurrent_lightning_attn, (3, 12)),
             "linear": (fla.fused_recurrent_linear_attn, ())}  # fmt: skip
    for name, (call, more) in calls.items():
        o, final = call(*qkv, *more, reverse=True, output_final_state=True)
        want, last = recurrent(*turned, gamma[name].expand(B, T, H))
        close(o, turn(want))
        close(final, last)
    v_first = fla.fused_recurrent_retention(*qkv, output_final_state=True, state_v_first=True)[1]
    assert torch.equal(v_first, fla.chunk_retention(*qkv, output_final_state=True)[1].mT)
    o, (S, z) = fla.fused_recurrent_linear_attn(*qkv, reverse=True, normalize=True, output_final_state=True)
    want, (want_S, want_z) = fla.chunk_linear_attn(*turned, output_final_state=True)
    for got, exact in ((o, turn(want)), (S, want_S), (z, want_z)):
        torch.testing.assert_close(got, exact)


def test_options_of_the_other_functions(qkv):
    state, ends, one = torch.randn(3, H, D, E), torch.tensor([0, 5, 20, T]), [x[:1] for x in qkv]
    options = {"scale": 0.3, "initial_state": state, "output_final_state": True, "cu_seqlens": ends}
    for a, b in ((fla.fused_chunk_retention, fla.chunk_retention), (fla.fused_chunk_simple_gla, fla.chunk_simple_gla)):
        given = {} if a is fla.fused_chunk_retention else {"g_gamma": -torch.rand(H)}
        assert all(map(torch.equal, a(*one, **options, **given), b(*one, **options, **given)))
    without = {"scale": 0.3, "cu_seqlens": ends}
    for a, b in ((fla.parallel_retention, fla.chunk_retention), (fla.parallel_simple_gla, fla.chunk_simple_gla)):
        assert torch.equal(a(*one, **without)[0], b(*one, **without)[0])
    shared = [x[:, :, :2] for x in qkv[:2]], qkv[2]
    assert fla.chunk_retention(*shared[0], shared[1])[0].shape == (B, T, H, E)


def test_memory_of_any_order(qkv):
    """As fla, which copies: what a transposed projection or a convolution left."""
    q, k, v = qkv
    strided = [x.permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0) for x in qkv]
    assert all(x.stride(3) != 1 for x in strided)
    assert torch.equal(fla.chunk_retention(*strided)[0], fla.chunk_retention(q, k, v)[0])
    _, final = fla.chunk_simple_gla(q, k, v, output_final_state=True, state_v_first=True)
    assert final.is_contiguous()


def test_bad_input(qkv):
    with pytest.raises(ValueError, match="g and g_gamma"):
        fla.chunk_simple_gla(*qkv, torch.zeros(B, T, H), torch.zeros(H))
    with pytest.raises(ValueError, match=r"g has shape \(4,\)"):
        fla.chunk_simple_gla(*qkv, torch.zeros(H))
    with pytest.raises(NotImplementedError, match="output_attentions=True"):
        fla.parallel_simple_gla(*qkv, output_attentions=True)
    with pytest.raises(ValueError, match="q has shape"):
        fla.chunk_retention(qkv[0][0], *qkv[1:])
    with pytest.raises(ValueError, match="is a tuple"):
        fla.chunk_linear_attn(*qkv, normalize=False, initial_state=(torch.zeros(1), torch.zeros(1)))


def test_values_are_called_by_flas_names(qkv):
    """On the CPU, where looking at values costs nothing."""
    g, gamma = -torch.rand(B, T, H), -torch.rand(H)
    g[1, 3, 2], gamma[1] = 0.5, 0.25
    said = {"g": rf"1 of {B * T * H} are not: \[0.5\]", "g_gamma": rf"1 of {H} are not: \[0.25\]"}
    for name, value in (("g", g), ("g_gamma", gamma)):
        with pytest.raises(ValueError, match=rf"^{name} must be finite and <= 0 \(a log decay: .*; {said[name]}"):
            fla.chunk_simple_gla(*qkv, **{name: value})
        with pytest.raises(ValueError, match=f"^{name} must be finite and <= 0"):
            fla.fused_recurrent_simple_gla(*qkv, **{name: torch.full_like(value, -math.inf)})
    with pytest.raises(ValueError, match=r"^g must be finite and <= 0"):  # read as one number for each head
        fla.chunk_simple_gla(*qkv, torch.ones(H).expand(B, T, H))
    for layer, layers in ((12, 12), (-1, 12), (13, 12), (1.5, 12)):
        with pytest.raises(ValueError, match=rf"^layer_idx={layer}: must be an int from 0 to 11"):
            fla.chunk_lightning_attn(*qkv, layer, layers)
    with pytest.raises(ValueError, match=r"^num_layers=0: must be an int of at least 1"):
        fla.chunk_lightning_attn(*qkv, 0, 0)


def test_a_normalised_state_has_its_denominator():
    q, k, v = (torch.rand(B, T, H, n) for n in (D, D, E))
    S, z = torch.rand(B, H, D, E), torch.rand(B, 1, H, D)
    fla.chunk_linear_attn(q, k, v, initial_state=(S, z))
    for state, message in (
        (S, r"^initial_state is a Tensor, must be \(S, z\) with normalize: z \(sequences, 1, H, D\)"),
        ((S, None), r"^initial_state is \(Tensor, NoneType\), must be \(S, z\)"),
        ((S, z, z), r"^initial_state is \(Tensor, Tensor, Tensor\), must be \(S, z\)"),
        ((S.mT, z), r"^initial_state\[0\] has shape \(2, 4, 8, 16\), must be \(sequences, H, D, E\)"),
        ((S, z[:, 0]), r"^initial_state\[1\] has shape \(2, 4, 16\), must be \(sequences, 1, H, D\) = \(2, 1, 4, 16\)"),
    ):
        with pytest.raises(ValueError, match=message):
            fla.chunk_linear_attn(q, k, v, initial_state=state)


@pytest.mark.parametrize("call", [fla.chunk_simple_gla, fla.chunk_linear_attn])
def test_compiled(qkv, call):
    """Values are not looked at."""
    given = {"g": -torch.rand(B, T, H)} if call is fla.chunk_simple_gla else {}
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*qkv, **given)[0], call(*qkv, **given)[0])


@pytest.mark.gpu
@pytest.mark.parametrize("size", [64, 128])
def test_on_a_gpu(size):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 200, 4, size, device="cuda", dtype=torch.bfloat16) / math.sqrt(8) for _ in range(3))
    g = torch.nn.functional.logsigmoid(torch.randn(2, 200, 4, device="cuda"))
    o, final = fla.chunk_simple_gla(q, k, v, g, output_final_state=True)
    want, last = recurrent(*(x.cpu() for x in (q, k, v, g)))
    assert (o.cpu().double() - want).norm() < 0.01 * want.norm()
    assert (final.cpu().double() - last).norm() < 0.01 * last.norm()


def test_the_gradient_of_an_expanded_decay_is_of_each_token():
    q, k, v = (torch.randn(2, 7, 3, 4) for _ in range(3))
    g = torch.full((3,), -0.3).expand(2, 7, 3)
    grads = []
    for given in (g.detach().requires_grad_(), g.contiguous().requires_grad_()):
        o, _ = fla.chunk_simple_gla(q, k, v, given)
        grads += torch.autograd.grad(o.sum(), given)
    torch.testing.assert_close(*grads)


def test_arguments_are_called_by_flas_names():
    q, k, v = (torch.randn(1, 7, 3, 4) for _ in range(3))
    for given, message in (
        ({"g": torch.zeros(1, 7, 2)}, r"^g has shape \(1, 7, 2\), must be \(B, T, H\) = \(1, 7, 3\)"),
        ({"g": torch.zeros(3)}, r"^g has shape \(3,\), must be \(B, T, H\)"),
        ({"g_gamma": torch.zeros(2)}, r"^g_gamma has shape \(2,\), must be \(H,\) = \(3,\)"),
        ({"g_gamma": -0.5}, "^g_gamma is a float, must be a torch.Tensor"),
        ({"g": torch.zeros(1, 7, 3, device="meta")}, "^g is on meta, must be on q's cpu"),
        ({"cu_seqlens": [0, 7]}, "^cu_seqlens is a list, must be a torch.Tensor"),
        ({"cu_seqlens": torch.tensor([0.0, 3.9, 7.0])}, "^cu_seqlens is torch.float32, must be integers"),
        ({"cu_seqlens": torch.tensor([False, True])}, "^cu_seqlens is torch.bool, must be integers"),
        ({"initial_state": torch.zeros(1, 3, 4, 2)}, r"^initial_state has shape .* must be \(sequences, H, D, E\)"),
        ({"initial_state": torch.zeros(1, 3, 4, 2), "state_v_first": True}, r"must be \(sequences, H, E, D\)"),
    ):
        with pytest.raises(ValueError, match=message):
            fla.chunk_simple_gla(q, k, v, **given)


def test_fp64_is_exact_to_its_last_digits(qkv):
    q, k, v = qkv
    g, gamma = -drawn(B, T, H).abs(), torch.log1p(-torch.exp2(-5.0 - torch.arange(H, dtype=torch.float64)))
    for (o, final), decay in (
        (fla.chunk_simple_gla(q, k, v, g, output_final_state=True), g),
        (fla.chunk_simple_gla(q, k, v, g_gamma=gamma, output_final_state=True), gamma.expand(B, T, H)),
        (fla.chunk_retention(q, k, v, output_final_state=True), gamma.expand(B, T, H)),
    ):
        torch.testing.assert_close((o, final), recurrent(q, k, v, decay), rtol=1e-11, atol=1e-12)
