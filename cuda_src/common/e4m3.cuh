// common/e4m3.cuh -- fp8 e4m3 (OCP) from and to wider types.
// SPDX-License-Identifier: Apache-2.0
//
// A sign, four bits of exponent with a bias of 7, three of mantissa. There are no infinities: 0x7f and 0xff are NaN,
// the largest number is 448. Every number is a float16.
#ifndef CUATTN_COMMON_E4M3_CUH
#define CUATTN_COMMON_E4M3_CUH
#include "common/ptx.cuh"

namespace e4m3 {

// In the highest bit of each byte, whether the code is NaN.
__device__ __forceinline__ u32 is_nan(u32 codes) { return (codes & 0x7f7f7f7fu) + 0x01010101u; }

// The same as widen, for GPUs before Ada: the bits of a code go where those of a half are, one place further down for
// the wider exponent, which makes numbers 2^-8 of what they should be; and NaN, whose exponent has four ones then, gets
// the fifth.
__device__ __forceinline__ void widen_bits(u32 (&pairs)[2], u32 codes) {
  constexpr u32 SIGNS_OF_BYTES = 0x80808080u, SIGNS = 0x80008000u, TWO_TO_8 = 0x5c005c00u;
  const u32 sizes = ptx::select_bits(is_nan(codes), codes, SIGNS_OF_BYTES);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const u32 to_upper_bytes = i == 0 ? 0x1404u : 0x3424u;
    const u32 half_sizes = ptx::prmt(sizes, 0, to_upper_bytes) >> 1;
    pairs[i] = ptx::mul_half2(ptx::select_bits(ptx::prmt(codes, 0, to_upper_bytes), half_sizes, SIGNS), TWO_TO_8);
  }
}

// Four neighboring codes as halves, exactly; a pair has two neighbors.
__device__ __forceinline__ void widen(u32 (&pairs)[2], u32 codes) {
  if constexpr (ptx::CONVERTS_E4M3) {
    ptx::halves_of_e4m3(pairs, codes);
  } else {
    widen_bits(pairs, codes);
  }
}

// The code nearest to x, of two the even one; 448 of its sign for what is larger, NaN for NaN. For GPUs before Ada.
__device__ __forceinline__ u32 nearest(float x) {
  constexpr float LARGEST = 448.f, SMALLEST_NORMAL = 0x1p-6f;
  constexpr float ULP_OF_SUBNORMALS = 0x1p14f;  // has the ulp 2^-9: what is added to it is rounded to theirs
  if (x != x) return 0x7f;
  const u32 sign = __float_as_uint(x) >> 24 & 0x80;
  const float size = fminf(fabsf(x), LARGEST);
  const u32 bits = __float_as_uint(size);
  const u32 normal = ((bits + 0x7ffff + (bits >> 20 & 1)) >> 20) - ((127 - 7) << 3);
  const u32 subnormal = __float_as_uint(size + ULP_OF_SUBNORMALS) - __float_as_uint(ULP_OF_SUBNORMALS);
  return sign | (size < SMALLEST_NORMAL ? subnormal : normal);
}

// Two codes in the lower bytes of a word.
__device__ __forceinline__ u32 narrow(float lo, float hi) {
  if constexpr (ptx::CONVERTS_E4M3) {
    return ptx::pack_e4m3(lo, hi);
  } else {
    return nearest(lo) | nearest(hi) << 8;
  }
}

}  // namespace e4m3

#endif
