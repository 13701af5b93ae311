// common/decode_floats.cuh -- what decode does in another way for floats: O^T = V^T P^T, scores that are no numbers.
// SPDX-License-Identifier: Apache-2.0
#ifndef CUATTN_COMMON_DECODE_FLOATS_CUH
#define CUATTN_COMMON_DECODE_FLOATS_CUH
#include "common/elements.cuh"
#include "common/tf32.cuh"
#include "common/tile16.cuh"

// A warp has KEY_BLOCKS blocks of 16 keys, ROW_TILES tiles of 8 query rows, and DIM_BLOCKS of 16 head_dim.
template <class Kv, int KEY_BLOCKS, int ROW_TILES, int DIM_BLOCKS>
struct DecodeFloats {
  using Scores = float[KEY_BLOCKS][ROW_TILES][4];
  static constexpr int SUMS = DIM_BLOCKS < 32 ? 2 : 1;  // accumulators of long rows leave no registers to two

  // P^T of keys 8 i .. 8 i + 7: an accumulator holds (row g, queries 2t, 2t+1), the operand wants query g of the rows
  // that stand at t and t + 4.
  static __device__ __forceinline__ void get_weights(u32 (&b)[2], const Scores& p, int i, int n, int lane) {
    const int g = lane / 4, t = lane % 4;
#pragma unroll
    for (int upper = 0; upper < 2; ++upper) {
      const int source = Kv::operand_row(t, upper) * 4 + g / 2;
      const float even = __shfl_sync(FULL_MASK, p[i / 2][n][i % 2 * 2], source);
      const float odd = __shfl_sync(FULL_MASK, p[i / 2][n][i % 2 * 2 + 1], source);
      b[upper] = __float_as_uint(g % 2 == 0 ? even : odd);
    }
  }

  // o += V^T P^T, each sum over the keys of the tile with one addition of float32.
  static __device__ __forceinline__ void multiply_v(float (&o)[ROW_TILES][DIM_BLOCKS][4], const Scores& p,
                                                    const u8* tile, const typename Kv::ValueLane& value_lane,
                                                    int lane) {
    u32 weights[2 * KEY_BLOCKS][ROW_TILES][2];
#pragma unroll
    for (int i = 0; i < 2 * KEY_BLOCKS; ++i) {
#pragma unroll
      for (int n = 0; n < ROW_TILES; ++n) get_weights(weights[i][n], p, i, n, lane);
    }
#pragma unroll
    for (int mb = 0; mb < DIM_BLOCKS; ++mb) {
      float sums[SUMS][ROW_TILES][4];  // of products with a small part, and of the others
      clear(sums);
#pragma unroll
      for (int i = 0; i < 2 * KEY_BLOCKS; ++i) {
        u32 words[4];
        Kv::get_values(words, tile, 8 * i, mb, value_lane);
        const tf32::Split<4> a(words);
#pragma unroll
        for (int n = 0; n < ROW_TILES; ++n) {
          const tf32::Split<2> b(weights[i][n]);
          tf32::add_small(sums[0][n], a, b);
          ptx::mma_m16n8k8_tf32(sums[SUMS - 1][n], a.hi, b.hi);
        }
      }
#pragma unroll
      for (int n = 0; n < ROW_TILES; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) o[n][mb][e] += SUMS == 1 ? sums[0][n][e] : sums[0][n][e] + sums[1][n][e];
      }
    }
  }

  // The same by ordinary sums, of the keys of the tile that each row sees: sees(row, key). Rare.
  template <class Sees>
  static __device__ __forceinline__ void add_visible(float (&o)[ROW_TILES][DIM_BLOCKS][4], const Scores& p,
                                                     const u8* tile, int lane, Sees sees) {
    const int g = lane / 4, t = lane % 4;
#pragma unroll
    for (int i = 0; i < KEY_BLOCKS; ++i) {
#pragma unroll 1
      for (int row = 0; row < 16; ++row) {
        const int key = i * 16 + tile_row(row);
        const u32 place = static_cast<u32>(Kv::Tile::offset(key, g / 4) + g % 4 * 4);
        float weight[ROW_TILES][2];
        bool seen[ROW_TILES][2];
#pragma unroll
        for (int n = 0; n < ROW_TILES; ++n) {
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            weight[n][c] = __shfl_sync(FULL_MASK, row < 8 ? p[i][n][c] : p[i][n][c + 2], row % 8 * 4 + t);
            seen[n][c] = sees(n * 8 + 2 * t + c, key);
          }
        }
#pragma unroll
        for (int mb = 0; mb < DIM_BLOCKS; ++mb) {
#pragma unroll
          for (int upper = 0; upper < 2; ++upper) {
            const u32 at = Kv::Tile::step_offset(place, 2 * mb + upper);
            const float value = *reinterpret_cast<const float*>(tile + at);
#pragma unroll
            for (int n = 0; n < ROW_TILES; ++n) {
#pragma unroll
              for (int c = 0; c < 2; ++c) {
                if (seen[n][c]) o[n][mb][c + 2 * upper] += weight[n][c] * value;
              }
            }
          }
        }
      }
    }
  }

  // Takes scores that met infinities, or the largest floats, anew by ordinary sums; the others stay. Rare.
  static __device__ __forceinline__ void mend(Scores& s, const u8* tile, const u8* q, int lane) {
    float sum = 0.f;  // x * 0 is NaN if x is no number
#pragma unroll
    for (int i = 0; i < KEY_BLOCKS; ++i) {
#pragma unroll
      for (int n = 0; n < ROW_TILES; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) sum += s[i][n][e] * 0.f;
      }
    }
    if (!__any_sync(FULL_MASK, sum != 0.f)) return;
    // Opaque: the compiler must not have addresses of this ready in every step.
    const int at = static_cast<int>(ptx::opaque(static_cast<u32>(lane))), g = at / 4, t = at % 4;
#pragma unroll
    for (int i = 0; i < KEY_BLOCKS; ++i) {
#pragma unroll
      for (int n = 0; n < ROW_TILES; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int key = i * 16 + tile_row(g + e / 2 * 8), row = n * 8 + 2 * t + e % 2;
          float x = 0.f;
#pragma unroll 1
          for (int chunk = 0; chunk < Kv::Tile::CHUNKS; ++chunk) {
            const float4 a = *reinterpret_cast<const float4*>(tile + Kv::Tile::offset(key, chunk));
            const float4 b = *reinterpret_cast<const float4*>(q + Kv::Tile::offset(row, chunk));
            x = fmaf(a.w, b.w, fmaf(a.z, b.z, fmaf(a.y, b.y, fmaf(a.x, b.x, x))));
          }
          if (s[i][n][e] * 0.f != 0.f) s[i][n][e] = x;
        }
      }
    }
  }
};

#endif
