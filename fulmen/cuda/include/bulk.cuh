// Bulk copies and sums between memory and shared memory, for Hopper; and turns, by which blocks that add to the same memory
// wait for each other.

// Contiguous bytes of memory to shared memory; the barrier counts them.
__device__ __forceinline__ void bulk_load(u32 to, const void *from, int bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 :: "r"(to), "l"(from), "r"(bytes), "r"(barrier) : "memory");
}

// Adds contiguous fp32 numbers of shared memory to memory.
__device__ __forceinline__ void bulk_add(void *to, u32 from, int bytes) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;"
                 :: "l"(to), "r"(from), "r"(bytes) : "memory");
}

__device__ __forceinline__ void bulk_store(void *to, u32 from, int bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
                 :: "l"(to), "r"(from), "r"(bytes) : "memory");
}

template <int PENDING>
__device__ __forceinline__ void bulk_wait() {
    asm volatile("cp.async.bulk.wait_group %0;" :: "n"(PENDING) : "memory");
}

__device__ __forceinline__ int turns_passed(const int *turns) {
    int now;
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(now) : "l"(turns) : "memory");
    asm volatile("fence.proxy.async.global;" ::: "memory");
    return now;
}

// Wait until the first, or `turn` tiles of keys, have passed their turn. What they added is visible then, to bulk copies.
__device__ __forceinline__ void wait_for_first(const int *turns) {
    asm volatile("{.reg .pred early; .reg .s32 now;\n"
                 "again: ld.acquire.gpu.global.s32 now, [%0]; setp.eq.s32 early, now, 0;\n"
                 "@early bra again;}" :: "l"(turns) : "memory");
    asm volatile("fence.proxy.async.global;" ::: "memory");
}

__device__ __forceinline__ void wait_for_turn(const int *turns, int turn) {
    asm volatile("{.reg .pred early; .reg .s32 now;\n"
                 "again: ld.acquire.gpu.global.s32 now, [%0]; setp.lt.s32 early, now, %1;\n"
                 "@early bra again;}" :: "l"(turns), "r"(turn) : "memory");
    asm volatile("fence.proxy.async.global;" ::: "memory");
}

__device__ __forceinline__ void pass_turn(int *turns) {
    asm volatile("red.release.gpu.global.add.s32 [%0], 1;" :: "l"(turns) : "memory");
}
