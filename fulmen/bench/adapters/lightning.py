"""Lightning attention for the benchmark; the package describes the names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fulmen import decay
from fulmen.bench.adapters import Call, Heads, dtype_of, makers, normal, shapes, small_case
from fulmen.bench.gate import Problem
from fulmen.lightning.op import lightning_attention, lightning_attention_with_state
from fulmen.lightning.spec import LightningSpec, Residuals, empty_states, is_per_token
from fulmen.testing import Expected
from fulmen.testing import lightning as testing

KEYS: dict[str, Any] = {
    "B": 1, "H": 8, "H_KV": None, "N": 1024, "D": 64, "E": None, "dtype": "auto", "causal": True, "decay": True,
    "per_token": False, "groups": None,
}  # fmt: skip
LEAVES = ("q", "k", "v", "initial_state")
STRONGEST = 0.2  # decay of a token
ROWS = 2048  # of the attention matrix that are written out at a time to check the timed shape


def complete(case: dict[str, Any]) -> dict[str, Any]:
    done = KEYS | case
    if not done["causal"]:
        raise ValueError("lightning attention is causal")
    if done["per_token"] and not done["decay"]:
        raise ValueError("per_token: every token has a decay, so decay must be true")
    if done["groups"] and (done["H"] % done["groups"] or done["H_KV"] not in (None, done["H"])):
        raise ValueError(f"groups={done['groups']}: must divide H={done['H']}, which v has")
    usual = {name for name in ("per_token", "groups") if not done[name]}  # as if there were no such options
    full = done | {"H_KV": done["H_KV"] or done["H"], "E": done["E"] or done["D"]}
    return {name: value for name, value in full.items() if name not in usual}


def function(case: dict[str, Any]) -> str:
    if case.get("per_token", False):
        return "causal linear attention with a decay for each token"
    return "causal linear attention with decay" if case["decay"] else "causal linear attention"


def few(case: dict[str, Any]) -> dict[str, Any]:
    """The shape of the gate; two groups, if there are any."""
    groups = case.get("groups") and {
        "H": 2 * (case["H"] // case.get("groups")),
        "H_KV": 2 * (case["H"] // case.get("groups")),
    }
    return small_case(case) | (groups | {"groups": 2} if groups else {})


def sizes(case: dict[str, Any]) -> list[tuple[int, ...]]:
    """Of q, k, v and o."""
    q, k, v, o = shapes(case)
    heads = case.get("groups") or case["H"]
    return [(q[0], heads, *q[2:]), (k[0], case.get("groups") or k[1], *k[2:]), v, o]


def decay_of(case: dict[str, Any], generator: torch.Generator) -> Tensor | None:
    if case.get("per_token", False):
        shape = case["B"], case["H"], case["N"]
        return torch.rand(shape, generator=generator, device=generator.device).mul_(STRONGEST).requires_grad_()
    return decay.alibi(case["H"]).to(generator.device) if case["decay"] else None


def drawn(
    case: dict[str, Any], device: torch.device, seed: int, fully: bool = False, one_head: int | None = None
) -> Problem:
    generator = torch.Generator(device).manual_seed(seed)
    q, k, v, do = (normal(shape, dtype_of(case), generator) for shape in sizes(case))
    exact, state = torch.promote_types(q.dtype, torch.float32), (case["B"], case["H"], case["D"], case["E"])
    initial, dstate = (normal(state, exact, generator) if fully else None for _ in range(2))
    slopes = decay_of(case, generator)
    x = testing.Inputs(q, k, v, slopes, 1.0, initial, None, do, q.new_zeros(0) if dstate is None else dstate)
    return as_problem(x, fully, one_head)


def as_problem(x: testing.Inputs, fully: bool = False, one_head: int | None = None) -> Problem:
    slopes = x.decay
    per_token = slopes is not None and is_per_token(slopes, max(x.q.shape[1], x.v.shape[1]))
    wanted = (*LEAVES, "decay") if per_token else LEAVES
    leaves = {name: t.requires_grad_() for name, t in x._asdict().items() if name in wanted and t is not None}
    heads = Heads.of(x.q, x.k, one_head)
    if x.q.shape[1] < x.v.shape[1]:  # groups
        heads = Heads.of(x.v, x.k, one_head)._replace(shared=("q", "k", "dq", "dk"))

    def expected() -> dict[str, Expected]:
        if heads.whole:
            found = testing.expected(x, ("o", "state") if fully else ("o",))
        else:
            part: dict[str, Any] = {name: heads.pick(name, getattr(x, name)).detach() for name in ("q", "k", "v", "do")}
            of_heads = slice(heads.head * heads.group, (heads.head + 1) * heads.group)
            part["decay"] = None if slopes is None or per_token else slopes[of_heads]
            if slopes is not None and per_token:
                part["decay"] = heads.pick("decay", slopes).detach().requires_grad_()
            found = testing.expected(x._replace(**part), ("o",), rows=ROWS)
        return {"dinitial_state" if name == "dinitial" else name: wanted for name, wanted in found.items()}

    douts = {"o": x.do, "state": x.dstate} if fully else {"o": x.do}
    constants = {} if slopes is None or per_token else {"decay": slopes}
    return Problem(x, leaves, douts, expected, constants, heads.pick)


problem, small = makers(drawn, few)


def attend(backend: str) -> Callable[[testing.Inputs], Tensor]:
    return lambda x: lightning_attention(x.q, x.k, x.v, x.decay, **x.options(), backend=backend)


def attend_fully(backend: str) -> Callable[[testing.Inputs], tuple[Tensor, Tensor]]:
    return lambda x: lightning_attention_with_state(x.q, x.k, x.v, x.decay, **x.options(), backend=backend)


def spec(case: dict[str, Any], device: torch.device) -> LightningSpec:
    B, H, H_KV, N, D, E = (case[key] for key in ("B", "H", "H_KV", "N", "D", "E"))
    call = LightningSpec(B, H, H_KV, N, D, E, dtype_of(case), device, has_decay=case["decay"])
    return call._replace(per_token=case.get("per_token", False), groups=case.get("groups"))


def without_data(case: dict[str, Any], fully: bool) -> Call:
    q, k, v, do = (torch.empty(shape, dtype=dtype_of(case), device="meta") for shape in sizes(case))
    slopes = torch.empty(case["H"], device=q.device) if case["decay"] else None
    if case.get("per_token", False):
        slopes = torch.empty(case["B"], case["H"], case["N"], device=q.device)
    call = spec(case, q.device)._replace(has_initial_state=fully, with_final_state=fully)
    initial = empty_states(call) if fully else None
    return call, Residuals(q, k, v, slopes, initial, None), lambda o, state: (do, state)
