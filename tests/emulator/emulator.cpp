// Launches, memory and numbers.

#include <cmath>

#include "core.h"

namespace emulator {

const Index &thread() { return state.now->thread; }
const Index &block() { return state.now->block->index; }
const Index &grid() { return state.grid; }
int threads() { return state.threads; }

// ----------------------------------------------------------------------------------------------------- memory

void check_global(const void *p, uint64_t bytes) {
    const uint64_t at = (uint64_t)p;
    for (auto &r : state.allowed)
        if (at >= r.first && at + bytes <= r.first + r.second) return;
    fail("reads or writes memory that is no tensor's");
}

void write4(unsigned address, unsigned x) {
    const unsigned all[4] = {x, x, x, x};
    write(address, all, 16);
}

void read4(unsigned &x, unsigned &y, unsigned &z, unsigned &w, unsigned address) {
    unsigned all[4];
    read(address, all, 16);
    x = all[0], y = all[1], z = all[2], w = all[3];
}

template <class T>
static void store_all(unsigned address, const T (&all)[4]) {
    if (address % 16) fail("st.shared.v4: not aligned to 16 bytes");
    write(address, all, 16);
}

void store4(unsigned address, float x, float y, float z, float w) { store_all(address, {x, y, z, w}); }
void store4(unsigned address, unsigned x, unsigned y, unsigned z, unsigned w) { store_all(address, {x, y, z, w}); }

static std::vector<Fiber *> waiting_for_turns;

void wait_for_turn(const int *turns, int turn) {
    check_global(turns, 4);
    while (*turns < turn) suspend(waiting_for_turns, "a block that starts later");
    if (*turns > turn) fail("comes after its turn");
}

void wait_for_first(const int *turns) {
    check_global(turns, 4);
    while (*turns == 0) suspend(waiting_for_turns, "a block that starts later");
}

int turns_passed(const int *turns) {
    check_global(turns, 4);
    return *turns;
}

void pass_turn(int *turns) {
    check_global(turns, 4);
    ++*turns;
    wake(waiting_for_turns);
}

int count(int *counter) {
    check_global(counter, 4);
    return (*counter)++;
}

void fence_async() {
    for (auto &d : state.now->dirty) {
        Block &b = block_of(d.first);
        const unsigned at = inside(d.first, d.second);
        memcpy(&b.seen[at], &b.memory[at], d.second);
    }
    state.now->dirty.clear();
}

char *shared_memory() { return state.now->block->memory.data(); }

unsigned shared_address(const void *p) {
    return (unsigned)((const char *)p - state.now->block->memory.data()) + 1024 + ((unsigned)state.now->block->rank << RANK_SHIFT);
}

// ---------------------------------------------------------------------------------------------------- numbers

static float flush(float x) { return std::fpclassify(x) == FP_SUBNORMAL ? 0.0f : x; }
float ex2(float x) { return flush(exp2f(flush(x))); }
float rcp(float x) { return flush(1.0f / flush(x)); }

float of_fp16[1 << 16];
static const bool filled = [] {
    for (unsigned i = 0; i < 1 << 16; i++) {
        const unsigned short bits = i;
        _Float16 x;
        memcpy(&x, &bits, 2);
        of_fp16[i] = (float)x;
    }
    return true;
}();

float from_half(unsigned short bits, int half) { return widened(bits, half); }

static unsigned short to_half(float x, int half) {
    unsigned short y;
    if (half) {
        _Float16 z = (_Float16)x;
        memcpy(&y, &z, 2);
        return y;
    }
    unsigned bits;
    memcpy(&bits, &x, 4);
    if (x != x) return 0x7fff;
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

unsigned pack(float high, float low, int half) { return (unsigned)to_half(high, half) << 16 | to_half(low, half); }

unsigned times(unsigned x, unsigned hi, unsigned lo) {
    float y[2];
    for (int i = 0; i < 2; i++) {
        float rest = from_half(to_half(part(x, i, 0) * part(lo, i, 0), 0), 0);
        y[i] = (float)((double)part(x, i, 0) * part(hi, i, 0) + rest);
    }
    return pack(y[1], y[0], 0);
}

// --------------------------------------------------------------------------------------------------- launches

static void run_cluster(std::vector<Index> blocks) {
    state.cluster.clear();
    state.ready.clear();
    state.all = Rendezvous();
    waiting_for_turns.clear();
    int used = 0;
    for (size_t r = 0; r < blocks.size(); r++) {
        auto b = std::make_unique<Block>();
        b->index = blocks[r];
        b->rank = r;
        b->memory.assign(state.shared + 64, (char)0xff);  // no numbers
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
            getcontext(&f.start);
            f.start.uc_stack.ss_sp = f.stack;
            f.start.uc_stack.ss_size = STACK;
            f.start.uc_link = nullptr;
            makecontext(&f.start, body, 0);
        }
        state.cluster.push_back(std::move(b));
    }
    for (auto &b : state.cluster)
        for (auto &f : b->fibers) state.ready.push_back(&f);
    schedule(used);
    state.now = nullptr;
    for (size_t i = 0; i < state.engine.size();)
        if (state.engine[i]->lingers) i++;
        else run_copy(i), i = 0;
    for (auto &b : state.cluster)
        for (int i = 0; i < 64; i++)
            if (b->memory[state.shared + i] != (char)0xff) fail("wrote beyond shared memory");
}

const char *launch(void (*kernel)(const void *), const void *arguments, Index grid, int threads, int shared, int cluster,
                   int mode, unsigned seed, int ranges, const unsigned long long *allowed) {
    state.kernel = kernel, state.arguments = arguments, state.grid = grid, state.threads = threads, state.shared = shared, state.error = "";
    state.loads = mode == PRESSED ? EARLY : mode, state.uses = mode == PRESSED ? LATE : mode;
    state.random.seed(seed);
    state.engine.clear();
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
                for (unsigned r = 0; r < (unsigned)cluster && i + r < grid.x; r++) blocks.push_back({i + r, j, k});
                run_cluster(blocks);
            }
    while (!state.engine.empty()) run_copy(0);
    return "";
}

}  // namespace emulator
