// What warps do: shuffles, matrices, mma.sync, copies by threads (cp.async).

#include "core.h"

namespace emulator {

// ------------------------------------------------------------------------------------------------------- warps

struct Exchange { unsigned value, got; int from; };

static Fiber *warp_of(Fiber *f) { return &f->block->fibers[f->warp * 32]; }  // its 32 threads

template <typename T, typename F>
static void with_warp(T &mine, F each) {  // each(all 32) when all have come
    Fiber *f = state.now;
    f->mine = &mine;
    rendezvous(f->block->warps[f->warp], 32, "its warp", [&] {
        T *all[32];
        Fiber *fibers = warp_of(f);
        for (int i = 0; i < 32; i++) all[i] = (T *)fibers[i].mine;
        each(all);
    });
}

void sync_warp() {
    int none = 0;
    with_warp(none, [](int **) {});
}

unsigned shuffle(unsigned value, int from) {
    Exchange x{value, value, from};
    with_warp(x, [](Exchange **all) {
        for (int i = 0; i < 32; i++) all[i]->got = all[all[i]->from % 32]->value;
    });
    return x.got;
}

struct Matrices { unsigned address; unsigned *x[4]; };

void ldmatrix(unsigned &x0, unsigned &x1, unsigned &x2, unsigned &x3, unsigned address, int transposed) {
    Matrices m{address, {&x0, &x1, &x2, &x3}};
    with_warp(m, [&](Matrices **all) {
        for (int k = 0; k < 4; k++) {
            unsigned short rows[8][8];
            for (int r = 0; r < 8; r++) {
                if (all[8 * k + r]->address % 16) fail("ldmatrix: a row that does not begin at a multiple of 16");
                read(all[8 * k + r]->address, rows[r], 16);
            }
            for (int i = 0; i < 32; i++) {
                const int g = i / 4, t = i % 4;
                const unsigned a = transposed ? rows[2 * t][g] : rows[g][2 * t];
                const unsigned b = transposed ? rows[2 * t + 1][g] : rows[g][2 * t + 1];
                *all[i]->x[k] = b << 16 | a;
            }
        }
    });
}

struct Stored { unsigned address, x[4]; };

void stmatrix(unsigned address, unsigned x0, unsigned x1, unsigned x2, unsigned x3) {
    Stored m{address, {x0, x1, x2, x3}};
    Fiber *f = state.now;
    f->mine = &m;
    rendezvous(f->block->warps[f->warp], 32, "its warp", [&] {
        Fiber *fibers = warp_of(f);
        Fiber *last = state.now;
        for (int k = 0; k < 4; k++)
            for (int r = 0; r < 8; r++) {
                unsigned row[4];
                for (int t = 0; t < 4; t++) row[t] = ((Stored *)fibers[4 * r + t].mine)->x[k];
                const unsigned to = ((Stored *)fibers[8 * k + r].mine)->address;
                if (to % 16) fail("stmatrix: a row that does not begin at a multiple of 16");
                for (int t = 0; t < 4; t++) {  // a lane's own words are its to fence
                    state.now = &fibers[4 * r + t];
                    write(to + 4 * t, &row[t], 4);
                }
                state.now = last;
            }
    });
}

struct Fragments { float *c[4]; unsigned a[4], b[2]; };

void mma(float &c0, float &c1, float &c2, float &c3, unsigned a0, unsigned a1, unsigned a2, unsigned a3,
                unsigned b0, unsigned b1, int half) {
    Fragments m{{&c0, &c1, &c2, &c3}, {a0, a1, a2, a3}, {b0, b1}};
    with_warp(m, [&](Fragments **all) {
        float a[16][16], b[16][8];
        for (int i = 0; i < 32; i++) {
            const int g = i / 4, t = i % 4;
            for (int k = 0; k < 4; k++)
                for (int e = 0; e < 2; e++) a[g + 8 * (k % 2)][2 * t + 8 * (k / 2) + e] = part(all[i]->a[k], e, half);
            for (int k = 0; k < 2; k++)
                for (int e = 0; e < 2; e++) b[2 * t + 8 * k + e][g] = part(all[i]->b[k], e, half);
        }
        for (int r = 0; r < 16; r++) {
            auto kept = [&](int c) { return all[r % 8 * 4 + c / 2]->c[r / 8 * 2 + c % 2]; };
            double sums[8];
            for (int c = 0; c < 8; c++) sums[c] = *kept(c);
            for (int j = 0; j < 16; j++)
                for (int c = 0; c < 8; c++) sums[c] += (double)a[r][j] * b[j][c];
            for (int c = 0; c < 8; c++) *kept(c) = (float)sums[c];
        }
    });
}

// ------------------------------------------------------------------------------------------- copies by threads

void land(Piece &p) {
    char x[16] = {};
    if (p.bytes) memcpy(x, p.from, p.bytes);
    write(p.to, x, 16);
    p.landed = true;
}

void cp_async(unsigned to, const void *from, int bytes) {
    if (to % 16 || (uint64_t)from % 16) fail("cp.async: not aligned to 16 bytes");
    if (bytes) check_global(from, bytes);
    inside(to, 16);
    Piece p{to, from, bytes};
    if (state.loads == EARLY || (state.loads == ANY && below(2))) land(p);
    state.now->open.push_back(p);
}

void cp_async_commit() {
    state.now->groups.push_back(std::move(state.now->open));
    state.now->open.clear();
}

void cp_async_wait(int pending) {
    Fiber *f = state.now;
    while ((int)f->groups.size() > pending) {
        for (auto &p : f->groups.front())
            if (!p.landed) land(p);
        f->groups.pop_front();
    }
}

}  // namespace emulator
