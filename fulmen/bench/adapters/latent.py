"""Latent attention over a cache for the benchmark.

N is the cache's capacity. All rows of the timed shape are that long, those of the small one have lengths of their own.
"""

from __future__ import annotations

from typing import ClassVar

from fulmen.bench.adapters import META, ODD_TOKENS, Attend, Call, Case, Operation, Source, dtype_of, lengths_of
from fulmen.bench.gate import Problem
from fulmen.latent.op import latent_attention
from fulmen.latent.spec import Residuals
from fulmen.testing import Expected
from fulmen.testing import latent as testing


class Latent(Operation):
    KEYS: ClassVar[Case] = {
        "B": 8, "H": 128, "H_KV": 1, "N": 8192, "N_Q": 1, "D": 576, "E": 512, "dtype": "auto", "causal": True,
        "grad": False,
    }  # fmt: skip
    backends = "latent"

    def check(self, case: Case) -> None:
        if case["H_KV"] != 1:
            raise ValueError(f"H_KV={case['H_KV']}: all heads read one latent, so it must be 1")
        if case["E"] > case["D"]:
            raise ValueError(f"E={case['E']}: values are the first columns of keys, at most D={case['D']}")

    def function(self, case: Case) -> str:
        return "softmax attention over a latent cache"

    def small_case(self, case: Case) -> Case:
        return case | {"B": 3, "N": min(ODD_TOKENS, case["N"] | 1)}

    def drawn(self, case: Case, source: Source, fully: bool = False) -> Problem:
        B, H, N, N_Q, D, E = (case[key] for key in ("B", "H", "N", "N_Q", "D", "E"))
        q, kv, o = (source.normal(shape, dtype_of(case)) for shape in ((B, H, N_Q, D), (B, N, D), (B, H, N_Q, E)))
        lengths = lengths_of(case, source)
        x = testing.Inputs(q, kv, E, lengths, None, None, case["causal"], None)
        heads = source.heads(q, kv[:, None])  # of the timed shape one row, whose heads share its keys

        def expected() -> dict[str, Expected]:
            at = slice(None) if heads.whole else slice(heads.batch, heads.batch + 1)
            part = x._replace(q=q[at], kv=kv[at], kv_lengths=lengths[at])
            return {"o": Expected(testing.low_precision(part), testing.reference(part))}

        return Problem(x, {}, {"o": o}, expected, {"q": q, "kv": kv, "kv_lengths": lengths}, heads.pick)

    def attend(self, backend: str) -> Attend:
        return lambda x: latent_attention(x.q, x.kv, **x.options(), backend=backend)

    def call(self, case: Case, fully: bool = False) -> Call:
        x = self.drawn(case, META).x
        return x.spec(), Residuals(x.q, x.kv, x.kv_lengths), lambda o: ()


latent = Latent()
