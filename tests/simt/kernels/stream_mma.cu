// stream_mma.cu -- c = a b^T with tiles of b streamed through shared memory by cp.async, two stages.
// SPDX-License-Identifier: Apache-2.0
//
//   grid   (1)      block  128: warp w has rows 16w .. 16w+15 of a
//   a [64, 64] Half, b [8 num_tiles, 64] Half, c [64, 8 num_tiles] float
#include "common/ptx.cuh"

constexpr int ROWS = 8, DEPTH = 64;

// Chunk c of a row lies at c ^ (row % 8), so that the eight rows of a matrix fall on different banks.
__device__ __forceinline__ const Half* chunk(const Half* tile, int row, int c) {
  return tile + row * DEPTH + ((c ^ (row % 8)) * 8);
}

__device__ __forceinline__ void fill(Half* tile, const Half* rows) {
  const int row = threadIdx.x / 8, c = threadIdx.x % 8;
  if (row < ROWS) ptx::cp_async16(tile + row * DEPTH + ((c ^ row) * 8), rows + row * DEPTH + c * 8, true);
  ptx::cp_async_commit();
}

extern "C" __global__ void __launch_bounds__(128) stream_mma(const Half* a, const Half* b, float* c, int num_tiles) {
  Half* stages = reinterpret_cast<Half*>(ptx::dynamic_smem());  // [2][ROWS * DEPTH]
  const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
  const u32* a32 = reinterpret_cast<const u32*>(a + (warp * 16 + g) * DEPTH + 2 * t);
  u32 a_frag[DEPTH / 16][4];  // A fragments of this warp's 16 rows
#pragma unroll
  for (int kb = 0; kb < DEPTH / 16; kb++) {
#pragma unroll
    for (int i = 0; i < 4; i++) a_frag[kb][i] = a32[(i % 2 * 8 * DEPTH + kb * 16 + i / 2 * 8) / 2];
  }
  fill(stages, b);
  for (int tile = 0; tile < num_tiles; tile++) {
    const Half* stage = stages + tile % 2 * ROWS * DEPTH;
    __syncthreads();  // every warp is done with the stage that is refilled next
    if (tile + 1 < num_tiles) {
      fill(stages + (tile + 1) % 2 * ROWS * DEPTH, b + (tile + 1) * ROWS * DEPTH);
    } else {
      ptx::cp_async_commit();
    }
    ptx::cp_async_wait<1>();
    __syncthreads();  // the tile is visible
    float acc[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
    for (int kb = 0; kb < DEPTH / 16; kb += 2) {
      u32 b_frag[4];  // B fragments of k 16 kb .. 16 kb + 31
      ptx::ldmatrix_x4(b_frag, chunk(stage, lane % 8, 2 * kb + lane / 8));
      ptx::mma_m16n8k16<Half>(acc, a_frag[kb], {b_frag[0], b_frag[1]});
      ptx::mma_m16n8k16<Half>(acc, a_frag[kb + 1], {b_frag[2], b_frag[3]});
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
      c[(warp * 16 + g + i / 2 * 8) * (num_tiles * ROWS) + tile * ROWS + 2 * t + i % 2] = acc[i];
    }
  }
}
