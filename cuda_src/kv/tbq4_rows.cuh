// kv/tbq4_rows.cuh -- rows of Q on their way into the rotated domain of TBQ4, and rows of O on their way back.
// SPDX-License-Identifier: Apache-2.0
#ifndef CUATTN_KV_TBQ4_ROWS_CUH
#define CUATTN_KV_TBQ4_ROWS_CUH
#include "common/ptx.cuh"
#include "common/tile16.cuh"
#include "kv/tbq4_rotation.cuh"

namespace tbq4 {

template <class Elem, int HEAD_DIM>
struct RotatedRows {
  static constexpr int PARTS = HEAD_DIM / cfg::BLOCK;

  // A warp rotates a row: a lane has four neighboring values of each block, and where blocks are small only some lanes
  // have any.
  static constexpr int ROTATING = cfg::BLOCK / 4;
  using RowSigns = Signs<ROTATING>;

  // A lane's part of a row of Q, on its way from global memory.
  struct QueryPart {
    uint2 raw[PARTS];

    __device__ __forceinline__ QueryPart(const u8* row, int lane) {
#pragma unroll
      for (int part = 0; part < PARTS; ++part) {
        raw[part] = make_uint2(0, 0);
        if (row != nullptr && lane < ROTATING)
          raw[part] = ptx::ld_global_nc_v2(row + (part * cfg::BLOCK + lane * 4) * 2);
      }
    }
    __device__ __forceinline__ float get(int part, int j) const {
      const u32 word = j < 2 ? raw[part].x : raw[part].y;
      return ptx::to_float(Elem{static_cast<u16>(word >> j % 2 * 16)});
    }
  };
  // What this thread needs first for store_rotated. source(row) is the address of a row, null for zeros.
  template <class Source>
  static __device__ __forceinline__ QueryPart fetch_queries(int rows, Source source) {
    const int row = threadIdx.x / WARP;
    return QueryPart(row < rows ? source(row) : nullptr, threadIdx.x % WARP);
  }

  // Rotates `rows` rows of Q and stores them as fp16 in a shared tile, scaled by a power of two, so that neither large
  // nor small ones leave fp16's range. scale[row] undoes the scaling in the scores; bias[row] is q . mean_of(row), zero
  // where that is null.
  // The value of head_dim `dim` goes to place Order::position(dim) of its row; those of a pair stay one.
  template <class Order, class Mean, class Source>
  static __device__ __forceinline__ void store_rotated(u8* tile, float* scale, float* bias, Mean mean_of, int rows,
                                                       Source source, QueryPart query) {
    const int lane = threadIdx.x % WARP;
    const RowSigns signs(cfg::SIGNS1, cfg::SIGNS2, lane % ROTATING);
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
          if (mean != nullptr && lane < ROTATING) dot += value * __ldg(mean + part * cfg::BLOCK + lane * 4 + j);
          x[part][j] = value * signs.first[j];
        }
      }
      if (row + cfg::NUM_WARPS < rows) query = QueryPart(source(row + cfg::NUM_WARPS), lane);
#pragma unroll
      for (int part = 0; part < PARTS; ++part) {
        hadamard(x[part], signs);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          x[part][j] *= signs.second[j];
          largest = fmaxf(largest, fabsf(x[part][j]));
        }
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
        if (lane >= ROTATING) continue;
#pragma unroll
        for (int j = 0; j < 4; j += 2) {
          const int place = Order::position(part * cfg::BLOCK + lane * 4 + j);
          *reinterpret_cast<u32*>(tile + Tile16<HEAD_DIM>::offset(row, place / 8) + place % 8 * 2) =
              ptx::pack2<Half>(x[part][j] * down, x[part][j + 1] * down);
        }
      }
      if (lane == 0) {
        scale[row] = __uint_as_float(static_cast<u32>(127 - shift) << 23);
        bias[row] = dot;
      }
    }
  }

  // Rotates a row of O back: a lane has values 128 i + 4 lane .. 128 i + 4 lane + 3 for each i.
  static __device__ __forceinline__ void restore(float (&x)[PARTS][4], int lane) { restore_row(x, lane); }
};

}  // namespace tbq4

#endif
