// common/elements.cuh -- neighboring elements in memory, as floats.
// SPDX-License-Identifier: Apache-2.0
#ifndef CUATTN_COMMON_ELEMENTS_CUH
#define CUATTN_COMMON_ELEMENTS_CUH
#include "common/ptx.cuh"

__device__ __forceinline__ float4 load4(const float* p) { return *reinterpret_cast<const float4*>(p); }
template <class Elem>
__device__ __forceinline__ float4 load4(const Elem* p) {
  const uint2 raw = *reinterpret_cast<const uint2*>(p);
  const auto half = [](u32 word, int i) { return ptx::to_float(Elem{static_cast<u16>(word >> (16 * i))}); };
  return make_float4(half(raw.x, 0), half(raw.x, 1), half(raw.y, 0), half(raw.y, 1));
}
__device__ __forceinline__ void store4(float* p, float4 x) { *reinterpret_cast<float4*>(p) = x; }
template <class Elem>
__device__ __forceinline__ void store4(Elem* p, float4 x) {
  *reinterpret_cast<uint2*>(p) = make_uint2(ptx::pack2<Elem>(x.x, x.y), ptx::pack2<Elem>(x.z, x.w));
}
__device__ __forceinline__ void store2(float* p, float x, float y) {
  *reinterpret_cast<float2*>(p) = make_float2(x, y);
}
template <class Elem>
__device__ __forceinline__ void store2(Elem* p, float x, float y) {
  *reinterpret_cast<u32*>(p) = ptx::pack2<Elem>(x, y);
}

// Sets accumulators to zero.
template <int A, int B>
__device__ __forceinline__ void clear(float (&x)[A][B][4]) {
#pragma unroll
  for (int a = 0; a < A; ++a) {
#pragma unroll
    for (int b = 0; b < B; ++b) {
#pragma unroll
      for (int e = 0; e < 4; ++e) x[a][b][e] = 0.f;
    }
  }
}

#endif
