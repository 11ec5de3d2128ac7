// Softmax attention, backward, for Hopper (sm_90a): dk and dv of a tile of keys, and what its keys add to dq.
//
// A block owns 128 keys of one head of k and v and walks the query tiles, of BLOCK_M rows, that see them, of all query
// heads of the group. Two consumer warpgroups own 64 keys each; dk and dv stay in their registers and are written once.
//
//     producer    one thread issues TMA loads: k and v once, then q into a ring of Q_STAGES stages, and do with lse and
//                 delta (backward_prologue.cu) into one of O_STAGES
//     consumer    for each query tile: start s^T = k q^T and dp^T = v do^T; wait for s; p = exp2(s - lse);
//                 start dv += p^T do; wait for dp; ds = p (dp - delta), to shared memory; barrier of both consumers;
//                 start dq = ds k and dk += ds^T q; wait for dv and dq; dq to shared memory; wait for dk
//     adders      two warps, one for each consumer, add that dq to the workspace with bulk reductions
//
// OVERLAP: s of the next tile is started after dv, ahead of the barrier, and dp of the next tile before dk is waited for.
//
// Keys are the rows of every product but dq, so p^T and ds^T are A operands as they come out of the tensor cores. Only dq
// needs ds from shared memory, from both consumers: each makes one half of it, of the columns (BLOCK_M = 64) or of the
// queries (128). ds has two buffers, so that one barrier a tile is enough.
//
// The workspace of dq is fp32 and lies as the accumulators do: (B * H, slots, consumer, chunk of 4, thread, 4). A slot is a
// query tile; a packed sequence has slots of its own, as in packed.cuh, so no sum needs a bound. backward_epilogue.cu turns
// it into dq.
//
// DETERMINISTIC: sums have a fixed order. The last tile of keys that a query tile sees stores, the others add one after the
// other; `turns` counts for each slot and consumer. Blocks start in the same order, so nobody waits for a block that has
// not started.
//
// Rows beyond a sequence are zeroed in shared memory (PACKED; else TMA does it), and their lse is infinity: p is 0.
//
// The compiler defines HEAD_DIM, VALUE_DIM, BLOCK_M, Q_STAGES, O_STAGES, OVERLAP, DETERMINISTIC, BF16, LEFT and RIGHT
// (whether there is such a limit), SOFTCAP and PACKED.

#include "cuda/include/sm90.cuh"
#include "cuda/include/softmax.cuh"
#include "cuda/include/packed.cuh"
#include "cuda/include/tile_scheduler.cuh"

constexpr int D = HEAD_DIM, E = VALUE_DIM, M = BLOCK_M, N = 128;
constexpr int THREADS = 384, WARPS = 8;                     // WARPS: of the consumers
constexpr int S = M / 2, P = M / 4, DQ = M * D / 256;       // registers
constexpr int DS_BYTES = N * M * 2, ROW_BYTES = 8 * M;      // ROW_BYTES: lse and delta
constexpr bool DP_LATE = SOFTCAP && (M == 128 || LEFT || PACKED);  // after p is made: the cap takes registers
static_assert(M == 64 || (M == 128 && D == 64), "a half of dq is 64 rows of a product");

enum { BOTH = 1, OWN = 2, FULL = 4, EMPTY = 6 };            // named barriers; from OWN on one for each consumer

// A ring of stages of M rows; full, empty: a barrier for each stage.
template <int SIZE, int COUNT>
struct Ring {
    using State = PipelineState<COUNT>;
    static constexpr int BYTES = M * SIZE * 2;
    u32 stages, full, empty;
    __device__ __forceinline__ u32 operator[](const State &x) const { return stages + x.stage * BYTES; }
    __device__ __forceinline__ void wait(const State &x) const { mbarrier_wait(full + 8 * x.stage, x.parity); }
    __device__ __forceinline__ void release(const State &x) const { mbarrier_arrive(empty + 8 * x.stage); }

    __device__ __forceinline__ void fetch(const TensorMap &map, const State &x, int more, int row, int h, int b) const {
        mbarrier_wait(empty + 8 * x.stage, x.parity ^ 1);
        mbarrier_expect(full + 8 * x.stage, BYTES + more);
#pragma unroll
        for (int i = 0; i < SIZE / 64; i++)
            tma_load((*this)[x] + i * M * 128, map, full + 8 * x.stage, 64 * i, row, h, b);
    }
};

struct Shared {
    u32 k, v, ds, dq, rows, k_full, v_full;
    Ring<D, Q_STAGES> q;
    Ring<E, O_STAGES> o;                // do, with lse and delta in `rows`
    __device__ __forceinline__ explicit Shared(u32 base) : k(base) {
        v = k + N * D * 2;
        q.stages = v + N * E * 2;
        o.stages = q.stages + Q_STAGES * q.BYTES;
        ds = o.stages + O_STAGES * o.BYTES;
        dq = ds + 2 * DS_BYTES;
        rows = dq + M * D * 4;
        k_full = rows + O_STAGES * ROW_BYTES;
        v_full = k_full + 8;
        q.full = v_full + 8;
        q.empty = q.full + 8 * Q_STAGES;
        o.full = q.empty + 8 * Q_STAGES;
        o.empty = o.full + 8 * O_STAGES;
    }
};

// ----------------------------------------------------------------------------------------------------- tiles

// The tile of keys of this block. L2 swizzle: all tiles of `swizzle` heads come before those of the next heads, so that
// their q, do and dq stay in L2. Of these heads, under a causal mask, the longest tiles come first (LPT).
struct Tile {
    int b, h, n0;                           // its batch, head of k and v, first key
    int begin_q, begin_k, n_q, n_kv, slot;  // of its sequence; slot: the first
    int last;                               // the last of its keys in a tile that is its own
    int shift;                              // query i stands at position i + shift
    int first, count;                       // queries, from which on, and how many times M

    __device__ __forceinline__ explicit Tile(const Args &a) {
        int t = blockIdx.x;
        const int from = t / (a.swizzle * a.tiles) * a.swizzle, size = min(a.swizzle, a.heads - from);
        t -= from * a.tiles;
        const int head = from + t % size;
        const int tile = DETERMINISTIC ? a.tiles - 1 - t / size : t / size;
        b = head / a.h, h = head % a.h;
        begin_q = begin_k = slot = 0, n_q = a.n_q, n_kv = a.n_kv, n0 = tile * N, last = n_kv - 1;
        if (PACKED) {
            const int i = sequence_of_tile(a.cu_k, a.sequences, a.n_kv, N, tile);
            begin_q = offset(a.cu_q, i, a.n_q);
            begin_k = offset(a.cu_k, i, a.n_kv);
            n_q = max(0, offset(a.cu_q, i + 1, a.n_q) - begin_q);
            n_kv = max(0, offset(a.cu_k, i + 1, a.n_kv) - begin_k);
            n0 = first_row(a.cu_k, i, a.n_kv, N, tile);
            slot = begin_q / M + i;
            last = n_kv - 1;
            while (DETERMINISTIC && last >= n0 + N &&   // offsets that decrease give tiles to another sequence
                   sequence_of_tile(a.cu_k, a.sequences, a.n_kv, N, tile + (last - n0) / N) != i) last -= N;
        }
        shift = a.top_left ? 0 : n_kv - n_q;
        first = RIGHT ? max(0, n0 - shift - a.right) / M * M : 0;
        const int end = LEFT ? min(n_q, min(n0 + N, n_kv) - shift + a.left) : n_q;
        count = n0 < n_kv ? max(0, end - first + M - 1) / M : 0;
    }

    // How many tiles of keys add to the queries from m on before this one.
    __device__ __forceinline__ int turn(const Args &a, int m) const {
        return (RIGHT ? min(last, m + M - 1 + shift + a.right) : last) / N - n0 / N;
    }
};

// The query tiles of a block, one head of the group after the other.
struct Walk {
    int left, m, head, slot;            // tiles, with this one; first query; query head; place in the workspace

    __device__ __forceinline__ Walk(const Args &a, const Tile &tile)
        : left(tile.count * a.group), m(tile.first), head(tile.h * a.group),
          slot((tile.b * a.h * a.group + head) * a.slots + tile.slot + tile.first / M) {}

    __device__ __forceinline__ void next(const Args &a, const Tile &tile) {
        left--, slot++, m += M;
        if (m == tile.first + tile.count * M) m = tile.first, head++, slot += a.slots - tile.count;
    }
};

// ---------------------------------------------------------------------------------------------------- memory

// Contiguous bytes of memory to shared memory; the barrier counts them.
__device__ __forceinline__ void bulk_load(u32 to, const void *from, int bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 :: "r"(to), "l"(from), "r"(bytes), "r"(barrier) : "memory");
}

// Adds contiguous fp32 numbers of shared memory to memory.
__device__ __forceinline__ void bulk_add(void *to, u32 from, int bytes) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;"
                 :: "l"(to), "r"(from), "r"(bytes) : "memory");
}

__device__ __forceinline__ void bulk_store(void *to, u32 from, int bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
                 :: "l"(to), "r"(from), "r"(bytes) : "memory");
}

__device__ __forceinline__ void bulk_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

__device__ __forceinline__ void store4(u32 to, const float *x) {
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};"
                 :: "r"(to), "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]) : "memory");
}

// Waits until `turn` others have passed their turn; what they added is visible then.
__device__ __forceinline__ void wait_for_turn(const int *turns, int turn) {
    asm volatile("{.reg .pred early; .reg .s32 now;\n"
                 "again: ld.acquire.gpu.global.s32 now, [%0]; setp.lt.s32 early, now, %1;\n"
                 "@early bra again;}" :: "l"(turns), "r"(turn) : "memory");
    asm volatile("fence.proxy.async.global;" ::: "memory");     // bulk copies follow
}

__device__ __forceinline__ void pass_turn(int *turns) {
    asm volatile("red.release.gpu.global.add.s32 [%0], 1;" :: "l"(turns) : "memory");
}

// Rows of a matrix of ROWS rows from `from` on become zero. Every consumer does it for itself, before it reads any.
template <int ROWS, int SIZE>
__device__ __forceinline__ void zero_rows(u32 x, int from, int consumer) {
    for (int unit = from * 8 + threadIdx.x % 128; unit < ROWS * 8; unit += 128)
#pragma unroll
        for (int i = 0; i < SIZE / 64; i++) store_zeros(x + i * ROWS * 128 + unit * 16);
    fence_async();
    named_barrier_sync<128>(OWN + consumer);
}

// ------------------------------------------------------------------------------------------------- the loads

__device__ __forceinline__ void produce(const Args &a, const Shared &at, const Tile &tile) {
    typename Ring<D, Q_STAGES>::State q;
    typename Ring<E, O_STAGES>::State o;
    const int row = tile.begin_k + tile.n0;
    if (tile.count == 0) return;
    mbarrier_expect(at.k_full, N * D * 2);
#pragma unroll
    for (int i = 0; i < D / 64; i++) tma_load(at.k + i * N * 128, a.k, at.k_full, 64 * i, row, tile.h, tile.b);
    bool once = true;
#pragma unroll 1
    for (Walk walk(a, tile); walk.left > 0; walk.next(a, tile)) {
        at.q.fetch(a.q, q, 0, tile.begin_q + walk.m, walk.head, tile.b);
        if (once) {
            mbarrier_expect(at.v_full, N * E * 2);
#pragma unroll
            for (int i = 0; i < E / 64; i++) tma_load(at.v + i * N * 128, a.v, at.v_full, 64 * i, row, tile.h, tile.b);
            once = false;
        }
        at.o.fetch(a.dout, o, ROW_BYTES, tile.begin_q + walk.m, walk.head, tile.b);
        bulk_load(at.rows + o.stage * ROW_BYTES, a.rows + walk.slot * (2LL * M), ROW_BYTES, at.o.full + 8 * o.stage);
        q.next();
        o.next();
    }
}

// Adds what one consumer leaves in shared memory to dq: one warp.
__device__ __forceinline__ void add_dq(const Args &a, const Shared &at, const Tile &tile, int consumer) {
    constexpr int BYTES = M * D * 2;
#pragma unroll 1
    for (Walk walk(a, tile); walk.left > 0; walk.next(a, tile)) {
        const int part = 2 * walk.slot + consumer;
        named_barrier_sync<160>(FULL + consumer);
        if (threadIdx.x % 32 == 0) {
            const int turn = DETERMINISTIC ? tile.turn(a, walk.m) : 1;
            float *to = a.dq + part * (BYTES / 4LL);
            if (DETERMINISTIC) wait_for_turn(a.turns + part, turn);
            if (turn) bulk_add(to, at.dq + consumer * BYTES, BYTES);
            else bulk_store(to, at.dq + consumer * BYTES, BYTES);
            tma_store_commit();
            if (DETERMINISTIC) bulk_wait(), pass_turn(a.turns + part);
            else tma_store_wait_read<0>();
        }
        __syncwarp();
        if (walk.left > 1) named_barrier_arrive<160>(EMPTY + consumer);
    }
}

// ------------------------------------------------------------------------------------------------- consumers

struct Queries {
    int first[2], last[2];              // that see the two keys of a lane
    __device__ __forceinline__ Queries(const Args &a, const Tile &tile, int keys) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const int key = keys + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4 + 8 * r;
            first[r] = key >= tile.n_kv ? 0x7fffffff : RIGHT ? key - tile.shift - a.right : 0;
            last[r] = key - tile.shift + a.left;
        }
    }
};

// s becomes p, and p its operand. With a softcap s becomes p times the slope of the cap.
template <bool MASK>
__device__ __forceinline__ void weights(float (&s)[S], u32 (&p)[P], const float *lse, const Queries &see, int query,
                                        float factor, float inner) {
    query += 2 * (threadIdx.x % 4);
#pragma unroll
    for (int j = 0; j < M / 8; j++) {
        const float2 of = reinterpret_cast<const float2 *>(lse)[4 * j + threadIdx.x % 4];
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float y[2];
#pragma unroll
            for (int c = 0; c < 2; c++) {
                float &x = s[4 * j + 2 * r + c];
                const int at = query + 8 * j + c;
                if (SOFTCAP) x = tanh_(x * inner);
                y[c] = exp2_(x * factor - (c ? of.y : of.x));
                if (MASK && (at < see.first[r] || (LEFT && at > see.last[r]))) y[c] = 0.0f;
                x = SOFTCAP ? y[c] * (1.0f - x * x) : y[c];
            }
            p[2 * j + r] = pack(y[0], y[1]);
        }
    }
}

__device__ __forceinline__ void gradients(u32 (&ds)[P], const float (&s)[S], const float (&dp)[S], const float *delta) {
#pragma unroll
    for (int j = 0; j < M / 8; j++) {
        const float2 of = reinterpret_cast<const float2 *>(delta)[4 * j + threadIdx.x % 4];
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const int i = 4 * j + 2 * r;
            ds[i / 2] = pack(s[i] * (dp[i] - of.x), s[i + 1] * (dp[i + 1] - of.y));
        }
    }
}

// ds^T of one consumer to shared memory: row by row, panels of 64 queries.
__device__ __forceinline__ void store_ds(const u32 (&ds)[P], u32 to, int consumer) {
    const int lane = threadIdx.x % 32, matrix = lane / 8;
    const int row = 64 * consumer + threadIdx.x % 128 / 32 * 16 + matrix % 2 * 8 + lane % 8;
#pragma unroll
    for (int j = 0; j < M / 8; j += 2) {
        const int unit = j + matrix / 2;
        asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
                     :: "r"(to + unit / 8 * N * 128 + row * 128 + ((unit % 8 ^ row % 8) << 4)), "r"(ds[2 * j]),
                        "r"(ds[2 * j + 1]), "r"(ds[2 * j + 2]), "r"(ds[2 * j + 3]) : "memory");
    }
    fence_async();
}

// Starts the consumer's half of dq = ds k.
__device__ __forceinline__ void start_dq(float (&dq)[DQ], u32 ds, u32 k, int consumer) {
    const u64 x = descriptor(ds + (M == 64 ? 0 : consumer * N * 128), 16);
    const u64 y = descriptor(k + (M == 64 ? consumer * (D / 128) * N * 128 : 0), N * 128);
#pragma unroll
    for (int i = 0; i < N / 16; i++) wgmma_transposed(dq, x + i * 128, y + i * 128, i > 0);
    wgmma_commit();
}

// Writes the 16 rows of one warp that are there, in units of 16 bytes.
template <int COUNT>
__device__ __forceinline__ void store(const float (&x)[COUNT], char *to, long long step, float factor, int rows) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int r = 0; r < 2; r++)
#pragma unroll
        for (int c = 0; c < COUNT / 4; c += 4) {
            u32 y[4];
#pragma unroll
            for (int i = 0; i < 4; i++)
                y[i] = pack(x[4 * (c + i) + 2 * r] * factor, x[4 * (c + i) + 2 * r + 1] * factor);
            transpose(y);
            if (g + 8 * r < rows)
                *reinterpret_cast<uint4 *>(to + (g + 8 * r) * step + (c + t) * 16) = make_uint4(y[0], y[1], y[2], y[3]);
        }
}

// What a consumer keeps.
struct Work {
    float s[S], dk[D / 2], dv[E / 2];
    u32 p[P], ds[P];
};

// All query tiles. Products that run at the same time as the code after them are named behind it.
__device__ __forceinline__ void walk_queries(Work &w, const Args &a, const Shared &at, const Tile &tile, const char *shared,
                                     int consumer) {
    const bool reports = threadIdx.x % 32 == 0;
    const int keys = tile.n0 + 64 * consumer;   // the first of the consumer's
    const u32 k = at.k + consumer * 64 * 128, v = at.v + consumer * 64 * 128;
    typename Ring<D, Q_STAGES>::State q;
    typename Ring<E, O_STAGES>::State o;
    // queries from which on, and up to which, no mask is needed
    const int all_from = keys + 64 > tile.n_kv ? 0x7fffffff : RIGHT ? keys + 63 - tile.shift - a.right : 0;
    const int all_to = keys - tile.shift + a.left - M + 1;
    Walk walk(a, tile);
    const int all = walk.left;

    auto await_q = [&](const typename Ring<D, Q_STAGES>::State &q, int m) {
        at.q.wait(q);
        if (PACKED && m + M > tile.n_q) zero_rows<M, D>(at.q[q], tile.n_q - m, consumer);
    };
    mbarrier_wait(at.k_full, 0);
    mbarrier_wait(at.v_full, 0);
    if (PACKED && tile.n0 + N > tile.n_kv) {
        zero_rows<N, D>(at.k, tile.n_kv - tile.n0, consumer);
        zero_rows<N, E>(at.v, tile.n_kv - tile.n0, consumer);
    }
    await_q(q, walk.m);
    if (OVERLAP) {
        fresh(w.s);
        pin(w.dk);
        pin(w.dv);
        pin(w.ds);
        wgmma_fence();
        start_over_columns<D, M, N>(w.s, k, at.q[q]);
        wgmma_wait<0>();
        pin(w.s);
    }
    auto before = q;                    // the tile before
    while (walk.left > 0) {
        const int m = walk.m;
        const u32 ds = at.ds + walk.left % 2 * DS_BYTES;
        const float *rows = reinterpret_cast<const float *>(shared + (at.rows - at.k) + o.stage * ROW_BYTES);
        float dp[S], dq[DQ];
        at.o.wait(o);
        if (PACKED && m + M > tile.n_q) zero_rows<M, E>(at.o[o], tile.n_q - m, consumer);
        if (!OVERLAP) fresh(w.s);
        if (!DP_LATE) fresh(dp);
        pin(w.dk);
        wgmma_fence();
        if (!OVERLAP) start_over_columns<D, M, N>(w.s, k, at.q[q]);
        if (!DP_LATE) start_over_columns<E, M, N>(dp, v, at.o[o]);
        wgmma_wait<!DP_LATE>();
        if (OVERLAP) {
            pin(w.dk);
            pin(w.ds);
            if (reports && walk.left < all) at.q.release(before);
        }
        pin(w.s);
        const Queries see(a, tile, keys);
        if (m < all_from || (LEFT && m > all_to)) weights<true>(w.s, w.p, rows, see, m, a.factor, a.inner);
        else weights<false>(w.s, w.p, rows, see, m, a.factor, a.inner);     // dp

        if (DP_LATE) fresh(dp);
        pin(w.p);
        pin(w.dv);
        wgmma_fence();
        if (DP_LATE) start_over_columns<E, M, N>(dp, v, at.o[o]);
        start_over_rows<M>(w.dv, w.p, at.o[o], true);
        wgmma_wait<1>();
        pin(dp);
        gradients(w.ds, w.s, dp, rows + M);                                 // dv
        store_ds(w.ds, ds, consumer);

        const bool waits = walk.left < all;
        before = q;
        walk.next(a, tile);
        q.next();
        if (walk.left > 0) await_q(q, walk.m);
        auto dv_is_made = [&] {
            pin(w.p);
            pin(w.dv);
            if (reports) at.o.release(o);
            o.next();
        };
        if (OVERLAP) {
            wgmma_wait<0>();
            dv_is_made();
            fresh(w.s);
            wgmma_fence();
            start_over_columns<D, M, N>(w.s, k, at.q[q]);                   // beyond the last tile: of no use
        }
        named_barrier_sync<256>(BOTH);
        fresh(dq);
        pin(w.ds);
        pin(w.dk);
        wgmma_fence();
        start_dq(dq, ds, at.k, consumer);
        start_over_rows<M>(w.dk, w.ds, at.q[before], true);
        if (waits) named_barrier_sync<160>(EMPTY + consumer);
        wgmma_wait<1>();
        if (!OVERLAP) dv_is_made();
        pin(dq);
        pin(w.s);
#pragma unroll
        for (int i = 0; i < DQ / 4; i++)                                    // dk
            store4(at.dq + consumer * (M * D * 2) + threadIdx.x % 128 * 16 + i * 2048, dq + 4 * i);
        fence_async();
        named_barrier_arrive<160>(FULL + consumer);
        if (OVERLAP) continue;
        wgmma_wait<0>();
        pin(w.dk);
        pin(w.ds);
        if (reports) at.q.release(before);
    }
    if (OVERLAP) {
        wgmma_wait<0>();
        pin(w.dk);
        pin(w.ds);
    }
}

__device__ __forceinline__ void consume(const Args &a, const Shared &at, const Tile &tile, const char *shared,
                                        int consumer) {
    if (tile.n0 >= tile.n_kv) return;
    Work w;
#pragma unroll
    for (int i = 0; i < D / 2; i++) w.dk[i] = 0.0f;
#pragma unroll
    for (int i = 0; i < E / 2; i++) w.dv[i] = 0.0f;
    if (tile.count > 0) walk_queries(w, a, at, tile, shared, consumer);
    const int key = tile.n0 + 64 * consumer + threadIdx.x % 128 / 32 * 16;
    const long long row = tile.begin_k + key;
    store(w.dk, a.dk + tile.b * a.dk_strides.b + tile.h * a.dk_strides.h + row * a.dk_strides.n, a.dk_strides.n, a.scale,
          tile.n_kv - key);
    store(w.dv, a.dv + tile.b * a.dv_strides.b + tile.h * a.dv_strides.h + row * a.dv_strides.n, a.dv_strides.n, 1.0f,
          tile.n_kv - key);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) flash_backward_kernel(const __grid_constant__ Args a) {
    extern __shared__ __align__(1024) char shared[];
    const Shared at((u32)__cvta_generic_to_shared(shared));
    if (threadIdx.x == 0) {
        mbarrier_init(at.k_full, 1);
        mbarrier_init(at.v_full, 1);
        for (int i = 0; i < Q_STAGES; i++) mbarrier_init(at.q.full + 8 * i, 1), mbarrier_init(at.q.empty + 8 * i, WARPS);
        for (int i = 0; i < O_STAGES; i++) mbarrier_init(at.o.full + 8 * i, 1), mbarrier_init(at.o.empty + 8 * i, WARPS);
        fence_barrier_init();
    }
    __syncthreads();
    wait_for_previous_kernel();
    if (threadIdx.x < 128) {
        give_registers<24>();
        const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
        if (threadIdx.x == 0) produce(a, at, Tile(a));
        if (warp == 1 || warp == 2) add_dq(a, at, Tile(a), warp - 1);
    } else {
        take_registers<240>();
        consume(a, at, Tile(a), shared, __shfl_sync(~0u, threadIdx.x / 128, 0) - 1);
    }
}
