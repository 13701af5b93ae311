// merge.cu -- one result from partial results over disjoint keys.
// SPDX-License-Identifier: Apache-2.0
//
//   grid   dim0 * dim1 * heads rows      block  NUM_WARPS * 32
//   CTA    one row; warp w takes parts w, w + NUM_WARPS, ...; a lane holds 4 elements of every 128
//
// What an empty part's out holds does not count: it may be anything.
#include "common/elements.cuh"
#include "common/params.cuh"
#include "common/softmax.cuh"

namespace {

using In = ElemOf<cfg::IN_DTYPE>::type;
using Out = ElemOf<cfg::OUT_DTYPE>::type;

constexpr int VECTORS = (cfg::HEAD_DIM + 4 * WARP - 1) / (4 * WARP);

struct Smem {
  float o[cfg::NUM_WARPS][cfg::HEAD_DIM];
  float max[cfg::NUM_WARPS];
  float sum[cfg::NUM_WARPS];
};
static_assert(sizeof(Smem) == cfg::SMEM_BYTES, "cuattn/_plan and merge.cu disagree on shared memory");
static_assert(sizeof(MergeParams) == cfg::PARAMS_BYTES, "cuattn/_params.py and params.cuh disagree");

__device__ __forceinline__ void merge(const MergeParams& p, Smem& sm) {
  const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
  const u32 row = blockIdx.x, heads = static_cast<u32>(p.heads), dim1 = static_cast<u32>(p.dim1);
  const i64 head = row % heads, i1 = row / heads % dim1, i0 = row / heads / dim1;
  const u8* const all_out_partial = p.out_partial + i0 * p.out_partial_stride_dim0 + i1 * p.out_partial_stride_dim1 +
                                    head * p.out_partial_stride_head;
  const u8* const all_lse_partial = reinterpret_cast<const u8*>(p.lse_partial) + i0 * p.lse_partial_stride_dim0 +
                                    i1 * p.lse_partial_stride_dim1 + head * p.lse_partial_stride_head;

  ptx::read_ahead(p);
  // At once: no grid passes its own wait before this one has ended, and so has the one before.
  ptx::griddepcontrol_launch_dependents();
  ptx::griddepcontrol_wait();
  const int first_part = p.shares == nullptr ? 0 : p.shares[2 * i0];
  const int num_parts = p.shares == nullptr ? p.num_parts : p.shares[2 * i0 + 1];
  const u8* const out_partial = all_out_partial + first_part * p.out_partial_stride_part;
  const u8* const lse_partial = all_lse_partial + first_part * p.lse_partial_stride_part;
  // (m, l) of a part; l < 0: empty. An lse is the m of one key, in natural units.
  const auto state = [&](int part) {
    const float* source = reinterpret_cast<const float*>(lse_partial + part * p.lse_partial_stride_part);
    if constexpr (cfg::PARTS == Parts::STATE) return *reinterpret_cast<const float2*>(source);
    return make_float2(*source, *source == neg_inf() ? EMPTY_PART : 1.f);
  };

  // Some parts of this warp on their way together, the first of them while the maximum is found: a row is few bytes,
  // and what it takes is trips to memory.
  float2 states[cfg::PARTS_AT_ONCE];
  float4 values[cfg::PARTS_AT_ONCE][VECTORS];
  const auto load = [&](int first) {
#pragma unroll
    for (int k = 0; k < cfg::PARTS_AT_ONCE; ++k) {
      const int part = first + k * cfg::NUM_WARPS;
      const bool exists = part < num_parts;
      states[k] = exists ? state(part) : make_float2(neg_inf(), EMPTY_PART);
      const In* source = reinterpret_cast<const In*>(out_partial + part * p.out_partial_stride_part);
#pragma unroll
      for (int i = 0; i < VECTORS; ++i) {
        const int dim = (i * WARP + lane) * 4;
        if (exists && dim < cfg::HEAD_DIM) values[k][i] = load4(source + dim);
      }
    }
  };
  load(warp);

  float m = neg_inf();
  for (int part = threadIdx.x; part < num_parts; part += cfg::NUM_WARPS * WARP) m = fmaxf(m, state(part).x);
#pragma unroll
  for (int bit = 1; bit < WARP; bit *= 2) m = fmaxf(m, __shfl_xor_sync(FULL_MASK, m, bit));
  if (lane == 0) sm.max[warp] = m;
  __syncthreads();  // the maxima of all warps are there
#pragma unroll
  for (int i = 0; i < cfg::NUM_WARPS; ++i) m = fmaxf(m, sm.max[i]);

  float4 o[VECTORS];
#pragma unroll
  for (int i = 0; i < VECTORS; ++i) o[i] = make_float4(0.f, 0.f, 0.f, 0.f);
  float sum = 0.f;
  for (int first = warp; first < num_parts; first += cfg::PARTS_AT_ONCE * cfg::NUM_WARPS) {
    if (first > warp) load(first);
#pragma unroll
    for (int k = 0; k < cfg::PARTS_AT_ONCE; ++k) {
      if (states[k].y < 0.f) continue;
      const float x = states[k].x;
      const float w = cfg::PARTS == Parts::STATE ? softmax::weight(x, m) : softmax::natural_weight(x - m);
      sum += w * states[k].y;
#pragma unroll
      for (int i = 0; i < VECTORS; ++i) {
        if ((i * WARP + lane) * 4 >= cfg::HEAD_DIM) continue;
        o[i].x += w * values[k][i].x;
        o[i].y += w * values[k][i].y;
        o[i].z += w * values[k][i].z;
        o[i].w += w * values[k][i].w;
      }
    }
  }
#pragma unroll
  for (int i = 0; i < VECTORS; ++i) {
    const int dim = (i * WARP + lane) * 4;
    if (dim < cfg::HEAD_DIM) store4(&sm.o[warp][dim], o[i]);
  }
  if (lane == 0) sm.sum[warp] = sum;
  __syncthreads();  // the sums of all warps are there

  sum = 0.f;
#pragma unroll
  for (int i = 0; i < cfg::NUM_WARPS; ++i) sum += sm.sum[i];
  const float total = sum == 0.f ? 1.f : sum;  // without keys the numerators are 0
  u8* out = p.out + i0 * p.out_stride_dim0 + i1 * p.out_stride_dim1 + head * p.out_stride_head;
  for (int dim = threadIdx.x * 4; dim < cfg::HEAD_DIM; dim += cfg::NUM_WARPS * WARP * 4) {
    float4 x = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
    for (int i = 0; i < cfg::NUM_WARPS; ++i) {
      const float4 y = load4(&sm.o[i][dim]);
      x = make_float4(x.x + y.x, x.y + y.y, x.z + y.z, x.w + y.w);
    }
    // Divided, not multiplied by an inverse: a rounding less, which float32 results show.
    store4(reinterpret_cast<Out*>(out) + dim, make_float4(x.x / total, x.y / total, x.z / total, x.w / total));
  }
  if (p.lse != nullptr && threadIdx.x == 0) {
    p.lse[row] = cfg::PARTS == Parts::STATE ? softmax::lse(m, sum) : softmax::lse(0.f, sum) + m;
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(cfg::NUM_WARPS* WARP, cfg::CTAS_PER_SM)
    merge_kernel(const __grid_constant__ MergeParams p) {
  merge(p, *reinterpret_cast<Smem*>(ptx::dynamic_smem()));
}
