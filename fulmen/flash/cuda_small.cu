// Softmax attention of short sequences, forward, from compute capability 8.0 on: mma.sync, ldmatrix, cp.async.
//
// A block owns 16 * WARPS_M queries of one head and walks the keys they see, BLOCK_N at a time, through a ring of
// STAGES places in shared memory. All places are asked for before anything is computed: a call of this size is over when
// its memory has come and gone. With one place all keys are one block, and nothing is scaled again from block to block.
// Warp (i, j) owns 16 queries and, of every BLOCK_N keys, the j-th of WARPS_N parts; few queries on a large GPU are the
// faster for it. Its m, l and o stay in registers, in base 2 as in triton.py, and where WARPS_N > 1 the warps of a row
// add theirs up at the end, in a fixed order.
//
// Rows lie in shared memory in units of 16 bytes, unit c of row r at c ^ (r % 8): eight rows at one c are in different
// banks. The fragments of m16n8k16, with g = lane / 4 and t = lane % 4: A holds rows g, g + 8 at columns 2t, 2t + 8
// (two each), B column g at rows 2t, 2t + 8, C rows g, g + 8 at columns 2t. So C of s = q k^T is A of p v as it is.
//
// The compiler defines HEAD_DIM (D = E), WARPS_M, WARPS_N, BLOCK_N, STAGES, BLOCKS_PER_SM, BF16, CAUSAL.

typedef unsigned int u32;
#define INFINITY_ __int_as_float(0x7f800000)

constexpr int D = HEAD_DIM;
constexpr int WARPS = WARPS_M * WARPS_N;
constexpr int THREADS = 32 * WARPS;
constexpr int ROWS = 16 * WARPS_M;
constexpr int UNITS = D / 8;            // of 16 bytes, in a row
constexpr int KEYS = BLOCK_N / WARPS_N; // a warp's share of a block of keys
constexpr int ROW_BYTES = 2 * D;
constexpr int TILE_BYTES = BLOCK_N * ROW_BYTES;
constexpr int SUM_ROW = D + 8;          // floats; rows of sums, apart so that banks differ
constexpr bool ONCE = STAGES == 1;
static_assert(KEYS % 16 == 0, "a warp takes 16 keys at a time");
static_assert(WARPS_N == 1 || 4 * WARPS * 16 * (SUM_ROW + 2) <= 2 * STAGES * TILE_BYTES, "sums fit where k, v lay");

struct Args {
    const char *q, *k, *v;
    char *o;
    float *lse;                         // or null
    long long q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, o_b, o_h, o_n;  // strides in bytes
    int group, n_q, n_kv, shift;        // query i stands at position i + shift
    float factor;                       // scale * log2(e)
};

__device__ __forceinline__ float exp2_(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ u32 pack(float low, float high) {
    u32 x;
#if BF16
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(x) : "f"(high), "f"(low));
#else
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(x) : "f"(high), "f"(low));
#endif
    return x;
}

__device__ __forceinline__ void multiply(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
#if BF16
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
#else
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
#endif
                 "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void load_matrices(u32 (&x)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(address) : "memory");
}

__device__ __forceinline__ void load_transposed(u32 (&x)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(address) : "memory");
}

// Byte of unit c in row r of a tile.
__device__ __forceinline__ u32 place(int r, int c) { return r * ROW_BYTES + ((c ^ (r & 7)) << 4); }

// The rows of one head on their way to shared memory, in order; a thread copies one unit of every STEP-th row.
struct Stream {
    static constexpr int STEP = THREADS / UNITS;
    const char *from;
    long long step;
    int left;                           // rows to the end of the tensor, beyond which all is zero

    __device__ __forceinline__ Stream(const char *head, long long stride, int first, int end)
        : from(head + (first + (int)threadIdx.x / UNITS) * stride + threadIdx.x % UNITS * 16), step(STEP * stride),
          left(end - first - (int)threadIdx.x / UNITS) {}

    template <int COUNT>
    __device__ __forceinline__ void fetch(u32 tile) {
        static_assert(STEP % 8 == 0 && COUNT % STEP == 0, "a thread's units lie one below the other");
        tile += place(threadIdx.x / UNITS, threadIdx.x % UNITS);
#pragma unroll
        for (int i = 0; i < COUNT / STEP; i++) {
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                         :: "r"(tile + i * STEP * ROW_BYTES), "l"(from), "r"(left > 0 ? 16 : 0) : "memory");
            from += step;
            left -= STEP;
        }
    }
};

__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int LEFT>
__device__ __forceinline__ void wait() { asm volatile("cp.async.wait_group %0;" :: "n"(LEFT) : "memory"); }

__device__ __forceinline__ float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}

__device__ __forceinline__ float quad_sum(float x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}

// What one warp knows of its 16 queries: lane holds rows g (index 0) and g + 8 (index 1).
struct Rows {
    float m[2], l[2];                   // m in units of q k^T; l is this lane's part until the end
    float o[D / 8][4];
};

// The weights of KEYS keys from `key` on, whose rows in shared memory begin at `k`. What the rows had is scaled to them.
__device__ __forceinline__ void weigh(Rows &x, float (&s)[KEYS / 8][4], u32 (&q)[D / 16][4], u32 q_rows, u32 k, int key,
                                      int limit0, int limit1, bool edge, float factor) {
    const int lane = threadIdx.x % 32, in8 = lane % 8, low = lane / 8 % 2, high = lane / 16;
#pragma unroll
    for (int j = 0; j < KEYS / 8; j++) s[j][0] = s[j][1] = s[j][2] = s[j][3] = 0.0f;
#pragma unroll
    for (int d = 0; d < D / 16; d++) {
        if (ONCE) load_matrices(q[d], q_rows + place(lane % 16, 2 * d + lane / 16));  // which saves registers
#pragma unroll
        for (int j = 0; j < KEYS / 16; j++) {
            u32 b[4];                   // keys 0-7 at d 0-7, 8-15; keys 8-15 the same
            load_matrices(b, k + place(16 * j + 8 * high + in8, 2 * d + low));
            multiply(s[2 * j], q[d], b[0], b[1]);
            multiply(s[2 * j + 1], q[d], b[2], b[3]);
        }
    }

    if (edge) {
#pragma unroll
        for (int j = 0; j < KEYS / 8; j++) {
            int n = key + 8 * j + 2 * (lane % 4);
            if (n > limit0) s[j][0] = -INFINITY_;
            if (n + 1 > limit0) s[j][1] = -INFINITY_;
            if (n > limit1) s[j][2] = -INFINITY_;
            if (n + 1 > limit1) s[j][3] = -INFINITY_;
        }
    }
    float pivot[2], alpha[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        float m = x.m[i];
#pragma unroll
        for (int j = 0; j < KEYS / 8; j++) m = fmaxf(m, fmaxf(s[j][2 * i], s[j][2 * i + 1]));
        m = quad_max(m);
        pivot[i] = m == -INFINITY_ ? 0.0f : m * factor;
        alpha[i] = ONCE ? 0.0f : exp2_(x.m[i] * factor - pivot[i]);
        x.m[i] = m;
        x.l[i] *= alpha[i];
    }
#pragma unroll
    for (int j = 0; j < KEYS / 8; j++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            s[j][i] = exp2_(s[j][i] * factor - pivot[i / 2]);
            x.l[i / 2] += s[j][i];
        }
#pragma unroll
    for (int e = 0; e < D / 8; e++)
#pragma unroll
        for (int i = 0; i < 4; i++) x.o[e][i] *= alpha[i / 2];
}

// Adds their values, whose rows begin at `v`, by these weights.
__device__ __forceinline__ void add(Rows &x, const float (&s)[KEYS / 8][4], u32 v) {
    const int lane = threadIdx.x % 32, in8 = lane % 8, low = lane / 8 % 2, high = lane / 16;
#pragma unroll
    for (int j = 0; j < KEYS / 16; j++) {
        u32 p[4] = {pack(s[2 * j][0], s[2 * j][1]), pack(s[2 * j][2], s[2 * j][3]),
                    pack(s[2 * j + 1][0], s[2 * j + 1][1]), pack(s[2 * j + 1][2], s[2 * j + 1][3])};
#pragma unroll
        for (int e = 0; e < D / 16; e++) {
            u32 b[4];                   // keys 0-7, 8-15 at e 0-7; at e 8-15 the same
            load_transposed(b, v + place(16 * j + 8 * low + in8, 2 * e + high));
            multiply(x.o[2 * e], p, b[0], b[1]);
            multiply(x.o[2 * e + 1], p, b[2], b[3]);
        }
    }
}

// The warps of a row put their sums together; what comes out is row by row in `sums`, WARPS_N addends each.
__device__ __forceinline__ void join(Rows &x, float *sums, float *heads, int warp_m, int warp_n, float factor) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    float *mine = heads + (warp_m * WARPS_N + warp_n) * 32;
    if (t == 0)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            mine[2 * (g + 8 * i)] = x.m[i];
            mine[2 * (g + 8 * i) + 1] = x.l[i];
        }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 2; i++) {
        float m = -INFINITY_, l = 0.0f;
#pragma unroll
        for (int j = 0; j < WARPS_N; j++) m = fmaxf(m, heads[(warp_m * WARPS_N + j) * 32 + 2 * (g + 8 * i)]);
        float pivot = m == -INFINITY_ ? 0.0f : m * factor;
#pragma unroll
        for (int j = 0; j < WARPS_N; j++) {
            const float *part = heads + (warp_m * WARPS_N + j) * 32 + 2 * (g + 8 * i);
            l += part[1] * exp2_(part[0] * factor - pivot);
        }
        float share = exp2_(x.m[i] * factor - pivot) / (l == 0.0f ? 1.0f : l);
        float *row = sums + ((warp_m * WARPS_N + warp_n) * 16 + g + 8 * i) * SUM_ROW + 2 * t;
#pragma unroll
        for (int e = 0; e < D / 8; e++)
            *reinterpret_cast<float2 *>(row + 8 * e) = make_float2(x.o[e][2 * i] * share, x.o[e][2 * i + 1] * share);
        x.m[i] = m;
        x.l[i] = l;
    }
    __syncthreads();
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
flash_small_forward_kernel(const __grid_constant__ Args a) {
    extern __shared__ __align__(128) char shared[];
    // who am I
    const int tile = CAUSAL ? gridDim.x - 1 - blockIdx.x : blockIdx.x, h = blockIdx.y, b = blockIdx.z;
    const int warp_m = threadIdx.x / 32 / WARPS_N, warp_n = threadIdx.x / 32 % WARPS_N;
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int m0 = tile * ROWS, row = m0 + 16 * warp_m + g;
    const int end = CAUSAL ? max(0, min(a.n_kv, m0 + ROWS + a.shift)) : a.n_kv;
    const int blocks = ONCE ? end > 0 : (end + BLOCK_N - 1) / BLOCK_N;
    const u32 q_tile = (u32)__cvta_generic_to_shared(shared), ring = q_tile + ROWS * ROW_BYTES;

#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    asm volatile("griddepcontrol.wait;" ::: "memory");  // all before this ran beside the launch before us
#endif
    Stream(a.q + b * a.q_b + h * a.q_h, a.q_n, m0, a.n_q).fetch<ROWS>(q_tile);
    Stream k(a.k + b * a.k_b + h / a.group * a.k_h, a.k_n, 0, a.n_kv);
    Stream v(a.v + b * a.v_b + h / a.group * a.v_h, a.v_n, 0, a.n_kv);
#pragma unroll
    for (int i = 0; i < STAGES; i++) {
        if (i < blocks) {
            k.fetch<BLOCK_N>(ring + 2 * i * TILE_BYTES);
            if (ONCE) commit();         // what is next to wait for is waited for by itself
            v.fetch<BLOCK_N>(ring + (2 * i + 1) * TILE_BYTES);
        }
        commit();
    }

    // what stays resident
    Rows x;
    u32 q[D / 16][4];
    x.m[0] = x.m[1] = -INFINITY_;
    x.l[0] = x.l[1] = 0.0f;
#pragma unroll
    for (int e = 0; e < D / 8; e++) x.o[e][0] = x.o[e][1] = x.o[e][2] = x.o[e][3] = 0.0f;
    const u32 q_rows = q_tile + 16 * warp_m * ROW_BYTES;
    const int last = a.n_kv - 1;        // key a row sees last
    const int limit0 = CAUSAL ? min(last, row + a.shift) : last;
    const int limit1 = CAUSAL ? min(last, row + 8 + a.shift) : last;
    const int all_see = CAUSAL ? min(last, m0 + 16 * warp_m + a.shift) : last;

    if (!blocks) {                      // outputs go through the place that q is still on its way to
        wait<0>();
        __syncthreads();
    }
    for (int j = 0; j < (ONCE ? min(blocks, 1) : blocks); j++) {
        if (ONCE || j == 0) {
            wait<(ONCE ? 1 : STAGES - 1)>();
            __syncthreads();
#pragma unroll
            for (int d = 0; d < D / 16; d++)
                if (!ONCE) load_matrices(q[d], q_rows + place(lane % 16, 2 * d + lane / 16));
        } else {
            wait<(ONCE ? 0 : STAGES - 2)>();
            __syncthreads();            // all are done with the block before, whose place is filled again
            if (j - 1 + STAGES < blocks) {
                u32 old = ring + 2 * ((j - 1) % STAGES) * TILE_BYTES;
                k.fetch<BLOCK_N>(old);
                v.fetch<BLOCK_N>(old + TILE_BYTES);
            }
            commit();
        }
        u32 block = ring + 2 * (j % STAGES) * TILE_BYTES + warp_n * KEYS * ROW_BYTES;
        int key = j * BLOCK_N + warp_n * KEYS;
        float s[KEYS / 8][4];
        weigh(x, s, q, q_rows, block, key, limit0, limit1, key + KEYS - 1 > all_see, a.factor);
        if (ONCE) {
            wait<0>();
            __syncthreads();
        }
        add(x, s, block + TILE_BYTES);
    }
    x.l[0] = quad_sum(x.l[0]);
    x.l[1] = quad_sum(x.l[1]);

    // epilogue: rows go out in units of 16 bytes
    char *o = a.o + b * a.o_b + h * a.o_h;
    if (WARPS_N > 1) {
        wait<0>();
        __syncthreads();
        float *heads = reinterpret_cast<float *>(shared + ROWS * ROW_BYTES), *sums = heads + WARPS * 32;
        join(x, sums, heads, warp_m, warp_n, a.factor);
        for (int unit = threadIdx.x; unit < ROWS * UNITS; unit += THREADS) {
            int r = unit / UNITS, c = unit % UNITS;
            float y[8] = {0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
            for (int j = 0; j < WARPS_N; j++) {
                const float *part = sums + ((r / 16 * WARPS_N + j) * 16 + r % 16) * SUM_ROW + 8 * c;
#pragma unroll
                for (int i = 0; i < 8; i++) y[i] += part[i];
            }
            if (m0 + r < a.n_q)
                *reinterpret_cast<uint4 *>(o + (m0 + r) * a.o_n + c * 16) =
                    make_uint4(pack(y[0], y[1]), pack(y[2], y[3]), pack(y[4], y[5]), pack(y[6], y[7]));
        }
    } else {
        char *rows = shared + 16 * warp_m * ROW_BYTES;  // this warp's queries, which it has read
        __syncwarp();
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float share = 1.0f / (x.l[i] == 0.0f ? 1.0f : x.l[i]);
#pragma unroll
            for (int e = 0; e < D / 8; e++)
                *reinterpret_cast<u32 *>(rows + place(g + 8 * i, e) + 4 * t) =
                    pack(x.o[e][2 * i] * share, x.o[e][2 * i + 1] * share);
        }
        __syncwarp();
#pragma unroll
        for (int i = 0; i < 16 * UNITS / 32; i++) {
            int r = (i * 32 + lane) / UNITS, c = (i * 32 + lane) % UNITS, at = m0 + 16 * warp_m + r;
            if (at < a.n_q)
                *reinterpret_cast<uint4 *>(o + at * a.o_n + c * 16) =
                    *reinterpret_cast<const uint4 *>(rows + place(r, c));
        }
    }
    if (a.lse && warp_n == 0 && t == 0)
#pragma unroll
        for (int i = 0; i < 2; i++)
            if (row + 8 * i < a.n_q) {
                long long at = ((long long)b * gridDim.y + h) * a.n_q + row + 8 * i;
                a.lse[at] = (x.m[i] * a.factor + __log2f(x.l[i])) * 0.6931471805599453f;
            }
}
