// kv/tbq4_rotation.cuh -- the rotation of one TBQ4 block: signs, Hadamard butterflies. docs/tbq4.md.
// SPDX-License-Identifier: Apache-2.0
//
// LANES neighboring lanes hold a block: lane `sub` of them values sub * VALUES .. sub * VALUES + VALUES - 1. So the
// first butterflies stay inside of a lane and the others go through shuffles. Signs are printed into the prelude from
// cuattn/_tbq4.py.
#ifndef CUATTN_KV_TBQ4_ROTATION_CUH
#define CUATTN_KV_TBQ4_ROTATION_CUH
#include "common/types.cuh"

namespace tbq4 {

static_assert(cfg::BLOCK == 64 || cfg::BLOCK == 128, "blocks have 64 or 128 values");

// What the lanes of a block need for every block, kept in registers: multiplying by a sign costs nothing where the
// value must be scaled anyway, and flipping a bit would cost two instructions on the pipe that encoding is short of.
template <int LANES>
struct Signs {
  static constexpr int VALUES = cfg::BLOCK / LANES;
  static constexpr int STAGES = LANES == 8 ? 3 : LANES == 16 ? 4 : 5;  // between lanes
  static_assert(1 << STAGES == LANES, "blocks lie in 8, 16 or 32 lanes");
  float first[VALUES];   // +-1
  float second[VALUES];  // +-1/sqrt(block)
  float pair[STAGES];    // -1 where this lane holds b of the pairs (a + b, a - b) of a stage between lanes

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
    for (int i = 0; i < STAGES; ++i) pair[i] = (sub >> i & 1) != 0 ? -1.f : 1.f;
  }
};

// x <- H x, Sylvester's order, not normalized; or only the stages of the bits of the index that BITS has.
template <int LANES, int BITS = ~0>
__device__ __forceinline__ void hadamard(float (&x)[cfg::BLOCK / LANES], const Signs<LANES>& signs) {
  constexpr int VALUES = Signs<LANES>::VALUES;
#pragma unroll
  for (int h = 1; h < VALUES; h *= 2) {
    if (!(BITS & h)) continue;
#pragma unroll
    for (int j = 0; j < VALUES; ++j) {
      if (j & h) continue;
      const float a = x[j], b = x[j + h];
      x[j] = a + b;
      x[j + h] = a - b;
    }
  }
#pragma unroll
  for (int i = 0; i < Signs<LANES>::STAGES; ++i) {
    if (!(BITS & VALUES << i)) continue;
#pragma unroll
    for (int j = 0; j < VALUES; ++j) x[j] = fmaf(x[j], signs.pair[i], __shfl_xor_sync(FULL_MASK, x[j], 1 << i));
  }
}

// Rotates a row back, in the lanes of a warp: a lane has values 128 i + 4 lane .. 128 i + 4 lane + 3 for each i, and
// where blocks are small only some lanes have any.
template <int BLOCKS>
__device__ __forceinline__ void restore_row(float (&x)[BLOCKS][4], int lane) {
  constexpr int ROTATING = cfg::BLOCK / 4;
  const Signs<ROTATING> signs(cfg::SIGNS2, cfg::SIGNS1, lane % ROTATING);  // exchanged: the transpose
#pragma unroll
  for (int part = 0; part < BLOCKS; ++part) {
#pragma unroll
    for (int j = 0; j < 4; ++j) x[part][j] *= signs.first[j];
    hadamard(x[part], signs);
#pragma unroll
    for (int j = 0; j < 4; ++j) x[part][j] *= signs.second[j];
  }
}

}  // namespace tbq4

#endif
