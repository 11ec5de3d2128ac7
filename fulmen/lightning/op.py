"""Lightning attention: linear attention with a per-head exponential decay.

    o_t = scale * sum_{j <= t} exp(-s_h (t - j)) (q_t . k_j) v_j        s = 0 without decay

or, token by token, S_t = exp(-s) S_{t-1} + k_t v_t^T and o_t = scale * q_t S_t, which is why cost grows with N and
not with N^2. This file is the whole story of a call: look for the plan of an equal call (`fulmen.plans`); without one
check arguments, build the spec and let `dispatch.pick` choose a kernel. Nothing but the arguments is saved for the
backward, unless a kernel asks for it. The gradient of the decay is the same for all of them (slopes.py). Compilers
and modes see two `torch.library` operators.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fulmen import dispatch, plans
from fulmen.boundary import (
    aligned,
    autocast,
    check_offset_values,
    check_offsets,
    check_qkv,
    check_scale,
    empty_rows,
    is_plain_eager,
    no_second_derivative,
    outside_autocast,
    plain_memory,
    refuse_derivatives_we_lack,
    require_tensors,
)
from fulmen.plans import Plan, Repeated

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
    return _attend((q, k, v, decay, initial_state, cu_seqlens), scale, False, backend)[0]


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
    return _attend((q, k, v, decay, initial_state, cu_seqlens), scale, True, backend)


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


def check_inputs(
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

    What would take a look at values is left to `check_values`.

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


def check_values(decay: Tensor | None, cu_seqlens: Tensor | None, N: int) -> None:
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
    return _spec(check_inputs(q, k, v, decay, scale, initial_state, cu_seqlens, True), float(scale), False)


def plain_spec(device: torch.device) -> LightningSpec:
    """An ordinary call on `device`, for `fulmen doctor`."""
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    return LightningSpec(4, 32, 32, 8192, 64, 64, dtype, device, has_decay=True)


# -------------------------------------------------------------------------- allocation, shared by backends


def empty_states(q: Tensor, sequences: int, E: int) -> Tensor:
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return torch.empty(sequences, q.shape[1], q.shape[3], E, dtype=dtype, device=q.device)


# ------------------------------------------------------------------------------------- kernels and plans


def _spec(x: Residuals, scale: float, with_state: bool) -> LightningSpec:
    return spec_of(
        *x[:4],
        scale=scale,
        initial_state=x.initial_state,
        cu_seqlens=x.cu_seqlens,
        with_final_state=with_state,
    )


def _plan(spec: LightningSpec, kernel: dispatch.Kernel, arguments: tuple[Any, ...], needs_grad: bool) -> Plan:
    """Both directions of `kernel`, and their prepared launches if it has any."""
    shape = kernel.saves(spec) if needs_grad and kernel.saves is not None else None

    def residuals(tensors: tuple[Any, ...]) -> Residuals:
        x = Residuals(*tensors)
        return x if shape is None else x._replace(saved=x.q.new_empty(shape))

    @outside_autocast
    def forward(*tensors: Any) -> tuple[Tensor, Tensor | None, Tensor | None]:
        x = residuals(tensors)
        return *kernel.forward(spec, x), x.saved

    @outside_autocast
    def backward(*tensors: Any) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        assert kernel.backward is not None, "natively differentiable backends do not come here"
        *given, do, dstate = tensors
        if spec.E > 1 and do.stride(3) != 1:  # autograd hands over expanded gradients, as of o.sum()
            do = do.contiguous()
        return kernel.backward(spec, Residuals(*given), do, None if dstate is None else dstate.contiguous())

    def prepare(*tensors: Any) -> Any:
        assert kernel.prepare is not None
        return kernel.prepare(spec, residuals(tensors))

    def prepare_backward(*tensors: Any) -> Any:
        assert kernel.prepare_backward is not None
        *given, do, dstate = tensors
        return kernel.prepare_backward(spec, Residuals(*given), do, dstate)

    return Plan(
        spec,
        Repeated(forward, kernel.prepare and prepare),
        lambda: Repeated(backward, kernel.prepare_backward and prepare_backward),
        arguments,
        needs_grad,
    )


def plan_of(spec: LightningSpec, x: Residuals, backend: str) -> Plan:
    """The plan of a spec that was not built from a call's arguments, as in `fulmen.parallel`; it saves nothing."""
    which, given = plans.given(x)
    key = (which, "lightning spec", spec, backend)
    kernel = dispatch.pick("lightning", spec, backend)
    return plans.find(key, given) or plans.keep(key, given, _plan(spec, kernel, (), False))


def _planned(key: Any, tensors: tuple[Any, ...], arguments: tuple[Any, ...], needs_grad: bool) -> Plan:
    """The plan of a call whose arguments are right: tensors, and after them what the operators take."""
    check_values(tensors[3], tensors[5], tensors[0].shape[2])
    which, given = plans.given(tensors)
    plan = plans.find((which, *key), given)
    if plan is None:
        spec = _spec(Residuals(*tensors), *arguments[:2])
        kernel = dispatch.pick("lightning", spec, arguments[2])
        plan = plans.keep((which, *key), given, _plan(spec, kernel, arguments, needs_grad))
    return plan


@outside_autocast
def _decay_gradient(spec: LightningSpec, x: Residuals, do: Tensor, dstate: Tensor | None) -> Tensor:
    from fulmen.lightning import slopes

    return slopes.gradient(spec, x, do, dstate)


# ------------------------------------------------------------------------- the torch.library boundary


_lib = torch.library.Library("fulmen", "FRAGMENT")
_TENSORS = "Tensor q, Tensor k, Tensor v, Tensor? decay, Tensor? initial_state, Tensor? cu_seqlens"
_lib.define(f"lightning_forward({_TENSORS}, float scale, bool with_state, str backend) -> (Tensor o, Tensor state)")
_lib.define(
    f"lightning_backward({_TENSORS}, Tensor do, Tensor? dstate, float scale, bool decay_gradient, str backend)"
    " -> (Tensor dq, Tensor dk, Tensor dv, Tensor ddecay, Tensor dinitial_state)"
)
TENSORS = 6


def _nothing(x: Tensor) -> Tensor:
    """Stands for a state or a gradient nobody asked for: an operator cannot return None."""
    return x.new_empty(0, dtype=torch.float32)


def _forward(*args: Any) -> tuple[Tensor, Tensor]:
    tensors, arguments = args[:TENSORS], args[TENSORS:]
    plan = _planned(("lightning operator", *arguments), tensors, arguments, False)
    o, state, _ = plan.forward.run(*tensors)
    return o, _nothing(o) if state is None else state


def _forward_fake(*args: Any) -> tuple[Tensor, Tensor]:
    *tensors, _, with_state, _ = args
    x = Residuals(*tensors)
    states = x.q.shape[0] if x.cu_seqlens is None else x.cu_seqlens.shape[0] - 1
    o = empty_rows(x.q, x.q.shape[1], x.v.shape[3])
    return o, empty_states(x.q, states, x.v.shape[3]) if with_state else _nothing(o)


def _backward(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    *tensors, do, dstate, scale, decay_gradient, backend = args
    arguments = (scale, dstate is not None, backend)
    plan = _planned(("lightning operator", *arguments), tuple(tensors), arguments, False)
    given = (*tensors, None, do, dstate)
    dq, dk, dv, dinitial = plan.gradients(*given)
    ddecay = _decay_gradient(plan.spec, Residuals(*tensors), do, dstate) if decay_gradient else _nothing(dq)
    return dq, dk, dv, ddecay, _nothing(dq) if dinitial is None else dinitial


def _backward_fake(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    x, decay_gradient = Residuals(*args[:TENSORS]), args[-2]
    dq, dk, dv = (empty_rows(t, t.shape[1], t.shape[3]) for t in (x.q, x.k, x.v))
    ddecay = torch.empty_like(x.decay) if decay_gradient and x.decay is not None else _nothing(dq)
    return dq, dk, dv, ddecay, _nothing(dq) if x.initial_state is None else torch.empty_like(x.initial_state)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.arguments = inputs[TENSORS:]
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:TENSORS])


def _operator_gradients(
    tensors: Any, do: Tensor | None, dstate: Tensor | None, decay_gradient: bool, arguments: tuple[Any, ...]
) -> tuple[Any, ...]:
    """Gradients of the tensors, by the registered operator."""
    x, (scale, with_state, backend) = Residuals(*tensors), arguments
    if do is None:  # only the state was used
        do = torch.zeros((*x.q.shape[:3], x.v.shape[3]), dtype=x.q.dtype, device=x.q.device)
    dq, dk, dv, ddecay, dinitial = torch.ops.fulmen.lightning_backward(
        *tensors, do, dstate if with_state else None, scale, decay_gradient, backend
    )
    return dq, dk, dv, ddecay if decay_gradient else None, None if x.initial_state is None else dinitial, None


def _gradients(ctx: Any, do: Tensor | None, dstate: Tensor | None) -> tuple[Any, ...]:
    grads = _operator_gradients(ctx.saved_tensors, do, dstate, ctx.needs_input_grad[3], ctx.arguments)
    return *grads, None, None, None


_lib.impl("lightning_forward", _forward, "CompositeExplicitAutograd")
_lib.impl("lightning_backward", _backward, "CompositeExplicitAutograd")
torch.library.register_fake("fulmen::lightning_forward", _forward_fake, lib=_lib)
torch.library.register_fake("fulmen::lightning_backward", _backward_fake, lib=_lib)
torch.library.register_autograd("fulmen::lightning_forward", _gradients, setup_context=_save, lib=_lib)
torch.library.register_autograd("fulmen::lightning_backward", no_second_derivative("lightning_attention"), lib=_lib)


# ------------------------------------------------------------------------------------------------ the call


class LightningFunction(torch.autograd.Function):
    """The gradient of plain eager calls, whose plan is known; what a kernel saves is saved here."""

    @staticmethod
    def forward(ctx: Any, plan: Plan, *tensors: Any) -> Any:
        o, state, saved = plan.forward.run(*tensors)
        ctx.plan = plan
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, saved)
        return o if state is None else (o, state)

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, dstate: Tensor | None = None) -> tuple[Any, ...]:
        plan, tensors = ctx.plan, ctx.saved_tensors
        if do is None:  # only the state was used
            do = torch.zeros((*tensors[0].shape[:3], plan.spec.E), dtype=plan.spec.dtype, device=plan.spec.device)
        run = plan.backward_of((*tensors, do, dstate))
        if run is None:
            return None, *_operator_gradients(tensors[:TENSORS], do, dstate, ctx.needs_input_grad[4], plan.arguments)
        dq, dk, dv, dinitial = run(*tensors, do, dstate)
        ddecay = None
        if ctx.needs_input_grad[4]:
            ddecay = _decay_gradient(plan.spec, Residuals(*tensors), do, dstate)
        return None, dq, dk, dv, ddecay, dinitial, None


_apply = plans.function_call(LightningFunction)


def _attend(tensors: tuple[Any, ...], scale: float, with_state: bool, backend: str) -> tuple[Tensor, Tensor | None]:
    plan = None
    if type(scale) is float and type(backend) is str:
        which, given = plans.given(tensors)
        plan = plans.find((which, "lightning", scale, with_state, backend), given)
    if plan is None:
        tensors = x = check_inputs(*tensors[:4], scale, *tensors[4:], decay_gradient=True)
        scale = float(scale)
        if dispatch.differentiable_as_it_is("lightning", backend):  # plain PyTorch: no boundary to cross
            check_values(x.decay, x.cu_seqlens, x.q.shape[2])
            spec = _spec(x, scale, with_state)
            return dispatch.pick("lightning", spec, backend).forward(spec, x)
        refuse_derivatives_we_lack("lightning_attention", x)
        tensors, arguments = x[:TENSORS], (scale, with_state, backend)
        if not is_plain_eager(*tensors):
            return torch.ops.fulmen.lightning_forward(*tensors, *arguments)
        needs_grad = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in x[:5])
        plan = _planned(("lightning", *arguments), tensors, arguments, needs_grad)
    else:
        check_values(tensors[3], tensors[5], plan.spec.N)
    if not plan.needs_grad:
        return plan.forward.run(*tensors)[:2]
    outputs = _apply(plan, *tensors)
    return outputs if with_state else (outputs, None)
