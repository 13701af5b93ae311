// kv/raw16.cuh -- K/V rows of fp16 or bf16: head_dim elements, contiguous, no scale.
// SPDX-License-Identifier: Apache-2.0
#ifndef CUATTN_KV_RAW16_CUH
#define CUATTN_KV_RAW16_CUH
#include "common/ptx.cuh"
#include "common/tile16.cuh"

template <class Elem, int HEAD_DIM>
struct Raw16 : Tile16<HEAD_DIM> {
  using Tile = Tile16<HEAD_DIM>;

  // A operand of S^T = K Q^T: tokens row0 .. row0+15, head_dim 16 kb .. 16 kb + 15.
  static __device__ __forceinline__ void load_k(u32 (&a)[4], const u8* tile, int row0, int kb, int lane) {
    ptx::ldmatrix_x4(a, tile + Tile::offset(row0 + lane % 16, 2 * kb + lane / 16));
  }

  // A operand of O^T = V^T P^T: head_dim 16 mb .. 16 mb + 15, tokens row0 .. row0+15.
  static __device__ __forceinline__ void load_v(u32 (&a)[4], const u8* tile, int row0, int mb, int lane) {
    ptx::ldmatrix_x4_trans(a, tile + Tile::offset(row0 + lane % 8 + lane / 16 * 8, 2 * mb + lane / 8 % 2));
  }

  // One element.
  static __device__ __forceinline__ float value(const u8* tile, int row, int dim) {
    return ptx::to_float(*reinterpret_cast<const Elem*>(tile + Tile::offset(row, dim / 8) + dim % 8 * 2));
  }

  // Whether no element of a tile of `rows` is infinite or NaN; the answer is the same in all lanes.
  static __device__ __forceinline__ bool all_finite(const u8* tile, int rows, int lane) {
    constexpr u32 EXPONENT = ElemTraits<Elem>::EXPONENT;  // all ones in infinities and NaN
    bool finite = true;
    for (int offset = lane * 4; offset < rows * Tile::ROW_BYTES; offset += WARP * 4) {
      const u32 pair = *reinterpret_cast<const u32*>(tile + offset);
      finite &= (pair & EXPONENT) != EXPONENT && (pair >> 16 & EXPONENT) != EXPONENT;
    }
    return __all_sync(FULL_MASK, finite);
  }
};

#endif
