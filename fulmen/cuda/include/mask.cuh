// Which keys a row sees: causal masks and windows. Query i stands at position i + shift among the keys.

// The keys seen up to `position`, if that is a limit.
template <bool LIMITED>
__device__ __forceinline__ int end_of_keys(int n_kv, int position) { return LIMITED ? max(0, min(n_kv, position)) : n_kv; }

// The last key that a row sees, of all up to `last`.
template <bool LIMITED>
__device__ __forceinline__ int last_key(int last, int position) { return LIMITED ? min(last, position) : last; }

struct Keys {
    int first[2], last[2];              // that the two rows of a lane see (softmax.cuh)
};

// Logits of the keys from `key` on that a row does not see become -infinity. FROM: there is a first key, too.
template <bool FROM, int N>
__device__ __forceinline__ void mask(float (&s)[N], int key, const Keys &seen) {
    key += 2 * (threadIdx.x % 4);
#pragma unroll
    for (int i = 0; i < N; i++) {
        const int at = key + 8 * (i / 4) + i % 2;
        if (at > seen.last[i / 2 % 2] || (FROM && at < seen.first[i / 2 % 2])) s[i] = -INFINITY_;
    }
}
