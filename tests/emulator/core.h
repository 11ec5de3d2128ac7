// What there is: blocks, fibers, barriers; who runs next; memory.

#pragma once

#include <cstdlib>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <setjmp.h>
#include <string>
#include <sys/mman.h>
#include <ucontext.h>
#include <vector>

#include "emulator.h"

namespace emulator {

enum { EARLY, LATE, ANY, PRESSED };
enum { RANK_SHIFT = 24, STACK = 1 << 18 };
struct Fiber;
struct Block;

template <typename T>
class Queue {                           // std::deque takes memory before anything is in it
    std::vector<T> all;
    size_t first = 0;

public:
    bool empty() const { return first == all.size(); }
    size_t size() const { return all.size() - first; }
    T &front() { return all[first]; }
    T *begin() { return all.data() + first; }
    T *end() { return all.data() + all.size(); }
    void push_back(T x) { all.push_back(std::move(x)); }
    void pop_front() {
        all[first++] = T();
        if (empty()) all.clear(), first = 0;
    }
};

struct Rendezvous {                        // so many come; the last does what is to be done
    int arrived = 0;
    std::vector<Fiber *> waiting;
};

struct Barrier {                        // an mbarrier
    int count = 0, left = 0;
    long bytes = 0;
    unsigned phase = 0;
    std::vector<Fiber *> waiting[2];
};

struct Product {                        // of one thread; the others of its warpgroup have the same
    float *keep[128];
    unsigned *a[4];
    unsigned early[4];
    uint64_t desc_a, desc_b;
    int n, add, trans_a, trans_b, from_registers, half;
};

struct Copy {
    std::function<void()> run;
    bool awaited = false;               // others wait for it
    bool lingers = false;               // its block may end before it
};

struct Piece {                          // 16 bytes of cp.async, of which some are read
    unsigned to;
    const void *from;
    int bytes;
    bool landed = false;
};

struct Fiber {
    ucontext_t start;
    jmp_buf at;                         // where it is, once it has started
    bool started = false;
    char *stack = nullptr;
    Index thread;
    int id, lane, warp;
    Block *block;
    bool done = false;
    const char *waits = "";
    void *mine = nullptr;               // what it brought to a rendezvous
    std::vector<Piece> open;            // cp.async, not committed
    Queue<std::vector<Piece>> groups;
    std::vector<std::shared_ptr<Copy>> open_bulk;
    Queue<std::vector<std::shared_ptr<Copy>>> bulk;
    std::vector<std::shared_ptr<Copy>> open_writes;  // of bulk stores, which only read shared memory in `bulk`
    Queue<std::vector<std::shared_ptr<Copy>>> writes;
    std::vector<Product> products;
    Queue<std::vector<Product>> product_groups;
    std::vector<std::pair<unsigned, unsigned>> dirty;  // what it wrote since its last fence
};

struct Block {
    Index index;
    int rank;
    std::vector<char> memory, seen;     // as threads and as the copy engine and wgmma see it
    std::map<unsigned, Barrier> barriers;
    Rendezvous named[16];
    std::vector<Rendezvous> warps, groups;  // groups: of four warps
    std::vector<Fiber> fibers;
    int running = 0;                    // threads that have not ended
};

struct State {
    jmp_buf home;                       // the scheduler
    ucontext_t failed;                  // where a failure goes
    Fiber *now = nullptr;
    std::vector<Fiber *> ready;
    std::vector<std::shared_ptr<Copy>> engine;  // copies under way
    std::vector<std::unique_ptr<Block>> cluster;
    std::vector<std::pair<uint64_t, uint64_t>> allowed;
    Rendezvous all;
    Index grid;
    int threads = 0, shared = 0, loads = EARLY, uses = EARLY;  // when the hardware does it
    int slow_block = -1, slow_warp = -1, slow_group = -1;
    std::mt19937 random;
    std::string error;
    std::vector<char *> stacks;
    void (*kernel)(const void *) = nullptr;
    const void *arguments = nullptr;
};
inline State state;

[[noreturn]] inline void fail(const std::string &what) {
    Fiber *f = state.now;
    if (state.error.empty())
        state.error = what + (f ? " (block " + std::to_string(f->block->index.x) + "," + std::to_string(f->block->index.y)
                                  + "," + std::to_string(f->block->index.z) + ", thread " + std::to_string(f->id) + ")" : "");
    setcontext(&state.failed);
    abort();
}

inline unsigned below(unsigned n) { return state.random() % n; }

// ------------------------------------------------------------------------------------------------ scheduling

// Not by swapcontext, which asks the kernel for the signal mask every time.
inline void resume(Fiber *f) {
    if (_setjmp(state.home)) return;
    if (f->started) _longjmp(f->at, 1);
    f->started = true;
    setcontext(&f->start);
}

inline void leave(Fiber *f) {
    if (!_setjmp(f->at)) _longjmp(state.home, 1);
}

inline void wake(std::vector<Fiber *> &waiting) {
    state.ready.insert(state.ready.end(), waiting.begin(), waiting.end());
    waiting.clear();
}

void land(Piece &p);

inline void land_any(Fiber *f) {        // one of the copies this thread has under way, if fate will
    if (state.loads != ANY || below(4)) return;
    std::vector<Piece *> open;
    for (auto &p : f->open) if (!p.landed) open.push_back(&p);
    for (auto &g : f->groups)
        for (auto &p : g) if (!p.landed) open.push_back(&p);
    if (!open.empty()) land(*open[below(open.size())]);
}

inline void suspend(std::vector<Fiber *> &queue, const char *why) {
    Fiber *me = state.now;
    me->waits = why;
    queue.push_back(me);
    leave(me);
    land_any(me);
}

template <typename F>
inline void rendezvous(Rendezvous &m, int count, const char *why, F last) {
    if (++m.arrived == count) {
        last();
        m.arrived = 0;
        wake(m.waiting);
    } else {
        suspend(m.waiting, why);
    }
}

inline void run_copy(size_t i) {
    std::shared_ptr<Copy> c = state.engine[i];
    state.engine.erase(state.engine.begin() + i);
    auto f = std::move(c->run);
    c->run = nullptr;
    if (f) f();
}

inline void start_copy(std::shared_ptr<Copy> c, int when) {
    state.engine.push_back(c);
    if (when == EARLY) run_copy(state.engine.size() - 1);
}

inline void complete(const std::shared_ptr<Copy> &c) {
    for (size_t i = 0; i < state.engine.size(); i++)
        if (state.engine[i] == c) return run_copy(i);
}

inline void body() {
    state.kernel(state.arguments);
    Fiber *f = state.now;
    for (auto &g : f->bulk)
        for (auto &c : g)
            if (c->run) fail("a thread ends while its bulk stores still read shared memory");
    f->groups.push_back(std::move(f->open));
    for (auto &g : f->groups)
        for (auto &p : g)
            if (!p.landed) fail("a thread ends while its copies are on their way");
    if (!f->products.empty() || !f->product_groups.empty()) fail("a thread ends with products under way");
    f->done = true;
    f->block->running--;
    leave(f);
}

inline bool slow(const Fiber *f) {
    return f->block->rank == state.slow_block || f->warp == state.slow_warp || f->warp / 4 == state.slow_group;
}

inline void schedule(int total) {
    const int whom = below(4);          // one of them may be behind all the time
    state.slow_block = whom == 1 && state.cluster.size() > 1 ? below(state.cluster.size()) : -1;
    state.slow_warp = whom == 2 ? below((state.threads + 31) / 32) : -1;
    state.slow_group = whom == 3 ? below((state.threads + 127) / 128) : -1;
    int done = 0;
    while (done < total) {
        if (state.loads == ANY && !state.engine.empty() && below(4) == 0) run_copy(below(state.engine.size()));
        if (state.ready.empty()) {
            if (state.engine.empty()) {
                std::map<std::string, int> why;
                for (auto &b : state.cluster)
                    for (auto &f : b->fibers)
                        if (!f.done) why[f.waits]++;
                std::string text = "all wait:";
                for (auto &w : why) text += " " + std::to_string(w.second) + " for " + w.first + ";";
                state.now = nullptr;
                fail(text);
            }
            state.now = nullptr;
            size_t i = below(state.engine.size());
            for (size_t tries = 0; tries < state.engine.size() && !state.engine[i]->awaited; tries++)
                i = (i + 1) % state.engine.size();
            run_copy(i);
            continue;
        }
        size_t i = below(state.ready.size());
        for (int tries = 0; tries < 32 && slow(state.ready[i]); tries++) i = below(state.ready.size());
        Fiber *f = state.ready[i];
        state.ready[i] = state.ready.back();
        state.ready.pop_back();
        state.now = f;
        resume(f);
        done += f->done;
    }
}

// ----------------------------------------------------------------------------------------------------- memory

inline Block &block_of(unsigned address) {
    const unsigned rank = address >> RANK_SHIFT;
    if (rank >= state.cluster.size()) fail("no such block in the cluster");
    return *state.cluster[rank];
}

inline unsigned inside(unsigned address, unsigned bytes) {
    const unsigned at = (address & ((1u << RANK_SHIFT) - 1)) - 1024;
    if (at > (unsigned)state.shared || at + bytes > (unsigned)state.shared) fail("outside shared memory");
    return at;
}

inline void read(unsigned address, void *to, unsigned bytes) { memcpy(to, &block_of(address).memory[inside(address, bytes)], bytes); }

inline void write(unsigned address, const void *from, unsigned bytes) {
    memcpy(&block_of(address).memory[inside(address, bytes)], from, bytes);
    state.now->dirty.push_back({address, bytes});
}

extern float of_fp16[1 << 16];          // every number of fp16

inline float widened(unsigned short bits, int half) { return half ? of_fp16[bits] : __int_as_float((unsigned)bits << 16); }
inline float part(unsigned x, int i, int half) { return widened(i ? x >> 16 : x & 0xffff, half); }

}  // namespace emulator
