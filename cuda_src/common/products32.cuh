// common/products32.cuh -- S = Q K^T and O += P V of a warp, for tiles of floats, to float32 accuracy.
// SPDX-License-Identifier: Apache-2.0
#ifndef CUATTN_COMMON_PRODUCTS32_CUH
#define CUATTN_COMMON_PRODUCTS32_CUH
#include "common/elements.cuh"
#include "common/tf32.cuh"

// As Products16. ldmatrix moves words as it moves pairs of halves: eight floats of a row lie where sixteen halves do.
template <class K, class V, int ROW_TILES, int DIM_TILES>
struct Products32 {
  static constexpr int ROW_BYTES = V::Tile::ROW_BYTES;

  // The place in a tile of V of the lane's element of key 2t and dim g. Banks differ: keys 2t, of four t, exchange
  // chunks by their upper bits, and the two chunks of eight dims differ in the lowest.
  static __device__ __forceinline__ u32 value_place(int lane) {
    const int g = lane / 4, t = lane % 4;
    return V::Tile::offset(2 * t, g / 4) + g % 4 * 4;
  }

  template <int N, class Beside>
  static __device__ __forceinline__ void multiply_k(float (&s)[ROW_TILES][N][4], const u8* q, u32 q_at, const u8* keys,
                                                    u32 k_at, Beside beside) {
    constexpr int STEPS = K::Tile::ROW_BYTES / 32;
    constexpr int AT_ONCE = N % 2 == 0 ? 2 : 1;  // tiles of eight keys
    clear(s);
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
      u32 rows[ROW_TILES][4];
#pragma unroll
      for (int r = 0; r < ROW_TILES; ++r) {
        ptx::ldmatrix_x4(rows[r], q + r * 16 * K::Tile::ROW_BYTES + K::Tile::step_offset(q_at, step));
      }
#pragma unroll
      for (int n = 0; n < N; n += AT_ONCE) {
        u32 words[AT_ONCE][2];
        load_keys(words, keys + n * 8 * K::Tile::ROW_BYTES + K::Tile::step_offset(k_at, step));
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
          const tf32::Split<2> b(words[i]);
#pragma unroll
          for (int r = 0; r < ROW_TILES; ++r) tf32::add(s[r][n + i], tf32::Split<4>(rows[r]), b);
        }
      }
      beside(step, STEPS);
    }
  }

  // A lane has the weights of keys 2t and 2t + 1, which an operand wants at t and t + 4: V's rows are in that order.
  template <int N, class Weigh, class Beside>
  static __device__ __forceinline__ void multiply_v(float (&o)[ROW_TILES][DIM_TILES][4], const u8* values, u32 v_at,
                                                    Weigh weigh, Beside beside) {
    constexpr int AT_ONCE = N % 4 == 0 ? 4 : N % 2 == 0 ? 2 : 1;
#pragma unroll
    for (int first = 0; first < N; first += AT_ONCE) {
      u32 weights[ROW_TILES][AT_ONCE][4];
#pragma unroll
      for (int n = 0; n < AT_ONCE; ++n) {
#pragma unroll
        for (int r = 0; r < ROW_TILES; ++r) {
          const float (&w)[4] = weigh(r, first + n);
          const int order[4] = {0, 2, 1, 3};
#pragma unroll
          for (int e = 0; e < 4; ++e) weights[r][n][e] = __float_as_uint(w[order[e]]);
        }
      }
#pragma unroll
      for (int d = 0; d < DIM_TILES; ++d) {
        float sum[ROW_TILES][4], small[ROW_TILES][4];
#pragma unroll
        for (int r = 0; r < ROW_TILES; ++r) {
#pragma unroll
          for (int e = 0; e < 4; ++e) sum[r][e] = small[r][e] = 0.f;
        }
#pragma unroll
        for (int n = 0; n < AT_ONCE; ++n) {
          const u32 place = V::Tile::step_offset(v_at, d);
          const u8* rows = values + (first + n) * 8 * ROW_BYTES;
          const u32 words[2] = {*reinterpret_cast<const u32*>(rows + place),
                                *reinterpret_cast<const u32*>(rows + ROW_BYTES + (place ^ 16))};
          const tf32::Split<2> b(words);
#pragma unroll
          for (int r = 0; r < ROW_TILES; ++r) {
            const tf32::Split<4> a(weights[r][n]);
            tf32::add_small(small[r], a, b);
            ptx::mma_m16n8k8_tf32(sum[r], a.hi, b.hi);
          }
        }
#pragma unroll
        for (int r = 0; r < ROW_TILES; ++r) {
#pragma unroll
          for (int e = 0; e < 4; ++e) o[r][d][e] += sum[r][e] + small[r][e];
        }
        beside(first / AT_ONCE * DIM_TILES + d, N / AT_ONCE * DIM_TILES);
      }
    }
  }

  // The scores of eight keys from row `first` on by ordinary sums, which infinities and NaN go through as they should;
  // `row0` is the warp's first row of Q.
  static __device__ __forceinline__ void multiply_k_plainly(float (&s)[ROW_TILES][1][4], const u8* q, int row0,
                                                            const u8* keys, int first, int lane) {
    const int g = lane / 4, t = lane % 4;
#pragma unroll
    for (int r = 0; r < ROW_TILES; ++r) {
#pragma unroll
      for (int e = 0; e < 4; ++e) s[r][0][e] = 0.f;
    }
#pragma unroll 1
    for (int chunk = 0; chunk < K::Tile::CHUNKS; ++chunk) {
      float4 k[2];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        k[j] = *reinterpret_cast<const float4*>(keys + K::Tile::offset(first + 2 * t + j, chunk));
      }
#pragma unroll
      for (int r = 0; r < ROW_TILES; ++r) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const int row = row0 + r * 16 + g + 8 * c;
          const float4 x = *reinterpret_cast<const float4*>(q + K::Tile::offset(row, chunk));
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            float& sum = s[r][0][2 * c + j];
            sum = fmaf(x.w, k[j].w, fmaf(x.z, k[j].z, fmaf(x.y, k[j].y, fmaf(x.x, k[j].x, sum))));
          }
        }
      }
    }
  }

 private:
  static __device__ __forceinline__ void load_keys(u32 (&words)[2][2], const u8* place) {
    u32 b[4];
    ptx::ldmatrix_x4(b, place);
    words[0][0] = b[0], words[0][1] = b[1], words[1][0] = b[2], words[1][1] = b[3];
  }
  static __device__ __forceinline__ void load_keys(u32 (&words)[1][2], const u8* place) {
    ptx::ldmatrix_x2(words[0], place);
  }
};

#endif
