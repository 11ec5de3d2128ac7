"""Without a GPU the Triton kernels run in Triton's interpreter, chosen here before anything imports triton.

Tests that need the real compiler start a process of their own: see `tests/aot.py`.
"""

from __future__ import annotations

import functools
import gc
import hashlib
import os
import pickle
import random
import sys
import time
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import aot, builds, fresh, interpreter, pairs

gc.disable()  # until tests are collected: what modules make at import stays

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)  # the workers are the parallelism
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # else inductor starts processes that import torch
# Inductor's few loops on a CPU are small: headers of vectors and their compiled form take most of g++'s time.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")
os.environ.setdefault("TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS", "0")
# Workers and all they start keep the memory they free: to get it anew from the kernel, page by page, takes a tenth of
# what Triton's interpreter takes.
for name, size in {"MMAP_THRESHOLD": 2**25, "TRIM_THRESHOLD": 2**28, "TOP_PAD": 2**25}.items():
    os.environ.setdefault(f"MALLOC_{name}_", str(size))


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.set_threshold(100_000)  # interpreted kernels and compilers make much that is soon gone
    gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish() -> None:
    gc.freeze()  # Python ends without a look at what the tests have left


# Left to `make test-all`: all architectures but the one we measure on and one with the least shared memory, which sm_86
# and sm_89 have, too; all modes of the emulator but ANY; in Triton's interpreter all dtypes but one, of which bf16 is
# skipped there; of tests with three options or more, and of kernels compiled for a GPU, cases whose pairs of options
# others have; and of other tests in the files of LONG all but one in so many, drawn by name.
ARCHITECTURES, MODE, OPERATIONS = (90, 120), 2, ("flash", "latent", "lightning", "step")
LONG = {
    "integrations/test_edges.py": 3, "integrations/test_models.py": 3, "integrations/test_transformers.py": 3,
    "latent/test_cuda.py": 2, "layers/test_compile.py": 2, "lightning/test_integration.py": 2,
    "parallel/test_layers.py": 2, "parallel/test_lightning.py": 2, "parallel/test_plans.py": 2,
}  # fmt: skip


def options(item: pytest.Item) -> dict[str, Any]:
    """A case's options by name; of a launch that is compiled, its fields."""
    given = item.callspec.params if hasattr(item, "callspec") else {}
    return given["case"]._asdict() if compiles(item) and "case" in given else given


def compiles(item: pytest.Item) -> bool:
    return "compiler" in getattr(item, "fixturenames", ())


def is_nightly(item: pytest.Item) -> bool:
    given = options(item)
    if given.get("dtype") in ("bf16", "fp16", "fp32") and "backend" in given and item.path.parent.name in OPERATIONS:
        return not torch.cuda.is_available() and given["backend"] != "sdpa" and not runs_here(item)
    if item.path.name.endswith("_emulated.py"):
        return given.get("mode", MODE) != MODE
    every = LONG.get(f"{item.path.parent.name}/{item.path.name}", 1)
    if 0 < len(given) < 3 and zlib.crc32(item.nodeid.encode()) % every:
        return True
    return (compiles(item) or "_fits_" in item.name) and given.get("arch") not in (None, *ARCHITECTURES)


def runs_here(item: pytest.Item) -> bool:
    """Without a GPU: not for a backend that is skipped there, nor in a dtype that is not interpreted."""
    given = options(item)
    backend, dtype = str(given.get("backend", "eager")), given.get("dtype")
    if compiles(item) or backend in ("eager", "reference"):
        return True
    return backend.startswith("triton") and dtype in (None, "fp16" if item.path.parent.name == "flash" else "fp32")


def repeated(items: list[pytest.Item]) -> list[pytest.Item]:
    """Cases of tests with three options or more that have no pair of options of their own."""
    tests: dict[Any, list[pytest.Item]] = {}
    for item in items:
        if len(options(item)) > 2 and runs_here(item):
            tests.setdefault((item.path, item.originalname), []).append(item)
    found = []
    for cases in tests.values():
        chosen = set(pairs.covering([pairs.pairs(options(item)) for item in cases]))
        found += [item for i, item in enumerate(cases) if i not in chosen]
    return found


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Any:
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    nightly = [item for item in items if item.get_closest_marker("nightly") or is_nightly(item)]
    left = set(map(id, gpu + nightly))
    nightly += repeated([item for item in items if id(item) not in left])
    for item in nightly:
        item.add_marker(pytest.mark.nightly)
    for item in gpu:
        if not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
    yield  # markers select
    items[:] = shared_out(items)


def shared_out(items: list[pytest.Item]) -> list[pytest.Item]:
    """For two workers, who get half of the tests each and take from the end of each other's when they are done.

    One half begins with what asks processes of ranks, the other with what asks the compiler's, so that only one worker
    starts them. Then comes what is slow, so that the end is short.
    """
    asked = ("nursery", "fresh_process", "compiler")
    fixtures = [set(getattr(item, "fixturenames", ())).intersection(asked) for item in items]
    compiled = [item for item, uses in zip(items, fixtures, strict=True) if "compiler" in uses]
    first = [item for item, uses in zip(items, fixtures, strict=True) if uses and "compiler" not in uses]
    rest = [item for item, uses in zip(items, fixtures, strict=True) if not uses]
    rest.sort(key=lambda item: item.get_closest_marker("slow") is None)
    half = max(0, len(items) // 2 - len(first))
    return [*first, *rest[:half], *compiled, *rest[half:]]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """What a test draws does not depend on the tests before it; fixtures come after this.

    Workers share a GPU: a test begins when a sixth of its memory is free, or after a minute.
    """
    torch.manual_seed(0)
    random.seed(0)
    if item.get_closest_marker("gpu") and torch.cuda.is_available():
        until = time.monotonic() + 60
        while 6 * torch.cuda.mem_get_info()[0] < torch.cuda.mem_get_info()[1] and time.monotonic() < until:
            time.sleep(0.1)


@pytest.fixture(autouse=True)
def poisoned():
    """torch.empty and its kin hand out NaN (integers: their maximum), so that an output nobody wrote is seen.

    PyTorch's own switch: it also reaches allocations made in C++ and inside compiled graphs. It is armed by
    deterministic mode, whose complaints about other operations are not our business.
    """
    was = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = was


@pytest.fixture(autouse=True)
def compiled_anew():
    """What dynamo has seen in other tests, and sizes it took for dynamic there, would change what this one compiles."""
    yield
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()


# --------------------------------------------------------------------------------- once a run, or once for all runs


@pytest.fixture(scope="session")
def compiler():
    """Triton's compiler, in a process of its own."""
    process = aot.Compiler()
    yield process
    process.close()


@pytest.fixture(scope="session")
def fresh_process():
    """fresh_process(program): what a program prints where torch is imported, and nothing of fulmen."""
    process = fresh.Fresh()
    yield process
    process.close()


@pytest.fixture(scope="session", autouse=True)
def kernels_compiled_once():
    """NVRTC's machine code is kept in build/tests."""
    from fulmen.cuda import compile as module

    compile_text = module.compile_text

    @functools.wraps(compile_text)
    def kept(*source: Any) -> tuple[bytes, str]:
        def make(file: Path) -> None:
            file.write_bytes(pickle.dumps(compile_text(*source)))

        return pickle.loads(builds.once(("NVRTC", module.nvrtc()[1], *source), make).read_bytes())

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(module, "compile_text", kept)
        yield


@pytest.fixture
def compiled_elsewhere(monkeypatch: pytest.MonkeyPatch) -> Any:
    """compiled_elsewhere(variants): a backend takes these kernels for compiled. Other tests compile and read them: all
    in `make test-all`, and in `make test` those with every pair of macros."""
    from fulmen.cuda import launch

    def take(variants: Any) -> None:
        known, compiled = frozenset(variants), launch.cubin_or_reason
        monkeypatch.setattr(launch, "cubin_or_reason", lambda one: b"" if one in known else compiled(one))

    return take


@pytest.fixture(scope="session", autouse=True)
def references_computed_once():
    """What inputs must give is remembered for the backends and modes that get the same ones next."""
    from fulmen.testing import flash, lightning

    with pytest.MonkeyPatch.context() as monkeypatch:
        for module in (flash, lightning):
            monkeypatch.setattr(module, "expected", remembered(module.expected))
        yield


def remembered(expected: Any) -> Any:
    """The same, which keeps its last answers about tensors on a CPU."""
    answers: dict[Any, Any] = {}

    @functools.wraps(expected)
    def ask(x: Any, *args: Any, **kwargs: Any) -> Any:
        if x.q.device.type != "cpu":
            return expected(x, *args, **kwargs)
        key = tuple(map(content, x)), args, tuple(kwargs.items()), torch.is_grad_enabled()
        if key not in answers:
            answers[key] = expected(x, *args, **kwargs)
            if len(answers) > 256:
                del answers[next(iter(answers))]
        return answers[key]

    return ask


def content(x: Any) -> Any:
    """A value, or all that a tensor is but its place."""
    if not isinstance(x, torch.Tensor):
        return x
    numbers = x.detach().reshape(-1).clone(memory_format=torch.contiguous_format).view(torch.uint8).numpy()
    return x.dtype, x.shape, x.stride(), hashlib.sha256(numbers).digest()


@pytest.fixture(scope="session", autouse=True)
def interpreted_faster():
    if os.environ.get("TRITON_INTERPRET") != "1":
        yield
        return
    with interpreter.faster():
        yield


MAX_RESERVED = 2**31  # bytes of GPU memory that a process may keep from one test to the next: others share the GPU


def pytest_runtest_logfinish() -> None:
    if torch.cuda.is_initialized() and torch.cuda.memory_reserved() > MAX_RESERVED:
        gc.collect()
        torch.cuda.empty_cache()


# ---------------------------------------------------------------------- kernels of decoding steps, interpreted


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Fused operations without gradients use their kernels on the CPU and in fp32, too; names of those that ran."""
    from fulmen import launch, plans
    from fulmen.boundary import is_plain_eager
    from fulmen.cuda.launch import address
    from fulmen.layers import fused, latent
    from fulmen.layers.fused import projections

    names: list[str] = []
    run, repeated = launch.run, launch.repeated

    def checked(describe: Any, options: Any) -> Any:
        """A repeated call finds the addresses of all launches among those of its tensors, the outputs and the work."""

        def described(options: Any, *tensors: torch.Tensor | None) -> Any:
            outputs, found = describe(options, *tensors)
            chain = launch.chain_of(found)
            every = (None, *tensors, *outputs, *chain.work)
            placed = launch.places_of(chain, every)
            assert placed is not None
            at = [address(x) for x in every]
            at += [at[i] + shift for i, shift in placed[1]]
            for one, place in zip(chain.launches, placed[0], strict=True):
                assert [at[i] for i in place] == [address(x) for x in one.given]
            return outputs, found

        return repeated(described, options)

    def noted(one: Any) -> None:
        names.append(one.kernel.__name__)
        run(one)

    def serves(*tensors: torch.Tensor) -> bool:
        same = fused.are_alike(*tensors)
        return same and tensors[0].dtype in (torch.float32, torch.float16) and is_plain_eager(*tensors)

    monkeypatch.setattr(launch, "run", noted)
    monkeypatch.setattr(launch, "repeated", checked)
    monkeypatch.setattr(fused, "serves", serves)
    for module in (fused, projections, latent):
        monkeypatch.setattr(module, "on_gpu", lambda x: True)
    monkeypatch.setattr(projections, "DTYPES", (torch.float32, torch.float16))
    plans.clear()
    return names


@pytest.fixture
def interpreted(ran: list[str]) -> list[str]:
    """The same for tests with tensors on the CPU."""
    if torch.cuda.is_available():
        pytest.skip("Triton's interpreter is for machines without a GPU")
    return ran
