// dequantize.cu -- TBQ4 codes and norms to rows of fp32, fp16 or bf16.
// SPDX-License-Identifier: Apache-2.0
//
//   grid   enough for all SMs, or fewer      block  NUM_WARPS * 32
//   warp   tiles of sixteen blocks of BLOCK values, until none is left
//
// Lane 4g + t reads codes 32c + 8t .. + 7 of blocks g and g + 8, a word for each c, and writes 16 bytes of a row at a
// time, next to those of lane t + 1.
#include "common/params.cuh"
#include "common/ptx.cuh"
#include "kv/tbq4_tile.cuh"

namespace {

using Out = ElemOf<cfg::OUT_DTYPE>::type;
// What the 16-bit branch packs; it is compiled for float32 results too, and never taken there.
using Pair16 = ElemOf<cfg::OUT_DTYPE == Dtype::FP32 ? Dtype::FP16 : cfg::OUT_DTYPE>::type;
using tbq4::CHUNKS;
using tbq4::PER_LANE;
using tbq4::STEPS;

constexpr int RUN = 16 / sizeof(Out);  // results of a lane that lie together
// Levels are float16 operands in two parts, whose sum has 22 bits; as large as this, the lower part is not subnormal.
constexpr float LEVEL_SCALE = 1024.f;
static_assert(sizeof(DequantizeParams) == cfg::PARAMS_BYTES, "cuattn/_params.py and params.cuh disagree");

struct Tables {
  u32 levels[2][256];           // of the two codes of a byte, as float16: upper parts, lower parts
  float4 results[STEPS][4];     // signs of each four results of lanes t
  uint4 operands[STEPS][WARP];  // two B operands of each lane
};
static_assert(sizeof(Tables) == cfg::SMEM_BYTES, "plan and kernel disagree on shared memory");

// Result i of lane t.
__device__ __forceinline__ u32 result_index(u32 i, u32 t) { return i / RUN * 4 * RUN + t * RUN + i % RUN; }

// Elements k, k + 1 of the B operand for codes 32c + 8t + 4k + 2q and + 1: the stages of bits 4, 3, 2 and 0. Results of
// a lane differ in bit 0, and those of the two operands in the bit above a run of 16-bit or the runs of 32-bit results.
__device__ __forceinline__ u32 operand(u32 step, u32 k, u32 which, u32 lane) {
  const u32 in = step / 2 * 32 + lane % 4 * 8 + k * 4 + step % 2 * 2;
  const u32 out = lane / 8 * RUN + which * (RUN == 8 ? 4 : 16) + lane / 4 % 2;
  return 0x3c003c00u | tbq4::is_negative(cfg::SIGNS2, in, out) << 15 |
         tbq4::is_negative(cfg::SIGNS2, in + 1, out) << 31;
}

__device__ __forceinline__ float level(u32 code) {
  return LEVEL_SCALE * (code >= 8 ? cfg::LEVELS[code - 8] : -cfg::LEVELS[7 - code]);
}

__device__ __forceinline__ void fill(Tables& tables) {
  constexpr u32 THREADS = cfg::NUM_WARPS * WARP;
  for (u32 i = threadIdx.x; i < 256; i += THREADS) {
    const float a = level(i % 16), b = level(i / 16);
    const u32 upper = ptx::pack2<Half>(a, b);
    const float upper_a = ptx::to_float(Half{static_cast<u16>(upper)});
    const float upper_b = ptx::to_float(Half{static_cast<u16>(upper >> 16)});
    tables.levels[0][i] = upper;
    tables.levels[1][i] = ptx::pack2<Half>(a - upper_a, b - upper_b);
  }
  for (u32 i = threadIdx.x; i < STEPS * 4; i += THREADS) {
    const auto sign = [i](u32 j) {
      return tbq4::is_negative(cfg::SIGNS1, result_index(i / 4 * 4 + j, i % 4), 0) ? -1.f : 1.f;
    };
    tables.results[i / 4][i % 4] = make_float4(sign(0), sign(1), sign(2), sign(3));
  }
  for (u32 i = threadIdx.x; i < STEPS * WARP; i += THREADS) {
    const u32 step = i / WARP, lane = i % WARP;
    tables.operands[step][lane] = make_uint4(operand(step, 0, 0, lane), operand(step, 1, 0, lane),
                                             operand(step, 0, 1, lane), operand(step, 1, 1, lane));
  }
}

// The input of a lane.
struct Input {
  u32 codes[2][CHUNKS];
  float norms[2];
  u32 mean_offset[2];  // elements

  __device__ __forceinline__ void load(const DequantizeParams& p, const tbq4::Rows& shape, u32 first, u32 num_blocks,
                                       u32 lane) {
    // Each lane finds one block, and learns of two. Past the end the last block is repeated.
    const tbq4::Place at(min(first + lane % tbq4::TILE_BLOCKS, num_blocks - 1), shape);
    const i64 offset = at.i0 * p.codes_stride_dim0 + at.i1 * p.codes_stride_dim1 + at.head * p.codes_stride_head +
                       static_cast<i64>(at.part * (cfg::BLOCK / 2));
    const u8* row_norms =
        p.norms + at.i0 * p.norms_stride_dim0 + at.i1 * p.norms_stride_dim1 + at.head * p.norms_stride_head;
    const float norm = ptx::to_float(reinterpret_cast<const Half*>(row_norms)[at.part]);
    const u32 mean = at.head * cfg::HEAD_DIM + at.part * cfg::BLOCK;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int source = lane / 4 + 8 * r;
      const u8* word = p.codes + __shfl_sync(FULL_MASK, offset, source) + lane % 4 * 4;
#pragma unroll
      for (int c = 0; c < CHUNKS; ++c) codes[r][c] = *reinterpret_cast<const u32*>(word + 16 * c);
      norms[r] = __shfl_sync(FULL_MASK, norm, source);
      if constexpr (cfg::WITH_MEAN) mean_offset[r] = __shfl_sync(FULL_MASK, mean, source);
    }
  }
};

// y <- H s2 levels, times LEVEL_SCALE. One MMA for each part of the levels does the stages of bits 4, 3, 2 and 0.
__device__ __forceinline__ void rotate(float (&y)[2][PER_LANE], const Input& x, const Tables& tables, u32 lane) {
  const u32 levels = ptx::smem_addr(tables.levels);  // a multiple of the size of a table
#pragma unroll
  for (int step = 0; step < STEPS; ++step) {
    const int c = step / 2, q = step % 2;
    u32 upper[4], lower[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int shift = 16 * (i / 2) + 8 * q;
      const u32 codes = x.codes[i % 2][c], entry = (shift != 0 ? codes >> (shift - 2) : codes << 2) & 255 * 4;
      upper[i] = ptx::ld_shared(levels | entry);
      lower[i] = ptx::ld_shared((levels | entry) + sizeof(tables.levels[0]));
    }
    const uint4 b = tables.operands[step][lane];
    const u32 operands[2][2] = {{b.x, b.y}, {b.z, b.w}};
#pragma unroll
    for (int which = 0; which < 2; ++which) {
      float d[4];
      ptx::mul_m16n8k16<Half>(d, lower, operands[which]);
      ptx::mma_m16n8k16<Half>(d, upper, operands[which]);
#pragma unroll
      for (int i = 0; i < 4; ++i) y[i / 2][8 * c + 4 * which + 2 * q + i % 2] = d[i];
    }
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) tbq4::butterflies<0b11010>(y[r]);
}

// RUN results to 16 bytes of a row.
__device__ __forceinline__ void store(u8* row, const float (&x)[RUN]) {
  if constexpr (sizeof(Out) == 4) {
    *reinterpret_cast<float4*>(row) = make_float4(x[0], x[1], x[2], x[3]);
  } else {
    u32 w[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) w[i] = ptx::pack2<Pair16>(x[2 * i % RUN], x[(2 * i + 1) % RUN]);
    *reinterpret_cast<uint4*>(row) = make_uint4(w[0], w[1], w[2], w[3]);
  }
}

__device__ __forceinline__ void dequantize(const DequantizeParams& p, Tables& tables) {
  fill(tables);
  __syncthreads();  // the tables are there
  ptx::griddepcontrol_wait();
  const u32 lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
  const tbq4::Rows shape(p.heads, p.dim1);
  const u32 num_blocks = static_cast<u32>(p.num_rows) * tbq4::BLOCKS_PER_ROW;
  const u32 step = gridDim.x * cfg::NUM_WARPS * tbq4::TILE_BLOCKS;
  u32 first = (blockIdx.x * cfg::NUM_WARPS + threadIdx.x / WARP) * tbq4::TILE_BLOCKS;
  if (first >= num_blocks) return;
  Input x;
  x.load(p, shape, first, num_blocks, lane);
  for (; first < num_blocks; first += step) {
    float y[2][PER_LANE];
    rotate(y, x, tables, lane);
    const float scales[2] = {x.norms[0] * (cfg::ROOT / LEVEL_SCALE), x.norms[1] * (cfg::ROOT / LEVEL_SCALE)};
    const u32 mean_offset[2] = {x.mean_offset[0], x.mean_offset[1]};
    if (first + step < num_blocks) x.load(p, shape, first + step, num_blocks, lane);

#pragma unroll
    for (int run = 0; run < PER_LANE / RUN; ++run) {
      float signs[RUN];
#pragma unroll
      for (int i = 0; i < RUN / 4; ++i) {
        const float4 four = tables.results[run * RUN / 4 + i][t];
        signs[4 * i] = four.x, signs[4 * i + 1] = four.y, signs[4 * i + 2] = four.z, signs[4 * i + 3] = four.w;
      }
      const u32 element = result_index(run * RUN, t);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float values[RUN];
#pragma unroll
        for (int i = 0; i < RUN; ++i) {
          values[i] = y[r][run * RUN + i] * scales[r];
          values[i] *= signs[i];
        }
        if constexpr (cfg::WITH_MEAN) {
#pragma unroll
          for (int i = 0; i < RUN; i += 4) {
            // An ordinary load stays behind the stores before it: there are no registers for all of the mean.
            const float4 m = *reinterpret_cast<const float4*>(p.mean + mean_offset[r] + element + i);
            values[i] += m.x, values[i + 1] += m.y, values[i + 2] += m.z, values[i + 3] += m.w;
          }
        }
        const u32 block = first + g + 8 * r;
        if (block < num_blocks) store(p.out + (static_cast<i64>(block) * cfg::BLOCK + element) * sizeof(Out), values);
      }
    }
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(cfg::NUM_WARPS* WARP, cfg::CTAS_PER_SM)
    dequantize_kernel(const __grid_constant__ DequantizeParams p) {
  dequantize(p, *reinterpret_cast<Tables*>(ptx::dynamic_smem()));
}
