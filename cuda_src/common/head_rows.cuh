// common/head_rows.cuh -- rows of K or of V of one KV head, and a row in the lanes of a warp.
// SPDX-License-Identifier: Apache-2.0
#ifndef CUATTN_COMMON_HEAD_ROWS_CUH
#define CUATTN_COMMON_HEAD_ROWS_CUH
#include "common/ptx.cuh"

// Where a token lies: the page, which for dense arrays is the sequence, and 0 for ragged ones, and its place there.
struct Place {
  int page, token;
};

// Rows of one KV head in all pages: of elements, codes or norms.
struct HeadPlane {
  const u8* first;  // of the first page
  i64 page_stride;  // bytes
  u32 row_stride;   // bytes from a token to the next, which 32 bits hold

  // By one instruction for a token and two for a page: the compiler would rather sum up products than addresses.
  __device__ __forceinline__ const u8* at(const Place& place) const {
    const u8* row = ptx::opaque(ptx::mad_wide(static_cast<u32>(place.token), row_stride, first));
    return ptx::opaque(row + static_cast<u64>(static_cast<u32>(place.page)) * page_stride);
  }
  // Of rows that begin `tokens` and some bytes later.
  __device__ __forceinline__ HeadPlane behind(u32 tokens, u32 bytes) const {
    return {ptx::opaque(ptx::mad_wide(tokens, row_stride, first) + bytes), page_stride, row_stride};
  }
};

// A row of K or of V.
struct HeadRow {
  const u8 *row, *norms;  // norms null: a format without
};

struct HeadPlanes {
  HeadPlane rows, norms;

  __device__ __forceinline__ HeadRow at(const Place& place) const { return {rows.at(place), norms.at(place)}; }
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
