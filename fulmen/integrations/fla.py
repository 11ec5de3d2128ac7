"""fla's functions of linear attention with a scalar decay, with its signatures, layout and meaning, computed by fulmen.

    from fulmen.integrations.fla import chunk_simple_gla      # was: from fla.ops.simple_gla import chunk_simple_gla

q, k, v are (B, T, H, D); `scale` is 1 / sqrt(D) unless given; a log decay g is finite and not positive, which is
checked on the CPU only (fulmen's decay is -g). A call gives (o, final state or None). States are (sequences, H, D, E)
in fp32, with `state_v_first` (sequences, H, E, D). Heads may be shared as in `lightning_attention`; D and E are at most
256. chunk_size and cu_seqlens_cpu are hints that fulmen does not need. One kernel serves the functions named chunk,
fused_chunk, fused_recurrent and parallel alike. q, k and v whose last dimension is strided are copied, as fla does.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from fulmen.boundary import check_integers, is_plain_eager, require_tensors, row_contiguous
from fulmen.layers.inputs import whole
from fulmen.lightning.op import lightning_attention_with_state
from fulmen.lightning.spec import check_sign

__all__ = [
    "chunk_lightning_attn",
    "chunk_linear_attn",
    "chunk_retention",
    "chunk_simple_gla",
    "fused_chunk_linear_attn",
    "fused_chunk_retention",
    "fused_chunk_simple_gla",
    "fused_recurrent_lightning_attn",
    "fused_recurrent_linear_attn",
    "fused_recurrent_retention",
    "fused_recurrent_simple_gla",
    "parallel_retention",
    "parallel_simple_gla",
]

State = Tensor | tuple[Tensor, Tensor] | None
Result = tuple[Tensor, Tensor | None]


def chunk_simple_gla(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None, g_gamma: Tensor | None = None, scale: float | None = None,
    initial_state: Tensor | None = None, output_final_state: bool = False, state_v_first: bool = False,
    cu_seqlens: Tensor | None = None, cu_seqlens_cpu: Tensor | None = None, chunk_size: int | None = None, *,
    backend: str = "auto",
) -> Result:  # fmt: skip
    """S_t = exp(g_t) S_{t-1} + k_t v_t^T, o_t = scale q_t S_t; g (B, T, H), or g_gamma (H,) for all tokens.

    A g that is expanded from one number for each head, and needs no gradient, costs no more than g_gamma.
    """
    final, v_first = output_final_state, state_v_first
    return _gla(q, k, v, g, g_gamma, scale, initial_state, final, v_first, cu_seqlens, False, backend)


def fused_chunk_simple_gla(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None, g_gamma: Tensor | None = None, scale: float | None = None,
    initial_state: Tensor | None = None, output_final_state: bool = False, cu_seqlens: Tensor | None = None,
) -> Result:  # fmt: skip
    """As `chunk_simple_gla`."""
    return _gla(q, k, v, g, g_gamma, scale, initial_state, output_final_state, False, cu_seqlens)


def fused_recurrent_simple_gla(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None, g_gamma: Tensor | None = None, scale: float | None = None,
    initial_state: Tensor | None = None, output_final_state: bool = False, reverse: bool = False,
    state_v_first: bool = False, cu_seqlens: Tensor | None = None,
) -> Result:  # fmt: skip
    """As `chunk_simple_gla`, whose kernels serve any length; with `reverse` from the last token to the first."""
    final, v_first = output_final_state, state_v_first
    return _gla(q, k, v, g, g_gamma, scale, initial_state, final, v_first, cu_seqlens, reverse)


def parallel_simple_gla(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None, scale: float | None = None,
    output_attentions: bool = False, cu_seqlens: Tensor | None = None, cu_seqlens_cpu: Tensor | None = None,
) -> Result:  # fmt: skip
    """As `chunk_simple_gla` without states; the weights that `output_attentions` asks for are never made."""
    _refuse_weights(output_attentions)
    return _gla(q, k, v, g, None, scale, None, False, False, cu_seqlens)


def chunk_lightning_attn(
    q: Tensor, k: Tensor, v: Tensor, layer_idx: int, num_layers: int, scale: float | None = None,
    initial_state: Tensor | None = None, output_final_state: bool = False, cu_seqlens: Tensor | None = None,
    chunk_size: int | None = None,
) -> Result:  # fmt: skip
    """Slopes of (8 / H) h (1 - layer_idx / num_layers), as fla has them: head 0 does not decay. layer_idx is from 0."""
    gamma = _lightning(q, k, v, layer_idx, num_layers)
    return _gla(q, k, v, None, gamma, scale, initial_state, output_final_state, False, cu_seqlens)


def fused_recurrent_lightning_attn(
    q: Tensor, k: Tensor, v: Tensor, layer_idx: int, num_layers: int, scale: float | None = None,
    initial_state: Tensor | None = None, output_final_state: bool = False, reverse: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Result:  # fmt: skip
    """As `chunk_lightning_attn`; with `reverse` from the last token to the first."""
    gamma = _lightning(q, k, v, layer_idx, num_layers)
    return _gla(q, k, v, None, gamma, scale, initial_state, output_final_state, False, cu_seqlens, reverse)


def chunk_retention(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, initial_state: Tensor | None = None,
    output_final_state: bool = False, cu_seqlens: Tensor | None = None, chunk_size: int | None = None,
) -> Result:  # fmt: skip
    """Retention: decays of 1 - 2^(-5 - h)."""
    return _gla(q, k, v, None, _retention(q, k, v), scale, initial_state, output_final_state, False, cu_seqlens)


def fused_chunk_retention(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, initial_state: Tensor | None = None,
    output_final_state: bool = False, cu_seqlens: Tensor | None = None,
) -> Result:  # fmt: skip
    """As `chunk_retention`."""
    return chunk_retention(q, k, v, scale, initial_state, output_final_state, cu_seqlens)


def fused_recurrent_retention(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, initial_state: Tensor | None = None,
    output_final_state: bool = False, reverse: bool = False, state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Result:  # fmt: skip
    """As `chunk_retention`; with `reverse` from the last token to the first."""
    gamma, final, v_first = _retention(q, k, v), output_final_state, state_v_first
    return _gla(q, k, v, None, gamma, scale, initial_state, final, v_first, cu_seqlens, reverse)


def parallel_retention(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, output_attentions: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Result:  # fmt: skip
    """As `chunk_retention` without states; the weights that `output_attentions` asks for are never made."""
    _refuse_weights(output_attentions)
    return chunk_retention(q, k, v, scale, cu_seqlens=cu_seqlens)


def chunk_linear_attn(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, initial_state: State = None,
    output_final_state: bool = False, normalize: bool = True, cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, State]:  # fmt: skip
    """No decay. With `normalize` o_t is divided by scale q_t . z_t + 1e-10, where z_t is the sum of the keys up to t.

    A state is then (S, z): z (sequences, 1, H, D). S alone is refused: o would be divided by the new keys' sum only.
    The denominator is linear attention whose values are 1. The 1e-10 is fla's, for a denominator of 0; feature maps
    that make q and k positive keep it away from 0.
    """
    return _linear(q, k, v, scale, initial_state, output_final_state, False, normalize, cu_seqlens)


def fused_chunk_linear_attn(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, initial_state: State = None,
    output_final_state: bool = False, normalize: bool = True, cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, State]:  # fmt: skip
    """As `chunk_linear_attn`."""
    return _linear(q, k, v, scale, initial_state, output_final_state, False, normalize, cu_seqlens)


def fused_recurrent_linear_attn(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, initial_state: State = None,
    output_final_state: bool = False, reverse: bool = False, normalize: bool = False, cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, State]:  # fmt: skip
    """As `chunk_linear_attn`, but not normalised unless asked for; with `reverse` from the last token to the first."""
    return _linear(q, k, v, scale, initial_state, output_final_state, reverse, normalize, cu_seqlens)


def _linear(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None, initial_state: State, output_final_state: bool, reverse: bool,
    normalize: bool, cu_seqlens: Tensor | None,
) -> tuple[Tensor, State]:  # fmt: skip
    _heads(q, k, v)
    if not normalize:
        state = _tensor(initial_state)
        return _gla(q, k, v, None, None, scale, state, output_final_state, False, cu_seqlens, reverse)
    state, z = _pair(initial_state)
    _check(q, v, {"initial_state[0]": state, "initial_state[1]": z, "cu_seqlens": cu_seqlens})
    o, state = _attend(q, k, v, None, scale, state, cu_seqlens, reverse)
    ones = torch.ones_like(v[..., :1])
    below, z = _attend(q, k, ones, None, scale, None if z is None else z.transpose(1, 2).mT, cu_seqlens, reverse)
    o = (o.to(_wide(q)) / (below.to(_wide(q)) + 1e-10)).to(o.dtype)
    return o, (state, z.mT.transpose(1, 2)) if output_final_state else None


def _gla(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, g_gamma: Tensor | None, scale: float | None,
    initial_state: Tensor | None, output_final_state: bool, v_first: bool, cu_seqlens: Tensor | None,
    reverse: bool = False, backend: str = "auto",
) -> Result:  # fmt: skip
    _heads(q, k, v)
    _check(q, v, {"g": g, "g_gamma": g_gamma, "initial_state": initial_state, "cu_seqlens": cu_seqlens}, v_first)
    if g is not None and g_gamma is not None:
        raise ValueError("g and g_gamma are both given: a decay is either of each token, g, or constant, g_gamma")
    name, log_decay = ("g_gamma", g_gamma) if g is None else ("g", g)
    if g is not None and _is_constant(g):
        log_decay, g = g[0, 0], None
    decay = None
    if log_decay is not None:
        log_decay = log_decay.to(_wide(q))
        if is_plain_eager(log_decay):
            check_sign(name, log_decay.detach(), -1, f"a log decay: the state decays as exp({name})")
        decay = -log_decay if g is None else -log_decay.transpose(1, 2)
    state = _turned(initial_state, v_first)
    o, final = _attend(q, k, v, decay, scale, state, cu_seqlens, reverse, backend)
    return o, _turned(final, v_first) if output_final_state else None


def _attend(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, scale: float | None, state: Tensor | None,
    ends: Tensor | None, reverse: bool, backend: str = "auto",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    packed = ends is not None
    if ends is not None:
        ends = ends.to(torch.int32)
    if reverse:  # the same from left to right, of sequences in the other order
        q, k, v = (x.flip(1) for x in (q, k, v))
        decay = decay.flip(2) if decay is not None and decay.ndim == 3 else decay
        ends = None if ends is None else q.shape[1] - ends.flip(0)
        state = state.flip(0) if state is not None and packed else state
    q, k, v = (row_contiguous(x).transpose(1, 2) for x in (q, k, v))
    o, final = lightning_attention_with_state(
        q,
        k,
        v,
        decay,
        scale=1 / math.sqrt(k.shape[3]) if scale is None else scale,
        initial_state=None if state is None else state.to(_wide(q)).contiguous(),
        cu_seqlens=ends,
        backend=backend,
    )
    o = o.transpose(1, 2)
    if reverse:
        o, final = o.flip(1), final.flip(0) if packed else final
    return o, final


def _lightning(q: Tensor, k: Tensor, v: Tensor, layer_idx: int, num_layers: int) -> Tensor:
    num_layers = whole("num_layers", num_layers)
    layer_idx = whole("layer_idx", layer_idx, 0, num_layers - 1)
    heads = max(_heads(q, k, v), v.shape[2])
    return -8 / heads * (1 - layer_idx / num_layers) * torch.arange(heads, dtype=_wide(q), device=q.device)


def _retention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    heads = torch.arange(max(_heads(q, k, v), v.shape[2]), dtype=_wide(q), device=q.device)
    return torch.log1p(-torch.exp2(-5.0 - heads))


def _refuse_weights(output_attentions: bool) -> None:
    if output_attentions:
        raise NotImplementedError("output_attentions=True: the attention matrix is never made; pass False")


def _is_constant(g: Tensor) -> bool:
    """Whether all tokens share their numbers in memory; a gradient is of each token."""
    if not g.numel() or (g.requires_grad and torch.is_grad_enabled()):
        return False
    return not any(s for s, n in zip(g.stride()[:2], g.shape[:2], strict=True) if n != 1)


def _check(q: Tensor, v: Tensor, given: dict[str, Any], v_first: bool = False) -> None:
    """What `lightning_attention` would call by other names."""
    require_tensors({}, given)
    check_integers("cu_seqlens", given["cu_seqlens"])
    (B, T, _, D), H, E, ends = q.shape, max(q.shape[2], v.shape[2]), v.shape[3], given["cu_seqlens"]
    sequences = B if ends is None else ends.numel() - 1
    states = ("(sequences, H, D, E)", (sequences, H, D, E))
    wanted = {
        "g": ("(B, T, H)", (B, T, H)), "g_gamma": ("(H,)", (H,)), "initial_state[0]": states,
        "initial_state": ("(sequences, H, E, D)", (sequences, H, E, D)) if v_first else states,
        "initial_state[1]": ("(sequences, 1, H, D)", (sequences, 1, H, D)),
    }  # fmt: skip
    for name, x in given.items():
        if x is None or name not in wanted:
            continue
        layout, shape = wanted[name]
        if tuple(x.shape) != shape:
            raise ValueError(f"{name} has shape {tuple(x.shape)}, must be {layout} = {shape}; q is {tuple(q.shape)}")
        if x.device != q.device:
            raise ValueError(f"{name} is on {x.device}, must be on q's {q.device}")


def _wide(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def _turned(state: Tensor | None, v_first: bool) -> Tensor | None:
    return state.mT.contiguous() if v_first and state is not None else state


def _tensor(state: State) -> Tensor | None:
    if isinstance(state, tuple):
        raise ValueError("initial_state is a tuple, (S, z): without normalize there is no z, pass S alone")
    return state


def _pair(state: State) -> tuple[Tensor | None, Tensor | None]:
    """S and z, both or none of them."""
    if state is None:
        return None, None
    if not isinstance(state, tuple) or len(state) != 2 or (state[0] is None) != (state[1] is None):
        parts = isinstance(state, tuple)
        got = f"({', '.join(type(t).__name__ for t in state)})" if parts else f"a {type(state).__name__}"
        raise ValueError(
            f"initial_state is {got}, must be (S, z) with normalize: z (sequences, 1, H, D) is the sum of the keys "
            "before, by which o is divided; pass the state that a call with output_final_state returned"
        )
    return state


def _heads(q: Tensor, k: Tensor, v: Tensor) -> int:
    """How many q has; checks that all are (B, T, heads, head dim)."""
    for name, x in {"q": q, "k": k, "v": v}.items():
        if not isinstance(x, Tensor) or x.ndim != 4:
            raise ValueError(f"{name} has shape {tuple(getattr(x, 'shape', ()))}, must be (B, T, heads, head dim)")
    return q.shape[2]
