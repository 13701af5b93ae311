// kv/raw16.cuh -- K/V rows of fp16 or bf16.
// SPDX-License-Identifier: Apache-2.0
#ifndef CUATTN_KV_RAW16_CUH
#define CUATTN_KV_RAW16_CUH
#include "kv/raw.cuh"

template <class Elem, int HEAD_DIM>
struct Raw16 : RawRows<Tile16<HEAD_DIM>, HEAD_DIM> {
  using Tile = Tile16<HEAD_DIM>;
  using Operand = Elem;

  // A operands of O^T = V^T P^T: 16 of head_dim each, 16 tokens.
  struct ValueLane {
    int row, chunk;
    __device__ __forceinline__ ValueLane(const u8* /*table*/, int lane)
        : row(tile_row(lane % 8 + lane / 16 * 8)), chunk(lane / 8 % 2) {}
  };
  struct Values {
    const u8* tile;
    int row;

    __device__ __forceinline__ void load(const u8* v_tile, int row0, int /*part*/, const ValueLane& lane) {
      tile = v_tile;
      row = row0 + lane.row;
    }
    __device__ __forceinline__ void get(u32 (&a)[4], int mb, const ValueLane& lane) const {
      ptx::ldmatrix_x4_trans(a, tile + Tile::offset(row, 2 * mb + lane.chunk));
    }
  };

  // One element of a tile.
  static __device__ __forceinline__ float value(const u8* tile, int row, int dim) {
    return ptx::to_float(*reinterpret_cast<const Elem*>(tile + Tile::offset(row, dim / 8) + dim % 8 * 2));
  }

  // Whether no element of a tile of `rows` is infinite or NaN; the answer is the same in all lanes.
  static __device__ __forceinline__ bool all_finite(const u8* tile, int rows, int lane) {
    constexpr u32 EXPONENT = ElemTraits<Elem>::EXPONENT;  // all ones in infinities and NaN
    bool finite = true;
    for (int offset = lane * 4; offset < rows * Tile::ROW_BYTES; offset += WARP * 4) {
      const u32 pair = *reinterpret_cast<const u32*>(tile + offset);
      finite &= (pair & EXPONENT) != EXPONENT && (pair >> 16 & EXPONENT) != EXPONENT;
    }
    return __all_sync(FULL_MASK, finite);
  }
};

#endif
