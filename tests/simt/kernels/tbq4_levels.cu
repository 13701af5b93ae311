// tbq4_levels.cu -- kv/tbq4_levels.cuh by itself; the prelude is that of a config of prefill_sm90.cu.
// SPDX-License-Identifier: Apache-2.0
//
//   levels, products   any grid, any block
#include "kv/tbq4_levels.cuh"

// words [n]; values [n, 8] float16.
extern "C" __global__ void levels(const u32* words, uint4* values, int n) {
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) {
    values[i] = tbq4::levels_of(words[i]);
  }
}

// norms [n] float16; values [n, 16]: times the levels of all codes.
extern "C" __global__ void products(const u16* norms, uint4* values, int n) {
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) {
    const tbq4::LevelBytes bytes = tbq4::LevelBytes::times(norms[i] * 0x10001u);
    values[2 * i] = tbq4::levels_of(0x76543210u, bytes);
    values[2 * i + 1] = tbq4::levels_of(0xfedcba98u, bytes);
  }
}
