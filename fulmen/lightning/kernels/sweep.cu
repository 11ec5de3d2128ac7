// Lightning attention for Hopper (sm_90a): the sweep of triton.py with TMA, mbarriers, wgmma, warp specialisation.
//
//     f(a, b, c)_r = scale * sum_{j <= r} lambda^(r-j) (a_r . b_j) c_j      rows r counted in walking order
//
// o = f(q, k, v), dq = f(do, v, k) walk left to right, dk = f(v, do, q), dv = f(k, q, do) right to left. A block owns
// (sequence, head, segment, sweep, 64 columns of c) and walks chunks of 64 rows:
//
//     producer    one thread issues TMA loads of a, b and c into a ring of STAGES stages;
//     state       one warpgroup keeps the state, [64, D] in fp32 registers: before a chunk it publishes it in bf16,
//                 through shared memory, then state = state * lambda^64 + (c * lambda^..)^T b;
//     outputs     OUTS warpgroups take chunks in turn and compute out = (a b^T * mask) c + (a state^T) * lambda^..
//
// With JOINED one block makes dv and dk, whose states are one, dS = sum q do^T: its stages hold q, do, k and v, one output
// warpgroup takes all chunks of dv, the other all of dk = f(v, do, q), both its panels, from the state over its rows. So dv
// and dk of D = 128, E = 64 load 6 tiles a chunk with the rows for DOTS, instead of 13, and keep one state instead of three.
//
// Who waits for what: a stage has a `full` barrier, on which TMA counts bytes and for which the warpgroups wait, and an
// `empty` one, on which their warps arrive and for which the producer waits. The published state has two buffers with
// the same pair of barriers between the state's warpgroup and the outputs'. What one chunk must wait for, the state, is
// so never behind the work on outputs. OUTS = 0 gathers a state alone. At D = 128 a fifth stage, or rows beside the outputs, take
// the room of one of the two buffers.
//
// dq needs the states of (k, v) left to right, and dk, dv walk right to left. So that all three can read the same rows
// at about the same time, from L2, the forward of a call with gradients saves the state before every EVERY-th chunk
// in bf16, as it publishes it; dq then takes groups of EVERY chunks from the last to the first, each from its state.
//
// D = 128 takes two panels of 64 columns (sm90.cuh). TMA zeroes rows outside the tensor, on both ends. Rows of a chunk
// that belong to another packed sequence are zeroed before they are used: they may be no numbers.
//
// wgmma's accumulators, with g = lane / 4, t = lane % 4: d[4 j + i] is row 16 warp + g + 8 (i / 2), column
// 8 j + 2 t + i % 2; the registers of an A operand are the same with two columns packed.
//
// A decay for each token (TOKENS): warps beside the producer sum s over the rows of a chunk and leave the factors in the
// chunk's stage (`Decays`). Chunks are counted from a sequence's first row in both directions: p of dq and of dk then
// has the same bits, and cancels in the sum of q . dq - k . dk that is the decay's gradient. DOTS writes these products, with
// rows of q or k: a fourth tile of the stage, or, where that does not fit (D = 128), in a buffer of each output warpgroup, which
// has the next ones come when it is done with these. That sum begins anew every EVERY chunks, at the product of the state's
// gradient (of dv's sweep) and the state saved, and at each chunk that keeps next to nothing of the state that enters it, at
// this state's part of q . dq.
//
// Mamba-2's scan (STEPS), of o, a state, dv and dk JOINED, and dq: v = dt x is never in memory, c or b is x. The decay warps
// leave the step sizes in the stage, too. They weigh the columns of the mask and what enters the state in o and dq, the rows
// of dk. o adds D x, whose rows are c, before it is stored; with GATE it is multiplied by silu(z), whose rows come into
// such a buffer. dv = d(dt x) becomes dx = dt dv + D do; the sums x . dv and x . do of its rows go through the
// stage to the decay warps, as those of DOTS do. The scale is 1.
//
// With SILU q, k and v are silu(x), and their gradients become those of x: an output is multiplied by silu's slope at x, whose
// rows are the fourth tile of the stage. The three warps beside the producer replace x there by silu's slopes, ahead of the
// outputs, which wait for a barrier of their own, `slopes`.
//
// The compiler defines HEAD_DIM (of a and b), TILES (of 64 columns of c), STAGES, OUTS, DECAY, TOKENS, DOTS, GROUPED
// (heads share rows of a tensor), PACKED, JOINED, STEPS, GATE, SILU, EVERY (chunks between saved states), SAVE (0: none, 1: writes them, 2: a sweep
// may read them) and SHARE: the blocks of a head's tiles of c, two at D = 128, are a cluster; each copies half of a and b
// into the shared memory of both (multicast), which halves the reads from L2.

#include "cuda/include/sm90.cuh"
#include "cuda/include/tile_scheduler.cuh"
#include "lightning/kernels/walk.cuh"
#include "lightning/kernels/tokens.cuh"
#include "lightning/kernels/state.cuh"

__device__ __forceinline__ void produce(const Args &x, const Shared &at, const Walk &w, const Sweep &sweep) {
    int group = 0;
    const int head_a = w.head_of(x, sweep.a), head_b = w.head_of(x, sweep.b), head_c = w.head_of(x, sweep.c);
    const Product &product = w.product(x);
    const bool fourth = SILU || (RING_ROWS && product.out);
    const int map = JOINED ? x.sweep[1].a : product.rows, head = w.head_of(x, map);
#pragma unroll 1
    for (int n = 0; n < w.chunks; n++) {
        if (w.grouped && w.opens_group(n)) {
            mbarrier_wait(at.saved_empty, group % 2 ^ 1);
            mbarrier_expect(at.saved_full, STATE);
            const int slot = w.slot + w.chunk(n) / EVERY;
#pragma unroll
            for (int i = 0; i < PANELS; i++)
                tma_load(at.saved + i * PANEL, x.map[7], at.saved_full, 64 * w.tile, 64 * i, slot, w.head);
            group++;
        }
        const u32 full = at.full + n % STAGES * 8, row = w.row(n);
        at.await_empty(n);
        mbarrier_expect(full, RING_ROWS && !fourth ? STAGE - PANEL : STAGE);
        if (CLUSTER > 1) {          // a panel from each block, to all of them
            const int i = w.tile;
            if (OUTS) tma_load_multicast(3, at.a(n) + i * PANEL, x.map[sweep.a], full, 64 * i, row, head_a, w.b);
            tma_load_multicast(3, at.b(n) + i * PANEL, x.map[sweep.b], full, 64 * i, row, head_b, w.b);
        } else {
#pragma unroll
            for (int i = 0; i < PANELS; i++) {
                if (OUTS) tma_load(at.a(n) + i * PANEL, x.map[sweep.a], full, 64 * i, row, head_a, w.b);
                tma_load(at.b(n) + i * PANEL, x.map[sweep.b], full, 64 * i, row, head_b, w.b);
            }
        }
        tma_load(at.c(n), x.map[sweep.c], full, 64 * w.tile, row, head_c, w.b);
        if (fourth) tma_load(at.rows(n), x.map[map], full, 64 * w.tile, row, head, w.b);
    }
    if (CLUSTER > 1)                // no block ends while another has yet to arrive on its `empty` barriers
        for (int n = w.chunks; n < w.chunks + STAGES; n++) at.await_empty(n);
}

// -------------------------------------------------------------------------------------------------- outputs

// With decay the part that comes from the state has a factor of its own: it waits for it in registers of its own, or,
// where there are too few, is multiplied before the other part is added.
constexpr bool APART = DECAY && OUTS == 1;

__device__ __forceinline__ float sigmoid(float x) {
    float y;
    asm volatile("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(exp2_(-1.4426950408889634f * x) + 1.0f));
    return y;
}

__device__ __forceinline__ float silu(float x) { return x * sigmoid(x); }

__device__ __forceinline__ float slope_of_silu(float x) {
    const float s = sigmoid(x);
    return s * fmaf(x, 1.0f - s, 1.0f);
}

__device__ __forceinline__ u32 slopes_of_silu(u32 x) { return pack(slope_of_silu(low(x)), slope_of_silu(high(x))); }

// Silu's slopes at x, in the place of x: three warps share the rows of a chunk.
__device__ __forceinline__ void make_slopes(const Shared &at, const Walk &w) {
#pragma unroll 1
    for (int n = 0; n < w.chunks; n++) {
        at.await_full(n);
#pragma unroll 2
        for (u32 i = 16 * (threadIdx.x % 128 - 32); i < PANEL; i += 16 * 96) {
            u32 x[4];
            asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                         : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(at.rows(n) + i) : "memory");
#pragma unroll
            for (int j = 0; j < 4; j++) x[j] = slopes_of_silu(x[j]);
            asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};"
                         :: "r"(at.rows(n) + i), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]) : "memory");
        }
        fence_async();              // the copy engine writes the next rows there
        __syncwarp();
        if (threadIdx.x % 32 == 0) mbarrier_arrive(at.slopes + n % STAGES * 8);
    }
}

// What a warpgroup does: its share of a sweep's chunks, or of two sweeps with one state all chunks of dv or of dk.
enum Kind { SHARED_OUT, OF_DV, OF_DK };

// What a warpgroup that makes outputs holds.
template <Kind KIND>
struct Outputs {
    static constexpr int STEP = KIND == SHARED_OUT ? OUTS : 1;
    static constexpr int WIDTH = KIND == OF_DK ? PANELS : 1;  // panels of its output
    static constexpr int BUFFERS = OUT_BUFFERS / WIDTH;

    static constexpr bool DK = KIND == OF_DK;
    int who;                        // of the output warpgroups

    // Where its tiles lie: dk = f(v, do, q) in the stage of dv = f(k, q, do), whose fourth tile is v.
    __device__ __forceinline__ u32 a(const Shared &at, int n) const { return DK ? at.rows(n) : at.a(n); }
    __device__ __forceinline__ u32 b(const Shared &at, int n) const { return DK ? at.c(n) : at.b(n); }
    __device__ __forceinline__ u32 c(const Shared &at, int n) const { return DK ? at.b(n) : at.c(n); }
    __device__ __forceinline__ u32 rows(const Shared &at, int n) const { return DK ? at.a(n) : at.rows(n); }

    static __device__ __forceinline__ bool reverse(const Walk &w) { return JOINED || w.reverse; }
    __device__ __forceinline__ const Product &product(const Args &x, const Walk &w) const {
        return x.product[DK ? 1 : w.which];
    }

    u32 seen;                       // without decay: which of its 32 pairs of rows have the earlier one first
    float mask[TOKENS ? 32 : DECAY ? 18 : 1];  // with decay: scale * lambda^(rows apart) or 0; if constant, one for each diagonal
    float since[2];                 // scale * lambda^(rows since the state)
    float p[32], out[32 * WIDTH], inter[APART ? 32 : 1];
    u32 q[16];                      // p of those pairs, decayed
    float skip = 0.0f;              // D of the head
    float sum[2], of_state = 0.0f;  // of this thread: products of two rows, of which so much comes from the state
    int warp, buffer, parity;       // parity: of the rows that come into the buffer
    bool leads, reports;

    // Rows 16 warp + g + 8 r and columns 8 j + 2 t + e: 8 (2 warp + r - j) + g - 2 t - e apart.
    static __device__ __forceinline__ int which(int i) {
        return TOKENS ? i : DECAY ? 2 * (i / 4 + 1 - i / 2 % 2) + i % 2 : 0;
    }

    __device__ __forceinline__ void prepare(const Args &x, const Walk &w, int role) {
        const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
        who = role - 1;
        warp = threadIdx.x / 32 % 4;
        leads = threadIdx.x % 128 == 0, reports = lane == 0;
        seen = buffer = parity = 0;
        if (STEPS && x.skip) skip = load_coherent(x.skip + w.h);
#pragma unroll
        for (int i = 0; i < 32; i++) {
            const int row = 16 * warp + g + 8 * (i / 2 % 2), column = 8 * (i / 4) + 2 * t + i % 2;
            const int apart = w.reverse ? column - row : row - column;
            if (DECAY && !TOKENS) mask[which(i)] = apart < 0 ? 0.0f : x.scale * exp2_(w.rate * apart);
            seen |= (u32)(apart >= 0) << i;
            p[i] = 0.0f;
        }
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const int row = 16 * warp + g + 8 * r;
            since[r] = x.scale * exp2_(w.rate * (w.reverse ? C - 1 - row : row + 1));
        }
#pragma unroll
        for (int i = 0; i < 32 * WIDTH; i++) out[i] = inter[APART ? i : 0] = 0.0f;
    }

    __device__ __forceinline__ float decayed(int i) const {
        return DECAY ? p[i] * mask[which(i)] : seen >> i & 1 ? p[i] : 0.0f;
    }

    __device__ __forceinline__ u32 output(const Shared &at) const { return at.staging + (OUT_BUFFERS * who + buffer) * PANEL; }

    // Has the rows come whose products with a chunk's output are written, or its gate.
    __device__ __forceinline__ void load_rows(const Args &x, const Shared &at, const Walk &w, const Place &place) {
        const Product &y = product(x, w);
        if (!OUT_ROWS || !leads || !(GATE || y.out)) return;
        const u32 full = at.rows_full + 8 * who;
        mbarrier_expect(full, PANEL);
        tma_load(at.rows_of_outputs + who * PANEL, x.map[y.rows], full, 64 * w.tile, w.first + place.at * C, w.head_of(x, y.rows), w.b);
    }

    // Where they lie, once they have come.
    __device__ __forceinline__ u32 await_rows(const Shared &at, int n) const {
        if (RING_ROWS) return rows(at, n);
        mbarrier_wait(at.rows_full + 8 * who, parity);
        return at.rows_of_outputs + who * PANEL;
    }

    // This thread's share of the products of two rows of `out` with those that lie at `from`.
    __device__ __forceinline__ void multiply_rows(u32 from, float (&sum)[2]) const {
        float each[4] = {};         // four chains, as one sum waits for the other
#pragma unroll
        for (int j = 0; j < 8 * WIDTH; j += 2) {
            u32 two[4];
            load_rows_of(two, from, j, warp);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int at = 4 * (j + i / 2) + 2 * (i % 2);
                each[i] = fmaf(out[at + 1], high(two[i]), fmaf(out[at], low(two[i]), each[i]));
            }
        }
        sum[0] = each[0] + each[2], sum[1] = each[1] + each[3];
    }

    // The part of q . dq that comes from the state, of a chunk that keeps next to nothing of it; else infinity.
    // part: this thread's, before its rows decay.
    __device__ __forceinline__ void keep_part(const float (&part)[2], int left) {
        const int row = 16 * warp + threadIdx.x % 32 / 4;
        of_state = (row < left ? part[0] * since[0] : 0.0f) + (row + 8 < left ? part[1] * since[1] : 0.0f);
    }

    // Its products with q or k, summed over the columns, into the chunk's stage.
    __device__ __forceinline__ void multiply_output(const Shared &at, int n) {
        multiply_rows(await_rows(at, n), sum);
#pragma unroll
        for (int bit = 1; bit <= 2; bit++) {
            sum[0] += __shfl_xor_sync(~0u, sum[0], bit);
            sum[1] += __shfl_xor_sync(~0u, sum[1], bit);
            of_state += __shfl_xor_sync(~0u, of_state, bit);
        }
        const int lane = threadIdx.x % 32;
        if (lane % 4 == 0) {
            Sums &y = at.sums[n % STAGES];
            y.rows[16 * warp + lane / 4] = sum[0], y.rows[16 * warp + lane / 4 + 8] = sum[1];
            y.of_state[8 * warp + lane / 4] = of_state;
        }
        __syncwarp();
    }

    // out += D x, of the rows of c.
    __device__ __forceinline__ void add_skip(u32 from) {
#pragma unroll
        for (int j = 0; j < 8; j += 2) {
            u32 two[4];
            load_rows_of(two, from, j, warp);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                float *here = out + 4 * (j + i / 2) + 2 * (i % 2);
                here[0] = fmaf(skip, low(two[i]), here[0]), here[1] = fmaf(skip, high(two[i]), here[1]);
            }
        }
        __syncwarp();
    }

    // out *= silu(z), whose rows have come into its buffer.
    __device__ __forceinline__ void open_gate(const Shared &at) {
        const u32 from = await_rows(at, 0);
#pragma unroll
        for (int j = 0; j < 8; j += 2) {
            u32 two[4];
            load_rows_of(two, from, j, warp);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                float *here = out + 4 * (j + i / 2) + 2 * (i % 2);
                here[0] *= silu(low(two[i])), here[1] *= silu(high(two[i]));
            }
        }
    }

    // From dv = d(dt x): dx = dt dv + D do; sums over columns of x dv and x do are left in the stage.
    __device__ __forceinline__ void make_dx(const Shared &at, int n) {
        const int lane = threadIdx.x % 32, row = 16 * warp + lane / 4;
        const float *steps = at.step_sizes(n);
        const float size[2] = {steps[row], steps[row + 8]};
        float of_dv[4] = {}, of_do[4] = {};  // four chains each, as one sum waits for the other
#pragma unroll
        for (int j = 0; j < 8; j += 2) {
            u32 x[4], g[4];
            load_rows_of(x, at.rows(n), j, warp);
            load_rows_of(g, at.c(n), j, warp);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                float *here = out + 4 * (j + i / 2) + 2 * (i % 2);
                of_dv[i] = fmaf(here[1], high(x[i]), fmaf(here[0], low(x[i]), of_dv[i]));
                of_do[i] = fmaf(high(g[i]), high(x[i]), fmaf(low(g[i]), low(x[i]), of_do[i]));
                here[0] = fmaf(skip, low(g[i]), here[0] * size[i % 2]);
                here[1] = fmaf(skip, high(g[i]), here[1] * size[i % 2]);
            }
        }
        StepSums &y = at.step_sums[n % STAGES];
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float dv = of_dv[r] + of_dv[r + 2], skip = of_do[r] + of_do[r + 2];
#pragma unroll
            for (int bit = 1; bit <= 2; bit++) dv += __shfl_xor_sync(~0u, dv, bit), skip += __shfl_xor_sync(~0u, skip, bit);
            if (lane % 4 == 0) y.dv[row + 8 * r] = dv, y.skip[row + 8 * r] = skip;
        }
        __syncwarp();
    }

    // out *= silu's slopes at x.
    __device__ __forceinline__ void activate(const Shared &at, int n) {
        at.await_slopes(n);
#pragma unroll
        for (int j = 0; j < 8; j += 2) {
            u32 two[4];
            load_rows_of(two, at.rows(n), j, warp);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                float *here = out + 4 * (j + i / 2) + 2 * (i % 2);
                here[0] *= low(two[i]), here[1] *= high(two[i]);
            }
        }
        __syncwarp();
    }

    // Starts p = a b^T.
    __device__ __forceinline__ void start_p(const Shared &at, const Walk &w, int n) {
        at.await_full(n);
        zero_rows(at, w, n, 1 + who);
        if (JOINED) fresh(p);
        else pin(p);
        wgmma_fence();
        start_over_columns<DK ? V : D, C>(p, a(at, n), b(at, n));
    }

    __device__ __forceinline__ void mask_p(const Args &x, const Shared &at, int n) {
        const int row = 16 * warp + threadIdx.x % 32 / 4;
        const float *steps = at.step_sizes(n);
        if (TOKENS && STEPS && KIND == SHARED_OUT) find_mask<true>(mask, seen, at.decay(n), steps, {}, warp);
        else if (TOKENS && STEPS && DK) find_mask<false>(mask, seen, at.decay(n), nullptr, {steps[row], steps[row + 8]}, warp);
        else if (TOKENS) find_mask<false>(mask, seen, at.decay(n), nullptr, {x.scale, x.scale}, warp);
        if (!DECAY) asm volatile("" : "+r"(seen));  // else its bits are taken apart ahead of the walk, for 32 registers
#pragma unroll
        for (int i = 0; i < 16; i++) q[i] = pack(decayed(2 * i), decayed(2 * i + 1));
    }

    // Waits for p, and starts the other products of the chunk.
    __device__ __forceinline__ void start_out(const Args &x, const Shared &at, const Walk &w, int n, const Place &place) {
#pragma unroll
        for (int r = 0; TOKENS && r < 2; r++) {
            const int row = 16 * warp + threadIdx.x % 32 / 4 + 8 * r;
            since[r] = STEPS && DK ? at.decay(n).into[row] * at.step_sizes(n)[row] : at.decay(n).into[row];
        }
        if (DECAY && WIDTH == 1) at.await_state(n);
        wgmma_wait<0>();
        pin(p);
        if (DECAY && WIDTH > 1) {   // p is masked first: its registers and those of two panels are too many at a time
            mask_p(x, at, n);
            pin(q);
            at.await_state(n);
        }
        if (!DECAY) {               // with decay, p is masked while the product below runs, for which it must wait
            mask_p(x, at, n);
            pin(q);
            at.await_state(n);
        }
        if (JOINED) fresh(out);
        else pin(out);
        pin(inter);
        wgmma_fence();
        if constexpr (APART) start_over_columns<D, C>(inter, a(at, n), at.state(n));
        else if constexpr (DK) start_over_state<V>(out, a(at, n), at.state(n));
        else start_over_columns<D, C>(out, a(at, n), at.state(n));
        if (DECAY && WIDTH == 1) mask_p(x, at, n);
        if (DECAY && !APART) {
            wgmma_wait<0>();
            pin(out);
            if (OUT_ROWS && reports) mbarrier_arrive(at.state_empty + n % 2 * 8);  // its one buffer is free
            if (DOTS && KIND == SHARED_OUT && product(x, w).entered) {
                of_state = INFINITY_;
                if (at.decay(n).keep < BEGINS) {
                    float part[2];
                    multiply_rows(await_rows(at, n), part);
                    keep_part(part, w.length - place.at * C);
                }
            }
#pragma unroll
            for (int i = 0; i < 32 * WIDTH; i++) out[i] *= since[i / 2 % 2];
            pin(out);
        }
        pin(q);
        wgmma_fence();
        start_over_rows<C>(out, q, c(at, n), !APART);
    }

    __device__ __forceinline__ void deliver(
        const Args &x, const Shared &at, const Walk &w, const Sweep &sweep, int n, const Place &place, const Place *next
    ) {
        const bool products = DOTS && KIND != OF_DV && product(x, w).out;
        constexpr bool SKIP = STEPS && !DOTS, DX = STEPS && KIND == OF_DV;
        pin(out);
        pin(inter);
        if (WIDTH == 1) keep_alive(q, x.zero);
        else asm volatile("" : "+r"(warp));  // else addresses are computed ahead of the walk, for more registers than there are
        if (!OUT_ROWS && reports) mbarrier_arrive(at.state_empty + n % 2 * 8);
        if (!products && !SKIP && !DX && !SILU) release(at.empty + n % STAGES * 8);
#pragma unroll
        for (int i = 0; i < 32 * WIDTH; i++)
            if (APART) out[i] = fmaf(inter[APART ? i : 0], since[i / 2 % 2], out[i]);
            else if (!DECAY) out[i] *= since[0];
        if (products) {
            multiply_output(at, n);
            release(at.empty + n % STAGES * 8);
        }
        if (SKIP || DX) {
            if constexpr (DX) make_dx(at, n);
            else add_skip(at.c(n));
            release(at.empty + n % STAGES * 8);
        }
        if constexpr (SILU) {
            activate(at, n);
            release(at.empty + n % STAGES * 8);
        }
        if (GATE) open_gate(at);
        const u32 from = output(at);
        if (BUFFERS == 2) buffer ^= 1;
        parity ^= OUT_ROWS;
        if (leads) tma_store_wait_read<BUFFERS - 1>();
        named_barrier_sync<128>(2 + who);
        if (next) load_rows(x, at, w, *next);
        store_rows(out, from, warp);
        fence_async();
        named_barrier_sync<128>(2 + who);
        const int row = TOKENS ? w.first + place.at * C : w.row(n), left = TOKENS ? w.length - place.at * C : w.left(n);
        if (left >= C || !(PACKED || reverse(w))) {  // the copy engine drops rows beyond the end, but takes none below 0
            if (leads) {
#pragma unroll
                for (int i = 0; i < WIDTH; i++) tma_store(from + i * PANEL, x.map[sweep.to], 64 * (w.tile + i), row, w.h, w.b);
                tma_store_commit();
            }
            return;
        }
        if (leads) tma_store_commit();  // an empty group: groups are counted to know when a buffer is free again
        const int skip = w.ends_first() ? C - left : 0;
#pragma unroll 1
        for (int unit = threadIdx.x % 128; unit < left * 8 * WIDTH; unit += 128) {
            const int r = skip + unit / (8 * WIDTH), u = unit % (8 * WIDTH);
            uint4 y;
            asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                         : "=r"(y.x), "=r"(y.y), "=r"(y.z), "=r"(y.w) : "r"(swizzled(from, r, u)) : "memory");
            char *to = sweep.out + w.b * sweep.out_b + w.h * sweep.out_h + (row + r) * sweep.out_n;
            *reinterpret_cast<uint4 *>(to + (64 * w.tile + 8 * u) * 2) = y;
        }
        if (OUT_ROWS) named_barrier_sync<128>(2 + who);  // before the next output is written there
    }
};

// The product a b^T of the next chunk is started before this one's output is delivered.
template <Kind KIND>
__device__ __forceinline__ void make_outputs(const Args &x, const Shared &at, const Walk &w, const Sweep &sweep, int role) {
    using Y = Outputs<KIND>;
    Y y;
    y.prepare(x, w, role);
    int n = KIND == SHARED_OUT ? y.who : 0;
    if (n >= w.chunks) return;
    Place place(w, n);
    y.load_rows(x, at, w, place);
    y.start_p(at, w, n);
#pragma unroll 1
    for (; n + Y::STEP < w.chunks; n += Y::STEP) {
        y.start_out(x, at, w, n, place);
        const Place here = place;
        place.next(w, Y::STEP);
        if (Y::WIDTH > 1) {         // q and the next p are too many registers at a time
            wgmma_wait<0>();
            pin(y.out);
            keep_alive(y.q, x.zero);
        }
        y.start_p(at, w, n + Y::STEP);
        if (Y::WIDTH == 1) wgmma_wait<1>();
        y.deliver(x, at, w, sweep, n, here, &place);
    }
    y.start_out(x, at, w, n, place);
    wgmma_wait<0>();
    if (Y::WIDTH > 1) keep_alive(y.q, x.zero);
    y.deliver(x, at, w, sweep, n, place, nullptr);
    if (y.leads) tma_store_wait_read<0>();
}

// Registers of a thread: what the producer gives away, the other warpgroups take.
constexpr int OF_PRODUCER = DOTS ? 56 - 8 * JOINED : 40;
constexpr int OF_STATE = OUTS == 1 ? 232 : JOINED ? 168 : DOTS ? 136 : 152;
constexpr int OF_OUTPUT = OUTS == 1 ? 232 : 160, OF_DV_BESIDE_DK = 136;
constexpr int AT_LAUNCH = 65536 / THREADS / 8 * 8;
constexpr int OF_ALL = OF_PRODUCER + OF_STATE + OUTS * OF_OUTPUT - JOINED * (OF_OUTPUT - OF_DV_BESIDE_DK);
static_assert(OUTS == 0 || (OF_PRODUCER < AT_LAUNCH && OF_STATE > AT_LAUNCH && OF_OUTPUT > AT_LAUNCH
              && OF_ALL <= (2 + OUTS) * AT_LAUNCH), "given away, and taken");

#if SHARE
#define CLUSTER_DIMS __cluster_dims__(HEAD_DIM / 64, 1, 1)
#else
#define CLUSTER_DIMS
#endif

extern "C" __global__ void CLUSTER_DIMS __launch_bounds__(THREADS, 1)
lightning_sweep_kernel(const __grid_constant__ Args x) {
    extern __shared__ __align__(1024) char shared[];
    const Shared at((u32)__cvta_generic_to_shared(shared), shared);
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            mbarrier_init(at.full + 8 * i, TOKENS ? 2 : 1);
            mbarrier_init(at.empty + 8 * i, (JOINED ? 12 : OUTS ? 8 : 4) * CLUSTER);
        }
        for (int i = 0; i < 2; i++) mbarrier_init(at.state_full + 8 * i, 4), mbarrier_init(at.state_empty + 8 * i, JOINED ? 8 : 4);
        mbarrier_init(at.saved_full, 1);
        mbarrier_init(at.saved_empty, 4);
        for (int i = 0; OUT_ROWS && i < OUTS; i++) mbarrier_init(at.rows_full + 8 * i, 1);
        for (int i = 0; SILU && i < STAGES; i++) mbarrier_init(at.slopes + 8 * i, 3);
        fence_barrier_init();
    }
    if (SHARE) cluster_sync();
    else __syncthreads();
    wait_for_previous_kernel();
    Walk w;
    const Sweep &sweep = w.find(x);
    const int role = __shfl_sync(~0u, threadIdx.x / 128, 0);
    if (role == 1 + OUTS) {
        if (OUTS) give_registers<OF_PRODUCER>();
        if (threadIdx.x % 128 == 0) produce(x, at, w, sweep);
        if (TOKENS && threadIdx.x % 128 >= 32) produce_decays(x, at, w, threadIdx.x % 128 / 32 - 1);
        if (SILU && threadIdx.x % 128 >= 32) make_slopes(at, w);
    } else if (role == 0) {
        if (OUTS) take_registers<OF_STATE>();
        keep_state(x, at, w, sweep);
    } else if (JOINED && __shfl_sync(~0u, threadIdx.x & 128, 0)) {  // role 1; asked by its number, all four are a jump by a table
        take_registers<OF_DV_BESIDE_DK>();
        if constexpr (JOINED) make_outputs<OF_DV>(x, at, w, x.sweep[0], role);
    } else if (OUTS) {
        take_registers<OF_OUTPUT>();
        if constexpr (JOINED) make_outputs<OF_DK>(x, at, w, x.sweep[1], role);
        else make_outputs<SHARED_OUT>(x, at, w, sweep, role);
    }
}
