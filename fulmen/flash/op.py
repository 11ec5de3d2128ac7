"""Softmax attention: o = softmax(mask(cap(scale q k^T))) v.

The path of a call: look for the plan of an equal call (`fulmen.plans`); without one check arguments, build the spec and
let `dispatch.pick` choose a kernel. The backward starts from q, k, v, o and lse, the log of the softmax's denominator.
Compilers and modes see two `torch.library` operators. Calls with kv_lengths are in cache.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fulmen import dispatch, plans
from fulmen.boundary import (
    check_scale,
    empty_rows,
    is_plain_eager,
    needs_gradient,
    no_second_derivative,
    refuse_unsupported_derivatives,
    register_operator,
)
from fulmen.flash.cache import attend_cache
from fulmen.flash.plan import TENSORS, given_tensors, has_exact_types, planned
from fulmen.flash.spec import (
    Causal,
    Residuals,
    Window,
    check_inputs,
    check_mask,
    check_values,
    empty_lse,
    spec_of,
)
from fulmen.plans import Plan, fake_nothing, nothing


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
    kv_lengths: Tensor | None = None,
    max_kv_length: int | None = None,
    page_table: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Softmax attention, exact: o (B, H, N_Q, E).

    q             (B, H, N_Q, D); any strides whose last dimension is contiguous, so a (B, N, H, D) tensor may be
                  passed as `x.transpose(1, 2)` at no cost. bf16 or fp16; fp32 and fp64 on some backends.
    k, v          (B, H_KV, N_KV, D) and (B, H_KV, N_KV, E); H_KV divides H, query head h reads head h // (H / H_KV).
    causal        False; True or "bottom_right": query i sees keys up to i + N_KV - N_Q, as in flash-attn, so the last
                  query sees everything; "top_left": up to i, as torch SDPA's is_causal, not with kv_lengths. The same
                  where N_Q = N_KV.
    window        (left, right): keys from `left` before the query's position to `right` after it; None: no limit.
                  Positions are aligned as `causal` says (bottom-right when not causal), and causal allows none after.
    softcap       logits become softcap * tanh(logits / softcap), before masking.
    sinks         (H,), fp32 or q's dtype: a logit per head that takes part in the softmax and has no value, so that
                  a head can attend to nothing. Differentiable.
    scale         multiplies q k^T; 1 / sqrt(D) unless given.
    cu_seqlens_*  int32 (sequences + 1,) on the inputs' device, rising from 0 to N_Q (N_KV): B is 1 and N holds packed
                  sequences, which do not see each other. cu_seqlens_k is cu_seqlens_q unless given. Values are
                  checked on the CPU only; on a GPU rows outside every sequence are undefined.
    kv_lengths    int32 (B,) on the inputs' device, for decoding: k and v are a cache, of which row b uses its first
                  kv_lengths[b] keys, and queries are aligned to that end. With cu_seqlens_q there is a length and a
                  row of k and v for each sequence. Lengths stay on the device, are clamped to what there is, and
                  what lies beyond them may be NaN. No gradients.
    max_kv_length an upper bound of kv_lengths, by which keys are split over blocks; lengths beyond it count as it.
                  The cache's capacity unless given.
    page_table    int32 (B, pages of a row) with k and v (pages, H_KV, page, D): row b has its keys in the pages
                  page_table[b], which rows may share. A page is 16 to 256 keys, a multiple of 16. Entries are clamped.
    backend       "auto" takes the fastest that supports the call; a name works or raises, it never falls back. Under
                  torch.use_deterministic_algorithms "auto" takes one whose gradients are the same every time.

    A row that sees no key is zero, and so are its gradients.
    """
    if kv_lengths is None and max_kv_length is None and page_table is None:
        o, _ = _attend(q, k, v, sinks, cu_seqlens_q, cu_seqlens_k, causal, window, softcap, scale, backend, False)
    else:
        o, _ = attend_cache(
            q, k, v, sinks, cu_seqlens_q, cu_seqlens_k, kv_lengths, page_table, causal, window, softcap, scale,
            max_kv_length, backend, False,
        )  # fmt: skip
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
    kv_lengths: Tensor | None = None,
    max_kv_length: int | None = None,
    page_table: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """As `flash_attention`, and lse (B, H, N_Q), fp32: the natural logarithm of the softmax's denominator.

    It counts the sink, is differentiable, and is -inf for a row that sees no key and no sink.
    """
    if kv_lengths is None and max_kv_length is None and page_table is None:
        return _attend(q, k, v, sinks, cu_seqlens_q, cu_seqlens_k, causal, window, softcap, scale, backend, True)
    return attend_cache(
        q, k, v, sinks, cu_seqlens_q, cu_seqlens_k, kv_lengths, page_table, causal, window, softcap, scale,
        max_kv_length, backend, True,
    )  # fmt: skip


# ------------------------------------------------------------------------- the torch.library boundary


_lib = torch.library.Library("fulmen", "FRAGMENT")
_TENSORS = "Tensor q, Tensor k, Tensor v, Tensor? sinks, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k"
_FACTS = "float scale, int? left, int? right, bool top_left, float? softcap, bool with_lse, bool needs_grad"
FACTS = _FACTS.count(",") + 1
ALONE, PLAIN = 0b111, 0b0111000111  # as `plans.given` counts: q, k, v; of a backward's tensors with o, lse and do


def _forward(*args: Any) -> tuple[Tensor, Tensor]:
    tensors, arguments, plan = args[:TENSORS], args[TENSORS:], None
    if args[3] is None and args[4] is None and args[5] is None:
        plan = plans.find((ALONE, "flash operator", *arguments), args[:3])
    if plan is None:
        plan = planned(("flash operator", *arguments), Residuals(*tensors), arguments)
    o, lse = plan.forward.run(*tensors)
    return o, lse if plan.spec.wants_lse else nothing(o.device)()


def _forward_fake(*args: Any) -> tuple[Tensor, Tensor]:
    q, _, v = args[:3]
    with_lse, needs_grad, _ = args[-3:]
    return empty_rows(q, q.shape[1], v.shape[3]), empty_lse(q) if with_lse or needs_grad else fake_nothing(q)


def _backward(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    tensors, lse = args[:TENSORS], args[TENSORS + 1]
    if lse.dim() != 3:  # `nothing`
        raise RuntimeError("flash_forward ran with needs_grad=False, so that its lse was not kept, and has no backward")
    arguments = args[TENSORS + 4 :]
    alone = args[3] is None and args[4] is None and args[5] is None and args[TENSORS + 3] is None
    which, given = (PLAIN, (*args[:3], *args[6:9])) if alone else given_tensors(args[: TENSORS + 4])
    key = (which, "flash backward operator", *arguments)
    plan = plans.find(key, given)
    if plan is None:
        ahead = planned(("flash operator", *arguments), Residuals(*tensors), arguments)
        plan = plans.keep(key, given, ahead.backward_alone())
    dq, dk, dv, dsinks = plan.forward.run(*args[: TENSORS + 4])
    return dq, dk, dv, nothing(lse.device)() if dsinks is None else dsinks


def _backward_fake(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x, lse = Residuals(*args[:TENSORS]), args[TENSORS + 1]
    dq, dk, dv = (empty_rows(t, t.shape[1], t.shape[3]) for t in (x.q, x.k, x.v))
    return dq, dk, dv, fake_nothing(lse) if x.sinks is None else torch.empty_like(x.sinks)


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


register_operator(
    _lib,
    f"flash_forward({_TENSORS}, {_FACTS}, str backend) -> (Tensor o, Tensor lse)",
    _forward,
    _forward_fake,
    _gradients,
    _save,
)
register_operator(
    _lib,
    f"flash_backward({_TENSORS}, Tensor o, Tensor lse, Tensor do, Tensor? dlse, {_FACTS}, str backend)"
    " -> (Tensor dq, Tensor dk, Tensor dv, Tensor dsinks)",
    _backward,
    _backward_fake,
    no_second_derivative("flash_attention"),
)


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


class PlainFunction(torch.autograd.Function):
    """The same for q, k and v alone and without lse: autograd pays for every argument, None included."""

    @staticmethod
    def forward(ctx: Any, plan: Plan, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        o, lse = plan.forward.run(q, k, v, None, None, None)
        ctx.plan = plan
        ctx.save_for_backward(q, k, v, o, lse)
        return o

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> tuple[Any, ...]:
        plan: Plan = ctx.plan
        q, k, v, o, lse = there = ctx.saved_tensors
        tensors = (q, k, v, None, None, None, o, lse, do, None)
        run = plan.backward_of(tensors, (*there, do), PLAIN)
        if run is None:
            dq, dk, dv, _ = _operator_gradients(tensors[:-2], do, None, plan.arguments)
        else:
            dq, dk, dv, _ = run(*tensors)
        return None, dq, dk, dv


_apply = plans.function_call(FlashFunction)
_apply_plain = plans.function_call(PlainFunction)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None,
    causal: Causal, window: Window, softcap: float | None, scale: float | None, backend: str, with_lse: bool,
) -> tuple[Tensor, Any]:  # fmt: skip
    tensors: tuple[Any, ...] = (q, k, v, sinks, cu_seqlens_q, cu_seqlens_k)
    alone = sinks is None and cu_seqlens_q is None and cu_seqlens_k is None
    plain, plan = has_exact_types(causal, window, softcap, scale, backend), None
    if plain:
        which, given = (ALONE, (q, k, v)) if alone else given_tensors(tensors)
        plan = plans.find((which, "flash", causal, window, softcap, scale, backend, with_lse), given)
        if plan is not None and cu_seqlens_k is None and cu_seqlens_q is not None and q.shape[2] != k.shape[2]:
            plan = None  # which is wrong, and checked below
    if plan is None:
        left, right, top_left = check_mask(causal, window, softcap)
        x = check_inputs(*tensors)
        tensors = x[:TENSORS]
        factor = x.q.shape[3] ** -0.5 if scale is None else check_scale(scale)
        cap = None if softcap is None else float(softcap)
        facts = (factor, left, right, top_left, cap, with_lse, needs_gradient(x[:4]))
        if dispatch.differentiable_as_it_is("flash", backend):  # plain PyTorch: no boundary to cross
            check_values(x)
            spec = spec_of(x, *facts)
            return dispatch.pick("flash", spec, backend).forward(spec, x)
        refuse_unsupported_derivatives("flash_attention", x)
        if not is_plain_eager(*x):
            return torch.ops.fulmen.flash_forward(*tensors, *facts, backend)
        key = (causal, window, softcap, scale, backend, with_lse) if plain else (*facts, backend)
        plan = planned(("flash", *key), x, (*facts, backend))
    elif cu_seqlens_q is not None:
        cu_seqlens_k = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
        tensors = (q, k, v, sinks, cu_seqlens_q, cu_seqlens_k)
        check_values(Residuals(*tensors))
    if not plan.needs_grad:
        return plan.forward.run(*tensors)
    if alone and not with_lse:
        return _apply_plain(plan, *tensors[:3]), None
    outputs = _apply(plan, *tensors)
    return outputs if with_lse else (outputs, None)
