"""Layers together: the example that mixes the three kinds of attention."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from torch._dynamo.testing import CompileCounterWithBackend

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def hybrid():
    """examples/hybrid_lm.py, a script."""
    spec = importlib.util.spec_from_file_location("hybrid_lm", ROOT / "examples" / "hybrid_lm.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["hybrid_lm"] = module  # dataclasses look there
    spec.loader.exec_module(module)
    yield module
    del sys.modules["hybrid_lm"]


@pytest.fixture(autouse=True)
def one_thread():
    """Sizes this small are slower with two, and much slower where others compute as well."""
    was = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(was)


def small(hybrid, pattern: str, **options):
    torch.manual_seed(0)
    alphabet = hybrid.Alphabet(hybrid.make_text(100))
    config = hybrid.Config(len(alphabet.letters), pattern, len(pattern), dim=32, heads=4, **options)
    return hybrid.HybridLM(config), alphabet


def test_training_lowers_the_loss_and_generation_spells(hybrid):
    model, alphabet = small(hybrid, "LGM")
    ids = alphabet.encode(hybrid.make_text(500))
    losses = hybrid.train(model, ids, steps=60, batch=8, length=64, lr=1e-2)
    start, end = sum(losses[:5]) / 5, sum(losses[-5:]) / 5
    assert start > 2.5, "about log 31 at first"
    assert end < 0.6 * start
    assert hybrid.evaluate(model, alphabet.encode(hybrid.make_text(50, seed=1)), 64) < 0.6 * start
    prompts = [alphabet.encode(p) for p in ("ada has two keys, f", "ben", "cleo has ten ")]
    cached, uncached = (model.generate(prompts, 20, cached=way) for way in (True, False))
    for prompt, a, b in zip(prompts, cached, uncached, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a[: len(prompt)], prompt)
        assert len(a) == len(prompt) + 20


@pytest.mark.parametrize(("pattern", "preset"), [("LLG", "minimax"), ("LM", "ring"), ("GM", "minimax")])
@torch.no_grad()
def test_cached_logits_are_the_uncached(hybrid, pattern, preset):
    model, _ = small(hybrid, pattern, preset=preset)
    ids = torch.randint(model.config.vocab, (2, 19), generator=torch.Generator().manual_seed(0))
    caches = model.new_caches()
    parts = [model(part, caches) for part in ids.split([8, 1, 1, 9], dim=1)]
    torch.testing.assert_close(torch.cat(parts, 1), model(ids))


def test_the_model_is_one_graph_whatever_the_length(hybrid):
    model, _ = small(hybrid, "LGM")
    counter, graphs = CompileCounterWithBackend("aot_eager"), []
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    for N in (9, 40, 23):
        ids = torch.randint(model.config.vocab, (2, N), generator=torch.Generator().manual_seed(0))
        got, want = (torch.autograd.grad(f(ids).square().sum(), model.parameters()) for f in (compiled, model))
        for x, y in zip(got, want, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)
        graphs.append(counter.frame_count)
    assert graphs == [1, 2, 2]


def test_checkpointing_has_the_same_gradients(hybrid):
    model, _ = small(hybrid, "LGM")
    ids = torch.randint(model.config.vocab, (2, 19), generator=torch.Generator().manual_seed(0))
    want = torch.autograd.grad(model(ids).square().mean(), model.parameters())
    model.checkpointing = True
    got = torch.autograd.grad(model(ids).square().mean(), model.parameters())
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_text_is_the_same_every_time_and_adds_up(hybrid):
    text = hybrid.make_text(200)
    assert text == hybrid.make_text(200)
    assert text != hybrid.make_text(200, seed=1)
    for line in text.splitlines():
        words = line.replace(",", "").replace(".", "").split()
        start, change, end = (hybrid.WORDS.index(words[i]) for i in (2, 5, -1))
        assert start + (change if words[4] == "finds" else -change) == end, line


def test_command(hybrid, tmp_path):
    picture = tmp_path / "loss.png"
    options = "--pattern LM --layers 2 --dim 32 --length 32 --batch 2 --steps 3 --new 5 --device cpu"
    result = CliRunner().invoke(hybrid.main, [*options.split(), "--plot", str(picture)])
    assert result.exit_code == 0, result.output
    assert "LM: 0.0" in result.output
    assert picture.stat().st_size > 1000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--pattern LX", "must be made of L"),
        ("--steps 0", "0 is not in the range x>=1"),
        ("--steps -1", "-1 is not in the range x>=1"),
        ("--length 0", "0 is not in the range x>=1"),
        ("--length 10000000", "--length 10000000: the text has"),
        ("--layers 0", "0 is not in the range x>=1"),
        ("--batch 0", "0 is not in the range x>=1"),
        ("--new -1", "-1 is not in the range x>=0"),
        ("--temperature -1", "-1.0 is not in the range x>=0"),
        ("--dim 130", "num_heads=4 must divide embed_dim=130"),
        ("--device cuda:99", "--device cuda:99: torch finds"),
        ("--device gpu", "--device gpu: "),
        ("--backend nope", "backend='nope'"),
    ],
)
def test_wrong_options_are_one_error_each(hybrid, arguments, message):
    result = CliRunner().invoke(hybrid.main, ["--device", "cpu", *arguments.split()])
    assert result.exit_code == 2, result.output
    assert message in " ".join(result.output.split())


def test_a_short_text_is_evaluated_whole(hybrid):
    model, alphabet = small(hybrid, "LG")
    ids = alphabet.encode(hybrid.make_text(1))
    assert hybrid.evaluate(model, ids, 10_000) == hybrid.evaluate(model, ids, len(ids) - 1)
