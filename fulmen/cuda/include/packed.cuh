// Packed sequences: sequence i has the rows from cu[i] to cu[i + 1], and the tiles from cu[i] / rows + i on.

__device__ __forceinline__ int offset(const int *cu, int i, int n) { return min(max(__ldg(cu + i), 0), n); }

// The last sequence whose tiles, of `rows` rows each, begin at `tile` or before.
__device__ __forceinline__ int sequence_of_tile(const int *cu, int sequences, int n, int rows, int tile) {
    int low = 0, high = sequences - 1;
    while (low < high) {
        int middle = (low + high + 1) / 2;
        if (offset(cu, middle, n) / rows + middle <= tile) low = middle;
        else high = middle - 1;
    }
    return low;
}
