// common/query_shift.cuh -- the power of two that brings a row of Q to the range of fp16.
// SPDX-License-Identifier: Apache-2.0
#ifndef CUATTN_COMMON_QUERY_SHIFT_CUH
#define CUATTN_COMMON_QUERY_SHIFT_CUH
#include "common/types.cuh"

// With it the largest value of a row is 2^14 or up to twice that, beside an infinity as if that were the largest
// number; rows of zeros, and of subnormal numbers, stay as they are.
__device__ __forceinline__ int query_shift(float largest) {
  const int exponent = min(static_cast<int>(__float_as_uint(largest) >> 23) - 127, 127);
  return exponent > -112 ? 14 - exponent : 0;
}

#endif
