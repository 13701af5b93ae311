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
constexpr u16 MAX_HALF = 0x7bff;   // 65504
constexpr u16 QUIET_NAN = 0x7e00;  // the one NaN of the format
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

__device__ __forceinline__ void quantize(const QuantizeParams& p, float (&squares)[8][WARP]) {
  const u32 lane = threadIdx.x % WARP, sub = lane % tbq4::LANES;
  for (u32 i = threadIdx.x; i < 8 * WARP; i += cfg::NUM_WARPS * WARP) {
    squares[i / WARP][i % WARP] = cfg::LEVELS_SQUARED[i / WARP];
  }
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
    float sum = 0.f;
#pragma unroll
    for (int j = 0; j < tbq4::VALUES; ++j) sum += x[j] * x[j];
    const float norm = sqrtf(tbq4::block_sum(sum));
    const float inverse = norm > cfg::MIN_NORM ? 1.f / norm : 0.f;
#pragma unroll
    for (int j = 0; j < tbq4::VALUES; ++j) x[j] *= signs.first[j] * inverse;
    tbq4::hadamard(x, signs);

    u32 codes[tbq4::CODE_BYTES / 4];
    float length = 0.f;
#pragma unroll
    for (int word = 0; word < tbq4::CODE_BYTES / 4; ++word) {
      codes[word] = 0;
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float u = x[word * 8 + j] * signs.second[word * 8 + j];
        const u32 index = tbq4::magnitude_index(u);
        codes[word] |= tbq4::code_of(u, index) << (4 * j);
        length += squares[index][lane];
      }
    }
    // The decoded block gets the norm of the row.
    const float stored = norm / sqrtf(tbq4::block_sum(length));
    if (!at.inside) continue;
    u8* target = p.codes + static_cast<i64>(at.row) * (cfg::HEAD_DIM / 2) + at.dim / 2;
    if constexpr (tbq4::CODE_BYTES == 8) {
      *reinterpret_cast<uint2*>(target) = make_uint2(codes[0], codes[tbq4::CODE_BYTES / 4 - 1]);
    } else {
      *reinterpret_cast<u32*>(target) = codes[0];
    }
    if (sub == 0) {
      u16 half = static_cast<u16>(ptx::pack2<Half>(stored, 0.f));
      if (stored != stored) {
        half = QUIET_NAN;
      } else if (half > MAX_HALF && stored != __uint_as_float(0x7f800000u)) {
        half = MAX_HALF;
        atomicAdd(p.clamped, 1);
      }
      p.norms[at.block] = half;
    }
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(cfg::NUM_WARPS* WARP, cfg::CTAS_PER_SM)
    quantize_kernel(const __grid_constant__ QuantizeParams p) {
  // Squares of the levels, a copy for each lane, so that no two lanes meet in a bank.
  quantize(p, *reinterpret_cast<float (*)[8][WARP]>(ptx::dynamic_smem()));
}
