// Softmax attention, forward, for Hopper (sm_90a): TMA, mbarriers, wgmma, warps with roles.
//
// A block is one producer warpgroup, of which one thread starts copies and which gives its registers away, and
// CONSUMERS warpgroups that own 64 queries each. Blocks stay: each walks tiles of 64 * CONSUMERS queries, the longest
// first, in an order that producer and consumers compute alike. Keys come from the last the tile sees to the first,
// BLOCK_N at a time, so that all blocks cut by a mask come first. A consumer keeps o, m, l and p in registers:
//
//     start s' = q k'^T of the next keys; start o += p v; wait for s'; softmax of s'; wait for o; scale o; p = s'
//
// p is written only after the wait for the product that reads it. k and v have rings of STAGES places each, filled by
// TMA, which counts bytes on a `full` barrier and zeroes rows beyond the end; every warp of a consumer reports on
// `empty` when it has no more use for a place. Queries are given back as soon as the last logits are there, each
// consumer's by itself, so that the next tile's come while this one ends; results leave straight from registers.
//
// D = 128 takes two panels of 64 columns (sm90.cuh).
//
// Packed sequences are found as in triton.py: sequence i has the tile slots from begin_i / ROWS + i on. Copies do not
// know where a sequence ends, so keys beyond its end are masked and rows of v beyond it zeroed before they are used: what
// lies there may be no number.
//
// GROUPED: the query heads that share a head of k and v share tiles, too; there are 2, 4, ... or 64 of them. Then `heads`,
// `h` and Tile::head count heads of k and v, row r of a tile is position r / group, query head r % group, and q's map is
// (D, group, N, H_KV, B) with boxes of 64 x group x 64 / group.
//
// SPLIT: few tiles of many keys would leave most SMs idle, so `splits` blocks share the keys of a tile. Each writes what it
// has: sums that are not divided yet, fp32, and m and l of every row; cuda_merge.cu puts them together.
//
// wgmma's accumulators, with g = lane / 4, t = lane % 4: d[4 j + i] is row 16 warp + g + 8 (i / 2), column
// 8 j + 2 t + i % 2; the registers of an A operand are the same with two columns packed. So s turns into p in place.
//
// The compiler defines HEAD_DIM, VALUE_DIM, CONSUMERS, BLOCK_N, STAGES, BLOCKS_PER_SM, TAKE_TURNS (consumers start
// their products one after the other), BF16, LEFT and RIGHT (whether there is such a limit), SOFTCAP, PACKED, GROUPED,
// SPLIT and SINKS (1: fp32, 2: as q).

#include "sm90.cuh"

#define INFINITY_ __int_as_float(0x7f800000)

constexpr int D = HEAD_DIM, E = VALUE_DIM;
constexpr int ROWS = 64 * CONSUMERS;
constexpr int THREADS = 128 * (CONSUMERS + 1);
constexpr int Q_BYTES = 64 * D * 2;     // of one consumer
constexpr int S = BLOCK_N / 2, O = E / 2, P = BLOCK_N / 4;  // registers
constexpr int WARPS = 4 * CONSUMERS;
static_assert(BLOCK_N % 16 == 0 && D % 64 == 0 && E % 64 == 0, "whole products");

struct Args {
    TensorMap q, k, v;                  // (D, N, heads, B); boxes of 64 columns and 64 (q) or BLOCK_N rows
    char *o;                            // SPLIT: sums (splits, B * H, N, E), fp32
    float *lse;                         // or null; SPLIT: m, in base 2, and l (splits, B * H, N, 2)
    const char *sinks;
    const int *cu_q, *cu_k;
    long long o_b, o_h, o_n;            // strides in bytes
    int heads, h, group;                // B * H, H, H / H_KV; GROUPED: B * H_KV, H_KV, H / H_KV
    int n_q, n_kv, left, right;
    int top_left, sequences;
    int tiles, section;                 // tiles of a head; heads that are worked on together
    float factor, inner;                // scale * log2(e); with a softcap, softcap * log2(e) and scale / softcap
    int log_group;                      // base 2; GROUPED only
    int splits;
};
static_assert(sizeof(Args) == 512, "as cuda_sm90.py packs them");

// ------------------------------------------------------------------------------------------------- barriers

// A place in a ring, and the parity of the phase in which it is filled.
struct Place {
    int at = 0, parity = 0;
    __device__ __forceinline__ void next() {
        if (++at == STAGES) at = 0, parity ^= 1;
    }
};

// 64 rows of queries, from position `row` on.
__device__ __forceinline__ void copy_q(u32 to, const TensorMap &map, u32 barrier, int column, int row, int h, int b) {
    if (!GROUPED) return load_box(to, map, barrier, column, row, h, b);
    asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%3, %4, %5, %6, %7}], [%2];"
                 :: "r"(to), "l"(&map), "r"(barrier), "r"(column), "r"(0), "r"(row), "r"(h), "r"(b) : "memory");
}

// ------------------------------------------------------------------------------------------------- products

FROM_SHARED(multiply, 40, 80, "%40", "%41", "%42", "0, 0")
FROM_SHARED(multiply, 64, 128, "%64", "%65", "%66", "0, 0")
FROM_SHARED(multiply, 80, 160, "%80", "%81", "%82", "0, 0")
FROM_SHARED(multiply, 88, 176, "%88", "%89", "%90", "0, 0")
FROM_REGISTERS(32, 64, "%32, %33, %34, %35", "%36", "%37")
FROM_REGISTERS(64, 128, "%64, %65, %66, %67", "%68", "%69")
FROM_REGISTERS(128, 256, "%128, %129, %130, %131", "%132", "%133")

// s = q k^T: both lie row by row along D.
__device__ __forceinline__ void start_s(float (&s)[S], u32 q, u32 k) {
    const u64 a = operand(q, 16), b = operand(k, 16);
#pragma unroll
    for (int d = 0; d < D / 16; d++)
        multiply(s, a + (d / 4 * 64 * 128 + d % 4 * 32) / 16, b + (d / 4 * BLOCK_N * 128 + d % 4 * 32) / 16, d > 0);
    commit();
}

// o += p v: the rows of v are what is summed over.
__device__ __forceinline__ void start_o(float (&o)[O], u32 (&p)[P], u32 v) {
    const u64 b = operand(v, BLOCK_N * 128);
#pragma unroll
    for (int j = 0; j < BLOCK_N / 16; j++) multiply(o, p + 4 * j, b + j * 16 * 128 / 16, 1);
    commit();
}

// -------------------------------------------------------------------------------------------------- softmax

// 1 - 2 / (e^2x + 1) cancels where x is small.
__device__ __forceinline__ float tanh_(float x) {
    float y;
    asm volatile("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(exp2_(x * 2.885390081777927f) + 1.0f));
    return fabsf(x) < 0.03f ? x - x * x * x * (1.0f / 3.0f) : 1.0f - 2.0f * y;
}

struct Keys {
    int low[2], high[2];                // the first and the last key that rows g and g + 8 see
};

struct Rows {
    float m[2], l[2], alpha[2];         // of rows g and g + 8; l is this lane's part until the end
};

// s becomes p, still in fp32; x.alpha is what o must be scaled with.
template <bool MASK>
__device__ __forceinline__ void softmax(float (&s)[S], Rows &x, int key, const Keys &see, float factor, float inner) {
    if (SOFTCAP)
#pragma unroll
        for (int i = 0; i < S; i++) s[i] = tanh_(s[i] * inner);
    if (MASK) {
        key += 2 * (threadIdx.x % 4);
#pragma unroll
        for (int i = 0; i < S; i++) {
            int at = key + 8 * (i / 4) + i % 2;
            if (at > see.high[i / 2 % 2] || (LEFT && at < see.low[i / 2 % 2])) s[i] = -INFINITY_;
        }
    }
    float pivot[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float m = x.m[r];
#pragma unroll
        for (int j = 0; j < S / 4; j++) m = fmaxf(m, fmaxf(s[4 * j + 2 * r], s[4 * j + 2 * r + 1]));
        m = fmaxf(m, __shfl_xor_sync(~0u, m, 1));
        m = fmaxf(m, __shfl_xor_sync(~0u, m, 2));
        pivot[r] = MASK && m == -INFINITY_ ? 0.0f : m * factor;
        x.alpha[r] = exp2_(x.m[r] * factor - pivot[r]);
        x.m[r] = m;
        x.l[r] *= x.alpha[r];
    }
#pragma unroll
    for (int i = 0; i < S; i++) {
        s[i] = exp2_(s[i] * factor - pivot[i / 2 % 2]);
        x.l[i / 2 % 2] += s[i];
    }
}

__device__ __forceinline__ void to_operand(u32 (&p)[P], const float (&s)[S]) {
#pragma unroll
    for (int i = 0; i < P; i++) p[i] = pack(s[2 * i], s[2 * i + 1]);
}

// --------------------------------------------------------------------------------------------------- tiles

__device__ __forceinline__ int offset(const int *cu, int i, int n) { return min(max(__ldg(cu + i), 0), n); }

// How many positions so many rows are.
__device__ __forceinline__ int positions(const Args &a, int rows) { return GROUPED ? rows >> a.log_group : rows; }

// The first query head of the tile's, and how many heads further row g + 8 r of this warp is.
__device__ __forceinline__ int query_head(const Args &a, int head) { return GROUPED ? head * a.group : head; }
__device__ __forceinline__ int further(const Args &a, int r) {
    return GROUPED ? (threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4 + 8 * r) & (a.group - 1) : 0;
}

// The i-th tile of this block; blocks take them in turns, back and forth, so that none gets the longest every time.
struct Tile {
    int head, m0;                       // m0: its first position
    int begin_q, begin_k, n_q, n_kv;    // of its sequence
    int shift;                          // query i stands at position i + shift
    int first, blocks;                  // keys, from which on, and how many times BLOCK_N
    int split;                          // which part of them

    __device__ __forceinline__ bool find(const Args &a, int i) {
        const int length = positions(a, ROWS);
        int t = i * gridDim.x + (i % 2 ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
        if (t >= a.heads * a.tiles * (SPLIT ? a.splits : 1)) return false;
        split = SPLIT ? t % a.splits : 0;
        if (SPLIT) t /= a.splits;
        int from = t / (a.section * a.tiles) * a.section, size = min(a.section, a.heads - from);
        t -= from * a.tiles;
        head = from + t % size;
        int slot = RIGHT ? a.tiles - 1 - t / size : t / size;
        begin_q = begin_k = 0, n_q = a.n_q, n_kv = a.n_kv;
        if (PACKED) {
            int low = 0, high = a.sequences - 1;
            while (low < high) {
                int middle = (low + high + 1) / 2;
                if (offset(a.cu_q, middle, a.n_q) / length + middle <= slot) low = middle;
                else high = middle - 1;
            }
            begin_q = offset(a.cu_q, low, a.n_q);
            begin_k = offset(a.cu_k, low, a.n_kv);
            n_q = max(0, offset(a.cu_q, low + 1, a.n_q) - begin_q);
            n_kv = max(0, offset(a.cu_k, low + 1, a.n_kv) - begin_k);
            slot -= begin_q / length + low;
        }
        m0 = slot * length;
        shift = a.top_left ? 0 : n_kv - n_q;
        int end = RIGHT ? max(0, min(n_kv, min(m0 + length, n_q) + shift + a.right)) : n_kv;
        first = LEFT ? max(0, m0 + shift - a.left) / BLOCK_N * BLOCK_N : 0;
        blocks = max(0, end - first + BLOCK_N - 1) / BLOCK_N;
        if (SPLIT) {
            const int each = (blocks + a.splits - 1) / a.splits, before = min(blocks, split * each);
            first += before * BLOCK_N;
            blocks = min(each, blocks - before);
        }
        return true;
    }

    __device__ __forceinline__ bool unused() const { return PACKED && m0 >= n_q; }
};

template <int SIZE>
struct Ring {
    static constexpr int BYTES = BLOCK_N * SIZE * 2;
    u32 places, full, empty;
    __device__ __forceinline__ u32 operator[](const Place &x) const { return places + x.at * BYTES; }

    __device__ __forceinline__ void fetch(const TensorMap &map, Place &place, int row, int h, int b) const {
        await(empty + 8 * place.at, place.parity ^ 1);
        expect(full + 8 * place.at, BYTES);
#pragma unroll
        for (int i = 0; i < SIZE / 64; i++)
            load_box((*this)[place] + i * BLOCK_N * 128, map, full + 8 * place.at, 64 * i, row, h, b);
        place.next();
    }
};

struct Shared {
    u32 q, q_full, q_empty;             // for each consumer its own
    Ring<D> k;
    Ring<E> v;
    __device__ __forceinline__ explicit Shared(u32 base) : q(base) {
        k.places = base + CONSUMERS * Q_BYTES;
        v.places = k.places + STAGES * k.BYTES;
        q_full = v.places + STAGES * v.BYTES;
        q_empty = q_full + 8 * CONSUMERS;
        k.full = q_empty + 8 * CONSUMERS;
        k.empty = k.full + 8 * STAGES;
        v.full = k.empty + 8 * STAGES;
        v.empty = v.full + 8 * STAGES;
    }
};

__device__ __forceinline__ void produce(const Args &a, const Shared &at) {
    Place k, v;
    Tile tile;
    int parity = 0;
    for (int i = 0; tile.find(a, i); i++) {
        if (tile.blocks == 0 || tile.unused()) continue;
        int b = tile.head / a.h, h = tile.head % a.h, h_kv = GROUPED ? h : h / a.group;
        int first = tile.begin_k + tile.first, row = first + (tile.blocks - 1) * BLOCK_N;
        at.k.fetch(a.k, k, row, h_kv, b);
        for (int c = 0; c < CONSUMERS; c++) {
            const int query = tile.begin_q + tile.m0 + positions(a, 64 * c);
            await(at.q_empty + 8 * c, parity ^ 1);
            expect(at.q_full + 8 * c, Q_BYTES);
#pragma unroll
            for (int d = 0; d < D; d += 64)
                copy_q(at.q + c * Q_BYTES + d * 128, a.q, at.q_full + 8 * c, d, query, h, b);
        }
        parity ^= 1;
        for (; row > first; row -= BLOCK_N) {
            at.k.fetch(a.k, k, row - BLOCK_N, h_kv, b);
            at.v.fetch(a.v, v, row, h_kv, b);
        }
        at.v.fetch(a.v, v, first, h_kv, b);
    }
}

__device__ __forceinline__ void wait_for_turn(int consumer) {
    if (TAKE_TURNS) asm volatile("bar.sync %0, 256;" :: "r"(1 + consumer) : "memory");
}

__device__ __forceinline__ void pass_turn(int consumer) {
    if (TAKE_TURNS) asm volatile("bar.arrive %0, 256;" :: "r"(1 + (consumer + 1) % CONSUMERS) : "memory");
}

// What a consumer holds of its tile.
struct Work {
    float s[S], o[O];
    u32 p[P];
    Rows x;
    Keys see;
};

// One block of keys, which has come: its logits, and the product of the block before.
template <bool MASK>
__device__ __forceinline__ void step(Work &w, const Args &a, const Shared &at, Place &k, Place &v, u32 q, int consumer,
                                     int key, int first) {
    const bool reports = threadIdx.x % 32 == 0;
    wait_for_turn(consumer);
    pin(w.s);
    pin(w.o);
    pin(w.p);
    begin();
    start_s(w.s, q, at.k[k]);
    await(at.v.full + 8 * v.at, v.parity);
    begin();                            // once more: the wait may have taken another path
    start_o(w.o, w.p, at.v[v]);
    pass_turn(consumer);
    finish<1>();
    pin(w.s);
    if (reports) arrive(at.k.empty + 8 * k.at);
    k.next();
    softmax<MASK>(w.s, w.x, key, w.see, a.factor, a.inner);
    if (key > first) await(at.k.full + 8 * k.at, k.parity);  // here, as the assembler moves nothing across a loop
    finish<0>();
    pin(w.s);                           // p is not made from it before the product that reads p is over
    pin(w.o);
    pin(w.p);
    if (reports) arrive(at.v.empty + 8 * v.at);
    v.next();
#pragma unroll
    for (int i = 0; i < O; i++) w.o[i] *= w.x.alpha[i / 2 % 2];
    to_operand(w.p, w.s);
}

// Rows of v that are beyond the end of their sequence: every consumer zeroes them for itself, before it uses any.
__device__ __forceinline__ void zero_rows(u32 v, int from, int consumer) {
    for (int unit = from * 8 + threadIdx.x % 128; unit < BLOCK_N * 8; unit += 128)
#pragma unroll
        for (int i = 0; i < E / 64; i++)
            asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};"
                         :: "r"(v + i * BLOCK_N * 128 + unit * 16), "r"(0) : "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    asm volatile("bar.sync %0, 128;" :: "r"(1 + CONSUMERS + consumer) : "memory");
}

// All keys of a tile, from the last to the first.
__device__ __forceinline__ void walk(Work &w, const Args &a, const Shared &at, const Tile &tile, Place &k, Place &v,
                                     u32 q, int consumer, int all_from, int all_to) {
    const int lane = threadIdx.x % 32;
    int key = tile.first + (tile.blocks - 1) * BLOCK_N;
    await(at.k.full + 8 * k.at, k.parity);
    pin(w.s);
    begin();
    start_s(w.s, q, at.k[k]);
    finish<0>();
    pin(w.s);
    if (lane == 0) arrive(at.k.empty + 8 * k.at);
    k.next();
    softmax<true>(w.s, w.x, key, w.see, a.factor, a.inner);
    to_operand(w.p, w.s);
    if (PACKED && key + BLOCK_N > tile.n_kv) {
        await(at.v.full + 8 * v.at, v.parity);
        zero_rows(at.v[v], tile.n_kv - key, consumer);
    }
    if (key > tile.first) await(at.k.full + 8 * k.at, k.parity);
    key -= BLOCK_N;
    for (; key >= tile.first && key + BLOCK_N - 1 > all_to; key -= BLOCK_N)
        step<true>(w, a, at, k, v, q, consumer, key, tile.first);
    for (; key >= (LEFT ? max(tile.first, all_from) : tile.first); key -= BLOCK_N)
        step<false>(w, a, at, k, v, q, consumer, key, tile.first);
    if (LEFT)
        for (; key >= tile.first; key -= BLOCK_N) step<true>(w, a, at, k, v, q, consumer, key, tile.first);
    if (lane == 0) arrive(at.q_empty + 8 * consumer);
    await(at.v.full + 8 * v.at, v.parity);
    pin(w.o);
    pin(w.p);
    begin();
    start_o(w.o, w.p, at.v[v]);
    finish<0>();
    pin(w.o);
    pin(w.p);
    if (lane == 0) arrive(at.v.empty + 8 * v.at);
    v.next();
}

// Adds up what the lanes of a row have; alpha becomes what o must be scaled with, and m is in base 2.
__device__ __forceinline__ void close(Rows &x, const Args &a, int head) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
        x.l[r] += __shfl_xor_sync(~0u, x.l[r], 1);
        x.l[r] += __shfl_xor_sync(~0u, x.l[r], 2);
        x.m[r] *= a.factor;
        x.alpha[r] = 1.0f;
        if (SPLIT) continue;
        if (SINKS) {
            float sink = sink_of(a.sinks, query_head(a, head % a.h) + further(a, r), SINKS), m = fmaxf(x.m[r], sink);
            float pivot = m == -INFINITY_ ? 0.0f : m;
            x.alpha[r] = exp2_(x.m[r] - pivot);
            x.l[r] = x.l[r] * x.alpha[r] + exp2_(sink - pivot);
            x.m[r] = m;
        }
        x.alpha[r] /= x.l[r] == 0.0f ? 1.0f : x.l[r];
    }
}

// Writes the 16 rows of one warp, from position `first` on, in units of 16 bytes.
__device__ __forceinline__ void store(const Args &a, const float (&o)[O], const Rows &x, const Tile &tile, int first) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const int h = query_head(a, tile.head % a.h);
    char *out = a.o + tile.head / a.h * a.o_b + h * a.o_h + (tile.begin_q + first) * a.o_n;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int row = positions(a, g + 8 * r);
        const bool there = first + row < tile.n_q;
#pragma unroll
        for (int c = 0; c < E / 8; c += 4) {
            u32 y[4];
#pragma unroll
            for (int i = 0; i < 4; i++)
                y[i] = pack(o[4 * (c + i) + 2 * r] * x.alpha[r], o[4 * (c + i) + 2 * r + 1] * x.alpha[r]);
            transpose(y);
            char *to = out + further(a, r) * a.o_h + row * a.o_n + (c + t) * 16;
            if (there) *reinterpret_cast<uint4 *>(to) = make_uint4(y[0], y[1], y[2], y[3]);
        }
        if (a.lse && t == 0 && there)
            a.lse[(long long)(query_head(a, tile.head) + further(a, r)) * a.n_q + tile.begin_q + first + row] =
                (x.m[r] + __log2f(x.l[r])) * 0.6931471805599453f;
    }
}

// The same of a part of the keys, for cuda_merge.cu.
__device__ __forceinline__ void store_part(
    const Args &a, const float (&o)[O], const Rows &x, const Tile &tile, int first
) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const long long every = GROUPED ? a.heads * a.group : a.heads;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int row = positions(a, g + 8 * r);
        if (first + row >= tile.n_q) continue;
        const long long head = tile.split * every + query_head(a, tile.head) + further(a, r);
        const long long at = head * a.n_q + first + row;
        float2 *to = reinterpret_cast<float2 *>(a.o) + at * (E / 2) + t;
#pragma unroll
        for (int j = 0; j < E / 8; j++) to[4 * j] = make_float2(o[4 * j + 2 * r], o[4 * j + 2 * r + 1]);
        if (t == 0) reinterpret_cast<float2 *>(a.lse)[at] = make_float2(x.m[r], x.l[r]);
    }
}

__device__ __forceinline__ void consume(const Args &a, const Shared &at, int consumer) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    Place k, v;
    Tile tile;
    int parity = 0;
    if (TAKE_TURNS && consumer == CONSUMERS - 1) pass_turn(consumer);  // the first goes first
    for (int i = 0; tile.find(a, i); i++) {
        if (tile.unused()) continue;
        Work w;
        w.x.m[0] = w.x.m[1] = -INFINITY_, w.x.l[0] = w.x.l[1] = 0.0f;
#pragma unroll
        for (int e = 0; e < O; e++) w.o[e] = 0.0f;
        const int top = tile.m0 + positions(a, 64 * consumer), first = top + positions(a, 16 * warp);
        const int last = tile.n_kv - 1;
        for (int r = 0; r < 2; r++) {
            int position = first + positions(a, lane / 4 + 8 * r) + tile.shift;
            w.see.low[r] = position - a.left;
            w.see.high[r] = RIGHT ? min(last, position + a.right) : last;
        }
        const int all_from = top + positions(a, 63) + tile.shift - a.left;  // keys that all rows see
        const int all_to = RIGHT ? min(last, top + tile.shift + a.right) : last;
        if (tile.blocks > 0) {
            await(at.q_full + 8 * consumer, parity);
            parity ^= 1;
            walk(w, a, at, tile, k, v, at.q + consumer * Q_BYTES, consumer, all_from, all_to);
        }
        close(w.x, a, tile.head);
        if (SPLIT) store_part(a, w.o, w.x, tile, first);
        else store(a, w.o, w.x, tile, first);
    }
}

// Registers of a thread, for which those at launch are pooled.
constexpr int OF_PRODUCER = CONSUMERS == 1 ? 40 : CONSUMERS == 3 ? 32 : PACKED ? 40 : 24;
constexpr int OF_CONSUMER = CONSUMERS == 1 ? 216 : CONSUMERS == 3 ? 160 : PACKED ? 232 : 240;

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
flash_sm90_forward_kernel(const __grid_constant__ Args a) {
    extern __shared__ __align__(1024) char shared[];
    const Shared at((u32)__cvta_generic_to_shared(shared));
    if (threadIdx.x == 0) {
        for (int i = 0; i < CONSUMERS; i++) init(at.q_full + 8 * i, 1), init(at.q_empty + 8 * i, 4);
        for (int i = 0; i < STAGES; i++) {
            init(at.k.full + 8 * i, 1), init(at.k.empty + 8 * i, WARPS);
            init(at.v.full + 8 * i, 1), init(at.v.empty + 8 * i, WARPS);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    }
    __syncthreads();
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    asm volatile("griddepcontrol.wait;" ::: "memory");
    if (threadIdx.x < 128) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"(OF_PRODUCER));
        if (threadIdx.x == 0) produce(a, at);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(OF_CONSUMER));
        consume(a, at, __shfl_sync(~0u, threadIdx.x / 128, 0) - 1);
    }
}
