// common/decode_result.cuh -- the end of decode.cu: a CTA's result from its warps', and a cluster's from its CTAs'.
// SPDX-License-Identifier: Apache-2.0
#ifndef CUATTN_COMMON_DECODE_RESULT_CUH
#define CUATTN_COMMON_DECODE_RESULT_CUH
#include "common/decode_work.cuh"
#include "common/elements.cuh"
#include "common/ptx.cuh"
#include "common/softmax.cuh"

// Of a row: a lane has four values of every 128.
constexpr int RESULT_VECTORS = (cfg::HEAD_DIM + 4 * WARP - 1) / (4 * WARP);

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

// The place of a row's result, whose values lie side by side.
__device__ __forceinline__ u8* out_row(const DecodeParams& p, const Work& w, int row) {
  return p.out + w.batch * p.out_stride_batch + w.token(p, row) * p.out_stride_token + w.head(p, row) * p.out_stride_head;
}

// Merges the warps, adds the sink, writes the result of the split: a warp has a row. `sm` has what the warps left; in a
// cluster the row's result takes the place of the first warp's, in the order of head_dim.
template <class Elem, class VHead, class Smem>
__device__ __forceinline__ void finish(const DecodeParams& p, const Work& w, Smem& sm) {
  constexpr int VECTORS = RESULT_VECTORS;
  const bool in_cluster = p.in_cluster != 0, direct = p.out_partial == nullptr && !in_cluster;
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
      if (in_cluster) {
        // Its readers in other lanes have exchanged what they read.
        sm.m[0][row] = total_m;
        sm.l[0][row] = l;
      } else if (!direct) {
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
    if (in_cluster) __syncwarp();  // all lanes have read the warps' o of the row
    // The mean counts with the keys' share of the weights.
    const float keys = mean == nullptr ? 0.f : l_keys * softmax::weight(m, total_m) * scale;
    u8* out = out_row(p, w, row);
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
        store4(in_cluster ? &sm.o[0][row][dim] : p.out_partial + flat * cfg::HEAD_DIM + dim, result);
      }
    }
  }
}

// A split without keys is its state alone.
template <class Smem>
__device__ __forceinline__ void leave_empty(const DecodeParams& p, const Work& w, Smem& sm) {
  for (int row = threadIdx.x; row < w.end_row(); row += cfg::NUM_WARPS * WARP) {
    if (!w.has(row)) continue;
    if (p.in_cluster != 0) {
      sm.l[0][row] = EMPTY_PART;
    } else {
      reinterpret_cast<float2*>(p.state_partial)[w.flat(p, row)] = make_float2(neg_inf(), EMPTY_PART);
    }
  }
}

// Merges the splits of the rows, which are the CTAs of a cluster, by the rule of merge.cu: in the order of their
// numbers, each result in shared memory of its CTA. A warp has 128 values of a row, and a lane the state of one split.
template <class Elem, class Smem>
__device__ __forceinline__ void merge_cluster(const DecodeParams& p, const Work& w, Smem& sm) {
  constexpr int AT_ONCE = 4;
  const int lane = threadIdx.x % WARP, splits = p.num_splits;
  ptx::cluster_arrive();
  ptx::cluster_wait();  // the results of all CTAs are there
#pragma unroll 1
  for (int index = w.split + static_cast<int>(threadIdx.x / WARP) * splits; index < w.end_row() * RESULT_VECTORS;
       index += cfg::NUM_WARPS * splits) {
    const int row = index / RESULT_VECTORS, dim = (index % RESULT_VECTORS * WARP + lane) * 4;
    if (!w.has(row)) continue;
    float own_m = neg_inf(), own_l = EMPTY_PART;
    if (lane < splits) {
      own_m = ptx::ld_cluster_f32(ptx::mapa(&sm.m[0][row], lane));
      own_l = ptx::ld_cluster_f32(ptx::mapa(&sm.l[0][row], lane));
    }
    const bool is_filled = !(own_l < 0.f);  // the sum of a split with NaN among its scores is NaN
    const u32 filled = __ballot_sync(FULL_MASK, is_filled);
    if (!is_filled) own_m = neg_inf();  // was not written
    const float m = over_warp(own_m, [](float a, float b) { return fmaxf(a, b); });
    const float own_weight = is_filled ? softmax::weight(own_m, m) : 0.f;
    const float l = over_warp(is_filled ? own_weight * own_l : 0.f, [](float a, float b) { return a + b; });
    float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
    for (int first = 0; first < splits; first += AT_ONCE) {
      float4 values[AT_ONCE];
#pragma unroll
      for (int i = 0; i < AT_ONCE; ++i) {
        values[i] = make_float4(0.f, 0.f, 0.f, 0.f);
        if ((filled >> (first + i) & 1) != 0 && dim < cfg::HEAD_DIM) {
          values[i] = ptx::ld_cluster_f32x4(ptx::mapa(&sm.o[0][row][dim], first + i));
        }
      }
#pragma unroll
      for (int i = 0; i < AT_ONCE; ++i) {
        const float weight = __shfl_sync(FULL_MASK, own_weight, first + i);
        sum.x += weight * values[i].x, sum.y += weight * values[i].y;
        sum.z += weight * values[i].z, sum.w += weight * values[i].w;
      }
    }
    const float total = l == 0.f ? 1.f : l;  // without keys the numerators are 0
    if (dim < cfg::HEAD_DIM) {
      store4(reinterpret_cast<Elem*>(out_row(p, w, row)) + dim,
             make_float4(sum.x / total, sum.y / total, sum.z / total, sum.w / total));
    }
    if (p.lse != nullptr && index % RESULT_VECTORS == 0 && lane == 0) {
      p.lse[w.flat_in_batch(p, row)] = softmax::lse(m, l);
    }
  }
  ptx::cluster_arrive();
  ptx::cluster_wait();  // no CTA ends while others read its shared memory
}

#endif
