// common/swizzled_tile.cuh -- tiles of 16-bit rows as TMA writes them and wgmma reads them, swizzled by 128 bytes.
// SPDX-License-Identifier: Apache-2.0
#ifndef CUATTN_COMMON_SWIZZLED_TILE_CUH
#define CUATTN_COMMON_SWIZZLED_TILE_CUH
#include "common/types.cuh"

// Columns lie in chunks of 64, rows of 128 bytes; 16-byte pieces of a row are permuted by the row.
template <int ROWS>
struct SwizzledTile {
  static constexpr int ROW_BYTES = 128, PIECES = ROW_BYTES / 16;

  // Byte offset of eight columns, `piece` of a row. Next to it in a group of 2, 4 or 8 is: XOR with a multiple of 16.
  static __device__ __forceinline__ u32 offset(int row, int piece) {
    return static_cast<u32>((piece / PIECES * ROWS + row) * ROW_BYTES + ((piece ^ row) % PIECES << 4));
  }
};

#endif
