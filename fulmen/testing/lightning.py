"""Inputs and oracles for lightning attention; see `fulmen.testing` for the tolerance.

    x = inputs(B=2, H=4, N=113, D=64, dtype=torch.float16, decay="mixed", initial_state=True)
    check(x, backend="triton")          # o, the final state and every gradient against fp64

The yardstick is the attention matrix written out. A state and its gradient are carried, and rounded, from chunk to
chunk, where the plain formula rounds once: they get the square root of the number of chunks (of 16 rows, the shortest
a backend uses) in roundings. So does the gradient of the decay, a sum over all rows, of the norm of its terms: they
cancel. That of a decay for each token is a running sum; its terms are those of the whole sequence. Of sequences whose
matrix is too large, `sampled` writes out some rows.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fulmen.lightning.op import lightning_attention_with_state
from fulmen.lightning.reference import Exponents, exponents
from fulmen.testing import (
    FORWARD_FACTOR,
    GRADIENT_FACTOR,
    Expected,
    assert_close,
    carried_roundings,
    fused_rows,
    rows,
)

__all__ = [
    "DECAYS", "FORWARD_FACTOR", "GRADIENT_FACTOR", "TOKEN_DECAYS", "Attend", "Inputs", "Outputs", "assert_close",
    "backend", "check", "check_summed", "decay_terms", "evaluate", "expected", "fused_rows", "inputs", "low_precision",
    "reference", "rows", "sampled", "slopes", "token_terms",
]  # fmt: skip

DECAYS = {
    "zero": (0.0,), "weak": (0.02,), "strong": (8.0,), "steep": (3.0, 40.0, 0.0), "mixed": (0.004, 0.7, 0.0, 8.0, 0.06),
}  # fmt: skip
# For each token: a slope of a head, as above, times a random number, or any of these numbers at random.
TOKEN_DECAYS = {"token": "mixed", "extreme": (0.0, 1e-6, 0.2, 1e4)}
MAX_MATRIX = 9 * 2**25  # bytes of attention matrices in fp64, two of 4,100 rows: autograd keeps about eight times that


class Inputs(NamedTuple):
    """The arguments of one call and the gradients that come back to it."""

    q: Tensor
    k: Tensor
    v: Tensor
    decay: Tensor | None
    scale: float
    initial_state: Tensor | None
    cu_seqlens: Tensor | None
    do: Tensor
    dstate: Tensor

    def options(self) -> dict[str, Any]:
        """The keyword arguments of `lightning_attention`."""
        return {"scale": self.scale, "initial_state": self.initial_state, "cu_seqlens": self.cu_seqlens}

    def to(self, dtype: torch.dtype) -> Inputs:
        """Every floating tensor in another dtype; strides stay."""
        names = ("q", "k", "v", "decay", "initial_state", "do", "dstate")
        given = {name: getattr(self, name) for name in names}
        cast: dict[str, Any] = {name: x.to(dtype) for name, x in given.items() if x is not None}
        return self._replace(**cast)


class Outputs(NamedTuple):
    o: Tensor
    state: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor
    dinitial: Tensor | None
    ddecay: Tensor | None = None  # where inputs.decay requires it


Attend = Callable[[Inputs], tuple[Tensor, Tensor]]

# ------------------------------------------------------------------------------------------------ inputs


def slopes(kind: str | None, H: int, device: str | torch.device = "cpu") -> Tensor | None:
    """One of DECAYS repeated over H heads, or None."""
    if kind is None:
        return None
    values = DECAYS[kind]
    return torch.tensor([values[h % len(values)] for h in range(H)], dtype=torch.float32, device=device)


def token_decays(kind: str, B: int, H: int, N: int, device: str | torch.device, generator: torch.Generator) -> Tensor:
    """One of TOKEN_DECAYS, fp32 (B, H, N)."""
    values = TOKEN_DECAYS[kind]
    if isinstance(values, str):
        each = slopes(values, H)
        assert each is not None
        return (torch.rand(B, H, N, generator=generator) * 2 * each[:, None]).to(device)
    return torch.tensor(values)[torch.randint(len(values), (B, H, N), generator=generator)].to(device)


def inputs(
    B: int = 1,
    H: int = 2,
    N: int = 64,
    D: int = 16,
    *,
    E: int | None = None,
    H_KV: int | None = None,
    groups: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    layout: str = "bhnd",
    decay: str | Tensor | None = None,
    scale: float = 1.0,
    initial_state: bool = False,
    lengths: Sequence[int] | None = None,
    seed: int = 0,
) -> Inputs:
    """Random arguments. `layout`: "bhnd", "bnhd" or "fused"; `lengths` packs sequences, their sum is N.

    groups  heads of q and k, where v has H
    """
    E, H_KV = E or D, H_KV or H
    heads = (groups or H, groups or H_KV, H_KV)
    if lengths is not None:
        B, N = 1, sum(lengths)
    states = B if lengths is None else len(lengths)
    generator = torch.Generator().manual_seed(seed)
    make: dict[str, Any] = {"dtype": dtype, "device": device, "generator": generator}
    if layout == "fused":
        q, k, v = fused_rows(B, heads, N, (D, D, E), **make)
    else:
        q, k, v = (rows(B, h, N, s, layout=layout, **make) for h, s in zip(heads, (D, D, E), strict=True))
    do = rows(B, H, N, E, layout="bhnd" if layout == "bhnd" else "bnhd", **make)
    make["dtype"] = torch.float64 if dtype == torch.float64 else torch.float32
    dstate = rows(states, H, D, E, **make)
    cu_seqlens = None
    if lengths is not None:
        ends = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
        cu_seqlens = torch.tensor(ends, dtype=torch.int32, device=device)
    if isinstance(decay, str) and decay in TOKEN_DECAYS:
        decay = token_decays(decay, B, H, N, device, generator)
        decay = decay if layout == "bhnd" else decay.mT.contiguous().mT
    return Inputs(
        q, k, v, slopes(decay, H, device) if decay is None or isinstance(decay, str) else decay, scale,
        rows(states, H, D, E, **make) if initial_state else None, cu_seqlens, do, dstate,
    )  # fmt: skip


# ----------------------------------------------------------------------------------------------- oracles


def evaluate(attend: Attend, x: Inputs, use: Sequence[str] = ("o", "state")) -> Outputs:
    """`attend`'s results and all gradients, from the results named in `use` (the others get no gradient)."""
    leaves = {name: getattr(x, name).detach().requires_grad_() for name in ("q", "k", "v")}
    if x.initial_state is not None:
        leaves["initial_state"] = x.initial_state.detach().requires_grad_()
    if x.decay is not None and x.decay.requires_grad:
        leaves["decay"] = x.decay.detach().requires_grad_()
    o, state = attend(x._replace(**leaves))
    given = {"o": (o, x.do), "state": (state, x.dstate.to(state.dtype))}
    results, gradients = zip(*(given[name] for name in use), strict=True)
    grads = torch.autograd.grad(results, list(leaves.values()), gradients, materialize_grads=True)
    of = dict(zip(leaves, grads, strict=True))
    dq, dk, dv = grads[:3]
    return Outputs(o.detach(), state.detach(), dq, dk, dv, of.get("initial_state"), of.get("decay"))


def backend(name: str) -> Attend:
    """A backend as `evaluate` takes it."""
    return lambda x: lightning_attention_with_state(x.q, x.k, x.v, x.decay, **x.options(), backend=name)


def reference(x: Inputs, use: Sequence[str] = ("o", "state"), oracle: str = "quadratic") -> Outputs:
    """The same quantities in fp64, by autograd through an oracle of `fulmen.lightning.reference`."""
    from fulmen.lightning import reference as oracles

    def attend(x: Inputs) -> tuple[Tensor, Tensor]:
        return oracles.attend(getattr(oracles, oracle), x.q, x.k, x.v, x.decay, **x.options())

    return evaluate(attend, x.to(torch.float64), use)


def low_precision(x: Inputs, use: Sequence[str] = ("o", "state")) -> Outputs:
    """The same quantities by the quadratic formula in the inputs' own dtype: the yardstick.

    In fp16 a product or a sum over k v^T can pass 65,504 where the results do not. All results are
    homogeneous in the inputs, so then the yardstick is measured on inputs times 2^-a, which only moves the
    exponents: o and the gradients of q, k, v come back times 2^3a, the states times 2^2a, the gradient of the decay
    times 2^4a (all in fp64).
    """
    for a in (0, 3, 6):
        shrunk = x._replace(**{n: getattr(x, n) * 2.0**-a for n in ("q", "k", "v", "do")})
        shrunk = shrunk._replace(dstate=x.dstate * 4.0**-a)
        if x.initial_state is not None:
            shrunk = shrunk._replace(initial_state=x.initial_state * 4.0**-a)
        out = evaluate(_plain, shrunk, use)
        if x.q.dtype != torch.float16 or all(y is None or bool(y.isfinite().all()) for y in out):
            break
    if a == 0:
        return out
    degree = {"state": 2, "dinitial": 2, "ddecay": 4}
    grown = {n: y.double() * 2.0 ** (a * degree.get(n, 3)) for n, y in out._asdict().items() if y is not None}
    return out._replace(**grown)


def _plain(x: Inputs) -> tuple[Tensor, Tensor]:
    """((q k^T) * M) v, as one would write it; only M's exponents are computed in more than the dtype."""
    q, k, v = _each_head(x)
    ends = [0, x.q.shape[2]] if x.cu_seqlens is None else x.cu_seqlens.tolist()
    dtype, fp32 = x.q.dtype, torch.promote_types(x.q.dtype, torch.float32)
    os, states = [], []
    for i, (begin, end) in enumerate(itertools.pairwise(ends)):
        q_, k_, v_ = (y[:, :, begin:end] for y in (q, k, v))
        e = _exponents(x, begin, end, fp32)
        m = torch.where(e.seen, torch.exp(-e.apart), 0.0).to(dtype)
        o = (q_ @ k_.mT * m) @ v_
        state = (k_ * torch.exp(-e.until).to(dtype)).mT @ v_
        if x.initial_state is not None:
            initial = (x.initial_state if x.cu_seqlens is None else x.initial_state[i : i + 1]).to(dtype)
            o = o + q_ @ initial * torch.exp(-e.since).to(dtype)
            state = state + initial * torch.exp(-e.whole).to(dtype)
        os.append(o * x.scale)
        states.append(state.to(fp32))
    return torch.cat(os, dim=2), torch.cat(states)


def _each_head(x: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v with as many heads as the output has."""
    H = max(x.q.shape[1], x.v.shape[1])
    q, k, v = (y.repeat_interleave(H // max(y.shape[1], 1), dim=1) for y in (x.q, x.k, x.v))
    return q, k, v


def _exponents(x: Inputs, begin: int, end: int, dtype: torch.dtype) -> Exponents:
    """The decay between tokens `begin` to `end`."""
    s = torch.zeros(x.do.shape[1], device=x.q.device) if x.decay is None else x.decay.to(dtype)
    return exponents(s[:, :, begin:end] if s.ndim == 3 else s, end - begin, dtype)


# --------------------------------------------------------------------------------------------- comparison


def expected(x: Inputs, use: Sequence[str] = ("o", "state"), rows: int | None = None) -> dict[str, Expected]:
    """What every result and gradient of this call must be, by name.

    rows  writes out the attention matrix of so many rows at a time and carries the state between them: for sequences
          whose whole matrix does not fit.
    """
    parts = _by_heads(x) if rows is None else [x]
    if len(parts) > 1:
        found = [expected(part, use) for part in parts]
        return {name: _joined([part[name] for part in found]) for name in found[0]}
    if rows is None or rows >= x.q.shape[2]:
        low, exact = low_precision(x, use), reference(x, use)
    else:
        low, exact = evaluate(functools.partial(_pieces, _plain, rows), x, use), _exact_pieces(x, use, rows)
    carried = carried_roundings(x.q.shape[2])
    roundings = dict.fromkeys(("state", "dinitial", "ddecay"), carried)
    return {
        name: Expected(
            getattr(low, name), value, GRADIENT_FACTOR if name.startswith("d") else FORWARD_FACTOR,
            roundings.get(name, 1.0), _decay_terms(x, use) if name == "ddecay" else None,
        )
        for name, value in exact._asdict().items()
        if value is not None
    }  # fmt: skip


def _by_heads(x: Inputs) -> list[Inputs]:
    """The call in parts of its heads, whose attention matrices fit MAX_MATRIX; heads that share one stay together."""
    groups = min(t.shape[1] for t in (x.q, x.k, x.v))
    if not x.q.numel() or not groups:
        return [x]
    N = x.q.shape[2] if x.cu_seqlens is None else int(x.cu_seqlens.diff().max())
    each = max(1, MAX_MATRIX // (8 * x.q.shape[0] * x.do.shape[1] // groups * N * N))
    if each >= groups:
        return [x]

    def part(t: Tensor, first: int, dim: int = 1) -> Tensor:
        heads = t.shape[dim] // groups
        return t.narrow(dim, first * heads, min(each, groups - first) * heads)

    parts = []
    for first in range(0, groups, each):
        some: dict[str, Any] = {name: part(getattr(x, name), first) for name in ("q", "k", "v", "do", "dstate")}
        state = None if x.initial_state is None else part(x.initial_state, first)
        decay = None if x.decay is None else part(x.decay, first, int(x.decay.ndim == 3))
        parts.append(x._replace(**some, initial_state=state, decay=decay))
    return parts


def _joined(parts: Sequence[Expected]) -> Expected:
    """Of all heads, from those of some."""
    dim = int(parts[0].exact.ndim > 1)
    low, exact = torch.cat([part.low for part in parts], dim), torch.cat([part.exact for part in parts], dim)
    terms = [part.terms for part in parts if part.terms is not None]
    return parts[0]._replace(low=low, exact=exact, terms=torch.cat(terms, dim) if terms else None)


def _decay_terms(x: Inputs, use: Sequence[str]) -> Tensor:
    """What is rounded on the way to the gradient of the decay."""
    assert x.decay is not None
    return decay_terms(x, use).norm(dim=1) if x.decay.ndim == 1 else token_terms(x, use)


def token_terms(x: Inputs, use: Sequence[str] = ("o", "state")) -> Tensor:
    """(B, H, N), fp64: the norm of what the gradient of a decay for each token is the running sum of: q . dq, k . dk of
    each row of the sequence, and the states' product."""
    assert x.decay is not None
    x = x._replace(decay=x.decay.detach()).to(torch.float64)
    norms = torch.zeros(x.do.shape[:3], dtype=torch.float64, device=x.q.device)
    q, k, v = _each_head(x)
    ends = [0, x.q.shape[2]] if x.cu_seqlens is None else x.cu_seqlens.tolist()
    for i, (begin, end) in enumerate(itertools.pairwise(ends)):
        which = slice(None) if x.cu_seqlens is None else slice(i, i + 1)
        q_, k_, v_, do = (y[:, :, begin:end] for y in (q, k, v, x.do))
        e = _exponents(x, begin, end, torch.float64)
        each = torch.zeros_like(e.apart)
        if "o" in use:
            each = torch.where(e.seen, x.scale * torch.exp(-e.apart) * (q_ @ k_.mT) * (do @ v_.mT), 0.0)
        rows, columns = each.sum(3), each.sum(2)
        if "o" in use and x.initial_state is not None:
            rows = rows + x.scale * (torch.exp(-e.since) * (q_ @ x.initial_state[which]) * do).sum(3)
        if "state" in use:
            columns = columns + (torch.exp(-e.until) * (k_ @ x.dstate[which]) * v_).sum(3)
        norms[:, :, begin:end] = (rows.square() + columns.square()).sum(2, keepdim=True).sqrt()
    return norms


def decay_terms(x: Inputs, use: Sequence[str] = ("o", "state")) -> Tensor:
    """(H, terms), fp64: what the gradient of the decay is the sum of, a term for each row of q and of k."""
    assert x.decay is not None
    s = x.decay.detach().double().view(-1, 1)
    x = x.to(torch.float64)
    each_q, each_k, each_v = _each_head(x)
    terms = []
    ends = [0, x.q.shape[2]] if x.cu_seqlens is None else x.cu_seqlens.tolist()
    for i, (begin, end) in enumerate(itertools.pairwise(ends)):
        which = slice(None) if x.cu_seqlens is None else slice(i, i + 1)
        q, k, v, do = (y[:, :, begin:end] for y in (each_q, each_k, each_v, x.do))
        N = end - begin
        t = torch.arange(N, dtype=torch.float64, device=q.device)
        apart = (t[:, None] - t).clamp(min=0)
        if "o" in use:
            each = apart * torch.exp(-s[..., None] * apart) * (q @ k.mT).tril() * (do @ v.mT)
            terms.append(-x.scale * each.sum((0, 3)))
            if x.initial_state is not None:
                seen = (q @ x.initial_state[which] * do).sum((0, 3))
                terms.append(-x.scale * (t + 1) * torch.exp(-s * (t + 1)) * seen)
        if "state" in use:
            met = ((k @ x.dstate[which]) * v).sum((0, 3))
            terms.append(-(N - 1 - t) * torch.exp(-s * (N - 1 - t)) * met)
            if x.initial_state is not None:
                met = (x.initial_state[which] * x.dstate[which]).sum((0, 2, 3)).view(-1, 1)
                terms.append(-N * torch.exp(-s * N) * met)
    return torch.cat([x.q.new_zeros(x.do.shape[1], 1), *terms], dim=1)


def check_summed(x: Inputs, ddecay: Tensor, use: Sequence[str] = ("o", "state")) -> None:
    """Raises AssertionError unless sums of s_t ds_t over 128 tokens are right, too.

    A factor of a head's decay has the sum over all tokens as its gradient, which adds up the errors that tokens share.
    Shorter sums show them as well, and there are enough of them to measure the plain computation by.
    """
    assert x.decay is not None
    s, (low, exact, factor, *_) = x.decay.detach().double(), expected(x, use)["ddecay"]

    def sums(y: Tensor) -> Tensor:
        return torch.stack([part.sum(2) for part in (y.double() * s).split(128, 2)], 2)

    name, found = "sums over tokens of decay * ddecay", sums(ddecay).to(ddecay.dtype)
    assert_close(name, found, sums(low), sums(exact), factor)


def sampled(x: Inputs, at: Sequence[int]) -> dict[str, Expected]:
    """What rows `at` of o and of the gradients must be, and the state after the last row, where the attention matrix is
    too large to be written out whole; from o's gradient alone, no initial state, nothing packed or shared.

    The state is carried in fp32 over chunks, so that o and the gradients get its roundings, too.
    """
    N, dtype = x.q.shape[2], x.q.dtype
    carried = carried_roundings(N)
    more = carried * torch.finfo(torch.float32).eps / torch.finfo(dtype).eps
    sums = {
        "o": (x.q, x.k, x.v, False), "dq": (x.do, x.v, x.k, False),
        "dk": (x.v, x.do, x.q, True), "dv": (x.k, x.q, x.do, True),
    }  # fmt: skip
    found = {}
    for name, (a, b, c, reverse) in sums.items():
        low, exact = (_some_rows(a, b, c, x.decay, x.scale, at, reverse, kind) for kind in (dtype, torch.float64))
        found[name] = Expected(low, exact, FORWARD_FACTOR if name == "o" else GRADIENT_FACTOR, 1 + more)
    low, exact = (_last_state(x.k, x.v, x.decay, kind) for kind in (dtype, torch.float64))
    found["state"] = Expected(low, exact, FORWARD_FACTOR, carried)
    return found


def _some_rows(
    a: Tensor, b: Tensor, c: Tensor, decay: Tensor | None, scale: float, at: Sequence[int], reverse: bool,
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """Rows `at` of ((a b^T) * M) c, or of ((a b^T) * M^T) c, computed in `dtype`; the exponents in fp64."""
    rows = torch.tensor(at, device=a.device)
    apart = rows[:, None] - torch.arange(a.shape[2], device=a.device)
    apart = (-apart if reverse else apart).double()
    s = torch.zeros(a.shape[1], device=a.device) if decay is None else decay
    m = torch.where(apart >= 0, torch.exp(-s.double().view(-1, 1, 1) * apart.clamp(min=0)) * scale, 0.0).to(dtype)
    return (a[:, :, rows].to(dtype) @ b.to(dtype).mT * m) @ c.to(dtype)


def _last_state(k: Tensor, v: Tensor, decay: Tensor | None, dtype: torch.dtype) -> Tensor:
    if decay is None:
        return k.to(dtype).mT @ v.to(dtype)
    age = torch.arange(k.shape[2], device=k.device, dtype=torch.float64).flip(0)
    return (k.to(dtype) * torch.exp(-decay.double().view(-1, 1, 1) * age[:, None]).to(dtype)).mT @ v.to(dtype)


def _pieces(attend: Attend, rows: int, x: Inputs) -> tuple[Tensor, Tensor]:
    """`attend` on `rows` rows at a time, each piece starting from the state the one before left; not packed."""
    os, state = [], x.initial_state
    for begin in range(0, x.q.shape[2], rows):
        names = ("q", "k", "v") if x.decay is None or x.decay.ndim == 1 else ("q", "k", "v", "decay")
        part = {name: getattr(x, name)[:, :, begin : begin + rows] for name in names}
        o, state = attend(x._replace(**part, initial_state=state))
        os.append(o)
    assert state is not None
    return torch.cat(os, dim=2), state


def _exact_pieces(x: Inputs, use: Sequence[str], rows: int) -> Outputs:
    from fulmen.lightning import reference as oracles

    def attend(x: Inputs) -> tuple[Tensor, Tensor]:
        return oracles.attend(oracles.quadratic, x.q, x.k, x.v, x.decay, **x.options())

    return evaluate(functools.partial(_pieces, attend, rows), x.to(torch.float64), use)


def check(x: Inputs, backend_name: str, use: Sequence[str] = ("o", "state")) -> Outputs:
    """A backend's results and gradients against fp64; returns them."""
    actual = evaluate(backend(backend_name), x, use)
    dtypes = {"o": x.q.dtype, "dq": x.q.dtype, "dk": x.q.dtype, "dv": x.q.dtype}
    for name, wanted in expected(x, use).items():
        value = getattr(actual, name)
        assert value.dtype == dtypes.get(name, x.dstate.dtype), f"{name} is {value.dtype}"
        assert_close(name, value, *wanted)
    return actual
