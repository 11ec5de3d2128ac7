"""Softmax attention: o = softmax(mask(cap(scale q k^T))) v.

This file is the whole story of a call: look for the plan of an equal call (`fulmen.plans`); without one check
arguments, build the spec and let `dispatch.pick` choose a kernel. The backward starts from q, k, v, o and lse, the log
of the softmax's denominator. Compilers and modes see two `torch.library` operators.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fulmen import dispatch, plans
from fulmen.boundary import (
    as_int,
    autocast,
    check_offset_values,
    check_offsets,
    check_qkv,
    check_scale,
    empty_rows,
    is_number,
    is_plain_eager,
    no_second_derivative,
    outside_autocast,
    plain_memory,
    refuse_derivatives_we_lack,
    require_tensors,
)
from fulmen.plans import Plan, Repeated

MAX_HEAD_DIM = 256

Causal = bool | str
Window = tuple[int | None, int | None] | None


class FlashSpec(NamedTuple):
    """Every fact about a call that is no tensor: the key of dispatch, of the tile tables, of a benchmark case.

    Query i stands at position i (top_left) or i + N_KV - N_Q, of its own sequence when packed, and sees the keys from
    `left` before that position to `right` after it; None: without limit. A causal call is one with right = 0.
    """

    B: int
    H: int
    H_KV: int
    N_Q: int
    N_KV: int
    D: int
    E: int
    dtype: torch.dtype
    device: torch.device
    scale: float
    left: int | None = None
    right: int | None = None
    top_left: bool = False
    softcap: float | None = None
    has_sinks: bool = False
    sequences: int | None = None  # None: not packed
    with_lse: bool = False
    needs_grad: bool = False
    deterministic: bool = False  # torch.use_deterministic_algorithms asks for gradients that repeat bit for bit

    @property
    def wants_lse(self) -> bool:
        """Whether anybody will read lse."""
        return self.with_lse or self.needs_grad

    @property
    def plain(self) -> bool:
        """Causal, up to a distance `right`, or not, and nothing else."""
        return self.left is None and self.softcap is None and self.sequences is None and not self.has_sinks

    @property
    def group(self) -> int:
        """Query heads that share one head of k and v."""
        return self.H // max(self.H_KV, 1)

    @property
    def causal(self) -> bool:
        """Nothing but causal: the one mask torch's SDPA can say."""
        return self.right == 0 and self.left is None and self.sequences is None and self.N_Q == self.N_KV


class Residuals(NamedTuple):
    """The tensors a backend's forward works on; its backward gets o and lse, too."""

    q: Tensor
    k: Tensor
    v: Tensor
    sinks: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: Causal = False,
    window: Window = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    scale: float | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Softmax attention, exact: o (B, H, N_Q, E).

    q             (B, H, N_Q, D); any strides whose last dimension is contiguous, so a (B, N, H, D) tensor may be
                  passed as `x.transpose(1, 2)` at no cost. bf16 or fp16; fp32 and fp64 on some backends.
    k, v          (B, H_KV, N_KV, D) and (B, H_KV, N_KV, E); H_KV divides H, query head h reads head h // (H / H_KV).
    causal        False; True or "bottom_right": query i sees keys up to i + N_KV - N_Q, as in flash-attn, so the last
                  query sees everything; "top_left": up to i, as torch SDPA's is_causal. The same where N_Q = N_KV.
    window        (left, right): keys from `left` before the query's position to `right` after it; None: no limit.
                  Positions are aligned as `causal` says (bottom-right when not causal), and causal allows none after.
    softcap       logits become softcap * tanh(logits / softcap), before masking.
    sinks         (H,), fp32 or q's dtype: a logit per head that takes part in the softmax and has no value, so that
                  a head can attend to nothing. Differentiable.
    scale         multiplies q k^T; 1 / sqrt(D) unless given.
    cu_seqlens_*  int32 (sequences + 1,) on the inputs' device, rising from 0 to N_Q (N_KV): B is 1 and N holds packed
                  sequences, which do not see each other. cu_seqlens_k is cu_seqlens_q unless given. Values are
                  checked on the CPU only; on a GPU rows outside every sequence are undefined.
    backend       "auto" takes the fastest that supports the call; a name works or raises, it never falls back. Under
                  torch.use_deterministic_algorithms "auto" takes one whose gradients are the same every time.

    A row that sees no key is zero, and so are its gradients.
    """
    o, _ = _attend(q, k, v, sinks, cu_seqlens_q, cu_seqlens_k, causal, window, softcap, scale, backend, False)
    return o


def flash_attention_with_lse(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: Causal = False,
    window: Window = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    scale: float | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """As `flash_attention`, and lse (B, H, N_Q), fp32: the natural logarithm of the softmax's denominator.

    It counts the sink, is differentiable, and is -inf for a row that sees no key and no sink.
    """
    return _attend(q, k, v, sinks, cu_seqlens_q, cu_seqlens_k, causal, window, softcap, scale, backend, True)


# ------------------------------------------------------------------------------------------------ checks


def check_mask(causal: Causal, window: Window, softcap: float | None) -> tuple[int | None, int | None, bool]:
    """(left, right, top_left) of the arguments `causal` and `window`."""
    if not isinstance(causal, bool | str) or causal not in (False, True, "bottom_right", "top_left"):
        raise ValueError(f"causal={causal!r}: must be False, True (the same as 'bottom_right') or 'top_left'")
    if softcap is not None and not (is_number(softcap) and 1e-30 <= softcap <= 1e30):
        raise ValueError(f"softcap={softcap!r}: must be None or a number between 1e-30 and 1e30")
    left, right = None, None
    if window is not None:
        if not isinstance(window, tuple | list) or len(window) != 2:
            raise ValueError(f"window={window!r}: must be None or (left, right), each an int >= 0 or None")
        left, right = (None if side is None else as_int(side) for side in window)
        if (left is not None and left < 0) or (right is not None and right < 0):
            raise ValueError(f"window={window!r}: left and right must be ints >= 0, or None for no limit")
    if causal:
        right = 0
    return left, right, causal == "top_left"


def check_inputs(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None
) -> Residuals:
    """The tensors of a call as backends take them; one clear error for each wrong argument."""
    optional = {"sinks": sinks, "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    require_tensors({"q": q, "k": k, "v": v}, optional)
    q, k, v = autocast(*plain_memory(q, k, v))
    check_qkv(q, k, v, MAX_HEAD_DIM, same_length=False)
    if sinks is not None:
        if tuple(sinks.shape) != (q.shape[1],):
            raise ValueError(f"sinks has shape {tuple(sinks.shape)}, must be (H,) with q's H={q.shape[1]}")
        if sinks.dtype not in (torch.float32, q.dtype):
            raise ValueError(f"sinks is {sinks.dtype}, must be float32 or q's {q.dtype}")
        if sinks.device != q.device:
            raise ValueError(f"sinks is on {sinks.device}, must be on q's {q.device}")
        sinks = sinks.contiguous()
    if cu_seqlens_q is None:
        if cu_seqlens_k is not None:
            raise ValueError("cu_seqlens_k is given without cu_seqlens_q: packed keys need packed queries")
        return Residuals(q, k, v, sinks)
    check_offsets("cu_seqlens_q", cu_seqlens_q, q)
    if cu_seqlens_k is None or cu_seqlens_k is cu_seqlens_q:
        if k.shape[2] != q.shape[2]:
            raise ValueError(
                f"cu_seqlens_k is missing: q has N={q.shape[2]} and k has N={k.shape[2]}, so theirs cannot be the same"
            )
        cu_seqlens_k = cu_seqlens_q
    check_offsets("cu_seqlens_k", cu_seqlens_k, k)
    if cu_seqlens_k.shape != cu_seqlens_q.shape:
        raise ValueError(
            f"cu_seqlens_q and cu_seqlens_k must count the same sequences; got shapes {tuple(cu_seqlens_q.shape)} "
            f"and {tuple(cu_seqlens_k.shape)}"
        )
    return Residuals(q, k, v, sinks, cu_seqlens_q.contiguous(), cu_seqlens_k.contiguous())


def check_values(x: Residuals) -> None:
    check_offset_values("cu_seqlens_q", x.cu_seqlens_q, x.q.shape[2])
    check_offset_values("cu_seqlens_k", x.cu_seqlens_k, x.k.shape[2])


def spec_of(
    x: Residuals, scale: float, left: int | None, right: int | None, top_left: bool, softcap: float | None,
    with_lse: bool, needs_grad: bool,
) -> FlashSpec:  # fmt: skip
    B, H, N_Q, D = x.q.shape
    _, H_KV, N_KV, E = x.v.shape
    sequences = None if x.cu_seqlens_q is None else x.cu_seqlens_q.shape[0] - 1
    far = N_Q + N_KV  # no query is so far from any key
    left, right = (None if side is None or side >= far else side for side in (left, right))
    limited = left is not None or right is not None
    top_left = top_left and limited and (sequences is not None or N_Q != N_KV)  # else both alignments are one
    return FlashSpec(
        B, H, H_KV, N_Q, N_KV, D, E, x.q.dtype, x.q.device, scale, left, right, top_left, softcap,
        x.sinks is not None, sequences, with_lse, needs_grad,
        needs_grad and plans.deterministic(),
    )  # fmt: skip


def checked_spec(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: Causal = False,
    window: Window = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    scale: float | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    with_lse: bool = False,
) -> FlashSpec:
    """The spec `flash_attention` would make of these arguments, with its checks: for `fulmen.explain`."""
    mask = check_mask(causal, window, softcap)
    x = check_inputs(q, k, v, sinks, cu_seqlens_q, cu_seqlens_k)
    scale = x.q.shape[3] ** -0.5 if scale is None else check_scale(scale)
    return spec_of(x, scale, *mask, softcap, with_lse, _needs_grad(x))


def plain_spec(device: torch.device) -> FlashSpec:
    """An ordinary call on `device`, for `fulmen doctor`."""
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    return FlashSpec(2, 16, 16, 8192, 8192, 128, 128, dtype, device, 128**-0.5, right=0, needs_grad=True)


# ------------------------------------------------------------------------------------- kernels and plans


def empty_lse(q: Tensor) -> Tensor:
    return torch.empty(q.shape[:3], dtype=torch.float64 if q.dtype == torch.float64 else torch.float32, device=q.device)


def empty_outputs(spec: FlashSpec, x: Residuals) -> tuple[Tensor, Tensor | None]:
    """o, and lse if anybody will read it."""
    lse = empty_lse(x.q) if spec.wants_lse else None
    if lse is not None and spec.has_sinks and spec.sequences is not None:
        lse.fill_(-torch.inf)  # rows of no sequence: they have no part in the sinks' gradients
    return empty_rows(x.q, spec.H, spec.E), lse


def _plan(spec: FlashSpec, kernel: dispatch.Kernel, arguments: tuple[Any, ...]) -> Plan:
    """Both directions of `kernel`, and their prepared launches if it has any."""

    @outside_autocast
    def forward(*tensors: Any) -> tuple[Tensor, Tensor | None]:
        return kernel.forward(spec, Residuals(*tensors))

    @outside_autocast
    def backward(*tensors: Any) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        assert kernel.backward is not None, "natively differentiable backends do not come here"
        *given, o, lse, do, dlse = tensors
        return kernel.backward(spec, Residuals(*given), o, lse, *tidy_gradients(o, do, dlse))

    def prepare(*tensors: Any) -> Any:
        assert kernel.prepare is not None
        return kernel.prepare(spec, Residuals(*tensors))

    def prepare_backward(*tensors: Any) -> Any:
        assert kernel.prepare_backward is not None
        return kernel.prepare_backward(spec, Residuals(*tensors[:TENSORS]), *tensors[TENSORS:])

    return Plan(
        spec,
        Repeated(forward, kernel.prepare and prepare),
        lambda: Repeated(backward, kernel.prepare_backward and prepare_backward),
        arguments,
        spec.needs_grad,
    )


def _planned(key: tuple[Any, ...], tensors: tuple[Any, ...], arguments: tuple[Any, ...]) -> Plan:
    """The plan of a call whose arguments are right: tensors, and after them what the operators take."""
    x = Residuals(*tensors)
    check_values(x)
    which, given = plans.given(tensors)
    plan = plans.find((which, *key), given)
    if plan is None:
        spec = spec_of(x, *arguments[:-1])
        plan = plans.keep((which, *key), given, _plan(spec, dispatch.pick("flash", spec, arguments[-1]), arguments))
    return plan


def plan_of(spec: FlashSpec, x: Residuals, backend: str) -> Plan:
    """The plan of a spec that was not built from a call's arguments, as in `fulmen.parallel`."""
    which, given = plans.given(x)
    key = (which, "flash spec", spec, backend)
    return plans.find(key, given) or plans.keep(key, given, _plan(spec, dispatch.pick("flash", spec, backend), ()))


def tidy_gradients(o: Tensor, do: Tensor | None, dlse: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Incoming gradients as backends take them: autograd leaves out what was not used, and expands, as for o.sum()."""
    if do is None:
        do = torch.zeros_like(o)
    elif (do.stride(3) != 1 and do.shape[3] > 1) or do.is_neg():
        do = do.resolve_neg().contiguous()
    return do, None if dlse is None else dlse.contiguous()


# ------------------------------------------------------------------------- the torch.library boundary


_lib = torch.library.Library("fulmen", "FRAGMENT")
_TENSORS = "Tensor q, Tensor k, Tensor v, Tensor? sinks, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k"
_FACTS = "float scale, int? left, int? right, bool top_left, float? softcap, bool with_lse, bool needs_grad"
_lib.define(f"flash_forward({_TENSORS}, {_FACTS}, str backend) -> (Tensor o, Tensor lse)")
_lib.define(
    f"flash_backward({_TENSORS}, Tensor o, Tensor lse, Tensor do, Tensor? dlse, {_FACTS}, str backend)"
    " -> (Tensor dq, Tensor dk, Tensor dv, Tensor dsinks)"
)
TENSORS, FACTS = 6, 7


def _forward(*args: Any) -> tuple[Tensor, Tensor]:
    tensors = args[:TENSORS]
    arguments = args[TENSORS:]
    o, lse = _planned(("flash operator", *arguments), tensors, arguments).forward.run(*tensors)
    return o, _nothing(o) if lse is None else lse


def _nothing(x: Tensor) -> Tensor:
    """Stands for an lse or a gradient nobody asked for: an operator cannot return None."""
    return x.new_empty(0, dtype=torch.float32)


def _forward_fake(*args: Any) -> tuple[Tensor, Tensor]:
    q, _, v = args[:3]
    with_lse, needs_grad, _ = args[-3:]
    return empty_rows(q, q.shape[1], v.shape[3]), empty_lse(q) if with_lse or needs_grad else _nothing(q)


def _backward(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    tensors, lse = args[:TENSORS], args[TENSORS + 1]
    if lse.shape != tensors[0].shape[:3]:
        raise RuntimeError("flash_forward ran with needs_grad=False, so that its lse was not kept, and has no backward")
    arguments, given = args[TENSORS + 4 :], args[: TENSORS + 4]
    plan = _planned(("flash operator", *arguments), tensors, arguments)
    dq, dk, dv, dsinks = plan.gradients(*given)
    return dq, dk, dv, _nothing(lse) if dsinks is None else dsinks


def _backward_fake(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x, lse = Residuals(*args[:TENSORS]), args[TENSORS + 1]
    dq, dk, dv = (empty_rows(t, t.shape[1], t.shape[3]) for t in (x.q, x.k, x.v))
    return dq, dk, dv, _nothing(lse) if x.sinks is None else torch.empty_like(x.sinks)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.arguments = inputs[TENSORS:]
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:TENSORS], *output)


def _operator_gradients(tensors: Any, do: Tensor | None, dlse: Tensor | None, arguments: tuple[Any, ...]) -> Any:
    """dq, dk, dv, dsinks or None, by the registered operator."""
    do = torch.zeros_like(tensors[TENSORS]) if do is None else do  # only lse was used
    *grads, dsinks = torch.ops.fulmen.flash_backward(*tensors, do, dlse, *arguments)
    return *grads, None if tensors[3] is None else dsinks


def _gradients(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
    return *_operator_gradients(ctx.saved_tensors, do, dlse, ctx.arguments), *[None] * (2 + FACTS + 1)


_lib.impl("flash_forward", _forward, "CompositeExplicitAutograd")
_lib.impl("flash_backward", _backward, "CompositeExplicitAutograd")
torch.library.register_fake("fulmen::flash_forward", _forward_fake, lib=_lib)
torch.library.register_fake("fulmen::flash_backward", _backward_fake, lib=_lib)
torch.library.register_autograd("fulmen::flash_forward", _gradients, setup_context=_save, lib=_lib)
torch.library.register_autograd("fulmen::flash_backward", no_second_derivative("flash_attention"), lib=_lib)


# ------------------------------------------------------------------------------------------------ the call


class FlashFunction(torch.autograd.Function):
    """The gradient of plain eager calls, whose plan is known."""

    @staticmethod
    def forward(ctx: Any, plan: Plan, *tensors: Any) -> Any:
        o, lse = plan.forward.run(*tensors)
        ctx.plan = plan
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, o, lse)
        return (o, lse) if plan.spec.with_lse else o

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, dlse: Tensor | None = None) -> tuple[Any, ...]:
        tensors = ctx.saved_tensors
        if do is None:  # only lse was used
            do = torch.zeros_like(tensors[TENSORS])
        run = ctx.plan.backward_of((*tensors, do, dlse))
        if run is None:
            return None, *_operator_gradients(tensors, do, dlse, ctx.plan.arguments), None, None
        return None, *run(*tensors, do, dlse), None, None


_apply = plans.function_call(FlashFunction)


def _needs_grad(x: Residuals) -> bool:
    if not torch.is_grad_enabled():
        return False
    hidden = not torch.compiler.is_compiling() and torch._C._functorch.peek_interpreter_stack() is not None
    return hidden or any(t is not None and t.requires_grad for t in x[:4])  # vmap hides what is asked of the whole


def _attend(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None,
    causal: Causal, window: Window, softcap: float | None, scale: float | None, backend: str, with_lse: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    tensors: tuple[Any, ...] = (q, k, v, sinks, cu_seqlens_q, cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k)
    plain = _plain_options(causal, window, softcap, scale, backend)
    plan = None
    if plain:
        which, given = (7, (q, k, v)) if sinks is None and cu_seqlens_q is None else plans.given(tensors)
        plan = plans.find((which, "flash", causal, window, softcap, scale, backend, with_lse), given)
    if plan is None:
        left, right, top_left = check_mask(causal, window, softcap)
        tensors = x = check_inputs(*tensors)
        factor = x.q.shape[3] ** -0.5 if scale is None else check_scale(scale)
        facts = (factor, left, right, top_left, None if softcap is None else float(softcap), with_lse, _needs_grad(x))
        if dispatch.differentiable_as_it_is("flash", backend):  # plain PyTorch: no boundary to cross
            check_values(x)
            spec = spec_of(x, *facts)
            return dispatch.pick("flash", spec, backend).forward(spec, x)
        refuse_derivatives_we_lack("flash_attention", x)
        if not is_plain_eager(*x):
            return torch.ops.fulmen.flash_forward(*x, *facts, backend)
        key = (causal, window, softcap, scale, backend, with_lse) if plain else (*facts, backend)
        plan = _planned(("flash", *key), x, (*facts, backend))
    elif cu_seqlens_q is not None:
        check_values(Residuals(*tensors))
    if not plan.needs_grad:
        return plan.forward.run(*tensors)
    outputs = _apply(plan, *tensors)
    return outputs if with_lse else (outputs, None)


def _plain_options(causal: Causal, window: Window, softcap: float | None, scale: float | None, backend: str) -> bool:
    """Whether options are of the types that need no checking beyond their value: what equals them is the same."""
    return (
        type(causal) in (bool, str)
        and type(backend) is str
        and (scale is None or type(scale) is float)
        and (softcap is None or type(softcap) is float)
        and (window is None or (type(window) is tuple and all(w is None or type(w) is int for w in window)))
    )
