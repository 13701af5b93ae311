// kv/raw.cuh -- what K/V rows of elements have in common: head_dim of them, contiguous, no norm.
// SPDX-License-Identifier: Apache-2.0
#ifndef CUATTN_KV_RAW_CUH
#define CUATTN_KV_RAW_CUH
#include "common/ptx.cuh"
#include "common/tile16.cuh"

// Of rows with a geometry in shared tiles.
template <class Rows, int HEAD_DIM>
struct RawRows : Rows {
  using Tile = Rows;
  static constexpr int NORMS = 0;
  static constexpr int PARTS = 1;
  static constexpr bool IN_ROTATED_DOMAIN = false;
  static constexpr bool HAS_SCALE = false;
  static constexpr bool SCALES_QUERIES = false;

  // A operands of S^T = K Q^T: 16 tokens, 32 bytes of each.
  struct KeyLane {
    int row, chunk;  // that a lane gives ldmatrix the address of
    __device__ __forceinline__ KeyLane(const u8* /*table*/, int lane) : row(tile_row(lane % 16)), chunk(lane / 16) {}
  };
  struct Keys {
    const u8* tile;
    int row;

    __device__ __forceinline__ void load(const u8* k_tile, int row0, int /*part*/, const KeyLane& lane) {
      tile = k_tile;
      row = row0 + lane.row;
    }
    __device__ __forceinline__ void get(u32 (&a)[4], int kb, const KeyLane& lane) const {
      ptx::ldmatrix_x4(a, tile + Tile::offset(row, 2 * kb + lane.chunk));
    }
  };

  // The first pieces of Q that a thread copies, on their way from global memory before tiles of K and V are asked for:
  // behind those they would come last.
  struct QueryPart {
    static constexpr int PIECES = 2;
    uint4 piece[PIECES];
  };
  // Piece `index` of all rows; zeros where there is no row.
  template <class Source>
  static __device__ __forceinline__ uint4 fetch_piece(int index, int rows, Source source) {
    const u8* address = index < rows * Tile::CHUNKS ? source(index / Tile::CHUNKS) : nullptr;
    if (address == nullptr) return make_uint4(0, 0, 0, 0);
    return ptx::ld_global_nc_v4(address + index % Tile::CHUNKS * 16);
  }
  template <class Source>
  static __device__ __forceinline__ QueryPart fetch_queries(int rows, Source source) {
    QueryPart part;
#pragma unroll
    for (int i = 0; i < QueryPart::PIECES; ++i) {
      part.piece[i] = fetch_piece(threadIdx.x + i * cfg::NUM_WARPS * WARP, rows, source);
    }
    return part;
  }

  // Copies `rows` rows of Q to a shared tile; source(row) is the address of a row, null for zeros.
  template <class Mean, class Factor, class Source>
  static __device__ __forceinline__ void store_queries(u8* tile, float* /*scale*/, float* /*bias*/, Mean /*mean_of*/,
                                                       Factor /*factor_of*/, int rows, Source source,
                                                       const QueryPart& part) {
    const auto store = [&](int index, const uint4& piece) {
      if (index >= rows * Tile::CHUNKS) return;
      *reinterpret_cast<uint4*>(tile + Tile::offset(index / Tile::CHUNKS, index % Tile::CHUNKS)) = piece;
    };
    int index = threadIdx.x;
#pragma unroll
    for (int i = 0; i < QueryPart::PIECES; ++i, index += cfg::NUM_WARPS * WARP) store(index, part.piece[i]);
    for (; index < rows * Tile::CHUNKS; index += cfg::NUM_WARPS * WARP) store(index, fetch_piece(index, rows, source));
  }

  // O is in the domain of the output.
  template <int N>
  static __device__ __forceinline__ void restore(float (&)[N][4], int /*lane*/) {}

  static __device__ __forceinline__ void fill_table(u8* /*table*/) {}

  // The head_dim that row g (`upper` 0) or g + 8 (1) of the operands' block `mb` holds.
  static __device__ __forceinline__ int dim(int mb, int g, int upper) { return mb * 16 + g + 8 * upper; }

  // Rows of O in shared memory; the padding keeps the four t of a quad in different banks.
  static constexpr int O_STRIDE = HEAD_DIM + 4;
  static __device__ __forceinline__ int o_place(int dim) { return dim; }
  static __device__ __forceinline__ void store_o(float* row, int mb, int g, float lower, float upper) {
    row[dim(mb, g, 0)] = lower;
    row[dim(mb, g, 1)] = upper;
  }
};

#endif
