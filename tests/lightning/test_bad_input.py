"""Every wrong argument has one error that names it and prints what was given. Nothing is silently cast."""

from __future__ import annotations

import functools
import re

import pytest
import torch

import fulmen
from fulmen import dispatch, hardware
from fulmen.lightning.spec import LightningSpec
from fulmen.testing import lightning as testing

GOOD = testing.inputs(2, 4, 8, 16, E=24, H_KV=2, decay="mixed", initial_state=True)
PACKED = testing.inputs(H=4, D=16, E=24, lengths=[3, 5], initial_state=True)
STATE = GOOD.initial_state
META = torch.device("meta")
CUDA = torch.device("cuda", 0)


def call(x: testing.Inputs, **changes):
    x = x._replace(**changes)
    return fulmen.lightning_attention(x.q, x.k, x.v, x.decay, **x.options())


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def change(**arguments):
    return arguments


# argument -> a value for it, and what the message must say (all of it)
WRONG = {
    "q of rank 3": (change(q=GOOD.q[0]), ["q has 3 dimensions", "(B, heads, N, head dim)", "q (4, 8, 16)"]),
    "k of rank 5": (change(k=GOOD.k[None]), ["k has 5 dimensions", "k (1, 2, 2, 8, 16)"]),
    "v of rank 2": (change(v=GOOD.v[0, 0]), ["v has 2 dimensions", "v (8, 24)"]),
    "B of k": (change(k=GOOD.k[:1]), ["k must share B=2 and N=8", "k (1, 2, 8, 16)"]),
    "B of v": (change(v=GOOD.v[:1]), ["v must share B=2 and N=8", "v (1, 2, 8, 24)"]),
    "N of k": (change(k=GOOD.k[:, :, :7]), ["k must share B=2 and N=8", "k (2, 2, 7, 16)"]),
    "N of v": (change(v=GOOD.v[:, :, 1:]), ["v must share B=2 and N=8", "v (2, 2, 7, 24)"]),
    "D of k": (change(k=GOOD.v), ["k has head dim 24", "q's D=16"]),
    "heads of v": (change(v=GOOD.v[:, :1]), ["v has 1 heads", "as many as k, 2", "v (2, 1, 8, 24)"]),
    "heads do not divide": (
        change(k=GOOD.k.repeat(1, 2, 1, 1)[:, :3], v=GOOD.v.repeat(1, 2, 1, 1)[:, :3]),
        ["k and v have 3 heads", "divide q's H=4", "k (2, 3, 8, 16)"],
    ),
    "no kv heads": (change(k=GOOD.k[:, :0], v=GOOD.v[:, :0]), ["k and v have 0 heads", "H=4"]),
    "D too large": (
        change(q=torch.ones(2, 4, 8, 257), k=torch.ones(2, 2, 8, 257)),
        ["head dims must be 1 to 256", "D=257, E=24", "k (2, 2, 8, 257)"],
    ),
    "D zero": (change(q=GOOD.q[..., :0], k=GOOD.k[..., :0]), ["head dims must be 1 to 256", "D=0"]),
    "E too large": (change(v=torch.ones(2, 2, 8, 300)), ["head dims must be 1 to 256", "v (2, 2, 8, 300)"]),
    "E zero": (change(v=torch.ones(2, 2, 8, 0)), ["head dims must be 1 to 256", "E=0"]),
    "integer q": (change(q=GOOD.q.int()), ["q is torch.int32", "bfloat16, float16, float32 or float64"]),
    "dtype of k": (change(k=GOOD.k.bfloat16()), ["k is torch.bfloat16", "q's torch.float32", "cast"]),
    "dtype of v": (change(v=GOOD.v.double()), ["v is torch.float64", "q's torch.float32"]),
    "device of k": (change(k=GOOD.k.to(META)), ["k is on meta", "q's cpu"]),
    "device of v": (change(v=GOOD.v.to(META)), ["v is on meta", "q's cpu"]),
    "strides of q": (
        change(q=GOOD.q.mT.contiguous().mT),
        ["q's last dimension", "strides are (512, 128, 1, 8)", ".contiguous()"],
    ),
    "strides of k": (change(k=GOOD.k.repeat(1, 1, 1, 2)[..., ::2]), ["k's last dimension", "(2, 2, 8, 16)"]),
    "strides of v": (change(v=GOOD.v[..., :1].expand_as(GOOD.v)), ["v's last dimension", "(2, 2, 8, 24)"]),
    "zero scale": (change(scale=0.0), ["scale=0.0"]),
    "infinite scale": (change(scale=float("-inf")), ["scale=-inf"]),
    "nan scale": (change(scale=float("nan")), ["scale=nan"]),
    "decay shape": (change(decay=torch.ones(2)), ["decay has shape (2,)", "(H,) or (H, 1, 1)", "H=4"]),
    "decay rank": (change(decay=torch.ones(4, 1)), ["decay has shape (4, 1)"]),
    "decay scalar": (change(decay=torch.tensor(0.1)), ["decay has shape ()"]),
    "decay dtype": (change(decay=torch.ones(4).half()), ["decay is torch.float16", "float32"]),
    "decay device": (change(decay=torch.ones(4, device=META)), ["decay is on meta", "q's cpu"]),
    "negative decay": (change(decay=torch.tensor([0.0, 1.0, -0.5, 2.0])), ["decay must be finite and >= 0", "-0.5"]),
    "nan decay": (change(decay=torch.tensor([0.0, 1.0, float("nan"), 2.0])), ["decay must be finite and >= 0", "nan"]),
    "infinite decay": (change(decay=torch.tensor([0.0, 1.0, float("inf"), 2.0])), ["decay must be finite", "inf"]),
    "state shape": (
        change(initial_state=STATE[:1]),
        ["initial_state has shape (1, 4, 16, 24)", "(B, H, D, E) = (2, 4, 16, 24)"],
    ),
    "state strides": (
        change(initial_state=STATE.mT.contiguous().mT),
        ["initial_state must be contiguous", "(2, 4, 16, 24)", ".contiguous()"],
    ),
    "state transposed": (change(initial_state=STATE.mT), ["initial_state has shape (2, 4, 24, 16)"]),
    "state dtype": (change(initial_state=STATE.half()), ["initial_state is torch.float16", "float32"]),
    "state device": (change(initial_state=STATE.to(META)), ["initial_state is on meta", "q's cpu"]),
}  # fmt: skip

WRONG_PACKED = {
    "rank": (change(cu_seqlens=ints(0, 3, 8)[None]), ["cu_seqlens has shape (1, 3)", "(sequences + 1,)"]),
    "empty": (change(cu_seqlens=ints()), ["cu_seqlens has shape (0,)"]),
    "dtype": (change(cu_seqlens=ints(0, 3, 8).long()), ["cu_seqlens is torch.int64", "int32"]),
    "device": (change(cu_seqlens=ints(0, 3, 8).to(META)), ["cu_seqlens is on meta", "q's cpu"]),
    "start": (change(cu_seqlens=ints(1, 3, 8)), ["cu_seqlens must start at 0", "[1, 3, 8]"]),
    "decreasing": (change(cu_seqlens=ints(0, 9, 8)), ["cu_seqlens must not decrease", "[0, 9, 8]"]),
    "end before N": (change(cu_seqlens=ints(0, 3, 7)), ["cu_seqlens must end at N=8", "[0, 3, 7]"]),
    "end after N": (change(cu_seqlens=ints(0, 3, 9)), ["cu_seqlens must end at N=8", "[0, 3, 9]"]),
    "long, abridged": (
        change(cu_seqlens=ints(*range(100)), initial_state=None),
        ["cu_seqlens must end at N=8", "'...'", "99]"],
    ),
    "states": (
        change(initial_state=PACKED.initial_state[:1]),
        ["initial_state has shape (1, 4, 16, 24)", "(sequences, H, D, E) = (2, 4, 16, 24)"],
    ),
}  # fmt: skip


def assert_says(x: testing.Inputs, changes: dict, words: list[str]) -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011  the words are checked below
        call(x, **changes)
    for word in words:
        assert word in str(error.value)


def test_the_unchanged_arguments_are_good():
    assert call(GOOD).shape == (2, 4, 8, 24)
    assert call(PACKED).shape == (1, 4, 8, 24)


@pytest.mark.parametrize("what", WRONG)
def test_wrong_argument(what):
    assert_says(GOOD, *WRONG[what])


@pytest.mark.parametrize("what", WRONG_PACKED)
def test_wrong_packing(what):
    assert_says(PACKED, *WRONG_PACKED[what])


def test_packing_a_batch():
    assert_says(
        GOOD,
        change(cu_seqlens=ints(0, 8), initial_state=None),
        ["cu_seqlens", "B must be 1", "(2, 4, 8, 16)"],
    )


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_values_are_checked_for_every_backend(backend):
    for x, changes in ((GOOD, change(decay=-torch.ones(4))), (PACKED, change(cu_seqlens=ints(0, 3, 7)))):
        y = x._replace(**changes)
        with pytest.raises(ValueError, match=r"decay|cu_seqlens"):
            fulmen.lightning_attention(y.q, y.k, y.v, y.decay, **y.options(), backend=backend)


def test_fp64_takes_fp64_states():
    x = GOOD.to(torch.float64)
    with pytest.raises(ValueError, match=r"initial_state is torch.float32, must be torch.float64"):
        call(x, decay=GOOD.decay, initial_state=GOOD.initial_state)
    assert call(x, decay=GOOD.decay).dtype == torch.float64


def test_with_state_checks_the_same():
    with pytest.raises(ValueError, match="k must share"):
        fulmen.lightning_attention_with_state(GOOD.q, GOOD.k[:1], GOOD.v)


def test_unknown_variant():
    with pytest.raises(ValueError, match=r"variant='fast': must be one of 'chunk_loop', 'parallel'"):
        fulmen.lightning_attn_func(GOOD.q, GOOD.k, GOOD.v, variant="fast")


def test_unknown_backend():
    with pytest.raises(ValueError, match=r"backend='fast': lightning has .*eager, .*reference, .*triton.*'auto'"):
        fulmen.lightning_attention(GOOD.q, GOOD.k, GOOD.v, backend="fast")


# --------------------------------------------------------------------------------- a backend that cannot


def spec(**changes) -> LightningSpec:
    return LightningSpec(1, 2, 2, 64, 16, 16, torch.float32, torch.device("cpu"))._replace(**changes)


def h200(device):
    return hardware.TARGETS[90]


def old_gpu(device):
    return hardware.Hardware(75, 40, 65_536, 4 << 20, "a T4")


# backend, spec, facts of the machine to pretend -> the sentence. One row for each sentence a backend can say.
SENTENCES = [
    ("eager", spec(device=CUDA, sequences=2), {"fulmen.hardware.of": h200},
     "eager reads cu_seqlens on the host, which would synchronise the GPU"),
    ("triton", spec(dtype=torch.float64), {}, "computes in fp32 at most, and q is float64"),
    ("triton", spec(device=CUDA), {"fulmen.hardware.of": old_gpu},
     "needs compute capability 8.0 or later, this GPU has 7.5"),
    ("triton", spec(dtype=torch.bfloat16), {"triton.knobs.runtime.interpret": True},
     "Triton's interpreter has no bf16 products"),
    ("triton", spec(), {"triton.knobs.runtime.interpret": False},
     "needs a CUDA GPU (or, to test, Triton's interpreter), and the device is cpu"),
    ("triton", spec(device=META), {},
     "needs a CUDA GPU (or, to test, Triton's interpreter), and the device is meta"),
    ("triton_split", spec(dtype=torch.float64), {}, "computes in fp32 at most, and q is float64"),
    ("cuda", spec(), {}, "needs a CUDA GPU, and the device is cpu"),  # its others: test_cuda.py
]  # fmt: skip


@pytest.mark.parametrize(("backend", "asked", "facts", "sentence"), SENTENCES)
def test_supports_sentences(backend, asked, facts, sentence, monkeypatch):
    for name, value in facts.items():
        monkeypatch.setattr(name, value)
    assert dispatch.kernels("lightning")[backend].supports(asked) == sentence
    dispatch.pick.cache_clear()
    with pytest.raises(NotImplementedError, match=re.escape(sentence)):
        dispatch.pick("lightning", asked, backend)
    dispatch.pick.cache_clear()


def test_every_backend_serves_a_plain_call(monkeypatch):
    monkeypatch.setattr(hardware, "of", h200)
    why = dispatch.reasons("lightning", spec(device=CUDA, dtype=torch.bfloat16, D=64, E=64))
    assert set(why.values()) == {None}


def test_explicit_backend_never_falls_back():
    """fp64 on triton: auto would take eager, the name raises and shows the table."""
    q = torch.randn(1, 2, 8, 16, dtype=torch.float64)
    assert fulmen.lightning_attention(q, q, q).dtype == torch.float64
    with pytest.raises(NotImplementedError, match=r"(?s)backend='triton' cannot.*float64.*eager +ok"):
        fulmen.lightning_attention(q, q, q, backend="triton")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_nothing_is_cast(dtype):
    x = GOOD.to(dtype)
    states = torch.float64 if dtype == torch.float64 else torch.float32
    initial = GOOD.initial_state.to(states)
    o, state = fulmen.lightning_attention_with_state(x.q, x.k, x.v, GOOD.decay, initial_state=initial)
    assert (o.dtype, state.dtype) == (dtype, states)


@pytest.mark.gpu
def test_cpu_and_gpu_mixed():
    with pytest.raises(ValueError, match="k is on cuda:0, must be on q's cpu"):
        call(GOOD, k=GOOD.k.cuda())
    with pytest.raises(ValueError, match="decay is on cpu, must be on q's cuda:0"):
        call(GOOD, **{n: getattr(GOOD, n).cuda() for n in ("q", "k", "v", "initial_state")})


@pytest.mark.gpu
def test_wrong_cu_seqlens_on_a_gpu_reads_nothing_foreign():
    """Values are not looked at there but clamped: what is right of them gives right rows."""
    x = testing.inputs(H=2, D=64, lengths=[100, 100], device="cuda", dtype=torch.bfloat16)
    good = fulmen.lightning_attention(x.q, x.k, x.v, cu_seqlens=x.cu_seqlens)
    wrong = torch.tensor([0, 100, 2**30], dtype=torch.int32, device="cuda")
    assert torch.equal(fulmen.lightning_attention(x.q, x.k, x.v, cu_seqlens=wrong), good)
    wrong = torch.tensor([-5, 100, 50], dtype=torch.int32, device="cuda")
    assert torch.equal(fulmen.lightning_attention(x.q, x.k, x.v, cu_seqlens=wrong)[:, :, :100], good[:, :, :100])
    torch.cuda.synchronize()


@pytest.mark.parametrize("name", ["q", "k", "v", "decay", "initial_state", "cu_seqlens"])
def test_what_is_no_tensor(name):
    arguments = {"q": GOOD.q, "k": GOOD.k, "v": GOOD.v, name: [1.0]}
    with pytest.raises(ValueError, match=f"{name} is a list, must be a torch.Tensor"):
        fulmen.lightning_attention(**arguments)


def test_explain_checks_like_the_call():
    with pytest.raises(ValueError, match="k has head dim 8, must have q's D=16"):
        fulmen.explain("lightning", GOOD.q, GOOD.k[..., :8], GOOD.v)


def test_forward_mode_and_transforms_are_refused():
    """Rather than a zero tangent: only plain PyTorch has these derivatives."""
    sentence = "no forward-mode derivative and no torch.func rules; backend='reference'"
    with pytest.raises(NotImplementedError, match=sentence):
        torch.func.jvp(lambda q: fulmen.lightning_attention(q, GOOD.k, GOOD.v), (GOOD.q,), (GOOD.q,))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(STATE, STATE)
        with pytest.raises(NotImplementedError, match=sentence):
            fulmen.lightning_attention(GOOD.q, GOOD.k, GOOD.v, initial_state=dual)
    attend = functools.partial(fulmen.lightning_attention, k=GOOD.k, v=GOOD.v, backend="reference")
    _, tangent = torch.func.jvp(attend, (GOOD.q,), (GOOD.q,))
    torch.testing.assert_close(tangent, attend(GOOD.q))  # linear in q
