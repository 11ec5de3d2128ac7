"""Softmax attention for the benchmark: `flash`, and over a cache with lengths, `flash_cache`."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from fulmen.bench.adapters import META, Attend, Call, Case, Operation, Source, dtype_of, lengths_of, shapes
from fulmen.bench.gate import Problem
from fulmen.flash.op import flash_attention, flash_attention_with_lse
from fulmen.flash.spec import Residuals
from fulmen.testing import Expected
from fulmen.testing import flash as testing


class Flash(Operation):
    KEYS: ClassVar[Case] = {
        "B": 1, "H": 8, "H_KV": None, "N": 1024, "N_Q": None, "D": 64, "E": None, "dtype": "auto", "causal": True,
    }  # fmt: skip
    backends = "flash"
    LAST_QUERIES = 512  # what is checked of a timed shape whose attention matrix does not fit
    MATRICES = 16  # fp64 (N, N) alive at once while a gradient is checked

    def complete(self, case: Case) -> Case:
        """A case has N_Q only where it differs from N, the number of keys."""
        done = super().complete(case)
        return {key: value for key, value in done.items() if key != "N_Q" or value not in (None, done["N"])}

    def function(self, case: Case) -> str:
        return "causal softmax attention" if case["causal"] else "softmax attention"

    def drawn(self, case: Case, source: Source, fully: bool = False) -> Problem:
        q, k, v, do = (source.normal(shape, dtype_of(case)) for shape in shapes(case))
        dlse = source.normal(tuple(q.shape[:3]) if fully else (0,), torch.promote_types(q.dtype, torch.float32))
        x = testing.Inputs(q, k, v, None, None, None, case["causal"], None, None, None, do, dlse)
        return self.problem_of(x, source, ("o", "lse") if fully else ("o",))

    def problem_of(self, x: testing.Inputs, source: Source, use: tuple[str, ...] = ("o",)) -> Problem:
        leaves = {name: getattr(x, name).requires_grad_() for name in ("q", "k", "v")}
        heads = source.heads(x.q, x.k)
        matrices = self.MATRICES * heads.group * x.q.shape[2] * x.k.shape[2] * 8
        if not source.whole and matrices > self.free_bytes(source.device) // 2:
            heads = heads._replace(last=self.LAST_QUERIES)

        def expected() -> dict[str, Expected]:
            part: dict[str, Any] = {name: heads.pick(name, getattr(x, name)).detach() for name in ("q", "k", "v", "do")}
            part["dlse"] = x.dlse if x.dlse.numel() else part["q"].new_zeros(part["q"].shape[:3], dtype=x.dlse.dtype)
            found = testing.expected(x._replace(**part), use)
            kept = {"o"} if heads.last else set(found) - (set() if "lse" in use else {"lse"})
            return {name: wanted for name, wanted in found.items() if name in kept}

        douts = {"o": x.do, "lse": x.dlse}
        return Problem(x, leaves, {name: douts[name] for name in use}, expected, pick=heads.pick)

    def free_bytes(self, device: torch.device) -> int:
        if device.type != "cuda":
            return 8 << 30
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # torch's, and free
        return torch.cuda.mem_get_info(device)[0] + kept

    def attend(self, backend: str) -> Attend:
        return lambda x: flash_attention(x.q, x.k, x.v, causal=x.causal, backend=backend)

    def attend_fully(self, backend: str) -> Attend | None:
        if backend in ("sdpa", "flash_attn", "auto"):  # no gradient of lse; what auto takes is gated under its own name
            return None
        return lambda x: flash_attention_with_lse(x.q, x.k, x.v, causal=x.causal, backend=backend)

    def call(self, case: Case, fully: bool = False) -> Call:
        x = self.drawn(case, META, fully).x
        tensors = Residuals(x.q, x.k, x.v, kv_lengths=x.kv_lengths, page_table=x.page_table)
        spec = x.spec(with_lse=fully, needs_grad=bool(case.get("grad", True)))
        return spec, tensors, lambda o, lse: (o, lse, x.do, lse if fully else None)


class FlashCache(Flash):
    """N is the cache's capacity, and the length of all rows of the timed shape; the small one's have their own.

    So the baselines of `flash` compute the same function at the fixed shape. With `page`, the cache lies in shuffled
    pages of so many keys, (pages, H_KV, page, D).
    """

    KEYS = Flash.KEYS | {"B": 64, "H": 64, "H_KV": 8, "N": 4096, "N_Q": 1, "D": 128, "page": 0, "grad": False}
    complete = Operation.complete

    def check(self, case: Case) -> None:
        if case["page"] and (case["page"] % 16 or case["page"] > 256):
            raise ValueError(f"page={case['page']}: must be a multiple of 16 up to 256, or 0 for a cache without pages")

    def drawn(self, case: Case, source: Source, fully: bool = False) -> Problem:
        page, table = case["page"], None
        q, k, v, do = (source.normal(shape, dtype_of(case)) for shape in shapes(case))
        heads, lengths = source.heads(q, k), lengths_of(case, source)
        if page:
            pages = source.permutation(case["B"] * -(-case["N"] // page))
            k, v = (paged(x, page, pages) for x in (k, v))
            table = pages.view(case["B"], -1).int()
        dlse = do.new_zeros(do.shape[:3], dtype=torch.float32)
        mask = (None, None, None, case["causal"], None, None, None)
        x = testing.Inputs(q, k, v, *mask, do, dlse, lengths, None, table)

        def expected() -> dict[str, Expected]:
            part: dict[str, Any] = {name: heads.pick(name, getattr(x, name)) for name in ("q", "do", "dlse")}
            if not heads.whole:
                row, head = (slice(i, i + 1) for i in (heads.batch, heads.head))
                part |= {name: t[row, head] if table is None else t[:, head] for name, t in (("k", k), ("v", v))}
                part |= {"kv_lengths": lengths[row], "page_table": None if table is None else table[row]}
            return {"o": testing.expected(x._replace(**part))["o"]}

        tensors = {"q": q, "k": k, "v": v, "kv_lengths": lengths, "page_table": table}
        return Problem(x, {}, {"o": do}, expected, {n: t for n, t in tensors.items() if t is not None}, heads.pick)

    def attend(self, backend: str) -> Attend:
        return lambda x: flash_attention(x.q, x.k, x.v, **x.options(), backend=backend)

    def attend_fully(self, backend: str) -> None:
        return None


def paged(x: Tensor, page: int, pages: Tensor) -> Tensor:
    """x (B, heads, N, size) as (pages, heads, page, size), page i of all rows at pages[i]."""
    whole = F.pad(x, (0, 0, 0, -x.shape[2] % page)).unflatten(2, (-1, page)).transpose(1, 2).flatten(0, 1)
    return torch.empty_like(whole, memory_format=torch.contiguous_format).index_copy_(0, pages, whole)


flash, flash_cache = Flash(), FlashCache()
