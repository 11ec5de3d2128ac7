"""`MultiHeadLatentAttention`: DeepSeek's MLA, whose cache holds one small latent for all heads.

    c_q = norm(x W_qa);  q = c_q W_qb = [q_nope | q_rope]            or q = x W_q, without q_rank
    [c | k_rope] = x W_kva;  c = norm(c)                             the latent, kv_rank elements a token
    [k_nope | v] = c W_kvb;  k = [k_nope | rope(k_rope)]             k_rope is one for all heads
    o = softmax(scale [q_nope | rope(q_rope)] k^T) v;  y = o W_o

Two ways lead to the same o. *Expanded*, as written: attention with a head dim of nope_dim + rope_dim (192 in
DeepSeek-V3) for q and k and value_dim (128) for v, through `flash_attention`; for training and for prompts. *Absorbed*:
W_kvb = [W_k | W_v] is applied to the queries and to the outputs instead of to every key,

    q k^T = (q_nope W_k^T) c^T + rope(q_rope) rope(k_rope)^T,    o = (p c) W_v

so that all heads read the one cached latent: multi-query attention with a head dim of kv_rank + rope_dim = 576 and
values of 512, which is `latent_attention`. With gradients, a window, a softcap or sinks these products are plain
PyTorch, the softmax in fp32. A step of a preallocated cache (`_step`) takes positions and lengths from the device, so
that it can be captured in a CUDA graph.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from fulmen.boundary import is_plain_eager
from fulmen.flash.spec import MAX_HEAD_DIM, Window
from fulmen.latent import op as latent_op
from fulmen.layers import weights
from fulmen.layers.append import append
from fulmen.layers.cache import End, LatentCache, Step
from fulmen.layers.fused import fused_call, kernels_for, on_gpu
from fulmen.layers.fused.projections import (
    MAX_ROWS_TOGETHER,
    Facts,
    are_few,
    few_rows,
    has_no_hooks,
    is_its_weights,
    is_plain,
    is_step,
    parameters_of,
    project,
)
from fulmen.layers.inputs import (
    USUAL_N,
    Counts,
    Inputs,
    Rows,
    backend_chosen,
    check_heads,
    choice,
    factory,
    flag,
    full_counts,
    number,
    whole,
)
from fulmen.layers.pool import LatentPool, check_positions_of
from fulmen.layers.rotary import Rotary, apply_rotary, check_model, config_size, config_value, rotary_kernels, rotary_of
from fulmen.layers.sequences import Sequences
from fulmen.layers.softmax import Options, attend, local_sinks, visible
from fulmen.layers.softmax import weights as softmax_weights
from fulmen.layers.tensor_parallel import (
    Heads,
    HeadwiseNorm,
    Replicated,
    RMSNorm,
    check_shares,
    local,
    summed_gradient,
)

MAX_NORM_WIDTH = 8192  # of a row that a program holds
CALLED = "it reads kv_b_proj's weight, and that module has hooks, a bias or an adapter, so it must be called"


class MultiHeadLatentAttention(weights.AttentionLayer):
    """Multi-head latent attention: x (B, N, embed_dim) to (B, N, embed_dim).

    embed_dim   size of a token's vector.
    num_heads   H; each has nope_dim elements without and rope_dim with position in q and k, and value_dim in v.
    q_rank      size of the queries' latent; None: q is projected from x directly.
    kv_rank     size of the latent of keys and values, which is what a `LatentCache` holds, with rope_dim more.
    rope        a `Rotary` over rope_dim elements, or a dict of its arguments; interleaved, as DeepSeek has it, unless
                the dict says otherwise. Its softmax_factor (YaRN) multiplies the scale 1 / sqrt(nope_dim + rope_dim).
    bias        of the projections to the latents and of o_proj.
    causal      whether a token sees none after it.
    window      (left, right): how many tokens before and after itself a token sees; None: no limit.
    softcap     logits become softcap * tanh(logits / softcap).
    sinks       whether each head has a learnt logit that takes weight and has no value.
    dropout     of attention weights, in training; on backends "auto" (then SDPA or eager), "sdpa" and "eager" only.
    absorb      with a cache: "auto" takes the way of fewer multiplications, True and False say which.
    backend     `flash_attention`'s: "auto", or a name, which works or raises. The absorbed way has none.
    """

    cache_type = LatentCache
    pool_type = LatentPool

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        q_rank: int | None = None,
        kv_rank: int = 512,
        nope_dim: int = 128,
        rope_dim: int = 64,
        value_dim: int = 128,
        rope: Rotary | Mapping[str, Any] | None = None,
        bias: bool = False,
        norm_eps: float = 1e-6,
        causal: bool = True,
        window: Window = None,
        softcap: float | None = None,
        sinks: bool = False,
        dropout: float = 0.0,
        absorb: bool | str = "auto",
        backend: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        embed_dim, num_heads, _ = check_heads(embed_dim, num_heads, num_heads)
        q_rank, kv_rank = None if q_rank is None else whole("q_rank", q_rank), whole("kv_rank", kv_rank)
        nope_dim, rope_dim = whole("nope_dim", nope_dim), whole("rope_dim", rope_dim)
        if rope_dim % 2:
            raise ValueError(f"rope_dim={rope_dim}: RoPE turns pairs, so rope_dim must be an even number")
        whole("nope_dim + rope_dim", nope_dim + rope_dim, 1, MAX_HEAD_DIM)
        value_dim = whole("value_dim", value_dim, 1, MAX_HEAD_DIM)
        if choice("absorb", absorb, True, False, "auto") is True and dropout:
            raise ValueError(
                f"dropout={dropout} with absorb=True: the absorbed way drops no weights; use 'auto' or False"
            )
        self.embed_dim, self.num_heads, self.q_rank, self.kv_rank = embed_dim, num_heads, q_rank, kv_rank
        self.nope_dim, self.rope_dim, self.value_dim = nope_dim, rope_dim, value_dim
        turn = rotary_of({} if rope is None else rope, nope_dim + rope_dim, dim=rope_dim, interleaved=True)
        if turn is None or turn.dim != rope_dim:
            raise ValueError(f"rope turns dim={turn and turn.dim} elements, must be rope_dim={rope_dim}")
        self.rope = turn
        scale = (nope_dim + rope_dim) ** -0.5 * self.rope.softmax_factor
        self.options = Options.checked(causal, window, softcap, scale, backend, dropout)
        self.absorb, self.dropout = absorb, float(dropout)
        kind = factory(device, dtype)
        self._build(flag("bias", bias), number("norm_eps", norm_eps, zero=True), kind)
        self.sinks = nn.Parameter(torch.zeros(num_heads, **kind)) if flag("sinks", sinks) else None
        self.rope.frequencies(self.o_proj.weight.device, self.o_proj.weight.dtype)

    def _build(self, bias: bool, eps: float, factory: dict[str, Any]) -> None:
        queries = self.num_heads * (self.nope_dim + self.rope_dim)
        self.q_proj = self.q_a_proj = self.q_a_layernorm = self.q_b_proj = None
        if self.q_rank is None:
            self.q_proj = nn.Linear(self.embed_dim, queries, bias=False, **factory)
        else:
            self.q_a_proj = nn.Linear(self.embed_dim, self.q_rank, bias=bias, **factory)
            self.q_a_layernorm = RMSNorm(self.q_rank, eps=eps, **factory)
            self.q_b_proj = nn.Linear(self.q_rank, queries, bias=False, **factory)
        self.kv_a_proj_with_mqa = nn.Linear(self.embed_dim, self.kv_rank + self.rope_dim, bias=bias, **factory)
        self.kv_a_layernorm = RMSNorm(self.kv_rank, eps=eps, **factory)
        self.kv_b_proj = nn.Linear(
            self.kv_rank, self.num_heads * (self.nope_dim + self.value_dim), bias=False, **factory
        )
        self.o_proj = nn.Linear(self.num_heads * self.value_dim, self.embed_dim, bias=bias, **factory)

    def reset_parameters(self) -> None:
        """Draws every parameter anew, as after `to_empty` of a layer built on the meta device."""
        for part in self.children():
            if not isinstance(part, Rotary):
                part.reset_parameters()  # type: ignore[operator]
        if self.sinks is not None:
            nn.init.zeros_(self.sinks)

    def extra_repr(self) -> str:
        heads, dims = (self.num_heads, self.num_heads), (self.nope_dim + self.rope_dim, self.value_dim)
        spec = self.options.spec(1, heads, USUAL_N, dims, self.o_proj.weight, self.sinks is not None, needs_grad=True)
        backend = backend_chosen("flash", spec, self.options.backend)
        parts = [f"{self.embed_dim}, num_heads={self.num_heads}, q_rank={self.q_rank}, kv_rank={self.kv_rank}"]
        parts += [f"nope_dim={self.nope_dim}, rope_dim={self.rope_dim}, value_dim={self.value_dim}"]
        parts += self.options.described()
        parts += ["sinks"] if self.sinks is not None else []
        parts += [f"dropout={self.dropout}"] if self.dropout else []
        return ", ".join([*parts, f"absorb={self.absorb}", f"backend={backend}"])

    # ------------------------------------------------------------------------------------------ the call

    def forward(
        self,
        x: Tensor,
        positions: Tensor | None = None,
        cache: LatentCache | LatentPool | None = None,
        mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> Tensor:
        """y (B, N, embed_dim).

        positions   (N,) or (B, N) for RoPE; counted on from the cache's tokens, without padding, unless given.
        cache       a `LatentCache`: x comes after its tokens, and is appended. Or a pool, by `new_pool`.
        mask        bool (B, N), True for a token: padding is not seen, and its y is zero.
        cu_seqlens  int32: B is 1 and N holds packed sequences, which do not see each other.
        """
        call = Inputs.of(self, x, positions, cache, mask, cu_seqlens, self.o_proj, self.options.causal)
        x, rows = call.x, call.rows
        if cache is not None and self._steps(x, call, cache):
            y = self._chained(x, cache) if isinstance(cache, LatentPool) else None
            if y is not None:
                return y
            (y,) = project(self._step(x, cache), self.o_proj, early=True)
            if isinstance(cache, LatentCache):
                cache.extend(x.shape[1], call.counts, self)
            return call.back(y)
        queries, latent, k_rope = self._up(*project(x, self._q_first(), self.kv_a_proj_with_mqa))
        cos, sin = call.rotations(self.rope)
        served = cache is None and rotary_kernels(cos, sin, queries, latent, k_rope) is not None
        weight = self._up_weight(latent) if served else None
        if weight is not None:
            o = self._expanded_at_once(queries, latent, k_rope, weight, cos, sin, rows)
            y = self.o_proj(o.flatten(2))
            return call.back(y)
        queries = queries.unflatten(2, (-1, self.nope_dim + self.rope_dim))
        q_nope, q_rope = queries.split([self.nope_dim, self.rope_dim], dim=3)
        q_rope = apply_rotary(q_rope.transpose(1, 2), cos, sin, self.rope.interleaved).transpose(1, 2)
        k_rope = apply_rotary(k_rope[:, None], cos, sin, self.rope.interleaved)[:, 0]
        if isinstance(cache, LatentCache):
            o, end = self._continued(q_nope, q_rope, latent, k_rope, call, cache)
            y = self.o_proj(o.flatten(2))
            cache.advance(end, self)
        else:
            y = self.o_proj(self._expanded(q_nope, q_rope, latent, k_rope, rows).flatten(2))
        return call.back(y)

    def _q_first(self) -> nn.Module:
        """The projection of x on the way to q."""
        first = self.q_a_proj if self.q_proj is None else self.q_proj
        assert first is not None
        return first

    def _up(self, first: Tensor, down: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The queries (B, N, H * (nope_dim + rope_dim)), the latent, normed, and k_rope; nothing is turned yet."""
        if self.q_b_proj is None or self.q_a_layernorm is None:
            latent, k_rope = normed((down, self.kv_a_layernorm))
            return first, latent, k_rope
        c_q, _, latent, k_rope = normed((first, self.q_a_layernorm), (down, self.kv_a_layernorm))
        (queries,) = project(c_q, self.q_b_proj, early=True)
        return queries, latent, k_rope

    def _continued(
        self, q_nope: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor, call: Inputs, cache: LatentCache
    ) -> tuple[Tensor, End]:
        """o (B, N, H, value_dim) of tokens that come after the cache's, expanded or absorbed, and the cache's end."""
        N, rows = q_nope.shape[1], call.rows
        kv, end = cache.offer(torch.cat([latent, k_rope], 2), call.counts)
        if cache.length == 0 and not self._absorbs(N, N):  # nothing but itself to see
            return self._expanded(q_nope, q_rope, latent, k_rope, rows), end
        if end.lengths is not None:
            rows = Counts(full_counts(latent, call.counts), end.lengths)
        if self._absorbs(N, kv.shape[1]):
            return self._absorbed(q_nope, q_rope, kv, rows), end
        latent, k_rope = kv.split([self.kv_rank, self.rope_dim], dim=2)
        return self._expanded(q_nope, q_rope, latent, k_rope, rows), end

    def _absorbs(self, N: int, keys: int) -> bool:
        """Whether N queries and so many keys take fewer multiplications the absorbed way."""
        if self.absorb is not False and not self._reads_up():
            if self.absorb is True:
                raise NotImplementedError(f"absorb=True: {CALLED}; use 'auto' or False")
            return False
        if self.absorb != "auto" or (self.dropout and self.training):
            return self.absorb is True
        R, P, up = self.kv_rank, self.rope_dim, self.nope_dim + self.value_dim
        return N * keys * (2 * R + P) + N * R * up < keys * R * up + N * keys * (up + P)

    def _expanded(self, q_nope: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor, rows: Rows | None) -> Tensor:
        """o (B, N, H, value_dim), with keys and values of every head."""
        H = q_nope.shape[2]
        up = self.kv_b_proj(latent).unflatten(2, (H, self.nope_dim + self.value_dim))
        k_nope, v = up.split([self.nope_dim, self.value_dim], dim=3)
        k_rope = summed_gradient(k_rope, self.mesh)[:, :, None].expand(-1, -1, H, -1)
        q, k = torch.cat([q_nope, q_rope], 3).transpose(1, 2), torch.cat([k_nope, k_rope], 3).transpose(1, 2)
        dropout = self.dropout if self.training else 0.0
        return attend(q, k, v.transpose(1, 2), self.options, self.sinks, rows, dropout, self.cp).transpose(1, 2)

    def _up_weight(self, latent: Tensor) -> Tensor | None:
        """This rank's part of kv_b_proj's weight; None: the module is no plain Linear and must be called."""
        module = self.kv_b_proj
        if not is_plain(module, planned=self.mesh is not None) or len(list(module.parameters())) > 1:
            return None
        weight = module.weight if self.mesh is None else local(module.weight)
        if torch.is_autocast_enabled(latent.device.type):
            weight = weight.to(latent.dtype)
        return weight if weight.dtype == latent.dtype and is_plain_eager(weight) else None

    def _expanded_at_once(
        self, q: Tensor, latent: Tensor, k_rope: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, rows: Rows | None
    ) -> Tensor:
        """As `_expanded`, of q (B, N, H * (nope_dim + rope_dim)) and k_rope before RoPE; turns q in place."""
        from fulmen.layers.fused.latent import Expanded

        last = self._q_first() if self.q_b_proj is None else self.q_b_proj
        if not is_plain(last) or q._is_view() or not q.is_contiguous():  # others may have it; autograd refuses views
            q = q.clone(memory_format=torch.contiguous_format)
        latent, k_rope = summed_gradient(latent, self.mesh), summed_gradient(k_rope, self.mesh)
        q, k, v = Expanded.apply(q, latent, k_rope, weight, cos, sin, self.nope_dim, self.rope.interleaved)
        q, k, v = (t.transpose(1, 2) for t in (q.unflatten(2, (-1, k.shape[3])), k, v))
        dropout = self.dropout if self.training else 0.0
        return attend(q, k, v, self.options, self.sinks, rows, dropout, self.cp).transpose(1, 2)

    def _absorbed(self, q_nope: Tensor, q_rope: Tensor, kv: Tensor, rows: Rows | None) -> Tensor:
        """o (B, N, H, value_dim), all heads reading the latents and rotated keys, kv (B, keys, kv_rank + rope_dim)."""
        N, H = q_nope.shape[1:3]
        kv = summed_gradient(kv, self.mesh)
        w_k, w_v = self._up_weights()
        q_latent = torch.einsum("bnhd,hdr->bhnr", q_nope, w_k)  # a product for each head: the weights are read once
        q = torch.cat([q_latent, q_rope.transpose(1, 2)], 3)
        if self._plain() and not (torch.is_grad_enabled() and (q.requires_grad or kv.requires_grad)):
            lengths = None if rows is None else _last_positions(rows, N)
            o_latent = self._attend(q, kv, lengths)
        else:
            s = (q.flatten(1, 2) @ kv.mT).unflatten(1, (H, N))
            s = s.to(torch.promote_types(s.dtype, torch.float32)) * self.options.scale
            seen = visible(q, kv[:, None], self.options, rows)
            if seen is not None:
                seen = seen | ~seen.any(-1, keepdim=True)  # padding sees all: its y is zeroed
            p = softmax_weights(s, self.options, local_sinks(self.sinks, q.dtype), seen).to(kv.dtype)
            o_latent = (p.flatten(1, 2) @ kv[..., : self.kv_rank]).unflatten(1, (H, N))
        return torch.einsum("bhnr,her->bnhe", o_latent, w_v)

    def _reads_up(self) -> bool:
        """Whether the absorbed way may read kv_b_proj's weight: calling the module would do no more."""
        module = self.kv_b_proj
        return is_its_weights(module, nn.Linear, self.mesh is not None) and module.bias is None

    def _up_weights(self) -> tuple[Tensor, ...]:
        """W_k (H, nope_dim, kv_rank) and W_v (H, value_dim, kv_rank) of this rank's heads."""
        up = local(self.kv_b_proj.weight).unflatten(0, (-1, self.nope_dim + self.value_dim))
        return up.split([self.nope_dim, self.value_dim], dim=1)

    def _plain(self) -> bool:
        """Whether `latent_attention` has the layer's options."""
        options = self.options
        return options.causal and options.window is None and options.softcap is None and self.sinks is None

    def _attend(
        self, q: Tensor, kv: Tensor, lengths: Tensor | None, table: Tensor | None = None, appended: bool = False
    ) -> Tensor:
        """`appended`: as in `latent.op.attend`."""
        return latent_op.attend(
            q, kv, self.kv_rank, lengths, None, table, True, self.options.scale, "auto", appended=appended
        )

    # ------------------------------------------------------------------------------------- a decoding step

    def _steps(self, x: Tensor, call: Inputs, cache: LatentCache | LatentPool) -> bool:
        """Whether `_step` serves: a pool, or a preallocated cache, the absorbed way, without gradients."""
        if isinstance(cache, LatentPool):
            if not self._reads_up():
                raise NotImplementedError(f"cache is a pool, which is read the absorbed way: {CALLED}")
            return True
        N, limit = x.shape[1], self.rope.max_positions
        return (
            cache.max_length is not None
            and cache.length > 0
            and not torch.is_grad_enabled()
            and self._plain()
            and self._absorbs(N, cache.length + N)
            and call.positions is None
            and (limit is None or limit >= cache.max_length)
            and local(self.kv_b_proj.weight).dtype == x.dtype
            and not torch.is_autocast_enabled(x.device.type)
        )

    def _chained(self, x: Tensor, pool: LatentPool) -> Tensor | None:
        """y of few rows on a pool: a chain of launches before the attention and one after it; None: no kernels.

        Not in fp16 where c_q is normed: times the norm's weight it could overflow before it is divided.
        """
        parts: dict[str, Any] = self._modules  # past Module.__getattr__
        dtype, q_norm, kv_norm = x.dtype, parts.get("q_a_layernorm"), parts["kv_a_layernorm"]
        if not is_step(x) or not _is_plain_norm(kv_norm, dtype):
            return None
        if q_norm is not None and (dtype == torch.float16 or not _is_plain_norm(q_norm, dtype)):
            return None
        first = parameters_of(parts.get("q_a_proj") or parts["q_proj"], parts["kv_a_proj_with_mqa"])
        second, last = parameters_of(parts.get("q_b_proj")), parameters_of(parts["o_proj"])
        up = local(self.kv_b_proj.weight)  # before the first launch: a parametrised module computes its weight here
        if first is None or second is None or last is None or not up.is_contiguous():
            return None
        up = up.view(-1, self.nope_dim + self.value_dim, self.kv_rank)
        tables = self.rope.from_start(pool.capacity, x.device, dtype)  # as well: kernels may read both early
        q_eps, q_weight = (0.0, None) if q_norm is None else (q_norm.eps, q_norm.weight)
        facts = (self.nope_dim, self.rope.interleaved, q_eps, kv_norm.eps)
        weights = (*first, q_weight, *second, kv_norm.weight, up)
        found = pool.fused("latent", facts, x, *weights, *tables, like=(x, *weights, *last))
        if found is None:
            return None
        (kv,), (_, end, _, _, table) = pool.memory, pool.sequences.first(x.shape[0])
        o = self._attend(found[0], kv, end, table, appended=True)
        y = fused_call("steps", "latent_out", self.nope_dim, o, up, *last)
        assert y is not None
        return y[0]

    def _step(self, x: Tensor, cache: LatentCache | LatentPool) -> Tensor:
        """o (B, N, H * value_dim) of tokens that are written after the cache's; where, the device alone knows."""
        R = self.kv_rank
        # Before the first launch, as kernels below may read both before earlier launches have ended: a parametrised
        # module computes its weight here.
        up = local(self.kv_b_proj.weight).view(-1, self.nope_dim + self.value_dim, R)
        tables: tuple[Tensor, ...] = ()
        fuses = on_gpu(x) and is_plain_eager(x)
        if fuses:
            tables = self.rope.from_start(cache.capacity, x.device, x.dtype)
        queries, down, latent, norm = self._queries(x)
        B, N, size = down.shape
        at = cache.at(down)
        (kv,) = at.memory
        few = are_few(down) and up.is_contiguous()
        found, in_rows = None, all(t is None or t.is_contiguous() for t in (queries, down, latent))
        if fuses and is_plain_eager(down) and in_rows:
            facts = (self.nope_dim, self.rope.interleaved, 0.0 if norm is None else self.kv_a_layernorm.eps)
            tensors = (queries, latent, down, norm, *tables, at.begin, at.table, kv, up if few else None)
            like = tuple(t for t in (queries, latent, down, norm, kv, up) if t is not None)
            found = fused_call("decode", "latent_step", facts, *tensors, like=like)
        if found is None:
            latent = self.kv_a_layernorm(down[..., :R]) if latent is None else latent
            return self._step_plainly(queries, latent, down[..., R:], at)
        q = found[0].transpose(0, 1)
        if few:
            o = self._attend(q, kv, at.end, at.table, appended=True)
            value = fused_call("decode", "latent_value", self.nope_dim, o, up)
            assert value is not None
            return value[0]
        H, T, nope, E = up.shape[0], B * N, self.nope_dim, self.value_dim
        width = queries.shape[2] // H  # of a head; as_strided: one view instead of two or three
        q_nope = queries.as_strided((H, T, nope), (width, H * width, 1))
        torch.bmm(q_nope, up[:, :nope], out=found[0].as_strided((H, T, R), (T * size, size, 1)))
        o = self._attend(q, kv, at.end, at.table).transpose(0, 1).reshape(H, T, R)
        y = torch.empty(B, N, H * E, dtype=down.dtype, device=down.device)
        torch.bmm(o, up[:, nope:].mT, out=y.as_strided((H, T, E), (E, H * E, 1)))
        return y

    def _queries(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """The queries before RoPE, kv_a_proj's output, and its latent or the weight of the norm that this still lacks.

        The kernel that writes the latent norms it. Of few rows the norm of c_q is part of the products around it, but
        in fp16, where c_q times the norm's weight could overflow before it is divided.
        """
        parts: dict[str, Any] = self._modules  # past Module.__getattr__
        q_norm, q_up, kv_norm = parts.get("q_a_layernorm"), parts.get("q_b_proj"), parts["kv_a_layernorm"]
        linears = parts.get("q_a_proj") or parts["q_proj"], parts["kv_a_proj_with_mqa"]
        plain = on_gpu(x) and all(norm is None or _is_plain_norm(norm, x.dtype) for norm in (q_norm, kv_norm))
        joins = plain and are_few(x) and x.dtype != torch.float16
        if joins and q_norm is not None and q_up is not None and is_plain(q_up):
            found = few_rows(x, *linears, norm=q_norm.weight)
            if found is not None:
                c_q, down, squares = found
                found = few_rows(c_q, q_up, squares=squares, facts=Facts(None, q_norm.eps or 0.0, early=True))
            if found is not None:
                return found[0], down, None, kv_norm.weight
        taken = parameters_of(*linears) if plain and is_step(x, MAX_ROWS_TOGETHER) else None
        if taken is not None and q_norm is not None and q_up is not None:
            found = fused_call("steps", "latent_down", q_norm.eps, x, *taken, q_norm.weight)
            if found is not None:
                (queries,) = project(found[0], q_up, early=True)
                return queries, found[1], None, kv_norm.weight
        first, down = project(x, *linears)
        if plain and first.is_contiguous() and down.is_contiguous():
            if q_norm is None or q_up is None:
                return first, down, None, kv_norm.weight
            found = fused_call("latent", "norms", (q_norm.eps,), first, q_norm.weight, None, None)
            if found is not None:
                (queries,) = project(found[1], q_up, early=True)
                return queries, down, None, kv_norm.weight
        queries, latent, _ = self._up(first, down)
        return queries, down, latent, None

    def _step_plainly(self, queries: Tensor, latent: Tensor, k_rope: Tensor, at: Step) -> Tensor:
        """`_step` in PyTorch's operations."""
        (kv,), (w_k, w_v) = at.memory, self._up_weights()
        sizes = [self.nope_dim, self.rope_dim]
        q_nope, q_rope = queries.unflatten(2, (-1, sum(sizes))).split(sizes, dim=3)
        tables, R = self.rope.span(0, at.limit, latent.device, latent.dtype), self.kv_rank
        new, memory = (k_rope[:, :, None], latent[:, :, None]), (kv[:, :, None, R:], kv[:, :, None, :R])
        q_rope, _ = append(q_rope, *new, *memory, at.begin, at.table, *tables, interleaved=self.rope.interleaved)
        q = torch.cat([torch.einsum("bnhd,hdr->bhnr", q_nope, w_k), q_rope.transpose(1, 2)], 3)
        return torch.einsum("bhnr,her->bnhe", self._attend(q, kv, at.end, at.table), w_v).flatten(2)

    def new_pool(self, sequences: Sequences) -> LatentPool:
        """Memory of this layer for `sequences`, on its device and in its dtype; a layer takes it as `cache`."""
        if not self._plain() or self.absorb is False:
            raise NotImplementedError(
                "a pool is read by latent_attention: give the layer causal=True, no window, softcap or sinks, and no "
                "absorb=False"
            )
        check_positions_of(self.rope, sequences)
        weight = self.o_proj.weight
        return LatentPool(sequences, self.kv_rank + self.rope_dim, device=weight.device, dtype=weight.dtype).of(self)

    # ------------------------------------------------------------------------------- weights and ranks

    @classmethod
    def from_hf(
        cls, module_or_state_dict: nn.Module | Mapping[str, Tensor], config: Any, *, prefix: str = "",
        backend: str = "auto", device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ) -> MultiHeadLatentAttention:  # fmt: skip
        """The layer of a Hugging Face attention module of DeepSeek-V3, or of its state_dict.

        config  the model's configuration, or its dict.
        prefix  of the names that are this layer's, as "model.layers.3.self_attn."; others are not looked at. DeepSeek's
                own names (wq_a, wkv_b, ...) are known, too.
        """
        tensors = {_our_name(n): x for n, x in weights.tensors_of(module_or_state_dict, prefix).items()}
        check_model(config, "qk_rope_head_dim", "DeepSeek-V3")
        rope_dim = config_size(config, "qk_rope_head_dim")
        interleaved = bool(config_value(config, "rope_interleave", True))
        make = functools.partial(
            cls,
            config_size(config, "hidden_size"),
            config_size(config, "num_attention_heads"),
            q_rank=config_value(config, "q_lora_rank", None),
            kv_rank=config_size(config, "kv_lora_rank"),
            nope_dim=config_size(config, "qk_nope_head_dim"),
            rope_dim=rope_dim,
            value_dim=config_size(config, "v_head_dim"),
            rope=Rotary.from_config(config, rope_dim, interleaved=interleaved),
            bias=bool(config_value(config, "attention_bias", False)),
            dropout=config_value(config, "attention_dropout", 0.0) or 0.0,
            backend=backend,
        )
        return weights.loaded(make, tensors, module_or_state_dict, device, dtype)

    def check_ranks(self, ranks: int) -> None:
        check_shares(self.num_heads, "num_heads", ranks)

    def tp_plan(self) -> dict[str, ParallelStyle]:
        """For `parallelize_module`: heads shared out to the ranks, the projections to the latents on every rank.

        In a model's plan the entry "" of the layer "blocks.0.attention" is "blocks.0.attention.".
        """
        plan: dict[str, ParallelStyle] = {"": Heads()}
        if self.q_rank is None:
            plan["q_proj"] = ColwiseParallel()
        else:
            plan |= {"q_a_proj": Replicated(), "q_a_layernorm": HeadwiseNorm(by_heads=False)}
            plan["q_b_proj"] = ColwiseParallel()
        plan |= {"kv_a_proj_with_mqa": Replicated(), "kv_a_layernorm": HeadwiseNorm(by_heads=False)}
        return plan | {"kv_b_proj": ColwiseParallel(), "o_proj": RowwiseParallel()}


def normed(*pairs: tuple[Tensor, RMSNorm]) -> tuple[Tensor, ...]:
    """For each x (B, N, width) and its norm of R features: the norm of x's first R columns, and the other columns."""
    tensors = [t for x, norm in pairs for t in (x, norm.weight)]
    if all(x.is_contiguous() and _is_plain_norm(norm, x.dtype) for x, norm in pairs):
        kernels = kernels_for("latent", *tensors)
        if kernels is not None:
            return kernels.Normed.apply(tuple(norm.eps for _, norm in pairs), *tensors)
    found: list[Tensor] = []
    for x, norm in pairs:
        R = norm.weight.shape[0]
        first, rest = x.split([R, x.shape[2] - R], dim=2)
        found += [norm(first), rest]
    return tuple(found)


def _is_plain_norm(norm: RMSNorm, dtype: torch.dtype) -> bool:
    """Whether a kernel that reads contiguous rows of this dtype can norm them instead of the module."""
    weight = norm.weight
    if type(weight) is not nn.Parameter or weight.dtype != dtype or weight.shape[0] > MAX_NORM_WIDTH:
        return False
    return norm.eps is not None and norm.mesh is None and has_no_hooks(norm, kind=RMSNorm)


def _last_positions(rows: Rows, N: int) -> Tensor:
    """The kv_lengths with which query i of N stands where it does in its row, padding after the row's queries."""
    assert isinstance(rows, Counts), "a cache has no packed sequences"
    return (rows.k - rows.q + N).to(torch.int32)


DEEPSEEK_NAMES = {
    "wq": "q_proj",
    "wq_a": "q_a_proj",
    "q_norm": "q_a_layernorm",
    "wq_b": "q_b_proj",
    "wkv_a": "kv_a_proj_with_mqa",
    "kv_norm": "kv_a_layernorm",
    "wkv_b": "kv_b_proj",
    "wo": "o_proj",
}


def _our_name(name: str) -> str:
    part, dot, rest = name.partition(".")
    return DEEPSEEK_NAMES.get(part, part) + dot + rest
