"""Softmax attention over a cache with lengths for the benchmark; the package describes the names.

N is the cache's capacity. All rows of the timed shape are that long, those of the small one have lengths of their own.
So the baselines of `flash` compute the same function at the fixed shape. With `page`, the cache lies in shuffled pages
of so many keys, (pages, H_KV, page, D).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fulmen.bench import adapters
from fulmen.bench.adapters import Call, Heads, dtype_of, empty, flash, makers, normal, shapes
from fulmen.bench.adapters.latent import lengths_of
from fulmen.bench.gate import Problem
from fulmen.flash.op import flash_attention
from fulmen.flash.spec import FlashSpec, Residuals
from fulmen.testing import Expected
from fulmen.testing import flash as testing

BACKENDS_OF = "flash"
KEYS = flash.KEYS | {"B": 64, "H": 64, "H_KV": 8, "N": 4096, "N_Q": 1, "D": 128, "page": 0, "grad": False}
function, small_case = flash.function, adapters.small_case


def complete(case: dict[str, Any]) -> dict[str, Any]:
    done = KEYS | case
    if done["page"] and (done["page"] % 16 or done["page"] > 256):
        raise ValueError(f"page={done['page']}: must be a multiple of 16 up to 256, or 0 for a cache without pages")
    if done["grad"]:
        raise ValueError("grad=yes: attention over a cache has no gradient")
    return done | {"E": done["E"] or done["D"]}


def drawn(
    case: dict[str, Any], device: torch.device, seed: int, fully: bool = False, one_head: int | None = None
) -> Problem:
    generator = torch.Generator(device).manual_seed(seed)
    q, k, v, do = (normal(shape, dtype_of(case), generator) for shape in shapes(case))
    heads, lengths, table = Heads.of(q, k, one_head), lengths_of(case, one_head is None, generator), None
    if case["page"]:
        pages = torch.randperm(case["B"] * pages_of(case), generator=generator, device=device)
        k, v = (paged(x, case["page"], pages) for x in (k, v))
        table = pages.view(case["B"], -1).int()
    dlse = do.new_zeros(do.shape[:3], dtype=torch.float32)
    mask = (None, None, None, case["causal"], None, None, None)
    x = testing.Inputs(q, k, v, *mask, do, dlse, lengths, None, table)

    def expected() -> dict[str, Expected]:
        if heads.whole:
            return {"o": testing.expected(x)["o"]}
        row, head = (slice(i, i + 1) for i in (heads.batch, heads.head))
        part: dict[str, Any] = {name: heads.pick(name, getattr(x, name)) for name in ("q", "do", "dlse")}
        part |= {name: heads.pick(name, t) if table is None else t[:, head] for name, t in (("k", k), ("v", v))}
        part |= {"kv_lengths": lengths[row], "page_table": None if table is None else table[row]}
        return {"o": testing.expected(x._replace(**part))["o"]}

    tensors = {"q": q, "k": k, "v": v, "kv_lengths": lengths, "page_table": table}
    return Problem(x, {}, {"o": do}, expected, {n: t for n, t in tensors.items() if t is not None}, heads.pick)


def pages_of(case: dict[str, Any]) -> int:
    """Pages of a row."""
    return -(-case["N"] // case["page"])


def paged(x: Tensor, page: int, pages: Tensor) -> Tensor:
    """x (B, heads, N, size) as (pages, heads, page, size), page i of all rows at pages[i]."""
    whole = F.pad(x, (0, 0, 0, -x.shape[2] % page)).unflatten(2, (-1, page)).transpose(1, 2).flatten(0, 1)
    return torch.empty_like(whole, memory_format=torch.contiguous_format).index_copy_(0, pages, whole)


problem, small = makers(drawn, small_case)


def attend(backend: str) -> Callable[[testing.Inputs], Tensor]:
    return lambda x: flash_attention(x.q, x.k, x.v, **x.options(), backend=backend)


def attend_fully(backend: str) -> None:
    return None


def spec(case: dict[str, Any], device: torch.device) -> FlashSpec:
    call = flash.spec(case, device)._replace(has_kv_lengths=True)
    return call._replace(N_KV=case["page"] * pages_of(case), page=case["page"]) if case["page"] else call


def without_data(case: dict[str, Any], fully: bool) -> Call:
    q, k, v, _ = empty(case)
    lengths, table = torch.empty(case["B"], dtype=torch.int32, device="meta"), None
    if case["page"]:
        table = lengths.new_empty(case["B"], pages_of(case))
        k, v = (x.new_empty(table.numel(), x.shape[1], case["page"], x.shape[3]) for x in (k, v))
    return spec(case, q.device), Residuals(q, k, v, kv_lengths=lengths, page_table=table), lambda *o: ()
