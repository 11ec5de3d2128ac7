"""The launches of layers beside their attention, for `tests.aot`."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple


class RotaryCase(NamedTuple):
    """Latent attention as DeepSeek-V3 has it: every kernel of `fulmen.layers`; and a step of Mamba."""

    arch: int
    interleaved: bool = True
    dtype: str = "bfloat16"


class LayerCase(NamedTuple):
    """The lightning layer: what comes before the attention and after it."""

    arch: int
    preset: str
    H: int = 16
    D: int = 128
    interleaved: bool = False
    dtype: str = "bfloat16"


class BlockCase(NamedTuple):
    """What a block has beside its attention."""

    arch: int
    dim: int = 2048
    vocab: int = 32000
    dtype: str = "bfloat16"


class ScanCase(NamedTuple):
    """Mamba-2: the convolution, what lies around the scan, and a step."""

    arch: int
    H: int = 64
    P: int = 64
    groups: int = 1
    dtype: str = "bfloat16"


class WideCase(NamedTuple):
    """Norms' backwards, which loop over rows: so wide or so narrow that shared memory is what limits them."""

    arch: int
    dtype: str


class LinearCase(NamedTuple):
    """Products of a decoding step of few rows: of one x, and of latent attention."""

    arch: int
    rows: int
    dtype: str = "bfloat16"


def rotary_launches(case: RotaryCase) -> list[Any]:
    import torch

    from fulmen.layers.fused import decode, latent
    from fulmen.layers.fused import rotary as module
    from fulmen.layers.fused import sums as adding

    B, N, H, nope, dim, E, R, R_Q = 2, 2048, 32, 128, 64, 128, 512, 1536
    rows = functools.partial(torch.empty, dtype=getattr(torch, case.dtype), device="meta")
    q, k, v, rope = rows(B, N, H, nope + dim), rows(B, N, H, nope + dim), rows(B, N, H, E), rows(B, N, dim)
    cos = torch.empty(N, dim // 2, device="meta")
    norm = rows(B, N, R + dim), rows(R), rows(B, N, R)
    q_norm = rows(B, N, R_Q), rows(R_Q), rows(B, N, R_Q)
    rstd, sums = torch.empty(2, B * N, device="meta"), torch.empty(528, R_Q + R, device="meta")
    ints, table = (torch.empty(*shape, dtype=torch.int32, device="meta") for shape in ((B,), (B, 128)))
    step = q.flatten(2), norm[2], norm[0], None, cos, cos, ints
    facts = [module.Pairs(dim // 2, case.interleaved, *f) for f in ((True, False), (True, True), (False, False))]
    found = [
        module.turn_launch(q, k, cos, cos, 1.0, case.interleaved),
        *(module.both_launch(q, k, rope[:1], rope[:1], q, k, one) for one in facts),
        latent.norms((1e-6, 1e-6), *q_norm[:2], *norm[:2])[1],
        latent.norms((1e-6,), *norm[:2])[1],
        latent.norm_backward_launch(*q_norm, rows(B, N, 0), q_norm[0], *norm, rope, norm[0], rstd, sums),
        adding.sum_launch(sums, q_norm[1], norm[1]),
        latent.rope_launch(q, rope, k, cos, cos, case.interleaved),
        latent.rope_backward_launch(q, k, rope, cos, cos, case.interleaved),
        *(
            decode.latent_step(
                (nope, case.interleaved, 0.0), *step, table if paged else None,
                rows(64 if paged else B, 64 if paged else 8192, R + dim), None,
            )[1]
            for paged in (False, True)
        ),
    ]  # fmt: skip
    if case.arch == 90:
        flat = k.view(B * N, -1), v.view(B * N, -1), rows(H * (nope + E), R), rows(B * N, R)
        found += [latent.gather_launch(*flat, H, nope, width) for width in latent.WIDTHS]
    return found


def mamba_tensors(rows: Any, shared: bool) -> tuple[Any, ...]:
    """Of a step of Mamba-2 with 8 groups, or of Mamba, whose dimensions differ."""
    B, H, P, N, G = 16, 64, 64, 128, 8
    x, of_head, of_all = rows(B, H, P), rows(H, P), rows(H, P, N)
    dt, bias, A = (rows(B, H), rows(H), rows(H)) if shared else (x, of_head, of_all)
    return rows(B, H, P, N), x, dt, A, rows(B, G, N), rows(B, G, N), of_head, x, bias, None


def scan_launches(case: ScanCase) -> list[Any]:
    import torch

    from fulmen.layers.fused import conv, state_update
    from fulmen.layers.fused import mamba as module
    from fulmen.layers.scan import Steps

    B, N, H, P = 2, 2048, case.H, case.P
    rows = functools.partial(torch.empty, dtype=getattr(torch, case.dtype), device="meta")
    full = functools.partial(torch.empty, device="meta")
    x, dt, A, seq = rows(B, N, H, P), rows(B, N, H), full(H), full(B, N, dtype=torch.int32)
    o, weight, decay, steps = rows(B, N, H * P), rows(H * P), full(B, H, N), Steps(True, 0.0, torch.inf)
    channels, sums = H * P + 256, full(132, H * P)
    mixed, taps, bias, before = rows(B, N, channels), rows(channels, 4), rows(channels), rows(B, 3, channels)
    return [
        module.values_launch(x, dt, A, A, seq, x, decay, steps),
        module.values_backward_launch(x, dt, A, A, A, x, decay, x, x, dt, sums, steps),
        module.steps_launch(dt, A, A, seq, decay, decay, steps),
        module.steps_backward_launch(dt, A, A, decay, full(2, B, H, N), dt, sums, steps),
        module.outputs_launch(o, o, weight, o, weight, o, case.groups, 1e-5),
        module.outputs_backward_launch(o, o, weight, o, weight, o, o, o, sums, case.groups, 1e-5),
        conv.conv_launch(mixed, taps, bias, seq, before, mixed, True),
        conv.conv_backward_launch(mixed, taps, bias, seq, before, mixed, mixed, sums, True),
        conv.conv_step_launch(mixed[:, 0], taps, bias, rows(B, channels, 4), mixed[:, 0], True),
        *(state_update.updated((steps, shared), *mamba_tensors(rows, shared))[1] for shared in (False, True)),
    ]


def layer_launches(case: LayerCase) -> list[Any]:
    import torch

    from fulmen.layers.fused import lightning as module

    B, N, H, D = 2, 2048, case.H, case.D
    rows = functools.partial(torch.empty, dtype=getattr(torch, case.dtype), device="meta")
    ring = case.preset == "ring"
    facts = module.Heads(H, H, D, D, None if ring else "silu", "before" if ring else None, 1e-6, case.interleaved)
    x, q, o, norm, weight = rows(B, N, 3 * H * D), rows(B, N, H, D), rows(B, N, H * D), rows(D), rows(H * D)
    cos = torch.empty(N, D // 4 if ring else 0, device="meta")
    parts, sums = torch.empty(792, 2 * D, device="meta"), rows(396, H * D).float()
    options = 4 if ring else 1, 1e-6, True
    dv = x.unflatten(2, (H, 3 * D))[..., -D:] if ring else q
    return [
        module.heads_launch(x, q, q, q, norm, norm, cos, cos, facts),
        module.heads_backward_launch(x, q, q, dv, x, norm, norm, cos, cos, parts, facts),
        module.gate_launch(o, o, weight, o, *options),
        module.gate_backward_launch(o, o, weight, o, o, o, sums, *options),
    ]


def block_launches(case: BlockCase) -> list[Any]:
    import torch

    from fulmen.layers.fused import block as module

    T, dim = 4096, case.dim
    rows = functools.partial(torch.empty, dtype=getattr(torch, case.dtype), device="meta")
    x, weight, gate, logits = rows(T, dim), rows(dim), rows(T, 3 * dim), rows(T, case.vocab)
    sums, each = rows(396, dim).float(), rows(T).float()
    return [
        module.add_norm_launch(x, x, weight, x, x, 1e-6),
        module.add_norm_backward_launch(x, weight, x, x, x, sums, 1e-6, True),
        module.gated_launch(gate, gate, gate, "silu"),
        module.gated_backward_launch(gate, gate, gate, gate, gate, "gelu"),
        module.loss_launch(logits, each.long(), each, each.expand(2, T)),
        module.loss_backward_launch(logits, each.long(), each.expand(2, T), each, logits),
    ]


def wide_launches(case: WideCase) -> list[Any]:
    import torch

    from fulmen.layers.fused import latent, lightning, mamba

    B, N, width = 2, 2048, 8192
    rows = functools.partial(torch.empty, dtype=getattr(torch, case.dtype), device="meta")
    o, weight, sums = rows(B, N, width), rows(width), torch.empty(132, width, device="meta")

    def of_norm(R: int, rest: int) -> tuple[Any, ...]:
        return rows(B, N, R + rest), rows(R), rows(B, N, R), rows(B, N, rest), rows(B, N, R + rest)

    def of_norms(*sizes: tuple[int, int]) -> Any:
        (rstd, parts), given = (torch.empty(len(sizes), n, device="meta") for n in (B * N, 2 * width)), sizes * 2
        of_all = parts[0].expand(132, -1)[:, : sum(R for R, _ in sizes)]
        return latent.norm_backward_launch(*of_norm(*given[0]), *of_norm(*given[1]), rstd, of_all)

    return [
        lightning.gate_backward_launch(o, o, weight, o, o, o, sums, 64, 1e-6, True),
        mamba.outputs_backward_launch(o, None, None, o, weight, o, o, o, sums, 1, 1e-5),
        of_norms((8, 128)), of_norms((16, 64), (16, 0)), of_norms((4096, 0), (4096, 64)), of_norms((8192, 0)),
    ]  # fmt: skip


def linear_launches(case: LinearCase) -> list[Any]:
    import torch

    from fulmen.layers.fused import decode, lightning, linear
    from fulmen.layers.fused.projections import MAX_ROWS, Facts

    B, K, H, nope, dim, R, R_Q = case.rows, 4096, 32, 128, 64, 512, 1536
    rows = functools.partial(torch.empty, dtype=getattr(torch, case.dtype), device="meta")
    ints, table = (torch.empty(*shape, dtype=torch.int32, device="meta") for shape in ((B,), (B, 128)))
    x, q, down = rows(B, 1, K), rows(B, 1, H * (nope + dim)), rows(B, 1, R + dim)
    cos, c_q, squares = torch.empty(8192, dim // 2, device="meta"), rows(B, 1, R_Q), torch.empty(96, B, device="meta")
    up, none = rows(H, 2 * nope, R), [None] * 3
    step = q, None, down, rows(R), cos, cos, ints, table, rows(64, 64, R + dim), up
    described = [
        lightning.gated((1, 1e-6), x, x, rows(K)),
        linear.linears(Facts("silu"), x, *none[1:], rows(3 * K, K), rows(K, K), None, *none),
        linear.linears(Facts(early=True), x, *none[1:], rows(K, K), *[rows(K // 4, K)] * 2, rows(K), None, None),
        linear.linears(Facts(early=True), x, *none[1:], rows(K, K), *none, *none[1:]),
        linear.linears(Facts(), x, rows(R_Q), None, rows(R_Q, K), rows(R + dim, K), None, *none),
        linear.linears(Facts(None, 1e-6, True), c_q, None, squares, rows(6144, R_Q), *none, *none[1:]),
        decode.latent_step((nope, True, 1e-6), *step),
        decode.latent_value(nope, rows(H, B, 1, R).transpose(0, 1), up),
    ]
    return [launch for _, launch in (described if B <= MAX_ROWS else described[:3])]  # of more rows several weights


LAUNCHES = {
    RotaryCase: rotary_launches,
    LayerCase: layer_launches,
    BlockCase: block_launches,
    ScanCase: scan_launches,
    WideCase: wide_launches,
    LinearCase: linear_launches,
}
