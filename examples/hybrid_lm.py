"""A small language model that mixes lightning, grouped-query and latent attention, trained in a minute on a CPU.

    python examples/hybrid_lm.py                                     # three lightning layers and a grouped-query one
    python examples/hybrid_lm.py --pattern LLM --layers 6 --preset ring --plot loss.png
    torchrun --nproc-per-node 4 examples/hybrid_lm.py --tp 2 --cp 2  # heads and tokens shared out; the rest is FSDP
    python examples/hybrid_lm.py --device cuda --dim 1024 --heads 16 --layers 24 --length 4096 --batch 16 \
        --steps 2000 --autocast --compile

The pattern says which attention the layers have, in turn: L lightning (linear, a state of fixed size), G grouped-query
softmax, M multi-head latent. The text is made here, letter by letter the same every time: small sums told as stories,
so that there is something to learn beyond spelling. At the end the model goes on with prompts of different lengths, in
one batch, on pools of pages and states; on a GPU a step is a CUDA graph.
"""

from __future__ import annotations

import dataclasses
import math
import os
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from fulmen.layers.attention import GroupedQueryAttention
from fulmen.layers.block import AddNorm, GatedMLP, linear_cross_entropy
from fulmen.layers.cache import KVCache, LatentCache, StateCache
from fulmen.layers.latent import MultiHeadLatentAttention
from fulmen.layers.lightning import LightningAttention
from fulmen.layers.pool import Pool
from fulmen.layers.sequences import Sequences
from fulmen.parallel import apply_parallel, shard

Cache = KVCache | LatentCache | StateCache | Pool
EPS = 1e-6  # of the norms
WITHOUT_LENGTHS = ("sdpa", "flash_attn")  # backends that do not read pools

# ------------------------------------------------------------------------------------------------ the model


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes of a `HybridLM`; `pattern` is repeated over the layers."""

    vocab: int
    pattern: str = "LLLG"
    layers: int = 4
    dim: int = 128
    heads: int = 4
    preset: str = "minimax"  # of the lightning layers
    backend: str = "auto"

    def kinds(self) -> list[str]:
        if not self.pattern or set(self.pattern) - set("LGM"):
            raise ValueError(f"pattern={self.pattern!r}: must be made of L (lightning), G (grouped-query), M (latent)")
        return [self.pattern[i % len(self.pattern)] for i in range(self.layers)]


class HybridBlock(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); the attention is of one of the three kinds.

    The last sum is left to the next norm: x and y come from the block before, and x + y is its result.
    """

    def __init__(self, config: Config, layer: int) -> None:
        super().__init__()
        self.kind = config.kinds()[layer]
        self.attention_norm, self.mlp_norm = AddNorm(config.dim, EPS), AddNorm(config.dim, EPS)
        self.attention = attention(config, self.kind, layer)
        self.mlp = GatedMLP(config.dim, -(-8 * config.dim // 3 // 32) * 32)  # a multiple, so that ranks can share it

    def forward(
        self, x: Tensor, y: Tensor | None, cache: Cache | None = None, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        x, normed = self.attention_norm(x, y)
        x, normed = self.mlp_norm(x, self.attention(normed, cache=cache, mask=mask))
        return x, self.mlp(normed)

    def new_cache(self) -> Cache:
        return {"L": StateCache, "G": KVCache, "M": LatentCache}[self.kind]()


def attention(config: Config, kind: str, layer: int) -> nn.Module:
    dim, heads, size, backend = config.dim, config.heads, config.dim // config.heads, config.backend
    if kind == "L":
        return LightningAttention(
            dim, heads, layer=layer, num_layers=config.layers, preset=config.preset, backend=backend
        )
    if kind == "G":
        rope = {"base": 10_000.0}
        return GroupedQueryAttention(
            dim, heads, max(heads // 2, 1), causal=True, qk_norm="before", rope=rope, backend=backend
        )
    return MultiHeadLatentAttention(
        dim, heads, q_rank=dim, kv_rank=dim // 2, nope_dim=size, rope_dim=size // 2, value_dim=size, backend=backend
    )


class HybridLM(nn.Module):
    """Tokens (B, N) to the logits of each next token (B, N, vocab) or, with targets (B, N), to their mean loss."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab, config.dim)
        self.blocks = nn.ModuleList(HybridBlock(config, i) for i in range(config.layers))
        self.norm = AddNorm(config.dim, EPS)
        self.head = nn.Linear(config.dim, config.vocab, bias=False)
        self.checkpointing = False
        nn.init.normal_(self.embed.weight, std=0.02)

    def forward(
        self, ids: Tensor, caches: list[Cache] | None = None, mask: Tensor | None = None, targets: Tensor | None = None
    ) -> Tensor:
        x, y = self.embed(ids), None
        for i, block in enumerate(self.blocks):
            if self.checkpointing and self.training:
                x, y = checkpoint(block, x, y, use_reentrant=False)
            else:
                x, y = block(x, y, None if caches is None else caches[i], mask)
        _, x = self.norm(x, y)
        if targets is None:
            return self.head(x)
        return linear_cross_entropy(x.flatten(0, 1), self.head.weight, targets.flatten()).mean()

    def new_caches(self) -> list[Cache]:
        return [block.new_cache() for block in self.blocks]  # type: ignore[operator]

    @torch.no_grad()
    def generate(self, prompts: list[Tensor], new: int, temperature: float = 0.0, cached: bool = True) -> list[Tensor]:
        """Each prompt (N,) with `new` tokens more; without caches every step computes the whole text again."""
        if cached and self.config.backend not in WITHOUT_LENGTHS:
            return self._generate_on_pools(prompts, new, temperature)
        longest, device = max(len(p) for p in prompts), self.embed.weight.device
        ids = torch.stack([F.pad(p, (longest - len(p), 0)) for p in prompts]).to(device)
        mask = torch.stack([torch.arange(longest) >= longest - len(p) for p in prompts]).to(device)
        for _ in range(new):
            token = pick(self(ids, mask=mask), temperature)
            ids = torch.cat([ids, token], dim=1)
            mask = torch.cat([mask, torch.ones_like(token, dtype=torch.bool)], dim=1)
        return [row[seen] for row, seen in zip(ids, mask, strict=True)]

    def _generate_on_pools(self, prompts: list[Tensor], new: int, temperature: float) -> list[Tensor]:
        """Prompts are read one by one, then all rows make a token in each step, on a GPU by one CUDA graph."""
        B, device, length = len(prompts), self.embed.weight.device, max(len(p) for p in prompts) + new
        served = Sequences(B, length, pages=B * -(-length // 64), page_size=64, slots=B, device=device)
        pools = [block.attention.new_pool(served) for block in self.blocks]  # type: ignore[operator, union-attr]
        token, graph = torch.zeros(B, 1, dtype=torch.int64, device=device), None
        if device.type == "cuda" and new > 1:
            served.step([], 1)  # of empty rows
            for _ in range(3):
                self(token, pools)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                logits = self(token, pools)
        rows, made = [served.new() for _ in prompts], []
        for i in range(new):
            if i == 0:
                for b, prompt in enumerate(prompts):
                    served.step([rows[b]], len(prompt))
                    token[b] = pick(self(prompt[None].to(device), pools), temperature)
            else:
                served.step(rows, 1)
                if graph is None:
                    logits = self(token, pools)
                else:
                    graph.replay()
                token.copy_(pick(logits, temperature))
            made.append(token.clone())
        return [torch.cat([p.to(device), *(t[b] for t in made)]) for b, p in enumerate(prompts)]


def pick(logits: Tensor, temperature: float) -> Tensor:
    """The next token (B, 1), the likeliest or drawn, of the last logits of (B, N, vocab)."""
    last = logits[:, -1].float()
    if temperature > 0:
        return torch.multinomial(torch.softmax(last / temperature, dim=-1), 1)
    return last.argmax(dim=-1, keepdim=True)


# ------------------------------------------------------------------------------------------------- the text

NAMES = ("ada", "ben", "cleo", "dan", "eva")
THINGS = ("shells", "stamps", "keys", "plums", "stones")
WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")


def make_text(stories: int, seed: int = 0) -> str:
    """Sums and differences up to ten, told in words."""
    draw = random.Random(seed)
    lines = []
    for _ in range(stories):
        name, thing, total = draw.choice(NAMES), draw.choice(THINGS), draw.randint(2, 10)
        part = draw.randint(1, total - 1)
        a, b, c = (WORDS[n] for n in (part, total - part, total))
        told = draw.random() < 0.5
        start, verb, end = (a, "finds", c) if told else (c, "loses", a)
        lines.append(f"{name} has {start} {thing}, {verb} {b}, and now has {end}.\n")
    return "".join(lines)


class Alphabet:
    """Letters as numbers."""

    def __init__(self, text: str) -> None:
        self.letters = sorted(set(text))
        self.number = {letter: i for i, letter in enumerate(self.letters)}

    def encode(self, text: str) -> Tensor:
        return torch.tensor([self.number[letter] for letter in text])

    def decode(self, ids: Tensor) -> str:
        return "".join(self.letters[i] for i in ids.tolist())


def batches(ids: Tensor, batch: int, length: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Pieces of the text and, for each letter, the next."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        at = torch.randint(len(ids) - length, (batch,), generator=generator)
        pieces = ids[at[:, None] + torch.arange(length + 1)]
        yield pieces[:, :-1], pieces[:, 1:]


# ---------------------------------------------------------------------------------------------------- ranks


def share_out(model: HybridLM, mesh: DeviceMesh, fsdp: bool = True) -> HybridLM:
    """Heads over the mesh's dimension tp, tokens over cp and, with FSDP, weights over dp and cp, whose gradients are
    averaged."""
    apply_parallel(model, mesh)
    if fsdp:
        for block in model.blocks:
            fully_shard(block, mesh=mesh["dp", "cp"])
        fully_shard(model, mesh=mesh["dp", "cp"])
    return model


def own_part(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """This rank's rows and tokens of a batch (B, N)."""
    return shard(shard(x, mesh["dp"], dim=0), mesh["cp"], dim=1)


def mean_over_ranks(loss: Tensor, mesh: DeviceMesh) -> Tensor:
    loss = loss.clone()
    for name in ("dp", "cp"):
        dist.all_reduce(loss, group=mesh.get_group(name))
    return loss / (mesh["dp"].size() * mesh["cp"].size())


def start_ranks(tp: int, cp: int, device: str) -> DeviceMesh | None:
    """The mesh of the processes torchrun started; None: there is one."""
    count = int(os.environ.get("WORLD_SIZE", "1"))
    if count == 1:
        if tp * cp > 1:
            raise click.UsageError(f"--tp {tp} --cp {cp} take {tp * cp} processes: torchrun --nproc-per-node {tp * cp}")
        return None
    if count % (tp * cp):
        raise click.UsageError(f"--tp {tp} --cp {cp} cannot be made of {count} processes")
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    return init_device_mesh(device, (count // (tp * cp), cp, tp), mesh_dim_names=("dp", "cp", "tp"))


def gathered(model: HybridLM, device: str) -> HybridLM:
    """A model of one process with the weights of one that is shared out."""
    whole = HybridLM(model.config).to(device)
    whole.load_state_dict(get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)))
    return whole.eval()


# ------------------------------------------------------------------------------------------------- training


def train(
    model: HybridLM,
    ids: Tensor,
    *,
    steps: int,
    batch: int,
    length: int,
    lr: float = 3e-3,
    seed: int = 0,
    autocast: bool = False,
    forward: Callable[..., Tensor] | None = None,
    watch: Callable[[float], None] | None = None,
    mesh: DeviceMesh | None = None,
) -> list[float]:
    """The loss of each step; `forward` stands for the model (compiled), `watch` is told each loss, `mesh` is that of a
    model that is shared out."""
    device = model.embed.weight.device
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    warm = max(1, steps // 20)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda s: min((s + 1) / warm, 0.55 + 0.45 * math.cos(math.pi * min(s / steps, 1.0)))
    )
    losses = []
    model.train()
    for _, (x, y) in zip(range(steps), batches(ids, batch, length, seed), strict=False):
        if mesh is not None:
            x, y = own_part(x, mesh), own_part(y, mesh)
        with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
            loss = (forward or model)(x.to(device), targets=y.to(device))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        schedule.step()
        losses.append((loss if mesh is None else mean_over_ranks(loss.detach(), mesh)).item())
        if watch is not None:
            watch(losses[-1])
    model.eval()
    return losses


@torch.no_grad()
def evaluate(model: HybridLM, ids: Tensor, length: int, pieces: int = 16) -> float:
    """Mean loss over the start of a text."""
    length = min(length, len(ids) - 1)
    count = min(pieces, (len(ids) - 1) // length)
    x, y = (ids[i : i + count * length].view(count, length).to(model.embed.weight.device) for i in (0, 1))
    return model(x, targets=y).item()


def sparkline(values: list[float], width: int = 72) -> str:
    """The values as a row of bars, averaged down to `width`."""
    size = max(1, math.ceil(len(values) / width))
    means = [sum(values[i : i + size]) / len(values[i : i + size]) for i in range(0, len(values), size)]
    low, high = min(means), max(means)
    bars = "▁▂▃▄▅▆▇█"
    return "".join(bars[round((m - low) / ((high - low) or 1.0) * (len(bars) - 1))] for m in means)


def plot(losses: list[float], path: Path, title: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    axes.plot(losses, linewidth=1)
    axes.set(xlabel="step", ylabel="loss (nats a letter)", title=title, ylim=(0, None))
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=150)


# ----------------------------------------------------------------------------------------------- the command


COUNT = click.IntRange(min=1)


def check_device(device: str) -> None:
    try:
        place = torch.device(device)
    except RuntimeError as error:
        raise click.UsageError(f"--device {device}: {error}") from error
    if place.type == "cuda" and (place.index or 0) >= torch.cuda.device_count():
        raise click.UsageError(f"--device {device}: torch finds {torch.cuda.device_count()} CUDA devices here")


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.option("--pattern", default="LLLG", help="Attention of the layers in turn: L lightning, G grouped, M latent.")
@click.option("--preset", type=click.Choice(["minimax", "ring"]), default="minimax", help="Of the lightning layers.")
@click.option("--layers", type=COUNT, default=4, help="Number of layers.")
@click.option("--dim", type=COUNT, default=128, help="Size of a token's vector.")
@click.option("--heads", type=COUNT, default=4, help="Heads of each layer.")
@click.option("--length", type=COUNT, default=128, help="Letters in a piece of text.")
@click.option("--batch", type=COUNT, default=16, help="Pieces a step.")
@click.option("--steps", type=COUNT, default=200, help="Steps of training.")
@click.option("--lr", type=click.FloatRange(min=0), default=3e-3, help="Learning rate at its highest.")
@click.option("--seed", default=0, help="Of weights and batches.")
@click.option("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="Where to compute.")
@click.option("--backend", default="auto", help="Of every layer's attention.")
@click.option("--autocast", is_flag=True, help="Train in bfloat16.")
@click.option("--compile", "compiled", is_flag=True, help="torch.compile the model.")
@click.option("--checkpointing", is_flag=True, help="Recompute activations in the backward pass.")
@click.option("--tp", type=COUNT, default=1, help="Ranks that share the heads; under torchrun.")
@click.option("--cp", type=COUNT, default=1, help="Ranks that share a piece's letters; under torchrun.")
@click.option("--plot", "picture", type=click.Path(path_type=Path), help="Write the loss curve to this PNG.")
@click.option("--new", type=click.IntRange(min=0), default=60, help="Letters to generate at the end.")
@click.option("--temperature", type=click.FloatRange(min=0), default=0.0, help="0: always the likeliest letter.")
def main(
    pattern: str, preset: str, layers: int, dim: int, heads: int, length: int, batch: int, steps: int, lr: float,
    seed: int, device: str, backend: str, autocast: bool, compiled: bool, checkpointing: bool, tp: int, cp: int,
    picture: Path | None, new: int, temperature: float,
) -> None:  # fmt: skip
    """Train a small hybrid language model on a text made here, and let it go on with a few prompts."""
    check_device(device)
    mesh = start_ranks(tp, cp, device)
    console = Console(quiet=mesh is not None and dist.get_rank() > 0)
    torch.manual_seed(seed)
    text, unseen = make_text(20_000), make_text(500, seed=1)
    alphabet = Alphabet(text)
    ids, held_out = alphabet.encode(text), alphabet.encode(unseen)
    if length >= len(ids):
        raise click.UsageError(f"--length {length}: the text has {len(ids):,} letters")
    try:
        config = Config(len(alphabet.letters), pattern, layers, dim, heads, preset, backend)
        model = HybridLM(config).to(device)
        size = sum(p.numel() for p in model.parameters())
        if mesh is not None:
            share_out(model, mesh)
    except (ValueError, NotImplementedError) as error:
        raise click.UsageError(str(error)) from error
    model.checkpointing = checkpointing
    console.print(f"{''.join(config.kinds())}: {size / 1e6:.2f} M parameters on {device}, {len(ids):,} letters of text")
    columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TextColumn("loss {task.fields[loss]:.3f}"))
    begun = time.perf_counter()
    with Progress(*columns, TimeRemainingColumn(), console=console) as progress:
        task = progress.add_task("training", total=steps, loss=math.nan)
        losses = train(
            model, ids, steps=steps, batch=batch, length=length, lr=lr, seed=seed, autocast=autocast,
            forward=torch.compile(model, fullgraph=True) if compiled else None,
            watch=lambda loss: progress.update(task, advance=1, loss=loss), mesh=mesh,
        )  # fmt: skip
    if mesh is not None:
        model = gathered(model, device)
        dist.destroy_process_group()
    speed = steps * batch * length / (time.perf_counter() - begun)
    console.print(f"loss {losses[0]:.3f} [cyan]{sparkline(losses, 60)}[/] {losses[-1]:.3f}")
    console.print(
        f"on text it has not seen: {evaluate(model, held_out, length):.3f} nats a letter; {speed:,.0f} letters/s"
    )
    if picture is not None:
        plot(losses, picture, f"{''.join(config.kinds())}, {size / 1e6:.2f} M parameters")
        console.print(f"loss curve: {picture}")
    prompts = ["ada has two keys, finds three, and now has", "cleo has ten plums, loses", "eva"]
    for prompt, row in zip(
        prompts, model.generate([alphabet.encode(p) for p in prompts], new, temperature), strict=True
    ):
        told = alphabet.decode(row)[len(prompt) :].replace("\n", " / ")
        console.print(f"[bold]{prompt}[/][green]{told}[/]", highlight=False)


if __name__ == "__main__":
    main()
