"""Another forward for one module, or the same with other functions, and back."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any


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
    # accelerate's hooks (device_map) call the forward they found under another name
    name = "_old_forward" if name == "forward" and hasattr(module, "_hf_hook") else name
    before = module.__dict__.get(name)
    setattr(module, name, method)

    def undo() -> None:
        if before is None:
            delattr(module, name)
        else:
            setattr(module, name, before)

    return undo
