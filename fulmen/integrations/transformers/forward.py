"""Another forward for one module, or the same with other functions, and back."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from typing import Any


def code_of(module: Any) -> types.CodeType | None:
    """The code of its class's forward, without decorators; None if it is not written in Python."""
    return getattr(inspect.unwrap(type(module).forward), "__code__", None)


def replaced_reason(module: Any) -> str | None:
    """Why another forward would skip somebody's code, or None."""
    forward = module.__dict__.get(_place(module, "forward"), type(module).forward)
    if getattr(forward, "__func__", forward) is type(module).forward:
        return None
    return "its forward was replaced by other code, which fulmen would skip: call accelerate(model) before that"


def with_names(function: Any, names: dict[str, Any]) -> Any:
    """The function, but it finds these objects under these names of the module that defines it."""
    found = {**function.__globals__, **names}
    del found["__name__"]  # by which torch.compile would look the names up in that module
    new = types.FunctionType(function.__code__, found, function.__name__, function.__defaults__, function.__closure__)
    new.__kwdefaults__ = function.__kwdefaults__
    return new


def set_forward(module: Any, forward: Callable[..., Any]) -> Callable[[], None]:
    """Gives this module another forward; returns what undoes it."""
    return set_method(module, "forward", forward)


def set_method(module: Any, name: str, method: Callable[..., Any]) -> Callable[[], None]:
    """As `set_forward`, of any method."""
    before = module.__dict__.get(_place(module, name))
    setattr(module, _place(module, name), method)

    def undo() -> None:
        place = _place(module, name)  # a hook of accelerate may have come or gone
        if module.__dict__.get(place) is not method:
            raise RuntimeError(
                f"{name} of {type(module).__name__} was replaced after accelerate(model): take that back, then call "
                "undo() again"
            )
        if before is not None:
            setattr(module, place, before)
        elif place == name:
            delattr(module, name)
        else:
            setattr(module, place, types.MethodType(getattr(type(module), name), module))

    return undo


def _place(module: Any, name: str) -> str:
    """Where the method is found: accelerate's hooks (device_map) call the forward they found under another name."""
    return "_old_forward" if name == "forward" and hasattr(module, "_hf_hook") else name
