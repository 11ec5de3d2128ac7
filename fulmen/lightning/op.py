"""Lightning attention: linear attention with a per-head exponential decay.

    o_t = scale * sum_{j <= t} exp(-s_h (t - j)) (q_t . k_j) v_j        s = 0 without decay

or, token by token, S_t = exp(-s) S_{t-1} + k_t v_t^T and o_t = scale * q_t S_t, which is why cost grows with N and
not with N^2. This file is the whole story of a call: check, build the spec, let `dispatch.pick` choose, and in the
backward do the same again; nothing but the arguments is saved, unless a kernel asks for it. The gradient of the decay
is the same for all of them (slopes.py). Compilers and modes see three `torch.library` operators.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fulmen import dispatch
from fulmen.boundary import (
    aligned,
    autocast,
    check_offset_values,
    check_offsets,
    check_qkv,
    check_scale,
    empty_rows,
    no_second_derivative,
    outside_autocast,
    plain_memory,
    refuse_derivatives_we_lack,
    require_tensors,
    unwatched,
)

MAX_HEAD_DIM = 256


class LightningSpec(NamedTuple):
    """Every fact about a call that is no tensor: the key of dispatch, of the tile tables, of a benchmark case."""

    B: int
    H: int
    H_KV: int
    N: int
    D: int
    E: int
    dtype: torch.dtype
    device: torch.device
    scale: float = 1.0
    has_decay: bool = False
    has_initial_state: bool = False
    with_final_state: bool = False
    sequences: int | None = None  # None: not packed
    aligned: bool = True  # rows of q, k and v begin at multiples of 16 bytes and do not repeat

    @property
    def states(self) -> int:
        """How many states enter and leave: one per batch entry, or one per packed sequence."""
        return self.B if self.sequences is None else self.sequences


class Residuals(NamedTuple):
    """The tensors of a call: what a backend's forward and backward work on, and all that is saved between them."""

    q: Tensor
    k: Tensor
    v: Tensor
    decay: Tensor | None  # (H,)
    initial_state: Tensor | None
    cu_seqlens: Tensor | None
    saved: Tensor | None = None  # of a kernel that saves: its forward writes it, its backward reads it


def lightning_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None = None,
    *,
    scale: float = 1.0,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Causal linear attention with optional per-head decay: o (B, H, N, E).

    q              (B, H, N, D); any strides whose last dimension is contiguous, so a (B, N, H, D) tensor may be
                   passed as `x.transpose(1, 2)` at no cost. bf16, fp16 or fp32 (fp64 on the eager backend).
    k, v           (B, H_KV, N, D) and (B, H_KV, N, E); H_KV divides H, query head h reads head h // (H / H_KV).
    decay          None, or the slopes s >= 0 as fp32 (H,) or (H, 1, 1); `fulmen.decay` builds the usual ones.
                   Differentiable; a backward that is not asked for its gradient does not pay for it.
                   Its sign is checked on the CPU only: on a GPU that would synchronise.
    scale          multiplies the output; 1 as in the Lightning Attention papers (fla defaults to D ** -0.5).
    initial_state  fp32 (B, H, D, E), the state before the first token; differentiable.
    cu_seqlens     int32 (sequences + 1,) on the inputs' device, rising from 0 to N: B is 1 and N holds packed
                   sequences; the state restarts at each boundary, states are (sequences, H, D, E). Values are
                   checked on the CPU only; on a GPU a wrong one is clamped to [0, N], never read out of bounds,
                   and rows that belong to no sequence are undefined.
    backend        "auto" takes the fastest that supports the call; a name works or raises, it never falls back.
    """
    x = _check(q, k, v, decay, scale, initial_state, cu_seqlens, decay_gradient=True)
    return _attend(x, float(scale), False, backend)[0]


def lightning_attention_with_state(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None = None,
    *,
    scale: float = 1.0,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """As `lightning_attention`, and the state after the last token, fp32 (B or sequences, H, D, E).

    The state is not scaled and is differentiable; pass it as the next call's `initial_state` to continue.
    """
    x = _check(q, k, v, decay, scale, initial_state, cu_seqlens, decay_gradient=True)
    return _attend(x, float(scale), True, backend)


def lightning_attn_func(
    q: Tensor, k: Tensor, v: Tensor, s: Tensor | None = None, variant: str = "chunk_loop"
) -> Tensor:
    """The interface of the Lightning Attention packages: unscaled, `s` of shape (H,) or (H, 1, 1).

    `variant` is the schedule on a GPU: "chunk_loop" is one fused sweep per head (backend "triton"), "parallel"
    splits the sequence over programs ("triton_split"), which pays with few heads and long sequences. On a CPU
    both are the eager backend, which works on all chunks at once.
    """
    variants = {"chunk_loop": "triton", "parallel": "triton_split"}
    if variant not in variants:
        raise ValueError(f"variant={variant!r}: must be one of {', '.join(map(repr, variants))}")
    on_gpu = isinstance(q, Tensor) and q.device.type != "cpu"
    backend = variants[variant] if on_gpu else "eager"
    return lightning_attention(q, k, v, s, backend=backend)


# ------------------------------------------------------------------------------------------------ checks


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None,
    scale: float,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    decay_gradient: bool = False,
) -> Residuals:
    """The tensors of a call as backends take them; one clear error for each wrong argument.

    What would take a look at values is left to `_check_values`.

    decay_gradient  whether the caller has one; without it, a decay that asks for it is refused
    """
    require_tensors(
        {"q": q, "k": k, "v": v}, {"decay": decay, "initial_state": initial_state, "cu_seqlens": cu_seqlens}
    )
    q, k, v = autocast(*plain_memory(q, k, v))
    check_qkv(q, k, v, MAX_HEAD_DIM, same_length=True)
    H, E = q.shape[1], v.shape[3]
    check_scale(scale)
    _check_decay(q, decay, decay_gradient)
    _check_states(q, initial_state, cu_seqlens, E)
    slopes = None if decay is None else decay.reshape(H).contiguous()
    ends = None if cu_seqlens is None else cu_seqlens.contiguous()
    return Residuals(q, k, v, slopes, initial_state, ends)


def _check_decay(q: Tensor, decay: Tensor | None, differentiable: bool) -> None:
    if decay is None:
        return
    H = q.shape[1]
    if decay.shape not in ((H,), (H, 1, 1)):
        raise ValueError(f"decay has shape {tuple(decay.shape)}, must be (H,) or (H, 1, 1) with q's H={H}")
    if decay.dtype != torch.float32:
        raise ValueError(f"decay is {decay.dtype}, must be float32")
    if decay.device != q.device:
        raise ValueError(f"decay is on {decay.device}, must be on q's {q.device}")
    if not differentiable and decay.requires_grad and torch.is_grad_enabled():
        raise NotImplementedError(
            "decay.requires_grad: over ranks (fulmen.parallel) its gradient is not implemented, pass decay.detach()"
        )


def _check_states(q: Tensor, initial_state: Tensor | None, cu_seqlens: Tensor | None, E: int) -> None:
    B, H, _, D = q.shape
    states = B
    if cu_seqlens is not None:
        check_offsets("cu_seqlens", cu_seqlens, q)
        states = cu_seqlens.shape[0] - 1
    if initial_state is not None:
        want = (states, H, D, E)
        state_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        if tuple(initial_state.shape) != want:
            of = "(B, H, D, E)" if cu_seqlens is None else "(sequences, H, D, E)"
            raise ValueError(f"initial_state has shape {tuple(initial_state.shape)}, must be {of} = {want}")
        if initial_state.dtype != state_dtype:
            raise ValueError(f"initial_state is {initial_state.dtype}, must be {state_dtype} for q of {q.dtype}")
        if initial_state.device != q.device:
            raise ValueError(f"initial_state is on {initial_state.device}, must be on q's {q.device}")
        if not initial_state.is_contiguous():
            raise ValueError(
                f"initial_state must be contiguous, its strides are {tuple(initial_state.stride())} for shape "
                f"{tuple(initial_state.shape)}: call .contiguous() on it"
            )


def _check_values(decay: Tensor | None, cu_seqlens: Tensor | None, N: int) -> None:
    """What a look at values costs nothing for: tensors on the CPU."""
    if decay is not None and decay.device.type == "cpu" and not bool(((decay >= 0) & decay.isfinite()).all()):
        raise ValueError(f"decay must be finite and >= 0 (the state decays as exp(-decay)); got {decay.tolist()}")
    check_offset_values("cu_seqlens", cu_seqlens, N)


def spec_of(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None = None,
    *,
    scale: float = 1.0,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    with_final_state: bool = False,
) -> LightningSpec:
    """The spec of a call whose arguments are right."""
    B, H, N, D = q.shape
    return LightningSpec(
        B=B,
        H=H,
        H_KV=k.shape[1],
        N=N,
        D=D,
        E=v.shape[3],
        dtype=q.dtype,
        device=q.device,
        scale=scale,
        has_decay=decay is not None,
        has_initial_state=initial_state is not None,
        with_final_state=with_final_state,
        sequences=None if cu_seqlens is None else cu_seqlens.shape[0] - 1,
        aligned=q.device.type != "cuda" or aligned(q, k, v),
    )


def checked_spec(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None = None,
    *,
    scale: float = 1.0,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> LightningSpec:
    """The spec `lightning_attention` would make of these arguments, with its checks: for `fulmen.explain`."""
    return _spec(_check(q, k, v, decay, scale, initial_state, cu_seqlens, True), float(scale), False)


def plain_spec(device: torch.device) -> LightningSpec:
    """An ordinary call on `device`, for `fulmen doctor`."""
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    return LightningSpec(4, 32, 32, 8192, 64, 64, dtype, device, has_decay=True)


# -------------------------------------------------------------------------- allocation, shared by backends


def empty_states(q: Tensor, sequences: int, E: int) -> Tensor:
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return torch.empty(sequences, q.shape[1], q.shape[3], E, dtype=dtype, device=q.device)


# ------------------------------------------------------------------------- the torch.library boundary


_lib = torch.library.Library("fulmen", "FRAGMENT")
_TENSORS = "Tensor q, Tensor k, Tensor v, Tensor? decay, Tensor? initial_state, Tensor? cu_seqlens"
_lib.define(f"lightning_forward({_TENSORS}, float scale, bool with_state, str backend) -> (Tensor o, Tensor state)")
_lib.define(
    f"lightning_backward({_TENSORS}, Tensor do, Tensor? dstate, float scale, str backend)"
    " -> (Tensor dq, Tensor dk, Tensor dv, Tensor dinitial_state)"
)
_lib.define(f"lightning_decay_gradient({_TENSORS}, Tensor do, Tensor? dstate, float scale) -> Tensor")


def _spec(x: Residuals, scale: float, with_state: bool) -> LightningSpec:
    return spec_of(
        *x[:4],
        scale=scale,
        initial_state=x.initial_state,
        cu_seqlens=x.cu_seqlens,
        with_final_state=with_state,
    )


def _nothing(x: Residuals) -> Tensor:
    """Stands for a state nobody asked for: an op cannot return None."""
    return x.q.new_empty(0, dtype=torch.float32)


@outside_autocast
def _forward(*args: Any, saves: bool = False) -> tuple[Tensor, ...]:
    """o, the final state and, if a backward will follow and the kernel saves something for it, that."""
    *tensors, scale, with_state, backend = args
    x = Residuals(*tensors)
    spec = _spec(x, scale, with_state)
    _check_values(x.decay, x.cu_seqlens, spec.N)
    kernel = dispatch.pick("lightning", spec, backend)
    shape = kernel.saves(spec) if saves and kernel.saves is not None else None
    if shape is not None:
        x = x._replace(saved=x.q.new_empty(shape))
    o, state = kernel.forward(spec, x)
    outputs = o, _nothing(x) if state is None else state
    return outputs if x.saved is None else (*outputs, x.saved)


def _forward_fake(*args: Any) -> tuple[Tensor, Tensor]:
    *tensors, _, with_state, _ = args
    x = Residuals(*tensors)
    states = x.q.shape[0] if x.cu_seqlens is None else x.cu_seqlens.shape[0] - 1
    o = empty_rows(x.q, x.q.shape[1], x.v.shape[3])
    return o, empty_states(x.q, states, x.v.shape[3]) if with_state else _nothing(x)


@outside_autocast
def _backward(*args: Any, saved: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    *tensors, do, dstate, scale, backend = args
    x = Residuals(*tensors)._replace(saved=saved)
    spec = _spec(x, scale, dstate is not None)
    kernel = dispatch.pick("lightning", spec, backend)
    assert kernel.backward is not None, "natively differentiable backends do not come here"
    if spec.E > 1 and do.stride(3) != 1:  # autograd hands over expanded gradients, as of o.sum()
        do = do.contiguous()
    dq, dk, dv, dinitial = kernel.backward(spec, x, do, None if dstate is None else dstate.contiguous())
    return dq, dk, dv, _nothing(x) if dinitial is None else dinitial


def _backward_fake(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x = Residuals(*args[:6])
    dq, dk, dv = (empty_rows(t, t.shape[1], t.shape[3]) for t in (x.q, x.k, x.v))
    return dq, dk, dv, _nothing(x) if x.initial_state is None else torch.empty_like(x.initial_state)


@outside_autocast
def _decay_gradient(*args: Any) -> Tensor:
    from fulmen.lightning import slopes

    *tensors, do, dstate, scale = args
    x = Residuals(*tensors)
    return slopes.gradient(_spec(x, scale, dstate is not None), x, do, dstate)


def _decay_gradient_fake(*args: Any) -> Tensor:
    return torch.empty_like(args[3])


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.scale, ctx.with_state, ctx.backend = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, *output[2:])


def _gradients(ctx: Any, do: Tensor | None, dstate: Tensor | None) -> tuple[Any, ...]:
    x = Residuals(*ctx.saved_tensors)
    if do is None:  # only the state was used
        do = torch.zeros((*x.q.shape[:3], x.v.shape[3]), dtype=x.q.dtype, device=x.q.device)
    args = (*x[:6], do, dstate if ctx.with_state else None, ctx.scale)
    plain = unwatched(*x, do, dstate) and not torch.is_grad_enabled()
    if plain:
        dq, dk, dv, dinitial = _backward(*args, ctx.backend, saved=x.saved)
    else:
        dq, dk, dv, dinitial = torch.ops.fulmen.lightning_backward(*args, ctx.backend)
    ddecay = None
    if x.decay is not None and ctx.needs_input_grad[3]:
        ddecay = (_decay_gradient if plain else torch.ops.fulmen.lightning_decay_gradient)(*args)
    return dq, dk, dv, ddecay, None if x.initial_state is None else dinitial, None, None, None, None


_lib.impl("lightning_forward", _forward, "CompositeExplicitAutograd")
_lib.impl("lightning_backward", _backward, "CompositeExplicitAutograd")
_lib.impl("lightning_decay_gradient", _decay_gradient, "CompositeExplicitAutograd")
torch.library.register_fake("fulmen::lightning_forward", _forward_fake, lib=_lib)
torch.library.register_fake("fulmen::lightning_backward", _backward_fake, lib=_lib)
torch.library.register_fake("fulmen::lightning_decay_gradient", _decay_gradient_fake, lib=_lib)
torch.library.register_autograd("fulmen::lightning_forward", _gradients, setup_context=_save, lib=_lib)
for _name in ("lightning_backward", "lightning_decay_gradient"):
    torch.library.register_autograd(f"fulmen::{_name}", no_second_derivative("lightning_attention"), lib=_lib)


class LightningFunction(torch.autograd.Function):
    """The gradient registered above, for plain eager calls, past the dispatcher's Python wrappers.

    Only here does a kernel save more than its inputs: an operator's outputs must not depend on the kernel.
    """

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, ...]:
        outputs = _forward(*inputs, saves=True)
        _save(ctx, inputs, outputs)
        return outputs[:2]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        return _gradients(ctx, *grads)


def _attend(x: Residuals, scale: float, with_state: bool, backend: str) -> tuple[Tensor, Tensor]:
    if dispatch.differentiable_as_it_is("lightning", backend):  # plain PyTorch: no boundary to cross
        _check_values(x.decay, x.cu_seqlens, x.q.shape[2])
        spec = _spec(x, scale, with_state)
        return dispatch.pick("lightning", spec, backend).forward(spec, x)
    inputs = (*x[:6], scale, with_state, backend)
    refuse_derivatives_we_lack("lightning_attention", x)
    if not unwatched(*x):
        return torch.ops.fulmen.lightning_forward(*inputs)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in x[:5]):
        return LightningFunction.apply(*inputs)
    return _forward(*inputs)
