"""Lightning attention for the benchmark."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from fulmen import decay
from fulmen.bench.adapters import META, Attend, Call, Case, Operation, Source, dtype_of, shapes
from fulmen.bench.gate import Problem
from fulmen.lightning.op import lightning_attention, lightning_attention_with_state
from fulmen.lightning.spec import Residuals, is_per_token, spec_of_residuals
from fulmen.testing import Expected
from fulmen.testing import lightning as testing

STRONGEST = 0.2  # decay of a token


class Lightning(Operation):
    KEYS: ClassVar[Case] = {
        "B": 1, "H": 8, "H_KV": None, "N": 1024, "D": 64, "E": None, "dtype": "auto", "causal": True, "decay": True,
        "per_token": False, "groups": None,
    }  # fmt: skip
    backends = "lightning"
    ROWS = 2048  # of the attention matrix that are written out at a time to check the timed shape

    def complete(self, case: Case) -> Case:
        """A case has per_token and groups only where they are used."""
        done = super().complete(case)
        return {key: value for key, value in done.items() if value or key not in ("per_token", "groups")}

    def check(self, case: Case) -> None:
        if not case["causal"]:
            raise ValueError("lightning attention is causal")
        if case["per_token"] and not case["decay"]:
            raise ValueError("per_token: every token has a decay, so decay must be true")
        if case["groups"] and (case["H"] % case["groups"] or case["H_KV"] != case["H"]):
            raise ValueError(f"groups={case['groups']}: must divide H={case['H']}, which v has")

    def function(self, case: Case) -> str:
        if case.get("per_token"):
            return "causal linear attention with a decay for each token"
        return "causal linear attention with decay" if case["decay"] else "causal linear attention"

    def small_case(self, case: Case) -> Case:
        """Two groups, if there are any."""
        if "groups" not in case:
            return super().small_case(case)
        heads = 2 * (case["H"] // case["groups"])
        return super().small_case(case) | {"H": heads, "H_KV": heads, "groups": 2}

    def drawn(self, case: Case, source: Source, fully: bool = False) -> Problem:
        q_shape, k_shape, *rest = shapes(case)
        if "groups" in case:  # heads of q and k, where v has H
            q_shape, k_shape = ((shape[0], case["groups"], *shape[2:]) for shape in (q_shape, k_shape))
        q, k, v, do = (source.normal(shape, dtype_of(case)) for shape in (q_shape, k_shape, *rest))
        exact, state = torch.promote_types(q.dtype, torch.float32), (case["B"], case["H"], case["D"], case["E"])
        initial, dstate = (source.normal(state, exact) if fully else None for _ in range(2))
        slopes = decay.alibi(case["H"]).to(source.device) if case["decay"] else None
        if case.get("per_token"):
            slopes = source.uniform(case["B"], case["H"], case["N"]).mul_(STRONGEST).requires_grad_()
        x = testing.Inputs(q, k, v, slopes, 1.0, initial, None, do, q.new_zeros(0) if dstate is None else dstate)
        return self.problem_of(x, source, fully)

    def problem_of(self, x: testing.Inputs, source: Source, fully: bool = False) -> Problem:
        slopes = x.decay
        per_token = slopes is not None and is_per_token(slopes, max(x.q.shape[1], x.v.shape[1]))
        wanted = ("q", "k", "v", "initial_state", *(["decay"] if per_token else []))
        leaves = {name: t.requires_grad_() for name, t in x._asdict().items() if name in wanted and t is not None}
        heads = source.heads(x.q, x.k)
        if x.q.shape[1] < x.v.shape[1]:  # groups
            heads = source.heads(x.v, x.k)._replace(shared=("q", "k", "dq", "dk"))

        def expected() -> dict[str, Expected]:
            names = ("q", "k", "v", "do", *(["decay"] if per_token else []))
            part: dict[str, Any] = {name: heads.pick(name, getattr(x, name)).detach() for name in names}
            if per_token:
                part["decay"].requires_grad_()
            elif slopes is not None:
                part["decay"] = heads.slopes(slopes)
            use, rows = ("o", "state") if fully else ("o",), None if heads.whole else self.ROWS
            found = testing.expected(x._replace(**part), use, rows=rows)
            return {"dinitial_state" if name == "dinitial" else name: wanted for name, wanted in found.items()}

        douts: dict[str, Tensor] = {"o": x.do, "state": x.dstate} if fully else {"o": x.do}
        constants = {} if slopes is None or per_token else {"decay": slopes}
        return Problem(x, leaves, douts, expected, constants, heads.pick)

    def attend(self, backend: str) -> Attend:
        return lambda x: lightning_attention(x.q, x.k, x.v, x.decay, **x.options(), backend=backend)

    def attend_fully(self, backend: str) -> Attend:
        return lambda x: lightning_attention_with_state(x.q, x.k, x.v, x.decay, **x.options(), backend=backend)

    def call(self, case: Case, fully: bool = False) -> Call:
        x = self.drawn(case, META, fully).x
        tensors = Residuals(x.q, x.k, x.v, x.decay, x.initial_state, None)
        return spec_of_residuals(tensors, x.scale, fully), tensors, lambda o, state: (x.do, state)


lightning = Lightning()
