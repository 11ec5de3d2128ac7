// Softmax attention, backward, for Hopper (sm_90a): dk and dv of a tile of keys, and what its keys add to dq.
//
// A tile is 128 keys of one head of k and v. A block walks the query tiles, of BLOCK_M rows, that see them, from the last to
// the first, each for all query heads of the group. Two consumer warpgroups own 64 keys each; dk and dv stay in their
// registers and are written once. Blocks are persistent, one an SM: they take tile after tile.
//
//     producer    one thread takes a tile and tells the others; it issues TMA loads: k and v once, q into a ring of Q_STAGES
//                 stages, and do with lse and delta (backward_prologue.cu) into one of O_STAGES
//     consumer    for each query tile: start s^T = k q^T and dp^T = v do^T; wait for s; p = exp2(s - lse);
//                 start dv += p^T do; wait for dp; ds = p (dp - delta), to shared memory; start dk += ds^T q and, of
//                 the tile before, dq = ds k; wait for dv and dq; dq to shared memory; wait for dk
//     adders      two warps, one for each consumer, add that dq to the workspace with bulk reductions
//
// OVERLAP: s of the next tile is started after dv, before ds is stored, and dp of the next tile before dk is waited for. The
// consumers take exponentials in turns, so that one's are taken while the other's products run. Left alone they drift:
// now and then both take exponentials, and the tensor cores wait.
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
// slot and adder how many tiles of keys have been added. The first tile of keys that a query tile sees stores and the
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
// The compiler defines HEAD_DIM, VALUE_DIM, BLOCK_M, Q_STAGES, O_STAGES, OVERLAP, DETERMINISTIC, BF16, LEFT and
// RIGHT (whether there is such a limit), SOFTCAP, PACKED and ADDERS (warps that add dq up).

#include "cuda/include/sm90.cuh"
#include "cuda/include/softmax.cuh"
#include "cuda/include/packed.cuh"
#include "cuda/include/bulk.cuh"
#include "cuda/include/tile_scheduler.cuh"

constexpr int D = HEAD_DIM, E = VALUE_DIM, M = BLOCK_M, N = 128;
constexpr int S = M / 2, P = M / 4;                         // registers
constexpr int AT_ONCE = 3;                                  // query tiles that are converted
constexpr int DS_BUFFERS = 3, P_BYTES = 0, V_WARPS = 8, BUFFERS = 2;
constexpr bool ROWS_WITH_Q = false;
constexpr bool DP_LATE = SOFTCAP && (M == 128 || LEFT || PACKED);  // after p is made: the cap takes registers
static_assert(M * D == 8192, "a half of dq is 64 x 64: some columns (M = 64) or some rows");

#include "flash/kernels/backward_tiles.cuh"
#include "flash/kernels/backward_parts.cuh"

// Named barriers, for each consumer: of even and odd tiles, and for its turn to take exponentials.
enum { STORED = NEXT, TURN = STORED + 4 };

// ------------------------------------------------------------------------------------------------- consumers

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

// Starts the consumer's half of dq = ds k.
__device__ __forceinline__ void start_dq(float (&dq)[DQ], u32 ds, u32 k, int consumer) {
    const u64 x = descriptor(ds + (M == 64 ? 0 : consumer * N * 128), 16);
    const u64 y = descriptor(k + (M == 64 ? consumer * (D / 128) * N * 128 : 0), N * 128);
#pragma unroll
    for (int i = 0; i < N / 16; i++) wgmma_transposed(dq, x + i * 128, y + i * 128, i > 0);
    wgmma_commit();
}

// What a consumer keeps of a tile of keys.
struct Work {
    float s[S], dk[D / 2], dv[E / 2];
    u32 p[P], ds[P];
};

// All query tiles. Products that run at the same time as the code after them are named behind it.
__device__ __forceinline__ void walk_queries(Work &w, Stages &stages, int parity, const Args &a, const Shared &same,
                                             const Tile &tile, const char *shared, int consumer) {
    const Shared at(__shfl_sync(~0u, same.k, 0));   // addresses in uniform registers: none is moved there in the loop
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
    if (OVERLAP && consumer == 1) named_barrier_arrive<256>(TURN);
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
        const int stored = STORED + walk.left % 2 * 2, stored_before = STORED + (walk.left + 1) % 2 * 2;
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
        if (OVERLAP) named_barrier_sync<256>(TURN + consumer);
        if (m < all_from || (LEFT && m > all_to)) weights<true>(w.s, w.p, rows, see, m, a.factor, a.inner);
        else weights<false>(w.s, w.p, rows, see, m, a.factor, a.inner);     // dp
        if (OVERLAP && (consumer == 0 || walk.left > 1)) named_barrier_arrive<256>(TURN + 1 - consumer);

        if (DP_LATE) fresh(dp);
        pin(w.p);
        pin(w.dv);
        wgmma_fence();
        if (DP_LATE) start_over_columns<E, M, N>(dp, v, at.o[o]);
        start_over_rows<M>(w.dv, w.p, at.o[o], true);
        wgmma_wait<1>();
        pin(dp);
        gradients(w.ds, w.s, dp, rows + M);                                 // dv
        auto dv_is_made = [&] {
            pin(w.p);
            pin(w.dv);
            if (reports) at.o.release(o);
            o.next();
        };
        auto go_on = [&] {
            before = q;
            walk.next(a);
            q.next();
            if (walk.left > 0) await_q(q, walk.m);
            else if (reports) mbarrier_arrive(at.v_empty);
        };
        if (OVERLAP) {
            go_on();
            wgmma_wait<0>();
            dv_is_made();
            fresh(w.s);
            wgmma_fence();
            start_over_columns<D, M, N>(w.s, k, at.q[q]);                   // beyond the last tile: of no use
        }
        if (!first) named_barrier_sync<256>(stored_before + 1 - consumer);
        store_ds(w.ds, ds, consumer);                                       // s
        named_barrier_arrive<256>(stored + consumer);
        if (!OVERLAP) go_on();
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
    if (reports) mbarrier_arrive(at.k_empty);
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
    if (threadIdx.x == 0) at.init_barriers();
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
