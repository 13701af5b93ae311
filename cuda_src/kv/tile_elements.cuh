// kv/tile_elements.cuh -- elements of tiles of 16-bit rows, one by one: for tiles in which a row may not see every key.
// SPDX-License-Identifier: Apache-2.0
#ifndef CUATTN_KV_TILE_ELEMENTS_CUH
#define CUATTN_KV_TILE_ELEMENTS_CUH
#include "common/ptx.cuh"
#include "common/tile16.cuh"

template <class Operand, int DIM>
struct TileElements {
  using Tile = Tile16<DIM>;

  // Whether `count` successive rows have neither infinities nor NaN; the same in all lanes.
  static __device__ __forceinline__ bool all_finite(const u8* tile, int row, int count, int lane) {
    constexpr u32 EXPONENT = ElemTraits<Operand>::EXPONENT * 0x10001u;  // all ones in infinities and NaN
    const uint4* chunks = reinterpret_cast<const uint4*>(tile + row * Tile::ROW_BYTES);
    u32 bad = 0;  // the highest bit of a half
#pragma unroll 4
    for (int i = lane; i < count * Tile::CHUNKS; i += WARP) {
      const uint4 x = chunks[i];
      bad |=
          all_ones(x.x | ~EXPONENT) | all_ones(x.y | ~EXPONENT) | all_ones(x.z | ~EXPONENT) | all_ones(x.w | ~EXPONENT);
    }
    return !__any_sync(FULL_MASK, bad != 0);
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

 private:
  // Not zero if a half of x has all bits set: then its complement is zero, and borrows from there on.
  static __device__ __forceinline__ u32 all_ones(u32 x) { return (~x - 0x00010001u) & x & 0x80008000u; }
};

#endif
