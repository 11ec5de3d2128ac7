"""Makes Triton's interpreter faster for tests, with the same results.

It spends its time on Python around numpy, again and again on the same questions. `faster` answers them once, and leaves
out what is computed for nothing. This knows the interpreter of the Triton that the Makefile installs; any other is used
as it is.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any

import pytest

VERSION = "3.6.0"


@contextlib.contextmanager
def faster() -> Iterator[None]:
    import triton

    if triton.__version__ != VERSION:
        yield
        return
    from triton.language import core, semantic
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(interpreter, "_patch_lang", patched_once(interpreter._patch_lang))
        monkeypatch.setattr(interpreter, "_get_np_dtype", known(interpreter._get_np_dtype))
        monkeypatch.setattr(interpreter.ScanOps, "generic_scan", scan)
        monkeypatch.setattr(core.block_type, "__init__", block_init(core, core.block_type.__init__))
        monkeypatch.setattr(core.tensor, "__init__", tensor_init(core))
        broadcast = semantic.TritonSemantic.broadcast_impl_value
        monkeypatch.setattr(semantic.TritonSemantic, "broadcast_impl_value", unless_equal(broadcast))
        # Overflow is computed for every operation on integers, and asserted in debug mode only.
        monkeypatch.setattr(builder, "options", dataclasses.replace(builder.options, sanitize_overflow=False))
        yield


def patched_once(patch: Any) -> Any:
    """`_patch_lang` for a module's functions once a launch. The interpreter patches its language again for every device
    function that is called, which makes each operation slower than the one before."""
    patched: set[int] = set()

    def patch_once(fn: Any) -> Any:
        if id(fn.__globals__) in patched:
            return None  # only a launch uses the answer
        launch, scope = not patched, patch(fn)
        patched.add(id(fn.__globals__))
        if launch:
            restore = scope.restore
            scope.restore = lambda: (patched.clear(), restore())
        return scope

    return patch_once


def known(np_dtype: Any) -> Any:
    """`_get_np_dtype`, which builds a table for every question."""
    of_scalar = functools.cache(np_dtype)  # scalars hash by name

    return lambda dtype: np_dtype(dtype) if dtype.scalar.is_ptr() else of_scalar(dtype.scalar)


def block_init(core: Any, init: Any) -> Any:
    """`block_type.__init__`, which checks and names a shape every time. Types of one shape share it."""

    @functools.cache
    def checked(shape: tuple[int, ...]) -> Any:
        block = object.__new__(core.block_type)
        init(block, core.float32, list(shape))
        return block

    def block_init(self: Any, element_ty: Any, shape: Any) -> None:
        block = checked(tuple([getattr(n, "value", n) for n in shape]))
        self.element_ty, self.shape, self.numel = element_ty, block.shape, block.numel
        self.name = f"<{self.shape}, {element_ty}>"

    return block_init


def tensor_init(core: Any) -> Any:
    """`tensor.__init__`, which wraps the numbers of its shape and names their type every time."""

    @functools.cache
    def facts(shape: Any) -> tuple[Any, Any]:
        return core.tuple([core.constexpr(n) for n in shape]), core.constexpr(math.prod(shape))

    def init(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = facts(type.shape if type.is_block() else ())

    return init


def unless_equal(broadcast: Any) -> Any:
    """`broadcast_impl_value`, which takes a list for another shape than a tuple and broadcasts what is equal."""

    def broadcast_unless_equal(self: Any, lhs: Any, rhs: Any) -> Any:
        if lhs.type.is_block() and rhs.type.is_block() and lhs.type.shape is rhs.type.shape:
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    return broadcast_unless_equal


def scan(self: Any, input: Any) -> list[Any]:
    """`ScanOps.generic_scan` in log2(n) steps of all elements, not one by one: element i takes in element i - step."""
    import numpy as np

    xs = [x.handle.data for x in input]
    size, axis = xs[0].shape[self.axis], self.axis
    places = np.arange(size).reshape([size if i == axis else 1 for i in range(xs[0].ndim)])
    step = 1
    while step < size:
        before = [self.to_tensor(np.roll(x, step, axis), of.dtype) for x, of in zip(xs, input, strict=True)]
        now = [self.to_tensor(x, of.dtype) for x, of in zip(xs, input, strict=True)]
        found = self.combine_fn.fn(*before, *now)
        found = found if isinstance(found, tuple) else (found,)
        xs = [np.where(places >= step, y.handle.data, x) for x, y in zip(xs, found, strict=True)]
        step *= 2
    return [self.to_tensor(x, of.dtype) for x, of in zip(xs, input, strict=True)]
