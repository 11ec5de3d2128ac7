// Copies by threads (cp.async) from memory to shared memory, in units of 16 bytes.

#include "cuda/include/convert.cuh"

// One unit; zeros, if it is not there.
__device__ __forceinline__ void cp_async(u32 to, const char *from, bool there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" :: "r"(to), "l"(from), "r"(there ? 16 : 0) : "memory");
}

__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int PENDING>
__device__ __forceinline__ void cp_async_wait() { asm volatile("cp.async.wait_group %0;" :: "n"(PENDING) : "memory"); }
