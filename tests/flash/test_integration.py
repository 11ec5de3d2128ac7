"""How the operation lives inside PyTorch: compile, autocast, checkpointing, the cache of plans, layouts."""

from __future__ import annotations

import copy
import functools
import shutil

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import forward_ad
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import fulmen
from fulmen import dispatch
from fulmen import plans as cache
from fulmen.flash import eager, op, sdpa
from fulmen.flash.spec import FlashSpec, Residuals
from fulmen.testing import flash as testing

BACKENDS = sorted(dispatch.kernels("flash"))
OURS = [b for b in BACKENDS if b.startswith(("triton", "cuda"))]
DERIVED = [b for b in BACKENDS if dispatch.kernels("flash")[b].backward is not None]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
COMPILER = pytest.mark.skipif(not shutil.which("g++"), reason="inductor needs a C++ compiler")
FULL = {"E": 24, "H_KV": 2, "causal": True, "window": (30, None), "softcap": 5.0, "scale": 0.5, "sinks": True}
HALF = torch.float16


def serving(x: testing.Inputs, backend: str, with_lse: bool = False) -> None:
    why = dispatch.kernels("flash")[backend].supports(x.spec(with_lse=with_lse, needs_grad=True))
    if why is not None:
        pytest.skip(why)


def attend(x: testing.Inputs, backend: str = "auto"):
    return fulmen.flash_attention_with_lse(x.q, x.k, x.v, **x.options(), backend=backend)


def attend_o(x: testing.Inputs, backend: str = "auto"):
    return fulmen.flash_attention(x.q, x.k, x.v, **x.options(), backend=backend), None


def assert_same(a: testing.Outputs, b: testing.Outputs) -> None:
    for name, x, y in zip(a._fields, a, b, strict=True):
        assert (x is None) == (y is None), name
        assert x is None or torch.equal(x, y), f"{name}: {(x - y).abs().max()}"


# ---------------------------------------------------------------------------------------------- compile


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["plain", "full", "packed"])
@pytest.mark.parametrize("mode", ["aot_eager", pytest.param("inductor", marks=COMPILER)])
def test_compile_fullgraph(mode, kind, device):
    """The op is opaque to the compiler, so compiled results have the same bits, whichever backend serves."""
    options = {} if kind == "plain" else FULL
    lengths = [30, 0, 40] if kind == "packed" else None
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    x = testing.inputs(1, 4, 70, 16, **options, lengths_q=lengths, device=device, dtype=dtype)
    f, use = (attend_o, ("o",)) if kind == "plain" else (attend, ("o", "lse"))
    compiled = torch.compile(f, fullgraph=True, backend=mode)
    assert_same(testing.evaluate(compiled, x, use), testing.evaluate(f, x, use))
    with torch.no_grad():
        assert torch.equal(compiled(x)[0], f(x)[0])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", ["bhnd", "bnhd"])
def test_compile_dynamic_shapes(layout, device):
    """One graph for every B and N. Equal sizes would be taken for one symbol."""
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(attend_o, fullgraph=True, dynamic=True, backend=counter)
    for B, N_Q, N_KV in ((3, 70, 90), (5, 129, 40), (4, 33, 201)):
        dtype = torch.float32 if device == "cpu" else torch.bfloat16
        x = testing.inputs(B, 2, N_Q, 16, N_KV=N_KV, causal="top_left", layout=layout, device=device, dtype=dtype)
        assert_same(testing.evaluate(compiled, x, ("o",)), testing.evaluate(attend_o, x, ("o",)))
    assert counter.frame_count == 1


@pytest.mark.parametrize(
    ("mode", "device"), [("aot_eager", "cpu"), pytest.param("inductor", "cuda", marks=pytest.mark.gpu)]
)
@pytest.mark.parametrize("backend", ["auto", "eager", "sdpa"])
def test_compile_of_a_layer_between_other_operations(backend, mode, device):
    """Views of a fused projection in, a transposed view out: the strides must be those the fake promised."""
    layer = torch.nn.Linear(32, 96, device=device)

    def f(x):
        q, k, v = layer(x).view(*x.shape[:2], 3, 2, 16).permute(2, 0, 3, 1, 4)
        o = fulmen.flash_attention(q.sin(), k, v, causal=True, backend=backend)
        return (o.transpose(1, 2).flatten(2) * 2).square().mean()

    x = torch.randn(2, 70, 32, device=device)
    plain = torch.autograd.grad(f(x), layer.parameters())
    compiled = torch.autograd.grad(torch.compile(f, fullgraph=True, backend=mode)(x), layer.parameters())
    for a, b in zip(plain, compiled, strict=True):
        assert (a - b).abs().max() <= 140 * torch.finfo(a.dtype).eps * a.abs().max()  # sums over 2 * 70 rows


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", ["bhnd", "bnhd"])
@pytest.mark.parametrize("kind", ["plain", "eager", "full", "packed"])
def test_opcheck(kind, layout, device):
    """Schema, fake implementation (shapes, strides), autograd registration, AOT dispatch; both ops.

    The last asks for the gradient of every output, and what serves the plain call on a CPU has none of lse.
    """
    utils = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    options = {"full": FULL, "packed": FULL | {"lengths_q": [30, 0, 10]}}.get(kind, {})
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    x = testing.inputs(2, 4, 40, 16, layout=layout, device=device, dtype=dtype, **options)
    q, k, v = (y.detach().requires_grad_() for y in (x.q, x.k, x.v))
    sinks = None if x.sinks is None else x.sinks.detach().requires_grad_()
    spec = x.spec()
    offsets = (x.cu_seqlens_q, x.cu_seqlens_q)
    forward, backward = torch.ops.fulmen.flash_forward.default, torch.ops.fulmen.flash_backward.default
    some = utils[:3] if kind == "plain" else utils
    backend = "eager" if kind == "eager" and device == "cpu" else "auto"
    for with_lse in (False, True) if options else (False,):
        own = {name: getattr(spec, name) for name in ("scale", "left", "right", "top_left", "softcap")}
        own |= {"with_lse": with_lse, "needs_grad": True, "backend": backend}
        facts = testing.operator_facts("flash_forward", **own)
        torch.library.opcheck(forward, (q, k, v, sinks, *offsets, *facts), test_utils=some)
        dlse = x.dlse if with_lse else None
        o, lse = testing.backend(backend)(x)
        tensors = (x.q, x.k, x.v, x.sinks, *offsets, o, lse, x.do, dlse)
        torch.library.opcheck(backward, (*tensors, *facts), test_utils=utils)


# -------------------------------------------------------------------------------- autocast, checkpointing


@pytest.mark.parametrize("device", DEVICES)
def test_autocast(device):
    """As in torch's own attention: mixed inputs in, the autocast dtype out, gradients as the inputs."""
    x = testing.inputs(1, 2, 70, 64, causal=True, device=device)
    q, k, v = x.q.requires_grad_(), x.k.half().requires_grad_(), x.v.bfloat16().requires_grad_()
    with torch.autocast(device, dtype=torch.bfloat16):
        o, lse = fulmen.flash_attention_with_lse(q, k, v, causal=True)
    assert (o.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    cast = x._replace(q=q.bfloat16(), k=k.bfloat16(), v=v.bfloat16())
    for got, want in zip((o, lse), attend(cast), strict=True):
        assert torch.equal(got, want)  # autocast reaches the op's inputs, never its fp32 insides
    grads = torch.autograd.grad(o, (q, k, v), x.do.bfloat16())
    assert [g.dtype for g in grads] == [torch.float32, torch.float16, torch.bfloat16]
    with pytest.raises(ValueError, match=r"k is torch\.float16"):
        fulmen.flash_attention(q, k, v)


def test_autocast_after_the_same_call_without():
    """The plan of a plain call must not serve one inside autocast."""
    x = testing.inputs(1, 2, 20, 16)
    assert fulmen.flash_attention(x.q, x.k, x.v).dtype == torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert fulmen.flash_attention(x.q, x.k, x.v).dtype == torch.bfloat16
    assert fulmen.flash_attention(x.q, x.k, x.v).dtype == torch.float32


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["plain", "full"])
def test_activation_checkpointing(kind, device):
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    x = testing.inputs(1, 4, 70, 16, **(FULL if kind == "full" else {}), device=device, dtype=dtype)
    f, use = (attend, ("o", "lse")) if kind == "full" else (attend_o, ("o",))
    again = testing.evaluate(lambda y: checkpoint(f, y, use_reentrant=False), x, use)
    assert_same(again, testing.evaluate(f, x, use))


HOOKS = {
    "every other number": lambda x: torch.stack([x, x], -1)[..., 0],
    "rows apart": lambda x: torch.nn.functional.pad(x, (0, 4))[..., :-4],  # not by multiples of 16 bytes
    "transposed": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2) if x.ndim >= 3 else x,
}


@pytest.mark.parametrize("hook", [*HOOKS, "save_on_cpu"])
@pytest.mark.parametrize("kind", ["plain", "full"])
@pytest.mark.parametrize("backend", DERIVED)
def test_hooks_of_saved_tensors(backend, kind, hook):
    """They may hand back other strides. The last calls are prepared."""
    where = {"N_Q": 700, "device": "cuda"} if torch.cuda.is_available() else {"N_Q": 70}
    options = {"sinks": True, "H_KV": 2, "causal": True} if kind == "full" else {}
    x = testing.inputs(1, 4, D=64, dtype=HALF, **where, **options)
    serving(x, backend, with_lse=kind == "full")
    f, use = (attend, ("o", "lse")) if kind == "full" else (attend_o, ("o",))

    def hooked(x: testing.Inputs):
        graph = torch.autograd.graph
        with graph.saved_tensors_hooks(lambda t: t, HOOKS[hook]) if hook in HOOKS else graph.save_on_cpu():
            return f(x, backend)

    for _ in range(3):
        found = testing.evaluate(hooked, x, use)
        testing.compare(x, found._replace(lse=testing.reference(x, use).lse.float()), use)


# ------------------------------------------------------------------------------------ the cache of plans


@pytest.fixture(params=[False, True], ids=["forward", "quick"])
def plans(monkeypatch, request):
    """An empty cache, and the number of times a call was checked in full; with and without a kernel's shortest way."""
    monkeypatch.setattr(cache, "_plans", {})
    monkeypatch.setattr(cache, "_recent", {})
    checked, check = [], op.check_inputs
    monkeypatch.setattr(op, "check_inputs", lambda *args: checked.append(1) or check(*args))
    if request.param:
        for name in ("sdpa", "eager"):
            slow = dispatch.kernels("flash")[name]
            monkeypatch.setitem(
                dispatch._kernels["flash"], name, slow._replace(prepare=functools.partial(shortest, slow))
            )
        dispatch.pick.cache_clear()
    yield checked
    dispatch.pick.cache_clear()


def shortest(kernel: dispatch.Kernel, spec: FlashSpec, x: Residuals):
    """As the kernels for GPUs have it: knows the spec and nothing else."""
    if spec.wants_lse or spec.has_sinks or spec.sequences is not None:
        return None
    return lambda *tensors: (kernel.forward(spec, Residuals(*tensors))[0], None)


@pytest.mark.parametrize("grad", [False, True])
def test_a_second_call_takes_the_fast_path(plans, grad):
    x = testing.inputs(1, 2, 20, 16, causal=True)
    for y in (x, testing.inputs(1, 2, 20, 16, causal=True, seed=1), x):
        if grad:
            out = testing.evaluate(attend_o, y, ("o",))
            assert_same(out, testing.evaluate(functools.partial(attend_o, backend="sdpa"), y, ("o",)))
        else:
            assert torch.equal(attend_o(y)[0], attend_o(y, "sdpa")[0])
    assert len(plans) == 2  # one for "auto", one for "sdpa"
    assert len(cache._plans) == 2


# One change each to a call that has a plan, which must not serve it.
OTHER_CALLS = {
    "window": {"window": (3, None)},
    "window of zero": {"window": (0, 0)},
    "not causal": {"causal": False},
    "top left": {"causal": "top_left"},
    "softcap": {"softcap": 2.0},
    "scale": {"scale": 0.7},
    "shape": {"N_Q": 21},
    "keys": {"N_KV": 31},
    "heads": {"H_KV": 1},
    "dtype": {"dtype": torch.float64},
    "strides": {"layout": "bnhd"},
    "fused": {"layout": "fused"},
    "sinks": {"sinks": True},
    "packed": {"lengths_q": [20], "lengths_k": [30]},
}  # fmt: skip


@pytest.mark.parametrize("what", OTHER_CALLS)
def test_a_plan_serves_only_its_like(plans, what):
    plain = {"H": 2, "N_Q": 20, "N_KV": 30, "causal": True}
    x = testing.inputs(**plain)
    attend_o(x)
    other = testing.inputs(**plain | OTHER_CALLS[what])
    results = [attend_o(other)[0] for _ in range(2)]
    assert len(plans) == 2
    for o in results:
        assert o.dtype == other.q.dtype
        testing.assert_close("o", o, testing.low_precision(other).o, testing.reference(other).o, roundings=8)


def test_a_plan_knows_whether_there_is_a_gradient(plans):
    x = testing.inputs(1, 2, 20, 16)
    for _ in range(2):
        assert not attend_o(x)[0].requires_grad
        for name in ("q", "k", "v"):
            one = x._replace(**{name: getattr(x, name).clone().requires_grad_()})
            assert attend_o(one)[0].requires_grad
            with torch.no_grad():
                assert not attend_o(one)[0].requires_grad
            (gradient,) = torch.autograd.grad(attend_o(one)[0].sum(), getattr(one, name))
            assert gradient.shape == getattr(x, name).shape
        assert not attend_o(x)[0].requires_grad
    assert len(cache._plans) == 2


CIRCUMSTANCES = [
    "grad", "no_grad", "inference", "Parameter", "negated", "autocast", "dual", "mode", "subclass", "vmap",
    "grad of func", "fake", "compile", "nested", "one tensor twice",
]  # fmt: skip


@pytest.fixture
def recognised(plans, monkeypatch):
    """Whether a call is served without looking at its tensors one by one."""
    plannable, looked = cache._plannable, []
    monkeypatch.setattr(cache, "_plannable", lambda given: looked.append(1) or plannable(given))
    return lambda call, *args: (looked.clear(), call(*args), not looked)[2]


@pytest.mark.parametrize("plans", [True], indirect=True, ids=["quick"])
def test_the_last_few_calls_are_recognised_at_once(recognised):
    shapes = [testing.inputs(1, 2, n, 16) for n in range(20, 20 + cache.MAX_RECENT)]
    for x in shapes:
        assert not recognised(attend_o, x)
    for x in (*shapes, *reversed(shapes)):
        assert recognised(attend_o, x)
    assert not recognised(attend_o, testing.inputs(1, 2, 7, 16))  # and takes the place of the oldest
    assert not recognised(attend_o, shapes[0])
    assert recognised(attend_o, shapes[0])
    assert not recognised(lambda: fulmen.flash_attention(*shapes[0][:3], causal=True))  # other options, other calls
    assert recognised(lambda: fulmen.flash_attention(*shapes[0][:3]))


@pytest.mark.parametrize("plans", [True], indirect=True, ids=["quick"])
@pytest.mark.parametrize("what", CIRCUMSTANCES)
def test_what_is_not_as_it_was_is_looked_at(recognised, what):
    """A call that has been recognised, in circumstances in which it is another one."""
    x = testing.inputs(1, 2, 20, 16)
    plain = attend_o(x)[0]
    assert recognised(attend_o, x)
    f = functools.partial(fulmen.flash_attention, k=x.k, v=x.v)
    if what == "grad":
        assert not recognised(lambda: f(x.q.clone().requires_grad_()))
        assert f(x.q.clone().requires_grad_()).requires_grad
    elif what == "no_grad":  # what asks for a gradient and gets none is not told from what gets one
        q = x.q.clone().requires_grad_()
        with torch.no_grad():
            assert not any(f(q).requires_grad for _ in range(2))
        assert [f(q).requires_grad, f(x.q).requires_grad] == [True, False]
    elif what == "inference":
        with torch.inference_mode():
            assert not recognised(attend_o, x)
            assert recognised(attend_o, x)
            assert attend_o(x)[0].is_inference()
        assert not attend_o(x)[0].is_inference()
    elif what == "nested":  # about which the guards must not be asked
        with pytest.raises((RuntimeError, ValueError)):
            f(torch.nested.nested_tensor([x.q[0], x.q[0]]))
    elif what == "one tensor twice":
        o = fulmen.flash_attention(x.q, x.k, x.k, backend="eager")
        for _ in range(3):
            assert not recognised(lambda: fulmen.flash_attention(x.q, x.k, x.k))
            torch.testing.assert_close(fulmen.flash_attention(x.q, x.k, x.k), o)
    elif what == "Parameter":
        assert not recognised(lambda: f(torch.nn.Parameter(x.q, requires_grad=False)))
    elif what == "negated":
        assert torch.equal(f(torch._neg_view(-x.q)), plain)
    elif what == "autocast":
        with torch.autocast("cpu", torch.bfloat16):
            assert attend_o(x)[0].dtype == torch.bfloat16
        assert torch.equal(attend_o(x)[0], plain)
    elif what == "dual":
        with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="forward-mode"):
            f(forward_ad.make_dual(x.q, x.q))
    elif what == "mode":
        seen = []

        class Mode(TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                seen.append(str(func))
                return func(*args, **(kwargs or {}))

        with Mode():
            attend_o(x)
        assert any("flash_forward" in name for name in seen)
    elif what == "subclass":
        assert type(fulmen.flash_attention(*(TwoTensor(t, t) for t in x[:3]))) is TwoTensor
    elif what == "vmap":
        assert not recognised(lambda: torch.vmap(f)(x.q.expand(3, *x.q.shape)))
    elif what == "grad of func":
        with pytest.raises(NotImplementedError, match=r"torch\.func"):
            torch.func.grad(lambda q: f(q).sum())(x.q)
    elif what == "fake":
        with FakeTensorMode(allow_non_fake_inputs=True):
            assert isinstance(attend_o(x)[0], FakeTensor)
    else:
        assert torch.equal(torch.compile(f, backend="eager", fullgraph=True)(x.q), plain)
    assert recognised(attend_o, x) or recognised(attend_o, x)
    assert torch.equal(attend_o(x)[0], plain)


def test_a_plan_knows_whether_lse_is_wanted(plans):
    """sdpa has no gradient of lse: a plan without must not serve a call with it."""
    x = testing.inputs(1, 2, 20, 16)
    testing.evaluate(attend_o, x, ("o",))
    both = testing.evaluate(attend, x)
    assert_same(both, testing.evaluate(functools.partial(attend, backend="eager"), x))
    testing.evaluate(attend_o, x, ("o",))
    assert_same(testing.evaluate(attend, x), both)


def test_a_bad_call_leaves_no_plan(plans):
    x = testing.inputs(1, 2, 20, 16)
    for _ in range(2):
        with pytest.raises(ValueError, match="window"):
            fulmen.flash_attention(x.q, x.k, x.v, window=(-1, 0))
        with pytest.raises(NotImplementedError, match="no window"):
            fulmen.flash_attention(x.q, x.k, x.v, window=(1, 0), backend="sdpa")
    assert not cache._plans


def test_plans_do_not_pile_up(plans, monkeypatch):
    monkeypatch.setattr(cache, "MAX_PLANS", 5)
    for n in range(1, 14):
        x = testing.inputs(1, 1, n, 16)
        for _ in range(2):
            attend_o(x)
        assert len(cache._plans) <= 5
    assert len(plans) == 13


# --------------------------------------------------------------------------------------- inputs and bits


@pytest.mark.parametrize("backend", BACKENDS)
def test_inputs_are_not_modified(backend):
    x = testing.inputs(1, 2, 33, 16, causal=True, dtype=HALF)
    serving(x, backend)
    before = [y.clone() if isinstance(y, torch.Tensor) else y for y in x]
    testing.evaluate(testing.backend(backend, with_lse=False), x, ("o",))
    for name, a, b in zip(x._fields, before, x, strict=True):
        assert a is b or a == b if not isinstance(a, torch.Tensor) else torch.equal(a, b), name


@pytest.mark.parametrize("backend", BACKENDS)
def test_same_bits_every_run(backend):
    torch.use_deterministic_algorithms(False)  # without help from PyTorch
    x = testing.inputs(1, 4, 40, 16, H_KV=1, causal=True, dtype=HALF)
    if backend == "sdpa":  # which has no such gradient in fp16
        x = x.to(torch.float32)
    serving(x, backend)
    first = testing.evaluate(testing.backend(backend, with_lse=False), x, ("o",))
    assert_same(testing.evaluate(testing.backend(backend, with_lse=False), x, ("o",)), first)


@pytest.mark.parametrize("backend", DERIVED)
def test_double_backward_raises(backend):
    x = testing.inputs(1, 2, 20, 16, dtype=HALF)
    serving(x, backend)
    q = x.q.requires_grad_()
    o = fulmen.flash_attention(q, x.k, x.v, backend=backend)
    (dq,) = torch.autograd.grad((o * x.do).sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="second derivative"):
        dq.sum().backward()


def test_reference_is_twice_differentiable():
    x = testing.inputs(1, 1, 4, 3, N_KV=5, causal=True, sinks=True, dtype=torch.float64)
    leaves = [y.requires_grad_() for y in (x.q, x.k, x.v, x.sinks)]
    assert torch.autograd.gradgradcheck(
        lambda q, k, v, s: fulmen.flash_attention(q, k, v, sinks=s, causal=True, backend="reference"), leaves
    )


@pytest.mark.parametrize("options", [{"N_KV": 4}, {"lengths_q": [3, 0, 1, 2], "lengths_k": [2, 1, 2, 2]}],
                         ids=["batch", "packed"])  # fmt: skip
def test_gradcheck(options):
    """Of o and lse; every row sees a key, as lse has no finite differences where it is -inf."""
    options = {"E": 2, "H_KV": 1, "window": (2, 1), "softcap": 3.0, "sinks": True, "causal": "top_left"} | options
    x = testing.inputs(1, 2, 4, 3, **options, dtype=torch.float64)
    leaves = [y.detach().requires_grad_() for y in (x.q, x.k, x.v, x.sinks)]
    assert torch.autograd.gradcheck(
        lambda q, k, v, s: attend(x._replace(q=q, k=k, v=v, sinks=s), backend="eager"), leaves
    )


def test_only_some_inputs_need_gradients():
    x = testing.inputs(1, 2, 20, 16, sinks=True)
    whole = testing.evaluate(attend, x)
    for name in ("q", "k", "v", "sinks"):
        leaf = getattr(x, name).detach().requires_grad_()
        o, lse = attend(x._replace(**{name: leaf}))
        (gradient,) = torch.autograd.grad((o, lse), leaf, (x.do, x.dlse))
        assert torch.equal(gradient, getattr(whole, f"d{name}")), name


# ------------------------------------------------------------------------------------- layouts, subclasses


@pytest.mark.parametrize("backend", DERIVED)
@pytest.mark.parametrize("layout", ["bhnd", "bnhd", "fused"])
def test_layout_follows_the_inputs(backend, layout):
    """A (B, N, H, D) model gets (B, N, H, E) memory back, and gradients like their inputs."""
    x = testing.inputs(2, 2, 33, 16, layout=layout, dtype=HALF)
    serving(x, backend)
    out = testing.evaluate(testing.backend(backend, with_lse=False), x, ("o",))
    for name in ("o", "dq", "dk", "dv"):
        y = getattr(out, name)
        assert (y if layout == "bhnd" else y.transpose(1, 2)).is_contiguous(), name


@pytest.mark.parametrize("implementation", [None, "cpu"])
def test_sdpa_takes_an_implementation_by_name(implementation):
    x = testing.inputs(1, 2, 20, 16)
    tensors, spec = Residuals(x.q, x.k, x.v), x.spec(needs_grad=True)
    o, lse = sdpa.forward(spec, tensors, implementation=implementation)
    assert torch.equal(o, attend_o(x, "sdpa")[0])
    gradients = sdpa.backward(spec, tensors, o, lse, x.do, None, implementation=implementation)
    whole = testing.evaluate(functools.partial(attend_o, backend="sdpa"), x, ("o",))
    assert all(torch.equal(a, b) for a, b in zip(gradients[:3], whole[2:5], strict=True))


def test_no_graph_is_kept_without_grad():
    x = testing.inputs(1, 2, 40, 16)
    with torch.no_grad():
        assert not fulmen.flash_attention(x.q.requires_grad_(), x.k, x.v).requires_grad
    assert fulmen.flash_attention(x.q, x.k, x.v).requires_grad


@pytest.mark.parametrize("backend", ["auto", "eager", "reference"])
def test_inference_mode(backend):
    x = testing.inputs(1, 2, 20, 16, causal=True)
    want = attend_o(x, backend)[0]
    with torch.inference_mode():
        for _ in range(2):
            got = attend_o(x, backend)[0]
            assert got.is_inference()
            assert torch.equal(got, want)
        made = x._replace(q=x.q.clone(), k=x.k.clone(), v=x.v.clone())
        assert torch.equal(attend_o(made, backend)[0], want)
    assert torch.equal(attend_o(x, backend)[0], want)
    assert testing.evaluate(functools.partial(attend_o, backend=backend), x, ("o",)).dq.abs().max() > 0


def test_a_deep_copy_of_a_module():
    class Attention(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.project, self.sinks = torch.nn.Linear(32, 96), torch.nn.Parameter(torch.randn(2))

        def forward(self, x):
            q, k, v = self.project(x).view(*x.shape[:2], 3, 2, 16).permute(2, 0, 3, 1, 4)
            return fulmen.flash_attention(q, k, v, sinks=self.sinks, causal=True).transpose(1, 2).flatten(2)

    module, x = Attention(), torch.randn(2, 20, 32)
    module(x).sum().backward()
    twin = copy.deepcopy(module)
    twin.zero_grad()
    twin(x).sum().backward()
    for a, b in zip(module.parameters(), twin.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


def test_fake_tensors_and_subclasses_go_through_the_operator():
    """Also where q itself is plain: the fast path must not look past the other arguments."""
    x = testing.inputs(1, 2, 40, 16)
    attend_o(x)  # a plan for these shapes
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(x.k)
        assert isinstance(fulmen.flash_attention(mode.from_tensor(x.q), fake, fake), FakeTensor)
    double = TwoTensor(x.v, x.v * 3)
    o = fulmen.flash_attention(x.q, x.k, double)
    assert isinstance(o, TwoTensor)
    torch.testing.assert_close(o.b, 3 * o.a, rtol=1e-4, atol=1e-3)


def test_meta_tensors():
    x = testing.inputs(2, 4, 40, 16, E=24, H_KV=2, N_KV=50, device="meta")
    o, lse = attend(x)
    assert (o.shape, lse.shape, o.device.type) == ((2, 4, 40, 24), (2, 4, 40), "meta")


def test_vmap():
    q, k, v = (testing.inputs(3, 2, 40, 16)[i].unsqueeze(1) for i in range(3))
    torch.testing.assert_close(
        torch.vmap(fulmen.flash_attention)(q, k, v)[:, 0], fulmen.flash_attention(q[:, 0], k[:, 0], v[:, 0])
    )


def test_eager_bounds_its_memory():
    """The logits of a panel, not of the whole call: 4 GiB would be 64 times the bound."""
    x = testing.inputs(1, 1, 32768, 16)
    spec = x.spec()
    for panel in eager.panels(spec, Residuals(x.q, x.k, x.v)):
        assert 4 * (panel.q1 - panel.q0) * (panel.k1 - panel.k0) <= eager.PANEL_BYTES


# ------------------------------------------------------------------------------------------------ import


def test_import_loads_no_compiler_and_no_backend(fresh_process):
    """torch itself may import triton; fulmen must not be what does. Touching the op loads op.py alone."""
    code = "import sys, torch; before = set(sys.modules); import fulmen; fulmen.flash_attention;"
    code += " print(*sorted(set(sys.modules) - before))"
    added = fresh_process(code).split()
    assert "fulmen.flash.op" in added
    modules = ("triton", "torch._dynamo", "flash_attn", *(f"fulmen.flash.{name}" for name in BACKENDS))
    assert not [name for name in added if name.startswith(modules)]
