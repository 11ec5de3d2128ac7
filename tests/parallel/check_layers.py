"""Layers and models over a mesh of ranks, seen from one of them; `test_layers.py` runs these."""

from __future__ import annotations

import copy
import functools
import importlib.util
import itertools
import math
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from fulmen import parallel
from fulmen.layers import (
    GroupedQueryAttention,
    LightningAttention,
    Mamba2,
    MultiHeadLatentAttention,
    MultiHeadSelfAttention,
)
from fulmen.testing import GRADIENT_FACTOR

LATENT = {"kv_rank": 16, "nope_dim": 8, "rope_dim": 4, "value_dim": 12}
ROPE = {"causal": True, "rope": {}, "qk_norm": "before"}
LAYERS = {
    "grouped": lambda: GroupedQueryAttention(24, 8, 2, head_dim=6, sinks=True, bias=True, **ROPE),
    "window": lambda: GroupedQueryAttention(24, 4, 4, window=(5, None), **ROPE),
    "self": lambda: MultiHeadSelfAttention(24, 4, **ROPE),
    "latent": lambda: MultiHeadLatentAttention(24, 4, **LATENT, q_rank=20),
    "minimax": lambda: LightningAttention(24, 4, head_dim=8, layer=1, num_layers=3),
    "ring": lambda: LightningAttention(24, 4, head_dim=8, preset="ring", layer=1, num_layers=3),
}
EXACT = {"atol": 1e-11, "rtol": 0}


def full(x):
    return x.full_tensor() if isinstance(x, DTensor) else x


@functools.cache
def mesh_of(tp: int, cp: int, device: str = "cpu"):
    dp = dist.get_world_size() // (tp * cp)
    return init_device_mesh(device, (dp, cp, tp), mesh_dim_names=("dp", "cp", "tp"))


@functools.cache
def hybrid():
    path = Path(__file__).parents[2] / "examples" / "hybrid_lm.py"
    spec = importlib.util.spec_from_file_location("hybrid_lm", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["hybrid_lm"] = module
    spec.loader.exec_module(module)
    return module


def layer(name: str, tp: int, cp: int, softmax: str = "ring", shards: str = "contiguous", packed: bool = False) -> None:
    """Outputs and every gradient of a layer over a mesh are those of the layer alone, in fp64."""
    mesh = mesh_of(tp, cp)
    torch.manual_seed(0)
    alone = LAYERS[name]().double()
    for p in alone.parameters():
        torch.nn.init.normal_(p, std=0.4)
    shared = parallel.apply_parallel(copy.deepcopy(alone), mesh, softmax=softmax, shards=shards)
    x, dy = torch.randn(2, 1 if packed else 2, 32, 24, dtype=torch.float64)
    more = {"cu_seqlens": torch.tensor([0, 5, 21, 32], dtype=torch.int32)} if packed else {}
    z = x.clone().requires_grad_()
    y = alone(z, **more)
    y.backward(dy)
    cut = {"dim": 1, "shards": shards}
    own = parallel.shard(x, mesh["cp"], **cut).clone().requires_grad_()
    y_own = shared(own, **more)
    y_own.backward(parallel.shard(dy, mesh["cp"], **cut))
    torch.testing.assert_close(parallel.unshard(y_own.detach(), mesh["cp"], **cut), y.detach(), **EXACT)
    torch.testing.assert_close(parallel.unshard(own.grad, mesh["cp"], **cut), z.grad, **EXACT)
    if name == "self" and tp > 1:  # rows of q, k and v are a rank's own: state_dict puts them in order, gradients not
        return
    for (key, p), q in zip(alone.named_parameters(), shared.parameters(), strict=True):
        grad = full(q.grad).clone()
        dist.all_reduce(grad, group=mesh["cp"].get_group())
        torch.testing.assert_close(grad, p.grad, **EXACT, msg=lambda m, key=key: f"{key}: {m}")


def refusals() -> None:
    """Before anything is changed or sent."""
    P = dist.get_world_size()
    mesh, flat = mesh_of(2, P // 2), mesh_of(1, P)
    two = torch.nn.Sequential(
        GroupedQueryAttention(24, 4, 2, causal=True), GroupedQueryAttention(24, 3, 3, causal=True)
    )
    hybrid = torch.nn.Sequential(GroupedQueryAttention(24, 4, 2, causal=True), Mamba2(24, 4, head_dim=8))
    wrong = [
        (r"1: num_heads=3 cannot be shared out evenly to 2 ranks", two, mesh, {}),
        (r"the mesh has dims \('dp', 'cp', 'tp'\), and no 'pp'", two, mesh, {"tp": "pp"}),
        (r"3 heads of q .*'ulysses' cannot share out", two, flat, {"softmax": "ulysses", "tp": None}),
        (r"softmax='star'", two, mesh, {"softmax": "star"}),
        (r"tp and cp are both 'cp'", two, flat, {"tp": "cp", "cp": "cp"}),
        (r"must be 'contiguous'", LightningAttention(24, 4), flat, {"shards": "zigzag", "tp": None}),
        (r"has dropout=0.1", GroupedQueryAttention(24, 4, 4, dropout=0.1), flat, {"tp": None}),
        (r"1 is a Mamba2 layer, which does not cut its tokens", hybrid, flat, {"tp": None}),
        (r"Linear has no attention layer", torch.nn.Linear(2, 2), flat, {}),
    ]
    for message, model, where, options in wrong:
        with pytest.raises(ValueError, match=message):
            parallel.apply_parallel(model, where, **options)
        assert not any(isinstance(p, DTensor) for p in model.parameters())
        assert all(getattr(m, "cp", None) is None for m in model.modules())
    with pytest.raises(TypeError, match="mesh is a str, must be a DeviceMesh"):
        parallel.apply_parallel(two, "m")
    shared = parallel.apply_parallel(GroupedQueryAttention(24, 4, 4, causal=True), flat, tp=None)
    assert copy.deepcopy(shared).cp is shared.cp  # the same ranks
    x = torch.randn(1, 4, 24)
    for message, options in (
        ("mask is given", {"mask": torch.ones(1, 4, dtype=torch.bool)}),
        ("context is given", {"context": x}),
    ):
        with pytest.raises(ValueError, match=message):
            shared(x, **options)


def twice() -> None:
    """A model that is parallel is refused and stays as it is; heads and tokens may be shared out in two calls."""
    mesh = mesh_of(2, dist.get_world_size() // 2)
    heads, tokens = r"0 has weights over mesh dims \('tp',\)", "tokens over mesh dim 'cp'"
    wrong = [
        ({}, {}, f"{heads} and {tokens}"),
        ({"cp": None}, {}, heads),
        ({"cp": None}, {"cp": None}, heads),
        ({"tp": None}, {}, f"0 has {tokens}"),
        ({"tp": None}, {"tp": None}, f"0 has {tokens}"),
    ]
    for name, (first, second, message) in itertools.product(LAYERS, wrong):
        model = parallel.apply_parallel(torch.nn.Sequential(LAYERS[name](), torch.nn.Linear(24, 24)), mesh, **first)
        parameters, cp = list(model.parameters()), model[0].cp
        for again in (model, copy.deepcopy(model)):
            with pytest.raises(ValueError, match=f"already parallel: {message}. A model is made parallel once"):
                parallel.apply_parallel(again, mesh, **second)
        assert all(p is q for p, q in zip(model.parameters(), parameters, strict=True))
        assert model[0].cp is cp
    sharded = LAYERS["grouped"]()
    fully_shard(sharded, mesh=mesh["dp"])
    with pytest.raises(
        ValueError, match=r"GroupedQueryAttention has weights over mesh dims \('dp',\).*before fully_sh"
    ):
        parallel.apply_parallel(sharded, mesh)
    torch.manual_seed(0)
    alone, x = LAYERS["window"](), torch.randn(1, 8, 24)
    want = parallel.shard(alone(x), mesh["cp"], dim=1)
    for steps in ({"cp": None}, {"tp": None}), ({"tp": None}, {"cp": None}):
        shared = copy.deepcopy(alone)
        for step in steps:
            parallel.apply_parallel(shared, mesh, **step)
        torch.testing.assert_close(shared(parallel.shard(x, mesh["cp"], dim=1)), want)


def build(pattern: str, tp: int, cp: int, fsdp: bool, seed: int = 0, device: str = "cpu"):
    """The hybrid example's model, and the same over a mesh."""
    module = hybrid()
    torch.manual_seed(seed)
    alphabet = module.Alphabet(module.make_text(100))
    model = module.HybridLM(module.Config(len(alphabet.letters), pattern, len(pattern), dim=32, heads=4)).to(device)
    mesh = mesh_of(tp, cp, device)
    return module, model, module.share_out(copy.deepcopy(model), mesh, fsdp=fsdp), mesh, alphabet


def training(
    pattern: str, tp: int, cp: int, checkpointing: bool = False, steps: int = 8, device: str = "cpu"
) -> None:  # fmt: skip
    """The losses of a model that is shared out are those of one process, up to rounding.

    The yardstick is one process in fp64. One process in fp32 strays from it as its roundings grow from step to step;
    ranks, which only sum in another order, may stray GRADIENT_FACTOR times as far as that ever was up to the step. A
    loss itself is a mean in fp32, on both sides: as many roundings more as a pairwise sum of its terms has levels.
    """
    module, alone, shared, mesh, alphabet = build(pattern, tp, cp, fsdp=True, device=device)
    shared.checkpointing = checkpointing
    ids = alphabet.encode(module.make_text(300))
    options = {"steps": steps, "batch": 4, "length": 32, "lr": 1e-2}
    losses, *yardsticks = torch.zeros(3, steps, dtype=torch.float64, device=device)
    losses.copy_(torch.tensor(module.train(shared, ids, mesh=mesh, **options)))
    if dist.get_rank() == 0:  # one process: the others are told
        for told, model in zip(yardsticks, (alone, copy.deepcopy(alone).double()), strict=True):
            told.copy_(torch.tensor(module.train(model, ids, mesh=None, **options)))
    for told in yardsticks:
        dist.broadcast(told, 0)
    losses, plain, exact = losses.cpu(), *(told.cpu() for told in yardsticks)
    assert exact[-1] < 0.9 * exact[0], exact
    strayed = (plain - exact).abs().cummax(0).values
    levels = math.log2(options["batch"] * options["length"])
    bound = GRADIENT_FACTOR * strayed + levels * torch.finfo(torch.float32).eps / 2 * exact
    assert ((losses - exact).abs() <= bound).all(), f"{losses - exact}, allowed {bound}"


class Tied(torch.nn.Module):
    """Embedding and output share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = torch.nn.Embedding(11, 24), torch.nn.Linear(24, 11, bias=False)
        self.head.weight = self.embed.weight
        self.attention = LAYERS["grouped"]()

    def forward(self, ids):
        return self.head(self.attention(self.embed(ids)))


def tied() -> None:
    """A shared weight stays shared, and gets both gradients."""
    torch.manual_seed(0)
    alone = Tied().double()
    shared = parallel.apply_parallel(copy.deepcopy(alone), mesh_of(2, dist.get_world_size() // 2))
    assert shared.head.weight is shared.embed.weight
    ids = torch.randint(11, (2, 16))
    cp = mesh_of(2, dist.get_world_size() // 2)["cp"]
    alone(ids).square().sum().backward()
    shared(parallel.shard(ids, cp, dim=1)).square().sum().backward()
    grad = full(shared.head.weight.grad).clone()
    dist.all_reduce(grad, group=cp.get_group())
    torch.testing.assert_close(grad, alone.head.weight.grad, rtol=1e-9, atol=0)


def compiled() -> None:
    """torch.compile breaks its graph where ranks meet, and goes on."""
    torch.manual_seed(0)
    for make in (LAYERS["grouped"], LAYERS["ring"]):
        layer = parallel.apply_parallel(make(), mesh_of(1, dist.get_world_size()), tp=None)
        x = torch.randn(1, 8, 24, requires_grad=True)
        want = torch.autograd.grad(layer(x).sum(), [x, *layer.parameters()])
        got = torch.autograd.grad(torch.compile(layer, backend="eager")(x).sum(), [x, *layer.parameters()])
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b)


def checkpoint(folder: str) -> None:
    """Saved on one mesh with its optimizer, loaded on others: the same weights, and the same next step."""
    P = dist.get_world_size()
    module, _, shared, mesh, alphabet = build("LGM", 2, P // 2, fsdp=True)
    ids = alphabet.encode(module.make_text(100))
    optimizer = torch.optim.AdamW(shared.parameters(), lr=1e-2, fused=True)  # or DTensor thinks for seconds

    def step(model, optimizer, mesh) -> float:
        x, y = (parallel.shard(t[None].repeat(2, 1), mesh["cp"], dim=1) for t in (ids[:64], ids[1:65]))
        loss = torch.nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss.detach())
        return float(loss) / P

    step(shared, optimizer, mesh)
    parallel.save(f"{folder}/saved", shared, optimizer)
    want = step(shared, optimizer, mesh)
    for tp, cp in ((1, P), (1, 1)):
        _, _, other, mesh_, _ = build("LGM", tp, cp, fsdp=True, seed=1)
        fresh = torch.optim.AdamW(other.parameters(), lr=1e-2, fused=True)
        parallel.load(f"{folder}/saved", other, fresh)
        got = step(other, fresh, mesh_)
        assert abs(got - want) < 1e-4 * want, (tp, cp, got, want)
    with pytest.raises(FileExistsError):
        parallel.save(f"{folder}/saved", shared)
    with pytest.raises(FileNotFoundError, match="no checkpoint"):
        parallel.load(f"{folder}/other", shared)
    assert not Path(f"{folder}/saved.partial").exists()


def fused_checkpoint(folder: str) -> None:
    """A fused projection under FSDP is saved as q, k and v, in their order."""
    mesh = mesh_of(1, 1)
    torch.manual_seed(0)
    alone = MultiHeadSelfAttention(24, 4, **ROPE)
    shared = copy.deepcopy(alone)
    fully_shard(shared, mesh=mesh["dp"])
    for name, x in shared.state_dict().items():
        assert torch.equal(full(x), alone.state_dict()[name]), name
    parallel.save(f"{folder}/fused", shared)
    other = MultiHeadSelfAttention(24, 4, **ROPE)
    fully_shard(other, mesh=mesh["dp"])
    parallel.load(f"{folder}/fused", other)
    x = torch.randn(1, 6, 24)
    torch.testing.assert_close(other(x), alone(x))
