// sm90_ops.cu -- what TMA leaves in shared memory, and what wgmma reads through its descriptors.
// SPDX-License-Identifier: Apache-2.0
//
//   all kernels   grid (1), block 128
#include "common/ptx_sm90.cuh"

__device__ __forceinline__ void dump(const u8* smem, uint4* out, int bytes) {
  for (int i = threadIdx.x; i < bytes / 16; i += blockDim.x) out[i] = reinterpret_cast<const uint4*>(smem)[i];
}

// Loads one box to offset `at` of `bytes` bytes of shared memory, filled with 0xa5 before. The barrier lies behind.
template <int RANK>
__device__ __forceinline__ void tma_dump(const TensorMap* map, uint4* out, int bytes, int at, int box_bytes, int4 c) {
  u8* smem = ptx::dynamic_smem();
  u64* bar = reinterpret_cast<u64*>(smem + bytes);
  constexpr u32 FILL = 0xa5a5a5a5u;
  for (int i = threadIdx.x; i < bytes / 16; i += blockDim.x) {
    reinterpret_cast<uint4*>(smem)[i] = make_uint4(FILL, FILL, FILL, FILL);
  }
  ptx::fence_proxy_async();
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(bar, 1);
    ptx::fence_mbarrier_init();
  }
  __syncthreads();  // the fill and the barrier are visible
  if (threadIdx.x < WARP && ptx::elect_one()) {
    ptx::prefetch_tensormap(map);
    ptx::mbarrier_arrive_expect_tx(bar, box_bytes);
    if constexpr (RANK == 2) ptx::tma_load_2d(smem + at, map, bar, c.x, c.y);
    if constexpr (RANK == 3) ptx::tma_load_3d(smem + at, map, bar, c.x, c.y, c.z);
    if constexpr (RANK == 4) ptx::tma_load_4d(smem + at, map, bar, c.x, c.y, c.z, c.w);
  }
  ptx::mbarrier_wait(bar, 0);
  dump(smem, out, bytes);
}
extern "C" __global__ void tma_2d(const __grid_constant__ TensorMap map, uint4* out, int bytes, int at, int box_bytes,
                                  int4 c) {
  tma_dump<2>(&map, out, bytes, at, box_bytes, c);
}
extern "C" __global__ void tma_3d(const __grid_constant__ TensorMap map, uint4* out, int bytes, int at, int box_bytes,
                                  int4 c) {
  tma_dump<3>(&map, out, bytes, at, box_bytes, c);
}
extern "C" __global__ void tma_4d(const __grid_constant__ TensorMap map, uint4* out, int bytes, int at, int box_bytes,
                                  int4 c) {
  tma_dump<4>(&map, out, bytes, at, box_bytes, c);
}

// Two bulk copies, announced apart from the arrival, polled for; `phases` times over.
extern "C" __global__ void bulk(const u8* in, uint4* out, int bytes, int phases) {
  u8* smem = ptx::dynamic_smem();
  u64* bar = reinterpret_cast<u64*>(smem + bytes);
  ptx::griddepcontrol_wait();
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(bar, 1);
    ptx::fence_mbarrier_init();
  }
  __syncthreads();  // the barrier is visible
  for (int phase = 0; phase < phases; phase++) {
    if (threadIdx.x == 0) {
      ptx::mbarrier_expect_tx(bar, bytes);
      ptx::bulk_load(smem, in, bytes / 2, bar);
      ptx::bulk_load(smem + bytes / 2, in + bytes / 2, bytes / 2, bar);
      ptx::mbarrier_arrive(bar);
    }
    while (!ptx::mbarrier_try_wait(bar, phase % 2)) {
    }
    dump(smem, out + phase * (bytes / 16), bytes);
    in += bytes;
    ptx::fence_proxy_async();
    __syncthreads();  // shared memory may be written again
  }
  ptx::griddepcontrol_launch_dependents();
}

// The launch of a wgmma kernel. Offsets and steps in bytes; `image` goes to shared memory as it is.
struct WgmmaParams {
  const uint4* image;  // [image_bytes / 16]
  const u32* a_regs;   // [steps, 128, 4], for A from registers
  float* out;          // [64, N]
  int image_bytes, steps;
  int a_start, a_lbo, a_sbo, a_step;
  int b_start, b_lbo, b_sbo, b_step;
  int swizzle;
};

__device__ __forceinline__ u64 desc(int swizzle, const u8* p, int lbo, int sbo) {
  if (swizzle == 128) return ptx::smem_desc<128>(p, lbo, sbo);
  if (swizzle == 64) return ptx::smem_desc<64>(p, lbo, sbo);
  if (swizzle == 32) return ptx::smem_desc<32>(p, lbo, sbo);
  return ptx::smem_desc<0>(p, lbo, sbo);
}

// out = the sum over steps of a b, in batches of one wgmma.
template <class Elem, int N, bool RS, int TRANS_A, int TRANS_B>
__device__ __forceinline__ void wgmma_test(const WgmmaParams& p) {
  u8* smem = ptx::dynamic_smem();
  const int tid = threadIdx.x;
  for (int i = tid; i < p.image_bytes / 16; i += 128) reinterpret_cast<uint4*>(smem)[i] = p.image[i];
  ptx::fence_proxy_async();
  __syncthreads();  // the image is visible to wgmma
  float d[N / 2];
#pragma unroll
  for (int i = 0; i < N / 2; i++) d[i] = 1e6f;  // vanishes, because the first step does not accumulate
  for (int s = 0; s < p.steps; s++) {
    const u64 desc_b = desc(p.swizzle, smem + p.b_start + s * p.b_step, p.b_lbo, p.b_sbo);
    if constexpr (RS) {
      u32 a[4];
#pragma unroll
      for (int i = 0; i < 4; i++) a[i] = p.a_regs[(s * 128 + tid) * 4 + i];
      ptx::wgmma_fence();
      ptx::wgmma_rs<Elem, N, TRANS_B>(d, a, desc_b, s > 0);
    } else {
      const u64 desc_a = desc(p.swizzle, smem + p.a_start + s * p.a_step, p.a_lbo, p.a_sbo);
      ptx::wgmma_fence();
      ptx::wgmma_ss<Elem, N, TRANS_A, TRANS_B>(d, desc_a, desc_b, s > 0);
    }
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
  }
#pragma unroll
  for (int i = 0; i < N / 2; i++) {
    p.out[(tid / 32 * 16 + tid % 32 / 4 + i / 2 % 2 * 8) * N + i / 4 * 8 + tid % 4 * 2 + i % 2] = d[i];
  }
}

// KERNEL(name, Elem, N, RS, TRANS_A, TRANS_B): every mode for a few shapes, every shape once.
#define KERNEL(name, ...)                                                                         \
  extern "C" __global__ void __launch_bounds__(128) name(const __grid_constant__ WgmmaParams p) { \
    wgmma_test<__VA_ARGS__>(p);                                                                   \
  }
KERNEL(wgmma_f16_8_ss_kk, Half, 8, false, 0, 0)
KERNEL(wgmma_f16_16_ss_kk, Half, 16, false, 0, 0)
KERNEL(wgmma_f16_32_rs_k, Half, 32, true, 0, 0)
KERNEL(wgmma_f16_64_ss_kk, Half, 64, false, 0, 0)
KERNEL(wgmma_f16_64_ss_km, Half, 64, false, 0, 1)
KERNEL(wgmma_f16_64_ss_mm, Half, 64, false, 1, 1)
KERNEL(wgmma_f16_64_rs_k, Half, 64, true, 0, 0)
KERNEL(wgmma_f16_64_rs_m, Half, 64, true, 0, 1)
KERNEL(wgmma_bf16_80_ss_kk, Bfloat16, 80, false, 0, 0)
KERNEL(wgmma_bf16_96_rs_m, Bfloat16, 96, true, 0, 1)
KERNEL(wgmma_bf16_128_ss_mm, Bfloat16, 128, false, 1, 1)
KERNEL(wgmma_bf16_160_ss_kk, Bfloat16, 160, false, 0, 0)
KERNEL(wgmma_bf16_176_ss_km, Bfloat16, 176, false, 0, 1)
KERNEL(wgmma_bf16_176_rs_k, Bfloat16, 176, true, 0, 0)
KERNEL(wgmma_f16_192_rs_m, Half, 192, true, 0, 1)
KERNEL(wgmma_bf16_256_ss_kk, Bfloat16, 256, false, 0, 0)
KERNEL(wgmma_f16_256_rs_m, Half, 256, true, 0, 1)
