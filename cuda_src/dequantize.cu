// dequantize.cu -- TBQ4 codes and norms to rows of fp32, fp16 or bf16.
// SPDX-License-Identifier: Apache-2.0
//
//   grid   enough for all SMs, or fewer      block  NUM_WARPS * 32
//   warp   four blocks of BLOCK values at a time, eight lanes each; float32 until the result is rounded
#include "common/params.cuh"
#include "common/ptx.cuh"
#include "kv/tbq4_codec.cuh"

namespace {

using Out = ElemOf<cfg::OUT_DTYPE>::type;
// What the 16-bit branch packs; it is compiled for float32 results too, and never taken there.
using Pair16 = ElemOf<cfg::OUT_DTYPE == Dtype::FP32 ? Dtype::FP16 : cfg::OUT_DTYPE>::type;

constexpr u32 BLOCKS_PER_ROW = cfg::HEAD_DIM / cfg::BLOCK;
constexpr u32 BLOCKS_PER_WARP = WARP / tbq4::LANES;
static_assert(sizeof(DequantizeParams) == cfg::PARAMS_BYTES, "cuattn/_params.py and params.cuh disagree");

__device__ __forceinline__ void dequantize(const DequantizeParams& p, float (&levels)[16][WARP]) {
  const u32 lane = threadIdx.x % WARP, sub = lane % tbq4::LANES;
  for (u32 i = threadIdx.x; i < 16 * WARP; i += cfg::NUM_WARPS * WARP) {
    const u32 code = i / WARP;
    levels[code][i % WARP] = code >= 8 ? cfg::LEVELS[code - 8] : -cfg::LEVELS[7 - code];
  }
  __syncthreads();                                         // the table is there
  const tbq4::Signs signs(cfg::SIGNS2, cfg::SIGNS1, sub);  // exchanged: the transpose

  const u32 num_blocks = static_cast<u32>(p.num_rows) * BLOCKS_PER_ROW;
  const u32 step = gridDim.x * cfg::NUM_WARPS * BLOCKS_PER_WARP;
  for (u32 first = (blockIdx.x * cfg::NUM_WARPS + threadIdx.x / WARP) * BLOCKS_PER_WARP; first < num_blocks;
       first += step) {
    const tbq4::Place<BLOCKS_PER_ROW> at(first, num_blocks, lane, p.heads, p.dim1);

    const u8* codes = p.codes + at.i0 * p.codes_stride_dim0 + at.i1 * p.codes_stride_dim1 +
                      at.head * p.codes_stride_head + at.dim / 2;
    const u8* norms =
        p.norms + at.i0 * p.norms_stride_dim0 + at.i1 * p.norms_stride_dim1 + at.head * p.norms_stride_head;
    const float norm = ptx::to_float(reinterpret_cast<const Half*>(norms)[at.part]);
    float x[tbq4::VALUES];
#pragma unroll
    for (int word = 0; word < tbq4::CODE_BYTES / 4; ++word) {
      const u32 eight = reinterpret_cast<const u32*>(codes)[word];
#pragma unroll
      for (int j = 0; j < 8; ++j) x[word * 8 + j] = signs.first[word * 8 + j] * levels[eight >> (4 * j) & 15][lane];
    }
    tbq4::hadamard(x, signs);
#pragma unroll
    for (int j = 0; j < tbq4::VALUES; ++j) {
      x[j] *= signs.second[j] * norm;
      if (p.mean != nullptr) x[j] += __ldg(p.mean + at.head * cfg::HEAD_DIM + at.dim + j);
    }
    if (!at.inside) continue;
    u8* out = p.out + (static_cast<i64>(at.row) * cfg::HEAD_DIM + at.dim) * static_cast<i64>(sizeof(Out));
    if constexpr (sizeof(Out) == 4) {
#pragma unroll
      for (int i = 0; i < tbq4::VALUES / 4; ++i) {
        reinterpret_cast<float4*>(out)[i] = make_float4(x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3]);
      }
    } else {
#pragma unroll
      for (int i = 0; i < tbq4::VALUES / 8; ++i) {
        u32 w[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) w[j] = ptx::pack2<Pair16>(x[8 * i + 2 * j], x[8 * i + 2 * j + 1]);
        reinterpret_cast<uint4*>(out)[i] = make_uint4(w[0], w[1], w[2], w[3]);
      }
    }
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(cfg::NUM_WARPS* WARP, cfg::CTAS_PER_SM)
    dequantize_kernel(const __grid_constant__ DequantizeParams p) {
  // The levels, a copy for each lane, so that no two lanes meet in a bank.
  dequantize(p, *reinterpret_cast<float (*)[16][WARP]>(ptx::dynamic_smem()));
}
