// common/softmax.cuh -- the online softmax: the only exponential, the only rescaling and the only lse formula.
// SPDX-License-Identifier: Apache-2.0
//
// A partial result over a set of keys is (m, l, o): m the largest score, l = sum exp2(x - m), o = sum exp2(x - m) v,
// with scores x in log2 units. Two of them merge by scaling l and o with weight(m, m_new). m = -inf means "no key yet".
#ifndef CUATTN_COMMON_SOFTMAX_CUH
#define CUATTN_COMMON_SOFTMAX_CUH
#include "common/ptx.cuh"

// The l of a part without keys, whose o is not written.
constexpr float EMPTY_PART = -1.f;

namespace softmax {

// exp2(x - m); 0 for x = -inf, also while m is -inf, where the plain difference would be NaN.
__device__ __forceinline__ float weight(float x, float m) { return ptx::exp2(x - (m == neg_inf() ? 0.f : m)); }

// exp(x) for differences of lse, which are natural: scaling x to log2 units first would round it by up to half an ulp
// of x.
__device__ __forceinline__ float natural_weight(float x) { return expf(x); }

// 1 / l; 0 for a row without keys, so that its output is 0.
__device__ __forceinline__ float inverse_sum(float l) { return l == 0.f ? 0.f : 1.f / l; }

// Natural-log lse of (m, l); -inf for a row without keys, NaN where a score was NaN.
__device__ __forceinline__ float lse(float m, float l) { return l == 0.f ? neg_inf() : (m + ptx::log2(l)) * LN_2; }

// Adds a sink, a key of score `sink` (natural units) whose value is zero, to (m, l).
__device__ __forceinline__ void add_sink(float sink, float& m, float& l) {
  const float x = sink * LOG2_E;
  const float m_new = fmaxf(m, x);
  l = l * weight(m, m_new) + weight(x, m_new);
  m = m_new;
}

// cap * tanh(s * scale / cap) in log2 units, from the raw score. The error of tanhf is relative, so that a cap far
// above all scores changes nothing; tanh.approx, and 1 - 2 / (1 + exp(2 y)), have an absolute one that the cap
// multiplies.
__device__ __forceinline__ float softcap(float s, float cap_log2, float scale_over_cap) {
  return cap_log2 * tanhf(s * scale_over_cap);
}

// Softmax state of N * 2 query rows that lie on the columns of S^T = K Q^T accumulators: a lane holds columns 2t and
// 2t+1 of each of N tiles; m is equal in the eight lanes of a column, l is this lane's part of the sum.
template <int N>
struct ColumnState {
  float m[N][2];
  float l[N][2];

  __device__ __forceinline__ ColumnState() {
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        m[n][c] = neg_inf();
        l[n][c] = 0.f;
      }
    }
  }

  // Turns scores x[M][N] of M * 16 keys into probabilities. Where a maximum grew, calls rescale(n, c, factor) for the
  // accumulators of that column; that is rare after the first keys, and the branch is uniform in the warp.
  template <int M, class Rescale>
  __device__ __forceinline__ void update(float (&x)[M][N][4], Rescale rescale) {
    float top[N][2];
    bool grew = false;
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        top[n][c] = neg_inf();
#pragma unroll
        for (int i = 0; i < M; ++i) top[n][c] = fmaxf(top[n][c], fmaxf(x[i][n][c], x[i][n][c + 2]));
        grew |= top[n][c] > m[n][c];
      }
    }
    if (__any_sync(FULL_MASK, grew)) {
#pragma unroll
      for (int n = 0; n < N; ++n) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          float m_new = fmaxf(m[n][c], top[n][c]);
#pragma unroll
          for (int bit = 4; bit < WARP; bit *= 2) m_new = fmaxf(m_new, __shfl_xor_sync(FULL_MASK, m_new, bit));
          const float factor = weight(m[n][c], m_new);
          m[n][c] = m_new;
          l[n][c] *= factor;
          rescale(n, c, factor);
        }
      }
    }
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
#pragma unroll
        for (int i = 0; i < M; ++i) {
          x[i][n][c] = weight(x[i][n][c], m[n][c]);
          x[i][n][c + 2] = weight(x[i][n][c + 2], m[n][c]);
          l[n][c] += x[i][n][c] + x[i][n][c + 2];
        }
      }
    }
  }

  // Sums l over the eight lanes of each column.
  __device__ __forceinline__ void reduce() {
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
#pragma unroll
        for (int bit = 4; bit < WARP; bit *= 2) l[n][c] += __shfl_xor_sync(FULL_MASK, l[n][c], bit);
      }
    }
  }
};

}  // namespace softmax

#endif
