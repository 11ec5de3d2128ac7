// What Hopper (sm_90a) adds: mbarriers, bulk tensor copies (TMA), asynchronous products of a warpgroup (wgmma).
//
// A row of shared memory has 128 bytes in units of 16, unit c of row r at c ^ (r % 8), as TMA's 128-byte swizzle writes
// and wgmma reads it. A panel is 64 columns of 16 bits; wider matrices are several panels.

#include "cuda/include/convert.cuh"

// ------------------------------------------------------------------------------------------------- barriers

__device__ __forceinline__ void mbarrier_init(u32 barrier, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(barrier), "r"(count) : "memory");
}

__device__ __forceinline__ void mbarrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(barrier) : "memory");
}

// On the same barrier of block `rank` of the cluster. Without .release.cluster, which costs a fence of the whole GPU: the
// reads that free a stage are complete when the warp arrives.
__device__ __forceinline__ void mbarrier_arrive_at(u32 barrier, int rank) {
    asm volatile("{.reg .b32 there; mapa.shared::cluster.u32 there, %0, %1;\n"
                 "mbarrier.arrive.shared::cluster.b64 _, [there];}" :: "r"(barrier), "r"(rank) : "memory");
}

// All threads of all blocks of the cluster. Relaxed: it makes no writes visible, and mbarriers need no such fence.
__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Arrives, and makes the phase wait for so many bytes of TMA.
__device__ __forceinline__ void mbarrier_expect(u32 barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(barrier), "r"(bytes) : "memory");
}

// Waits until the phase of this parity is complete; the phase before the first has parity 1.
__device__ __forceinline__ void mbarrier_wait(u32 barrier, int parity) {
    asm volatile("{.reg .pred done;\n"
                 "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
                 "@!done bra again;}" :: "r"(barrier), "r"(parity) : "memory");
}

// A stage of a ring buffer, and the parity of the phase in which it is filled.
template <int COUNT>
struct PipelineState {
    int stage = 0, parity = 0;
    __device__ __forceinline__ void next() {
        if (++stage == COUNT) stage = 0, parity ^= 1;
    }
};

// Named barriers: 0 is __syncthreads.
template <int THREADS>
__device__ __forceinline__ void named_barrier_sync(int id) {
    asm volatile("bar.sync %0, %1;" :: "r"(id), "n"(THREADS) : "memory");
}

template <int THREADS>
__device__ __forceinline__ void named_barrier_arrive(int id) {
    asm volatile("bar.arrive %0, %1;" :: "r"(id), "n"(THREADS) : "memory");
}

// What this thread wrote to shared memory becomes visible to TMA and wgmma.
__device__ __forceinline__ void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// After mbarrier_init, before any other thread or TMA uses the barriers.
__device__ __forceinline__ void fence_barrier_init() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    fence_async();
}

// One unit of 16 bytes.
__device__ __forceinline__ void store_zeros(u32 to) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" :: "r"(to), "r"(0) : "memory");
}

// A warpgroup gives registers away, or takes what others gave: so many a thread are left, or are had.
template <int COUNT>
__device__ __forceinline__ void give_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"(COUNT)); }

template <int COUNT>
__device__ __forceinline__ void take_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(COUNT)); }

// ------------------------------------------------------------------------------------------------------ TMA

// Has a map fetched, which a first load would wait for.
__device__ __forceinline__ void prefetch(const TensorMap &map) {
    asm volatile("prefetch.tensormap [%0];" :: "l"(&map) : "memory");
}

[[maybe_unused]] constexpr u64 EVICT_FIRST = 0x12f0000000000000;  // a cache policy: createpolicy.fractional.L2::evict_first

// LAST: nobody reads this again, so that it leaves L2 before anything else.
template <bool LAST = false>
__device__ __forceinline__ void tma_load(u32 to, const TensorMap &map, u32 barrier, int x, int y, int z, int w) {
    if (LAST) {
        asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
                     "[%0], [%1, {%3, %4, %5, %6}], [%2], %7;"
                     :: "r"(to), "l"(&map), "r"(barrier), "r"(x), "r"(y), "r"(z), "r"(w), "l"(EVICT_FIRST) : "memory");
        return;
    }
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%3, %4, %5, %6}], [%2];"
                 :: "r"(to), "l"(&map), "r"(barrier), "r"(x), "r"(y), "r"(z), "r"(w) : "memory");
}

// To the same address in each block of the cluster that `blocks` has a bit for, and to its barrier.
__device__ __forceinline__ void tma_load_multicast(
    u32 blocks, u32 to, const TensorMap &map, u32 barrier, int x, int y, int z, int w
) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
                 "[%0], [%1, {%3, %4, %5, %6}], [%2], %7;"
                 :: "r"(to), "l"(&map), "r"(barrier), "r"(x), "r"(y), "r"(z), "r"(w), "h"((unsigned short)blocks)
                 : "memory");
}

__device__ __forceinline__ void tma_store(u32 from, const TensorMap &map, int x, int y, int z, int w) {
    asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%1, {%2, %3, %4, %5}], [%0];"
                 :: "r"(from), "l"(&map), "r"(x), "r"(y), "r"(z), "r"(w) : "memory");
}

__device__ __forceinline__ void tma_store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

template <int PENDING>
__device__ __forceinline__ void tma_store_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" :: "n"(PENDING) : "memory");
}

// ---------------------------------------------------------------------------------------------------- wgmma

#if BF16
#define TYPES "bf16.bf16"
#else
#define TYPES "f16.f16"
#endif
#define LIST_40 LIST_32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define LIST_16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define LIST_32 LIST_16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define LIST_64 LIST_32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
    "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define LIST_80 LIST_64 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define LIST_88 LIST_80 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define LIST_96 LIST_88 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define LIST_128 LIST_96 ", %96, %97, %98, %99, " \
    "%100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, " \
    "%116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define D8(i) D4(i), D4(i + 4)
#define D_16 D8(0), D8(8)
#define D_32 D_16, D8(16), D8(24)
#define D_40 D_32, D8(32)
#define D_64 D_32, D8(32), D8(40), D8(48), D8(56)
#define D_80 D_64, D8(64), D8(72)
#define D_88 D_80, D8(80)
#define D_96 D_88, D8(88)
#define D_128 D_96, D8(96), D8(104), D8(112), D8(120)
// d = a b, or d += a b, of 64 rows and N columns: both operands in shared memory, TRANSPOSED where the sum goes over an
// operand's rows, or a in registers.
#define WGMMA_SHARED(NAME, REGS, N, A, B, ADD, TRANSPOSED) \
    __device__ __forceinline__ void NAME(float (&d)[REGS], u64 a, u64 b, int add) { \
        asm volatile("{.reg .pred add; setp.ne.b32 add, " ADD ", 0;\n" \
                     "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPES " {" LIST_##REGS "}, " \
                     A ", " B ", add, 1, 1, " TRANSPOSED ";}" \
                     : D_##REGS : "l"(a), "l"(b), "r"(add)); \
    }
#define WGMMA_REGISTERS(NAME, REGS, N, A, B, ADD, TRANSPOSED) \
    __device__ __forceinline__ void NAME(float (&d)[REGS], u32 *a, u64 b, int add) { \
        asm volatile("{.reg .pred add; setp.ne.b32 add, " ADD ", 0;\n" \
                     "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPES " {" LIST_##REGS "}, " \
                     "{" A "}, " B ", add, 1, 1, " TRANSPOSED ";}" \
                     : D_##REGS, "+r"(a[0]), "+r"(a[1]), "+r"(a[2]), "+r"(a[3]) : "l"(b), "r"(add)); \
    }

WGMMA_SHARED(wgmma, 16, 32, "%16", "%17", "%18", "0, 0")
WGMMA_SHARED(wgmma, 32, 64, "%32", "%33", "%34", "0, 0")
WGMMA_SHARED(wgmma, 40, 80, "%40", "%41", "%42", "0, 0")
WGMMA_SHARED(wgmma, 64, 128, "%64", "%65", "%66", "0, 0")
WGMMA_SHARED(wgmma, 80, 160, "%80", "%81", "%82", "0, 0")
WGMMA_SHARED(wgmma, 88, 176, "%88", "%89", "%90", "0, 0")
WGMMA_SHARED(wgmma_transposed, 32, 64, "%32", "%33", "%34", "1, 1")
WGMMA_SHARED(wgmma_transposed, 64, 128, "%64", "%65", "%66", "1, 1")
WGMMA_SHARED(wgmma_over_rows, 64, 128, "%64", "%65", "%66", "0, 1")
WGMMA_SHARED(wgmma_over_rows, 128, 256, "%128", "%129", "%130", "0, 1")
WGMMA_REGISTERS(wgmma_over_columns, 32, 64, "%32, %33, %34, %35", "%36", "%37", "0")
WGMMA_REGISTERS(wgmma, 32, 64, "%32, %33, %34, %35", "%36", "%37", "1")
WGMMA_REGISTERS(wgmma, 64, 128, "%64, %65, %66, %67", "%68", "%69", "1")
WGMMA_REGISTERS(wgmma, 96, 192, "%96, %97, %98, %99", "%100", "%101", "1")
WGMMA_REGISTERS(wgmma, 128, 256, "%128, %129, %130, %131", "%132", "%133", "1")

// Where an operand lies, in units of 16 bytes: groups of 8 rows 1024 bytes apart, 128-byte swizzle and, if the sum goes
// over its rows, panels `panel` bytes apart. (Above an address's 18 bits is the block's rank in its cluster.)
__device__ __forceinline__ u64 descriptor(u32 address, int panel) {
    return (u64)((address & 0x3ffff) >> 4) | (u64)(panel >> 4) << 16 | (u64)(1024 >> 4) << 32 | 1ull << 62;
}

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int PENDING>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(PENDING) : "memory");
}

constexpr int PANEL = 64 * 128;         // bytes of 64 rows of a panel

// Starts y = x z^T over D columns, of 64 of the X_ROWS rows of x and ROWS of the Z_ROWS rows of z.
template <int D, int ROWS, int X_ROWS = 64, int Z_ROWS = ROWS, int COUNT>
__device__ __forceinline__ void start_over_columns(float (&y)[COUNT], u32 x, u32 z) {
    const u64 a = descriptor(x, 16), b = descriptor(z, 16);
#pragma unroll
    for (int d = 0; d < D / 16; d++)
        wgmma(y, a + (d / 4 * X_ROWS * 128 + d % 4 * 32) / 16, b + (d / 4 * Z_ROWS * 128 + d % 4 * 32) / 16, d > 0);
    wgmma_commit();
}

// Starts y = x z, or y += x z, over ROWS of the Z_ROWS rows of z, with x in registers.
template <int ROWS, int Z_ROWS = ROWS, int COUNT>
__device__ __forceinline__ void start_over_rows(float (&y)[COUNT], u32 (&x)[ROWS / 4], u32 z, bool add) {
    const u64 b = descriptor(z, Z_ROWS * 128);
#pragma unroll
    for (int j = 0; j < ROWS / 16; j++) wgmma(y, x + 4 * j, b + j * 16 * 128 / 16, add || j > 0);
    wgmma_commit();
}

// Starts y = x z over ROWS rows of z, of 64 rows of x, whose columns are those rows.
template <int ROWS, int COUNT>
__device__ __forceinline__ void start_over_state(float (&y)[COUNT], u32 x, u32 z) {
    const u64 a = descriptor(x, 16), b = descriptor(z, ROWS * 128);
#pragma unroll
    for (int j = 0; j < ROWS / 16; j++)
        wgmma_over_rows(y, a + (j / 4 * PANEL + j % 4 * 32) / 16, b + j * 16 * 128 / 16, j > 0);
    wgmma_commit();
}

// Registers that a running product reads or writes: the compiler moves no use of them across this.
template <int COUNT>
__device__ __forceinline__ void pin(float (&x)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; i++) asm volatile("" : "+f"(x[i]) :: "memory");
}

template <int COUNT>
__device__ __forceinline__ void pin(u32 (&x)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; i++) asm volatile("" : "+r"(x[i]) :: "memory");
}

// Accumulators of a product that does not add: their old values are not kept for it.
template <int COUNT>
__device__ __forceinline__ void fresh(float (&x)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; i++) asm volatile("" : "=f"(x[i]) :: "memory");
}

// A use of registers after the product that reads them. Without one the assembler frees them as soon as the product has
// started, and may put other values there: tests/sass.py looks for that. The product names them as changed, so that
// these very registers are meant. `zero` is 0, which the compiler does not know.
__device__ __forceinline__ void keep_alive(const u32 (&x)[16], int zero) {
    u32 all = 0;
#pragma unroll
    for (int i = 0; i < 16; i++) all ^= x[i];
    asm volatile("{.reg .pred never; setp.eq.u32 never, %0, %1; @never trap;}" :: "r"(all | 1), "r"(zero) : "memory");
}

// -------------------------------------------------------------------------------------------------- matrices

// Unit `unit` of row `row`.
__device__ __forceinline__ u32 swizzled(u32 base, int row, int unit) {
    return base + unit / 8 * PANEL + row * 128 + ((unit % 8 ^ row % 8) << 4);
}

// The registers of an A operand x^T, 64 x 64: columns 16 warp to 16 warp + 16 of a panel x, rows as they come.
__device__ __forceinline__ void load_transposed(u32 (&x)[4], u32 panel, int row, int warp) {
    const int lane = threadIdx.x % 32, matrix = lane / 8;
    u32 from = swizzled(panel, row + matrix / 2 * 8 + lane % 8, 2 * warp + matrix % 2);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(from) : "memory");
}

// Units j and j + 1 of a warp's 16 rows, two columns in a register: as accumulators 4 j to 4 j + 7 lie, see store_rows.
__device__ __forceinline__ void load_rows_of(u32 (&x)[4], u32 panel, int j, int warp) {
    const int lane = threadIdx.x % 32, matrix = lane / 8;
    u32 from = swizzled(panel, 16 * warp + matrix % 2 * 8 + lane % 8, j + matrix / 2);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(from) : "memory");
}

// Four lanes hold a word each of units 0 to 3; afterwards lane t holds the four words of unit t.
__device__ __forceinline__ void transpose(u32 (&x)[4]) {
    const int t = threadIdx.x % 4;
#pragma unroll
    for (int bit = 1; bit <= 2; bit++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (!(i & bit)) {
                u32 &low = x[i], &high = x[i | bit];
                u32 got = __shfl_xor_sync(~0u, t & bit ? low : high, bit);
                (t & bit ? low : high) = got;
            }
}

// Accumulators of 64 rows as bf16 to shared memory, row by row.
template <int COUNT>
__device__ __forceinline__ void store_rows(const float (&x)[COUNT], u32 to, int warp) {
    const int lane = threadIdx.x % 32, matrix = lane / 8, row = 16 * warp + matrix % 2 * 8 + lane % 8;
#pragma unroll
    for (int j = 0; j < COUNT / 4; j += 2) {
        u32 at = swizzled(to, row, j + matrix / 2);
        asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
                     :: "r"(at), "r"(pack(x[4 * j], x[4 * j + 1])), "r"(pack(x[4 * j + 2], x[4 * j + 3])),
                        "r"(pack(x[4 * j + 4], x[4 * j + 5])), "r"(pack(x[4 * j + 6], x[4 * j + 7])) : "memory");
    }
}
