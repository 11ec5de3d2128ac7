"""torch's flash operators as fulmen serves them: by themselves and, on the CPU, behind torch's dispatcher and autograd;
with a GPU, in `scaled_dot_product_attention` itself."""

from __future__ import annotations

import contextlib
import inspect

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, current_flash_attention_impl, sdpa_kernel

from fulmen import dispatch
from fulmen.flash.spec import checked_spec
from fulmen.integrations import sdpa


def cuda_kernels() -> set[str]:
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    return {name for name in sdpa.OPERATORS if hasattr(torch.ops.aten, name) and has(f"aten::{name}", "CUDA")}


@pytest.fixture
def given_back():
    """Whatever a test does, the next one finds torch as it was."""
    assert current_flash_attention_impl() is None
    yield
    if current_flash_attention_impl() is not None:
        torch.nn.attention.restore_flash_attention_impl()


@pytest.fixture
def on_cpu():
    """The replacements behind torch's dispatcher, on the device at hand: torch has no such kernels for the CPU."""
    library = torch.library.Library("aten", "IMPL", "CPU")
    for name, function in sdpa.OPERATORS.items():
        if hasattr(torch.ops.aten, name):
            library.impl(name, function, "CPU")
    yield torch.ops.aten
    library._destroy()


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def make(*shape):
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


def math(q, k, v, causal=False, scale=None):
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=True)


@pytest.mark.parametrize("name", sdpa.OPERATORS)
def test_signatures_hold_the_operators_arguments(name):
    if not hasattr(torch.ops.aten, name):
        pytest.skip(f"torch {torch.__version__} has no {name}")
    function = sdpa.OPERATORS[name]
    if function is sdpa.flash_forward_into:
        function, skipped = sdpa.flash_forward, 1  # `out`
    else:
        skipped = 0
    parameters = dict(inspect.signature(function).parameters)
    assert parameters.pop("backend").default == "auto"
    arguments = getattr(torch.ops.aten, name).default._schema.arguments[skipped:]
    positional = [p.name for p in parameters.values() if p.kind is not p.KEYWORD_ONLY]
    assert positional == [a.name for a in arguments if not a.kwarg_only]
    named = {p.name for p in parameters.values() if p.kind is p.KEYWORD_ONLY}
    assert {a.name for a in arguments if a.kwarg_only} <= named  # older torch has fewer


def test_install_and_uninstall(given_back):
    before = cuda_kernels()
    sdpa.install()
    assert current_flash_attention_impl() == "fulmen"
    assert cuda_kernels() == {name for name in sdpa.OPERATORS if hasattr(torch.ops.aten, name)}
    with pytest.raises(RuntimeError, match="already"):
        sdpa.install()
    sdpa.uninstall()
    assert current_flash_attention_impl() is None
    assert cuda_kernels() == before
    with pytest.raises(RuntimeError, match="does not serve"):
        sdpa.uninstall()
    with contextlib.suppress(KeyError), sdpa.installed():
        assert current_flash_attention_impl() == "fulmen"
        raise KeyError
    assert current_flash_attention_impl() is None
    assert cuda_kernels() == before


def test_another_implementation_gets_its_place_back(given_back, monkeypatch):
    calls = []

    class Handle:
        def remove(self):
            calls.append("removed")

    def activate():
        calls.append("activated")
        return Handle()

    monkeypatch.setattr(torch.nn.attention._registry, "_FLASH_ATTENTION_IMPLS", {})
    torch.nn.attention.register_flash_attention_impl("other", register_fn=activate)
    torch.nn.attention.activate_flash_attention_impl("other")
    with sdpa.installed():
        assert calls == ["activated", "removed"]
    assert calls == ["activated", "removed", "activated"]
    assert current_flash_attention_impl() == "other"


def test_torch_is_not_asked_to_serve_itself(given_back):
    with pytest.raises(ValueError, match=r"backend='sdpa'.*can be served by"):
        sdpa.install("sdpa")
    with pytest.raises(ValueError, match="backend='nonsense'"):
        sdpa.install("nonsense")
    q = make(1, 2, 3, 8)
    spec = checked_spec(q, q, q)._replace(needs_grad=True)
    assert dispatch.pick("flash", spec).name == "sdpa", "else this test says nothing"
    assert sdpa._kernel(spec, "auto").name == "eager"


def test_a_torch_without_the_switch_is_told(monkeypatch):
    monkeypatch.delattr(torch.nn.attention, "restore_flash_attention_impl")
    with pytest.raises(ImportError, match="restore_flash_attention_impl"):
        sdpa.install()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("H_KV", "transposed", "scale"), [(4, False, None), (2, True, 0.3)])
def test_dense_operator_and_its_gradient(on_cpu, causal, H_KV, transposed, scale):
    shapes = [(2, 7, 4, 8), (2, 7, H_KV, 8), (2, 7, H_KV, 8)]
    leaves = [make(*s) for s in shapes]
    q, k, v = (x.transpose(1, 2) if transposed else x.transpose(1, 2).contiguous() for x in leaves)
    o, lse, _, _, N_Q, N_KV, *_ = on_cpu._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, scale=scale)
    exact = math(q, k, v, causal, scale)
    assert (N_Q, N_KV, lse.shape) == (7, 7, (2, 4, 7))
    assert o.stride() == torch.empty_like(q).stride()  # as torch.compile expects
    torch.testing.assert_close(o, exact, rtol=1e-10, atol=1e-10)
    do = torch.randn_like(o)
    for got, want in zip(torch.autograd.grad(o, leaves, do), torch.autograd.grad(exact, leaves, do), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-10)


def test_causal_is_aligned_to_the_bottom_right(on_cpu):
    q, k = make(1, 2, 3, 8), make(1, 2, 7, 8)  # torch.nn.attention.bias.causal_lower_right calls it so
    o = on_cpu._scaled_dot_product_flash_attention(q, k, k, 0.0, True)[0]
    mask = torch.ones(3, 7, dtype=torch.bool).tril(4)
    torch.testing.assert_close(o, F.scaled_dot_product_attention(q, k, k, attn_mask=mask), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("causal", "window"), [(False, (None, None)), (True, (-1, -1)), (True, (2, 3)), (False, (2, 1))]
)
def test_flash_operator_and_its_gradient(on_cpu, packed, causal, window):
    leaves = [make(2, 6, h, 8) for h in (4, 2, 2)]
    q, k, v = (x.flatten(0, 1) if packed else x for x in leaves)
    ends = [0, 6, 12] if packed else None
    cu = None if ends is None else torch.tensor(ends, dtype=torch.int32)
    options = {"scale": 0.4, "window_size_left": window[0], "window_size_right": window[1]}
    o, lse, *_ = on_cpu._flash_attention_forward(q, k, v, cu, cu, 6, 6, 0.0, causal, False, **options)
    assert lse.shape == ((4, 12) if packed else (2, 4, 6))
    assert o.shape == q.shape
    i, j = torch.arange(6)[:, None], torch.arange(6)[None, :]
    left, right = (6 if w is None or w < 0 else w for w in window)
    mask = (j >= i - left) & (j <= i + (0 if causal else right))
    dense = (x.transpose(1, 2) for x in leaves)
    exact = F.scaled_dot_product_attention(*dense, attn_mask=mask, scale=0.4, enable_gqa=True).transpose(1, 2)
    torch.testing.assert_close(o, exact.reshape(o.shape), rtol=1e-10, atol=1e-10)
    do = torch.randn_like(o)
    rest = (do, q, k, v, o, lse, cu, cu, 6, 6, 0.0, causal)
    if packed:
        grads = on_cpu._flash_attention_backward(*rest, lse[:0], lse[:0], **options)
    else:  # its schema wants offsets
        grads = sdpa.flash_backward(*rest, None, None, **options)
    for got, want in zip(grads, torch.autograd.grad(exact, leaves, do.reshape(exact.shape)), strict=True):
        torch.testing.assert_close(got, want.reshape(got.shape), rtol=1e-9, atol=1e-10)


def test_operator_with_an_output(on_cpu):
    if not hasattr(on_cpu, "_flash_attention_forward_no_dropout_inplace"):
        pytest.skip(f"torch {torch.__version__} has no such operator")
    q, cu = make(6, 2, 8).detach(), torch.tensor([0, 2, 6], dtype=torch.int32)
    rest = (q, q, q, cu, cu, 4, 4, 0.0, True, False)
    out = torch.zeros_like(q)
    lse = on_cpu._flash_attention_forward_no_dropout_inplace(out, *rest)
    o, same, *_ = on_cpu._flash_attention_forward(*rest)
    torch.testing.assert_close((out, lse), (o, same), rtol=0, atol=0)


def test_what_is_lacking_raises():
    q = make(1, 2, 3, 8)
    with pytest.raises(NotImplementedError, match=r"no dropout_p=0\.5.*uninstall"):
        sdpa.sdpa_forward(q, q, q, 0.5)
    for options in ({"seqused_k": q}, {"alibi_slopes": q}, {"block_table": q}):
        with pytest.raises(NotImplementedError, match=next(iter(options))):
            sdpa.flash_forward(q, q, q, None, None, 3, 3, 0.0, False, False, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
def test_scaled_dot_product_attention_on_the_gpu(given_back, causal, monkeypatch):
    calls = []

    def counted(name):
        function = sdpa.OPERATORS[name]

        def run(*args, **kwargs):
            calls.append(name)
            return function(*args, **kwargs)

        return run

    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v, do = (
        torch.randn(2, 4, 200, 64, device="cuda", dtype=torch.bfloat16, generator=generator) for _ in range(4)
    )
    leaves = [x.requires_grad_() for x in (q, k, v)]

    def step(backend, dtype):
        x = [t.to(dtype) for t in leaves]
        with sdpa_kernel(backend):
            o = F.scaled_dot_product_attention(*x, is_causal=causal)
        return o, *torch.autograd.grad(o, leaves, do.to(dtype))

    exact = step(SDPBackend.MATH, torch.float64)
    torchs_own = step(SDPBackend.FLASH_ATTENTION, torch.bfloat16)
    for name in list(sdpa.OPERATORS):
        monkeypatch.setitem(sdpa.OPERATORS, name, counted(name))
    with sdpa.installed():
        ours = step(SDPBackend.FLASH_ATTENTION, torch.bfloat16)
    assert calls == ["_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_backward"]
    for got, low, want in zip(ours, torchs_own, exact, strict=True):
        error, yardstick = ((x.double() - want.double()).abs().max() for x in (got, low))
        assert error <= 3 * yardstick
    again = step(SDPBackend.FLASH_ATTENTION, torch.bfloat16)
    assert len(calls) == 2, "torch's own operators are back"
    torch.testing.assert_close(again[0], torchs_own[0], rtol=0, atol=0)
