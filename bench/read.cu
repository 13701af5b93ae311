// read.cu -- reads memory and does nothing else: the roof of every kernel that is bound by reading.
// SPDX-License-Identifier: Apache-2.0
//
//   grid, block  any one-dimensional ones
//   thread       UNROLL loads of 16 bytes in flight; neighbors read neighbors
//
// roofline.py puts UNROLL in front. The sum is stored only if it is `unlikely`, which the compiler cannot rule out: so
// it must load everything.

extern "C" __global__ void __launch_bounds__(1024) read_kernel(const uint4* __restrict__ data, unsigned long long words,
                                                               unsigned unlikely, unsigned* __restrict__ sink) {
  const unsigned long long step = static_cast<unsigned long long>(gridDim.x) * blockDim.x;
  unsigned sum = 0;
  for (unsigned long long first = static_cast<unsigned long long>(blockIdx.x) * blockDim.x + threadIdx.x; first < words;
       first += UNROLL * step) {
    uint4 word[UNROLL];
    // A bound on every load rather than a loop for the rest: short reads keep all their loads in flight, too.
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
      const unsigned long long i = first + u * step;
      word[u] = i < words ? data[i] : make_uint4(0, 0, 0, 0);
    }
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
      sum += word[u].x ^ word[u].y ^ word[u].z ^ word[u].w;
    }
  }
  if (sum == unlikely) {
    *sink = sum;
  }
}
