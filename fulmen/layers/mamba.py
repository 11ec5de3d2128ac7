"""`Mamba2`: the mixer of Mamba-2 and its hybrids as a layer, on lightning attention with a decay for each token.

    z, xBC, dt = x W_in;   x, B, C = silu(conv(xBC));   dt = clamp(softplus(dt + dt_bias))
    o = lightning_attention(q=C, k=B, v=dt x, decay=exp(A_log) dt)
    y = norm((o + D x) silu(z)) W_out

Parameters have Hugging Face's names and layout: `in_proj` holds the rows of z, x, B, C and dt, `conv1d` those of x, B
and C. Heads of a group share B and C. What lies between the projections is scan.py, as in the mixers of transformers.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle, RowwiseParallel

from fulmen.boundary import is_number, needs_gradient
from fulmen.layers import weights
from fulmen.layers.cache import MambaCache
from fulmen.layers.fused.projections import has_no_hooks, is_its_weights, project
from fulmen.layers.inputs import (
    Inputs,
    check_backend,
    factory,
    flag,
    full_counts,
    number,
    sequences_of,
    whole,
)
from fulmen.layers.rotary import config_size, config_value, unknown_model
from fulmen.layers.scan import Norm, Steps, convolve, convolve_step, gated_norm, scan, scan_step
from fulmen.layers.tensor_parallel import (
    FusedHeads,
    FusedRows,
    Heads,
    HeadsNorm,
    ShardedHeadsNorm,
    check_shares,
    join_rows,
    local,
    ranks_of,
    split_rows,
)
from fulmen.lightning.spec import MAX_HEAD_DIM


class Mamba2(weights.AttentionLayer):
    """Mamba-2's mixer: x (B, N, embed_dim) to (B, N, embed_dim).

    embed_dim    size of a token's vector.
    num_heads    H, of `head_dim` (P) each; 2 * embed_dim / head_dim unless given, as in Mamba-2.
    state_size   of B and C; with head_dim the size of a head's state.
    num_groups   heads of B and C; H / num_groups heads share one.
    conv_size    tokens that the convolution sees.
    norm_groups  RMSNorm of the gated outputs: the number of groups they are normed in (1: all together), None: none.
    dt_limit     the step sizes are clamped to it.
    bias         of in_proj and out_proj; conv_bias of the convolution.
    backend      of `lightning_attention`: "auto", or a name that works or raises.
    """

    cache_type = MambaCache
    pool_type = None

    def __init__(
        self,
        embed_dim: int,
        num_heads: int | None = None,
        *,
        head_dim: int = 64,
        state_size: int = 128,
        num_groups: int = 1,
        conv_size: int = 4,
        norm_groups: int | None = 1,
        dt_limit: tuple[float, float] = (0.0, math.inf),
        bias: bool = False,
        conv_bias: bool = True,
        norm_eps: float = 1e-5,
        backend: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.embed_dim, self.head_dim = whole("embed_dim", embed_dim), whole("head_dim", head_dim, 1, MAX_HEAD_DIM)
        if num_heads is None and 2 * self.embed_dim % self.head_dim:
            raise ValueError(
                f"embed_dim={embed_dim}: head_dim={head_dim} must divide 2 * embed_dim, unless num_heads is given"
            )
        self.num_heads = whole("num_heads", 2 * self.embed_dim // self.head_dim if num_heads is None else num_heads)
        self.state_size = whole("state_size", state_size, 1, MAX_HEAD_DIM)
        self.num_groups, self.conv_size = whole("num_groups", num_groups), whole("conv_size", conv_size, 2)
        if self.num_heads % self.num_groups:
            raise ValueError(f"num_groups={self.num_groups} must divide num_heads={self.num_heads}")
        self.steps = Steps(True, *_limit(dt_limit))
        self.backend = check_backend("lightning", backend)
        kind, eps = factory(device, dtype), number("norm_eps", norm_eps, zero=True)
        _, inner, states, _, _ = sizes = self._rows()
        channels = inner + 2 * states
        self.in_proj = nn.Linear(self.embed_dim, sum(sizes), bias=flag("bias", bias), **kind)
        self.conv1d = nn.Conv1d(
            channels, channels, self.conv_size, groups=channels, padding=self.conv_size - 1,
            bias=flag("conv_bias", conv_bias), **kind,
        )  # fmt: skip
        self.dt_bias, self.A_log, self.D = (nn.Parameter(torch.empty(self.num_heads, **kind)) for _ in range(3))
        self.norm = None
        if norm_groups is not None:
            groups = whole("norm_groups", norm_groups)
            if inner % groups:
                raise ValueError(f"norm_groups={groups}: so many groups must divide H * P = {inner}")
            self.norm = HeadsNorm(inner, groups, eps, **kind)
        self.out_proj = nn.Linear(inner, self.embed_dim, bias=bias, **kind)
        self.reset_parameters()
        self.register_state_dict_post_hook(_in_order)
        self.register_load_state_dict_pre_hook(_to_ranks)

    def _rows(self, ranks: int = 1) -> tuple[int, int, int, int, int]:
        """Rows of in_proj on a rank: of z, x, B, C and dt."""
        inner, states = self.num_heads * self.head_dim // ranks, self.num_groups * self.state_size // ranks
        return inner, inner, states, states, self.num_heads // ranks

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draws every parameter anew, as Mamba-2 does: A from 1 to 16, step sizes from 0.001 to 0.1."""
        for part in (self.in_proj, self.conv1d, self.norm, self.out_proj):
            if part is not None:
                part.reset_parameters()
        self.A_log.uniform_(1.0, 16.0).log_()
        self.D.fill_(1.0)
        dt = torch.empty_like(self.dt_bias).uniform_(math.log(0.001), math.log(0.1)).exp_().clamp_(min=1e-4)
        self.dt_bias.copy_(dt + torch.log(-torch.expm1(-dt)))  # softplus gives dt back

    def extra_repr(self) -> str:
        return (
            f"{self.embed_dim}, num_heads={self.num_heads}, head_dim={self.head_dim}, state_size={self.state_size}, "
            f"num_groups={self.num_groups}, conv_size={self.conv_size}, backend={self.backend!r}"
        )

    # ------------------------------------------------------------------------------------------ the call

    def forward(
        self,
        x: Tensor,
        *,
        cache: MambaCache | None = None,
        mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> Tensor:
        """y (B, N, embed_dim).

        cache       continues from the cache's tokens and takes in x. A single token without gradients updates it in
                    place, so that the step can be captured in a CUDA graph.
        mask        bool (B, N), True for a token, False for padding, on either side or between tokens, whose y is zero.
        cu_seqlens  int32 (sequences + 1,): B is 1 and N holds packed sequences.
        """
        if self.cp is not None:
            raise NotImplementedError("Mamba2 does not cut its tokens over ranks: use tp_plan, or data parallelism")
        call = Inputs.of(self, x, None, cache, mask, cu_seqlens, self.out_proj)
        (mixed,) = project(call.x, self.in_proj)
        z, inner, states, _, heads = self._rows(ranks_of(self.mesh))
        z, xBC, dt = mixed.split([z, inner + 2 * states, heads], 2)
        if cache is not None and cache.state is not None:
            cache.check_state(xBC)
            self._check_memory(cache, xBC, heads)
        if cache is not None and self._takes_step(call, cache, mixed):
            y = self._step(z, xBC[:, 0], dt[:, 0], cache)
            (y,) = project(y, self.out_proj, early=True)
            return call.back(y)
        y, state = self._scan(z, xBC, dt, call, cache)
        (y,) = project(y, self.out_proj, early=True)
        if cache is not None and state is not None:
            conv = _last_tokens(cache.conv, xBC, self.conv_size - 1, call.counts)
            cache.update(state, xBC.shape[1], call.counts, self, conv)
        return call.back(y)

    def _takes_step(self, call: Inputs, cache: MambaCache, mixed: Tensor) -> bool:
        if cache.state is None or call.padding is not None or mixed.shape[1] != 1:
            return False
        if not torch.compiler.is_compiling() and cache.state.is_inference() and not torch.is_inference_mode_enabled():
            return False  # such memory cannot change in place here
        return not torch.is_grad_enabled() or not needs_gradient((mixed, cache.state, *self.parameters()))

    def _check_memory(self, cache: MambaCache, xBC: Tensor, heads: int) -> None:
        rows, _, channels = xBC.shape
        assert cache.state is not None
        assert cache.conv is not None
        wanted = (rows, heads, self.state_size, self.head_dim), (rows, self.conv_size - 1, channels)
        if (cache.state.shape, cache.conv.shape) != wanted:
            raise ValueError(
                f"cache holds states {tuple(cache.state.shape)} and last inputs {tuple(cache.conv.shape)}, x needs "
                f"{wanted[0]} and {wanted[1]}: call reset() before other sequences or another layer"
            )

    def _parameters_here(self) -> tuple[Tensor, Tensor | None, Tensor, Tensor, Tensor]:
        """On this rank: the convolution's weight (channels, taps) and bias, A_log, D, dt_bias."""
        if not is_its_weights(self.conv1d, nn.Conv1d):
            raise NotImplementedError(
                f"conv1d is a {type(self.conv1d).__name__} that has hooks or is no plain torch.nn.Conv1d: Mamba2 reads "
                "its weights and does not call it; put hooks on in_proj, out_proj or the layer"
            )
        bias = None if self.conv1d.bias is None else local(self.conv1d.bias)
        return local(self.conv1d.weight)[:, 0], bias, local(self.A_log), local(self.D), local(self.dt_bias)

    def _split(self, xBC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x (..., H, P), B and C (..., groups, state size), of this rank."""
        _, inner, states, _, _ = self._rows(ranks_of(self.mesh))
        x, B, C = xBC.split([inner, states, states], -1)
        by_state = (-1, self.state_size)
        return x.unflatten(-1, (-1, self.head_dim)), B.unflatten(-1, by_state), C.unflatten(-1, by_state)

    def _norm_of(self, z: Tensor) -> Norm | None:
        """The norm of this rank's features, as many as z's, if they are whole groups and nobody sees its call."""
        if self.norm is None or (groups := self.norm.groups_in(z)) is None:
            return None
        if not has_no_hooks(self.norm, kind=HeadsNorm):
            return None
        return Norm(local(self.norm.weight), groups, self.norm.eps)

    def _scan(
        self, z: Tensor, xBC: Tensor, dt: Tensor, call: Inputs, cache: MambaCache | None
    ) -> tuple[Tensor, Tensor | None]:
        """(B, N, H * P), normed and gated, and the state a cache is to hold."""
        weight, bias, A_log, D, dt_bias = self._parameters_here()
        A = -torch.exp(A_log.to(torch.promote_types(A_log.dtype, torch.float32)))
        (rows, N), counts = xBC.shape[:2], call.counts
        before, state = (None, None) if cache is None else (cache.conv, cache.state)
        seq = None if call.cu_seqlens is None else sequences_of(N, call.cu_seqlens)[None]
        x, B, C = self._split(convolve(xBC, weight, bias, True, seq, before))
        norm = self._norm_of(z)
        given = [x, dt, B, C, z.unflatten(2, x.shape[2:])]
        ends = call.cu_seqlens
        if counts is not None:  # each row is two packed sequences, its tokens and its padding
            given = [t.flatten(0, 1)[None] for t in given]
            row = torch.arange(rows, device=x.device) * N
            ends = nn.functional.pad(torch.stack([row + counts, row + N], 1).flatten(), (1, 0)).to(torch.int32)
            state = None if state is None else torch.stack([state, torch.zeros_like(state)], 1).flatten(0, 1)
        x, dt, B, C, gate = given
        y, last = scan(
            x, dt, A, B, C, D, gate, dt_bias, self.steps, initial_state=state, cu_seqlens=ends, norm=norm,
            with_state=cache is not None, backend=self.backend,
        )  # fmt: skip
        y = y.reshape(z.shape)
        if last is not None and counts is not None:
            last = last.unflatten(0, (rows, 2))[:, 0].contiguous()
        return y if norm is not None or self.norm is None else self.norm(y), last

    def _step(self, z: Tensor, xBC: Tensor, dt: Tensor, cache: Any) -> Tensor:
        """(B, 1, H * P) of one token; the cache's memory is updated in place."""
        weight, bias, A_log, D, dt_bias = self._parameters_here()
        x, B, C = self._split(convolve_step(xBC, weight, bias, cache.conv.mT, True))
        norm = None if self.norm is None else self._norm_of(z)
        gate = None if self.norm is not None else z.view(x.shape)
        y = scan_step(cache.state.mT, x, dt, A_log, B, C, D, gate, dt_bias, self.steps, log=True).view(z.shape)
        cache.count(1, self)
        if self.norm is None:
            return y
        return gated_norm(y, z, norm) if norm is not None else self.norm(y * nn.functional.silu(z))

    # ------------------------------------------------------------------------------- weights and ranks

    @classmethod
    def from_hf(
        cls, module_or_state_dict: nn.Module | Mapping[str, Tensor], config: Any, *, prefix: str = "",
        backend: str = "auto", device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ) -> Mamba2:  # fmt: skip
        """The layer of a Hugging Face mixer of Mamba-2, Bamba, Granite 4 H, Nemotron-H or Zamba2, or of its state_dict.

        config  the model's configuration, or its dict.
        prefix  of the names that are this layer's, as "backbone.layers.3.mixer."; others are not looked at.
        """
        tensors = weights.tensors_of(module_or_state_dict, prefix)
        options = _options(config)
        options["norm_groups"] = _norm_groups(module_or_state_dict, prefix) or options["num_groups"]
        make = functools.partial(cls, **options, backend=backend)
        return weights.loaded(make, tensors, module_or_state_dict, device, dtype, like="out_proj.weight")

    def check_ranks(self, ranks: int) -> None:
        check_shares(self.num_groups, "num_groups", ranks)
        if self.norm is not None:
            self.norm.check_ranks(ranks)

    def tp_plan(self) -> dict[str, ParallelStyle]:
        """For `parallelize_module`: heads and their groups shared out to the ranks, of which groups are no fewer.

        In a model's plan the entry "" of the layer "blocks.0.mixer" is "blocks.0.mixer.".
        """
        sizes = self._rows()
        plan: dict[str, ParallelStyle] = {"": Heads(), "in_proj": FusedHeads(sizes), "conv1d": FusedRows(sizes[1:4])}
        plan["out_proj"] = RowwiseParallel()
        return plan if self.norm is None else plan | {"norm": ShardedHeadsNorm()}


def _limit(limit: Any) -> tuple[float, float]:
    pair = tuple(limit) if isinstance(limit, Sequence) else ()
    if len(pair) != 2 or not all(map(is_number, pair)) or not 0.0 <= pair[0] < pair[1]:
        raise ValueError(f"dt_limit={limit!r}: must be two numbers, the first at least 0 and below the second")
    return float(pair[0]), float(pair[1])


def _last_tokens(before: Tensor | None, xBC: Tensor, taps: int, counts: Tensor | None) -> Tensor:
    """(B, taps, channels): the last of each row's tokens, those of `before` or zeros where it has fewer."""
    if counts is None and xBC.shape[1] >= taps:
        return xBC[:, -taps:].clone(memory_format=torch.contiguous_format)  # a step changes it in place
    early = xBC.new_zeros(xBC.shape[0], taps, xBC.shape[2]) if before is None else before
    every = torch.cat([early, xBC], 1)
    place = full_counts(xBC, counts)[:, None] + torch.arange(taps, device=xBC.device)
    return every.take_along_dim(place[..., None], 1)


# --------------------------------------------------------------------------- state_dict under tensor parallelism


def _shared(layer: Any) -> list[tuple[str, tuple[int, ...]]]:
    """Names of parameters whose rows lie on the ranks in pieces, and the rows of their parts."""
    sizes, found = layer._rows(), []
    for part, rows in (("in_proj", sizes), ("conv1d", sizes[1:4])):
        found += [(f"{part}.{name}", rows) for name, _ in layer.get_submodule(part).named_parameters(recurse=False)]
    return found if layer.mesh is not None else []


def _in_order(layer: Any, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    """Rows in the order of one rank."""
    for name, rows in _shared(layer):
        parts = split_rows(state_dict[prefix + name], rows, layer.mesh)
        state_dict[prefix + name] = torch.cat([t.full_tensor() if isinstance(t, DTensor) else t for t in parts])


def _to_ranks(layer: Any, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
    for name, rows in _shared(layer):
        whole = state_dict.get(prefix + name)
        if whole is not None:
            state_dict[prefix + name] = join_rows(split_rows(whole, rows), layer.get_parameter(name), layer.mesh)


# -------------------------------------------------------------------------------------- Hugging Face's configurations

# what each family calls num_heads, head_dim, state_size, num_groups, conv_size, bias, conv_bias, norm_eps
BAMBA = ("mamba_n_heads", "mamba_d_head", "mamba_d_state", "mamba_n_groups", "mamba_d_conv", "mamba_proj_bias",
         "mamba_conv_bias", "rms_norm_eps")  # fmt: skip
NAMES = {
    "mamba2": ("num_heads", "head_dim", "state_size", "n_groups", "conv_kernel", "use_bias", "use_conv_bias",
               "layer_norm_epsilon"),
    "bamba": BAMBA,
    "granitemoehybrid": BAMBA,
    "nemotron_h": ("mamba_num_heads", "mamba_head_dim", "ssm_state_size", "n_groups", "conv_kernel", "use_bias",
                   "use_conv_bias", "layer_norm_epsilon"),
    "zamba2": ("n_mamba_heads", "mamba_headdim", "mamba_d_state", "mamba_ngroups", "mamba_d_conv", "add_bias_linear",
               None, None),
}  # fmt: skip
OWN = ("num_heads", "head_dim", "state_size", "num_groups", "conv_size", "bias", "conv_bias", "norm_eps")
FLOORED = ("nemotron_h", "zamba2")  # whose step sizes have a floor


def _norm_groups(source: Any, prefix: str) -> int | None:
    """The groups of a mixer's norm; None, of a state_dict: those of B and C. Before transformers 5.23 some had one."""
    if not isinstance(source, nn.Module):
        return None
    norm: Any = getattr(source.get_submodule(prefix.removesuffix(".")), "norm", None)
    weight = getattr(norm, "weight", None)
    if weight is None:
        return None
    width: int = weight.shape[0]
    return width // getattr(norm, "group_size", width)


def _options(config: Any) -> dict[str, Any]:
    """The arguments of `Mamba2`, but for the groups of its norm."""
    family = config_value(config, "model_type", None)
    if family not in NAMES:
        raise unknown_model(config, ", ".join(NAMES))
    act = config_value(config, "mamba_hidden_act" if family == "nemotron_h" else "hidden_act", "silu")
    if act != "silu" and family != "zamba2":
        raise NotImplementedError(f"config has hidden_act={act!r}: the convolution is followed by silu here")
    given = zip(OWN, NAMES[family], strict=True)
    options = {ours: config_value(config, theirs) for ours, theirs in given if theirs is not None}
    limit = (config_value(config, "time_step_min"), math.inf) if family in FLOORED else None
    return options | {
        "embed_dim": config_size(config, "hidden_size"),
        "dt_limit": limit or tuple(config_value(config, "time_step_limit", (0.0, math.inf))),
    }
