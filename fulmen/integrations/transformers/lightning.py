"""The lightning layer of MiniMax (Text-01, M1) in transformers, and the cache of its model.

    q, k, v = silu(x W_qkv);  o = lightning_attention(q, k, v, decay);  y = (norm(o) * sigmoid(x W_gate)) W_out

`Lightning.forward` takes the place of the module's forward and reads the module's own parameters at every call. The
state lives where transformers keeps it, `cache.linear_cache`, in fp32. Where transformers' own code is wrong it is
right here:

| | transformers | here |
|---|---|---|
| packed sequences | the state runs on over boundaries | a state for each |
| padding on the right or between tokens | decays the state | does not |
| a row without a token in a decoding step | is taken in | is not |
| beam search | states stay with the old beams | are reordered |
| positions without `position_ids` | counted from 0 if the first layer is linear | from the tokens in the cache |
| steps of a batch padded on the left | masked as if no token were in the cache, if the first layer is linear | right |
| slopes of a model in bf16 | rounded to bf16 | fp32, if they are those of MiniMax |

Beams and positions are matters of the cache: cache.py.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fulmen import decay as slopes
from fulmen.boundary import needs_gradient
from fulmen.integrations.transformers import packing
from fulmen.integrations.transformers.cache import cache_type, check_states
from fulmen.integrations.transformers.forward import set_forward
from fulmen.layers.fused import fused_call, kernels_for
from fulmen.layers.fused.projections import Facts, few_rows, has_no_hooks, project
from fulmen.layers.inputs import Padding, many_rows, one_row
from fulmen.layers.lightning import MAX_GATE_WIDTH
from fulmen.lightning.op import lightning_attention, lightning_attention_with_state
from fulmen.lightning.spec import MAX_HEAD_DIM
from fulmen.step.op import stepped
from fulmen.step.spec import MAX_STEP_TOKENS

PARTS = ("qkv_proj", "out_proj", "output_gate", "norm", "slope_rate", "act_fn", "num_attention_heads", "head_dim")
ACTIVATIONS = {"SiLU": "silu", "SiLUActivation": "silu", "ReLU": "relu"}  # what the fused kernel knows, by class


def matches(module: Any) -> bool:
    """Whether the module has the parts of MiniMax's lightning layer."""
    return all(hasattr(module, name) for name in PARTS)


def unsupported_reason(module: Any) -> str | None:
    """Why the layer cannot be served, or None."""
    if not hasattr(importlib.import_module(type(module).__module__), "MiniMaxCache"):
        return "the module that defines it has no MiniMaxCache to keep its state in"
    H, D = module.num_attention_heads, module.head_dim
    want = {"qkv_proj": 3 * H * D, "output_gate": H * D}
    for name, size in want.items():
        got = getattr(getattr(module, name), "out_features", size)
        if got != size:
            return f"{name} has {got} outputs, and {H} heads of {D} need {size}"
    if module.slope_rate.numel() != H:
        return f"slope_rate has {module.slope_rate.numel()} slopes, and there are {H} heads"
    return None if D <= MAX_HEAD_DIM else f"head_dim={D} is above {MAX_HEAD_DIM}"


def replace(module: Any, backend: str) -> list[Callable[[], None]]:
    """Serves the layer; returns what undoes it."""
    cache_type(type(module).__module__)  # a compiler cannot make the class
    return [set_forward(module, Lightning(module, backend).forward)]


class Lightning:
    """The forward of one layer."""

    def __init__(self, module: Any, backend: str) -> None:
        self.module, self.backend = module, backend
        self._read_slopes()

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: Any = None,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """transformers' signature. Returns y (B, N, hidden_size), and no weights."""
        x, padding, layer = hidden_states, None, self.module
        if attention_mask is None:
            attention_mask = kwargs.get(packing.TOKENS)
        if attention_mask is not None:
            if attention_mask.shape != x.shape[:2]:
                raise ValueError(
                    f"attention_mask has shape {tuple(attention_mask.shape)}, and this layer has {tuple(x.shape[:2])} "
                    "tokens: give the model a (B, N) padding mask"
                )
            padding = Padding.of(attention_mask.bool())
            x = padding.front(x)
        q, k, v, gate = self._projected(x)
        if past_key_values is not None:
            o = self._with_state(q, k, v, padding, past_key_values)
        else:
            packed = packing.offsets(x, kwargs) if padding is None else _rows(padding)
            o = self._alone(q, k, v, packed)
        (y,) = project(self._gated(o.transpose(1, 2).flatten(2), gate), layer.out_proj, early=True)
        return y if padding is None else padding.back(y), None

    def _projected(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q, k, v (B, H, N, D) and the gate (B, N, H * D)."""
        layer, act_fn, found = self.module, self.module.act_fn, None
        activation = ACTIVATIONS.get(type(act_fn).__name__)
        if activation is not None and isinstance(act_fn, nn.Module) and not has_no_hooks(act_fn, kind=type(act_fn)):
            activation = None
        if activation is not None:  # a decoding step: one launch
            found = few_rows(x, layer.qkv_proj, layer.output_gate, facts=Facts(activation))
        if found is None:
            qkv, gate = project(x, layer.qkv_proj, layer.output_gate)
            return *self._heads(qkv, activation), gate
        q, k, v = found[0].unflatten(2, (-1, 3 * layer.head_dim)).transpose(1, 2).split(layer.head_dim, dim=3)
        return q, k, v, found[1]

    def _heads(self, qkv: Tensor, activation: str | None) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v (B, H, N, D) of the projection's output."""
        layer = self.module
        H, D = qkv.shape[2] // (3 * layer.head_dim), layer.head_dim  # of a tensor-parallel rank: its own heads
        kernels = kernels_for("lightning", qkv) if activation is not None and qkv.is_contiguous() else None
        if kernels is not None:
            facts = kernels.Heads(H, H, D, D, activation, None, 0.0, False)
            q, k, v = kernels.Prepared.apply(facts, qkv, None, None, None, None)
        else:
            q, k, v = layer.act_fn(qkv).unflatten(2, (H, 3 * D)).split(D, dim=3)
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    def _gated(self, o: Tensor, gate: Tensor) -> Tensor:
        """norm(o) * sigmoid(gate), (B, N, H * D)."""
        norm = self.module.norm
        fits = o.shape[2] <= MAX_GATE_WIDTH and o.is_contiguous() and gate.is_contiguous()
        if fits and _is_plain_norm(norm, self.module) and norm.weight.dtype == o.dtype:
            if not torch.is_grad_enabled():
                found = fused_call("lightning", "gated", (1, norm.variance_epsilon), o, gate, norm.weight)
                if found is not None:
                    return found[0]
            kernels = kernels_for("lightning", o, gate)
            if kernels is not None:
                return kernels.Gated.apply(1, norm.variance_epsilon, o, gate, norm.weight)
        return norm(o) * torch.sigmoid(gate)

    def _read_slopes(self) -> None:
        self.held = self.module.slope_rate
        self.version = _version(self.held)
        with torch.inference_mode(False):  # a later call may train
            self.decay = _slopes(self.module)

    def _options(self, q: Tensor) -> dict[str, Any]:
        if not torch.compiler.is_compiling():
            held = self.module.slope_rate
            if held is not self.held or _version(held) != self.version:  # others were loaded, or the model was moved
                self._read_slopes()
        if self.decay.device != q.device:
            self.decay = self.decay.to(q.device)
        return {"decay": self.decay, "backend": self.backend}

    def _alone(self, q: Tensor, k: Tensor, v: Tensor, packed: Tensor | None) -> Tensor:
        """o (B, H, N, D) without a cache."""
        options = self._options(q)
        if packed is None:
            return lightning_attention(q, k, v, **options)
        o = lightning_attention(one_row(q), one_row(k), one_row(v), cu_seqlens=packed, **options)
        return many_rows(o, q.shape[0], q.shape[2])

    def _with_state(self, q: Tensor, k: Tensor, v: Tensor, padding: Padding | None, cache: Any) -> Tensor:
        """o (B, H, N, D); the cache's state takes in the tokens."""
        decay, options, index = self.decay, self._options(q), self.module.layer_idx
        B, N = q.shape[0], q.shape[2]
        state = _state_of(cache, index, q)
        if state is not None and N <= MAX_STEP_TOKENS and padding is None and not needs_gradient((q, k, v, state)):
            early = options["decay"] is decay and state is cache.linear_cache[index]  # only q, k and v are just made
            o = stepped(  # in place
                q, k, v, options["decay"], state, slots=None, draft=None, accepted=None, scale=1.0, backend="auto",
                early=early,
            )  # fmt: skip
        elif padding is None:
            o, state = lightning_attention_with_state(q, k, v, initial_state=state, **options)
        else:  # each row is two packed sequences, its tokens and its padding
            if state is not None:
                state = torch.stack([state, torch.zeros_like(state)], 1).flatten(0, 1)
            o, states = lightning_attention_with_state(
                one_row(q), one_row(k), one_row(v), initial_state=state, cu_seqlens=_rows(padding), **options
            )
            o, state = many_rows(o, B, N), states.unflatten(0, (B, 2))[:, 0].contiguous()
        cache.set_linear_cache(index, state)
        return o


def _rows(padding: Padding) -> Tensor:
    """cu_seqlens of the rows' tokens and of the rows' padding, in turn."""
    B, N = padding.mask.shape
    row = torch.arange(B, device=padding.mask.device) * N
    ends = torch.stack([row + padding.counts, row + N], 1).flatten()
    return nn.functional.pad(ends, (1, 0)).to(torch.int32)


def _slopes(module: Any) -> Tensor:
    """fp32 (H,): MiniMax's own if `slope_rate` is these up to its rounding, else what it holds."""
    held = module.slope_rate.detach().flatten()
    if held.is_meta:
        raise ValueError("the model is on the meta device: load its weights before accelerate(model)")
    H, layer, layers = module.num_attention_heads, module.layer_idx, module.num_hidden_layers
    exact = slopes.minimax(H, layer, layers).to(held.device)
    close = torch.allclose(held.double(), exact.double(), rtol=8 * torch.finfo(held.dtype).eps, atol=0.0)
    return exact if close else held.to(torch.float32, copy=True)


def _version(x: Tensor) -> int:
    """Changes when the tensor is written to."""
    return -1 if x.is_inference() else x._version


def _is_plain_norm(norm: Any, layer: Any) -> bool:
    """Whether it is the RMSNorm of the layer's own file, without hooks."""
    kind = type(norm)
    own = kind.__module__ == type(layer).__module__ and hasattr(norm, "variance_epsilon")
    return own and has_no_hooks(norm, kind=kind)


def _state_of(cache: Any, index: int, q: Tensor) -> Tensor | None:
    """The state before q's tokens, in the dtype that `lightning_attention` takes; None: none yet."""
    states = getattr(cache, "linear_cache", None)
    if states is None:
        raise ValueError(
            f"past_key_values is a {type(cache).__name__}, which holds no state of lightning attention: pass None, or "
            "new_cache() of what accelerate returned"
        )
    state = states[index] if index < len(states) else None
    if not isinstance(state, Tensor):
        return None
    check_states(state, *q.shape[:2])
    return state.to(torch.promote_types(q.dtype, torch.float32))
