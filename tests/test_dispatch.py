"""The registry alone, with made-up backends of a made-up operation; then what `auto` picks for real."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch

import fulmen
from fulmen import dispatch, hardware
from fulmen.lightning.op import LightningSpec, plain_spec

CUDA = torch.device("cuda", 0)


@pytest.fixture
def toy(monkeypatch):
    """An op whose specs are integers: `small` serves those below 10 and is fastest, `any` those below 100."""
    monkeypatch.setitem(dispatch._kernels, "toy", {})
    monkeypatch.setitem(dispatch._missing, "toy", {"gone": "cannot be imported: No module named 'cuda'"})
    monkeypatch.setattr(dispatch, "_load", lambda op: None)

    def add(name: str, rank: float, limit: int) -> None:
        def supports(spec):
            return None if spec < limit else f"{spec} is not below {limit}"

        dispatch.register("toy", name, supports=supports, rank=lambda _: rank, forward=print, backward=print)

    add("any", 5.0, 100)
    add("small", 1.0, 10)
    dispatch.pick.cache_clear()
    yield "toy"
    dispatch.pick.cache_clear()


def test_auto_takes_the_lowest_rank_that_supports(toy):
    assert dispatch.pick(toy, 3).name == "small"
    assert dispatch.pick(toy, 30).name == "any"


def test_auto_leaves_what_has_no_backward_to_those_who_ask(toy):
    dispatch.register(toy, "oracle", supports=lambda _: None, rank=lambda _: 0.0, forward=print, backward=None)
    assert dispatch.pick(toy, 3).name == "small"
    assert dispatch.pick(toy, 3, "oracle").name == "oracle"


def test_auto_with_none_left_shows_every_reason(toy):
    with pytest.raises(NotImplementedError) as error:
        dispatch.pick(toy, 300)
    for sentence in ("no toy backend", "300 is not below 10", "300 is not below 100", "cannot be imported"):
        assert sentence in str(error.value)


def test_by_name_works_or_raises(toy):
    assert dispatch.pick(toy, 3, "any").name == "any"
    with pytest.raises(NotImplementedError, match=r"backend='small' cannot.*: 30 is not below 10"):
        dispatch.pick(toy, 30, "small")
    with pytest.raises(NotImplementedError, match="cannot be imported: No module named 'cuda'"):
        dispatch.pick(toy, 3, "gone")
    with pytest.raises(ValueError, match="backend='fast': toy has any, gone, small, or 'auto'"):
        dispatch.pick(toy, 3, "fast")


def test_reasons_are_fastest_first(toy):
    why = dispatch.reasons(toy, 30)
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
    assert set(dispatch.kernels("lightning")) == files - {"__init__", "op", "slopes"}


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
def test_what_auto_picks_on_an_h200(asked, chosen, monkeypatch):
    """What cuda serves; else few heads and many rows are split. A CPU never gets the interpreter."""
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
    assert text.endswith("auto: eager")
    with pytest.raises(ValueError, match="op='flesh': fulmen has lightning"):
        fulmen.explain("flesh", q, q, q)


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
