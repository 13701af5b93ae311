// dequantize.cu -- TBQ4 codes and norms to rows of fp32, fp16 or bf16.
// SPDX-License-Identifier: Apache-2.0
//
//   grid   blocks of values / (NUM_WARPS * 4), rounded up      block  NUM_WARPS * 32
//   warp   four blocks of BLOCK values, eight lanes each; float32 until the result is rounded
#include "common/params.cuh"
#include "common/ptx.cuh"
#include "kv/tbq4_codec.cuh"

namespace {

using Out = ElemOf<cfg::OUT_DTYPE>::type;
// What the 16-bit branch packs; it is compiled for float32 results too, and never taken there.
using Pair16 = ElemOf<cfg::OUT_DTYPE == Dtype::FP32 ? Dtype::FP16 : cfg::OUT_DTYPE>::type;

constexpr int BLOCKS_PER_ROW = cfg::HEAD_DIM / cfg::BLOCK;
static_assert(sizeof(DequantizeParams) == cfg::PARAMS_BYTES, "cuattn/_params.py and params.cuh disagree");

__device__ __forceinline__ void dequantize(const DequantizeParams& p) {
  const int lane = threadIdx.x % WARP, sub = lane % tbq4::LANES;
  const i64 warp = static_cast<i64>(blockIdx.x) * cfg::NUM_WARPS + threadIdx.x / WARP;
  const i64 block = warp * (WARP / tbq4::LANES) + lane / tbq4::LANES;
  const bool inside = block < p.num_rows * BLOCKS_PER_ROW;
  const i64 row = inside ? block / BLOCKS_PER_ROW : 0;
  const int part = static_cast<int>(block % BLOCKS_PER_ROW), dim = part * cfg::BLOCK + sub * tbq4::VALUES;
  const i64 head = row % p.heads, i1 = row / p.heads % p.dim1, i0 = row / p.heads / p.dim1;

  const u8* codes =
      p.codes + i0 * p.codes_stride_dim0 + i1 * p.codes_stride_dim1 + head * p.codes_stride_head + dim / 2;
  const u8* norms = p.norms + i0 * p.norms_stride_dim0 + i1 * p.norms_stride_dim1 + head * p.norms_stride_head;
  const float norm = ptx::to_float(reinterpret_cast<const Half*>(norms)[part]);
  float x[tbq4::VALUES];
#pragma unroll
  for (int word = 0; word < tbq4::CODE_BYTES / 4; ++word) {
    const u32 eight = reinterpret_cast<const u32*>(codes)[word];
#pragma unroll
    for (int j = 0; j < 8; ++j) x[word * 8 + j] = tbq4::decode(eight >> (4 * j) & 15);
  }
  tbq4::apply_signs(x, cfg::SIGNS2, sub);
  tbq4::hadamard(x, sub);
  tbq4::apply_signs(x, cfg::SIGNS1, sub);
  const float scale = norm * cfg::ROOT;
#pragma unroll
  for (int j = 0; j < tbq4::VALUES; ++j) {
    x[j] *= scale;
    if (p.mean != nullptr) x[j] += __ldg(p.mean + head * cfg::HEAD_DIM + dim + j);
  }
  if (!inside) return;
  u8* out = p.out + (row * cfg::HEAD_DIM + dim) * static_cast<i64>(sizeof(Out));
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

}  // namespace

extern "C" __global__ void __launch_bounds__(cfg::NUM_WARPS* WARP, cfg::CTAS_PER_SM)
    dequantize_kernel(const __grid_constant__ DequantizeParams p) {
  dequantize(p);
}
