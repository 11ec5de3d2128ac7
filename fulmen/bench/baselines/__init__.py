"""Other people's kernels, one file each, named after it with "-" for "_". A file says:

    COMPUTES                  the operation it computes, a name of `fulmen.bench.adapters`
    version()                 of the package
    refuses(case, device)     None, or why it cannot take the case; a package that is not installed is such a reason
    attend(x)                 the call, on `fulmen.testing.<op>.Inputs`; (B, H, N, D) in and out
    pinned()                  optional: a context around every call, outside what is timed

Everything outside torch is imported inside the functions.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
from importlib import resources
from typing import Any


def names() -> list[str]:
    found = (f.name for f in resources.files("fulmen.bench.baselines").iterdir())
    return sorted(n.removesuffix(".py").replace("_", "-") for n in found if n.endswith(".py") and n[0] != "_")


def of(name: str) -> Any:
    return importlib.import_module(f"fulmen.bench.baselines.{name.replace('-', '_')}")


def absent(module: str, package: str) -> str | None:
    """None, or that the package cannot be imported here."""
    try:
        found = importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        found = False
    return None if found else f"{package} is not installed"


def version_of(*packages: str) -> str:
    for package in packages:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return ""
