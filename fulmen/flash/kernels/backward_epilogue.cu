// dq of backward.cu's fp32 workspace, which lies as the accumulators do. A block owns one slot: BLOCK_M queries of a head.
//
// DETERMINISTIC: of queries that see no key nothing was stored; their turns are 0, and so is their dq.
//
// The compiler defines HEAD_DIM, BLOCK_M, BF16, PACKED and DETERMINISTIC.

#include "cuda/include/sm90.cuh"
#include "cuda/include/packed.cuh"
#include "cuda/include/tile_scheduler.cuh"

constexpr int D = HEAD_DIM, M = BLOCK_M, THREADS = 256;
constexpr int CHUNKS = M * D / 1024;    // of four numbers a thread

extern "C" __global__ void __launch_bounds__(THREADS)
flash_backward_epilogue_kernel(const __grid_constant__ Args a) {
    const long long block = blockIdx.x, head = blockIdx.x / a.slots;
    const int slot = blockIdx.x % a.slots, h = head % a.h, b = head / a.h;
    const int half = threadIdx.x / 128, warp = threadIdx.x % 128 / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    wait_for_previous_kernel();
    int m0 = slot * M, begin = 0, n = a.n;
    if (PACKED) {
        const int i = sequence_of_tile(a.cu, a.sequences, a.n, M, slot);
        begin = offset(a.cu, i, a.n);
        n = max(0, offset(a.cu, i + 1, a.n) - begin);
        m0 = first_row(a.cu, i, a.n, M, slot);
    }
    const bool none = DETERMINISTIC && a.turns[2 * block + half] == 0;
    const float4 *from = reinterpret_cast<const float4 *>(a.sums) + block * (M * D / 4) + half * (M * D / 8) + threadIdx.x % 128;
    const int first = m0 + (M == 64 ? 0 : 64 * half) + 16 * warp + g;
    char *to = a.dq + b * a.dq_strides.b + h * a.dq_strides.h + (M == 64 ? half * D : 0) + t * 16;
#pragma unroll
    for (int c = 0; c < CHUNKS; c += 4) {
        float4 x[4];
#pragma unroll
        for (int i = 0; i < 4; i++) x[i] = none ? make_float4(0, 0, 0, 0) : from[(c + i) * 128];
#pragma unroll
        for (int r = 0; r < 2; r++) {
            u32 y[4];
#pragma unroll
            for (int i = 0; i < 4; i++)
                y[i] = r ? pack(x[i].z * a.scale, x[i].w * a.scale) : pack(x[i].x * a.scale, x[i].y * a.scale);
            transpose(y);
            const int row = first + 8 * r;
            if (row < n)
                *reinterpret_cast<uint4 *>(to + (long long)(begin + row) * a.dq_strides.n + c * 16) =
                    make_uint4(y[0], y[1], y[2], y[3]);
        }
    }
}
