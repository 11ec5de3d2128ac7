// What a decay for each token adds to a sweep (sweep.cu).

constexpr float BEGINS = 0x1p-8f;   // a chunk that keeps less of a state in bf16 keeps next to nothing; as in tokens.py

// The products of a chunk's rows, of which a lane has two, and the sum of what comes of them from the state.
__device__ __forceinline__ void write_sums(const Args &x, const Product &to, const Walk &w, const Sums &from, int place) {
    const int lane = threadIdx.x % 32, left = w.length - place * C;
    const long long row = ((long long)(w.b * x.h + w.h) * (WIDE ? PANELS : TILES) + w.tile) * x.n + (w.first + place * C + 2 * lane);
#pragma unroll
    for (int i = 0; i < 2; i++)
        if (2 * lane + i < left) {
            to.out[row + i] = from.rows[2 * lane + i];
            if (WIDE) to.out[row + i + x.n] = 0.0f;  // of both tiles
        }
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
    auto bits = [&](int n, int i) {
        const int row = 2 * lane + i;
        if (n >= w.chunks || row >= w.left(n)) return 0.0f;
        const float found = 1.4426950408889634f * load_coherent(from + (w.row(n) + row) * x.decay_n);
        return found > 64.0f ? 64.0f : found;  // NaN stays
    };
    const bool products = DOTS && w.product(x).out;
    float next[2] = {bits(turn, 0), bits(turn, 1)};
    for (int n = turn, after; n < w.chunks + (products ? STAGES : 0); n = after) {
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
        float start[4] = {};        // the sum before each block of 16 rows, which 8 lanes have
#pragma unroll
        for (int block = 1; block < 4; block++) start[block] = __shfl_sync(~0u, sum, 8 * block - 1);
        const float own = lane < 8 ? start[0] : lane < 16 ? start[1] : lane < 24 ? start[2] : start[3];
        at.await_empty(n);
        if (products && n >= STAGES) write_sums(x, w.product(x), w, at.sums[stage], w.place(n - STAGES));
        if (products && n >= w.chunks) continue;
        Decays &y = at.decays[stage];
        float left[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const float since = exp2_(-a[i]), until = exp2_(fminf(a[i] - total, 0.0f));
            y.since[2 * lane + i] = a[i];
            y.into[2 * lane + i] = x.scale * (w.reverse ? until : since);
            y.inner[2 * lane + i] = x.scale * exp2_(fminf(own - a[i], 0.0f));
#pragma unroll
            for (int block = 1; block < 4; block++)
                y.outer[block - 1][2 * lane + i] = exp2_(fminf(a[i] - start[block], 0.0f));
            left[i] = w.reverse ? since : until;
        }
        const u32 hi = pack(left[0], left[1]);
        y.left[lane] = make_uint2(hi, pack(left[0] - low(hi), left[1] - high(hi)));
        if (lane == 0) y.keep = exp2_(-total);
        __syncwarp();
        if (lane == 0) mbarrier_arrive(at.full + stage * 8);
    }
}

// p times its decay, in bf16, of the 16 rows of a chunk that warp WARP has: exp2(a_j - a_i) for j before i. Rows and columns
// of one block of 16 take exponentials; those of two blocks the product of two factors, with the same bits in both directions.
template <int WARP, bool REVERSE>
__device__ __forceinline__ void mask_block(u32 (&q)[16], const float (&p)[32], const Decays &d, float scale) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = 2 * (lane % 4), row = 16 * WARP + g;
    auto two = [&](const float *from, int column) { return *reinterpret_cast<const float2 *>(from + column + t); };
    const float a[2] = {d.since[row], d.since[row + 8]}, inner[2] = {d.inner[row], d.inner[row + 8]};
#pragma unroll
    for (int j = 0; j < 8; j++) {   // columns 8 j + t and 8 j + t + 1
        const int block = j / 2;
        float y[4] = {};
        if (block == WARP) {
            const float2 other = two(d.since, 8 * j);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int r = i / 2, e = i % 2;
                if (REVERSE ? r > j % 2 : r < j % 2) continue;
                const float apart = REVERSE ? a[r] - (e ? other.y : other.x) : (e ? other.y : other.x) - a[r];
                const float one = p[4 * j + i] * (exp2_(fminf(apart, 0.0f)) * scale);
                y[i] = r != j % 2 || (REVERSE ? g <= t + e : g >= t + e) ? one : 0.0f;
            }
        } else if (!REVERSE && block < WARP) {
            const float2 outer = two(d.outer[WARP ? WARP - 1 : 0], 8 * j);
#pragma unroll
            for (int i = 0; i < 4; i++) y[i] = p[4 * j + i] * ((i % 2 ? outer.y : outer.x) * inner[i / 2]);
        } else if (REVERSE && block > WARP) {
            const float2 later = two(d.inner, 8 * j);
            const float *outer = &d.outer[block ? block - 1 : 0][row];
#pragma unroll
            for (int i = 0; i < 4; i++) y[i] = p[4 * j + i] * ((i % 2 ? later.y : later.x) * outer[8 * (i / 2)]);
        }
        q[2 * j] = pack(y[0], y[1]), q[2 * j + 1] = pack(y[2], y[3]);
    }
}

template <bool REVERSE>
__device__ __forceinline__ void mask_blocks(u32 (&q)[16], const float (&p)[32], const Decays &d, float scale, int warp) {
    if (warp & 2) {                 // not a switch, which would load where to jump to
        if (warp & 1) mask_block<3, REVERSE>(q, p, d, scale);
        else mask_block<2, REVERSE>(q, p, d, scale);
    } else {
        if (warp & 1) mask_block<1, REVERSE>(q, p, d, scale);
        else mask_block<0, REVERSE>(q, p, d, scale);
    }
}
