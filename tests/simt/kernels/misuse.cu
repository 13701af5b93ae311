// misuse.cu -- kernels that are wrong, one error each, for the reports of the harness.
// SPDX-License-Identifier: Apache-2.0
//
//   all kernels   grid (1), block 64, 1024 bytes of dynamic shared memory; x [64] ints
#include "common/ptx_sm90.cuh"

extern "C" __global__ void divergent_barrier(int*) {
  if (threadIdx.x < 32) {
    __syncthreads();
  } else {
    __syncthreads();
  }
}
extern "C" __global__ void early_return(int*) {
  if (threadIdx.x == 40) return;
  __syncthreads();
}
extern "C" __global__ void barrier_sizes(int*) {
  if (threadIdx.x < 32) {
    ptx::bar_arrive(3, 64);
  } else {
    ptx::bar_sync(3, 96);
  }
}
extern "C" __global__ void divergent_shuffle(int* x) {
  if (threadIdx.x % 2 == 0) x[threadIdx.x] = __shfl_xor_sync(FULL_MASK, x[threadIdx.x], 2);
}
extern "C" __global__ void unnamed_lane(int* x) { x[threadIdx.x] = __shfl_sync(0x7fffffffu, x[threadIdx.x], 0); }
extern "C" __global__ void unnamed_source(int* x) {
  if (threadIdx.x < 16) x[threadIdx.x] = __shfl_sync(0xffffu, x[threadIdx.x], 20);
}
extern "C" __global__ void poll_forever(int* x) {
  while (*const_cast<volatile int*>(x) != -1) __nanosleep(100);
}
extern "C" __global__ void store_past_the_end(int* x) { reinterpret_cast<int*>(ptx::dynamic_smem())[256] = x[0]; }
extern "C" __global__ void copy_past_the_end(int* x) { ptx::cp_async16(ptx::dynamic_smem() + 1024, x, true); }
extern "C" __global__ void copy_past_the_array(int* x) { ptx::cp_async16(ptx::dynamic_smem(), x + 64, true); }
extern "C" __global__ void load_past_the_array(int* x) { x[0] = static_cast<int>(ptx::ld_global_nc_v4(x + 64).x); }
extern "C" __global__ void crooked_copy(int* x) { ptx::cp_async16(ptx::dynamic_smem() + 8, x, true); }
extern "C" __global__ void crooked_target(int* x) { ptx::cp_async_small<8>(ptx::dynamic_smem() + 4, x, true); }
extern "C" __global__ void crooked_source(int* x) { ptx::cp_async_small<8>(ptx::dynamic_smem(), x + 1, true); }
extern "C" __global__ void small_copy_past_the_array(int* x) {
  ptx::cp_async_small<4>(ptx::dynamic_smem(), x + 64, true);
}
extern "C" __global__ void crooked_ldmatrix(int*) {
  u32 r[4];
  ptx::ldmatrix_x4(r, ptx::dynamic_smem() + threadIdx.x * 8);
}
extern "C" __global__ void lone_copy(int* x) {
  u64* bar = reinterpret_cast<u64*>(ptx::dynamic_smem());
  if (threadIdx.x != 0) return;
  ptx::mbarrier_init(bar, 1);
  ptx::mbarrier_arrive_expect_tx(bar, 64);
  ptx::bulk_load(bar + 2, x, 64, bar);
}
extern "C" __global__ void uninitialized_mbarrier(int*) {
  ptx::mbarrier_wait(reinterpret_cast<u64*>(ptx::dynamic_smem()), 0);
}
extern "C" __global__ void arrivals(int*) {
  u64* bar = reinterpret_cast<u64*>(ptx::dynamic_smem());
  if (threadIdx.x == 0) ptx::mbarrier_init(bar, 1);
  __syncthreads();
  if (threadIdx.x == 1) ptx::mbarrier_expect_tx(bar, 16);
  __syncthreads();
  ptx::mbarrier_arrive(bar);
}
extern "C" __global__ void half_a_warpgroup(int*) {
  float d[4];
  ptx::wgmma_fence();
  ptx::wgmma_ss<Half, 8>(d, 0, 0, false);
}
extern "C" __global__ void trap(int*) { __trap(); }
