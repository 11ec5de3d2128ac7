"""`MultiHeadLatentAttention`: DeepSeek's MLA, whose cache holds one small latent for all heads.

    c_q = norm(x W_qa);  q = c_q W_qb = [q_nope | q_rope]            or q = x W_q, without q_rank
    [c | k_rope] = x W_kva;  c = norm(c)                             the latent, kv_rank elements a token
    [k_nope | v] = c W_kvb;  k = [k_nope | rope(k_rope)]             k_rope is one for all heads
    o = softmax(scale [q_nope | rope(q_rope)] k^T) v;  y = o W_o

There are two ways to the same o. *Expanded*, as written: attention with a head dim of nope_dim + rope_dim (192 in
DeepSeek-V3) for q and k and value_dim (128) for v, through `flash_attention`; for training and for prompts. *Absorbed*:
W_kvb = [W_k | W_v] is applied to the queries and to the outputs instead of to every key,

    q k^T = (q_nope W_k^T) c^T + rope(q_rope) rope(k_rope)^T,    o = (p c) W_v

so that all heads read the one cached latent: multi-query attention with a head dim of kv_rank + rope_dim = 576 and
values of 512. No kernel of `flash_attention` takes such heads (256 is the most), so these products are plain PyTorch,
the softmax in fp32. A step of one token reads the cache once and writes no key at all.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from fulmen.boundary import is_plain_eager
from fulmen.flash.op import MAX_HEAD_DIM, FlashSpec, Window, checked_spec
from fulmen.layers import dropout as dropping
from fulmen.layers import weights
from fulmen.layers.cache import End, LatentCache
from fulmen.layers.calls import (
    USUAL_N,
    attend,
    backend_chosen,
    check_backend,
    check_call,
    check_heads,
    check_kind,
    counts_of,
    loaded,
    rotary,
    rotations,
    sinks_of,
    tokens_first,
)
from fulmen.layers.checks import choice, factory, flag, number, whole
from fulmen.layers.projections import plain, project
from fulmen.layers.ranks import (
    Heads,
    HeadwiseNorm,
    Replicated,
    RMSNorm,
    check_shares,
    local,
    replace_parameters,
    summed_gradient,
)
from fulmen.layers.rotary import Rotary, apply_rotary, config_size, config_value, fused, kernels_for
from fulmen.layers.rows import Rows

if TYPE_CHECKING:
    from fulmen.parallel.context import ContextParallel


class MultiHeadLatentAttention(weights.Whole):
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

    mesh: DeviceMesh | None = None  # the ranks that share the heads, if they do
    cp: ContextParallel | None = None  # the ranks that share x's tokens, if they do

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
        whole("nope_dim + rope_dim", nope_dim + rope_dim, 1, MAX_HEAD_DIM)
        value_dim = whole("value_dim", value_dim, 1, MAX_HEAD_DIM)
        if choice("absorb", absorb, True, False, "auto") is True and dropout:
            raise ValueError(
                f"dropout={dropout} with absorb=True: the absorbed way drops no weights; use 'auto' or False"
            )
        dropping.refuse(check_backend("flash", backend), dropout)
        self.embed_dim, self.num_heads, self.q_rank, self.kv_rank = embed_dim, num_heads, q_rank, kv_rank
        self.nope_dim, self.rope_dim, self.value_dim = nope_dim, rope_dim, value_dim
        self.absorb, self.dropout = absorb, float(dropout)
        turn = rotary({} if rope is None else rope, nope_dim + rope_dim, dim=rope_dim, interleaved=True)
        if turn is None or turn.dim != rope_dim:
            raise ValueError(f"rope turns dim={turn and turn.dim} elements, must be rope_dim={rope_dim}")
        self.rope = turn
        scale = (nope_dim + rope_dim) ** -0.5 * self.rope.softmax_factor
        self.options = dropping.Options(flag("causal", causal), window, softcap, scale, backend)
        like = torch.empty(1, 1, 1, nope_dim + rope_dim, device="meta")
        checked_spec(like, like, like, causal=causal, window=window, softcap=softcap, scale=scale)
        kind = factory(device, dtype)
        self._build(flag("bias", bias), number("norm_eps", norm_eps, zero=True), kind)
        self.sinks = nn.Parameter(torch.zeros(num_heads, **kind)) if flag("sinks", sinks) else None
        self.rope._frequencies_on(self.o_proj.weight.device)

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
        o, weight = self.options, self.o_proj.weight
        spec = FlashSpec(
            1, self.num_heads, self.num_heads, USUAL_N, USUAL_N, self.nope_dim + self.rope_dim, self.value_dim,
            weight.dtype, weight.device, o.scale, *o.limits, softcap=o.softcap, has_sinks=self.sinks is not None,
            needs_grad=True,
        )  # fmt: skip
        parts = [f"{self.embed_dim}, num_heads={self.num_heads}, q_rank={self.q_rank}, kv_rank={self.kv_rank}"]
        parts += [f"nope_dim={self.nope_dim}, rope_dim={self.rope_dim}, value_dim={self.value_dim}"]
        parts += ["causal" if o.causal else "full"]
        parts += [f"{name}={value}" for name, value in (("window", o.window), ("softcap", o.softcap)) if value]
        parts += ["sinks"] if self.sinks is not None else []
        parts += [f"dropout={self.dropout}"] if self.dropout else []
        return ", ".join([*parts, f"absorb={self.absorb}", f"backend={backend_chosen('flash', spec, o.backend)}"])

    # ------------------------------------------------------------------------------------------ the call

    def forward(
        self,
        x: Tensor,
        positions: Tensor | None = None,
        cache: LatentCache | None = None,
        mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> Tensor:
        """y (B, N, embed_dim).

        positions   (N,) or (B, N) for RoPE; counted on from the cache's tokens, without padding, unless given.
        cache       a `LatentCache`: x comes after its tokens, and is appended.
        mask        bool (B, N), True for a token: padding is not seen, and its y is zero.
        cu_seqlens  int32: B is 1 and N holds packed sequences, which do not see each other.
        """
        check_call(self.embed_dim, x, positions, cache, LatentCache, mask, cu_seqlens, self.options.causal, self.cp)
        check_kind("x", x, self.o_proj)
        if cache is not None:
            cache.check_writer(self)
        x, padding = tokens_first(x, mask)
        rows = None if cu_seqlens is None else Rows(None, None, cu_seqlens, cu_seqlens)
        if padding is not None:
            rows = Rows(padding.counts, padding.counts)
        cos, sin = rotations(self.rope, x, positions, cache, padding, cu_seqlens, self.cp)
        queries, down = project(x, self._q_first(), self.kv_a_proj_with_mqa)
        if self.q_b_proj is not None and self.q_a_layernorm is not None:
            queries, _, latent, k_rope = normed((queries, self.q_a_layernorm), (down, self.kv_a_layernorm))
            queries = self.q_b_proj(queries)
        else:
            latent, k_rope = normed((down, self.kv_a_layernorm))
        served = cache is None and fused(cos, sin, queries, latent, k_rope) is not None
        weight = self._up_weight(latent) if served else None
        if weight is not None:
            o = self._expanded_at_once(queries, latent, k_rope, weight, cos, sin, rows)
            y = self.o_proj(o.flatten(2))
            return y if padding is None else padding.back(y)
        queries = queries.unflatten(2, (-1, self.nope_dim + self.rope_dim))
        q_nope, q_rope = queries.split([self.nope_dim, self.rope_dim], dim=3)
        q_rope = apply_rotary(q_rope.transpose(1, 2), cos, sin, self.rope.interleaved).transpose(1, 2)
        k_rope = apply_rotary(k_rope[:, None], cos, sin, self.rope.interleaved)[:, 0]
        if cache is None:
            y = self.o_proj(self._expanded(q_nope, q_rope, latent, k_rope, rows).flatten(2))
        else:
            o, end = self._continued(q_nope, q_rope, latent, k_rope, rows, cache)
            y = self.o_proj(o.flatten(2))
            cache.advance(end, self)
        return y if padding is None else padding.back(y)

    def _q_first(self) -> nn.Module:
        """What x is multiplied with on its way to q."""
        first = self.q_a_proj if self.q_proj is None else self.q_proj
        assert first is not None
        return first

    def _continued(
        self, q_nope: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor, rows: Rows | None, cache: LatentCache
    ) -> tuple[Tensor, End]:
        """o (B, N, H, value_dim) of tokens that come after the cache's, either way of the two, and the cache's end."""
        N, counts = q_nope.shape[1], None if rows is None else rows.q_counts
        all_latent, all_k_rope, end = cache.offer(latent, k_rope, counts)
        if cache.length == 0 and not self._absorbs(N, N):  # nothing but itself to see
            return self._expanded(q_nope, q_rope, latent, k_rope, rows), end
        if end.lengths is not None:
            rows = Rows(counts_of(latent, None) if counts is None else counts, end.lengths)
        way = self._absorbed if self._absorbs(N, all_latent.shape[1]) else self._expanded
        return way(q_nope, q_rope, all_latent, all_k_rope, rows), end

    def _absorbs(self, N: int, keys: int) -> bool:
        """Whether N queries and so many keys take fewer multiplications the absorbed way."""
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
        """kv_b_proj's weight as far as it lies here, for products of our own; None: there is more to that module."""
        module = self.kv_b_proj
        if not plain(module, planned=self.mesh is not None) or len(list(module.parameters())) > 1:
            return None
        weight = module.weight if self.mesh is None else local(module.weight)
        if torch.is_autocast_enabled(latent.device.type):
            weight = weight.to(latent.dtype)
        return weight if weight.dtype == latent.dtype and is_plain_eager(weight) else None

    def _expanded_at_once(
        self, q: Tensor, latent: Tensor, k_rope: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, rows: Rows | None
    ) -> Tensor:
        """The same of q (B, N, H * (nope_dim + rope_dim)) and k_rope as they are projected; q is turned in place."""
        from fulmen.layers.latent_triton import Expanded

        last = self._q_first() if self.q_b_proj is None else self.q_b_proj
        if not plain(last) or q._is_view():  # somebody may have kept it; autograd refuses views
            q = q.clone()
        latent, k_rope = summed_gradient(latent, self.mesh), summed_gradient(k_rope, self.mesh)
        q, k, v = Expanded.apply(q, latent, k_rope, weight, cos, sin, self.nope_dim, self.rope.interleaved)
        q, k, v = (t.transpose(1, 2) for t in (q.unflatten(2, (-1, k.shape[3])), k, v))
        dropout = self.dropout if self.training else 0.0
        return attend(q, k, v, self.options, self.sinks, rows, dropout, self.cp).transpose(1, 2)

    def _absorbed(self, q_nope: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor, rows: Rows | None) -> Tensor:
        """o (B, N, H, value_dim), all heads reading the latents."""
        N, H = q_nope.shape[1:3]
        latent, k_rope = summed_gradient(latent, self.mesh), summed_gradient(k_rope, self.mesh)
        up = local(self.kv_b_proj.weight).unflatten(0, (H, self.nope_dim + self.value_dim))
        w_k, w_v = up.split([self.nope_dim, self.value_dim], dim=1)  # (H, nope_dim, R), (H, value_dim, R)
        q_latent = torch.einsum("bnhd,hdr->bhnr", q_nope, w_k)  # a product for each head: the weights are read once
        s = q_latent.flatten(1, 2) @ latent.mT + q_rope.transpose(1, 2).flatten(1, 2) @ k_rope.mT  # (B, H * N, keys)
        s = s.to(torch.promote_types(s.dtype, torch.float32)).unflatten(1, (H, N)) * self.options.scale
        if self.options.softcap is not None:
            s = self.options.softcap * torch.tanh(s / self.options.softcap)
        seen = dropping.visible(q_latent, latent[:, None], self.options, rows)
        if seen is not None:
            s = s.masked_fill(~(seen | ~seen.any(-1, keepdim=True)), -torch.inf)  # padding sees all: its y is zeroed
        sinks = sinks_of(self.sinks, q_latent.dtype)
        if sinks is not None:
            s = torch.cat([s, sinks.to(s.dtype).view(1, -1, 1, 1).expand(*s.shape[:3], 1)], 3)
        p = torch.softmax(s, dim=3)[..., : latent.shape[1]].to(latent.dtype)
        o_latent = (p.flatten(1, 2) @ latent).unflatten(1, (H, N))
        return torch.einsum("bhnr,her->bnhe", o_latent, w_v)

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
        return loaded(make, tensors, module_or_state_dict, device, dtype)

    def check_ranks(self, ranks: int) -> None:
        """Raises if its heads cannot be shared out to so many."""
        check_shares(self.num_heads, "num_heads", ranks)

    def tp_plan(self) -> dict[str, ParallelStyle]:
        """For `parallelize_module`: heads shared out to the ranks, the projections to the latents on every rank.

        In a model's plan the entry "" of the layer "blocks.0.attention" is "blocks.0.attention.".
        """

        def take(layer: nn.Module, mesh: DeviceMesh) -> None:
            assert isinstance(layer, MultiHeadLatentAttention)
            layer.mesh = mesh
            replace_parameters(layer, mesh, Shard(0), 0)  # the sinks

        plan: dict[str, ParallelStyle] = {"": Heads(self.num_heads, "num_heads", take)}
        if self.q_rank is None:
            plan["q_proj"] = ColwiseParallel()
        else:
            plan |= {"q_a_proj": Replicated(), "q_a_layernorm": HeadwiseNorm(by_heads=False)}
            plan["q_b_proj"] = ColwiseParallel()
        plan |= {"kv_a_proj_with_mqa": Replicated(), "kv_a_layernorm": HeadwiseNorm(by_heads=False)}
        return plan | {"kv_b_proj": ColwiseParallel(), "o_proj": RowwiseParallel()}


def normed(*pairs: tuple[Tensor, RMSNorm]) -> tuple[Tensor, ...]:
    """Of each x (B, N, width) and its norm: the norm of as many of x's first columns as it is for, and the others."""
    tensors = [t for x, norm in pairs for t in (x, norm.weight)]
    kernels = None
    if all(type(norm.weight) is nn.Parameter for _, norm in pairs):
        kernels = kernels_for("latent_triton", *tensors)
    if kernels is not None and all(kernels.serves(x, norm) for x, norm in pairs):
        return kernels.Normed.apply(tuple(norm.eps for _, norm in pairs), *tensors)
    found: list[Tensor] = []
    for x, norm in pairs:
        R = norm.weight.shape[0]
        first, rest = x.split([R, x.shape[2] - R], dim=2)
        found += [norm(first), rest]
    return tuple(found)


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
