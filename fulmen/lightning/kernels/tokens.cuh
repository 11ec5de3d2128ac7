// What a decay for each token adds to a sweep (sweep.cu).

constexpr float BEGINS = 0x1p-8f;   // a chunk that keeps less of a state in bf16 keeps next to nothing; as in tokens.py

// The decay of each row of a chunk, summed: three warps take chunks in turn, so that three loads are under way. A stage is
// always one warp's: others could mistake its barrier's phase, as arrivals from other blocks come in any order. A lane has
// two rows; no row takes more than 64 bits, which leaves differences of sums exact enough.
__device__ __forceinline__ void produce_decays(const Args &x, const Shared &at, const Walk &w, int turn) {
    constexpr int WARPS = 3;
    const int lane = threadIdx.x % 32;
    const float *from = x.decay + w.b * x.decay_b + w.h * x.decay_h;
    auto bits = [&](int n, int i) {
        const int row = 2 * lane + i;
        if (n >= w.chunks || row >= w.left(n)) return 0.0f;
        const float found = 1.4426950408889634f * load_coherent(from + (w.row(n) + row) * x.decay_n);
        return found > 64.0f ? 64.0f : found;  // NaN stays
    };
    float next[2] = {bits(turn, 0), bits(turn, 1)};
    for (int n = turn, after; n < w.chunks; n = after) {
        const float s[2] = {next[0], next[1]};
        const int stage = n % STAGES;
        after = stage + WARPS < STAGES ? n + WARPS : n - stage + STAGES + turn;
        next[0] = bits(after, 0), next[1] = bits(after, 1);
        float sum = s[0] + s[1];
#pragma unroll
        for (int d = 1; d < 32; d *= 2) {
            const float before = __shfl_sync(~0u, sum, max(lane - d, 0));
            sum += lane >= d ? before : 0.0f;
        }
        const float before = __shfl_sync(~0u, sum, max(lane - 1, 0)), total = __shfl_sync(~0u, sum, 31);
        const float a[2] = {(lane ? before : 0.0f) + s[0], sum};
        at.await_empty(n);
        Decays &y = at.decays[stage];
        float left[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const float since = exp2_(-a[i]), until = exp2_(fminf(a[i] - total, 0.0f));
            y.since[2 * lane + i] = a[i];
            y.into[2 * lane + i] = x.scale * (w.reverse ? until : since);
            left[i] = w.reverse ? since : until;
        }
        const u32 hi = pack(left[0], left[1]);
        y.left[lane] = make_uint2(hi, pack(left[0] - low(hi), left[1] - high(hi)));
        if (lane == 0) y.keep = exp2_(-total);
        __syncwarp();
        if (lane == 0) mbarrier_arrive(at.full + stage * 8);
    }
}
