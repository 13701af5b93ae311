// quantize.cu -- rows of fp32, fp16 or bf16 to TBQ4 codes and norms.
// SPDX-License-Identifier: Apache-2.0
//
//   grid   enough for all SMs, or fewer      block  NUM_WARPS * 32
//   warp   four blocks of BLOCK values at a time, eight lanes each, until none is left
//
// Row r of x is [dim0, dim1, heads] index r; a row has HEAD_DIM / BLOCK blocks. float32 throughout.
#include "common/params.cuh"
#include "common/ptx.cuh"
#include "kv/tbq4_codec.cuh"

namespace {

using In = ElemOf<cfg::IN_DTYPE>::type;

constexpr u32 BLOCKS_PER_ROW = cfg::HEAD_DIM / cfg::BLOCK;
constexpr u32 BLOCKS_PER_WARP = WARP / tbq4::LANES;
static_assert(sizeof(QuantizeParams) == cfg::PARAMS_BYTES, "cuattn/_params.py and params.cuh disagree");

// Element j of 16 bytes.
template <class Elem>
__device__ __forceinline__ float element(const u32 (&words)[4], int j, Elem) {
  return ptx::to_float(Elem{static_cast<u16>(words[j / 2] >> (j % 2 * 16))});
}
__device__ __forceinline__ float element(const u32 (&words)[4], int j, float) { return __uint_as_float(words[j]); }

// VALUES neighboring elements, 16 bytes at a time.
__device__ __forceinline__ void load(float (&x)[tbq4::VALUES], const u8* source) {
  constexpr int PER_LOAD = 16 / sizeof(In);
#pragma unroll
  for (int i = 0; i < tbq4::VALUES / PER_LOAD; ++i) {
    const uint4 raw = reinterpret_cast<const uint4*>(source)[i];
    const u32 words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int j = 0; j < PER_LOAD; ++j) x[i * PER_LOAD + j] = element(words, j, In{});
  }
}

__device__ __forceinline__ void quantize(const QuantizeParams& p, tbq4::Squares& squares) {
  const u32 lane = threadIdx.x % WARP, sub = lane % tbq4::LANES;
  tbq4::fill(squares, cfg::NUM_WARPS * WARP);
  __syncthreads();  // the table is there
  const tbq4::Signs signs(cfg::SIGNS1, cfg::SIGNS2, sub);

  const u32 num_blocks = static_cast<u32>(p.num_rows) * BLOCKS_PER_ROW;
  const u32 step = gridDim.x * cfg::NUM_WARPS * BLOCKS_PER_WARP;
  for (u32 first = (blockIdx.x * cfg::NUM_WARPS + threadIdx.x / WARP) * BLOCKS_PER_WARP; first < num_blocks;
       first += step) {
    const tbq4::Place<BLOCKS_PER_ROW> at(first, num_blocks, lane, p.heads, p.dim1);

    float x[tbq4::VALUES];
    load(x, p.x + at.i0 * p.x_stride_dim0 + at.i1 * p.x_stride_dim1 + at.head * p.x_stride_head + at.dim * sizeof(In));
    if (p.mean != nullptr) {
#pragma unroll
      for (int j = 0; j < tbq4::VALUES; ++j) x[j] -= __ldg(p.mean + at.head * cfg::HEAD_DIM + at.dim + j);
    }
    const tbq4::Encoded block = tbq4::encode(x, signs, squares);
    if (!at.inside) continue;
    u8* codes = p.codes + static_cast<i64>(at.row) * (cfg::HEAD_DIM / 2) + at.dim / 2;
    tbq4::store(block, sub, codes, p.norms + at.block, p.clamped);
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(cfg::NUM_WARPS* WARP, cfg::CTAS_PER_SM)
    quantize_kernel(const __grid_constant__ QuantizeParams p) {
  quantize(p, *reinterpret_cast<tbq4::Squares*>(ptx::dynamic_smem()));
}
