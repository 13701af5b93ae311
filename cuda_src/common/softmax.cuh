// common/softmax.cuh -- the online softmax: the only exponential, the only rescaling and the only lse formula.
// SPDX-License-Identifier: Apache-2.0
//
// A partial result over a set of keys is (m, l, o): m about the largest score, l = sum exp2(x - m), o = sum exp2(x - m)
// v, with scores x in log2 units. Two of them merge by scaling l and o with weight(m, m_new). m = -inf means "no key
// yet".
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

// cap * tanh(x) in log2 units, x the score over the cap. The error of tanhf is relative, so that a cap far
// above all scores changes nothing; tanh.approx, and 1 - 2 / (1 + exp(2 y)), have an absolute one that the cap
// multiplies.
__device__ __forceinline__ float softcap(float x, float cap_log2) { return cap_log2 * tanhf(x); }

// Softmax state of N * 2 query rows that lie on the columns of S^T = K Q^T accumulators: a lane holds columns 2t and
// 2t+1 of each of N tiles; m is equal in the eight lanes of a column, l is this lane's part of the sum. m is the
// largest score to within SLACK: any m will do that keeps the weights in range, and following every new maximum would
// rescale the accumulators of all columns again and again. A weight is at most 2^SLACK.
template <int N>
struct ColumnState {
  static constexpr float SLACK = 8.f;
  // The maximum of no keys: no score is below it but -inf, and it is finite, so that x - m is not NaN for x = -inf.
  static constexpr float LOWEST = -3.402823466e38f;
  float m[N][2];
  float l[N][2];

  __device__ __forceinline__ ColumnState() {
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        m[n][c] = LOWEST;
        l[n][c] = 0.f;
      }
    }
  }

  // Turns scores x[M][N] of M * 16 keys into probabilities. Where a maximum grew too far, takes all maxima anew, calls
  // rescale(n, c, factor) for the accumulators of each column and returns true; that is rare after the first keys, and
  // uniform in the warp.
  template <int M, class Rescale>
  __device__ __forceinline__ bool update(float (&x)[M][N][4], Rescale rescale) {
    float top[N][2];
    bool grew = false;
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        top[n][c] = fmaxf(x[0][n][c], x[0][n][c + 2]);
#pragma unroll
        for (int i = 1; i < M; ++i) top[n][c] = fmaxf(top[n][c], fmaxf(x[i][n][c], x[i][n][c + 2]));
        grew |= top[n][c] > m[n][c] + SLACK;
      }
    }
    grew = __any_sync(FULL_MASK, grew);
    if (grew) {
#pragma unroll
      for (int n = 0; n < N; ++n) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          float m_new = fmaxf(m[n][c], top[n][c]);
#pragma unroll
          for (int bit = 4; bit < WARP; bit *= 2) m_new = fmaxf(m_new, __shfl_xor_sync(FULL_MASK, m_new, bit));
          const float factor = ptx::exp2(m[n][c] - m_new);
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
          x[i][n][c] = ptx::exp2(x[i][n][c] - m[n][c]);
          x[i][n][c + 2] = ptx::exp2(x[i][n][c + 2] - m[n][c]);
          l[n][c] += x[i][n][c] + x[i][n][c + 2];
        }
      }
    }
    return grew;
  }

  // m, or -inf without a key.
  __device__ __forceinline__ float maximum(int n, int c) const { return m[n][c] == LOWEST ? neg_inf() : m[n][c]; }

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

// What makes scores in log2 units of raw products, for rows g and g + 8 of each of M tiles; not negative. All rows have
// one factor unless ROW_FACTORS.
template <int M, bool ROW_FACTORS>
struct RowFactors {
  static constexpr int TILES = ROW_FACTORS ? M : 1, ROWS = ROW_FACTORS ? 2 : 1;
  float of[TILES][ROWS];

  template <class F>
  __device__ __forceinline__ void fill(F f) {
#pragma unroll
    for (int r = 0; r < TILES; ++r) {
#pragma unroll
      for (int c = 0; c < ROWS; ++c) of[r][c] = f(r, c);
    }
  }
  __device__ __forceinline__ float get(int r, int c) const { return of[ROW_FACTORS ? r : 0][ROW_FACTORS ? c : 0]; }
};

// The same state for rows of S = Q K^T: a lane holds rows g and g + 8 of each of M tiles, and columns 2t and 2t+1 of
// tiles of 8 keys; m is equal in the four lanes of a row. Scores come as raw products, so that scaling them and taking
// m off is one instruction.
template <int M>
struct RowState {
  static constexpr float SLACK = ColumnState<1>::SLACK, LOWEST = ColumnState<1>::LOWEST;
  float m[M][2];
  float l[M][2];

  __device__ __forceinline__ RowState() {
#pragma unroll
    for (int r = 0; r < M; ++r) {
#pragma unroll
      for (int c = 0; c < 2; ++c) m[r][c] = LOWEST, l[r][c] = 0.f;
    }
  }

  // The largest of a lane's scores.
  template <int N, class Factors>
  static __device__ __forceinline__ void largest(float (&top)[M][2], const float (&x)[M][N][4],
                                                 const Factors& factors) {
#pragma unroll
    for (int r = 0; r < M; ++r) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        top[r][c] = fmaxf(x[r][0][2 * c], x[r][0][2 * c + 1]);
#pragma unroll
        for (int n = 1; n < N; ++n) top[r][c] = fmaxf(top[r][c], fmaxf(x[r][n][2 * c], x[r][n][2 * c + 1]));
        top[r][c] *= factors.get(r, c);
      }
    }
  }

  // Takes the scores of N * 8 more keys in. Where a maximum grew too far, takes all maxima anew, calls
  // rescale(r, c, by) for the accumulators of each row and returns true; that is rare after the first keys, and uniform
  // in the warp.
  template <int N, class Factors, class Rescale>
  __device__ __forceinline__ bool follow(const float (&x)[M][N][4], const Factors& factors, Rescale rescale) {
    float top[M][2];
    largest(top, x, factors);
    bool grew = false;
#pragma unroll
    for (int r = 0; r < M; ++r) {
#pragma unroll
      for (int c = 0; c < 2; ++c) grew |= top[r][c] > m[r][c] + SLACK;
    }
    if (!__any_sync(FULL_MASK, grew)) return false;
    raise(top, rescale);
    return true;
  }

  // Takes all maxima anew, of those so far and of a lane's `top`.
  template <class Rescale>
  __device__ __forceinline__ void raise(const float (&top)[M][2], Rescale rescale) {
#pragma unroll
    for (int r = 0; r < M; ++r) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        float m_new = fmaxf(m[r][c], top[r][c]);
        m_new = fmaxf(m_new, __shfl_xor_sync(FULL_MASK, m_new, 1));
        m_new = fmaxf(m_new, __shfl_xor_sync(FULL_MASK, m_new, 2));
        const float by = ptx::exp2(m[r][c] - m_new);
        m[r][c] = m_new;
        l[r][c] *= by;
        rescale(r, c, by);
      }
    }
  }

  // From here on weights are 2^by times as large, as values are so much smaller: accumulators stay as they are. So m is
  // about the largest of score plus log2 of a value's scale, and weights stay in range for values of all sizes.
  __device__ __forceinline__ void shift(float by) {
    const float factor = ptx::exp2(by);
#pragma unroll
    for (int r = 0; r < M; ++r) {
#pragma unroll
      for (int c = 0; c < 2; ++c) m[r][c] -= by, l[r][c] *= factor;
    }
  }

  template <class Factors>
  __device__ __forceinline__ float weight(float x, const Factors& factors, int r, int c) const {
    return ptx::exp2(fmaf(x, factors.get(r, c), -m[r][c]));
  }

  // Turns the scores of 8 keys and tile r into weights.
  template <class Factors>
  __device__ __forceinline__ void weigh(float (&x)[4], const Factors& factors, int r) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      x[e] = weight(x[e], factors, r, e / 2);
      l[r][e / 2] += x[e];
    }
  }

  // The same two steps at once, for scores that stay as they are: calls put(r, n, w) with the weights of four. No
  // maximum is looked for unless a lane's sum of weights says that one grew, or it is `first`: a sum up to 2^SLACK has
  // no larger weight, and with maxima taken anew a weight is at most 1, and a sum at most their number, less than
  // 2^SLACK.
  template <int N, class Factors, class Put, class Rescale>
  __device__ __forceinline__ bool absorb(const float (&x)[M][N][4], const Factors& factors, bool first, Put put,
                                         Rescale rescale) {
    static_assert(2 * N < 1 << static_cast<int>(SLACK), "maxima that were taken anew would not do");
    float sum[M][2];
    bool grew = first;
    if (!first) {
      sum_weights(sum, x, factors, put);
      bool fits = true;
#pragma unroll
      for (int r = 0; r < M; ++r) {
#pragma unroll
        for (int c = 0; c < 2; ++c) fits &= !(sum[r][c] > static_cast<float>(1 << static_cast<int>(SLACK)));
      }
      grew = !__all_sync(FULL_MASK, fits);
    }
    if (grew) {
      float top[M][2];
      largest(top, x, factors);
      raise(top, rescale);
      sum_weights(sum, x, factors, put);
    }
#pragma unroll
    for (int r = 0; r < M; ++r) {
#pragma unroll
      for (int c = 0; c < 2; ++c) l[r][c] += sum[r][c];
    }
    return grew;
  }

  template <int N, class Factors, class Put>
  __device__ __forceinline__ void sum_weights(float (&sum)[M][2], const float (&x)[M][N][4], const Factors& factors,
                                              Put put) const {
#pragma unroll
    for (int r = 0; r < M; ++r) {
#pragma unroll
      for (int n = 0; n < N; ++n) {
        float w[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          w[e] = weight(x[r][n][e], factors, r, e / 2);
          sum[r][e / 2] = n == 0 && e % 2 == 0 ? w[e] : sum[r][e / 2] + w[e];
        }
        put(r, n, w);
      }
    }
  }

  __device__ __forceinline__ float maximum(int r, int c) const { return m[r][c] == LOWEST ? neg_inf() : m[r][c]; }

  // Sums l over the four lanes of each row.
  __device__ __forceinline__ void reduce() {
#pragma unroll
    for (int r = 0; r < M; ++r) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        l[r][c] += __shfl_xor_sync(FULL_MASK, l[r][c], 1);
        l[r][c] += __shfl_xor_sync(FULL_MASK, l[r][c], 2);
      }
    }
  }
};

// Keeps weights, probabilities times the norms of values, in the range of fp16, as a maximum keeps probabilities there:
// the weights of a column and its accumulators are multiplied by a power of two, so that the largest weight so far
// is about 2^8. A weight that is 2^-22 of it, and a later one that is 2^7 times as large, is still a normal number.
template <int N>
struct ColumnScale {
  static constexpr float MAX_HALF = 65504.f;
  static constexpr int EXPONENT = 8;       // of the largest weight
  static constexpr int MAX_EXPONENT = 96;  // of a factor: all norms may be 0
  float factor[N][2];
  float largest[N][2];  // of this lane's weights so far, times the factor

  __device__ __forceinline__ ColumnScale() {
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        factor[n][c] = 1.f;
        largest[n][c] = 0.f;
      }
    }
  }

  // The maximum of the scores grew: weights so far were multiplied by `by`.
  __device__ __forceinline__ void rescale(int n, int c, float by) { largest[n][c] *= by; }

  // Takes the weights of P parts of M * 16 keys in. Where they become too large, and with `anyway`, chooses the factors
  // anew, multiplies the weights, and calls rescale(n, c, by) for the accumulators.
  template <int P, int M, class Rescale>
  __device__ __forceinline__ void update(float (&w)[P][M][N][4], bool anyway, Rescale rescale_accumulators) {
    bool over = anyway;
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
#pragma unroll
        for (int i = 0; i < P * M; ++i) {
          const float (&x)[4] = w[i / M][i % M][n];
          largest[n][c] = fmaxf(largest[n][c], fmaxf(fabsf(x[c]), fabsf(x[c + 2])));
        }
        over |= largest[n][c] > MAX_HALF;
      }
    }
    if (!__any_sync(FULL_MASK, over)) return;
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        float top = largest[n][c];
#pragma unroll
        for (int bit = 4; bit < WARP; bit *= 2) top = fmaxf(top, __shfl_xor_sync(FULL_MASK, top, bit));
        const int held = static_cast<int>(__float_as_uint(factor[n][c]) >> 23) - 127;
        const int exponent = static_cast<int>(__float_as_uint(top) >> 23) - 127;
        const int by = top == 0.f ? 0 : min(EXPONENT - max(exponent, -MAX_EXPONENT), MAX_EXPONENT - held);
        const float power = __uint_as_float(static_cast<u32>(127 + by) << 23);
        factor[n][c] *= power;
        largest[n][c] = top * power;
        rescale_accumulators(n, c, power);
#pragma unroll
        for (int i = 0; i < P * M; ++i) {
          w[i / M][i % M][n][c] *= power;
          w[i / M][i % M][n][c + 2] *= power;
        }
      }
    }
  }
};

}  // namespace softmax

#endif
