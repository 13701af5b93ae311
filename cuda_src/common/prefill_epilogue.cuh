// common/prefill_epilogue.cuh -- from accumulators to out and lse, or to a split's part of them.
// SPDX-License-Identifier: Apache-2.0
#ifndef CUATTN_COMMON_PREFILL_EPILOGUE_CUH
#define CUATTN_COMMON_PREFILL_EPILOGUE_CUH
#include "common/elements.cuh"
#include "common/prefill_cta.cuh"
#include "common/ptx.cuh"

namespace {

// Normalizes O, adds sinks and means, rotates back where V is rotated, and stores. Eight rows at a time go through
// shared memory, from lanes that have pieces of each to lanes that have neighboring ones: as they are stored, or in
// float32 for what is left to do in a row.
struct Epilogue {
  using Row = Either<IN_FLOATS, Tile32<DIMS>, Tile16<DIMS>>::type;
  static constexpr int VECTORS = (DIMS + 4 * WARP - 1) / (4 * WARP);
  const PrefillParams& p;
  const Work& w;
  const Smem& sm;
  const Lane& at;
  u8* rows;  // of this warp, and those with the same ones

  __device__ __forceinline__ void store(const Outputs& o, const State& state, int r, int c) const {
    const int own = at.row(r, c), first = at.row0 + r * 16 + 8 * c;
    const float keys_m = key_maximum(state, r, c, own), keys_l = state.l[r][c];
    float m = keys_m, l = keys_l;
    if (p.sinks != nullptr && blockIdx.y == 0) softmax::add_sink(__ldg(p.sinks + w.head(p, own)), m, l);
    const bool is_part = p.out_partial != nullptr;
    const float scale = (is_part ? 1.f : softmax::inverse_sum(l)) * softmax::weight(keys_m, m);
    if (at.t == 0 && at.dim_part == 0 && own < w.num_rows) {
      if (is_part) {
        const KeyRange keys = w.keys(p, own);
        const bool empty = l == 0.f && max(keys.lo, w.lo) >= min(keys.hi, w.hi);
        reinterpret_cast<float2*>(p.state_partial)[w.flat_part(p, own)] = make_float2(m, empty ? EMPTY_PART : l);
      } else if (p.lse != nullptr) {
        p.lse[w.flat(p, own)] = softmax::lse(m, l);
      }
    }
    if constexpr (V::IN_ROTATED_DOMAIN) {
#pragma unroll
      for (int d = 0; d < DIM_TILES; ++d) {
        *reinterpret_cast<float2*>(place(at.g, d * 8 + 2 * at.t)) =
            make_float2(o[r][d][2 * c] * scale, o[r][d][2 * c + 1] * scale);
      }
      __syncwarp();                           // eight rows are there
      const float own_keys = keys_l * scale;  // the keys' share of the weights, which a mean counts with
#pragma unroll 1
      for (int g = 0; g < 8; ++g) restore_row(first + g, g, __shfl_sync(FULL_MASK, own_keys, g * 4));
    } else if (is_part) {
      if (own < w.num_rows) {
        float* out = part_of(own) + 2 * at.t;
#pragma unroll
        for (int d = 0; d < DIM_TILES; ++d) {
          *reinterpret_cast<float2*>(out + d * 8) = make_float2(o[r][d][2 * c] * scale, o[r][d][2 * c + 1] * scale);
        }
      }
    } else {
      u8* tile = rows + at.dim_part * 8 * Row::ROW_BYTES;
#pragma unroll
      for (int d = 0; d < DIM_TILES; ++d) {
        const int place = (d * 8 + 2 * at.t) * sizeof(Elem);
        store2(reinterpret_cast<Elem*>(tile + Row::offset(at.g, place / 16) + place % 16), o[r][d][2 * c] * scale,
               o[r][d][2 * c + 1] * scale);
      }
      __syncwarp();  // eight rows are there
#pragma unroll
      for (int index = at.lane; index < 8 * Row::CHUNKS; index += WARP) {
        const int g = index / Row::CHUNKS, chunk = index % Row::CHUNKS;
        if (first + g >= w.num_rows) continue;
        *reinterpret_cast<uint4*>(w.out(p, first + g) + at.dim_part * Row::ROW_BYTES + chunk * 16) =
            *reinterpret_cast<const uint4*>(tile + Row::offset(g, chunk));
      }
    }
    __syncwarp();  // all have read them
  }

 private:
  // Of a row, its split's part of the result.
  __device__ __forceinline__ float* part_of(int row) const {
    return p.out_partial + w.flat_part(p, row) * cfg::VALUE_DIM + at.dim_part * DIMS;
  }
  // In float32, [8][DIMS].
  __device__ __forceinline__ float* place(int row, int dim) const {
    float* part = reinterpret_cast<float*>(rows) + at.dim_part * 8 * DIMS;
    return part + row * DIMS + (dim / 4 ^ row) * 4 + dim % 4;
  }
  // The bias of a row is the same for all its keys, so that weights are without it.
  __device__ __forceinline__ float key_maximum(const State& state, int r, int c, int row) const {
    const float m = state.maximum(r, c);
    // A row without keys has none, whatever its bias is.
    if (!K::IN_ROTATED_DOMAIN || p.softcap_log2 != 0.f || m == neg_inf()) return m;
    return fmaf(sm.q_bias[row], p.softmax_scale_log2, m);
  }
  // A row in the lanes of a warp: back from the rotated domain, with the mean, and to memory.
  __device__ __forceinline__ void restore_row(int row, int g, float keys) const {
    if (row >= w.num_rows) return;
    float x[VECTORS][4];
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
      const int dim = (i * WARP + at.lane) * 4;
      float4 y = make_float4(0.f, 0.f, 0.f, 0.f);
      if (dim < DIMS) y = *reinterpret_cast<const float4*>(place(g, dim));
      x[i][0] = y.x, x[i][1] = y.y, x[i][2] = y.z, x[i][3] = y.w;
    }
    TilesOf<cfg::V_FORMAT, Elem, DIMS>::type::restore(x, at.lane);
    u8* out = w.out(p, row) + at.dim_part * Row::ROW_BYTES;
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
      const int dim = (i * WARP + at.lane) * 4;
      if (dim >= DIMS) continue;
      if (p.v_mean != nullptr) {
        const float* mean = p.v_mean + w.kv_head * cfg::VALUE_DIM + at.dim_part * DIMS + dim;
#pragma unroll
        for (int j = 0; j < 4; ++j) x[i][j] += keys * __ldg(mean + j);
      }
      const float4 y = make_float4(x[i][0], x[i][1], x[i][2], x[i][3]);
      if (p.out_partial != nullptr) {
        store4(part_of(row) + dim, y);
      } else {
        store4(reinterpret_cast<Elem*>(out) + dim, y);
      }
    }
  }
};

}  // namespace

#endif
