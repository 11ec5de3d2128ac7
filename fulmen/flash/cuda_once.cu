// Softmax attention of few keys, forward, for Hopper (sm_90a): all of them are in shared memory at once.
//
// A block is one warpgroup. It owns 64 queries of one head and multiplies them with BLOCK_N keys at a time (wgmma), PARTS
// times. Everything is asked for before anything is computed, in the order in which it is needed: a call of this size is
// over when its memory has come and gone. Several blocks share an SM, and while one computes others' memory comes.
//
// GROUPED: the query heads that share a head of k and v share a block, too, at fewer positions: row r is position
// r / group, head r % group, and blocks count heads of k and v. There are 2, 4, ... or 64 to a group.
//
// Rows lie in shared memory as sm90.cuh has it, brought there by cp.async; the registers of products are those of
// cuda_sm90.cu.
//
// The compiler defines HEAD_DIM (D = E), BLOCK_N, PARTS, BLOCKS_PER_SM, BF16, CAUSAL, GROUPED.

#include "sm90.cuh"

#define INFINITY_ __int_as_float(0x7f800000)

constexpr int D = HEAD_DIM;
constexpr int THREADS = 128, ROWS = 64;
constexpr int UNITS = D / 8;            // of 16 bytes, in a row
constexpr int TILE_BYTES = BLOCK_N * D * 2;
constexpr int S = BLOCK_N / 2, O = D / 2, P = BLOCK_N / 4;  // registers
static_assert(D % 64 == 0 && BLOCK_N % 16 == 0, "whole products");

struct Args {
    const char *q, *k, *v;
    char *o;
    float *lse;                         // or null
    long long q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, o_b, o_h, o_n;  // strides in bytes
    int group, n_q, n_kv, shift;        // query i stands at position i + shift
    float factor;                       // scale * log2(e)
    int log_group;                      // base 2; GROUPED only
};

// How many positions so many rows are, and which of the group's heads row r is of.
__device__ __forceinline__ int positions(const Args &a, int rows) { return GROUPED ? rows >> a.log_group : rows; }
__device__ __forceinline__ int further(const Args &a, int r) { return GROUPED ? r & (a.group - 1) : 0; }

FROM_SHARED(multiply, 32, 64, "%32", "%33", "%34", "0, 0")
FROM_SHARED(multiply, 40, 80, "%40", "%41", "%42", "0, 0")
FROM_SHARED(multiply, 64, 128, "%64", "%65", "%66", "0, 0")
FROM_REGISTERS(32, 64, "%32, %33, %34, %35", "%36", "%37")
FROM_REGISTERS(64, 128, "%64, %65, %66, %67", "%68", "%69")

// --------------------------------------------------------------------------------------------------- copies

constexpr int STEP = THREADS / UNITS;   // a thread copies one unit of every STEP-th row
static_assert(STEP % 8 == 0, "a thread's units lie one below the other");

__device__ __forceinline__ void copy(u32 to, const char *from, bool there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" :: "r"(to), "l"(from), "r"(there ? 16 : 0) : "memory");
}

// Where the first of a thread's units lies in a tile of COUNT rows.
template <int COUNT>
__device__ __forceinline__ u32 first_unit(u32 tile) {
    const int row = threadIdx.x / UNITS, unit = threadIdx.x % UNITS;
    return tile + unit / 8 * COUNT * 128 + row * 128 + ((unit % 8 ^ row % 8) << 4);
}

__device__ __forceinline__ void close_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// The queries of a block, from position m0 on; those that are not there are zero.
__device__ __forceinline__ void fetch_queries(const Args &a, u32 tile, const char *head, int m0) {
    const u32 to = first_unit<ROWS>(tile);
#pragma unroll
    for (int i = 0; i < ROWS / STEP; i++) {
        const int r = threadIdx.x / UNITS + i * STEP, position = m0 + positions(a, r);
        copy(to + i * STEP * 128, head + position * a.q_n + further(a, r) * a.q_h + threadIdx.x % UNITS * 16,
             position < a.n_q);
    }
    close_copies();
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
            copy(to + i * STEP * 128, from, left > 0);
            from += step;
            left -= STEP;
        }
        close_copies();
    }
};

template <int LEFT>
__device__ __forceinline__ void wait() { asm volatile("cp.async.wait_group %0;" :: "n"(LEFT) : "memory"); }

// Until all threads' copies are there, but for the last LEFT groups of each, for wgmma to see.
template <int LEFT>
__device__ __forceinline__ void await_copies() {
    wait<LEFT>();
    fence_async();
    __syncthreads();
}

// ------------------------------------------------------------------------------------------------- the keys

// What a warpgroup knows of its queries; a lane holds parts of rows g (index 0) and g + 8 (index 1).
struct Rows {
    float m[2], l[2];                   // m in units of q k^T; l is this lane's part until the end
    float o[O];
    int see[2];                         // the last key
    int all_see;                        // the last key that all rows of the warp see
};

// The weights of one part of the keys; what the rows had is scaled to them.
template <int PART>
__device__ __forceinline__ void weigh(Rows &x, float (&s)[S], float factor) {
    const int t = threadIdx.x % 4;
    if (PART * BLOCK_N + BLOCK_N - 1 > x.all_see) {
#pragma unroll
        for (int i = 0; i < S; i++)
            if (PART * BLOCK_N + 8 * (i / 4) + 2 * t + i % 2 > x.see[i / 2 % 2]) s[i] = -INFINITY_;
    }
    float pivot[2], alpha[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float m = x.m[r];
#pragma unroll
        for (int j = 0; j < S / 4; j++) m = fmaxf(m, fmaxf(s[4 * j + 2 * r], s[4 * j + 2 * r + 1]));
        m = fmaxf(m, __shfl_xor_sync(~0u, m, 1));
        m = fmaxf(m, __shfl_xor_sync(~0u, m, 2));
        pivot[r] = m == -INFINITY_ ? 0.0f : m * factor;
        alpha[r] = PART ? exp2_(x.m[r] * factor - pivot[r]) : 0.0f;
        x.m[r] = m;
        x.l[r] *= alpha[r];
    }
#pragma unroll
    for (int i = 0; i < S; i++) {
        s[i] = exp2_(s[i] * factor - pivot[i / 2 % 2]);
        x.l[i / 2 % 2] += s[i];
    }
    if (PART)
#pragma unroll
        for (int i = 0; i < O; i++) x.o[i] *= alpha[i / 2 % 2];
}

// The parts from PART on, as far as there are keys to see.
template <int PART>
__device__ __forceinline__ void attend(Rows &x, u32 q, u32 keys, int end, float factor) {
    if (PART * BLOCK_N >= end) return;
    const u32 k = keys + 2 * PART * TILE_BYTES, v = k + TILE_BYTES;
    float s[S];
    u32 p[P];
    await_copies<2 * (PARTS - PART) - 1>();
    pin(s);
    begin();
    const u64 rows = operand(q, 16), columns = operand(k, 16);
#pragma unroll
    for (int d = 0; d < D / 16; d++)
        multiply(s, rows + (d / 4 * ROWS * 128 + d % 4 * 32) / 16, columns + (d / 4 * BLOCK_N * 128 + d % 4 * 32) / 16, d > 0);
    commit();
    finish<0>();
    pin(s);
    weigh<PART>(x, s, factor);
#pragma unroll
    for (int i = 0; i < P; i++) p[i] = pack(s[2 * i], s[2 * i + 1]);
    await_copies<2 * (PARTS - PART) - 2>();
    pin(x.o);
    pin(p);
    begin();
    const u64 values = operand(v, BLOCK_N * 128);
#pragma unroll
    for (int j = 0; j < BLOCK_N / 16; j++) multiply(x.o, p + 4 * j, values + j * 16 * 128 / 16, 1);
    commit();
    finish<0>();
    pin(x.o);
    pin(p);
    if constexpr (PART + 1 < PARTS) attend<PART + 1>(x, q, keys, end, factor);
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
flash_once_forward_kernel(const __grid_constant__ Args a) {
    extern __shared__ __align__(1024) char shared[];
    // who am I
    const int tile = CAUSAL ? gridDim.x - 1 - blockIdx.x : blockIdx.x, h = blockIdx.y, b = blockIdx.z;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    const int m0 = tile * positions(a, ROWS);  // its first position
    const int end = CAUSAL ? max(0, min(a.n_kv, m0 + positions(a, ROWS) + a.shift)) : a.n_kv;
    const int h_q = GROUPED ? h * a.group : h, h_kv = GROUPED ? h : h / a.group;
    const u32 q = (u32)__cvta_generic_to_shared(shared), keys = q + ROWS * D * 2;

    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    asm volatile("griddepcontrol.wait;" ::: "memory");  // all before this ran beside the launch before us
    fetch_queries(a, q, a.q + b * a.q_b + h_q * a.q_h, m0);
    Stream k(a.k + b * a.k_b + h_kv * a.k_h, a.k_n, end), v(a.v + b * a.v_b + h_kv * a.v_h, a.v_n, end);
#pragma unroll
    for (int i = 0; i < PARTS; i++) {
        k.fetch(keys + 2 * i * TILE_BYTES);
        v.fetch(keys + (2 * i + 1) * TILE_BYTES);
    }

    Rows x;
    const int last = a.n_kv - 1;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        x.m[r] = -INFINITY_;
        x.l[r] = 0.0f;
        x.see[r] = CAUSAL ? min(last, m0 + positions(a, 16 * warp + g + 8 * r) + a.shift) : last;
    }
    x.all_see = CAUSAL ? min(last, m0 + positions(a, 16 * warp) + a.shift) : last;
#pragma unroll
    for (int i = 0; i < O; i++) x.o[i] = 0.0f;
    attend<0>(x, q, keys, end, a.factor);
    wait<0>();                          // for what no row sees

    // epilogue: rows go out from registers in units of 16 bytes
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int row = 16 * warp + g + 8 * r, position = m0 + positions(a, row), head = h_q + further(a, row);
        char *out = a.o + b * a.o_b + head * a.o_h + position * a.o_n;
        float l = x.l[r];
        l += __shfl_xor_sync(~0u, l, 1);
        l += __shfl_xor_sync(~0u, l, 2);
        const float share = 1.0f / (l == 0.0f ? 1.0f : l);
        const bool there = position < a.n_q;
#pragma unroll
        for (int c = 0; c < UNITS; c += 4) {
            u32 y[4];
#pragma unroll
            for (int i = 0; i < 4; i++)
                y[i] = pack(x.o[4 * (c + i) + 2 * r] * share, x.o[4 * (c + i) + 2 * r + 1] * share);
            transpose(y);
            if (there)
                *reinterpret_cast<uint4 *>(out + (c + t) * 16) = make_uint4(y[0], y[1], y[2], y[3]);
        }
        if (a.lse && t == 0 && there)
            a.lse[((long long)b * gridDim.y * (GROUPED ? a.group : 1) + head) * a.n_q + position] =
                (x.m[r] * a.factor + __log2f(l)) * 0.6931471805599453f;
    }
}
