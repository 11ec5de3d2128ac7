"""A training step of a stack of layers for the benchmark.

The stack is that of examples/hybrid_lm.py: an embedding, blocks of attention and a gated MLP, each behind an RMSNorm,
and the product that makes logits. `pattern` says which attention the blocks have, in turn: L lightning, G grouped-query
softmax. The call returns the loss of every token. In the pass `total` AdamW follows the backward, with a learning rate
of 0, so that a step leaves its arguments as they were.

At the gate's small shape every parameter's gradient is compared with fp64, at the timed shape the losses are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from fulmen.bench.adapters import Attend, Case, Operation, Source, dtype_of
from fulmen.bench.adapters.attention import lightning
from fulmen.bench.adapters.layers import filled
from fulmen.bench.gate import Formula, Problem
from fulmen.layers import AddNorm, GatedMLP, GroupedQueryAttention, LightningAttention, linear_cross_entropy
from fulmen.testing import Expected

EPS = 1e-6  # of norms; torch's own default depends on the dtype


# ------------------------------------------------------------------------------------------------- the stack
class Parts(NamedTuple):
    """Who computes the parts of a stack, from its modules: ours, or others on the same parameters."""

    attention: Callable[[Any, Tensor], Tensor]
    norm: Callable[[AddNorm, Tensor, Tensor | None], tuple[Tensor, Tensor]]
    mlp: Callable[[GatedMLP, Tensor], Tensor]
    losses: Callable[[Tensor, Tensor, Tensor], Tensor]


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); y is what the block before adds to x, and what this one does."""

    def __init__(self, attention: nn.Module, dim: int, kind: dict[str, Any]) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = (AddNorm(dim, EPS, **kind) for _ in range(2))
        self.attention, self.mlp = attention, GatedMLP(dim, -(-8 * dim // 3 // 32) * 32, **kind)

    def forward(self, x: Tensor, y: Tensor | None, parts: Parts) -> tuple[Tensor, Tensor]:
        x, normed = parts.norm(self.attention_norm, x, y)
        x, normed = parts.norm(self.mlp_norm, x, parts.attention(self.attention, normed))
        return x, parts.mlp(self.mlp, normed)


class Stack(nn.Module):
    """Tokens and the next ones, (B, N) each, to the loss of each token."""

    def __init__(self, case: dict[str, Any], device: torch.device, dtype: torch.dtype, backend: str) -> None:
        super().__init__()
        H, D, H_KV, layers, vocab = (case[key] for key in ("H", "D", "H_KV", "layers", "vocab"))
        dim = H * D
        kind: dict[str, Any] = {"device": device, "dtype": dtype}

        def attention(i: int) -> nn.Module:
            if case["pattern"][i % len(case["pattern"])] == "L":
                return LightningAttention(dim, H, layer=i, num_layers=layers, backend=backend, **kind)
            options: dict[str, Any] = {"causal": True, "qk_norm": "before", "rope": {}, "backend": backend}
            return GroupedQueryAttention(dim, H, H_KV, **options, **kind)

        self.embed = nn.Embedding(vocab, dim, **kind)
        self.blocks = nn.ModuleList(Block(attention(i), dim, kind) for i in range(layers))
        self.norm, self.head = AddNorm(dim, EPS, **kind), nn.Linear(dim, vocab, bias=False, **kind)

    def forward(self, ids: Tensor, targets: Tensor, parts: Parts) -> Tensor:
        x, y = self.embed(ids), None
        for block in self.blocks:
            x, y = block(x, y, parts)
        _, normed = parts.norm(self.norm, x, y)
        return parts.losses(normed.flatten(0, 1), self.head.weight, targets.flatten())


class Inputs(NamedTuple):
    stack: Callable[..., Tensor]  # its blocks compiled, if the case says so
    ids: Tensor
    targets: Tensor


def compile_blocks(stack: nn.Module) -> None:
    """Compiles each block, as for models of many layers: blocks of one kind share their code.

    A whole stack of eight blocks has 2.4 times as many operations to compile.
    """
    limits: Any = torch._dynamo.config
    limits.recompile_limit = max(limits.recompile_limit, 64)  # kinds of blocks, shapes and competitors in one process
    for block in stack.get_submodule("blocks").children():
        block.compile(fullgraph=True, dynamic=False)


def our_module(own: Any, *tensors: Any) -> Any:
    return own(*tensors)


def torch_norm(own: AddNorm, x: Tensor, y: Tensor | None) -> tuple[Tensor, Tensor]:
    x = x if y is None else x + y
    return x, F.rms_norm(x, tuple(own.normalized_shape), own.weight, own.eps)


def torch_mlp(own: GatedMLP, x: Tensor) -> Tensor:
    return own.down(F.silu(own.gate(x)) * own.up(x))


def torch_losses(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    logits = F.linear(x, weight)
    return F.cross_entropy(logits if logits.dtype == torch.float64 else logits.float(), targets, reduction="none")


OURS = Parts(our_module, our_module, our_module, linear_cross_entropy)
PLAIN = Parts(our_module, torch_norm, torch_mlp, torch_losses)  # our attention between torch's operations


# --------------------------------------------------------------------------------------------- the operation
class Train(Operation):
    KEYS: ClassVar[Case] = {
        "B": 64, "N": 8192, "H": 16, "H_KV": None, "D": 128, "layers": 8, "pattern": "LLLLLLLG", "vocab": 32000,
        "compiled": False, "dtype": "auto",
    }  # fmt: skip

    def derived(self, case: Case) -> Case:
        return {"H_KV": max(case["H"] // 2, 1)}

    def faults(self, case: Case) -> Sequence[tuple[Any, str]]:
        odd = not case["pattern"] or set(case["pattern"]) - set("LG")
        return [(odd, f"pattern={case['pattern']}: must be made of L (lightning) and G (grouped-query)")]

    def function(self, case: Case) -> str:
        kinds = {"L": "linear", "G": "softmax"}
        return f"a training step, {' and '.join(kinds[kind] for kind in kinds if kind in case['pattern'])} attention"

    def within(self, case: Case) -> tuple[Operation, Case]:
        return lightning, lightning.complete({key: case[key] for key in ("B", "H", "N", "D", "dtype") if key in case})

    def small_case(self, case: Case) -> Case:
        """A block of each kind, and few letters."""
        kinds, vocab = "".join(dict.fromkeys(case["pattern"])), min(case["vocab"], 50)
        return super().small_case(case) | {"D": 32, "layers": len(kinds), "pattern": kinds, "vocab": vocab}

    def drawn(self, case: Case, source: Source, fully: bool = False) -> Problem:
        text = torch.randint(0, case["vocab"], (case["B"], case["N"] + 1), **source.make)
        stack = filled(Stack(case, source.device, dtype_of(case), "auto"), source)
        parameters, ids, targets = dict(stack.named_parameters()), text[:, :-1].clone(), text[:, 1:].clone()

        def formula(ids: Tensor, targets: Tensor, *weights: Tensor) -> Tensor:
            values = dict(zip(parameters, weights, strict=True))
            plain = Stack(case, source.device, weights[0].dtype, "eager")
            return functional_call(plain, values, (ids, targets, PLAIN))

        if case["compiled"]:
            compile_blocks(stack)
        arguments, names = (ids, targets, *parameters.values()), ["ids", "targets", *parameters]
        made = Formula(formula).problem(Inputs(stack, ids, targets), arguments, names, source.seed)
        made.after = adamw(list(parameters.values()))
        return made if source.whole else replace(made, expected=lambda: losses_alone(formula, arguments))

    def attend(self, backend: str) -> Attend:
        return lambda p: p.stack(p.ids, p.targets, OURS)


def losses_alone(formula: Callable[..., Tensor], arguments: Sequence[Tensor]) -> dict[str, Expected]:
    """Without gradients, whose fp64 would not fit a GPU."""
    with torch.no_grad():
        low = formula(*arguments)
        return {"o": Expected(low, formula(*(a.double() if a.is_floating_point() else a for a in arguments)))}


def adamw(parameters: list[Tensor]) -> Callable[[Sequence[Tensor | None]], None]:
    """A step of it, from gradients."""
    adam = torch.optim.AdamW(parameters, lr=0.0, betas=(0.9, 0.95), weight_decay=0.1, fused=True)

    def step(grads: Sequence[Tensor | None]) -> None:
        for p, grad in zip(parameters, grads, strict=True):
            p.grad = grad
        adam.step()
        adam.zero_grad(set_to_none=True)

    return step


train = Train()
