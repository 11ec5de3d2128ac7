// Attention over a latent cache (absorbed MLA) for Hopper (sm_90a): TMA, mbarriers, wgmma, warp specialisation.
//
// All heads share kv (N, 576), whose first 512 columns are the values. A block owns 64 queries of one row of the batch, of
// any heads (query r is token r / H, head r % H), and one split of the row's keys, which it walks BLOCK_N at a time:
//
//     producer    one thread issues TMA loads of tiles of kv into STAGES stages, in two halves each: columns 0 to 255
//                 with 512 to 575, and columns 256 to 511. It gives its registers to the consumers.
//     consumer w  of two keeps o of columns 256 w to 256 w + 255. It owns every second tile: the logits s = q kv^T and
//                 the softmax of an own tile are its work, the product p v of every tile is done by both.
//
// p of an own tile is in the owner's registers; the other consumer reads it from shared memory, with the row maxima m. So,
// for its tile j, consumer w = j % 2
//
//     starts s = q kv_j^T; waits for p_j-1; starts o += p_j-1 v_j-1; waits for s; softmax of s; waits for o;
//     hands out p_j and m_j; starts o += p_j v_j; waits for o
//
// and the softmax of one consumer runs beside the products of the other. There is one buffer for p: p_j is written by the
// warps that have read p_j-1, at the same rows.
//
// Who waits for what: TMA counts bytes on the `full` barrier of a half stage; consumer w arrives on `empty` of half w when
// its product with these values is over, which is after the logits. Named barrier 1 + w says that p of consumer w is there.
//
// A tile that the row's end cuts: keys beyond it are masked, and their rows zeroed once the logits are there, as what lies
// there may be no number. PAGED: a tile is loaded in boxes of BOX keys, each within a page; boxes beyond the end are not.
//
// SPLIT: blocks that share a row's keys leave sums, not divided yet, in fp32, and m and l of every query for
// flash/kernels/combine.cu; a block without keys leaves m = -infinity alone.
//
// APPENDED: this step's launches write only q and the last n_q keys of a row, and the one ahead lets this one start only
// after its own wait, so that lengths and the table are there. Tiles of older keys are loaded before that one has ended; the
// producer waits for it before a tile with new keys, the consumers before anything else.
//
// The compiler defines BLOCK_N, STAGES, BF16, CAUSAL, SPLIT, PAGED, BOX, ONCE (no other block reads the same keys) and
// APPENDED.

#include "cuda/include/sm90.cuh"
#include "cuda/include/cp_async.cuh"
#include "cuda/include/softmax.cuh"
#include "cuda/include/mask.cuh"
#include "cuda/include/tile_scheduler.cuh"

constexpr int D = 576, E = 512, ROWS = 64;
constexpr int THREADS = 384, COLUMNS = E / 2;       // COLUMNS: of o, a consumer's
constexpr int Q_BYTES = D / 64 * PANEL;
constexpr int KV_PANEL = BLOCK_N * 128, STAGE = D / 64 * KV_PANEL;
constexpr int S = BLOCK_N / 2, O = COLUMNS / 2, P = BLOCK_N / 4;  // registers
constexpr int OF_PRODUCER = 24, OF_CONSUMER = 240;  // registers of a thread
constexpr int BOTH = 3, WITHIN = 4;                 // named barriers: of the consumers; of one, from here on

struct Shared {
    u32 q, stages, p, full, empty;      // full, empty: of half h of stage i at 8 (2 i + h)
    float *m, *l;                       // of 64 rows; l of both consumers
    __device__ __forceinline__ explicit Shared(char *shared) : q((u32)__cvta_generic_to_shared(shared)) {
        stages = q + Q_BYTES;
        p = stages + STAGES * STAGE;
        full = p + PANEL;
        empty = full + 16 * STAGES;
        m = reinterpret_cast<float *>(shared + Q_BYTES + STAGES * STAGE + PANEL + 32 * STAGES);
        l = m + ROWS;
    }
    __device__ __forceinline__ u32 stage(int tile) const { return stages + tile % STAGES * STAGE; }
    __device__ __forceinline__ static int barrier(int tile, int half) { return 8 * (tile % STAGES * 2 + half); }
    __device__ __forceinline__ void wait(int tile, int half) const {
        mbarrier_wait(full + barrier(tile, half), tile / STAGES % 2);
    }
    __device__ __forceinline__ void release(int tile, int half) const {
        if (threadIdx.x % 32 == 0) mbarrier_arrive(empty + barrier(tile, half));
    }
};

// What a block does: queries from `row` on, `tiles` of keys from `first` on.
struct Task {
    int b, split, row, length, first, tiles;
    __device__ __forceinline__ explicit Task(const Args &a) {
        const int block = blockIdx.x;
        row = block % a.tiles * ROWS;
        split = block / a.tiles % a.splits;
        b = block / a.tiles / a.splits;
        length = a.lengths ? min(max(load_coherent(a.lengths + b), 0), a.n_kv) : a.n_kv;
        const int all = (length + BLOCK_N - 1) / BLOCK_N, each = (all + a.splits - 1) / a.splits;
        first = min(all, split * each) * BLOCK_N;
        tiles = min(each, all - first / BLOCK_N);
        if (CAUSAL) {                   // as far as the last query sees
            const int end = length - a.n_q + min(row + ROWS - 1, a.h * a.n_q - 1) / a.h + 1;
            tiles = max(0, min(tiles, (end - first + BLOCK_N - 1) / BLOCK_N));
        }
    }
};

// ------------------------------------------------------------------------------------------------- producer

__device__ __forceinline__ void produce(const Args &a, const Task &task, const Shared &at) {
    constexpr int BOXES = BLOCK_N / BOX;
    for (int j = 0; j < task.tiles; j++) {
        const int key = task.first + j * BLOCK_N;
        int row[BOXES], where[BOXES], boxes = 0;    // within the page, or row of the batch; which
#pragma unroll
        for (int i = 0; i < BOXES; i++)
            if (!PAGED || key + i * BOX < task.length) {
                row[i] = key + i * BOX, where[i] = task.b, boxes++;
                if (PAGED) {
                    const long long entry = (long long)task.b * a.table_width + row[i] / a.page;
                    where[i] = min(max(load_coherent(a.table + entry), 0), a.pages - 1);
                    row[i] %= a.page;
                }
            }
        if (APPENDED && key + BLOCK_N > task.length - a.n_q) wait_for_new_data();
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int barrier = at.barrier(j, half), panels = half ? 4 : 5;
            mbarrier_wait(at.empty + barrier, j / STAGES % 2 ^ 1);
            mbarrier_expect(at.full + barrier, boxes * panels * BOX * 128);
#pragma unroll
            for (int c = 0; c < panels; c++) {
                const int panel = c == 4 ? 8 : 4 * half + c;
#pragma unroll
                for (int i = 0; i < BOXES; i++)
                    if (i < boxes)
                        tma_load<ONCE>(at.stage(j) + panel * KV_PANEL + i * BOX * 128, a.kv, at.full + barrier,
                                       64 * panel, row[i], 0, where[i]);
            }
        }
    }
}

// ------------------------------------------------------------------------------------------------ consumers

// What a consumer keeps.
struct Work {
    float s[S], o[O];
    u32 p[P];
    Softmax x;
    Keys seen;
};

// Starts s = q kv^T over COUNT panels, or s += q kv^T.
template <int COUNT>
__device__ __forceinline__ void start_panels(float (&s)[S], u32 q, u32 kv, bool add) {
    const u64 a = descriptor(q, 16), b = descriptor(kv, 16);
#pragma unroll
    for (int d = 0; d < 4 * COUNT; d++) {
        wgmma(s, a + (d / 4 * PANEL + d % 4 * 32) / 16, b + (d / 4 * KV_PANEL + d % 4 * 32) / 16, add || d > 0);
    }
}

// Starts o += p v, with p in shared memory.
__device__ __forceinline__ void start_from_shared(float (&o)[O], u32 p, u32 v) {
    const u64 a = descriptor(p, 16), b = descriptor(v, KV_PANEL);
#pragma unroll
    for (int j = 0; j < BLOCK_N / 16; j++) wgmma_over_rows(o, a + j * 32 / 16, b + j * 16 * 128 / 16, 1);
    wgmma_commit();
}

__device__ __forceinline__ void rescale_if_needed(float (&o)[O], const float (&alpha)[2]) {
    if (alpha[0] != 1.0f || alpha[1] != 1.0f) rescale(o, alpha);
}

__device__ __forceinline__ int row_of_lane(int r) {
    return threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4 + 8 * r;
}

// Takes the other's p of `tile`, when it is there, into o: o is rescaled to the other's maxima first.
__device__ __forceinline__ void start_other(Work &w, const Shared &at, int tile, int consumer, float factor) {
    float alpha[2];
    named_barrier_sync<256>(2 - consumer);
    at.wait(tile, consumer);
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const float m = at.m[row_of_lane(r)];
        alpha[r] = exp2_(w.x.m[r] * factor - (m == -INFINITY_ ? 0.0f : m * factor));
        w.x.m[r] = m;
        w.x.l[r] *= alpha[r];
    }
    rescale_if_needed(w.o, alpha);
    pin(w.o);
    wgmma_fence();
    start_from_shared(w.o, at.p, at.stage(tile) + consumer * 4 * KV_PANEL);
}

// Rows of the values that are beyond the end of the keys, once every warp has its logits.
__device__ __forceinline__ void zero_rows(u32 kv, int from, int consumer) {
    named_barrier_sync<128>(WITHIN + consumer);
    for (int unit = from * 8 + threadIdx.x % 128; unit < BLOCK_N * 8; unit += 128)
#pragma unroll
        for (int i = 0; i < E / 64; i++) store_zeros(kv + i * KV_PANEL + unit * 16);
    fence_async();
    named_barrier_sync<128>(WITHIN + consumer);
}

// Own tile j, and the other's before it. FIRST: there is none.
template <bool FIRST>
__device__ __forceinline__ void step(Work &w, const Args &a, const Task &task, const Shared &at, int j, int consumer,
                                     int all_to) {
    const int key = task.first + j * BLOCK_N, warp = threadIdx.x / 32 % 4;
    float alpha[2];
    at.wait(j, 0);
    pin(w.s);
    wgmma_fence();
    start_panels<4>(w.s, at.q, at.stage(j), false);
    start_panels<1>(w.s, at.q + 8 * PANEL, at.stage(j) + 8 * KV_PANEL, true);
    at.wait(j, 1);
    wgmma_fence();                      // again: the wait may have taken another path
    start_panels<4>(w.s, at.q + 4 * PANEL, at.stage(j) + 4 * KV_PANEL, true);
    wgmma_commit();
    if (FIRST) {
        wgmma_wait<0>();
    } else {
        start_other(w, at, j - 1, consumer, a.factor);
        wgmma_wait<1>();
    }
    pin(w.s);
    if (key + BLOCK_N > task.length) zero_rows(at.stage(j), task.length - key, consumer);
    if (key + BLOCK_N - 1 > all_to) mask<false>(w.s, key, w.seen);
    w.x.step<false, true>(w.s, alpha, a.factor);
    if (!FIRST) {
        wgmma_wait<0>();
        pin(w.o);
        at.release(j - 1, consumer);
    }
    store_rows(w.s, at.p, warp);
    if (threadIdx.x % 4 == 0)
#pragma unroll
        for (int r = 0; r < 2; r++) at.m[row_of_lane(r)] = w.x.m[r];
    fence_async();
    named_barrier_arrive<256>(1 + consumer);
#pragma unroll
    for (int i = 0; i < P; i++) w.p[i] = pack(w.s[2 * i], w.s[2 * i + 1]);
    rescale_if_needed(w.o, alpha);
    pin(w.o);
    pin(w.p);
    wgmma_fence();
    start_over_rows<BLOCK_N>(w.o, w.p, at.stage(j) + consumer * 4 * KV_PANEL, true);
    wgmma_wait<0>();
    pin(w.o);
    pin(w.p);
    at.release(j, consumer);
}

// Writes o, divided by the denominators.
__device__ __forceinline__ void store(const Args &a, const Task &task, const Work &w, int consumer) {
    const int t = threadIdx.x % 4;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int row = task.row + row_of_lane(r);
        const float share = 1.0f / divisor(w.x.l[r]);
        char *to = a.o + task.b * a.o_strides.b + row % a.h * a.o_strides.h + row / a.h * a.o_strides.n + consumer * E;
#pragma unroll
        for (int c = 0; c < O / 4; c += 4) {
            u32 y[4];
#pragma unroll
            for (int i = 0; i < 4; i++) y[i] = pack(w.o[4 * (c + i) + 2 * r] * share, w.o[4 * (c + i) + 2 * r + 1] * share);
            transpose(y);
            if (row < a.h * a.n_q) *reinterpret_cast<uint4 *>(to + (c + t) * 16) = make_uint4(y[0], y[1], y[2], y[3]);
        }
    }
}

// The sums of one split; without keys m and l alone.
__device__ __forceinline__ void store_split(const Args &a, const Task &task, const Work &w, int consumer) {
    const int t = threadIdx.x % 4;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int row = task.row + row_of_lane(r);
        if (row >= a.h * a.n_q) continue;
        const long long head = ((long long)task.split * a.batch + task.b) * a.h + row % a.h;
        const long long at = head * a.n_q + row / a.h;
        if (task.tiles > 0) {
            float2 *to = reinterpret_cast<float2 *>(a.o) + at * (E / 2) + consumer * (COLUMNS / 2) + t;
#pragma unroll
            for (int j = 0; j < O / 4; j++) to[4 * j] = make_float2(w.o[4 * j + 2 * r], w.o[4 * j + 2 * r + 1]);
        }
        if (t == 0 && consumer == 0) a.found[at] = make_float2(w.x.m[r] * a.factor, w.x.l[r]);
    }
}

// 64 queries to shared memory, zeros where there are none: eight rows a warp, of which lane i finds row i % 8.
__device__ __forceinline__ void load_q(const Args &a, const Task &task, u32 to) {
    constexpr int UNITS = D / 8;
    const int lane = threadIdx.x % 32, first = threadIdx.x / 32 * 8 - 32, row = task.row + first + lane % 8;
    const long long mine = row % a.h * a.q_strides.h + row / a.h * a.q_strides.n;
    const char *q = a.q + task.b * a.q_strides.b;
#pragma unroll
    for (int r = 0; r < 8; r++) {
        const bool there = task.row + first + r < a.h * a.n_q;
        const long long offset = __shfl_sync(~0u, mine, r);     // by all lanes
#pragma unroll
        for (int i = 0; i < UNITS; i += 32) {
            const int unit = i + lane;
            if (unit < UNITS) cp_async(swizzled(to, first + r, unit), there ? q + offset + unit * 16 : q, there);
        }
    }
    cp_async_commit();
    cp_async_wait<0>();
    fence_async();
    named_barrier_sync<256>(BOTH);
}

__device__ __forceinline__ void consume(const Args &a, const Task &task, const Shared &at, int consumer) {
    if (APPENDED) wait_for_new_data();
    Work w;
    w.x.init();
#pragma unroll
    for (int i = 0; i < O; i++) w.o[i] = 0.0f;
    const int last = task.length - 1, shift = task.length - a.n_q;
    for (int r = 0; r < 2; r++) w.seen.last[r] = last_key<CAUSAL>(last, (task.row + row_of_lane(r)) / a.h + shift);
    const int all_to = last_key<CAUSAL>(last, task.row / a.h + shift);
    if (task.tiles > 0) {
        load_q(a, task, at.q);
        int j = consumer;
        if (j == 0) step<true>(w, a, task, at, j, consumer, all_to), j = 2;
        for (; j < task.tiles; j += 2) step<false>(w, a, task, at, j, consumer, all_to);
        if (j == task.tiles) {          // the last tile was the other's
            start_other(w, at, j - 1, consumer, a.factor);
            wgmma_wait<0>();
            pin(w.o);
            at.release(j - 1, consumer);
        }
        float *mine = at.l + consumer * ROWS, *other = at.l + (1 - consumer) * ROWS;
#pragma unroll
        for (int r = 0; r < 2; r++) {
            w.x.l[r] = quad_sum(w.x.l[r]);
            if (threadIdx.x % 4 == 0) mine[row_of_lane(r)] = w.x.l[r];
        }
        named_barrier_sync<256>(BOTH);
#pragma unroll
        for (int r = 0; r < 2; r++) w.x.l[r] += other[row_of_lane(r)];
    }
    if (SPLIT) store_split(a, task, w, consumer);
    else store(a, task, w, consumer);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
latent_forward_kernel(const __grid_constant__ Args a) {
    extern __shared__ __align__(1024) char shared[];
    const Shared at(shared);
    if (threadIdx.x == 0) {
        prefetch(a.kv);
        for (int i = 0; i < 2 * STAGES; i++) mbarrier_init(at.full + 8 * i, 1), mbarrier_init(at.empty + 8 * i, 4);
        fence_barrier_init();
    }
    __syncthreads();
    if (APPENDED) let_next_kernel_start();
    else wait_for_previous_kernel();
    const Task task(a);
    if (threadIdx.x < 128) {
        give_registers<OF_PRODUCER>();
        if (threadIdx.x == 0) produce(a, task, at);
    } else {
        take_registers<OF_CONSUMER>();
        consume(a, task, at, __shfl_sync(~0u, threadIdx.x / 128, 0) - 1);
    }
}
