// kv/tbq4_levels.cuh -- from codes and norms of TBQ4 to values in float16.
// SPDX-License-Identifier: Apache-2.0
//
// Values are levels times norms, rounded to float16 once, with a power of two for each tile. Eight codes take about 25
// instructions and no look-up in memory: byte permutations pick from registers, by three bits of a code, as levels of
// codes c and 15 - c differ in the sign only.
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

// Byte `which` of the levels of codes first .. first + 3.
constexpr u32 level_bytes(int first, int which) {
  u32 bytes = 0;
  for (int i = 0; i < 4; ++i) bytes |= (cfg::LEVELS_HALF[first + i] >> which * 8 & 0xff) << i * 8;
  return bytes;
}

// What levels are picked from: a byte permutation takes one constant only as an operand, and wants the other in a
// register.
struct LevelBytes {
  u32 lower = level_bytes(0, 0), upper = level_bytes(0, 1);  // of codes 0 to 3

  __device__ __forceinline__ void hold() { lower = ptx::held(lower), upper = ptx::held(upper); }
};

// The levels of eight codes, of which `word` has the first in its lowest bits.
__device__ __forceinline__ uint4 levels_of(u32 word, const LevelBytes& bytes = LevelBytes()) {
  constexpr u32 LOWER = level_bytes(4, 0), UPPER = level_bytes(4, 1);
  const u32 high = word & 0x88888888u;                            // codes 8 to 15, ...
  const u32 index = (word & 0x77777777u) ^ (high - (high >> 3));  // ... whose other bits are turned round
  const u32 even = word << 4;                                     // bit 7 of byte j is that of code 2j, here of 2j+1
  u32 pairs[4];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const u32 select = half == 0 ? index : index >> 16;
    const u32 lower = ptx::prmt(bytes.lower, LOWER, select);
    const u32 flips = ptx::prmt(even, word, half == 0 ? 0x5140u : 0x7362u) & 0x80808080u;
    const u32 upper = ptx::prmt(bytes.upper, UPPER, select) ^ flips;
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
  static constexpr int SLACK = 3, NO_EXPONENT = -1000;
  int exponent;

  // `before` is the exponent of the tile before.
  __device__ __forceinline__ explicit NormScale(u32 largest, int before = NO_EXPONENT) {
    const float norm = ptx::to_float(Half{static_cast<u16>(max(largest, SMALLEST))});
    exponent = static_cast<int>(__float_as_uint(norm) >> 23) - 127;
    if (exponent <= before && exponent >= before - SLACK) exponent = before;
  }
  // Values are elements times 2 to this power.
  __device__ __forceinline__ float log2() const { return static_cast<float>(exponent - TOP); }
  // A scaled norm. An infinite one becomes NaN: so is infinity times levels of both signs.
  __device__ __forceinline__ float apply(u32 norm) const {
    const float scale = __uint_as_float(static_cast<u32>(127 + TOP - exponent) << 23);
    return ptx::to_float(Half{static_cast<u16>(ptx::nan_if_infinite(norm))}) * scale;
  }
};

}  // namespace tbq4

#endif
