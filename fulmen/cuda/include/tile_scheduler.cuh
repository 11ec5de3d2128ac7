// Which tile a block takes, when it may begin, and how it reads what the launch ahead may have written.

// Longest-processing-time first (LPT): under a causal mask the last rows see the most keys, so the last tile comes first.
template <bool LPT>
__device__ __forceinline__ int tile_of_grid() { return LPT ? gridDim.x - 1 - blockIdx.x : blockIdx.x; }

// A block starts while the launch ahead of it in the stream still runs, and waits here before it reads what that one writes.
__device__ __forceinline__ void wait_for_new_data() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// The launch behind this one may start.
__device__ __forceinline__ void let_next_kernel_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

__device__ __forceinline__ void wait_for_previous_kernel() {
    let_next_kernel_start();
    wait_for_new_data();
}

// A plain load: one through the read-only cache (__ldg) may be moved ahead of the wait. The emulator checks its address.
template <typename T>
__device__ __forceinline__ T load_coherent(const T *p) { return *p; }

// The next of the tiles that blocks share out: they count them in memory.
__device__ __forceinline__ int take_tile(int *counter) {
    int tile;
    asm volatile("atom.relaxed.gpu.global.add.s32 %0, [%1], 1;" : "=r"(tile) : "l"(counter) : "memory");
    return tile;
}
