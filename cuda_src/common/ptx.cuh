// common/ptx.cuh -- the instructions of the sm_80 baseline that CUDA C has no word for, one function each.
// SPDX-License-Identifier: Apache-2.0
//
// Rule: `asm` stands in common/ptx*.cuh and nowhere else. A pure instruction is not volatile, so that the compiler may
// move it; one that touches memory or order is. tests/simt/ has a second definition of every function here, for
// the CPU; it defines this file's guard, so both offer the same names.
#ifndef CUATTN_COMMON_PTX_CUH
#define CUATTN_COMMON_PTX_CUH
#include "common/types.cuh"

namespace ptx {

// The block's dynamic shared memory. Everything that ldmatrix, cp.async, TMA or wgmma touches lies in it.
__device__ __forceinline__ u8* dynamic_smem() {
  extern __shared__ __align__(1024) u8 smem_raw[];
  return smem_raw;
}

// Address in the shared window.
__device__ __forceinline__ u32 smem_addr(const void* p) { return static_cast<u32>(__cvta_generic_to_shared(p)); }

// PTX ISA: mma.sync.aligned.m16n8k16.row.col.f32.{f16,bf16}.{f16,bf16}.f32. d += a b, with g = lane / 4, t = lane % 4:
// a[0] row g, k 2t..2t+1; a[1] row g+8; a[2], a[3] the same rows, k 2t+8..2t+9;  b[0] column g, k 2t..2t+1; b[1] k + 8;
// d[0..1] row g, columns 2t, 2t+1; d[2..3] row g+8.
template <class Elem>
__device__ void mma_m16n8k16(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]);
template <>
__device__ __forceinline__ void mma_m16n8k16<Half>(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
template <>
__device__ __forceinline__ void mma_m16n8k16<Bfloat16>(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// d = a b, which takes no instruction to make d zero.
template <class Elem>
__device__ void mul_m16n8k16(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]);
template <>
__device__ __forceinline__ void mul_m16n8k16<Half>(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%10,%10,%10};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(0.f));
}
template <>
__device__ __forceinline__ void mul_m16n8k16<Bfloat16>(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%10,%10,%10};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(0.f));
}

// PTX ISA: mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32, of floats whose lowest 13 bits are not looked at. d as
// above; a[0] row g, k t; a[1] row g+8; a[2], a[3] the same rows, k t+4;  b[0] column g, k t; b[1] k t+4.
__device__ __forceinline__ void mma_m16n8k8_tf32(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
__device__ __forceinline__ void mul_m16n8k8_tf32(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%10,%10,%10};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(0.f));
}

// PTX ISA: ldmatrix.sync.aligned.m8n8.{x2,x4}{.trans}.shared.b16. Lanes 8i..8i+7 give the rows of matrix i.
__device__ __forceinline__ void ldmatrix_x2(u32 (&r)[2], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];"
               : "=r"(r[0]), "=r"(r[1])
               : "r"(smem_addr(row))
               : "memory");
}
__device__ __forceinline__ void ldmatrix_x4(u32 (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(smem_addr(row))
               : "memory");
}
__device__ __forceinline__ void ldmatrix_x4_trans(u32 (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(smem_addr(row))
               : "memory");
}

// PTX ISA: movmatrix.sync.aligned.m8n8.trans.b16, the transpose of an 8x8 matrix held as a fragment.
__device__ __forceinline__ u32 movmatrix_trans(u32 value) {
  u32 r;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(value));
  return r;
}

// PTX ISA: cp.async.cg.shared.global, 16 bytes; zeros are written, and nothing is read, unless `valid`.
__device__ __forceinline__ void cp_async16(void* dst, const void* src, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(smem_addr(dst)), "l"(src), "r"(valid ? 16 : 0)
               : "memory");
}
// PTX ISA: cp.async.ca.shared.global, likewise for 4 or 8 bytes, which .cg does not have.
template <int BYTES>
__device__ __forceinline__ void cp_async_small(void* dst, const void* src, bool valid) {
  static_assert(BYTES == 4 || BYTES == 8, "cp_async16 has 16, and there is nothing below 4");
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(smem_addr(dst)), "l"(src), "n"(BYTES),
               "r"(valid ? BYTES : 0)
               : "memory");
}
// PTX ISA: cp.async.commit_group.
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// PTX ISA: cp.async.wait_group; at most N of this thread's groups are still in flight afterwards.
template <int N>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

// PTX ISA: cp.async.mbarrier.arrive.noinc.shared::cta.b64. This thread's arrival, once all its copies so far have
// landed.
__device__ __forceinline__ void cp_async_mbarrier_arrive(u64* bar) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(smem_addr(bar)) : "memory");
}

// ---- mbarrier ----------------------------------------------------------------------------------------------------
// A phase completes when `count` arrivals came and the bytes that were announced have landed. Waiting for `parity`
// returns once the phase of that parity has completed: 0 for the first phase, 1 for the one "before" it.

// PTX ISA: mbarrier.init.shared::cta.b64. By one thread; then a barrier publishes it, after fence_mbarrier_init where
// TMA is to see it.
__device__ __forceinline__ void mbarrier_init(u64* bar, u32 count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(smem_addr(bar)), "r"(count) : "memory");
}
// PTX ISA: mbarrier.arrive.shared::cta.b64.
template <int ARCH = __CUDA_ARCH__>
__device__ __forceinline__ void mbarrier_arrive(u64* bar) {
  if constexpr (ARCH >= 900) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(smem_addr(bar)) : "memory");
  } else {
    u64 state;
    asm volatile("mbarrier.arrive.shared::cta.b64 %0, [%1];" : "=l"(state) : "r"(smem_addr(bar)) : "memory");
  }
}
// PTX ISA: mbarrier.{test,try}_wait.parity.shared::cta.b64. The latter suspends the thread, here for
// up to 10 ms, longer than any wait: whoever wakes up to look takes cycles and power from others.
template <int ARCH = __CUDA_ARCH__>
__device__ __forceinline__ bool mbarrier_try_wait(u64* bar, u32 parity) {
  u32 done;
  if constexpr (ARCH >= 900) {
    asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2, %3;\nselp.u32 %0, 1, 0, p;\n}"
                 : "=r"(done)
                 : "r"(smem_addr(bar)), "r"(parity), "r"(10000000)
                 : "memory");
  } else {
    asm volatile("{\n.reg .pred p;\nmbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
                 : "=r"(done)
                 : "r"(smem_addr(bar)), "r"(parity)
                 : "memory");
  }
  return done != 0;
}
__device__ __forceinline__ void mbarrier_wait(u64* bar, u32 parity) {
  while (!mbarrier_try_wait(bar, parity)) {
  }
}

// PTX ISA: ld.global.nc.L1::no_allocate.{v2,v4}.b32, for data that is read once, and that is not written from
// griddepcontrol.wait on until the kernel ends.
__device__ __forceinline__ uint2 ld_global_nc_v2(const void* p) {
  uint2 v;
  asm volatile("ld.global.nc.L1::no_allocate.v2.b32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p));
  return v;
}
__device__ __forceinline__ uint4 ld_global_nc_v4(const void* p) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.b32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p));
  return v;
}

// PTX ISA: ld.global.u16 into a whole register. With one of 16 bits the compiler makes a copy at once, which waits for
// the load.
__device__ __forceinline__ u32 ld_global_u16(const void* p) {
  u32 v;
  asm volatile("ld.global.u16 %0, [%1];" : "=r"(v) : "l"(p));
  return v;
}

// PTX ISA: ld.shared.b32, ld.shared.v2.b32, of a table: it may move like arithmetic, but not over the barrier behind
// which it is whole, as its address comes from later data.
__device__ __forceinline__ u32 ld_shared(u32 address) {
  u32 v;
  asm("ld.shared.b32 %0, [%1];" : "=r"(v) : "r"(address));
  return v;
}
__device__ __forceinline__ uint2 ld_shared_v2(u32 address) {
  uint2 v;
  asm("ld.shared.v2.b32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(address));
  return v;
}

// PTX ISA: st.shared.v4.b32.
__device__ __forceinline__ void st_shared_v4(u32 address, const uint4& v) {
  asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}

// threadIdx.x, read anew: the compiler cannot keep it, and what follows from it, in registers between uses.
__device__ __forceinline__ int thread_index() {
  int i;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(i));
  return i;
}

// The value itself, which the compiler then keeps in a register rather than compute it anew for each use.
__device__ __forceinline__ u32 opaque(u32 x) {
  asm volatile("" : "+r"(x));
  return x;
}
__device__ __forceinline__ const u8* opaque(const u8* p) {
  asm volatile("" : "+l"(p));
  return p;
}
// The same of a constant, which the assembler would make anew for each use. It does not know that blocks have one
// dimension, so that threadIdx.y is zero.
__device__ __forceinline__ u32 held(u32 x) { return opaque(x + threadIdx.y); }
// The value itself, of a pointer into shared memory, which stays one for the compiler.
__device__ __forceinline__ u8* opaque_shared(u8* p) {
  return static_cast<u8*>(__cvta_shared_to_generic(opaque(smem_addr(p))));
}

// PTX ISA: fma.rn.f16x2, x * 0 + x: two halves as they are, but NaN for infinities.
__device__ __forceinline__ u32 nan_if_infinite(u32 halves) {
  u32 r;
  asm("fma.rn.f16x2 %0, %1, %2, %1;" : "=r"(r) : "r"(halves), "r"(0));
  return r;
}

// PTX ISA: redux.sync.max.u32, over all lanes.
__device__ __forceinline__ u32 warp_max(u32 x) {
  u32 r;
  asm volatile("redux.sync.max.u32 %0, %1, 0xffffffff;" : "=r"(r) : "r"(x));
  return r;
}

// PTX ISA: mul.rn.f16x2.
__device__ __forceinline__ u32 mul_half2(u32 a, u32 b) {
  u32 r;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}

// PTX ISA: mad.wide.u32, an address: one instruction even where the compiler does not see that `b` has 32 bits.
__device__ __forceinline__ const u8* mad_wide(u32 a, u32 b, const u8* c) {
  const u8* r;
  asm("mad.wide.u32 %0, %1, %2, %3;" : "=l"(r) : "r"(a), "r"(b), "l"(c));
  return r;
}

// PTX ISA: abs.f16x2.
__device__ __forceinline__ u32 abs_half2(u32 a) {
  u32 r;
  asm("abs.f16x2 %0, %1;" : "=r"(r) : "r"(a));
  return r;
}

// PTX ISA: max.f16x2; of a NaN and a number, the number.
__device__ __forceinline__ u32 max_half2(u32 a, u32 b) {
  u32 r;
  asm("max.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}

// PTX ISA: lop3.b32; the bits of `a` where `mask` is set, else those of `b`.
__device__ __forceinline__ u32 select_bits(u32 a, u32 b, u32 mask) {
  u32 r;
  asm("lop3.b32 %0, %1, %2, %3, 0xca;" : "=r"(r) : "r"(mask), "r"(a), "r"(b));
  return r;
}

// PTX ISA: prmt.b32.
__device__ __forceinline__ u32 prmt(u32 a, u32 b, u32 selector) {
  u32 r;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(selector));
  return r;
}

// PTX ISA: ex2.approx.ftz.f32; ex2(-inf) = +0.
__device__ __forceinline__ float exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// PTX ISA: lg2.approx.ftz.f32; lg2(0) = -inf.
__device__ __forceinline__ float log2(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// PTX ISA: sqrt.approx.ftz.f32 and rsqrt.approx.ftz.f32, to 2^-23 and 2^-22.4; subnormal arguments are zeros.
__device__ __forceinline__ float sqrt(float x) {
  float y;
  asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float rsqrt(float x) {
  float y;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// PTX ISA: cvt.rn.{f16x2,bf16x2}.f32; `lo` goes to the low half.
template <class Elem>
__device__ u32 pack2(float lo, float hi);
template <>
__device__ __forceinline__ u32 pack2<Half>(float lo, float hi) {
  u32 r;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
  return r;
}
template <>
__device__ __forceinline__ u32 pack2<Bfloat16>(float lo, float hi) {
  u32 r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
  return r;
}

// Whether there are conversions from and to fp8 e4m3.
constexpr bool CONVERTS_E4M3 = __CUDA_ARCH__ >= 890;
// PTX ISA: cvt.rn.f16x2.e4m3x2, of the two lower ones of four codes and of the two upper ones, each the lower one to
// the low half. Both at once, as the compiler would shift a word for its upper half, which the instruction can pick
// itself.
template <int ARCH = __CUDA_ARCH__>
__device__ __forceinline__ void halves_of_e4m3(u32 (&pairs)[2], u32 codes) {
  static_assert(ARCH >= 890, "common/e4m3.cuh has another way");
  asm("{\n.reg .b16 lower, upper;\nmov.b32 {lower, upper}, %2;\n"
      "cvt.rn.f16x2.e4m3x2 %0, lower;\ncvt.rn.f16x2.e4m3x2 %1, upper;\n}"
      : "=r"(pairs[0]), "=r"(pairs[1])
      : "r"(codes));
}
// PTX ISA: cvt.rn.satfinite.e4m3x2.f32; `lo` goes to the low byte. What is too large becomes 448, NaN stays NaN.
template <int ARCH = __CUDA_ARCH__>
__device__ __forceinline__ u32 pack_e4m3(float lo, float hi) {
  static_assert(ARCH >= 890, "common/e4m3.cuh has another way");
  u16 r;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(r) : "f"(hi), "f"(lo));
  return r;
}

// PTX ISA: cvt.f32.f16; a bfloat16 is the upper half of a float.
__device__ __forceinline__ float to_float(Half x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
  return y;
}
__device__ __forceinline__ float to_float(Bfloat16 x) { return __uint_as_float(static_cast<u32>(x.bits) << 16); }
__device__ __forceinline__ float to_float(float x) { return x; }

// Reads a word of every 64 bytes of a kernel's parameters, so that their cache has them when they are needed: each
// launch has others, and a miss takes longer than a trip to L2.
template <class Params>
__device__ __forceinline__ void read_ahead(const Params& p) {
  const u32* words = reinterpret_cast<const u32*>(&p);
#pragma unroll
  for (u32 i = 0; i < sizeof(Params) / 4; i += 16) asm volatile("" ::"r"(words[i]));
}

// What may come before griddepcontrol_wait, of memory that may be written at that time.
// PTX ISA: ld.relaxed.gpu.global.s32: a number of some time, from L2, so that no later load finds an old one in L1.
__device__ __forceinline__ int ld_relaxed(const int* p) {
  int x;
  asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(x) : "l"(p));
  return x;
}
// PTX ISA: cp.async.bulk.prefetch.L2.global: `bytes` and the address are multiples of 16. L2 is where all SMs meet, so
// what is written afterwards is found by those who load afterwards. Nothing below sm_90, where there is no such time.
template <int ARCH = __CUDA_ARCH__>
__device__ __forceinline__ void prefetch_l2(const void* p, u32 bytes) {
  if constexpr (ARCH >= 900) asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(p), "r"(bytes));
}

// PTX ISA: griddepcontrol.wait: the grids before this one have ended, and what they wrote is visible. Kernels are
// launched so that they may overlap with the end of the grid before: every thread must call this before it touches
// global memory, but for what stands above and constants of the module, and before it ends. There is none below sm_90,
// where nothing overlaps (cuattn/_jit.py). Only functions here ask for the architecture, as kernels are the same files
// for all.
template <int ARCH = __CUDA_ARCH__>
__device__ __forceinline__ void griddepcontrol_wait() {
  if constexpr (ARCH >= 900) asm volatile("griddepcontrol.wait;" ::: "memory");
}
// PTX ISA: griddepcontrol.launch_dependents: the next grid may start, as far as there is room, once a thread of every
// block has called this or the block has ended.
template <int ARCH = __CUDA_ARCH__>
__device__ __forceinline__ void griddepcontrol_launch_dependents() {
  if constexpr (ARCH >= 900) asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// PTX ISA: bar.sync / bar.arrive on named barrier `id`, `threads` a multiple of 32.
__device__ __forceinline__ void bar_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void bar_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

}  // namespace ptx

#endif
