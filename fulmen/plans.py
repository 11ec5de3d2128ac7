"""The fast path: repeated eager calls of an op, forward and backward, find a plan instead of being checked again.

A plan is what an op learns about a call before a kernel runs: the spec, the kernel and its prepared launches. A call is
looked up twice:

    _recent   the last few plans with the same options, each behind a guard: one C++ call that compares types, dtypes,
              devices, shapes, strides and requires_grad of all tensors. torch.compile's guards are used.
    _plans    all plans, in a dictionary keyed by the same facts. It also serves calls that guards do not: under
              autocast, with one tensor given twice, or with one that does not begin at a multiple of 16 bytes.

The key holds everything an op's checks read, so a hit skips them. Only plain eager calls have plans: no compiler, mode,
transform, tensor subclass or nested tensor. `clear()` forgets every plan.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from fulmen.boundary import is_plain_eager, outside_autocast
from fulmen.dispatch import Kernel

Guard = Callable[..., bool]

MAX_PLANS = 4096
MAX_RECENT = 8
GUARDED = (Tensor, torch.nn.Parameter)  # exact types

_compiling = torch.compiler.is_compiling
_dispatch_modes = torch._C._len_torch_dispatch_stack
_grad_enabled = torch.is_grad_enabled
_deterministic = torch.are_deterministic_algorithms_enabled
_plans: dict[Hashable, Plan] = {}
_recent: dict[Hashable, tuple[tuple[Guard, Plan], ...]] = {}


class Repeated:
    """One direction of a call: `run` is `general` at the first call; the second prepares what all others take.

    prepare  (*tensors) -> a function of such tensors that does the same at less cost, or None
    """

    __slots__ = ("general", "prepare", "run")

    def __init__(self, general: Callable[..., Any], prepare: Callable[..., Any] | None) -> None:
        self.general, self.prepare = general, prepare
        self.run: Callable[..., Any] = general if prepare is None else self._first

    def _first(self, *tensors: Tensor | None) -> Any:
        self.run = self._second
        return self.general(*tensors)

    def _second(self, *tensors: Tensor | None) -> Any:
        assert self.prepare is not None
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return self.general(*tensors)  # to prepare may launch the kernel, which a graph would repeat
        self.run = self.prepare(*tensors) or self.general
        return self.run(*tensors)


def forward_of(kernel: Kernel, spec: Any, residuals: Callable[..., Any]) -> Repeated:
    """A kernel's forward, of `residuals(*tensors)`."""

    @outside_autocast
    def forward(*tensors: Any) -> Any:
        return kernel.forward(spec, residuals(*tensors))

    def prepare(*tensors: Any) -> Any:
        assert kernel.prepare is not None
        return kernel.prepare(spec, residuals(*tensors))

    return Repeated(forward, kernel.prepare and prepare)


def backward_of(
    kernel: Kernel, spec: Any, residuals: Callable[..., Any], count: int, tidy: Callable[..., tuple[Any, ...]]
) -> Repeated:
    """A kernel's backward, of `residuals` of the first `count` tensors and of the others, once they are tidy."""

    @outside_autocast
    def backward(*tensors: Any) -> Any:
        assert kernel.backward is not None, "natively differentiable backends do not come here"
        tensors = tidy(*tensors)
        return kernel.backward(spec, residuals(*tensors[:count]), *tensors[count:])

    def prepare(*tensors: Any) -> Any:
        assert kernel.prepare_backward is not None
        if any(a is not b for a, b in zip(tensors, tidy(*tensors), strict=True)):
            return None
        return kernel.prepare_backward(spec, residuals(*tensors[:count]), *tensors[count:])

    return Repeated(backward, kernel.prepare_backward and prepare)


class Plan:
    """What is known about calls with the same shapes, strides and options.

    forward     from the op's tensors to its outputs
    backward    builds a `Repeated` for the backward, from saved tensors and gradients; `backward_of` keeps them
    arguments   what the registered operators take after the tensors
    needs_grad  whether a backward will follow
    """

    __slots__ = ("arguments", "backward", "backwards", "forward", "needs_grad", "spec")

    def __init__(
        self,
        spec: Any,
        forward: Repeated,
        backward: Callable[[], Repeated],
        arguments: tuple[Any, ...],
        needs_grad: bool,
    ) -> None:
        self.spec, self.forward, self.backward = spec, forward, backward
        self.arguments, self.needs_grad = arguments, needs_grad
        self.backwards: tuple[tuple[Hashable, Guard, Repeated], ...] = ()  # which tensors are given, and which are one

    def backward_alone(self) -> Plan:
        """The plan of calls of the backward alone: its tensors are the saved ones and the gradients."""
        return Plan(self.spec, self.backward(), self.backward, self.arguments, False)

    def gradients(self, *tensors: Tensor | None) -> Any:
        """Runs the backward on saved tensors and gradients of any kind."""
        return (self.backward_of(tensors) or self.backward().general)(*tensors)

    def backward_of(
        self, tensors: tuple[Tensor | None, ...], there: tuple[Tensor, ...] | None = None, which: Hashable = None
    ) -> Callable[..., Any] | None:
        """The backward of these saved tensors and gradients; None unless this is a plain eager call.

        there, which  what `given` returns for them, where the caller knows it
        """
        if _grad_enabled() or _compiling() or _dispatch_modes() or forward_ad._current_level >= 0:
            return None
        if there is None:
            which, there = given(tensors)
        known = self._known(which, there)
        if known is not None:
            return known
        if len(set(map(id, there))) < len(there):  # guards do not support a tensor given twice, as k and v
            first = tuple(next(i for i, u in enumerate(tensors) if u is t) for t in tensors)
            which, there = (which, first), tuple({id(t): t for t in there}.values())
            known = self._known(which, there)
        return known or self._new(which, there)

    def _known(self, which: Hashable, there: tuple[Tensor, ...]) -> Callable[..., Any] | None:
        for of, guard, known in self.backwards:
            if of == which and guard(*there):
                return known.run if _aligned(there) else known.general
        return None

    def _new(self, which: Hashable, there: tuple[Tensor, ...]) -> Callable[..., Any] | None:
        if not is_plain_eager(*there):
            return None
        new = self.backward()
        if any(t.is_neg() for t in there):  # prepared launches read memory, not such bits
            return new.general
        if (made := _guard(there)) is not None:
            self.backwards = ((which, made, new), *self.backwards)[:MAX_RECENT]
        return new.run if _aligned(there) else new.general


def given(tensors: tuple[Tensor | None, ...]) -> tuple[int, tuple[Tensor, ...]]:
    """A bit mask of the tensors that are not None, and those tensors."""
    which, bit, there = 0, 1, []
    for t in tensors:
        if t is not None:
            there.append(t)
            which += bit
        bit += bit
    return which, tuple(there)


def find(options: Hashable, tensors: tuple[Tensor, ...]) -> Plan | None:
    """The plan of a call with these options and tensors, if an equal call came before.

    options  all that is no tensor, and which tensors are given; equal options must mean the same call, so that 1 and
             True must not both occur
    """
    if not tensors or _compiling() or _dispatch_modes() or forward_ad._current_level >= 0:
        return None
    for t in tensors:
        if t.__class__ not in GUARDED or t.is_nested:  # guards must not be asked about nested tensors
            return None
    for guard, plan in _recent.get((options, _grad_enabled(), _deterministic() and deterministic()), ()):
        if guard(*tensors):
            address = 0
            for t in tensors:
                address |= t.data_ptr()
            if address & 15:
                break
            return plan
    if not _plannable(tensors):
        return None
    known = _plans.get(_key(options, tensors))
    if known is not None:
        _remember(options, tensors, known)
    return known


def keep(options: Hashable, tensors: tuple[Tensor, ...], plan: Plan) -> Plan:
    """Keeps the plan of a checked call that `find` did not know, if it is a plain eager call."""
    if _plannable(tensors):
        if not _aligned(tensors):  # prepared launches take alignment for granted
            plan.forward = Repeated(plan.forward.general, None)
        if len(_plans) >= MAX_PLANS:
            clear()
        _plans[_key(options, tensors)] = plan
        _remember(options, tensors, plan)
    return plan


def clear() -> None:
    """Forgets every plan."""
    _plans.clear()
    _recent.clear()


def function_call(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """`function.apply` without its search for torch.func's transforms: plain eager calls have none."""
    return super(torch.autograd.Function, function).apply  # type: ignore[misc]


def deterministic() -> bool:
    """Whether torch.use_deterministic_algorithms asks for results that repeat bit for bit."""
    return torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()


def _plannable(tensors: tuple[Tensor, ...]) -> bool:
    return is_plain_eager(*tensors) and not any(t.is_neg() for t in tensors)


def _key(options: Hashable, tensors: tuple[Tensor, ...]) -> Hashable:
    """Everything the checks of a call read."""
    facts = tuple((t.shape, t.stride(), t.dtype, t.device, t.is_inference()) for t in tensors)
    needs_grad = _grad_enabled() and any(t.requires_grad for t in tensors)  # an operator's is among its options
    device = tensors[0].device.type
    cast = device != "meta" and torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device)
    modes = (cast, torch.is_inference_mode_enabled(), needs_grad, deterministic())
    return options, facts, modes, tuple(t.data_ptr() % 16 == 0 for t in tensors)


def _remember(options: Hashable, tensors: tuple[Tensor, ...], plan: Plan) -> None:
    """Puts the plan in front of those with its options and modes of autograd; guards do not see the autocast dtype."""
    if torch._C._is_any_autocast_enabled() or not _aligned(tensors):
        return
    if (guard := _guard(tensors)) is not None:
        options = (options, _grad_enabled(), deterministic())
        _recent[options] = ((guard, plan), *_recent.get(options, ()))[:MAX_RECENT]


def _aligned(tensors: tuple[Tensor, ...]) -> bool:
    """Whether all begin at multiples of 16 bytes, which prepared launches take for granted."""
    address = 0
    for t in tensors:
        address |= t.data_ptr()
    return not address & 15


# ------------------------------------------------------------------------------------- guards and allocation


def _guard(tensors: tuple[Tensor, ...]) -> Guard | None:
    """A guard of torch.compile's: one C++ call that says whether other tensors are like these.

    It compares type, dtype, device, sizes, strides, requires_grad, the negative bit and active dispatch keys. Returns
    None if a tensor appears twice or this torch has no guards. Does not support nested tensors.
    """
    twice = len({id(t) for t in tensors}) < len(tensors)
    if not GUARDS_WORK or twice or any(type(t) not in GUARDED for t in tensors):
        return None
    return _check_of(*tensors)


def _check_of(*tensors: Tensor) -> Guard:
    guards: Any = torch._C._dynamo.guards
    check: Guard = guards.TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    return check


def _guards_work() -> bool:
    """Whether this torch's private TensorGuards behave as we need."""
    try:
        x = torch.zeros(2, 3, dtype=torch.float32, device="cpu")
        check = _check_of(x)
        others = (x[:1], x[:, :2], x.T, x.T.contiguous().T, x[None], x.double(), torch._neg_view(x), None, 1.0)
        watched = (x.clone().requires_grad_(), torch.nn.Parameter(x, requires_grad=False))
        return check(x) and check(x.clone()) and not any(check(y) for y in (*others, *watched))
    except (AttributeError, RuntimeError, TypeError):
        return False


GUARDS_WORK = _guards_work()


def allocator(like: Tensor) -> Callable[[], Tensor]:
    """Returns a fast `empty_like` for this layout: on a GPU the allocation call of torch.compile's generated code."""
    size, stride, dtype, device = tuple(like.shape), like.stride(), like.dtype, like.device
    usual = functools.partial(torch.empty_strided, size, stride, dtype=dtype, device=device)
    make = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)
    if make is None or device.type != "cuda":
        return usual
    index, current = device.index, torch._C._cuda_getDevice
    try:
        with torch.cuda.device(device):
            made = make(size, stride, dtype)
    except (RuntimeError, TypeError):  # nobody promised it
        return usual
    if (made.shape, made.stride(), made.dtype, made.device) != (like.shape, stride, dtype, device):
        return usual
    return lambda: make(size, stride, dtype) if current() == index else usual()


@functools.cache
def nothing(device: torch.device) -> Callable[[], Tensor]:
    """Returns a function that makes the empty fp32 tensor an operator returns in place of None."""
    return allocator(torch.empty(0, dtype=torch.float32, device=device))


def fake_nothing(x: Tensor) -> Tensor:
    """The same of a fake tensor."""
    return x.new_empty(0, dtype=torch.float32)
