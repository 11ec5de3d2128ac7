"""Whole attention layers for the benchmark.

`layer` calls layer(x); x and every parameter get a gradient. All results are compared whole: at the timed shape with
the eager layer in fp64, whose memory is bounded, at the gate's small shape with the reference. `layer_parts` is what it
is made of: every projection as one product, and the attention kernel.

`layer_step_gqa`, `_mla` and `_lightning` call layer(x, cache=pool) for the last of N tokens of every row. The benchmark
repeats it, so it must change no bit: that token's keys, values or latents are in the pool already, and states belong to
`Sequences(drafts=True)` with nothing accepted, so that a call reads and writes them and they stay as they are. Results
are compared with the same step of the same layer on a CPU, in fp64 and, for the tolerance, in its own dtype: of all
rows, or of one row of the timed shape.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from fulmen import decay, layers
from fulmen.bench import floors
from fulmen.bench.adapters import Attend, Case, Operation, Source, dtype_of
from fulmen.bench.adapters.attention import flash, flash_cache, latent, lightning, step
from fulmen.bench.gate import YARDSTICKS, Formula, Problem
from fulmen.testing import Expected
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


def filled(layer: nn.Module, source: Source) -> nn.Module:
    """Every parameter drawn: matrices so that a product keeps the size of what it multiplies, scales around 1."""
    with torch.no_grad():
        for p in layer.parameters():
            drawn = source.normal(tuple(p.shape), torch.float32)
            p.copy_(drawn * p.shape[1] ** -0.5 if p.ndim == 2 else 1 + drawn / 4)
    return layer


def made(case: Case, **options: Any) -> nn.Module:
    """The layer of a case of `layer`."""
    hidden, H, kind = (case[key] for key in ("hidden", "H", "layer"))
    if kind in LIGHTNING:
        return layers.LightningAttention(hidden, H, head_dim=case["D"], preset=kind, num_layers=2, **options)
    options["causal"] = case["causal"]
    if kind == "mla":
        return latent_layer(case, q_rank=case["rank"], **options)
    if kind == "gqa":
        return layers.GroupedQueryAttention(hidden, H, case["H_KV"], head_dim=case["D"], **options)
    kinds = {"mhsa": layers.MultiHeadSelfAttention, "mha": layers.MultiHeadAttention, "mqa": layers.MultiQueryAttention}
    return kinds[kind](hidden, H, head_dim=case["D"], **options)


def latent_layer(case: Case, **options: Any) -> nn.Module:
    """D = E + what RoPE turns; `rank` and `q_rank` are the sizes of the latents of keys and of queries."""
    E = case["E"]
    sizes = {"kv_rank": case["rank"], "nope_dim": E, "rope_dim": case["D"] - E, "value_dim": E}
    return layers.MultiHeadLatentAttention(case["hidden"], case["H"], **sizes, **options)


# ------------------------------------------------------------------------------------------------- layer(x)
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

    KEYS = {"layer": "mhsa"} | Operation.SIZES | {"hidden": None, "rank": 0, "causal": True}

    def derived(self, case: Case) -> Case:
        H, E = case["H"], case["E"] or case["D"]
        return {"H_KV": {"mqa": 1, "gqa": None}.get(case["layer"], H), "E": E, "hidden": H * E}

    def faults(self, case: Case) -> Sequence[tuple[Any, str]]:
        kind, H_KV, D, E, rank = (case[key] for key in ("layer", "H_KV", "D", "E", "rank"))
        usual = self.derived(case)["H_KV"]
        return [(wrong, f"layer={kind}: {why}") for wrong, why in (
            (kind not in WORDS, f"must be one of {', '.join(WORDS)}"),
            (bool(rank) != (kind == "mla"), f"with rank={rank}: mla has a rank, and the others none"),
            (kind == "mla" and E >= D, f"E={E} must be less than D={D}, by as much as RoPE turns"),
            (kind != "mla" and E != D, f"E={E} must be D={D}"),
            (usual not in (None, H_KV) or not H_KV, f"H_KV={H_KV} must be {usual or 'given'}"),
        )]  # fmt: skip

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
        layer = filled(made(case, device=source.device, dtype=dtype_of(case), backend="eager"), source)
        parameters = dict(layer.named_parameters())

        def formula(x: Tensor, *weights: Tensor) -> Tensor:
            backend = "reference" if x.dtype == torch.float64 and source.whole else "eager"
            plain = made(case, device=source.device, dtype=x.dtype, backend=backend)
            return functional_call(plain, dict(zip(parameters, weights, strict=True)), (x,))

        # o of a lightning layer's first token is q k times v, and a norm divides by its size: where that happens to be
        # small, gradients err by the rounding of one number, which may be lucky in one draw.
        yardstick, names = Formula(formula), ["x", *parameters]
        for other in range(YARDSTICKS if source.whole and case["layer"] in LIGHTNING else 0):
            like = source.normal(tuple(x.shape), x.dtype).requires_grad_()
            yardstick.problem(like, (like, *parameters.values()), names, source.seed + other).expected()
        return yardstick.problem(Inputs(x, layer, {}), (x, *parameters.values()), names, source.seed)

    def attend(self, backend: str) -> Attend:
        return lambda p: p.on(backend)(p.x)


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
        if case["layer"] in LIGHTNING:
            slopes, nothing = decay.alibi(H).to(source.device), torch.zeros(0, device=source.device)
            x = linear.Inputs(q, k, v, slopes, 1.0, None, None, do.contiguous(), nothing)
            second = lightning.problem_of(x, source)
        else:
            second = flash.problem_of(q, k, v, do.contiguous(), {"causal": case["causal"]}, source)

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


# -------------------------------------------------------------------------------------- layer(x, cache=pool)
class StepInputs(NamedTuple):
    x: Tensor
    layer: nn.Module
    pool: Any


class LayerStep(Operation):
    """Of a kind of layer, which `made` makes, over the pool of the operation `attention`."""

    SIZES = Operation.SIZES | {"H": 32, "N": 8192, "N_Q": 1, "D": 128, "page": 64, "causal": True, "grad": False,
                               "hidden": None}  # fmt: skip
    attention: Operation
    words: str
    made: Any

    def derived(self, case: Case) -> Case:
        return super().derived(case) | {"hidden": case["H"] * (case["E"] or case["D"])}

    def faults(self, case: Case) -> Sequence[tuple[Any, str]]:
        one = case["N_Q"] == 1 and case["causal"]
        return [(not one, "N_Q and causal: a step of a layer is of one token, and causal")]

    def function(self, case: Case) -> str:
        return f"a decoding step of a {self.words}"

    def sizes_within(self, case: Case) -> Case:
        """What the case of the attention has instead of the layer's own."""
        return {}

    def within(self, case: Case) -> tuple[Operation, Case]:
        own = {key: case[key] for key in self.attention.KEYS if key in case}
        return self.attention, self.attention.complete(own | self.sizes_within(self.KEYS | case))

    def small_case(self, case: Case) -> Case:
        return self.complete(super().small_case(case))

    def drawn(self, case: Case, source: Source, fully: bool = False) -> Problem:
        dtype, B, device = dtype_of(case), case["B"], source.device
        layer = filled(self.made(case, device, dtype), source)
        sequences, rows = served(case, B, device)
        x, do = (source.normal((B, 1, case["hidden"]), dtype) for _ in range(2))
        given = StepInputs(x, layer, layer.new_pool(sequences))  # type: ignore[operator]
        for t in given.pool.memory:
            t.copy_(source.normal(tuple(t.shape), torch.float32))
        compared = list(range(B)) if source.whole else [random.Random(source.seed).randrange(B)]
        with torch.no_grad():
            layer(x, cache=given.pool)

        @torch.no_grad()
        def expected() -> dict[str, Expected]:
            kinds = (dtype, torch.float64)
            low, exact = (torch.cat([self.alone(case, given, rows[b], b, kind) for b in compared]) for kind in kinds)
            return {"o": Expected(low, exact)}

        constants = {"x": x, **dict(layer.named_parameters())}
        constants |= {f"memory {i}": t for i, t in enumerate(given.pool.memory)}
        return Problem(given, {}, {"o": do}, expected, constants, lambda name, y: y[compared])

    def alone(self, case: Case, given: StepInputs, theirs: layers.Sequence, b: int, dtype: torch.dtype) -> Tensor:
        """y (1, 1, hidden) of row b on the CPU in this dtype."""
        cpu = torch.device("cpu")
        layer = self.made(case, cpu, dtype)
        layer.load_state_dict({name: t.to(cpu, dtype) for name, t in given.layer.state_dict().items()})
        sequences, (mine,) = served(case, 1, cpu)
        pool = layer.new_pool(sequences)
        for own, other in zip(pool.memory, given.pool.memory, strict=True):
            own[places(mine, pool)] = other[places(theirs, pool)].to(cpu, own.dtype)
        return layer(given.x[b : b + 1].to(cpu, dtype), cache=pool).to(given.x.device)

    def attend(self, backend: str) -> Attend:
        return lambda given: given.layer(given.x, cache=given.pool)


def served(case: Case, B: int, device: torch.device) -> tuple[layers.Sequences, list[layers.Sequence]]:
    """B sequences of N tokens, of which the layers compute the last."""
    N, page = case["N"], case["page"]
    sequences = layers.Sequences(B, N, pages=B * -(-N // page), page_size=page, slots=B, drafts=True, device=device)
    rows = [sequences.new() for _ in range(B)]
    if N > 1:
        sequences.step(rows, N - 1)
        for row in rows:
            row.drafted = 0  # a short prompt, too, is in the states
    sequences.step(rows, 1)
    sequences.stepped = []  # a pool of states refuses a second call of the same step
    return sequences, rows


def places(row: layers.Sequence, pool: Any) -> Any:
    """Where a sequence's tokens or state are in the pool's memory."""
    return row.pages if hasattr(pool, "at") else row.slot


class GroupedQueryStep(LayerStep):
    """With RoPE."""

    KEYS = LayerStep.SIZES | {"H_KV": 8}
    attention, words = flash_cache, "grouped-query attention layer, softmax attention"

    def faults(self, case: Case) -> Sequence[tuple[Any, str]]:
        return [*super().faults(case), (case["E"] != case["D"], f"E={case['E']}: must be D={case['D']}")]

    def made(self, case: Case, device: torch.device, dtype: torch.dtype) -> Any:
        options: dict[str, Any] = {"head_dim": case["D"], "rope": {}, "causal": True, "device": device, "dtype": dtype}
        return layers.GroupedQueryAttention(case["hidden"], case["H"], case["H_KV"], **options)


class LatentStep(LayerStep):
    """D = E + what RoPE turns; `rank` and `q_rank` are the sizes of the latents of keys and of queries."""

    KEYS = LayerStep.SIZES | {"D": 192, "E": 128, "rank": 512, "q_rank": 1536}
    attention, words = latent, "latent attention layer, softmax attention"

    def faults(self, case: Case) -> Sequence[tuple[Any, str]]:
        H, H_KV, D, E = (case[key] for key in ("H", "H_KV", "D", "E"))
        why = f"H_KV={H_KV} must be H, and E={E} less than D={D}, by what RoPE turns"
        return [*super().faults(case), (H_KV != H or E >= D, why)]

    def small_case(self, case: Case) -> Case:
        return super().small_case(case) | {"rank": 64, "q_rank": 48}

    def made(self, case: Case, device: torch.device, dtype: torch.dtype) -> Any:
        return latent_layer(case, q_rank=case["q_rank"], absorb=True, device=device, dtype=dtype)

    def sizes_within(self, case: Case) -> Case:
        return {"H_KV": 1, "D": case["rank"] + case["D"] - case["E"], "E": case["rank"]}


class LightningStep(LayerStep):
    """Of the preset minimax, whose pool is of fp32."""

    KEYS = LayerStep.SIZES | {"N": 1, "gate": True, "state_dtype": "float32"}
    attention, words = step, "lightning layer, linear attention with decay"

    def faults(self, case: Case) -> Sequence[tuple[Any, str]]:
        state = case["state_dtype"]
        return [*super().faults(case), (state != "float32", f"state_dtype={state}: a layer's pool must be fp32")]

    def made(self, case: Case, device: torch.device, dtype: torch.dtype) -> Any:
        sizes = {"num_kv_heads": case["H_KV"], "head_dim": case["D"], "value_dim": case["E"], "gate": case["gate"]}
        return layers.LightningAttention(case["hidden"], case["H"], **sizes, device=device, dtype=dtype)

    def sizes_within(self, case: Case) -> Case:
        return {"N": 1}


layer, layer_parts = Layer(), LayerParts()
layer_step_gqa, layer_step_mla, layer_step_lightning = GroupedQueryStep(), LatentStep(), LightningStep()
