"""A decay for each token, and heads of v that share q and k: every backend against fp64, with the decay's gradient.

What both decays have in common is in test_backends.py.
"""

from __future__ import annotations

import pytest
import torch

import fulmen
from fulmen.lightning import reference
from fulmen.testing import lightning as testing
from tests.lightning.test_backends import BACKENDS, DTYPES, case, check, segments, supported  # noqa: F401

# Sizes around the tile edges, then the options, alone and together.
CASES = {
    "N=0": case(B=2, H=2, N=0, D=16, initial_state=True),
    "N=1": case(B=2, H=2, N=1, D=16, initial_state=True),
    "N=63": case(H=1, N=63, D=64),
    "N=130": case(B=2, H=2, N=130, D=16),
    "D=16 E=48": case(N=67, D=16, E=48, initial_state=True),
    "D=128 E=64": case(H=1, N=65, D=128, E=64, initial_state=True),
    "D=5 E=1": case(N=70, D=5, E=1, initial_state=True),
    "scale": case(N=100, D=16, scale=-0.25, initial_state=True),
    "heads 4/2": case(H=4, H_KV=2, N=70, D=16, initial_state=True),
    "groups 2": case(H=4, groups=2, N=70, D=16, E=32, initial_state=True),
    "groups 1, fused": case(B=2, H=3, groups=1, N=70, D=32, E=16, layout="fused"),
    "bnhd": case(B=2, H=3, N=70, D=16, layout="bnhd"),
    "packed": case(H=2, D=16, lengths=[0, 1, 64, 0, 65, 0], initial_state=True),
    "packed, groups": case(H=4, groups=2, D=16, E=32, lengths=[33, 1, 40], layout="fused", scale=0.5),
    "packed, all empty": case(H=2, D=16, lengths=[0, 0], initial_state=True),
    "two spans": case(H=1, N=530, D=16, initial_state=True),  # of 512 rows, at which the gradient's sum begins anew
    "packed, two spans": case(H=1, D=16, E=24, lengths=[40, 0, 515], initial_state=True),
}  # fmt: skip


def drawn(kind: str = "token", **options) -> testing.Inputs:
    """Inputs whose decay requires a gradient."""
    x = testing.inputs(decay=kind, **options)
    return x._replace(decay=x.decay.requires_grad_())


@pytest.mark.parametrize("kind", testing.TOKEN_DECAYS)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_against_fp64(backend, dtype, case, kind, segments):  # noqa: F811
    check(backend, drawn(kind, **CASES[case], dtype=DTYPES[dtype]), segments)


# Compiled kernels at real tile sizes: chunks, saved states, segments, tiles of D, shared heads.
GPU_CASES = {
    "D=64": case(B=2, H=5, N=1000, D=64, initial_state=True, scale=-2.0),
    "D=64 long": case(B=1, H=3, N=8200, D=64),
    "D=64 many heads": case(B=2, H=70, N=700, D=64, layout="bnhd"),
    "D=128": case(B=1, H=4, N=4099, D=128, layout="fused", initial_state=True),
    "D=128 many heads": case(B=2, H=70, N=700, D=128),
    "D=128 E=64": case(B=2, H=6, groups=2, N=1100, D=128, E=64, layout="bnhd", initial_state=True),
    "D=128 E=64 many heads": case(B=3, H=64, groups=1, N=600, D=128, E=64, layout="fused"),
    "D=80 E=48": case(B=1, H=4, H_KV=2, N=1100, D=80, E=48),
    "N=1": case(B=2, H=2, N=1, D=64, initial_state=True),
    "packed D=64": case(H=4, D=64, lengths=[0, 1, 999, 0, 65, 1, 2000, 0], initial_state=True),
    "packed D=128": case(H=70, D=128, lengths=[1, 0, 63, 64, 65, 300, 0, 511, 513, 1], initial_state=True),
}  # fmt: skip
GPU_RUNS = [("bf16", name) for name in GPU_CASES] + [
    (dtype, name) for dtype in ("fp16", "fp32") for name in ("D=64", "D=128 E=64", "D=80 E=48", "packed D=64")
]


@pytest.mark.gpu
@pytest.mark.parametrize("kind", testing.TOKEN_DECAYS)
@pytest.mark.parametrize(("dtype", "case"), GPU_RUNS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_on_gpu(backend, dtype, case, kind, segments):  # noqa: F811
    check(backend, drawn(kind, **GPU_CASES[case], dtype=DTYPES[dtype], device="cuda"), segments)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lengths", [None, [300, 0, 1, 699]], ids=["batch", "packed"])
def test_long_against_fp64(lengths, dtype, segments):  # noqa: F811
    check("eager", drawn(H=2, N=1000, D=32, lengths=lengths, initial_state=True, dtype=DTYPES[dtype]), segments)


@pytest.mark.parametrize("use", [("o",), ("state",)], ids=["only o", "only state"])
@pytest.mark.parametrize("lengths", [None, [30, 0, 40]], ids=["batch", "packed"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_only_one_result_used(backend, lengths, use, segments):  # noqa: F811
    check(backend, drawn(H=2, N=70, D=16, E=24, lengths=lengths, scale=0.5, initial_state=True), segments, use)


@pytest.mark.parametrize("options", [case(H_KV=1), case(groups=1)], ids=["shared k, v", "shared q, k"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_shared_heads_are_summed_in_fp32(backend, options, segments):  # noqa: F811
    """32 heads on one stored head, in fp16: partial sums rounded to fp16 would show."""
    check(backend, drawn(H=32, N=70, D=16, dtype=torch.float16, **options), segments)


@pytest.mark.parametrize("decay", [None, "mixed"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_groups_with_a_constant_decay(backend, decay, segments):  # noqa: F811
    x = testing.inputs(H=4, groups=2, N=70, D=16, E=32, decay=decay, initial_state=True)
    if decay is not None:
        x = x._replace(decay=x.decay.requires_grad_())
    check(backend, x, segments)


def fast_tokens(H: int = 4, N: int = 500, rate: float = 1.3, **options) -> testing.Inputs:
    """Inputs whose heads forget a state within a few tokens, as at the initialisation of Mamba-2."""
    x = drawn(H=H, N=N, **{"D": 16, "dtype": torch.bfloat16, **options})
    spread = torch.randn(x.decay.shape, generator=torch.Generator().manual_seed(1)).to(x.decay.device)
    return x._replace(decay=(rate * torch.exp(0.5 * spread)).requires_grad_())


@pytest.mark.parametrize("rate", [0.5, 1.3])
@pytest.mark.parametrize("lengths", [None, [300, 0, 200]], ids=["batch", "packed"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_summed_over_tokens(backend, lengths, rate):
    """A factor of each head's decay, as Mamba-2's A."""
    x = fast_tokens(rate=rate, lengths=lengths, dtype=torch.float16)
    supported(backend, x)
    testing.check_summed(x, testing.evaluate(testing.backend(backend), x).ddecay)


@pytest.mark.gpu
@pytest.mark.parametrize("options", [case(D=64), case(D=128), case(D=128, E=64, groups=8)], ids=str)
@pytest.mark.parametrize("rate", [0.3, 1.3])
@pytest.mark.parametrize("backend", BACKENDS)
def test_summed_over_tokens_on_gpu(backend, rate, options):
    x = fast_tokens(H=16, N=4000, rate=rate, device="cuda", **options)
    supported(backend, x)
    testing.check_summed(x, testing.evaluate(testing.backend(backend), x).ddecay)


@pytest.mark.parametrize("backend", BACKENDS)
def test_padding_before_the_first_token_has_no_gradient(backend):
    x = drawn(N=300, D=16, dtype=torch.float16)
    for rows in (x.q, x.k, x.v, x.do):
        rows[:, :, :100] = 0.0
    supported(backend, x)
    ddecay = testing.evaluate(testing.backend(backend), x, ("o",)).ddecay
    assert ddecay[:, :, :101].abs().max() <= 1e-6 * ddecay.abs().max()


@pytest.mark.parametrize("backend", BACKENDS)
def test_equals_a_constant_decay(backend):
    """The same slope for every token is a constant decay; its gradient is the sum over tokens."""
    x = testing.inputs(2, 3, 100, 16, decay="mixed", initial_state=True)
    slopes = x.decay.requires_grad_()
    tokens = slopes.detach()[None, :, None].repeat(2, 1, 100).requires_grad_()
    supported(backend, x._replace(decay=tokens))
    one, each = (testing.evaluate(testing.backend(backend), x._replace(decay=s)) for s in (slopes, tokens))
    assert each.ddecay.shape == (2, 3, 100)
    each = each._replace(ddecay=each.ddecay.sum((0, 2)))
    for name, wanted in testing.expected(x).items():
        testing.assert_close(name, getattr(one, name), *wanted)
        if name == "ddecay":  # a sum over tokens of running sums over tokens
            wanted = wanted._replace(roundings=2 * wanted.roundings)
        testing.assert_close(name, getattr(each, name), *wanted)


@pytest.mark.parametrize("oracle", ["recurrent", "chunked"])
@pytest.mark.parametrize("lengths", [None, [3, 0, 17]], ids=["batch", "packed"])
def test_oracles_agree(oracle, lengths):
    x = drawn(H=4, groups=2, N=20, D=8, E=5, lengths=lengths, initial_state=True, scale=0.5)
    found, wanted = testing.reference(x, oracle=oracle), testing.reference(x)
    for name, value in found._asdict().items():
        torch.testing.assert_close(value, getattr(wanted, name), rtol=1e-9, atol=1e-9, msg=name)


@pytest.mark.parametrize("kind", ["token", "mixed", None])
@pytest.mark.parametrize("options", [
    case(B=2, H=3, N=40), case(H=6, H_KV=3, N=40), case(H=6, groups=3, N=40, E=5), case(H=5, lengths=[30, 0, 3]),
], ids=str)  # fmt: skip
def test_what_is_expected_a_few_heads_at_a_time(options, kind, monkeypatch):
    """As of all heads at once, and no attention matrix is larger than allowed."""
    x = testing.inputs(D=8, decay=kind, initial_state=True, scale=0.5, dtype=torch.float16, **options)
    x = x if kind is None else x._replace(decay=x.decay.requires_grad_())
    monkeypatch.setattr(testing, "expected", testing.expected.__wrapped__)  # which remembers nothing
    whole, sizes, largest = testing.expected(x), [], 2 * 8 * 1600
    exponents = reference.exponents

    def noted(s, N, dtype):
        found = exponents(s, N, dtype)
        sizes.append(x.q.shape[0] * found.apart.shape[-3] * N * N)
        return found

    monkeypatch.setattr(reference, "exponents", noted)
    monkeypatch.setattr(testing, "MAX_MATRIX", largest)
    parts = testing.expected(x)
    assert max(sizes) * 8 <= largest < 8 * x.do.shape[:2].numel() * 900
    assert parts.keys() == whole.keys()
    for name, wanted in whole.items():
        found = parts[name]
        assert found[2:4] == wanted[2:4]
        assert (found.terms is None) == (wanted.terms is None)
        for got, want in ((found.exact, wanted.exact), (found.terms, wanted.terms)):
            if want is not None:
                torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(found.low, wanted.low, rtol=1e-2, atol=1e-2)


def test_the_oracle_where_sums_are_not_monotone(monkeypatch):
    """A GPU sums in parallel: with decays of 0 and 1e4 a later sum can be rounded below an earlier one."""
    x = drawn("extreme", B=1, H=2, N=600, D=8)

    def in_parts(t, dim):
        first, rest = t[..., ::2], t[..., 1::2]
        pairs = torch.ops.aten.cumsum(first + rest, dim)
        return torch.stack((pairs - rest * (1 + 1e-15), pairs), -1).flatten(-2)

    monkeypatch.setattr(torch.Tensor, "cumsum", in_parts)
    s = x.decay.detach().double().requires_grad_()
    assert (s.cumsum(2).diff(dim=2) < 0).any()
    apart = reference.exponents(s, 600, torch.float64).apart
    assert apart.min() > -1e-6
    (found,) = torch.autograd.grad(apart.sum(), s)
    i = torch.arange(600).double()  # a decay lies between i tokens and 600 - i
    torch.testing.assert_close(found, (i * (600 - i)).expand_as(found))


@pytest.mark.parametrize("backend", BACKENDS)
def test_segments_with_passed_state(backend):
    """The decay of a segment's first token acts on the state that enters."""
    x = testing.inputs(1, 2, 100, 16, decay="token", initial_state=True)
    supported(backend, x)
    parts, state = [], x.initial_state
    for part in (slice(0, 37), slice(37, 100)):
        rows = {name: getattr(x, name)[:, :, part] for name in ("q", "k", "v", "decay")}
        o, state = testing.backend(backend)(x._replace(**rows, initial_state=state))
        parts.append(o)
    wanted = testing.expected(x)
    testing.assert_close("o", torch.cat(parts, 2), *wanted["o"])
    testing.assert_close("state", state, *wanted["state"])


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_strided_decay(backend, segments):  # noqa: F811
    """As of a (B, N, H) tensor, and every other element of a larger one."""
    x = drawn(B=2, H=3, N=70, D=16)
    spread = torch.full((2, 70, 3, 2), 3.0)
    spread[..., 0] = x.decay.detach().transpose(1, 2)
    view = spread[..., 0].transpose(1, 2)
    assert not view.is_contiguous()
    check(backend, x._replace(decay=view.requires_grad_()), segments)


@pytest.mark.parametrize("backend", BACKENDS)
def test_without_the_gradient_of_the_decay(backend, segments):  # noqa: F811
    check(backend, testing.inputs(H=2, N=70, D=16, decay="token", initial_state=True), segments)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_token_that_forgets(backend):
    """exp(-1e4) is nothing: rows from there on do not know of those before, and the gradient of such a decay is 0."""
    x = testing.inputs(1, 2, 100, 16, decay="token")
    decay = x.decay.clone()
    decay[:, :, 40] = 1e4
    x = x._replace(decay=decay.requires_grad_())
    supported(backend, x)
    whole = testing.evaluate(testing.backend(backend), x, ("o",))
    rows = {name: getattr(x, name)[:, :, 40:] for name in ("q", "k", "v", "decay", "do")}
    for name, wanted in testing.expected(x._replace(**rows), ("o",)).items():
        value = getattr(whole, name)
        testing.assert_close(name, value if value.ndim == 4 and name == "state" else value[:, :, 40:], *wanted)


def test_gradcheck():
    x = testing.inputs(1, 2, 5, 3, E=2, dtype=torch.float64, decay="token", initial_state=True)

    def attend(q, k, v, decay, state):
        return reference.attend(reference.quadratic, q, k, v, decay, initial_state=state, scale=0.5)

    given = [y.double().requires_grad_() for y in (x.q, x.k, x.v, x.decay, x.initial_state)]
    assert torch.autograd.gradcheck(attend, given)


@pytest.mark.parametrize("groups", [None, 1])
def test_opcheck(groups):
    x = drawn(H=2, N=9, D=4, groups=groups, initial_state=True)
    given = (*(y.detach().requires_grad_() for y in x[:4]), x.initial_state, None)
    torch.library.opcheck(torch.ops.fulmen.lightning_forward, (*given, 1.0, True, "eager", True))
    given = tuple(None if t is None else t.detach() for t in given)
    torch.library.opcheck(torch.ops.fulmen.lightning_backward, (*given, x.do, x.dstate, 1.0, True, "eager", None))


@pytest.mark.slow
@pytest.mark.parametrize("groups", [None, 1])
def test_compiled_equals_eager(groups):
    x = drawn(B=2, H=2, N=70, D=8, groups=groups, layout="bnhd", initial_state=True)
    compiled = torch.compile(testing.backend("eager"), fullgraph=True, backend="aot_eager")
    for got, wanted in zip(*(testing.evaluate(f, x) for f in (compiled, testing.backend("eager"))), strict=True):
        torch.testing.assert_close(got, wanted)


WRONG = {
    "N": (torch.ones(2, 4, 7), ["decay has shape (2, 4, 7)", "(B, H, N) = (2, 4, 8)"]),
    "heads": (torch.ones(2, 2, 8), ["decay has shape (2, 2, 8)", "H=4"]),
    "dtype": (torch.ones(2, 4, 8).bfloat16(), ["decay is torch.bfloat16", "float32"]),
    "negative": (torch.ones(2, 4, 8).index_fill_(2, torch.tensor([5]), -0.5), ["8 of 64", "-0.5", ">= 0"]),
    "nan": (torch.full((2, 4, 8), torch.nan), ["64 of 64", "nan"]),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_decay(what):
    decay, words = WRONG[what]
    x = testing.inputs(2, 4, 8, 16, H_KV=2)
    with pytest.raises(ValueError) as error:  # noqa: PT011  the words are checked below
        fulmen.lightning_attention(x.q, x.k, x.v, decay)
    for word in words:
        assert word in str(error.value)


def test_wrong_heads():
    x = testing.inputs(2, 6, 8, 16)
    with pytest.raises(ValueError, match=r"v has 6 heads, must have as many as k, 4, or a multiple if q has as many"):
        fulmen.lightning_attention(x.q[:, :4], x.k[:, :4], x.v)
    with pytest.raises(ValueError, match=r"v has 6 heads, must have as many as k, 3, or a multiple"):
        fulmen.lightning_attention(x.q[:, :2], x.k[:, :3], x.v)
