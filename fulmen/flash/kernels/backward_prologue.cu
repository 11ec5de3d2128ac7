// What the backward needs of every query before backward.cu runs. A block owns one slot: BLOCK_M queries of a head.
//
//     rows    lse in base 2, and delta = rowsum(do * o) - dlse, side by side; a row that sees nothing, or is beyond its
//             sequence, has an lse of infinity, so that its weights are 0
//     turns   zeros, and a counter of tiles
//     dq      zeros of queries that see no key; backward.cu writes the others
//     drawn   what this block adds to the gradient of the head's sink (SINKS)
//
// E / 8 lanes share a row, 16 bytes each.
//
// The compiler defines HEAD_DIM, VALUE_DIM, BLOCK_M, BF16, LEFT and RIGHT (whether there is such a limit), PACKED,
// ADDERS (warps of backward.cu that take turns) and SINKS (1: fp32, 2: as q).

#include "cuda/include/softmax.cuh"
#include "cuda/include/packed.cuh"
#include "cuda/include/tile_scheduler.cuh"

constexpr int D = HEAD_DIM, E = VALUE_DIM, M = BLOCK_M, THREADS = 256;
constexpr int LANES = E / 8, AT_ONCE = THREADS / LANES;

__device__ __forceinline__ float value(u32 x, int i) {
    if (BF16) return i ? high(x) : low(x);
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"((unsigned short)(i ? x >> 16 : x & 0xffff)));
    return y;
}

__device__ __forceinline__ float dot(const uint4 &x, const uint4 &y) {
    const u32 a[4] = {x.x, x.y, x.z, x.w}, b[4] = {y.x, y.y, y.z, y.w};
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; i++) sum += value(a[i / 2], i % 2) * value(b[i / 2], i % 2);
    return sum;
}

extern "C" __global__ void __launch_bounds__(THREADS)
flash_backward_prologue_kernel(const __grid_constant__ Args a) {
    extern __shared__ __align__(16) char shared[];
    float *sums = reinterpret_cast<float *>(shared);    // of the warps
    const long long block = blockIdx.x, head = blockIdx.x / a.slots;
    const int slot = blockIdx.x % a.slots, h = head % a.h, b = head / a.h, lane = threadIdx.x % LANES;
    wait_for_previous_kernel();
    int m0 = slot * M, begin = 0, n = a.n_q, n_kv = a.n_kv;
    if (PACKED) {
        const int i = sequence_of_tile(a.cu_q, a.sequences, a.n_q, M, slot);
        begin = offset(a.cu_q, i, a.n_q);
        n = max(0, offset(a.cu_q, i + 1, a.n_q) - begin);
        m0 = first_row(a.cu_q, i, a.n_q, M, slot);
        n_kv = max(0, offset(a.cu_k, i + 1, a.n_kv) - offset(a.cu_k, i, a.n_kv));
    }
    const float sink = SINKS ? sink_of(a.sinks, h, SINKS) : 0.0f;
    float drawn = 0.0f;
    uint4 x[M / AT_ONCE], y[M / AT_ONCE];
#pragma unroll
    for (int i = 0; i < M / AT_ONCE; i++) {
        const int row = m0 + i * AT_ONCE + threadIdx.x / LANES;
        x[i] = y[i] = make_uint4(0, 0, 0, 0);
        if (row < n) {
            const long long at = begin + row;
            x[i] = *reinterpret_cast<const uint4 *>(a.o + b * a.o_strides.b + h * a.o_strides.h + at * a.o_strides.n + lane * 16);
            y[i] = *reinterpret_cast<const uint4 *>(
                a.dout + b * a.dout_strides.b + h * a.dout_strides.h + at * a.dout_strides.n + lane * 16);
        }
    }
    if (threadIdx.x < ADDERS) a.turns[ADDERS * block + threadIdx.x] = 0;
    if (block == 0 && threadIdx.x == 0) *a.counter = 0;
    const int position = m0 + (a.top_left ? 0 : n_kv - n);
    if (n_kv == 0 || (RIGHT && position + M - 1 + a.right < 0) || (LEFT && position - a.left >= n_kv))
        for (int i = threadIdx.x; i < min(M, n - m0) * (D / 8); i += THREADS)
            *reinterpret_cast<uint4 *>(a.dq + b * a.dq_strides.b + h * a.dq_strides.h +
                                       (begin + m0 + i / (D / 8)) * a.dq_strides.n + i % (D / 8) * 16) = make_uint4(0, 0, 0, 0);
#pragma unroll
    for (int i = 0; i < M / AT_ONCE; i++) {
        const int r = i * AT_ONCE + threadIdx.x / LANES, row = m0 + r;
        float delta = dot(x[i], y[i]), lse = INFINITY_;
#pragma unroll
        for (int bit = 1; bit < LANES; bit *= 2) delta += __shfl_xor_sync(~0u, delta, bit);
        if (lane == 0) {
            if (row < n) {
                const long long at = head * a.n_q + begin + row;
                lse = a.lse[at] * LOG2_E;
                if (lse == -INFINITY_) lse = INFINITY_;
                if (a.dlse) delta -= a.dlse[at];
            }
            a.rows[block * 2 * M + r] = lse;
            a.rows[block * 2 * M + M + r] = delta;
            if (SINKS) drawn -= exp2_(sink - lse) * delta;
        }
    }
    if (SINKS) {
#pragma unroll
        for (int bit = 1; bit < 32; bit *= 2) drawn += __shfl_xor_sync(~0u, drawn, bit);
        if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = drawn;
        __syncthreads();
        if (threadIdx.x == 0) {
            for (int i = 1; i < THREADS / 32; i++) drawn += sums[i];
            a.drawn[block] = drawn;
        }
    }
}
