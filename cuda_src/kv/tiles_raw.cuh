// kv/tiles_raw.cuh -- what tiles have in common whose rows copies bring as they are.
// SPDX-License-Identifier: Apache-2.0
#ifndef CUATTN_KV_TILES_RAW_CUH
#define CUATTN_KV_TILES_RAW_CUH
#include "common/ptx.cuh"

// Of rows with a geometry.
template <class Rows>
struct RawTiles {
  using Tile = Rows;
  using Source = Tile;
  static constexpr int NORMS = 0;
  static constexpr int EXPAND_STEPS = 0;
  static constexpr bool IN_ROTATED_DOMAIN = false;

  struct Buffers {
    alignas(128) u8 rows[cfg::NUM_STAGES][cfg::TILE_KV * Tile::ROW_BYTES];

    __device__ __forceinline__ u8* incoming(int i) { return rows[in_ring<cfg::NUM_STAGES>(i)]; }
    __device__ __forceinline__ u8* tile(int i) { return rows[in_ring<cfg::NUM_STAGES>(i)]; }
    __device__ __forceinline__ float log2_scale(int /*i*/) const { return 0.f; }
    template <int ROWS, int WORDS>
    __device__ __forceinline__ void store_norms(int /*i*/, const u32 (&)[ROWS][WORDS], int /*lane*/) {}
  };

  struct Expansion {
    __device__ __forceinline__ Expansion(Buffers& /*b*/, int /*i*/) {}
    __device__ __forceinline__ void make(int /*step*/) {}
    __device__ __forceinline__ void put(int /*step*/) const {}
  };

  // Copies `rows` rows of Q, of the group in flight. source(row) is the address of a row, null for zeros.
  template <class Source>
  static __device__ __forceinline__ void store_queries(u8* tile, float* /*scale*/, float* /*bias*/,
                                                       const float* /*mean*/, int rows, Source source) {
#pragma unroll 1
    for (int index = threadIdx.x; index < rows * Tile::CHUNKS; index += cfg::NUM_WARPS * WARP) {
      const int row = index / Tile::CHUNKS, chunk = index % Tile::CHUNKS;
      const u8* address = source(row);
      ptx::cp_async16(tile + Tile::offset(row, chunk), address == nullptr ? source(0) : address + chunk * 16,
                      address != nullptr);
    }
  }

  // O is in the domain of the output.
  template <int N>
  static __device__ __forceinline__ void restore(float (&)[N][4], int /*lane*/) {}
};

#endif
