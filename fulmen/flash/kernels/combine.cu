// Combines the results of a row whose keys were split over several blocks of sm90.cu or latent.cu (SPLIT).
//
// Each split left its sums (not divided yet), their maximum m and denominator l. A block owns one row, up to 128 of its
// columns. Thread (side, lane) reads four columns of the splits side, side + SIDES, ..., eight at a time; the first eight
// are on their way while every warp finds the common maximum and denominator for itself. Lane i of a warp has the weights
// of splits i, i + 32, ... The sums of the sides are added in a fixed order.
//
// The compiler defines VALUE_DIM, SIDES, MAX_SPLITS, BF16 and SINKS (1: fp32, 2: as q).

#include "cuda/include/softmax.cuh"
#include "cuda/include/tile_scheduler.cuh"

constexpr int E = VALUE_DIM, COLUMNS = E < 128 ? E : 128, SLICES = E / COLUMNS;
constexpr int LANES = COLUMNS / 4, THREADS = LANES * SIDES;
constexpr int AHEAD = 8, BATCH = AHEAD * SIDES;     // splits that are read at a time, by a thread and by all
constexpr int HELD = (MAX_SPLITS + 31) / 32;        // weights of a lane
static_assert(E % COLUMNS == 0 && 32 % SIDES == 0, "whole slices; weights of all sides in one element");

// Splits from `first` on: what this thread reads of them, all before the first use.
__device__ __forceinline__ void load(const Args &a, float4 (&x)[AHEAD], int first, long long step, long long at) {
#pragma unroll
    for (int j = 0; j < AHEAD; j++) {
        const int i = first + threadIdx.x / LANES + j * SIDES;
        x[j] = i < a.splits ? a.sums[i * step + at] : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
#pragma unroll
    for (int j = 0; j < AHEAD; j++) asm volatile("" : "+f"(x[j].x), "+f"(x[j].y), "+f"(x[j].z), "+f"(x[j].w) :: "memory");
}

// Adds the same splits to y; their weights are in `held` of all lanes.
template <int FIRST>
__device__ __forceinline__ void add(float4 &y, const float4 (&x)[AHEAD], const float (&held)[HELD]) {
#pragma unroll
    for (int j = 0; j < AHEAD; j++) {
        const int i = FIRST + j * SIDES;    // of side 0; those of the other sides are in the same element of `held`
        if (i / 32 >= HELD) continue;
        const float weight = __shfl_sync(~0u, held[i / 32 < HELD ? i / 32 : 0], i % 32 + threadIdx.x / LANES);
        if (weight == 0.0f) continue;       // a split without keys has written no sums
        y.x += weight * x[j].x;
        y.y += weight * x[j].y;
        y.z += weight * x[j].z;
        y.w += weight * x[j].w;
    }
}

template <int FIRST>
__device__ __forceinline__ void add_from(const Args &a, float4 &y, const float (&held)[HELD], long long step, long long at) {
    if constexpr (FIRST < MAX_SPLITS && FIRST / 32 < HELD) {
        if (FIRST >= a.splits) return;
        float4 x[AHEAD];
        load(a, x, FIRST, step, at);
        add<FIRST>(y, x, held);
        add_from<FIRST + BATCH>(a, y, held, step, at);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1024 / THREADS)
flash_combine_kernel(const __grid_constant__ Args a) {
    extern __shared__ __align__(16) char shared[];
    float4 *partial = reinterpret_cast<float4 *>(shared);
    const int head = blockIdx.y + blockIdx.z * a.h, position = blockIdx.x / SLICES, slice = blockIdx.x % SLICES;
    const int lane = threadIdx.x % LANES;
    const long long step = (long long)a.heads * a.n, row = (long long)head * a.n + position;
    const long long at = row * (E / 4) + slice * LANES + lane;
    wait_for_previous_kernel();

    float4 x[AHEAD];
    load(a, x, 0, step * (E / 4), at);
    float2 found[HELD];
#pragma unroll
    for (int j = 0; j < HELD; j++) {
        const int i = threadIdx.x % 32 + 32 * j;
        found[j] = i < a.splits ? a.found[i * step + row] : make_float2(-INFINITY_, 0.0f);
    }
    // the maximum and the denominator of all splits
    const float sink = SINKS ? sink_of(a.sinks, blockIdx.y, SINKS) : -INFINITY_;
    float m = sink, l = 0.0f, held[HELD];
#pragma unroll
    for (int j = 0; j < HELD; j++) m = fmaxf(m, found[j].x);
#pragma unroll
    for (int i = 16; i > 0; i /= 2) m = fmaxf(m, __shfl_xor_sync(~0u, m, i));
    const float pivot = m == -INFINITY_ ? 0.0f : m;
#pragma unroll
    for (int j = 0; j < HELD; j++) {
        held[j] = exp2_(found[j].x - pivot);
        l += held[j] * found[j].y;
    }
#pragma unroll
    for (int i = 16; i > 0; i /= 2) l += __shfl_xor_sync(~0u, l, i);
    if (SINKS) l += exp2_(sink - pivot);

    float4 y = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    add<0>(y, x, held);
    add_from<BATCH>(a, y, held, step * (E / 4), at);
    partial[threadIdx.x] = y;
    __syncthreads();
    if (threadIdx.x < LANES) {
        const float share = 1.0f / divisor(l);
#pragma unroll
        for (int i = 1; i < SIDES; i++) {
            const float4 z = partial[i * LANES + lane];
            y.x += z.x;
            y.y += z.y;
            y.z += z.z;
            y.w += z.w;
        }
        char *to = a.o + blockIdx.z * a.o_strides.b + blockIdx.y * a.o_strides.h + position * a.o_strides.n;
        reinterpret_cast<uint2 *>(to)[slice * LANES + lane] =
            make_uint2(pack(y.x * share, y.y * share), pack(y.z * share, y.w * share));
    }
    if (a.lse && slice == 0 && threadIdx.x == 0) a.lse[row] = log_sum_exp(m, l);
}
