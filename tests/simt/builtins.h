// builtins.h -- the CUDA language on the CPU: keywords, vector types, built-in variables and functions.
// SPDX-License-Identifier: Apache-2.0
//
// Built-ins that gather a warp or a block take the caller's line as a hidden last argument: all participants have to
// come by the same line, and reports name it. What the kernels may use is what stands here.
#ifndef CUATTN_SIMT_BUILTINS_H
#define CUATTN_SIMT_BUILTINS_H
#include "fibers.h"

#define __global__
#define __device__
#define __host__
#define __constant__ static
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(n) alignas(n)
#define __shared__ static  // the fibers of a block share one OS thread, and blocks run one after another
#define __CUDA_ARCH__ 900

#define threadIdx (simt::self->thread_idx)
#define blockIdx (simt::block->block_idx)
#define blockDim (simt::block->launch->block)
#define gridDim (simt::block->launch->grid)

#define SIMT_VECTORS(name, type)                                   \
  struct alignas(2 * sizeof(type)) name##2 { type x, y; };         \
  struct alignas(4 * sizeof(type)) name##4 { type x, y, z, w; };   \
  inline name##2 make_##name##2(type x, type y) { return {x, y}; } \
  inline name##4 make_##name##4(type x, type y, type z, type w) { return {x, y, z, w}; }
SIMT_VECTORS(uint, unsigned)
SIMT_VECTORS(int, int)
SIMT_VECTORS(float, float)
#undef SIMT_VECTORS

namespace simt {

template <class To, class From>
To bit_cast(const From& from) {
  static_assert(sizeof(To) == sizeof(From), "bit_cast: sizes differ");
  To to;
  memcpy(&to, &from, sizeof(To));
  return to;
}

template <class T>
T shuffle(unsigned mask, T value, int source, Place at) {
  return warp_read(mask, at, "__shfl_sync", value, [=](const Slot* s) {
    if (!participates(mask, source)) fail("__shfl_sync: reads lane %d, which mask %08x does not name", source, mask);
    return s[source].get<T>();
  });
}

// Folds the values of all lanes of `mask`, in lane order.
template <class T, class Op>
T fold(unsigned mask, T value, Place at, const char* what, Op op) {
  return warp_read(mask, at, what, value, [=](const Slot* s) {
    int first = 0;
    while (!participates(mask, first)) first++;
    T acc = s[first].get<T>();
    for (int l = first + 1; l < WARP_LANES; l++) {
      if (participates(mask, l)) acc = op(acc, s[l].get<T>());
    }
    return acc;
  });
}

// Fibers switch only inside built-ins, so a plain read, change and write is atomic.
template <class T, class Op>
T atomic(T* p, Op op) {
  const T old = *p;
  *p = op(old);
  return old;
}

}  // namespace simt

// ---- synchronization and warp functions --------------------------------------------------------------------------

inline void __syncthreads(simt::Place at = simt::here()) { simt::sync_threads(at); }
inline void __syncwarp(unsigned mask = ~0u, simt::Place at = simt::here()) {
  simt::warp_read(mask, at, "__syncwarp", 0, [](const simt::Slot*) { return 0; });
}
inline void __threadfence() {}
inline void __threadfence_block() {}
inline void __nanosleep(unsigned) { simt::poll(); }
[[noreturn]] inline void __trap(simt::Place at = simt::here()) {
  simt::self->place = at;
  simt::fail("__trap()");
}

template <class T>
T __shfl_sync(unsigned mask, T v, int source, int width = 32, simt::Place at = simt::here()) {
  return simt::shuffle(mask, v, (simt::lane() & ~(width - 1)) | (source & (width - 1)), at);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T v, int bits, int width = 32, simt::Place at = simt::here()) {
  const int l = simt::lane(), source = l ^ bits;
  return simt::shuffle(mask, v, source < (l & ~(width - 1)) + width ? source : l, at);
}
template <class T>
T __shfl_down_sync(unsigned mask, T v, int delta, int width = 32, simt::Place at = simt::here()) {
  const int l = simt::lane();
  return simt::shuffle(mask, v, (l & (width - 1)) + delta < width ? l + delta : l, at);
}
template <class T>
T __shfl_up_sync(unsigned mask, T v, int delta, int width = 32, simt::Place at = simt::here()) {
  const int l = simt::lane();
  return simt::shuffle(mask, v, (l & (width - 1)) >= delta ? l - delta : l, at);
}

inline unsigned __ballot_sync(unsigned mask, int p, simt::Place at = simt::here()) {
  return simt::fold(mask, p ? 1u << simt::lane() : 0u, at, "__ballot_sync", [](auto a, auto b) { return a | b; });
}
inline int __any_sync(unsigned mask, int p, simt::Place at = simt::here()) { return __ballot_sync(mask, p, at) != 0; }
inline int __all_sync(unsigned mask, int p, simt::Place at = simt::here()) { return __ballot_sync(mask, !p, at) == 0; }

#define SIMT_REDUCE(name, expression)                                                           \
  template <class T>                                                                            \
  T name(unsigned mask, T v, simt::Place at = simt::here()) {                                   \
    static_assert(std::is_integral_v<T> && sizeof(T) == 4, #name " takes 32-bit integers");     \
    return simt::fold(mask, v, at, #name, [](T a, T b) { return static_cast<T>(expression); }); \
  }
SIMT_REDUCE(__reduce_add_sync, a + b)
SIMT_REDUCE(__reduce_min_sync, b < a ? b : a)
SIMT_REDUCE(__reduce_max_sync, a < b ? b : a)
SIMT_REDUCE(__reduce_and_sync, (a & b))
SIMT_REDUCE(__reduce_or_sync, a | b)
SIMT_REDUCE(__reduce_xor_sync, a ^ b)
#undef SIMT_REDUCE

// ---- memory ------------------------------------------------------------------------------------------------------

#define SIMT_ATOMIC(name, expression)                                                 \
  template <class T, class U>                                                         \
  T name(T* p, U value) {                                                             \
    const T b = static_cast<T>(value);                                                \
    return simt::atomic(p, [b](T a) { return (void)a, static_cast<T>(expression); }); \
  }
SIMT_ATOMIC(atomicAdd, a + b)
SIMT_ATOMIC(atomicMin, b < a ? b : a)
SIMT_ATOMIC(atomicMax, a < b ? b : a)
SIMT_ATOMIC(atomicAnd, (a & b))
SIMT_ATOMIC(atomicOr, a | b)
SIMT_ATOMIC(atomicExch, b)
SIMT_ATOMIC(atomicInc, a >= b ? 0 : a + 1)
#undef SIMT_ATOMIC
template <class T, class U, class V>
T atomicCAS(T* p, U compare, V value) {
  return simt::atomic(p, [=](T a) { return a == static_cast<T>(compare) ? static_cast<T>(value) : a; });
}

#define SIMT_LOAD(name) \
  template <class T>    \
  T name(const T* p) {  \
    return *p;          \
  }
SIMT_LOAD(__ldg)
SIMT_LOAD(__ldcg)
SIMT_LOAD(__ldcs)
#undef SIMT_LOAD
template <class T>
void __stcg(T* p, T value) {
  *p = value;
}
template <class T>
void __stcs(T* p, T value) {
  *p = value;
}

// ---- arithmetic (math.h has the rest) ----------------------------------------------------------------------------

template <class A, class B>
std::common_type_t<A, B> min(A a, B b) {
  using C = std::common_type_t<A, B>;
  return static_cast<C>(b) < static_cast<C>(a) ? static_cast<C>(b) : static_cast<C>(a);
}
template <class A, class B>
std::common_type_t<A, B> max(A a, B b) {
  using C = std::common_type_t<A, B>;
  return static_cast<C>(a) < static_cast<C>(b) ? static_cast<C>(b) : static_cast<C>(a);
}

inline float rsqrtf(float x) { return 1.f / sqrtf(x); }
inline float __expf(float x) { return expf(x); }
inline float __logf(float x) { return logf(x); }
inline float __log2f(float x) { return log2f(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __frcp_rn(float x) { return 1.f / x; }
inline float __fsqrt_rn(float x) { return sqrtf(x); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float __saturatef(float x) { return x > 0.f ? (x < 1.f ? x : 1.f) : 0.f; }
// As cvt.s32.f32: the nearest int where there is none, 0 for NaN.
inline int __float2int_rz(float x) {
  if (x != x) return 0;
  return x >= 0x1p31f ? 0x7fffffff : x < -0x1p31f ? -0x7fffffff - 1 : static_cast<int>(x);
}
inline int __float2int_rn(float x) { return __float2int_rz(rintf(x)); }
inline float __int2float_rn(int x) { return static_cast<float>(x); }
inline int __float_as_int(float x) { return simt::bit_cast<int>(x); }
inline unsigned __float_as_uint(float x) { return simt::bit_cast<unsigned>(x); }
inline float __int_as_float(int x) { return simt::bit_cast<float>(x); }
inline float __uint_as_float(unsigned x) { return simt::bit_cast<float>(x); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __clz(int x) { return x ? __builtin_clz(static_cast<unsigned>(x)) : 32; }
inline int __clzll(long long x) { return x ? __builtin_clzll(static_cast<unsigned long long>(x)) : 64; }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline unsigned __umulhi(unsigned a, unsigned b) {
  return static_cast<unsigned>(static_cast<unsigned long long>(a) * b >> 32);
}
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
  const unsigned long long both = static_cast<unsigned long long>(b) << 32 | a;
  unsigned r = 0;
  for (int i = 0; i < 4; i++) r |= static_cast<unsigned>(both >> (selector >> 4 * i & 7) * 8 & 0xff) << 8 * i;
  return r;
}
inline unsigned __funnelshift_l(unsigned lo, unsigned hi, unsigned shift) {
  return static_cast<unsigned>((static_cast<unsigned long long>(hi) << 32 | lo) << (shift & 31) >> 32);
}
inline unsigned __funnelshift_r(unsigned lo, unsigned hi, unsigned shift) {
  return static_cast<unsigned>((static_cast<unsigned long long>(hi) << 32 | lo) >> (shift & 31));
}

#endif
