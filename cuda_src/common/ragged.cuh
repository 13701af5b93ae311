// common/ragged.cuh -- sequences whose tokens follow each other in one array, and tiles of these.
// SPDX-License-Identifier: Apache-2.0
#ifndef CUATTN_COMMON_RAGGED_CUH
#define CUATTN_COMMON_RAGGED_CUH
#include "common/types.cuh"

// Where sequence `b` begins and how many of `all` tokens it has, whatever the array holds.
__device__ __forceinline__ void find_sequence(const int* cu_seqlens, int b, int all, int& first, int& count) {
  first = max(0, min(__ldg(cu_seqlens + b), all));
  count = max(first, min(__ldg(cu_seqlens + b + 1), all)) - first;
}

// A tile of one of several ragged sequences.
struct RaggedTile {
  int batch;         // of the sequence
  int first, count;  // its tokens
  int tile;          // of its own
};

// Finds tile `tile` among those of `batch` sequences of `all` tokens, of which one with `count` has tiles_of(count);
// false past the last. For a whole warp, which looks at as many sequences at once as it has lanes.
template <class TilesOf>
__device__ __forceinline__ bool find_ragged(const int* cu_seqlens, int batch, int all, int tile, TilesOf tiles_of,
                                            RaggedTile& found) {
  const int lane = threadIdx.x % WARP;
  for (int b0 = 0; b0 < batch; b0 += WARP) {
    int first = 0, count = 0;
    if (b0 + lane < batch) find_sequence(cu_seqlens, b0 + lane, all, first, count);
    const int tiles = tiles_of(count);
    int sum = tiles;  // of this lane and those before
#pragma unroll
    for (int by = 1; by < WARP; by *= 2) {
      const int before = __shfl_up_sync(FULL_MASK, sum, by);
      if (lane >= by) sum += before;
    }
    const u32 behind = __ballot_sync(FULL_MASK, tile < sum);
    if (behind != 0) {
      const int source = __ffs(static_cast<int>(behind)) - 1;
      found.batch = b0 + source;
      found.first = __shfl_sync(FULL_MASK, first, source);
      found.count = __shfl_sync(FULL_MASK, count, source);
      found.tile = tile - __shfl_sync(FULL_MASK, sum - tiles, source);
      return true;
    }
    tile -= __shfl_sync(FULL_MASK, sum, WARP - 1);
  }
  return false;
}

#endif
