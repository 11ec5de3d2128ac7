// Puts together what blocks of cuda_sm90.cu have of one row's keys each (SPLIT): sums, their maxima m and denominators l.
//
// A block owns one row. E / 4 threads read four sums each of one part, so that PARTS parts are read side by side; what they
// add up is added in a fixed order.
//
// The compiler defines VALUE_DIM, BF16 and SINKS (1: fp32, 2: as q).

#include "sm90.cuh"

#define INFINITY_ __int_as_float(0x7f800000)

constexpr int E = VALUE_DIM, THREADS = 128;
constexpr int LANES = E / 4, PARTS = THREADS / LANES;
constexpr int MAX_SPLITS = 264;

struct Args {
    const float4 *sums;                 // (splits, heads, N, E)
    const float2 *found;                // m, in base 2, and l (splits, heads, N)
    char *o;
    float *lse;                         // or null
    const char *sinks;
    long long o_b, o_h, o_n;            // strides in bytes
    int heads, h, n, splits;            // B * H, H
};

extern "C" __global__ void __launch_bounds__(THREADS)
flash_merge_kernel(const __grid_constant__ Args a) {
    extern __shared__ __align__(16) char shared[];
    float *weights = reinterpret_cast<float *>(shared);           // of the parts
    float4 *added = reinterpret_cast<float4 *>(shared + 4 * MAX_SPLITS);
    const int head = blockIdx.y + blockIdx.z * a.h, position = blockIdx.x;
    const int lane = threadIdx.x % LANES, part = threadIdx.x / LANES;
    const long long step = (long long)a.heads * a.n, row = (long long)head * a.n + position;
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    asm volatile("griddepcontrol.wait;" ::: "memory");

    // what all parts have in common, found by every warp for itself
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
    for (int i = part; i < a.splits; i += PARTS) {
        const float4 x = a.sums[(i * step + row) * LANES + lane];
        const float weight = weights[i];
        y.x += weight * x.x;
        y.y += weight * x.y;
        y.z += weight * x.z;
        y.w += weight * x.w;
    }
    added[threadIdx.x] = y;
    __syncthreads();
    if (part == 0) {
        const float share = 1.0f / (l == 0.0f ? 1.0f : l);
#pragma unroll
        for (int i = 1; i < PARTS; i++) {
            const float4 x = added[i * LANES + lane];
            y.x += x.x;
            y.y += x.y;
            y.z += x.z;
            y.w += x.w;
        }
        char *to = a.o + blockIdx.z * a.o_b + blockIdx.y * a.o_h + position * a.o_n + lane * 8;
        *reinterpret_cast<uint2 *>(to) = make_uint2(pack(y.x * share, y.y * share), pack(y.z * share, y.w * share));
    }
    if (a.lse && threadIdx.x == 0) a.lse[row] = (m + __log2f(l)) * 0.6931471805599453f;
}
