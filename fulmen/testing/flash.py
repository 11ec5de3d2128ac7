"""Inputs and oracles for softmax attention; see `fulmen.testing` for the tolerance.

    x = inputs(B=2, H=4, N_Q=113, D=64, H_KV=2, dtype=torch.float16, causal=True, sinks=True)
    check(x, "triton")                  # o, lse and every gradient against fp64

The yardstick is the attention matrix written out in the inputs' dtype; of lse, the fp32 logarithm over the logits
so rounded. What it does not measure, because it normalises after exp and never keeps lse:

- a row that sees no key has lse = -inf exactly, and its o and dq are exactly zero;
- lse = m + log l: the logit m, the sum l, its logarithm and the sum of both are rounded each, in fp32: 4 roundings;
- a weight is exp(s - lse): what lse may err, 4 roundings of fp32, all that is made of weights may err |lse| times;
- the gradients of logits are differences, p * (dp - delta), that cancel where one key takes all the weight. What is
  rounded are the products in dp = do v^T, in fp32, and in delta = sum of do * o, where o has q's dtype; such roundings
  are independent and add up as their squares do. Two roundings of that are allowed in dq, dk and dsinks.

In fp64 "fp32" above is fp64.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fulmen.flash.op import flash_attention, flash_attention_with_lse
from fulmen.flash.spec import Causal, FlashSpec, Residuals, Window, checked_spec
from fulmen.testing import FORWARD_FACTOR, GRADIENT_FACTOR, Expected, assert_close, fused_rows, normal, rows

__all__ = [
    "FORWARD_FACTOR", "GRADIENT_FACTOR", "ROUNDINGS", "Attend", "Inputs", "Outputs", "assert_close", "backend", "check",
    "compare", "evaluate", "expected", "fused_rows", "inputs", "low_precision", "reference", "rows",
]  # fmt: skip

ROUNDINGS = {"o": 1.0, "lse": 4.0, "dq": 2.0, "dk": 2.0, "dv": 1.0, "dsinks": 2.0}


class Inputs(NamedTuple):
    """The arguments of one call and the gradients that come back to it."""

    q: Tensor
    k: Tensor
    v: Tensor
    sinks: Tensor | None
    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None
    causal: Causal
    window: Window
    softcap: float | None
    scale: float | None
    do: Tensor
    dlse: Tensor
    kv_lengths: Tensor | None = None
    max_kv_length: int | None = None
    page_table: Tensor | None = None

    def options(self) -> dict[str, Any]:
        """The keyword arguments of `flash_attention`."""
        names = ["sinks", "cu_seqlens_q", "cu_seqlens_k", "causal", "window", "softcap", "scale"]
        if self.kv_lengths is not None:
            names += ["kv_lengths", "max_kv_length", "page_table"]
        return {name: getattr(self, name) for name in names}

    def spec(self, with_lse: bool = False, needs_grad: bool = False) -> FlashSpec:
        """What dispatch sees of the call, whatever its offsets are."""

        def valid(ends: Tensor | None, total: int) -> Tensor | None:
            return None if ends is None else ends.new_tensor([0] * (len(ends) - 1) + [total])

        ends = {
            "cu_seqlens_q": (self.cu_seqlens_q, self.q.shape[2]),
            "cu_seqlens_k": (self.cu_seqlens_k, self.k.shape[2]),
        }
        options = self.options() | {name: valid(*given) for name, given in ends.items()}
        return checked_spec(self.q, self.k, self.v, **options, with_lse=with_lse)._replace(needs_grad=needs_grad)

    def to(self, dtype: torch.dtype) -> Inputs:
        """Every floating tensor in another dtype; strides stay."""
        given = {name: getattr(self, name) for name in ("q", "k", "v", "sinks", "do", "dlse")}
        cast: dict[str, Any] = {name: x.to(dtype) for name, x in given.items() if x is not None}
        return self._replace(**cast)


def operator_facts(name: str, **given: Any) -> tuple[Any, ...]:
    """What the registered operator takes after its tensors, in its order; options that are not given are off."""
    given = {"scale": 0.25, "backend": "eager", **given}
    facts = [a for a in getattr(torch.ops.fulmen, name).default._schema.arguments if "Tensor" not in str(a.type)]
    return tuple(given.get(a.name, False if str(a.type) == "bool" else None) for a in facts)


class Outputs(NamedTuple):
    o: Tensor
    lse: Tensor | None
    dq: Tensor | None
    dk: Tensor | None
    dv: Tensor | None
    dsinks: Tensor | None


Attend = Callable[[Inputs], tuple[Tensor, Tensor | None]]

# ------------------------------------------------------------------------------------------------ inputs


def inputs(
    B: int = 1,
    H: int = 2,
    N_Q: int = 64,
    D: int = 16,
    *,
    N_KV: int | None = None,
    E: int | None = None,
    H_KV: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    layout: str = "bhnd",
    causal: Causal = False,
    window: Window = None,
    softcap: float | None = None,
    sinks: bool = False,
    scale: float | None = None,
    lengths_q: Sequence[int] | None = None,
    lengths_k: Sequence[int] | None = None,
    seed: int = 0,
) -> Inputs:
    """Random arguments. `layout`: "bhnd", "bnhd" or "fused"; `lengths_*` pack sequences, their sums are the N."""
    E, H_KV = E or D, H if H_KV is None else H_KV
    if lengths_q is not None:
        B, N_Q, N_KV = 1, sum(lengths_q), sum(lengths_q if lengths_k is None else lengths_k)
    N_KV = N_Q if N_KV is None else N_KV
    generator = torch.Generator().manual_seed(seed)
    make: dict[str, Any] = {"dtype": dtype, "device": device, "generator": generator}
    if layout != "fused":
        shapes = ((H, N_Q, D), (H_KV, N_KV, D), (H_KV, N_KV, E))
        q, k, v = (rows(B, heads, N, size, layout=layout, **make) for heads, N, size in shapes)
    elif N_Q == N_KV:
        q, k, v = fused_rows(B, (H, H_KV, H_KV), N_Q, (D, D, E), **make)
    else:  # cross attention: keys and values come from one projection
        q = rows(B, H, N_Q, D, layout="bnhd", **make)
        k, v = fused_rows(B, (H_KV, H_KV), N_KV, (D, E), **make)
    do = rows(B, H, N_Q, E, layout="bhnd" if layout == "bhnd" else "bnhd", **make)
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    dlse = normal((B, H, N_Q), generator, device).to(exact)
    sink = normal((H,), generator, device).to(exact) if sinks else None
    offsets = (_offsets(lengths_q, device), _offsets(lengths_k, device))
    return Inputs(q, k, v, sink, *offsets, causal, window, softcap, scale, do, dlse)


def cache_inputs(
    kv_lengths: Sequence[int],
    capacity: int,
    *,
    page: int | None = None,
    lengths_q: Sequence[int] | None = None,
    max_kv_length: int | None = None,
    device: str | torch.device = "cpu",
    **options: Any,
) -> Inputs:
    """Random arguments of a call over a cache, NaN wherever nothing may be read.

    With `page` the rows of the cache lie in pages in any order, between pages of NaN; table entries behind a row's
    last page are out of range.
    """
    x = inputs(len(kv_lengths), N_KV=capacity, device=device, **options)
    if lengths_q is not None:
        heads, size = x.q.shape[1], x.q.shape[3]
        packed = inputs(H=heads, D=size, E=x.v.shape[3], lengths_q=lengths_q, dtype=x.q.dtype, device=device, seed=1)
        x = x._replace(q=packed.q, do=packed.do, dlse=packed.dlse, cu_seqlens_q=packed.cu_seqlens_q)
    for b, n in enumerate(kv_lengths):
        for t in (x.k, x.v):
            t[b, :, max(n, 0) :] = torch.nan
    table = None
    if page is not None:
        count = -(-capacity // page)
        order = torch.randperm(2 * len(kv_lengths) * count, generator=torch.Generator().manual_seed(3)).int()
        table = order[: len(kv_lengths) * count].view(-1, count).to(device)
        used = [-(-min(max(n, 0), capacity) // page) for n in kv_lengths]
        x = x._replace(k=_paged(x.k, table, page, used), v=_paged(x.v, table, page, used))
        for b, n in enumerate(used):
            table[b, n:] = 1_000_000_000 if b % 2 else -7
    lengths = torch.tensor(kv_lengths, dtype=torch.int32, device=device)
    return x._replace(kv_lengths=lengths, max_kv_length=max_kv_length, page_table=table)


def _paged(x: Tensor, table: Tensor, page: int, used: Sequence[int]) -> Tensor:
    """Rows (B, heads, capacity, size) in pages (pages, heads, page, size), with the memory order of x."""
    B, heads, _, size = x.shape
    pages = x.new_full((2 * table.numel(), page, heads, size), torch.nan).transpose(1, 2)
    if x.is_contiguous():
        pages = pages.contiguous()
    for b in range(B):
        for i in range(used[b]):
            rows = x[b, :, i * page : (i + 1) * page]
            pages[table[b, i], :, : rows.shape[1]] = rows
    return pages


def dense_rows(x: Inputs) -> list[Inputs]:
    """The calls without a cache that together are a call over one: its definition."""
    assert x.kv_lengths is not None
    calls = []
    for b, n in enumerate(x.kv_lengths.tolist()):
        k, v = x.k[b : b + 1], x.v[b : b + 1]
        if x.page_table is not None:
            which = x.page_table[b].long().clamp(0, x.k.shape[0] - 1)
            k, v = (t[which].transpose(0, 1).flatten(1, 2)[None] for t in (x.k, x.v))
        n = max(0, min(n, k.shape[2], *(() if x.max_kv_length is None else (x.max_kv_length,))))
        at: tuple[slice, ...] = (slice(b, b + 1),)
        if x.cu_seqlens_q is not None:
            at = (slice(None), slice(None), slice(*x.cu_seqlens_q[b : b + 2].tolist()))
        parts = {name: getattr(x, name)[at] for name in ("q", "do", "dlse")}
        without: dict[str, Any] = dict.fromkeys(("cu_seqlens_q", "kv_lengths", "max_kv_length", "page_table"))
        calls.append(x._replace(**parts, **without, k=k[:, :, :n], v=v[:, :, :n]))
    return calls


def _offsets(lengths: Sequence[int] | None, device: str | torch.device) -> Tensor | None:
    if lengths is None:
        return None
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)


# ----------------------------------------------------------------------------------------------- oracles


def evaluate(attend: Attend, x: Inputs, use: Sequence[str] = ("o", "lse")) -> Outputs:
    """`attend`'s results and all gradients, from the results named in `use` (the others get no gradient)."""
    leaves = {name: getattr(x, name).detach().requires_grad_() for name in ("q", "k", "v")}
    if x.sinks is not None:
        leaves["sinks"] = x.sinks.detach().requires_grad_()
    o, lse = attend(x._replace(**leaves))
    given = {"o": (o, x.do), "lse": (lse, x.dlse)}
    used = [(y, dy) for y, dy in (given[name] for name in use) if y is not None and y.requires_grad]
    if used:
        results, gradients = zip(*used, strict=True)
        grads = torch.autograd.grad(results, list(leaves.values()), gradients, materialize_grads=True)
    else:  # without keys the results are constants
        grads = tuple(torch.zeros_like(leaf) for leaf in leaves.values())
    dsinks = None if x.sinks is None else grads[3]
    return Outputs(o.detach(), None if lse is None else lse.detach(), grads[0], grads[1], grads[2], dsinks)


def backend(name: str, with_lse: bool = True) -> Attend:
    """A backend as `evaluate` takes it; without lse it need not have lse's gradient."""
    if with_lse:
        return lambda x: flash_attention_with_lse(x.q, x.k, x.v, **x.options(), backend=name)
    return lambda x: (flash_attention(x.q, x.k, x.v, **x.options(), backend=name), None)


def reference(x: Inputs, use: Sequence[str] = ("o", "lse")) -> Outputs:
    """The same quantities in fp64, by autograd through `fulmen.flash.reference`, on any device."""
    from fulmen.flash import reference as oracle

    def attend(x: Inputs) -> tuple[Tensor, Tensor]:
        k_offsets = x.cu_seqlens_q if x.cu_seqlens_k is None else x.cu_seqlens_k
        return oracle.forward(x.spec(), Residuals(x.q, x.k, x.v, x.sinks, x.cu_seqlens_q, k_offsets))

    return evaluate(attend, x.to(torch.float64), use)


def low_precision(x: Inputs, use: Sequence[str] = ("o", "lse")) -> Outputs:
    """The same quantities by the plain formula in the inputs' own dtype: the yardstick."""
    return evaluate(_plain, x, use)


def _weights(x: Inputs) -> Iterator[tuple[slice, slice, Tensor, Tensor]]:
    """For each sequence its rows of q and of k, the weights p (1 or B, H, queries, keys), and lse."""
    spec = x.spec()
    k = x.k.repeat_interleave(spec.group, dim=1)
    ends_q, ends_k = [0, spec.N_Q], [0, spec.N_KV]
    if x.cu_seqlens_q is not None:
        ends_q = x.cu_seqlens_q.tolist()
        ends_k = ends_q if x.cu_seqlens_k is None else x.cu_seqlens_k.tolist()
    for (a, b), (c, d) in zip(itertools.pairwise(ends_q), itertools.pairwise(ends_k), strict=True):
        s = (x.q[:, :, a:b] * spec.scale) @ k[:, :, c:d].mT
        if spec.softcap is not None:
            s = spec.softcap * torch.tanh(s / spec.softcap)
        s = s.masked_fill(_hidden(spec, b - a, d - c, s.device), -torch.inf)
        sink = x.q.new_full((1, spec.H, 1, 1), -torch.inf) if x.sinks is None else x.sinks.to(s.dtype).view(1, -1, 1, 1)
        s = torch.cat([s, sink.expand(*s.shape[:3], 1)], dim=3)
        blind = (s == -torch.inf).all(dim=3, keepdim=True)
        s = s.masked_fill(blind, 0.0)
        lse = torch.logsumexp(s.to(x.dlse.dtype), dim=3)
        p = torch.softmax(s, dim=3).masked_fill(blind, 0.0)
        yield slice(a, b), slice(c, d), p[..., :-1], lse.masked_fill(blind[..., 0], -torch.inf)


def _plain(x: Inputs) -> tuple[Tensor, Tensor]:
    """softmax(q k^T) v, as one would write it."""
    spec = x.spec()
    v = x.v.repeat_interleave(spec.group, dim=1)
    os, lses = [x.q.new_zeros(spec.B, spec.H, 0, spec.E)], [x.dlse.new_zeros(spec.B, spec.H, 0)]
    for _, keys, p, lse in _weights(x):
        os.append(p @ v[:, :, keys])
        lses.append(lse)
    return torch.cat(os, dim=2), torch.cat(lses, dim=2)


def _hidden(spec: FlashSpec, N_Q: int, N_KV: int, device: torch.device) -> Tensor:
    """Which keys a query of one sequence does not see: its distance to a key is out of bounds. Bool (N_Q, N_KV)."""
    first = 0 if spec.top_left else N_KV - N_Q
    after = torch.arange(N_KV, device=device)[None, :] - torch.arange(first, first + N_Q, device=device)[:, None]
    left = N_Q + N_KV if spec.left is None else spec.left
    right = N_Q + N_KV if spec.right is None else spec.right
    return (after < -left) | (after > right)


# --------------------------------------------------------------------------------------------- comparison


def check(x: Inputs, backend_name: str, use: Sequence[str] = ("o", "lse")) -> Outputs:
    """A backend's results and gradients against fp64; returns them. lse is compared even if it is not in `use`."""
    actual = evaluate(backend(backend_name, with_lse="lse" in use), x, use)
    if actual.lse is None:
        with torch.no_grad():
            actual = actual._replace(lse=backend(backend_name)(x)[1])
    compare(x, actual, use)
    return actual


def compare(x: Inputs, actual: Outputs, use: Sequence[str] = ("o", "lse")) -> None:
    """Results and gradients, from wherever they come, against fp64; gradients may be missing."""
    wanted = expected(x, use)
    blind = blind_rows(wanted)
    assert actual.lse is not None
    assert torch.equal(actual.lse == -torch.inf, blind), "lse is -inf where a row sees nothing, and only there"
    for name in ("o", "dq"):
        value = getattr(actual, name)
        assert value is None or not value[blind].any(), f"{name} is not zero in a row that sees no key"
    dtypes = {"lse": x.dlse.dtype, "dsinks": None if x.sinks is None else x.sinks.dtype}
    for name, value in actual._asdict().items():
        if value is None:
            continue
        assert value.dtype == dtypes.get(name, x.q.dtype), f"{name} is {value.dtype}"
        got = seen_lse(value, blind) if name == "lse" else value
        assert_close(name, got, *finite(wanted[name], blind if name == "lse" else None))


def expected(x: Inputs, use: Sequence[str] = ("o", "lse")) -> dict[str, Expected]:
    """What every result and gradient of this call must be, by name; lse holds -inf where a row sees nothing.

    Of a call over a cache, which has no gradients, o and lse.
    """
    if x.kv_lengths is not None:
        return _joined([expected(row, ()) for row in dense_rows(x)], 0 if x.cu_seqlens_q is None else 2)
    low, exact = low_precision(x, use), reference(x, use)
    assert exact.lse is not None
    fine = torch.finfo(x.dlse.dtype).eps / torch.finfo(x.q.dtype).eps  # a rounding of fp32, in those of q's dtype
    terms = _terms(x.to(torch.float64), exact, fine, use)
    blind = exact.lse == -torch.inf
    exponent = float(exact.lse.masked_fill(blind, 0.0).abs().max()) if blind.numel() else 0.0
    wanted = {}
    for name, value in exact._asdict().items():
        if value is None:
            continue
        factor = GRADIENT_FACTOR if name.startswith("d") else FORWARD_FACTOR
        roundings = ROUNDINGS[name] + (0.0 if name == "lse" else fine * ROUNDINGS["lse"] * exponent)
        if name == "dsinks":  # fp32, made of what was rounded in q's dtype
            roundings /= fine
        wanted[name] = Expected(getattr(low, name), value, factor, roundings, terms.get(name))
    return wanted


def _joined(rows_: Sequence[dict[str, Expected]], along: int) -> dict[str, Expected]:
    """o and lse of several calls as those of one."""
    wanted = {}
    for name in ("o", "lse"):
        low, exact = (torch.cat([getattr(row[name], field) for row in rows_], along) for field in ("low", "exact"))
        wanted[name] = Expected(low, exact, roundings=max(row[name].roundings for row in rows_))
    return wanted


def blind_rows(wanted: dict[str, Expected]) -> Tensor:
    """Which rows see no key: bool (B, H, N_Q)."""
    return wanted["lse"].exact == -torch.inf


def seen_lse(lse: Tensor, blind: Tensor) -> Tensor:
    return lse.masked_fill(blind, 0.0)


def finite(wanted: Expected, blind: Tensor | None) -> Expected:
    """`wanted` of lse with zeros for the rows that see nothing, which have been compared already."""
    if blind is None:
        return wanted
    return wanted._replace(low=seen_lse(wanted.low, blind), exact=seen_lse(wanted.exact, blind))


def _terms(x: Inputs, exact: Outputs, fine: float, use: Sequence[str]) -> dict[str, Tensor]:
    """What is rounded on the way to dq, dk and dsinks; see the top of the file. `x` in fp64."""
    spec = x.spec()
    assert exact.lse is not None
    do, dlse = (y if name in use else torch.zeros_like(y) for name, y in (("o", x.do), ("lse", x.dlse)))
    k, v = (y.repeat_interleave(spec.group, dim=1).square() for y in (x.k, x.v))
    delta = torch.linalg.vector_norm(do * exact.o, dim=3) + fine * dlse.abs()
    dq, dk = torch.zeros_like(x.q), torch.zeros_like(k)
    for rows_, keys, p, _ in _weights(x):
        dp = (do[:, :, rows_].square() @ v[:, :, keys].mT).sqrt()
        ds = (spec.scale * p * (fine * dp + delta[:, :, rows_, None])).square()
        dq[:, :, rows_] = (ds @ k[:, :, keys]).sqrt()
        dk[:, :, keys] = ds.mT @ x.q[:, :, rows_].square()
    terms = {"dq": dq, "dk": dk.unflatten(1, (spec.H_KV, spec.group)).sum(2).sqrt()}
    if x.sinks is not None:
        p_sink = torch.exp(x.sinks[:, None] - exact.lse)
        terms["dsinks"] = torch.linalg.vector_norm(p_sink * delta, dim=(0, 2))
    return terms
