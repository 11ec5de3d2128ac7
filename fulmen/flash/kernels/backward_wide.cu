// Softmax attention, backward, for Hopper (sm_90a), of head dims for which dk and dv do not fit one warpgroup's registers:
// D = E = 256, and D 192 with E 128. Tiles, turns, sums of dq and the order of blocks are those of backward.cu.
//
// A tile is 64 keys of one head of k and v. Two consumer warpgroups share all of them:
//
//     producer    as in backward.cu; lse and delta come with q
//     first       for each query tile: p = exp2(s - lse), to shared memory; start dv += p^T do; start s^T = k q^T of the next
//                 query tile; wait for dv, and for ds; its pieces of dq = ds k
//     second      for each query tile: dp^T = v do^T; wait for p; ds = p (dp - delta), to shared memory; start its first piece
//                 of dq and dk += ds^T q; the other pieces of dq
//     adders      three warps add those pieces to the workspace with bulk reductions: the first consumer's, and each of the second's
//
// The second consumer takes p in 16 bits, as dv does; with a softcap, times the slope of the cap. Each lane takes what the
// same lane of the first consumer made, so p has no other order than that of registers.
//
// A piece of dq is 64 columns. The second consumer makes two, with dk in between, and stages them in one buffer. The first has
// exponentials to take, too: it makes one (D 192), or two, one after the other, in buffers of their own.
//
// KEEP: k and v are A operands of s and dp in registers, which saves reading them from shared memory for every query tile.
//
// One buffer of p and one of ds are enough: the first consumer writes p after it has seen ds of the tile before, for which
// the second has read p; the second writes ds after it has seen that p, ahead of which the first has made its dq.
//
// The compiler defines HEAD_DIM, VALUE_DIM, BLOCK_M, Q_STAGES, O_STAGES, KEEP, DETERMINISTIC, BF16, LEFT and RIGHT
// (whether there is such a limit), SOFTCAP, PACKED and ADDERS (warps that add dq up).

#include "cuda/include/sm90.cuh"
#include "cuda/include/softmax.cuh"
#include "cuda/include/packed.cuh"
#include "cuda/include/bulk.cuh"
#include "cuda/include/tile_scheduler.cuh"

constexpr int D = HEAD_DIM, E = VALUE_DIM, M = BLOCK_M, N = 64;
constexpr int S = M / 2, P = M / 4;                         // registers
constexpr int AT_ONCE = 3;                                  // pieces of dq that are converted
constexpr int DS_BUFFERS = 1, P_BYTES = N * M * 2, V_WARPS = 4, BUFFERS = D == 256 ? 3 : 2;
constexpr bool ROWS_WITH_Q = true;
constexpr int KEEP_K = KEEP ? D : 0, KEEP_V = KEEP ? E : 0;  // columns
constexpr int CONSUMERS = D == 256 ? 240 : 232, OTHERS = 504 - 2 * CONSUMERS;  // registers; 504 = 3 * 168, as at the launch

#include "flash/kernels/backward_tiles.cuh"
#include "flash/kernels/backward_parts.cuh"

static_assert(M == 64 && pieces(1) == 2 && ADDERS == 3, "a consumer's accumulators of s are 64 x 64, and the second makes two pieces of dq");

enum { FIRST = 0, SECOND = 1 };                             // the consumers
enum { WEIGHTS = NEXT, GRADIENTS };                         // named barriers: p is stored; ds is stored

__device__ __forceinline__ const float *rows_of(const char *shared, const Shared &at, int stage) {
    return reinterpret_cast<const float *>(shared + (at.rows - at.k) + stage * ROW_BYTES);
}

__device__ __forceinline__ void await_q(const Shared &at, const Stages &x, const Tile &tile, int m, int consumer) {
    at.q.wait(x.q);
    if (PACKED && m + M > tile.n_q) zero_rows<M, D>(at.q[x.q], tile.n_q - m, consumer);
}

__device__ __forceinline__ void await_o(const Shared &at, const Stages &x, const Tile &tile, int m, int consumer) {
    at.o.wait(x.o);
    if (PACKED && m + M > tile.n_q) zero_rows<M, E>(at.o[x.o], tile.n_q - m, consumer);
}

template <int SIZE>
__device__ __forceinline__ void await_keys(u32 x, u32 full, int parity, const Tile &tile, int consumer) {
    mbarrier_wait(full, parity);
    if (PACKED && tile.n0 + N > tile.n_kv) zero_rows<N, SIZE>(x, tile.n_kv - tile.n0, consumer);
}

// Starts y = x z^T over SIZE columns, of which the first KEPT of x are in registers, as `keep` has loaded them.
template <int SIZE, int KEPT>
__device__ __forceinline__ void start(float (&y)[S], u32 (&kept)[KEPT / 4 + !KEPT], u32 x, u32 z) {
    const u32 a = (u32)descriptor(x, 16), b = (u32)descriptor(z, 16);       // sums of 32 bits move them
#pragma unroll
    for (int d = 0; d < SIZE / 16; d++) {
        const int at = (d / 4 * PANEL + d % 4 * 32) / 16;
        const u64 of_x = (u64)(a + at) | descriptor(0, 0), of_z = (u64)(b + at) | descriptor(0, 0);
        if (16 * d < KEPT) wgmma_over_columns(y, kept + 4 * d, of_z, d > 0);
        else wgmma(y, of_x, of_z, d > 0);
    }
    wgmma_commit();
}

template <int KEPT>
__device__ __forceinline__ void keep(u32 (&kept)[KEPT / 4 + !KEPT], u32 from) {
#pragma unroll
    for (int d = 0; d < KEPT / 16; d++)
        load_rows_of(reinterpret_cast<u32 (&)[4]>(kept[4 * d]), from + d / 4 * PANEL, d % 4 * 2, threadIdx.x % 128 / 32);
}

// Starts a piece of dq = ds k.
__device__ __forceinline__ void start_dq(float (&dq)[DQ], const Shared &at, int piece) {
    const u64 x = descriptor(at.ds, 16), y = descriptor(at.k + piece * N * 128, N * 128);
#pragma unroll
    for (int i = 0; i < N / 16; i++) wgmma_transposed(dq, x + i * 128, y + i * 128, i > 0);
    wgmma_commit();
}

// Lane by lane, 16 bytes at a time.
__device__ __forceinline__ uint4 *handed(char *shared, const Shared &at) {
    return reinterpret_cast<uint4 *>(shared + (at.p - at.k)) + threadIdx.x % 128;
}

__device__ __forceinline__ float value(u32 x, int i) {
    if (BF16) return i ? high(x) : low(x);
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"((unsigned short)(i ? x >> 16 : x & 0xffff)));
    return y;
}

// p becomes ds.
__device__ __forceinline__ void gradients(u32 (&p)[P], const float (&dp)[S], const float *delta) {
#pragma unroll
    for (int j = 0; j < M / 8; j++) {
        const float2 of = reinterpret_cast<const float2 *>(delta)[4 * j + threadIdx.x % 4];
#pragma unroll
        for (int r = 0; r < 2; r++) {
            u32 &x = p[2 * j + r];
            const int i = 4 * j + 2 * r;
            x = pack(value(x, 0) * (dp[i] - of.x), value(x, 1) * (dp[i + 1] - of.y));
        }
    }
}

// ------------------------------------------------------------------------------------------------- consumers

// All query tiles. Products that run at the same time as the code after them are named behind it.
__device__ __forceinline__ void walk_queries(float (&dv)[E / 2], Stages &x, int parity, const Args &a, const Shared &at,
                                             const Tile &tile, char *shared) {
    const bool reports = threadIdx.x % 32 == 0;
    // queries from which on, and up to which, no mask is needed
    const int all_from = tile.n0 + N > tile.n_kv ? 0x7fffffff : RIGHT ? tile.n0 + N - 1 - tile.shift - a.right : 0;
    const int all_to = tile.n0 - tile.shift + a.left - M + 1;
    Walk walk(a, tile);
    float s[S];
    u32 p[P], kept[KEEP_K / 4 + !KEEP_K];
    await_keys<D>(at.k, at.k_full, parity, tile, FIRST);
    keep<KEEP_K>(kept, at.k);
    await_q(at, x, tile, walk.m, FIRST);
    fresh(s);
    pin(dv);
    pin(kept);
    wgmma_fence();
    start<D, KEEP_K>(s, kept, at.k, at.q[x.q]);
    wgmma_wait<0>();
    pin(s);
    pin(kept);
    while (walk.left > 0) {
        const int m = walk.m;
        const float *rows = rows_of(shared, at, x.q.stage);
        const Queries see(a, tile, tile.n0);
        if (m < all_from || (LEFT && m > all_to)) weights<true>(s, p, rows, see, m, a.factor, a.inner);
        else weights<false>(s, p, rows, see, m, a.factor, a.inner);
#pragma unroll
        for (int i = 0; i < P; i += 4) {
            u32 y[4];
#pragma unroll
            for (int j = 0; j < 4; j++) y[j] = SOFTCAP ? pack(s[2 * (i + j)], s[2 * (i + j) + 1]) : p[i + j];
            handed(shared, at)[i * 32] = make_uint4(y[0], y[1], y[2], y[3]);
        }
        named_barrier_arrive<256>(WEIGHTS);

        await_o(at, x, tile, m, FIRST);
        pin(p);
        pin(dv);
        wgmma_fence();
        start_over_rows<M>(dv, p, at.o[x.o], true);
        if (reports) at.q.release(x.q);
        walk.next(a);
        x.q.next();
        if (walk.left > 0) await_q(at, x, tile, walk.m, FIRST);             // dv
        fresh(s);
        pin(kept);
        wgmma_fence();
        start<D, KEEP_K>(s, kept, at.k, at.q[x.q]);                    // beyond the last tile: of no use
        wgmma_wait<1>();
        pin(p);
        pin(dv);
        if (reports) at.o.release(x.o);
        x.o.next();
        named_barrier_sync<256>(GRADIENTS);                                 // s
#pragma unroll
        for (int i = 0; i < pieces(FIRST); i++) {
            float dq[DQ];
            fresh(dq);
            wgmma_fence();
            start_dq(dq, at, i);
            named_barrier_sync<160>(EMPTY + i);
            wgmma_wait<0>();
            pin(dq);
            pin(s);
            pin(kept);
            stage_dq(dq, at.dq, i);
        }
    }
    if (reports) mbarrier_arrive(at.k_empty);
}

__device__ __forceinline__ void walk_queries_second(float (&dk)[D / 2], Stages &x, int parity, const Args &a,
                                                    const Shared &at, const Tile &tile, char *shared) {
    const bool reports = threadIdx.x % 32 == 0;
    u32 kept[KEEP_V / 4 + !KEEP_V];
    await_keys<E>(at.v, at.v_full, parity, tile, SECOND);
    keep<KEEP_V>(kept, at.v);
    await_keys<D>(at.k, at.k_full, parity, tile, SECOND);
    Walk walk(a, tile);
    while (walk.left > 0) {
        const int m = walk.m;
        float dp[S];
        u32 ds[P];
        await_o(at, x, tile, m, SECOND);
        fresh(dp);
        pin(kept);
        wgmma_fence();
        start<E, KEEP_V>(dp, kept, at.v, at.o[x.o]);
        await_q(at, x, tile, m, SECOND);
        named_barrier_sync<256>(WEIGHTS);                                   // dp
#pragma unroll
        for (int i = 0; i < P; i += 4) {
            const uint4 y = handed(shared, at)[i * 32];
            ds[i] = y.x, ds[i + 1] = y.y, ds[i + 2] = y.z, ds[i + 3] = y.w;
        }
        wgmma_wait<0>();
        pin(dp);
        pin(kept);
        if (reports) at.o.release(x.o);
        x.o.next();
        gradients(ds, dp, rows_of(shared, at, x.q.stage) + M);
        store_ds(ds, at.ds, 0);
        named_barrier_arrive<256>(GRADIENTS);
        named_barrier_sync<128>(OWN + SECOND);

        walk.next(a);
        if (walk.left == 0 && reports) mbarrier_arrive(at.v_empty);
        float dq[DQ];
        fresh(dq);
        pin(ds);
        pin(dk);
        wgmma_fence();
        start_dq(dq, at, OF_FIRST);
        start_over_rows<M>(dk, ds, at.q[x.q], true);
        named_barrier_sync<160>(EMPTY + OF_FIRST);
        wgmma_wait<1>();
        pin(dq);
        stage_dq(dq, at.dq, OF_FIRST);                                      // dk
        fresh(dq);
        wgmma_fence();
        start_dq(dq, at, OF_FIRST + 1);
        wgmma_wait<1>();
        pin(ds);
        pin(dk);
        if (reports) at.q.release(x.q);
        x.q.next();
        named_barrier_sync<160>(EMPTY + OF_FIRST + 1);
        wgmma_wait<0>();
        pin(dq);
        stage_dq(dq, at.dq, OF_FIRST + 1);
    }
    if (reports) mbarrier_arrive(at.k_empty);
}

// dv (the first consumer) or dk of a tile of keys.
template <int CONSUMER>
__device__ __forceinline__ void consume(Stages &x, int parity, const Args &a, const Shared &at, const Tile &tile,
                                        char *shared) {
    if (tile.n0 >= tile.n_kv) return;
    constexpr int COUNT = (CONSUMER == FIRST ? E : D) / 2;
    float y[COUNT];
#pragma unroll
    for (int i = 0; i < COUNT; i++) y[i] = 0.0f;
    const int key = tile.n0 + threadIdx.x % 128 / 32 * 16, b = tile.head / a.h, h = tile.head % a.h;
    const long long row = tile.begin_k + key;
    if constexpr (CONSUMER == FIRST) {
        if (tile.count > 0) walk_queries(y, x, parity, a, at, tile, shared);
        store(y, a.dv + b * a.dv_strides.b + h * a.dv_strides.h + row * a.dv_strides.n, a.dv_strides.n, 1.0f,
              tile.n_kv - key);
    } else {
        if (tile.count > 0) walk_queries_second(y, x, parity, a, at, tile, shared);
        store(y, a.dk + b * a.dk_strides.b + h * a.dk_strides.h + row * a.dk_strides.n, a.dk_strides.n, a.scale,
              tile.n_kv - key);
    }
}

template <int CONSUMER>
__device__ __forceinline__ void consume_all(const Args &a, const Shared &at, char *shared) {
    Stages stages;
    Schedule().each(a, at, shared, [&](const Told &told) {
        if (told.tile >= a.lag) convert_dq(a, Tile(a, told.tile - a.lag), CONSUMER);
        // by a shuffle addresses lie in uniform registers: else they are moved there for every query tile
        const Shared here(__shfl_sync(~0u, at.k, 0));
        if (told.tile < a.works) consume<CONSUMER>(stages, told.loaded & 1, a, here, Tile(a, told.tile), shared);
    });
}

template <int ADDER>
__device__ __forceinline__ void add_all(const Args &a, const Shared &at, char *shared) {
    Schedule().each(a, at, shared, [&](const Told &told) {
        if (told.tile < a.works) add_dq(a, at, Tile(a, told.tile), ADDER);
    });
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) flash_backward_wide_kernel(const __grid_constant__ Args a) {
    extern __shared__ __align__(1024) char shared[];
    const Shared at((u32)__cvta_generic_to_shared(shared));
    if (threadIdx.x == 0) at.init_barriers();
    __syncthreads();
    wait_for_previous_kernel();
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
    if (warp < 4) {
        give_registers<OTHERS>();
        if (threadIdx.x == 0) produce(a, at, shared);
        else if (warp == 1) add_all<0>(a, at, shared);
        else if (warp == 2) add_all<1>(a, at, shared);
        else if (warp == 3) add_all<2>(a, at, shared);
    } else {
        take_registers<CONSUMERS>();
        if (warp < 8) consume_all<FIRST>(a, at, shared);
        else consume_all<SECOND>(a, at, shared);
    }
}
