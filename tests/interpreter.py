"""Makes Triton's interpreter faster for tests, with the same results.

It spends its time on Python around numpy, again and again on the same questions. `faster` answers them once, and leaves
out what is computed for nothing. This knows the interpreter of the Triton that the Makefile installs; any other is used
as it is, but for one mistake: a comparison's answer, made a tensor, turns from bool to int32, which Triton 3.9 refuses
as a mask.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import math
from collections.abc import Iterator
from typing import Any

import pytest

VERSION = "3.6.0"


@contextlib.contextmanager
def faster() -> Iterator[None]:
    import triton
    from triton.language import core, semantic
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    with pytest.MonkeyPatch.context() as monkeypatch:
        if triton.__version__ != VERSION:
            monkeypatch.setattr(interpreter.InterpreterBuilder, "create_splat", splat(interpreter.TensorHandle))
            yield
            return
        quick = Operators(core, interpreter).by_name()
        monkeypatch.setattr(interpreter, "_patch_lang", patched_once(interpreter._patch_lang, core.tensor, quick))
        monkeypatch.setattr(interpreter, "_get_np_dtype", known(interpreter._get_np_dtype))
        monkeypatch.setattr(interpreter.ScanOps, "generic_scan", scan)
        monkeypatch.setattr(interpreter, "_patch_builtin", patch_builtin(interpreter._patch_attr, core.is_builtin))
        monkeypatch.setattr(core.dtype, "__eq__", unless_identical(core.dtype.__eq__))
        monkeypatch.setattr(core.block_type, "__init__", block_init(core, core.block_type.__init__))
        monkeypatch.setattr(core.tensor, "__init__", tensor_init(core))
        broadcast = semantic.TritonSemantic.broadcast_impl_value
        monkeypatch.setattr(semantic.TritonSemantic, "broadcast_impl_value", unless_equal(broadcast))
        convert = unless_one(core.tensor, semantic.TritonSemantic.to_tensor)
        monkeypatch.setattr(semantic.TritonSemantic, "to_tensor", convert)
        monkeypatch.setattr(semantic.TritonSemantic, "cast", unless_the_same(semantic.TritonSemantic.cast))
        # Overflow is computed for every operation on integers, and asserted in debug mode only.
        monkeypatch.setattr(builder, "options", dataclasses.replace(builder.options, sanitize_overflow=False))
        yield


def splat(handle: Any) -> Any:
    """`create_splat` that keeps the dtype of its data."""
    import numpy as np

    def create_splat(self: Any, to: Any, value: Any) -> Any:
        return handle(np.full(to.shape, value.data.item(), value.data.dtype), value.dtype.scalar)

    return create_splat


def patched_once(patch: Any, tensor: Any, quick: dict[str, Any]) -> Any:
    """`_patch_lang` for a module's functions once a launch, with quick operators of tensors. The interpreter patches
    its language again for every device function that is called, and makes each operation slower than the one before."""
    patched: set[int] = set()

    def patch_once(fn: Any) -> Any:
        if id(fn.__globals__) in patched:
            return None  # only a launch uses the answer
        launch, scope = not patched, patch(fn)
        patched.add(id(fn.__globals__))
        if launch:
            for name, method in quick.items():
                scope.set_attr(tensor, name, method(getattr(tensor, name)))
            restore = scope.restore
            scope.restore = lambda: (patched.clear(), restore())
        return scope

    return patch_once


class Operators:
    """Operators of tensors: each is a function of the slow one, which serves what is unusual.

    Triton casts and broadcasts operands, then calls numpy. Among floats, and among signed integers, numpy's own rules
    give the same type, shape and numbers.
    """

    def __init__(self, core: Any, interpreter: Any) -> None:
        floats, ints = (core.float16, core.float32, core.float64), (core.int32, core.int64)
        self.core, self.handle = core, interpreter.TensorHandle
        self.usual = {id(t): t for t in (*floats, *ints, core.int1)}
        self.numpy_type = {id(t): interpreter._get_np_dtype(t) for t in (*floats, *ints)}
        self.limits = {id(t): 2 ** (t.primitive_bitwidth - 1) for t in ints}
        self.numbers = {(id(a), id(b)): kind[max(i, j)]
                        for kind in (floats, ints) for i, a in enumerate(kind) for j, b in enumerate(kind)}  # fmt: skip
        self.integers = {(a, b): dtype for (a, b), dtype in self.numbers.items() if id(dtype) in self.limits}
        self.bools = {(id(core.int1), id(core.int1)): core.int1}
        self.facts = functools.cache(self.facts)
        self.block = functools.cache(self.block)

    def facts(self, shape: tuple[int, ...]) -> tuple[Any, Any]:
        core = self.core
        return core.tuple([core.constexpr(n) for n in shape]), core.constexpr(math.prod(shape))

    def block(self, dtype: int, shape: tuple[int, ...]) -> Any:
        return self.core.block_type(self.usual[dtype], list(shape))

    def made(self, data: Any, held: Any, dtype: Any, is_block: bool) -> Any:
        """A tensor of `dtype`, whose handle has the type `held`."""
        handle, made = object.__new__(self.handle), object.__new__(self.core.tensor)
        handle.data, handle.dtype, handle.attr = data, held, {}
        made.handle, made.dtype, made.type = handle, dtype, dtype
        if is_block:
            cached = id(dtype) in self.usual
            made.type = self.block(id(dtype), data.shape) if cached else self.core.block_type(dtype, list(data.shape))
        made.shape, made.numel = self.facts(data.shape if is_block else ())
        return made

    def constant(self, x: Any, dtype: int, compared: bool) -> Any:
        """A number as Triton casts it for such a tensor; None: not one of the usual."""
        import numpy as np

        limit, core = self.limits.get(dtype), self.core
        if type(x) is int and (limit is None or -limit <= x < limit):
            fits = not compared or (-(2**31) <= x < 2**31 and dtype != id(core.float16))
        else:
            fits = type(x) is float and dtype == id(core.float32) and (not compared or x == 0 or 1e-30 < abs(x) < 1e30)
        return np.array([x], dtype=self.numpy_type[dtype]) if fits else None

    def binary(self, op: Any, types: dict[Any, Any], *, swapped: bool = False, result: Any = None) -> Any:
        core, made, constant = self.core, self.made, self.constant
        tensor, block_type, constexpr = core.tensor, core.block_type, core.constexpr

        def quick(slow: Any) -> Any:
            def method(self: Any, other: Any) -> Any:
                if type(other) is constexpr:
                    other = other.value
                a, is_block = self.handle.data, type(self.type) is block_type
                if type(other) is tensor:
                    dtype, b = types.get((id(self.dtype), id(other.dtype))), other.handle.data
                    is_block = is_block or type(other.type) is block_type
                else:
                    dtype = types.get((id(self.dtype), id(self.dtype)))
                    unusual = dtype is None or dtype is core.int1
                    b = None if unusual else constant(other, id(dtype), result is not None)
                if dtype is None or b is None:
                    return slow(self, other)
                return made(op(b, a) if swapped else op(a, b), dtype, result or dtype, is_block)

            return method

        return quick

    def added(self, slow: Any) -> Any:
        """Also to pointers."""
        import numpy as np

        core, made, is_int, plain = self.core, self.made, self.limits, self.binary(np.add, self.numbers)(slow)

        def method(self: Any, other: Any) -> Any:
            offset = type(other) is core.tensor and id(other.dtype) in is_int
            if not offset or type(self.dtype) is not core.pointer_type:
                return plain(self, other)
            width = max(1, self.dtype.element_ty.primitive_bitwidth // 8)
            data = self.handle.data + width * other.handle.data.astype(np.uint64)
            is_block = type(self.type) is core.block_type or type(other.type) is core.block_type
            return made(data, self.handle.dtype, self.dtype, is_block)

        return method

    def indexed(self, slow: Any) -> Any:
        """x[:, None] and its like."""
        core, made, whole = self.core, self.made, slice(None)

        def method(self: Any, slices: Any) -> Any:
            if type(slices) is not tuple or type(self.type) is not core.block_type:
                return slow(self, slices)
            if any(one is not None and one != whole for one in slices):
                return slow(self, slices)
            return made(self.handle.data[slices], self.handle.dtype, self.dtype, True)

        return method

    def to(self, slow: Any) -> Any:
        """Of the type it has already."""

        def method(self: Any, dtype: Any, *args: Any, **kwargs: Any) -> Any:
            return self if dtype is self.dtype and not args and not kwargs else slow(self, dtype, *args, **kwargs)

        return method

    def by_name(self) -> dict[str, Any]:
        import numpy as np

        def quotient(a: Any, b: Any) -> Any:
            return (a - np.fmod(a, b)) // b  # rounded towards zero, as the interpreter has it

        binary, numbers = self.binary, self.numbers
        compared = {"lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal, "eq": np.equal,
                    "ne": np.not_equal}  # fmt: skip
        return {
            "__add__": self.added, "__radd__": binary(np.add, numbers, swapped=True),
            "__sub__": binary(np.subtract, numbers), "__rsub__": binary(np.subtract, numbers, swapped=True),
            "__mul__": binary(np.multiply, numbers), "__rmul__": binary(np.multiply, numbers, swapped=True),
            "__floordiv__": binary(quotient, self.integers), "__mod__": binary(np.fmod, self.integers), "to": self.to,
            "__and__": binary(np.bitwise_and, self.bools), "__or__": binary(np.bitwise_or, self.bools),
            "__getitem__": self.indexed,
            **{f"__{name}__": binary(op, numbers, result=self.core.int1) for name, op in compared.items()},
        }  # fmt: skip


def patch_builtin(patch_attr: Any, is_builtin: Any) -> Any:
    """`_patch_builtin`, which looks through all that a module or a class has at every launch."""

    @functools.cache
    def builtins(owner: Any) -> list[tuple[str, Any]]:  # asked first when none of them is patched
        return [(name, member) for name, member in inspect.getmembers(owner) if is_builtin(member)]

    def patch(owner: Any, builder: Any, scope: Any) -> None:
        for name, member in builtins(owner):
            if getattr(owner, name) is member:  # not patched yet
                patch_attr(owner, name, member, builder, scope)

    return patch


def unless_identical(equal: Any) -> Any:
    """`dtype.__eq__`, which compares names."""
    return lambda self, other: self is other or equal(self, other)


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
        return block, f"<{block.shape}, "

    def block_init(self: Any, element_ty: Any, shape: Any) -> None:
        shape = tuple(shape)
        if {*map(type, shape)} != {int}:
            shape = tuple([getattr(n, "value", n) for n in shape])
        block, name = checked(shape)
        self.element_ty, self.shape, self.numel = element_ty, block.shape, block.numel
        self.name = f"{name}{element_ty.name}>"

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


def unless_one(tensor: Any, to_tensor: Any) -> Any:
    """`to_tensor`, which asks last whether it is one."""
    return lambda self, x, *check: x if type(x) is tensor else to_tensor(self, x, *check)


def unless_the_same(cast: Any) -> Any:
    """`cast`, which compares types by what they print."""

    def cast_unless_the_same(self: Any, input: Any, dst_ty: Any, *rounding: Any) -> Any:
        return input if input.dtype is dst_ty.scalar else cast(self, input, dst_ty, *rounding)

    return cast_unless_the_same


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
