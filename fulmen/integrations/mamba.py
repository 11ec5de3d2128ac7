"""mamba-ssm's functions for Mamba-2, with its signatures, layout and meaning, computed by fulmen.

    from fulmen.integrations.mamba import mamba_chunk_scan_combined, selective_state_update

`mamba_split_conv1d_scan_combined` has all that lies between a layer's projections.

Mamba-2's scan is lightning attention with a decay for each token and heads of q and k that heads of v share:

    q = C,  k = B,  v = dt x,  s = -A dt          h_t = exp(A dt_t) h_{t-1} + dt_t x_t B_t^T,  y_t = h_t C_t + D x_t

x, z are (B, L, heads, head dim), dt (B, L, heads), B and C (B, L, groups, state size). States are (B, heads, head dim,
state size): fulmen's, transposed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fulmen.boundary import (
    brief,
    check_distinct,
    check_integers,
    check_offset_values,
    check_offsets,
    is_number,
    is_plain_eager,
    require_tensors,
    row_contiguous,
)
from fulmen.layers.inputs import whole
from fulmen.layers.scan import Norm, Steps, convolve, gated_norm, norm_then_gate, scan, scan_step, step_sizes
from fulmen.lightning.spec import check_sign

__all__ = ["mamba_chunk_scan_combined", "mamba_split_conv1d_scan_combined", "selective_state_update"]


def mamba_chunk_scan_combined(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int | None = None,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    return_final_states: bool = False,
    return_varlen_states: bool = False,
    state_dtype: torch.dtype | None = None,
    *,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, ...]:
    """y (B, L, heads, head dim), of x's dtype; with return_final_states (y, states after the last token).

    D                 (heads,) or (heads, head dim): y = h C + D x
    z                 y times silu(z)
    A, dt             dt plus dt_bias (heads,), through softplus with dt_softplus, then clamped to dt_limit, is a step
                      size: finite and >= 0. A is finite and <= 0. Values are checked on the CPU only.
    seq_idx           int (B, L): the state starts again at zero where it changes, and at a row's first token unless
                      that has seq_idx 0: a row that begins with another number does not see its initial state
    cu_seqlens        (sequences + 1,), B is 1: packed sequences. initial_states are then one for each sequence. With
                      seq_idx as well both must say the same, and cu_seqlens serves return_varlen_states alone
    return_*_states   final: of each row of the batch, in fp32. varlen, with cu_seqlens: of each sequence
    state_dtype       of the varlen states, fp32 unless given; chunk_size is a hint that fulmen does not need

    x, B, C and z whose last dimension is strided are copied, as mamba-ssm does.
    """
    given = {"x": x, "dt": dt, "A": A, "B": B, "C": C}
    around = {"D": D, "z": z, "dt_bias": dt_bias, "initial_states": initial_states}
    _check_places(given, around | {"seq_idx": seq_idx, "cu_seqlens": cu_seqlens}, "x")
    _check(x, dt, A, B, C, seq_idx, cu_seqlens)
    _check_around(x, D, z, dt_bias)
    if return_varlen_states and cu_seqlens is None:
        raise ValueError("return_varlen_states needs cu_seqlens")
    if seq_idx is not None and cu_seqlens is not None:
        _check_same_sequences(seq_idx, cu_seqlens)
        if return_varlen_states and initial_states is not None:
            raise ValueError(
                "initial_states with seq_idx and return_varlen_states: pass one for each sequence, and no seq_idx"
            )
        seq_idx, cu_seqlens = (None, cu_seqlens) if return_varlen_states else (seq_idx, None)
    _check_states(initial_states, x, B, cu_seqlens)
    steps = Steps(bool(dt_softplus), *_limit(dt_limit))
    _check_values(dt, A, dt_bias, steps)
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    x, B, C, z = row_contiguous(x), row_contiguous(B), row_contiguous(C), None if z is None else row_contiguous(z)
    y, states = scan(
        x, dt, A, B, C, D, z, dt_bias, steps, seq=seq_idx,
        initial_state=None if initial_states is None else initial_states.mT.to(wide).contiguous(),
        cu_seqlens=None if cu_seqlens is None else cu_seqlens.to(torch.int32),
        with_state=return_final_states or return_varlen_states, backend=backend,
    )  # fmt: skip
    if states is None:
        return y
    states = states.mT.contiguous()
    last = states
    if cu_seqlens is not None:  # of the last sequence that has a token
        sequences = torch.arange(states.shape[0], device=states.device)
        last = states.index_select(0, (sequences * (cu_seqlens.diff() > 0)).argmax(0, keepdim=True))
    each = states if state_dtype is None else states.to(state_dtype)
    return y, *[last] * return_final_states, *[each] * return_varlen_states


def mamba_split_conv1d_scan_combined(
    zxbcdt: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor | None,
    dt_bias: Tensor,
    A: Tensor,
    D: Tensor,
    chunk_size: int | None = None,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    return_final_states: bool = False,
    activation: str | None = "silu",
    rmsnorm_weight: Tensor | None = None,
    rmsnorm_eps: float = 1e-6,
    outproj_weight: Tensor | None = None,
    outproj_bias: Tensor | None = None,
    headdim: int | None = None,
    ngroups: int = 1,
    norm_before_gate: bool = True,
    state_dtype: torch.dtype | None = None,
    *,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """What lies between a Mamba-2 layer's projections: convolution, scan, gate, norm and, if given, the second product.

    zxbcdt           (B, L, 2 M + 2 dim + 2 groups * state size + heads), the first product: a gated MLP's two halves if
                     M > 0, whose output comes before the scan's, then z, x, B, C and dt; dim = heads * headdim
    conv1d_weight    (dim + 2 groups * state size, taps), with conv1d_bias over x, B and C; then `activation`, "silu"
                     (or "swish") or None
    D                (heads, headdim), or (heads,) with headdim given
    rmsnorm_weight   (dim,): RMSNorm in `ngroups` parts, times silu(z); without norm_before_gate of y silu(z)
    outproj_weight   (out, M + dim)
    state_dtype      of states between chunks in mamba-ssm; not needed, as chunk_size

    Step sizes are softplus(dt + dt_bias), clamped to dt_limit. Other arguments as in `mamba_chunk_scan_combined`.
    """
    required = {"zxbcdt": zxbcdt, "conv1d_weight": conv1d_weight, "dt_bias": dt_bias, "A": A, "D": D}
    around = {"conv1d_bias": conv1d_bias, "rmsnorm_weight": rmsnorm_weight, "outproj_weight": outproj_weight}
    others = {"outproj_bias": outproj_bias, "initial_states": initial_states, "seq_idx": seq_idx}
    _check_places(required, around | others, "zxbcdt")
    parts = _split(zxbcdt, conv1d_weight, D, headdim, ngroups, activation)
    for name, width in (("conv1d_bias", parts.widths[2]), ("rmsnorm_weight", parts.dim)):
        t = around[name]
        if t is not None and t.shape != (width,):
            raise ValueError(f"{name} has shape {tuple(t.shape)}, must be ({width},)")
    if outproj_bias is not None and outproj_weight is None:
        raise ValueError("outproj_bias is given without outproj_weight: pass both or none")
    mlp, z, mixed, dt = zxbcdt.split(parts.widths, dim=2)
    weight, bias = conv1d_weight.to(mixed.dtype), None if conv1d_bias is None else conv1d_bias.to(mixed.dtype)
    mixed = convolve(row_contiguous(mixed), weight, bias, activation is not None, seq_idx)
    x, B, C = mixed.split([parts.dim, *[ngroups * parts.state] * 2], dim=2)
    x, z_heads = (t.unflatten(2, (-1, parts.headdim)) for t in (x, z))
    B, C = (t.unflatten(2, (ngroups, -1)) for t in (B, C))
    inside = rmsnorm_weight is None  # the gate
    found = mamba_chunk_scan_combined(
        x, dt, A, B, C, None, D, z_heads if inside else None, dt_bias, initial_states, seq_idx, None, True, dt_limit,
        return_final_states, backend=backend,
    )  # fmt: skip
    y, *states = found if isinstance(found, tuple) else (found,)
    y = y.flatten(2)
    if rmsnorm_weight is not None:
        y = (norm_then_gate if norm_before_gate else gated_norm)(y, z, Norm(rmsnorm_weight, ngroups, rmsnorm_eps))
    if parts.widths[0]:
        gate, up = mlp.chunk(2, dim=2)
        y = torch.cat([(F.silu(gate) * up).to(y.dtype), y], dim=2)
    y = y if outproj_weight is None else F.linear(y, outproj_weight, outproj_bias)
    return (y, states[0]) if states else y


class _Parts(NamedTuple):
    """What zxbcdt holds."""

    widths: list[int]  # of the MLP's halves, of z, of x, B and C together, of dt
    dim: int
    headdim: int
    state: int


def _split(
    zxbcdt: Tensor, weight: Tensor, D: Tensor, headdim: int | None, groups: int, activation: str | None
) -> _Parts:
    if activation not in (None, "silu", "swish"):
        raise ValueError(f"activation={activation!r}: must be None, 'silu' or 'swish'")
    if D.ndim not in (1, 2) or weight.ndim != 2 or not weight.shape[1]:
        raise ValueError(
            f"D has shape {tuple(D.shape)}, must be (heads,) or (heads, headdim), and conv1d_weight has "
            f"{tuple(weight.shape)}, must be (channels, taps)"
        )
    if D.ndim == 1 and headdim is None:
        raise ValueError("headdim is missing: D (heads,) does not tell it")
    heads, size = D.shape[0], whole("headdim", D.shape[1] if D.ndim == 2 else headdim)
    dim, groups = heads * size, whole("ngroups", groups)
    channels = weight.shape[0]
    state = (channels - dim) // (2 * groups)
    if zxbcdt.ndim != 3 or state < 1 or heads % groups or channels != dim + 2 * groups * state:
        raise ValueError(
            f"conv1d_weight has shape {tuple(weight.shape)}, must be (dim + 2 * ngroups * state size, taps) with "
            f"dim = heads * headdim = {dim} and ngroups={groups}, which divides heads={heads}; zxbcdt is "
            f"{tuple(zxbcdt.shape)}, D {tuple(D.shape)}"
        )
    rest = zxbcdt.shape[2] - dim - channels - heads
    if rest < 0 or rest % 2:
        raise ValueError(
            f"zxbcdt has shape {tuple(zxbcdt.shape)}, must be (B, L, {dim + channels + heads}) for z, x, B, C and dt, "
            "or wider by an even number, for an MLP"
        )
    return _Parts([rest, dim, channels, heads], dim, size, state)


def selective_state_update(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    state_batch_indices: Tensor | None = None,
) -> Tensor:
    """One token for each row: `state` is updated in place, y (B, heads, head dim) returned. No gradients.

    state  (slots, heads, head dim, state size), any float dtype
    x, dt, z         (B, heads, head dim)         A   (heads, head dim, state size)
    B, C             (B, groups, state size)      D, dt_bias   (heads, head dim)
    state_batch_indices  int (B,), which slot a row has. Any number that is no slot, as -1, is padding, whose y is zero.
                         Other rows must not share a slot: an error on the CPU, undefined on a GPU. Unless given, row b
                         has slot b.

    Without heads, as in Mamba: state (slots, dim, state size), x (B, dim), A (dim, state size) and so on. B and C may
    lack their groups, and all others their heads, where there is one.
    """
    optional = {"D": D, "z": z, "dt_bias": dt_bias, "state_batch_indices": state_batch_indices}
    _check_places({"state": state, "x": x, "dt": dt, "A": A, "B": B, "C": C}, optional, "state")
    if state.ndim not in (3, 4):
        raise ValueError(
            f"state has shape {tuple(state.shape)}, must be (slots, heads, head dim, state size), or without heads"
        )
    headless = state.ndim == 3
    state = state[:, None] if headless else state
    B, C = (t[:, None] if t.ndim == 2 else t for t in (B, C))
    if state.shape[1] == 1:
        x, dt = (t[:, None] if t.ndim == 2 else t for t in (x, dt))
        z, A = z[:, None] if z is not None and z.ndim == 2 else z, A[None] if A.ndim == 2 else A
        D, dt_bias = (t[None] if t is not None and t.ndim == 1 else t for t in (D, dt_bias))
    given = {"state": state, "x": x, "dt": dt, "A": A, "B": B, "C": C, "D": D, "z": z, "dt_bias": dt_bias}
    _check_step(given, state_batch_indices)
    steps = Steps(bool(dt_softplus), -math.inf, math.inf)
    y = scan_step(state, x, dt, A, B, C, D, z, dt_bias, steps, state_batch_indices)
    return y[:, 0] if headless else y


def _check_places(required: dict[str, Any], optional: dict[str, Any], of: str) -> None:
    """All are tensors where `of` is: kernels get addresses."""
    require_tensors(required, optional)
    device = required[of].device
    for name, t in (required | optional).items():
        if t is not None and t.device != device:
            raise ValueError(f"{name} is on {t.device}, must be on {of}'s {device}")


def _limit(limit: Any) -> tuple[float, float]:
    pair = tuple(limit) if isinstance(limit, Sequence) else ()
    if len(pair) != 2 or not all(map(is_number, pair)) or not pair[0] <= pair[1] or pair[1] < 0:
        raise ValueError(f"dt_limit={limit!r}: must be two numbers, the first at most the second, which is at least 0")
    return float(pair[0]), float(pair[1])


def _check(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, seq_idx: Tensor | None, ends: Tensor | None) -> None:
    if x.ndim != 4:
        raise ValueError(f"x has shape {tuple(x.shape)}, must be (B, L, heads, head dim)")
    batch, length, heads, _ = x.shape
    if dt.shape != x.shape[:3]:
        raise ValueError(f"dt has shape {tuple(dt.shape)}, must be (B, L, heads) = {tuple(x.shape[:3])}")
    if A.shape != (heads,):
        raise ValueError(f"A has shape {tuple(A.shape)}, must be (heads,) = ({heads},), one number for each head")
    if B.ndim != 4 or B.shape[:2] != (batch, length) or heads % max(B.shape[2], 1):
        raise ValueError(
            f"B has shape {tuple(B.shape)}, must be ({batch}, {length}, groups that divide {heads}, state)"
        )
    if C.shape != B.shape:
        raise ValueError(f"C has shape {tuple(C.shape)}, must be that of B, {tuple(B.shape)}")
    for name, t in (("B", B), ("C", C)):
        if t.dtype != x.dtype and not torch.is_autocast_enabled(x.device.type):
            raise ValueError(f"{name} is {t.dtype}, must be x's {x.dtype}: cast one of them")
    check_integers("seq_idx", seq_idx)
    check_integers("cu_seqlens", ends)
    if seq_idx is not None and seq_idx.shape != (batch, length):
        raise ValueError(f"seq_idx has shape {tuple(seq_idx.shape)}, must be (B, L) = ({batch}, {length})")
    if ends is not None:
        check_offsets("cu_seqlens", ends.to(torch.int32), x, "x", along=1)


def _check_same_sequences(seq_idx: Tensor, ends: Tensor) -> None:
    """On the CPU, where a look at values costs nothing."""
    if seq_idx.device.type != "cpu" or not is_plain_eager(seq_idx, ends):
        return
    check_offset_values("cu_seqlens", ends, seq_idx.shape[1])
    changes = (seq_idx[0, 1:] != seq_idx[0, :-1]).nonzero().flatten() + 1
    begins = ends.unique()[:-1]
    if changes.tolist() != begins[begins > 0].tolist():
        raise ValueError(
            f"seq_idx changes at {brief(changes.tolist())}, and cu_seqlens is {brief(ends.tolist())}: they must agree"
        )


def _check_values(dt: Tensor, A: Tensor, dt_bias: Tensor | None, steps: Steps) -> None:
    """On the CPU, where a look at values costs nothing: the decay -A dt is finite and at least 0."""
    if dt.device.type != "cpu" or not is_plain_eager(dt, A, dt_bias):
        return
    check_sign("A", A.detach(), -1, "the state decays as exp(A dt)")
    with torch.no_grad():
        sizes = step_sizes(dt, dt_bias, steps)
    name = "dt" if dt_bias is None else "dt + dt_bias"
    how = f"with dt_softplus={steps.softplus} and dt_limit={steps[1:]}, as step sizes"
    check_sign(name, sizes, 1, how if steps.low >= 0 else f"{how}; dt_limit=(0.0, inf) makes them so")


def _check_states(states: Tensor | None, x: Tensor, B: Tensor, ends: Tensor | None) -> None:
    if states is None:
        return
    wanted = (x.shape[0] if ends is None else ends.shape[0] - 1, *x.shape[2:], B.shape[3])
    if tuple(states.shape) != wanted:
        rows = "B" if ends is None else "sequences"
        raise ValueError(
            f"initial_states has shape {tuple(states.shape)}, must be ({rows}, heads, head dim, state) = {wanted}"
        )


def _check_around(x: Tensor, D: Tensor | None, z: Tensor | None, dt_bias: Tensor | None) -> None:
    heads, dim = x.shape[2:]
    wanted: list[tuple[str, Tensor | None, list[tuple[int, ...]]]] = [
        ("D", D, [(heads,), (heads, dim)]), ("z", z, [tuple(x.shape)]), ("dt_bias", dt_bias, [(heads,)]),
    ]  # fmt: skip
    for name, t, shapes in wanted:
        if t is not None and tuple(t.shape) not in shapes:
            raise ValueError(f"{name} has shape {tuple(t.shape)}, must be {' or '.join(map(str, shapes))}")


def _check_step(given: dict[str, Tensor | None], slots: Tensor | None) -> None:
    state, x, B = given["state"], given["x"], given["B"]
    assert state is not None
    assert x is not None
    assert B is not None
    heads, dim, size = state.shape[1:]
    groups = B.shape[1] if B.ndim == 3 else 0
    if not groups or heads % groups:
        raise ValueError(f"B has shape {tuple(B.shape)}, must be (B, groups that divide {heads}, {size})")
    rows = (x.shape[0], heads, dim)
    wanted = {
        "x": rows, "dt": rows, "z": rows, "A": (heads, dim, size), "B": (x.shape[0], groups, size),
        "C": (x.shape[0], groups, size), "D": (heads, dim), "dt_bias": (heads, dim),
    }  # fmt: skip
    for name, shape in wanted.items():
        t = given[name]
        if t is not None and t.shape != shape:
            raise ValueError(f"{name} has shape {tuple(t.shape)}, must be {shape} with state {tuple(state.shape)}")
    if slots is None and x.shape[0] > state.shape[0]:
        raise ValueError(f"x has {x.shape[0]} rows and state {state.shape[0]} slots: pass state_batch_indices")
    check_integers("state_batch_indices", slots)
    if slots is not None and slots.shape != rows[:1]:
        raise ValueError(f"state_batch_indices has shape {tuple(slots.shape)}, must be ({rows[0]},)")
    if slots is not None and slots.device.type == "cpu" and is_plain_eager(slots):
        check_distinct("state_batch_indices", slots, state.shape[0], ", but for padding, as -1")
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in given.values()):
        raise NotImplementedError("selective_state_update has no gradient: call it under torch.no_grad()")
