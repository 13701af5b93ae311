// warp_ops.cu -- every function of common/ptx.cuh, and the warp built-ins, one result a column.
// SPDX-License-Identifier: Apache-2.0
//
//   warp_ops   grid (1), block 128     permute, convert, infinities, multiply_halves   any grid and block
// tests/simt/cases.py computes the same in NumPy, in the same order.
#include "common/ptx.cuh"

constexpr int NUM_WORDS = 64, NUM_FLOATS = 8, IMAGE_ROWS = 256;

// words [128, 16]; halves [128, 8], bfloats [128, 8]: pairs of small integers; rows [128]: of the image; image
// [IMAGE_ROWS] 16 bytes each; exact [128, NUM_WORDS]; approximate [128, NUM_FLOATS].
extern "C" __global__ void __launch_bounds__(128)
    warp_ops(const u32* words, const u32* halves, const u32* bfloats, const int* rows, const uint4* image, u32* exact,
             float* approximate) {
  __shared__ u32 mailbox[128];
  u8* smem = ptx::dynamic_smem();  // the image
  const int tid = threadIdx.x, lane = tid % WARP;
  const u32 *r = words + tid * 16, *h = halves + tid * 8, *b = bfloats + tid * 8;
  u32* out = exact + tid * NUM_WORDS;
  int n = 0;

  for (int i = tid; i < IMAGE_ROWS; i += 128) {
    ptx::cp_async16(smem + i * 16, image + i, i % 7 != 3);
    ptx::cp_async_commit();
  }
  ptx::cp_async_wait<0>();
  __syncthreads();  // the image is visible
  const u8* row = smem + rows[tid] * 16;
  u32 x2[2], x4[4];
  ptx::ldmatrix_x2(x2, row);
  for (int i = 0; i < 2; i++) out[n++] = x2[i];
  ptx::ldmatrix_x4(x4, row);
  for (int i = 0; i < 4; i++) out[n++] = x4[i];
  ptx::ldmatrix_x4_trans(x4, row);
  for (int i = 0; i < 4; i++) out[n++] = x4[i];
  out[n++] = ptx::movmatrix_trans(r[0]);
  const uint4 wide = ptx::ld_global_nc_v4(image + tid);
  out[n++] = wide.x ^ wide.y * 3 ^ wide.z * 5 ^ wide.w * 7;
  out[n++] = ptx::smem_addr(row) - ptx::smem_addr(smem);

  out[n++] = ptx::prmt(r[0], r[1], r[2]);
  out[n++] = __byte_perm(r[0], r[1], r[3]);
  out[n++] = __popc(r[0]) + 100 * __clz(r[1] >> lane) + 10000 * __ffs(r[2] << lane);
  out[n++] = __funnelshift_l(r[0], r[1], r[2]) ^ __funnelshift_r(r[3], r[4], r[5]);
  out[n++] = __umulhi(r[0], r[1]);

  out[n++] = __shfl_sync(FULL_MASK, r[0], r[1] % WARP);
  out[n++] = __shfl_sync(FULL_MASK, r[0], lane * 5 + 3, 8);
  out[n++] = __shfl_xor_sync(FULL_MASK, r[0], 9);
  out[n++] = __shfl_xor_sync(FULL_MASK, r[0], 3, 16);
  out[n++] = __shfl_down_sync(FULL_MASK, r[0], 5);
  out[n++] = __shfl_down_sync(FULL_MASK, r[0], 3, 8);
  out[n++] = __shfl_up_sync(FULL_MASK, r[0], 5);
  out[n++] = __shfl_up_sync(FULL_MASK, r[0], 3, 8);
  u32 half_warp;
  if (lane < 16) {
    half_warp = __shfl_xor_sync(0xffffu, r[1], 1);
  } else {
    half_warp = __shfl_xor_sync(0xffff0000u, r[1], 2) * 3;
  }
  __syncwarp();
  out[n++] = half_warp;
  out[n++] = __ballot_sync(FULL_MASK, r[0] & 1);
  out[n++] = __any_sync(FULL_MASK, lane == 7) + 2 * __any_sync(FULL_MASK, lane > 40) +
             4 * __all_sync(FULL_MASK, lane < 32) + 8 * __all_sync(FULL_MASK, lane < 31);
  out[n++] = __reduce_add_sync(FULL_MASK, r[3]);
  out[n++] = __reduce_min_sync(FULL_MASK, static_cast<int>(r[4]));
  out[n++] = __reduce_max_sync(FULL_MASK, r[5]);
  out[n++] = __reduce_and_sync(FULL_MASK, r[6] | r[7]);
  out[n++] = __reduce_or_sync(FULL_MASK, r[6] & r[7] & r[8]);
  out[n++] = __reduce_xor_sync(FULL_MASK, r[9]);

  float d[4];
  for (int i = 0; i < 4; i++) d[i] = static_cast<float>(static_cast<int>(r[i] % 64) - 32);
  ptx::mma_m16n8k16<Half>(d, {h[0], h[1], h[2], h[3]}, {h[4], h[5]});
  for (int i = 0; i < 4; i++) out[n++] = __float_as_uint(d[i]);
  ptx::mma_m16n8k16<Bfloat16>(d, {b[0], b[1], b[2], b[3]}, {b[4], b[5]});
  for (int i = 0; i < 4; i++) out[n++] = __float_as_uint(d[i]);
  for (int i = 0; i < 4; i++) d[i] = static_cast<float>(static_cast<int>(r[i] % 64) - 32);
  // Bits that a tf32 does not have are set.
  u32 tf32[6];
  for (int i = 0; i < 6; i++) tf32[i] = b[i] << 16 | (r[i] & 0x1fff);
  ptx::mma_m16n8k8_tf32(d, {tf32[0], tf32[1], tf32[2], tf32[3]}, {tf32[4], tf32[5]});
  for (int i = 0; i < 4; i++) out[n++] = __float_as_uint(d[i]);
  out[n++] = ptx::ld_shared(ptx::smem_addr(row) + 4);
  const uint2 two = ptx::ld_shared_v2(ptx::smem_addr(row) + 8);
  out[n++] = two.x ^ two.y * 3;
  out[n++] = ptx::select_bits(r[0], r[1], r[2]);
  const uint2 half_wide = ptx::ld_global_nc_v2(reinterpret_cast<const uint2*>(image) + tid);
  out[n++] = half_wide.x ^ half_wide.y * 3;
  out[n++] = ptx::ld_global_u16(reinterpret_cast<const u16*>(image) + tid);
  out[n++] = static_cast<u32>(ptx::opaque_shared(smem + lane) - smem);
  __syncthreads();  // all have read the image, where smaller pieces of it go
  ptx::cp_async_small<8>(smem + tid * 16, reinterpret_cast<const uint2*>(image) + tid, tid % 5 != 2);
  ptx::cp_async_small<4>(smem + tid * 16 + 12, reinterpret_cast<const u32*>(image) + tid, tid % 3 != 1);
  ptx::cp_async_commit();
  ptx::cp_async_wait<0>();
  const uint4 piece = *reinterpret_cast<const uint4*>(smem + tid * 16);  // its third word is still the image's
  out[n++] = piece.x ^ piece.y * 3;
  out[n++] = piece.z;
  out[n++] = piece.w;

  // Warps 0 and 1 hand words to warps 2 and 3 through a named barrier.
  if (tid < 64) {
    mailbox[tid] = r[12];
    ptx::bar_arrive(1, 128);
    out[n++] = 0;
  } else {
    ptx::bar_sync(1, 128);
    out[n++] = mailbox[tid - 64];
  }
  const u64 address = reinterpret_cast<u64>(ptx::mad_wide(r[0], r[1], reinterpret_cast<const u8*>(u64{r[2]} << 16)));
  out[n++] = static_cast<u32>(address >> 32) ^ static_cast<u32>(address) * 3;
  while (n < NUM_WORDS) out[n++] = 0;

  // About -2 to 2.
  const float x = static_cast<float>(static_cast<int>(r[10])) * 0x1p-30f;
  approximate += tid * NUM_FLOATS;
  approximate[0] = ptx::exp2(x);
  approximate[1] = ptx::log2(x + 3.f);
  approximate[2] = __expf(x);
  approximate[3] = __logf(x + 3.f);
  approximate[4] = rsqrtf(x + 3.f);
  approximate[5] = __fdividef(1.f, x + 3.f);
  approximate[6] = ptx::sqrt(x + 3.f);
  approximate[7] = ptx::rsqrt(x + 3.f);
}

// abs [3, n]: the operands; out [n].
extern "C" __global__ void permute(const u32* abs, u32* out, int n) {
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) {
    out[i] = ptx::prmt(abs[i], abs[n + i], abs[2 * n + i]);
  }
}

// out [65536]: every half in both places, NaN as 0x7fff.
extern "C" __global__ void infinities(u32* out) {
  const auto one_nan = [](u32 half) { return (half & 0x7fff) > 0x7c00 ? 0x7fffu : half; };
  for (u32 i = blockIdx.x * blockDim.x + threadIdx.x; i < 65536; i += gridDim.x * blockDim.x) {
    const u32 r = ptx::nan_if_infinite(i | (65535 - i) << 16);
    out[i] = one_nan(r & 0xffff) | one_nan(r >> 16) << 16;
  }
}

// a, b, out [n]: two halves each, NaN as 0x7fff.
extern "C" __global__ void multiply_halves(const u32* a, const u32* b, u32* out, int n) {
  const auto one_nan = [](u32 half) { return (half & 0x7fff) > 0x7c00 ? 0x7fffu : half; };
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) {
    const u32 r = ptx::mul_half2(a[i], b[i]);
    out[i] = one_nan(r & 0xffff) | one_nan(r >> 16) << 16;
  }
}

// a, b, out [n]: two halves each; the larger size, NaN as 0x7fff.
extern "C" __global__ void larger_halves(const u32* a, const u32* b, u32* out, int n) {
  const auto one_nan = [](u32 half) { return (half & 0x7fff) > 0x7c00 ? 0x7fffu : half; };
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) {
    const u32 r = ptx::max_half2(ptx::abs_half2(a[i]), ptx::abs_half2(b[i]));
    out[i] = one_nan(r & 0xffff) | one_nan(r >> 16) << 16;
  }
}

// x [n] floats to 16 bits and back; half, bfloat [n] words, the value in the high and its negative in the low half.
extern "C" __global__ void convert(const float* x, u32* half, u32* bfloat, float* from_half, float* from_bfloat,
                                   int n) {
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) {
    half[i] = ptx::pack2<Half>(-x[i], x[i]);
    bfloat[i] = ptx::pack2<Bfloat16>(-x[i], x[i]);
    from_half[i] = ptx::to_float(Half{static_cast<u16>(half[i] >> 16)});
    from_bfloat[i] = ptx::to_float(Bfloat16{static_cast<u16>(bfloat[i] >> 16)});
  }
}
