// A machine that runs our CUDA sources on a CPU, thread by thread: blocks, warps, barriers, the copy engine, products.
//
// Every CUDA thread is a fiber; what they do together (a product of a warp, a barrier) is done when the last of them has
// come. Threads take turns in a random order, in which a block, a warp or a warpgroup may be behind all others. What
// hardware does on its own time, copies and products of a warpgroup, happens at once (EARLY), as late as the program
// allows (LATE), or sometime between (ANY); PRESSED, loads come at once and what reads shared memory, products and
// stores, is late. A program that does not wait for what it needs is wrong in one of the four. Two views of shared
// memory are kept apart: what threads write is not seen by the copy engine and by wgmma before fence.proxy.async.
//
// What is refused: addresses outside the tensors (copies and __ldg) and outside shared memory, a wait that nothing ends,
// blocks that end while their shared memory is still being read or told of, stores of the copy engine that begin below 0.
//
// Not modelled: registers as the assembler assigns them (tests/sass.py), time, what ordinary loads and stores of different
// threads see of each other without a barrier.

#include "core.h"
#include "hopper.h"
#include "warps.h"

namespace machine {

// --------------------------------------------------------------------------------------------------- launches

inline void run_cluster(std::vector<Index> blocks) {
    state.cluster.clear();
    state.ready.clear();
    state.engine.clear();
    state.all = Meeting();
    int used = 0;
    for (size_t r = 0; r < blocks.size(); r++) {
        auto b = std::make_unique<Block>();
        b->index = blocks[r];
        b->rank = r;
        b->memory.resize(state.shared + 64);
        for (auto &x : b->memory) x = (char)0xff;  // no numbers
        b->seen = b->memory;
        b->warps.resize((state.threads + 31) / 32);
        b->groups.resize((state.threads + 127) / 128);
        b->fibers.resize(state.threads);
        b->running = state.threads;
        for (int i = 0; i < state.threads; i++) {
            Fiber &f = b->fibers[i];
            f.id = i, f.lane = i % 32, f.warp = i / 32;
            f.thread = {(unsigned)i, 0, 0};
            f.block = b.get();
            if (used == (int)state.stacks.size())
                state.stacks.push_back((char *)mmap(nullptr, STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
            f.stack = state.stacks[used++];
            getcontext(&f.context);
            f.context.uc_stack.ss_sp = f.stack;
            f.context.uc_stack.ss_size = STACK;
            f.context.uc_link = nullptr;
            makecontext(&f.context, body, 0);
        }
        state.cluster.push_back(std::move(b));
    }
    for (auto &b : state.cluster)
        for (auto &f : b->fibers) state.ready.push_back(&f);
    schedule(used);
    state.now = nullptr;
    while (!state.engine.empty()) run_copy(0);
    for (auto &b : state.cluster)
        for (int i = 0; i < 64; i++)
            if (b->memory[state.shared + i] != (char)0xff) fail("wrote beyond shared memory");
}

inline const char *launch(std::function<void()> kernel, Index grid, int threads, int shared, int cluster, int mode,
                          unsigned seed, int ranges, const unsigned long long *allowed) {
    state.kernel = kernel, state.grid = grid, state.threads = threads, state.shared = shared, state.error = "";
    state.loads = mode == PRESSED ? EARLY : mode, state.uses = mode == PRESSED ? LATE : mode;
    state.random.seed(seed);
    state.allowed.clear();
    for (int i = 0; i < ranges; i++) state.allowed.push_back({allowed[2 * i], allowed[2 * i + 1]});
    volatile bool failed = false;
    getcontext(&state.failed);
    if (failed) return state.error.c_str();
    failed = true;
    for (unsigned k = 0; k < grid.z; k++)
        for (unsigned j = 0; j < grid.y; j++)
            for (unsigned i = 0; i < grid.x; i += cluster) {
                std::vector<Index> blocks;
                for (int r = 0; r < cluster; r++) blocks.push_back({i + r, j, k});
                run_cluster(blocks);
            }
    return "";
}

}  // namespace machine

#define threadIdx (machine::state.now->thread)
#define blockIdx (machine::state.now->block->index)
#define gridDim (machine::state.grid)
#define __cvta_generic_to_shared(p) machine::shared_address(p)
#define __syncthreads() machine::sync(0, machine::state.threads)

inline void __syncwarp() {
    int none = 0;
    machine::with_warp(none, [](int **) {});
}
template <typename T> inline T __shfl_xor_sync(unsigned, T x, int bit) { return machine::shuffle(x, machine::state.now->lane ^ bit); }
template <typename T> inline T __shfl_sync(unsigned, T x, int from) { return machine::shuffle(x, from); }
template <typename T> inline T __ldg(const T *p) { machine::check_global(p, sizeof(T)); return *p; }
