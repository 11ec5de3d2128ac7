"""Lightning attention: linear attention with an exponential decay of each head, constant or of each token.

    S_t = exp(-s_t) S_{t-1} + k_t v_t^T,   o_t = scale * q_t S_t        s = 0 without decay

or, written out, o_t = scale * sum_{j <= t} exp(-(s_{j+1} + .. + s_t)) (q_t . k_j) v_j; cost grows with N and not with
N^2, as a state of fixed size sums up the past. The path of a call: look for the plan of an equal call
(`fulmen.plans`); without one check arguments, build the spec and let `dispatch.pick` choose a kernel. Nothing but the
arguments is saved for the backward, unless a kernel asks for it. The gradient of a constant decay is the same for all
of them (slopes.py), that of a decay for each token is part of their backward. Compilers and modes see two
`torch.library` operators; what a kernel saves is an output of the first.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from fulmen import dispatch, plans
from fulmen.boundary import (
    empty_rows,
    is_plain_eager,
    needs_gradient,
    no_second_derivative,
    outside_autocast,
    refuse_unsupported_derivatives,
    register_operator,
)
from fulmen.lightning.plan import Shape, plan_for
from fulmen.lightning.spec import (
    LightningSpec,
    Residuals,
    check_inputs,
    check_values,
    empty_output,
    empty_states,
    spec_of_residuals,
)
from fulmen.plans import Plan, fake_nothing, nothing


class Projection(Protocol):
    """What q, k and v are made of, whose gradient the attention's backward may write."""

    silu: bool  # q, k and v are silu of it, and nothing else

    def buffers(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor | None = None) -> tuple[Tensor | None, ...]:
        """The tensors to write dq, dk and dv to, each or None; given x, also its parts that q, k and v are silu of.
        (): the backward allocates its own."""

    def forget(self) -> None:
        """This backward does not write to the buffers."""


class Into(NamedTuple):
    projection: Projection
    x: Tensor  # the projection's output


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
    """Causal linear attention with optional decay: o (B, H, N, E).

    q              (B, H, N, D); any strides whose last dimension is contiguous, so a (B, N, H, D) tensor may be
                   passed as `x.transpose(1, 2)` at no cost. bf16, fp16 or fp32 (fp64 on the eager backend).
    k, v           (B, H_KV, N, D) and (B, H_KV, N, E); H_KV divides H, query head h reads head h // (H / H_KV).
                   Or q and k have the fewer heads, as Mamba-2's groups: both G, v H; G divides H, and head h of v
                   reads head h // (H / G) of q and k.
    decay          None, or s >= 0 in fp32 (fp64 if q is): (H,) or (H, 1, 1), constant slopes (`fulmen.decay` has some);
                   (B, H, N), one for each token, any strides. A token's decay acts on the state before it.
                   Differentiable; a backward that is not asked for its gradient does not pay for it.
                   Finite and >= 0, which is checked on the CPU only: on a GPU that would synchronise.
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


def lightning_attention_into(
    into: Into, q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, scale: float, cu_seqlens: Tensor | None,
    backend: str,
) -> Tensor:  # fmt: skip
    """As `lightning_attention`; a plain eager backward writes gradients into the projection's."""
    return _attend((q, k, v, decay, None, cu_seqlens), scale, False, backend, into)[0]


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


# ------------------------------------------------------------------------------------- kernels and plans
def _planned(tensors: tuple[Any, ...], arguments: tuple[Any, ...], needs_grad: bool, operator: bool = False) -> Plan:
    """The plan of a call whose arguments are right: tensors, and after them what the operators take.

    What an operator saves has a shape that its fake implementation knows, too: see `_saved_shape`.
    """
    check_values(tensors[3], tensors[5], tensors[0].shape[2])
    which, given = plans.given(tensors)
    key = (which, "lightning operator" if operator else "lightning", *arguments, operator and needs_grad)
    plan = plans.find(key, given)
    if plan is None:
        spec, backend = spec_of_residuals(Residuals(*tensors), *arguments[:2]), arguments[2]
        saved = _saved_shape(spec, backend) if operator and needs_grad else None
        copies = saved is not None and not spec.aligned and backend == "auto"
        spec = spec._replace(aligned=spec.aligned or copies)
        kernel = dispatch.pick("lightning", spec, backend)
        if needs_grad and not operator and kernel.saves is not None:
            saved = _joined(kernel.saves(spec))
        plan = plans.keep(key, given, plan_for(spec, kernel, arguments, needs_grad, saved, copies))
    return plan


def _saved_shape(spec: LightningSpec, backend: str) -> Shape | None:
    """What the operators save: a shape that depends on sizes, which may be symbols, and not on what they make the
    policy choose. None: nothing, or something that not every call of this kind has.

    A kernel that saves after a single token always does. Forward and backward must agree on it, also if their tensors
    are not aligned alike; `_planned` copies those that are not.
    """
    if spec.device.type == "cuda" and not torch.cuda.is_available():  # fake tensors of a GPU that is not here
        return None
    H, H_KV, groups = (2 if spec.shared_heads else 1, 1, None) if spec.groups is None else (2, 2, 1)
    sequences = None if spec.sequences is None else 1
    one = spec._replace(B=1, H=H, H_KV=H_KV, N=1, D=int(spec.D), E=int(spec.E), groups=groups)
    one = one._replace(sequences=sequences, scale=1.0, aligned=True)
    kernel = dispatch.pick("lightning", one, backend)
    return _joined(kernel.saves(spec)) if kernel.saves is not None and kernel.saves(one) is not None else None


def _joined(shape: Shape | None) -> Shape | None:
    """Two dimensions for any number: a compiler asks of each symbol whether it is 1, and of their product it is not."""
    return None if shape is None else (math.prod(shape[:-1]), shape[-1])


@outside_autocast
def _slopes_gradient(spec: LightningSpec, x: Residuals, do: Tensor, dstate: Tensor | None) -> Tensor:
    from fulmen.lightning import slopes

    return slopes.gradient(spec, x, do, dstate)


# ------------------------------------------------------------------------- the torch.library boundary
_lib = torch.library.Library("fulmen", "FRAGMENT")
_TENSORS = "Tensor q, Tensor k, Tensor v, Tensor? decay, Tensor? initial_state, Tensor? cu_seqlens"
TENSORS = 6


def _forward(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, initial_state: Tensor | None, cu_seqlens: Tensor | None,
    scale: float, with_state: bool, backend: str, needs_grad: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    tensors = (q, k, v, decay, initial_state, cu_seqlens)
    plan = _planned(tensors, (scale, with_state, backend), needs_grad, operator=True)
    o, state, saved = plan.forward.run(*tensors)
    empty = nothing(q.device)
    return o, empty() if state is None else state, empty() if saved is None else saved


def _forward_fake(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, initial_state: Tensor | None, cu_seqlens: Tensor | None,
    scale: float, with_state: bool, backend: str, needs_grad: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    spec = spec_of_residuals(Residuals(q, k, v, decay, initial_state, cu_seqlens), scale, with_state)
    shape = _saved_shape(spec, backend) if needs_grad else None
    o = empty_output(spec, Residuals(q, k, v, decay, initial_state, cu_seqlens))
    state = empty_states(spec) if with_state else fake_nothing(o)
    return o, state, fake_nothing(o) if shape is None else q.new_empty(shape)


def _backward(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, initial_state: Tensor | None, cu_seqlens: Tensor | None,
    do: Tensor, dstate: Tensor | None, scale: float, decay_gradient: bool, backend: str, saved: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    tensors = (q, k, v, decay, initial_state, cu_seqlens)
    if saved is not None and saved.ndim == 1:  # nothing
        saved = None
    which, given = plans.given((*tensors, saved, do, dstate))
    key = (which, "lightning backward operator", scale, decay_gradient, backend)
    plan = plans.find(key, given)
    if plan is None:
        ahead = _planned(tensors, (scale, dstate is not None, backend), saved is not None, operator=True)
        plan = plans.keep(key, given, ahead.backward_alone())
    ddecay = _token_gradient(plan.spec, decay, decay_gradient)
    dq, dk, dv, dinitial = plan.forward.run(*tensors, saved, do, dstate, *(() if ddecay is None else (ddecay,)))
    empty = nothing(q.device)
    if decay_gradient and ddecay is None:
        ddecay = _slopes_gradient(plan.spec, Residuals(*tensors), do, dstate)
    return dq, dk, dv, *(empty() if t is None else t for t in (ddecay, dinitial))


def _token_gradient(spec: LightningSpec, decay: Tensor | None, wanted: bool) -> Tensor | None:
    """Where a backward writes the gradient of a decay for each token; None, if it need not."""
    return torch.empty_like(decay) if wanted and spec.per_token and decay is not None else None


def _backward_fake(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    x, decay_gradient = Residuals(*args[:TENSORS]), args[TENSORS + 3]
    dq, dk, dv = (empty_rows(t, t.shape[1], t.shape[3]) for t in (x.q, x.k, x.v))
    ddecay = torch.empty_like(x.decay) if decay_gradient and x.decay is not None else fake_nothing(dq)
    return dq, dk, dv, ddecay, fake_nothing(dq) if x.initial_state is None else torch.empty_like(x.initial_state)


def _zero_output(q: Tensor, v: Tensor) -> Tensor:
    shape = q.shape[0], max(q.shape[1], v.shape[1]), q.shape[2], v.shape[3]
    return torch.zeros(shape, dtype=q.dtype, device=q.device)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.arguments = inputs[TENSORS:]
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[2])
    ctx.save_for_backward(*inputs[:TENSORS], output[2])


def _operator_gradients(
    tensors: Any, do: Tensor | None, dstate: Tensor | None, decay_gradient: bool, arguments: tuple[Any, ...]
) -> tuple[Any, ...]:
    """Gradients of the tensors, by the registered operator; after them, what was saved."""
    *given, saved = tensors
    x, (scale, with_state, backend) = Residuals(*given), arguments[:3]
    if do is None:  # only the state was used
        do = _zero_output(x.q, x.v)
    dq, dk, dv, ddecay, dinitial = torch.ops.fulmen.lightning_backward(
        *given, do, dstate if with_state else None, scale, decay_gradient, backend, saved
    )
    return dq, dk, dv, ddecay if decay_gradient else None, None if x.initial_state is None else dinitial, None


def _gradients(ctx: Any, do: Tensor | None, dstate: Tensor | None, dsaved: None) -> tuple[Any, ...]:
    grads = _operator_gradients(ctx.saved_tensors, do, dstate, ctx.needs_input_grad[3], ctx.arguments)
    return *grads, *[None] * len(ctx.arguments)


register_operator(
    _lib,
    f"lightning_forward({_TENSORS}, float scale, bool with_state, str backend, bool needs_grad=False)"
    " -> (Tensor o, Tensor state, Tensor saved)",
    _forward,
    _forward_fake,
    _gradients,
    _save,
)
register_operator(
    _lib,
    f"lightning_backward({_TENSORS}, Tensor do, Tensor? dstate, float scale, bool decay_gradient, str backend,"
    " Tensor? saved=None) -> (Tensor dq, Tensor dk, Tensor dv, Tensor ddecay, Tensor dinitial_state)",
    _backward,
    _backward_fake,
    no_second_derivative("lightning_attention"),
)


# ------------------------------------------------------------------------------------------------ the call


class LightningFunction(torch.autograd.Function):
    """The gradient of plain eager calls, whose plan is known; what a kernel saves is saved here."""

    @staticmethod
    def forward(ctx: Any, plan: Plan, into: Into | None, *tensors: Any) -> Any:
        o, state, saved = plan.forward.run(*tensors)
        ctx.plan, ctx.projection = plan, into and into.projection
        ctx.set_materialize_grads(False)
        x = (into.x,) if into is not None and into.projection.silu and _takes_silu(plan) else ()
        ctx.save_for_backward(*tensors, saved, *x)
        return o if state is None else (o, state)

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, dstate: Tensor | None = None) -> tuple[Any, ...]:
        plan, projection, tensors = ctx.plan, ctx.projection, ctx.saved_tensors
        tensors, x = tensors[: TENSORS + 1], tensors[TENSORS + 1 :]
        if do is None:  # only the state was used
            do = _zero_output(tensors[0], tensors[2])
        decay_gradient = ctx.needs_input_grad[5]
        ddecay = _token_gradient(plan.spec, tensors[3], decay_gradient)
        buffers = () if projection is None else projection.buffers(*tensors[:3], *x)
        into = (ddecay, None, *buffers) if buffers or ddecay is not None else ()
        run = plan.backward_of((*tensors, do, dstate, *into))
        if run is None:
            if projection is not None:
                projection.forget()
            return None, None, *_operator_gradients(tensors, do, dstate, decay_gradient, plan.arguments)
        dq, dk, dv, dinitial = run(*tensors, do, dstate, *into)
        if decay_gradient and ddecay is None:
            ddecay = _slopes_gradient(plan.spec, Residuals(*tensors), do, dstate)
        return None, None, dq, dk, dv, ddecay, dinitial, None


def _takes_silu(plan: Plan) -> bool:
    takes = dispatch.pick("lightning", plan.spec, plan.arguments[2]).takes_silu
    return takes is not None and takes(plan.spec)


_apply = plans.function_call(LightningFunction)


def _attend(
    tensors: tuple[Any, ...], scale: float, with_state: bool, backend: str, into: Into | None = None
) -> tuple[Tensor, Any]:
    plan = None
    if type(scale) is float and type(backend) is str:
        which, given = plans.given(tensors)
        plan = plans.find((which, "lightning", scale, with_state, backend, False), given)
    if plan is None:
        q, k, v, decay, initial_state, cu_seqlens = tensors
        x = check_inputs(q, k, v, decay, scale, initial_state, cu_seqlens, decay_gradient=True)
        scale = float(scale)
        if dispatch.differentiable_as_it_is("lightning", backend):  # plain PyTorch: no boundary to cross
            check_values(x.decay, x.cu_seqlens, x.q.shape[2])
            spec = spec_of_residuals(x, scale, with_state)
            return dispatch.pick("lightning", spec, backend).forward(spec, x)
        refuse_unsupported_derivatives("lightning_attention", x)
        tensors, arguments, needs_grad = x[:TENSORS], (scale, with_state, backend), needs_gradient(x[:5])
        if not is_plain_eager(*tensors):
            return torch.ops.fulmen.lightning_forward(*tensors, *arguments, needs_grad)[:2]
        plan = _planned(tensors, arguments, needs_grad)
    elif plan.spec.device.type == "cpu":
        check_values(tensors[3], tensors[5], plan.spec.N)
    if not plan.needs_grad:
        o, state, _ = plan.forward.run(*tensors)
        return o, state
    outputs = _apply(plan, into, *tensors)
    return outputs if with_state else (outputs, None)
