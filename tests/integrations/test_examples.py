"""The longer examples: fine-tuning a Hugging Face model, and a stack on longer and longer sequences."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import re
import types
import weakref
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


def refusal(name, *arguments):
    """What a script says of arguments it refuses, on one line. Any other exception is raised."""
    done = CliRunner().invoke(script(name).main, [str(a) for a in arguments], catch_exceptions=False)
    assert done.exit_code == 2, done.output
    return " ".join(done.output.split())


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
    checkpoint = tmp_path / "whole" / "checkpoint.pt"
    said = run("finetune", *options, "--steps", 5, "--out", tmp_path / "whole", "--resume")
    assert f"{checkpoint} is finished: it has 6 steps, and --steps is 5" in said


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of two steps with adapters of rank 1."""
    out = tmp_path_factory.mktemp("finished")
    run("finetune", "--lora", 1, "--length", 48, "--steps", 2, "--device", "cpu", "--out", out)
    return out


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--lora", 4, "--lora 1; --resume needs the same, not --lora 4"),
        ("--lora", 0, "--lora 1; --resume needs the same, not --lora 0"),
        ("--length", 64, "--length 48; --resume needs the same, not --length 64"),
        ("--batch", 3, "--batch 2; --resume needs the same, not --batch 3"),
        ("--seed", 1, "--seed 0; --resume needs the same, not --seed 1"),
        ("--model", "tiny-mamba", "--model tiny; --resume needs the same, not --model tiny-mamba"),
        ("--data", __file__, "sha256 of the text "),
    ],
)
def test_finetuning_resumes_the_same_run_alone(option, value, said, finished):
    before = (finished / "checkpoint.pt").read_bytes()
    options = ("--lora", 1, "--length", 48, "--steps", 4, "--device", "cpu", "--out", finished, "--resume")
    answer = refusal("finetune", *options, option, value)
    assert f"checkpoint.pt was written with {said}" in answer
    assert (finished / "checkpoint.pt").read_bytes() == before


def test_finetuning_compares_shapes_before_it_loads(finished):
    """Rank 1 would be broadcast into rank 4. A model may change under its name."""
    module = script("finetune")
    model, _ = module.load_model("tiny", "cpu")
    module.add_lora(module.fulmen.integrations.transformers.accelerate(model, verbose=False), 4)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    options = torch.load(finished / "checkpoint.pt")["options"]
    before = {name: p.clone() for name, p in module.trained(model).items()}
    with pytest.raises(module.click.UsageError, match=r"has shape \(64, 1\) there and \(64, 4\) here"):
        module.resume(finished / "checkpoint.pt", model, optimizer, options, "cpu")
    torch.testing.assert_close(module.trained(model), before, rtol=0, atol=0)


def test_finetuning_resumes_with_another_learning_rate(finished, tmp_path):
    (tmp_path / "checkpoint.pt").write_bytes((finished / "checkpoint.pt").read_bytes())
    options = ("--lora", 1, "--length", 48, "--steps", 3, "--device", "cpu", "--out", tmp_path, "--resume")
    run("finetune", *options, "--lr", 0)
    before, after = (torch.load(path / "checkpoint.pt") for path in (finished, tmp_path))
    assert len(after["losses"]) == 3
    torch.testing.assert_close(after["weights"], before["weights"], rtol=0, atol=0)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--data", "empty.txt"), "--data empty.txt holds no text"),
        (("--data", "missing.txt"), "--data missing.txt cannot be read as text: [Errno 2] No such file"),
        (("--data", "bytes.txt"), "--data bytes.txt cannot be read as text: 'utf-8' codec"),
        (("--model", "."), "--model . cannot be loaded"),
        (("--resume",), "--resume needs --out"),
        (("--resume", "--out", "run"), f"--resume finds no checkpoint: there is no {Path('run', 'checkpoint.pt')}"),
        (("--every", 0), "Invalid value for '--every': 0 is not in the range x>=1"),
        (("--steps", 0), "Invalid value for '--steps'"),
        (("--batch", 0), "Invalid value for '--batch'"),
        (("--length", 1), "Invalid value for '--length'"),
        (("--lora", -2), "Invalid value for '--lora': -2 is not in the range x>=0"),
        (("--out", "empty.txt"), "Invalid value for '--out'"),
        (("--device", "abacus"), "Invalid value for '--device': abacus"),
    ],
)
def test_finetuning_refuses(arguments, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.txt").write_text("\n\n  \n")
    (tmp_path / "bytes.txt").write_bytes(b"\xff\xfe")
    assert said in refusal("finetune", "--device", "cpu", "--steps", 1, *arguments)


def test_lora_needs_projections():
    module = script("finetune")
    model = torch.nn.Linear(2, 2)
    with pytest.raises(module.click.UsageError, match="--lora finds no linear projections"):
        module.add_lora(types.SimpleNamespace(model=model, mixers=[]), 4)


def test_packed_rows_hold_whole_documents():
    module = script("finetune")
    ids, positions = next(module.batches(["abc", "defgh"], module.Bytes(), 1, 10, seed=0))
    starts = (positions[0] == 0).nonzero().flatten().tolist()
    assert starts[0] == 0
    assert [int(ids[0, start - 1]) for start in starts[1:]] == [0] * (len(starts) - 1), "a document ends before it"


def test_longer_and_longer_sequences(tmp_path):
    files = "--plot", tmp_path / "long.png", "--out", tmp_path / "long.jsonl"
    said = run("long_context", "--from", 64, "--to", 256, *files, "--patterns", "L, LG")
    lines = [json.loads(line) for line in (tmp_path / "long.jsonl").read_text().splitlines()]
    assert [(line["pattern"], line["N"]) for line in lines] == [(p, N) for p in ("L", "LG") for N in (64, 128, 256)]
    assert all(line["seconds"] > 0 and line["memory"] is None for line in lines)
    assert all(f"{pattern} {N} tokens" in said for pattern in ("L", "LG") for N in (64, 128, 256))
    assert all(
        re.search(rf"^{pattern}: (time grows as N\^|no exponent)", said, re.MULTILINE) for pattern in ("L", "LG")
    )
    assert (tmp_path / "long.png").stat().st_size > 0
    assert "Memory is measured on a GPU only." in said
    assert "GiB" not in said


def test_each_length_is_warmed_up_and_repeated(monkeypatch):
    module, calls = script("long_context"), []
    clock = iter([0, 50, 50, 51, 51, 52.5])  # the first step compiles
    monkeypatch.setattr(module.time, "perf_counter", lambda: next(clock))
    model = module.Stack("L", 16, 1, 1)
    model.register_forward_pre_hook(lambda _, args: calls.append(args[0].shape))
    row = module.measure(model, 8, torch.device("cpu"))
    assert row == module.Row(8, 1.25, None, 0.2)
    assert calls == [(1, 8)] * 3, "one step that is not timed, then no more after two seconds"
    clock = iter(range(99))
    assert module.measure(model, 8, torch.device("cpu")).seconds == 1
    assert len(calls) == 6
    clock = iter([0, 50, 50, 90])  # a long step is timed once
    assert module.measure(model, 8, torch.device("cpu")) == module.Row(8, 40, None, 0)
    clock = iter(i / 100 for i in range(99))
    module.measure(model, 8, torch.device("cpu"))
    assert len(calls) == 6 + 2 + 1 + module.REPEATS


def test_exponents():
    module = script("long_context")
    rows = [module.Row(N, 1e-6 * N**1.5) for N in (1, 2, 1024, 2048, 4096)]
    assert module.growth(rows, 1e-3) == "time grows as N^1.50"
    assert "fewer than three lengths took at least 0.080 s" in module.growth(rows, 0.04)
    assert "fewer than three" in module.growth(rows[-2:], 1e-3)
    assert "fewer than three" in module.growth([], 1e-3)
    assert "a longer sequence took less time" in module.growth([*rows, module.Row(8192, 0.2)], 1e-3)
    assert "took different times" in module.growth([*rows, module.Row(8192, 0.8, None, 0.3)], 1e-3)


def test_memory_has_a_panel_where_it_is_measured(tmp_path, monkeypatch):
    module, made = script("long_context"), []
    import matplotlib.pyplot as plt

    subplots = plt.subplots
    monkeypatch.setattr(plt, "subplots", lambda *a, **k: made.append(subplots(*a, **k)) or made[-1])
    for name, memory in (("cpu", None), ("gpu", 2.0)):
        module.plot({"L": [module.Row(64, 0.1, memory), module.Row(128, 0.2, memory)]}, tmp_path / f"{name}.png")
    labels = [[axis.get_ylabel() for axis in figure.axes] for figure, _ in made]
    assert labels == [["seconds a step"], ["seconds a step", "GiB"]]
    assert list(made[1][1][0, 1].lines[0].get_ydata()) == [2.0, 2.0]


def test_the_default_stacks_have_every_letter():
    module = script("long_context")
    default = {option.name: option.default for option in module.main.params}
    for pattern in default["patterns"].split(","):
        stack = module.Stack(pattern, 16, 1, default["layers"])
        kinds = {"L": module.LightningAttention, "G": module.GroupedQueryAttention}
        found = [type(block.attention) for block in stack.blocks]
        assert found == [kinds[letter] for letter in pattern] * (len(found) // len(pattern))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--patterns", "X"), "a pattern is letters L and G, not 'X'"),
        (("--patterns", "L,lg"), "a pattern is letters L and G, not 'lg'"),
        (("--patterns", ""), "a pattern is letters L and G, not ''"),
        (("--patterns", "L,G,L"), "names a pattern twice"),
        (("--layers", 2), "pattern LLLG in --layers 2 is LL: give it --layers 4 or more"),
        (("--layers", 0), "Invalid value for '--layers'"),
        (("--from", 0), "Invalid value for '--from': 0 is not in the range x>=2"),
        (("--from", 512, "--to", 256), "--from 512 is longer than --to 256"),
        (("--heads", 3), "--dim 64 in --heads 3: heads need an even number of elements each"),
        (("--plot", Path("missing", "long.png")), "there is no folder missing"),
        (("--out", Path("missing", "long.jsonl")), "--out missing/long.jsonl: there is no folder missing"),
        (("--device", "abacus"), "Invalid value for '--device': abacus"),
        (("--device", "meta"), "meta: steps are timed on cpu and cuda alone"),
    ],
)
def test_longer_sequences_refuse(arguments, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert said in refusal("long_context", *arguments)


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
    assert "Times on a CPU say nothing about a GPU" in said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--batch", "0"), "--batch must be at least 1, not 0"),
        (("--tokens", "0"), "--tokens must be at least 2, not 0"),
        (("--tokens", "1"), "--tokens must be at least 2, not 1"),
        (("--rounds", "0"), "--rounds must be at least 1, not 0"),
        (("--device", "abacus"), "--device abacus: "),
        (("--device", "meta"), "--device meta: times are measured on cpu and cuda alone"),
        (("--out", str(Path("missing", "rows.jsonl"))), "cannot be written: [Errno 2]"),
    ],
)
def test_speedup_refuses(arguments, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stopped:
        script("speedup").main(["--tiny", "--device", "cpu", *arguments])
    assert stopped.value.code == 2
    assert said in capsys.readouterr().err


def test_speedup_of_the_full_size_is_not_for_a_cpu(capsys):
    with pytest.raises(SystemExit):
        script("speedup").main(["--device", "cpu"])
    assert "the full size takes hours on a CPU: use --tiny, or choose --tokens" in capsys.readouterr().err


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

    def captured(step, side):
        """As a CUDA graph: transformers' own step makes a new state, which is put into the cache but once."""
        cache = side.cache

        def replay():
            held = list(cache.linear_cache)
            step()
            if type(cache).__name__ == "MiniMaxCache":
                cache.linear_cache = held

        return replay

    monkeypatch.setattr(module, "Replay", captured)
    rows = {row["what"]: row for row in module.measure(sides, 1, graphs=True)}
    stuck = {what: row["state_does_not_advance"] for what, row in rows.items() if "graph" in what}
    assert {what.split(":")[0]: who for what, who in stuck.items()} == {
        "all mixers": ["own"], "MiniMaxLightningAttention": ["own"], "MiniMaxAttention": [],
    }  # fmt: skip
    assert capsys.readouterr().out.count("does not advance the states that an eager step advances: transformers") == 2


def tensors_in(held):
    """Those in dictionaries and lists."""
    if isinstance(held, torch.Tensor):
        return [held]
    inner = held.values() if isinstance(held, dict) else held if isinstance(held, list | tuple) else ()
    return [tensor for one in inner for tensor in tensors_in(one)]


@pytest.mark.parametrize("model", ["minimax", "granite"])
def test_speedup_keeps_what_a_graph_reads(model, monkeypatch):
    """What a cache holds at a capture lives as long as the graph, also if a step replaces it there."""
    module, read, replaced = script("speedup"), [], []
    sides = module.build(model, True, 1, 16, torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: None)

    @contextlib.contextmanager
    def graph(_):
        reachable = [tensor for layer in side.cache.layers for tensor in tensors_in(vars(layer))]
        reachable += tensors_in(getattr(side.cache, "linear_cache", ()))
        read.extend(weakref.ref(tensor) for tensor in reachable)
        yield

    monkeypatch.setattr(torch.cuda, "graph", graph)
    for side in sides:
        cache = side.new_cache(32)
        side.record(side.given.ids, cache)
        side.record(side.given.ids[:, :1], cache)
        read.clear()
        replay = module.Replay(functools.partial(side.step, [0, 1, 2, 3]), side)
        assert len(read) >= 5  # three states, keys and values
        assert all(ref() is not None for ref in read)
        before = {tensor.data_ptr() for tensor in replay.kept}
        replaced.append(before != {tensor.data_ptr() for tensor in side.held()})
    assert replaced == [model == "minimax", False]
