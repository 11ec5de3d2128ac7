"""Another forward for one module, and back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def set_forward(module: Any, forward: Callable[..., Any]) -> Callable[[], None]:
    """Gives this module another forward; returns what undoes it."""
    # accelerate's hooks (device_map) call the forward they found under another name
    name = "_old_forward" if hasattr(module, "_hf_hook") else "forward"
    before = module.__dict__.get(name)
    setattr(module, name, forward)

    def undo() -> None:
        if before is None:
            delattr(module, name)
        else:
            setattr(module, name, before)

    return undo
