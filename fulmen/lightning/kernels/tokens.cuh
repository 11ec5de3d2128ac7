// What a decay for each token adds to a sweep (sweep.cu).

constexpr float BEGINS = 0x1p-8f;   // a chunk that keeps less of a state in bf16 keeps next to nothing; as in tokens.py

// Those of dv's rows with x and of do's, of which a lane has two.
__device__ __forceinline__ void write_step_sums(const Args &x, const Walk &w, const StepSums &from, int place) {
    const int lane = threadIdx.x % 32, left = w.length - place * C;
    const long long row = (long long)(w.b * x.h + w.h) * x.n + (w.first + place * C + 2 * lane);
#pragma unroll
    for (int i = 0; i < 2; i++)
        if (2 * lane + i < left) x.x_dv[row + i] = from.dv[2 * lane + i], x.x_do[row + i] = from.skip[2 * lane + i];
}

// The products of a chunk's rows, of which a lane has two, and the sum of what comes of them from the state.
__device__ __forceinline__ void write_sums(const Args &x, const Product &to, const Walk &w, const Sums &from, const StepSums &of_steps, int place) {
    const int lane = threadIdx.x % 32, left = w.length - place * C;
    const long long row = ((long long)(w.b * x.h + w.h) * (JOINED ? PANELS : TILES) + w.tile) * x.n + (w.first + place * C + 2 * lane);
#pragma unroll
    for (int i = 0; i < 2; i++)
        if (2 * lane + i < left) {
            to.out[row + i] = from.rows[2 * lane + i];
            if (JOINED) to.out[row + i + x.n] = 0.0f;  // of both tiles
        }
    if (JOINED && STEPS) write_step_sums(x, w, of_steps, place);
    if (!to.entered) return;
    float sum = from.of_state[lane];
#pragma unroll
    for (int bit = 1; bit < 32; bit *= 2) sum += __shfl_xor_sync(~0u, sum, bit);
    const long long chunk = ((long long)w.head * x.slots + w.slot) * EVERY + place;
    if (lane == 0) to.entered[chunk * TILES + w.tile] = sum;
}

// The decay of each row of a chunk, summed: three warps take chunks in turn, so that three loads are under way. A stage is
// always one warp's: others could mistake its barrier's phase, as arrivals from other blocks come in any order. A lane has
// two rows; no row takes more than 64 bits, which leaves differences of sums exact enough. These warps also write the
// products that the outputs left in a stage, so that no warpgroup's fence waits for stores to memory.
__device__ __forceinline__ void produce_decays(const Args &x, const Shared &at, const Walk &w, int turn) {
    constexpr int WARPS = 3;
    const int lane = threadIdx.x % 32;
    const float *from = x.decay + w.b * x.decay_b + w.h * x.decay_h;
    const float *steps = STEPS ? x.steps + w.b * x.decay_b + w.h * x.decay_h : from;
    float next[2], next_steps[2];   // as they lie in memory: nobody waits for them before they are due
    auto load = [&](int n) {
        const int place = w.place(n), left = n < w.chunks ? w.length - place * C : 0;
        const long long row = (w.first + place * C + 2 * lane) * x.decay_n;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            next[i] = 2 * lane + i < left ? load_coherent(from + row + i * x.decay_n) : 0.0f;
            if (STEPS) next_steps[i] = 2 * lane + i < left ? load_coherent(steps + row + i * x.decay_n) : 0.0f;
        }
    };
    const bool products = DOTS && w.product(x).out;
    load(turn);
    for (int n = turn, after; n < w.chunks + (products ? STAGES : 0); n = after) {
        float s[2], size[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const float found = 1.4426950408889634f * next[i];
            s[i] = found > 64.0f ? 64.0f : found;  // NaN stays
            size[i] = next_steps[i];
        }
        const int stage = n % STAGES;
        after = stage + WARPS < STAGES ? n + WARPS : n - stage + STAGES + turn;
        load(after);
        float sum = s[0] + s[1];
#pragma unroll
        for (int d = 1; d < 32; d *= 2) {
            const float before = __shfl_sync(~0u, sum, max(lane - d, 0));
            sum += lane >= d ? before : 0.0f;
        }
        const float before = __shfl_sync(~0u, sum, max(lane - 1, 0)), total = __shfl_sync(~0u, sum, 31);
        const float a[2] = {(lane ? before : 0.0f) + s[0], sum};
        at.await_empty(n);
        if (products && n >= STAGES) write_sums(x, w.product(x), w, at.sums[stage], at.step_sums[stage], w.place(n - STAGES));
        if (products && n >= w.chunks) continue;
        Decays &y = at.decays[stage];
        float left[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const float since = exp2_(-a[i]), until = exp2_(fminf(a[i] - total, 0.0f));
            y.since[2 * lane + i] = a[i];
            y.into[2 * lane + i] = x.scale * (w.reverse ? until : since);
            left[i] = w.reverse ? since : STEPS ? until * size[i] : until;
            if (STEPS) at.steps[stage * C + 2 * lane + i] = size[i];
        }
        const u32 hi = pack(left[0], left[1]);
        y.left[lane] = make_uint2(hi, pack(left[0] - low(hi), left[1] - high(hi)));
        if (lane == 0) y.keep = exp2_(-total);
        __syncwarp();
        if (lane == 0) mbarrier_arrive(at.full + stage * 8);
    }
}

// What the decay leaves of p, where `seen` has a bit: exp2 of minus the bits between two rows, in both directions the same.
// Times a factor of its column or, where COLUMNS is false, of its two rows.
template <bool COLUMNS>
__device__ __forceinline__ void find_mask(
    float *mask, u32 seen, const Decays &d, const float *columns, const float (&rows)[2], int warp
) {
    const int lane = threadIdx.x % 32, row = 16 * warp + lane / 4;
    const float a[2] = {d.since[row], d.since[row + 8]};
    asm volatile("" : "+r"(seen));  // else its bits are taken apart ahead of the walk, for 32 registers
#pragma unroll
    for (int j = 0; j < 8; j++) {
        const float2 other = *reinterpret_cast<const float2 *>(d.since + 8 * j + 2 * (lane % 4));
        float2 of_column;
        if (COLUMNS) of_column = *reinterpret_cast<const float2 *>(columns + 8 * j + 2 * (lane % 4));
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float kept = exp2_(-fabsf(a[i / 2] - (i % 2 ? other.y : other.x)));
            const float times = COLUMNS ? (i % 2 ? of_column.y : of_column.x) : rows[i / 2];
            mask[4 * j + i] = seen >> (4 * j + i) & 1 ? kept * times : 0.0f;
        }
    }
}
