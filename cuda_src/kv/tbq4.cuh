// kv/tbq4.cuh -- K/V rows of TBQ4: head_dim / 2 code bytes in a plane, a float16 norm per BLOCK values in another.
// SPDX-License-Identifier: Apache-2.0
//
// A code byte becomes two fp16 levels by one look-up in shared memory. The table has 256 entries with a copy of each
// for every lane, so that a lane stays in its own bank whatever it looks up. No element is multiplied by anything:
// norms multiply scores (K) and probabilities (V), once a token, and rows stay in the rotated domain, into which Q is
// rotated on the way in and from which O is rotated back on the way out.
//
// The order of head_dim inside of a dot product is free, so a lane takes neighboring code bytes of a row for its
// successive operands, and Q is stored in the same order.
#ifndef CUATTN_KV_TBQ4_CUH
#define CUATTN_KV_TBQ4_CUH
#include "common/ptx.cuh"
#include "common/tile16.cuh"
#include "kv/tbq4_rows.cuh"

namespace tbq4 {

constexpr int TABLE_BYTES = 256 * cfg::TABLE_STRIDE;
static_assert(cfg::TABLE_STRIDE == 128 || cfg::TABLE_STRIDE == 256, "an entry has 128 bytes, 4 for each lane");

// The level of a code as bits of a float16, picked from immediate operands: the constants would come from memory.
__device__ __forceinline__ u32 level_of(int code) {
  u32 pair = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const u32 mask = code / 2 == i ? 0xffffffffu : 0u;
    pair |= ptx::opaque(mask) & (cfg::LEVELS_HALF[2 * i] | cfg::LEVELS_HALF[2 * i + 1] << 16);
  }
  return pair >> code % 2 * 16 & 0xffff;
}

// Fills the table; a barrier must follow.
__device__ __forceinline__ void fill_table(u8* table) {
  const int lane = threadIdx.x % WARP;
#pragma unroll 1
  for (int lower = threadIdx.x / WARP; lower < 16; lower += cfg::NUM_WARPS) {
    const u32 level = level_of(lower);
    u8* entry = table + lower * cfg::TABLE_STRIDE + lane * 4;
#pragma unroll
    for (int upper = 0; upper < 16; ++upper) {
      *reinterpret_cast<u32*>(entry + upper * 16 * cfg::TABLE_STRIDE) = level | cfg::LEVELS_HALF[upper] << 16;
    }
  }
}

// This lane's place in the table, as look_up takes it.
struct TableLane {
  u32 base;

  __device__ __forceinline__ TableLane(const u8* table, int lane)
      : base(ptx::opaque(ptx::smem_addr(table) + (cfg::TABLE_STRIDE == 256 ? lane * 4 : 0))) {}
};

// The two levels of byte `which` of `word`. With a stride of 256, and a table at a multiple of 64 KB, one permutation
// makes the address: the byte goes to bits 8 to 15 of the lane's place.
__device__ __forceinline__ u32 look_up(const TableLane& at, u32 word, int which, int lane) {
  if constexpr (cfg::TABLE_STRIDE == 256) return ptx::ld_shared(ptx::prmt(word, at.base, 0x7604u | which << 4));
  return ptx::ld_shared(at.base + (ptx::prmt(word, lane * 8, 0x5504u | which << 4) >> 1));
}

template <class Elem, int HEAD_DIM>
struct Rows : RotatedRows<Elem, HEAD_DIM> {
  using Rotation = RotatedRows<Elem, HEAD_DIM>;
  using QueryPart = typename Rotation::QueryPart;
  using Operand = Half;
  static constexpr int NORMS = HEAD_DIM / cfg::BLOCK;
  static constexpr int PARTS = NORMS;
  static constexpr bool IN_ROTATED_DOMAIN = true;
  static constexpr bool HAS_SCALE = false;
  static constexpr bool SCALES_QUERIES = true;
  static constexpr int ROW_BYTES = HEAD_DIM / 2;
  static constexpr int CHUNKS = ROW_BYTES / 16;
  static constexpr int ROW_PERIOD = 4;
  static constexpr int BLOCK_BYTES = cfg::BLOCK / 2;
  static constexpr int STEPS = cfg::BLOCK / 16;  // operands of a block, for K and for V

  // Byte offset of a chunk in a shared tile. Keys reads two rows whose lowest bits differ, 64 bytes each, and Values
  // four that differ in the lowest two bits, 32 bytes each, from all banks at once.
  static __device__ __forceinline__ int offset(int row, int chunk) {
    const int key = CHUNKS >= 8 ? (row & 1) << 2 | (row & 2) : CHUNKS == 4 ? row & 2 : 0;
    return row * ROW_BYTES + ((chunk ^ key) << 4);
  }

  // A operands of S^T = K Q^T for one block: lane t of a row has a quarter of the block's bytes, two for each operand.
  struct KeyLane : TableLane {
    int lane;
    u32 offset;  // in a tile, of the bytes of row g of block 0

    __device__ __forceinline__ KeyLane(const u8* table, int this_lane) : TableLane(table, this_lane), lane(this_lane) {
      offset = ptx::opaque(Rows::offset_of_byte(tile_row(lane / 4), lane % 4 * (BLOCK_BYTES / 4)));
    }
  };
  struct Keys {
    static constexpr int WORDS = BLOCK_BYTES / 16;
    u32 low[WORDS], high[WORDS];  // of rows g and g + 8

    __device__ __forceinline__ void load(const u8* tile, int row0, int part, const KeyLane& at) {
      const u8* row = tile + row0 * ROW_BYTES + (at.offset ^ part_offset(part));
      read(low, row);
      read(high, row + 8 * ROW_BYTES);
    }
    __device__ __forceinline__ void get(u32 (&a)[4], int step, const KeyLane& at) const {
      const int byte = step % 2 * 2;
      a[0] = look_up(at, low[step / 2], byte, at.lane);
      a[1] = look_up(at, high[step / 2], byte, at.lane);
      a[2] = look_up(at, low[step / 2], byte + 1, at.lane);
      a[3] = look_up(at, high[step / 2], byte + 1, at.lane);
    }
  };

  // A operands of O^T = V^T P^T for one block: lanes of one g have an eighth of the block's bytes, one for each
  // operand: row g is its lower code, row g + 8 its upper one. An operand pairs two tokens, so that the codes of two
  // tokens are put together in a byte before they are looked up.
  struct ValueLane : TableLane {
    int lane;
    u32 first, second;  // offsets in a tile, of the bytes of operand rows 2t and 2t+1 of block 0

    __device__ __forceinline__ ValueLane(const u8* table, int this_lane)
        : TableLane(table, this_lane), lane(this_lane) {
      const int t = lane % 4, byte = lane / 4 * (BLOCK_BYTES / 8);
      first = ptx::opaque(Rows::offset_of_byte(tile_row(2 * t), byte));
      second = ptx::opaque(Rows::offset_of_byte(tile_row(2 * t + 1), byte));
    }
  };
  struct Values {
    static constexpr int WORDS = BLOCK_BYTES / 32;
    u32 lower[2][WORDS], upper[2][WORDS];  // of tokens 2t, 2t+1 and 2t+8, 2t+9

    __device__ __forceinline__ void load(const u8* tile, int row0, int part, const ValueLane& at) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const u8* rows = tile + (row0 + 8 * half) * ROW_BYTES;
        u32 first[WORDS], second[WORDS];
        read(first, rows + (at.first ^ part_offset(part)));
        read(second, rows + (at.second ^ part_offset(part)));
#pragma unroll
        for (int w = 0; w < WORDS; ++w) {
          lower[half][w] = ptx::select_bits(second[w] << 4, first[w], 0xf0f0f0f0u);
          upper[half][w] = ptx::select_bits(second[w], first[w] >> 4, 0xf0f0f0f0u);
        }
      }
    }
    __device__ __forceinline__ void get(u32 (&a)[4], int step, const ValueLane& at) const {
      a[0] = look_up(at, lower[0][step / 4], step % 4, at.lane);
      a[1] = look_up(at, upper[0][step / 4], step % 4, at.lane);
      a[2] = look_up(at, lower[1][step / 4], step % 4, at.lane);
      a[3] = look_up(at, upper[1][step / 4], step % 4, at.lane);
    }
  };

  static __device__ __forceinline__ u32 offset_of_byte(int row, int byte) {
    return static_cast<u32>(offset(row, byte / 16) + byte % 16);
  }
  // What block `part` differs by from block 0, as the swizzle leaves that bit of a chunk alone or flips it: XOR it.
  static __device__ __forceinline__ u32 part_offset(int part) { return static_cast<u32>(part * BLOCK_BYTES); }

  // The head_dim that row g (`which` 0) or g + 8 (1) of the operands' block `mb` holds.
  static __device__ __forceinline__ int dim(int mb, int g, int which) {
    return mb / STEPS * cfg::BLOCK + g * (cfg::BLOCK / 8) + mb % STEPS * 2 + which;
  }

  // Rows of O in shared memory. Lanes of one mb are 16 values apart, so that every 32 are shifted by four banks; pairs
  // that are stored then meet one other pair in a bank.
  static constexpr int O_STRIDE = HEAD_DIM + HEAD_DIM / 8 + 4;
  static __device__ __forceinline__ int o_place(int dim) { return dim + dim / 32 * 4; }
  static __device__ __forceinline__ void store_o(float* row, int mb, int g, float lower, float upper) {
    *reinterpret_cast<float2*>(row + o_place(dim(mb, g, 0))) = make_float2(lower, upper);
  }

  // Where head_dim `dim` of a Q row stands among the 16 of each operand: step i takes from lane t 4 i .. 4 i + 3 of its
  // quarter, the first two as k = 2t, 2t+1, the others as 2t+8, 2t+9.
  static __device__ __forceinline__ int position(int dim) {
    const int in_block = dim % cfg::BLOCK, quarter = in_block / (cfg::BLOCK / 4), rest = in_block % (cfg::BLOCK / 4);
    return dim - in_block + rest / 4 * 16 + rest / 2 % 2 * 8 + quarter * 2 + rest % 2;
  }

  template <int WORDS>
  static __device__ __forceinline__ void read(u32 (&x)[WORDS], const u8* source) {
    if constexpr (WORDS == 4) {
      const uint4 v = *reinterpret_cast<const uint4*>(source);
      x[0] = v.x, x[1] = v.y, x[2] = v.z, x[3] = v.w;
    } else if constexpr (WORDS == 2) {
      const uint2 v = *reinterpret_cast<const uint2*>(source);
      x[0] = v.x, x[1] = v.y;
    } else {
      x[0] = *reinterpret_cast<const u32*>(source);
    }
  }

  template <class Mean, class Factor, class Source>
  static __device__ __forceinline__ void store_queries(u8* tile, float* scale, float* bias, Mean mean_of,
                                                       Factor /*factor_of*/, int rows, Source source, QueryPart query) {
    Rotation::template store_rotated<Rows>(tile, scale, bias, mean_of, rows, source, query);
  }

  static __device__ __forceinline__ void fill_table(u8* table) { tbq4::fill_table(table); }
};

}  // namespace tbq4

#endif
