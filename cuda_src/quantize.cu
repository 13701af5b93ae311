// quantize.cu -- rows of fp32, fp16 or bf16 to TBQ4 codes and norms.
// SPDX-License-Identifier: Apache-2.0
//
//   grid   blocks of values / (NUM_WARPS * 4), rounded up      block  NUM_WARPS * 32
//   warp   four blocks of BLOCK values, eight lanes each
//
// Row r of x is [dim0, dim1, heads] index r; a row has HEAD_DIM / BLOCK blocks. float32 throughout.
#include "common/params.cuh"
#include "common/ptx.cuh"
#include "kv/tbq4_codec.cuh"

namespace {

using In = ElemOf<cfg::IN_DTYPE>::type;

constexpr int BLOCKS_PER_ROW = cfg::HEAD_DIM / cfg::BLOCK;
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

__device__ __forceinline__ void quantize(const QuantizeParams& p) {
  const int lane = threadIdx.x % WARP, sub = lane % tbq4::LANES;
  const i64 warp = static_cast<i64>(blockIdx.x) * cfg::NUM_WARPS + threadIdx.x / WARP;
  const i64 block = warp * (WARP / tbq4::LANES) + lane / tbq4::LANES;
  const bool inside = block < p.num_rows * BLOCKS_PER_ROW;
  const i64 row = inside ? block / BLOCKS_PER_ROW : 0;  // lanes past the end work on row 0, for the shuffles' sake
  const int dim = static_cast<int>(block % BLOCKS_PER_ROW) * cfg::BLOCK + sub * tbq4::VALUES;
  const i64 head = row % p.heads, i1 = row / p.heads % p.dim1, i0 = row / p.heads / p.dim1;

  float x[tbq4::VALUES];
  load(x, p.x + i0 * p.x_stride_dim0 + i1 * p.x_stride_dim1 + head * p.x_stride_head + dim * sizeof(In));
  if (p.mean != nullptr) {
#pragma unroll
    for (int j = 0; j < tbq4::VALUES; ++j) x[j] -= __ldg(p.mean + head * cfg::HEAD_DIM + dim + j);
  }
  float squares = 0.f;
#pragma unroll
  for (int j = 0; j < tbq4::VALUES; ++j) squares += x[j] * x[j];
  const float norm = sqrtf(tbq4::block_sum(squares));
  const float inverse = norm > cfg::MIN_NORM ? 1.f / norm : 0.f;

  tbq4::apply_signs(x, cfg::SIGNS1, sub);
#pragma unroll
  for (int j = 0; j < tbq4::VALUES; ++j) x[j] *= inverse;
  tbq4::hadamard(x, sub);
#pragma unroll
  for (int j = 0; j < tbq4::VALUES; ++j) x[j] *= cfg::ROOT;
  tbq4::apply_signs(x, cfg::SIGNS2, sub);

  u32 codes[tbq4::CODE_BYTES / 4];
  float levels = 0.f;
#pragma unroll
  for (int word = 0; word < tbq4::CODE_BYTES / 4; ++word) {
    codes[word] = 0;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      float level_squared;
      codes[word] |= tbq4::encode(x[word * 8 + j], level_squared) << (4 * j);
      levels += level_squared;
    }
  }
  // The decoded block gets the norm of the row.
  const float stored = norm / sqrtf(tbq4::block_sum(levels));
  if (!inside) return;
  u8* target = p.codes + row * (cfg::HEAD_DIM / 2) + dim / 2;
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
    p.norms[block] = half;
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(cfg::NUM_WARPS* WARP, cfg::CTAS_PER_SM)
    quantize_kernel(const __grid_constant__ QuantizeParams p) {
  quantize(p);
}
