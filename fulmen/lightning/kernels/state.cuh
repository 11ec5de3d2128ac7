// The warpgroup of a sweep that keeps the state (sweep.cu), and what it shares with those that form outputs.

// A warp has no more use for a stage, into which every block of the cluster loads for all of them.
__device__ __forceinline__ void release(u32 barrier) {
    const int lane = threadIdx.x % 32;
    if (lane >= CLUSTER) return;
    if (CLUSTER == 1) mbarrier_arrive(barrier);
    else mbarrier_arrive_at(barrier, lane);
}

// Rows of b and c that belong to another sequence: every warpgroup zeroes them for itself, before it uses any.
__device__ __forceinline__ void zero_rows(const Shared &at, const Walk &w, int n, int group) {
    if (!PACKED || w.left(n) >= C) return;
    const int from = w.ends_first() ? 0 : w.left(n), to = w.ends_first() ? C - w.left(n) : C;
#pragma unroll 1
    for (int unit = from * 8 + threadIdx.x % 128; unit < to * 8; unit += 128)
#pragma unroll
        for (int i = 0; i < PANELS + 1; i++) store_zeros(at.b(n) + i * PANEL + unit * 16);
    fence_async();
    named_barrier_sync<128>(1 + group);
}

// Saved states are read when they are due: registers do not hold them until then.
constexpr bool LATE = PANELS == 2 && OUTS == 2;

// What the warpgroup that keeps the state holds.
struct State {
    float state[D / 2];             // [v, k]
    u32 saved[DOTS && !LATE ? D / 4 : 1];  // by the forward
    u32 hi[8], lo[8];               // lambda^(rows walked after row j), for pairs of rows, in twice the digits of bf16
    int warp, walked;

    // fp32, from or to memory: [k, v] or, swapped, [v, k].
    template <bool LOAD>
    __device__ __forceinline__ void move(float *x, float times, const Walk &w, int number, bool swapped) {
        const int lane = threadIdx.x % 32, along_v = swapped ? D : 1, along_k = swapped ? 1 : V;
        x += (long long)number * D * V + (64 * w.tile + 16 * warp + lane / 4) * along_v + 2 * (lane % 4) * along_k;
#pragma unroll
        for (int i = 0; i < D / 2; i++) {
            float &here = x[8 * (i / 2 % 2) * along_v + (8 * (i / 4) + i % 2) * along_k];
            if (LOAD) state[i] = here * times;
            else here = state[i] * times;
        }
    }

    // From a saved state, which lies transposed.
    __device__ __forceinline__ void take_saved(u32 saved) {
#pragma unroll
        for (int k = 0; k < D / 16; k++) {
            u32 y[4];
            load_transposed(y, saved, 16 * k, warp);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                state[8 * k + 2 * i] = low(y[i]);
                state[8 * k + 2 * i + 1] = high(y[i]);
            }
        }
    }

    // c of a chunk, transposed, times what its rows have decayed at the chunk's end.
    __device__ __forceinline__ void take_c(u32 (&c)[16], u32 from, const Decays &d, float rate, bool reverse, int rows) {
        if (TOKENS) {
#pragma unroll
            for (int i = 0; i < 8; i++) {
                const uint2 left = d.left[4 * i + threadIdx.x % 4];
                hi[i] = left.x, lo[i] = left.y;
            }
        } else if (rows != walked) {  // once, and again where a sequence ends
            walked = rows;
#pragma unroll
            for (int i = 0; i < 8; i++) {
                float f[2];
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    const int j = 8 * i + 2 * (threadIdx.x % 4) + e, turn = reverse ? C - 1 - j : j;
                    f[e] = exp2_(rate * max(rows - (reverse ? 0 : 1) - turn, 0));
                }
                hi[i] = pack(f[0], f[1]);
                lo[i] = pack(f[0] - low(hi[i]), f[1] - high(hi[i]));
            }
        }
#pragma unroll
        for (int j = 0; j < 4; j++) {
            u32 y[4];
            load_transposed(y, from, 16 * j, warp);
#pragma unroll
            for (int i = 0; i < 4; i++) c[4 * j + i] = times(y[i], hi[2 * j + i / 2], lo[2 * j + i / 2]);
        }
    }

    // What the forward saved before the chunk at a place, in the order of `state`; and its product with that, summed. LATE: it is
    // only fetched into L2 ahead of time.
    __device__ __forceinline__ const char *saved_at(const Args &x, const Walk &w, int place) const {
        const int lane = threadIdx.x % 32;
        return x.saved + ((w.saved_slot(x, place) * V + 64 * w.tile + 16 * warp + lane / 4) * D + 2 * (lane % 4)) * 2;
    }

    static __device__ __forceinline__ u32 one_saved(const char *from, int i) {
        return load_coherent(reinterpret_cast<const u32 *>(from + (i % 2 * 8 * D + i / 2 * 8) * 2));
    }

    __device__ __forceinline__ void load_saved(const Args &x, const Walk &w, int place) {
        if (LATE) {
            const char *line = x.saved + ((w.saved_slot(x, place) * V + 64 * w.tile) * D + threadIdx.x * 64) * 2;
            asm volatile("prefetch.global.L2 [%0];" :: "l"(line) : "memory");
            return;
        }
        const char *from = saved_at(x, w, place);
#pragma unroll
        for (int i = 0; i < D / 4; i++) saved[DOTS && !LATE ? i : 0] = one_saved(from, i);
    }

    __device__ __forceinline__ void write_anchor(const Args &x, const Walk &w, int place, float times) {
        const char *from = saved_at(x, w, place);
        float each[4] = {};         // four chains, as one sum waits for the other
#pragma unroll
        for (int half = 0; half < D / 64; half++) {
            u32 some[16];
#pragma unroll
            for (int i = 0; i < 16; i++) some[i] = LATE ? one_saved(from, 16 * half + i) : saved[DOTS && !LATE ? 16 * half + i : 0];
#pragma unroll
            for (int i = 0; i < 16; i++) {
                float &sum = each[i % 4];
                sum = fmaf(state[32 * half + 2 * i + 1], high(some[i]), fmaf(state[32 * half + 2 * i], low(some[i]), sum));
            }
            if (LATE) pin(each);      // else all are loaded first
        }
        float sum = each[0] + each[1] + (each[2] + each[3]);
#pragma unroll
        for (int bit = 1; bit < 32; bit *= 2) sum += __shfl_xor_sync(~0u, sum, bit);
        if (threadIdx.x % 32 == 0) x.product[w.which].anchors[(w.saved_slot(x, place) * TILES + w.tile) * 4 + warp] = sum * times;
    }

    // Without decay c goes into the product as it lies in shared memory.
    __device__ __forceinline__ void start_add(u32 c, u32 b) {
        const u64 x = descriptor(c, PANEL), z = descriptor(b, PANEL);
        pin(state);
        wgmma_fence();
#pragma unroll
        for (int j = 0; j < C / 16; j++) wgmma_transposed(state, x + j * 16 * 128 / 16, z + j * 16 * 128 / 16, 1);
        wgmma_commit();
    }
};

// All others wait for this warpgroup: c of the next chunk is fetched while a product runs, and stages and rows are
// counted, not computed from n.
__device__ __forceinline__ void keep_state(const Args &x, const Shared &at, const Walk &w, const Sweep &sweep) {
    const bool leads = threadIdx.x == 0, reports = threadIdx.x % 32 == 0;
    const int partial = w.partial(), rest = w.length % C;
    const float whole = exp2_(w.rate * C);
    float *enters = w.whole ? sweep.first_enters : sweep.enters, *leaves = w.whole ? sweep.first_leaves : sweep.leaves;
    State y;
    u32 c[2][16] = {};              // of this chunk and of the next
    y.warp = threadIdx.x / 32, y.walked = 0;
#pragma unroll
    for (int i = 0; i < D / 2; i++) y.state[i] = 0.0f;
    if (enters) y.move<true>(enters, sweep.enters_times, w, JOINED ? w.number_again(x) : w.number, sweep.swapped);
    int opens = 0, group = 0;       // the chunk that opens the next group, and which group that is
    int stage = 0, parity = 0;      // of the ring, counted
    float passed = 1.0f;            // what is left of the state that entered
    const bool anchors = DOTS && x.product[w.which].anchors;  // of a sweep right to left
    auto meets = [&](int n) { return anchors && (w.chunks - 1 - n) % EVERY == 0; };
    auto fetch = [&](int n, u32 (&c)[16]) {
        mbarrier_wait(at.full + 8 * stage, parity);
        zero_rows(at, w, n, 0);
        const u32 from = at.ring + stage * STAGE + PANELS * PANEL;
        if (DECAY) y.take_c(c, from, at.decays[stage], w.rate, w.reverse, n == partial ? rest : C);
    };
    auto step = [&](int n, const int turn, u32 (&c)[16], u32 (&next)[16]) {
        const u32 chunk = at.ring + stage * STAGE, state = at.states + turn % STATE_BUFFERS * STATE, free = at.empty + 8 * stage;
        if (SAVE == 2 && w.grouped && n == opens) {
            mbarrier_wait(at.saved_full, group++ % 2);
            y.take_saved(at.saved);
            __syncwarp();
            if (reports) mbarrier_arrive(at.saved_empty);
            opens = n ? n + EVERY : (w.chunks - 1) % EVERY + 1;
        }
        if (OUTS) {
            if (SAVE == 1 && n >= STATE_BUFFERS && (n - STATE_BUFFERS) % EVERY == 0) {  // the store of what this buffer held must have read it
                if (leads) tma_store_wait_read<0>();
                named_barrier_sync<128>(1);
            }
            if (STATE_BUFFERS == 2) mbarrier_wait(at.state_empty + 8 * turn, n / 2 % 2 ^ 1);
            else if (n) mbarrier_wait(at.state_empty + 8 * (turn ^ 1), (n - 1) / 2 % 2);
            store_rows(y.state, state, y.warp);
            fence_async();
            __syncwarp();
            if (reports) mbarrier_arrive(at.state_full + 8 * turn);
            if (SAVE == 1 && n % EVERY == 0) {
                named_barrier_sync<128>(1);
                if (leads) {
#pragma unroll
                    for (int i = 0; i < PANELS; i++)
                        tma_store(state + i * PANEL, x.map[7], 64 * i, 64 * w.tile, w.slot + n / EVERY, w.head);
                    tma_store_commit();
                }
            }
        }
        if (DOTS && meets(n + 1)) y.load_saved(x, w, w.chunks - 2 - n);  // behind the fence, which would wait for it
        if constexpr (DECAY) {
            const float keep = TOKENS ? at.decays[stage].keep : n == partial ? exp2_(w.rate * rest) : whole;
            passed *= keep;
#pragma unroll
            for (int i = 0; i < D / 2; i++) y.state[i] *= keep;
            pin(y.state);
            wgmma_fence();
            start_over_rows<C>(y.state, c, chunk, true);
        } else {
            y.start_add(chunk + PANELS * PANEL, chunk);
        }
        if (DECAY && !TOKENS) keep_alive(next, x.zero);  // of the chunk before, whose product is over
        if (++stage == STAGES) stage = 0, parity ^= 1;
        if (n + 1 < w.chunks) fetch(n + 1, next);
        wgmma_wait<0>();
        pin(y.state);
        release(free);
        if (DOTS && meets(n)) y.write_anchor(x, w, w.chunks - 1 - n, sweep.leaves_times);
    };
    if (DOTS && w.chunks && meets(0)) y.load_saved(x, w, w.chunks - 1);
    if (w.chunks) fetch(0, c[0]);
    if (TOKENS) {                   // one code for both buffers: see tokens.cuh
#pragma unroll 1
        for (int n = 0; n < w.chunks; n++) {
            step(n, n % 2, c[0], c[1]);
            keep_alive(c[0], x.zero);
#pragma unroll
            for (int i = 0; i < 16; i++) c[0][i] = c[1][i];
        }
    } else {
        for (int n = 0; n < w.chunks; n += 2) {
            step(n, 0, c[0], c[1]);
            if (n + 1 < w.chunks) step(n + 1, 1, c[1], c[0]);
        }
        if (DECAY) keep_alive(c[0], x.zero), keep_alive(c[1], x.zero);
    }
    if (leaves) y.move<false>(leaves, sweep.leaves_times, w, JOINED ? w.number_again(x) : w.number, sweep.swapped);
    if (TOKENS && !OUTS && leads && w.tile == 0) x.keeps[w.number] = passed;
    if (SAVE == 1 && leads) tma_store_wait_read<0>();
}
