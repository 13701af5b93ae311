// common/tile16.cuh -- rows of 16-bit elements in shared memory, swizzled so that ldmatrix meets no bank conflict.
// SPDX-License-Identifier: Apache-2.0
#ifndef CUATTN_COMMON_TILE16_CUH
#define CUATTN_COMMON_TILE16_CUH
#include "common/types.cuh"

template <int HEAD_DIM>
struct Tile16 {
  static constexpr int ROW_BYTES = HEAD_DIM * 2;
  static constexpr int CHUNKS = ROW_BYTES / 16;
  static_assert(CHUNKS % 4 == 0, "head_dim must be a multiple of 32");

  // Byte offset of 16-byte chunk `chunk` of row `row`. ldmatrix reads one chunk of eight successive rows, which must
  // fall into eight different 16-byte columns of the 128-byte bank row. Rows of 64 mod 128 bytes alternate halves by
  // themselves and need two more bits; rows of 0 mod 128 bytes need all three.
  static __device__ __forceinline__ int offset(int row, int chunk) {
    const int key = CHUNKS % 8 == 0 ? row & 7 : (row >> 1) & 3;
    return row * ROW_BYTES + ((chunk ^ key) << 4);
  }
};

#endif
