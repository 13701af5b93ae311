// clock.cu -- the clock of an SM, for the mean clock between two launches.
// SPDX-License-Identifier: Apache-2.0
//
//   grid (1)      block (1)
//
// On a GPU with nothing else to do the same SM has both, and clocks of SMs rise and fall together.

extern "C" __global__ void clock_kernel(long long* cycles) { *cycles = clock64(); }
