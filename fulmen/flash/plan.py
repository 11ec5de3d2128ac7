"""The plans of softmax attention: both directions of the chosen kernel, found again by `fulmen.plans`."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fulmen import dispatch, plans
from fulmen.boundary import tidy_rows
from fulmen.flash.spec import Causal, FlashSpec, Residuals, Window, check_values, spec_of
from fulmen.plans import Plan

TENSORS = 6  # of a call without a cache, the first of `Residuals`


def plan_for(spec: FlashSpec, kernel: dispatch.Kernel, arguments: tuple[Any, ...]) -> Plan:
    """Both directions of `kernel`, and their prepared launches if it has any."""
    forward = plans.forward_of(kernel, spec, Residuals)
    return Plan(
        spec, forward, lambda: plans.backward_of(kernel, spec, Residuals, TENSORS, tidy), arguments, spec.needs_grad
    )


def given_tensors(tensors: tuple[Any, ...]) -> tuple[int, tuple[Tensor, ...]]:
    """Which tensors are given, and these, for `plans.find`; cu_seqlens that serve q and k count once."""
    return plans.given(tensors if tensors[5] is not tensors[4] else (*tensors[:5], None, *tensors[6:]))


def planned(key: tuple[Any, ...], x: Residuals, arguments: tuple[Any, ...]) -> Plan:
    """The plan of a call whose arguments are right: tensors, and after them what the operators take."""
    check_values(x)
    which, given = given_tensors(x)
    plan = plans.find((which, *key), given)
    if plan is None:
        spec = spec_of(x, *arguments[:-1])
        plan = plans.keep((which, *key), given, plan_for(spec, dispatch.pick("flash", spec, arguments[-1]), arguments))
    return plan


def plan_of(spec: FlashSpec, x: Residuals, backend: str) -> Plan:
    """The plan of a spec that was not built from a call's arguments, as in `fulmen.parallel`."""
    which, given = given_tensors(x)
    key = (which, "flash spec", spec, backend)
    return plans.find(key, given) or plans.keep(key, given, plan_for(spec, dispatch.pick("flash", spec, backend), ()))


def tidy(
    q: Tensor, k: Tensor, v: Tensor, sinks: Any, cu_q: Any, cu_k: Any, o: Tensor, lse: Tensor, do: Tensor, dlse: Any
) -> tuple[Any, ...]:
    """The tensors of a backward as backends take them: hooks of saved tensors may hand back other strides, and autograd
    expands gradients, as for o.sum()."""
    q, k, v, o, do = map(tidy_rows, (q, k, v, o, do))
    sinks, cu_q, cu_k, dlse = (x if x is None else x.resolve_neg().contiguous() for x in (sinks, cu_q, cu_k, dlse))
    return q, k, v, sinks, cu_q, cu_k, o, lse.resolve_neg().contiguous(), do, dlse


def has_exact_types(causal: Causal, window: Window, softcap: float | None, scale: float | None, backend: str) -> bool:
    """Whether every option has an exact built-in type, so that it can be part of a plan's key."""
    return (
        type(causal) in (bool, str)
        and type(backend) is str
        and (scale is None or type(scale) is float)
        and (softcap is None or type(softcap) is float)
        and (window is None or (type(window) is tuple and all(w is None or type(w) is int for w in window)))
    )
