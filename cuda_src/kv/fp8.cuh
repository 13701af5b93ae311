// kv/fp8.cuh -- K/V rows of fp8 e4m3: head_dim code bytes, and one float32 scale a KV head.
// SPDX-License-Identifier: Apache-2.0
//
// Codes are exact as fp16, so operands are codes and nothing is multiplied by element: the scale of a head is in the
// factor of its rows of Q (K), or multiplies rows of O (V).
//
// ldmatrix takes two neighboring codes for an element of 16 bits. What a lane gets, 4 codes, are operands of both
// halves of k (K), or of both halves of the rows (V): the order of head_dim inside of an operand is free, if Q is
// stored, and O read, in the same. Eight elements of K take 4 conversions of two, half an ldmatrix.x4 and its address;
// those of V, where a pair is of two tokens, take two prmt more.
#ifndef CUATTN_KV_FP8_CUH
#define CUATTN_KV_FP8_CUH
#include "common/e4m3.cuh"
#include "common/query_rows.cuh"
#include "kv/raw.cuh"

template <class Elem, int HEAD_DIM>
struct Fp8 : RawRows<Tile8<HEAD_DIM>, HEAD_DIM> {
  using Raw = RawRows<Tile8<HEAD_DIM>, HEAD_DIM>;
  using Tile = Tile8<HEAD_DIM>;
  using KeyLane = typename Raw::KeyLane;
  static constexpr int SPAN = HEAD_DIM < 4 * WARP ? HEAD_DIM : 4 * WARP;  // of a row of Q, in the lanes of a warp
  using Queries = QueryRows<Elem, HEAD_DIM, SPAN>;
  using QueryPart = typename Queries::QueryPart;
  using Operand = Half;
  static constexpr bool HAS_SCALE = true;
  static constexpr bool SCALES_QUERIES = true;

  // A operands of S^T = K Q^T: of a chunk of 16 codes of a row, lane t has four.
  struct Keys : Raw::Keys {
    u32 codes[4];  // of rows g and g + 8 in one chunk, then in the next

    __device__ __forceinline__ void get(u32 (&a)[4], int kb, const KeyLane& lane) {
      if (kb % 2 == 0) Raw::Keys::get(codes, kb / 2, lane);
      u32 lower[2], upper[2];
      e4m3::widen(lower, codes[kb % 2 * 2]);
      e4m3::widen(upper, codes[kb % 2 * 2 + 1]);
      a[0] = lower[0], a[1] = upper[0], a[2] = lower[1], a[3] = upper[1];
    }
  };

  // A operands of O^T = V^T P^T: of a chunk of 16 codes, lanes of one g have two, of tokens 2t and 2t + 1.
  using ValueLane = KeyLane;
  struct Values : Raw::Keys {
    u32 codes[4];  // of tokens 0 to 7 and 8 to 15 in one chunk, then in the next

    __device__ __forceinline__ void get(u32 (&a)[4], int mb, const ValueLane& lane) {
      if (mb % 2 == 0) {
        ptx::ldmatrix_x4_trans(codes, this->tile + Tile::offset(this->row, mb + lane.chunk));
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        u32 rows[2];  // g and g + 8 of the operand: its pairs of tokens
        e4m3::widen(rows, ptx::prmt(codes[mb % 2 * 2 + half], 0, 0x3120));
        a[2 * half] = rows[0], a[2 * half + 1] = rows[1];
      }
    }
  };

  // Where head_dim `dim` of a row of Q stands among the 16 of each operand: the first two of a lane's four codes are
  // k = 2t, 2t+1, the others 2t+8, 2t+9.
  static __device__ __forceinline__ int position(int dim) {
    const int in_chunk = dim % 16;
    return dim - in_chunk + in_chunk / 4 * 2 + in_chunk / 2 % 2 * 8 + in_chunk % 2;
  }
  struct SameDomain {
    __device__ __forceinline__ explicit SameDomain(int /*lane*/) {}
    __device__ __forceinline__ float sign(int /*j*/) const { return 1.f; }
    __device__ __forceinline__ void enter(float (&)[4]) const {}
  };
  template <class Source>
  static __device__ __forceinline__ QueryPart fetch_queries(int rows, Source source) {
    return Queries::fetch_queries(rows, source);
  }
  template <class Mean, class Factor, class Source>
  static __device__ __forceinline__ void store_queries(u8* tile, float* scale, float* bias, Mean /*mean_of*/,
                                                       Factor factor_of, int rows, Source source, QueryPart query) {
    const auto no_mean = [](int) -> const float* { return nullptr; };
    Queries::template store<Fp8, SameDomain>(tile, scale, bias, no_mean, factor_of, rows, source, query);
  }

  // The head_dim that row g (`upper` 0) or g + 8 (1) of the operands' block `mb` holds.
  static __device__ __forceinline__ int dim(int mb, int g, int upper) { return mb * 16 + 2 * g + upper; }
  static __device__ __forceinline__ void store_o(float* row, int mb, int g, float lower, float upper) {
    *reinterpret_cast<float2*>(row + dim(mb, g, 0)) = make_float2(lower, upper);
  }

  // One element of a tile, without its scale.
  static __device__ __forceinline__ float value(const u8* tile, int row, int dim) {
    u32 pairs[2];
    e4m3::widen(pairs, tile[Tile::offset(row, dim / 16) + dim % 16]);
    return ptx::to_float(Half{static_cast<u16>(pairs[0])});
  }
  // Whether no element of a tile of `rows` is NaN; the answer is the same in all lanes.
  static __device__ __forceinline__ bool all_finite(const u8* tile, int rows, int lane) {
    u32 found = 0;
    for (int offset = lane * 4; offset < rows * Tile::ROW_BYTES; offset += WARP * 4) {
      found |= e4m3::is_nan(*reinterpret_cast<const u32*>(tile + offset));
    }
    return __all_sync(FULL_MASK, (found & 0x80808080u) == 0);
  }
};

#endif
