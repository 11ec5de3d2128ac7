"""Files that compilers made for tests: each is made once for all workers and runs, and kept in build/tests."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "build/tests"


def once(depends: object, make: Callable[[Path], object]) -> Path:
    """The file that `make` writes to the path it is given, named by the hash of all its content depends on."""
    import fcntl  # not on Windows, where none of these compilers are

    file = FOLDER / hashlib.sha256(repr(depends).encode()).hexdigest()[:32]
    if not file.exists():
        FOLDER.mkdir(parents=True, exist_ok=True)
        with file.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # whoever comes second waits and finds the file
            if not file.exists():
                unfinished = file.with_suffix(".part")
                make(unfinished)
                unfinished.replace(file)
    return file
