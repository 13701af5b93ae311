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
  static constexpr int NORM_WARPS = (cfg::TILE_KV + WARP - 1) / WARP;

  struct Buffers {
    alignas(128) u8 rows[cfg::EXPANDED_TILES][cfg::TILE_KV * Tile::ROW_BYTES];
    alignas(128) u8 codes[cfg::NUM_STAGES][cfg::TILE_KV * Source::ROW_BYTES];
    float norms[cfg::NORM_TILES][NORMS][cfg::TILE_KV];  // of a row
    float largest[cfg::NORM_TILES][NORM_WARPS];         // of the norms of every 32 rows

    __device__ __forceinline__ u8* incoming(int i) { return codes[i % cfg::NUM_STAGES]; }
    __device__ __forceinline__ u8* tile(int i) { return rows[i % cfg::EXPANDED_TILES]; }

    // Exponent of the largest norm of tile i.
    __device__ __forceinline__ int exponent(int i) const {
      float x = largest[i % cfg::NORM_TILES][0];
#pragma unroll
      for (int w = 1; w < NORM_WARPS; ++w) x = fmaxf(x, largest[i % cfg::NORM_TILES][w]);
      return static_cast<int>(__float_as_uint(x) >> 23) - 127;
    }
    // The values of tile i are its elements times 2 to this power. Norms are scaled so that the largest is just in
    // float16's range: a row loses bits only if it is 2^-20 of another one.
    __device__ __forceinline__ float log2_scale(int i) const { return static_cast<float>(exponent(i) - TOP); }

    // Norms of row `row` of tile i. All lanes of the warp are here, those past the last row with norms of zero.
    template <int WORDS>
    __device__ __forceinline__ void store_norms(int i, int row, const u32 (&words)[WORDS]) {
      static_assert(2 * WORDS >= NORMS, "two norms a word");
      float top = SMALLEST;
#pragma unroll
      for (int n = 0; n < NORMS; ++n) {
        // An infinite norm becomes NaN: so is infinity times levels of both signs.
        const float norm = ptx::to_float(Half{static_cast<u16>(ptx::nan_if_infinite(words[n / 2]) >> n % 2 * 16)});
        if (row < cfg::TILE_KV) norms[i % cfg::NORM_TILES][n][row] = norm;
        top = fmaxf(top, fabsf(norm));  // not NaN
      }
#pragma unroll
      for (int bit = 1; bit < WARP; bit *= 2) top = fmaxf(top, __shfl_xor_sync(FULL_MASK, top, bit));
      if (row % WARP == 0) largest[i % cfg::NORM_TILES][row / WARP] = top;
    }

   private:
    static constexpr float SMALLEST = 5.9604645e-8f;  // float16 above zero
  };
  static constexpr int TOP = 15;  // exponent of the largest norm in a tile

  // Makes a tile of its codes: a thread has eight values a step, lanes neighboring ones of a row.
  struct Expansion {
    const u8* source;  // codes of step 0, and norms
    const float* norms;
    u8* target;
    float scale;
    uint4 values;

    __device__ __forceinline__ Expansion(Buffers& b, int i)
        : source(b.incoming(i) + row0() * Source::ROW_BYTES + column() * 4),
          norms(&b.norms[i % cfg::NORM_TILES][column() * 8 / cfg::BLOCK][row0()]),
          target(b.tile(i) + Tile::offset(row0(), column())),
          scale(__uint_as_float(static_cast<u32>(127 + TOP - b.exponent(i)) << 23)),
          values{} {}

    static __device__ __forceinline__ u32 row0() { return threadIdx.x / COLUMNS; }
    static __device__ __forceinline__ u32 column() { return threadIdx.x % COLUMNS; }

    __device__ __forceinline__ void make(int step) {
      const int down = step / ROW_STEPS * ROWS_AT_ONCE, right = step % ROW_STEPS * COLUMNS;
      const u32 word = *reinterpret_cast<const u32*>(source + down * Source::ROW_BYTES + right * 4);
      const float norm = norms[right * 8 / cfg::BLOCK * cfg::TILE_KV + down] * scale;
      values = levels_of(word);
      const u32 pair = ptx::pack2<Half>(norm, norm);
      values.x = ptx::mul_half2(values.x, pair);
      values.y = ptx::mul_half2(values.y, pair);
      values.z = ptx::mul_half2(values.z, pair);
      values.w = ptx::mul_half2(values.w, pair);
    }
    __device__ __forceinline__ void put(int step) const {
      const int down = step / ROW_STEPS * ROWS_AT_ONCE, right = step % ROW_STEPS * COLUMNS;
      // Rows that are a multiple of eight apart are swizzled alike.
      const int place = ROWS_AT_ONCE % Tile::ROW_PERIOD == 0
                            ? down * Tile::ROW_BYTES + right * 16
                            : Tile::offset(row0() + down, column() + right) - Tile::offset(row0(), column());
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
