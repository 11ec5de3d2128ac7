"""The plans of lightning attention: both directions of the chosen kernel, found again by `fulmen.plans`."""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor

from fulmen import dispatch, plans
from fulmen.boundary import outside_autocast, readable, tidy_rows
from fulmen.lightning.spec import LightningSpec, Residuals
from fulmen.plans import Plan, Repeated

Shape = tuple[int, ...]


def count_inputs(spec: LightningSpec) -> int:
    """How many tensors a forward takes: those of step sizes only where there are some."""
    return len(Residuals._fields) if spec.steps else Residuals._fields.index("saved")


def count_residuals(spec: LightningSpec) -> int:
    """How many tensors come before the gradients in a backward: those of step sizes only where there are some."""
    return len(Residuals._fields) if spec.steps else Residuals._fields.index("saved") + 1


def plan_for(
    spec: LightningSpec,
    kernel: dispatch.Kernel,
    arguments: tuple[Any, ...],
    needs_grad: bool,
    saved: Shape | None = None,
    copies: bool = False,
) -> Plan:
    """Both directions of `kernel`, and their prepared launches if it has any.

    The backward takes residuals, do, dstate and the tensors to write to, or None: ddecay, if the gradient of a decay
    for each token is wanted; with step sizes (2, B, H, N), x . d(dt x) and x . do; then buffers for dq, dk
    and dv. A kernel that `takes_silu` may also be given, behind them, what q, k and v are silu of.

    saved   the shape of what the forward saves for the backward
    copies  whether q, k and v are copied, so that their rows begin at multiples of 16 bytes
    """

    def new_residuals(*tensors: Any) -> Residuals:
        x = Residuals(*tensors)
        if copies:
            x = x._replace(q=readable(x.q), k=readable(x.k), v=readable(x.v))
        return x if saved is None else x._replace(saved=x.q.new_empty(saved))

    @outside_autocast
    def forward(*tensors: Any) -> tuple[Tensor, Tensor | None, Tensor | None]:
        x = new_residuals(*tensors)
        return *kernel.forward(spec, x), x.saved

    def backward() -> Repeated:
        return plans.backward_of(kernel, spec, Residuals, count_residuals(spec), functools.partial(tidy, spec))

    prepare = None if copies else plans.forward_of(kernel, spec, new_residuals).prepare
    return Plan(spec, Repeated(forward, prepare), backward, arguments, needs_grad)


def tidy(spec: LightningSpec, *tensors: Any) -> tuple[Any, ...]:
    """The tensors of a backward as kernels take them: hooks of saved tensors may hand back other strides, and autograd
    expands gradients, as for o.sum()."""
    count = count_residuals(spec)
    (q, k, v, decay, *others), (do, dstate, *into) = tensors[:count], tensors[count:]
    q, k, v, do = map(tidy_rows, (q, k, v, do))
    if spec.aligned:
        q, k, v = map(readable, (q, k, v))
    strided = spec.per_token and not spec.steps  # step sizes have their decay's strides
    decay = decay.resolve_neg() if strided else whole(decay)
    return q, k, v, decay, *map(whole, others), do, whole(dstate), *into


def whole(x: Tensor | None) -> Tensor | None:
    return x if x is None else x.resolve_neg().contiguous()


def plan_of(spec: LightningSpec, x: Residuals, backend: str) -> Plan:
    """The plan of a spec that was not built from a call's arguments, as in `fulmen.parallel`; it saves nothing."""
    which, given = plans.given(x)
    key = (which, "lightning spec", spec, backend)
    kernel = dispatch.pick("lightning", spec, backend)
    return plans.find(key, given) or plans.keep(key, given, plan_for(spec, kernel, (), False))
