// common/types.cuh -- fixed-width integers, the 16-bit element types, and the enums that the prelude names.
// SPDX-License-Identifier: Apache-2.0
//
// NVRTC has no standard headers and this project needs none: 16-bit values are opaque bits, converted by the
// instructions of common/ptx.cuh.
#ifndef CUATTN_COMMON_TYPES_CUH
#define CUATTN_COMMON_TYPES_CUH

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

constexpr int WARP = 32;
constexpr u32 FULL_MASK = 0xffffffffu;
constexpr float LOG2_E = 1.44269504088896340736f;
constexpr float LN_2 = 0.69314718055994530942f;

// Values as in cuattn/_kinds.py, which prints them by name.
enum class Dtype { FP16, BF16, FP32 };
enum class KvFormat { RAW16, RAW32, TBQ4, FP8 };
// What comes with a partial result: its lse, and the result normalized; or its softmax state (m, l), and the bare sum.
enum class Parts { LSE, STATE };

// Tags with the size of the element; arithmetic is done in float.
struct Half {
  u16 bits;
};
struct Bfloat16 {
  u16 bits;
};

template <Dtype DTYPE>
struct ElemOf;
template <>
struct ElemOf<Dtype::FP16> {
  using type = Half;
};
template <>
struct ElemOf<Dtype::BF16> {
  using type = Bfloat16;
};
template <>
struct ElemOf<Dtype::FP32> {
  using type = float;
};

// A flag as a type.
template <bool VALUE>
struct Flag {
  static constexpr bool value = VALUE;
};

// The first type if FIRST, else the second.
template <bool FIRST, class A, class B>
struct Either {
  using type = A;
};
template <class A, class B>
struct Either<false, A, B> {
  using type = B;
};

// A CUtensorMap, made by cuTensorMapEncodeTiled. A kernel takes it as a `const __grid_constant__` parameter, or inside
// of one, and never copies it: TMA wants its address in parameter or global memory.
struct alignas(128) TensorMap {
  u64 opaque[16];
};

// The place of item i, which is not negative, in a ring of N.
template <int N>
__device__ __forceinline__ u32 in_ring(int i) {
  return static_cast<u32>(i) % N;
}

// A constant as an argument, for lambdas.
template <bool VALUE>
struct Constant {
  static constexpr bool value = VALUE;
};

// Whether two types are one.
template <class A, class B>
constexpr bool SAME = false;
template <class A>
constexpr bool SAME<A, A> = true;

template <class Elem>
struct ElemTraits;
template <>
struct ElemTraits<Half> {
  static constexpr u32 EXPONENT = 0x7c00;
};
template <>
struct ElemTraits<Bfloat16> {
  static constexpr u32 EXPONENT = 0x7f80;
};

__device__ __forceinline__ float neg_inf() { return __int_as_float(static_cast<int>(0xff800000u)); }

#endif
