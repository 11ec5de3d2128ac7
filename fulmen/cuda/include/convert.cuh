// Numbers: 16 bits, two to a word, and exponentials in base 2. BF16 chooses bf16 (1, as if undefined) or fp16 (0).

typedef unsigned int u32;
typedef unsigned long long u64;

#define INFINITY_ __int_as_float(0x7f800000)
#define LOG2_E 1.4426950408889634f
#define LN_2 0.6931471805599453f

#ifndef BF16
#define BF16 1
#endif
#if BF16
#define PAIR "bf16x2"
#else
#define PAIR "f16x2"
#endif

#ifndef ORDERED                         // exponentials and conversions stay in the order of the source
#define ORDERED volatile
#endif

__device__ __forceinline__ float exp2_(float x) {
    float y;
    asm ORDERED("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ u32 pack(float low, float high) {
    u32 x;
    asm ORDERED("cvt.rn." PAIR ".f32 %0, %1, %2;" : "=r"(x) : "f"(high), "f"(low));
    return x;
}

// bf16 only.
__device__ __forceinline__ float low(u32 x) { return __int_as_float(x << 16); }
__device__ __forceinline__ float high(u32 x) { return __int_as_float(x & 0xffff0000u); }

// x * (hi + lo), rounded once: hi and lo are a factor in twice the digits of bf16.
__device__ __forceinline__ u32 times(u32 x, u32 hi, u32 lo) {
    u32 y;
    asm("{.reg .b32 rest; mul.rn.bf16x2 rest, %1, %3; fma.rn.bf16x2 %0, %1, %2, rest;}"
        : "=r"(y) : "r"(x), "r"(hi), "r"(lo));
    return y;
}
