// common/head_rows.cuh -- rows of K or of V of one KV head, and a row in the lanes of a warp.
// SPDX-License-Identifier: Apache-2.0
#ifndef CUATTN_COMMON_HEAD_ROWS_CUH
#define CUATTN_COMMON_HEAD_ROWS_CUH
#include "common/ptx.cuh"

struct HeadRows {
  const u8 *rows, *norms;       // the first ones; norms null: a format without
  u32 row_stride, norm_stride;  // bytes from a token to the next, which 32 bits hold
  int count;                    // of rows that are there

  // By one instruction: the compiler would rather sum up numbers of rows than addresses.
  __device__ __forceinline__ HeadRows opaque() const {
    return {ptx::opaque(rows), ptx::opaque(norms), row_stride, norm_stride, count};
  }
  __device__ __forceinline__ const u8* row(u32 i) const { return rows + static_cast<u64>(i) * row_stride; }
  __device__ __forceinline__ const u8* norm(u32 i) const { return norms + static_cast<u64>(i) * norm_stride; }
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
