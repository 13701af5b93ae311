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
    static constexpr int CODE_BYTES = 0, TILE_BYTES = 0;

    __device__ __forceinline__ void begin(const HeadPlanes& /*from*/) {}
    template <bool WHOLE>
    __device__ __forceinline__ void fetch_codes(u8* /*slot*/, const Place& /*at*/, int /*count*/ = 0) {}
    template <bool WHOLE>
    __device__ __forceinline__ void fetch_norms(const Place& /*at*/, int /*count*/ = 0) {}
    template <bool FOLLOWS>
    __device__ __forceinline__ void scale_norms() {}
    __device__ __forceinline__ void take_codes(const u8* /*slot*/) {}
    __device__ __forceinline__ void expand(u8* /*tile*/, float& /*log2_scale*/) {}
  };

  template <int ROWS, class Source>
  static __device__ __forceinline__ void store_queries(u8* /*tile*/, int /*row0*/, int /*lane*/, float (&)[2], Source) {
  }
  template <int N>
  static __device__ __forceinline__ void restore(float (&)[N], int /*t*/) {}

  static __device__ __forceinline__ void load_row(LaneRow<DIM>& to, const HeadRow& from, int lane) {
#pragma unroll
    for (int i = 0; i < LaneRow<DIM>::VECTORS; ++i) {
      const int dim = LaneRow<DIM>::dim(i, lane);
      to.x[i] = dim < DIM ? load4(reinterpret_cast<const Elem*>(from.row) + dim) : make_float4(0.f, 0.f, 0.f, 0.f);
    }
  }
  // Of this lane's part.
  static __device__ __forceinline__ bool is_bad(const HeadRow& from, int lane) {
    bool bad = false;
#pragma unroll 1
    for (int dim = lane; dim < DIM; dim += WARP) {
      bad |= (reinterpret_cast<const u16*>(from.row)[dim] & ElemTraits<Elem>::EXPONENT) == ElemTraits<Elem>::EXPONENT;
    }
    return bad;
  }
};

#endif
