// Online softmax in base 2, on the accumulators of a tensor-core product.
//
// Accumulators of wgmma and of mma.m16n8k16 lie alike: with g = lane / 4 and t = lane % 4, element 4 j + i is row
// g + 8 (i / 2) of the warp's 16, column 8 j + 2 t + i % 2. So a lane holds parts of two rows, index 0 and 1 below, and the
// four lanes of a quad share them.

#include "cuda/include/convert.cuh"

__device__ __forceinline__ float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}

__device__ __forceinline__ float quad_sum(float x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}

// 1 - 2 / (e^2x + 1) cancels where x is small.
__device__ __forceinline__ float tanh_(float x) {
    float y;
    asm volatile("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(exp2_(x * 2.885390081777927f) + 1.0f));
    return fabsf(x) < 0.03f ? x - x * x * x * (1.0f / 3.0f) : 1.0f - 2.0f * y;
}

struct Softmax {
    float m[2], l[2];                   // maxima, in units of the logits; sums, of this lane alone until the end

    __device__ __forceinline__ void init() {
        m[0] = m[1] = -INFINITY_;
        l[0] = l[1] = 0.0f;
    }

    // Logits become weights, exp2(factor * (s - m)); what was summed up before must be scaled with alpha.
    // FIRST: nothing came before. BLIND: rows may have seen no key yet.
    template <bool FIRST, bool BLIND, int N>
    __device__ __forceinline__ void step(float (&s)[N], float (&alpha)[2], float factor) {
        float pivot[2];
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float top = m[r];
#pragma unroll
            for (int j = 0; j < N / 4; j++) top = fmaxf(top, fmaxf(s[4 * j + 2 * r], s[4 * j + 2 * r + 1]));
            top = quad_max(top);
            pivot[r] = BLIND && top == -INFINITY_ ? 0.0f : top * factor;
            alpha[r] = FIRST ? 0.0f : exp2_(m[r] * factor - pivot[r]);
            m[r] = top;
            l[r] *= alpha[r];
        }
#pragma unroll
        for (int i = 0; i < N; i++) {
            s[i] = exp2_(s[i] * factor - pivot[i / 2 % 2]);
            l[i / 2 % 2] += s[i];
        }
    }
};

template <int N>
__device__ __forceinline__ void rescale(float (&o)[N], const float (&alpha)[2]) {
#pragma unroll
    for (int i = 0; i < N; i++) o[i] *= alpha[i / 2 % 2];
}

// Accumulators of several mma.m16n8k16, one after the other.
template <int N>
__device__ __forceinline__ float (&flat(float (&x)[N][4]))[4 * N] { return reinterpret_cast<float (&)[4 * N]>(x); }

// What a row is divided by: 1 where it has seen no key.
__device__ __forceinline__ float divisor(float l) { return l == 0.0f ? 1.0f : l; }

// The natural logarithm of a sum l whose maximum m is in base 2.
__device__ __forceinline__ float log_sum_exp(float m, float l) { return (m + __log2f(l)) * LN_2; }

// The sink of a head in base 2; kind 1: fp32, 2: as q.
__device__ __forceinline__ float sink_of(const char *sinks, int h, int kind) {
    if (kind == 1) return reinterpret_cast<const float *>(sinks)[h] * LOG2_E;
    const unsigned short bits = reinterpret_cast<const unsigned short *>(sinks)[h];
    float x = __int_as_float((u32)bits << 16);
    if (!BF16) asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
    return x * LOG2_E;
}
