// Combines the results of a row whose keys were split over several blocks of sm90.cu (SPLIT).
//
// Each split left its sums (not divided yet), their maximum m and denominator l. A block of this kernel owns one row. Every
// warp finds the common maximum and denominator for itself; warp 0 leaves the weights of the splits in shared memory. Then
// E / 4 threads read four sums each of one split, SIDE_BY_SIDE splits side by side, and the partial sums are added in a
// fixed order.
//
// The compiler defines VALUE_DIM, BF16 and SINKS (1: fp32, 2: as q).

#include "cuda/include/softmax.cuh"
#include "cuda/include/tile_scheduler.cuh"

constexpr int E = VALUE_DIM, THREADS = 128;
constexpr int LANES = E / 4, SIDE_BY_SIDE = THREADS / LANES;
constexpr int MAX_SPLITS = 264;

extern "C" __global__ void __launch_bounds__(THREADS)
flash_combine_kernel(const __grid_constant__ Args a) {
    extern __shared__ __align__(16) char shared[];
    float *weights = reinterpret_cast<float *>(shared);           // of the splits
    float4 *partial = reinterpret_cast<float4 *>(shared + 4 * MAX_SPLITS);
    const int head = blockIdx.y + blockIdx.z * a.h, position = blockIdx.x;
    const int lane = threadIdx.x % LANES, side = threadIdx.x / LANES;
    const long long step = (long long)a.heads * a.n, row = (long long)head * a.n + position;
    wait_for_previous_kernel();

    // the maximum and the denominator of all splits
    const float sink = SINKS ? sink_of(a.sinks, blockIdx.y, SINKS) : -INFINITY_;
    float m = sink;
    for (int i = threadIdx.x % 32; i < a.splits; i += 32) m = fmaxf(m, a.found[i * step + row].x);
#pragma unroll
    for (int i = 16; i > 0; i /= 2) m = fmaxf(m, __shfl_xor_sync(~0u, m, i));
    const float pivot = m == -INFINITY_ ? 0.0f : m;
    float l = 0.0f;
    for (int i = threadIdx.x % 32; i < a.splits; i += 32) {
        const float2 x = a.found[i * step + row];
        const float weight = exp2_(x.x - pivot);
        if (threadIdx.x < 32) weights[i] = weight;
        l += weight * x.y;
    }
#pragma unroll
    for (int i = 16; i > 0; i /= 2) l += __shfl_xor_sync(~0u, l, i);
    if (SINKS) l += exp2_(sink - pivot);
    __syncthreads();

    float4 y = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    for (int i = side; i < a.splits; i += SIDE_BY_SIDE) {
        const float weight = weights[i];
        if (weight == 0.0f) continue;   // a split without keys has written no sums
        const float4 x = a.sums[(i * step + row) * LANES + lane];
        y.x += weight * x.x;
        y.y += weight * x.y;
        y.z += weight * x.z;
        y.w += weight * x.w;
    }
    partial[threadIdx.x] = y;
    __syncthreads();
    if (side == 0) {
        const float share = 1.0f / divisor(l);
#pragma unroll
        for (int i = 1; i < SIDE_BY_SIDE; i++) {
            const float4 x = partial[i * LANES + lane];
            y.x += x.x;
            y.y += x.y;
            y.z += x.z;
            y.w += x.w;
        }
        char *to = a.o + blockIdx.z * a.o_strides.b + blockIdx.y * a.o_strides.h + position * a.o_strides.n + lane * 8;
        *reinterpret_cast<uint2 *>(to) = make_uint2(pack(y.x * share, y.y * share), pack(y.z * share, y.w * share));
    }
    if (a.lse && threadIdx.x == 0) a.lse[row] = log_sum_exp(m, l);
}
