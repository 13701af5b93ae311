// common/divisor.cuh -- division by a number that stays.
// SPDX-License-Identifier: Apache-2.0
#ifndef CUATTN_COMMON_DIVISOR_CUH
#define CUATTN_COMMON_DIVISOR_CUH
#include "common/types.cuh"

// Divides by a number that is the same for a whole kernel. Its reciprocal is rounded down, so that a quotient is too
// small by one at most.
struct Divisor {
  u32 divisor, reciprocal;

  Divisor() = default;
  __device__ __forceinline__ explicit Divisor(int d) : divisor(static_cast<u32>(d)), reciprocal(0xffffffffu / d) {}
  __device__ __forceinline__ u32 divide(u32 n, u32& remainder) const {
    const u32 quotient = __umulhi(n, reciprocal);
    remainder = n - quotient * divisor;
    if (remainder < divisor) return quotient;
    remainder -= divisor;
    return quotient + 1;
  }
};

#endif
