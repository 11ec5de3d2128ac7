// Softmax attention, forward, for Hopper (sm_90a): TMA, mbarriers, wgmma, warp specialisation.
//
// A block is one producer warpgroup and CONSUMERS consumer warpgroups, and stays: it walks tiles of 64 * CONSUMERS queries
// in an order that producer and consumers compute alike (Tile).
//
//     producer    one thread issues TMA loads: q of the tile, and blocks of BLOCK_N keys into rings of STAGES stages, one
//                 for k and one for v. It gives its registers to the consumers.
//     consumer    owns 64 queries; o, m, l and p stay in its registers. For each block of keys:
//                 start s' = q k'^T; start o += p v; wait for s'; softmax of s'; wait for o; rescale o; p = s'
//
// Who waits for what: TMA counts bytes on the `full` barrier of a stage, for which consumers wait; every consumer warp
// arrives on `empty` when it has no more use for the stage, for which the producer waits. q has the same pair for each
// consumer, and is released as soon as the last logits are there, so that the next tile's q comes while this tile ends.
// p is written only after the wait for the product that reads it. Results leave straight from registers.
//
// Keys come from the last the tile sees to the first, so that the blocks a mask cuts come first. A consumer skips the blocks
// that none of its rows sees, and of the first it takes 64 or 128 keys if its rows see no more. D = 128 takes two panels.
//
// Packed sequences are found as in triton.py: sequence i has the tile slots from begin_i / ROWS + i on. TMA does not know
// where a sequence ends, so keys beyond its end are masked, and rows of v beyond it are zeroed before they are used: what
// lies there may be no number.
//
// PACK_GQA (pack_gqa.cuh): `heads`, `h` and Tile::head count heads of k and v, and q's map is (D, group, N, H_KV, B) with
// boxes of 64 x group x 64 / group.
//
// SPLIT: few tiles of many keys would leave most SMs idle, so `splits` blocks share the keys of a tile. Each writes its
// sums, not divided yet, in fp32, and m and l of every row; combine.cu combines them. One without keys leaves m and l.
//
// LENGTHS: k and v are a cache, of which a row of q (PACKED: a sequence) uses as many keys as `lengths` says. Keys are
// split by that length, and rows of v beyond it are zeroed, as those of packed sequences are.
// PAGE: key n of row i is row n % PAGE of page table[i][n / PAGE]. A block of keys is BOXES boxes, each within a page, and
// the producer as many threads. Each looks up its page one block ahead, before it waits for a stage. Entries are clamped.
// No thread falls behind by a phase: without its box the stage is not full.
//
// The registers of s are those of the A operand p with two columns packed (softmax.cuh), so s turns into p in place.
//
// The compiler defines HEAD_DIM, VALUE_DIM, CONSUMERS, BLOCK_N, STAGES, BLOCKS_PER_SM, TAKE_TURNS (consumers start
// their products one after the other), BF16, LEFT and RIGHT (whether there is such a limit), SOFTCAP, PACKED, PACK_GQA,
// SPLIT, SINKS (1: fp32, 2: as q), LENGTHS, PAGE (0: k and v are not paged), BOX (rows of a TMA load of k or v) and
// ONCE (no other block reads the same keys).

#include "cuda/include/sm90.cuh"
#include "cuda/include/softmax.cuh"
#include "cuda/include/mask.cuh"
#include "cuda/include/pack_gqa.cuh"
#include "cuda/include/packed.cuh"
#include "cuda/include/tile_scheduler.cuh"

constexpr int D = HEAD_DIM, E = VALUE_DIM;
constexpr int ROWS = 64 * CONSUMERS;
constexpr int THREADS = 128 * (CONSUMERS + 1);
constexpr int Q_BYTES = 64 * D * 2;     // of one consumer
constexpr int S = BLOCK_N / 2, O = E / 2, P = BLOCK_N / 4;  // registers
constexpr int WARPS = 4 * CONSUMERS;
constexpr bool RAGGED = PACKED || LENGTHS;  // what lies beyond n_kv is there, and may be no number
constexpr bool NARROW = CONSUMERS > 1 && BLOCK_N >= 128 && !SOFTCAP;  // consumers leave out keys that their rows do not see
static_assert(BLOCK_N % 16 == 0 && D % 64 == 0 && E % 64 == 0, "whole products");
static_assert(!NARROW || STAGES > 1, "a block that is left out waits for v while the next k is loaded");
constexpr int BOXES = BLOCK_N / BOX;    // of a block of keys; threads of the producer
static_assert(BLOCK_N % BOX == 0 && PAGE % BOX == 0 && BOX % 8 == 0 && BOXES <= 32, "whole boxes");

using Stage = PipelineState<STAGES>;

// 64 rows of queries, from position `row` on.
__device__ __forceinline__ void copy_q(u32 to, const TensorMap &map, u32 barrier, int column, int row, int h, int b) {
    if (!PACK_GQA) return tma_load(to, map, barrier, column, row, h, b);
    asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%3, %4, %5, %6, %7}], [%2];"
                 :: "r"(to), "l"(&map), "r"(barrier), "r"(column), "r"(0), "r"(row), "r"(h), "r"(b) : "memory");
}

// -------------------------------------------------------------------------------------------------- softmax

// s becomes p, still in fp32; alpha is what o must be scaled with.
template <bool MASK, int N>
__device__ __forceinline__ void softmax(float (&s)[N], Softmax &x, float (&alpha)[2], int key, const Keys &seen,
                                        float factor, float inner) {
    if (SOFTCAP)
#pragma unroll
        for (int i = 0; i < N; i++) s[i] = tanh_(s[i] * inner);
    if (MASK) mask<LEFT>(s, key, seen);
    x.step<false, MASK>(s, alpha, factor);
}

template <int N>
__device__ __forceinline__ void to_operand(u32 (&p)[N / 2], const float (&s)[N]) {
#pragma unroll
    for (int i = 0; i < N / 2; i++) p[i] = pack(s[2 * i], s[2 * i + 1]);
}

// --------------------------------------------------------------------------------------------------- tiles

// Keys of row i of the cache.
__device__ __forceinline__ int length_of_row(const Args &a, int i) {
#if LENGTHS
    return offset(a.lengths, i, a.n_kv);
#else
    return a.n_kv;
#endif
}

// Which of the tile's query heads row g + 8 r of this warp belongs to.
__device__ __forceinline__ int head_of_lane(const Args &a, int r) {
    return head_of_row(a, threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4 + 8 * r);
}

// The tile scheduler: the i-th tile of this block, and the keys it sees. L2 swizzle: all tiles of `swizzle` heads, a group,
// come before those of the next heads, so that their k and v stay in L2. Under a causal mask the last group begins with its
// longest tiles (LPT), the one before with its shortest, and so on: lengths rise and fall without a jump. Blocks take turns
// back and forth, so that each gets about as much of a rise or a fall, and the shortest tiles come last.
struct Tile {
    int head, m0;                       // m0: its first position
    int row;                            // of k and v
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
        const int turn = t / (a.swizzle * a.tiles), from = turn * a.swizzle, size = min(a.swizzle, a.heads - from);
        t -= from * a.tiles;
        head = from + t % size;
        const int slot = RIGHT && (a.swizzles - turn) % 2 ? a.tiles - 1 - t / size : t / size;
        begin_q = begin_k = 0, n_q = a.n_q, n_kv = a.n_kv, row = head / a.h, m0 = slot * length;
        if (PACKED) {
            const int low = sequence_of_tile(a.cu_q, a.sequences, a.n_q, length, slot);
            begin_q = offset(a.cu_q, low, a.n_q);
            n_q = max(0, offset(a.cu_q, low + 1, a.n_q) - begin_q);
            if (LENGTHS) {
                row = low;
            } else {
                begin_k = offset(a.cu_k, low, a.n_kv);
                n_kv = max(0, offset(a.cu_k, low + 1, a.n_kv) - begin_k);
            }
            m0 = first_row(a.cu_q, low, a.n_q, length, slot);
        }
        if (LENGTHS) n_kv = length_of_row(a, row);
        shift = a.top_left ? 0 : n_kv - n_q;
        int end = end_of_keys<RIGHT>(n_kv, min(m0 + length, n_q) + shift + a.right);
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

// Where the rows of a box of k or v lie, in a batch entry or a page. Thread i of the producer loads box i of a block.
struct Place {
    int row, page;

    __device__ __forceinline__ void find(const Args &a, const Tile &tile, int key) {
#if PAGE
        key += threadIdx.x * BOX;
        row = key % PAGE;
        const int *entry = a.table + (long long)tile.row * a.row_pages;
        page = offset(entry, min(key / PAGE, a.row_pages - 1), a.pages - 1);
#else
        row = tile.begin_k + key;
        page = tile.row;
#endif
    }
};

template <int SIZE>
struct Ring {
    static constexpr int BYTES = BLOCK_N * SIZE * 2;
    u32 stages, full, empty;            // full, empty: a barrier for each stage
    __device__ __forceinline__ u32 operator[](const Stage &x) const { return stages + x.stage * BYTES; }
    __device__ __forceinline__ void wait(const Stage &x) const { mbarrier_wait(full + 8 * x.stage, x.parity); }
    __device__ __forceinline__ void release(const Stage &x) const { mbarrier_arrive(empty + 8 * x.stage); }

    __device__ __forceinline__ void fetch(const TensorMap &map, Stage &x, const Place &from, int h) const {
        mbarrier_wait(empty + 8 * x.stage, x.parity ^ 1);
        if (threadIdx.x == 0) mbarrier_expect(full + 8 * x.stage, BYTES);
#pragma unroll
        for (int i = 0; i < SIZE / 64; i++)
            tma_load<ONCE>((*this)[x] + (i * BLOCK_N + threadIdx.x * BOX) * 128, map, full + 8 * x.stage, 64 * i,
                           from.row, h, from.page);
        x.next();
    }
};

struct Shared {
    u32 q, q_full, q_empty;             // for each consumer its own
    Ring<D> k;
    Ring<E> v;
    __device__ __forceinline__ explicit Shared(u32 base) : q(base) {
        k.stages = base + CONSUMERS * Q_BYTES;
        v.stages = k.stages + STAGES * k.BYTES;
        q_full = v.stages + STAGES * v.BYTES;
        q_empty = q_full + 8 * CONSUMERS;
        k.full = q_empty + 8 * CONSUMERS;
        k.empty = k.full + 8 * STAGES;
        v.full = k.empty + 8 * STAGES;
        v.empty = v.full + 8 * STAGES;
    }
};

__device__ __forceinline__ void produce(const Args &a, const Shared &at) {
    Stage k, v;
    Tile tile;
    int parity = 0;
    for (int i = 0; tile.find(a, i); i++) {
        if (tile.blocks == 0 || tile.unused()) continue;
        int b = tile.head / a.h, h = tile.head % a.h, h_kv = kv_head(a, h);
        int key = tile.first + (tile.blocks - 1) * BLOCK_N;
        Place here, next;
        here.find(a, tile, key);
        if (key > tile.first) next.find(a, tile, key - BLOCK_N);
        at.k.fetch(a.k, k, here, h_kv);
        for (int c = 0; c < CONSUMERS && threadIdx.x == 0; c++) {
            const int query = tile.begin_q + tile.m0 + positions(a, 64 * c);
            mbarrier_wait(at.q_empty + 8 * c, parity ^ 1);
            mbarrier_expect(at.q_full + 8 * c, Q_BYTES);
#pragma unroll
            for (int d = 0; d < D; d += 64)
                copy_q(at.q + c * Q_BYTES + d * 128, a.q, at.q_full + 8 * c, d, query, h, b);
        }
        parity ^= 1;
        for (; key > tile.first; key -= BLOCK_N) {
            at.k.fetch(a.k, k, next, h_kv);
            at.v.fetch(a.v, v, here, h_kv);
            here = next;
            if (key - BLOCK_N > tile.first) next.find(a, tile, key - 2 * BLOCK_N);
        }
        at.v.fetch(a.v, v, here, h_kv);
    }
}

__device__ __forceinline__ void wait_for_turn(int consumer) {
    if (TAKE_TURNS) named_barrier_sync<256>(1 + consumer);
}

__device__ __forceinline__ void pass_turn(int consumer) {
    if (TAKE_TURNS) named_barrier_arrive<256>(1 + (consumer + 1) % CONSUMERS);
}

// What a consumer keeps of its tile.
struct Work {
    float s[S], o[O];
    u32 p[P];
    Softmax x;
    float alpha[2];
    Keys seen;
};

// The first N of an array.
template <int N, class T, int ALL>
__device__ __forceinline__ T (&part(T (&x)[ALL]))[N] { return reinterpret_cast<T (&)[N]>(x); }

// One block of keys, whose k has arrived: its logits, and the product of p and v of the block before, of which the first
// WIDTH keys count.
template <bool MASK, int WIDTH = BLOCK_N>
__device__ __forceinline__ void step(Work &w, const Args &a, const Shared &at, Stage &k, Stage &v, u32 q, int consumer,
                                     int key, int first) {
    const bool reports = threadIdx.x % 32 == 0;
    wait_for_turn(consumer);
    fresh(w.s);
    pin(w.o);
    pin(w.p);
    wgmma_fence();
    start_over_columns<D, BLOCK_N>(w.s, q, at.k[k]);
    at.v.wait(v);
    wgmma_fence();                      // again: the wait may have taken another path
    start_over_rows<WIDTH, BLOCK_N>(w.o, part<WIDTH / 4>(w.p), at.v[v], true);
    pass_turn(consumer);
    wgmma_wait<1>();
    pin(w.s);
    if (reports) at.k.release(k);
    k.next();
    softmax<MASK>(w.s, w.x, w.alpha, key, w.seen, a.factor, a.inner);
    if (key > first) at.k.wait(k);      // here, as the assembler moves nothing across a loop
    wgmma_wait<0>();
    pin(w.s);                           // p is not made from it before the product that reads p is over
    pin(w.o);
    pin(w.p);
    if (reports) at.v.release(v);
    v.next();
    rescale(w.o, w.alpha);
    to_operand(w.p, w.s);
}

// Rows of v that are beyond the end of their sequence or length: every consumer zeroes them for itself, before it uses any.
__device__ __forceinline__ void zero_rows(u32 v, int from, int consumer) {
    for (int unit = from * 8 + threadIdx.x % 128; unit < BLOCK_N * 8; unit += 128)
#pragma unroll
        for (int i = 0; i < E / 64; i++) store_zeros(v + i * BLOCK_N * 128 + unit * 16);
    fence_async();
    named_barrier_sync<128>(1 + CONSUMERS + consumer);
}

// The first block of a tile, of which no row sees more than WIDTH keys, and the step after it if part of it counts.
template <int WIDTH>
__device__ __forceinline__ void begin(Work &w, const Args &a, const Shared &at, const Tile &tile, Stage &k, Stage &v,
                                      u32 q, int consumer, int &key) {
    float (&s)[WIDTH / 2] = part<WIDTH / 2>(w.s);
    fresh(s);
    wgmma_fence();
    start_over_columns<D, WIDTH, 64, BLOCK_N>(s, q, at.k[k]);
    wgmma_wait<0>();
    pin(s);
    if (threadIdx.x % 32 == 0) at.k.release(k);
    k.next();
    softmax<true>(s, w.x, w.alpha, key, w.seen, a.factor, a.inner);
    to_operand(part<WIDTH / 4>(w.p), s);
#pragma unroll
    for (int i = WIDTH / 4; i < P; i++) w.p[i] = 0;
    if (RAGGED && key + BLOCK_N > tile.n_kv) {
        at.v.wait(v);
        zero_rows(at.v[v], tile.n_kv - key, consumer);
    }
    if (key > tile.first) at.k.wait(k);
    key -= BLOCK_N;
    if (WIDTH < BLOCK_N && key >= tile.first) {
        step<true, WIDTH>(w, a, at, k, v, q, consumer, key, tile.first);
        key -= BLOCK_N;
    }
}

// All keys of a tile, from the last to the first; this consumer's rows see those before `end`.
__device__ __forceinline__ void walk(Work &w, const Args &a, const Shared &at, const Tile &tile, Stage &k, Stage &v,
                                     u32 q, int consumer, int end, int all_from, int all_to) {
    const int lane = threadIdx.x % 32;
    int key = tile.first + (tile.blocks - 1) * BLOCK_N;
    for (; NARROW && RIGHT && key > tile.first && key >= end; key -= BLOCK_N) {
        wait_for_turn(consumer);        // consumers take equally many turns
        pass_turn(consumer);
        at.k.wait(k), at.v.wait(v);
        __syncwarp();                   // no lane still waits for a stage that is refilled
        if (lane == 0) at.k.release(k), at.v.release(v);
        k.next(), v.next();
    }
    at.k.wait(k);
    if (NARROW && end - key <= 64) begin<64>(w, a, at, tile, k, v, q, consumer, key);
    else if (NARROW && BLOCK_N > 128 && end - key <= 128) begin<128>(w, a, at, tile, k, v, q, consumer, key);
    else begin<BLOCK_N>(w, a, at, tile, k, v, q, consumer, key);
    for (; key >= tile.first && key + BLOCK_N - 1 > all_to; key -= BLOCK_N)
        step<true>(w, a, at, k, v, q, consumer, key, tile.first);
    for (; key >= (LEFT ? max(tile.first, all_from) : tile.first); key -= BLOCK_N)
        step<false>(w, a, at, k, v, q, consumer, key, tile.first);
    if (LEFT)
        for (; key >= tile.first; key -= BLOCK_N) step<true>(w, a, at, k, v, q, consumer, key, tile.first);
    if (lane == 0) mbarrier_arrive(at.q_empty + 8 * consumer);
    at.v.wait(v);
    pin(w.o);
    pin(w.p);
    wgmma_fence();
    start_over_rows<BLOCK_N>(w.o, w.p, at.v[v], true);
    wgmma_wait<0>();
    pin(w.o);
    pin(w.p);
    if (lane == 0) at.v.release(v);
    v.next();
}

// Adds up the lanes of a row; alpha becomes what o must be scaled with, and m is in base 2.
__device__ __forceinline__ void close(Softmax &x, float (&alpha)[2], const Args &a, int head) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
        x.l[r] = quad_sum(x.l[r]);
        x.m[r] *= a.factor;
        alpha[r] = 1.0f;
        if (SPLIT) continue;
        if (SINKS) {
            float sink = sink_of(a.sinks, query_head(a, head % a.h) + head_of_lane(a, r), SINKS), m = fmaxf(x.m[r], sink);
            float pivot = m == -INFINITY_ ? 0.0f : m;
            alpha[r] = exp2_(x.m[r] - pivot);
            x.l[r] = x.l[r] * alpha[r] + exp2_(sink - pivot);
            x.m[r] = m;
        }
        alpha[r] /= divisor(x.l[r]);
    }
}

// Writes the 16 rows of one warp, from position `first` on, in units of 16 bytes.
__device__ __forceinline__ void store(const Args &a, const float (&o)[O], const Softmax &x, const float (&alpha)[2],
                                      const Tile &tile, int first) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const int h = query_head(a, tile.head % a.h);
    char *out = a.o + tile.head / a.h * a.o_strides.b + h * a.o_strides.h + (tile.begin_q + first) * a.o_strides.n;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int row = positions(a, g + 8 * r);
        const bool there = first + row < tile.n_q;
#pragma unroll
        for (int c = 0; c < E / 8; c += 4) {
            u32 y[4];
#pragma unroll
            for (int i = 0; i < 4; i++)
                y[i] = pack(o[4 * (c + i) + 2 * r] * alpha[r], o[4 * (c + i) + 2 * r + 1] * alpha[r]);
            transpose(y);
            char *to = out + head_of_lane(a, r) * a.o_strides.h + row * a.o_strides.n + (c + t) * 16;
            if (there) *reinterpret_cast<uint4 *>(to) = make_uint4(y[0], y[1], y[2], y[3]);
        }
        if (a.lse && t == 0 && there)
            a.lse[(long long)(query_head(a, tile.head) + head_of_lane(a, r)) * a.n_q + tile.begin_q + first + row] =
                log_sum_exp(x.m[r], x.l[r]);
    }
}

// The same of one split of the keys, for combine.cu.
__device__ __forceinline__ void store_split(
    const Args &a, const float (&o)[O], const Softmax &x, const Tile &tile, int first
) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const long long every = PACK_GQA ? a.heads * a.group : a.heads;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int row = positions(a, g + 8 * r);
        if (first + row >= tile.n_q) continue;
        const long long head = tile.split * every + query_head(a, tile.head) + head_of_lane(a, r);
        const long long at = head * a.n_q + tile.begin_q + first + row;
        if (t == 0) reinterpret_cast<float2 *>(a.lse)[at] = make_float2(x.m[r], x.l[r]);
        if (LENGTHS && tile.blocks <= 0) continue;
        float2 *to = reinterpret_cast<float2 *>(a.o) + at * (E / 2) + t;
#pragma unroll
        for (int j = 0; j < E / 8; j++) to[4 * j] = make_float2(o[4 * j + 2 * r], o[4 * j + 2 * r + 1]);
    }
}

__device__ __forceinline__ void consume(const Args &a, const Shared &at, int consumer) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    Stage k, v;
    Tile tile;
    int parity = 0;
    if (TAKE_TURNS && consumer == CONSUMERS - 1) pass_turn(consumer);  // the first goes first
    for (int i = 0; tile.find(a, i); i++) {
        if (tile.unused()) continue;
        Work w;
        w.x.init();
#pragma unroll
        for (int e = 0; e < O; e++) w.o[e] = 0.0f;
        const int top = tile.m0 + positions(a, 64 * consumer), first = top + positions(a, 16 * warp);
        const int last = tile.n_kv - 1;
        for (int r = 0; r < 2; r++) {
            int position = first + positions(a, lane / 4 + 8 * r) + tile.shift;
            w.seen.first[r] = position - a.left;
            w.seen.last[r] = last_key<RIGHT>(last, position + a.right);
        }
        const int end = last_key<RIGHT>(last, top + positions(a, 63) + tile.shift + a.right) + 1;   // that any row sees
        const int all_from = top + positions(a, 63) + tile.shift - a.left;                          // that all rows see
        const int all_to = last_key<RIGHT>(last, top + tile.shift + a.right);
        if (tile.blocks > 0) {
            mbarrier_wait(at.q_full + 8 * consumer, parity);
            parity ^= 1;
            walk(w, a, at, tile, k, v, at.q + consumer * Q_BYTES, consumer, end, all_from, all_to);
        }
        close(w.x, w.alpha, a, tile.head);
        if (SPLIT) store_split(a, w.o, w.x, tile, first);
        else store(a, w.o, w.x, w.alpha, tile, first);
    }
}

// Registers of a thread: what the producer gives away, the consumers take.
constexpr int OF_PRODUCER = CONSUMERS == 1 ? 40 : CONSUMERS == 3 ? 32 : RAGGED ? 40 : 24;
constexpr int OF_CONSUMER = CONSUMERS == 1 ? 216 : CONSUMERS == 3 ? 160 : RAGGED ? 232 : 240;

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
flash_sm90_forward_kernel(const __grid_constant__ Args a) {
    extern __shared__ __align__(1024) char shared[];
    const Shared at((u32)__cvta_generic_to_shared(shared));
    if (threadIdx.x == 0) {
        prefetch(a.k), prefetch(a.q), prefetch(a.v);
        for (int i = 0; i < CONSUMERS; i++) mbarrier_init(at.q_full + 8 * i, 1), mbarrier_init(at.q_empty + 8 * i, 4);
        for (int i = 0; i < STAGES; i++) {
            mbarrier_init(at.k.full + 8 * i, 1), mbarrier_init(at.k.empty + 8 * i, WARPS);
            mbarrier_init(at.v.full + 8 * i, 1), mbarrier_init(at.v.empty + 8 * i, WARPS);
        }
        fence_barrier_init();
    }
    __syncthreads();
    wait_for_previous_kernel();
    if (threadIdx.x < 128) {
        give_registers<OF_PRODUCER>();
        if (threadIdx.x < BOXES) produce(a, at);
    } else {
        take_registers<OF_CONSUMER>();
        consume(a, at, __shfl_sync(~0u, threadIdx.x / 128, 0) - 1);
    }
}
