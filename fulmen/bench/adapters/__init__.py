"""Operations as the benchmark sees them: a subclass of `Operation` each, whose instance has the operation's name.

A new operation is a class, a row of MODULES and a suite.
"""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from fulmen import dispatch
from fulmen.bench.cases import DTYPES, odd_heads
from fulmen.bench.gate import Problem
from fulmen.testing import Expected

MODULES = {
    "attention": ("flash", "flash_cache", "latent", "lightning", "step"),
    "layers": ("layer", "layer_parts", "layer_step_gqa", "layer_step_lightning", "layer_step_mla"),
    "train": ("train",),
}
OPS = {op: module for module, ops in MODULES.items() for op in ops}
ODD_TOKENS = 333  # no multiple of any tile
Case = dict[str, Any]
Attend = Callable[[Any], Any]
Call = tuple[Any, Any, Callable[..., tuple[Any, ...]]]  # spec, residuals; forward's results -> backward's arguments


class Operation:
    """What is drawn, computed and called for a case."""

    SIZES: ClassVar[Case] = {"B": 1, "H": 8, "H_KV": None, "N": 1024, "D": 64, "E": None, "dtype": "auto"}
    KEYS: ClassVar[Case]  # of a case, with their defaults; None: derived by `complete`
    backends: ClassVar[str]  # the operation of the registry that serves it, unless `within` names another
    function: Any  # case -> what is computed, in words
    drawn: Any  # case, source, fully -> a `Problem`; fully: with states or lse
    attend: Any  # backend -> our implementation as it is timed
    call: Any  # case, fully -> a `Call`, without data

    def complete(self, case: Case) -> Case:
        """The case with every key filled in; raises ValueError."""
        done = {key: DTYPES.get(str(value), value) for key, value in (self.KEYS | case).items()}
        done |= {key: value for key, value in self.derived(done).items() if key in done and not done[key]}
        decoding = (done.get("grad") and self.KEYS.get("grad") is False, "grad=yes: decoding has no gradient")
        for wrong, why in (decoding, *self.faults(done)):
            if wrong:
                raise ValueError(why)
        return done

    def derived(self, case: Case) -> Case:
        """What keys are that a case does not say."""
        return {"H_KV": case["H"], "E": case["D"]}

    def faults(self, case: Case) -> Sequence[tuple[Any, str]]:
        """Whether values do not go together, and why."""
        return ()

    def attend_fully(self, backend: str) -> Attend | None:
        """Our implementation with every output it has; None: it has no more."""
        return None

    def within(self, case: Case) -> tuple[Operation, Case]:
        """The operation of the registry that a case calls, and its case."""
        return self, case

    def problem(self, case: Case, device: torch.device, seed: int) -> Problem:
        """Arguments of the timed shape, compared in part."""
        return self.drawn(case, Source(device, seed, whole=False))

    def small(self, case: Case, device: torch.device, seed: int, fully: bool = False) -> Problem:
        """An odd shape with the case's options, compared whole."""
        return self.drawn(self.small_case(case), Source(device, seed), fully)

    def small_case(self, case: Case) -> Case:
        """The shape of the gate: an odd length and few heads, as many to a head of k and v as in the case."""
        few = {"B": 2, "H": 2 * (case["H"] // case["H_KV"]), "H_KV": 2, "N": min(ODD_TOKENS, case["N"] | 1)}
        return case | few | ({"N_Q": min(few["N"], case["N_Q"])} if "N_Q" in case else {})

    def spec(self, case: Case, device: torch.device) -> Any:
        """What the backends are asked about."""
        operation, own = self.within(case)
        return operation.call(own)[0]._replace(device=device)


def of(op: str) -> Any:
    if op not in OPS:
        raise ValueError(f"op = {op!r}: must be one of {', '.join(OPS)}")
    return getattr(importlib.import_module(f"fulmen.bench.adapters.{OPS[op]}"), op)


def backends_of(op: str, case: Case) -> str:
    """The operation of the registry whose backends serve a case of `op`."""
    return of(op).within(case)[0].backends


# ------------------------------------------------------------------------------------------------------- cases
def keys_of(op: str) -> Case:
    """The keys of a case with their defaults."""
    return {"grad": True} | of(op).KEYS


def check(op: str, case: Case) -> None:
    """Raises ValueError for a key that `op` does not have, and for a value that its key cannot have."""
    known = keys_of(op)
    if unknown := sorted(set(case) - set(known)):
        raise ValueError(f"{op} has no {', '.join(unknown)}; a case says {', '.join(of(op).KEYS)}")
    for key, value in case.items():
        usual = known[key]
        if key == "dtype":
            right, words = DTYPES.get(value, value) in ("auto", *DTYPES.values()), f"one of {', '.join(DTYPES)}"
        elif isinstance(usual, bool):
            right, words = isinstance(value, bool), "yes or no"
        elif isinstance(usual, str):
            right, words = isinstance(value, str), "a name"
        else:
            right = value is None or (type(value) is int and (value > 0 or value == usual))
            words = "a whole number above 0"
        if not right:
            raise ValueError(f"{key}={value}: must be {words}")
    if why := odd_heads(case):
        raise ValueError(why)


def complete(op: str, case: Case, device: torch.device) -> Case:
    """The case, checked, with every key filled in; dtype "auto" is fp32 on a CPU and bf16 on a GPU."""
    check(op, case)
    full: Case = of(op).complete(case)
    usual = "float32" if device.type == "cpu" else "bfloat16"
    return full | ({"dtype": usual} if full["dtype"] == "auto" else {})


def dtype_of(case: Case) -> torch.dtype:
    return getattr(torch, case["dtype"])


def shapes(case: Case) -> tuple[tuple[int, ...], ...]:
    """Of q, k, v and o."""
    B, H, H_KV, N, D, E = (case[key] for key in ("B", "H", "H_KV", "N", "D", "E"))
    N_Q = case.get("N_Q", N)
    return (B, H, N_Q, D), (B, H_KV, N, D), (B, H_KV, N, E), (B, H, N_Q, E)


def taken(op: str, case: Case, device: torch.device, backend: str) -> str:
    """What "auto" takes, with its kernel where the backend has several; raises NotImplementedError, and says why.

    Backends that were not asked for are not asked, either, since to answer one may have to compile.
    """
    registered, spec = backends_of(op, case), of(op).spec(case, device)
    if backend != "auto":
        kernel = dispatch.kernels(registered).get(backend)
        missing = dispatch._missing[registered].get(backend, f"there is no backend {backend!r}")
        if why := missing if kernel is None else kernel.supports(spec):
            raise NotImplementedError(why)
    choice = dispatch.choose(registered, spec, dispatch.pick(registered, spec, backend).name)
    return choice.backend if choice.kernel == choice.backend else f"{choice.backend} ({choice})"


# ------------------------------------------------------------------------------------------------------ inputs
class Source:
    """Random numbers of a seed, drawn on their device: at the timed sizes a CPU would take longer than all the rest.

    whole  all of a call is compared; otherwise one head, which the seed draws
    make   what torch's random functions are given
    """

    def __init__(self, device: torch.device, seed: int, whole: bool = True) -> None:
        self.device, self.seed, self.whole = device, seed, whole
        generator = None if device.type == "meta" else torch.Generator(device).manual_seed(seed)
        self.make: dict[str, Any] = {"generator": generator, "device": device}

    def heads(self, q: Tensor, k: Tensor) -> Heads:
        """What is compared of a call on q and k."""
        if self.whole:
            return Heads(0, 0, q.shape[1] // k.shape[1], whole=True)
        batch, head = divmod(random.Random(self.seed).randrange(max(1, k.shape[0] * k.shape[1])), k.shape[1])
        return Heads(batch, head, q.shape[1] // k.shape[1], whole=False)

    def normal(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.randn(shape, dtype=torch.float32, **self.make).to(dtype)


class Heads(NamedTuple):
    """The part of a call that is compared: all of it, or one head of k and v with its queries, or the last of those."""

    batch: int
    head: int
    group: int
    whole: bool
    last: int | None = None  # queries
    shared: tuple[str, ...] = ("k", "v", "dk", "dv")  # tensors that have the heads of k
    paged: bool = False  # k and v lie in pages, which all rows share

    def pick(self, name: str, x: Tensor) -> Tensor:
        """That part of an argument or a result."""
        if self.whole:
            return x
        row = slice(self.batch, self.batch + 1)
        if name in ("kv", "kv_lengths", "page_table"):
            return x[row]
        each = 1 if name in self.shared else self.group
        heads = slice(self.head * each, (self.head + 1) * each)
        if x.ndim == 1:  # slopes
            return x[heads]
        part = x[:, heads] if self.paged and name in ("k", "v") else x[row, heads]
        return part[:, :, -self.last :] if self.last and name in ("q", "o", "do", "dlse") else part


def problem_of(
    x: Any, leaves: Sequence[str], douts: dict[str, Tensor], oracle: Callable[[Any], dict[str, Expected]], heads: Heads
) -> Problem:
    """The call on a named tuple. `oracle`: its part that is compared -> what must come out of that."""
    tensors = {name: t for name, t in x._asdict().items() if isinstance(t, Tensor) and t.numel()}

    def expected() -> dict[str, Expected]:
        part = {name: heads.pick(name, t).detach() for name, t in tensors.items()}
        if "decay" in leaves:
            part["decay"].requires_grad_()
        return oracle(x._replace(**part))

    given = {name: tensors[name].requires_grad_() for name in leaves}
    constants = {name: t for name, t in tensors.items() if name not in (*leaves, "do", "dlse", "dstate")}
    return Problem(x, given, douts, expected, constants, heads.pick)


META = Source(torch.device("meta"), 0)  # shapes only
