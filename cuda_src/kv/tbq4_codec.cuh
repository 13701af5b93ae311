// kv/tbq4_codec.cuh -- encode and decode of one TBQ4 block: rotation, 16 levels, norm. docs/tbq4.md.
// SPDX-License-Identifier: Apache-2.0
//
// Levels and boundaries are printed into the prelude from cuattn/_tbq4.py; levels are odd-symmetric, so that
// cfg::LEVELS and cfg::BOUNDARIES hold the positive halves.
#ifndef CUATTN_KV_TBQ4_CODEC_CUH
#define CUATTN_KV_TBQ4_CODEC_CUH
#include "common/ptx.cuh"
#include "kv/tbq4_rotation.cuh"

namespace tbq4 {

constexpr int CODE_BYTES = VALUES / 2;  // of one lane
constexpr u16 MAX_HALF = 0x7bff;        // 65504
constexpr u16 QUIET_NAN = 0x7e00;       // the one NaN of the format

// Where a lane works: rows are [dim0, dim1, heads], a row has PER_ROW blocks, a warp takes the four blocks from `first`
// on.
template <u32 PER_ROW>
struct Place {
  u32 block, row, part;  // part: which block of the row
  u32 dim;               // first value of this lane in the row
  u32 head, i1, i0;
  bool inside;  // lanes past the end repeat a block, for the shuffles' sake, and write nothing

  __device__ __forceinline__ Place(u32 first, u32 num_blocks, u32 lane, u32 heads, u32 dim1) {
    inside = first + lane / LANES < num_blocks;
    block = inside ? first + lane / LANES : first;
    row = block / PER_ROW;
    part = block % PER_ROW;
    dim = part * cfg::BLOCK + lane % LANES * VALUES;
    head = row % heads;
    i1 = row / heads % dim1;
    i0 = row / heads / dim1;
  }
};

// Index 0..7 of the level of |u|. A value on a boundary belongs to the level above it: for u < 0 that is the smaller
// magnitude, so that one less in the bits makes "at least" into "above". -0 is not below 0; NaN has the largest index.
__device__ __forceinline__ u32 magnitude_index(float u) {
  const u32 magnitude = (__float_as_uint(u) & 0x7fffffffu) - (u < 0.f ? 1u : 0u);
  const auto at_least = [magnitude](float boundary) { return magnitude >= __float_as_uint(boundary); };
  const bool high = at_least(cfg::BOUNDARIES[3]);
  const bool middle = at_least(high ? cfg::BOUNDARIES[5] : cfg::BOUNDARIES[1]);
  const float upper = middle ? cfg::BOUNDARIES[6] : cfg::BOUNDARIES[4];
  const float lower = middle ? cfg::BOUNDARIES[2] : cfg::BOUNDARIES[0];
  return (high ? 4 : 0) + (middle ? 2 : 0) + (at_least(high ? upper : lower) ? 1 : 0);
}

// The code of a value whose magnitude has `index`.
__device__ __forceinline__ u32 code_of(float u, u32 index) { return u < 0.f ? 7 - index : 8 + index; }

// What encoding looks up, in shared memory: squares of the levels, a copy for each lane, so that no two lanes meet in a
// bank.
using Squares = float[8][WARP];

// All threads of the block fill it together; a barrier must follow.
__device__ __forceinline__ void fill(Squares& squares, u32 num_threads) {
  for (u32 i = threadIdx.x; i < 8 * WARP; i += num_threads) squares[i / WARP][i % WARP] = cfg::LEVELS_SQUARED[i / WARP];
}

// A block as its lanes hold it: the codes of their own values, and all of them the norm.
struct Encoded {
  u32 codes[CODE_BYTES / 4];
  u16 norm;      // float16
  bool clamped;  // whether the norm was too large for float16
};

// Encodes the block that eight lanes hold in x, which is used up; the whole warp calls it together.
__device__ __forceinline__ Encoded encode(float (&x)[VALUES], const Signs& signs, const Squares& squares) {
  const u32 lane = threadIdx.x % WARP;
  float sum = 0.f;
#pragma unroll
  for (int j = 0; j < VALUES; ++j) sum += x[j] * x[j];
  const float norm = sqrtf(block_sum(sum));
  const float inverse = norm > cfg::MIN_NORM ? 1.f / norm : 0.f;
#pragma unroll
  for (int j = 0; j < VALUES; ++j) x[j] *= signs.first[j] * inverse;
  hadamard(x, signs);

  Encoded block;
  float length = 0.f;
#pragma unroll
  for (int word = 0; word < CODE_BYTES / 4; ++word) {
    block.codes[word] = 0;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float u = x[word * 8 + j] * signs.second[word * 8 + j];
      const u32 index = magnitude_index(u);
      block.codes[word] |= code_of(u, index) << (4 * j);
      length += squares[index][lane];
    }
  }
  // The decoded block gets the norm of the row.
  const float stored = norm / sqrtf(block_sum(length));
  block.norm = stored != stored ? QUIET_NAN : static_cast<u16>(ptx::pack2<Half>(stored, 0.f));
  block.clamped = stored == stored && block.norm > MAX_HALF && stored != __uint_as_float(0x7f800000u);
  if (block.clamped) block.norm = MAX_HALF;
  return block;
}

// Stores a block: `codes` is where this lane's own go, lane 0 of the eight stores the norm and counts a clamped one
// unless `clamped` is null.
__device__ __forceinline__ void store(const Encoded& block, u32 sub, u8* codes, u16* norm, int* clamped) {
  if constexpr (CODE_BYTES == 8) {
    *reinterpret_cast<uint2*>(codes) = make_uint2(block.codes[0], block.codes[CODE_BYTES / 4 - 1]);
  } else {
    *reinterpret_cast<u32*>(codes) = block.codes[0];
  }
  if (sub != 0) return;
  *norm = block.norm;
  if (block.clamped && clamped != nullptr) atomicAdd(clamped, 1);
}

}  // namespace tbq4

#endif
