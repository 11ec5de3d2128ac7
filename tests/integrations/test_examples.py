"""The longer examples: fine-tuning a Hugging Face model, and a stack on longer and longer sequences."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

ROOT = Path(__file__).parents[2]


def script(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(name, *arguments):
    done = CliRunner().invoke(script(name).main, [str(a) for a in arguments], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


@pytest.mark.parametrize(("model", "lora"), [("tiny", 0), ("tiny", 4), ("tiny-mamba", 4)])
def test_finetuning_resumes_where_it_stopped(model, lora, tmp_path):
    options = ("--model", model, "--lora", lora, "--length", 48, "--every", 3, "--device", "cpu")
    run("finetune", *options, "--steps", 6, "--out", tmp_path / "whole")
    run("finetune", *options, "--steps", 3, "--out", tmp_path / "parts")
    run("finetune", *options, "--steps", 6, "--out", tmp_path / "parts", "--resume")
    whole, parts = (torch.load(tmp_path / name / "checkpoint.pt") for name in ("whole", "parts"))
    assert whole["losses"][-1] < whole["losses"][0]
    torch.testing.assert_close(parts["losses"], whole["losses"])
    torch.testing.assert_close(parts["weights"], whole["weights"])
    assert all(name.endswith((".a", ".b")) for name in whole["weights"]) == bool(lora)
    if lora:  # every projection of every kind of mixer, and nothing else
        adapted = {name.removesuffix(".a").split(".", 3)[3] for name in whole["weights"] if name.endswith(".a")}
        softmax = {f"self_attn.{part}_proj" for part in "qkvo"}
        others = {"self_attn": ("qkv_proj", "out_proj", "output_gate"), "mamba": ("in_proj", "out_proj")}
        kind = "mamba" if model == "tiny-mamba" else "self_attn"
        assert adapted == softmax | {f"{kind}.{part}" for part in others[kind]}
        assert all(weight.any() for name, weight in whole["weights"].items() if name.endswith(".b")), "all are trained"
    assert (tmp_path / "parts" / "loss.png").stat().st_size > 0
    other = CliRunner().invoke(
        script("finetune").main,
        ["--model", model, "--lora", str(4 - lora), "--out", str(tmp_path / "whole"), "--resume"],
    )
    assert other.exit_code == 2
    assert "holds other weights" in other.output


def test_packed_rows_hold_whole_documents():
    module = script("finetune")
    ids, positions = next(module.batches(["abc", "defgh"], module.Bytes(), 1, 10, seed=0))
    starts = (positions[0] == 0).nonzero().flatten().tolist()
    assert starts[0] == 0
    assert [int(ids[0, start - 1]) for start in starts[1:]] == [0] * (len(starts) - 1), "a document ends before it"


def test_longer_and_longer_sequences(tmp_path):
    said = run("long_context", "--from", 64, "--to", 256, "--plot", tmp_path / "long.png", "--patterns", "L,LG")
    assert all(f"{pattern} {N} tokens" in said for pattern in ("L", "LG") for N in (64, 128, 256))
    assert (tmp_path / "long.png").stat().st_size > 0
    found = [(N, 1e-6 * N**1.5, 0.0) for N in (1, 2, 1024, 2048, 4096)]
    assert script("long_context").exponent(found) == pytest.approx(1.5)


@pytest.mark.parametrize("model", ["minimax", "granite"])
def test_speedup(model, tmp_path, capsys):
    """Every row is measured on both sides; a side that is wrong stops the script."""
    module, file = script("speedup"), tmp_path / "rows.jsonl"
    module.main(["--model", model, "--tiny", "--rounds", "2", "--device", "cpu", "--out", str(file)])
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    classes = {"minimax": ("MiniMaxLightningAttention", "MiniMaxAttention"), "granite": (
        "GraniteMoeHybridMambaLayer", "GraniteMoeHybridAttention"
    )}  # fmt: skip
    who = ("all mixers", *classes[model], "whole model")
    assert [row["what"] for row in rows] == [
        f"{one}: {what}" for what in ("training", "prefill", "decoding step") for one in who
    ]
    for row in rows:
        assert row["speedup"] == row["own_ms"] / row["ours_ms"]
        assert len(row["own_samples"]) == len(row["ours_samples"]) == 2
        assert row["config"]["num_hidden_layers"] == 4
    said = capsys.readouterr().out
    assert all(row["what"] in said for row in rows)


@pytest.mark.parametrize(
    ("part", "named"), [("self_attn.out_proj", "output of mixer 0"), ("mlp", "logits of a prompt")]
)
def test_speedup_stops_if_results_differ(part, named, monkeypatch):
    module, ours = script("speedup"), script("speedup").fulmen.integrations.transformers
    accelerate = ours.accelerate

    def wrong(model):
        with torch.no_grad():
            for weight in model.get_submodule(f"model.layers.0.{part}").parameters():
                weight.mul_(1.01)
        return accelerate(model)

    monkeypatch.setattr(ours, "accelerate", wrong)
    with pytest.raises(SystemExit, match=f"{named}: fulmen's relative error is"):
        module.main(["--tiny", "--device", "cpu"])


def test_speedup_tells_of_states_that_a_graph_does_not_advance(monkeypatch, capsys):
    module = script("speedup")
    sides = module.build("minimax", True, 1, 16, torch.device("cpu"))

    def captured(step):
        """As a CUDA graph: transformers' own step makes a new state, which is put into the cache but once."""
        cache = step.func.__self__.cache

        def replay():
            held = list(cache.linear_cache)
            step()
            if type(cache).__name__ == "MiniMaxCache":
                cache.linear_cache = held

        return replay

    monkeypatch.setattr(module, "captured", captured)
    rows = {row["what"]: row for row in module.measure(sides, 1, graphs=True)}
    stuck = {what: row["state_does_not_advance"] for what, row in rows.items() if "graph" in what}
    assert {what.split(":")[0]: who for what, who in stuck.items()} == {
        "all mixers": ["own"], "MiniMaxLightningAttention": ["own"], "MiniMaxAttention": [],
    }  # fmt: skip
    assert capsys.readouterr().out.count("does not advance the states that an eager step advances: own") == 2
