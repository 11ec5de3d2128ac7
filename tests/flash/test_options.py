"""Nothing a caller asks for is ignored: each fact of a spec reaches a launch or is refused, each option its check."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

import fulmen
from fulmen import cuda, hardware, plans
from fulmen.dispatch import Choice
from fulmen.flash import policy
from fulmen.flash.kernels import backward, combine, single_tile, sm90, small
from fulmen.flash.spec import FlashSpec
from fulmen.testing import flash as testing

CALL = FlashSpec(
    2, 4, 2, 128, 192, 64, 64, torch.bfloat16, torch.device("cuda", 0), 0.125, left=500, right=0, softcap=3.0,
    has_sinks=True, sequences=3, with_lse=True, needs_grad=True,
)  # fmt: skip
PLAIN = CALL._replace(left=None, softcap=None, has_sinks=False, sequences=None)
OTHER = {
    "B": 3, "H": 8, "H_KV": 1, "N_Q": 100, "N_KV": 191, "D": 128, "E": 128, "dtype": torch.float16, "scale": 0.25,
    "left": 7, "right": 5, "top_left": True, "softcap": 4.0, "has_sinks": True, "sequences": 2, "deterministic": True,
    "has_kv_lengths": True, "page": 64,
}  # fmt: skip
# Known to a launch by what it is given: a pointer or null, addresses. Rows that are not aligned are refused before.
BY_ADDRESS = {"device", "with_lse", "needs_grad", "aligned"}


def launch_of_sm90(spec):
    tile = policy.sm90_tile(CALL, hardware.TARGETS[90])
    sinks = torch.float32 if spec.has_sinks else None
    return sm90.launch_of(spec, Choice("cuda", "sm90", tile, 1, "cuda"), (1, 2, 3), sinks)


def launch_of_small(spec):
    return small.launch_of(spec, Choice("cuda", "small", policy.SmallTile(1, 4, 128, 2), 1, "cuda"), ((1, 2, 3),) * 4)


def launch_of_single_tile(spec):
    tile = policy.SingleTile(64, 3)
    return single_tile.launch_of(spec, Choice("cuda", "single_tile", tile, 1, "cuda"), ((1, 2, 3),) * 4)


def launch_of_combine(spec):
    return combine.launch_of(spec, 2, (1, 2, 3), torch.float32 if spec.has_sinks else None)


def launch_of_backward(spec):
    tile, x = policy.backward_tile(CALL)._replace(fixed=spec.deterministic), torch.empty(1, 1, 1, 1)
    return backward.launches(spec, tile, x, x, x, x, x, torch.float32 if spec.has_sinks else None)


# The macros and constants in which a fact shows. Facts that are not named are refused, or are in SAME.
SHOWS: dict[Any, dict[str, str]] = {
    launch_of_sm90: {
        "B": "heads grid", "H": "group", "H_KV": "group h heads", "N_Q": "n_q tiles grid", "N_KV": "n_kv",
        "D": "HEAD_DIM", "E": "VALUE_DIM", "dtype": "BF16", "scale": "inner", "left": "LEFT left",
        "right": "RIGHT right", "top_left": "top_left", "softcap": "SOFTCAP factor inner", "has_sinks": "SINKS",
        "sequences": "PACKED sequences", "has_kv_lengths": "LENGTHS", "page": "PAGE BOX",
    },
    launch_of_small: {
        "B": "grid", "H": "group log_group grid", "H_KV": "group log_group", "N_Q": "n_q shift grid",
        "N_KV": "n_kv shift", "dtype": "BF16", "scale": "factor", "right": "CAUSAL", "top_left": "shift",
    },
    launch_of_single_tile: {
        "B": "grid", "H": "group log_group grid", "H_KV": "group log_group", "N_Q": "n_q shift", "N_KV": "n_kv shift",
        "dtype": "BF16", "scale": "factor", "right": "CAUSAL", "top_left": "shift",
    },
    launch_of_combine: {
        "B": "heads grid", "H": "h heads grid", "N_Q": "n grid", "E": "VALUE_DIM", "dtype": "BF16",
        "has_sinks": "SINKS",
    },
    launch_of_backward: {
        "B": "heads works grid", "H": "group grid", "H_KV": "group h heads", "N_Q": "n_q slots grid", "N_KV": "n_kv",
        "D": "HEAD_DIM", "E": "VALUE_DIM", "dtype": "BF16", "scale": "inner scale", "left": "LEFT left",
        "right": "RIGHT right", "top_left": "top_left", "softcap": "SOFTCAP factor inner", "has_sinks": "SINKS",
        "sequences": "PACKED sequences slots tiles works end", "deterministic": "DETERMINISTIC",
    },
}  # fmt: skip
SAME = {
    launch_of_sm90: {"deterministic"},  # a forward always is
    launch_of_small: {"deterministic", "page"},  # pages come with lengths, which are refused
    launch_of_single_tile: {"deterministic", "page"},
    launch_of_combine: {  # it adds what was summed, however that was
        "deterministic", "H_KV", "N_KV", "D", "scale", "left", "right", "top_left", "softcap", "sequences",
        "has_kv_lengths", "page",
    },
    launch_of_backward: {"has_kv_lengths", "page"},  # which have no gradient
}  # fmt: skip


def facts_of(launches) -> dict[Any, Any]:
    found = {}
    for i, launch in enumerate(launches if isinstance(launches, list) else [launches]):
        (variant, _, grid, _, _, constants), _ = launch
        found |= {(name, i): value for name, value in (*variant.macros, *constants.items(), ("grid", grid))}
    return found


@pytest.mark.parametrize("field", [f for f in FlashSpec._fields if f not in BY_ADDRESS])
@pytest.mark.parametrize("launch_of", SHOWS, ids=lambda f: f.__name__)
def test_a_fact_reaches_the_launch_or_is_refused(launch_of, field, monkeypatch):
    """A new field of the spec needs another value in OTHER, and each kernel its argument, its macro or its refusal."""
    monkeypatch.setattr(hardware, "of", lambda device: hardware.TARGETS[90])
    monkeypatch.setattr(cuda, "Launch", lambda *facts, **others: (facts, others))
    short = launch_of in (launch_of_small, launch_of_single_tile)
    call = PLAIN if short else CALL
    other = OTHER[field] if getattr(call, field) != OTHER[field] else not OTHER[field]
    others = [other, None] if field in ("left", "right", "softcap", "sequences") else [other]
    changed, refused = set(), []
    for value in others:
        asked = call._replace(**{field: value})
        refused.append(short and asked != call and small.unsupported_reason(asked, hardware.TARGETS[90]) is not None)
        if not refused[-1]:
            before, after = facts_of(launch_of(call)), facts_of(launch_of(asked))
            changed |= {name for name, i in before if before[name, i] != after.get((name, i))}
    assert set(SHOWS[launch_of].get(field, "").split()) <= changed
    assert bool(changed) == (field in SHOWS[launch_of])
    assert changed or any(refused) or field in SAME[launch_of]


# Values of an option after which a plan is kept, and others that are equal to them, or nearly, but are no values of it.
EQUAL = {
    "causal": [(True, 1), (False, 0), (False, 0.0)],
    "window": [((1, 0), (True, False)), ((1, 0), (1.0, 0.0))],
    "softcap": [(1.0, True)],
    "scale": [(1.0, True)],
    "max_kv_length": [(1, True), (1, 1.0)],
    "backend": [("eager", b"eager")],
}
TENSORS = {"q", "k", "v", "sinks", "cu_seqlens_q", "cu_seqlens_k", "kv_lengths", "page_table"}


@pytest.mark.parametrize(
    "option", [o for o in inspect.signature(fulmen.flash_attention).parameters if o not in TENSORS]
)
def test_a_plan_serves_no_wrong_value(option):
    """A plan is found by the values of options, and 1.0 == True."""
    x = testing.inputs(1, 2, 8, 16)
    others = {"kv_lengths": torch.tensor([8], dtype=torch.int32)} if option == "max_kv_length" else {}
    for right, wrong in EQUAL[option]:
        plans.clear()
        with pytest.raises((TypeError, ValueError)) as fresh:
            fulmen.flash_attention(x.q, x.k, x.v, **others, **{option: wrong})
        for _ in range(3):
            fulmen.flash_attention(x.q, x.k, x.v, **others, **{option: right})
        with pytest.raises((TypeError, ValueError)) as planned:
            fulmen.flash_attention(x.q, x.k, x.v, **others, **{option: wrong})
        assert str(planned.value) == str(fresh.value)
