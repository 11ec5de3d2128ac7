// What the kernels of the backward share beside their products: shared memory, the tile scheduler, the loads, the sums of dq.
//
// The kernel's source defines D, E, M, N, S, P, AT_ONCE, DS_BUFFERS (of ds) and P_BYTES, ROWS_WITH_Q (lse and delta come with
// q, not with do), V_WARPS, the warps that read v, and BUFFERS of dq.
//
// dq travels in pieces of 64 x 64 fp32 numbers, as the accumulators of a warpgroup lie: (chunk of 4, thread, 4). Of a query
// tile the first consumer makes pieces 0 .. PIECES / 2 - 1, and stages each in a buffer of its own; the second makes the rest,
// and stages all of them in the last buffer. An adder is a warp that adds to the workspace what the first consumer makes, or
// one of the second's pieces: so each of these is passed on while the next one is made.

constexpr int THREADS = 384, WARPS = 8;                     // WARPS: of the consumers
constexpr int DQ = 32;                                      // registers of a piece
constexpr int PIECE_BYTES = 64 * 64 * 4, PIECES = M * D / 4096, OF_FIRST = PIECES / 2;
constexpr int DS_BYTES = N * M * 2, ROW_BYTES = 8 * M;      // ROW_BYTES: lse and delta
static_assert(ADDERS == PIECES - OF_FIRST + 1, "one of the first consumer, and one of each of the second's pieces");
static_assert(M == 64 || M * D == 8192, "pieces are columns (M = 64), or there are two, of some rows");

enum { OWN = 1, FULL = 3, EMPTY = FULL + PIECES, NEXT = EMPTY + PIECES };    // named barriers: of consumers, of pieces

__device__ __forceinline__ constexpr int first_piece(int consumer) { return consumer * OF_FIRST; }
__device__ __forceinline__ constexpr int pieces(int consumer) { return consumer ? PIECES - OF_FIRST : OF_FIRST; }
__device__ __forceinline__ constexpr int buffer(int piece) { return piece < BUFFERS ? piece : BUFFERS - 1; }

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
    u32 k, v, ds, p, dq, rows, k_full, v_full, k_empty, v_empty;
    u32 tile, told, heard;              // of the scheduler: the next tile, and the barriers around it
    Ring<D, Q_STAGES> q;
    Ring<E, O_STAGES> o;                // do
    __device__ __forceinline__ explicit Shared(u32 base) : k(base) {
        v = k + N * D * 2;
        q.stages = v + N * E * 2;
        o.stages = q.stages + Q_STAGES * q.BYTES;
        ds = o.stages + O_STAGES * o.BYTES;
        p = ds + DS_BUFFERS * DS_BYTES;
        dq = p + P_BYTES;
        rows = dq + BUFFERS * PIECE_BYTES;
        k_full = rows + (ROWS_WITH_Q ? Q_STAGES : O_STAGES) * ROW_BYTES;
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

    __device__ __forceinline__ void init_barriers() const {
        mbarrier_init(k_full, 1), mbarrier_init(k_empty, WARPS);
        mbarrier_init(v_full, 1), mbarrier_init(v_empty, V_WARPS);
        mbarrier_init(told, 1), mbarrier_init(heard, WARPS + ADDERS);
        for (int i = 0; i < Q_STAGES; i++) mbarrier_init(q.full + 8 * i, 1), mbarrier_init(q.empty + 8 * i, WARPS);
        for (int i = 0; i < O_STAGES; i++) mbarrier_init(o.full + 8 * i, 1), mbarrier_init(o.empty + 8 * i, WARPS);
        fence_barrier_init();
    }
};

// Where a consumer is in the rings, from tile to tile.
struct Stages {
    typename Ring<D, Q_STAGES>::State q;
    typename Ring<E, O_STAGES>::State o;
};

// ------------------------------------------------------------------------------------------------- scheduler

// What the producer tells the others: the next tile, and of how many tiles k and v were loaded before it.
struct Told {
    int tile, loaded;
};

// The scheduler. The producer takes tiles from a counter in memory, long before the others need them, and tells them.
// Without a counter every tile has a block of its own.
struct Schedule {
    int parity = 0;

    __device__ __forceinline__ int take(const Args &a, const Shared &at, char *shared, bool first, int loaded) {
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
#pragma unroll 1
        for (Told told; (told = next(at, shared)).tile < a.end;) do_tile(told);
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

// N rows of k or v, when the consumers have released those of the tile before.
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
            auto fetch_rows = [&](int stage, u32 full) {
                bulk_load(at.rows + stage * ROW_BYTES, a.rows + walk.slot * (2LL * M), ROW_BYTES, full + 8 * stage);
            };
            at.q.fetch(a.q, q, ROWS_WITH_Q ? ROW_BYTES : 0, walk.m, h * a.group + walk.i, b);
            if (ROWS_WITH_Q) fetch_rows(q.stage, at.q.full);
            at.o.fetch(a.dout, o, ROWS_WITH_Q ? 0 : ROW_BYTES, walk.m, h * a.group + walk.i, b);
            if (!ROWS_WITH_Q) fetch_rows(o.stage, at.o.full);
            q.next();
            o.next();
            if (once) fetch_keys<E>(at.v, a.v, at.v_full, at.v_empty, before, row, h, b);
            if (once && before) fetch_keys<D>(at.k, a.k, at.k_full, at.k_empty, before, row, h, b);
            once = false;
        }
        before++;
    }
}

// Adds an adder's pieces, which a consumer leaves in shared memory, to the sums: one warp.
__device__ __forceinline__ void add_dq(const Args &a, const Shared &at, const Tile &tile, int adder) {
    const bool leads = threadIdx.x % 32 == 0;
    constexpr bool TWO = ADDERS == 2;   // each has one piece and one buffer; so written, the compiler sees constants
    const int from = OF_FIRST == 1 ? adder : adder ? OF_FIRST + adder - 1 : 0, count = OF_FIRST == 1 || adder ? 1 : OF_FIRST;
    // frees: the piece that is staged next in the buffer this adder empties; of_next: it is of the next query tile, so that the
    // buffer is free at first
    const int frees = TWO ? adder : adder == 0 ? 0 : adder + 1 < ADDERS ? from + 1 : OF_FIRST;
    const bool of_next = TWO || adder == 0 || adder + 1 == ADDERS;
    int before = -1;                    // the part that is not passed on yet: its sum may be on its way
    bool ready = false;                 // its turn has come
    if (tile.count > 0 && of_next)
        for (int i = 0; i < count; i++) named_barrier_arrive<160>(EMPTY + frees + i);
    Walk walk(a, tile);
#pragma unroll 1
    while (walk.left > 0) {
        const int part = ADDERS * walk.slot + adder, turn = tile.n0 / N - tile.first_tile(a, walk.m);
        if (leads && turn && !ready) {
            if (DETERMINISTIC) wait_for_turn(a.turns + part, turn);
            else wait_for_first(a.turns + part);
        }
        __syncwarp();
        walk.next(a);
        int i = 0;                      // with one piece no loop is left; of a `for` something would be
        do {
            named_barrier_sync<160>(FULL + from + i);
            if (leads) {
                const long long piece = TWO ? part : part / ADDERS * (long long)PIECES + from + i;
                float *to = a.sums + piece * (PIECE_BYTES / 4LL);
                if (turn) bulk_add(to, at.dq + buffer(from + i) * PIECE_BYTES, PIECE_BYTES);
                else bulk_store(to, at.dq + buffer(from + i) * PIECE_BYTES, PIECE_BYTES);
                tma_store_commit();
                if (i + 1 == count && walk.left > 0)            // the next one, while shared memory is read
                    ready = turns_passed(a.turns + ADDERS * walk.slot + adder) >=
                            (DETERMINISTIC ? tile.n0 / N - tile.first_tile(a, walk.m) : 1);
                tma_store_wait_read<0>();
            }
            __syncwarp();
            if (walk.left > 0 || !of_next) named_barrier_arrive<160>(EMPTY + frees + i);
        } while (++i < count);
        const bool now = DETERMINISTIC || turn == 0 || walk.left == 0;      // others wait for it
        if (leads) {
            if (now) bulk_wait<0>();
            else if (count == 1) bulk_wait<1>();
            else bulk_wait<2>();
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

// ds^T of 64 keys to shared memory: row by row, panels of 64 queries.
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

// A piece of dq to shared memory, for its adder.
__device__ __forceinline__ void stage_dq(const float (&dq)[DQ], u32 to, int piece) {
#pragma unroll
    for (int i = 0; i < DQ / 4; i++)
        store4(to + buffer(piece) * PIECE_BYTES + threadIdx.x % 128 * 16 + i * 2048, dq + 4 * i);
    fence_async();
    named_barrier_arrive<160>(FULL + piece);
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

// Turns the consumer's pieces of sums into dq. A tile of keys has its share of the queries of its sequence: with a limit on
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
    const int *turns = a.turns + ADDERS * ((head + a.group - 1) * a.slots + slot) + consumer;
    const int every = tile.last_tile(a, from) - tile.first_tile(a, from) + 1;
    wait_for_turn(turns, every);
    if (ADDERS > 2 && consumer) wait_for_turn(turns + 1, every);    // of the second's other piece
    const int warp = threadIdx.x % 128 / 32 * 16 + (M == 64 ? 0 : 64 * consumer);   // its first row
    const int items = (min(to, tile.n_q) - from + M - 1) / M * a.group * pieces(consumer);
#pragma unroll 1
    for (int first = 0; first < items; first += AT_ONCE) {
        float x[AT_ONCE][DQ];
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            const int item = min(first + i, items - 1);     // else x lives on from tile to tile
            const int of = item / pieces(consumer);
            const long long part = PIECES * (long long)((head + of % a.group) * a.slots + slot + of / a.group) +
                                   first_piece(consumer) + item % pieces(consumer);
#pragma unroll
            for (int c = 0; c < DQ / 4; c++)
                *reinterpret_cast<float4 *>(x[i] + 4 * c) =
                    reinterpret_cast<const float4 *>(a.sums)[part * (PIECE_BYTES / 16) + c * 128 + threadIdx.x % 128];
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            const int item = first + i, of = item / pieces(consumer), row = from + of / a.group * M + warp;
            if (item >= items) break;
            const int column = M == 64 ? 64 * (first_piece(consumer) + item % pieces(consumer)) : 0;
            store(x[i], a.dq + b * a.dq_strides.b + (h * a.group + of % a.group) * a.dq_strides.h +
                            (tile.begin_q + row) * a.dq_strides.n + 2 * column,
                  a.dq_strides.n, a.scale, tile.n_q - row);
        }
    }
}
