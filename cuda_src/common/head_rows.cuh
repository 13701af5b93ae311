// common/head_rows.cuh -- rows of K or of V of one KV head, and a row in the lanes of a warp.
// SPDX-License-Identifier: Apache-2.0
#ifndef CUATTN_COMMON_HEAD_ROWS_CUH
#define CUATTN_COMMON_HEAD_ROWS_CUH
#include "common/types.cuh"

struct HeadRows {
  const u8 *rows, *norms;        // of token 0; norms null: a format without
  int row_stride, norm_stride;   // bytes from a token to the next, which 32 bits hold

  __device__ __forceinline__ const u8* row(int token) const { return rows + static_cast<i64>(token) * row_stride; }
  __device__ __forceinline__ const u8* norm(int token) const { return norms + static_cast<i64>(token) * norm_stride; }
};

// Elements 4 lane .. 4 lane + 3 of every 128 of a row.
template <int DIM>
struct LaneRow {
  static constexpr int VECTORS = (DIM + 4 * WARP - 1) / (4 * WARP);
  float4 x[VECTORS];

  // The first element of vector i; past the row if this lane has none.
  static __device__ __forceinline__ int dim(int i, int lane) { return (i * WARP + lane) * 4; }
};

#endif
