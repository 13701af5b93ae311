// kv/tbq4_rotation.cuh -- the rotation of one TBQ4 block: signs, Hadamard butterflies. docs/tbq4.md.
// SPDX-License-Identifier: Apache-2.0
//
// Eight neighboring lanes hold a block: lane `sub` of them values sub * VALUES .. sub * VALUES + VALUES - 1. So the
// first butterflies stay inside of a lane and three go through shuffles. Signs are printed into the prelude from
// cuattn/_tbq4.py.
#ifndef CUATTN_KV_TBQ4_ROTATION_CUH
#define CUATTN_KV_TBQ4_ROTATION_CUH
#include "common/types.cuh"

namespace tbq4 {

constexpr int LANES = 8;
constexpr int VALUES = cfg::BLOCK / LANES;
static_assert(VALUES == 8 || VALUES == 16, "blocks have 64 or 128 values");

// Sum over the eight lanes of a block, the same in each.
__device__ __forceinline__ float block_sum(float x) {
#pragma unroll
  for (int bit = 1; bit < LANES; bit *= 2) x += __shfl_xor_sync(FULL_MASK, x, bit);
  return x;
}

// What the eight lanes of a block need for every block, kept in registers: multiplying by a sign costs nothing where
// the value must be scaled anyway, and flipping a bit would cost two instructions on the pipe that encoding is short
// of.
struct Signs {
  float first[VALUES];   // +-1
  float second[VALUES];  // +-1/sqrt(block)
  float pair[3];         // -1 where this lane holds b of the pairs (a + b, a - b) of a stage between lanes

  __device__ __forceinline__ Signs(const u32 (&s_first)[4], const u32 (&s_second)[4], int sub) {
    const auto bit = [sub](const u32(&mask)[4], int j) {
      u32 word = mask[0];
#pragma unroll
      for (int w = 1; w < cfg::BLOCK / 32; ++w) word = sub * VALUES / 32 == w ? mask[w] : word;
      return (word >> (sub * VALUES % 32 + j) & 1) != 0;
    };
#pragma unroll
    for (int j = 0; j < VALUES; ++j) {
      first[j] = bit(s_first, j) ? -1.f : 1.f;
      second[j] = bit(s_second, j) ? -cfg::ROOT : cfg::ROOT;
    }
#pragma unroll
    for (int i = 0; i < 3; ++i) pair[i] = (sub >> i & 1) != 0 ? -1.f : 1.f;
  }
};

// x <- H x, Sylvester's order, not normalized.
__device__ __forceinline__ void hadamard(float (&x)[VALUES], const Signs& signs) {
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
  for (int i = 0; i < 3; ++i) {
#pragma unroll
    for (int j = 0; j < VALUES; ++j) x[j] = fmaf(x[j], signs.pair[i], __shfl_xor_sync(FULL_MASK, x[j], 1 << i));
  }
}

}  // namespace tbq4

#endif
