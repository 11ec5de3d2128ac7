// What Hopper adds: mbarriers, clusters, TMA, wgmma.

#include "core.h"

namespace emulator {

// ---------------------------------------------------------------------------------------------------- barriers

static Rendezvous &named(int id) {
    if (id < 0 || id >= 16) fail("a block has 16 named barriers");
    return state.now->block->named[id];
}

void named_barrier_sync(int id, int count) { rendezvous(named(id), count, "a named barrier", [] {}); }

void named_barrier_arrive(int id, int count) {
    Rendezvous &m = named(id);
    if (++m.arrived == count) {
        m.arrived = 0;
        wake(m.waiting);
    }
}

static Barrier &barrier(unsigned address) {
    Block &b = block_of(address);
    const auto found = b.barriers.find(inside(address, 8));
    if (found == b.barriers.end()) fail("a barrier that was not made");
    if (!b.running) fail("a barrier of a block that has ended");
    return found->second;
}

void mbarrier_init(unsigned address, int count) {
    if (address % 8) fail("a barrier that is not aligned");
    Barrier &b = block_of(address).barriers[inside(address, 8)];
    b = Barrier();
    b.count = b.left = count;
}

static void turn(Barrier &b) {
    if (b.left == 0 && b.bytes == 0) {
        b.left = b.count;
        b.phase++;
        wake(b.waiting[(b.phase - 1) % 2]);
    }
}

void mbarrier_arrive(unsigned address, long bytes) {
    Barrier &b = barrier(address);
    if (b.left == 0) fail("more arrivals at a barrier than it waits for");
    b.bytes += bytes;
    b.left--;
    turn(b);
}

static void landed(unsigned address, long bytes) {
    Barrier &b = barrier(address);
    b.bytes -= bytes;
    turn(b);
}

void mbarrier_wait(unsigned address, int parity) {
    while (true) {
        Barrier &b = barrier(address);
        if ((int)(b.phase % 2) != parity) return;
        suspend(b.waiting[parity], "an mbarrier");
    }
}

static unsigned at_rank(unsigned address, unsigned rank) {
    return (address & ((1u << RANK_SHIFT) - 1)) | rank << RANK_SHIFT;
}

void mbarrier_arrive_at(unsigned address, unsigned rank) {  // an arrival in another block takes its time
    const unsigned there = at_rank(address, rank);
    if ((int)rank == state.now->block->rank) return mbarrier_arrive(there, 0);
    auto c = std::make_shared<Copy>();
    c->run = [=] { mbarrier_arrive(there, 0); };
    c->awaited = true;
    start_copy(c, state.uses);
}

void cluster_sync() {
    rendezvous(state.all, (int)state.cluster.size() * state.threads, "the cluster", [] {});
}

// ------------------------------------------------------------------------------------------------------- TMA

struct Map {                            // ours, in the place of the driver's 128 bytes
    uint64_t base;
    uint32_t rank, width;
    uint32_t size[5], box[5];
    uint64_t step[4];                   // bytes
};
static_assert(sizeof(Map) <= 128, "fits");

static unsigned swizzled(unsigned address) { return address ^ (address >> 3 & 0x70); }

template <typename F>
static void each_row(const Map &m, const int *at, F f) {  // f(row of the box, where it lies or null, columns there)
    int rows = 1;
    for (unsigned i = 1; i < m.rank; i++) rows *= m.box[i];
    for (int r = 0; r < rows; r++) {
        uint64_t offset = 0;
        bool there = true;
        for (unsigned i = 1, rest = r; i < m.rank; i++) {
            const int x = at[i] + (int)(rest % m.box[i]);
            rest /= m.box[i];
            there = there && x >= 0 && x < (int)m.size[i];
            offset += (uint64_t)(int64_t)x * m.step[i - 1];
        }
        f(r, there ? (char *)m.base + offset : nullptr);
    }
}

// Of a row of a box, which is 128 bytes, those columns that the tensor has: their place in the row and their number.
struct Columns { int first, count; };

static Columns columns(const Map &m, int at) {
    const int first = max(0, -at), last = min((int)m.box[0], (int)m.size[0] - at);
    return {first, max(0, last - first)};
}

// The copy engine may be ahead of a thread's write that no fence.proxy.async follows: that could land on top.
static void write_by_copy(Block &b, unsigned at, const void *from, unsigned bytes) {
    if (memcmp(&b.memory[at], &b.seen[at], bytes)) fail("a copy to where a thread wrote, and no fence followed");
    memcpy(&b.memory[at], from, bytes);
    memcpy(&b.seen[at], from, bytes);
}

void tma_load(unsigned blocks, unsigned to, const void *map, unsigned barrier_at, Coordinates where) {
    const std::vector<int> at(where);
    const Map m = *(const Map *)map;
    if (m.box[0] * m.width != 128 || to % 1024) fail("a box whose rows are not 128 bytes, or not at a multiple of 1024");
    if ((unsigned)at.size() != m.rank) fail("a box of another rank than its map");
    const unsigned me = state.now->block->rank;
    auto what = [=](unsigned rank) {
        Block &b = *state.cluster[rank];
        const Columns c = columns(m, at[0]);
        long bytes = 0;
        each_row(m, at.data(), [&](int r, char *from) {
            char row[128] = {};
            if (from && c.count) {
                from += (int64_t)(at[0] + c.first) * m.width;
                check_global(from, c.count * m.width);
                memcpy(row + c.first * m.width, from, c.count * m.width);
            }
            for (int unit = 0; unit < 128; unit += 16) {  // which the swizzle moves as a whole
                const unsigned offset = inside(swizzled(to + r * 128 + unit), 16);
                write_by_copy(b, offset, row + unit, 16);
            }
            bytes += 128;
        });
        landed(at_rank(barrier_at, rank), bytes);
    };
    for (unsigned rank = 0; rank < state.cluster.size(); rank++)
        if (blocks ? blocks >> rank & 1 : rank == me) {
            auto c = std::make_shared<Copy>();
            c->run = [=] { what(rank); };
            c->awaited = true;
            start_copy(c, state.loads);
        }
}

void tma_store(unsigned from, const void *map, Coordinates where) {
    const std::vector<int> at(where);
    const Map m = *(const Map *)map;
    for (int x : at)
        if (x < 0) fail("the copy engine takes no row below 0 when it stores");
    if (m.box[0] * m.width != 128 || from % 1024) fail("a box whose rows are not 128 bytes, or not at a multiple of 1024");
    Fiber *f = state.now;
    auto c = std::make_shared<Copy>();
    c->run = [=] {
        Block &b = block_of(from);
        const int bytes = columns(m, at[0]).count * m.width;
        each_row(m, at.data(), [&](int r, char *to) {
            if (!to || !bytes) return;
            char row[128];
            for (int unit = 0; unit < 128; unit += 16)
                memcpy(row + unit, &b.seen[inside(swizzled(from + r * 128 + unit), 16)], 16);
            to += (int64_t)at[0] * m.width;
            check_global(to, bytes);
            memcpy(to, row, bytes);
        });
    };
    f->open_bulk.push_back(c);
    start_copy(c, state.uses);
}

void bulk_load(unsigned to, const void *from, int bytes, unsigned barrier_at) {
    if (to % 16 || (uint64_t)from % 16 || bytes % 16) fail("a bulk copy that is not aligned to 16 bytes");
    auto c = std::make_shared<Copy>();
    c->run = [=] {
        Block &b = block_of(to);
        check_global(from, bytes);
        const unsigned at = inside(to, bytes);
        write_by_copy(b, at, from, bytes);
        landed(barrier_at, bytes);
    };
    c->awaited = true;
    start_copy(c, state.loads);
}

void bulk_store(void *to, unsigned from, int bytes, bool add) {  // reads shared memory first, and writes later
    if (from % 16 || (uint64_t)to % 16 || bytes % 16) fail("a bulk store that is not aligned to 16 bytes");
    auto read = std::make_shared<Copy>(), written = std::make_shared<Copy>();
    auto held = std::make_shared<std::vector<float>>();
    read->run = [=] {
        const char *there = &block_of(from).seen[inside(from, bytes)];
        held->assign((const float *)there, (const float *)(there + bytes));
    };
    written->run = [=] {
        complete(read);
        check_global(to, bytes);
        for (int i = 0; i < bytes / 4; i++) ((float *)to)[i] = (add ? ((float *)to)[i] : 0.0f) + (*held)[i];
    };
    written->lingers = true;
    state.now->open_bulk.push_back(read);
    state.now->open_writes.push_back(written);
    start_copy(read, state.uses);
    start_copy(written, state.uses);
}

typedef std::vector<std::shared_ptr<Copy>> Group;

static void commit(Group &open, Queue<Group> &groups) {
    groups.push_back(std::move(open));
    open.clear();
}

static void complete(Queue<Group> &groups, int pending) {
    for (; (int)groups.size() > pending; groups.pop_front())
        for (auto &c : groups.front()) complete(c);
}

void tma_store_commit() {
    commit(state.now->open_bulk, state.now->bulk);
    commit(state.now->open_writes, state.now->writes);
}

void tma_store_wait_read(int pending) { complete(state.now->bulk, pending); }

void tma_store_wait(int pending) {
    tma_store_wait_read(pending);
    complete(state.now->writes, pending);
}

// ----------------------------------------------------------------------------------------------------- wgmma

typedef double Half[16][256];           // an operand: 16 steps of k, and rows of a or columns of b

static void load_operand(const Block &b, uint64_t desc, int along, int transposed, int half, Half to) {
    const unsigned start = (unsigned)(desc & 0x3fff) << 4, panel = (unsigned)(desc >> 16 & 0x3fff) << 4;
    const unsigned rows = (unsigned)(desc >> 32 & 0x3fff) << 4;
    if (desc >> 62 != 1) fail("a descriptor without the 128-byte swizzle");
    auto unit = [&](unsigned offset, unsigned short *bits) {  // 16 bytes, which the swizzle moves as a whole
        memcpy(bits, &b.seen[inside(swizzled(start + offset), 16)], 16);
    };
    unsigned short bits[8];
    if (transposed) {
        for (int k = 0; k < 16; k++)
            for (int i = 0; i < along; i += 8) {
                unit(i / 64 * panel + k / 8 * rows + k % 8 * 128 + i % 64 * 2, bits);
                for (int j = 0; j < 8; j++) to[k][i + j] = widened(bits[j], half);
            }
    } else {
        for (int i = 0; i < along; i++)
            for (int k = 0; k < 16; k += 8) {
                unit(i / 8 * rows + i % 8 * 128 + k * 2, bits);
                for (int j = 0; j < 8; j++) to[k + j][i] = widened(bits[j], half);
            }
    }
}

#ifdef __x86_64__
__attribute__((target_clones("avx2", "default")))
#endif
__attribute__((optimize("O3")))
static void multiply(const Half a, const Half b, int row, double *sums, int n) {
    for (int c = 0; c < n; c += 8) {
        double s[8];
        for (int j = 0; j < 8; j++) s[j] = sums[c + j];
        for (int k = 0; k < 16; k++)
            for (int j = 0; j < 8; j++) s[j] += a[k][row] * b[k][c + j];
        for (int j = 0; j < 8; j++) sums[c + j] = s[j];
    }
}

static void execute(Fiber **threads, size_t which) {  // the same product of all 128
    const Product &p = threads[0]->products[which];
    const Block &b = *threads[0]->block;
    static Half a, z;
    if (!p.from_registers) load_operand(b, p.desc_a, 64, p.trans_a, p.half, a);
    load_operand(b, p.desc_b, p.n, p.trans_b, p.half, z);
    for (int i = 0; i < 128; i++) {
        const Product &q = threads[i]->products[which];
        if (q.desc_a != p.desc_a || q.desc_b != p.desc_b || q.n != p.n || q.add != p.add) fail("a warpgroup's threads ask for different products");
        const int row = i / 32 * 16 + i % 32 / 4, column = 2 * (i % 4);
        for (int j = 0; j < 4 && p.from_registers; j++)
            for (int e = 0; e < 2; e++)
                a[column + 8 * (j / 2) + e][row + 8 * (j % 2)] = widened((state.uses == LATE ? *q.a[j] : q.early[j]) >> 16 * e, p.half);
    }
    for (int row = 0; row < 64; row++) {
        double sums[256] = {};
        auto each = [&](auto f) {       // f(column, where its sum is kept): of four threads
            for (int t = 0; t < 4; t++) {
                const Product &q = threads[row / 16 * 32 + row % 8 * 4 + t]->products[which];
                for (int c = 0; c < p.n / 8; c++)
                    for (int e = 0; e < 2; e++) f(8 * c + 2 * t + e, q.keep[4 * c + 2 * (row / 8 % 2) + e]);
            }
        };
        if (p.add) each([&](int column, float *x) { sums[column] = *x; });
        multiply(a, z, row, sums, p.n);
        each([&](int column, float *x) { *x = (float)sums[column]; });
    }
}

void wgmma(float **d, int n, unsigned **a, uint64_t desc_a, uint64_t desc_b, int add, int trans_a, int trans_b, int half) {
    Product p{};
    memcpy(p.keep, d, n / 2 * sizeof(float *));
    p.desc_a = desc_a, p.desc_b = desc_b, p.n = n, p.add = add, p.trans_a = trans_a, p.trans_b = trans_b, p.half = half;
    p.from_registers = a != nullptr;
    for (int i = 0; a && i < 4; i++) p.a[i] = a[i], p.early[i] = *a[i];
    state.now->products.push_back(p);
}

template <typename F>
static void with_group(F f) {
    Fiber *me = state.now;
    const int g = me->id / 128;
    rendezvous(me->block->groups[g], 128, "its warpgroup", [&] {
        Fiber *all[128];
        for (int i = 0; i < 128; i++) all[i] = &me->block->fibers[g * 128 + i];
        f(all);
    });
}

static void run_products(Fiber **all, int pending) {
    while ((int)all[0]->product_groups.size() > pending) {
        for (int i = 0; i < 128; i++) {
            if (all[i]->product_groups.empty()) fail("a warpgroup's threads committed different products");
            all[i]->products.swap(all[i]->product_groups.front());
            all[i]->product_groups.pop_front();
        }
        for (size_t w = 0; w < all[0]->products.size(); w++) execute(all, w);
        for (int i = 0; i < 128; i++) all[i]->products.clear();
    }
}

void wgmma_commit() {
    state.now->product_groups.push_back(std::move(state.now->products));
    state.now->products.clear();
    with_group([&](Fiber **all) {
        if (state.uses == EARLY || (state.uses == ANY && below(2))) run_products(all, 0);
    });
}

void wgmma_wait(int pending) {
    with_group([&](Fiber **all) { run_products(all, pending); });
}

}  // namespace emulator
