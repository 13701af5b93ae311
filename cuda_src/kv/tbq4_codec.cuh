// kv/tbq4_codec.cuh -- encode and decode of one TBQ4 block: signs, Hadamard butterflies, 16 levels, norm. docs/tbq4.md.
// SPDX-License-Identifier: Apache-2.0
//
// Eight neighboring lanes hold a block: lane `sub` of them values sub * VALUES .. sub * VALUES + VALUES - 1. So the
// first butterflies stay inside of a lane and three go through shuffles. Levels, boundaries and signs are printed into
// the prelude from cuattn/_tbq4.py; levels are odd-symmetric, so that cfg::LEVELS and cfg::BOUNDARIES hold the positive
// halves.
#ifndef CUATTN_KV_TBQ4_CODEC_CUH
#define CUATTN_KV_TBQ4_CODEC_CUH
#include "common/types.cuh"

namespace tbq4 {

constexpr int LANES = 8;
constexpr int VALUES = cfg::BLOCK / LANES;
constexpr int CODE_BYTES = VALUES / 2;  // of one lane
static_assert(VALUES == 8 || VALUES == 16, "blocks have 64 or 128 values");

// Sum over the eight lanes of a block, the same in each.
__device__ __forceinline__ float block_sum(float x) {
#pragma unroll
  for (int bit = 1; bit < LANES; bit *= 2) x += __shfl_xor_sync(FULL_MASK, x, bit);
  return x;
}

// Flips the values whose sign is -1; bit j of `mask` belongs to value j of the block.
__device__ __forceinline__ void apply_signs(float (&x)[VALUES], const u32 (&mask)[4], int sub) {
  u32 bits = 0;
#pragma unroll
  for (int word = 0; word < cfg::BLOCK / 32; ++word) {
    if (sub * VALUES / 32 == word) bits = mask[word] >> (sub * VALUES % 32);
  }
#pragma unroll
  for (int j = 0; j < VALUES; ++j) x[j] = __uint_as_float(__float_as_uint(x[j]) ^ (bits >> j << 31));
}

// x <- H x, Sylvester's order, not normalized.
__device__ __forceinline__ void hadamard(float (&x)[VALUES], int sub) {
#pragma unroll
  for (int h = 1; h < VALUES; h *= 2) {
#pragma unroll
    for (int j = 0; j < VALUES; ++j) {
      if (j & h) continue;
      const float a = x[j], b = x[j + h];
      x[j] = a + b;
      x[j + h] = a - b;
    }
  }
#pragma unroll
  for (int bit = 1; bit < LANES; bit *= 2) {
    // The lane with the bit set holds b of the pair (a + b, a - b).
    const u32 flip = (sub & bit) != 0 ? 0x80000000u : 0u;
#pragma unroll
    for (int j = 0; j < VALUES; ++j) {
      const float other = __shfl_xor_sync(FULL_MASK, x[j], bit);
      x[j] = other + __uint_as_float(__float_as_uint(x[j]) ^ flip);
    }
  }
}

// The code of a rotated value of a unit vector, and the square of its level. A value on a boundary belongs to the level
// above it: for u < 0 that is the smaller magnitude, so that one less in the bits makes "at least" into "above". NaN
// is 15.
__device__ __forceinline__ u32 encode(float u, float& level_squared) {
  const u32 bits = __float_as_uint(u);
  const u32 negative = u < 0.f ? 1u : 0u;  // -0 lies on the boundary 0 and goes up
  const u32 magnitude = (bits & 0x7fffffffu) - negative;
  u32 index = 0;
  level_squared = cfg::LEVELS[0] * cfg::LEVELS[0];
#pragma unroll
  for (int i = 0; i < 7; ++i) {
    const bool above = magnitude >= __float_as_uint(cfg::BOUNDARIES[i]);
    index = above ? i + 1 : index;
    level_squared = above ? cfg::LEVELS[i + 1] * cfg::LEVELS[i + 1] : level_squared;
  }
  return negative != 0 ? 7 - index : 8 + index;
}

// The level of a code.
__device__ __forceinline__ float decode(u32 code) {
  const u32 index = (code & 8) != 0 ? code & 7 : 7 - code;
  float level = cfg::LEVELS[0];
#pragma unroll
  for (int i = 1; i < 8; ++i) level = index == i ? cfg::LEVELS[i] : level;
  return (code & 8) != 0 ? level : -level;
}

}  // namespace tbq4

#endif
