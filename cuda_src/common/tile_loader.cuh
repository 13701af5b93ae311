// common/tile_loader.cuh -- rows of K or V to tiles in shared memory, by asynchronous copies of all threads of a CTA.
// SPDX-License-Identifier: Apache-2.0
#ifndef CUATTN_COMMON_TILE_LOADER_CUH
#define CUATTN_COMMON_TILE_LOADER_CUH
#include "common/prefill_work.cuh"
#include "common/ptx.cuh"

// Where the rows of one KV head of a sequence lie.
struct RowPlane {
  const u8* base;
  i64 stride_page, stride_token;

  __device__ __forceinline__ const u8* row(int page, int token) const {
    return base + page * stride_page + token * stride_token;
  }
  // Without a page table keys are neighbors.
  __device__ __forceinline__ const u8* row_of(const PageTable& pages, int key) const {
    return row(pages.dense ? 0 : pages.page(key), pages.dense ? key : pages.slot(key));
  }
};

// Copies tiles of TILE_KV rows with the geometry of Rows (PlainRows, Tile16). Each thread has the same chunk of rows a
// fixed number apart, and of every PERIOD chunks, which is the same distance apart in both memories.
template <class Rows>
struct TileLoader {
  static constexpr int ROWS_AT_ONCE = cfg::NUM_WARPS * WARP / Rows::PERIOD;
  static constexpr int STEPS = (cfg::TILE_KV + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE;
  static constexpr bool ALL_BUSY = cfg::TILE_KV % ROWS_AT_ONCE == 0;
  static_assert(ROWS_AT_ONCE % 8 == 0, "successive rows of a thread are swizzled alike");

  static __device__ __forceinline__ void copy_row(u8* target, const u8* source, bool valid) {
#pragma unroll
    for (int i = 0; i < Rows::CHUNKS / Rows::PERIOD; ++i) {
      ptx::cp_async16(target + i * Rows::PERIOD * 16, source + (valid ? i * Rows::PERIOD * 16 : 0), valid);
    }
  }

  // Rows key0 and following; those that no query of the CTA sees are zeros: 0 * NaN in P V would show what lies there.
  // `readable` is any address that a copy of nothing may name.
  static __device__ __forceinline__ void load(u8* tile, const RowPlane& plane, const PageTable& pages,
                                              const KeyTiles& keys, int key0, const void* readable) {
    const int row0 = threadIdx.x / Rows::PERIOD, chunk = threadIdx.x % Rows::PERIOD;
    u8* target = tile + Rows::offset(row0, chunk);
    const int slot = pages.dense ? key0 : pages.slot(key0);
    if (key0 >= keys.lo && key0 + cfg::TILE_KV <= keys.hi && (pages.dense || slot + cfg::TILE_KV <= pages.page_size)) {
      const u8* source = plane.row(pages.dense ? 0 : pages.page(key0), slot + row0) + chunk * 16;
#pragma unroll
      for (int step = 0; step < STEPS; ++step) {
        if (ALL_BUSY || row0 + step * ROWS_AT_ONCE < cfg::TILE_KV) copy_row(target, source, true);
        source += ROWS_AT_ONCE * plane.stride_token;
        target += ROWS_AT_ONCE * Rows::ROW_BYTES;
      }
      return;
    }
#pragma unroll 1
    for (int step = 0; step < STEPS; ++step) {
      const int row = row0 + step * ROWS_AT_ONCE, key = key0 + row;
      const bool valid = key >= keys.lo && key < keys.hi;
      const u8* source = static_cast<const u8*>(readable);
      if (valid) source = plane.row_of(pages, key) + chunk * 16;
      if (ALL_BUSY || row < cfg::TILE_KV) copy_row(target, source, valid);
      target += ROWS_AT_ONCE * Rows::ROW_BYTES;
    }
  }
};

#endif
