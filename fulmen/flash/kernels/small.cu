// Softmax attention of short sequences, forward, from compute capability 8.0 on: mma.sync, ldmatrix, cp.async.
//
// A block owns 16 * WARPS_M queries of one head and walks the keys they see, BLOCK_N at a time, through a ring of STAGES
// stages in shared memory. All threads copy (cp.async) and all warps multiply. Every stage is requested before anything
// is computed: a call of this size is over when its memory has come and gone. Then, block of keys by block of keys:
//
//     wait for k and v; request the next block into the stage that is free; s = q k^T; softmax of s; o += p v
//
// SINGLE_BLOCK (STAGES = 1): all keys are one block, k and v are waited for separately, and nothing is rescaled.
//
// Warp (i, j) owns 16 queries and, of every BLOCK_N keys, the j-th of WARPS_N parts: few queries on a large GPU finish
// sooner so. Its m, l and o stay in registers, and where WARPS_N > 1 the warps of a row add theirs up at the end, in a
// fixed order.
//
// Rows lie in shared memory in units of 16 bytes, unit c of row r at c ^ (r % 8): eight rows at one c are in different
// banks. The fragments of m16n8k16, with g = lane / 4 and t = lane % 4: A holds rows g, g + 8 at columns 2t, 2t + 8
// (two each), B column g at rows 2t, 2t + 8, C rows g, g + 8 at columns 2t. So C of s = q k^T is A of p v as it is.
//
// The compiler defines HEAD_DIM (D = E), WARPS_M, WARPS_N, BLOCK_N, STAGES, BLOCKS_PER_SM, BF16, CAUSAL.

#define ORDERED                         // exponentials and conversions in any order

#include "cuda/include/cp_async.cuh"
#include "cuda/include/softmax.cuh"
#include "cuda/include/mask.cuh"
#include "cuda/include/tile_scheduler.cuh"

constexpr int D = HEAD_DIM;
constexpr int WARPS = WARPS_M * WARPS_N;
constexpr int THREADS = 32 * WARPS;
constexpr int ROWS = 16 * WARPS_M;
constexpr int UNITS = D / 8;            // of 16 bytes, in a row
constexpr int KEYS = BLOCK_N / WARPS_N; // a warp's share of a block of keys
constexpr int ROW_BYTES = 2 * D;
constexpr int TILE_BYTES = BLOCK_N * ROW_BYTES;
constexpr int SUM_ROW = D + 8;          // floats; rows of sums, apart so that banks differ
constexpr bool SINGLE_BLOCK = STAGES == 1;
static_assert(KEYS % 16 == 0, "a warp takes 16 keys at a time");
static_assert(WARPS_N == 1 || 4 * WARPS * 16 * (SUM_ROW + 2) <= 2 * STAGES * TILE_BYTES, "sums fit where k, v lay");

__device__ __forceinline__ void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
#if BF16
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
#else
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
#endif
                 "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void load_matrices(u32 (&x)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(address) : "memory");
}

__device__ __forceinline__ void load_transposed(u32 (&x)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(address) : "memory");
}

// Byte of unit c in row r of a tile.
__device__ __forceinline__ u32 swizzled(int r, int c) { return r * ROW_BYTES + ((c ^ (r & 7)) << 4); }

// The rows of one head on their way to shared memory, in order; a thread copies one unit of every STEP-th row.
struct Stream {
    static constexpr int STEP = THREADS / UNITS;
    const char *from;
    long long step;
    int left;                           // rows to the end of the tensor, beyond which all is zero

    __device__ __forceinline__ Stream(const char *head, long long stride, int first, int end)
        : from(head + (first + (int)threadIdx.x / UNITS) * stride + threadIdx.x % UNITS * 16), step(STEP * stride),
          left(end - first - (int)threadIdx.x / UNITS) {}

    template <int COUNT>
    __device__ __forceinline__ void fetch(u32 tile) {
        static_assert(STEP % 8 == 0 && COUNT % STEP == 0, "a thread's units lie one below the other");
        tile += swizzled(threadIdx.x / UNITS, threadIdx.x % UNITS);
#pragma unroll
        for (int i = 0; i < COUNT / STEP; i++) {
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                         :: "r"(tile + i * STEP * ROW_BYTES), "l"(from), "r"(left > 0 ? 16 : 0) : "memory");
            from += step;
            left -= STEP;
        }
    }
};

// What one warp keeps of its 16 queries.
struct Rows {
    Softmax softmax;
    float o[D / 8][4];
};

// The weights of KEYS keys from `key` on, whose rows in shared memory begin at `k`; o is rescaled to them.
__device__ __forceinline__ void weigh(Rows &x, float (&s)[KEYS / 8][4], u32 (&q)[D / 16][4], u32 q_rows, u32 k, int key,
                                      int limit0, int limit1, bool edge, float factor) {
    const int lane = threadIdx.x % 32, in8 = lane % 8, low = lane / 8 % 2, high = lane / 16;
#pragma unroll
    for (int j = 0; j < KEYS / 8; j++) s[j][0] = s[j][1] = s[j][2] = s[j][3] = 0.0f;
#pragma unroll
    for (int d = 0; d < D / 16; d++) {
        if (SINGLE_BLOCK) load_matrices(q[d], q_rows + swizzled(lane % 16, 2 * d + lane / 16));  // which saves registers
#pragma unroll
        for (int j = 0; j < KEYS / 16; j++) {
            u32 b[4];                   // keys 0-7 at d 0-7, 8-15; keys 8-15 the same
            load_matrices(b, k + swizzled(16 * j + 8 * high + in8, 2 * d + low));
            mma(s[2 * j], q[d], b[0], b[1]);
            mma(s[2 * j + 1], q[d], b[2], b[3]);
        }
    }

    if (edge) {
#pragma unroll
        for (int j = 0; j < KEYS / 8; j++) {
            int n = key + 8 * j + 2 * (lane % 4);
            if (n > limit0) s[j][0] = -INFINITY_;
            if (n + 1 > limit0) s[j][1] = -INFINITY_;
            if (n > limit1) s[j][2] = -INFINITY_;
            if (n + 1 > limit1) s[j][3] = -INFINITY_;
        }
    }
    float alpha[2];
    x.softmax.step<SINGLE_BLOCK, true>(flat(s), alpha, factor);
    rescale(flat(x.o), alpha);
}

// Adds their values, whose rows begin at `v`, by these weights.
__device__ __forceinline__ void add(Rows &x, const float (&s)[KEYS / 8][4], u32 v) {
    const int lane = threadIdx.x % 32, in8 = lane % 8, low = lane / 8 % 2, high = lane / 16;
#pragma unroll
    for (int j = 0; j < KEYS / 16; j++) {
        u32 p[4] = {pack(s[2 * j][0], s[2 * j][1]), pack(s[2 * j][2], s[2 * j][3]),
                    pack(s[2 * j + 1][0], s[2 * j + 1][1]), pack(s[2 * j + 1][2], s[2 * j + 1][3])};
#pragma unroll
        for (int e = 0; e < D / 16; e++) {
            u32 b[4];                   // keys 0-7, 8-15 at e 0-7; at e 8-15 the same
            load_transposed(b, v + swizzled(16 * j + 8 * low + in8, 2 * e + high));
            mma(x.o[2 * e], p, b[0], b[1]);
            mma(x.o[2 * e + 1], p, b[2], b[3]);
        }
    }
}

// The warps of a row exchange m and l; what each adds to the output is left in `sums`, row by row, WARPS_N addends each.
__device__ __forceinline__ void join(Rows &x, float *sums, float *heads, int warp_m, int warp_n, float factor) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    float *mine = heads + (warp_m * WARPS_N + warp_n) * 32;
    if (t == 0)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            mine[2 * (g + 8 * i)] = x.softmax.m[i];
            mine[2 * (g + 8 * i) + 1] = x.softmax.l[i];
        }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 2; i++) {
        float m = -INFINITY_, l = 0.0f;
#pragma unroll
        for (int j = 0; j < WARPS_N; j++) m = fmaxf(m, heads[(warp_m * WARPS_N + j) * 32 + 2 * (g + 8 * i)]);
        float pivot = m == -INFINITY_ ? 0.0f : m * factor;
#pragma unroll
        for (int j = 0; j < WARPS_N; j++) {
            const float *part = heads + (warp_m * WARPS_N + j) * 32 + 2 * (g + 8 * i);
            l += part[1] * exp2_(part[0] * factor - pivot);
        }
        float share = exp2_(x.softmax.m[i] * factor - pivot) / divisor(l);
        float *row = sums + ((warp_m * WARPS_N + warp_n) * 16 + g + 8 * i) * SUM_ROW + 2 * t;
#pragma unroll
        for (int e = 0; e < D / 8; e++)
            *reinterpret_cast<float2 *>(row + 8 * e) = make_float2(x.o[e][2 * i] * share, x.o[e][2 * i + 1] * share);
        x.softmax.m[i] = m;
        x.softmax.l[i] = l;
    }
    __syncthreads();
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
flash_small_forward_kernel(const __grid_constant__ Args a) {
    extern __shared__ __align__(128) char shared[];
    // who am I
    const int tile = tile_of_grid<CAUSAL>(), h = blockIdx.y, b = blockIdx.z;
    const int warp_m = threadIdx.x / 32 / WARPS_N, warp_n = threadIdx.x / 32 % WARPS_N;
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int m0 = tile * ROWS, row = m0 + 16 * warp_m + g;
    const int end = end_of_keys<CAUSAL>(a.n_kv, m0 + ROWS + a.shift);
    const int blocks = SINGLE_BLOCK ? end > 0 : (end + BLOCK_N - 1) / BLOCK_N;
    const u32 q_tile = (u32)__cvta_generic_to_shared(shared), ring = q_tile + ROWS * ROW_BYTES;

    wait_for_previous_kernel();
    Stream(a.q + b * a.q_strides.b + h * a.q_strides.h, a.q_strides.n, m0, a.n_q).fetch<ROWS>(q_tile);
    Stream k(a.k + b * a.k_strides.b + h / a.group * a.k_strides.h, a.k_strides.n, 0, a.n_kv);
    Stream v(a.v + b * a.v_strides.b + h / a.group * a.v_strides.h, a.v_strides.n, 0, a.n_kv);
#pragma unroll
    for (int i = 0; i < STAGES; i++) {
        if (i < blocks) {
            k.fetch<BLOCK_N>(ring + 2 * i * TILE_BYTES);
            if (SINGLE_BLOCK) cp_async_commit();         // what is next to wait for is waited for by itself
            v.fetch<BLOCK_N>(ring + (2 * i + 1) * TILE_BYTES);
        }
        cp_async_commit();
    }

    // what stays resident
    Rows x;
    u32 q[D / 16][4];
    x.softmax.init();
#pragma unroll
    for (int e = 0; e < D / 8; e++) x.o[e][0] = x.o[e][1] = x.o[e][2] = x.o[e][3] = 0.0f;
    const u32 q_rows = q_tile + 16 * warp_m * ROW_BYTES;
    const int last = a.n_kv - 1;
    const int limit0 = last_key<CAUSAL>(last, row + a.shift);
    const int limit1 = last_key<CAUSAL>(last, row + 8 + a.shift);
    const int all_see = last_key<CAUSAL>(last, m0 + 16 * warp_m + a.shift);

    if (!blocks) {                      // outputs go through where q is still on its way to
        cp_async_wait<0>();
        __syncthreads();
    }
    for (int j = 0; j < (SINGLE_BLOCK ? min(blocks, 1) : blocks); j++) {
        if (SINGLE_BLOCK || j == 0) {
            cp_async_wait<(SINGLE_BLOCK ? 1 : STAGES - 1)>();
            __syncthreads();
#pragma unroll
            for (int d = 0; d < D / 16; d++)
                if (!SINGLE_BLOCK) load_matrices(q[d], q_rows + swizzled(lane % 16, 2 * d + lane / 16));
        } else {
            cp_async_wait<(SINGLE_BLOCK ? 0 : STAGES - 2)>();
            __syncthreads();            // all have read the block before, whose stage is filled again
            if (j - 1 + STAGES < blocks) {
                u32 old = ring + 2 * ((j - 1) % STAGES) * TILE_BYTES;
                k.fetch<BLOCK_N>(old);
                v.fetch<BLOCK_N>(old + TILE_BYTES);
            }
            cp_async_commit();
        }
        u32 block = ring + 2 * (j % STAGES) * TILE_BYTES + warp_n * KEYS * ROW_BYTES;
        int key = j * BLOCK_N + warp_n * KEYS;
        float s[KEYS / 8][4];
        weigh(x, s, q, q_rows, block, key, limit0, limit1, key + KEYS - 1 > all_see, a.factor);
        if (SINGLE_BLOCK) {
            cp_async_wait<0>();
            __syncthreads();
        }
        add(x, s, block + TILE_BYTES);
    }
    x.softmax.l[0] = quad_sum(x.softmax.l[0]);
    x.softmax.l[1] = quad_sum(x.softmax.l[1]);

    // epilogue: rows go out in units of 16 bytes
    char *o = a.o + b * a.o_strides.b + h * a.o_strides.h;
    if (WARPS_N > 1) {
        cp_async_wait<0>();
        __syncthreads();
        float *heads = reinterpret_cast<float *>(shared + ROWS * ROW_BYTES), *sums = heads + WARPS * 32;
        join(x, sums, heads, warp_m, warp_n, a.factor);
        for (int unit = threadIdx.x; unit < ROWS * UNITS; unit += THREADS) {
            int r = unit / UNITS, c = unit % UNITS;
            float y[8] = {0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
            for (int j = 0; j < WARPS_N; j++) {
                const float *part = sums + ((r / 16 * WARPS_N + j) * 16 + r % 16) * SUM_ROW + 8 * c;
#pragma unroll
                for (int i = 0; i < 8; i++) y[i] += part[i];
            }
            if (m0 + r < a.n_q)
                *reinterpret_cast<uint4 *>(o + (m0 + r) * a.o_strides.n + c * 16) =
                    make_uint4(pack(y[0], y[1]), pack(y[2], y[3]), pack(y[4], y[5]), pack(y[6], y[7]));
        }
    } else {
        char *rows = shared + 16 * warp_m * ROW_BYTES;  // this warp's queries, which it has read
        __syncwarp();
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float share = 1.0f / divisor(x.softmax.l[i]);
#pragma unroll
            for (int e = 0; e < D / 8; e++)
                *reinterpret_cast<u32 *>(rows + swizzled(g + 8 * i, e) + 4 * t) =
                    pack(x.o[e][2 * i] * share, x.o[e][2 * i + 1] * share);
        }
        __syncwarp();
#pragma unroll
        for (int i = 0; i < 16 * UNITS / 32; i++) {
            int r = (i * 32 + lane) / UNITS, c = (i * 32 + lane) % UNITS, at = m0 + 16 * warp_m + r;
            if (at < a.n_q)
                *reinterpret_cast<uint4 *>(o + at * a.o_strides.n + c * 16) =
                    *reinterpret_cast<const uint4 *>(rows + swizzled(r, c));
        }
    }
    if (a.lse && warp_n == 0 && t == 0)
#pragma unroll
        for (int i = 0; i < 2; i++)
            if (row + 8 * i < a.n_q) {
                long long at = ((long long)b * gridDim.y + h) * a.n_q + row + 8 * i;
                a.lse[at] = log_sum_exp(x.softmax.m[i] * a.factor, x.softmax.l[i]);
            }
}
