"""Which implementation serves a call, and the reasons in words.

An operation is a folder `fulmen/<op>/`; each module in it that calls `register` is a backend, named after its
file. They are imported at the first call, so `import fulmen` loads no compiler, and a backend whose import
fails stays in the table with the reason. What is fastest, and with which tile, `fulmen/<op>/policy.py` says; this file
applies it.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import pkgutil
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from fulmen import hardware

OPS = ("lightning", "step", "flash", "latent")
NATIVE = ("reference",)  # backends of plain PyTorch, which autograd goes through by itself
ONLY_BY_NAME = 'only by name, never by "auto"'  # what a table says of them


class Choice(NamedTuple):
    """What a backend runs for a call, as `fulmen/<op>/policy.py` chooses it."""

    backend: str
    kernel: str  # which of the backend's kernels; its own name if it has but one
    tile: Any  # what the kernel is launched with: a tuple of numbers, or None
    splits: int  # flash: blocks that share the keys of a tile; lightning: segments of a sequence
    backward: str  # whose backward follows: a backend or kernel
    backward_tile: Any = None  # what that is launched with, if it is the backend's own
    workspace: int = 0  # bytes the backward allocates beside its results

    def __str__(self) -> str:
        words = [self.kernel] if self.kernel != self.backend else []
        words += [str(self.tile)] if self.tile is not None else []
        words += [f"{self.splits} splits"] if self.splits > 1 else []
        words += [f"backward {self.backward}"] if self.backward not in (self.backend, self.kernel) else []
        words += [f"backward {self.backward_tile}"] if self.backward_tile is not None else []
        words += [f"{self.workspace / 2**20:.1f} MiB workspace"] if self.workspace else []
        return ", ".join(words)


class Kernel(NamedTuple):
    """One implementation of an operation.

    supports  spec -> None, or the sentence that says why not
    forward   (spec, residuals) -> the op's outputs; for lightning (o, final state or None)
    backward  (spec, residuals, gradients of the outputs...) -> gradients; for lightning, from do and dstate (or None),
              (dq, dk, dv, dinitial_state or None). None: forward is differentiable as it is, and the kernel is taken
              only when asked for by name.
    prepare   (spec, residuals) -> None, or a function of the tensors alone that repeats the forward of a plain call
              with the same shapes and strides, each of which begins at a multiple of 16 bytes; for lightning it
              returns what is saved for the backward, too
    prepare_backward  (spec, residuals, what the backward takes after them) -> the same for the backward
    saves     spec -> the shape of what the forward writes to residuals.saved for its backward, or None. If it is a
              shape for one token, it is a formula of sizes, which may be symbols
    takes_silu  spec -> for lightning, whether the backward can make gradients of x of those of q, k and v = silu(x)
    """

    op: str
    name: str
    supports: Callable[[Any], str | None]
    forward: Callable[..., Any]
    backward: Callable[..., Any] | None
    prepare: Callable[..., Any] | None = None
    prepare_backward: Callable[..., Any] | None = None
    saves: Callable[[Any], tuple[int, ...] | None] | None = None
    takes_silu: Callable[[Any], bool] | None = None


_kernels: dict[str, dict[str, Kernel]] = {op: {} for op in OPS}
_missing: dict[str, dict[str, str]] = {op: {} for op in OPS}


def register(
    op: str,
    name: str,
    *,
    supports: Callable[[Any], str | None],
    forward: Callable[..., Any],
    backward: Callable[..., Any] | None,
    prepare: Callable[..., Any] | None = None,
    prepare_backward: Callable[..., Any] | None = None,
    saves: Callable[[Any], tuple[int, ...] | None] | None = None,
    takes_silu: Callable[[Any], bool] | None = None,
) -> None:
    _kernels[op][name] = Kernel(op, name, supports, forward, backward, prepare, prepare_backward, saves, takes_silu)


@functools.lru_cache
def _load(op: str) -> None:
    package = importlib.import_module(f"fulmen.{op}")
    for module in pkgutil.iter_modules(package.__path__):
        try:
            importlib.import_module(f"fulmen.{op}.{module.name}")
        except ImportError as error:
            _missing[op][module.name] = f"cannot be imported: {error}"


def kernels(op: str) -> dict[str, Kernel]:
    """Every backend of `op` that could be imported, by name."""
    _load(op)
    return _kernels[op]


def policy(op: str) -> Any:
    """The module that chooses for `op`: `order` and `choose`, pure functions of a spec and the hardware."""
    return importlib.import_module(f"fulmen.{op}.policy")


def choose(op: str, spec: Any, backend: str = "auto") -> Choice:
    """What `backend` runs for `spec`: kernel, tile, splits. "auto": the backend to try first."""
    return _choose(op, spec, hardware.of(spec.device), backend)


@functools.lru_cache(maxsize=4096)
def _choose(op: str, spec: Any, hw: hardware.Hardware, backend: str) -> Choice:
    choice: Choice = policy(op).choose(spec, hw, backend)
    return choice


def candidates(op: str, spec: Any) -> list[Kernel]:
    """Every backend that could be imported, fastest first; one that the policy does not know comes last."""
    known, names = kernels(op), policy(op).order(spec, hardware.of(spec.device))
    return [known[name] for name in dict.fromkeys((*names, *known)) if name in known]


def reasons(op: str, spec: Any) -> dict[str, str | None]:
    """For each backend of `op`: None if it serves `spec`, else why not; in the order `auto` asks them."""
    return {kernel.name: kernel.supports(spec) for kernel in candidates(op, spec)} | _missing[op]


@functools.lru_cache(maxsize=4096)
def pick(op: str, spec: Any, backend: str = "auto") -> Kernel:
    """The backend that serves `spec`; one asked for by name works or raises, it never falls back."""
    if backend == "auto":  # those behind the first that serves are not asked: to answer, one may have to compile
        for kernel in candidates(op, spec):
            if kernel.backward is not None and kernel.supports(spec) is None:
                return kernel
    elif backend in kernels(op) and kernels(op)[backend].supports(spec) is None:
        return kernels(op)[backend]
    why = reasons(op, spec)
    if backend != "auto":
        if backend not in why:
            raise unknown(op, backend)
        raise NotImplementedError(f"backend={backend!r} cannot serve this call: {why[backend]}\n{table(op, spec, why)}")
    raise NotImplementedError(f"no {op} backend can serve this call:\n{table(op, spec, why)}")


@functools.lru_cache(maxsize=4096)
def find(op: str, spec: Any, backend: str = "auto") -> Kernel | None:
    """As `pick`, for a caller with another way: None if no backend serves `spec`, or not the one asked for."""
    for kernel in candidates(op, spec):
        if backend in ("auto", kernel.name) and kernel.backward is not None and kernel.supports(spec) is None:
            return kernel
    return None


def unknown(op: str, backend: Any) -> ValueError:
    """The error for what is no name of a backend of `op`. `pick`, which hashes it first, must be given a string."""
    return ValueError(f"backend={backend!r}: {op} has {', '.join(sorted({*kernels(op), *_missing[op]}))}, or 'auto'")


def differentiable_as_it_is(op: str, backend: str) -> bool:
    """Whether `backend` names a kernel of plain PyTorch, which autograd goes through by itself."""
    if not isinstance(backend, str):
        raise unknown(op, backend)
    if backend == "auto":
        return False
    if not torch.compiler.is_compiling():  # a compiler cannot follow imports
        _load(op)
    elif backend not in NATIVE:  # it would guard that the table has no such name, which the call itself may change
        return False
    kernel = _kernels[op].get(backend)
    return kernel is not None and kernel.backward is None


def table(op: str, spec: Any, why: dict[str, str | None]) -> str:
    """The `reasons`, one backend a line; one that serves the call has its kernel and tile instead."""
    width = max(map(len, why))
    lines = []
    for name, reason in why.items():
        if reason is None:
            words = ONLY_BY_NAME if differentiable_as_it_is(op, name) else str(choose(op, spec, name))
            reason = f"ok ({words})" if words else "ok"
        lines.append(f"  {name:<{width}}  {reason}")
    return "\n".join(lines)


def explain(op: str, *args: Any, **kwargs: Any) -> str:
    """The backends for a call of `op` with these arguments, and which one serves it.

    A backend that can serve the call is listed with its kernel, tile, splits and backward; another with the reason.

    >>> print(fulmen.explain("lightning", q, k, v, decay))
    """
    if op not in OPS:
        raise ValueError(f"op={op!r}: fulmen has {', '.join(OPS)}")
    backend = kwargs.pop("backend", "auto")
    if not isinstance(backend, str):
        raise unknown(op, backend)
    checked_spec = importlib.import_module(f"fulmen.{op}.spec").checked_spec
    arguments = inspect.signature(checked_spec)
    try:
        arguments.bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(f"explain({op!r}, ...) {error}; it takes {', '.join(arguments.parameters)}, backend") from None
    spec = checked_spec(*args, **kwargs)
    try:
        chosen = pick(op, spec, backend).name
    except NotImplementedError:
        chosen = "no backend serves this call" if backend == "auto" else "cannot serve this call"
    heading = 'backends, in the order backend="auto" tries them:'
    return f"{spec}\n{heading}\n{table(op, spec, reasons(op, spec))}\n{backend}: {chosen}"


def report(op: str, device: torch.device) -> list[tuple[str, str | None]]:
    """For `fulmen doctor`: each backend on a plain bf16 (CPU: fp32) call on `device`, and why not."""
    spec = importlib.import_module(f"fulmen.{op}.spec").plain_spec(device)
    return list(reasons(op, spec).items())
