// kv/tiles_sm90_raw16.cuh -- swizzled tiles of fp16 or bf16 rows, which TMA brings.
// SPDX-License-Identifier: Apache-2.0
#ifndef CUATTN_KV_TILES_SM90_RAW16_CUH
#define CUATTN_KV_TILES_SM90_RAW16_CUH
#include "common/elements.cuh"
#include "common/head_rows.cuh"

template <class Elem, int DIM>
struct SwizzledRaw16 {
  using Operand = Elem;
  static constexpr bool EXPANDED = false;
  struct Expander {
    __device__ __forceinline__ void begin() {}
    __device__ __forceinline__ void fetch(const HeadRows& /*from*/) {}
    __device__ __forceinline__ void expand(u8* /*tile*/, float& /*log2_scale*/) {}
  };

  template <int ROWS, class Source>
  static __device__ __forceinline__ void store_queries(u8* /*tile*/, int /*row0*/, int /*lane*/, float (&)[2], Source) {
  }
  template <int N>
  static __device__ __forceinline__ void restore(float (&)[N], int /*t*/) {}

  static __device__ __forceinline__ void load_row(LaneRow<DIM>& to, const HeadRows& from, int lane) {
#pragma unroll
    for (int i = 0; i < LaneRow<DIM>::VECTORS; ++i) {
      const int dim = LaneRow<DIM>::dim(i, lane);
      to.x[i] = dim < DIM ? load4(reinterpret_cast<const Elem*>(from.rows) + dim) : make_float4(0.f, 0.f, 0.f, 0.f);
    }
  }
  // Of this lane's part.
  static __device__ __forceinline__ bool is_bad(const HeadRows& from, int lane) {
    bool bad = false;
#pragma unroll 1
    for (int dim = lane; dim < DIM; dim += WARP) {
      bad |= (reinterpret_cast<const u16*>(from.rows)[dim] & ElemTraits<Elem>::EXPONENT) == ElemTraits<Elem>::EXPONENT;
    }
    return bad;
  }
};

#endif
