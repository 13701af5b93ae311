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
  __device__ __forceinline__ explicit Divisor(int d) : Divisor(d, 0xffffffffu / d) {}
  // With its reciprocal from the host: parameters take no registers.
  __device__ __forceinline__ Divisor(int d, u32 from_host) : divisor(static_cast<u32>(d)), reciprocal(from_host) {}
  __device__ __forceinline__ u32 divide(u32 n, u32& remainder) const {
    const u32 quotient = __umulhi(n, reciprocal);
    remainder = n - quotient * divisor;
    if (remainder < divisor) return quotient;
    remainder -= divisor;
    return quotient + 1;
  }
};

#endif
