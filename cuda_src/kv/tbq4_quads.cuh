// kv/tbq4_quads.cuh -- the rotation of TBQ4 for rows in four lanes each, as accumulators of a warp have them.
// SPDX-License-Identifier: Apache-2.0
#ifndef CUATTN_KV_TBQ4_QUADS_CUH
#define CUATTN_KV_TBQ4_QUADS_CUH
#include "common/ptx.cuh"

namespace tbq4 {

// A block in four lanes: value v of lane t is element v % RUN + RUN (t + 4 (v / RUN)), so that lanes have runs of
// neighboring elements in turn. A Hadamard matrix is a butterfly stage for each bit of the index, in any order: two of
// them go through shuffles.
template <int RUN>
struct QuadBlock {
  static constexpr int VALUES = cfg::BLOCK / 4;
  static_assert(RUN == 2 || RUN == 8, "a word of a row of 32 bits, or of 128");

  float x[VALUES];

  // Q's way, and O's way back: the transpose.
  __device__ __forceinline__ void rotate(int t) { turn(cfg::SIGNS1, cfg::SIGNS2, t); }
  __device__ __forceinline__ void restore(int t) { turn(cfg::SIGNS2, cfg::SIGNS1, t); }

 private:
  __device__ __forceinline__ void turn(const u32 (&first)[4], const u32 (&second)[4], int lane) {
    // Known here only: the compiler would keep signs in registers between rows.
    const int t = static_cast<int>(ptx::opaque(static_cast<u32>(lane)));
    flip(first, t);
#pragma unroll
    for (int h = 1; h < VALUES; h *= 2) {
#pragma unroll
      for (int v = 0; v < VALUES; ++v) {
        if ((v & h) != 0) continue;
        const float a = x[v], b = x[v + h];
        x[v] = a + b;
        x[v + h] = a - b;
      }
    }
#pragma unroll
    for (int bit = 1; bit < 4; bit *= 2) {
      const float sign = (t & bit) != 0 ? -1.f : 1.f;
#pragma unroll
      for (int v = 0; v < VALUES; ++v) x[v] = fmaf(x[v], sign, __shfl_xor_sync(FULL_MASK, x[v], bit));
    }
    flip(second, t);
#pragma unroll
    for (int v = 0; v < VALUES; ++v) x[v] *= cfg::ROOT;
  }

  // Signs of the elements; bit j of all words is set where that of element j is -1.
  __device__ __forceinline__ void flip(const u32 (&signs)[4], int t) {
#pragma unroll
    for (int v = 0; v < VALUES; ++v) {
      const int element = v % RUN + RUN * 4 * (v / RUN);  // of lane 0
      const u32 from_here = signs[element / 32] >> (RUN * t);
      x[v] = __uint_as_float(__float_as_uint(x[v]) ^ (from_here << (31 - element % 32) & 0x80000000u));
    }
  }
};

}  // namespace tbq4

#endif
