// The sizes of a sweep (sweep.cu), its shared memory, and its walk: which rows a block owns, and in which order it takes its
// chunks.

constexpr int D = HEAD_DIM, C = 64, V = 64 * TILES;
constexpr int PANELS = D / 64;
constexpr bool RING_ROWS = (DOTS && (PANELS == 1 || JOINED)) || SILU;  // rows of q or k, or of x, are in a stage, too
constexpr bool OUT_ROWS = (DOTS && !RING_ROWS) || GATE;              // rows come into a buffer of each output warpgroup
constexpr int STAGE = ((OUTS ? 2 : 1) * PANELS + 1 + RING_ROWS) * PANEL;  // b, c, a, rows
constexpr int STATE = PANELS * PANEL;                                // a state in bf16
constexpr int STATE_BUFFERS = (OUTS == 1 && (STAGES > 4 || SILU)) || OUT_ROWS ? 1 : 2;  // of published states; others need the room
constexpr int OUT_BUFFERS = (PANELS == 2 && OUTS == 2 && !JOINED) || STATE_BUFFERS == 1 ? 1 : 2;  // panels in which a warpgroup leaves outputs
constexpr int THREADS = 128 * (2 + OUTS);
constexpr int CLUSTER = SHARE ? PANELS : 1;                          // blocks that load a and b for each other
static_assert(STAGES > OUTS, "a warpgroup starts on its next chunk before it is done with this one");
static_assert(!SHARE || TILES == PANELS, "a block loads the panel of its tile");
static_assert(!TOKENS || DECAY, "a decay for each token is a decay");
static_assert(!DOTS || OUTS == 2, "products take the registers of two warpgroups");
static_assert(!OUT_ROWS || (OUTS == 2 && OUT_BUFFERS == 1), "a buffer for rows takes the place of one for outputs");
static_assert(!STEPS || TOKENS, "step sizes come with decays");
static_assert(!GATE || (STEPS && !DOTS && OUTS), "of o alone");
static_assert(!SILU || (!TOKENS && OUTS), "SILU is of dq, dk and dv, with a constant decay");
static_assert(!JOINED || (DOTS && TILES == 1 && PANELS == 2 && OUTS == 2), "a warpgroup each for dv and dk, twice as wide");

// Of a chunk whose rows have a decay each: what its rows and its state are multiplied with.
struct Decays {
    float since[C];                 // bits that have decayed from the chunk's first row to this one, both included
    float into[C];                  // of the state, where a row reads it; times scale
    uint2 left[C / 2];              // of pairs of rows, where they enter the state: in twice the digits of bf16
    float keep, unused[3];          // of the state
};

// Of a chunk's rows: their products with q or k, and parts of what comes of them from the state.
struct Sums {
    float rows[C], of_state[C / 2];
};

// With step sizes, of rows of dv's sweep: x . d(dt x) and x . do.
struct StepSums {
    float dv[C], skip[C];
};

struct Shared {
    u32 ring, states, staging, rows_of_outputs, saved;
    u32 full, empty, state_full, state_empty, saved_full, saved_empty, rows_full, slopes;
    Decays *decays;
    Sums *sums;
    float *steps;
    StepSums *step_sums;
    __device__ __forceinline__ explicit Shared(u32 base, char *shared) : ring(base) {
        states = ring + STAGES * STAGE;
        staging = states + (OUTS ? STATE_BUFFERS * STATE : 0);
        rows_of_outputs = staging + OUT_BUFFERS * OUTS * PANEL;
        saved = rows_of_outputs + (OUT_ROWS ? OUTS * PANEL : 0);
        full = saved + (SAVE == 2 ? STATE : 0);
        empty = full + 8 * STAGES;
        state_full = empty + 8 * STAGES;
        state_empty = state_full + 16;
        saved_full = state_empty + 16;
        saved_empty = saved_full + 8;
        rows_full = saved_empty + 8;
        slopes = rows_full + (OUT_ROWS ? 8 * OUTS : 0);
        const u32 end = slopes + (SILU ? 8 * STAGES : 0);
        decays = reinterpret_cast<Decays *>(shared + ((end - base + 15) & ~15u));
        sums = reinterpret_cast<Sums *>(decays + STAGES);
        steps = reinterpret_cast<float *>(sums + (DOTS ? STAGES : 0));
        step_sums = reinterpret_cast<StepSums *>(steps + STAGES * C);
    }
    __device__ __forceinline__ const Decays &decay(int n) const { return decays[n % STAGES]; }
    __device__ __forceinline__ const float *step_sizes(int n) const { return steps + n % STAGES * C; }
    __device__ __forceinline__ u32 stage(int n) const { return ring + n % STAGES * STAGE; }
    __device__ __forceinline__ u32 a(int n) const { return stage(n) + (PANELS + 1) * PANEL; }
    __device__ __forceinline__ u32 b(int n) const { return stage(n); }
    __device__ __forceinline__ u32 c(int n) const { return stage(n) + PANELS * PANEL; }
    __device__ __forceinline__ u32 rows(int n) const { return stage(n) + (2 * PANELS + 1) * PANEL; }
    __device__ __forceinline__ void await_full(int n) const { mbarrier_wait(full + n % STAGES * 8, n / STAGES % 2); }
    __device__ __forceinline__ void await_empty(int n) const { mbarrier_wait(empty + n % STAGES * 8, n / STAGES % 2 ^ 1); }
    __device__ __forceinline__ void await_slopes(int n) const { mbarrier_wait(slopes + n % STAGES * 8, n / STAGES % 2); }
    __device__ __forceinline__ u32 state(int n) const { return states + n % STATE_BUFFERS * STATE; }
    __device__ __forceinline__ void await_state(int n) const {
        mbarrier_wait(state_full + n % 2 * 8, n / 2 % 2);
    }
};

// ---------------------------------------------------------------------------------------------------- walks

// What a block owns, and in which order it takes its chunks.
struct Walk {
    int b, h, tile, number;         // number: of (sequence, head) or of its segment, which names its states
    int first, length, chunks;      // the rows: first is the one before the end, if it walks right to left
    int slot, head;                 // of saved states
    int which;                      // of the launch's sweeps
    float rate;                     // a row decays by 2^rate
    bool reverse, grouped, whole;   // whole: comes before those that are cut

    __device__ __forceinline__ const Sweep &find(const Args &x) {
        int pid = blockIdx.x;
        tile = pid % TILES;
        pid /= TILES;
        which = pid % x.sweeps;
        const Sweep &sweep = x.sweep[which];
        number = pid / x.sweeps + x.start;
        reverse = sweep.reverse;
        grouped = SAVE == 2 && sweep.saved;
        whole = number < x.whole;
        int sequence, segment = 0, begin = 0, end = x.n, unit = number;
        if (PACKED && x.segment_offsets) {   // the last sequence that begins with this segment or before
            h = number % x.h;
            sequence = 0;
            for (int beyond = x.segments; beyond - sequence > 1;) {
                int middle = (sequence + beyond) / 2;
                if (load_coherent(x.segment_offsets + middle) <= number / x.h) sequence = middle;
                else beyond = middle;
            }
            segment = number / x.h - load_coherent(x.segment_offsets + sequence);
        } else {
            if (!whole) {
                number -= x.whole;
                segment = number % x.segments;
                unit = x.whole + number / x.segments;
            }
            h = unit % x.h, sequence = unit / x.h;
        }
        b = PACKED ? 0 : sequence;
        if (PACKED) {               // clamped: a wrong cu_seqlens must not reach foreign memory
            begin = min(max(load_coherent(x.cu + sequence), 0), x.n);
            end = min(max(load_coherent(x.cu + (sequence + 1)), begin), x.n);
        }
        int skip = segment * x.segment;
        if (TOKENS && reverse && !whole) skip = ((end - begin + x.segment - 1) / x.segment - 1) * x.segment - skip;
        length = max(0, min(end - begin - skip, whole ? x.n : x.segment));
        if (TOKENS ? x.not_last && (reverse ? skip == 0 : begin + skip + x.segment >= end) || skip < 0
                   : x.not_last && begin + skip + x.segment >= end) length = 0;
        chunks = (length + C - 1) / C;
        first = reverse && !TOKENS ? end - skip : begin + skip;
        rate = DECAY && !TOKENS ? -1.4426950408889634f * load_coherent(x.decay + h) : 0.0f;
        if (DECAY && !TOKENS && !OUTS) {  // of a state alone: chunks from whose time less than 2^-64 is left are not read
            const int seen = 1 + (int)fminf(-64.0f / fminf(rate, -1e-30f), 1e9f), over = max(length - seen, 0) / C;
            first += reverse ? -over * C : over * C;
            length -= over * C;
            chunks -= over;
        }
        slot = skip / (EVERY * C);
        head = b * x.h + h;
        if (PACKED) slot += begin / (EVERY * C) + sequence, head = h;
        return sweep;
    }

    // The n-th chunk in walking order, counted from `first` on.
    __device__ __forceinline__ int chunk(int n) const {
        if (!OUTS && !DECAY) return chunks - 1 - n;  // so that L2 still has what the sweep from this state begins with
        if (!grouped) return n;
        const int groups = (chunks + EVERY - 1) / EVERY, top = chunks - (groups - 1) * EVERY;
        if (n < top) return (groups - 1) * EVERY + n;
        return (groups - 2 - (n - top) / EVERY) * EVERY + (n - top) % EVERY;
    }

    // Its place among them, left to right where there is a decay for each token.
    __device__ __forceinline__ int place(int n) const { return TOKENS && reverse ? chunks - 1 - chunk(n) : chunk(n); }
    __device__ __forceinline__ int row(int n) const {
        return reverse && !TOKENS ? first - (chunk(n) + 1) * C : first + place(n) * C;
    }
    __device__ __forceinline__ int left(int n) const { return length - place(n) * C; }
    __device__ __forceinline__ bool ends_first() const { return reverse && !TOKENS; }  // rows missing are the first ones
    __device__ __forceinline__ bool opens_group(int n) const { return chunk(n) % EVERY == 0; }

    // The number of the state that is saved before the chunk at a place.
    __device__ __forceinline__ long long saved_slot(const Args &x, int place) const {
        return (long long)head * x.slots + slot + place / EVERY;
    }

    // Whose products are written: of dv and dk in one block, dk's.
    __device__ __forceinline__ const Product &product(const Args &x) const { return x.product[JOINED ? 1 : which]; }

    // `number`, found again where a register for it is one too many.
    __device__ __forceinline__ int number_again(const Args &x) const {
        const int all = blockIdx.x / TILES / x.sweeps + x.start;
        return whole || (PACKED && x.segment_offsets) ? all : all - x.whole;
    }

    // The head of a tensor that has this block's rows.
    __device__ __forceinline__ int head_of(const Args &x, int map) const { return GROUPED ? h / x.group[map] : h; }

    // Which comes without all of its rows, if one does: the last in place, but not always in turn.
    __device__ __forceinline__ int partial() const {
        if (length % C == 0) return -1;
        return (!OUTS && !DECAY) || (TOKENS && reverse) ? 0 : grouped ? (chunks - 1) % EVERY : chunks - 1;
    }
};

// The place of a warpgroup's chunk, counted from one chunk to its next: `Walk::place` divides and branches.
struct Place {
    int at, group;                  // group: the first of its group of EVERY chunks

    __device__ __forceinline__ Place(const Walk &w, int n) : at(TOKENS ? w.place(n) : 0), group(at / EVERY * EVERY) {}

    __device__ __forceinline__ void next(const Walk &w, int chunks) {
        if (!TOKENS) return;
        at += w.reverse ? -chunks : chunks;
        if (!w.grouped) return;
        const int end = min(group + EVERY, w.chunks);
        if (at < end) return;
        group -= EVERY;
        at += group - end;
    }
};
