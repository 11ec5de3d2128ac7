"""dq, dk and the decay's gradient of heads that share q and k (groups.py), from saved states, against fp64."""

from __future__ import annotations

import itertools

import pytest
import torch

from fulmen.lightning import groups, triton
from fulmen.lightning.policy import GROUP_ROWS, slots_of
from fulmen.lightning.spec import Residuals, spec_of
from fulmen.testing import lightning as testing

CASES = {
    "two groups": {"B": 2, "H": 4, "groups": 2, "N": 300, "decay": "token", "layout": "fused"},
    "one group": {"H": 3, "groups": 1, "N": 129, "decay": "token", "initial_state": True, "scale": 0.5},
    # the kernel is for 16 bits: sums of decays that forget are exact to 2^-12 only
    "no group": {"H": 2, "N": 64, "decay": "extreme", "initial_state": True, "dtype": torch.float16},
    "packed": {"H": 2, "groups": 1, "lengths": [70, 0, 200, 1], "decay": "token", "initial_state": True},
    "extreme": {"H": 2, "groups": 1, "N": 200, "decay": "extreme", "layout": "bnhd", "dtype": torch.float16},
}


def saved_states(x: testing.Inputs, spec):
    """What the forward and the sweep of dv save, and the anchors of the decay's gradient; rounded at the end."""
    B, H, slots = x.q.shape[0], spec.H, slots_of(spec, GROUP_ROWS)
    states, dstates = (torch.zeros(B, H, slots, spec.D, spec.E, dtype=torch.float64) for _ in range(2))
    anchors = torch.zeros(B, H, slots, 1, dtype=torch.float64)
    group = H // x.q.shape[1]
    q, k = (t.double().repeat_interleave(group, 1)[..., None] for t in (x.q, x.k))
    v, do, keep = (
        x.v.double()[..., None, :],
        x.do.double()[..., None, :],
        torch.exp(-x.decay.detach().double())[..., None, None],
    )
    ends = [0, x.q.shape[2]] if x.cu_seqlens is None else x.cu_seqlens.tolist()
    for i, (begin, end) in enumerate(itertools.pairwise(ends)):
        which = slice(None) if x.cu_seqlens is None else slice(i, i + 1)
        first = begin // GROUP_ROWS + i
        state = torch.zeros_like(states[:, :, 0]) if x.initial_state is None else x.initial_state[which].double()
        for t in range(begin, end):
            if (t - begin) % GROUP_ROWS == 0:
                states[:, :, first + (t - begin) // GROUP_ROWS] = state
            state = keep[:, :, t] * state + k[:, :, t] * v[:, :, t]
        dstate = x.dstate[which].double() / spec.scale
        for t in reversed(range(begin, end)):
            slot = first + (t - begin) // GROUP_ROWS
            if t == end - 1 or (t + 1 - begin) % GROUP_ROWS == 0:
                dstates[:, :, slot] = dstate
            dstate = keep[:, :, t] * (dstate + q[:, :, t] * do[:, :, t])
            if (t - begin) % GROUP_ROWS == 0:
                anchors[:, :, slot, 0] = (states[:, :, slot] * dstate).sum((2, 3)) * spec.scale
    lie = (y.mT.flatten(0, 1).to(x.q.dtype).contiguous() for y in (states, dstates))
    return *lie, anchors.flatten(0, 1).float()


@pytest.mark.parametrize("case", CASES)
def test_gradients_from_saved_states(case):
    x = testing.inputs(**CASES[case], **({} if "N" in CASES[case] else {"N": 0}), D=32, E=16)
    x = x._replace(decay=x.decay.requires_grad_())
    spec = spec_of(x.q, x.k, x.v, x.decay, **x.options(), with_final_state=True)
    states, dstates, anchors = saved_states(x, spec)
    given = Residuals(x.q, x.k, x.v, x.decay.detach(), x.initial_state, x.cu_seqlens)
    grads = triton.Gradients.empty(spec, given, 64, spans=False, apart=True)._replace(anchors=anchors)
    ddecay = torch.empty_like(given.decay)
    launches = [
        groups.group_gradients(spec, given, x.do, states, dstates, grads),
        triton.token_gradient(spec, given, grads, ddecay, True, GROUP_ROWS),
    ]
    triton.run(launches, spec.device)
    found = {"dq": grads.dq, "dk": grads.dk, "ddecay": ddecay}
    for name, wanted in testing.expected(x).items():
        if name in found:
            testing.assert_close(name, found[name], *wanted)
