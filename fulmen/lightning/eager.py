"""Lightning attention in plain PyTorch, forward and backward: the default on a CPU, right on any device.

The sequence is cut into chunks of C rows and the chunks into panels; all chunks of a panel are computed at once as
batched matrix products, so that Python runs once per panel and per state, never per token:

    p = tril(q k^T * mask),  o = p v + (q S) * into      S: the state entering the chunk
    S' = S * whole + (k * left)^T v                      S': the state leaving it

with, for row r of a chunk, mask_rj = scale lambda^(r-j), into_r = scale lambda^(r+1), left_r = lambda^(C-1-r) and
whole = lambda^C. Where every token has a decay of its own, with a_r the sum of s from the chunk's first row to row r,
they are scale exp(a_j - a_r), scale exp(-a_r), exp(a_r - a_{C-1}) and exp(-a_{C-1}). The backward is the adjoint, right
to left, with dS' the gradient of the leaving state:

    dp = tril(do v^T * mask),  dq = dp k + (do S^T) * into
    dk = dp^T q + (v dS'^T) * left,  dv = p^T do + (k dS') * left,  dS = dS' * whole + (q * into)^T do

and, of a decay for each token, all that passes through row t from rows before it to t and later ones:

    ds_t = -(<S, dS'> whole + sum_{r >= t} (q_r S . do_r) into_r + sum_{j < t} (k_j dS' . v_j) left_j
             + sum_{j < t <= r} p_rj (v_j . do_r))

Nothing but q, k, v is saved; a panel bounds the memory of states, and within it heads are taken in parts whose p and
dp stay in the cache. bf16 and fp16 compute in fp32.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
from torch import Tensor

from fulmen.boundary import empty_rows
from fulmen.dispatch import register
from fulmen.lightning.spec import NO_STEPS, LightningSpec, Residuals, empty_output, empty_states

CHUNK = 64  # rows; on 2 CPU cores, H8 N4096 D64: 12 ms forward, against 14 with 32 and 15 with 128
PANEL_BYTES = 32 << 20  # of p over all heads: bounds the memory
PART_BYTES = 4 << 20  # of p at a time: stays in the cache, and its memory is used again


def supports(spec: LightningSpec) -> str | None:
    if spec.sequences is not None and spec.device.type != "cpu":
        return "eager reads cu_seqlens on the host, which would synchronise the GPU"
    return NO_STEPS if spec.steps else None


class Powers(NamedTuple):
    """The decay factors of chunks, shaped to broadcast over (B, H, chunks, C, size); None where all are 1.

    Of a decay for each token there is no mask: `since` has what it is made of, a part at a time.
    """

    mask: Tensor | float  # (H, 1, C, C), scaled; nothing above the diagonal is used
    into: Tensor | float  # (H, 1, C, 1) or (B, H, chunks, C, 1), scaled
    left: Tensor | None  # (H, 1, C, 1) or (B, H, chunks, C, 1)
    whole: Tensor | None  # (H, 1, 1) or (B, H, chunks, 1, 1)
    since: Tensor | None = None  # (B, H, chunks, C): a_r, in high precision


def powers(decay: Tensor | None, scale: float, panel: Panel, like: Tensor) -> Powers:
    """Powers are products of exp(-s) in fp64: exact to the last bit of fp32, and one small exp per call."""
    if decay is None:
        return Powers(scale, scale, None, None)
    C, exact = panel.C, torch.float32 if like.device.type == "mps" else torch.float64  # MPS has no fp64
    if decay.ndim == 3:
        since = panel.rows(decay[..., None]).squeeze(4).to(exact).cumsum(3)
        into, left = (torch.exp(-x)[..., None].to(like.dtype) for x in (since, since[..., -1:] - since))
        return Powers(scale, into * scale, left, into[:, :, :, -1:], since)
    r = torch.arange(C, device=like.device)
    each = torch.exp(-decay.to(exact)).view(-1, 1).repeat(1, C + 1)
    each[:, 0] = 1.0
    table = each.cumprod(1).to(like.dtype)  # (H, C + 1): lambda^0 .. lambda^C
    mask = table[:, (r[:, None] - r[None, :]).clamp(min=0)] * scale
    column = table[:, None, :, None]
    return Powers(mask[:, None], column[:, :, 1:] * scale, column[:, :, :C].flip(2), table[:, C].view(-1, 1, 1))


Part = tuple[slice, slice]  # of the batches and of the query heads


class Panel(NamedTuple):
    """`chunks` chunks of C rows from row `begin`."""

    begin: int
    chunks: int
    C: int

    def rows(self, x: Tensor) -> Tensor:
        """This panel's rows of x as (B, heads, chunks, C, size)."""
        return x.narrow(2, self.begin, self.chunks * self.C).unflatten(2, (self.chunks, self.C))

    def of(self, x: Tensor, heads: int, dtype: torch.dtype) -> Tensor:
        """`rows` to compute with: each stored head repeated for those of the `heads` that share it."""
        x, group = self.rows(x).to(dtype), heads // max(x.shape[1], 1)
        return (x.repeat_interleave(group, dim=1) if group > 1 else x).contiguous()

    def parts(self, spec: LightningSpec) -> list[Part]:
        """Cuts batches and heads so that p of a part stays in the cache; heads that share rows stay together."""
        group = spec.H // (spec.groups or spec.H_KV)
        heads = max(1, PART_BYTES // (4 * self.chunks * self.C * self.C * group)) * group
        if heads < spec.H:
            return [(slice(b, b + 1), slice(h, h + heads)) for b in range(spec.B) for h in range(0, spec.H, heads)]
        batches = heads // spec.H
        return [(slice(b, b + batches), slice(None)) for b in range(0, spec.B, batches)]


def write(x: Tensor, part: Part, a: Tensor, state: Tensor, w: Tensor | float | None, p: Tensor, c: Tensor) -> None:
    """That part of the rows x = (a state) * w + p c, summed over query heads that share a stored head of x."""
    group = a.shape[1] // x.shape[1]
    batches, heads = part
    stored = heads if heads.start is None else slice(heads.start // group, heads.stop // group)
    rows, a, state, c = x[batches, stored], a[part], state[part], c[part]
    direct = group == 1 and rows.dtype == a.dtype and rows.is_contiguous()
    out = rows if direct else a.new_empty(*a.shape[:4], x.shape[4])
    flat = out.flatten(0, 2)
    torch.bmm(a.flatten(0, 2), state.flatten(0, 2), out=flat)
    if w is not None:
        out.mul_(of_part(w, part))
    flat.baddbmm_(p.flatten(0, 2), c.flatten(0, 2))
    if not direct:
        rows.copy_(out.unflatten(1, (-1, group)).sum(2) if group > 1 else out)


def panels(begin: int, end: int, heads: int) -> list[Panel]:
    most = max(1, PANEL_BYTES // (4 * heads * CHUNK * CHUNK))
    full, tail = divmod(end - begin, CHUNK)
    cut = [Panel(begin + i * CHUNK, min(most, full - i), CHUNK) for i in range(0, full, most)]
    return cut + ([Panel(begin + full * CHUNK, 1, tail)] if tail else [])


def of_part(w: Tensor | float, part: Part) -> Tensor | float:
    """The factors of these batches and heads; without decay there is one for all."""
    if isinstance(w, float):
        return w
    return w[part] if w.ndim == 5 else w if w.shape[0] == 1 else w[part[1]]


def weigh(x: Tensor, w: Tensor | float | None, part: Part) -> Tensor:
    return x if w is None or (isinstance(w, float) and w == 1.0) else x * of_part(w, part)


def added(a: Tensor, w: Tensor | float | None, b: Tensor, parts: list[Part]) -> Tensor:
    """What each chunk adds to the state, (a * w)^T b: (B, H, chunks, D, E)."""
    steps = a.new_empty(*a.shape[:3], a.shape[4], b.shape[4])
    for part in parts:
        left = weigh(a[part], w, part).flatten(0, 2)
        torch.bmm(left.mT, b[part].flatten(0, 2), out=steps[part].flatten(0, 2))
    return steps


def masked(a: Tensor, b: Tensor, w: Powers, part: Part) -> Tensor:
    """tril(a b^T * mask) of a part: what tril drops may be NaN, which a factor of zero would keep."""
    p = (a[part] @ b[part].mT).mul_(of_part(w.mask, part)).tril_()
    if w.since is not None:
        since = w.since[part]
        p.mul_((since[..., None, :] - since[..., None]).clamp_(max=0.0).exp_())
    return p


def scan(steps: Tensor, state: Tensor, whole: Tensor | None, reverse: bool = False) -> tuple[Tensor, Tensor]:
    """Turns what each chunk adds, (B, H, chunks, D, E), into the state entering it, in place; and the state leaving."""
    chunks = range(steps.shape[2])
    for i in reversed(chunks) if reverse else chunks:
        step, kept = steps[:, :, i], whole if whole is None or whole.ndim == 3 else whole[:, :, i]
        after = step + state if kept is None else torch.addcmul(step, state, kept)
        step.copy_(state)
        state = after
    return steps, state


def sequences(spec: LightningSpec, x: Residuals) -> list[tuple[int, int, slice]]:
    """(begin, end, which states) of each sequence that has rows; the whole batch at once when not packed."""
    if x.cu_seqlens is None:
        return [(0, spec.N, slice(None))] if x.q.numel() else []
    ends = x.cu_seqlens.tolist()
    bounds = enumerate(itertools.pairwise(ends))
    return [(begin, end, slice(i, i + 1)) for i, (begin, end) in bounds if begin < end]


def initial_states(spec: LightningSpec, x: Residuals) -> Tensor:
    states = empty_states(spec)
    return states.zero_() if x.initial_state is None else states.copy_(x.initial_state)


def forward(spec: LightningSpec, x: Residuals) -> tuple[Tensor, Tensor | None]:
    o = empty_output(spec, x)
    states = initial_states(spec, x)
    for begin, end, which in sequences(spec, x):
        state = states[which]
        for panel in panels(begin, end, spec.B * spec.H):
            w = powers(x.decay, spec.scale, panel, state)
            parts = panel.parts(spec)
            q, k, v = (panel.of(t, spec.H, state.dtype) for t in (x.q, x.k, x.v))
            entering, state = scan(added(k, w.left, v, parts), state, w.whole)
            for part in parts:
                write(panel.rows(o), part, q, entering, w.into, masked(q, k, w, part), v)
        states[which] = state
    return o, states if spec.with_final_state else None


def backward(
    spec: LightningSpec, x: Residuals, do: Tensor, dstate: Tensor | None, ddecay: Tensor | None = None,
    of_steps: None = None, *buffers: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """ddecay: where to write the gradient of a decay for each token, (B, H, N); buffers: for dq, dk, dv, or None."""
    dq, dk, dv = (
        empty_rows(t, *t.shape[1::2]) if buffer is None else buffer
        for t, buffer in zip((x.q, x.k, x.v), buffers or (None,) * 3, strict=True)
    )
    states = initial_states(spec, x)
    dstates = torch.zeros_like(states) if dstate is None else dstate.clone()
    for begin, end, which in sequences(spec, x):
        cut = panels(begin, end, spec.B * spec.H)
        starts = [states[which]]  # the state entering each panel
        for panel in cut[:-1]:
            w = powers(x.decay, spec.scale, panel, states)
            k, v = (panel.of(t, spec.H, states.dtype) for t in (x.k, x.v))
            starts.append(scan(added(k, w.left, v, panel.parts(spec)), starts[-1], w.whole)[1])
        dstate = dstates[which]
        for panel, start in zip(reversed(cut), reversed(starts), strict=True):
            w = powers(x.decay, spec.scale, panel, states)
            parts = panel.parts(spec)
            q, do_, k, v = (panel.of(t, spec.H, states.dtype) for t in (x.q, do, x.k, x.v))
            entering, _ = scan(added(k, w.left, v, parts), start, w.whole)
            leaving, dstate = scan(added(q, w.into, do_, parts), dstate, w.whole, reverse=True)
            for part in parts:
                dp = masked(do_, v, w, part)
                write(panel.rows(dq), part, do_, entering.mT, w.into, dp, k)
                write(panel.rows(dk), part, v, leaving.mT, w.left, dp.mT, q)
                p = masked(q, k, w, part)
                write(panel.rows(dv), part, k, leaving, w.left, p.mT, do_)
                if ddecay is not None:
                    rows = (y[part] for y in (q, k, v, do_, entering, leaving))
                    panel.rows(ddecay[..., None])[part] = token_gradient(w, part, p, *rows)[..., None]
        dstates[which] = dstate
    return dq, dk, dv, None if x.initial_state is None else dstates


def token_gradient(
    w: Powers, part: Part, p: Tensor, q: Tensor, k: Tensor, v: Tensor, do: Tensor, entering: Tensor, leaving: Tensor
) -> Tensor:
    """The gradient of a decay for each token, (B, H, chunks, C) of a part; see the top of the file."""
    assert w.since is not None
    assert w.whole is not None
    exact = w.since.dtype
    pairs = p.tril(-1).mul_(do @ v.mT).to(exact)
    later = weigh((q @ entering).mul_(do), w.into, part).sum(4, dtype=exact) + pairs.sum(4) - pairs.sum(3)
    earlier = weigh((k @ leaving).mul_(v), w.left, part).sum(4, dtype=exact)
    through = (entering * leaving).sum((3, 4), dtype=exact)[..., None] * w.whole[part][..., 0]
    return -(through + later.flip(3).cumsum(3).flip(3) + earlier.cumsum(3) - earlier)


register("lightning", "eager", supports=supports, forward=forward, backward=backward)
