"""First trials of the softmax kernels: which tiles, TMA or pointers, one backward launch or two."""
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor


@triton.jit
def rows_of(x, strides, b, h, row, end, SIZE: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, TMA: tl.constexpr, MASK: tl.constexpr):
    if TMA:
        return x.load([b, h, row, 0]).reshape(BLOCK, WIDTH)
    else:
        offs_n = tl.arange(0, BLOCK)
        offs_d = tl.arange(0, WIDTH)
        base = x + b.to(tl.int64) * strides[0] + h.to(tl.int64) * strides[1] + row.to(tl.int64) * strides[2]
        ptrs = base + offs_n[:, None] * strides[2] + offs_d[None, :]
        if MASK and SIZE != WIDTH:
            return tl.load(ptrs, mask=(row + offs_n < end)[:, None] & (offs_d < SIZE)[None, :], other=0.0)
        elif MASK:
            return tl.load(ptrs, mask=(row + offs_n < end)[:, None], other=0.0)
        elif SIZE != WIDTH:
            return tl.load(ptrs, mask=(offs_d < SIZE)[None, :], other=0.0)
        else:
            return tl.load(ptrs)


@triton.jit
def fwd_loop(acc, m, l, q, k_in, v_in, ks, vs, b, hk, lo, hi, pos, N, scale,
             D: tl.constexpr, E: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, TMA: tl.constexpr, MASK: tl.constexpr):
    for n in tl.range(lo, hi, BN):
        n = tl.multiple_of(n, BN)
        k = rows_of(k_in, ks, b, hk, n, N, D, BN, BD, TMA, MASK)
        s = tl.dot(q, tl.trans(k))
        if MASK:
            j = n + tl.arange(0, BN)
            s = tl.where((j[None, :] <= pos[:, None]) & (j < N)[None, :], s, float("-inf"))
            m_new = tl.maximum(m, tl.max(s, 1) * scale)
            m_use = tl.where(m_new == float("-inf"), 0.0, m_new)
        else:
            m_new = tl.maximum(m, tl.max(s, 1) * scale)
            m_use = m_new
        p = tl.exp2(s * scale - m_use[:, None])
        alpha = tl.exp2(m - m_use)
        l = l * alpha + tl.sum(p, 1)
        acc = acc * alpha[:, None]
        v = rows_of(v_in, vs, b, hk, n, N, E, BN, BE, TMA, MASK)
        acc = tl.dot(p.to(v.dtype), v, acc)
        m = m_new
    return acc, m, l


@triton.jit
def trial_fwd(q_in, k_in, v_in, o_in, lse_ptr, qs, ks, vs, os, H, GROUP, N, scale,
              CAUSAL: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
              BD: tl.constexpr, BE: tl.constexpr, TMA: tl.constexpr, ORDER: tl.constexpr):
    tiles = tl.cdiv(N, BM)
    pid = tl.program_id(0)
    if ORDER == 0:
        t = pid % tiles
        head = pid // tiles
    else:
        heads = tl.num_programs(0) // tiles
        t = pid // heads
        head = pid % heads
    if CAUSAL:
        t = tiles - 1 - t
    b = head // H
    h = head % H
    hk = h // GROUP
    m0 = t * BM
    q = rows_of(q_in, qs, b, h, m0, N, D, BM, BD, TMA, True)
    pos = m0 + tl.arange(0, BM)
    acc = tl.zeros([BM, BE], tl.float32)
    m = tl.full([BM], float("-inf"), tl.float32)
    l = tl.zeros([BM], tl.float32)
    if CAUSAL:
        full = m0 // BN * BN
        end = tl.minimum(m0 + BM, N)
    else:
        full = N // BN * BN
        end = N
    acc, m, l = fwd_loop(acc, m, l, q, k_in, v_in, ks, vs, b, hk, 0, full, pos, N, scale, D, E, BN, BD, BE, TMA, False)
    acc, m, l = fwd_loop(acc, m, l, q, k_in, v_in, ks, vs, b, hk, full, end, pos if CAUSAL else pos * 0 + N, N, scale, D, E, BN, BD, BE, TMA, True)
    acc = acc / tl.where(l == 0, 1.0, l)[:, None]
    offs_m = m0 + tl.arange(0, BM)
    tl.store(lse_ptr + head.to(tl.int64) * N + offs_m, (m + tl.log2(l)) * 0.6931471805599453, mask=offs_m < N)
    offs_e = tl.arange(0, BE)
    base = o_in + b.to(tl.int64) * os[0] + h.to(tl.int64) * os[1] + m0.to(tl.int64) * os[2]
    tl.store(base + tl.arange(0, BM)[:, None] * os[2] + offs_e[None, :], acc.to(o_in.dtype.element_ty), mask=(offs_m < N)[:, None] & (offs_e < E)[None, :])


@triton.jit
def trial_pre(o, do, lse_ptr, delta_ptr, lse2_ptr, os, dos, H, N, E: tl.constexpr, BM: tl.constexpr, BE: tl.constexpr):
    tiles = tl.cdiv(N, BM)
    pid = tl.program_id(0)
    t = pid % tiles
    head = pid // tiles
    b = head // H
    h = head % H
    x = rows_of(o, os, b, h, t * BM, N, E, BM, BE, False, True).to(tl.float32)
    y = rows_of(do, dos, b, h, t * BM, N, E, BM, BE, False, True).to(tl.float32)
    offs = t * BM + tl.arange(0, BM)
    where = head.to(tl.int64) * N + offs
    tl.store(delta_ptr + where, tl.sum(x * y, 1), mask=offs < N)
    lse = tl.load(lse_ptr + where, mask=offs < N, other=0.0)
    tl.store(lse2_ptr + where, tl.where(lse == float("-inf"), float("inf"), lse * 1.4426950408889634), mask=offs < N)


@triton.jit
def dkdv_loop(dk, dv, k, v, q_in, do_in, qs, dos, lse2, delta, b, h, lo, hi, n0, N, scale,
              D: tl.constexpr, E: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, TMA: tl.constexpr, MASK: tl.constexpr):
    for m in tl.range(lo, hi, BM):
        q = rows_of(q_in, qs, b, h, m, N, D, BM, BD, TMA, True)
        do = rows_of(do_in, dos, b, h, m, N, E, BM, BE, TMA, True)
        i = m + tl.arange(0, BM)
        ls = tl.load(lse2 + i, mask=i < N, other=float("inf"))
        de = tl.load(delta + i, mask=i < N, other=0.0)
        s = tl.dot(k, tl.trans(q))  # [BN, BM]
        p = tl.exp2(s * scale - ls[None, :])
        if MASK:
            j = n0 + tl.arange(0, BN)
            p = tl.where(j[:, None] <= i[None, :], p, 0.0)
        dv = tl.dot(p.to(do.dtype), do, dv)
        dp = tl.dot(v, tl.trans(do))
        ds = p * (dp - de[None, :])
        dk = tl.dot(ds.to(q.dtype), q, dk)
    return dk, dv


@triton.jit
def dq_loop(dq, q, do, ls, de, k_in, v_in, ks, vs, b, hk, lo, hi, m0, N, scale,
            D: tl.constexpr, E: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, TMA: tl.constexpr, MASK: tl.constexpr, CAUSAL: tl.constexpr):
    for n in tl.range(lo, hi, BN):
        k = rows_of(k_in, ks, b, hk, n, N, D, BN, BD, TMA, MASK)
        v = rows_of(v_in, vs, b, hk, n, N, E, BN, BE, TMA, MASK)
        s = tl.dot(q, tl.trans(k))
        dp = tl.dot(do, tl.trans(v))
        p = tl.exp2(s * scale - ls[:, None])
        if MASK:
            j = n + tl.arange(0, BN)
            i = m0 + tl.arange(0, BM)
            if CAUSAL:
                p = tl.where((j[None, :] <= i[:, None]) & (j < N)[None, :], p, 0.0)
            else:
                p = tl.where((j < N)[None, :], p, 0.0)
        ds = p * (dp - de[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq)
    return dq


@triton.jit
def trial_bwd(q_in, k_in, v_in, do_in, q_t, k_t, v_t, do_t, dq_ptr, dk_ptr, dv_ptr, lse2, delta,
              qs, ks, vs, dos, dqs, dks, dvs, H, GROUP, N, scale2, scale,
              CAUSAL: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
              BM1: tl.constexpr, BN1: tl.constexpr, BM2: tl.constexpr, BN2: tl.constexpr,
              BD: tl.constexpr, BE: tl.constexpr, TMA: tl.constexpr, PHASES: tl.constexpr, HPP: tl.constexpr):
    """q_in...: loop tiles; k_t...: resident tiles."""
    BLOCK: tl.constexpr = BN1 if PHASES != 2 else BM2
    tiles = tl.cdiv(N, BLOCK)
    pid = tl.program_id(0)
    t = pid % tiles
    head0 = pid // tiles  # in units of HPP query heads
    per = H // HPP
    b = head0 // per
    h0 = head0 % per * HPP
    offs_d = tl.arange(0, BD)
    offs_e = tl.arange(0, BE)
    if PHASES != 2:
        n0 = t * BN1
        hk = h0 // GROUP
        k = rows_of(k_t, ks, b, hk, n0, N, D, BN1, BD, TMA, True)
        v = rows_of(v_t, vs, b, hk, n0, N, E, BN1, BE, TMA, True)
        dk = tl.zeros([BN1, BD], tl.float32)
        dv = tl.zeros([BN1, BE], tl.float32)
        for g in range(HPP):
            h = h0 + g
            row = (b * H + h).to(tl.int64) * N
            lo = 0
            if CAUSAL:
                lo = n0 // BM1 * BM1
                mid = tl.minimum((n0 + BN1 + BM1 - 1) // BM1 * BM1, (N + BM1 - 1) // BM1 * BM1)
                dk, dv = dkdv_loop(dk, dv, k, v, q_in, do_in, qs, dos, lse2 + row, delta + row, b, h, lo, mid, n0, N, scale2, D, E, BM1, BN1, BD, BE, TMA, True)
                lo = mid
            dk, dv = dkdv_loop(dk, dv, k, v, q_in, do_in, qs, dos, lse2 + row, delta + row, b, h, lo, N, n0, N, scale2, D, E, BM1, BN1, BD, BE, TMA, False)
        offs_n = tl.arange(0, BN1)
        ho = h0 // HPP
        base = dk_ptr + b.to(tl.int64) * dks[0] + ho.to(tl.int64) * dks[1] + n0.to(tl.int64) * dks[2]
        tl.store(base + offs_n[:, None] * dks[2] + offs_d[None, :], (dk * scale).to(dk_ptr.dtype.element_ty), mask=(n0 + offs_n < N)[:, None] & (offs_d < D)[None, :])
        base = dv_ptr + b.to(tl.int64) * dvs[0] + ho.to(tl.int64) * dvs[1] + n0.to(tl.int64) * dvs[2]
        tl.store(base + offs_n[:, None] * dvs[2] + offs_e[None, :], dv.to(dv_ptr.dtype.element_ty), mask=(n0 + offs_n < N)[:, None] & (offs_e < E)[None, :])
    if PHASES != 1:
        if PHASES == 2 and CAUSAL:
            t = tiles - 1 - t
        m0 = t * BM2
        for g in range(HPP):
            h = h0 + g
            hk = h // GROUP
            row = (b * H + h).to(tl.int64) * N
            q = rows_of(q_t, qs, b, h, m0, N, D, BM2, BD, TMA, True)
            do = rows_of(do_t, dos, b, h, m0, N, E, BM2, BE, TMA, True)
            i = m0 + tl.arange(0, BM2)
            ls = tl.load(lse2 + row + i, mask=i < N, other=float("inf"))
            de = tl.load(delta + row + i, mask=i < N, other=0.0)
            dq = tl.zeros([BM2, BD], tl.float32)
            if CAUSAL:
                full = m0 // BN2 * BN2
                end = tl.minimum(m0 + BM2, N)
            else:
                full = N // BN2 * BN2
                end = N
            dq = dq_loop(dq, q, do, ls, de, k_in, v_in, ks, vs, b, hk, 0, full, m0, N, scale2, D, E, BM2, BN2, BD, BE, TMA, False, CAUSAL)
            dq = dq_loop(dq, q, do, ls, de, k_in, v_in, ks, vs, b, hk, full, end, m0, N, scale2, D, E, BM2, BN2, BD, BE, TMA, True, CAUSAL)
            base = dq_ptr + b.to(tl.int64) * dqs[0] + h.to(tl.int64) * dqs[1] + m0.to(tl.int64) * dqs[2]
            tl.store(base + tl.arange(0, BM2)[:, None] * dqs[2] + offs_d[None, :], (dq * scale).to(dq_ptr.dtype.element_ty), mask=(i < N)[:, None] & (offs_d < D)[None, :])


LOG2E = 1.4426950408889634


def desc(x, rows):
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [1, 1, rows, triton.next_power_of_2(x.shape[3])])


def st(x):
    return tuple(x.stride()[:3])


def fwd_args(q, k, v, o, lse, causal, c):
    B, H, N, D = q.shape
    E = v.shape[3]
    tma = c["tma"]
    return ((desc(q, c["bm"]) if tma else q, desc(k, c["bn"]) if tma else k, desc(v, c["bn"]) if tma else v, o, lse,
             st(q), st(k), st(v), st(o), H, H // k.shape[1], N, D**-0.5 * LOG2E, causal, D, E, c["bm"], c["bn"],
             triton.next_power_of_2(D), triton.next_power_of_2(E), tma, c.get("order", 0)),
            (triton.cdiv(N, c["bm"]) * B * H,), dict(num_warps=c["w"], num_stages=c["s"], **({"maxnreg": c["r"]} if c.get("r") else {})))


def bwd_args(q, k, v, do, dq, dk, dv, lse2, delta, causal, c, phases):
    B, H, N, D = q.shape
    E = v.shape[3]
    tma = c["tma"]
    d = (lambda x, r: desc(x, r)) if tma else (lambda x, r: x)
    hpp = c.get("hpp", H // k.shape[1])
    block = c["n1"] if phases != 2 else c["m2"]
    return ((d(q, c["m1"]), d(k, c["n2"]), d(v, c["n2"]), d(do, c["m1"]), d(q, c["m2"]), d(k, c["n1"]), d(v, c["n1"]), d(do, c["m2"]),
             dq, dk, dv, lse2, delta, st(q), st(k), st(v), st(do), st(dq), st(dk), st(dv), H, H // k.shape[1], N,
             D**-0.5 * LOG2E, D**-0.5, causal, D, E, c["m1"], c["n1"], c["m2"], c["n2"],
             triton.next_power_of_2(D), triton.next_power_of_2(E), tma, phases, hpp),
            (triton.cdiv(N, block) * B * (H // hpp),), dict(num_warps=c["w"], num_stages=c["s"]))
