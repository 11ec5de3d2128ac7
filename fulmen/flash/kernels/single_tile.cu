// Softmax attention of few keys, forward, for Hopper (sm_90a): all keys of a tile are resident in shared memory.
//
// A block is one warpgroup. It owns 64 queries of one head and multiplies them (wgmma) with BLOCK_N keys at a time, PARTS
// times. All threads start by requesting everything with cp.async, in the order in which it is needed: q, then k and v of
// each part. Then, part by part:
//
//     wait for k; s = q k^T; softmax of s; wait for v; o += p v
//
// A call of this size is over when its memory has come and gone: there is no producer and no ring. Several blocks share an
// SM, and while one computes, the memory of others arrives.
//
// The compiler defines HEAD_DIM (D = E), BLOCK_N, PARTS, BLOCKS_PER_SM, BF16, CAUSAL, PACK_GQA.

#include "cuda/include/sm90.cuh"
#include "cuda/include/cp_async.cuh"
#include "cuda/include/softmax.cuh"
#include "cuda/include/mask.cuh"
#include "cuda/include/pack_gqa.cuh"
#include "cuda/include/tile_scheduler.cuh"

constexpr int D = HEAD_DIM;
constexpr int THREADS = 128, ROWS = 64;
constexpr int UNITS = D / 8;            // of 16 bytes, in a row
constexpr int TILE_BYTES = BLOCK_N * D * 2;
constexpr int S = BLOCK_N / 2, O = D / 2, P = BLOCK_N / 4;  // registers
static_assert(D % 64 == 0 && BLOCK_N % 16 == 0, "whole products");

// --------------------------------------------------------------------------------------------------- copies

constexpr int STEP = THREADS / UNITS;   // a thread copies one unit of every STEP-th row
static_assert(STEP % 8 == 0, "a thread's units lie one below the other");

// Where the first of a thread's units lies in a tile of COUNT rows.
template <int COUNT>
__device__ __forceinline__ u32 first_unit(u32 tile) {
    const int row = threadIdx.x / UNITS, unit = threadIdx.x % UNITS;
    return tile + unit / 8 * COUNT * 128 + row * 128 + ((unit % 8 ^ row % 8) << 4);
}

// The queries of a block, from position m0 on; those beyond the end are zero.
__device__ __forceinline__ void fetch_queries(const Args &a, u32 tile, const char *head, int m0) {
    const u32 to = first_unit<ROWS>(tile);
#pragma unroll
    for (int i = 0; i < ROWS / STEP; i++) {
        const int r = threadIdx.x / UNITS + i * STEP, position = m0 + positions(a, r);
        const char *from = head + position * a.q_strides.n + head_of_row(a, r) * a.q_strides.h;
        cp_async(to + i * STEP * 128, from + threadIdx.x % UNITS * 16, position < a.n_q);
    }
    cp_async_commit();
}

// The rows of one head of k or v on their way to shared memory, BLOCK_N at a time.
struct Stream {
    const char *from;
    long long step;
    int left;                           // rows until `end`, from which on all is zero

    __device__ __forceinline__ Stream(const char *head, long long stride, int end)
        : from(head + (int)threadIdx.x / UNITS * stride + threadIdx.x % UNITS * 16), step(STEP * stride),
          left(end - (int)threadIdx.x / UNITS) {}

    __device__ __forceinline__ void fetch(u32 tile) {
        static_assert(BLOCK_N % STEP == 0, "whole rounds");
        const u32 to = first_unit<BLOCK_N>(tile);
#pragma unroll
        for (int i = 0; i < BLOCK_N / STEP; i++) {
            cp_async(to + i * STEP * 128, from, left > 0);
            from += step;
            left -= STEP;
        }
        cp_async_commit();
    }
};

// Waits until the copies of all threads have arrived, but for the last PENDING groups of each, for wgmma to see.
template <int PENDING>
__device__ __forceinline__ void await_copies() {
    cp_async_wait<PENDING>();
    fence_async();
    __syncthreads();
}

// ------------------------------------------------------------------------------------------------- the keys

// What a warpgroup keeps of its queries.
struct Rows {
    Softmax softmax;
    float o[O];
    Keys seen;
    int all_see;                        // the last key that all rows of the warp see
};

// The parts from PART on, as far as there are keys to see.
template <int PART>
__device__ __forceinline__ void attend(Rows &x, u32 q, u32 keys, int end, float factor) {
    if (PART * BLOCK_N >= end) return;
    const u32 k = keys + 2 * PART * TILE_BYTES, v = k + TILE_BYTES;
    float s[S];
    u32 p[P];
    await_copies<2 * (PARTS - PART) - 1>();
    pin(s);
    wgmma_fence();
    start_over_columns<D, BLOCK_N>(s, q, k);
    wgmma_wait<0>();
    pin(s);
    if (PART * BLOCK_N + BLOCK_N - 1 > x.all_see) mask<false>(s, PART * BLOCK_N, x.seen);
    float alpha[2];
    x.softmax.step<PART == 0, true>(s, alpha, factor);
    if (PART) rescale(x.o, alpha);
#pragma unroll
    for (int i = 0; i < P; i++) p[i] = pack(s[2 * i], s[2 * i + 1]);
    await_copies<2 * (PARTS - PART) - 2>();
    pin(x.o);
    pin(p);
    wgmma_fence();
    start_over_rows<BLOCK_N>(x.o, p, v, true);
    wgmma_wait<0>();
    pin(x.o);
    pin(p);
    if constexpr (PART + 1 < PARTS) attend<PART + 1>(x, q, keys, end, factor);
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
flash_single_tile_forward_kernel(const __grid_constant__ Args a) {
    extern __shared__ __align__(1024) char shared[];
    // who am I
    const int tile = tile_of_grid<CAUSAL>(), h = blockIdx.y, b = blockIdx.z;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    const int m0 = tile * positions(a, ROWS);  // its first position
    const int end = end_of_keys<CAUSAL>(a.n_kv, m0 + positions(a, ROWS) + a.shift);
    const int h_q = query_head(a, h), h_kv = kv_head(a, h);
    const u32 q = (u32)__cvta_generic_to_shared(shared), keys = q + ROWS * D * 2;

    wait_for_previous_kernel();
    fetch_queries(a, q, a.q + b * a.q_strides.b + h_q * a.q_strides.h, m0);
    Stream k(a.k + b * a.k_strides.b + h_kv * a.k_strides.h, a.k_strides.n, end);
    Stream v(a.v + b * a.v_strides.b + h_kv * a.v_strides.h, a.v_strides.n, end);
#pragma unroll
    for (int i = 0; i < PARTS; i++) {
        k.fetch(keys + 2 * i * TILE_BYTES);
        v.fetch(keys + (2 * i + 1) * TILE_BYTES);
    }

    Rows x;
    const int last = a.n_kv - 1;
    x.softmax.init();
#pragma unroll
    for (int r = 0; r < 2; r++)
        x.seen.last[r] = last_key<CAUSAL>(last, m0 + positions(a, 16 * warp + g + 8 * r) + a.shift);
    x.all_see = last_key<CAUSAL>(last, m0 + positions(a, 16 * warp) + a.shift);
#pragma unroll
    for (int i = 0; i < O; i++) x.o[i] = 0.0f;
    attend<0>(x, q, keys, end, a.factor);
    cp_async_wait<0>();                 // for keys that no row sees

    // epilogue: rows go out from registers
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int row = 16 * warp + g + 8 * r, position = m0 + positions(a, row), head = h_q + head_of_row(a, row);
        char *out = a.o + b * a.o_strides.b + head * a.o_strides.h + position * a.o_strides.n;
        const float l = quad_sum(x.softmax.l[r]), share = 1.0f / divisor(l);
        const bool there = position < a.n_q;
        #pragma unroll
        for (int c = 0; c < UNITS; c += 4) {
            u32 y[4];
#pragma unroll
            for (int i = 0; i < 4; i++)
                y[i] = pack(x.o[4 * (c + i) + 2 * r] * share, x.o[4 * (c + i) + 2 * r + 1] * share);
            transpose(y);
            if (there) *reinterpret_cast<uint4 *>(out + (c + t) * 16) = make_uint4(y[0], y[1], y[2], y[3]);
        }
        if (a.lse && t == 0 && there)
            a.lse[((long long)b * gridDim.y * (PACK_GQA ? a.group : 1) + head) * a.n_q + position] =
                log_sum_exp(x.softmax.m[r] * a.factor, l);
    }
}
