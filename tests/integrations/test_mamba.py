"""mamba-ssm's functions, token by token in fp64 from their definitions."""

from __future__ import annotations

import math
import re

import pytest
import torch
from torch.nn import functional as F

from fulmen.integrations import mamba
from fulmen.launch import run
from fulmen.layers.fused import state_update
from fulmen.layers.scan import Steps

ROWS, L, H, P, N, G = 2, 41, 6, 8, 16, 2
OPTIONS = {
    "plain": {},
    "softplus": {"dt_bias": True, "dt_softplus": True},
    "limit": {"dt_softplus": True, "dt_limit": (0.2, 0.9)},
    "D": {"D": 1},
    "D of each": {"D": 2, "dt_softplus": True},
    "z": {"D": 1, "z": True, "dt_bias": True, "dt_softplus": True},
}


def inputs(dtype=torch.float64, rows=ROWS, device="cpu", D=0, z=False, dt_bias=False, **options):
    torch.manual_seed(0)
    n = lambda *shape: torch.randn(*shape, dtype=dtype, device=device)  # noqa: E731
    tensors = {"x": n(rows, L, H, P), "dt": n(rows, L, H), "A": -torch.rand(H, device=device) - 0.1,
               "B": n(rows, L, G, N), "C": n(rows, L, G, N)}  # fmt: skip
    if not options.get("dt_softplus"):
        tensors["dt"] = tensors["dt"].abs()
    if D:
        tensors["D"] = n(H, P)[:H, 0] if D == 1 else n(H, P)
    if z:
        tensors["z"] = n(rows, L, H, P)
    if dt_bias:
        tensors["dt_bias"] = n(H)
    return tensors, options


def scan(x, dt, A, B, C, D=None, z=None, dt_bias=None, dt_softplus=False, dt_limit=None, state=None, resets=()):
    """y and the state after the last token, in fp64."""
    x, dt, A, B, C = (t.double() for t in (x, dt, A, B, C))
    dt = dt if dt_bias is None else dt + dt_bias.double()
    dt = F.softplus(dt) if dt_softplus else dt
    dt = dt if dt_limit is None else dt.clamp(*dt_limit)
    B, C = (t.repeat_interleave(H // G, 2) for t in (B, C))
    h = torch.zeros(x.shape[0], H, P, N, dtype=torch.float64) if state is None else state.double()
    y = []
    for t in range(x.shape[1]):
        h = h * 0 if t in resets else h
        h = h * torch.exp(dt[:, t] * A)[..., None, None] + (dt[:, t, :, None] * x[:, t])[..., None] * B[:, t, :, None]
        y.append((h * C[:, t, :, None]).sum(-1))
    y = torch.stack(y, 1)
    if D is not None:
        y = y + x * (D.double()[:, None] if D.ndim == 1 else D.double())
    return y if z is None else y * F.silu(z.double()), h


def close(got, want):
    torch.testing.assert_close(got.double(), want.double(), rtol=1e-4, atol=1e-4 * float(want.abs().max()))


@pytest.mark.parametrize("name", OPTIONS)
def test_scan(name):
    tensors, options = inputs(**OPTIONS[name])
    state = torch.randn(ROWS, H, P, N)
    y, final = mamba.mamba_chunk_scan_combined(
        **tensors, **options, chunk_size=16, initial_states=state, return_final_states=True
    )
    want, last = scan(**tensors, **options, state=state)
    close(y, want)
    close(final, last)
    assert mamba.mamba_chunk_scan_combined(**tensors, **options).shape == y.shape


def test_gradients():
    tensors, options = inputs(**OPTIONS["z"])
    leaves = [t.requires_grad_() for t in tensors.values()]
    dy = torch.randn(ROWS, L, H, P, dtype=torch.float64)
    got = torch.autograd.grad(mamba.mamba_chunk_scan_combined(**tensors, **options), leaves, dy)
    want = torch.autograd.grad(scan(**tensors, **options)[0], leaves, dy)
    for name, a, b in zip(tensors, got, want, strict=True):
        assert a.dtype == tensors[name].dtype
        close(a, b)


def test_sequences_in_a_row():
    tensors, options = inputs(rows=1, **OPTIONS["z"])
    ends = [0, 3, 20, L]
    want, last = scan(**tensors, **options, resets=ends)
    index = torch.repeat_interleave(torch.arange(3), torch.tensor(ends).diff())[None]
    y, final = mamba.mamba_chunk_scan_combined(**tensors, **options, seq_idx=index, return_final_states=True)
    close(y, want)
    close(final, last)
    y, final, states = mamba.mamba_chunk_scan_combined(
        **tensors, **options, cu_seqlens=torch.tensor(ends), return_final_states=True, return_varlen_states=True,
        state_dtype=torch.float32,
    )  # fmt: skip
    close(y, want)
    close(final, last)
    assert states.shape == (3, H, P, N)
    assert (states.dtype, final.dtype) == (torch.float32, torch.float64)  # final states keep theirs
    assert torch.equal(states[-1:], final.float())
    assert final.is_contiguous()


def test_both_ways_to_say_where_sequences_begin():
    """As mamba-ssm's own layer: seq_idx separates them, cu_seqlens is for the varlen states."""
    tensors, options = inputs(rows=1, **OPTIONS["z"])
    ends = torch.tensor([0, 3, 3, 20, L])
    both = {"seq_idx": torch.repeat_interleave(torch.arange(4), ends.diff())[None], "cu_seqlens": ends}
    call = lambda **given: mamba.mamba_chunk_scan_combined(**tensors, **options, **given)  # noqa: E731
    y, final, states = call(**both, return_final_states=True, return_varlen_states=True)
    want = call(cu_seqlens=ends, return_final_states=True, return_varlen_states=True)
    assert all(map(torch.equal, (y, final, states), want))
    state = torch.randn(1, H, P, N)
    assert torch.equal(call(**both, initial_states=state), call(seq_idx=both["seq_idx"], initial_states=state))
    with pytest.raises(ValueError, match=r"seq_idx changes at \[3, 20\], and cu_seqlens is \[0, 4, 41\]"):
        call(seq_idx=both["seq_idx"], cu_seqlens=torch.tensor([0, 4, L]))
    with pytest.raises(ValueError, match="and no seq_idx"):
        call(**both, initial_states=state, return_varlen_states=True)


def test_memory_that_a_convolution_leaves():
    """(B, channels, L) turned round and split, as in mamba-ssm's layer."""
    tensors, options = inputs(**OPTIONS["z"])
    turned = {k: t.movedim(1, -1).contiguous().movedim(-1, 1) if t.ndim == 4 else t for k, t in tensors.items()}
    assert turned["B"].stride(3) != 1
    got, want = (mamba.mamba_chunk_scan_combined(**t, **options) for t in (turned, tensors))
    torch.testing.assert_close(got, want)


LAYERS = {
    "gate": {},
    "norm, then gate": {"norm": True},
    "gate, then norm": {"norm": True, "norm_before_gate": False},
    "in groups, with an MLP and a product": {"norm": True, "norm_before_gate": False, "M": 5, "out": 7},
    "sequences": {"norm": True, "seq": [0, 3, 20, L]},
    "D of each, no activation, no bias": {"activation": None, "D": 2, "bias": False, "out": 7},
    "other constants": {
        "norm": True,
        "norm_before_gate": False,
        "eps": 0.3,
        "limit": (0.2, 0.9),
        "activation": "swish",
    },
    "other constants, gate last": {"norm": True, "eps": 0.3, "limit": (0.2, 0.9)},
}


@pytest.mark.parametrize("name", LAYERS)
def test_between_the_projections_of_a_layer(name):
    """Convolution, scan, gate and norm, each as its definition says, and gradients of everything."""
    torch.manual_seed(0)
    usual = {"M": 0, "out": 0, "D": 1, "activation": "silu", "bias": True, "norm": False, "seq": None, "eps": 1e-6}
    case = usual | {"limit": (0.0, math.inf)} | LAYERS[name]
    dim, M = H * P, case["M"]
    n = lambda *shape: torch.randn(*shape, dtype=torch.float64).requires_grad_()  # noqa: E731
    width = dim + 2 * G * N
    given = {"zxbcdt": n(1, L, 2 * M + dim + width + H), "conv1d_weight": n(width, 4), "dt_bias": n(H),
             "A": (-torch.rand(H) - 0.1).double().requires_grad_(), "D": n(H, P)[:, 0]}  # fmt: skip
    given |= {"D": n(H, P)} if case["D"] == 2 else {}
    given |= {"conv1d_bias": n(width)} if case["bias"] else {}
    given |= {"rmsnorm_weight": n(dim)} if case["norm"] else {}
    given |= {"outproj_weight": n(case["out"], M + dim), "outproj_bias": n(case["out"])} if case["out"] else {}
    options = {"headdim": P, "ngroups": G, "activation": case["activation"], "initial_states": torch.randn(1, H, P, N),
               "rmsnorm_eps": case["eps"], "dt_limit": case["limit"],
               "norm_before_gate": case.get("norm_before_gate", True)}  # fmt: skip
    ends = case["seq"]
    index = None if ends is None else torch.repeat_interleave(torch.arange(3), torch.tensor(ends).diff())[None]
    y, final = mamba.mamba_split_conv1d_scan_combined(
        **{"conv1d_bias": None} | given, **options, seq_idx=index, return_final_states=True
    )
    gate, up, z, mixed, dt = given["zxbcdt"].split([M, M, dim, width, H], 2)
    rows = []
    for t in range(L):
        first = max([0] if ends is None else [e for e in ends if e <= t])
        taps = [mixed[:, t - i] * given["conv1d_weight"][:, 3 - i] for i in range(4) if t - i >= first]
        rows.append(sum(taps) + given.get("conv1d_bias", 0.0))
    mixed = torch.stack(rows, 1)
    mixed = F.silu(mixed) if case["activation"] else mixed
    x, B, C = mixed.split([dim, G * N, G * N], 2)
    heads = {"x": x.unflatten(2, (H, P)), "B": B.unflatten(2, (G, N)), "C": C.unflatten(2, (G, N))}
    around = {"dt_bias": given["dt_bias"], "dt_softplus": True, "resets": () if ends is None else ends[1:],
              "dt_limit": case["limit"], "state": options["initial_states"]}  # fmt: skip
    want, last = scan(dt=dt, A=given["A"], D=given["D"], **heads, **around)
    want, gated = want.flatten(2), F.silu(z)
    if case["norm"]:
        before = options["norm_before_gate"]
        want = (want if before else want * gated).unflatten(2, (G, -1))
        want = F.rms_norm(want, (dim // G,), eps=case["eps"]).flatten(2) * given["rmsnorm_weight"]
        want = want * gated if before else want
    else:
        want = want * gated
    want = torch.cat([F.silu(gate) * up, want], 2)
    want = F.linear(want, given["outproj_weight"], given["outproj_bias"]) if case["out"] else want
    close(y, want)
    close(final, last)
    dy = torch.randn_like(y)
    for a, b in zip(*(torch.autograd.grad(o, list(given.values()), dy) for o in (y, want)), strict=True):
        close(a, b)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("seq", [False, True])
def test_a_layer_of_mixed_dtypes(autocast, seq):
    """bf16 activations with fp32 parameters, as under autocast; and bf16 as it is."""
    torch.manual_seed(0)
    width = H * P + 2 * G * N
    zxbcdt, norm = torch.randn(2, L, H * P + width + H), torch.rand(H * P) + 0.5
    own = {"conv1d_weight": torch.randn(width, 4), "conv1d_bias": torch.randn(width), "dt_bias": torch.randn(H),
           "A": -torch.rand(H) - 0.1, "D": torch.randn(H), "rmsnorm_weight": norm}  # fmt: skip
    options = {"headdim": P, "ngroups": G, "norm_before_gate": False}
    options["seq_idx"] = torch.arange(L).div(9, rounding_mode="floor").expand(2, L) if seq else None
    exact = mamba.mamba_split_conv1d_scan_combined(
        zxbcdt.double(), **{k: t.double() for k, t in own.items()}, **options
    )
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        y = mamba.mamba_split_conv1d_scan_combined(zxbcdt.bfloat16(), **own, **options)
    assert y.dtype == torch.bfloat16
    roundings = 4  # of what enters and leaves the convolution, of the scan's operands, of y
    assert (y.double() - exact).norm() < roundings * torch.finfo(torch.bfloat16).eps * exact.norm()


def test_the_last_state_is_that_of_the_last_token():
    """An empty sequence behind it, as in offsets that are padded, has none."""
    tensors, options = inputs(rows=1)
    call = lambda *ends: mamba.mamba_chunk_scan_combined(  # noqa: E731
        **tensors, **options, cu_seqlens=torch.tensor(ends), return_final_states=True
    )
    assert torch.equal(call(0, 5, L, L, L)[1], call(0, 5, L)[1])


def test_wrong_parts_of_a_layer():
    zxbcdt, weight, D = torch.randn(1, 9, 2 * 12 + 2 * 4 + 3), torch.randn(12 + 8, 4), torch.ones(3)
    call = lambda **given: mamba.mamba_split_conv1d_scan_combined(  # noqa: E731
        **{"zxbcdt": zxbcdt, "conv1d_weight": weight, "conv1d_bias": None, "dt_bias": D, "A": -D, "D": D, "headdim": 4}
        | given
    )
    assert call().shape == (1, 9, 12)
    for given, words in (
        ({"headdim": None}, "headdim is missing"), ({"activation": "relu"}, "activation='relu'"),
        ({"conv1d_weight": weight[:13]}, r"conv1d_weight has shape \(13, 4\), must be \(dim \+ 2"),
        ({"zxbcdt": zxbcdt[..., 1:]}, r"zxbcdt has shape \(1, 9, 34\), must be \(B, L, 35\)"),
        ({"zxbcdt": zxbcdt[0]}, r"zxbcdt is \(9, 35\)"), ({"ngroups": 0}, "ngroups=0"),
        ({"ngroups": 2}, "ngroups=2, which divides heads=3"), ({"conv1d_bias": D[:1]}, "conv1d_bias has shape"),
        ({"rmsnorm_weight": torch.ones(1, 12)}, r"rmsnorm_weight has shape \(1, 12\), must be \(12,\)"),
        ({"outproj_bias": D}, "outproj_bias is given without"), ({"D": torch.ones(())}, r"D has shape \(\)"),
        ({"conv1d_weight": weight[:, :0]}, "taps"), ({"conv1d_weight": weight.to("meta")}, "conv1d_weight is on meta"),
        ({"zxbcdt": zxbcdt[..., :-3]}, "zxbcdt has shape"), ({"seq_idx": [0] * 9}, "seq_idx is a list"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=words):
            call(**given)


def step_inputs(shared: bool, dtype=torch.float32, device="cpu"):
    torch.manual_seed(0)
    n = lambda *shape: torch.randn(*shape, dtype=dtype, device=device)  # noqa: E731
    given = {"x": n(3, H, P), "B": n(3, G, N), "C": n(3, G, N), "z": n(3, H, P)}
    if shared:
        given |= {"dt": n(3, H, 1).expand(3, H, P), "A": -torch.rand(H, 1, 1, device=device).expand(H, P, N),
                  "dt_bias": n(H, 1).expand(H, P), "D": n(H, 1).expand(H, P)}  # fmt: skip
    else:
        given |= {"dt": n(3, H, P), "A": -torch.rand(H, P, N, device=device), "dt_bias": n(H, P), "D": n(H, P)}
    return given


def check_step(update, given, state, slots, less=()):
    given = {k: None if k in less else v for k, v in given.items()}
    before, state = state.clone(), state.clone()
    y = update(state, **given, dt_softplus=True, slots=slots)
    of = range(3) if slots is None else slots.tolist()
    for b, slot in enumerate(of):
        if slot < 0:
            assert not y[b].any()
            continue
        g = {k: None if v is None else v.double() for k, v in given.items()}
        dt = g["dt"][b] if g["dt_bias"] is None else g["dt"][b] + g["dt_bias"]
        dt = F.softplus(dt)[..., None]
        new = before[slot].double() * torch.exp(dt * g["A"])
        new = new + dt * g["x"][b][..., None] * g["B"][b].repeat_interleave(H // G, 0)[:, None]
        want = (new * g["C"][b].repeat_interleave(H // G, 0)[:, None]).sum(-1)
        want = want if g["D"] is None else want + g["x"][b] * g["D"]
        want = want if g["z"] is None else want * F.silu(g["z"][b])
        precision = 3 * max(torch.finfo(t.dtype).eps for t in (state, y))
        assert (state[slot].double() - new).norm() < precision * new.norm()
        assert (y[b].double() - want).norm() < 3 * precision * want.norm()
    untouched = [i for i in range(len(state)) if i not in set(of)]
    assert torch.equal(state[untouched].nan_to_num(), before[untouched].nan_to_num())


def plainly(state, *, slots, **given):
    return mamba.selective_state_update(state, state_batch_indices=slots, **given)


def by_kernel(state, *, slots, dt_softplus, **given):
    order = (given[k] for k in ("x", "dt", "A", "B", "C", "D", "z", "dt_bias"))
    slots = None if slots is None else slots.contiguous()
    facts = Steps(dt_softplus, -torch.inf, torch.inf), False
    (y,), launch = state_update.updated(facts, state, *order, slots)
    run(launch)
    return y


@pytest.mark.parametrize("update", [plainly, by_kernel])
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("slots", [None, [4, -1, 0]])
def test_step(update, shared, slots):
    state = torch.randn(5, H, P, N)
    state[3] = torch.nan  # a free slot
    slots = None if slots is None else torch.tensor(slots, dtype=torch.int32)
    check_step(update, step_inputs(shared), state, slots)
    check_step(update, step_inputs(shared), state, slots, ("D", "z", "dt_bias"))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kept", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shared", [True, False])
def test_step_on_a_gpu(shared, kept, dtype):
    state = torch.randn(5, H, P, N, device="cuda").to(kept)
    check_step(plainly, step_inputs(shared, dtype, "cuda"), state, torch.tensor([4, -1, 0], device="cuda"))


def test_a_scan_is_its_steps():
    tensors, options = inputs(torch.float32, **OPTIONS["z"])
    y, final = mamba.mamba_chunk_scan_combined(**tensors, **options, return_final_states=True)
    state, ys = torch.zeros(ROWS, H, P, N), []
    for t in range(L):
        one = {k: tensors[k][:, t] for k in ("x", "B", "C", "z")}
        ys.append(mamba.selective_state_update(
            state, **one, dt=tensors["dt"][:, t, :, None].expand(ROWS, H, P), dt_softplus=True,
            A=tensors["A"][:, None, None].expand(H, P, N), D=tensors["D"][:, None].expand(H, P),
            dt_bias=tensors["dt_bias"][:, None].expand(H, P),
        ))  # fmt: skip
    close(torch.stack(ys, 1), y)
    close(state, final)


def test_without_heads():
    """As Mamba has it."""
    torch.manual_seed(0)
    state, x, dt, z = torch.randn(2, P, N), *(torch.randn(2, P) for _ in range(3))
    A, B, C, D = -torch.rand(P, N), torch.randn(2, N), torch.randn(2, N), torch.randn(P)
    with_heads = state.clone()[:, None]
    y = mamba.selective_state_update(state, x, dt, A, B, C, D, z, dt_softplus=True)
    want = mamba.selective_state_update(
        with_heads, x[:, None], dt[:, None], A[None], B[:, None], C[:, None], D[None], z[:, None], dt_softplus=True
    )
    assert torch.equal(y, want[:, 0])
    assert torch.equal(state, with_heads[:, 0])


def test_one_group_and_one_head_need_no_dimension():
    torch.manual_seed(0)
    given, state = step_inputs(True), torch.randn(3, H, P, N)
    one = given | {"B": given["B"][:, :1], "C": given["C"][:, :1]}
    none = given | {"B": given["B"][:, 0], "C": given["C"][:, 0]}
    states = state.clone(), state.clone()
    assert torch.equal(*(mamba.selective_state_update(s, **g) for s, g in zip(states, (one, none), strict=True)))
    assert torch.equal(*states)
    state, x, A, B = torch.randn(2, P, N), torch.randn(2, P), -torch.rand(P, N), torch.randn(2, N)
    mixed = mamba.selective_state_update(state.clone(), x[:, None], x.abs()[:, None], A, B, B, torch.ones(P))
    assert torch.equal(mixed, mamba.selective_state_update(state.clone(), x, x.abs(), A, B, B, torch.ones(P)))


def test_bad_input():
    tensors, _ = inputs()
    scan_of = lambda **changed: mamba.mamba_chunk_scan_combined(**(tensors | changed))  # noqa: E731
    wrong = {"dt": tensors["dt"][..., :2], "A": torch.rand(H, P), "B": tensors["B"][:, :, :1].repeat(1, 1, 4, 1),
             "C": tensors["C"][..., :3], "x": tensors["x"][0]}  # fmt: skip
    for name, bad in wrong.items():
        with pytest.raises(ValueError, match=f"^{name} has shape"):
            scan_of(**{name: bad})
    with pytest.raises(ValueError, match="return_varlen_states needs cu_seqlens"):
        scan_of(return_varlen_states=True)
    given, state = step_inputs(True), torch.zeros(5, H, P, N)
    with pytest.raises(ValueError, match="dt_bias has shape"):
        mamba.selective_state_update(state, **given | {"dt_bias": torch.zeros(H)})
    with pytest.raises(ValueError, match="state_batch_indices"):
        mamba.selective_state_update(state[:2], **given)
    for slots, says in ((torch.zeros(3).bool(), "is torch.bool, must be integers"), (torch.arange(4), "has shape")):
        with pytest.raises(ValueError, match=f"^state_batch_indices {says}"):
            mamba.selective_state_update(state, **given, state_batch_indices=slots)
    with pytest.raises(NotImplementedError, match="no gradient"):
        mamba.selective_state_update(state, **given | {"x": given["x"].clone().requires_grad_()})


@pytest.mark.parametrize(("name", "shape"), [("D", (1,)), ("dt_bias", (1,)), ("z", (2, 1, 4, 8)), ("D", (4, 1))])
def test_what_lies_around_the_scan_is_not_broadcast(name, shape):
    x, dt, B = torch.randn(2, 9, 4, 8), torch.rand(2, 9, 4), torch.randn(2, 9, 1, 16)
    with pytest.raises(ValueError, match=rf"{name} has shape"):
        mamba.mamba_chunk_scan_combined(x, dt, -torch.rand(4), B, B, 8, **{name: torch.randn(shape)})


def test_fp64_is_exact_to_its_last_digits():
    tensors, options = inputs(**OPTIONS["z"])
    tensors["A"] = tensors["A"].double()
    state = torch.randn(ROWS, H, P, N, dtype=torch.float64)
    y, final = mamba.mamba_chunk_scan_combined(**tensors, **options, initial_states=state, return_final_states=True)
    want, last = scan(**tensors, **options, state=state)
    torch.testing.assert_close(y, want, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(final, last, rtol=1e-11, atol=1e-12)
    given, state = {k: v.double() for k, v in step_inputs(False).items()}, state[:1].repeat(3, 1, 1, 1)
    other = state.clone()
    y = mamba.selective_state_update(state, **given, dt_softplus=True)
    dt = F.softplus(given["dt"] + given["dt_bias"])[..., None]
    B, C = (given[k].repeat_interleave(H // G, 1)[:, :, None] for k in "BC")
    new = other * torch.exp(dt * given["A"]) + dt * given["x"][..., None] * B
    torch.testing.assert_close(state, new, rtol=1e-13, atol=1e-14)
    want = ((new * C).sum(-1) + given["x"] * given["D"]) * F.silu(given["z"])
    torch.testing.assert_close(y, want, rtol=1e-12, atol=1e-13)


def test_indices_that_are_views():
    """Columns of a table: kernels read what lies side by side."""
    tensors, options = inputs(torch.float32, rows=1, **OPTIONS["z"])
    ends = torch.tensor([[0, 9], [3, 9], [20, 9], [L, 9]], dtype=torch.int32)[:, 0]
    index = torch.repeat_interleave(torch.arange(3), ends.long().diff())[None, :, None].expand(1, L, 2)[..., 0]
    for given in ({"cu_seqlens": ends}, {"seq_idx": index}):
        close_by = {k: v.contiguous() for k, v in given.items()}
        y = mamba.mamba_chunk_scan_combined(**tensors, **options, **given)
        assert torch.equal(y, mamba.mamba_chunk_scan_combined(**tensors, **options, **close_by))
    slots = torch.tensor([[4, 1], [-1, 1], [0, 1]], dtype=torch.int32)[:, 0]
    state = torch.randn(5, H, P, N)
    check_step(by_kernel, step_inputs(True), state, slots)
    check_step(plainly, step_inputs(True), state, slots)


META = {
    "scan": ["dt", "A", "B", "C", "D", "z", "dt_bias", "initial_states", "seq_idx"],
    "step": ["x", "dt", "A", "B", "C", "D", "z", "dt_bias", "state_batch_indices"],
}


@pytest.mark.parametrize(("of", "name"), [(of, name) for of, names in META.items() for name in names])
def test_tensors_of_another_device_are_named(of, name):
    if of == "scan":
        tensors, options = inputs(torch.float32, **OPTIONS["z"])
        tensors |= {"initial_states": torch.zeros(ROWS, H, P, N), "seq_idx": torch.zeros(ROWS, L, dtype=torch.int32)}
        call = lambda **given: mamba.mamba_chunk_scan_combined(**given, **options)  # noqa: E731
    else:
        tensors = {"state": torch.zeros(3, H, P, N), **step_inputs(True), "state_batch_indices": torch.arange(3)}
        call = mamba.selective_state_update
    call(**tensors)
    owner = "x" if of == "scan" else "state"
    with pytest.raises(ValueError, match=f"^{name} is on meta, must be on {owner}'s cpu"):
        call(**tensors | {name: tensors[name].to("meta")})


def test_more_bad_input():
    tensors, _ = inputs(torch.float32)
    one = {k: v[:1] if k != "A" else v for k, v in tensors.items()}
    for given, message in (
        (tensors | {"B": tensors["B"].half()}, "^B is torch.float16, must be x's torch.float32"),
        (tensors | {"C": tensors["C"].half()}, "^C is torch.float16, must be x's torch.float32"),
        (tensors | {"A": -1.0}, "^A is a float, must be a torch.Tensor"),
        (tensors | {"dt_limit": (0.0,)}, "^dt_limit="),
        (tensors | {"dt_limit": (2.0, 1.0)}, "^dt_limit="),
        (tensors | {"seq_idx": torch.zeros(ROWS, L)}, "^seq_idx is torch.float32, must be integers"),
        (tensors | {"initial_states": torch.zeros(ROWS, H, N, P)}, r"^initial_states has shape .* = \(2, 6, 8, 16\)"),
        (tensors | {"cu_seqlens": torch.tensor([0, L])}, "^cu_seqlens packs sequences along N, so B must be 1; got x"),
        (one | {"cu_seqlens": torch.tensor([0.0, L])}, "^cu_seqlens is torch.float32, must be integers"),
        (one | {"cu_seqlens": torch.tensor([0, 9]), "initial_states": torch.zeros(2, H, P, N)}, "sequences, heads"),
    ):
        with pytest.raises(ValueError, match=message):
            mamba.mamba_chunk_scan_combined(**given)
    with pytest.raises(ValueError, match=r"^state has shape \(3, 6\), must be"):
        mamba.selective_state_update(torch.zeros(3, H), **step_inputs(True))


def test_two_rows_must_not_have_the_same_slot():
    given, state = step_inputs(True), torch.randn(5, H, P, N)
    before = state.clone()
    for slots in ([4, 0, 4], [1, 1, -1]):
        with pytest.raises(
            ValueError, match=re.escape(f"state_batch_indices must differ, but for padding, as -1; got {slots}")
        ):
            mamba.selective_state_update(state, **given, state_batch_indices=torch.tensor(slots))
    assert torch.equal(state, before)
    x, B = torch.randn(3, P), torch.randn(3, N)
    slots = torch.tensor([2, 2, 0])
    with pytest.raises(ValueError, match="state_batch_indices must differ"):  # without heads
        mamba.selective_state_update(torch.zeros(5, P, N), x, x, -torch.rand(P, N), B, B, state_batch_indices=slots)


@pytest.mark.parametrize("update", [plainly, by_kernel])
def test_any_number_that_is_no_slot_is_padding(update):
    given, state = step_inputs(True), torch.randn(5, H, P, N)
    want = state.clone()
    alone = update(want, **given, dt_softplus=True, slots=torch.tensor([-1, 3, -1], dtype=torch.int32))
    for slots in ([5, 3, 5], [-7, 3, 1000]):  # padding may repeat
        after = state.clone()
        y = update(after, **given, dt_softplus=True, slots=torch.tensor(slots, dtype=torch.int32))
        assert torch.equal(y, alone)
        assert torch.equal(after, want)
        assert not y[0].any()
        assert not y[2].any()


def test_values_are_called_by_their_names():
    """On the CPU, where looking at values costs nothing."""
    tensors, _ = inputs(torch.float32)
    A, dt, bias = tensors["A"].clone(), tensors["dt"].clone(), torch.zeros(H)
    A[2], dt[1, 3, 4], bias[1] = 0.5, -0.25, -100.0
    wide = {"dt_limit": (-math.inf, math.inf)}
    for given, message in (
        ({"A": A}, r"^A must be finite and <= 0 \(the state decays as exp\(A dt\)\); 1 of 6 are not: \[0.5\]"),
        ({"A": torch.full((H,), -math.inf)}, "^A must be finite and <= 0"),
        ({"dt": dt, **wide}, r"^dt must be .* >= 0 \(.*dt_limit=\(-inf, inf\).*makes them so\); 1 of .* \[-0.25\]"),
        ({"dt_bias": bias, **wide}, r"^dt \+ dt_bias must be finite and >= 0"),
        ({"dt": torch.full_like(dt, math.nan)}, "^dt must be finite and >= 0"),
        ({"dt_limit": (-2.0, -1.0)}, r"^dt_limit=\(-2.0, -1.0\): must be two numbers, .* at least 0"),
    ):
        with pytest.raises(ValueError, match=message):
            mamba.mamba_chunk_scan_combined(**tensors | given)
    y = mamba.mamba_chunk_scan_combined(**tensors)
    assert torch.equal(mamba.mamba_chunk_scan_combined(**tensors, **wide), y)  # all dt are positive
    close(mamba.mamba_chunk_scan_combined(**tensors | {"dt": dt}), scan(**tensors | {"dt": dt.clamp(min=0)})[0])


def test_a_row_that_begins_with_another_seq_idx_ignores_its_initial_state():
    tensors, _ = inputs()
    index, state = torch.ones(ROWS, L, dtype=torch.int32), torch.randn(ROWS, H, P, N)
    index[0] = 0
    y = mamba.mamba_chunk_scan_combined(**tensors, seq_idx=index, initial_states=state)
    close(y[0], scan(**tensors, state=state)[0][0])
    close(y[1], scan(**tensors)[0][1])


def test_a_step_of_any_strides_is_one_launch(interpreted):
    """So that it can be captured: PyTorch's operations would read the slots on the host."""
    given, slots = step_inputs(False), torch.tensor([4, -1, 0], dtype=torch.int32)
    given = {k: v.mT.contiguous().mT for k, v in given.items()}
    assert given["x"].stride(2) != 1
    check_step(plainly, given, torch.randn(5, H, P, N).mT.contiguous().mT, slots)
    assert interpreted == ["state_update_kernel"]
