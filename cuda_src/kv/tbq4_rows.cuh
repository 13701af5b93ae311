// kv/tbq4_rows.cuh -- rows of Q on their way into the rotated domain of TBQ4, and rows of O on their way back.
// SPDX-License-Identifier: Apache-2.0
#ifndef CUATTN_KV_TBQ4_ROWS_CUH
#define CUATTN_KV_TBQ4_ROWS_CUH
#include "common/query_rows.cuh"
#include "kv/tbq4_rotation.cuh"

namespace tbq4 {

template <class Elem, int HEAD_DIM>
struct RotatedRows : QueryRows<Elem, HEAD_DIM, cfg::BLOCK> {
  using Queries = QueryRows<Elem, HEAD_DIM, cfg::BLOCK>;
  static constexpr int PARTS = HEAD_DIM / cfg::BLOCK;

  // A lane has four neighboring values of each block, and where blocks are small only some lanes have any.
  static constexpr int ROTATING = cfg::BLOCK / 4;

  struct Rotation {
    Signs<ROTATING> signs;

    __device__ __forceinline__ explicit Rotation(int lane) : signs(cfg::SIGNS1, cfg::SIGNS2, lane % ROTATING) {}
    __device__ __forceinline__ float sign(int j) const { return signs.first[j]; }
    __device__ __forceinline__ void enter(float (&x)[4]) const {
      hadamard(x, signs);
#pragma unroll
      for (int j = 0; j < 4; ++j) x[j] *= signs.second[j];
    }
  };

  // Rotates `rows` rows of Q and stores them as QueryRows does.
  template <class Order, class Mean, class Source>
  static __device__ __forceinline__ void store_rotated(u8* tile, float* scale, float* bias, Mean mean_of, int rows,
                                                       Source source, typename Queries::QueryPart query) {
    const auto no_factor = [](int) { return 1.f; };
    Queries::template store<Order, Rotation>(tile, scale, bias, mean_of, no_factor, rows, source, query);
  }

  // Rotates a row of O back: a lane has values 128 i + 4 lane .. 128 i + 4 lane + 3 for each i.
  static __device__ __forceinline__ void restore(float (&x)[PARTS][4], int lane) { restore_row(x, lane); }
};

}  // namespace tbq4

#endif
