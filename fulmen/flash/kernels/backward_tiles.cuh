// Which keys a tile of the backward has, which queries see them, and in which order they come. M queries and N keys are a
// tile; see backward.cu.

// A tile of keys. L2 swizzle: all tiles of `swizzle` heads come before those of the next heads, so that their q, do and dq
// stay in L2. Of these heads, under a causal mask, the longest tiles come first (LPT).
struct Tile {
    int head, n0;                           // of k and v in all batches; its first key
    int begin_q, begin_k, n_q, n_kv, slot;  // of its sequence; slot: the first
    int own, last;                          // the sequence's first tile of keys, and last key in a tile
    int shift;                              // query i stands at position i + shift
    int first, count;                       // queries, from which on, and how many times M

    __device__ __forceinline__ Tile(const Args &a, int t) {
        const int from = t / (a.swizzle * a.tiles) * a.swizzle, size = min(a.swizzle, a.heads - from);
        t -= from * a.tiles;
        const int tile = t / size;
        head = from + t % size;
        begin_q = begin_k = slot = own = 0, n_q = a.n_q, n_kv = a.n_kv, n0 = tile * N, last = n_kv - 1;
        if (PACKED) {
            const int i = sequence_of_tile(a.cu_k, a.sequences, a.n_kv, N, tile);
            begin_q = offset(a.cu_q, i, a.n_q);
            begin_k = offset(a.cu_k, i, a.n_kv);
            n_q = max(0, offset(a.cu_q, i + 1, a.n_q) - begin_q);
            n_kv = max(0, offset(a.cu_k, i + 1, a.n_kv) - begin_k);
            n0 = first_row(a.cu_k, i, a.n_kv, N, tile);
            slot = begin_q / M + i;
            last = n_kv - 1;
            auto is_own = [&](int key) {            // offsets that decrease give tiles to another sequence
                return sequence_of_tile(a.cu_k, a.sequences, a.n_kv, N, tile + (key - n0) / N) == i;
            };
            while (n0 < n_kv && !is_own(own * N)) own++;
            while (n0 < n_kv && !is_own(last / N * N)) last -= N;
        }
        shift = a.top_left ? 0 : n_kv - n_q;
        first = RIGHT ? first_query(a, n0) : 0;
        const int end = LEFT ? min(n_q, min(n0 + N, n_kv) - shift + a.left) : n_q;
        count = n0 < n_kv ? max(0, end - first + M - 1) / M : 0;
    }

    // The first queries that see the keys from `key` on.
    __device__ __forceinline__ int first_query(const Args &a, int key) const {
        return max(0, key - shift - a.right) / M * M;
    }

    // The tiles of keys that the queries from m on see.
    __device__ __forceinline__ int first_tile(const Args &a, int m) const {
        return LEFT ? max(own, (m + shift - a.left) / N) : own;
    }
    __device__ __forceinline__ int last_tile(const Args &a, int m) const {
        return (RIGHT ? min(last, m + M - 1 + shift + a.right) : last) / N;
    }
};

// The query tiles of a block: from the last to the first, of all heads of the group.
struct Walk {
    int left, m, i, slot;               // tiles, with this one; first query; head of the group; place in the workspace

    __device__ __forceinline__ Walk(const Args &a, const Tile &tile)
        : left(tile.count * a.group), m(tile.first + (tile.count - 1) * M), i(0),
          slot(tile.head * a.group * a.slots + tile.slot + m / M) {}

    __device__ __forceinline__ void next(const Args &a) {
        left--, slot += a.slots;
        if (++i == a.group) i = 0, m -= M, slot -= a.group * a.slots + 1;
    }
};
