// Copies by threads (cp.async) from memory to shared memory, in units of 16 bytes, and prefetches.

#include "cuda/include/convert.cuh"

// One unit; zeros, if it is not there.
__device__ __forceinline__ void cp_async(u32 to, const char *from, bool there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" :: "r"(to), "l"(from), "r"(there ? 16 : 0) : "memory");
}

__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int PENDING>
__device__ __forceinline__ void cp_async_wait() { asm volatile("cp.async.wait_group %0;" :: "n"(PENDING) : "memory"); }

// The line of L2 that holds this. A hint: the line may be written afterwards.
__device__ __forceinline__ void prefetch_to_l2(const void *from) { asm volatile("prefetch.global.L2 [%0];" :: "l"(from)); }
