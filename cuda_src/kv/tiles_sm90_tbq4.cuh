// kv/tiles_sm90_tbq4.cuh -- swizzled tiles of TBQ4 rows: a warpgroup turns codes into float16 values for wgmma.
// SPDX-License-Identifier: Apache-2.0
//
// Values are those of kv/tbq4_levels.cuh, in the rotated domain. Codes and norms of a tile are asked for as soon as
// those of the one before are expanded and published, since a fence waits for loads, too.
#ifndef CUATTN_KV_TILES_SM90_TBQ4_CUH
#define CUATTN_KV_TILES_SM90_TBQ4_CUH
#include "common/head_rows.cuh"
#include "common/ptx_sm90.cuh"
#include "common/swizzled_tile.cuh"
#include "kv/tbq4_levels.cuh"
#include "kv/tbq4_quads.cuh"
#include "kv/tbq4_rotation.cuh"

namespace tbq4 {

template <class Elem, int DIM>
struct SwizzledTiles {
  using Operand = Half;
  static constexpr bool EXPANDED = true;
  static constexpr int BLOCKS = DIM / cfg::BLOCK;
  static constexpr int PIECES = DIM / 8;  // of 16 bytes in a tile's row, and words of codes

  // A tile on its way, by the four warps of a warpgroup. A lane has WORDS neighboring words of codes of rows
  // ROWS_AT_ONCE apart. Eight lanes have as many words of WORDS rows as fill all banks when each stores one of them.
  struct Expander {
    using Tile = SwizzledTile<cfg::TILE_KV>;
    static constexpr int WORDS = cfg::TILE_KV % (4 * WARP * 4 / PIECES) == 0 ? 4 : 2;
    static constexpr int LANES = PIECES / WORDS;  // of a row
    static constexpr int WARP_ROWS = WARP / LANES, ROWS_AT_ONCE = 4 * WARP_ROWS;
    static constexpr int STEPS = cfg::TILE_KV / ROWS_AT_ONCE;
    static constexpr int NORM_STEPS = (cfg::TILE_KV + WARP - 1) / WARP;  // each lane has norms of a row
    static_assert(cfg::TILE_KV % ROWS_AT_ONCE == 0, "all lanes expand as many codes");
    static_assert(ROWS_AT_ONCE % Tile::PIECES == 0, "rows of a lane are swizzled alike");
    static_assert(BLOCKS <= 2, "two norms a word");

    int lane, row0, word0;  // of this lane at step 0
    int norm_row0;          // the first row of a warp's norms, whose others follow by exclusive or
    int exponent;           // of the tile before
    LevelBytes bytes;
    u32 codes[STEPS][WORDS], norms[NORM_STEPS];

    __device__ __forceinline__ Expander() : exponent(NormScale::NO_EXPONENT), codes{}, norms{} {
      bytes.hold();
      constexpr int TOGETHER = Tile::PIECES / WORDS;  // lanes of a row among eight
      const int warp = static_cast<int>(threadIdx.x) / WARP % 4;
      lane = static_cast<int>(threadIdx.x) % WARP;
      word0 = (lane % TOGETHER + lane / 8 % (LANES / TOGETHER) * TOGETHER) * WORDS;
      row0 = warp * WARP_ROWS + lane / TOGETHER % WORDS + lane / 8 / (LANES / TOGETHER) * WORDS;
      norm_row0 = warp * WARP_ROWS / WARP * WARP;
    }

    // No tile was before.
    __device__ __forceinline__ void begin() { exponent = NormScale::NO_EXPONENT; }

    // Asks for the rows of a tile, which has zeros for those that are not there.
    __device__ __forceinline__ void fetch(const HeadRows& given) {
      const HeadRows from = given.opaque();
      // Known here only: the compiler would keep products of rows and strides, of which there are many.
      const int first = static_cast<int>(ptx::opaque(static_cast<u32>(row0)));
      const int norm_first = static_cast<int>(ptx::opaque(static_cast<u32>(lane))) ^ norm_row0;
#pragma unroll
      for (int step = 0; step < STEPS; ++step) {
        const int row = step * ROWS_AT_ONCE + first;
#pragma unroll
        for (int i = 0; i < WORDS; ++i) codes[step][i] = 0;
        if (row >= from.count) continue;
        const u8* source = from.row(row) + word0 * 4;
        if constexpr (WORDS == 4) {
          const uint4 x = ptx::ld_global_nc_v4(source);
          codes[step][0] = x.x, codes[step][1] = x.y, codes[step][2] = x.z, codes[step][3] = x.w;
        } else {
          const uint2 x = ptx::ld_global_nc_v2(source);
          codes[step][0] = x.x, codes[step][1] = x.y;
        }
      }
#pragma unroll
      for (int i = 0; i < NORM_STEPS; ++i) {
        const int row = i * WARP ^ norm_first;
        norms[i] = 0;
        if ((cfg::TILE_KV % WARP != 0 && row >= cfg::TILE_KV) || row >= from.count) continue;
        const u8* source = from.norm(row);
        norms[i] = BLOCKS == 2 ? __ldg(reinterpret_cast<const u32*>(source)) : ptx::ld_global_u16(source);
      }
    }

    // Makes the tile that was asked for, at `tile` in shared memory.
    __device__ __forceinline__ void expand(u8* tile, float& log2_scale) {
      u32 top = 0;
#pragma unroll
      for (int i = 0; i < NORM_STEPS; ++i) {
        top = max(top, finite_size(norms[i] & 0xffff));
        if (BLOCKS == 2) top = max(top, finite_size(norms[i] >> 16));
      }
      const NormScale scale(ptx::warp_max(top), exponent);
      exponent = scale.exponent;
      if (threadIdx.x % (4 * WARP) == 0) log2_scale = scale.log2();
#pragma unroll
      for (int i = 0; i < NORM_STEPS; ++i) {
        const float lower = scale.apply(norms[i] & 0xffff);
        norms[i] = ptx::pack2<Half>(lower, BLOCKS == 2 ? scale.apply(norms[i] >> 16) : lower);
      }
      const u32 first = ptx::smem_addr(tile) + Tile::offset(row0, word0);
#pragma unroll
      for (int step = 0; step < STEPS; ++step) {
        const int row = step * ROWS_AT_ONCE;
        u32 norm = __shfl_sync(FULL_MASK, norms[row / WARP], row % WARP + row0 % WARP);
        if (BLOCKS == 2) norm = ptx::prmt(norm, norm, word0 < PIECES / 2 ? 0x1010u : 0x3232u);
#pragma unroll
        for (int i = 0; i < WORDS; ++i) {
          uint4 values = levels_of(codes[step][i], bytes);
          values.x = ptx::mul_half2(values.x, norm);
          values.y = ptx::mul_half2(values.y, norm);
          values.z = ptx::mul_half2(values.z, norm);
          values.w = ptx::mul_half2(values.w, norm);
          ptx::st_shared_v4((first ^ static_cast<u32>(i) << 4) + row * Tile::ROW_BYTES, values);
        }
      }
    }
  };

  // Rotates the 16 rows of Q of a warp and stores them in a swizzled tile of ROWS, scaled by powers of two, so that
  // neither large nor small ones leave float16's range. scale[r] undoes that in the scores of row g + 8 r, which four
  // lanes have. source(r) is the address of that row, null for zeros.
  template <int ROWS, class Source>
  static __device__ __forceinline__ void store_queries(u8* tile, int row0, int lane, float (&scale)[2], Source source) {
    const int g = lane / 4, t = lane % 4;
#pragma unroll 1
    for (int r = 0; r < 2; ++r) {
      const u8* from = source(r);
      QuadBlock<8> blocks[BLOCKS];
      float largest = 0.f;
#pragma unroll
      for (int b = 0; b < BLOCKS; ++b) {
#pragma unroll
        for (int v = 0; v < cfg::BLOCK / 4; v += 8) {
          uint4 raw = make_uint4(0, 0, 0, 0);
          if (from != nullptr) raw = ptx::ld_global_nc_v4(from + (b * cfg::BLOCK + 8 * t + 4 * v) * sizeof(Elem));
#pragma unroll
          for (int j = 0; j < 8; ++j) {
            const u32 word = j < 2 ? raw.x : j < 4 ? raw.y : j < 6 ? raw.z : raw.w;
            blocks[b].x[v + j] = ptx::to_float(Elem{static_cast<u16>(word >> j % 2 * 16)});
          }
        }
      }
#pragma unroll
      for (int b = 0; b < BLOCKS; ++b) {
        blocks[b].rotate(t);
#pragma unroll
        for (int v = 0; v < cfg::BLOCK / 4; ++v) largest = fmaxf(largest, fabsf(blocks[b].x[v]));
      }
      largest = fmaxf(largest, __shfl_xor_sync(FULL_MASK, largest, 1));
      largest = fmaxf(largest, __shfl_xor_sync(FULL_MASK, largest, 2));
      const int shift = query_shift(largest);
      const float down = __uint_as_float(static_cast<u32>(127 + shift) << 23);
      if (r == 0) {
        scale[0] = __uint_as_float(static_cast<u32>(127 - shift) << 23);
      } else {
        scale[1] = __uint_as_float(static_cast<u32>(127 - shift) << 23);
      }
#pragma unroll
      for (int b = 0; b < BLOCKS; ++b) {
#pragma unroll
        for (int v = 0; v < cfg::BLOCK / 4; v += 8) {
          const float (&x)[cfg::BLOCK / 4] = blocks[b].x;
          const auto pair = [&](int j) { return ptx::pack2<Half>(x[v + j] * down, x[v + j + 1] * down); };
          const u32 place = SwizzledTile<ROWS>::offset(row0 + g + 8 * r, b * cfg::BLOCK / 8 + t + v / 2);
          ptx::st_shared_v4(ptx::smem_addr(tile) + place, make_uint4(pair(0), pair(2), pair(4), pair(6)));
        }
      }
    }
  }

  // Rotates the rows of accumulators of a warp back.
  template <int N>
  static __device__ __forceinline__ void restore(float (&o)[N], int t) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int b = 0; b < BLOCKS; ++b) {
        const auto place = [&](int v) { return b * cfg::BLOCK / 2 + v / 2 * 4 + 2 * r + v % 2; };
        QuadBlock<2> block;
#pragma unroll
        for (int v = 0; v < cfg::BLOCK / 4; ++v) block.x[v] = o[place(v)];
        block.restore(t);
#pragma unroll
        for (int v = 0; v < cfg::BLOCK / 4; ++v) o[place(v)] = block.x[v];
      }
    }
  }

  static __device__ __forceinline__ void load_row(LaneRow<DIM>& to, const HeadRows& from, int this_lane) {
    // Known here only: the compiler would keep signs of a lane in registers for what is rare.
    const int lane = static_cast<int>(ptx::opaque(static_cast<u32>(this_lane)));
    float x[BLOCKS][4];
#pragma unroll
    for (int b = 0; b < BLOCKS; ++b) {
      const int dim = LaneRow<DIM>::dim(b, lane);
      const u32 word = dim < DIM ? *reinterpret_cast<const u16*>(from.rows + dim / 2) : 0u;
      const float norm = ptx::to_float(Half{reinterpret_cast<const u16*>(from.norms)[b]});
      const uint4 levels = levels_of(word);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        x[b][j] = ptx::to_float(Half{static_cast<u16>((j < 2 ? levels.x : levels.y) >> j % 2 * 16)}) * norm;
      }
    }
    restore_row(x, lane);
#pragma unroll
    for (int b = 0; b < BLOCKS; ++b) to.x[b] = make_float4(x[b][0], x[b][1], x[b][2], x[b][3]);
  }
  static __device__ __forceinline__ bool is_bad(const HeadRows& from, int /*lane*/) {
    u32 largest = 0;
#pragma unroll
    for (int b = 0; b < BLOCKS; ++b) largest = max(largest, reinterpret_cast<const u16*>(from.norms)[b] & 0x7fffu);
    return largest >= ElemTraits<Half>::EXPONENT;
  }
};

}  // namespace tbq4

#endif
