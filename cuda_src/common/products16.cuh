// common/products16.cuh -- S = Q K^T and O += P V of a warp, for tiles of 16-bit elements.
// SPDX-License-Identifier: Apache-2.0
#ifndef CUATTN_COMMON_PRODUCTS16_CUH
#define CUATTN_COMMON_PRODUCTS16_CUH
#include "common/elements.cuh"
#include "common/ptx.cuh"

// A warp has ROW_TILES tiles of 16 rows, and DIM_TILES * 8 of value_dim.
template <class K, class V, int ROW_TILES, int DIM_TILES>
struct Products16 {
  // The place in a tile of V that a lane gives ldmatrix.
  static __device__ __forceinline__ u32 value_place(int lane) { return V::Tile::offset(lane % 16, lane / 16); }

  // s = Q K^T of the warp's rows and N * 8 keys, of which the lane reads from `q_at` and `k_at` on. beside(step, STEPS)
  // is called with each step, for work that may stand beside the products.
  template <int N, class Beside>
  static __device__ __forceinline__ void multiply_k(float (&s)[ROW_TILES][N][4], const u8* q, u32 q_at, const u8* keys,
                                                    u32 k_at, Beside beside) {
    constexpr int STEPS = K::Tile::ROW_BYTES / 32;
    clear(s);
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
      u32 a[ROW_TILES][4];
#pragma unroll
      for (int r = 0; r < ROW_TILES; ++r) {
        ptx::ldmatrix_x4(a[r], q + r * 16 * K::Tile::ROW_BYTES + K::Tile::step_offset(q_at, step));
      }
#pragma unroll
      for (int n = 0; n < N; n += 2) {
        u32 b[4];  // keys 8 n .. 8 n + 7 and the next eight
        ptx::ldmatrix_x4(b, keys + n * 8 * K::Tile::ROW_BYTES + K::Tile::step_offset(k_at, step));
        const u32 lower[2] = {b[0], b[1]}, upper[2] = {b[2], b[3]};
#pragma unroll
        for (int r = 0; r < ROW_TILES; ++r) {
          ptx::mma_m16n8k16<typename K::Operand>(s[r][n], a[r], lower);
          ptx::mma_m16n8k16<typename K::Operand>(s[r][n + 1], a[r], upper);
        }
      }
      beside(step, STEPS);
    }
  }

  // o += P V of N * 8 keys; weigh(r, n) gives the weights of row tile r and key tile n, so that exponentials of later
  // keys stand beside products of earlier ones; beside(step, STEPS) as in multiply_k.
  template <int N, class Weigh, class Beside>
  static __device__ __forceinline__ void multiply_v(float (&o)[ROW_TILES][DIM_TILES][4], const u8* values, u32 v_at,
                                                    Weigh weigh, Beside beside) {
    static_assert(N % 2 == 0, "P of 16 keys is an operand");
    constexpr int STEPS = N / 2;
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
      u32 a[ROW_TILES][4];
#pragma unroll
      for (int r = 0; r < ROW_TILES; ++r) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float (&w)[4] = weigh(r, 2 * step + half);
          a[r][2 * half] = ptx::pack2<typename V::Operand>(w[0], w[1]);
          a[r][2 * half + 1] = ptx::pack2<typename V::Operand>(w[2], w[3]);
        }
      }
#pragma unroll
      for (int d = 0; d < DIM_TILES; d += 2) {
        u32 b[4];
        ptx::ldmatrix_x4_trans(b, values + step * 16 * V::Tile::ROW_BYTES + V::Tile::step_offset(v_at, d / 2));
        const u32 lower[2] = {b[0], b[1]}, upper[2] = {b[2], b[3]};
#pragma unroll
        for (int r = 0; r < ROW_TILES; ++r) {
          ptx::mma_m16n8k16<typename V::Operand>(o[r][d], a[r], lower);
          ptx::mma_m16n8k16<typename V::Operand>(o[r][d + 1], a[r], upper);
        }
        beside(step * (DIM_TILES / 2) + d / 2, STEPS * (DIM_TILES / 2));
      }
    }
  }
};

#endif
