"""An emulator of our CUDA sources on a CPU, thread by thread (emulator.h).

The text NVRTC is given is preprocessed with a variant's macros; each `asm` statement becomes a call of the emulator, as
`statement` has it, and the rest is C++ as it is. `serve` replaces the launches of `fulmen.cuda` by it.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import math
import re
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fulmen import cuda, dispatch, hardware, plans
from fulmen.cuda import tensor_map as maps
from fulmen.flash import cuda as flash_cuda
from fulmen.flash import spec as flash_spec
from fulmen.flash.kernels import backward, sm90
from fulmen.latent import cuda as latent_cuda
from fulmen.launch import Launch
from fulmen.lightning import cuda as lightning_cuda
from fulmen.lightning import sweeps, tokens
from fulmen.lightning import triton as lightning_triton
from fulmen.lightning import triton_split as split
from tests import builds

HERE, COMPILER = Path(__file__).parent, shutil.which("g++")
EARLY, LATE, ANY, PRESSED = MODES = range(4)
Edit = tuple[str, str] | None
OPTIONS = (
    "-std=c++17", "-shared", "-fPIC", "-w", "-Wno-psabi", "-fno-strict-aliasing", "-Wl,-Bsymbolic",
    "-U_FORTIFY_SOURCE",  # which takes a jump to another fiber for a broken stack
)  # fmt: skip


# -------------------------------------------------------------------------------------------- translation


def outside_strings(text: str) -> Iterator[tuple[int, str, int]]:
    """Characters with their place and how many brackets are open after them."""
    depth, quoted = 0, False
    for i, c in enumerate(text):
        if c == '"' and not (quoted and text[i - 1] == "\\"):
            quoted = not quoted
        elif not quoted:
            depth += (c in "([{") - (c in ")]}")
            yield i, c, depth


def cut(text: str, at: str) -> list[str]:
    """At every `at` outside of brackets and strings."""
    places = [-1, *(i for i, c, depth in outside_strings(text) if c == at and depth == 0), len(text)]
    return [text[i + 1 : j] for i, j in itertools.pairwise(places)]


def operands(section: str) -> list[str]:
    return [re.match(r'\s*"[^"]*"\s*\((.*)\)\s*$', one, re.S)[1] for one in cut(section, ",") if one.strip()]


NOTHING = re.compile(
    r"^\s*$|^griddepcontrol|^setmaxnreg|^fence\.mbarrier_init|^wgmma\.fence|^prefetch\.(tensormap|global)"
    r"|^\{\.reg \.pred never"
)
CALLS = [  # a pattern of PTX, and the call: {0} is the first operand
    (r"ex2\.approx\.ftz\.f32", "{0} = emulator::ex2({1})"),
    (r"rcp\.approx\.ftz\.f32", "{0} = emulator::rcp({1})"),
    (r"cvt\.rn\.bf16x2\.f32", "{0} = emulator::pack({1}, {2}, 0)"),
    (r"cvt\.rn\.f16x2\.f32", "{0} = emulator::pack({1}, {2}, 1)"),
    (r"cvt\.f32\.f16 ", "{0} = emulator::from_half({1}, 1)"),
    (r".*mul\.rn\.bf16x2 rest, %1, %3; fma\.rn\.bf16x2 %0, %1, %2, rest", "{0} = emulator::times({1}, {2}, {3})"),
    (r"mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.bf16\.bf16\.f32", "emulator::mma({all}, 0)"),
    (r"mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.f16\.f16\.f32", "emulator::mma({all}, 1)"),
    (r"ldmatrix\.sync\.aligned\.m8n8\.x4\.shared\.b16", "emulator::ldmatrix({all}, 0)"),
    (r"ldmatrix\.sync\.aligned\.m8n8\.x4\.trans\.shared\.b16", "emulator::ldmatrix({all}, 1)"),
    (r"stmatrix\.sync\.aligned\.m8n8\.x4\.shared\.b16", "emulator::stmatrix({all})"),
    (r"cp\.async\.cg\.shared\.global \[%0\], \[%1\], 16, %2", "emulator::cp_async({all})"),
    (r"cp\.async\.commit_group", "emulator::cp_async_commit()"),
    (r"cp\.async\.wait_group", "emulator::cp_async_wait({0})"),
    (r"mbarrier\.init\.shared::cta\.b64", "emulator::mbarrier_init({all})"),
    (r"mbarrier\.arrive\.shared::cta\.b64 _, \[%0\]", "emulator::mbarrier_arrive({0}, 0)"),
    (r"mbarrier\.arrive\.expect_tx\.shared::cta\.b64 _, \[%0\], %1", "emulator::mbarrier_arrive({all})"),
    (r".*mapa\.shared::cluster\.u32 there, %0, %1;\s*mbarrier\.arrive\.shared::cluster\.b64 _, \[there\]",
     "emulator::mbarrier_arrive_at({all})"),
    (r".*again: mbarrier\.try_wait\.parity\.shared::cta\.b64 done, \[%0\], %1;\s*@!done bra again",
     "emulator::mbarrier_wait({all})"),
    (r"barrier\.cluster\.arrive\.relaxed\.aligned;\s*barrier\.cluster\.wait", "emulator::cluster_sync()"),
    (r"bar\.sync %0, %1", "emulator::named_barrier_sync({all})"),
    (r"bar\.arrive %0, %1", "emulator::named_barrier_arrive({all})"),
    (r"fence\.proxy\.async", "emulator::fence_async()"),
    (r"cp\.async\.bulk\.tensor\.\dd\.shared::cluster\.global\.mbarrier::complete_tx::bytes\.multicast::cluster .*%7",
     "emulator::tma_load({7}, {0}, {1}, {2}, {{{3}, {4}, {5}, {6}}})"),
    (r"cp\.async\.bulk\.tensor\.\dd\.shared::cluster\.global\.mbarrier::complete_tx::bytes\.L2::cache_hint \[.*%7",
     "emulator::tma_load(0, {0}, {1}, {2}, {{{3}, {4}, {5}, {6}}})"),
    (r"cp\.async\.bulk\.tensor\.\dd\.shared::cluster\.global\.mbarrier::complete_tx::bytes \[",
     "emulator::tma_load(0, {0}, {1}, {2}, {{{from3}}})"),
    (r"cp\.async\.bulk\.tensor\.\dd\.global\.shared::cta\.bulk_group", "emulator::tma_store({0}, {1}, {{{from2}}})"),
    (r"cp\.async\.bulk\.shared::cluster\.global\.mbarrier::complete_tx::bytes \[", "emulator::bulk_load({all})"),
    (r"cp\.reduce\.async\.bulk\.global\.shared::cta\.bulk_group\.add\.f32", "emulator::bulk_store({all}, true)"),
    (r"cp\.async\.bulk\.global\.shared::cta\.bulk_group", "emulator::bulk_store({all}, false)"),
    (r"cp\.async\.bulk\.wait_group %0", "emulator::tma_store_wait({0})"),
    (r"cp\.async\.bulk\.commit_group", "emulator::tma_store_commit()"),
    (r"cp\.async\.bulk\.wait_group\.read", "emulator::tma_store_wait_read({0})"),
    (r"wgmma\.commit_group", "emulator::wgmma_commit()"),
    (r"wgmma\.wait_group", "emulator::wgmma_wait({0})"),
    (r"st\.shared\.v4\.b32 \[%0\], \{%1, %1, %1, %1\}", "emulator::write4({all})"),
    (r"st\.shared\.v4\.(?:b32|f32) \[%0\], \{%1, %2, %3, %4\}", "emulator::store4({all})"),
    (r".*again: ld\.acquire\.gpu\.global\.s32 now, \[%0\]; setp\.lt\.s32 early, now, %1;\s*@early bra again",
     "emulator::wait_for_turn({all})"),
    (r".*again: ld\.acquire\.gpu\.global\.s32 now, \[%0\]; setp\.eq\.s32 early, now, 0;\s*@early bra again",
     "emulator::wait_for_first({0})"),
    (r"ld\.acquire\.gpu\.global\.s32 %0, \[%1\]", "{0} = emulator::turns_passed({1})"),
    (r"red\.release\.gpu\.global\.add\.s32 \[%0\], 1", "emulator::pass_turn({0})"),
    (r"atom\.relaxed\.gpu\.global\.add\.s32 %0, \[%1\], 1", "{0} = emulator::count({1})"),
    (r"ld\.shared\.v4\.b32 \{%0, %1, %2, %3\}, \[%4\]", "emulator::read4({all})"),
]  # fmt: skip
PRODUCT = re.compile(
    r".*setp\.ne\.b32 add, %(\d+), 0;\s*wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k16\.f32\.(b?f16)\.b?f16 "
    r"\{[^}]*\}, (\{[^}]*\}|%\d+), %(\d+), add, 1, 1, ([01, ]+);\}",
    re.S,
)


def product(m: re.Match[str], ops: list[str]) -> str:
    add, n, kind, a, b, flags = int(m[1]), int(m[2]), m[3], m[4], int(m[5]), m[6].replace(" ", "").split(",")
    registers = [int(x) for x in re.findall(r"%(\d+)", a)] if a.startswith("{") else []
    d = ", ".join(f"&({x})" for x in ops[: n // 2])
    if registers:
        held = f"unsigned *a_[] = {{{', '.join(f'&({ops[i]})' for i in registers)}}};"
        return (f"{{ float *d_[] = {{{d}}}; {held} emulator::wgmma(d_, {n}, a_, 0, {ops[b]}, {ops[add]}, 0, "
                f"{flags[0]}, {int(kind == 'f16')}); }}")  # fmt: skip
    return (f"{{ float *d_[] = {{{d}}}; emulator::wgmma(d_, {n}, nullptr, {ops[int(a[1:])]}, {ops[b]}, {ops[add]}, "
            f"{flags[0]}, {flags[1]}, {int(kind == 'f16')}); }}")  # fmt: skip


def statement(text: str) -> str:
    """What the emulator does for one asm statement, its brackets taken away."""
    sections = [s.strip() for s in cut(text, ":")]
    ptx = "".join(re.findall(r'"((?:[^"\\]|\\.)*)"', sections[0])).replace("\\n", "\n").strip()
    ops = [f"({x})" for section in sections[1:3] for x in operands(section)]
    if NOTHING.match(ptx):
        return ";"
    if m := PRODUCT.match(ptx):
        return product(m, [x[1:-1] for x in ops])
    for pattern, call in CALLS:
        if re.match(pattern, ptx, re.S):
            later = {f"from{i}": ", ".join(ops[i:]) for i in (2, 3)}
            return call.format(*ops, all=", ".join(ops), **later) + ";"
    raise NotImplementedError(f"the emulator does not know: {ptx}")


def translated(variant: cuda.Variant, edit: Edit = None) -> str:
    """A C++ source whose `run` runs the kernel; `edit`: a passage of its text and what stands there instead."""
    text = cuda.source_text(variant)
    if edit is not None:
        text = text.replace(*edit)
    macros = [f"-D{name}={value}" for name, value in variant.macros]
    command = [COMPILER, "-E", "-P", "-xc++", "-nostdinc", "-D__CUDA_ARCH__=900", *macros, "-"]
    text = subprocess.run(command, input=text, capture_output=True, text=True, check=True).stdout
    text = re.sub(
        r"extern __shared__ __align__\(\d+\) char shared\[\];", "char *shared = emulator::shared_memory();", text
    )
    load = "load_coherent(const T *p) {"
    text = text.replace(load, f"{load} emulator::check_global(p, sizeof(T));")
    out, at = [], 0
    for m in re.finditer(r"\basm(?:\s+volatile)?\s*\(", text):
        end = m.end() - 1 + next(i for i, _, depth in outside_strings(text[m.end() - 1 :]) if depth == 0)
        out += [text[at : m.start()], statement(text[m.end() : end])]
        at = end + 1
        assert text[at] == ";", "an asm statement ends here"
        at += 1
    out.append(text[at:])
    return f"""#include "emulator.h"
{"".join(out)}
extern "C" const char *run(const void *arguments, unsigned x, unsigned y, unsigned z, int threads, int shared,
                           int cluster, int mode, unsigned seed, int ranges, const unsigned long long *allowed) {{
    auto kernel = [](const void *arguments) {{ {variant.kernel}(*(const Args *)arguments); }};
    return emulator::launch(kernel, arguments, {{x, y, z}}, threads, shared, cluster, mode, seed, ranges, allowed);
}}
"""


@functools.cache
def version() -> str:
    return subprocess.run([COMPILER, "-v"], capture_output=True, text=True, check=True).stderr


def compiled(options: tuple[str, ...], *sources: str) -> Path:
    """A library of these sources."""

    def make(library: Path) -> None:
        with tempfile.TemporaryDirectory() as scratch:
            files = [Path(scratch) / f"{i}.cpp" for i in range(len(sources))]
            for file, text in zip(files, sources, strict=True):
                file.write_text(text)
            command = [COMPILER, *options, *OPTIONS, f"-I{HERE}", *map(str, files), "-o", str(library)]
            subprocess.run(command, check=True)

    headers = [path.read_text() for path in sorted(HERE.glob("*.h"))]
    return builds.once((version(), options, OPTIONS, headers, sources), make)


@functools.cache
def runtime() -> ctypes.CDLL:
    """Found by the kernels that are loaded after it."""
    sources = [path.read_text() for path in sorted(HERE.glob("*.cpp"))]
    return ctypes.CDLL(str(compiled(("-O2",), *sources)), ctypes.RTLD_GLOBAL)


@functools.cache
def library(variant: cuda.Variant, edit: Edit = None) -> Any:
    """Not optimised, which would take longer than it saves: a kernel runs a few times, and mostly in the runtime, which
    brings C++'s library along."""
    runtime()
    run = ctypes.CDLL(str(compiled(("-O0", "-nostdlib"), translated(variant, edit)))).run
    run.restype = ctypes.c_char_p
    return run


# ------------------------------------------------------------------------------------------------- launches


class Emulator:
    """Launches instead of `cuda.Launch`'s: in which mode and order, and on which tensors."""

    def __init__(self, mode: int, seed: int, edit: Edit, together: int = 1) -> None:
        self.mode, self.seed, self.edit, self.together = mode, seed, edit, together
        self.guarded: list[tuple[torch.Tensor, torch.Tensor]] = []  # whole, and the part that may be used
        self.launches = 0
        self.edited = edit is None

    def tensor(self, x: torch.Tensor) -> torch.Tensor:
        """The same numbers and strides, between margins of memory that must stay as it is."""
        if not x.numel():
            return x
        span = 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
        margin = (1 << 16) // x.element_size()  # what a mistake may write there must not hit others
        whole = torch.empty(span + 2 * margin, dtype=x.dtype)
        whole.view(torch.uint8).fill_(0xFF)  # no numbers
        inner = whole[margin : margin + span]
        y = torch.as_strided(inner, x.shape, x.stride(), inner.storage_offset())
        y.copy_(x)
        self.guarded.append((whole, inner))
        return y

    def empty(self, *args: Any, like: Any) -> torch.Tensor:
        x = like(*args)
        x.view(torch.uint8).fill_(0xFF)
        return self.tensor(x)

    def on_own_memory(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """The same with its tensors between margins, which are looked at afterwards."""

        def call(spec: Any, x: Any, *more: Any) -> Any:
            self.guarded = []
            moved = [self.tensor(t) if isinstance(t, torch.Tensor) else t for t in (*x, *more)]
            results = run(spec, type(x)(*moved[: len(x)]), *moved[len(x) :])
            self.check()
            theirs = {}
            for before, after in zip((*x, *more), moved, strict=True):
                if isinstance(before, torch.Tensor):
                    before.data.copy_(after)  # what a call saves; autograd takes no notice
                    theirs[id(after)] = before
            return tuple(theirs.get(id(t), t) for t in results) if isinstance(results, tuple) else results

        return call

    def check(self) -> None:
        for whole, inner in self.guarded:
            offset = inner.storage_offset()
            for margin in (whole[:offset], whole[offset + inner.numel() :]):
                assert bool((margin.view(torch.uint8) == 0xFF).all()), "wrote outside a tensor"

    def launch(
        self, variant: cuda.Variant, device: Any, grid: tuple[int, int, int], threads: int, shared: int,
        constants: dict[str, Any], early: bool = False,
    ) -> Any:  # fmt: skip
        front, rest = variant.arguments.bind(constants)

        def call(*values: float | bytes) -> None:
            arguments = front.pack(*values) + rest[front.size :]
            buffer = ctypes.create_string_buffer(len(arguments) + 64)
            start = ctypes.addressof(buffer) + -ctypes.addressof(buffer) % 64
            ctypes.memmove(start, arguments, len(arguments))
            allowed = [n for _, x in self.guarded for n in (x.data_ptr(), x.numel() * x.element_size())]
            macros = dict(variant.macros)
            cluster = macros["HEAD_DIM"] // 64 if macros.get("SHARE") else self.together
            self.launches += 1
            edit = self.edit if self.edit and self.edit[0] in cuda.source_text(variant) else None
            self.edited |= edit is not None
            failure = library(variant, edit)(
                ctypes.c_void_p(start), *grid, threads, shared, cluster, self.mode, self.seed, len(allowed) // 2,
                (ctypes.c_ulonglong * len(allowed))(*allowed),
            )  # fmt: skip
            if failure:
                raise AssertionError(f"{variant.kernel}: {failure.decode()}")

        call.empty = 0 in grid
        call.at = lambda addresses, values: None if call.empty else call(*values(addresses))
        return call


def encode(
    dtype: torch.dtype, address: int, sizes: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...]
) -> bytes:
    """As `emulator.h` reads it."""
    rank = len(sizes)
    pad = [0] * (5 - rank)
    facts = (address, rank, dtype.itemsize, *sizes, *pad, *box, *pad, *strides, *pad)
    return struct.pack("Q2I5I5I4Q", *facts).ljust(128, b"\0")


@contextlib.contextmanager
def serve(
    op: str, mode: int, seed: int = 0, edit: Edit = None, sm_count: int = 132, together: int = 1
) -> Iterator[Emulator]:
    """Lets backend "cuda" of an operation serve calls on CPU tensors, as on an H200.

    `together`: how many blocks run at the same time. The next start when all of them have ended.
    """
    emulator = Emulator(mode, seed, edit, together)
    with contextlib.ExitStack() as stack:
        stack.callback(forget)
        monkeypatch = stack.enter_context(pytest.MonkeyPatch.context())
        forget()
        hw = hardware.TARGETS[90]._replace(sm_count=sm_count)
        monkeypatch.setattr(hardware, "of", lambda device: hw)
        replace(monkeypatch, op, emulator)
        yield emulator
        assert emulator.edited, f"no such passage: {edit}"


def forget() -> None:
    """What is known of calls: launches belong to an emulator."""
    plans.clear()
    for module in (flash_cuda, latent_cuda, lightning_cuda, dispatch, maps):
        for function in vars(module).values():
            if hasattr(function, "cache_clear"):
                function.cache_clear()


def replace(monkeypatch: pytest.MonkeyPatch, op: str, emulator: Emulator) -> None:
    monkeypatch.setattr(cuda, "Launch", emulator.launch)
    monkeypatch.setattr(cuda, "problem", lambda variant, device, shared: None)
    monkeypatch.setattr(maps, "encode", encode)
    monkeypatch.setattr(Launch, "run", run_launch)
    segments = lightning_cuda.segments

    def guarded_segments(*args: Any) -> Any:
        found = segments(*args)
        return (
            found
            if found.segment_offsets is None
            else found._replace(segment_offsets=emulator.tensor(found.segment_offsets))
        )

    monkeypatch.setattr(lightning_cuda, "segments", guarded_segments)
    workspace = sm90.workspace

    def guarded_workspace(*args: Any) -> Any:
        work, after = workspace(*args)
        return emulator.empty(like=lambda: work), after

    monkeypatch.setattr(sm90, "workspace", guarded_workspace)
    empty_workspace = functools.partial(emulator.empty, like=backward.empty_workspace)
    monkeypatch.setattr(backward, "empty_workspace", empty_workspace)
    kernel = dispatch.kernels(op)["cuda"]
    home = sys.modules[kernel.forward.__module__]
    for module in (home, flash_spec, lightning_cuda, lightning_triton):
        for name in ("empty_rows", "empty_lse", "empty_states", "empty_output"):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, functools.partial(emulator.empty, like=getattr(module, name)))
    own = emulator.on_own_memory
    changed = kernel._replace(
        supports=lambda spec: None, forward=own(kernel.forward), backward=own(kernel.backward), prepare=None,
        prepare_backward=None,
    )  # fmt: skip
    monkeypatch.setitem(dispatch._kernels[op], "cuda", changed)


# ----------------------------------------------------------------- what lightning's splits ask of Triton, here by torch


def run_launch(launch: Launch, run: Callable[[Launch], None] = Launch.run) -> None:
    of_split = {
        split.lightning_scan_kernel: scan,
        split.lightning_segment_offsets_kernel: find_segment_offsets,
        tokens.lightning_token_gradient_kernel: token_gradient,
        sweeps.lightning_sum_heads_kernel: sum_heads,
    }
    if launch.kernel in of_split:
        of_split[launch.kernel](*launch.args)
    else:
        run(launch)


def find_segment_offsets(
    cu: torch.Tensor, segment_offsets: torch.Tensor, sequences: int, N: int, segment: int, most: int, block: int
) -> None:
    count = [-(-n // segment) for n in cu.diff().tolist()]
    segment_offsets.copy_(torch.tensor([0, *count]).cumsum(0))


def scan(
    states: Any, initial: Any, final: Any, decay: Any, keeps: Any, cu: Any, segment_offsets: Any, whole: int, H: int,
    N: int, segment: int, count: int, size: int, *tiles: int,
) -> None:  # fmt: skip
    heads = whole + states.numel() // (count * size) if segment_offsets is None else (segment_offsets.numel() - 1) * H
    for head in range(whole, heads):
        rows, rate = N, 0.0 if decay is None else float(decay[head % H])
        if segment_offsets is None:
            here, kept = (
                states.view(-1, count, size)[head - whole],
                None if keeps is None else keeps.view(-1, count)[head - whole],
            )
        else:
            first, last = segment_offsets[head // H : head // H + 2].tolist()
            here, rows = states.view(-1, H, size)[first:last, head % H], int(cu[head // H + 1] - cu[head // H])
            kept = None if keeps is None else keeps.view(-1, H)[first:last, head % H]
        carry = torch.zeros(size) if initial is None else initial.view(-1, size)[head].clone()
        for i in range(len(here)):
            added = here[i].clone()
            here[i] = carry
            left = math.exp(-rate * (min((i + 1) * segment, rows) - i * segment)) if kept is None else float(kept[i])
            carry = carry * left + added
        if final is not None:
            final.view(-1, size)[head] = carry


def token_gradient(
    ddecay: Any, decay: Any, qdq: Any, kdk: Any, anchors: Any, entered: Any, cu: Any, *sizes: Any
) -> None:  # fmt: skip
    B, H, N = decay.shape
    span, chunk, is_open = sizes[-4:-1]
    ends = [0, N] if cu is None else cu.tolist()
    added = (qdq - kdk).double().sum(1).view(B, H, N)
    sizes = (qdq.abs() + kdk.abs()).double().sum(1).view(B, H, N)
    products, entering = (x.double().sum(2).view(B, H, -1) for x in (anchors, entered))
    for i, (first, last) in enumerate(itertools.pairwise(ends)):
        slot = first // span + i
        for begin in range(first, last, span):
            end, at = min(begin + span, last), slot + (begin - first) // span
            total = -products[:, :, at]
            arrives = (decay[:, :, begin:end] <= 30.0).all(2) & (end < last or not is_open)
            for t in range(begin, end):
                if (t - begin) % chunk == 0:
                    product = entering[:, :, at * (span // chunk) + (t - begin) // chunk]
                    total, arrives = torch.where(product.isfinite(), -product, total), arrives & ~product.isfinite()
                total = torch.where(decay[:, :, t] > 30.0, 0.0, total)
                ddecay[:, :, t] = total
                total = total + added[:, :, t]
            if end < last:
                total = total + products[:, :, at + 1]
            until = sizes[:, :, begin:end].cumsum(2)
            parts = (until - sizes[:, :, begin:end]) / until[:, :, -1:].clamp(min=1e-30)
            ddecay[:, :, begin:end] -= torch.where(arrives[..., None], total[..., None] * parts, 0.0)


def sum_heads(each: Any, stored: Any, *sizes: Any) -> None:
    stored.copy_(each.unflatten(1, (stored.shape[1], -1)).sum(2, dtype=torch.float32))
