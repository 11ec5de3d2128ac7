// Softmax attention, backward, for Hopper (sm_90a): dk and dv of a tile of keys, and what its keys add to dq.
//
// A tile is 128 keys of one head of k and v. A block walks the query tiles, of BLOCK_M rows, that see them, from the last to
// the first, each for all query heads of the group. Two consumer warpgroups own 64 keys each; dk and dv stay in their
// registers and are written once. PERSISTENT: blocks stay, one an SM, and take tile after tile.
//
//     producer    one thread takes a tile and tells the others; it issues TMA loads: k and v once, q into a ring of Q_STAGES
//                 stages, and do with lse and delta (backward_prologue.cu) into one of O_STAGES
//     consumer    for each query tile: start s^T = k q^T and dp^T = v do^T; wait for s; p = exp2(s - lse);
//                 start dv += p^T do; wait for dp; ds = p (dp - delta), to shared memory; start dk += ds^T q and, of
//                 the tile before, dq = ds k; wait for dv and dq; dq to shared memory; wait for dk
//     adders      two warps, one for each consumer, add that dq to the workspace with bulk reductions
//
// OVERLAP: s of the next tile is started after dv, and dp of the next tile before dk is waited for.
//
// From tile to tile nobody waits for all others. The rings of q and do run on: the next tile's first q and do are loaded
// while this one's last are in use, v from the last dp on, and k from the last dq on, while the consumers write dk and dv.
// Until that k is there, no consumer begins the next tile; so ds and the barriers around it need no care between tiles.
// The adders make the last sums meanwhile.
//
// Keys are the rows of every product but dq, so p^T and ds^T are A operands as they come out of the tensor cores. Only dq
// needs ds from shared memory, from both consumers: each makes one half of it, of the columns (BLOCK_M = 64) or of the
// queries (128). dq comes a tile late, from ds in three buffers, so that the consumers are not in step: one takes
// exponentials while the other's products run.
//
// The workspace of dq is fp32 and lies as the accumulators do: (B * H, slots, consumer, chunk of 4, thread, 4). A slot is a
// query tile; a packed sequence has slots of its own, as in packed.cuh, so no sum needs a bound. `turns` counts for each
// slot and consumer how many tiles of keys have been added. The first tile of keys that a query tile sees stores and the
// others add, so the workspace need not be zeroed. Sums become dq while they are in L2: before a tile, while its k is
// loaded, the consumers convert those of the tile `lag` before it. Tiles from `works` to `end` are no more than that.
//
// Nobody waits for ever, however few blocks run. A tile waits for sums of tiles with lower numbers only: DETERMINISTIC, tiles
// of keys add in ascending order; else for the first that stores; and what is converted ends with them. Blocks take tiles in
// ascending order from a counter (the prologue clears it), and work on theirs in that order. So of all tiles that are not
// done the lowest is in a running block, which has done all it took before, and waits for nobody. Since all tiles walk from
// the last queries to the first, those of fewer queries do not wait for others.
//
// Rows beyond a sequence are zeroed in shared memory (PACKED; else TMA does it), and their lse is infinity: p is 0.
//
// The compiler defines HEAD_DIM, VALUE_DIM, BLOCK_M, Q_STAGES, O_STAGES, OVERLAP, PERSISTENT, DETERMINISTIC, BF16, LEFT and
// RIGHT (whether there is such a limit), SOFTCAP and PACKED.

#include "cuda/include/sm90.cuh"
#include "cuda/include/softmax.cuh"
#include "cuda/include/packed.cuh"
#include "cuda/include/bulk.cuh"
#include "cuda/include/tile_scheduler.cuh"

constexpr int D = HEAD_DIM, E = VALUE_DIM, M = BLOCK_M, N = 128;
constexpr int THREADS = 384, WARPS = 8, ADDERS = 2;         // WARPS: of the consumers
constexpr int S = M / 2, P = M / 4, DQ = 32;                // registers
constexpr int AT_ONCE = 3;                                  // query tiles that are converted
constexpr int DS_BYTES = N * M * 2, ROW_BYTES = 8 * M;      // ROW_BYTES: lse and delta
constexpr bool DP_LATE = SOFTCAP && (M == 128 || LEFT || PACKED);  // after p is made: the cap takes registers
static_assert(M * D == 8192, "a half of dq is 64 x 64: some columns (M = 64) or some rows");

#include "flash/kernels/backward_tiles.cuh"

enum { OWN = 1, FULL = 3, EMPTY = 5, STORED = 7 };         // named barriers, for each consumer; STORED: of odd tiles, too

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
    u32 k, v, ds, dq, rows, k_full, v_full, k_empty, v_empty;
    u32 tile, told, heard;              // of the scheduler: the next tile, and the barriers around it
    Ring<D, Q_STAGES> q;
    Ring<E, O_STAGES> o;                // do, with lse and delta in `rows`
    __device__ __forceinline__ explicit Shared(u32 base) : k(base) {
        v = k + N * D * 2;
        q.stages = v + N * E * 2;
        o.stages = q.stages + Q_STAGES * q.BYTES;
        ds = o.stages + O_STAGES * o.BYTES;
        dq = ds + 3 * DS_BYTES;
        rows = dq + M * D * 4;
        k_full = rows + O_STAGES * ROW_BYTES;
        v_full = k_full + 8;
        k_empty = v_full + 8;
        v_empty = k_empty + 8;
        tile = v_empty + 8;
        told = tile + 8;
        heard = told + 8;
        q.full = heard + 8;
        q.empty = q.full + 8 * Q_STAGES;
        o.full = q.empty + 8 * Q_STAGES;
        o.empty = o.full + 8 * O_STAGES;
    }
};

// ------------------------------------------------------------------------------------------------- scheduler

// What the producer tells the others: the next tile, and of how many tiles k and v were loaded before it.
struct Told {
    int tile, loaded;
};

// The scheduler. PERSISTENT: the producer takes tiles from a counter in memory, long before the others need them, and tells
// them. Else, and without a counter, every tile has a block of its own.
struct Schedule {
    int parity = 0;

    __device__ __forceinline__ int take(const Args &a, const Shared &at, char *shared, bool first, int loaded) {
        if (!PERSISTENT) return first ? blockIdx.x : a.end;
        const int t = a.counter ? take_tile(a.counter) : first ? blockIdx.x : a.end;
        mbarrier_wait(at.heard, parity ^ 1);
        *reinterpret_cast<Told *>(shared + (at.tile - at.k)) = {t, loaded};
        mbarrier_arrive(at.told);
        parity ^= 1;
        return t;
    }

    // Every warp asks once for every tile.
    __device__ __forceinline__ Told next(const Shared &at, const char *shared) {
        mbarrier_wait(at.told, parity);
        const Told told = *reinterpret_cast<const Told *>(shared + (at.tile - at.k));
        __syncwarp();
        if (threadIdx.x % 32 == 0) mbarrier_arrive(at.heard);
        parity ^= 1;
        return {__shfl_sync(~0u, told.tile, 0), __shfl_sync(~0u, told.loaded, 0)};
    }

    // Calls do_tile for every tile of this block.
    template <typename Do>
    __device__ __forceinline__ void each(const Args &a, const Shared &at, const char *shared, Do do_tile) {
        if constexpr (PERSISTENT) {
#pragma unroll 1
            for (Told told; (told = next(at, shared)).tile < a.end;) do_tile(told);
        } else {
            do_tile(Told{(int)blockIdx.x, 0});
        }
    }
};

// ---------------------------------------------------------------------------------------------------- memory

__device__ __forceinline__ void store4(u32 to, const float *x) {
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};"
                 :: "r"(to), "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]) : "memory");
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

// 128 rows of k or v, when both consumers have released those of the tile before.
template <int SIZE>
__device__ __forceinline__ void fetch_keys(u32 to, const TensorMap &map, u32 full, u32 empty, int before, int row, int h,
                                           int b) {
    mbarrier_wait(empty, ~before & 1);
    mbarrier_expect(full, N * SIZE * 2);
#pragma unroll
    for (int i = 0; i < SIZE / 64; i++) tma_load(to + i * N * 128, map, full, 64 * i, row, h, b);
}

// Loads of a tile are issued while the tile before it ends, in the order in which the consumers release what they replace:
// k, which the last dq reads, after the first q, do and v. Only the block's first tile begins with k.
__device__ __forceinline__ void produce(const Args &a, const Shared &at, char *shared) {
    typename Ring<D, Q_STAGES>::State q;
    typename Ring<E, O_STAGES>::State o;
    Schedule schedule;
    int before = 0;                     // tiles whose k and v were loaded
#pragma unroll 1
    for (int t = schedule.take(a, at, shared, true, 0); t < a.end; t = schedule.take(a, at, shared, false, before)) {
        if (t >= a.works) continue;
        const Tile tile(a, t);
        if (tile.count == 0) continue;
        const int b = tile.head / a.h, h = tile.head % a.h, row = tile.begin_k + tile.n0;
        if (before == 0) fetch_keys<D>(at.k, a.k, at.k_full, at.k_empty, before, row, h, b);
        Walk walk(a, tile);
        walk.m += tile.begin_q;
        bool once = true;
#pragma unroll 1
        for (; walk.left > 0; walk.next(a)) {
            at.q.fetch(a.q, q, 0, walk.m, h * a.group + walk.i, b);
            at.o.fetch(a.dout, o, ROW_BYTES, walk.m, h * a.group + walk.i, b);
            bulk_load(at.rows + o.stage * ROW_BYTES, a.rows + walk.slot * (2LL * M), ROW_BYTES, at.o.full + 8 * o.stage);
            q.next();
            o.next();
            if (once) fetch_keys<E>(at.v, a.v, at.v_full, at.v_empty, before, row, h, b);
            if (once && before) fetch_keys<D>(at.k, a.k, at.k_full, at.k_empty, before, row, h, b);
            once = false;
        }
        before++;
    }
}

// Adds what one consumer leaves in shared memory to the sums: one warp.
__device__ __forceinline__ void add_dq(const Args &a, const Shared &at, const Tile &tile, int consumer) {
    constexpr int BYTES = M * D * 2;
    const bool leads = threadIdx.x % 32 == 0;
    int before = -1;                    // the part that is not passed on yet: its sum may be on its way
    bool ready = false;                 // its turn has come
    if (tile.count > 0) named_barrier_arrive<160>(EMPTY + consumer);
    Walk walk(a, tile);
#pragma unroll 1
    while (walk.left > 0) {
        const int part = 2 * walk.slot + consumer, turn = tile.n0 / N - tile.first_tile(a, walk.m);
        if (leads && turn && !ready) {
            if (DETERMINISTIC) wait_for_turn(a.turns + part, turn);
            else wait_for_first(a.turns + part);
        }
        __syncwarp();
        walk.next(a);
        named_barrier_sync<160>(FULL + consumer);
        if (leads) {
            float *to = a.sums + part * (BYTES / 4LL);
            if (turn) bulk_add(to, at.dq + consumer * BYTES, BYTES);
            else bulk_store(to, at.dq + consumer * BYTES, BYTES);
            tma_store_commit();
            if (walk.left > 0)                                  // the next one, while shared memory is read
                ready = turns_passed(a.turns + 2 * walk.slot + consumer) >=
                        (DETERMINISTIC ? tile.n0 / N - tile.first_tile(a, walk.m) : 1);
            tma_store_wait_read<0>();
        }
        __syncwarp();
        if (walk.left > 0) named_barrier_arrive<160>(EMPTY + consumer);
        const bool now = DETERMINISTIC || turn == 0 || walk.left == 0;      // others wait for it
        if (leads) {
            if (now) bulk_wait<0>();
            else bulk_wait<1>();
            if (before >= 0) pass_turn(a.turns + before);
            if (now) pass_turn(a.turns + part);
        }
        before = now ? -1 : part;
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
    const u32 lane = threadIdx.x % 32, matrix = lane / 8;
    const u32 row = 64 * consumer + threadIdx.x % 128 / 32 * 16 + lane % 16;
#pragma unroll
    for (int j = 0; j < M / 8; j += 2) {
        const u32 unit = j + matrix / 2;
        asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
                     :: "r"(to + unit / 8 * N * 128 + row * 128 + ((unit % 8 ^ lane % 8) << 4)), "r"(ds[2 * j]),
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

// The consumer's half of dq to shared memory, for its adder.
__device__ __forceinline__ void stage_dq(const float (&dq)[DQ], u32 to, int consumer) {
#pragma unroll
    for (int i = 0; i < DQ / 4; i++)
        store4(to + consumer * (M * D * 2) + threadIdx.x % 128 * 16 + i * 2048, dq + 4 * i);
    fence_async();
    named_barrier_arrive<160>(FULL + consumer);
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

// The first query tile of share n, of as many as there are tiles of keys.
__device__ __forceinline__ int share(int n, int queries, int tiles) { return n * (queries / tiles) + min(n, queries % tiles); }

// Turns the consumer's half of sums into dq. A tile of keys has its share of the queries of its sequence: with a limit on
// the right those that see no later tile of keys.
__device__ __forceinline__ void convert_dq(const Args &a, const Tile &tile, int consumer) {
    if (tile.n0 >= tile.n_kv) return;
    const int tiles = tile.last / N + 1, n = tile.n0 / N, queries = (tile.n_q + M - 1) / M;
    const int from = RIGHT ? tile.first : share(n, queries, tiles) * M;
    int to = n + 1 == tiles ? tile.n_q : RIGHT ? tile.first_query(a, tile.n0 + N) : share(n + 1, queries, tiles) * M;
    if (LEFT) to = min(to, tile.n_kv - tile.shift + a.left);
    if (from >= min(to, tile.n_q)) return;
    const int b = tile.head / a.h, h = tile.head % a.h, head = tile.head * a.group, slot = tile.slot + from / M;
    // all walk from the last queries to the first: when the last head's first are done, all are
    wait_for_turn(a.turns + 2 * ((head + a.group - 1) * a.slots + slot) + consumer,
                  tile.last_tile(a, from) - tile.first_tile(a, from) + 1);
    const int warp = threadIdx.x % 128 / 32 * 16 + (M == 64 ? 0 : 64 * consumer);   // its first row
    const int items = (min(to, tile.n_q) - from + M - 1) / M * a.group;
#pragma unroll 1
    for (int first = 0; first < items; first += AT_ONCE) {
        float x[AT_ONCE][DQ];
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            const int item = PERSISTENT ? min(first + i, items - 1) : first + i;    // else x lives on from tile to tile
            if (!PERSISTENT && item >= items) break;
            const long long part = 2LL * ((head + item % a.group) * a.slots + slot + item / a.group) + consumer;
#pragma unroll
            for (int c = 0; c < DQ / 4; c++)
                *reinterpret_cast<float4 *>(x[i] + 4 * c) =
                    reinterpret_cast<const float4 *>(a.sums)[part * (M * D / 8) + c * 128 + threadIdx.x % 128];
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            const int item = first + i, row = from + item / a.group * M + warp;
            if (item >= items) break;
            store(x[i], a.dq + b * a.dq_strides.b + (h * a.group + item % a.group) * a.dq_strides.h +
                            (tile.begin_q + row) * a.dq_strides.n + (M == 64 ? consumer * D : 0),
                  a.dq_strides.n, a.scale, tile.n_q - row);
        }
    }
}

// What a consumer keeps of a tile of keys.
struct Work {
    float s[S], dk[D / 2], dv[E / 2];
    u32 p[P], ds[P];
};

// Where it is in the rings, from tile to tile.
struct Stages {
    typename Ring<D, Q_STAGES>::State q;
    typename Ring<E, O_STAGES>::State o;
};

// All query tiles. Products that run at the same time as the code after them are named behind it.
__device__ __forceinline__ void walk_queries(Work &w, Stages &stages, int parity, const Args &a, const Shared &at,
                                             const Tile &tile, const char *shared, int consumer) {
    const bool reports = threadIdx.x % 32 == 0;
    const int keys = tile.n0 + 64 * consumer;   // the first of the consumer's
    const u32 k = at.k + consumer * 64 * 128, v = at.v + consumer * 64 * 128;
    auto &q = stages.q;
    auto &o = stages.o;
    // queries from which on, and up to which, no mask is needed
    const int all_from = keys + 64 > tile.n_kv ? 0x7fffffff : RIGHT ? keys + 63 - tile.shift - a.right : 0;
    const int all_to = keys - tile.shift + a.left - M + 1;
    Walk walk(a, tile);
    const int all = walk.left;

    auto await_q = [&](const typename Ring<D, Q_STAGES>::State &q, int m) {
        at.q.wait(q);
        if (PACKED && m + M > tile.n_q) zero_rows<M, D>(at.q[q], tile.n_q - m, consumer);
    };
    mbarrier_wait(at.k_full, parity);
    mbarrier_wait(at.v_full, parity);
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
    u32 ds = at.ds, made = ds;          // of this tile, and of the tile before
    while (walk.left > 0) {
        const int m = walk.m;
        const bool first = walk.left == all;
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
            if (reports && !first) at.q.release(before);
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
        if (!first) named_barrier_sync<256>(STORED + (walk.left + 1) % 2 * 2 + 1 - consumer);
        store_ds(w.ds, ds, consumer);
        named_barrier_arrive<256>(STORED + walk.left % 2 * 2 + consumer);

        before = q;
        walk.next(a);
        q.next();
        if (walk.left > 0) await_q(q, walk.m);
        else if (PERSISTENT && reports) mbarrier_arrive(at.v_empty);
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
        fresh(dq);
        pin(w.ds);
        pin(w.dk);
        wgmma_fence();
        start_dq(dq, made, at.k, consumer);                                 // before the first tile: of no use
        made = ds;
        ds = ds == at.ds + 2 * DS_BYTES ? at.ds : ds + DS_BYTES;
        start_over_rows<M>(w.dk, w.ds, at.q[before], true);
        if (!first) named_barrier_sync<160>(EMPTY + consumer);
        wgmma_wait<1>();
        if (!OVERLAP) dv_is_made();
        pin(dq);
        pin(w.s);
        if (!first) stage_dq(dq, at.dq, consumer);                          // dk
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
        if (reports) at.q.release(before);
    }
    float dq[DQ];                       // of the last tile
    named_barrier_sync<256>(STORED + 2 + 1 - consumer);
    fresh(dq);
    wgmma_fence();
    start_dq(dq, made, at.k, consumer);
    named_barrier_sync<160>(EMPTY + consumer);
    wgmma_wait<0>();
    pin(dq);
    if (PERSISTENT && reports) mbarrier_arrive(at.k_empty);
    stage_dq(dq, at.dq, consumer);
}

__device__ __forceinline__ void consume(Stages &stages, int parity, const Args &a, const Shared &at, const Tile &tile,
                                        const char *shared, int consumer) {
    if (tile.n0 >= tile.n_kv) return;
    Work w;
#pragma unroll
    for (int i = 0; i < D / 2; i++) w.dk[i] = 0.0f;
#pragma unroll
    for (int i = 0; i < E / 2; i++) w.dv[i] = 0.0f;
    if (tile.count > 0) walk_queries(w, stages, parity, a, at, tile, shared, consumer);
    const int key = tile.n0 + 64 * consumer + threadIdx.x % 128 / 32 * 16;
    const long long row = tile.begin_k + key;
    const int b = tile.head / a.h, h = tile.head % a.h;
    store(w.dk, a.dk + b * a.dk_strides.b + h * a.dk_strides.h + row * a.dk_strides.n, a.dk_strides.n, a.scale,
          tile.n_kv - key);
    store(w.dv, a.dv + b * a.dv_strides.b + h * a.dv_strides.h + row * a.dv_strides.n, a.dv_strides.n, 1.0f,
          tile.n_kv - key);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) flash_backward_kernel(const __grid_constant__ Args a) {
    extern __shared__ __align__(1024) char shared[];
    const Shared at((u32)__cvta_generic_to_shared(shared));
    if (threadIdx.x == 0) {
        mbarrier_init(at.k_full, 1), mbarrier_init(at.k_empty, WARPS);
        mbarrier_init(at.v_full, 1), mbarrier_init(at.v_empty, WARPS);
        mbarrier_init(at.told, 1), mbarrier_init(at.heard, WARPS + ADDERS);
        for (int i = 0; i < Q_STAGES; i++) mbarrier_init(at.q.full + 8 * i, 1), mbarrier_init(at.q.empty + 8 * i, WARPS);
        for (int i = 0; i < O_STAGES; i++) mbarrier_init(at.o.full + 8 * i, 1), mbarrier_init(at.o.empty + 8 * i, WARPS);
        fence_barrier_init();
    }
    __syncthreads();
    wait_for_previous_kernel();
    Schedule schedule;
    if (threadIdx.x < 128) {
        give_registers<24>();
        const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
        if (threadIdx.x == 0) {
            produce(a, at, shared);
        } else if (warp == 1 || warp == 2) {
            schedule.each(a, at, shared, [&](const Told &told) {
                if (told.tile < a.works) add_dq(a, at, Tile(a, told.tile), warp - 1);
            });
        }
    } else {
        take_registers<240>();
        const int consumer = __shfl_sync(~0u, threadIdx.x / 128, 0) - 1;
        Stages stages;
        schedule.each(a, at, shared, [&](const Told &told) {
            if (told.tile >= a.lag) convert_dq(a, Tile(a, told.tile - a.lag), consumer);
            if (told.tile < a.works) consume(stages, told.loaded & 1, a, at, Tile(a, told.tile), shared, consumer);
        });
    }
}
