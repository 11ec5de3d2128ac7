// Runs our CUDA sources on a CPU, thread by thread: blocks, warps, barriers, TMA, wgmma.
//
// Every CUDA thread is a fiber. What threads do together (a product of a warp, a barrier) happens when the last of them
// has arrived. Threads run in a random order, in which a block, a warp or a warpgroup may be behind all others. What
// hardware does asynchronously, copies and products of a warpgroup, happens at once (EARLY), as late as the program
// allows (LATE), or at any time between (ANY); PRESSED: loads come at once, and what reads shared memory, products and
// stores, is late. A program that does not wait for what it needs is wrong in one of the four. Two views of shared memory
// are kept apart: what threads write is not seen by TMA and wgmma before fence.proxy.async, nor may TMA write there before.
//
// Errors: addresses outside the tensors (copies and load_coherent) and outside shared memory, a deadlock, threads that end while
// their copies are under way, blocks that end while their shared memory is still read or their barriers are still
// arrived on, TMA stores that begin below 0.
//
// Not modelled: registers as the assembler assigns them (tests/sass.py) and wgmma.fence, which is about them; time; warps
// of a warpgroup that begin a product before the others have arrived; what ordinary loads and stores of different
// threads see of each other without a barrier; the launch before this one (griddepcontrol). Ordinary stores are only
// noticed in the margins around tensors and behind shared memory.

#pragma once

#include <cstdint>
#include <cstring>
#include <initializer_list>

#define __device__
#define __global__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define __cluster_dims__(...)

// All that kernels use of <cmath>, which takes longer to read than a kernel to compile.
extern "C" {
float fabsf(float) noexcept;
float fmaf(float, float, float) noexcept;
float fmaxf(float, float) noexcept;
float fminf(float, float) noexcept;
float log2f(float) noexcept;
}

struct Index { unsigned x, y, z; };
struct uint4 { unsigned x, y, z, w; };
struct uint2 { unsigned x, y; };
struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
inline float __int_as_float(int x) { float y; memcpy(&y, &x, 4); return y; }
inline float __log2f(float x) { return log2f(x); }

namespace emulator {

typedef std::initializer_list<int> Coordinates;

// who and where (core.h, emulator.cpp)
const Index &thread(), &block(), &grid();
int threads();
char *shared_memory();
unsigned shared_address(const void *);
void check_global(const void *, uint64_t bytes);
void write4(unsigned address, unsigned x);
void read4(unsigned &, unsigned &, unsigned &, unsigned &, unsigned address);
void store4(unsigned address, float, float, float, float);
void store4(unsigned address, unsigned, unsigned, unsigned, unsigned);
void wait_for_turn(const int *turns, int turn), wait_for_first(const int *turns), pass_turn(int *turns);
int turns_passed(const int *turns), count(int *counter);
void fence_async();
const char *launch(void (*kernel)(const void *), const void *arguments, Index grid, int threads, int shared, int cluster,
                   int mode, unsigned seed, int ranges, const unsigned long long *allowed);

// numbers
float ex2(float), rcp(float), from_half(unsigned short bits, int half);
unsigned pack(float high, float low, int half), times(unsigned x, unsigned hi, unsigned lo);

// warps, and copies by threads (warps.cpp)
void sync_warp();
unsigned shuffle(unsigned value, int from);
void ldmatrix(unsigned &, unsigned &, unsigned &, unsigned &, unsigned address, int transposed);
void stmatrix(unsigned address, unsigned, unsigned, unsigned, unsigned);
void mma(float &, float &, float &, float &, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, int half);
void cp_async(unsigned to, const void *from, int bytes), cp_async_commit(), cp_async_wait(int pending);

// barriers, TMA, wgmma (hopper.cpp)
void named_barrier_sync(int id, int count), named_barrier_arrive(int id, int count), cluster_sync();
void mbarrier_init(unsigned barrier, int count), mbarrier_arrive(unsigned barrier, long bytes), mbarrier_arrive_at(unsigned barrier, unsigned rank);
void mbarrier_wait(unsigned barrier, int parity);
void tma_load(unsigned blocks, unsigned to, const void *map, unsigned barrier, Coordinates);
void tma_store(unsigned from, const void *map, Coordinates), tma_store_commit(), tma_store_wait_read(int pending), tma_store_wait(int pending);
void bulk_load(unsigned to, const void *from, int bytes, unsigned barrier), bulk_store(void *to, unsigned from, int bytes, bool add);
void wgmma(float **d, int n, unsigned **a, uint64_t desc_a, uint64_t desc_b, int add, int trans_a, int trans_b, int half);
void wgmma_commit(), wgmma_wait(int pending);

}  // namespace emulator

#define threadIdx (emulator::thread())
#define blockIdx (emulator::block())
#define gridDim (emulator::grid())
#define __cvta_generic_to_shared(p) emulator::shared_address(p)
#define __syncthreads() emulator::named_barrier_sync(0, emulator::threads())
#define __syncwarp() emulator::sync_warp()

template <typename T>
inline T __shfl_sync(unsigned, T x, int from) {
    static_assert(sizeof(T) % 4 == 0, "words");
    unsigned bits[sizeof(T) / 4];
    memcpy(bits, &x, sizeof(T));
    for (unsigned &word : bits) word = emulator::shuffle(word, from);
    memcpy(&x, bits, sizeof(T));
    return x;
}
template <typename T>
inline T __shfl_xor_sync(unsigned all, T x, int bit) { return __shfl_sync(all, x, (int)(threadIdx.x % 32) ^ bit); }
