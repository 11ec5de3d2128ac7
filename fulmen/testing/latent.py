"""Inputs and oracles for latent attention; see `fulmen.testing` for the tolerance.

    x = inputs(B=2, H=4, N_Q=1, N_KV=113, D=96, E=64, lengths=[113, 70], page=16, dtype=torch.float16)
    check(x, "triton")                  # o against fp64

What lies beyond a row's length, and in pages that no row has, is NaN.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fulmen.latent import reference as oracle
from fulmen.latent.op import latent_attention
from fulmen.latent.spec import LatentSpec, Residuals, checked_spec
from fulmen.testing import assert_close, carried_roundings, normal, rows


class Inputs(NamedTuple):
    """The arguments of one call."""

    q: Tensor
    kv: Tensor
    value_dim: int
    kv_lengths: Tensor | None
    max_kv_length: int | None
    page_table: Tensor | None
    causal: bool
    scale: float | None

    def options(self) -> dict[str, Any]:
        """The keyword arguments of `latent_attention`."""
        return {name: value for name, value in self._asdict().items() if name not in ("q", "kv")}

    def spec(self) -> LatentSpec:
        """What dispatch sees of the call."""
        return checked_spec(self.q, self.kv, **self.options())


def inputs(
    B: int = 1,
    H: int = 2,
    N_Q: int = 1,
    N_KV: int = 64,
    D: int = 96,
    E: int = 64,
    *,
    lengths: Sequence[int] | None = None,
    page: int | None = None,
    max_kv_length: int | None = None,
    causal: bool = False,
    scale: float | None = None,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    layout: str = "bhnd",
    seed: int = 0,
) -> Inputs:
    """Random arguments. `layout` of q: "bhnd" or "bnhd"; `page`: kv lies in shuffled pages, with some to spare."""
    generator = torch.Generator().manual_seed(seed)
    q = rows(B, H, N_Q, D, dtype=dtype, device=device, layout=layout, generator=generator)
    kv = normal((B, N_KV, D), generator, device).to(dtype)
    if lengths is not None:
        for b, length in enumerate(lengths):
            kv[b, max(0, length) :] = torch.nan
    table = None
    if page is not None:
        kv, table = paged(kv, page, generator)
    ends = None if lengths is None else torch.tensor(lengths, dtype=torch.int32, device=device)
    return Inputs(q, kv, E, ends, max_kv_length, table, causal, scale)


def paged(kv: Tensor, page: int, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
    """kv (B, N, D) in shuffled pages, N rounded up, with pages of NaN between, and the table of pages."""
    B, N, D = kv.shape
    each = math.ceil(N / page)
    pool = kv.new_full((2 * B * each + 1, page, D), torch.nan)
    order = torch.randperm(pool.shape[0], generator=generator)[: B * each].to(kv.device)
    filled = torch.cat([kv, kv.new_full((B, each * page - N, D), torch.nan)], 1)
    pool[order] = filled.view(B * each, page, D)
    return pool, order.view(B, each).int()


def reference(x: Inputs) -> Tensor:
    """o in fp64, by `fulmen.latent.reference`."""
    spec = x.spec()._replace(dtype=torch.float64)
    return oracle.forward(spec, Residuals(x.q.double(), x.kv.double(), x.kv_lengths, x.page_table))


def low_precision(x: Inputs) -> Tensor:
    """The plain formula in the inputs' own dtype: the yardstick."""
    spec = x.spec()
    tensors = Residuals(x.q, x.kv, x.kv_lengths, x.page_table)
    lengths = oracle.lengths_of(spec, tensors)
    kv = oracle.keys_of(spec, tensors, lengths)[:, None]
    hidden = oracle.hidden(spec, lengths)
    s = (x.q @ kv.mT * spec.scale).masked_fill(hidden, -torch.inf)
    p = torch.softmax(s, 3).masked_fill(hidden.all(3, keepdim=True), 0.0)
    return p @ kv[..., : spec.E]


def compare(x: Inputs, o: Tensor) -> None:
    """Raises AssertionError unless o is as exact as `fulmen.testing` demands, and zero where a query sees no key."""
    spec = x.spec()
    assert (o.dtype, o.device) == (x.q.dtype, x.q.device)
    roundings = 1.0
    if o.dtype == torch.float32:  # s is about scale * sqrt(D), and what it is off by, p is off by relative to p
        roundings = carried_roundings(max(spec.D, spec.N_KV)) + abs(spec.scale) * math.sqrt(spec.D)
    assert_close("o", o, low_precision(x), reference(x), roundings=roundings)
    lengths = oracle.lengths_of(spec, Residuals(x.q, x.kv, x.kv_lengths, x.page_table))
    blind = oracle.hidden(spec, lengths).all(3).expand(spec.B, spec.H, spec.N_Q)
    assert not o[blind].any(), "a query that sees no key is not zero"


def check(x: Inputs, backend: str) -> Tensor:
    """o of `backend`, compared with fp64."""
    with torch.no_grad():
        o = latent_attention(x.q, x.kv, **x.options(), backend=backend)
    compare(x, o)
    return o
