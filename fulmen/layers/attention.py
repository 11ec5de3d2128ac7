"""Softmax attention layers: grouped-query attention, and multi-head and multi-query attention as its special cases.

    q, k, v = x W_q, x W_k, x W_v         heads of head_dim; num_kv_heads of k and v, each shared by H / H_KV of q
    q, k    = RoPE(norm(q)), RoPE(norm(k))                       each if asked for, the norm before or after
    y       = flash_attention(q, k, v, ...) W_o

Projections are plain Linear layers named as in Hugging Face's models (q_proj, k_proj, v_proj, o_proj, q_norm, k_norm).
q, k and v go to the kernel as the views the projections return, and its output to o_proj as a view: between the
projections and the kernel nothing is copied.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypedDict

import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from fulmen.boundary import check_scale
from fulmen.flash.op import flash_attention
from fulmen.flash.spec import MAX_HEAD_DIM, Window
from fulmen.layers import hf, weights
from fulmen.layers.append import append
from fulmen.layers.cache import KVCache, Step
from fulmen.layers.fused.projections import MAX_ROWS_TOGETHER, is_step, parameters_of, project
from fulmen.layers.inputs import (
    USUAL_N,
    Counts,
    Inputs,
    Packed,
    Padding,
    Rows,
    backend_chosen,
    check_causal,
    check_heads,
    check_kind,
    check_mask,
    check_packed,
    check_tokens,
    choice,
    factory,
    flag,
    full_counts,
    number,
    whole,
)
from fulmen.layers.pool import KVPool, check_positions_of
from fulmen.layers.rotary import Rotary, apply_rotary, rotary_of
from fulmen.layers.sequences import Sequences
from fulmen.layers.softmax import Options, attend, local_sinks
from fulmen.layers.tensor_parallel import (
    FusedHeads,
    Heads,
    HeadsNorm,
    HeadwiseNorm,
    KeyHeads,
    RMSNorm,
    ShardedHeadsNorm,
    check_shares,
    ranks_of,
)

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack


MAX_APPENDED = 16  # tokens of a call that is a decoding step
NO_LENGTHS = ("sdpa", "flash_attn")  # backends without kv_lengths


class AttentionOptions(TypedDict, total=False):
    """The arguments all layers here share; `GroupedQueryAttention` says what they mean."""

    head_dim: int | None
    bias: bool
    qk_norm: str | None
    norm_eps: float
    rope: Rotary | Mapping[str, Any] | None
    causal: bool
    window: Window
    softcap: float | None
    sinks: bool
    scale: float | None
    dropout: float
    backend: str
    device: torch.device | str | None
    dtype: torch.dtype | None


class GroupedQueryAttention(weights.AttentionLayer):
    """Softmax attention of x (B, N, embed_dim) to itself, or to a context; the result has x's shape.

    embed_dim     size of a token's vector.
    num_heads     H, heads of q.
    num_kv_heads  H_KV, heads of k and v; divides H.
    head_dim      embed_dim / H unless given.
    bias          of all four projections.
    qk_norm       None, or RMSNorm of each head of q and k "before" or "after" RoPE, or of "all" heads together before
                  it, with `norm_eps`.
    rope          None, a `Rotary`, or a dict of its arguments (dim is head_dim unless given); layers may share one.
    causal        whether a token sees none after it.
    window        (left, right): how many tokens before and after itself a token sees; None: no limit.
    softcap       logits become softcap * tanh(logits / softcap).
    sinks         whether each head has a learnt logit that takes weight and has no value.
    scale         of the logits: 1 / sqrt(head_dim) unless given, times the Rotary's softmax_factor.
    dropout       of attention weights, in training; on backends "auto" (then SDPA or eager), "sdpa" and "eager" only.
    context_dim   size of a context's vectors; embed_dim unless given.
    fused_qkv     whether q, k and v are one product; state_dict has three tensors all the same.
    backend       `flash_attention`'s: "auto", or a name, which works or raises.
    """

    cache_type = KVCache
    pool_type = KVPool

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        num_kv_heads: int,
        *,
        head_dim: int | None = None,
        bias: bool = False,
        qk_norm: str | None = None,
        norm_eps: float = 1e-6,
        rope: Rotary | Mapping[str, Any] | None = None,
        causal: bool = False,
        window: Window = None,
        softcap: float | None = None,
        sinks: bool = False,
        scale: float | None = None,
        dropout: float = 0.0,
        context_dim: int | None = None,
        fused_qkv: bool = False,
        backend: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        embed_dim, num_heads, num_kv_heads = check_heads(embed_dim, num_heads, num_kv_heads)
        head_dim = _checked_head_dim(embed_dim, num_heads, head_dim)
        context_dim = embed_dim if context_dim is None else whole("context_dim", context_dim)
        if flag("fused_qkv", fused_qkv) and context_dim != embed_dim:
            raise ValueError(f"context_dim={context_dim} with fused_qkv: one product makes q, k and v of the same x")
        self.embed_dim, self.num_heads, self.num_kv_heads = embed_dim, num_heads, num_kv_heads
        self.head_dim, self.context_dim = head_dim, context_dim
        self.qk_norm = choice("qk_norm", qk_norm, None, "before", "after", "all")
        self.rope = rotary_of(rope, head_dim)
        factor = 1.0 if self.rope is None else self.rope.softmax_factor
        scale = (head_dim**-0.5 if scale is None else check_scale(scale)) * factor
        self.options = Options.checked(causal, window, softcap, scale, backend, dropout)
        self.dropout = float(dropout)
        bias, norm_eps, kind = flag("bias", bias), number("norm_eps", norm_eps, zero=True), factory(device, dtype)
        q_size, kv_size = num_heads * head_dim, num_kv_heads * head_dim
        if fused_qkv:
            self.qkv_proj = nn.Linear(embed_dim, q_size + 2 * kv_size, bias, **kind)
            weights.save_separately(self)
        else:
            self.q_proj = nn.Linear(embed_dim, q_size, bias, **kind)
            self.k_proj = nn.Linear(self.context_dim, kv_size, bias, **kind)
            self.v_proj = nn.Linear(self.context_dim, kv_size, bias, **kind)
        self.fused_qkv = fused_qkv
        self.o_proj = nn.Linear(q_size, embed_dim, bias, **kind)
        self.q_norm, self.k_norm = (self._norm(size, norm_eps, kind) for size in (q_size, kv_size))
        self.sinks = nn.Parameter(torch.zeros(num_heads, **kind)) if flag("sinks", sinks) else None
        if self.rope is not None:
            self.rope.frequencies(self.o_proj.weight.device, self.o_proj.weight.dtype)

    def _norm(self, size: int, eps: float, kind: dict[str, Any]) -> RMSNorm | HeadsNorm | None:
        """The norm of q or k, which has `size` features."""
        if self.qk_norm is None:
            return None
        return HeadsNorm(size, 1, eps, **kind) if self.qk_norm == "all" else RMSNorm(self.head_dim, eps, **kind)

    def reset_parameters(self) -> None:
        """Draws every parameter anew, as after `to_empty` of a layer built on the meta device."""
        for module in self.children():
            if isinstance(module, nn.Linear | nn.RMSNorm | HeadsNorm):
                module.reset_parameters()
        if self.sinks is not None:
            nn.init.zeros_(self.sinks)

    # ------------------------------------------------------------------------------------------ the call

    def forward(
        self,
        x: Tensor,
        positions: Tensor | None = None,
        cache: KVCache | KVPool | None = None,
        mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        *,
        context: Tensor | None = None,
        context_mask: Tensor | None = None,
        context_cu_seqlens: Tensor | None = None,
    ) -> Tensor:
        """y (B, N, embed_dim).

        positions   int64 (N,) or (B, N), for RoPE alone: what a token sees goes by its place in x. Unless given, a
                    row's tokens are counted on from those in the cache, padding is not, packed sequences start at 0.
        cache       a `KVCache`: x's tokens go on where it stopped, and are appended. Or a pool, by `new_pool`.
        mask        bool (B, N), True for a token; padding, on either side or between, is not seen, and its y is 0.
        cu_seqlens  int32 (sequences + 1,): B is 1 and x holds packed sequences, which do not see each other.
        context     (B, N_KV, context_dim): k and v are made of it (cross-attention), with a mask or offsets of its own.
        """
        call = Inputs.of(self, x, positions, cache, mask, cu_seqlens, self.o_proj, self.options.causal)
        x, rows = call.x, call.rows
        if context is None:
            self._check_no_context(x, context_mask, context_cu_seqlens)
        if context is None and cache is not None and self._steps(x, call, cache):
            (y,) = project(self._step(x, cache), self.o_proj, early=True)
            if isinstance(cache, KVCache):
                cache.extend(x.shape[1], call.counts, self)
            return call.back(y)
        if context is None:
            q, k, v = self._project(x, x)
        else:
            self._check_context(x, context, cache)
            context, rows = self._context(call, context, context_mask, context_cu_seqlens)
            q, k, v = self._project(x, context)
        tables = None if self.rope is None else call.rotations(self.rope)
        q, k = self._norm_and_rotate(q, self.q_norm, tables), self._norm_and_rotate(k, self.k_norm, tables)
        end = None
        if isinstance(cache, KVCache):
            k, v, end = cache.offer(k, v, call.counts)
            if end.lengths is not None:
                rows = Counts(full_counts(x, call.counts), end.lengths)
        o = attend(q, k, v, self.options, self.sinks, rows, self.dropout if self.training else 0.0, self.cp)
        y = self.o_proj(o.transpose(1, 2).flatten(2))
        if isinstance(cache, KVCache) and end is not None:
            cache.advance(end, self)
        return call.back(y)

    def _steps(self, x: Tensor, call: Inputs, cache: KVCache | KVPool) -> bool:
        """Whether `_step` serves: a pool, or a few tokens after those of a preallocated cache, without gradients."""
        if isinstance(cache, KVPool):
            return True
        limit = None if self.rope is None else self.rope.max_positions
        return (
            cache.max_length is not None
            and cache.length > 0
            and x.shape[1] <= MAX_APPENDED
            and self.options.backend not in NO_LENGTHS
            and not torch.is_grad_enabled()
            and call.positions is None
            and not (self.dropout and self.training)
            and (limit is None or limit >= cache.max_length)
            and not torch.is_autocast_enabled(x.device.type)
        )

    def _step(self, x: Tensor, cache: KVCache | KVPool) -> Tensor:
        """o (B, N, H * head_dim) of tokens that are written after the cache's; where, the device alone knows."""
        q = self._appended(x, cache) if isinstance(cache, KVPool) else None
        if q is None:
            q, at = self._append(x, cache)
            (k, v), end, table = (t.transpose(1, 2) for t in at.memory), at.end, at.table
        else:
            assert isinstance(cache, KVPool)
            k, v, (_, end, _, _, table) = cache.k, cache.v, cache.sequences.first(x.shape[0])
        causal, window, softcap, scale, backend = self.options
        o = flash_attention(
            q, k, v, causal=causal, window=window, softcap=softcap, scale=scale, backend=backend, kv_lengths=end,
            page_table=table, sinks=None if self.sinks is None else local_sinks(self.sinks, q.dtype),
        )  # fmt: skip
        return o.transpose(1, 2).flatten(2)

    def _appended(self, x: Tensor, pool: KVPool) -> Tensor | None:
        """q (B, H, N, head_dim) of few rows, with k and v in the pool, by one chain of launches; None: no kernels."""
        if self.fused_qkv or self.qk_norm is not None or not is_step(x, MAX_ROWS_TOGETHER):
            return None
        parts = self._modules  # past Module.__getattr__
        parameters = parameters_of(parts["q_proj"], parts["k_proj"], parts["v_proj"])
        if parameters is None:
            return None
        rope, turns = self.rope, False
        tables: tuple[Tensor | None, Tensor | None] = None, None
        if rope is not None:
            tables, turns = rope.from_start(pool.capacity, x.device, x.dtype), rope.interleaved
        found = pool.fused("grouped", (self.head_dim, turns), x, *parameters, *tables, like=(x, *parameters))
        return None if found is None else found[0]

    def _append(self, x: Tensor, cache: KVCache | KVPool) -> tuple[Tensor, Step]:
        """The same for other calls, and where the step reads and writes."""
        B, N, _ = x.shape
        D = self.head_dim
        q, k, v = (t.view(B, N, t.shape[2] // D, D) for t in self._projections(x, x))
        at = cache.at(k, v)
        cos = sin = None
        if self.qk_norm is not None:
            tables = None
            if self.rope is not None and self.qk_norm == "after":
                tables = self.rope(at.positions(N), x.dtype)
            q, k = (
                self._norm_and_rotate(t.transpose(1, 2), norm, tables).transpose(1, 2)
                for t, norm in ((q, self.q_norm), (k, self.k_norm))
            )
        if self.rope is not None and self.qk_norm != "after":
            cos, sin = self.rope.from_start(at.limit, x.device, x.dtype)
        turns = self.rope is not None and self.rope.interleaved
        k_all, v_all = at.memory
        q, _ = append(q, k, v, k_all, v_all, at.begin, at.table, cos, sin, interleaved=turns)
        return q.transpose(1, 2), at

    def new_pool(self, sequences: Sequences) -> KVPool:
        """Memory of this layer for `sequences`, on its device and in its dtype; the layer takes it as `cache`."""
        check_causal("a pool", self.options.causal)
        check_positions_of(self.rope, sequences)
        heads, weight = max(self.num_kv_heads // ranks_of(self.mesh), 1), self.o_proj.weight
        return KVPool(sequences, heads, self.head_dim, device=weight.device, dtype=weight.dtype).of(self)

    def _project(self, x: Tensor, context: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v (B, heads, N, head_dim), views of the projections' outputs; heads: those of this rank."""
        D = self.head_dim
        q, k, v = (t.unflatten(-1, (t.shape[-1] // D, D)).transpose(1, 2) for t in self._projections(x, context))
        return q, k, v

    def _projections(self, x: Tensor, context: Tensor) -> Sequence[Tensor]:
        """q, k, v (B, N, heads * head_dim)."""
        if not self.fused_qkv:
            if context is x:
                return project(x, self.q_proj, self.k_proj, self.v_proj)
            return *project(x, self.q_proj), *project(context, self.k_proj, self.v_proj)
        (qkv,) = project(x, self.qkv_proj)
        q_size = qkv.shape[-1] * self.num_heads // (self.num_heads + 2 * self.num_kv_heads)
        kv_size = (qkv.shape[-1] - q_size) // 2
        return qkv.split([q_size, kv_size, kv_size], -1)

    def _norm_and_rotate(
        self, x: Tensor, norm: RMSNorm | HeadsNorm | None, tables: tuple[Tensor, Tensor] | None
    ) -> Tensor:
        """q or k (B, heads, N, head_dim), normed and turned."""
        if norm is not None and self.qk_norm == "before":
            x = norm(x.transpose(1, 2)).transpose(1, 2)
        elif norm is not None and self.qk_norm == "all":
            x = norm(x.transpose(1, 2).flatten(2)).unflatten(2, (-1, self.head_dim)).transpose(1, 2)
        if tables is not None and self.rope is not None:
            x = apply_rotary(x, *tables, self.rope.interleaved)
        if norm is not None and self.qk_norm == "after":
            x = norm(x.transpose(1, 2)).transpose(1, 2)
        return x

    def _context(
        self, call: Inputs, context: Tensor, context_mask: Tensor | None, context_cu_seqlens: Tensor | None
    ) -> tuple[Tensor, Rows | None]:
        """The context, its tokens first, and what x's tokens see of it."""
        if call.cu_seqlens is not None or context_cu_seqlens is not None:
            if call.cu_seqlens is None or context_cu_seqlens is None or context_mask is not None:
                raise ValueError("packed cross-attention needs cu_seqlens and context_cu_seqlens, and no context_mask")
            check_packed("context_cu_seqlens", context_cu_seqlens, "context", context)
            return context, Packed(call.cu_seqlens, context_cu_seqlens)
        counts = None
        if context_mask is not None:
            check_mask(context_mask, context, "context_mask")
            padding = Padding.of(context_mask)
            context, counts = padding.front(context), padding.counts
        elif call.padding is None:
            return context, None
        return context, Counts(full_counts(call.x, call.counts), full_counts(context, counts))

    def _check_no_context(self, x: Tensor, context_mask: Tensor | None, context_cu_seqlens: Tensor | None) -> None:
        if self.context_dim != self.embed_dim:
            raise ValueError(
                f"context is None, and the layer makes k and v of vectors of context_dim={self.context_dim}, "
                f"which x {tuple(x.shape)} does not have"
            )
        if context_mask is not None or context_cu_seqlens is not None:
            raise ValueError("context_mask or context_cu_seqlens is given, and no context")

    def _check_context(self, x: Tensor, context: Tensor, cache: KVCache | KVPool | None) -> None:
        if self.fused_qkv:
            raise ValueError("context is given to a layer whose q, k and v are one product: use MultiHeadAttention")
        check_tokens("context", context, self.context_dim, "context_dim")
        if context.shape[0] != x.shape[0]:
            raise ValueError(f"context has shape {tuple(context.shape)}, must have as many rows as x, B={x.shape[0]}")
        if self.options.causal or self.options.window is not None or self.rope is not None:
            raise ValueError(
                "context is given to a layer with causal, window or rope: those say where tokens of one sequence stand"
            )
        if cache is not None:
            raise ValueError("context and cache are given together: a context does not grow")
        if self.cp is not None:
            raise ValueError("context is given to a layer whose tokens are cut over ranks: cross-attention is not")
        check_kind("context", context, self.o_proj)

    # --------------------------------------------------------------------------------- weights and ranks

    @classmethod
    def from_hf(
        cls, module_or_state_dict: nn.Module | Mapping[str, Tensor], config: Any, *, layer: int | None = None,
        prefix: str = "",
        backend: str = "auto", device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ) -> Self:  # fmt: skip
        """The layer of a Hugging Face attention module, or of its state_dict.

        Llama, Mistral, Phi-3, Qwen 3, OLMo 2, Gemma 2 and 3, gpt-oss. A norm's weight of Gemma 3 is 1 + theirs here.

        config  the model's configuration, or its dict.
        layer   the number of the layer, from 0, where layers differ; transformers' modules and such a prefix know it.
        prefix  of the names that are this layer's, as "model.layers.3.self_attn."; others are not looked at.
        """
        own = weights.layer_of(module_or_state_dict, prefix)
        make = functools.partial(cls._with, **hf.arguments(config, layer, own), backend=backend)
        tensors = hf.named(weights.tensors_of(module_or_state_dict, prefix), config)
        return weights.loaded(make, tensors, module_or_state_dict, device, dtype)

    @classmethod
    def from_torch(
        cls, module_or_state_dict: nn.Module | Mapping[str, Tensor], num_heads: int | None = None, *,
        causal: bool = False, backend: str = "auto", device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> Self:  # fmt: skip
        """The layer of a `torch.nn.MultiheadAttention`, or of its state_dict, which does not tell `num_heads`.

        x is (B, N, embed_dim) here, whatever the module's batch_first, which is False unless it was given.
        """
        arguments, tensors = weights.from_multihead_attention(module_or_state_dict, num_heads)
        make = functools.partial(cls._with, **arguments, causal=causal, backend=backend)
        return weights.loaded(make, tensors, module_or_state_dict, device, dtype)

    @classmethod
    def _with(cls, embed_dim: int, num_heads: int, num_kv_heads: int, **options: Any) -> Self:
        """A layer of this class with these sizes."""
        return cls(embed_dim, num_heads, num_kv_heads, **options)

    def tp_plan(self) -> dict[str, ParallelStyle]:
        """Heads shared out to ranks, for torch's `parallelize_module(layer, mesh, layer.tp_plan())`.

        num_heads must be a multiple of the number of ranks. Heads of k and v are shared out, too, or, where there are
        fewer than ranks, computed by every rank that needs them.
        """
        plan: dict[str, ParallelStyle] = {"": Heads(), "o_proj": RowwiseParallel()}
        if self.fused_qkv:
            plan["qkv_proj"] = FusedHeads([self.num_heads, self.num_kv_heads, self.num_kv_heads])
        else:
            keys = KeyHeads(self.num_kv_heads)
            plan |= {"q_proj": ColwiseParallel(), "k_proj": keys, "v_proj": keys}
        if self.qk_norm == "all":
            plan |= {"q_norm": ShardedHeadsNorm(), "k_norm": ShardedHeadsNorm()}
        elif self.qk_norm is not None:
            plan |= {"q_norm": HeadwiseNorm(by_heads=True), "k_norm": HeadwiseNorm(by_heads=True)}
        return plan

    def check_ranks(self, ranks: int) -> None:
        check_shares(self.num_heads, "num_heads", ranks)
        kv_heads = self.num_kv_heads
        if kv_heads % ranks and ranks % kv_heads:
            raise ValueError(f"num_kv_heads={kv_heads} and {ranks} ranks: one must divide the other")
        if self.qk_norm == "all" and kv_heads % ranks:
            raise ValueError(f"num_kv_heads={kv_heads} with qk_norm='all' cannot be shared out evenly to {ranks} ranks")
        if self.fused_qkv and kv_heads % ranks:
            raise ValueError(f"num_kv_heads={kv_heads} with fused_qkv cannot be shared out evenly to {ranks} ranks")

    def extra_repr(self) -> str:
        parts = [f"{self.embed_dim}, num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}"]
        parts += [f"head_dim={self.head_dim}", *self.options.described()]
        parts += [f"qk_norm={self.qk_norm!r}"] if self.qk_norm else []
        parts += ["sinks"] if self.sinks is not None else []
        parts += [f"dropout={self.dropout}"] if self.dropout else []
        return ", ".join([*parts, f"backend={self.backend_chosen()}"])

    def backend_chosen(self, B: int = 1, N: int = USUAL_N, needs_grad: bool = True) -> str:
        """The backend of a call with x (B, N, embed_dim), in words; `fulmen.explain` tells the others' reasons."""
        if self.dropout and self.training:
            return f"{self.options.backend!r}, with dropout"
        heads, dims = (self.num_heads, self.num_kv_heads), (self.head_dim, self.head_dim)
        spec = self.options.spec(B, heads, N, dims, self.o_proj.weight, self.sinks is not None, needs_grad)
        return backend_chosen("flash", spec, self.options.backend, N)


class MultiHeadAttention(GroupedQueryAttention):
    """Every head has keys and values of its own; q, k and v are three products, so that k and v may be of a context."""

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        context_dim: int | None = None,
        **options: Unpack[AttentionOptions],
    ) -> None:
        super().__init__(embed_dim, num_heads, num_heads, context_dim=context_dim, **options)

    @classmethod
    def _with(cls, embed_dim: int, num_heads: int, num_kv_heads: int, **options: Any) -> Self:
        return cls(embed_dim, _same_heads(cls, num_heads, num_kv_heads), **options)


class MultiHeadSelfAttention(GroupedQueryAttention):
    """Every head has keys and values of its own; q, k and v are one product."""

    def __init__(self, embed_dim: int, num_heads: int, **options: Unpack[AttentionOptions]) -> None:
        super().__init__(embed_dim, num_heads, num_heads, fused_qkv=True, **options)

    @classmethod
    def _with(cls, embed_dim: int, num_heads: int, num_kv_heads: int, **options: Any) -> Self:
        if options.pop("context_dim", None) not in (None, embed_dim):
            raise ValueError(f"{cls.__name__} takes no context: use MultiHeadAttention for weights with kdim, vdim")
        return cls(embed_dim, _same_heads(cls, num_heads, num_kv_heads), **options)


class MultiQueryAttention(GroupedQueryAttention):
    """All heads share one head of keys and values."""

    def __init__(self, embed_dim: int, num_heads: int, **options: Unpack[AttentionOptions]) -> None:
        super().__init__(embed_dim, num_heads, 1, **options)

    @classmethod
    def _with(cls, embed_dim: int, num_heads: int, num_kv_heads: int, **options: Any) -> Self:
        if num_kv_heads != 1:
            raise ValueError(f"the weights have num_kv_heads={num_kv_heads}, and MultiQueryAttention one")
        return cls(embed_dim, num_heads, **options)


def _same_heads(cls: type, num_heads: int, num_kv_heads: int) -> int:
    if num_kv_heads != num_heads:
        raise ValueError(
            f"the weights have num_kv_heads={num_kv_heads} for num_heads={num_heads}, and {cls.__name__} as many of "
            "both: use GroupedQueryAttention"
        )
    return num_heads


def _checked_head_dim(embed_dim: int, num_heads: int, head_dim: int | None) -> int:
    if head_dim is not None:
        return whole("head_dim", head_dim, 1, MAX_HEAD_DIM)
    if embed_dim % num_heads:
        raise ValueError(
            f"embed_dim={embed_dim} is not divisible by num_heads={num_heads}: change one, or give head_dim"
        )
    return embed_dim // num_heads
