// common/tile_loader.cuh -- rows of K or V to tiles in shared memory, by asynchronous copies of all threads of a CTA.
// SPDX-License-Identifier: Apache-2.0
#ifndef CUATTN_COMMON_TILE_LOADER_CUH
#define CUATTN_COMMON_TILE_LOADER_CUH
#include "common/prefill_work.cuh"
#include "common/ptx.cuh"

// Where the rows of one KV head of a sequence lie.
struct RowPlane {
  const u8* base;
  i64 stride_page;
  int stride_token;  // bytes, which 32 bits hold: one instruction makes an address then

  __device__ __forceinline__ RowPlane(const u8* first, i64 page_bytes, i64 token_bytes)
      : base(first), stride_page(page_bytes), stride_token(static_cast<int>(token_bytes)) {}
  // Bytes from a row to the one `tokens` further on.
  __device__ __forceinline__ i64 span(int tokens) const { return static_cast<i64>(tokens) * stride_token; }
  // Bytes from `base` to a row.
  __device__ __forceinline__ i64 offset_of(const PagedRows& pages, int key) const {
    if (!pages.are_there) return span(key);
    int slot;
    const int page = pages.find(key, slot);
    return page * stride_page + span(slot);
  }
};

// Copies tiles of TILE_KV rows with the geometry of Rows (PlainRows, Tile16). Each thread has the same chunk of rows a
// fixed number apart, and of every PERIOD chunks, which is the same distance apart in both memories.
template <class Rows>
struct TileLoader {
  static constexpr int ROWS_AT_ONCE = cfg::NUM_WARPS * WARP / Rows::PERIOD;
  static constexpr int STEPS = (cfg::TILE_KV + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE;
  static constexpr bool ALL_BUSY = cfg::TILE_KV % ROWS_AT_ONCE == 0;
  static constexpr int WARP_ROWS = WARP / Rows::PERIOD;  // of a warp at once
  static constexpr i64 NOWHERE = static_cast<i64>(1) << 63;
  static_assert(ROWS_AT_ONCE % 8 == 0, "successive rows of a thread are swizzled alike");
  static_assert(STEPS * WARP_ROWS <= WARP, "a lane looks up one row");

  static constexpr bool SHARED = STEPS > 2;
  static __device__ __forceinline__ i64 offset_of(const RowPlane& plane, const PagedRows& pages, const KeyTiles& keys,
                                                  int key) {
    return key >= keys.lo && key < keys.hi ? plane.offset_of(pages, key) : NOWHERE;
  }
  static __device__ __forceinline__ void copy_row(u8* target, const u8* source, bool valid) {
#pragma unroll
    for (int i = 0; i < Rows::CHUNKS / Rows::PERIOD; ++i) {
      ptx::cp_async16(target + i * Rows::PERIOD * 16, source + (valid ? i * Rows::PERIOD * 16 : 0), valid);
    }
  }

  // Rows key0 and following; those that no query of the CTA sees are zeros: 0 * NaN in P V would show what lies there.
  // `readable` is any address that a copy of nothing may name.
  static __device__ __forceinline__ void load(u8* tile, const RowPlane& plane, const PagedRows& pages,
                                              const KeyTiles& keys, int key0, const void* readable) {
    const int row0 = threadIdx.x / Rows::PERIOD, chunk = threadIdx.x % Rows::PERIOD;
    u8* target = tile + Rows::offset(row0, chunk);
    const u8* source = plane.base + chunk * 16;
    int slot = key0;
    bool together = key0 >= keys.lo && key0 + cfg::TILE_KV <= keys.hi;
    if (together && pages.are_there) {
      source += pages.find(key0, slot) * plane.stride_page;
      together = slot + cfg::TILE_KV <= pages.size();
    }
    if (together) {
      source += plane.span(slot + row0);
#pragma unroll
      for (int step = 0; step < STEPS; ++step) {
        if (ALL_BUSY || row0 + step * ROWS_AT_ONCE < cfg::TILE_KV) {
          copy_row(target + step * ROWS_AT_ONCE * Rows::ROW_BYTES, source + plane.span(step * ROWS_AT_ONCE), true);
        }
      }
      return;
    }
    // A lane looks up one of the rows that its warp copies.
    const int lane = static_cast<int>(threadIdx.x) % WARP;
    int key = key0 + row0;
    if (SHARED) key += lane / WARP_ROWS * ROWS_AT_ONCE + lane % WARP_ROWS - lane / Rows::PERIOD;
    i64 offset = offset_of(plane, pages, keys, key);
#pragma unroll 1
    for (int step = 0; step < STEPS; ++step) {
      i64 mine = offset;
      if (SHARED) {
        mine = __shfl_sync(FULL_MASK, offset, step * WARP_ROWS + lane / Rows::PERIOD);
      } else if (step > 0) {
        mine = offset_of(plane, pages, keys, key + step * ROWS_AT_ONCE);
      }
      const bool valid = mine != NOWHERE;
      const u8* row = valid ? plane.base + mine + chunk * 16 : static_cast<const u8*>(readable);
      if (ALL_BUSY || row0 + step * ROWS_AT_ONCE < cfg::TILE_KV) copy_row(target, row, valid);
      target += ROWS_AT_ONCE * Rows::ROW_BYTES;
    }
  }
};

#endif
