// common/decode_result.cuh -- the end of decode.cu: a CTA's result from what its warps left in shared memory.
// SPDX-License-Identifier: Apache-2.0
#ifndef CUATTN_COMMON_DECODE_RESULT_CUH
#define CUATTN_COMMON_DECODE_RESULT_CUH
#include "common/decode_work.cuh"
#include "common/elements.cuh"
#include "common/ptx.cuh"
#include "common/softmax.cuh"

template <class Combine>
__device__ __forceinline__ float over_warp(float x, Combine combine) {
#pragma unroll
  for (int bit = 1; bit < WARP; bit *= 2) x = combine(x, __shfl_xor_sync(FULL_MASK, x, bit));
  return x;
}

// What values of a KV head are multiplied by.
__device__ __forceinline__ float head_scale(const float* of_heads, float of_all, int kv_head) {
  return of_heads == nullptr ? of_all : __ldg(of_heads + kv_head);
}

// Merges the warps, adds the sink, writes the result of the split: a warp has a row, a lane four values of every 128.
template <class Elem, class VHead, class Smem>
__device__ __forceinline__ void finish(const DecodeParams& p, const Work& w, const Smem& sm) {
  constexpr int VECTORS = (cfg::HEAD_DIM + 4 * WARP - 1) / (4 * WARP);
  const bool direct = p.out_partial == nullptr;
  const int lane = threadIdx.x % WARP;
#pragma unroll 1
  for (int row = threadIdx.x / WARP; row < w.end_row(); row += cfg::NUM_WARPS) {
    if (!w.has(row)) continue;
    const float* mean = p.v_mean == nullptr ? nullptr : p.v_mean + w.kv_head_of(row) * cfg::HEAD_DIM;
    // A lane has the state of one warp.
    const bool of_warp = lane < cfg::NUM_WARPS;
    const float own_m = of_warp ? sm.m[lane][row] : neg_inf();
    const float m = over_warp(own_m, [](float a, float b) { return fmaxf(a, b); });
    const float own_l = of_warp ? sm.l[lane][row] * softmax::weight(own_m, m) : 0.f;
    const float l_keys = over_warp(own_l, [](float a, float b) { return a + b; });
    float l = l_keys, total_m = m;
    if (p.sinks != nullptr && w.split == 0) {
      softmax::add_sink(__ldg(p.sinks + w.head(p, row)), total_m, l);
    }
    // Parts go to merge.cu as they are: a rounded lse would cost their weights the precision that it lost.
    const float scale = direct ? softmax::inverse_sum(l) : 1.f;
    const float v_scale = VHead::HAS_SCALE ? head_scale(p.v_scales, p.v_scale, w.kv_head_of(row)) : 1.f;
    const float own_weight = softmax::weight(own_m, total_m) * scale * v_scale;  // of a warp's o in the result
    const i64 flat = w.flat(p, row);
    if (lane == 0) {
      if (!direct) {
        reinterpret_cast<float2*>(p.state_partial)[flat] = make_float2(total_m, l);
      } else if (p.lse != nullptr) {
        p.lse[flat] = softmax::lse(total_m, l);
      }
    }

    float x[VECTORS][4];
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) x[i][j] = 0.f;
    }
#pragma unroll
    for (int warp = 0; warp < cfg::NUM_WARPS; ++warp) {
      const float weight = __shfl_sync(FULL_MASK, own_weight, warp);
#pragma unroll
      for (int i = 0; i < VECTORS; ++i) {
        const int dim = (i * WARP + lane) * 4;
        if (dim >= cfg::HEAD_DIM) continue;
        const float4 y = *reinterpret_cast<const float4*>(&sm.o[warp][row][VHead::o_place(dim)]);
        x[i][0] += weight * y.x, x[i][1] += weight * y.y, x[i][2] += weight * y.z, x[i][3] += weight * y.w;
      }
    }
    VHead::restore(x, lane);
    // The mean counts with the keys' share of the weights.
    const float keys = mean == nullptr ? 0.f : l_keys * softmax::weight(m, total_m) * scale;
    u8* out = p.out + w.batch * p.out_stride_batch + w.token(p, row) * p.out_stride_token +
              w.head(p, row) * p.out_stride_head;
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
      const int dim = (i * WARP + lane) * 4;
      if (dim >= cfg::HEAD_DIM) continue;
      if (mean != nullptr) {
#pragma unroll
        for (int j = 0; j < 4; ++j) x[i][j] += keys * __ldg(mean + dim + j);
      }
      const float4 result = make_float4(x[i][0], x[i][1], x[i][2], x[i][3]);
      if (direct) {
        store4(reinterpret_cast<Elem*>(out) + dim, result);
      } else {
        store4(p.out_partial + flat * cfg::HEAD_DIM + dim, result);
      }
    }
  }
}

// A split without keys is its state alone.
__device__ __forceinline__ void leave_empty(const DecodeParams& p, const Work& w) {
  for (int row = threadIdx.x; row < w.end_row(); row += cfg::NUM_WARPS * WARP) {
    if (!w.has(row)) continue;
    reinterpret_cast<float2*>(p.state_partial)[w.flat(p, row)] = make_float2(neg_inf(), EMPTY_PART);
  }
}

#endif
