// kv/tiles_raw32.cuh -- tiles of rows of floats.
// SPDX-License-Identifier: Apache-2.0
#ifndef CUATTN_KV_TILES_RAW32_CUH
#define CUATTN_KV_TILES_RAW32_CUH
#include "common/tile16.cuh"
#include "kv/tiles_raw.cuh"

template <int DIM>
struct Raw32Tiles : RawTiles<Tile32<DIM>> {
  using Operand = float;
  using Tile = Tile32<DIM>;

  // Elements `dim` and `dim` + 1, of an even dim.
  static __device__ __forceinline__ float2 pair(const u8* tile, int row, int dim) {
    return *reinterpret_cast<const float2*>(tile + Tile::offset(row, dim / 4) + dim % 4 * 4);
  }
};

#endif
