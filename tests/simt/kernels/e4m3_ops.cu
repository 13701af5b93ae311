// e4m3_ops.cu -- the functions of common/e4m3.cuh, and those of common/ptx.cuh that they stand for.
// SPDX-License-Identifier: Apache-2.0
//
//   widen, narrow   any grid, any block
// tests/simt/numpy_cases.py computes the same in NumPy.
#include "common/e4m3.cuh"

// codes [n]; halves, by_bits [n, 2]: pairs of halves, NaN as 0x7fff.
extern "C" __global__ void widen(const u32* codes, u32* halves, u32* by_bits, int n) {
  const auto one_nan = [](u32 pair) {
    const auto half = [](u32 x) { return (x & 0x7fff) > 0x7c00 ? 0x7fffu : x; };
    return half(pair & 0xffff) | half(pair >> 16) << 16;
  };
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) {
    u32 pairs[2];
    ptx::halves_of_e4m3(pairs, codes[i]);
    for (int j = 0; j < 2; j++) halves[2 * i + j] = one_nan(pairs[j]);
    e4m3::widen_bits(pairs, codes[i]);
    for (int j = 0; j < 2; j++) by_bits[2 * i + j] = one_nan(pairs[j]);
  }
}

// x [n]; codes, by_bits [n]: that of -x, then that of x, NaN as 0x7f.
extern "C" __global__ void narrow(const float* x, u32* codes, u32* by_bits, int n) {
  const auto one_nan = [](u32 code) { return (code & 0x7f) == 0x7f ? 0x7fu : code; };
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) {
    const u32 two = ptx::pack_e4m3(-x[i], x[i]);
    codes[i] = one_nan(two & 0xff) | one_nan(two >> 8) << 8;
    by_bits[i] = one_nan(e4m3::nearest(-x[i])) | one_nan(e4m3::nearest(x[i])) << 8;
  }
}
