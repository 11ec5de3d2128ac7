"""Fine-tunes a Hugging Face model on fulmen's kernels: LoRA or all weights, packed sequences, resumable.

    python examples/finetune.py                                  # a tiny random MiniMax on this file, on a CPU
    python examples/finetune.py --model tiny-mamba --lora 4      # a tiny random Granite 4 H, adapters alone
    python examples/finetune.py --model MiniMaxAI/MiniMax-Text-01-hf --data notes.txt --lora 16 --out run --device cuda
    python examples/finetune.py --model Qwen/Qwen3-0.6B --data hf:roneneldan/TinyStories --length 8192 --out run
    python examples/finetune.py ... --out run --resume           # goes on after the last checkpoint

Documents (a text file's paragraphs, a dataset's rows) are packed: a row of --length tokens holds several, and
`position_ids` that start over tell the model where. None sees another, and no token is padding.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import torch
import transformers
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn

import fulmen.integrations.transformers

# ------------------------------------------------------------------------------------------------- the data


class Bytes:
    """The tokenizer of the tiny model: a byte is a token, 0 ends a document."""

    eos_token_id = 0

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": list(text.encode())}


def documents(data: str) -> list[str]:
    """The paragraphs of a text file, or the rows of a dataset of the Hub, "hf:name"."""
    if data.startswith("hf:"):
        try:
            from datasets import load_dataset
        except ImportError:
            raise click.UsageError(f"--data {data} needs `pip install datasets`") from None
        rows = load_dataset(data.removeprefix("hf:"), split="train")
        if "text" not in rows.column_names:
            raise click.UsageError(f"--data {data} has no column 'text', only {', '.join(rows.column_names)}")
        parts = rows["text"]
    else:
        try:
            parts = Path(data).read_text("utf-8").split("\n\n")
        except (OSError, UnicodeDecodeError) as error:
            raise click.UsageError(f"--data {data} cannot be read as text: {error}") from None
    texts = [part for part in parts if part.strip()]
    if not texts:
        raise click.UsageError(f"--data {data} holds no text")
    return texts


def batches(texts: list[str], tokenizer: Any, batch: int, length: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields ids and position_ids (batch, length) without end: documents end to end, positions from 0 in each."""
    order, ids, positions = random.Random(seed), [], []
    while True:
        for text in order.sample(texts, len(texts)):
            tokens = [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]
            ids += tokens
            positions += range(len(tokens))
            while len(ids) >= batch * length:
                now, ids, places, positions = (
                    ids[: batch * length], ids[batch * length :], positions[: batch * length],
                    positions[batch * length :],
                )  # fmt: skip
                yield torch.tensor(now).view(batch, length), torch.tensor(places).view(batch, length)


# ------------------------------------------------------------------------------------------------ the model


class LoRA(nn.Module):
    """linear(x) + x A B: `linear` stays as it is, A and B are trained. B starts at zero."""

    def __init__(self, linear: nn.Linear, rank: int) -> None:
        super().__init__()
        self.linear = linear
        kind = {"device": linear.weight.device, "dtype": linear.weight.dtype}
        self.a = nn.Parameter(torch.randn(linear.in_features, rank, **kind) / math.sqrt(linear.in_features))
        self.b = nn.Parameter(torch.zeros(rank, linear.out_features, **kind))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + x @ self.a @ self.b

    # transformers' Mamba-2 mixers look at those of `out_proj`

    @property
    def weight(self) -> Tensor:
        return self.linear.weight

    @property
    def bias(self) -> Tensor | None:
        return self.linear.bias


def add_lora(accelerated: fulmen.integrations.transformers.Accelerated, rank: int) -> None:
    """Gives the projections of every mixer (softmax, lightning, Mamba-2) an adapter, and trains nothing else."""
    accelerated.model.requires_grad_(False)
    found = [
        (parent, name, child)
        for mixer in accelerated.mixers
        for parent in mixer.module.modules()
        for name, child in parent.named_children()
        if isinstance(child, nn.Linear) and not isinstance(parent, LoRA)
    ]
    if not found:
        raise click.UsageError("--lora finds no linear projections in the mixers of this model")
    for parent, name, child in found:
        setattr(parent, name, LoRA(child, rank))


def load_model(name: str, device: str) -> tuple[Any, Any]:
    sizes = {
        "vocab_size": 256, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "num_local_experts": 2, "num_experts_per_tok": 2, "eos_token_id": 0,
        "pad_token_id": None,
    }  # fmt: skip
    mamba = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "shared_intermediate_size": 32}
    if name == "tiny":  # lightning and softmax
        kinds = ["linear_attention"] * 3 + ["full_attention"]
        config = transformers.MiniMaxConfig(**sizes, layer_types=kinds)
    elif name == "tiny-mamba":  # Mamba-2 and softmax
        kinds = ["mamba"] * 3 + ["attention"]
        config = transformers.GraniteMoeHybridConfig(**sizes, **mamba, layer_types=kinds)
    else:
        try:
            model = transformers.AutoModelForCausalLM.from_pretrained(name, dtype="auto").to(device)
            tokenizer = transformers.AutoTokenizer.from_pretrained(name)
        except (OSError, ValueError) as error:
            raise click.UsageError(f"--model {name} cannot be loaded: {error}") from None
        if tokenizer.eos_token_id is None:
            raise click.UsageError(f"the tokenizer of {name} has no token that ends a document")
        return model, tokenizer
    return transformers.AutoModelForCausalLM.from_config(config).to(device), Bytes()


def loss_of(model: Any, ids: Tensor, positions: Tensor) -> Tensor:
    """The mean loss of each next token of the same document."""
    logits = model(ids, position_ids=positions, use_cache=False).logits[:, :-1]
    target = ids[:, 1:].masked_fill(positions[:, 1:] == 0, -100)
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), target.flatten())


# --------------------------------------------------------------------------------------------------- the run


def trained(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}


def save(
    path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, losses: list[float], options: dict[str, Any]
) -> None:
    """Writes beside the old checkpoint first, so that one that is whole is always there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(".new")
    state = {"weights": trained(model), "optimizer": optimizer.state_dict(), "losses": losses, "options": options}
    torch.save(state, fresh)
    fresh.replace(path)


def resume(
    path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, options: dict[str, Any], device: str
) -> list[float]:
    """Loads a checkpoint of a run with the same `options`, and returns the losses of its steps."""
    saved = torch.load(path, map_location=device)
    was = saved.get("options", {})
    differ = [name for name in options if was.get(name) != options[name]]
    if differ:
        before, after = (", ".join(f"{name} {of.get(name)}" for name in differ) for of in (was, options))
        raise click.UsageError(f"{path} was written with {before}; --resume needs the same, not {after}")
    shapes, expected = ({name: tuple(p.shape) for name, p in w.items()} for w in (saved["weights"], trained(model)))
    if shapes != expected:
        name = min(shapes.items() ^ expected.items())[0]
        found = f"{name} has shape {shapes.get(name)} there and {expected.get(name)} here"
        raise click.UsageError(f"{path} holds other weights than this model trains: {found}")
    for name, p in trained(model).items():
        p.copy_(saved["weights"][name])
    rates = [group["lr"] for group in optimizer.param_groups]
    optimizer.load_state_dict(saved["optimizer"])
    for group, lr in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = lr  # --lr may change
    return list(saved["losses"])


def plot(losses: list[float], path: Path) -> None:
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(6, 3.5), layout="constrained")
    axis.plot(range(1, len(losses) + 1), losses)
    axis.set(xlabel="step", ylabel="loss")
    figure.savefig(path)


def usable(_: click.Context, __: click.Parameter, device: str) -> str:
    try:
        torch.empty(0, device=device)
    except (AssertionError, RuntimeError) as error:
        raise click.BadParameter(f"{device}: {error}") from None
    return device


@click.command(context_settings={"show_default": True})
@click.option("--model", "name", default="tiny", help="A model of the Hub, a folder, 'tiny' or 'tiny-mamba'.")
@click.option("--data", default=__file__, help="A text file, or hf:NAME of a dataset with a column 'text'.")
@click.option("--lora", type=click.IntRange(0), default=0, help="Rank of the adapters; 0 trains all weights.")
@click.option("--length", type=click.IntRange(2), default=256, help="Tokens in a row.")
@click.option("--batch", type=click.IntRange(1), default=2, help="Rows a step.")
@click.option("--steps", type=click.IntRange(1), default=40, help="In all, with those before --resume.")
@click.option("--lr", type=click.FloatRange(0), default=3e-3, help="Of AdamW.")
@click.option("--every", type=click.IntRange(1), default=20, help="Steps between checkpoints.")
@click.option(
    "--out", type=click.Path(file_okay=False, path_type=Path), help="A folder for checkpoints and the loss curve."
)
@click.option("--resume", "go_on", is_flag=True, help="Go on from the checkpoint in --out.")
@click.option("--device", default="cuda" if torch.cuda.is_available() else "cpu", callback=usable)
@click.option("--seed", default=0)
def main(
    name: str, data: str, lora: int, length: int, batch: int, steps: int, lr: float, every: int, out: Path | None,
    go_on: bool, device: str, seed: int,
) -> None:  # fmt: skip
    """Trains, and writes checkpoints and a loss curve."""
    path = None if out is None else out / "checkpoint.pt"
    if go_on and path is None:
        raise click.UsageError("--resume needs --out")
    if go_on and path is not None and not path.exists():
        raise click.UsageError(f"--resume finds no checkpoint: there is no {path}")
    texts = documents(data)
    options = {
        "--model": name, "--lora": lora, "--length": length, "--batch": batch, "--seed": seed,
        "sha256 of the text": hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16],
    }  # fmt: skip
    console = Console()
    torch.manual_seed(seed)
    model, tokenizer = load_model(name, device)
    accelerated = fulmen.integrations.transformers.accelerate(model)
    if lora:
        add_lora(accelerated, lora)
    model.train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr)
    losses: list[float] = []
    if go_on and path is not None:
        losses = resume(path, model, optimizer, options, device)
        if len(losses) >= steps:
            console.print(f"{path} is finished: it has {len(losses)} steps, and --steps is {steps}", soft_wrap=True)
            return
    rows = batches(texts, tokenizer, batch, length, seed)
    for _ in losses:  # those that were seen
        next(rows)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("loss", total=steps, completed=len(losses))
        while len(losses) < steps:
            ids, positions = (x.to(device) for x in next(rows))
            loss = loss_of(model, ids, positions)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            losses.append(loss.item())
            progress.update(task, advance=1, description=f"loss {losses[-1]:.3f}")
            if path is not None and (len(losses) % every == 0 or len(losses) == steps):
                save(path, model, optimizer, losses, options)
    console.print(f"loss {losses[0]:.3f} to {losses[-1]:.3f} in {len(losses)} steps")
    if out is not None:
        plot(losses, out / "loss.png")


if __name__ == "__main__":
    main()
