"""The Mamba-2 mixers of transformers: Mamba-2, Bamba, Granite 4 H, Falcon-H1, Nemotron-H, Zamba2.

Their forwards are alike: projection, convolution, scan, gated norm, projection. They call functions of the module that
defines them, which compute in plain PyTorch where mamba-ssm and causal-conv1d are not installed. `replace` gives
one mixer a forward of the same code that finds fulmen's functions there; parameters and cache stay the module's own.

| name in their module | here |
|---|---|
| mamba2_chunk_scan | `fulmen.integrations.mamba.mamba_chunk_scan_combined` |
| mamba2_selective_state_update | `scan_step` of `fulmen.layers.scan` |
| mamba2_split_conv1d_scan_combined | nothing: the mixer calls the others one by one |
| causal_conv1d_fn, causal_conv1d_update | `convolve`, `convolve_step` of `fulmen.layers.scan` |
| the forward of `norm` | `gated_norm` of `fulmen.layers.scan`, where the gate comes before the norm |

Packed sequences reach the mixers as `seq_idx`, which `announce`, a forward pre-hook of the model, makes.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fulmen.integrations import mamba
from fulmen.integrations.transformers import packing
from fulmen.integrations.transformers.cache import check_states
from fulmen.integrations.transformers.forward import code_of, replaced_reason, set_forward, with_names
from fulmen.layers.scan import Norm, Steps, convolve, convolve_step, gated_norm, scan_step
from fulmen.lightning.spec import MAX_HEAD_DIM

CALLS = {"mamba2_chunk_scan", "mamba2_selective_state_update", "causal_conv1d_fn"}
CHECKED = "fulmen_checked"  # on a cache; an argument of layers whose model makes the cache itself
PARTS = ("in_proj", "conv1d", "out_proj", "A_log", "D", "dt_bias", "ssm_state_size", "head_dim", "time_step_limit")


def matches(module: nn.Module) -> bool:
    """Whether the module has the parts of a Mamba-2 mixer."""
    return all(hasattr(module, name) for name in PARTS)


def unsupported_reason(module: Any) -> str | None:
    """Why the mixer cannot be served, or None."""
    code = code_of(module)
    if code is None or not set(code.co_names) >= CALLS:
        return f"its forward does not call {', '.join(sorted(CALLS))}, as transformers 5.22's does"
    largest = max(module.ssm_state_size, module.head_dim)
    return None if largest <= MAX_HEAD_DIM else f"its state size or head dim {largest} is above {MAX_HEAD_DIM}"


def replace(module: Any, backend: str) -> list[Callable[[], None]]:
    """Serves the mixer; returns what undoes it."""
    own = inspect.unwrap(type(module).forward)
    functions = {
        "mamba2_chunk_scan": functools.partial(chunk_scan, backend=backend),
        "mamba2_selective_state_update": functools.partial(state_update, dt_limit=module.time_step_limit),
        "mamba2_split_conv1d_scan_combined": no_fused,
        "causal_conv1d_fn": conv,
        "causal_conv1d_update": conv_update,
    }
    forward = with_names(own, functions)
    if own is not type(module).forward:  # transformers' decorator, which loads offloaded weights of the convolution
        hooks = importlib.import_module("transformers.integrations.accelerate")
        forward = hooks.force_accelerate_hooks("conv1d")(forward)
    names = tuple(inspect.signature(own).parameters)[1:]
    undo = [set_forward(module, types.MethodType(keeping_states(forward, names), module))]
    norm = getattr(module, "norm", None)
    if _is_gated_norm(norm):
        undo.append(set_forward(norm, types.MethodType(gated, norm)))
    return undo


def keeping_states(forward: Any, names: tuple[str, ...]) -> Callable[..., Any]:
    """The mixer's forward. In a decoding step, rows without a token keep their convolution's and scan's states."""

    def keeping(module: Any, *args: Any, **kwargs: Any) -> Any:
        tokens: Tensor | None = kwargs.pop(packing.TOKENS, None)
        checked: Checked | None = kwargs.pop(CHECKED, None)
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        cache = given.get("cache_params")
        if cache is not None:
            held = _states(cache, module.layer_idx)[1]
            if held is not None:  # reset() leaves it
                check_states(held, given[names[0]].shape[0], module.A_log.shape[0])
            if checked is not None:
                setattr(cache, CHECKED, checked)  # which its model made after `announce`
        if tokens is None:
            return forward(module, **given)
        if cache is None or not cache.has_previous_state(module.layer_idx):  # the first token: as of a prompt
            return forward(module, **{**given, "attention_mask": tokens})
        before = [state.clone() for state in _states(cache, module.layer_idx)]
        y = forward(module, **given)
        for state, old in zip(_states(cache, module.layer_idx), before, strict=True):
            state.copy_(torch.where(tokens.view(-1, *[1] * (state.ndim - 1)), state, old))
        return y

    return keeping


def _states(cache: Any, layer: int) -> list[Any]:
    """Of the convolution and the scan, None where there are none yet: a layer may hold several, by number."""
    held = cache.layers[layer].conv_states, cache.layers[layer].recurrent_states
    return [states[0] if isinstance(states, dict) else states for states in held]


def _is_gated_norm(norm: Any) -> bool:
    """Whether `gated` computes what the norm does."""
    if not type(norm).__name__.endswith("RMSNormGated") or replaced_reason(norm) is not None:
        return False
    return hasattr(norm, "variance_epsilon") and not getattr(norm, "norm_before_gate", False)


def announce(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """A forward pre-hook of the model, after packing's: `seq_idx` (B, N), where sequences are packed."""
    given = packing.by_name(module, args, kwargs)
    tokens = packing.tokens_of(given)
    if tokens is None:
        return args, kwargs
    checked, held = _refuse_gaps(tokens.shape[1], given), _cache_of(given)
    if held is not None:
        setattr(held, CHECKED, checked)
    elif checked is not None and checked.padded:
        kwargs = {**kwargs, CHECKED: checked}
    starts = None if given.get("seq_idx") is not None else packing.taken(tokens, given)
    if starts is None:
        return args, kwargs
    begins = torch.zeros(tokens.shape[0] * tokens.shape[1], dtype=torch.int32, device=starts.device)
    begins[starts[1:-1].long()] = 1
    sequences = begins.view(tokens.shape[:2])
    sequences[:, 0] = 0
    sequences = sequences.cumsum(1).to(torch.int32)
    setattr(sequences, packing.NAME, starts)  # for attention layers that are not given position_ids
    return args, {**kwargs, "seq_idx": sequences}


def _cache_of(given: dict[str, Any]) -> Any:
    return next((given[name] for name in ("past_key_values", "cache_params") if given.get(name) is not None), None)


def _refuse_gaps(N: int, given: dict[str, Any]) -> Checked | None:
    """Raises if padding stands between tokens: the mixers' convolution and state would take it in.

    That of decoding steps is no matter, as states are kept. Synchronises if there is an `attention_mask` on a GPU; of
    single tokens, at the first one in a cache alone, or at all if a row of its prompt ended in padding.

    Returns what is known of the mask, if there is one.
    """
    mask, held = given.get("attention_mask"), _cache_of(given)
    checked: Checked | None = getattr(held, CHECKED, None)
    if not isinstance(mask, Tensor) or mask.ndim != 2 or mask.shape[1] == N:  # it says nothing of the cache
        if checked is not None and checked.padded and held.has_previous_state():
            raise NotImplementedError(
                "a row of the cache ends in padding, which the states of Mamba-2 layers took in, and no column of "
                "attention_mask tells it from tokens: pad on the left"
            )
        checked = None
    if not isinstance(mask, Tensor) or mask.ndim != 2:
        return None
    checked = checked or Checked()
    if N == 1 and given.get(packing.TOKENS) is not None and not torch.compiler.is_compiling():
        checked.kept.append(mask.shape[1] - 1)  # not in a graph: it would be compiled again at every step
    if N > 1 or not checked.steps:
        if N > 1 and mask.shape[1] == N and held is not None and held.has_previous_state():
            mask = torch.nn.functional.pad(mask, (1, 0), value=1)  # of the tokens in the cache
        gaps, checked.padded = _gaps(mask, checked.kept)
        if gaps:
            raise NotImplementedError(
                "attention_mask has padding between tokens, which the states of Mamba-2 layers would take in: pad on "
                "the left"
            )
        checked.steps = N == 1 and not checked.padded
    return checked


class Checked:
    """On a cache: what is known of the mask of its tokens."""

    def __init__(self) -> None:
        self.steps = False  # whether the last call was a step, and the mask up to there has no gaps
        self.padded = False  # whether states took in padding behind a row's tokens
        self.kept: list[int] = []  # columns of steps in which rows without a token kept their states


@torch.compiler.disable
def _gaps(mask: Tensor, kept: list[int]) -> list[bool]:
    """Whether padding that states took in stands between a row's tokens, and whether any stands behind its first."""
    mask = mask.bool()
    padding = ~mask & (mask.cumsum(1) > 0)
    padding[:, kept] = False
    facts: list[bool] = torch.stack([(mask & (padding.cumsum(1) > 0)).any(), padding.any()]).tolist()
    return facts


# ------------------------------------------------------------------- what the mixers call, with their signatures


def chunk_scan(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, chunk_size: int | None = None, *, D: Tensor | None = None,
    z: Tensor | None = None, dt_bias: Tensor | None = None, initial_states: Tensor | None = None,
    dt_softplus: bool = False, dt_limit: tuple[float, float] = (0.0, float("inf")), return_final_states: bool = False,
    seq_idx: Tensor | None = None, backend: str = "auto", **others: Any,
) -> Any:  # fmt: skip
    """y, or y and the last states; `others` are of other layers."""
    return mamba.mamba_chunk_scan_combined(
        x, dt, A, B, C, chunk_size, D, z, dt_bias, initial_states, seq_idx, dt_softplus=dt_softplus,
        dt_limit=(dt_limit[0], dt_limit[1]), return_final_states=return_final_states, backend=backend,
    )  # fmt: skip


def state_update(
    state: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None,
    z: Tensor | None = None, dt_bias: Tensor | None = None, dt_softplus: bool = False, *,
    dt_limit: tuple[float, float] = (0.0, float("inf")), **others: Any,
) -> Tensor:  # fmt: skip
    """y of one token; `state` is updated in place. dt_limit holds as in the scan; transformers' own step forgets it."""
    return scan_step(state, x, dt, A, B, C, D, z, dt_bias, Steps(dt_softplus, *map(float, dt_limit)))


def no_fused(*args: Any, **kwargs: Any) -> None:
    """Convolution, scan and norm in one call, for training: None has the mixer call them one by one."""


def conv(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, *,
    seq_idx: Tensor | None = None, **others: Any,
) -> Tensor:  # fmt: skip
    """The causal convolution of each channel, x (B, channels, N); a token's channels lie together in y."""
    y = convolve(x.to(weight.dtype).transpose(1, 2), weight, bias, activation == "silu", seq_idx)
    return _activated(y, activation).to(x.dtype).transpose(1, 2)


def conv_update(
    x: Tensor, conv_state: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None
) -> Tensor:
    """The convolution of one token, x (B, channels, 1); conv_state (B, channels, last tokens) is updated in place."""
    y = convolve_step(x[:, :, 0].to(weight.dtype), weight, bias, conv_state, activation == "silu")
    return _activated(y, activation).to(x.dtype)[:, :, None]


def _activated(y: Tensor, activation: str | None) -> Tensor:
    if activation in (None, "silu"):
        return y
    return importlib.import_module("transformers.activations").ACT2FN[activation](y)


def gated(norm: Any, hidden_states: Tensor, gate: Tensor | None = None) -> Tensor:
    """The forward of a mixer's norm, (B, N, width)."""
    width = hidden_states.shape[-1]
    groups = getattr(norm, "n_groups", width // getattr(norm, "group_size", width))
    if gate is None or hidden_states.ndim != 3:
        return type(norm).forward(norm, hidden_states, gate)
    return gated_norm(hidden_states, gate, Norm(norm.weight, groups, norm.variance_epsilon))
