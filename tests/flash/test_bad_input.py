"""Every wrong argument has one error that names it and prints what was given. Nothing is silently cast."""

from __future__ import annotations

import functools
import re

import pytest
import torch

import fulmen
from fulmen import dispatch, hardware
from fulmen.flash import sdpa
from fulmen.flash.spec import FlashSpec
from fulmen.testing import flash as testing

GOOD = testing.inputs(2, 4, 8, 16, N_KV=10, E=24, H_KV=2, sinks=True)
PACKED = testing.inputs(H=4, D=16, lengths_q=[3, 5], lengths_k=[4, 6])
META = torch.device("meta")
CPU = torch.device("cpu")
CUDA = torch.device("cuda", 0)


def call(x: testing.Inputs, **changes):
    x = x._replace(**changes)
    return fulmen.flash_attention(x.q, x.k, x.v, **x.options())


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def change(**arguments):
    return arguments


# argument -> a value for it, and what the message must say (all of it)
WRONG = {
    "q of rank 3": (change(q=GOOD.q[0]), ["q has 3 dimensions", "(B, heads, N, head dim)", "q (4, 8, 16)"]),
    "k of rank 5": (change(k=GOOD.k[None]), ["k has 5 dimensions", "k (1, 2, 2, 10, 16)"]),
    "v of rank 2": (change(v=GOOD.v[0, 0]), ["v has 2 dimensions", "v (10, 24)"]),
    "B of k": (change(k=GOOD.k[:1]), ["k must share B=2 with q", "k (1, 2, 10, 16)"]),
    "B of v": (change(v=GOOD.v[:1]), ["v must share B=2 and N=10 with k", "v (1, 2, 10, 24)"]),
    "N of v": (change(v=GOOD.v[:, :, 1:]), ["v must share B=2 and N=10 with k", "v (2, 2, 9, 24)"]),
    "D of k": (change(k=GOOD.v), ["k has head dim 24", "q's D=16"]),
    "heads of v": (change(v=GOOD.v[:, :1]), ["v has 1 heads", "as many as k, 2", "v (2, 1, 10, 24)"]),
    "heads do not divide": (
        change(k=GOOD.k.repeat(1, 2, 1, 1)[:, :3], v=GOOD.v.repeat(1, 2, 1, 1)[:, :3]),
        ["k and v have 3 heads", "divide q's H=4", "k (2, 3, 10, 16)"],
    ),
    "no kv heads": (change(k=GOOD.k[:, :0], v=GOOD.v[:, :0]), ["k and v have 0 heads", "H=4"]),
    "D too large": (
        change(q=torch.ones(2, 4, 8, 257), k=torch.ones(2, 2, 10, 257)),
        ["head dims must be 1 to 256", "D=257, E=24", "k (2, 2, 10, 257)"],
    ),
    "D zero": (change(q=GOOD.q[..., :0], k=GOOD.k[..., :0]), ["head dims must be 1 to 256", "D=0"]),
    "E too large": (change(v=torch.ones(2, 2, 10, 300)), ["head dims must be 1 to 256", "v (2, 2, 10, 300)"]),
    "E zero": (change(v=torch.ones(2, 2, 10, 0)), ["head dims must be 1 to 256", "E=0"]),
    "integer q": (change(q=GOOD.q.int()), ["q is torch.int32", "bfloat16, float16, float32 or float64"]),
    "dtype of k": (change(k=GOOD.k.bfloat16()), ["k is torch.bfloat16", "q's torch.float32", "cast"]),
    "dtype of v": (change(v=GOOD.v.double()), ["v is torch.float64", "q's torch.float32"]),
    "device of k": (change(k=GOOD.k.to(META)), ["k is on meta", "q's cpu"]),
    "device of v": (change(v=GOOD.v.to(META)), ["v is on meta", "q's cpu"]),
    "strides of q": (
        change(q=GOOD.q.mT.contiguous().mT),
        ["q's last dimension", "strides are (512, 128, 1, 8)", ".contiguous()"],
    ),
    "strides of k": (change(k=GOOD.k.repeat(1, 1, 1, 2)[..., ::2]), ["k's last dimension", "(2, 2, 10, 16)"]),
    "strides of v": (change(v=GOOD.v[..., :1].expand_as(GOOD.v)), ["v's last dimension", "(2, 2, 10, 24)"]),
    "zero scale": (change(scale=0.0), ["scale=0.0"]),
    "infinite scale": (change(scale=float("-inf")), ["scale=-inf"]),
    "nan scale": (change(scale=float("nan")), ["scale=nan"]),
    "causal": (change(causal="left"), ["causal='left'", "False, True (the same as 'bottom_right') or 'top_left'"]),
    "causal None": (change(causal=None), ["causal=None", "must be False, True"]),
    "zero softcap": (change(softcap=0.0), ["softcap=0.0", "None or a number between"]),
    "negative softcap": (change(softcap=-3.0), ["softcap=-3.0"]),
    "nan softcap": (change(softcap=float("nan")), ["softcap=nan"]),
    "window an int": (change(window=5), ["window=5", "(left, right)"]),
    "window of three": (change(window=(1, 2, 3)), ["window=(1, 2, 3)", "(left, right)"]),
    "negative window": (change(window=(-1, 0)), ["window=(-1, 0)", "ints >= 0, or None"]),
    "window of floats": (change(window=(1.0, None)), ["window=(1.0, None)", "ints >= 0, or None"]),
    "window of bools": (change(window=(True, None)), ["window=(True, None)", "ints >= 0, or None"]),
    "sinks shape": (change(sinks=torch.ones(2)), ["sinks has shape (2,)", "(H,)", "H=4"]),
    "sinks rank": (change(sinks=torch.ones(4, 1)), ["sinks has shape (4, 1)"]),
    "sinks dtype": (change(sinks=torch.ones(4).half()), ["sinks is torch.float16", "float32"]),
    "sinks device": (change(sinks=torch.ones(4, device=META)), ["sinks is on meta", "q's cpu"]),
}  # fmt: skip

WRONG_PACKED = {
    "rank": (change(cu_seqlens_q=ints(0, 3, 8)[None]), ["cu_seqlens_q has shape (1, 3)", "(sequences + 1,)"]),
    "rank of k": (change(cu_seqlens_k=ints(0, 4, 10)[None]), ["cu_seqlens_k has shape (1, 3)", "(sequences + 1,)"]),
    "empty": (change(cu_seqlens_q=ints()), ["cu_seqlens_q has shape (0,)"]),
    "dtype": (change(cu_seqlens_q=ints(0, 3, 8).long()), ["cu_seqlens_q is torch.int64", "int32"]),
    "dtype of k": (change(cu_seqlens_k=ints(0, 4, 10).long()), ["cu_seqlens_k is torch.int64", "int32"]),
    "device": (change(cu_seqlens_k=ints(0, 4, 10).to(META)), ["cu_seqlens_k is on meta", "q's cpu"]),
    "start": (change(cu_seqlens_q=ints(1, 3, 8)), ["cu_seqlens_q must start at 0", "[1, 3, 8]"]),
    "decreasing": (change(cu_seqlens_q=ints(0, 9, 8)), ["cu_seqlens_q must not decrease", "[0, 9, 8]"]),
    "end before N": (change(cu_seqlens_q=ints(0, 3, 7)), ["cu_seqlens_q must end at N=8", "[0, 3, 7]"]),
    "end after N": (change(cu_seqlens_k=ints(0, 3, 11)), ["cu_seqlens_k must end at N=10", "[0, 3, 11]"]),
    "k alone": (change(cu_seqlens_q=None), ["cu_seqlens_k is given without cu_seqlens_q"]),
    "q alone": (change(cu_seqlens_k=None), ["cu_seqlens_k is missing", "q has N=8 and k has N=10"]),
    "sequences": (change(cu_seqlens_k=ints(0, 10)), ["the same sequences", "(3,)", "(2,)"]),
    "long, abridged": (
        change(cu_seqlens_q=ints(*range(100)), cu_seqlens_k=ints(*range(100))),
        ["cu_seqlens_q must end at N=8", "'...'", "99]"],
    ),
}  # fmt: skip


def assert_says(x: testing.Inputs, changes: dict, words: list[str]) -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011  the words are checked below
        call(x, **changes)
    for word in words:
        assert word in str(error.value)


def test_the_unchanged_arguments_are_good():
    assert call(GOOD).shape == (2, 4, 8, 24)
    assert call(PACKED).shape == (1, 4, 8, 16)


@pytest.mark.parametrize("what", WRONG)
def test_wrong_argument(what):
    assert_says(GOOD, *WRONG[what])
    if what.partition(" ")[0] != "sinks":  # without sinks a call looks for its plan before it is checked
        assert_says(GOOD._replace(sinks=None), *WRONG[what])


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_no_tensor(name):
    x = {n: getattr(GOOD, n) for n in ("q", "k", "v")} | {name: None}
    with pytest.raises((TypeError, ValueError), match=f"{name} is a NoneType, must be a torch.Tensor"):
        fulmen.flash_attention(**x)


@pytest.mark.parametrize("options", [{"scale": True}, {"softcap": True}])
def test_no_number(options):
    with pytest.raises(ValueError, match=f"{next(iter(options))}=True: must be"):
        fulmen.flash_attention(GOOD.q, GOOD.k, GOOD.v, **options)


@pytest.mark.parametrize("what", WRONG_PACKED)
def test_wrong_packing(what):
    assert_says(PACKED, *WRONG_PACKED[what])


def test_packing_a_batch():
    offsets = change(cu_seqlens_q=ints(0, 8), cu_seqlens_k=ints(0, 10))
    assert_says(GOOD, offsets, ["cu_seqlens_q", "B must be 1", "(2, 4, 8, 16)"])


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_values_are_checked_for_every_backend(backend):
    x = PACKED._replace(cu_seqlens_q=ints(0, 3, 7))
    with pytest.raises(ValueError, match="cu_seqlens_q must end at N=8"):
        fulmen.flash_attention(x.q, x.k, x.v, **x.options(), backend=backend)


def test_with_lse_checks_the_same():
    with pytest.raises(ValueError, match="k must share"):
        fulmen.flash_attention_with_lse(GOOD.q, GOOD.k[:1], GOOD.v)


@pytest.mark.parametrize("name", ["q", "k", "v", "sinks", "cu_seqlens_q", "cu_seqlens_k"])
def test_what_is_no_tensor(name):
    arguments = {"q": GOOD.q, "k": GOOD.k, "v": GOOD.v, name: [1.0]}
    with pytest.raises(ValueError, match=f"{name} is a list, must be a torch.Tensor"):
        fulmen.flash_attention(**arguments)


def test_explain_checks_like_the_call():
    with pytest.raises(ValueError, match="k has head dim 8, must have q's D=16"):
        fulmen.explain("flash", GOOD.q, GOOD.k[..., :8], GOOD.v)
    with pytest.raises(ValueError, match="window=5"):
        fulmen.explain("flash", GOOD.q, GOOD.k, GOOD.v, window=5)


def test_unknown_backend():
    with pytest.raises(ValueError, match=r"backend='metal': flash has .*eager, .*reference, .*sdpa.*'auto'"):
        fulmen.flash_attention(GOOD.q, GOOD.k, GOOD.v, backend="metal")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_nothing_is_cast(dtype):
    x = GOOD.to(dtype)
    for sinks in (None, GOOD.sinks, x.sinks):
        o, lse = fulmen.flash_attention_with_lse(x.q, x.k, x.v, sinks=sinks)
        assert (o.dtype, lse.dtype) == (dtype, torch.float64 if dtype == torch.float64 else torch.float32)


def test_forward_mode_and_transforms_are_refused():
    """Rather than a zero tangent: only plain PyTorch has these derivatives."""
    sentence = "no forward-mode derivative and no torch.func rules; backend='reference'"
    for x in (GOOD, GOOD._replace(sinks=None)):
        attend = functools.partial(fulmen.flash_attention, k=x.k, v=x.v, sinks=x.sinks)
        with pytest.raises(NotImplementedError, match=sentence):
            torch.func.jvp(attend, (x.q,), (x.q,))
        with pytest.raises(NotImplementedError, match=sentence):
            torch.func.grad(lambda q, attend=attend: attend(q).sum())(x.q)
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(x.q, x.q)
            with pytest.raises(NotImplementedError, match=sentence):
                attend(dual)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(GOOD.sinks, GOOD.sinks)
        with pytest.raises(NotImplementedError, match=sentence):
            call(GOOD, sinks=dual)
    attend = functools.partial(fulmen.flash_attention, GOOD.q, GOOD.k, backend="reference")
    _, tangent = torch.func.jvp(attend, (GOOD.v,), (GOOD.v,))
    torch.testing.assert_close(tangent, attend(GOOD.v))  # linear in v


# --------------------------------------------------------------------------------- a backend that cannot


def spec(**changes) -> FlashSpec:
    plain = FlashSpec(1, 2, 2, 64, 64, 16, 16, torch.float16, CPU, 0.25)
    return plain._replace(**changes)


def gpu(**changes) -> FlashSpec:
    return spec(device=CUDA, **changes)


def machine(arch: int, cudnn: int = 91900):
    """The facts of a GPU to pretend."""
    facts = hardware.TARGETS[90]._replace(arch=arch, cudnn=cudnn)
    return {"fulmen.hardware.of": lambda device: facts}


HUGE = {"B": 64, "H": 64, "H_KV": 64, "N_Q": 8192, "N_KV": 8192, "D": 64, "E": 64}

# backend, spec, facts of the machine to pretend -> the sentence. One row for each sentence a backend can say; those of
# flash_attn are in test_flash_attn.py.
SENTENCES = [
    ("eager", gpu(sequences=2), machine(90), "eager reads cu_seqlens on the host, which would synchronise the GPU"),
    ("reference", gpu(sequences=2), machine(90),
     "reference reads cu_seqlens on the host, which would synchronise the GPU"),
    ("reference", spec(device=torch.device("mps")), {}, "reference computes in fp64, which MPS lacks"),
    ("sdpa", spec(device=META), {}, "torch's SDPA has these operators for CPU and CUDA, and q is on meta"),
    ("sdpa", spec(sequences=2), {}, "SDPA takes no packed sequences (cu_seqlens)"),
    ("sdpa", spec(has_sinks=True), {}, "SDPA has no sinks"),
    ("sdpa", spec(softcap=3.0), {}, "SDPA has no softcap"),
    ("sdpa", spec(with_lse=True, needs_grad=True), {}, "SDPA's backward has no gradient of lse"),
    ("sdpa", spec(scale=-0.25), {},
     "SDPA's kernels mask and take the maximum before they scale, so scale must be positive"),
    ("sdpa", spec(N_KV=0), {}, "SDPA's kernels refuse empty tensors"),
    ("sdpa", spec(N_Q=32, right=0), {},
     "SDPA's is_causal counts from the first query and key, and this call from the last: N_Q=32, N_KV=64"),
    ("sdpa", spec(left=10), {}, "SDPA has no window"),
    ("sdpa", spec(right=10), {}, "SDPA has no window"),
    ("sdpa", spec(left=10, right=0), {}, "SDPA has no window"),
    ("sdpa", spec(E=24), {}, "torch's CPU kernel needs E = D, here D=16, E=24"),
    ("sdpa", spec(H_KV=1, needs_grad=True), {},
     "torch's CPU kernel adds the gradients of heads that share k and v in float16"),
    ("sdpa", gpu(dtype=torch.float64), machine(90),
     "cudnn: does not compute in float64; flash: does not compute in float64; efficient: does not compute in float64"),
    ("sdpa", gpu(D=20, E=20), machine(90),
     "cudnn: needs head dims that are multiples of 8, here D=20, E=20; flash: needs head dims that are multiples of 8, "
     "here D=20, E=20; efficient: needs head dims that are multiples of 8, here D=20, E=20"),
    ("sdpa", gpu(B=70_000), machine(90),
     "cudnn: takes at most 65535 batches and heads, here B=70000, H=2; flash: takes at most 65535 batches and heads, "
     "here B=70000, H=2; efficient: takes at most 65535 batches and heads, here B=70000, H=2"),
    ("sdpa", gpu(D=192, E=64, H_KV=1), machine(90),
     "cudnn: needs head dims up to 128 (on Hopper D = E up to 256, or D=192 with E=128), here D=192, E=64; flash: "
     "needs E = D, here D=192, E=64; efficient: would need k and v expanded to q's heads"),
    ("sdpa", gpu(N_Q=32, right=0, top_left=True, H_KV=1, D=192, E=192), machine(100),
     "cudnn: needs head dims up to 128 (on Hopper D = E up to 256, or D=192 with E=128), here D=192, E=192; flash: "
     "aligns causal attention to the last key, here N_Q=32, N_KV=64; efficient: would need k and v expanded to q's "
     "heads"),
    ("sdpa", gpu(dtype=torch.bfloat16), machine(75),
     "cudnn: is taken from compute capability 9.0 on, this GPU has 7.5; flash: needs compute capability 8.0 or later, "
     "this GPU has 7.5; efficient: needs compute capability 8.0 or later for bf16, this GPU has 7.5"),
    ("sdpa", gpu(D=200, E=200, H_KV=1, needs_grad=True), machine(89),
     "cudnn: is taken from compute capability 9.0 on, this GPU has 8.9; flash: lacks a backward for D=200 on this "
     "GPU's shared memory; efficient: would need k and v expanded to q's heads"),
    ("triton", spec(dtype=torch.float32), {}, "multiplies bf16 and fp16, and q is torch.float32"),
    ("triton", spec(D=20), {}, "head dims must be multiples of 8, 16 at least; D=20, E=16"),
    ("triton", spec(scale=-0.5), {}, "needs a positive scale, and it is -0.5"),
    ("triton", gpu(), machine(75), "needs compute capability 8.0 or later, this GPU has 7.5"),
    ("triton", spec(dtype=torch.bfloat16), {"triton.knobs.runtime.interpret": True},
     "Triton's interpreter has no bf16 products"),
    ("triton", spec(), {"triton.knobs.runtime.interpret": False},
     "needs a CUDA GPU (or, to test, Triton's interpreter), and the device is cpu"),
]  # fmt: skip

# The sentences of one implementation, where another serves the call.
LACKS = [
    ("cudnn", gpu(), machine(89), "is taken from compute capability 9.0 on, this GPU has 8.9", "flash"),
    ("cudnn", gpu(), machine(90, cudnn=91400), "needs cuDNN 9.15.1 or later, here 91400", "flash"),
    ("cudnn", gpu(N_KV=1), machine(90), "needs more than one key", "flash"),
    ("cudnn", gpu(**HUGE), machine(90), "has 32-bit strides, and a tensor has 2^31 elements or more", "flash"),
    ("cudnn", gpu(D=192, E=192), machine(100),
     "needs head dims up to 128 (on Hopper D = E up to 256, or D=192 with E=128), here D=192, E=192", "flash"),
    ("cudnn", gpu(D=192, E=128), machine(120),
     "needs head dims up to 128 (on Hopper D = E up to 256, or D=192 with E=128), here D=192, E=128", "efficient"),
    ("cudnn", gpu(needs_grad=True, deterministic=True), machine(90),
     "adds dq up in no fixed order, and torch.use_deterministic_algorithms is on", "flash"),
    ("flash", gpu(N_Q=128, N_KV=256, right=0, top_left=True), machine(90),
     "aligns causal attention to the last key, here N_Q=128, N_KV=256", "cudnn"),
    ("flash", gpu(dtype=torch.float32), machine(90), "does not compute in float32", "efficient"),
    ("flash", gpu(), machine(75), "needs compute capability 8.0 or later, this GPU has 7.5", "efficient"),
    ("efficient", gpu(H_KV=1), machine(80), "would need k and v expanded to q's heads", "flash"),
]  # fmt: skip


@pytest.fixture
def pretend(monkeypatch):
    def set_facts(facts):
        for name, value in facts.items():
            monkeypatch.setattr(name, value)
        dispatch.pick.cache_clear()

    yield set_facts
    dispatch.pick.cache_clear()


@pytest.mark.parametrize(("backend", "asked", "facts", "sentence"), SENTENCES)
def test_supports_sentences(backend, asked, facts, sentence, pretend):
    if backend not in dispatch.kernels("flash"):
        pytest.skip(f"{backend} cannot be imported here")
    pretend(facts)
    assert dispatch.kernels("flash")[backend].supports(asked) == sentence
    with pytest.raises(NotImplementedError, match=re.escape(sentence)):
        dispatch.pick("flash", asked, backend)


@pytest.mark.parametrize(("implementation", "asked", "facts", "sentence", "other"), LACKS)
def test_implementations_of_sdpa(implementation, asked, facts, sentence, other, pretend):
    pretend(facts)
    assert sdpa.unsupported_reason(asked, hardware.of(asked.device), implementation) == sentence
    assert sdpa.supports(asked) is None
    assert sdpa.chosen(asked) == other
    assert str(dispatch.choose("flash", asked, "sdpa")) == other


@pytest.mark.parametrize(("asked", "arch", "choice"), [
    (gpu(), 90, "cudnn"), (gpu(), 100, "cudnn"), (gpu(), 80, "flash"), (gpu(D=192, E=128), 90, "cudnn"),
    (gpu(H_KV=1, right=0), 90, "cudnn"), (gpu(D=256, E=256), 90, "cudnn"), (gpu(D=256, E=256), 100, "flash"),
    (gpu(E=24), 80, "efficient"),
    (gpu(N_Q=1, right=0), 90, "flash"), (gpu(dtype=torch.float32), 90, "efficient"), (spec(), 0, "cpu"),
    (gpu(N_Q=128, right=0, top_left=True), 80, "efficient"), (gpu(left=64, right=63), 80, "flash"),
])  # fmt: skip
def test_choice_of_implementation(asked, arch, choice, pretend):
    pretend(machine(arch))
    assert sdpa.supports(asked) is None
    assert sdpa.chosen(asked) == choice


def test_sdpa_without_any_implementation(pretend):
    pretend(machine(90))
    with pytest.raises(NotImplementedError, match="does not compute in float64"):
        sdpa.chosen(gpu(dtype=torch.float64))


def test_every_backend_serves_a_plain_call(pretend):
    pretend(machine(90))
    asked = gpu(dtype=torch.bfloat16, D=64, E=64)
    assert {kernel.supports(asked) for kernel in dispatch.kernels("flash").values()} == {None}


def test_explicit_backend_never_falls_back():
    """Sinks on sdpa: auto would take eager, the name raises and shows the table."""
    with pytest.raises(NotImplementedError, match=r"(?s)backend='sdpa' cannot.*SDPA has no sinks.*eager +ok"):
        fulmen.flash_attention(GOOD.q, GOOD.k, GOOD.v, sinks=GOOD.sinks, backend="sdpa")


@pytest.mark.gpu
def test_cpu_and_gpu_mixed():
    with pytest.raises(ValueError, match="k is on cuda:0, must be on q's cpu"):
        call(GOOD, k=GOOD.k.cuda())
    with pytest.raises(ValueError, match="sinks is on cpu, must be on q's cuda:0"):
        call(GOOD, **{n: getattr(GOOD, n).cuda() for n in ("q", "k", "v")})


@pytest.mark.gpu
def test_wrong_cu_seqlens_on_a_gpu_reads_nothing_foreign():
    """Values are not looked at there but clamped: what is right of them gives right rows."""
    x = testing.inputs(H=2, D=64, lengths_q=[100, 100], device="cuda", dtype=torch.bfloat16)
    good = fulmen.flash_attention(x.q, x.k, x.v, cu_seqlens_q=x.cu_seqlens_q)
    wrong = torch.tensor([0, 100, 2**30], dtype=torch.int32, device="cuda")
    assert torch.equal(fulmen.flash_attention(x.q, x.k, x.v, cu_seqlens_q=wrong), good)
    wrong = torch.tensor([-5, 100, 50], dtype=torch.int32, device="cuda")
    assert torch.equal(fulmen.flash_attention(x.q, x.k, x.v, cu_seqlens_q=wrong)[:, :, :100], good[:, :, :100])
    torch.cuda.synchronize()
