// common/ptx_sm90.cuh -- Hopper's instructions (sm_90a), one function each: mbarrier, TMA, bulk copies, wgmma.
// SPDX-License-Identifier: Apache-2.0
//
// The rules of common/ptx.cuh. Addresses named `bar`, `dst` and operands of wgmma lie in ptx::dynamic_smem().
#ifndef CUATTN_COMMON_PTX_SM90_CUH
#define CUATTN_COMMON_PTX_SM90_CUH
#include "common/ptx.cuh"

namespace ptx {

// ---- mbarrier ----------------------------------------------------------------------------------------------------
// Beside those of common/ptx.cuh.

// PTX ISA: fence.mbarrier_init.release.cluster.
__device__ __forceinline__ void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
// PTX ISA: mbarrier.expect_tx.relaxed.cta.shared::cta.b64. Announces `bytes` without arriving.
__device__ __forceinline__ void mbarrier_expect_tx(u64* bar, u32 bytes) {
  asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(smem_addr(bar)), "r"(bytes) : "memory");
}
// PTX ISA: mbarrier.arrive.expect_tx.shared::cta.b64.
__device__ __forceinline__ void mbarrier_arrive_expect_tx(u64* bar, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(smem_addr(bar)), "r"(bytes) : "memory");
}
// PTX ISA: fence.proxy.async.shared::cta. Between ordinary accesses to shared memory and TMA or wgmma on the same
// bytes; by every thread that made such accesses, before the barrier.
__device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// PTX ISA: elect.sync. True in one lane of a warp that is complete here.
__device__ __forceinline__ bool elect_one() {
  u32 elected;
  asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}" : "=r"(elected)::"memory");
  return elected != 0;
}

// ---- TMA and bulk copies, global to shared memory ----------------------------------------------------------------

// PTX ISA: prefetch.tensormap.
__device__ __forceinline__ void prefetch_tensormap(const TensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
// PTX ISA: cp.async.bulk.tensor.{2d,3d,4d}.shared::cluster.global.tile.mbarrier::complete_tx::bytes. One box, c0 along
// the innermost dimension; elements outside of the tensor are zero, and count as bytes of the box like the others. c0
// is a multiple of 16 bytes: an H200 answers others with "illegal instruction".
__device__ __forceinline__ void tma_load_2d(void* dst, const TensorMap* map, u64* bar, int c0, int c1) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3,%4}], [%2];" ::
          "r"(smem_addr(dst)),
      "l"(map), "r"(smem_addr(bar)), "r"(c0), "r"(c1)
      : "memory");
}
__device__ __forceinline__ void tma_load_3d(void* dst, const TensorMap* map, u64* bar, int c0, int c1, int c2) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3,%4,%5}], "
      "[%2];" ::"r"(smem_addr(dst)),
      "l"(map), "r"(smem_addr(bar)), "r"(c0), "r"(c1), "r"(c2)
      : "memory");
}
__device__ __forceinline__ void tma_load_4d(void* dst, const TensorMap* map, u64* bar, int c0, int c1, int c2, int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3,%4,%5,%6}], "
      "[%2];" ::"r"(smem_addr(dst)),
      "l"(map), "r"(smem_addr(bar)), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}
// PTX ISA: cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes. Addresses and `bytes` multiples of 16.
__device__ __forceinline__ void bulk_load(void* dst, const void* src, u32 bytes, u64* bar) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(smem_addr(dst)),
      "l"(src), "r"(bytes), "r"(smem_addr(bar))
      : "memory");
}

// ---- wgmma -------------------------------------------------------------------------------------------------------
// d[64, N] += a[64, 16] b[16, N], by the four warps of a warpgroup. A batch is: wgmma_fence, some wgmma, wgmma_commit.
// Accumulators, registers of a and shared-memory operands belong to the hardware until wgmma_wait.

// PTX ISA: wgmma.fence.sync.aligned. Registers written so far are seen by the wgmma that follow.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
// PTX ISA: wgmma.commit_group.sync.aligned.
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// PTX ISA: wgmma.wait_group.sync.aligned; at most N batches are still in flight afterwards.
template <int N>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

// PTX ISA: setp.lt.f32, wgmma.wait_group. The same, once x and y are known, which are not negative: the compiler would
// move the arithmetic that they come from behind the wait, where it stands beside no product. It does not move it over
// a branch.
template <int N>
__device__ __forceinline__ void wgmma_wait_behind(float x, float y) {
  asm volatile(
      "{\n.reg .pred p, q;\nsetp.lt.f32 p, %0, 0f00000000;\nsetp.lt.or.f32 q, %1, 0f00000000, p;\n@q trap;\n"
      "wgmma.wait_group.sync.aligned %2;\n}" ::"f"(x),
      "f"(y), "n"(N)
      : "memory");
}
// The accumulators themselves, which the compiler then does not read before the wait in front: it takes them for
// results of the wgmma that began them.
template <int N>
__device__ __forceinline__ void read_behind(float (&d)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// PTX ISA: matrix descriptor of wgmma. SWIZZLE is the bytes of a row that the swizzle permutes (0, 32, 64, 128), `lbo`
// and `sbo` are bytes. With s = SWIZZLE, element (mn, k) of an operand lies, before the swizzle, at
//   K-major   s > 0: mn/8 sbo + mn%8 s + 2 k                         s = 0: mn/8 sbo + k/8 lbo + mn%8 16 + k%8 2
//   MN-major  s > 0: 2mn/s lbo + k/8 sbo + k%8 s + 2 mn%(s/2)        s = 0: mn/8 sbo + k/8 lbo + k%8 16 + mn%8 2
// The next 16 k of a swizzled K-major tile are 32 bytes further on. A tile starts at a multiple of 8 s bytes.
template <int SWIZZLE>
__device__ __forceinline__ u64 smem_desc(const void* p, u32 lbo, u32 sbo) {
  static_assert(SWIZZLE == 0 || SWIZZLE == 32 || SWIZZLE == 64 || SWIZZLE == 128, "swizzle spans");
  constexpr u64 MODE = SWIZZLE == 128 ? 1 : SWIZZLE == 64 ? 2 : SWIZZLE == 32 ? 3 : 0;
  return static_cast<u64>(smem_addr(p) >> 4 & 0x3fff) | static_cast<u64>(lbo >> 4 & 0x3fff) << 16 |
         static_cast<u64>(sbo >> 4 & 0x3fff) << 32 | MODE << 62;
}

// The registers and operands of an accumulator, for the shapes that the kernels use. asm wants both as literals.
#define CUATTN_REGS4 "%0,%1,%2,%3"
#define CUATTN_REGS8 CUATTN_REGS4 ",%4,%5,%6,%7"
#define CUATTN_REGS16 CUATTN_REGS8 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define CUATTN_REGS32 CUATTN_REGS16 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define CUATTN_REGS40 CUATTN_REGS32 ",%32,%33,%34,%35,%36,%37,%38,%39"
#define CUATTN_REGS48 CUATTN_REGS32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47"
#define CUATTN_REGS64 CUATTN_REGS48 ",%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define CUATTN_REGS80 CUATTN_REGS64 ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79"
#define CUATTN_REGS88 CUATTN_REGS80 ",%80,%81,%82,%83,%84,%85,%86,%87"
#define CUATTN_REGS96 CUATTN_REGS88 ",%88,%89,%90,%91,%92,%93,%94,%95"
#define CUATTN_REGS128                                                                     \
  CUATTN_REGS96                                                                            \
  ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,%112,%113" \
  ",%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
#define CUATTN_ACC4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define CUATTN_ACC8(i) CUATTN_ACC4(i), CUATTN_ACC4(i + 4)
#define CUATTN_ACC16(i) CUATTN_ACC8(i), CUATTN_ACC8(i + 8)
#define CUATTN_ACC32(i) CUATTN_ACC16(i), CUATTN_ACC16(i + 16)
#define CUATTN_ACC64(i) CUATTN_ACC32(i), CUATTN_ACC32(i + 32)
// WGMMA(N, registers, seven operand numbers that follow them, operands)
#define CUATTN_WGMMA_SHAPES(WGMMA)                                                                                 \
  WGMMA(8, CUATTN_REGS4, "%4", "%5", "%6", "%7", "%8", "%9", "%10", CUATTN_ACC4(0))                                \
  WGMMA(16, CUATTN_REGS8, "%8", "%9", "%10", "%11", "%12", "%13", "%14", CUATTN_ACC8(0))                           \
  WGMMA(32, CUATTN_REGS16, "%16", "%17", "%18", "%19", "%20", "%21", "%22", CUATTN_ACC16(0))                       \
  WGMMA(64, CUATTN_REGS32, "%32", "%33", "%34", "%35", "%36", "%37", "%38", CUATTN_ACC32(0))                       \
  WGMMA(80, CUATTN_REGS40, "%40", "%41", "%42", "%43", "%44", "%45", "%46", CUATTN_ACC32(0), CUATTN_ACC8(32))      \
  WGMMA(96, CUATTN_REGS48, "%48", "%49", "%50", "%51", "%52", "%53", "%54", CUATTN_ACC32(0), CUATTN_ACC16(32))     \
  WGMMA(128, CUATTN_REGS64, "%64", "%65", "%66", "%67", "%68", "%69", "%70", CUATTN_ACC64(0))                      \
  WGMMA(160, CUATTN_REGS80, "%80", "%81", "%82", "%83", "%84", "%85", "%86", CUATTN_ACC64(0), CUATTN_ACC16(64))    \
  WGMMA(176, CUATTN_REGS88, "%88", "%89", "%90", "%91", "%92", "%93", "%94", CUATTN_ACC64(0), CUATTN_ACC16(64),    \
        CUATTN_ACC8(80))                                                                                           \
  WGMMA(192, CUATTN_REGS96, "%96", "%97", "%98", "%99", "%100", "%101", "%102", CUATTN_ACC64(0), CUATTN_ACC32(64)) \
  WGMMA(256, CUATTN_REGS128, "%128", "%129", "%130", "%131", "%132", "%133", "%134", CUATTN_ACC64(0), CUATTN_ACC64(64))

template <class Elem>
constexpr bool IS_HALF = false;
template <>
constexpr bool IS_HALF<Half> = true;
template <int N>
constexpr bool IS_WGMMA_SHAPE = N == 8 || N == 16 || N == 32 || N == 64 || N == 80 || N == 96 || N == 128 || N == 160 ||
                                N == 176 || N == 192 || N == 256;

#define CUATTN_WGMMA_ASM(N_, TYPE, REGS, A, B, ACCUMULATE, TAIL)                                               \
  "{\n.reg .pred p;\nsetp.ne.b32 p, " ACCUMULATE ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N_ "k16.f32." TYPE \
  "." TYPE " {" REGS "}, " A ", " B ", p, 1, 1, " TAIL ";\n}"
#define CUATTN_WGMMA_SS(N_, REGS, I0, I1, I2, I3, I4, I5, I6, ...)                                 \
  if constexpr (N == N_ && IS_HALF<Elem>) {                                                        \
    asm volatile(CUATTN_WGMMA_ASM(N_, "f16", REGS, I0, I1, I2, I3 ", " I4)                         \
                 : __VA_ARGS__                                                                     \
                 : "l"(desc_a), "l"(desc_b), "r"(accumulate ? 1 : 0), "n"(TRANS_A), "n"(TRANS_B)); \
  } else if constexpr (N == N_) {                                                                  \
    asm volatile(CUATTN_WGMMA_ASM(N_, "bf16", REGS, I0, I1, I2, I3 ", " I4)                        \
                 : __VA_ARGS__                                                                     \
                 : "l"(desc_a), "l"(desc_b), "r"(accumulate ? 1 : 0), "n"(TRANS_A), "n"(TRANS_B)); \
  }
#define CUATTN_WGMMA_RS(N_, REGS, I0, I1, I2, I3, I4, I5, I6, ...)                                                  \
  if constexpr (N == N_ && IS_HALF<Elem>) {                                                                         \
    asm volatile(CUATTN_WGMMA_ASM(N_, "f16", REGS, "{" I0 "," I1 "," I2 "," I3 "}", I4, I5, I6)                     \
                 : __VA_ARGS__                                                                                      \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(desc_b), "r"(accumulate ? 1 : 0), "n"(TRANS_B)); \
  } else if constexpr (N == N_) {                                                                                   \
    asm volatile(CUATTN_WGMMA_ASM(N_, "bf16", REGS, "{" I0 "," I1 "," I2 "," I3 "}", I4, I5, I6)                    \
                 : __VA_ARGS__                                                                                      \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(desc_b), "r"(accumulate ? 1 : 0), "n"(TRANS_B)); \
  }

// PTX ISA: wgmma.mma_async.sync.aligned.m64nNk16.f32.{f16,bf16}.{f16,bf16}. Both operands in shared memory; d is
// overwritten unless `accumulate`. With g = lane / 4, t = lane % 4, warp w of the group: d[4 i + 2 r + c] is row
// 16 w + g + 8 r, column 8 i + 2 t + c. TRANS: 0 for a K-major operand, 1 for an MN-major one.
template <class Elem, int N, int TRANS_A = 0, int TRANS_B = 0>
__device__ __forceinline__ void wgmma_ss(float (&d)[N / 2], u64 desc_a, u64 desc_b, bool accumulate) {
  static_assert(IS_WGMMA_SHAPE<N>, "add the shape to CUATTN_WGMMA_SHAPES");
  CUATTN_WGMMA_SHAPES(CUATTN_WGMMA_SS)
}
// The same with a in registers, as the four of mma_m16n8k16 for the 16 rows of each warp.
template <class Elem, int N, int TRANS_B = 0>
__device__ __forceinline__ void wgmma_rs(float (&d)[N / 2], const u32 (&a)[4], u64 desc_b, bool accumulate) {
  static_assert(IS_WGMMA_SHAPE<N>, "add the shape to CUATTN_WGMMA_SHAPES");
  CUATTN_WGMMA_SHAPES(CUATTN_WGMMA_RS)
}

#undef CUATTN_REGS4
#undef CUATTN_REGS8
#undef CUATTN_REGS16
#undef CUATTN_REGS32
#undef CUATTN_REGS40
#undef CUATTN_REGS48
#undef CUATTN_REGS64
#undef CUATTN_REGS80
#undef CUATTN_REGS88
#undef CUATTN_REGS96
#undef CUATTN_REGS128
#undef CUATTN_ACC4
#undef CUATTN_ACC8
#undef CUATTN_ACC16
#undef CUATTN_ACC32
#undef CUATTN_ACC64
#undef CUATTN_WGMMA_SHAPES
#undef CUATTN_WGMMA_ASM
#undef CUATTN_WGMMA_SS
#undef CUATTN_WGMMA_RS

// ---- registers and dependent launches ----------------------------------------------------------------------------

// PTX ISA: setmaxnreg.{dec,inc}.sync.aligned.u32, by all warps of a warpgroup; R is a multiple of 8 from 24 to 256.
template <int R>
__device__ __forceinline__ void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(R));
}
template <int R>
__device__ __forceinline__ void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(R));
}

}  // namespace ptx

#endif
