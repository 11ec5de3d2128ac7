"""The plans of lightning attention: both directions of the chosen kernel, found again by `fulmen.plans`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fulmen import dispatch, plans
from fulmen.boundary import outside_autocast, readable
from fulmen.lightning.spec import LightningSpec, Residuals
from fulmen.plans import Plan, Repeated

Shape = tuple[int, ...]
RESIDUALS = len(Residuals._fields)


def plan_for(
    spec: LightningSpec,
    kernel: dispatch.Kernel,
    arguments: tuple[Any, ...],
    needs_grad: bool,
    saved: Shape | None = None,
    copies: bool = False,
) -> Plan:
    """Both directions of `kernel`, and their prepared launches if it has any.

    The backward takes residuals, do, dstate and, where the gradient of a decay for each token is wanted, the tensor to
    write it to.

    saved   the shape of what the forward saves for the backward
    copies  whether q, k and v are copied, so that their rows begin at multiples of 16 bytes
    """

    def residuals(tensors: Sequence[Any]) -> Residuals:
        x = Residuals(*tensors)
        return x._replace(q=readable(x.q), k=readable(x.k), v=readable(x.v)) if copies else x

    def new_residuals(tensors: tuple[Any, ...]) -> Residuals:
        x = residuals(tensors)
        return x if saved is None else x._replace(saved=x.q.new_empty(saved))

    @outside_autocast
    def forward(*tensors: Any) -> tuple[Tensor, Tensor | None, Tensor | None]:
        x = new_residuals(tensors)
        return *kernel.forward(spec, x), x.saved

    @outside_autocast
    def backward(*tensors: Any) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        assert kernel.backward is not None, "natively differentiable backends do not come here"
        do, dstate, *ddecay = tensors[RESIDUALS:]
        do = do.resolve_neg()
        if spec.E > 1 and do.stride(3) != 1:  # autograd hands over expanded gradients, as of o.sum()
            do = do.contiguous()
        dstate = None if dstate is None else dstate.resolve_neg().contiguous()
        return kernel.backward(spec, residuals(tensors[:RESIDUALS]), do, dstate, *ddecay)

    def prepare(*tensors: Any) -> Any:
        assert kernel.prepare is not None
        return kernel.prepare(spec, new_residuals(tensors))

    def prepare_backward(*tensors: Any) -> Any:
        assert kernel.prepare_backward is not None
        return kernel.prepare_backward(spec, Residuals(*tensors[:RESIDUALS]), *tensors[RESIDUALS:])

    ahead, back = (None, None) if copies else (kernel.prepare, kernel.prepare_backward)
    return Plan(
        spec,
        Repeated(forward, ahead and prepare),
        lambda: Repeated(backward, back and prepare_backward),
        arguments,
        needs_grad,
    )


def plan_of(spec: LightningSpec, x: Residuals, backend: str) -> Plan:
    """The plan of a spec that was not built from a call's arguments, as in `fulmen.parallel`; it saves nothing."""
    which, given = plans.given(x)
    key = (which, "lightning spec", spec, backend)
    kernel = dispatch.pick("lightning", spec, backend)
    return plans.find(key, given) or plans.keep(key, given, plan_for(spec, kernel, (), False))
