"""Trial for issue 6: the lightning sweep with TMA loads (as flash has), one sweep a launch. AOT here, timing on the GPU.

    PYTHONPATH=. python dev/lightning_tma.py aot          registers, stack, shared memory on sm_90
    PYTHONPATH=. python3 dev/lightning_tma.py time        on the GPU, against fulmen.lightning_attention
"""
import os
import sys
import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def tma_sweep(a_d, b_d, c_d, out_ptr, decay_ptr, so_b, so_h, so_n, H, N, scale,
              REVERSE: tl.constexpr, DECAY: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BV: tl.constexpr, STAGES: tl.constexpr):
    TV: tl.constexpr = V // BV
    pid = tl.program_id(0)
    pv = pid % TV
    head = pid // TV
    b_i = head // H
    h = head % H
    offs_c = tl.arange(0, C)
    place = C - 1 - offs_c if REVERSE else offs_c
    LAG: tl.constexpr = 0 if REVERSE else 1
    mask = tl.where(place[:, None] <= place[None, :], scale, 0.0)
    if DECAY:
        rate = -LOG2E * tl.load(decay_ptr + h)
        chunk_decay = tl.exp2(rate * C)
        mask *= tl.exp2(rate * tl.maximum(place[None, :] - place[:, None], 0))
        a_decay = tl.exp2(rate * (place + LAG)) * scale
        c_decay = tl.exp2(rate * (C - LAG - place))
    state = tl.zeros([BV, K], tl.float32)
    base = out_ptr + b_i.to(tl.int64) * so_b + h.to(tl.int64) * so_h
    offs_v = pv * BV + tl.arange(0, BV)
    for i in tl.range(0, N, C, num_stages=STAGES):
        row = (N - C - i) if REVERSE else i
        b = b_d.load([b_i, h, row, 0]).reshape(C, K)
        c = c_d.load([b_i, h, row, pv * BV]).reshape(C, BV)
        a = a_d.load([b_i, h, row, 0]).reshape(C, K)
        p = tl.dot(b, tl.trans(a)) * mask
        p = p.to(c.dtype)
        inter = tl.dot(state.to(a.dtype), tl.trans(a))  # [V, C]
        if DECAY:
            inter *= a_decay[None, :]
        else:
            inter *= scale
        out = tl.dot(tl.trans(c), p, inter)
        tl.store(base + (row + offs_c)[None, :] * so_n + offs_v[:, None], out.to(out_ptr.dtype.element_ty), mask=(row + offs_c >= 0)[None, :] & (row + offs_c < N)[None, :])
        ct = tl.trans(c)
        if DECAY:
            ct = (ct * c_decay[None, :]).to(c.dtype)
            state *= chunk_decay
        state = tl.dot(ct, b, state)


def d(x, rows, cols):
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [1, 1, rows, cols])


def args(a, b, c, out, decay, reverse, cfg):
    C, BV, w, s = cfg
    B, H, N, K = a.shape
    V = c.shape[3]
    return ((d(a, C, K), d(b, C, K), d(c, C, min(BV, V)), out, decay, *out.stride()[:3], H, N, 1.0, reverse, decay is not None, K, V, C, min(BV, V), s),
            (B * H * (V // min(BV, V)),), dict(num_warps=w, num_stages=s))


CFG = {64: [(64, 64, 4, 3), (64, 64, 4, 4)],
       128: [(64, 64, 4, 3), (64, 64, 4, 4), (64, 128, 8, 3), (128, 64, 8, 2)],
       256: [(32, 64, 4, 3)]}
WARM = os.environ.get("WARM")

if __name__ == "__main__" and sys.argv[1] == "aot":
    from types import SimpleNamespace as NS
    from tests.aot import compile as comp, usage
    for D, cfgs in CFG.items():
        x = torch.empty(2, 32, 8192, D, dtype=torch.bfloat16, device="meta")
        for cfg in cfgs:
            for dec in (True, False):
                for rev in (False, True):
                    a, g, o = args(x, x, x, x, torch.empty(32, device="meta") if dec else None, rev, cfg)
                    l = NS(kernel=tma_sweep, args=a, options=o)
                    try:
                        u = usage(l, comp(l, 90))
                        print(D, cfg, "decay" if dec else "none", "rev" if rev else "fwd", "shared", u.shared, "stack", u.stack, "reg", u.registers, flush=True)
                    except Exception as e:
                        print(D, cfg, dec, rev, "ERR", str(e)[:80], flush=True)
if __name__ == "__main__" and sys.argv[1] == "time":
    import fulmen
    from timing import timeit

    src = torch.empty(1 << 29, dtype=torch.int8, device="cuda"); dst = torch.empty_like(src)
    bw = 2 * src.numel() / timeit(lambda: dst.copy_(src))
    for shape in ((4, 32, 8192, 64), (2, 32, 8192, 128), (1, 32, 8192, 256), (1, 64, 4096, 128)):
        if WARM and WARM != str(shape[3]):
            continue
        q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3))
        o = torch.empty_like(q)
        for dec in (True, False):
            s = fulmen.decay.alibi(shape[1]).cuda() if dec else None
            ref = fulmen.lightning_attention(q, k, v, s)
            base = timeit(lambda: fulmen.lightning_attention(q, k, v, s))
            u = q.numel() * 2
            print(shape, dec, f"now {4*u/base/bw:.1%}", flush=True)
            for cfg in CFG[shape[3]]:
                for rev in (False, True):
                    try:
                        a, g, op = args(q, k, v, o, s, rev, cfg)
                        tma_sweep[g](*a, **op)
                        err = ((o.float() - ref.float()).norm() / ref.float().norm()).item() if not rev else float("nan")
                        ms = timeit(lambda: tma_sweep[g](*a, **op))
                        print("   ", cfg, "rev" if rev else "fwd", f"{4*u/ms/bw:.1%} err {err:.1e}", flush=True)
                    except Exception as e:
                        print("   ", cfg, str(e)[:60], flush=True)
