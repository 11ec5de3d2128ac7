"""The registry alone, with made-up backends of a made-up operation; then what `auto` picks for real."""

from __future__ import annotations

import importlib
import itertools
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import fulmen
from fulmen import dispatch, hardware
from fulmen.lightning.spec import LightningSpec, plain_spec
from tests.lightning import test_cuda, test_cuda_tokens

CUDA = torch.device("cuda", 0)


class Size(int):
    """A spec of the made-up operation."""

    device = torch.device("cpu")


@pytest.fixture
def toy(monkeypatch):
    """An op whose specs are sizes: `small` serves those below 10 and is fastest, `any` those below 100."""
    monkeypatch.setitem(dispatch._kernels, "toy", {})
    monkeypatch.setitem(dispatch._missing, "toy", {"gone": "cannot be imported: No module named 'cuda'"})
    monkeypatch.setattr(dispatch, "_load", lambda op: None)

    policy = SimpleNamespace(
        order=lambda spec, hw: ("small", "any"),
        choose=lambda spec, hw, name: dispatch.Choice(name, name, None, 1, name),
    )
    monkeypatch.setattr(dispatch, "policy", lambda op: policy)
    monkeypatch.setattr(hardware, "of", lambda device: None)

    def add(name: str, limit: int) -> None:
        def supports(spec):
            return None if spec < limit else f"{spec} is not below {limit}"

        dispatch.register("toy", name, supports=supports, forward=print, backward=print)

    add("any", 100)
    add("small", 10)
    dispatch.pick.cache_clear()
    yield "toy"
    dispatch.pick.cache_clear()


def test_auto_takes_the_first_that_supports(toy):
    assert dispatch.pick(toy, Size(3)).name == "small"
    assert dispatch.pick(toy, Size(30)).name == "any"


def test_a_backend_the_policy_does_not_know_comes_last(toy):
    dispatch.register(toy, "new", supports=lambda _: None, forward=print, backward=print)
    assert [kernel.name for kernel in dispatch.candidates(toy, Size(3))] == ["small", "any", "new"]
    assert dispatch.pick(toy, Size(300)).name == "new"


def test_auto_leaves_what_has_no_backward_to_those_who_ask(toy):
    dispatch.register(toy, "oracle", supports=lambda _: None, forward=print, backward=None)
    assert dispatch.pick(toy, Size(3)).name == "small"
    assert dispatch.pick(toy, Size(3), "oracle").name == "oracle"


def test_auto_with_none_left_shows_every_reason(toy):
    with pytest.raises(NotImplementedError) as error:
        dispatch.pick(toy, Size(300))
    for sentence in ("no toy backend", "300 is not below 10", "300 is not below 100", "cannot be imported"):
        assert sentence in str(error.value)


def test_by_name_works_or_raises(toy):
    assert dispatch.pick(toy, Size(3), "any").name == "any"
    with pytest.raises(NotImplementedError, match=r"backend='small' cannot.*: 30 is not below 10"):
        dispatch.pick(toy, Size(30), "small")
    with pytest.raises(NotImplementedError, match="cannot be imported: No module named 'cuda'"):
        dispatch.pick(toy, Size(3), "gone")
    with pytest.raises(ValueError, match="backend='fast': toy has any, gone, small, or 'auto'"):
        dispatch.pick(toy, Size(3), "fast")


def test_reasons_are_fastest_first(toy):
    why = dispatch.reasons(toy, Size(30))
    assert list(why) == ["small", "any", "gone"]
    assert (why["small"], why["any"]) == ("30 is not below 10", None)


def test_a_backend_that_cannot_be_imported_stays_in_the_table(monkeypatch):
    """As on a machine without triton: the module is found, its import fails, the others still serve."""
    monkeypatch.setitem(dispatch._kernels, "lightning", dict(dispatch.kernels("lightning")))
    dispatch._kernels["lightning"].pop("triton_split")
    monkeypatch.setitem(dispatch._missing, "lightning", {})
    monkeypatch.setitem(sys.modules, "fulmen.lightning.triton_split", None)  # import raises ImportError
    dispatch._load.cache_clear()
    try:
        assert "triton_split" not in dispatch.kernels("lightning")
        why = dispatch.reasons("lightning", plain_spec(torch.device("cpu")))
        assert why["triton_split"].startswith("cannot be imported: ")
        assert why["eager"] is None
    finally:
        monkeypatch.undo()
        dispatch._load.cache_clear()
        dispatch.kernels("lightning")


def test_every_file_of_an_operation_but_its_story_is_a_backend():
    files = {path.stem for path in Path(dispatch.__file__).with_name("lightning").glob("*.py")}
    story = {"__init__", "op", "plan", "policy", "slopes", "spec", "sweeps", "tokens"}
    assert set(dispatch.kernels("lightning")) == files - story


def spec(**changes) -> LightningSpec:
    return plain_spec(CUDA)._replace(**changes)


@pytest.mark.parametrize(
    ("asked", "chosen"),
    [
        (spec(), "cuda"),
        (spec(D=128, E=128), "cuda"),
        (spec(has_decay=False), "cuda"),
        (spec(B=1, H=8, H_KV=8, N=65536), "cuda"),
        (spec(B=1, H=8, H_KV=8, N=65536, sequences=4), "cuda"),
        (spec(B=1, H=32, N=65536, sequences=64), "cuda"),
        (spec(H_KV=8), "triton"),
        (spec(D=128), "triton"),
        (spec(D=128, per_token=True), "cuda"),
        (spec(D=128, per_token=True, groups=8), "cuda"),
        (spec(per_token=True), "cuda"),
        (spec(D=256, E=256), "triton"),
        (spec(dtype=torch.float16), "triton"),
        (spec(dtype=torch.float32), "triton"),
        (spec(dtype=torch.float64), "eager"),
        (spec(dtype=torch.float16, B=1, H=8, N=65536), "triton_split"),
        (spec(dtype=torch.float16, B=1, H=8, N=512), "triton"),
        (spec(dtype=torch.float16, B=1, H=8, N=65536, sequences=4), "triton_split"),
        (spec(dtype=torch.float16, B=1, H=32, N=65536, sequences=64), "triton"),
        (spec(B=1, H=8, H_KV=4, N=65536), "triton_split"),
        (spec(device=torch.device("cpu"), dtype=torch.float32), "eager"),
        (spec(device=torch.device("cpu"), dtype=torch.bfloat16, sequences=4), "eager"),
    ],
)
def test_what_auto_picks_on_an_h200(asked, chosen, monkeypatch, compiled_elsewhere):
    """What cuda serves; else few heads and many rows are split. A CPU never gets the interpreter."""
    compiled_elsewhere([*test_cuda.kernels(), *test_cuda_tokens.kernels()])
    real = hardware.of
    monkeypatch.setattr(hardware, "of", lambda d: hardware.TARGETS[90] if d.type == "cuda" else real(d))
    dispatch.pick.cache_clear()
    assert dispatch.pick("lightning", asked).name == chosen
    dispatch.pick.cache_clear()


def test_explain_says_which_and_why():
    q = torch.randn(1, 2, 8, 16, dtype=torch.float64)
    text = fulmen.explain("lightning", q, q, q, torch.ones(2))
    assert "has_decay=True" in text
    assert "computes in fp32 at most, and q is float64" in text
    assert 'reference     ok (only by name, never by "auto")\nauto: eager' in text
    assert text.endswith("auto: eager")
    with pytest.raises(ValueError, match="op='flesh': fulmen has lightning"):
        fulmen.explain("flesh", q, q, q)


Q = torch.ones(1, 2, 8, 16)
OFFSETS = torch.tensor([0, 5, 9], dtype=torch.int32)
STEP = (Q[:, :, :1], Q[:, :, :1], Q[:, :, :1], torch.ones(2), torch.zeros(3, 2, 16, 16))
WRONG_VALUES = {
    "decay": ("lightning", (Q, Q, Q, torch.tensor([1.0, -1.0])), {}),
    "offsets of lightning": ("lightning", (Q, Q, Q), {"cu_seqlens": OFFSETS}),
    "offsets of flash": ("flash", (Q, Q, Q), {"cu_seqlens_q": OFFSETS}),
    "offsets over a cache": (
        "flash", (Q, Q.expand(2, 2, 8, 16), Q.expand(2, 2, 8, 16)),
        {"cu_seqlens_q": OFFSETS, "kv_lengths": torch.tensor([8, 8], dtype=torch.int32)},
    ),
    "decay of a step": ("step", (*STEP[:3], -STEP[3], STEP[4]), {}),
}  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG_VALUES)
@torch.no_grad()
def test_explain_refuses_the_values_that_the_call_refuses(wrong):
    op, args, options = WRONG_VALUES[wrong]
    call = {"lightning": fulmen.lightning_attention, "flash": fulmen.flash_attention, "step": fulmen.lightning_step}[op]
    with pytest.raises(ValueError, match=r".") as error:
        call(*args, **options)
    with pytest.raises(ValueError, match=re.escape(str(error.value))):
        fulmen.explain(op, *args, **options)


def test_explain_names_arguments_that_the_operation_does_not_take():
    says = "explain('lightning', ...) got an unexpected keyword argument 'decays'; it takes q, k, v, decay, scale, "
    with pytest.raises(TypeError, match=re.escape(says)):
        fulmen.explain("lightning", Q, Q, Q, decays=None)
    with pytest.raises(
        TypeError, match=re.escape("explain('step', ...) missing a required argument: 'k'; it takes q,")
    ):
        fulmen.explain("step", Q)


@pytest.mark.parametrize("backend", [["eager"], {"eager": 1}, None, 3])
def test_what_is_no_string_is_refused_as_an_unknown_name_is(backend):
    q = torch.randn(1, 2, 8, 16)
    says = re.escape(f"backend={backend!r}: lightning has cuda, eager, reference, triton, triton_split, or 'auto'")
    with pytest.raises(ValueError, match=says):
        fulmen.lightning_attention(q, q, q, backend=backend)
    with pytest.raises(ValueError, match=says):
        fulmen.explain("lightning", q, q, q, backend=backend)
    with pytest.raises(ValueError, match=re.escape(f"backend={backend!r}: flash has ")):
        fulmen.explain("flash", q, q, q, backend=backend)


def test_report_names_every_backend():
    names = [name for name, _ in dispatch.report("lightning", torch.device("cpu"))]
    assert sorted(names) == sorted(dispatch.kernels("lightning"))


def test_a_backend_without_backward_is_differentiated_as_it_is(monkeypatch):
    oracle = dispatch.kernels("lightning")["reference"]
    monkeypatch.setitem(dispatch.kernels("lightning"), "oracle", oracle._replace(name="oracle"))
    q = torch.randn(1, 2, 8, 16, requires_grad=True)
    fulmen.lightning_attention(q, q, q, backend="oracle").sum().backward()
    assert q.grad is not None


POLICIES = """
import sys, torch
before = set(sys.modules)  # torch may import some of these
from fulmen.flash import policy
from fulmen.lightning import policy
wrong = {name for name in sys.modules if "triton" in name or "cuda" in name} - before
sys.exit(", ".join(wrong) or None)
"""


def test_a_policy_imports_no_compiler(fresh_process):
    fresh_process(POLICIES)


@pytest.mark.parametrize("hw", hardware.TARGETS.values(), ids=lambda hw: hw.name)
@pytest.mark.parametrize("op", dispatch.OPS)
def test_a_policy_always_answers_the_same(op, hw):
    """For every backend and "auto", which is the first in the order; without asking a device."""
    policy = dispatch.policy(op)
    for D, dtype in itertools.product((64, 80, 256), (torch.bfloat16, torch.float64)):
        asked = importlib.import_module(f"fulmen.{op}.spec").plain_spec(CUDA)._replace(D=D, E=D, dtype=dtype)
        names = policy.order(asked, hw)
        assert names == policy.order(asked, hw)
        assert set(dispatch.kernels(op)) <= set(names)
        assert names[-1] == "reference"  # which "auto" does not take
        assert policy.choose(asked, hw) == policy.choose(asked, hw, names[0])
        for name in (*names, "a new one"):
            choice = policy.choose(asked, hw, name)
            assert choice == policy.choose(asked, hw, name)
            assert (choice.backend, choice.splits >= 1) == (name, True)
            assert hash(choice) == hash(policy.choose(asked, hw, name))


def test_explain_prints_the_choice(monkeypatch):
    """Kernel, tile, splits and whose backward, of every backend that serves."""
    monkeypatch.setattr("fulmen.cuda.problem", lambda *args: None)
    monkeypatch.setattr(hardware, "of", lambda device: hardware.TARGETS[90])
    asked = importlib.import_module("fulmen.flash.spec").plain_spec(CUDA)._replace(B=1, H=32, H_KV=8, N_Q=1, N_KV=8192)
    asked = asked._replace(D=128, E=128, right=None, needs_grad=False)
    monkeypatch.setattr("fulmen.flash.spec.checked_spec", lambda: asked)
    dispatch.pick.cache_clear()
    text = fulmen.explain("flash")
    dispatch.pick.cache_clear()
    assert "cuda        ok (sm90, 64 queries x 80 keys, pack GQA, 15 splits)" in text
    assert "sdpa        ok (flash)" in text
    assert 'backends, in the order backend="auto" tries them:\n  cuda' in text
    assert "triton      ok (forward 64 x 64, 4 warps, 3 stages; joined 64 x 64, 8 warps, 2 stages)" in text
    assert text.endswith("auto: cuda")


def test_an_operation_that_is_imported_has_its_operators(fresh_process):
    """As docs/integrations.md says: a program of torch.export needs them."""
    operators = [
        ("flash", "flash_forward"), ("lightning", "lightning_forward"), ("latent", "latent_forward"),
        ("step", "lightning_step"), ("layers", "cache_append"),
    ]  # fmt: skip
    for module, operator in operators:
        fresh_process(f"import torch, fulmen.{module}; torch.ops.fulmen.{operator}.default")


# ------------------------------------------------------------------------------------------ under a compiler


def test_native_backends_are_named():
    found = {kernel.name for op in dispatch.OPS for kernel in dispatch.kernels(op).values() if kernel.backward is None}
    assert found == {*dispatch.NATIVE}


FIRST = """
import torch, fulmen
q = torch.randn(1, 2, 16, 16, requires_grad=True)
slopes = fulmen.decay.alibi(2)
attend = lambda q: fulmen.lightning_attention(q, q, q, slopes, backend="eager")
o = torch.compile(attend, backend="aot_eager", fullgraph=True)(q)
assert torch.allclose(o, attend(q), atol=1e-5)
"""


@pytest.mark.slow
def test_the_first_call_of_a_process_may_be_compiled(fresh_process):
    """Backends are imported while the compiler looks on."""
    fresh_process(FIRST)
