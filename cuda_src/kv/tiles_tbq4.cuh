// kv/tiles_tbq4.cuh -- tiles of TBQ4 rows: codes become float16 levels in shared memory, a tile ahead of their use.
// SPDX-License-Identifier: Apache-2.0
//
// Values are those of kv/tbq4_levels.cuh, in the rotated domain.
#ifndef CUATTN_KV_TILES_TBQ4_CUH
#define CUATTN_KV_TILES_TBQ4_CUH
#include "common/ptx.cuh"
#include "common/tile16.cuh"
#include "kv/tbq4_levels.cuh"
#include "kv/tbq4_rows.cuh"
#include "kv/tile_elements.cuh"

namespace tbq4 {

template <class Elem, int DIM>
struct Tiles : RotatedRows<Elem, DIM>, TileElements<Half, DIM> {
  using Rotation = RotatedRows<Elem, DIM>;
  using Operand = Half;
  using Tile = Tile16<DIM>;
  using Source = PlainRows<DIM / 2>;
  static constexpr int NORMS = DIM / cfg::BLOCK;
  static constexpr bool IN_ROTATED_DOMAIN = true;
  static constexpr int THREADS = cfg::NUM_WARPS * WARP;
  static constexpr int COLUMNS = Tile::CHUNKS < WARP ? Tile::CHUNKS : WARP;  // eight values each, of a row at once
  static constexpr int ROWS_AT_ONCE = THREADS / COLUMNS;
  static constexpr int ROW_STEPS = Tile::CHUNKS / COLUMNS;
  static constexpr int EXPAND_STEPS = cfg::TILE_KV / ROWS_AT_ONCE * ROW_STEPS;
  static_assert(cfg::TILE_KV % ROWS_AT_ONCE == 0, "all threads expand the same number of codes");

  struct Buffers {
    alignas(128) u8 rows[cfg::EXPANDED_TILES][cfg::TILE_KV * Tile::ROW_BYTES];
    alignas(128) u8 codes[cfg::NUM_STAGES][cfg::TILE_KV * Source::ROW_BYTES];
    u16 norms[cfg::NORM_TILES][NORMS][cfg::TILE_KV];  // of a row: float16, less the power of two of the tile
    float log2_scales[cfg::SCALE_TILES];

    __device__ __forceinline__ u8* incoming(int i) { return codes[in_ring<cfg::NUM_STAGES>(i)]; }
    __device__ __forceinline__ u8* tile(int i) { return rows[in_ring<cfg::EXPANDED_TILES>(i)]; }
    __device__ __forceinline__ u16* norms_of(int i, int block) { return norms[in_ring<cfg::NORM_TILES>(i)][block]; }

    // The values of tile i are its elements times 2 to this power.
    __device__ __forceinline__ float log2_scale(int i) const { return log2_scales[in_ring<cfg::SCALE_TILES>(i)]; }

    // Norms of tile i by a warp, whose lanes have those of every WARP-th row, two in a word.
    template <int ROWS, int WORDS>
    __device__ __forceinline__ void store_norms(int i, const u32 (&words)[ROWS][WORDS], int lane) {
      static_assert(2 * WORDS >= NORMS, "two norms a word");
      u32 top = NormScale::SMALLEST;
#pragma unroll
      for (int r = 0; r < ROWS; ++r) {
#pragma unroll
        for (int n = 0; n < NORMS; ++n) top = max(top, finite_size(half_of(words[r], n)));
      }
      const NormScale scale = NormScale::of(ptx::warp_max(top));
      if (lane == 0) log2_scales[in_ring<cfg::SCALE_TILES>(i)] = scale.log2();
#pragma unroll
      for (int r = 0; r < ROWS; ++r) {
        const int row = r * WARP + lane;
        if (cfg::TILE_KV % WARP != 0 && row >= cfg::TILE_KV) continue;
#pragma unroll
        for (int n = 0; n < NORMS; ++n) {
          const float norm = scale.apply(ptx::nan_if_infinite(half_of(words[r], n)));
          norms_of(i, n)[row] = static_cast<u16>(ptx::pack2<Half>(norm, norm));
        }
      }
    }

   private:
    template <int WORDS>
    static __device__ __forceinline__ u32 half_of(const u32 (&words)[WORDS], int n) {
      return words[n / 2] >> n % 2 * 16 & 0xffff;
    }
  };

  // Makes a tile of its codes: a thread has eight values a step, lanes neighboring ones of a row.
  struct Expansion {
    u32 row0, column;  // of step 0
    const u8* source;  // codes of step 0, and norms
    const u16* norms;
    u8* target;
    uint4 values;

    __device__ __forceinline__ Expansion(Buffers& b, int i) : Expansion(b, i, static_cast<u32>(ptx::thread_index())) {}
    __device__ __forceinline__ Expansion(Buffers& b, int i, u32 thread)
        : row0(thread / COLUMNS),
          column(thread % COLUMNS),
          source(b.incoming(i) + row0 * Source::ROW_BYTES + column * 4),
          norms(b.norms_of(i, column * 8 / cfg::BLOCK) + row0),
          target(b.tile(i) + Tile::offset(row0, column)),
          values{} {}

    __device__ __forceinline__ void make(int step) {
      const int down = step / ROW_STEPS * ROWS_AT_ONCE, right = step % ROW_STEPS * COLUMNS;
      const u32 word = *reinterpret_cast<const u32*>(source + down * Source::ROW_BYTES + right * 4);
      const u32 norm = norms[right * 8 / cfg::BLOCK * cfg::TILE_KV + down] * 0x10001u;
      LevelBytes bytes;
      bytes.hold();
      values = levels_of(word, bytes);
      values.x = ptx::mul_half2(values.x, norm);
      values.y = ptx::mul_half2(values.y, norm);
      values.z = ptx::mul_half2(values.z, norm);
      values.w = ptx::mul_half2(values.w, norm);
    }
    __device__ __forceinline__ void put(int step) const {
      const int down = step / ROW_STEPS * ROWS_AT_ONCE, right = step % ROW_STEPS * COLUMNS;
      // Rows that are a multiple of eight apart are swizzled alike.
      const int place = ROWS_AT_ONCE % Tile::ROW_PERIOD == 0
                            ? down * Tile::ROW_BYTES + right * 16
                            : Tile::offset(row0 + down, column + right) - Tile::offset(row0, column);
      *reinterpret_cast<uint4*>(target + place) = values;
    }
  };

  // Rotates `rows` rows of Q at once. source(row) is the address of a row, null for zeros.
  template <class Source>
  static __device__ __forceinline__ void store_queries(u8* tile, float* scale, float* bias, const float* mean, int rows,
                                                       Source source) {
    const auto mean_of = [mean](int) { return mean; };
    Rotation::template store_rotated<Tiles>(tile, scale, bias, mean_of, rows, source,
                                            Rotation::fetch_queries(rows, source));
  }
  // The order of Q's values in a row is that of the levels.
  static __device__ __forceinline__ int position(int dim) { return dim; }
};

}  // namespace tbq4

#endif
