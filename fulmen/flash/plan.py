"""The plans of softmax attention: both directions of the chosen kernel, found again by `fulmen.plans`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fulmen import dispatch, plans
from fulmen.boundary import outside_autocast
from fulmen.flash.spec import Causal, FlashSpec, Residuals, Window, check_values, spec_of
from fulmen.plans import Plan, Repeated

TENSORS = 6  # of a call without a cache, the first of `Residuals`


def plan_for(spec: FlashSpec, kernel: dispatch.Kernel, arguments: tuple[Any, ...]) -> Plan:
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


def tidy_gradients(o: Tensor, do: Tensor | None, dlse: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Incoming gradients as backends take them: autograd leaves out what was not used, and expands, as for o.sum()."""
    if do is None:
        do = torch.zeros_like(o)
    elif (do.stride(3) != 1 and do.shape[3] > 1) or do.is_neg():
        do = do.resolve_neg().contiguous()
    return do, None if dlse is None else dlse.resolve_neg().contiguous()


def plain_options(causal: Causal, window: Window, softcap: float | None, scale: float | None, backend: str) -> bool:
    """Whether every option has an exact built-in type, so that it can be part of a plan's key."""
    return (
        type(causal) in (bool, str)
        and type(backend) is str
        and (scale is None or type(scale) is float)
        and (softcap is None or type(softcap) is float)
        and (window is None or (type(window) is tuple and all(w is None or type(w) is int for w in window)))
    )
