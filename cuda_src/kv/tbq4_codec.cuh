// kv/tbq4_codec.cuh -- from rotated values to codes and a stored norm, and the encoder of one TBQ4 block. docs/tbq4.md.
// SPDX-License-Identifier: Apache-2.0
//
// The search is a table: the line of u is cut into equal cells of which none holds two boundaries, so that a value is
// compared with the one boundary of its cell. Cells, signs and squares are printed into the prelude from
// cuattn/_tbq4.py.
//
// `encode` has eight neighboring lanes for a block: lane `sub` of them values sub * VALUES .. sub * VALUES + VALUES
// - 1. So the first butterflies stay inside of a lane and three go through shuffles. kv/tbq4_tile.cuh has sixteen
// blocks for a warp, and tensor cores.
#ifndef CUATTN_KV_TBQ4_CODEC_CUH
#define CUATTN_KV_TBQ4_CODEC_CUH
#include "common/ptx.cuh"
#include "kv/tbq4_rotation.cuh"

namespace tbq4 {

// ---- search, packing, norm ----

constexpr int NUM_CELLS = sizeof(cfg::CELL_CODES) / sizeof(u32);
static_assert((NUM_CELLS & (NUM_CELLS - 1)) == 0, "a mask keeps the index of a cell inside of the table");

// A table in shared memory, aligned to its size. x: minus the boundary in the cell, as float bits, y: the code of
// values that are not below it. The 16 cells around 0, where most values lie, are in different banks. A value on a
// boundary has the code above, so that +0 and -0 have code 8: the rule.
struct Cells {
  uint2 cells[NUM_CELLS];

  __device__ __forceinline__ void fill(u32 thread, u32 threads) {
    for (u32 i = thread; i < NUM_CELLS; i += threads) {
      cells[i] = make_uint2(__float_as_uint(cfg::CELL_OFFSETS[i]), cfg::CELL_CODES[i]);
    }
  }
};

// Codes of eight values u[j] * scale, element j in bits 4j .. 4j + 3, by a table at this address. NaN has any code.
__device__ __forceinline__ u32 eight_codes(const float (&u)[8], float scale, u32 table) {
  constexpr u32 CELL_BYTES = sizeof(uint2);
  // An ulp of 2^20 .. 2^21 is 1/8, so that the low bits of the sum are the byte offset of a cell and three bits of the
  // place in it. Cell NUM_CELLS / 2 has 0 in its middle.
  constexpr float ORIGIN = 1048576.f + NUM_CELLS / 2 + .5f;
  const float cells_per_u = scale * cfg::CELLS_PER_UNIT;
  u32 codes = 0;
#pragma unroll
  for (int j = 7; j >= 0; --j) {
    const u32 offset = __float_as_uint(fmaf(u[j], cells_per_u, ORIGIN)) & (NUM_CELLS - 1) * CELL_BYTES;
    const uint2 cell = ptx::ld_shared_v2(table | offset);
    // One rounding: the sign is exact, and +0 where they are equal, as no offset is -0.
    const float above = fmaf(u[j], scale, __uint_as_float(cell.x));
    codes = codes * 16 + cell.y + static_cast<u32>(__float_as_int(above) >> 31);  // -1 if below
  }
  return codes;
}

// Swaps the bits of `a` in ~mask with those of `b` in mask, `shift` lower.
__device__ __forceinline__ void swap_bits(u32& a, u32& b, int shift, u32 mask) {
  const u32 low = ptx::select_bits(a, b << shift, mask), high = ptx::select_bits(a >> shift, b, mask);
  a = low;
  b = high;
}

// Sum of the squares of the levels of 8 * WORDS codes. It is linear in the products of the bits of the codes, so that
// counting bits does for 32 codes what a table would do for one. Exact but for the squares, which are multiples of
// 2^-30.
template <int WORDS>
__device__ __forceinline__ float squared_length(const u32 (&codes)[WORDS]) {
  static_assert(WORDS <= 4, "four words have a bit plane each");
  u32 plane[4] = {};
#pragma unroll
  for (int i = 0; i < WORDS; ++i) plane[i] = codes[i];
  swap_bits(plane[0], plane[2], 2, 0x33333333u);
  swap_bits(plane[1], plane[3], 2, 0x33333333u);
  swap_bits(plane[0], plane[1], 1, 0x55555555u);
  swap_bits(plane[2], plane[3], 1, 0x55555555u);
  // The upper half of the codes is reflected to the lower half: 0 is the level of the largest magnitude in both, and
  // where there is no code.
  const u32 b0 = plane[0] ^ plane[3], b1 = plane[1] ^ plane[3], b2 = plane[2] ^ plane[3];
  const u32 products[7] = {b0, b1, b0 & b1, b2, b0 & b2, b1 & b2, b0 & b1 & b2};
  u32 sum = 8 * WORDS * cfg::SQUARE_TERMS[0];
#pragma unroll
  for (int i = 0; i < 7; ++i) sum += cfg::SQUARE_TERMS[i + 1] * static_cast<u32>(__popc(products[i]));
  return static_cast<float>(sum) * 0x1p-30f;
}

// 1 / norm of a block with this sum of squares, or 0.
__device__ __forceinline__ float inverse_norm(float sum) { return sum > cfg::MIN_SQUARE ? ptx::rsqrt(sum) : 0.f; }

// The float16 that gives the decoded block the norm of the row, as bits; a norm that is clamped is counted
// unless there is no counter.
__device__ __forceinline__ u16 stored_norm(float sum, float squared_length, int* clamped) {
  constexpr u16 MAX_HALF = 0x7bff;   // 65504
  constexpr u16 QUIET_NAN = 0x7e00;  // the one NaN of the format
  // Exact to some 2^-22, as the sum is; a division and exact roots would take a twentieth of what a block does.
  const float stored = ptx::sqrt(sum) * ptx::rsqrt(squared_length);
  if (stored != stored) return QUIET_NAN;
  const u16 half = static_cast<u16>(ptx::pack2<Half>(stored, 0.f));
  if (half <= MAX_HALF || stored == __uint_as_float(0x7f800000u)) return half;
  if (clamped != nullptr) atomicAdd(clamped, 1);
  return MAX_HALF;
}

// ---- a block in eight lanes ----

constexpr int LANES = 8;
constexpr int VALUES = cfg::BLOCK / LANES;
constexpr int CODE_BYTES = VALUES / 2;  // of one lane

// What `encode` gives, besides the codes: the arguments of stored_norm, the same in the eight lanes.
struct Norms {
  float sum, squared_length;
};

// Sum over the eight lanes of a block, the same in each.
__device__ __forceinline__ float block_sum(float x) {
#pragma unroll
  for (int bit = 1; bit < LANES; bit *= 2) x += __shfl_xor_sync(FULL_MASK, x, bit);
  return x;
}

// Codes of a block whose values are x; x is lost. All lanes of the warp take part.
__device__ __forceinline__ Norms encode(u32 (&codes)[CODE_BYTES / 4], float (&x)[VALUES], const Signs<LANES>& signs,
                                        const Cells& cells) {
  float sum = 0.f;
#pragma unroll
  for (int j = 0; j < VALUES; ++j) sum += x[j] * x[j];
  sum = block_sum(sum);
  const float inverse = inverse_norm(sum);
#pragma unroll
  for (int j = 0; j < VALUES; ++j) x[j] *= signs.first[j] * inverse;
  hadamard(x, signs);
  const u32 table = ptx::smem_addr(cells.cells);
  const bool is_nan = x[0] != x[0];  // then all of the block are: infinities have met their inverse norm, 0
#pragma unroll
  for (int word = 0; word < CODE_BYTES / 4; ++word) {
    float u[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) u[j] = x[word * 8 + j] * signs.second[word * 8 + j];
    codes[word] = is_nan ? 0xffffffffu : eight_codes(u, 1.f, table);
  }
  return {sum, block_sum(squared_length(codes))};
}

}  // namespace tbq4

#endif
