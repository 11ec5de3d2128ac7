"""A decoding step of lightning attention for the benchmark.

A step changes its states, and the benchmark repeats a call with the same arguments. So the timed states are a fixed
point: with keep = exp(-s) = 1 - 2^-j the step S <- keep S + k v^T maps 2^j k v^T to itself. k and v have four
significant bits, which makes this exact in fp32 and in bf16. So the plain step reads and writes every state, and no bit
changes. The small problem has random states and the slopes of `decay.alibi`. Its call works on a copy of the states,
which is compared, too.

N is the number of tokens of a step, `state_dtype` that of the pool.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from fulmen import decay
from fulmen.bench.adapters import META, Attend, Call, Case, Operation, Source, dtype_of, shapes
from fulmen.bench.cases import DTYPES
from fulmen.bench.gate import Problem
from fulmen.step.op import lightning_step
from fulmen.step.spec import MAX_TOKENS, Tensors, spec_of
from fulmen.testing import Expected
from fulmen.testing import step as testing


class Inputs(NamedTuple):
    call: testing.Inputs
    copied: bool  # the call works on a copy of the states and returns it


class Step(Operation):
    KEYS: ClassVar[Case] = {
        "B": 64, "H": 64, "H_KV": None, "N": 1, "D": 128, "E": None, "dtype": "auto", "state_dtype": "float32",
        "grad": False,
    }  # fmt: skip
    backends = "step"

    def complete(self, case: Case) -> Case:
        done = super().complete(case)
        return done | {"state_dtype": DTYPES.get(done["state_dtype"], done["state_dtype"])}

    def check(self, case: Case) -> None:
        if case["state_dtype"] not in ("float32", "fp32", "bfloat16", "bf16"):
            raise ValueError(f"state_dtype={case['state_dtype']}: must be fp32 or bf16")
        if case["N"] > MAX_TOKENS:
            raise ValueError(f"N={case['N']}: a step takes 1 to {MAX_TOKENS} tokens")

    def function(self, case: Case) -> str:
        return "a decoding step of linear attention with decay"

    def small_case(self, case: Case) -> Case:
        return case | {"B": 3, "H": 2 * (case["H"] // case["H_KV"]), "H_KV": 2}

    def drawn(self, case: Case, source: Source, fully: bool = False) -> Problem:
        q, k, v, o = (source.normal(shape, dtype_of(case)) for shape in shapes(case))
        if source.whole:
            slopes = decay.alibi(case["H"]).to(source.device)
            state = source.normal((case["B"], case["H"], case["D"], case["E"]), torch.float32)
        else:
            k, v, slopes, state = fixed_point(k, v, case["H"])
        state = state.to(getattr(torch, case["state_dtype"]))
        x = testing.Inputs(q, k, v, slopes, state, None, None, None, 1.0)
        heads = source.heads(q, k)

        def expected() -> dict[str, Expected]:
            part: dict[str, Any] = {name: heads.pick(name, getattr(x, name)) for name in ("q", "k", "v", "state")}
            found = testing.expected(x._replace(**part, decay=heads.slopes(slopes)))
            return found if heads.whole else {"o": found["o"]}

        constants = {"q": q, "k": k, "v": v, "decay": slopes, "state": state}
        douts = {"o": o, "state": torch.zeros_like(state)} if heads.whole else {"o": o}
        return Problem(Inputs(x, heads.whole), {}, douts, expected, constants, heads.pick)

    def attend(self, backend: str) -> Attend:
        def step(given: Inputs) -> Any:
            x = given.call
            if given.copied:
                return testing.evaluate(x, backend)[:2]
            return lightning_step(x.q, x.k, x.v, x.decay, x.state, backend=backend)

        return step

    def call(self, case: Case, fully: bool = False) -> Call:
        x = self.drawn(case, META).x.call
        tensors = Tensors(x.q, x.k, x.v, x.decay, x.state, None, None, None, None)
        return spec_of(tensors, 1.0), tensors, lambda o: ()


def fixed_point(k: Tensor, v: Tensor, H: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """k and v (every token the first one), slopes and states that a step leaves as they are."""
    k, v = (x[:, :, :1].to(torch.float8_e4m3fn).to(x.dtype).repeat(1, 1, x.shape[2], 1) for x in (k, v))
    power = 2.0 ** (1 + torch.arange(H, device=k.device, dtype=torch.float64) % 8)
    keys, values = (x[:, :, 0].float().repeat_interleave(H // x.shape[1], dim=1) for x in (k, v))
    state = (keys * power.float()[:, None])[:, :, :, None] * values[:, :, None, :]
    return k, v, -torch.log1p(-1 / power).float(), state


step = Step()
