// common/tf32.cuh -- products of floats on tensor cores: three of TF32 for one.
// SPDX-License-Identifier: Apache-2.0
//
// A float is hi + lo, each with the 11 bits that tensor cores look at. hi is rounded to nearest, so that lo has 12 bits
// and a sign: the sum is the float but for its last bit, and that with either sign. a b is then hi hi + hi lo + lo hi:
// lo lo is below 2^-22 of it, again with either sign. So each product has an error as that of its rounding to float32.
//
// Tensor cores cut a sum off where float32 rounds it, always toward zero: 2^-24 of it on average in each instruction,
// which adds up. So they add up little, from zero on, and ordinary additions the rest.
#ifndef CUATTN_COMMON_TF32_CUH
#define CUATTN_COMMON_TF32_CUH
#include "common/ptx.cuh"

namespace tf32 {

// Of N registers of an operand. An infinity has NaN for lo, and so have the largest floats, whose hi is infinite.
template <int N>
struct Split {
  u32 hi[N], lo[N];

  __device__ __forceinline__ explicit Split(const u32 (&x)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      hi[i] = (x[i] + 0x1000u) & 0xffffe000u;  // sign and magnitude: rounded to nearest, ties away from zero
      lo[i] = __float_as_uint(__uint_as_float(x[i]) - __uint_as_float(hi[i]));
    }
  }
};

// small += the products with a lo, which are 2^-11 of the others.
__device__ __forceinline__ void add_small(float (&small)[4], const Split<4>& a, const Split<2>& b) {
  ptx::mma_m16n8k8_tf32(small, a.lo, b.hi);
  ptx::mma_m16n8k8_tf32(small, a.hi, b.lo);
}

// sum += a b with one addition of float32 for eight products.
__device__ __forceinline__ void add(float (&sum)[4], const Split<4>& a, const Split<2>& b) {
  float products[4] = {0.f, 0.f, 0.f, 0.f};
  add_small(products, a, b);
  ptx::mma_m16n8k8_tf32(products, a.hi, b.hi);
#pragma unroll
  for (int e = 0; e < 4; ++e) sum[e] += products[e];
}

}  // namespace tf32

// d += a b, of 32 bytes of each row of `a` and column of `b`: sixteen elements of 16 bits, or eight floats.
template <class Operand>
__device__ __forceinline__ void multiply_add(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  if constexpr (SAME<Operand, float>) {
    tf32::add(d, tf32::Split<4>(a), tf32::Split<2>(b));
  } else {
    ptx::mma_m16n8k16<Operand>(d, a, b);
  }
}

#endif
