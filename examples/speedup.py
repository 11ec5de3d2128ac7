"""How much faster a Hugging Face model is on fulmen's kernels: transformers' own code beside an accelerated copy.

    python examples/speedup.py --tiny                                  # a tiny random MiniMax, in a minute on a CPU
    python examples/speedup.py --model minimax --out speedup.jsonl     # on a GPU: 4 layers of 2048, B2 N8192, bf16
    python examples/speedup.py --model granite --batch 1 --tokens 4096

Weights are random. The script first compares both with the same model in a higher precision. It stops unless fulmen's
error is at most twice transformers' own (three times for gradients), plus one rounding. Then it measures the mixers
alone and the whole model: training (forward and backward, no optimizer), prefill into a new cache, and a decoding step
in a static cache after a prompt. Times are medians over interleaved rounds, each with inputs drawn anew. A token takes
all experts, so that no rounding changes the routing.

It needs torch, triton and transformers. On a machine without transformers a folder on PYTHONPATH serves, with these
packages and their dist-info folders: transformers, safetensors, tqdm, regex, yaml, packaging, filelock, huggingface_hub
and what that imports (httpx2, httpcore2, h11, idna, truststore). Of transformers/models it may hold auto, minimax and
granitemoehybrid alone, and regex may be a file `regex.py` with `from re import *`: 20 MB, the same for every Python.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

import fulmen
import fulmen.integrations.transformers

try:
    import triton
except ImportError:  # it comes with torch on Linux alone
    triton = None

ROOM, STEPS = 64, 8  # tokens of a static cache after the prompt; decoding steps of a sample
CHECKED = 1024  # tokens of the comparison


def config_of(name: str, tiny: bool) -> Any:
    dim, heads, chunk = (64, 4, 16) if tiny else (2048, 16, 256)
    sizes = {
        "vocab_size": 128 if tiny else 32000, "hidden_size": dim, "intermediate_size": dim, "num_hidden_layers": 4,
        "num_attention_heads": heads, "num_key_value_heads": heads // 4, "num_local_experts": 2,
        "num_experts_per_tok": 2,
    }  # fmt: skip
    if name == "minimax":
        kinds = ["linear_attention"] * 3 + ["full_attention"]
        return transformers.MiniMaxConfig(**sizes, head_dim=dim // heads, layer_types=kinds, block_size=chunk)
    mamba = {"mamba_n_heads": 4 * heads, "mamba_d_state": chunk if tiny else 128, "mamba_chunk_size": chunk}
    options = {"shared_intermediate_size": dim, "attention_multiplier": heads / dim}
    return transformers.GraniteMoeHybridConfig(**sizes, **mamba, **options, layer_types=["mamba"] * 3 + ["attention"])


def own_cache(model: Any, length: int | None = None) -> Any:
    """transformers' own, which grows, or a static one. MiniMax has none of these: its class takes them from layer 0."""
    kinds, modeling = model.config.layer_types, sys.modules[type(model).__module__]
    if not hasattr(modeling, "MiniMaxCache"):
        static = {"config": model.config, "max_cache_len": length}
        return transformers.DynamicCache(config=model.config) if length is None else transformers.StaticCache(**static)
    cache = modeling.MiniMaxCache()
    if length is None:
        return cache
    cache.layer_class_to_replicate, cache.linear_cache = None, [None for _ in kinds]
    cache.layers = [transformers.StaticLayer(length) for _ in kinds]
    softmax = cache.layers[kinds.index("full_attention")]
    cache.get_seq_length = lambda layer_idx=0: softmax.get_seq_length()
    return cache


class Inputs:
    """What both models are given."""

    def __init__(self, B: int, N: int, config: Any, device: torch.device, dtype: torch.dtype) -> None:
        self.x, self.dy = (torch.empty(B, N, config.hidden_size, device=device, dtype=dtype) for _ in range(2))
        self.x1, self.ids = torch.empty_like(self.x[:, :1]), torch.empty(B, N, device=device, dtype=torch.int64)
        self.x.requires_grad_()
        self.vocab = config.vocab_size
        self.draw()

    @torch.no_grad()
    def draw(self) -> None:
        for tensor in (self.x, self.dy, self.x1):
            tensor.normal_()
        self.ids.random_(self.vocab)


class Side:
    """One of the models. What is measured takes the numbers of the mixers that run alone, or None: the whole model."""

    def __init__(self, model: Any, names: list[str], new_cache: Callable[..., Any], given: Inputs) -> None:
        self.model, self.new_cache, self.given = model, new_cache, given
        self.mixers = [model.get_submodule(name) for name in names]
        self.calls: list[dict[str, Any]] = []  # what the model hands to each mixer
        self.cache: Any = None  # of these calls

    @torch.no_grad()
    def record(self, ids: Tensor, cache: Any) -> None:
        """Runs the model, and keeps how it calls its mixers."""
        calls: dict[Any, dict[str, Any]] = {}
        hooks = [
            mixer.register_forward_pre_hook(lambda mixer, _, kwargs: calls.update({mixer: kwargs}), with_kwargs=True)
            for mixer in self.mixers
        ]
        self.model(ids, past_key_values=cache, use_cache=cache is not None)
        for hook in hooks:
            hook.remove()
        self.calls, self.cache = [calls[mixer] for mixer in self.mixers], cache

    def mix(self, i: int, x: Tensor, cache: Any) -> Tensor:
        call = {name: cache if value is self.cache else value for name, value in self.calls[i].items()}
        y = self.mixers[i](**call | {"hidden_states": x})
        return y if isinstance(y, Tensor) else y[0]

    def train(self, chosen: list[int] | None) -> None:
        if chosen is None:
            self.model(self.given.ids, labels=self.given.ids, use_cache=False).loss.backward()
        for i in chosen or ():
            self.mix(i, self.given.x, None).backward(self.given.dy)

    @torch.no_grad()
    def prefill(self, chosen: list[int] | None) -> None:
        cache = self.new_cache()  # grows: with a static one transformers' attention needs a mask
        if chosen is None:
            self.model(self.given.ids, past_key_values=cache, logits_to_keep=1)
        for i in chosen or ():
            self.mix(i, self.given.x, cache)

    @torch.no_grad()
    def step(self, chosen: list[int] | None) -> None:
        if chosen is None:
            self.model(self.given.ids[:, :1], past_key_values=self.cache)
        for i in chosen or ():
            self.mix(i, self.given.x1, self.cache)

    def begin(self) -> None:
        """Before a sample: no gradients, and a cache with its prompt alone. States stay as they are."""
        self.given.x.grad = None
        self.model.zero_grad(set_to_none=True)
        for layer in () if self.cache is None else self.cache.layers:
            if isinstance(layer, transformers.StaticLayer):
                layer.cumulative_length.fill_(self.given.x.shape[1])

    def held(self, kinds: tuple[str, ...] = ("conv_states", "recurrent_states", "keys", "values")) -> list[Tensor]:
        """The cache's tensors of these kinds, and its states of lightning attention."""
        parts = [getattr(layer, kind, None) for layer in self.cache.layers for kind in kinds]
        parts = [one for part in parts for one in (part.values() if isinstance(part, dict) else (part,))]
        return [one for one in (*parts, *getattr(self.cache, "linear_cache", ())) if isinstance(one, Tensor)]

    def changed(self, step: Callable[[], Any]) -> list[bool]:
        """Which states of the cache a step changes."""
        found = []
        for run in (lambda: None, step):
            run()
            found.append([state.clone() for state in self.held(("recurrent_states",))])
        return [not torch.equal(before, after) for before, after in zip(*found, strict=True)]

    def results(self, given: Inputs) -> dict[str, Tensor]:
        """Outputs and gradients of every mixer, logits of a prompt and of a step after it."""
        found, ids = {}, given.ids
        x, dy = (t.detach().to(self.model.dtype).requires_grad_() for t in (given.x, given.dy))
        self.record(ids, None)
        for i in range(len(self.mixers)):
            found[f"output of mixer {i}"] = y = self.mix(i, x, None)
            (found[f"gradient of mixer {i}"],) = torch.autograd.grad(y, x, dy)
        with torch.no_grad():
            cache = self.new_cache(ids.shape[1])
            found["logits of a prompt"] = self.model(ids[:, :-1], past_key_values=cache, logits_to_keep=1).logits
            found["logits of a step"] = self.model(ids[:, -1:], past_key_values=cache).logits
        return {name: x.detach() for name, x in found.items()}


def check(sides: list[Side], exact: Side, given: Inputs) -> None:
    """Stops unless both sides agree with the exact one."""
    theirs, ours, wanted = (side.results(given) for side in (*sides, exact))
    largest = 0.0
    for name, want in wanted.items():
        own, error = (float((found[name].to(want.dtype) - want).norm() / want.norm()) for found in (theirs, ours))
        bound = (3 if name.startswith("gradient") else 2) * own + torch.finfo(given.x.dtype).eps
        if not error <= bound:
            sys.exit(f"{name}: fulmen's relative error is {error:.1e}, and must be at most {bound:.1e}")
        largest = max(largest, error / bound)
    print(f"{len(wanted)} results agree with {exact.model.dtype}: errors are at most {largest:.2f} of the bound\n")


def timed(function: Callable[[], Any], count: int, on_gpu: bool) -> float:
    """Milliseconds of a call, the mean of `count` in a row."""
    if on_gpu:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
    begin = time.perf_counter()
    for _ in range(count):
        function()
    if not on_gpu:
        return 1e3 * (time.perf_counter() - begin) / count
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / count


def compare(what: str, both: list[Callable[[], Any]], sides: list[Side], rounds: int, count: int) -> dict[str, Any]:
    """A row of the table. A side that runs out of memory has no time."""
    samples: list[list[float]] = [[], []]
    failed: set[int] = set()
    for turn in range(rounds + 2):  # the first two compile and warm up
        for i in sorted({0, 1} - failed, reverse=bool(turn % 2)):
            sides[i].given.draw()
            for side in sides:
                side.begin()
            try:
                samples[i].append(timed(both[i], count, sides[i].given.x.is_cuda))
            except torch.OutOfMemoryError:
                failed.add(i)
            if i in failed:
                torch.cuda.empty_cache()
    own, ours = (None if i in failed else statistics.median(samples[i][2:]) for i in range(2))
    speedup = own / ours if own and ours else None
    words = ["out of memory" if x is None else f"{x:.3f}" for x in (own, ours)]
    print(f"{what:56}{words[0]:>14}{words[1]:>14}{'' if speedup is None else f'{speedup:.2f}x':>9}", flush=True)
    row = {"what": what, "own_ms": own, "ours_ms": ours, "speedup": speedup}
    return row | {"own_samples": samples[0][2:], "ours_samples": samples[1][2:]}


class Replay:
    """A CUDA graph of the side's step; a call replays it.

    A graph reads the memory that tensors had in the capture and does not keep them. transformers' MiniMax puts a new
    state into the cache at every step, so the state before the capture would be freed: it is kept here.
    """

    def __init__(self, step: Callable[[], Any], side: Side) -> None:
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(3):
                step()
        torch.cuda.synchronize()
        self.graph, self.kept = torch.cuda.CUDAGraph(), side.held()
        with torch.cuda.graph(self.graph):
            step()

    def __call__(self) -> None:
        self.graph.replay()


def measure(sides: list[Side], rounds: int, graphs: bool) -> Iterator[dict[str, Any]]:
    """The rows of the table, as they are measured; `graphs`: also of steps in CUDA graphs."""
    ids, mixers = sides[0].given.ids, sides[0].mixers
    alone = {"all mixers": list(range(len(mixers)))}
    for i, mixer in enumerate(mixers):
        alone.setdefault(type(mixer).__name__, []).append(i)
    print(f"{'milliseconds':56}{'transformers':>14}{'fulmen':>14}{'speedup':>9}")

    def rows(what: str, verb: str, count: int = 1) -> Iterator[dict[str, Any]]:
        for name, chosen in (alone | {"whole model": None}).items():
            both = [partial(getattr(side, verb), chosen) for side in sides]
            yield compare(f"{name}: {what}", both, sides, rounds, count)

    for side in sides:
        side.model.train()
        side.record(ids, None)
    yield from rows("training", "train")
    for side in sides:
        side.model.eval()
        side.record(ids, side.new_cache())
    yield from rows("prefill", "prefill")
    for side in sides:
        cache = side.new_cache(ids.shape[1] + ROOM)
        side.record(ids, cache)
        side.record(ids[:, :1], cache)
    yield from rows("decoding step", "step", STEPS)
    for name, chosen in alone.items() if graphs else ():
        steps = [partial(side.step, chosen) for side in sides]
        both = [Replay(step, side) for step, side in zip(steps, sides, strict=True)]
        row = compare(f"{name}: decoding step, CUDA graph", both, sides, rounds, STEPS)
        changed = [
            (side.changed(step), side.changed(again)) for side, step, again in zip(sides, steps, both, strict=True)
        ]
        stuck = [who for who, states in zip(("own", "ours"), changed, strict=True) if states[0] != states[1]]
        if stuck:
            whose = " and ".join("transformers" if who == "own" else "fulmen" for who in stuck)
            print(f"    a replay does not advance the states that an eager step advances: {whose}")
        yield row | {"state_does_not_advance": stuck}


def build(name: str, tiny: bool, batch: int, N: int, device: torch.device) -> list[Side]:
    """transformers' own model and its accelerated copy, which agree."""
    dtype, higher = (torch.bfloat16, torch.float32) if device.type == "cuda" else (torch.float32, torch.float64)
    config = config_of(name, tiny)
    exact = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").to(device, higher)
    own = copy.deepcopy(exact).to(dtype)
    exact.set_experts_implementation("eager")  # others do not take every dtype
    with torch.no_grad():  # weights that both precisions hold
        for mine, theirs in zip(exact.parameters(), own.parameters(), strict=True):
            mine.copy_(theirs)
    ours = copy.deepcopy(own)
    accelerated = fulmen.integrations.transformers.accelerate(ours)
    names = [mixer.name for mixer in accelerated.mixers if mixer.reason is None]
    given, few = (Inputs(batch, tokens, config, device, dtype) for tokens in (N, min(N, CHECKED)))
    sides = [Side(own, names, partial(own_cache, own), given), Side(ours, names, accelerated.new_cache, given)]
    check(sides, Side(exact, names, partial(own_cache, exact), few), few)
    return sides


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    """The options, if they can run."""
    parser = argparse.ArgumentParser(description="transformers' own model beside its accelerated copy")
    parser.add_argument("--model", choices=("minimax", "granite"), default="minimax")
    parser.add_argument("--tiny", action="store_true", help="sizes for a CPU")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--tokens", type=int, help="of a sequence, before a decoding step: 8192, or 32 if tiny")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--out", type=Path, help="a file that gets a JSON line for each row")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args(arguments)
    try:
        args.device = torch.empty(0, device=args.device).device
    except (AssertionError, RuntimeError) as error:
        parser.error(f"--device {args.device}: {error}")
    if args.device.type not in ("cpu", "cuda"):
        parser.error(f"--device {args.device}: times are measured on cpu and cuda alone")
    if args.tokens is None:
        if args.device.type == "cpu" and not args.tiny:
            parser.error("the full size takes hours on a CPU: use --tiny, or choose --tokens")
        args.tokens = 32 if args.tiny else 8192
    for name, least in {"batch": 1, "tokens": 2, "rounds": 1}.items():
        if getattr(args, name) < least:
            parser.error(f"--{name} must be at least {least}, not {getattr(args, name)}")
    if args.out:
        try:
            args.out.open("a").close()
        except OSError as error:
            parser.error(f"--out {args.out} cannot be written: {error}")
    return args


def main(arguments: list[str] | None = None) -> None:
    args = parsed(arguments)
    torch.manual_seed(0)
    device, N = args.device, args.tokens
    sides = build(args.model, args.tiny, args.batch, N, device)
    facts = {
        "model": args.model, "batch": args.batch, "tokens": N, "dtype": str(sides[0].model.dtype),
        "config": sides[0].model.config.to_diff_dict(), "fulmen": fulmen.__version__, "torch": torch.__version__,
        "triton": triton and triton.__version__, "transformers": transformers.__version__,
        "mamba_ssm": importlib.util.find_spec("mamba_ssm") is not None,  # else transformers scans in plain PyTorch
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
    }  # fmt: skip
    if device.type == "cpu":
        print("Times on a CPU say nothing about a GPU: fulmen's kernels for GPUs are not used.\n")
    for row in measure(sides, args.rounds, device.type == "cuda"):
        if args.out:
            with args.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row | facts) + "\n")


if __name__ == "__main__":
    main()
