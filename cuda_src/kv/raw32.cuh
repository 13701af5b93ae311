// kv/raw32.cuh -- K/V rows of floats.
// SPDX-License-Identifier: Apache-2.0
#ifndef CUATTN_KV_RAW32_CUH
#define CUATTN_KV_RAW32_CUH
#include "kv/raw.cuh"

template <int HEAD_DIM>
struct Raw32 : RawRows<Tile32<HEAD_DIM>, HEAD_DIM> {
  using Tile = Tile32<HEAD_DIM>;
  using Operand = float;

  // Which row of eight of an operand of keys, see tile_row, stands at k = t (`upper` 0) or t + 4 (1) of V^T P^T: so
  // that the four t read rows of tiles whose chunks are exchanged by different upper bits, from different banks.
  static __device__ __forceinline__ int operand_row(int t, int upper) { return t % 2 + t / 2 * 4 + 2 * upper; }

  // A operands of O^T = V^T P^T: 16 of head_dim each, 8 tokens.
  struct ValueLane {
    u32 places[2];  // of its elements of rows t and t + 4 of the operand
    __device__ __forceinline__ ValueLane(const u8* /*table*/, int lane) {
#pragma unroll
      for (int upper = 0; upper < 2; ++upper) {
        const int g = lane / 4, row = tile_row(operand_row(lane % 4, upper));
        places[upper] = static_cast<u32>(Tile::offset(row, g / 4) + g % 4 * 4);
      }
    }
  };
  // Of tokens row0 .. row0 + 7.
  static __device__ __forceinline__ void get_values(u32 (&a)[4], const u8* tile, int row0, int mb,
                                                    const ValueLane& lane) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const u32 place = Tile::step_offset(lane.places[i / 2], 2 * mb + i % 2);  // chunks come in pairs
      a[i] = *reinterpret_cast<const u32*>(tile + row0 * Tile::ROW_BYTES + place);
    }
  }

  // Whether all elements of a tile of `rows` are the sum of two parts (common/tf32.cuh): neither infinite nor NaN, nor
  // among the largest floats. The answer is the same in all lanes.
  static __device__ __forceinline__ bool all_finite(const u8* tile, int rows, int lane) {
    u32 largest = 0;
#pragma unroll 4
    for (int offset = lane * 16; offset < rows * Tile::ROW_BYTES; offset += WARP * 16) {
      const uint4 x = *reinterpret_cast<const uint4*>(tile + offset);
      largest = max(largest, max(max(magnitude(x.x), magnitude(x.y)), max(magnitude(x.z), magnitude(x.w))));
    }
    return __all_sync(FULL_MASK, largest < 0x7f7ff000u);  // which is rounded to infinity
  }

 private:
  // The order of floats without their sign is that of their bits.
  static __device__ __forceinline__ u32 magnitude(u32 x) { return x & 0x7fffffffu; }
};

#endif
