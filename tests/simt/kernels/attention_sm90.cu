// attention_sm90.cu -- attention of 64 queries a head with a TMA ring and wgmma.
// SPDX-License-Identifier: Apache-2.0
//
//   grid   (num_heads)      block  256: warpgroup 0 computes, one thread of warpgroup 1 issues the copies
//   q [num_heads, 64, HEAD_DIM], k, v [num_heads, num_keys, HEAD_DIM], Elem; out [num_heads, 64, HEAD_DIM] float
// Tiles lie in shared memory as chunks of 64 columns: rows of 128 bytes, swizzled. The prelude has the constants.
#include "common/ptx_sm90.cuh"

using Elem = ElemOf<cfg::DTYPE>::type;

constexpr int QUERIES = 64, CHUNK = 64, NUM_CHUNKS = cfg::HEAD_DIM / CHUNK;
constexpr u32 ROW_BYTES = CHUNK * 2, GROUP_BYTES = 8 * ROW_BYTES, TILE_BYTES = cfg::TILE_KV * cfg::HEAD_DIM * 2;

struct Smem {
  alignas(1024) Elem q[NUM_CHUNKS][QUERIES * CHUNK];
  alignas(1024) Elem k[cfg::NUM_STAGES][NUM_CHUNKS][cfg::TILE_KV * CHUNK];
  alignas(1024) Elem v[cfg::NUM_STAGES][NUM_CHUNKS][cfg::TILE_KV * CHUNK];
  u64 q_full, full[cfg::NUM_STAGES], empty[cfg::NUM_STAGES];
};

// q, k, v: innermost first, boxes {CHUNK, QUERIES or TILE_KV, 1}, swizzle 128.
struct Params {
  TensorMap q, k, v;
  float* out;
  int num_keys;
  float scale_log2;  // softmax_scale * log2(e)
};

__device__ __forceinline__ void produce(const Params& p, Smem& sm, int num_tiles) {
  const int head = blockIdx.x;
  ptx::mbarrier_arrive_expect_tx(&sm.q_full, sizeof(sm.q));
  for (int c = 0; c < NUM_CHUNKS; c++) ptx::tma_load_3d(sm.q[c], &p.q, &sm.q_full, c * CHUNK, 0, head);
  for (int j = 0; j < num_tiles; j++) {
    const int stage = j % cfg::NUM_STAGES, phase = j / cfg::NUM_STAGES % 2;
    ptx::mbarrier_wait(&sm.empty[stage], phase ^ 1);
    ptx::mbarrier_arrive_expect_tx(&sm.full[stage], 2 * TILE_BYTES);
    for (int c = 0; c < NUM_CHUNKS; c++) {
      ptx::tma_load_3d(sm.k[stage][c], &p.k, &sm.full[stage], c * CHUNK, j * cfg::TILE_KV, head);
      ptx::tma_load_3d(sm.v[stage][c], &p.v, &sm.full[stage], c * CHUNK, j * cfg::TILE_KV, head);
    }
  }
}

__device__ __forceinline__ void consume(const Params& p, Smem& sm, int num_tiles) {
  const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
  float o[cfg::HEAD_DIM / 2], s[cfg::TILE_KV / 2];  // accumulators, rows g and g + 8 of the warp's 16
  float row_max[2] = {neg_inf(), neg_inf()}, row_sum[2] = {0.f, 0.f};
#pragma unroll
  for (int i = 0; i < cfg::HEAD_DIM / 2; i++) o[i] = 0.f;
  ptx::mbarrier_wait(&sm.q_full, 0);
  for (int j = 0; j < num_tiles; j++) {
    const int stage = j % cfg::NUM_STAGES, phase = j / cfg::NUM_STAGES % 2;
    ptx::mbarrier_wait(&sm.full[stage], phase);
    ptx::wgmma_fence();
#pragma unroll
    for (int kb = 0; kb < cfg::HEAD_DIM / 16; kb++) {
      const int c = kb / 4, k = kb % 4 * 16;
      const u64 q_desc = ptx::smem_desc<128>(sm.q[c] + k, 16, GROUP_BYTES);
      const u64 k_desc = ptx::smem_desc<128>(sm.k[stage][c] + k, 16, GROUP_BYTES);
      ptx::wgmma_ss<Elem, cfg::TILE_KV>(s, q_desc, k_desc, kb > 0);
    }
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
#pragma unroll
    for (int r = 0; r < 2; r++) {
      float new_max = row_max[r];
#pragma unroll
      for (int i = 0; i < cfg::TILE_KV / 4; i++) {
        float& x = s[i / 2 * 4 + r * 2 + i % 2];
        if (j * cfg::TILE_KV + i / 2 * 8 + 2 * t + i % 2 >= p.num_keys) x = neg_inf();
        new_max = fmaxf(new_max, x);
      }
      new_max = fmaxf(new_max, __shfl_xor_sync(FULL_MASK, new_max, 1));
      new_max = fmaxf(new_max, __shfl_xor_sync(FULL_MASK, new_max, 2));
      const float rescale = ptx::exp2((row_max[r] - new_max) * p.scale_log2);
      row_max[r] = new_max;
      row_sum[r] *= rescale;
#pragma unroll
      for (int i = 0; i < cfg::TILE_KV / 4; i++) {
        float& x = s[i / 2 * 4 + r * 2 + i % 2];
        x = ptx::exp2((x - new_max) * p.scale_log2);
        row_sum[r] += x;
      }
#pragma unroll
      for (int i = 0; i < cfg::HEAD_DIM / 4; i++) o[i / 2 * 4 + r * 2 + i % 2] *= rescale;
    }
    u32 probs[cfg::TILE_KV / 16][4];  // A fragments of P
#pragma unroll
    for (int i = 0; i < cfg::TILE_KV / 4; i++) probs[i / 4][i % 4] = ptx::pack2<Elem>(s[i * 2], s[i * 2 + 1]);
    ptx::wgmma_fence();
#pragma unroll
    for (int kb = 0; kb < cfg::TILE_KV / 16; kb++) {
      const u64 v_desc = ptx::smem_desc<128>(sm.v[stage][0] + kb * 16 * CHUNK, cfg::TILE_KV * ROW_BYTES, GROUP_BYTES);
      ptx::wgmma_rs<Elem, cfg::HEAD_DIM, 1>(o, probs[kb], v_desc, true);
    }
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    if (lane == 0) ptx::mbarrier_arrive(&sm.empty[stage]);
  }
#pragma unroll
  for (int r = 0; r < 2; r++) {
    float sum = row_sum[r];
    sum += __shfl_xor_sync(FULL_MASK, sum, 1);
    sum += __shfl_xor_sync(FULL_MASK, sum, 2);
    float* out = p.out + ((static_cast<i64>(blockIdx.x) * QUERIES + warp * 16 + g + r * 8) * cfg::HEAD_DIM + 2 * t);
#pragma unroll
    for (int i = 0; i < cfg::HEAD_DIM / 4; i++) out[i / 2 * 8 + i % 2] = o[i / 2 * 4 + r * 2 + i % 2] / sum;
  }
}

extern "C" __global__ void __launch_bounds__(256, 1) attention_sm90(const __grid_constant__ Params p) {
  Smem& sm = *reinterpret_cast<Smem*>(ptx::dynamic_smem());
  const int num_tiles = (p.num_keys + cfg::TILE_KV - 1) / cfg::TILE_KV;
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(&sm.q_full, 1);
    for (int i = 0; i < cfg::NUM_STAGES; i++) {
      ptx::mbarrier_init(&sm.full[i], 1);
      ptx::mbarrier_init(&sm.empty[i], 4);  // one arrival a consumer warp
    }
    ptx::fence_mbarrier_init();
  }
  __syncthreads();  // the barriers are visible
  if (threadIdx.x < 128) {
    ptx::setmaxnreg_inc<240>();
    consume(p, sm, num_tiles);
  } else {
    ptx::setmaxnreg_dec<24>();
    if (threadIdx.x == 128) produce(p, sm, num_tiles);
  }
}
