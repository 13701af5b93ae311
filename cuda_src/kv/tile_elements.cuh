// kv/tile_elements.cuh -- elements of tiles of 16-bit rows, one by one: for tiles in which a row may not see every key.
// SPDX-License-Identifier: Apache-2.0
#ifndef CUATTN_KV_TILE_ELEMENTS_CUH
#define CUATTN_KV_TILE_ELEMENTS_CUH
#include "common/ptx.cuh"
#include "common/tile16.cuh"

template <class Operand, int DIM>
struct TileElements {
  using Tile = Tile16<DIM>;

  // Whether this lane's part of a row has neither infinities nor NaN.
  static __device__ __forceinline__ bool is_finite(const u8* tile, int row, int lane) {
    constexpr u32 EXPONENT = ElemTraits<Operand>::EXPONENT;  // all ones in infinities and NaN
    bool finite = true;
    for (int pair = lane; pair < DIM / 2; pair += WARP) {
      const u32 x = *reinterpret_cast<const u32*>(tile + Tile::offset(row, pair / 4) + pair % 4 * 4);
      finite &= (x & EXPONENT) != EXPONENT && (x >> 16 & EXPONENT) != EXPONENT;
    }
    return finite;
  }

  // Elements `dim` and `dim` + 1, of an even dim.
  static __device__ __forceinline__ float2 pair(const u8* tile, int row, int dim) {
    const u32 x = *reinterpret_cast<const u32*>(tile + Tile::offset(row, dim / 8) + dim % 8 * 2);
    return make_float2(ptx::to_float(Operand{static_cast<u16>(x)}), ptx::to_float(Operand{static_cast<u16>(x >> 16)}));
  }

  static __device__ __forceinline__ void clear(u8* tile, int row, int lane) {
    for (int chunk = lane; chunk < Tile::CHUNKS; chunk += WARP) {
      *reinterpret_cast<uint4*>(tile + Tile::offset(row, chunk)) = make_uint4(0, 0, 0, 0);
    }
  }
};

#endif
