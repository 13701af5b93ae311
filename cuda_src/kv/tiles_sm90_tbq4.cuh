// kv/tiles_sm90_tbq4.cuh -- swizzled tiles of TBQ4 rows: a warpgroup turns codes into float16 values for wgmma.
// SPDX-License-Identifier: Apache-2.0
//
// Values are those of kv/tbq4_levels.cuh, in the rotated domain.
#ifndef CUATTN_KV_TILES_SM90_TBQ4_CUH
#define CUATTN_KV_TILES_SM90_TBQ4_CUH
#include "common/head_rows.cuh"
#include "common/ptx_sm90.cuh"
#include "common/query_shift.cuh"
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

  // A tile on its way, by the four warps of a warpgroup. A lane has WORDS neighboring words of codes in each chunk of
  // 64 columns, of rows ROWS_AT_ONCE apart. Eight lanes have as many words of WORDS rows as fill all banks when each
  // stores one of them.
  struct Expander {
    using Tile = SwizzledTile<cfg::TILE_KV>;
    static constexpr int CHUNKS = PIECES / Tile::PIECES;
    static constexpr int WORDS = cfg::TILE_KV % 64 == 0 ? 4 : 2;
    static constexpr int LANES = Tile::PIECES / WORDS;  // of a row
    static constexpr int WARP_ROWS = WARP / LANES, ROWS_AT_ONCE = 4 * WARP_ROWS;
    static constexpr int STEPS = cfg::TILE_KV / ROWS_AT_ONCE;
    static constexpr int NORM_STEPS = cfg::TILE_KV / WARP;  // each lane has norms of a row
    static_assert(cfg::TILE_KV % ROWS_AT_ONCE == 0, "all lanes expand as many codes");
    static_assert(cfg::TILE_KV % WARP == 0, "all lanes have as many norms");
    static_assert(ROWS_AT_ONCE % Tile::PIECES == 0, "rows of a lane are swizzled alike");
    static_assert(BLOCKS <= 2, "two norms a word");

    // Codes come by way of shared memory, a tile beyond the one that is next: no register waits for them, and no fence.
    // Each lane has those that it asked for itself.
    static constexpr int LANE_BYTES = WORDS * 4, TILE_BYTES = cfg::TILE_KV * DIM / 2;
    static constexpr int CODE_BYTES = cfg::CODE_SLOTS * TILE_BYTES;

    int row0, word0;              // of this lane at step 0
    int norm_row0;                // the first row of its norms, whose others follow by exclusive or
    int norm_lane;                // the one that has the norm of row0
    u32 place;                    // of its first word in a tile
    u32 power;                    // of the tile that is next
    HeadPlane plane, norm_plane;  // from its words of a row on, and norms
    i64 to_other;                 // bytes from the norm of a row to that of the one whose number differs by WARP's bit
    u32 codes[STEPS][CHUNKS][WORDS], norms[NORM_STEPS];  // of the tile that is next; norms are scaled
    u32 raw_norms[NORM_STEPS];                           // that were asked for

    __device__ __forceinline__ Expander()
        : power(NormScale::NONE), plane{}, norm_plane{}, to_other(0), codes{}, norms{}, raw_norms{} {
      const int warp = static_cast<int>(threadIdx.x) / WARP % 4;
      const int lane = static_cast<int>(threadIdx.x) % WARP;
      word0 = lane % LANES * WORDS;
      row0 = warp * WARP_ROWS + lane / LANES;
      norm_row0 = warp * WARP_ROWS / WARP * WARP + lane;
      norm_lane = static_cast<int>(ptx::opaque(static_cast<u32>(row0 % WARP)));
      place = ptx::opaque(Tile::offset(row0, word0));
    }

    // Tiles of a head follow, and none was before.
    __device__ __forceinline__ void begin(const HeadPlanes& from) {
      plane = from.rows.behind(row0, word0 * 4);
      norm_plane = from.norms.behind(norm_row0, 0);
      to_other = (norm_row0 & WARP) == 0 ? 1 : -1;
      to_other *= static_cast<i64>(from.norms.row_stride) * WARP;
      power = NormScale::NONE;
    }

    // Asks for codes of a tile, for one of the slots; of a tile that is not WHOLE for zeros from row `count` on.
    template <bool WHOLE>
    __device__ __forceinline__ void fetch_codes(u8* slot, const Place& at, int count = 0) {
      const u8* source = plane.at(at);
      u8* to = slot + static_cast<int>(threadIdx.x) % (4 * WARP) * LANE_BYTES;
#pragma unroll
      for (int step = 0; step < STEPS; ++step) {
        const bool there = WHOLE || step * ROWS_AT_ONCE + row0 < count;
#pragma unroll
        for (int chunk = 0; chunk < CHUNKS; ++chunk) {
          const u8* from = ptx::mad_wide(step * ROWS_AT_ONCE, plane.row_stride, source) + chunk * Tile::PIECES * 4;
          u8* lane_words = to + (step * CHUNKS + chunk) * 4 * WARP * LANE_BYTES;
          if constexpr (WORDS == 4) {
            ptx::cp_async16(lane_words, from, there);
          } else {
            ptx::cp_async_small<LANE_BYTES>(lane_words, from, there);
          }
        }
      }
    }
    // And for its norms.
    template <bool WHOLE>
    __device__ __forceinline__ void fetch_norms(const Place& at, int count = 0) {
      const u8* source = norm_plane.at(at);
#pragma unroll
      for (int i = 0; i < NORM_STEPS; ++i) {
        const int row = i * WARP ^ norm_row0;
        raw_norms[i] = 0;
        if (!WHOLE && row >= count) continue;
        const u8* from = ptx::mad_wide(i / 2 * 2 * WARP, norm_plane.row_stride, source) + (i % 2 == 0 ? 0 : to_other);
        raw_norms[i] = BLOCKS == 2 ? __ldg(reinterpret_cast<const u32*>(from)) : ptx::ld_global_u16(from);
      }
    }
    // Scales the norms that were asked for. FOLLOWS: with the power of the tile before if it can.
    template <bool FOLLOWS>
    __device__ __forceinline__ void scale_norms() {
      u32 top = NormScale::SMALLEST;
#pragma unroll
      for (int i = 0; i < NORM_STEPS; ++i) {
        raw_norms[i] = ptx::nan_if_infinite(raw_norms[i]);  // so is infinity times levels of both signs
        top = ptx::max_half2(top, ptx::abs_half2(raw_norms[i]));
      }
      if (BLOCKS == 2) top = ptx::max_half2(top, top >> 16) & 0xffff;
      NormScale scale = NormScale::of(ptx::warp_max(top));
      if constexpr (FOLLOWS) scale.follow(power);
      power = scale.power;
#pragma unroll
      for (int i = 0; i < NORM_STEPS; ++i) {
        const float lower = scale.apply(raw_norms[i]);
        norms[i] = ptx::pack2<Half>(lower, BLOCKS == 2 ? scale.apply(raw_norms[i] >> 16) : lower);
      }
    }

    // Takes codes that are there out of their slot.
    __device__ __forceinline__ void take_codes(const u8* slot) {
      const u8* from = slot + static_cast<int>(threadIdx.x) % (4 * WARP) * LANE_BYTES;
#pragma unroll
      for (int step = 0; step < STEPS; ++step) {
#pragma unroll
        for (int chunk = 0; chunk < CHUNKS; ++chunk) {
          u32(&words)[WORDS] = codes[step][chunk];
          const u8* lane_words = from + (step * CHUNKS + chunk) * 4 * WARP * LANE_BYTES;
          if constexpr (WORDS == 4) {
            const uint4 x = *reinterpret_cast<const uint4*>(lane_words);
            words[0] = x.x, words[1] = x.y, words[2] = x.z, words[3] = x.w;
          } else {
            const uint2 x = *reinterpret_cast<const uint2*>(lane_words);
            words[0] = x.x, words[1] = x.y;
          }
        }
      }
    }
    // Makes a tile in shared memory of the codes that were taken, and norms that were scaled.
    __device__ __forceinline__ void expand(u8* tile, float& log2_scale) {
      if (threadIdx.x % (4 * WARP) == 0) log2_scale = NormScale(power).log2();
      const u32 first = ptx::smem_addr(tile) + place;
#pragma unroll
      for (int step = 0; step < STEPS; ++step) {
        const int row = step * ROWS_AT_ONCE;
        const u32 row_norms = __shfl_sync(FULL_MASK, norms[row / WARP], row % WARP + norm_lane);
#pragma unroll
        for (int block = 0; block < BLOCKS; ++block) {
          const u32 norm = BLOCKS == 1 ? row_norms : ptx::prmt(row_norms, row_norms, block == 0 ? 0x1010u : 0x3232u);
          const LevelBytes products = LevelBytes::times(norm);
#pragma unroll
          for (int chunk = block * CHUNKS / BLOCKS; chunk < (block + 1) * CHUNKS / BLOCKS; ++chunk) {
#pragma unroll
            for (int i = 0; i < WORDS; ++i) {
              ptx::st_shared_v4((first ^ static_cast<u32>(i) << 4) + (chunk * cfg::TILE_KV + row) * Tile::ROW_BYTES,
                                levels_of(codes[step][chunk][i], products));
            }
          }
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

  static __device__ __forceinline__ void load_row(LaneRow<DIM>& to, const HeadRow& from, int this_lane) {
    // Known here only: the compiler would keep signs of a lane in registers for what is rare.
    const int lane = static_cast<int>(ptx::opaque(static_cast<u32>(this_lane)));
    float x[BLOCKS][4];
#pragma unroll
    for (int b = 0; b < BLOCKS; ++b) {
      const int dim = LaneRow<DIM>::dim(b, lane);
      const u32 word = dim < DIM ? *reinterpret_cast<const u16*>(from.row + dim / 2) : 0u;
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
  static __device__ __forceinline__ bool is_bad(const HeadRow& from, int /*lane*/) {
    u32 largest = 0;
#pragma unroll
    for (int b = 0; b < BLOCKS; ++b) largest = max(largest, reinterpret_cast<const u16*>(from.norms)[b] & 0x7fffu);
    return largest >= ElemTraits<Half>::EXPONENT;
  }
};

}  // namespace tbq4

#endif
