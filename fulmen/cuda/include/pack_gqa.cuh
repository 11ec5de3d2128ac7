// PACK_GQA: the query heads that share a head of k and v share a tile, too, at fewer positions. Row r of a tile is
// position r / group, query head r % group; a group has 2, 4, ... or 64 heads, and grids count heads of k and v.

__device__ __forceinline__ int positions(const Args &a, int rows) { return PACK_GQA ? rows >> a.log_group : rows; }

// Which of the tile's query heads row r belongs to, counted from the first.
__device__ __forceinline__ int head_of_row(const Args &a, int r) { return PACK_GQA ? r & (a.group - 1) : 0; }

// The first query head of a tile, and its head of k and v.
__device__ __forceinline__ int query_head(const Args &a, int head) { return PACK_GQA ? head * a.group : head; }
__device__ __forceinline__ int kv_head(const Args &a, int head) { return PACK_GQA ? head : head / a.group; }
