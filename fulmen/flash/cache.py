"""Softmax attention over a cache: `flash_attention` with kv_lengths, for decoding. It has no gradient.

The path of a call is that of op.py, with one `torch.library` operator.
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
    no_gradient,
    refuse_unsupported_derivatives,
    register_operator,
)
from fulmen.flash.plan import has_exact_types, plan_for
from fulmen.flash.spec import (
    Causal,
    Residuals,
    Window,
    check_cache,
    check_mask,
    check_max_kv_length,
    check_values,
    empty_lse,
    spec_of,
)
from fulmen.plans import Plan, fake_nothing, nothing


def _planned(key: tuple[Any, ...], x: Residuals, facts: tuple[Any, ...], backend: str) -> Plan:
    check_values(x)
    which, given = plans.given(x)
    plan = plans.find((which, *key), given)
    if plan is None:
        spec = spec_of(x, *facts)
        plan = plans.keep((which, *key), given, plan_for(spec, dispatch.pick("flash", spec, backend), ()))
    return plan


def _forward(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, cu_seqlens_q: Tensor | None, kv_lengths: Tensor,
    page_table: Tensor | None, scale: float, left: int | None, right: int | None, softcap: float | None,
    with_lse: bool, most: int | None, backend: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    x = Residuals(q, k, v, sinks, cu_seqlens_q, None, kv_lengths, page_table)
    facts = (scale, left, right, False, softcap, with_lse, False, most)
    plan = _planned(("flash cache operator", *facts, backend), x, facts, backend)
    o, lse = plan.forward.run(*x)
    return o, lse if with_lse else nothing(o.device)()


def _forward_fake(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    return empty_rows(q, q.shape[1], v.shape[3]), empty_lse(q) if others[-3] else fake_nothing(q)


_lib = torch.library.Library("fulmen", "FRAGMENT")
register_operator(
    _lib,
    "flash_cache_forward(Tensor q, Tensor k, Tensor v, Tensor? sinks, Tensor? cu_seqlens_q, Tensor kv_lengths,"
    " Tensor? page_table, float scale, int? left, int? right, float? softcap, bool with_lse, int? max_kv_length,"
    " str backend) -> (Tensor o, Tensor lse)",
    _forward,
    _forward_fake,
    no_gradient("flash_attention over a cache"),
)


def attend_cache(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None,
    kv_lengths: Tensor | None, page_table: Tensor | None, causal: Causal, window: Window, softcap: float | None,
    scale: float | None, most: int | None, backend: str, with_lse: bool,
) -> tuple[Tensor, Any]:  # fmt: skip
    """o, and lse or None; arguments as of `flash_attention`, `most` is max_kv_length."""
    tensors: Any = (q, k, v, sinks, cu_seqlens_q, cu_seqlens_k, kv_lengths, page_table)
    key = ("flash cache", causal, window, softcap, scale, most, backend, with_lse)
    plain, plan = has_exact_types(causal, window, softcap, scale, backend) and (most is None or type(most) is int), None
    if plain:
        which, given = plans.given(tensors)
        plan = plans.find((which, *key), given)
    if plan is None:
        left, right, top_left = check_mask(causal, window, softcap)
        tensors = x = check_cache(top_left, *tensors)
        factor = x.q.shape[3] ** -0.5 if scale is None else check_scale(scale)
        most, cap = check_max_kv_length(most), None if softcap is None else float(softcap)
        facts = (factor, left, right, False, cap, with_lse, False, most)
        refuse_unsupported_derivatives("flash_attention", x)
        if not is_plain_eager(*x):
            options = (factor, left, right, cap, with_lse, most, backend)
            return torch.ops.fulmen.flash_cache_forward(*x[:5], *x[6:], *options)
        if not isinstance(backend, str):
            raise dispatch.unknown("flash", backend)
        plan = _planned(key if plain else ("flash cache facts", *facts, backend), x, facts, backend)
    elif cu_seqlens_q is not None:
        check_values(Residuals(*tensors))
    return plan.forward.run(*tensors)
