// kv/tiles_tbq4.cuh -- tiles of TBQ4 rows: codes become float16 levels in shared memory, a tile ahead of their use.
// SPDX-License-Identifier: Apache-2.0
//
// Values are levels times norms, in the rotated domain, rounded to float16 once, with a power of two for each tile.
// Eight codes take about 25 instructions and no look-up in memory: byte permutations pick from registers, by three bits
// of a code, as levels of codes c and 15 - c differ in the sign only.
#ifndef CUATTN_KV_TILES_TBQ4_CUH
#define CUATTN_KV_TILES_TBQ4_CUH
#include "common/ptx.cuh"
#include "common/tile16.cuh"
#include "kv/tbq4_rows.cuh"
#include "kv/tile_elements.cuh"

namespace tbq4 {

constexpr bool levels_are_symmetric() {
  for (int c = 0; c < 8; ++c) {
    if (cfg::LEVELS_HALF[c] != (cfg::LEVELS_HALF[15 - c] ^ 0x8000u)) return false;
  }
  return true;
}
static_assert(levels_are_symmetric(), "levels of codes c and 15 - c differ in the sign");

// Byte `which` of the levels of codes first .. first + 3.
constexpr u32 level_bytes(int first, int which) {
  u32 bytes = 0;
  for (int i = 0; i < 4; ++i) bytes |= (cfg::LEVELS_HALF[first + i] >> which * 8 & 0xff) << i * 8;
  return bytes;
}

// The levels of eight codes, of which `word` has the first in its lowest bits.
__device__ __forceinline__ uint4 levels_of(u32 word) {
  constexpr u32 LOWER[2] = {level_bytes(0, 0), level_bytes(4, 0)}, UPPER[2] = {level_bytes(0, 1), level_bytes(4, 1)};
  const u32 high = word & 0x88888888u;                            // codes 8 to 15, ...
  const u32 index = (word & 0x77777777u) ^ (high - (high >> 3));  // ... whose other bits are turned round
  const u32 even = high << 4;                                     // bit 7 of byte j is that of code 2j, here of 2j+1
  u32 pairs[4];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const u32 select = half == 0 ? index : index >> 16;
    const u32 lower = ptx::prmt(LOWER[0], LOWER[1], select);
    const u32 flips = ptx::prmt(even, high, half == 0 ? 0x5140u : 0x7362u) & 0x80808080u;
    const u32 upper = ptx::prmt(UPPER[0], UPPER[1], select) ^ flips;
    pairs[2 * half] = ptx::prmt(lower, upper, 0x5140u);
    pairs[2 * half + 1] = ptx::prmt(lower, upper, 0x7362u);
  }
  return make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
}

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

    // The values of tile i are its elements times 2 to this power. Norms are scaled so that the largest is just in
    // float16's range: a row loses bits only if it is 2^-20 of another one.
    __device__ __forceinline__ float log2_scale(int i) const { return log2_scales[in_ring<cfg::SCALE_TILES>(i)]; }

    // Norms of tile i by a warp, whose lanes have those of every WARP-th row, two in a word.
    template <int ROWS, int WORDS>
    __device__ __forceinline__ void store_norms(int i, const u32 (&words)[ROWS][WORDS], int lane) {
      static_assert(2 * WORDS >= NORMS, "two norms a word");
      u32 top = SMALLEST;
#pragma unroll
      for (int r = 0; r < ROWS; ++r) {
#pragma unroll
        for (int n = 0; n < NORMS; ++n) {
          const u32 size = half_of(words[r], n) & 0x7fff;
          if (size < INFINITE) top = max(top, size);
        }
      }
      const float largest = ptx::to_float(Half{static_cast<u16>(ptx::warp_max(top))});
      const int exponent = static_cast<int>(__float_as_uint(largest) >> 23) - 127;
      const float scale = __uint_as_float(static_cast<u32>(127 + TOP - exponent) << 23);
      if (lane == 0) log2_scales[in_ring<cfg::SCALE_TILES>(i)] = static_cast<float>(exponent - TOP);
#pragma unroll
      for (int r = 0; r < ROWS; ++r) {
        const int row = r * WARP + lane;
        if (cfg::TILE_KV % WARP != 0 && row >= cfg::TILE_KV) continue;
#pragma unroll
        for (int n = 0; n < NORMS; ++n) {
          // An infinite norm becomes NaN: so is infinity times levels of both signs.
          const u32 half = ptx::nan_if_infinite(half_of(words[r], n));
          const float norm = ptx::to_float(Half{static_cast<u16>(half)}) * scale;
          norms_of(i, n)[row] = static_cast<u16>(ptx::pack2<Half>(norm, norm));
        }
      }
    }

   private:
    static constexpr u32 SMALLEST = 1, INFINITE = 0x7c00;  // float16

    template <int WORDS>
    static __device__ __forceinline__ u32 half_of(const u32 (&words)[WORDS], int n) {
      return words[n / 2] >> n % 2 * 16 & 0xffff;
    }
  };
  static constexpr int TOP = 15;  // exponent of the largest norm in a tile

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
      values = levels_of(word);
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
