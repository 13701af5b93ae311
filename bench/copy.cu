// copy.cu -- copies memory and does nothing else: the roof of every kernel that reads about as much as it writes.
// SPDX-License-Identifier: Apache-2.0
//
//   grid, block  any one-dimensional ones
//   thread       UNROLL loads of 16 bytes in flight, then as many stores; neighbors copy neighbors
//
// roofline.py puts UNROLL in front.

extern "C" __global__ void __launch_bounds__(1024)
    copy_kernel(const uint4* __restrict__ source, unsigned long long words, uint4* __restrict__ target) {
  const unsigned long long step = static_cast<unsigned long long>(gridDim.x) * blockDim.x;
  for (unsigned long long first = static_cast<unsigned long long>(blockIdx.x) * blockDim.x + threadIdx.x; first < words;
       first += UNROLL * step) {
    uint4 word[UNROLL];
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
      const unsigned long long i = first + u * step;
      if (i < words) {
        word[u] = source[i];
      }
    }
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
      const unsigned long long i = first + u * step;
      if (i < words) {
        target[i] = word[u];
      }
    }
  }
}
