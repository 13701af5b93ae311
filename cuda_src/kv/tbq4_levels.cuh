// kv/tbq4_levels.cuh -- from codes and norms of TBQ4 to values in float16.
// SPDX-License-Identifier: Apache-2.0
//
// Values are levels times norms, rounded to float16 once, with a power of two for each tile. Eight codes take 16
// instructions and no look-up in memory: byte permutations pick from registers, by three bits, as levels of codes c and
// 15 - c differ in the sign only. What is picked are levels, which four more multiply, or products of some codes' norm.
#ifndef CUATTN_KV_TBQ4_LEVELS_CUH
#define CUATTN_KV_TBQ4_LEVELS_CUH
#include "common/ptx.cuh"

namespace tbq4 {

constexpr bool levels_are_symmetric() {
  for (int c = 0; c < 8; ++c) {
    if (cfg::LEVELS_HALF[c] != (cfg::LEVELS_HALF[15 - c] ^ 0x8000u)) return false;
  }
  return true;
}
static_assert(levels_are_symmetric(), "levels of codes c and 15 - c differ in the sign");

// Levels are picked by the lower three bits of a code's Gray code, c ^ c >> 1, which codes c and 15 - c have in common.
// The code below 8 of such an index.
constexpr int code_of(int index) { return index ^ index >> 1 ^ index >> 2; }

// Byte `which` of the levels of indices first .. first + 3.
constexpr u32 level_bytes(int first, int which) {
  u32 bytes = 0;
  for (int i = 0; i < 4; ++i) bytes |= (cfg::LEVELS_HALF[code_of(first + i)] >> which * 8 & 0xff) << i * 8;
  return bytes;
}
// The levels of indices `first` and first + 1.
constexpr u32 level_pair(int first) {
  return cfg::LEVELS_HALF[code_of(first)] | static_cast<u32>(cfg::LEVELS_HALF[code_of(first + 1)]) << 16;
}

// What values are picked from, of codes below 8: bytes of indices 0 to 3, and 4 to 7.
struct LevelBytes {
  u32 lower[2] = {level_bytes(0, 0), level_bytes(4, 0)}, upper[2] = {level_bytes(0, 1), level_bytes(4, 1)};

  // A byte permutation takes one constant only as an operand, and wants the other in a register.
  __device__ __forceinline__ void hold() { lower[0] = ptx::held(lower[0]); }

  // Of levels times a norm, which both halves of a word have: products are rounded alike whatever their sign.
  static __device__ __forceinline__ LevelBytes times(u32 norm) {
    LevelBytes bytes;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const u32 first = ptx::mul_half2(norm, level_pair(4 * i)), second = ptx::mul_half2(norm, level_pair(4 * i + 2));
      bytes.lower[i] = ptx::prmt(first, second, 0x6420u);
      bytes.upper[i] = ptx::prmt(first, second, 0x7531u);
    }
    return bytes;
  }
};

// The levels, or products, of eight codes, of which `word` has the first in its lowest bits.
__device__ __forceinline__ uint4 levels_of(u32 word, const LevelBytes& bytes = LevelBytes()) {
  const u32 index = (word ^ word >> 1) & 0x77777777u;
  const u32 even = word << 4;  // bit 7 of byte j is that of code 2j, here of 2j+1: set in codes 8 to 15
  u32 pairs[4];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const u32 select = half == 0 ? index : index >> 16;
    const u32 lower = ptx::prmt(bytes.lower[0], bytes.lower[1], select);
    const u32 flips = ptx::prmt(even, word, half == 0 ? 0x5140u : 0x7362u) & 0x80808080u;
    const u32 upper = ptx::prmt(bytes.upper[0], bytes.upper[1], select) ^ flips;
    pairs[2 * half] = ptx::prmt(lower, upper, 0x5140u);
    pairs[2 * half + 1] = ptx::prmt(lower, upper, 0x7362u);
  }
  return make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
}

// The size of a norm as it counts for the largest of a tile, in bits of float16: nothing if it is not finite.
__device__ __forceinline__ u32 finite_size(u32 norm) {
  constexpr u32 INFINITE = 0x7c00;
  const u32 size = norm & 0x7fff;
  return size < INFINITE ? size : 0;
}

// The power of two of a tile, by the bits of its largest norm: norms are scaled so that this one is just in float16's
// range, or SLACK bits below if the tile before has such a power. A row loses bits only if it is 2^-20 of another one.
struct NormScale {
  static constexpr int TOP = 15;  // exponent of the largest norm
  static constexpr u32 SMALLEST = 1;
  static constexpr int BIAS = 127, MANTISSA = 23;  // of float32
  static constexpr u32 SLACK = 3u << MANTISSA, NONE = 0;
  u32 power;  // of two, in the bits of a float

  __device__ __forceinline__ explicit NormScale(u32 bits) : power(bits) {}
  // Of norms up to `largest`, which is SMALLEST at least.
  static __device__ __forceinline__ NormScale of(u32 largest) {
    return NormScale(__float_as_uint(ptx::to_float(Half{static_cast<u16>(largest)})) & ~0u << MANTISSA);
  }
  // `before` is the power of the tile before, or NONE.
  __device__ __forceinline__ void follow(u32 before) {
    if (before - power <= SLACK) power = before;
  }
  // Values are elements times 2 to this power.
  __device__ __forceinline__ float log2() const {
    return static_cast<float>(static_cast<int>(power >> MANTISSA) - (BIAS + TOP));
  }
  // A scaled norm.
  __device__ __forceinline__ float apply(u32 norm) const {
    const float scale = __uint_as_float((static_cast<u32>(2 * BIAS + TOP) << MANTISSA) - power);
    return ptx::to_float(Half{static_cast<u16>(norm)}) * scale;
  }
};

}  // namespace tbq4

#endif
