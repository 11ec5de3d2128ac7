"""`LightningAttention`: linear attention with per-head decay as a layer, with the presets of published models.

    q, k, v = activation(x W_qkv);  q, k = rope(norm(q)), rope(norm(k))
    o = lightning_attention(q, k, v, decay, scale)
    y = (norm(o) * sigmoid(x W_gate)) W_out

What models differ in is in `PRESETS`; docs/layers.md has it as a table.

`qkv_proj` holds, for each key-value head in turn, the rows of its query heads, of its key and of its value. This is
MiniMax's order where every head has its own, and a rank's share of the heads is contiguous.

On a GPU one kernel lies between the projections and the attention and one behind it (fused/lightning.py). Saved for the
backward are x, the output of `qkv_proj`, q and k (and v, if it is activated), o, the gate and the input of `out_proj`:
with dim = H D and as many heads of k and v, 10u in minimax and 9u in ring, where u is the bytes of q.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from fulmen import decay as slopes
from fulmen.boundary import check_scale
from fulmen.layers import hf_lightning, weights
from fulmen.layers.cache import StateCache
from fulmen.layers.fused import fused_call, kernels_for
from fulmen.layers.fused.projections import (
    MAX_ROWS_TOGETHER,
    Facts,
    are_few,
    few_rows,
    has_no_hooks,
    parameters_of,
    project,
)
from fulmen.layers.inputs import (
    USUAL_N,
    Inputs,
    backend_chosen,
    check_backend,
    check_heads,
    choice,
    factory,
    flag,
    many_rows,
    number,
    one_row,
    whole,
)
from fulmen.layers.pool import StatePool, check_positions_of
from fulmen.layers.rotary import Rotary, apply_rotary, config_size, rotary_of
from fulmen.layers.sequences import Sequences
from fulmen.layers.tensor_parallel import (
    Heads,
    HeadsNorm,
    HeadwiseNorm,
    RMSNorm,
    ShardedHeadsNorm,
    check_shares,
    ranks_of,
)
from fulmen.lightning.op import Into, lightning_attention, lightning_attention_into, lightning_attention_with_state
from fulmen.lightning.spec import MAX_HEAD_DIM, LightningSpec
from fulmen.step.spec import MAX_STEP_TOKENS

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": nn.functional.silu,
    "relu": nn.functional.relu,
    "gelu": nn.functional.gelu,
}
DECAYS: dict[str, Callable[[int, int, int], Tensor]] = {
    "minimax": slopes.minimax,
    "ring": slopes.ring,
    "alibi": lambda H, layer, num_layers: slopes.alibi(H),
}
MAX_GATE_WIDTH = 16384  # features of a token that one program holds


class Choices(NamedTuple):
    """What distinguishes the presets; `LightningAttention` says what each may be."""

    activation: str | None
    scale: float | None
    qk_norm: str | None
    rope: Rotary | Mapping[str, Any] | None
    output_norm: int | None
    gate: bool
    decay: str | Tensor | None
    turned: float = 0.5  # the share of a head that RoPE turns, unless `rope` says


PRESETS = {
    "minimax": Choices("silu", 1.0, None, None, 1, True, "minimax"),  # MiniMax-Text-01, M1
    "ring": Choices(None, None, "before", {"base": 600_000.0}, 4, True, "ring"),  # Ring, Ling 2.0, 2.5
    "sala": Choices(None, None, "before", {"base": 10_000.0}, 1, True, "alibi", 1.0),  # MiniCPM-SALA
}
AS_PRESET: Any = "preset"


class LightningAttention(weights.AttentionLayer):
    """Causal linear attention with per-head decay: x (B, N, embed_dim) to (B, N, embed_dim).

    embed_dim     size of a token's vector.
    num_heads     H; `head_dim` is embed_dim / H unless given, `value_dim` (E) is head_dim, num_kv_heads is H.
    layer         this layer's number, from 0, of `num_layers`: deeper layers decay less in minimax and ring.
    preset        "minimax", "ring" or "sala"; each of the following is the preset's unless given:
    activation    None, "silu", "relu" or "gelu", of q, k and v.
    scale         of the output; None: 1 / sqrt(head_dim).
    qk_norm       None, or RMSNorm of each head of q and k "before" or "after" RoPE.
    rope          None, a `Rotary` over the first of a head's elements, or a dict of its arguments (dim is half of
                  head_dim unless given, in sala all of it).
    output_norm   RMSNorm of the heads' outputs: the number of groups they are normed in (1: all together), None: none.
    gate          whether the normed outputs are multiplied by sigmoid(x W).
    decay         "minimax", "ring" or "alibi" of `fulmen.decay`, a tensor of H slopes, or None for no decay.
    bias          of qkv_proj and out_proj.
    backend       of `lightning_attention`: "auto", or a name that works or raises.
    """

    decay: Tensor | None
    cache_type = StateCache
    pool_type = StatePool

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        value_dim: int | None = None,
        layer: int = 0,
        num_layers: int = 1,
        preset: str = "minimax",
        activation: str | None = AS_PRESET,
        scale: float | None = AS_PRESET,
        qk_norm: str | None = AS_PRESET,
        rope: Rotary | Mapping[str, Any] | None = AS_PRESET,
        output_norm: int | None = AS_PRESET,
        gate: bool = AS_PRESET,
        decay: str | Tensor | None = AS_PRESET,
        bias: bool = False,
        norm_eps: float = 1e-6,
        backend: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        choice("preset", preset, *PRESETS)
        given: dict[str, Any] = {
            "activation": activation, "scale": scale, "qk_norm": qk_norm, "rope": rope, "output_norm": output_norm,
            "gate": gate, "decay": decay,
        }  # fmt: skip
        own = {name: x for name, x in given.items() if not isinstance(x, str) or x != AS_PRESET}
        chosen = PRESETS[preset]._replace(**own)
        kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        embed_dim, num_heads, kv_heads = check_heads(embed_dim, num_heads, kv_heads)
        if head_dim is None and embed_dim % num_heads:
            raise ValueError(f"num_heads={num_heads} must divide embed_dim={embed_dim}, or head_dim must be given")
        self.embed_dim, self.num_heads, self.num_kv_heads = embed_dim, num_heads, kv_heads
        self.head_dim = whole("head_dim", embed_dim // num_heads if head_dim is None else head_dim, 1, MAX_HEAD_DIM)
        self.value_dim = whole("value_dim", self.head_dim if value_dim is None else value_dim, 1, MAX_HEAD_DIM)
        self.layer, self.num_layers, self.preset = whole("layer", layer, 0), whole("num_layers", num_layers), preset
        self.backend = check_backend("lightning", backend)
        self.activation = choice("activation", chosen.activation, None, *ACTIVATIONS)
        self.scale = self.head_dim**-0.5 if chosen.scale is None else check_scale(chosen.scale)
        self._build(chosen, flag("bias", bias), number("norm_eps", norm_eps, zero=True), factory(device, dtype))
        self._slopes = self._numbers(chosen.decay)
        self.register_buffer("decay", self._decay(device), persistent=False)
        self.register_load_state_dict_post_hook(_refilled)

    def _build(self, chosen: Choices, bias: bool, eps: float, kind: dict[str, Any]) -> None:
        outputs = self.num_heads * self.value_dim
        self.qkv_proj = nn.Linear(self.embed_dim, self.num_kv_heads * sum(self._widths()), bias=bias, **kind)
        self.qk_norm = choice("qk_norm", chosen.qk_norm, None, "before", "after")
        self.q_norm = RMSNorm(self.head_dim, eps=eps, **kind) if self.qk_norm else None
        self.k_norm = RMSNorm(self.head_dim, eps=eps, **kind) if self.qk_norm else None
        self.rope = rotary_of(chosen.rope, self.head_dim, dim=int(self.head_dim * chosen.turned))
        self.norm = None
        if chosen.output_norm is not None:
            groups = whole("output_norm", chosen.output_norm)
            if outputs % groups:
                raise ValueError(f"output_norm={groups}: so many groups must divide H * E = {outputs}")
            self.norm = HeadsNorm(outputs, groups, eps, **kind)
        gated = flag("gate", chosen.gate)
        self.output_gate = nn.Linear(self.embed_dim, outputs, bias=False, **kind) if gated else None
        self.out_proj = nn.Linear(outputs, self.embed_dim, bias=bias, **kind)

    def _widths(self) -> tuple[int, int, int]:
        """Features of the queries, the key and the value that belong to one key-value head."""
        return self.num_heads // self.num_kv_heads * self.head_dim, self.head_dim, self.value_dim

    # ------------------------------------------------------------------------------------- construction

    def _numbers(self, decay: Any) -> list[float] | None:
        """The slopes as Python numbers, which no cast or move changes."""
        H = self.num_heads
        if decay is None:
            return None
        if isinstance(decay, Tensor):
            if decay.numel() != H:
                raise ValueError(f"decay has shape {tuple(decay.shape)}, must hold num_heads={H} slopes")
            numbers = decay.detach().to("cpu", torch.float32).flatten()
            if not bool(((numbers >= 0) & numbers.isfinite()).all()):
                raise ValueError(f"decay must be finite and >= 0; got {numbers.tolist()}")
            return numbers.tolist()
        if not isinstance(decay, str) or decay not in DECAYS:
            raise ValueError(f"decay={decay!r}: must be a tensor, None or one of {', '.join(map(repr, DECAYS))}")
        with torch.device("cpu"):  # the numbers are needed, also inside torch.device("meta")
            made = DECAYS[decay](H, self.layer, self.num_layers)
        return made.tolist()

    def _decay(self, device: torch.device | str | None) -> Tensor | None:
        return None if self._slopes is None else torch.tensor(self._slopes, dtype=torch.float32, device=device)

    def reset_parameters(self) -> None:
        """Draws every parameter anew, as after `to_empty` of a layer built on the meta device."""
        for part in (self.qkv_proj, self.q_norm, self.k_norm, self.norm, self.output_gate, self.out_proj):
            if part is not None:
                part.reset_parameters()

    def _refill(self, device: torch.device) -> None:
        if self.decay is not None:
            self.decay = self._decay(device)

    def _apply(self, fn: Any, recurse: bool = True) -> LightningAttention:
        """Fills the slopes again: `.to(bfloat16)` is for the weights, and `to_empty` leaves a buffer without values."""
        super()._apply(fn, recurse)
        if self.decay is not None:
            self._refill(self.decay.device)
        return self

    def extra_repr(self) -> str:
        weight = self.out_proj.weight
        spec = LightningSpec(
            1, self.num_heads, self.num_kv_heads, USUAL_N, self.head_dim, self.value_dim, weight.dtype, weight.device,
            self.scale, self.decay is not None,
        )  # fmt: skip
        return (
            f"{self.embed_dim}, num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}, "
            f"head_dim={self.head_dim}, preset={self.preset!r}, layer={self.layer} of {self.num_layers}, "
            f"backend={backend_chosen('lightning', spec, self.backend)}"
        )

    # ------------------------------------------------------------------------------------------ the call

    def forward(
        self,
        x: Tensor,
        positions: Tensor | None = None,
        cache: StateCache | StatePool | None = None,
        mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> Tensor:
        """y (B, N, embed_dim).

        positions   (N,) or (B, N) for RoPE; counted on from the cache's tokens, without padding, unless given.
        cache       a `StateCache`: x goes on where it stopped, and it is brought up to x's last token. Or a pool made
                    by `new_pool`.
        mask        bool (B, N), True for a token: padding is not seen and does not decay the state; its y is zero.
        cu_seqlens  int32: B is 1 and N holds packed sequences, each with a state of its own.
        """
        call = Inputs.of(self, x, positions, cache, mask, cu_seqlens, self.out_proj)
        x = call.x
        pool = cache if isinstance(cache, StatePool) and self._chains(x) else None
        y = None if pool is None else self._stepped(x, pool)
        if y is None:
            q, k, v, gate, into = self._projected(x, call)
            y = None if pool is None else self._stepped_from(q, k, v, gate, x, pool)
        if y is not None:
            return y
        o, state = self._attend(q, k, v, call, into)
        (y,) = project(self._gated(o.transpose(1, 2).flatten(2), gate), self.out_proj, early=True)
        if isinstance(cache, StateCache) and state is not None:
            cache.update(state, x.shape[1], call.counts, self)
        return call.back(y)

    def _projected(self, x: Tensor, call: Inputs) -> tuple[Any, ...]:
        """q (B, H, N, D), k (B, H_KV, N, D), v (B, H_KV, N, E); the gate or None; where gradients go, or None."""
        gates = [] if self.output_gate is None else [self.output_gate]
        if self._only_activated():
            found = few_rows(x, self.qkv_proj, *gates, facts=Facts(self.activation))
            if found is not None:
                qkv, *gate = found
                heads = qkv.view(*qkv.shape[:2], self.num_heads, -1).transpose(1, 2)
                return *heads.split(self._widths(), dim=3), gate[0] if gate else None, None
        qkv, *gate = project(x, self.qkv_proj, *gates)
        *parts, into = self._heads(qkv, (None, None) if self.rope is None else call.rotations(self.rope))
        return *parts, gate[0] if gate else None, into

    def _only_activated(self) -> bool:
        """Whether q, k and v are views of the activated projection."""
        plain = self.qk_norm is None and self.rope is None
        return plain and self.activation is not None and self.num_heads == self.num_kv_heads

    def _heads(self, qkv: Tensor, tables: tuple[Tensor | None, Tensor | None]) -> tuple[Tensor, Tensor, Tensor, Any]:
        """q (B, H, N, D), k (B, H_KV, N, D), v (B, H_KV, N, E), of this rank's heads; where gradients go, or None.

        tables  cos and sin
        """
        kernels = self._head_kernels(qkv, tables)
        if kernels is not None:
            facts = self._facts(qkv, kernels)
            silu = self._only_activated() and self.activation == "silu"
            shared = silu or self.activation is None
            projection = kernels.ProjectionGradient(facts[:4], qkv, silu) if shared else None
            q, k, v = kernels.Prepared.apply(facts, qkv, *self._norm_weights(qkv), *tables, projection)
            into = None if projection is None else Into(projection, qkv)
            return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), into
        if self.activation is not None:
            qkv = ACTIVATIONS[self.activation](qkv)
        q, k, v = qkv.unflatten(2, (-1, sum(self._widths()))).split(self._widths(), dim=3)
        q = q.unflatten(3, (-1, self.head_dim)).flatten(2, 3)
        if self.qk_norm == "before":
            q, k = self._normed(q, k)
        cos, sin = tables
        if self.rope is not None and cos is not None and sin is not None:
            q, k = (apply_rotary(t.transpose(1, 2), cos, sin, self.rope.interleaved).transpose(1, 2) for t in (q, k))
        if self.qk_norm == "after":
            q, k = self._normed(q, k)
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), None

    def _normed(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        assert self.q_norm is not None
        assert self.k_norm is not None
        return self.q_norm(q), self.k_norm(k)

    def _head_kernels(self, qkv: Tensor, tables: tuple[Tensor | None, Tensor | None]) -> Any:
        """The kernels that make q, k and v of the projection's output, or None."""
        if self.activation is None and self.qk_norm is None and self.rope is None:
            return None
        if self.q_norm is not None and self.k_norm is not None:
            same = self.q_norm.eps is not None and self.q_norm.eps == self.k_norm.eps
            if not same or not has_no_hooks(self.q_norm, self.k_norm, kind=RMSNorm):
                return None
        if any(t is not None and not (t.is_contiguous() and t.dtype == torch.float32) for t in tables):
            return None
        return kernels_for("lightning", qkv) if qkv.is_contiguous() else None

    def _facts(self, qkv: Tensor, kernels: Any) -> Any:
        H_KV = qkv.shape[2] // sum(self._widths())
        H = self.num_heads // self.num_kv_heads * H_KV
        eps = 0.0 if self.q_norm is None else self.q_norm.eps
        turn = self.rope is not None and self.rope.interleaved
        return kernels.Heads(H, H_KV, self.head_dim, self.value_dim, self.activation, self.qk_norm, eps, turn)

    def _norm_weights(self, x: Tensor) -> tuple[Tensor | None, Tensor | None]:
        if self.q_norm is None or self.k_norm is None:
            return None, None
        return self.q_norm.weight_for(x), self.k_norm.weight_for(x)

    def _gated(self, o: Tensor, gate: Tensor | None) -> Tensor:
        """o (B, N, H * E), normed and multiplied by sigmoid(gate)."""
        norm = self.norm
        if self._fuses_gate(o, gate):
            groups, eps, weight = (1, 0.0, None) if norm is None else (norm.groups_in(o), norm.eps, norm.weight_for(o))
            if not torch.is_grad_enabled():
                found = fused_call("lightning", "gated", (groups, eps), o, gate, weight)
                if found is not None:
                    return found[0]
            kernels = kernels_for("lightning", *(t for t in (o, gate) if t is not None))
            if kernels is not None:
                return kernels.Gated.apply(groups, eps, o, gate, weight)
        if norm is not None:
            o = norm(o)
        return o if gate is None else o * torch.sigmoid(gate)

    # ------------------------------------------------------------------------------- a step of few rows on a pool

    def _chains(self, x: Tensor) -> bool:
        """Whether a step on a pool may be a chain of launches (`fused/steps.py`): few rows, a norm nobody looks at."""
        norm: Any = self._modules.get("norm")  # past Module.__getattr__
        return (
            are_few(x, MAX_ROWS_TOGETHER)
            and x.shape[1] <= MAX_STEP_TOKENS
            and self.cp is None
            and self.backend in ("auto", "triton")
            and not (torch.compiler.is_compiling() or torch._C._is_any_autocast_enabled())
            and ((decay := self.decay) is None or decay.stride() == (1,))
            and (
                norm is None
                or (
                    norm.mesh is None
                    and norm.weight.dtype == x.dtype  # a copy would be on its way when the step begins
                    and has_no_hooks(norm, kind=HeadsNorm)
                )
            )
        )

    def _joins_norm(self, x: Tensor) -> bool:
        """Whether norm and gate are part of the launches before and after them: one group of features, in few rows.

        Not in fp16, where o times the norm's weight could overflow before out_proj divides it.
        """
        norm: Any = self._modules.get("norm")
        return norm is not None and norm.groups == 1 and x.dtype != torch.float16 and are_few(x)

    def _stepped(self, x: Tensor, pool: StatePool) -> Tensor | None:
        """y, where q, k and v are the activated projection; None: no kernels."""
        parts: dict[str, Any] = self._modules
        norm, gate = parts.get("norm"), parts.get("output_gate")
        taken = parameters_of(parts["qkv_proj"], gate)
        if taken is None or not self._only_activated() or not (x.shape[1] == 1 or x.is_contiguous()):
            return None
        last = parameters_of(parts["out_proj"]) if self._joins_norm(x) else None
        if norm is not None and last is not None:
            return self._chained("lightning_layer", pool, x, *taken, norm.weight, *last)
        if (norm is None and gate is None) or self.num_heads * self.value_dim > MAX_GATE_WIDTH:
            return None
        z = self._chained("lightning_rows", pool, x, *taken, None if norm is None else norm.weight)
        return None if z is None else project(z, parts["out_proj"], early=True)[0]

    def _stepped_from(
        self, q: Tensor, k: Tensor, v: Tensor, gate: Tensor | None, x: Tensor, pool: StatePool
    ) -> Tensor | None:
        """y, where other kernels made q, k and v; None: norm and gate take a launch of their own, or no kernels."""
        last = parameters_of(self.out_proj) if self._joins_norm(x) else None
        if last is None or self.norm is None:
            return None
        gates = None if gate is None else gate.unflatten(2, (-1, self.value_dim)).transpose(1, 2)
        return self._chained("lightning", pool, q, k, v, gates, self.norm.weight, *last)

    def _chained(self, chain: str, pool: StatePool, *tensors: Tensor | None) -> Tensor | None:
        norm: Any = self._modules.get("norm")
        of_norm = (0.0, 1) if norm is None else (norm.eps, norm.groups)
        facts = (self.head_dim, self.value_dim, self.activation, self.scale, *of_norm)
        found = pool.fused(chain, facts, *tensors, self.decay, like=tensors)
        return None if found is None else found[0]

    def _fuses_gate(self, o: Tensor, gate: Tensor | None) -> bool:
        """Whether the kernels of norm and gate have the layer's options."""
        if self.norm is None and gate is None:
            return False
        if self.norm is not None and (not has_no_hooks(self.norm, kind=HeadsNorm) or self.norm.groups_in(o) is None):
            return False
        return o.is_contiguous() and (gate is None or gate.is_contiguous()) and o.shape[2] <= MAX_GATE_WIDTH

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, call: Inputs, into: Into | None) -> tuple[Tensor, Tensor | None]:
        """o (B, H, N, E) and, with a cache, the state it is to hold. into: where gradients go, or None."""
        if self.cp is not None:
            return self.cp.lightning(q, k, v, self.decay, self.scale, self.backend, call.cu_seqlens), None
        if isinstance(call.cache, StatePool):
            return call.cache.attend(q, k, v, self.decay, self.scale, self.backend), None
        options: dict[str, Any] = {"scale": self.scale, "backend": self.backend}
        state = call.cache.state if isinstance(call.cache, StateCache) else None
        B, N = q.shape[0], q.shape[2]
        if isinstance(call.cache, StateCache):
            call.cache.check_state(q)
        if state is not None and state.shape[:2] != q.shape[:2]:
            raise ValueError(
                f"the cache holds the states of {state.shape[0]} rows and {state.shape[1]} heads, and x has {B} rows "
                f"and {q.shape[1]} heads: call reset() before another batch"
            )
        if call.padding is None:
            if call.cache is None:
                options["cu_seqlens"] = call.cu_seqlens
                if into is not None:
                    return lightning_attention_into(into, q, k, v, self.decay, **options), None
                return lightning_attention(q, k, v, self.decay, **options), None
            return lightning_attention_with_state(q, k, v, self.decay, initial_state=state, **options)
        # Each row is two packed sequences, its tokens and its padding, and the state of the first is the row's.
        row = torch.arange(B, device=q.device) * N
        ends = torch.stack([row + call.padding.counts, row + N], 1).flatten()
        options["cu_seqlens"] = nn.functional.pad(ends, (1, 0)).to(torch.int32)
        q, k, v = one_row(q), one_row(k), one_row(v)
        if call.cache is None:
            return many_rows(lightning_attention(q, k, v, self.decay, **options), B, N), None
        if state is not None:
            options["initial_state"] = torch.stack([state, torch.zeros_like(state)], 1).flatten(0, 1)
        o, states = lightning_attention_with_state(q, k, v, self.decay, **options)
        return many_rows(o, B, N), states.unflatten(0, (B, 2))[:, 0].contiguous()

    def new_pool(self, sequences: Sequences, state_dtype: torch.dtype | None = None) -> StatePool:
        """States of this layer for `sequences`, on its device, in fp32 or bf16; the layer takes it as `cache`."""
        choice("state_dtype", state_dtype, None, torch.float32, torch.bfloat16)
        check_positions_of(self.rope, sequences)
        ranks, weight = ranks_of(self.mesh), self.out_proj.weight
        return StatePool(
            sequences, self.num_heads // ranks, self.num_kv_heads // ranks, self.head_dim, self.value_dim,
            device=weight.device, dtype=weight.dtype, state_dtype=state_dtype,
        ).of(self)  # fmt: skip

    # ------------------------------------------------------------------------------- weights and ranks

    @classmethod
    def from_hf(
        cls, module_or_state_dict: nn.Module | Mapping[str, Tensor], config: Any, *, layer: int | None = None,
        prefix: str = "", backend: str = "auto", device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> LightningAttention:  # fmt: skip
        """The layer of a Hugging Face module of MiniMax, Ring (Bailing) or MiniCPM-SALA, or of its state_dict.

        config  the model's configuration, or its dict.
        layer   the number of the layer, from 0, which the slopes depend on; transformers' modules and such a prefix
                know it. Slopes and decay factors among the weights are not looked at.
        prefix  of the names that are this layer's, as "model.layers.3.self_attn."; others are not looked at.
        """
        tensors = weights.tensors_of(module_or_state_dict, prefix)
        own = weights.layer_of(module_or_state_dict, prefix)
        if layer is not None and own is not None and layer != own:
            raise ValueError(f"layer={layer!r}: by layer_idx or prefix these weights are of layer {own}")
        layer = own if layer is None else layer
        if layer is None:
            raise ValueError("layer is missing: a state_dict does not tell which of the model's layers it is of")
        options, tensors = hf_lightning.converted(tensors, config)
        where: dict[str, Any] = {"layer": layer, "num_layers": config_size(config, "num_hidden_layers")}
        make = functools.partial(cls, **options, **where, backend=backend)
        return weights.loaded(make, tensors, module_or_state_dict, device, dtype, like="out_proj.weight")

    def check_ranks(self, ranks: int) -> None:
        check_shares(self.num_kv_heads, "num_kv_heads", ranks)
        if self.norm is not None:
            self.norm.check_ranks(ranks)

    def take_heads(self, mesh: DeviceMesh) -> None:
        super().take_heads(mesh)
        if self._slopes is not None:
            here = self.num_heads // mesh.size()
            begin = mesh.get_local_rank() * here
            self._slopes = self._slopes[begin : begin + here]
            self._refill(self.out_proj.weight.device)

    def tp_plan(self) -> dict[str, ParallelStyle]:
        """For `parallelize_module`: heads shared out to the ranks; a norm over all heads sums its squares over ranks.

        In a model's plan the entry "" of the layer "blocks.0.attention" is "blocks.0.attention.".
        """
        plan: dict[str, ParallelStyle] = {"": Heads()}
        plan |= {"qkv_proj": ColwiseParallel(), "out_proj": RowwiseParallel()}
        if self.norm is not None:
            plan["norm"] = ShardedHeadsNorm()
        if self.output_gate is not None:
            plan["output_gate"] = ColwiseParallel()
        if self.q_norm is not None:
            plan |= {"q_norm": HeadwiseNorm(by_heads=True), "k_norm": HeadwiseNorm(by_heads=True)}
        return plan


def _refilled(layer: nn.Module, keys: Any) -> None:
    """Fills the slopes after a load by assignment into a layer on the meta device: a checkpoint does not hold them."""
    assert isinstance(layer, LightningAttention)
    if layer.decay is not None and layer.decay.is_meta:
        layer._refill(layer.out_proj.weight.device)
