"""Which implementation serves a call, and the reasons in words.

An operation is a folder `fulmen/<op>/`; each module in it that calls `register` is a backend, named after its
file. They are imported at the first call, so `import fulmen` loads no compiler, and a backend whose import
fails stays in the table with the reason. Nothing else in the library chooses between implementations.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

OPS = ("lightning", "flash")


class Kernel(NamedTuple):
    """One implementation of an operation.

    supports  spec -> None, or the sentence that says why not
    rank      spec -> how it compares where several support the spec; "auto" takes the lowest
    forward   (spec, residuals) -> the op's outputs; for lightning (o, final state or None)
    backward  (spec, residuals, gradients of the outputs...) -> gradients; for lightning, from do and dstate (or None),
              (dq, dk, dv, dinitial_state or None). None: forward is differentiable as it is, and the kernel is taken
              only when asked for by name.
    prepare   (spec, residuals) -> None, or a function of the tensors alone that repeats the forward of a plain call
              with the same shapes and strides and rows at multiples of 16 bytes
    prepare_backward  (spec, residuals, what the backward takes after them) -> the same for the backward
    detail    spec -> what exactly would serve it, for `explain`; None: the name says it
    saves     spec -> the shape of what the forward writes to residuals.saved for its backward, or None
    """

    op: str
    name: str
    supports: Callable[[Any], str | None]
    rank: Callable[[Any], float]
    forward: Callable[..., Any]
    backward: Callable[..., Any] | None
    prepare: Callable[..., Any] | None = None
    prepare_backward: Callable[..., Any] | None = None
    detail: Callable[[Any], str] | None = None
    saves: Callable[[Any], tuple[int, ...] | None] | None = None


_kernels: dict[str, dict[str, Kernel]] = {op: {} for op in OPS}
_missing: dict[str, dict[str, str]] = {op: {} for op in OPS}


def register(
    op: str,
    name: str,
    *,
    supports: Callable[[Any], str | None],
    rank: Callable[[Any], float],
    forward: Callable[..., Any],
    backward: Callable[..., Any] | None,
    prepare: Callable[..., Any] | None = None,
    prepare_backward: Callable[..., Any] | None = None,
    detail: Callable[[Any], str] | None = None,
    saves: Callable[[Any], tuple[int, ...] | None] | None = None,
) -> None:
    _kernels[op][name] = Kernel(op, name, supports, rank, forward, backward, prepare, prepare_backward, detail, saves)


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


def reasons(op: str, spec: Any) -> dict[str, str | None]:
    """For each backend of `op`: None if it serves `spec`, else why not. Fastest first."""
    return {kernel.name: kernel.supports(spec) for kernel in ranked(op, spec)} | _missing[op]


def ranked(op: str, spec: Any) -> list[Kernel]:
    return sorted(kernels(op).values(), key=lambda kernel: kernel.rank(spec))


@functools.lru_cache(maxsize=4096)
def pick(op: str, spec: Any, backend: str = "auto") -> Kernel:
    """The backend that serves `spec`; one asked for by name works or raises, it never falls back."""
    if backend == "auto":  # those behind the first that serves are not asked: to answer, one may have to compile
        for kernel in ranked(op, spec):
            if kernel.backward is not None and kernel.supports(spec) is None:
                return kernel
    elif backend in kernels(op) and kernels(op)[backend].supports(spec) is None:
        return kernels(op)[backend]
    why = reasons(op, spec)
    if backend != "auto":
        if backend not in why:
            raise unknown(op, backend)
        raise NotImplementedError(f"backend={backend!r} cannot serve this call: {why[backend]}\n{table(why)}")
    raise NotImplementedError(f"no {op} backend can serve this call:\n{table(why)}")


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
    kernel = _kernels[op].get(backend)
    return kernel is not None and kernel.backward is None


def table(why: dict[str, str | None], details: dict[str, str] | None = None) -> str:
    """Candidates in the order `auto` would take them, one a line."""
    width = max(map(len, why))
    good = {name: f"ok ({detail})" for name, detail in (details or {}).items()}
    return "\n".join(f"  {name:<{width}}  {reason or good.get(name, 'ok')}" for name, reason in why.items())


def details(op: str, spec: Any) -> dict[str, str]:
    """What the backends that serve `spec` would run, where their name does not say it."""
    return {
        name: kernel.detail(spec)
        for name, kernel in kernels(op).items()
        if kernel.detail is not None and kernel.supports(spec) is None
    }


def explain(op: str, *args: Any, **kwargs: Any) -> str:
    """The candidates for a call of `op` with these arguments, and which one serves it.

    >>> print(fulmen.explain("lightning", q, k, v, decay))
    """
    if op not in OPS:
        raise ValueError(f"op={op!r}: fulmen has {', '.join(OPS)}")
    backend = kwargs.pop("backend", "auto")
    if not isinstance(backend, str):
        raise unknown(op, backend)
    spec = importlib.import_module(f"fulmen.{op}.op").checked_spec(*args, **kwargs)
    try:
        chosen = pick(op, spec, backend).name
    except NotImplementedError:
        chosen = "none"
    return f"{spec}\n{table(reasons(op, spec), details(op, spec))}\n{backend}: {chosen}"


def report(op: str, device: torch.device) -> list[tuple[str, str | None]]:
    """For `fulmen doctor`: each backend on a plain bf16 (CPU: fp32) call on `device`, and why not."""
    spec = importlib.import_module(f"fulmen.{op}.op").plain_spec(device)
    return list(reasons(op, spec).items())
