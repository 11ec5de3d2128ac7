"""Softmax attention: o = softmax(mask(cap(scale q k^T))) v.

This file is the whole story of a call: check, build the spec, let `dispatch.pick` choose, and in the backward do the
same again from q, k, v, o and lse = log sum exp of a row's logits. A plain eager call whose like came before finds its
spec and kernel by shapes and strides in `_plans`, or faster among the last few in `_recent`, and skips the checks: on
small shapes the host is what costs. Compilers and modes see two `torch.library` operators.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fulmen import dispatch
from fulmen.boundary import (
    autocast,
    check_offset_values,
    check_offsets,
    check_qkv,
    check_scale,
    empty_rows,
    no_second_derivative,
    outside_autocast,
    plain_memory,
    recogniser,
    refuse_derivatives_we_lack,
    require_tensors,
    undisturbed,
    unwatched,
)

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


def _check_mask(causal: Causal, window: Window, softcap: float | None) -> tuple[int | None, int | None, bool]:
    """(left, right, top_left) of the arguments `causal` and `window`."""
    if not isinstance(causal, bool | str) or causal not in (False, True, "bottom_right", "top_left"):
        raise ValueError(f"causal={causal!r}: must be False, True (the same as 'bottom_right') or 'top_left'")
    if softcap is not None and (type(softcap) not in (int, float) or not 1e-30 <= softcap <= 1e30):
        raise ValueError(f"softcap={softcap!r}: must be None or a number between 1e-30 and 1e30")
    left, right = None, None
    if window is not None:
        if not isinstance(window, tuple | list) or len(window) != 2:
            raise ValueError(f"window={window!r}: must be None or (left, right), each an int >= 0 or None")
        for side in window:
            if side is not None and (not isinstance(side, int) or isinstance(side, bool) or side < 0):
                raise ValueError(f"window={window!r}: left and right must be ints >= 0, or None for no limit")
        left, right = window
    if causal:
        right = 0
    return left, right, causal == "top_left"


def _check(
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
    if cu_seqlens_k is None:
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


def _check_values(x: Residuals) -> None:
    check_offset_values("cu_seqlens_q", x.cu_seqlens_q, x.q.shape[2])
    check_offset_values("cu_seqlens_k", x.cu_seqlens_k, x.k.shape[2])


def _spec(
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
        needs_grad and _deterministic(),
    )  # fmt: skip


def _deterministic() -> bool:
    return torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()


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
    mask = _check_mask(causal, window, softcap)
    x = _check(q, k, v, sinks, cu_seqlens_q, cu_seqlens_k)
    scale = x.q.shape[3] ** -0.5 if scale is None else check_scale(scale)
    return _spec(x, scale, *mask, softcap, with_lse, _needs_grad(x))


def plain_spec(device: torch.device) -> FlashSpec:
    """An ordinary call on `device`, for `fulmen doctor`."""
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    return FlashSpec(2, 16, 16, 8192, 8192, 128, 128, dtype, device, 128**-0.5, right=0, needs_grad=True)


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


def empty_lse(q: Tensor) -> Tensor:
    return torch.empty(q.shape[:3], dtype=torch.float64 if q.dtype == torch.float64 else torch.float32, device=q.device)


@outside_autocast
def _forward(*args: Any) -> tuple[Tensor, Tensor]:
    x, facts, backend = Residuals(*args[:TENSORS]), args[TENSORS:-1], args[-1]
    _check_values(x)
    spec = _spec(x, *facts)
    o, lse = dispatch.pick("flash", spec, backend).forward(spec, x)
    return o, lse if spec.wants_lse else _nothing(x.q)


def _nothing(q: Tensor) -> Tensor:
    """Stands for an lse nobody reads: an operator cannot return None."""
    return q.new_empty(0, dtype=torch.float32)


def _forward_fake(*args: Any) -> tuple[Tensor, Tensor]:
    q, _, v = args[:3]
    with_lse, needs_grad, _ = args[-3:]
    return empty_rows(q, q.shape[1], v.shape[3]), empty_lse(q) if with_lse or needs_grad else _nothing(q)


@outside_autocast
def _backward(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x, facts, backend = Residuals(*args[:TENSORS]), args[-FACTS - 1 : -1], args[-1]
    o, lse, do, dlse = args[TENSORS : TENSORS + 4]
    spec = _spec(x, *facts)
    kernel = dispatch.pick("flash", spec, backend)
    assert kernel.backward is not None, "natively differentiable backends do not come here"
    if lse.shape != x.q.shape[:3]:
        raise RuntimeError("flash_forward ran with needs_grad=False, so that its lse was not kept, and has no backward")
    dq, dk, dv, dsinks = kernel.backward(spec, x, o, lse, *_tidy(o, do, dlse))
    return dq, dk, dv, lse.new_empty(0) if dsinks is None else dsinks


def _tidy(o: Tensor, do: Tensor | None, dlse: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Incoming gradients as backends take them: autograd leaves out what was not used, and expands, as for o.sum()."""
    if do is None:
        do = torch.zeros_like(o)
    elif (do.stride(3) != 1 and do.shape[3] > 1) or do.is_neg():
        do = do.resolve_neg().contiguous()
    return do, None if dlse is None else dlse.contiguous()


def _backward_fake(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x, lse = Residuals(*args[:TENSORS]), args[TENSORS + 1]
    dq, dk, dv = (empty_rows(t, t.shape[1], t.shape[3]) for t in (x.q, x.k, x.v))
    return dq, dk, dv, lse.new_empty(0) if x.sinks is None else torch.empty_like(x.sinks)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.options = inputs[TENSORS:]
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:TENSORS], *output)


def _gradients(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
    *tensors, o, lse = ctx.saved_tensors
    if do is None:  # only lse was used
        do = torch.zeros_like(o)
    plain = not torch.is_grad_enabled() and unwatched(*tensors, o, lse, do, dlse)
    run = _backward if plain else torch.ops.fulmen.flash_backward
    dq, dk, dv, dsinks = run(*tensors, o, lse, do, dlse, *ctx.options)
    return dq, dk, dv, None if tensors[3] is None else dsinks, *[None] * (2 + FACTS + 1)


_lib.impl("flash_forward", _forward, "CompositeExplicitAutograd")
_lib.impl("flash_backward", _backward, "CompositeExplicitAutograd")
torch.library.register_fake("fulmen::flash_forward", _forward_fake, lib=_lib)
torch.library.register_fake("fulmen::flash_backward", _backward_fake, lib=_lib)
torch.library.register_autograd("fulmen::flash_forward", _gradients, setup_context=_save, lib=_lib)
torch.library.register_autograd("fulmen::flash_backward", no_second_derivative("flash_attention"), lib=_lib)


class FlashFunction(torch.autograd.Function):
    """The gradient registered above, for plain eager calls, past the dispatcher's Python wrappers."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        outputs = _forward(*inputs)
        _save(ctx, inputs, outputs)
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        return _gradients(ctx, *grads)


# ------------------------------------------------------------------------------------------------ the call


class Plan(NamedTuple):
    """What was found out about a plain call with these shapes, strides and options."""

    spec: FlashSpec
    kernel: dispatch.Kernel
    inputs: tuple[Any, ...]  # what the operators take after the tensors
    quick: Callable[..., Any] | None  # the kernel's shortest way
    alike: Callable[..., bool] | None = None  # says of q, k, v whether it is theirs


class PlannedFunction(torch.autograd.Function):
    """The same gradient once more, for plain calls whose plan is known: nothing is looked up again."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, plan: Plan) -> tuple[Tensor, Tensor]:
        ctx.plan = plan
        ctx.set_materialize_grads(False)
        o, lse = plan.kernel.forward(plan.spec, Residuals(q, k, v))
        ctx.save_for_backward(q, k, v, o, lse)
        return o, lse

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        q, k, v, o, lse = ctx.saved_tensors
        spec, kernel, inputs = ctx.plan[:3]
        if torch.is_grad_enabled() or not unwatched(q, k, v, o, lse, do, dlse) or torch._C._is_any_autocast_enabled():
            do = torch.zeros_like(o) if do is None else do
            return *torch.ops.fulmen.flash_backward(q, k, v, None, None, None, o, lse, do, dlse, *inputs)[:3], None
        return *kernel.backward(spec, Residuals(q, k, v), o, lse, *_tidy(o, do, dlse))[:3], None


_plans: dict[Any, Plan] = {}
_recent: dict[Any, tuple[tuple[Callable[..., bool], Callable[..., Any]], ...]] = {}  # by options: alike, quick
MAX_PLANS = 4096
MAX_RECENT = 8


def _remember(key: Any, options: tuple[Any, ...], plan: Plan, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Keeps a plan, and puts it first among those of its options, if its like can be told at once."""
    alike, quick = plan.alike, plan.quick
    if alike is None:
        if len(_plans) >= MAX_PLANS and key not in _plans:
            forget()
        told_apart = type(q) is type(k) is type(v) is Tensor and not (q is k or q is v or k is v)
        if quick is not None and told_apart and not (q.requires_grad or k.requires_grad or v.requires_grad):
            alike = recogniser(q, k, v)
        _plans[key] = plan._replace(alike=alike)
    if alike is not None and quick is not None:
        others = (pair for pair in _recent.get(options, ()) if pair[0] is not alike)
        _recent[options] = ((alike, quick), *others)[:MAX_RECENT]


def forget() -> None:
    """All that was found out about earlier calls."""
    _plans.clear()
    _recent.clear()


def _needs_grad(x: Residuals) -> bool:
    if not torch.is_grad_enabled():
        return False
    hidden = not torch.compiler.is_compiling() and torch._C._functorch.peek_interpreter_stack() is not None
    return hidden or any(t is not None and t.requires_grad for t in x[:4])  # vmap hides what is asked of the whole


def _attend(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None,
    causal: Causal, window: Window, softcap: float | None, scale: float | None, backend: str, with_lse: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    key, options = None, (causal, window, softcap, scale, backend, with_lse)
    if (
        sinks is None
        and cu_seqlens_q is None
        and cu_seqlens_k is None
        and undisturbed()
        and _usual(causal, window, softcap, scale, backend)
    ):
        recent = _recent.get(options, ())
        told = recent and type(q) is type(k) is type(v) is Tensor
        if told and not (q.is_nested or k.is_nested or v.is_nested):  # about which guards must not be asked
            for alike, quick in recent:
                if alike(q, k, v) and (done := quick(q, k, v)) is not None:
                    return done
        if _plain(q, k, v) and not torch._C._is_any_autocast_enabled():  # which guards tell, as far as it matters
            grad = (q.requires_grad or k.requires_grad or v.requires_grad) and torch.is_grad_enabled()
            key = (
                q.shape, q.stride(), q.dtype, q.device, k.shape, k.stride(), k.dtype, k.device, v.shape, v.stride(),
                v.dtype, v.device, options, torch.is_inference_mode_enabled(), q.is_inference(), k.is_inference(),
                v.is_inference(), grad and (_deterministic(), True),
            )  # fmt: skip
            found = _plans.get(key)
            if found is not None:
                if grad:
                    return PlannedFunction.apply(q, k, v, found)
                _remember(key, options, found, q, k, v)
                done = None if found.quick is None else found.quick(q, k, v)
                return found.kernel.forward(found.spec, Residuals(q, k, v)) if done is None else done
    left, right, top_left = _check_mask(causal, window, softcap)
    x = _check(q, k, v, sinks, cu_seqlens_q, cu_seqlens_k)
    scale = x.q.shape[3] ** -0.5 if scale is None else check_scale(scale)
    facts = (scale, left, right, top_left, None if softcap is None else float(softcap), with_lse, _needs_grad(x))
    if dispatch.differentiable_as_it_is("flash", backend):  # plain PyTorch: no boundary to cross
        _check_values(x)
        spec = _spec(x, *facts)
        return dispatch.pick("flash", spec, backend).forward(spec, x)
    refuse_derivatives_we_lack("flash_attention", x)
    inputs = (*x, *facts, backend)
    if not unwatched(*x):
        return torch.ops.fulmen.flash_forward(*inputs)
    outputs = FlashFunction.apply(*inputs) if facts[-1] else _forward(*inputs)
    if key is not None:
        spec = _spec(x, *facts)
        kernel = dispatch.pick("flash", spec, backend)
        plan = Plan(spec, kernel, (*facts, backend), kernel.prepare(spec, x) if kernel.prepare else None)
        _remember(key, options, plan, q, k, v)
    return outputs


def _usual(causal: Causal, window: Window, softcap: float | None, scale: float | None, backend: str) -> bool:
    """Whether options are of the types that need no checking beyond their value: what equals them is the same."""
    return (
        type(causal) in (bool, str)
        and type(backend) is str
        and (scale is None or type(scale) is float)
        and (softcap is None or type(softcap) is float)
        and (window is None or (type(window) is tuple and all(w is None or type(w) is int for w in window)))
    )


def _plain(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether these are three true tensors and nobody looks on."""
    return (
        unwatched(q, k, v)
        and q is not None
        and k is not None
        and v is not None
        and not (q.is_neg() or k.is_neg() or v.is_neg())
    )
