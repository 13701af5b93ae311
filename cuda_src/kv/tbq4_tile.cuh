// kv/tbq4_tile.cuh -- a tile of sixteen TBQ4 blocks in a warp, whose rotation is half done by tensor cores.
// SPDX-License-Identifier: Apache-2.0
//
// A Hadamard matrix is a product of one butterfly stage for each bit of the index, in any order. The stages of the bits
// in which the lanes differ, and of one or two more, are a product with a matrix of signs: one MMA whose rows are the
// blocks; the others are butterflies inside of a lane. No shuffle is needed, and the signs that the format asks for in
// front of H are those of the rows of that matrix.
//
// Lane 4g + t holds values of blocks g and g + 8: as input elements 32c + 8t .. 32c + 8t + 7 for each c, so that four
// lanes read 64 bytes of a row of 16-bit elements together. Where its results lie is up to the columns of the matrix.
#ifndef CUATTN_KV_TBQ4_TILE_CUH
#define CUATTN_KV_TBQ4_TILE_CUH
#include "common/divisor.cuh"
#include "common/ptx.cuh"

namespace tbq4 {

constexpr u32 TILE_BLOCKS = 16;
constexpr int CHUNKS = cfg::BLOCK / 32;   // runs of eight elements of a lane
constexpr int PER_LANE = cfg::BLOCK / 4;  // elements of one block in a lane
constexpr int STEPS = PER_LANE / 4;       // steps of 16 elements of a block
constexpr u32 BLOCKS_PER_ROW = cfg::HEAD_DIM / cfg::BLOCK;
static_assert(cfg::BLOCK == 64 || cfg::BLOCK == 128, "blocks have 64 or 128 values");

// Shape of rows [dim0, dim1, heads].
struct Rows {
  Divisor heads, dim1;

  __device__ __forceinline__ Rows(int num_heads, int size1) : heads(num_heads), dim1(size1) {}
};

// A block of these rows.
struct Place {
  u32 part;  // which block of the row
  u32 head, i1, i0;

  __device__ __forceinline__ Place(u32 block, const Rows& rows) {
    part = block % BLOCKS_PER_ROW;
    i0 = rows.dim1.divide(rows.heads.divide(block / BLOCKS_PER_ROW, head), i1);
  }
};

// 1 where the element in row `in`, column `out` of a matrix diag(signs) H is -1; sign j is -1 where bit j is set.
__device__ __forceinline__ u32 is_negative(const u32 (&signs)[4], u32 in, u32 out) {
  return (signs[in / 32] >> in % 32 ^ static_cast<u32>(__popc(in & out))) & 1;
}

// The butterfly stages of the index bits in STAGES.
template <int STAGES, int N>
__device__ __forceinline__ void butterflies(float (&x)[N]) {
#pragma unroll
  for (int h = 1; h < N; h *= 2) {
    if (!(STAGES & h)) continue;
#pragma unroll
    for (int j = 0; j < N; ++j) {
      if (j & h) continue;
      const float a = x[j], b = x[j + h];
      x[j] = a + b;
      x[j + h] = a - b;
    }
  }
}

__device__ __forceinline__ u32 word_of(const uint4& v, int i) {
  return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}

}  // namespace tbq4

#endif
