// common/tile16.cuh -- rows of 16-bit elements in shared memory, swizzled so that ldmatrix meets no bank conflict.
// SPDX-License-Identifier: Apache-2.0
#ifndef CUATTN_COMMON_TILE16_CUH
#define CUATTN_COMMON_TILE16_CUH
#include "common/types.cuh"

// The row of a tile that stands in row `r` of 16 of an mma operand, in every format, since scores and probabilities of
// the same keys meet. Lanes t = 0 .. 3 that read operand rows 2t then read tile rows t, those that read 2t + 1 tile
// rows 5, 4, 7, 6: formats with short rows need that to meet no bank conflict (kv/tbq4.cuh), ldmatrix does not mind.
__device__ __forceinline__ int tile_row(int r) {
  const int pair = r >> 1 & 3;
  return (r & 8) + ((r & 1) != 0 ? 4 + (pair ^ 1) : pair);
}

template <int HEAD_DIM>
struct Tile16 {
  static constexpr int ROW_BYTES = HEAD_DIM * 2;
  static constexpr int CHUNKS = ROW_BYTES / 16;
  static constexpr int ROW_PERIOD = 8;  // rows whose chunks are swizzled alike are so far apart
  static constexpr int PERIOD = CHUNKS % 8 == 0 ? 8 : CHUNKS % 4 == 0 ? 4 : 2;  // chunks exchanged among themselves
  static_assert(CHUNKS % 2 == 0, "head_dim must be a multiple of 16");

  // Byte offset of 16-byte chunk `chunk` of row `row`. ldmatrix reads one chunk of eight successive rows, which must
  // fall into eight different 16-byte columns of the 128-byte bank row. Rows of 64 mod 128 bytes alternate halves by
  // themselves and need two more bits; rows of 0 mod 128 bytes need all three. Four successive rows of 32 or 96 mod
  // 128 bytes stand in every second column, and the next four in the same ones unless one bit is flipped.
  static __device__ __forceinline__ int offset(int row, int chunk) {
    const int key = PERIOD == 8 ? row & 7 : PERIOD == 4 ? (row >> 1) & 3 : (row >> 2) & 1;
    return row * ROW_BYTES + ((chunk ^ key) << 4);
  }

  // The same of chunk `first` + 2 `step`, from the offset of chunk `first`, 0 or 1: an XOR with one of few constants.
  static __device__ __forceinline__ u32 step_offset(u32 first_offset, int step) {
    return (first_offset ^ static_cast<u32>(2 * step % PERIOD * 16)) +
           static_cast<u32>(2 * step / PERIOD * PERIOD * 16);
  }
};

// Rows of floats lie as rows of twice as many halves: an mma of TF32 takes eight of them, one of 16 bits sixteen.
template <int HEAD_DIM>
using Tile32 = Tile16<2 * HEAD_DIM>;

// Rows of bytes lie as rows of half as many halves, which is what ldmatrix takes them for.
template <int HEAD_DIM>
using Tile8 = Tile16<HEAD_DIM / 2>;

// Rows that no mma reads as they are.
template <int BYTES>
struct PlainRows {
  static constexpr int ROW_BYTES = BYTES;
  static constexpr int CHUNKS = ROW_BYTES / 16;
  static constexpr int PERIOD = CHUNKS < 8 ? CHUNKS : 8;
  static __device__ __forceinline__ int offset(int row, int chunk) { return row * ROW_BYTES + chunk * 16; }
};

#endif
