"""Whole attention layers for the benchmark, `layer`, and what they are made of, `layer_parts`.

The call is layer(x); x and every parameter get a gradient. All results are compared whole: at the timed shape with the
eager layer in fp64, whose memory is bounded, at the gate's small shape with the reference.
"""

from __future__ import annotations

import copy
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from fulmen import decay, layers
from fulmen.bench import floors
from fulmen.bench.adapters import Attend, Case, Operation, Source, dtype_of
from fulmen.bench.adapters.flash import flash
from fulmen.bench.adapters.lightning import lightning
from fulmen.bench.gate import Formula, Problem
from fulmen.testing import flash as softmax
from fulmen.testing import lightning as linear

WORDS = {
    "mhsa": "multi-head self-attention layer (fused projections)",
    "mha": "multi-head attention layer (separate projections)",
    "gqa": "grouped-query attention layer",
    "mqa": "multi-query attention layer",
    "mla": "multi-head latent attention layer",
    "minimax": "lightning attention layer as in MiniMax-Text-01",
    "ring": "lightning attention layer as in Ring-linear 2.0",
}
LIGHTNING = ("minimax", "ring")
SMALL_RANK = 64


class Inputs(NamedTuple):
    x: Tensor
    layer: nn.Module
    twins: dict[str, nn.Module]  # the same parameters, other backends

    def on(self, backend: str) -> nn.Module:
        if backend not in self.twins:
            self.twins[backend] = twin = copy.copy(self.layer)
            if isinstance(twin, layers.LightningAttention):
                twin.backend = backend
            else:
                twin.options = self.layer.options._replace(backend=backend)  # type: ignore[operator, union-attr]
        return self.twins[backend]


class Layer(Operation):
    """mla: D = E + what RoPE turns, `rank` is the size of both latents; others: H * D = hidden unless given."""

    KEYS: ClassVar[Case] = {
        "layer": "mhsa", "B": 1, "N": 1024, "H": 8, "H_KV": None, "D": 64, "E": None, "hidden": None, "rank": 0,
        "dtype": "auto", "causal": True,
    }  # fmt: skip

    def complete(self, case: Case) -> Case:
        done = self.KEYS | case
        kind, H, D, E = (done[key] for key in ("layer", "H", "D", "E"))
        usual = {"mqa": 1, "gqa": None}.get(kind, H)
        H_KV = done["H_KV"] or usual
        if kind not in WORDS:
            raise ValueError(f"layer={kind}: must be one of {', '.join(WORDS)}")
        if bool(done["rank"]) != (kind == "mla"):
            raise ValueError(f"layer={kind} with rank={done['rank']}: mla has a rank, and the others none")
        if kind == "mla" and not (E and E < D):
            raise ValueError(f"layer=mla: E={E} must be less than D={D}, by as much as RoPE turns")
        if kind != "mla" and E not in (None, D):
            raise ValueError(f"layer={kind}: E={E} must be D={D}")
        if H_KV is None or (usual is not None and usual != H_KV):
            raise ValueError(f"layer={kind}: H_KV={done['H_KV']} must be {'given' if usual is None else usual}")
        E = E or D
        return done | {"H_KV": H_KV, "E": E, "hidden": done["hidden"] or H * E}

    def function(self, case: Case) -> str:
        attention, own = self.within(case)
        return f"{WORDS[case['layer']]}, {attention.function(own)}"

    def within(self, case: Case) -> tuple[Operation, Case]:
        """The attention of the layer."""
        attention: Operation = lightning if case.get("layer") in LIGHTNING else flash
        known = {key: case[key] for key in attention.KEYS if key in case}
        return attention, attention.complete(known | {"grad": case.get("grad", True)})

    def small_case(self, case: Case) -> Case:
        """As of any operation, and with a small rank."""
        case = super().small_case(case) | {"hidden": None, "rank": min(case["rank"], SMALL_RANK)}
        if case["layer"] == "mqa":
            case |= {"H": case["H"] // case["H_KV"], "H_KV": 1}
        return self.complete(case)

    def drawn(self, case: Case, source: Source, fully: bool = False) -> Problem:
        x = source.normal((case["B"], case["N"], case["hidden"]), dtype_of(case)).requires_grad_()
        layer = filled(made(case, source.device, dtype_of(case), "eager"), source)
        parameters = dict(layer.named_parameters())

        def formula(x: Tensor, *weights: Tensor) -> Tensor:
            backend = "reference" if x.dtype == torch.float64 and source.whole else "eager"
            values = dict(zip(parameters, weights, strict=True))
            y: Tensor = functional_call(made(case, source.device, x.dtype, backend), values, (x,))
            return y

        arguments = (x, *parameters.values())
        return Formula(formula).problem(Inputs(x, layer, {}), arguments, ["x", *parameters], source.seed)

    def attend(self, backend: str) -> Attend:
        return lambda p: p.on(backend)(p.x)


def made(case: Case, device: torch.device, dtype: torch.dtype, backend: str) -> nn.Module:
    hidden, H, D, E = (case[key] for key in ("hidden", "H", "D", "E"))
    options: dict[str, Any] = {"backend": backend, "device": device, "dtype": dtype}
    kind, rank = case["layer"], case["rank"]
    if kind in LIGHTNING:
        return layers.LightningAttention(hidden, H, head_dim=D, preset=kind, num_layers=2, **options)
    options["causal"] = case["causal"]
    if kind == "mla":
        sizes = {"q_rank": rank, "kv_rank": rank, "nope_dim": E, "rope_dim": D - E, "value_dim": E}
        return layers.MultiHeadLatentAttention(hidden, H, **sizes, **options)
    options["head_dim"] = D
    if kind == "gqa":
        return layers.GroupedQueryAttention(hidden, H, case["H_KV"], **options)
    kinds = {"mhsa": layers.MultiHeadSelfAttention, "mha": layers.MultiHeadAttention, "mqa": layers.MultiQueryAttention}
    return kinds[kind](hidden, H, **options)


def filled(layer: nn.Module, source: Source) -> nn.Module:
    """Every parameter drawn: matrices so that a product keeps the size of what it multiplies, scales around 1."""
    with torch.no_grad():
        for p in layer.parameters():
            drawn = source.normal(tuple(p.shape), torch.float32)
            p.copy_(drawn * p.shape[1] ** -0.5 if p.ndim == 2 else 1 + drawn / 4)
    return layer


class LayerParts(Layer):
    """Each part on inputs of its own: every projection as one product, and the attention kernel.

    Interleaved with the layer it shows what the layer adds: norms, RoPE, joining q and k, sums of gradients.
    """

    def function(self, case: Case) -> str:
        return f"parts of a {super().function(case)}"

    def drawn(self, case: Case, source: Source, fully: bool = False) -> Problem:
        """The products, and attention of q, k, v as projections leave them, (B, N, H, D); both in one problem."""
        dtype = dtype_of(case)
        B, N, H, H_KV, D, E = (case[key] for key in ("B", "N", "H", "H_KV", "D", "E"))
        sizes = floors.projections_of(case)
        if case["layer"] in ("mhsa", *LIGHTNING):  # q, k and v are one product
            sizes = [(sizes[0][0], sum(out for _, out in sizes[:3])), *sizes[3:]]
        pairs = []
        for a, b in sizes:
            pairs += [source.normal((B, N, a), dtype), source.normal((b, a), dtype) * a**-0.5]
        pairs = [t.requires_grad_() for t in pairs]
        names = [f"{name}{i}" for i in range(len(sizes)) for name in "xw"]
        first = Formula(products, output="y").problem(pairs, pairs, names, source.seed)
        shapes = ((B, N, H, D), (B, N, H_KV, D), (B, N, H_KV, E), (B, N, H, E))
        q, k, v, do = (source.normal(shape, dtype).transpose(1, 2) for shape in shapes)
        do, nothing = do.contiguous(), torch.zeros(0, device=source.device)
        if case["layer"] in LIGHTNING:
            slopes = decay.alibi(H).to(source.device)
            x: Any = linear.Inputs(q, k, v, slopes, 1.0, None, None, do, nothing)
            second = lightning.problem_of(x, source)
        else:
            x = softmax.Inputs(q, k, v, None, None, None, case["causal"], None, None, None, do, nothing)
            second = flash.problem_of(x, source)

        def pick(name: str, y: Tensor) -> Tensor:
            return second.pick(name, y) if name.removeprefix("d") in ("q", "k", "v", "o") else y

        return Problem(
            (pairs, second.x), first.leaves | second.leaves, first.douts | second.douts,
            lambda: first.expected() | second.expected(), second.constants, pick,
        )  # fmt: skip

    def attend(self, backend: str) -> Attend:
        def parts(given: Any) -> list[Tensor]:
            attention: Operation = lightning if isinstance(given[1], linear.Inputs) else flash
            return [*products(*given[0]), attention.attend(backend)(given[1])]

        return parts


def products(*pairs: Tensor) -> list[Tensor]:
    return [F.linear(x, w) for x, w in zip(pairs[::2], pairs[1::2], strict=True)]


layer, layer_parts = Layer(), LayerParts()
