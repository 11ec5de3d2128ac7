// Softmax attention, forward, for Hopper (sm_90a): TMA, mbarriers, wgmma, warps with roles.
//
// A block is one producer warpgroup, of which one thread starts copies and which gives its registers away, and
// CONSUMERS warpgroups that own 64 queries each. Blocks stay: each walks tiles of 64 * CONSUMERS queries, the longest
// first, in an order that producer and consumers compute alike. Keys come from the last the tile sees to the first,
// BLOCK_N at a time, so that all blocks cut by a mask come first. A consumer keeps o, m, l and p in registers:
//
//     start s' = q k'^T of the next keys; start o += p v; wait for s'; softmax of s'; wait for o; scale o; p = s'
//
// p is written only after the wait for the product that reads it. k and v have rings of STAGES places each, filled by
// TMA, which counts bytes on a `full` barrier and zeroes rows beyond the end; every warp of a consumer reports on
// `empty` when it has no more use for a place. A row of shared memory has 128 bytes in units of 16, unit c of row r at
// c ^ (r % 8), as TMA's 128-byte swizzle writes and wgmma's reads it; D = 128 takes two panels of 64 columns.
//
// wgmma's accumulators, with g = lane / 4, t = lane % 4: d[4 j + i] is row 16 warp + g + 8 (i / 2), column
// 8 j + 2 t + i % 2; the registers of an A operand are the same with two columns packed. So s turns into p in place.
//
// The compiler defines HEAD_DIM (D = E), CONSUMERS, BLOCK_N, STAGES, BF16, CAUSAL and TAKE_TURNS (consumers start their
// products one after the other).

typedef unsigned int u32;
typedef unsigned long long u64;
#define INFINITY_ __int_as_float(0x7f800000)

constexpr int D = HEAD_DIM;
constexpr int PANELS = D / 64;
constexpr int ROWS = 64 * CONSUMERS;
constexpr int THREADS = 128 * (CONSUMERS + 1);
constexpr int Q_BYTES = 64 * D * 2;     // of one consumer
constexpr int KV_BYTES = BLOCK_N * D * 2;
constexpr int S = BLOCK_N / 2, O = D / 2, P = BLOCK_N / 4;  // registers
constexpr int WARPS = 4 * CONSUMERS;
static_assert(BLOCK_N % 16 == 0 && D % 64 == 0, "whole products");

struct alignas(64) TensorMap { u64 opaque[16]; };

struct Args {
    TensorMap q, k, v;                  // (D, N, heads, B); boxes of 64 columns and 64 (q) or BLOCK_N rows
    char *o;
    float *lse;                         // or null
    long long o_b, o_h, o_n;            // strides in bytes
    int heads, h, group;                // B * H, H, H / H_KV
    int n_q, n_kv, shift;               // query i stands at position i + shift
    int tiles, section;                 // tiles of a head; heads that are worked on together
    float factor;                       // scale * log2(e)
};

// ------------------------------------------------------------------------------------------------- barriers

__device__ __forceinline__ void init(u32 barrier, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(barrier), "r"(count) : "memory");
}

__device__ __forceinline__ void arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(barrier) : "memory");
}

__device__ __forceinline__ void expect(u32 barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(barrier), "r"(bytes) : "memory");
}

// Until the phase of this parity is over; the phase before the first has parity 1.
__device__ __forceinline__ void await(u32 barrier, int parity) {
    asm volatile("{.reg .pred done;\n"
                 "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
                 "@!done bra again;}" :: "r"(barrier), "r"(parity) : "memory");
}

// A place in a ring, and the parity of the phase in which it is filled.
struct Place {
    int at = 0, parity = 0;
    __device__ __forceinline__ void next() {
        if (++at == STAGES) at = 0, parity ^= 1;
    }
};

__device__ __forceinline__ void copy_box(u32 to, const TensorMap &map, u32 barrier, int column, int row, int h, int b) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%3, %4, %5, %6}], [%2];"
                 :: "r"(to), "l"(&map), "r"(barrier), "r"(column), "r"(row), "r"(h), "r"(b) : "memory");
}

// ------------------------------------------------------------------------------------------------- products

#if BF16
#define TYPES "bf16.bf16"
#else
#define TYPES "f16.f16"
#endif
#define LIST_32 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define LIST_64 LIST_32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
    "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define LIST_88 LIST_64 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, " \
    "%76, %77, %78, %79, %80, %81, %82, %83, %84, %85, %86, %87"
#define D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define D8(i) D4(i), D4(i + 4)
#define D_32 D8(0), D8(8), D8(16), D8(24)
#define D_64 D_32, D8(32), D8(40), D8(48), D8(56)
#define D_88 D_64, D8(64), D8(72), D8(80)
#define FROM_SHARED(REGS, N, A, B, ADD) \
    __device__ __forceinline__ void multiply(float (&d)[REGS], u64 a, u64 b, int add) { \
        asm volatile("{.reg .pred add; setp.ne.b32 add, " ADD ", 0;\n" \
                     "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPES " {" LIST_##REGS "}, " \
                     A ", " B ", add, 1, 1, 0, 0;}" \
                     : D_##REGS : "l"(a), "l"(b), "r"(add)); \
    }
#define FROM_REGISTERS(REGS, N, A, B) \
    __device__ __forceinline__ void multiply(float (&d)[REGS], const u32 *a, u64 b) { \
        asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPES " {" LIST_##REGS "}, " \
                     "{" A "}, " B ", 1, 1, 1, 1;" \
                     : D_##REGS : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b)); \
    }
FROM_SHARED(64, 128, "%64", "%65", "%66")
FROM_SHARED(88, 176, "%88", "%89", "%90")
FROM_REGISTERS(32, 64, "%32, %33, %34, %35", "%36")
FROM_REGISTERS(64, 128, "%64, %65, %66, %67", "%68")

// Where an operand lies, in units of 16 bytes: groups of 8 rows 1024 bytes apart, 128-byte swizzle and, if the sum goes
// over its rows, panels of 64 columns `panel` bytes apart.
__device__ __forceinline__ u64 operand(u32 address, int panel) {
    return (u64)(address >> 4) | (u64)(panel >> 4) << 16 | (u64)(1024 >> 4) << 32 | 1ull << 62;
}

__device__ __forceinline__ void begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int LEFT>
__device__ __forceinline__ void finish() { asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(LEFT) : "memory"); }

// Registers that a product under way reads or writes: nothing about them moves across this.
template <int COUNT>
__device__ __forceinline__ void pin(float (&x)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; i++) asm volatile("" : "+f"(x[i]) :: "memory");
}

template <int COUNT>
__device__ __forceinline__ void pin(u32 (&x)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; i++) asm volatile("" : "+r"(x[i]) :: "memory");
}

// s = q k^T: both lie row by row along D.
__device__ __forceinline__ void start_s(float (&s)[S], u32 q, u32 k) {
    const u64 a = operand(q, 16), b = operand(k, 16);
#pragma unroll
    for (int d = 0; d < D / 16; d++)
        multiply(s, a + (d / 4 * 64 * 128 + d % 4 * 32) / 16, b + (d / 4 * BLOCK_N * 128 + d % 4 * 32) / 16, d > 0);
    commit();
}

// o += p v: the rows of v are what is summed over.
__device__ __forceinline__ void start_o(float (&o)[O], const u32 (&p)[P], u32 v) {
    const u64 b = operand(v, BLOCK_N * 128);
#pragma unroll
    for (int j = 0; j < BLOCK_N / 16; j++) multiply(o, p + 4 * j, b + j * 16 * 128 / 16);
    commit();
}

// -------------------------------------------------------------------------------------------------- softmax

__device__ __forceinline__ float exp2_(float x) {
    float y;
    asm volatile("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ u32 pack(float low, float high) {
    u32 x;
#if BF16
    asm volatile("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(x) : "f"(high), "f"(low));
#else
    asm volatile("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(x) : "f"(high), "f"(low));
#endif
    return x;
}

struct Rows {
    float m[2], l[2], alpha[2];         // of rows g and g + 8; l is this lane's part until the end
};

// s becomes p, still in fp32; x.alpha is what o must be scaled with.
template <bool MASK>
__device__ __forceinline__ void softmax(float (&s)[S], Rows &x, int key, int limit0, int limit1, float factor) {
    if (MASK) {
        key += 2 * (threadIdx.x % 4);
#pragma unroll
        for (int i = 0; i < S; i++)
            if (key + 8 * (i / 4) + i % 2 > (i % 4 < 2 ? limit0 : limit1)) s[i] = -INFINITY_;
    }
    float pivot[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float m = x.m[r];
#pragma unroll
        for (int j = 0; j < S / 4; j++) m = fmaxf(m, fmaxf(s[4 * j + 2 * r], s[4 * j + 2 * r + 1]));
        m = fmaxf(m, __shfl_xor_sync(~0u, m, 1));
        m = fmaxf(m, __shfl_xor_sync(~0u, m, 2));
        pivot[r] = MASK && m == -INFINITY_ ? 0.0f : m * factor;
        x.alpha[r] = exp2_(x.m[r] * factor - pivot[r]);
        x.m[r] = m;
        x.l[r] *= x.alpha[r];
    }
#pragma unroll
    for (int i = 0; i < S; i++) {
        s[i] = exp2_(s[i] * factor - pivot[i / 2 % 2]);
        x.l[i / 2 % 2] += s[i];
    }
}

__device__ __forceinline__ void to_operand(u32 (&p)[P], const float (&s)[S]) {
#pragma unroll
    for (int i = 0; i < P; i++) p[i] = pack(s[2 * i], s[2 * i + 1]);
}

// --------------------------------------------------------------------------------------------------- tiles

// The i-th tile of this block; blocks take them in turns, back and forth, so that none gets the longest every time.
struct Tile {
    int head, m0, blocks;
    __device__ __forceinline__ bool find(const Args &a, int i) {
        int t = i * gridDim.x + (i % 2 ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
        if (t >= a.heads * a.tiles) return false;
        int first = t / (a.section * a.tiles) * a.section, size = min(a.section, a.heads - first);
        t -= first * a.tiles;
        head = first + t % size;
        m0 = (CAUSAL ? a.tiles - 1 - t / size : t / size) * ROWS;
        int end = CAUSAL ? max(0, min(a.n_kv, m0 + ROWS + a.shift)) : a.n_kv;
        blocks = (end + BLOCK_N - 1) / BLOCK_N;
        return true;
    }
};

struct Shared {
    u32 q, k, v, q_full, q_empty, k_full, k_empty, v_full, v_empty;
    __device__ __forceinline__ explicit Shared(u32 base)
        : q(base), k(base + CONSUMERS * Q_BYTES), v(k + STAGES * KV_BYTES), q_full(v + STAGES * KV_BYTES),
          q_empty(q_full + 8), k_full(q_full + 16), k_empty(k_full + 8 * STAGES), v_full(k_empty + 8 * STAGES),
          v_empty(v_full + 8 * STAGES) {}
};

__device__ __forceinline__ void fetch(const TensorMap &map, u32 ring, u32 full, u32 empty, Place &place, int row, int h,
                                      int b) {
    await(empty + 8 * place.at, place.parity ^ 1);
    expect(full + 8 * place.at, KV_BYTES);
#pragma unroll
    for (int i = 0; i < PANELS; i++)
        copy_box(ring + place.at * KV_BYTES + i * BLOCK_N * 128, map, full + 8 * place.at, 64 * i, row, h, b);
    place.next();
}

__device__ __forceinline__ void produce(const Args &a, const Shared &at) {
    Place k, v;
    Tile tile;
    int parity = 0;
    for (int i = 0; tile.find(a, i); i++) {
        if (tile.blocks == 0) continue;
        int b = tile.head / a.h, h = tile.head % a.h, h_kv = h / a.group;
        await(at.q_empty, parity ^ 1);
        expect(at.q_full, CONSUMERS * Q_BYTES);
#pragma unroll
        for (int c = 0; c < CONSUMERS * PANELS; c++)
            copy_box(at.q + c * 64 * 128, a.q, at.q_full, c % PANELS * 64, tile.m0 + c / PANELS * 64, h, b);
        parity ^= 1;
        int row = (tile.blocks - 1) * BLOCK_N;
        fetch(a.k, at.k, at.k_full, at.k_empty, k, row, h_kv, b);
        for (; row > 0; row -= BLOCK_N) {
            fetch(a.k, at.k, at.k_full, at.k_empty, k, row - BLOCK_N, h_kv, b);
            fetch(a.v, at.v, at.v_full, at.v_empty, v, row, h_kv, b);
        }
        fetch(a.v, at.v, at.v_full, at.v_empty, v, 0, h_kv, b);
    }
}

__device__ __forceinline__ void wait_for_turn(int consumer) {
    if (TAKE_TURNS) asm volatile("bar.sync %0, 256;" :: "r"(1 + consumer) : "memory");
}

__device__ __forceinline__ void pass_turn(int consumer) {
    if (TAKE_TURNS) asm volatile("bar.arrive %0, 256;" :: "r"(1 + (consumer + 1) % CONSUMERS) : "memory");
}

// One block of keys, which has come: its logits, and the product of the block before.
template <bool MASK>
__device__ __forceinline__ void step(float (&s)[S], float (&o)[O], u32 (&p)[P], Rows &x, const Shared &at, Place &k,
                                     Place &v, u32 q, int consumer, int key, int limit0, int limit1, float factor) {
    const bool reports = threadIdx.x % 32 == 0;
    wait_for_turn(consumer);
    pin(s);
    pin(o);
    pin(p);
    begin();
    start_s(s, q, at.k + k.at * KV_BYTES);
    await(at.v_full + 8 * v.at, v.parity);
    begin();                            // once more: the wait may have taken another path
    start_o(o, p, at.v + v.at * KV_BYTES);
    pass_turn(consumer);
    finish<1>();
    pin(s);
    if (reports) arrive(at.k_empty + 8 * k.at);
    k.next();
    softmax<MASK>(s, x, key, limit0, limit1, factor);
    if (key > 0) await(at.k_full + 8 * k.at, k.parity);  // here, as the assembler moves nothing across a loop
    finish<0>();
    pin(s);                             // p is not made from it before the product that reads p is over
    pin(o);
    pin(p);
    if (reports) arrive(at.v_empty + 8 * v.at);
    v.next();
#pragma unroll
    for (int i = 0; i < O; i++) o[i] *= x.alpha[i / 2 % 2];
    to_operand(p, s);
}

// Writes the rows of one warp: through shared memory, where its queries lay, and out in units of 16 bytes. Rows that
// see nothing had no queries there, and somebody else's may be on their way.
__device__ __forceinline__ void store(const Args &a, char *rows, const float (&o)[O], const Rows &x, int head,
                                      int first, bool nothing) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    rows += threadIdx.x / 32 % 4 * 16 * 128;
    if (!nothing) {
        float share[2] = {1.0f / (x.l[0] == 0.0f ? 1.0f : x.l[0]), 1.0f / (x.l[1] == 0.0f ? 1.0f : x.l[1])};
#pragma unroll
        for (int i = 0; i < O; i += 2) {
            int r = g + 8 * (i / 2 % 2), c = i / 4;
            char *to = rows + c / 8 * 64 * 128 + r * 128 + ((c % 8 ^ r % 8) << 4) + 4 * t;
            *reinterpret_cast<u32 *>(to) = pack(o[i] * share[i / 2 % 2], o[i + 1] * share[i / 2 % 2]);
        }
    }
    __syncwarp();
    char *out = a.o + head / a.h * a.o_b + head % a.h * a.o_h;
#pragma unroll
    for (int i = 0; i < 16 * D / 8 / 32; i++) {
        int r = (i * 32 + lane) / (D / 8), c = (i * 32 + lane) % (D / 8);
        uint4 y = make_uint4(0, 0, 0, 0);
        if (!nothing)
            y = *reinterpret_cast<const uint4 *>(rows + c / 8 * 64 * 128 + r * 128 + ((c % 8 ^ r % 8) << 4));
        if (first + r < a.n_q) *reinterpret_cast<uint4 *>(out + (first + r) * a.o_n + c * 16) = y;
    }
    if (a.lse && t == 0)
#pragma unroll
        for (int i = 0; i < 2; i++)
            if (first + g + 8 * i < a.n_q)
                a.lse[(long long)head * a.n_q + first + g + 8 * i] =
                    (x.m[i] * a.factor + __log2f(x.l[i])) * 0.6931471805599453f;
}

__device__ __forceinline__ void consume(const Args &a, const Shared &at, char *shared, int consumer) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    const u32 q = at.q + consumer * Q_BYTES;
    Place k, v;
    Tile tile;
    int parity = 0;
    if (TAKE_TURNS && consumer == CONSUMERS - 1) pass_turn(consumer);  // the first goes first
    for (int i = 0; tile.find(a, i); i++) {
        float s[S], o[O];
        u32 p[P];
        Rows x;
        x.m[0] = x.m[1] = -INFINITY_;
        x.l[0] = x.l[1] = 0.0f;
#pragma unroll
        for (int e = 0; e < O; e++) o[e] = 0.0f;
        const int top = tile.m0 + 64 * consumer, first = top + 16 * warp, row = first + lane / 4, last = a.n_kv - 1;
        const int limit0 = CAUSAL ? min(last, row + a.shift) : last;
        const int limit1 = CAUSAL ? min(last, row + 8 + a.shift) : last;
        const int all_see = CAUSAL ? min(last, top + a.shift) : last;  // keys up to here
        if (tile.blocks > 0) {
            int key = (tile.blocks - 1) * BLOCK_N;
            await(at.q_full, parity);
            parity ^= 1;
            await(at.k_full + 8 * k.at, k.parity);
            pin(s);
            begin();
            start_s(s, q, at.k + k.at * KV_BYTES);
            finish<0>();
            pin(s);
            if (lane == 0) arrive(at.k_empty + 8 * k.at);
            k.next();
            softmax<true>(s, x, key, limit0, limit1, a.factor);
            to_operand(p, s);
            if (key > 0) await(at.k_full + 8 * k.at, k.parity);
            key -= BLOCK_N;
            for (; key >= 0 && key + BLOCK_N - 1 > all_see; key -= BLOCK_N)
                step<true>(s, o, p, x, at, k, v, q, consumer, key, limit0, limit1, a.factor);
            for (; key >= 0; key -= BLOCK_N)
                step<false>(s, o, p, x, at, k, v, q, consumer, key, limit0, limit1, a.factor);
            await(at.v_full + 8 * v.at, v.parity);
            pin(o);
            pin(p);
            begin();
            start_o(o, p, at.v + v.at * KV_BYTES);
            finish<0>();
            pin(o);
            pin(p);
            if (lane == 0) arrive(at.v_empty + 8 * v.at);
            v.next();
        }
#pragma unroll
        for (int r = 0; r < 2; r++) {
            x.l[r] += __shfl_xor_sync(~0u, x.l[r], 1);
            x.l[r] += __shfl_xor_sync(~0u, x.l[r], 2);
        }
        asm volatile("bar.sync %0, 128;" :: "r"(1 + CONSUMERS + consumer) : "memory");  // all four have done with q
        store(a, shared + consumer * Q_BYTES, o, x, tile.head, first, tile.blocks == 0);
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        __syncwarp();
        if (lane == 0 && tile.blocks > 0) arrive(at.q_empty);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) flash_sm90_forward_kernel(const __grid_constant__ Args a) {
    extern __shared__ __align__(1024) char shared[];
    const Shared at((u32)__cvta_generic_to_shared(shared));
    if (threadIdx.x == 0) {
        init(at.q_full, 1);
        init(at.q_empty, WARPS);
        for (int i = 0; i < STAGES; i++) {
            init(at.k_full + 8 * i, 1);
            init(at.k_empty + 8 * i, WARPS);
            init(at.v_full + 8 * i, 1);
            init(at.v_empty + 8 * i, WARPS);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    }
    __syncthreads();
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    asm volatile("griddepcontrol.wait;" ::: "memory");
    if (threadIdx.x < 128) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"(CONSUMERS == 2 ? 24 : 32));
        if (threadIdx.x == 0) produce(a, at);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(CONSUMERS == 2 ? 240 : 160));
        consume(a, at, shared, __shfl_sync(~0u, threadIdx.x / 128, 0) - 1);
    }
}
