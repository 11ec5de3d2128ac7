"""Compiles kernels with NVRTC and keeps the machine code on disk.

A `Variant` is one kernel of one source for one architecture, with the macros it is compiled with. `cubin` returns its
machine code. The cache names a file by the hash of everything the code depends on, so that the next process reads it
in a millisecond. A file or folder that somebody else could have written is not trusted.

What cannot be compiled raises `Unavailable`. Backends pass its message on as the reason why they cannot serve a call.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import re
import stat
import tempfile
import warnings
from pathlib import Path
from typing import Any, NamedTuple

from fulmen.cuda.arguments import TENSOR_MAP, Struct

PACKAGE = Path(__file__).parents[1]
OPTIONS = ("--std=c++17", "--ptxas-options=-v")


class Unavailable(RuntimeError):
    """A kernel that cannot be compiled or loaded here, and why."""


class Variant(NamedTuple):
    source: str  # below the package, "flash/kernels/small.cu"
    kernel: str
    arch: str  # "80", "90a"
    macros: tuple[tuple[str, int], ...]
    arguments: Struct

    @property
    def options(self) -> tuple[str, ...]:
        return (f"--gpu-architecture=sm_{self.arch}", *OPTIONS, *(f"-D{name}={value}" for name, value in self.macros))


# ------------------------------------------------------------------------------------------------- compiler


@functools.lru_cache
def nvrtc() -> tuple[Any, tuple[int, int]]:
    """The compiler and its version."""
    try:
        from cuda.bindings import nvrtc as module
    except ImportError as error:
        raise Unavailable(f"needs the package cuda-bindings ({error}): pip install 'fulmen[cuda]'") from error
    try:
        status, *version = module.nvrtcVersion()
    except Exception as error:  # the library is looked for at the first call
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise Unavailable(f"NVRTC cannot be loaded ({reason[0]}): pip install 'fulmen[cuda]' brings it") from error
    if int(status) != 0:
        raise Unavailable(f"NVRTC does not answer: {status.name}")
    return module, (version[0], version[1])


def compile_text(text: str, name: str, options: tuple[str, ...]) -> tuple[bytes, str]:
    """The machine code of a source, and what the compiler said."""
    module, version = nvrtc()

    def ask(function: Any, *args: Any) -> Any:
        status, *rest = function(*args)
        if int(status) != 0:
            raise Unavailable(f"NVRTC {version[0]}.{version[1]} fails in {function.__name__}: {status.name}")
        return rest[0] if rest else None

    program = ask(module.nvrtcCreateProgram, text.encode(), name.encode(), 0, [], [])
    try:
        (status,) = module.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
        said = bytearray(ask(module.nvrtcGetProgramLogSize, program))
        ask(module.nvrtcGetProgramLog, program, said)
        log = said.decode(errors="replace").strip("\0\n ")
        if int(status) != 0:
            first = next((line for line in log.splitlines() if "error" in line), status.name).strip()
            raise Unavailable(f"NVRTC {version[0]}.{version[1]} cannot compile {name}: {first}")
        code = bytearray(ask(module.nvrtcGetCUBINSize, program))
        ask(module.nvrtcGetCUBIN, program, code)
    finally:
        module.nvrtcDestroyProgram(program)
    return bytes(code), log


class Usage(NamedTuple):
    """What a compiled kernel takes, as the assembler reports it."""

    registers: int
    spilled: int  # bytes
    shared: int  # bytes, beside what is asked for at launch
    warnings: tuple[str, ...]


def usage(log: str) -> Usage:
    registers = re.search(r"Used (\d+) registers", log)
    if registers is None:
        raise ValueError(f"the assembler did not report: {log}")
    shared = re.search(r"(\d+) bytes smem", log)
    spilled = sum(map(int, re.findall(r"(\d+) bytes spill", log)))
    told = tuple(
        line.strip() for line in log.splitlines() if re.search(r"warning|serializ|C75\d\d", line, re.IGNORECASE)
    )
    return Usage(int(registers[1]), spilled, int(shared[1]) if shared else 0, told)


def included(source: str, seen: set[str] | None = None) -> str:
    """A source with the files it includes, named by their path below the package, in their places, each once."""
    seen = {source} if seen is None else seen

    def content(found: re.Match[str]) -> str:
        if found[1] in seen:
            return ""
        seen.add(found[1])
        return included(found[1], seen).rstrip()

    text = (PACKAGE / source).read_text("utf-8")
    return re.sub(r'^#include "(.+)"$', content, text, flags=re.MULTILINE)


def source_text(variant: Variant) -> str:
    """What the compiler is given: the struct of the arguments, then the source."""
    return f"{TENSOR_MAP}\n{variant.arguments.declaration()}\n{included(variant.source)}"


def compile_variant(variant: Variant) -> tuple[bytes, Usage]:
    """Compiled here and now, past the cache: for tests and tuning."""
    code, log = compile_text(source_text(variant), variant.source, variant.options)
    return code, usage(log)


# ---------------------------------------------------------------------------------------------------- cache


def cache_folder() -> Path:
    """$FULMEN_CACHE_DIR, or `fulmen` in $XDG_CACHE_HOME, or in ~/.cache."""
    if chosen := os.environ.get("FULMEN_CACHE_DIR"):
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "fulmen"


def cache_file(variant: Variant, text: str) -> Path:
    """Named by the hash of all the machine code depends on."""
    _, version = nvrtc()
    everything = repr((text, variant.kernel, variant.options, version))
    return cache_folder() / f"{variant.kernel}.sm_{variant.arch}.{hashlib.sha256(everything.encode()).hexdigest()[:32]}"


def distrusted(path: Path, status: os.stat_result) -> str | None:
    """Why somebody else could have written what lies at `path`."""
    if not hasattr(os, "getuid"):  # Windows: the home folder is the user's own
        return None
    if status.st_uid != os.getuid():
        return f"{path} belongs to another user"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"{path} can be written by other users (chmod go-w)"
    return None


def read(file: Path) -> bytes | None:
    """The machine code kept in `file`; None if there is none, or if it is damaged or not to be trusted."""
    try:
        with file.open("rb") as stream:  # asked of the open file: what is checked is what is read
            why = distrusted(file.parent, file.parent.stat()) or distrusted(file, os.fstat(stream.fileno()))
            content = b"" if why else stream.read()
    except OSError:
        return None
    if why:
        warnings.warn(f"compiled kernels are not loaded, but compiled again: {why}", stacklevel=2)
    digest, code = content[:32], content[32:]
    return code if hashlib.sha256(code).digest() == digest else None


def keep(file: Path, code: bytes) -> None:
    """Other processes see the whole file or none: it gets its name when it is complete."""
    temporary = None
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=file.parent, prefix=".")
        with os.fdopen(handle, "wb") as stream:
            stream.write(hashlib.sha256(code).digest() + code)
        os.replace(temporary, file)
    except OSError as error:
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
        warnings.warn(f"compiled kernels are not kept, each process compiles anew: {error}", stacklevel=2)


@functools.lru_cache(maxsize=1024)
def cubin_or_reason(variant: Variant) -> bytes | str:
    """The machine code, or the reason why there is none: neither is asked for twice in a process."""
    try:
        text = source_text(variant)
        file = cache_file(variant, text)
        code = read(file)
        if code is None:
            code, _ = compile_text(text, variant.source, variant.options)
            keep(file, code)
    except (Unavailable, OSError, RuntimeError) as error:  # RuntimeError: there is no home
        return str(error)
    return code


def cubin(variant: Variant) -> bytes:
    code = cubin_or_reason(variant)
    if isinstance(code, str):
        raise Unavailable(code)
    return code


# --------------------------------------------------------------------------------------------------- doctor


def describe() -> str:
    """One line for `fulmen doctor`: which NVRTC is loaded, from where, and where kernels are kept."""
    try:
        _, version = nvrtc()
    except Unavailable as error:
        return str(error)
    from cuda import pathfinder  # by which cuda.bindings found it

    compiler = f"NVRTC {version[0]}.{version[1]} ({pathfinder.load_nvidia_dynamic_lib('nvrtc').abs_path})"
    try:
        return f"{compiler}, keeps kernels in {cache_folder()}"
    except RuntimeError as error:
        return f"{compiler}; nothing is kept: {error}"
