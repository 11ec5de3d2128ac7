"""Mamba-2's scan inside the CUDA sweeps: step sizes, skip and gate, by `fulmen.layers.scan`.

On the emulator, and on a GPU, every output and gradient against fp64; what is launched; what is compiled.
"""

from __future__ import annotations

import contextlib
import itertools
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from fulmen import cuda as build
from fulmen import dispatch
from fulmen.boundary import is_plain_eager
from fulmen.hardware import TARGETS
from fulmen.layers import scan as mamba
from fulmen.layers.fused import mamba as kernels
from fulmen.lightning import cuda, policy
from fulmen.lightning.kernels import sweep
from fulmen.testing import assert_close, expected, results_of
from fulmen.testing import lightning as testing
from tests import emulator, sass
from tests.emulator import ANY, LATE, MODES, PRESSED
from tests.lightning.cuda_calls import spec
from tests.lightning.test_cuda_tokens import HOT

SOFTPLUS = mamba.Steps(True, 0.0, torch.inf)
STATE, P = 128, 64  # D and E
emulated = pytest.mark.skipif(emulator.COMPILER is None, reason="the emulator needs g++")
CASES = {
    "plain": {"N": 150, "D": False},
    "D": {"N": 333, "H": 4, "groups": 2, "initial": True},
    "z": {"N": 130, "rows": 2, "z": True},
    "long": {"N": 600, "H": 2, "groups": 1, "z": True, "initial": True},
    "one": {"N": 1, "H": 1, "groups": 1},
    "no groups": {"N": 70, "H": 2, "groups": 2},
    "packed": {"lengths": [65, 0, 1, 70], "z": True, "initial": True},
    "zero steps": {"N": 200, "dt": "zero"},
    "large steps": {"N": 200, "dt": "large"},
    "seq": {"N": 140, "seq": True, "z": True},
    "norm": {"N": 130, "z": True, "norm": True},
}


def drawn(*shape, seed=0, device="cpu"):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device)


class Call:
    """Arguments of a scan, as slices of projections; `leaves` are what gradients are asked of."""

    def __init__(
        self, N=0, rows=1, H=2, groups=1, D=True, z=False, initial=False, lengths=None, dt=None, seq=False, norm=False,
        device="cpu", P=P,
    ):  # fmt: skip
        N = N or sum(lengths)
        self.sizes, self.device = (rows, N, H, P, groups), device
        self.has_d, self.has_z, self.has_norm, self.has_initial = D, z, norm, initial
        self.cu = None
        if lengths is not None:
            ends = [0, *itertools.accumulate(lengths)]
            self.cu = torch.tensor(ends, dtype=torch.int32, device=device)
        self.seq = (torch.arange(N, device=device) // 50)[None].expand(rows, -1) if seq else None
        width = H * P + 2 * groups * STATE
        make = lambda *shape, seed: drawn(*shape, seed=seed, device=device)  # noqa: E731
        states = rows if lengths is None else len(lengths)
        step = make(rows, N, H, seed=2)
        step = {None: step - 2, "zero": step - 200 * (step > 0), "large": 40 * step.abs()}[dt]
        of_heads = torch.stack([-make(H, seed=3).abs() - 0.1, make(H, seed=4), make(H, seed=5)])
        self.leaves = {
            "xBC": make(rows, N, width, seed=0).bfloat16(), "dt": step.bfloat16(), "of_heads": of_heads,
            "z": make(rows, N, H * P + 8, seed=1).bfloat16() if z else None,
            "weight": make(H * P, seed=6).bfloat16() if norm else None,
            "initial": make(states, H, STATE, P, seed=7) if initial else None,
        }  # fmt: skip
        self.leaves = {name: t for name, t in self.leaves.items() if t is not None}
        self.douts = [make(rows, N, H, P, seed=8).bfloat16(), make(states, H, STATE, P, seed=9)]

    def scan(self, backend, *leaves):
        """y and the last states; `backend` is a name or a function in its place."""
        of = dict(zip(self.leaves, leaves, strict=True))
        rows, N, H, P, groups = self.sizes
        ends = (0, H * P, H * P + groups * STATE, H * P + 2 * groups * STATE)
        x, B, C = (of["xBC"][:, :, i:j] for i, j in itertools.pairwise(ends))
        x, B, C = x.unflatten(2, (H, P)), B.unflatten(2, (groups, STATE)), C.unflatten(2, (groups, STATE))
        A, bias, D = (of["of_heads"][i] for i in range(3))
        z = of["z"][:, :, 8:].unflatten(2, (H, P)) if self.has_z else None
        norm = mamba.Norm(of["weight"], 1, 1e-5) if self.has_norm else None
        given = (x, of["dt"], A, B, C, D if self.has_d else None, z, bias, SOFTPLUS)
        if callable(backend):
            return backend(*given, self.seq, of.get("initial"), self.cu, norm)
        return mamba.scan(
            *given, seq=self.seq, initial_state=of.get("initial"), cu_seqlens=self.cu, norm=norm, backend=backend
        )


def plain(x, dt, A, B, C, D, z, bias, steps, seq, initial, cu, norm):
    """As one would write it, in the dtype of x."""
    v, decay = mamba._values(x, dt, A, bias, steps, seq)
    q, k, v = (t.transpose(1, 2) for t in (C, B, v))
    none = x.new_empty(1, x.shape[2], 0, 0)
    o, state = testing._plain(testing.Inputs(q, k, v, decay, 1.0, initial, cu, none, none))
    return mamba._outputs(o.transpose(1, 2), x, D, z, norm).to(x.dtype), state


def check(call: Call, backend: str = "cuda") -> None:
    """y without gradients, then y, the states and all gradients."""
    given = [t.requires_grad_() for t in call.leaves.values()]
    wanted = expected(lambda *leaves: call.scan(plain, *leaves), given, call.douts, terms=call.sizes[1])
    with torch.no_grad():
        alone = call.scan(backend, *given)
    names = ["y", "state", *(f"d{name}" for name in call.leaves)]
    for name, got, want in zip(names[:2], alone, wanted, strict=False):
        assert_close(f"{name} without gradients", got, *want)
    found = results_of(lambda *leaves: call.scan(backend, *leaves), given, call.douts)
    for name, got, want in zip(names, found, wanted, strict=True):
        assert_close(name, got, *want)


@contextlib.contextmanager
def serving(mode=ANY, seed=0, edit=None, **more):
    """The emulator serves scans as an H200 would: kernels around it are interpreted."""
    with pytest.MonkeyPatch.context() as patch, emulator.serve("lightning", mode, seed, edit, **more) as machine:
        patch.setattr(mamba, "kernels_for", lambda name, *given: kernels if is_plain_eager(*given) else None)
        yield machine


@emulated
@pytest.mark.parametrize("mode", MODES, ids=["early", "late", "any", "pressed"])
@pytest.mark.parametrize("case", CASES)
def test_right_on_the_emulator(case, mode):
    with serving(mode) as machine:
        check(Call(**CASES[case]))
        assert machine.launches == 4  # o twice, then dv and dk, and dq
