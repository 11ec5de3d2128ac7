// Packed sequences: sequence i has the rows from cu[i] to cu[i + 1], and the tiles from cu[i] / rows + i on.

#include "cuda/include/tile_scheduler.cuh"

__device__ __forceinline__ int offset(const int *cu, int i, int n) { return min(max(load_coherent(cu + i), 0), n); }

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

// The first row of a tile in its sequence i. Tiles before the first sequence, if it does not begin at 0, lie like those no
// sequence needs: beyond its end.
__device__ __forceinline__ int first_row(const int *cu, int i, int n, int rows, int tile) {
    tile -= offset(cu, i, n) / rows + i;
    return tile < 0 ? n : tile * rows;
}
