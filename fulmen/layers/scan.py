"""What Mamba-2 computes between its projections: convolution, scan, skip, gate and norm.

    x, B, C = silu(conv(xBC));   dt = clamp(softplus(dt + bias))
    o = lightning_attention(C, B, dt x, -A dt);   y = norm((o + D x) silu(z))

On a GPU one kernel lies before the attention and one behind it (fused/mamba.py), and the convolution is one
(fused/conv.py); elsewhere these are PyTorch's operations. Where a backend of the attention applies dt and D itself, no
pass over x comes before it, and without z or norm none behind it. `fulmen.layers.Mamba2`, `fulmen.integrations.mamba`
and the mixers of transformers share them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fulmen import dispatch, plans
from fulmen.boundary import aligned, at_least_fp32, autocasts, is_plain_eager, needs_gradient
from fulmen.layers.fused import are_readable, fused_call, in_rows, kernels_for
from fulmen.lightning.op import lightning_attention, lightning_attention_with_state
from fulmen.lightning.plan import plan_for
from fulmen.lightning.spec import check_inputs, spec_of
from fulmen.plans import Plan

RESET = 128.0  # a decay of exp(-128) leaves nothing in fp32, and a running sum that takes it in stays exact to 1e-5
MAX_NORM = 8192  # features normed together, which one program holds
MAX_FUSED_TAPS = 4
_note_change = torch._C._increment_version  # so that autograd refuses a backward that saved an earlier state


class Steps(NamedTuple):
    """How step sizes come of dt: clamp(softplus(dt + bias), low, high)."""

    softplus: bool
    low: float
    high: float


class Norm(NamedTuple):
    """RMSNorm of (o + D x) silu(z), in groups of a token's features."""

    weight: Tensor
    groups: int
    eps: float


def scan(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, z: Tensor | None, dt_bias: Tensor | None,
    steps: Steps, *, seq: Tensor | None = None, initial_state: Tensor | None = None, cu_seqlens: Tensor | None = None,
    norm: Norm | None = None, with_state: bool = True, backend: str = "auto",
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """y (B, N, H, P), of x's dtype, and with_state the last states (B, H, D, E), as `lightning_attention` has them.

    x, z     (B, N, H, P)                    dt      (B, N, H), plus dt_bias (H,)
    B, C     (B, N, groups, state size)      A       (H,)
    D        (H,) or (H, P), or None         seq     int (B, N): the state starts again where it changes
    """
    kernels = _kernels(x, D, z, norm)
    if kernels is not None:
        seq = None if seq is None else seq.to(torch.int32).contiguous()
        dt_bias, D, cu_seqlens = (None if t is None else t.contiguous() for t in (dt_bias, D, cu_seqlens))
        A = A.float().contiguous()
        needs_grad = needs_gradient((x, dt, A, B, C, D, z, dt_bias, initial_state))
        gate = None if needs_grad or norm is not None else z
        plan = _inside(x, B, C, D, gate, initial_state, cu_seqlens, with_state, needs_grad, backend)
        if plan is not None:
            between = (x, dt, A, B, C, dt_bias, D)
            return _scanned(kernels, plan, steps, between, seq, z, initial_state, cu_seqlens, norm)
        v, decay, skip = kernels.Values.apply(steps, x, dt, A, dt_bias, D, seq)
    else:
        v, decay = _values(x, dt, A, dt_bias, steps, seq)
    q, k, v = C.transpose(1, 2), B.transpose(1, 2), v.transpose(1, 2)
    options: Any = {"initial_state": initial_state, "cu_seqlens": cu_seqlens, "backend": backend}
    state = None
    if with_state:
        o, state = lightning_attention_with_state(q, k, v, decay, **options)
    else:
        o = lightning_attention(q, k, v, decay, **options)
    o = o.transpose(1, 2)
    if kernels is None:
        return _outputs(o, x, D, z, norm).to(x.dtype), state
    if D is None and z is None and norm is None:
        return o, state
    weight, groups, eps = (None, 1, 0.0) if norm is None else norm
    skip, z = None if D is None else skip.flatten(2), None if z is None else z.flatten(2)
    y = kernels.Outputs.apply(groups, eps, _rows(o), skip, None if D is None else D.detach(), z, weight)
    return y.view(x.shape), state


def _rows(o: Tensor) -> Tensor:
    """o as `Outputs` reads it, (B, N, all heads): its memory lies as that of C or x, which may be (N, B, ...)."""
    o = o.flatten(2)
    return o if in_rows(o) else o.contiguous()


def _inside(
    x: Tensor, B: Tensor, C: Tensor, D: Tensor | None, gate: Tensor | None, initial: Tensor | None,
    cu_seqlens: Tensor | None, with_state: bool, needs_grad: bool, backend: str,
) -> Plan | None:  # fmt: skip
    """The attention's plan with step sizes inside it, and the gate if it can be; None if no backend takes them."""
    others = [t for t in (B, C, initial, cu_seqlens) if t is not None]
    if B.dtype != x.dtype or C.dtype != x.dtype or not is_plain_eager(*others) or not are_readable(x, *others):
        return None
    if autocasts(x) and torch.get_autocast_dtype(x.device.type) != x.dtype:
        return None
    q, k, v = C.transpose(1, 2), B.transpose(1, 2), x.transpose(1, 2)
    z = None if gate is None or not aligned(gate.transpose(1, 2)) else gate
    which, given = plans.given((q, k, v, z, initial, cu_seqlens))
    key = (which, "lightning scan", D is not None, with_state, needs_grad, backend)  # a prepared launch has D or not
    if (plan := plans.find(key, given)) is not None:
        return plan
    spec = spec_of(q, k, v, initial_state=initial, cu_seqlens=cu_seqlens, with_final_state=with_state)
    spec = spec._replace(has_decay=True, per_token=True, steps=True, gated=z is not None)
    kernel = dispatch.find("lightning", spec, backend)
    if kernel is None:
        return None
    check_inputs(q, k, v, None, 1.0, initial, cu_seqlens)
    saved = kernel.saves(spec) if needs_grad and kernel.saves is not None else None
    return plans.keep(key, given, plan_for(spec, kernel, (), needs_grad, saved))


def _scanned(
    kernels: Any, plan: Plan, steps: Steps, between: tuple[Any, ...], seq: Tensor | None, z: Tensor | None,
    initial: Tensor | None, cu_seqlens: Tensor | None, norm: Norm | None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """y and the last states; between: x, dt, A, B, C, dt_bias, D."""
    gate = z if plan.spec.gated else None
    if plan.needs_grad:
        found = kernels.Scanned.apply(plan, steps, *between, seq, initial, cu_seqlens)
        y, state = found if plan.spec.with_final_state else (found, None)
    else:
        _, y, state = kernels.scanned(plan, steps, *between, gate, seq, initial, cu_seqlens)
    if norm is None and (z is None or gate is not None):
        return y, state
    weight, groups, eps = (None, 1, 0.0) if norm is None else norm
    u = kernels.Outputs.apply(groups, eps, _rows(y), None, None, None if z is None else z.flatten(2), weight)
    return u.view(y.shape), state


def scan_step(
    state: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, z: Tensor | None,
    dt_bias: Tensor | None, steps: Steps, slots: Tensor | None = None, *, log: bool = False,
) -> Tensor:  # fmt: skip
    """y (B, H, P) of one token for each row; state is updated in place.

    state        (slots, H, P, state size), any strides       x, dt, z     (B, H, P)
    A            (H, P, state size)                           D, dt_bias   (H, P)
    B, C         (B, groups, state size)                      slots        int (B,) or None; -1: none, and y is zero
    log          A is given as log(-A)

    A, dt, D and dt_bias may lack their last dimensions, which then share a number.
    """
    trained = needs_gradient((state, x, dt, A, B, C, D, z, dt_bias))
    if not trained and state.dtype != torch.float64:
        slots = None if slots is None else slots.contiguous()
        x = x if x.stride(2) == 1 else x.clone(memory_format=torch.contiguous_format)
        tensors = (state, x, dt, A, B, C, D, z, dt_bias, slots)
        found = fused_call("state_update", "updated", (steps, log), *tensors, like=(x,))
        if found is not None:
            _note_change([state])
            return found[0]
    heads, wide = state.shape[1], torch.promote_types(at_least_fp32(x).dtype, state.dtype)
    A = -torch.exp(at_least_fp32(A)) if log else A
    A = A.view(*A.shape, *(1,) * (3 - A.ndim))
    D, dt_bias = (t if t is None or t.ndim == 2 else t[:, None] for t in (D, dt_bias))
    dt = step_sizes(dt if dt.ndim == 3 else dt[..., None], dt_bias, steps)[..., None]
    B, C = (t.to(wide).repeat_interleave(heads // t.shape[1], 1)[:, :, None] for t in (B, C))
    rows = None if slots is None else torch.where((slots >= 0) & (slots < state.shape[0]), slots, -1).long()
    old = state[: x.shape[0]] if rows is None else state[rows]
    kept = (old.clone() if trained else old).to(wide) * torch.exp(dt * A.to(wide))
    new = kept + dt * x.to(wide)[..., None] * B
    y = (new * C).sum(-1)
    y = y if D is None else y + x * D
    y = (y if z is None else y * F.silu(at_least_fp32(z))).to(x.dtype)
    if rows is None:
        old.copy_(new)
        return y
    state[rows[rows >= 0]] = new[rows >= 0].to(state.dtype)
    return y.masked_fill_((rows < 0)[:, None, None], 0)


def _kernels(x: Tensor, D: Tensor | None, z: Tensor | None, norm: Norm | None) -> Any:
    """The kernels around the scan if they take these tensors, else None."""
    given = [x] if z is None else [x, z]
    if (D is not None and D.ndim != 1) or not all(_in_rows(t) for t in given) or not _fits(norm):
        return None
    return kernels_for("mamba", *given)


def _fits(norm: Norm | None) -> bool:
    return norm is None or (norm.weight.shape[0] <= MAX_NORM * norm.groups and norm.weight.is_contiguous())


def _in_rows(x: Tensor) -> bool:
    """Whether the heads of a token lie together, and tokens at equal distances."""
    B, N, H, P = x.shape
    return x.stride(3) == 1 and (H == 1 or x.stride(2) == P) and (B == 1 or x.stride(0) == N * x.stride(1))


def _values(
    x: Tensor, dt: Tensor, A: Tensor, bias: Tensor | None, steps: Steps, seq: Tensor | None
) -> tuple[Tensor, Tensor]:
    """v, as x, and decay (B, H, N)."""
    dt = step_sizes(dt, bias, steps)
    decay = -A * dt
    if seq is not None:
        changes = torch.cat([seq[:, :1] != 0, seq[:, 1:] != seq[:, :-1]], 1)
        decay = decay + RESET * changes[..., None]
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    return (x * dt[..., None]).to(x.dtype), decay.transpose(1, 2).to(wide)


def step_sizes(dt: Tensor, bias: Tensor | None, steps: Steps) -> Tensor:
    """clamp(softplus(dt + bias)), in fp32, or in fp64 if dt is."""
    dt = at_least_fp32(dt)
    dt = dt if bias is None else dt + bias.to(dt.dtype)
    dt = F.softplus(dt) if steps.softplus else dt
    return dt if steps.softplus and steps[1:] == (0.0, torch.inf) else dt.clamp(*steps[1:])


def _outputs(o: Tensor, x: Tensor, D: Tensor | None, z: Tensor | None, norm: Norm | None) -> Tensor:
    if D is not None:
        o = o + x * (D[:, None] if D.ndim == 1 else D)
    if z is not None:
        o = o * F.silu(at_least_fp32(z))
    return o if norm is None else _normed(o.flatten(2), norm, x.dtype).view(x.shape)


def _normed(g: Tensor, norm: Norm, dtype: torch.dtype) -> Tensor:
    g = at_least_fp32(g.unflatten(-1, (norm.groups, -1)))
    g = g * torch.rsqrt(g.pow(2).mean(-1, keepdim=True) + norm.eps)
    return norm.weight * g.flatten(-2).to(dtype)


def norm_then_gate(o: Tensor, z: Tensor, norm: Norm) -> Tensor:
    """norm(o) silu(z), (B, N, width), in torch's operations."""
    return (_normed(o, norm, at_least_fp32(o).dtype) * F.silu(at_least_fp32(z))).to(o.dtype)


def gated_norm(o: Tensor, z: Tensor, norm: Norm) -> Tensor:
    """norm(o silu(z)), (B, N, width)."""
    even = all(t.stride(2) == 1 and (t.shape[0] == 1 or t.stride(0) == t.shape[1] * t.stride(1)) for t in (o, z))
    if even and _fits(norm):
        if not torch.is_grad_enabled():
            facts = norm.groups, norm.eps
            found = fused_call("mamba", "finished", facts, o, None, None, z, norm.weight, like=(o, z))
            if found is not None:
                return found[0]
        kernels = kernels_for("mamba", o, z)
        if kernels is not None:
            return kernels.Outputs.apply(norm.groups, norm.eps, o, None, None, z, norm.weight)
    return _normed(o * F.silu(at_least_fp32(z)), norm, o.dtype).to(o.dtype)


# ---------------------------------------------------------------------------------------------- convolution


def convolve(
    x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool, seq: Tensor | None = None, before: Tensor | None = None
) -> Tensor:
    """The causal convolution of each channel: x (B, N, channels), weight (channels, taps), y as x.

    seq     int (B, N): tokens of other sequences count as zero
    before  (B, taps - 1, channels): the tokens before the first, zeros unless given
    """
    taps = weight.shape[1]
    if seq is not None and seq.shape != x.shape[:2]:
        raise ValueError(
            f"seq_idx has shape {tuple(seq.shape)}, and the convolution takes {tuple(x.shape[:2])} tokens: packed "
            "sequences cannot continue from a cache"
        )
    if taps <= MAX_FUSED_TAPS and x.stride(2) == 1 and not needs_gradient((before,)):
        given = [t for t in (x, bias, before) if t is not None]
        kernels = kernels_for("conv", *given) if weight.dtype == x.dtype and weight.is_contiguous() else None
        if kernels is not None:
            seq = None if seq is None else seq.to(torch.int32).contiguous()
            before = None if before is None else before.contiguous()
            return kernels.Convolved.apply(x, weight, bias, seq, before, silu)
    N = x.shape[1]
    if seq is None and N:
        rows = F.pad(x, (0, 0, taps - 1, 0)) if before is None else torch.cat([before.to(x.dtype), x], 1)
        y = F.conv1d(rows.transpose(1, 2), weight[:, None], bias, groups=x.shape[2]).transpose(1, 2)
    else:
        y = x * weight[:, -1]
        for back in range(1, min(taps, N)):
            assert seq is not None
            same = (seq[:, back:] == seq[:, :-back])[..., None]
            y = y + F.pad(torch.where(same, x[:, :-back], 0), (0, 0, back, 0)) * weight[:, -1 - back]
        y = y if bias is None else y + bias
    return (F.silu(y) if silu else y).to(x.dtype).contiguous()


def convolve_step(x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, silu: bool) -> Tensor:
    """y (B, channels) of one token x (B, channels); state (B, channels, last tokens) is shifted in place."""
    taps = weight.shape[1]
    if taps <= MAX_FUSED_TAPS and weight.is_contiguous() and not needs_gradient((x, weight, bias, state)):
        like = (x, weight) if bias is None else (x, weight, bias)
        found = fused_call("conv", "stepped", silu, x, weight, bias, state, like=like)
        if found is not None:
            _note_change([state])
            return found[0]
    rows = torch.cat([state.to(x.dtype), x[:, :, None]], 2)
    state.copy_(rows[:, :, 1:])
    y = (rows[:, :, -taps:] * weight).sum(2)
    y = y if bias is None else y + bias
    return (F.silu(y) if silu else y).to(x.dtype)
