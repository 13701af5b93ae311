// common/query_rows.cuh -- rows of Q as fp16, each with a factor of its own that brings it to fp16's range.
// SPDX-License-Identifier: Apache-2.0
#ifndef CUATTN_COMMON_QUERY_ROWS_CUH
#define CUATTN_COMMON_QUERY_ROWS_CUH
#include "common/ptx.cuh"
#include "common/query_shift.cuh"
#include "common/tile16.cuh"

// A warp has a row: a lane four neighboring values of each SPAN of them, as far as there are any.
template <class Elem, int HEAD_DIM, int SPAN>
struct QueryRows {
  static constexpr int PARTS = (HEAD_DIM + SPAN - 1) / SPAN;

  static __device__ __forceinline__ bool has(int part, int lane) {
    if constexpr (HEAD_DIM % SPAN == 0) return lane < SPAN / 4;
    return part * SPAN + lane * 4 < HEAD_DIM;
  }

  // A lane's part of a row, on its way from global memory.
  struct QueryPart {
    uint2 raw[PARTS];

    __device__ __forceinline__ QueryPart(const u8* row, int lane) {
#pragma unroll
      for (int part = 0; part < PARTS; ++part) {
        raw[part] = make_uint2(0, 0);
        if (row != nullptr && has(part, lane)) raw[part] = ptx::ld_global_nc_v2(row + (part * SPAN + lane * 4) * 2);
      }
    }
    __device__ __forceinline__ float get(int part, int j) const {
      const u32 word = j < 2 ? raw[part].x : raw[part].y;
      return ptx::to_float(Elem{static_cast<u16>(word >> j % 2 * 16)});
    }
  };
  // What this thread needs first for store. source(row) is the address of a row, null for zeros.
  template <class Source>
  static __device__ __forceinline__ QueryPart fetch_queries(int rows, Source source) {
    const int row = threadIdx.x / WARP;
    return QueryPart(row < rows ? source(row) : nullptr, threadIdx.x % WARP);
  }

  // Stores `rows` rows in a shared tile as fp16, of values times domain.sign after domain.enter, scaled by a power of
  // two, so that neither large nor small ones leave fp16's range. scale[row] undoes the scaling in the scores, times
  // factor_of(row); bias[row] is q . mean_of(row), zero where that is null. The value of head_dim `dim` goes to place
  // Order::position(dim) of its row; those of a pair stay one.
  template <class Order, class Domain, class Mean, class Factor, class Source>
  static __device__ __forceinline__ void store(u8* tile, float* scale, float* bias, Mean mean_of, Factor factor_of,
                                               int rows, Source source, QueryPart query) {
    const int lane = threadIdx.x % WARP;
    const Domain domain(lane);
#pragma unroll 1
    for (int row = threadIdx.x / WARP; row < rows; row += cfg::NUM_WARPS) {
      float x[PARTS][4];
      float dot = 0.f, largest = 0.f;
      const float* mean = mean_of(row);
#pragma unroll
      for (int part = 0; part < PARTS; ++part) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float value = query.get(part, j);
          if (mean != nullptr && has(part, lane)) dot += value * __ldg(mean + part * SPAN + lane * 4 + j);
          x[part][j] = value * domain.sign(j);
        }
      }
      if (row + cfg::NUM_WARPS < rows) query = QueryPart(source(row + cfg::NUM_WARPS), lane);
#pragma unroll
      for (int part = 0; part < PARTS; ++part) {
        domain.enter(x[part]);
#pragma unroll
        for (int j = 0; j < 4; ++j) largest = fmaxf(largest, fabsf(x[part][j]));
      }
#pragma unroll
      for (int bit = 1; bit < WARP; bit *= 2) {
        largest = fmaxf(largest, __shfl_xor_sync(FULL_MASK, largest, bit));
        if (mean != nullptr) dot += __shfl_xor_sync(FULL_MASK, dot, bit);
      }
      const int shift = query_shift(largest);
      const float down = __uint_as_float(static_cast<u32>(127 + shift) << 23);
#pragma unroll
      for (int part = 0; part < PARTS; ++part) {
        if (!has(part, lane)) continue;
#pragma unroll
        for (int j = 0; j < 4; j += 2) {
          const int place = Order::position(part * SPAN + lane * 4 + j);
          *reinterpret_cast<u32*>(tile + Tile16<HEAD_DIM>::offset(row, place / 8) + place % 8 * 2) =
              ptx::pack2<Half>(x[part][j] * down, x[part][j + 1] * down);
        }
      }
      if (lane == 0) {
        scale[row] = __uint_as_float(static_cast<u32>(127 - shift) << 23) * factor_of(row);
        bias[row] = dot;
      }
    }
  }
};

#endif
