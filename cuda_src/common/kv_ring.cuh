// common/kv_ring.cuh -- a warp's ring of K and V tiles in shared memory, filled by asynchronous copies.
// SPDX-License-Identifier: Apache-2.0
//
// Tiles of TILE_KV keys alternate, K V K V ..., in NUM_STAGES slots. A slot holds rows, then their norms if the format
// has any. Rows before the first key and past the last are zeros, with norms of zero.
#ifndef CUATTN_COMMON_KV_RING_CUH
#define CUATTN_COMMON_KV_RING_CUH
#include "common/paging.cuh"
#include "common/params.cuh"
#include "common/ptx.cuh"
#include "common/tile16.cuh"

template <class Kv>
constexpr int SLOT_BYTES = (cfg::TILE_KV * (Kv::ROW_BYTES + 2 * Kv::NORMS) + 127) / 128 * 128;
template <class K, class V>
constexpr int RING_BYTES = cfg::NUM_STAGES * (SLOT_BYTES<K> + SLOT_BYTES<V>) / 2;

// An infinite norm counts as NaN: so is infinity times levels of both signs, while infinity times their sum may hide a
// key, and an infinite weight leaves no range to the others.
__device__ __forceinline__ float norm_of(u32 bits) {
  const float norm = ptx::to_float(Half{static_cast<u16>(bits)});
  return fmaf(norm, 0.f, norm);
}

// Norms of one row: from their plane or from a slot into registers, and from there to a slot.
template <int N>
struct RowNorms;
template <>
struct RowNorms<1> {
  u32 bits;
  static __device__ __forceinline__ RowNorms read(const u8* p) { return {*reinterpret_cast<const u16*>(p)}; }
  static __device__ __forceinline__ RowNorms fetch(const u8* p) { return {ptx::ld_global_u16(p)}; }
  __device__ __forceinline__ void write(u8* p) const { *reinterpret_cast<u16*>(p) = static_cast<u16>(bits); }
  __device__ __forceinline__ float get(int) const { return norm_of(bits); }
};
template <>
struct RowNorms<2> {
  u32 bits;
  static __device__ __forceinline__ RowNorms read(const u8* p) { return {*reinterpret_cast<const u32*>(p)}; }
  static __device__ __forceinline__ RowNorms fetch(const u8* p) { return read(p); }
  __device__ __forceinline__ void write(u8* p) const { *reinterpret_cast<u32*>(p) = bits; }
  __device__ __forceinline__ float get(int part) const { return norm_of(bits >> (16 * part)); }
};
template <>
struct RowNorms<4> {
  uint2 bits;
  static __device__ __forceinline__ RowNorms read(const u8* p) { return {*reinterpret_cast<const uint2*>(p)}; }
  static __device__ __forceinline__ RowNorms fetch(const u8* p) { return read(p); }
  __device__ __forceinline__ void write(u8* p) const { *reinterpret_cast<uint2*>(p) = bits; }
  __device__ __forceinline__ float get(int part) const {
    return norm_of((part < 2 ? bits.x : bits.y) >> (16 * (part % 2)));
  }
};
template <>
struct RowNorms<0> {
  __device__ __forceinline__ float get(int) const { return 1.f; }
};

// Norms of the rows of a tile whose scores a lane has: operand rows g and g + 8 of every 16.
template <class Kv>
struct TileNorms {
  RowNorms<Kv::NORMS> rows[cfg::TILE_KV / 16][2];

  __device__ __forceinline__ TileNorms(const u8* tile, int lane) {
    if constexpr (Kv::NORMS > 0) {
      const u8* norms = tile + cfg::TILE_KV * Kv::ROW_BYTES + tile_row(lane / 4) * 2 * Kv::NORMS;
#pragma unroll
      for (int i = 0; i < cfg::TILE_KV / 8; ++i) {
        rows[i / 2][i % 2] = RowNorms<Kv::NORMS>::read(norms + i * 8 * 2 * Kv::NORMS);
      }
    }
  }
};

// The rows of K (`IS_K`) or of V of this CTA's KV head: where they lie in global memory, and the norms of the tile
// before, which wait in registers for this one. Addresses are made from the parameters where they are needed: few are,
// and a thread has no registers to spare.
template <class Kv, bool IS_K>
struct Stream {
  static constexpr int COPIES = cfg::TILE_KV * Kv::CHUNKS / WARP;  // of 16 bytes, of a lane for a tile
  // Whole rows in a copy of the warp: successive copies of a lane are a fixed number of rows apart.
  static constexpr bool WHOLE_ROWS = WARP % Kv::CHUNKS == 0;
  using Norms = RowNorms<Kv::NORMS>;
  const DecodeParams& p;
  const u8* at;        // of this lane's first copy in the next tile
  const u8* norms_at;  // of the norms of this lane's row there
  Norms waiting;
  u8* waiting_slot;

  __device__ __forceinline__ Stream(const DecodeParams& params, u8* first_slot)
      : p(params), at(nullptr), norms_at(nullptr), waiting{}, waiting_slot(first_slot) {}

  __device__ __forceinline__ i64 token() const { return IS_K ? p.k_stride_token : p.v_stride_token; }
  __device__ __forceinline__ i64 norms_token() const { return IS_K ? p.k_norms_stride_token : p.v_norms_stride_token; }
  // Row, and its norms, in token `slot` of page `page`.
  __device__ __forceinline__ const u8* row(int page, int slot) const {
    return (IS_K ? p.k : p.v) + blockIdx.y * (IS_K ? p.k_stride_head : p.v_stride_head) +
           page * (IS_K ? p.k_stride_page : p.v_stride_page) + slot * token();
  }
  __device__ __forceinline__ const u8* norms(int page, int slot) const {
    return (IS_K ? p.k_norms : p.v_norms) + blockIdx.y * (IS_K ? p.k_norms_stride_head : p.v_norms_stride_head) +
           page * (IS_K ? p.k_norms_stride_page : p.v_norms_stride_page) + slot * norms_token();
  }

  // Points at the tile whose first row is token `slot` of page `page`.
  __device__ __forceinline__ void point(int page, int slot, int lane) {
    at = WHOLE_ROWS ? row(page, slot + lane / Kv::CHUNKS) + lane % Kv::CHUNKS * 16 : row(page, slot);
    if constexpr (Kv::NORMS > 0) norms_at = norms(page, slot + lane % cfg::TILE_KV);
  }
  // To the next tile of this warp in the same page.
  __device__ __forceinline__ void step() {
    at += cfg::NUM_WARPS * cfg::TILE_KV * token();
    if constexpr (Kv::NORMS > 0) norms_at += cfg::NUM_WARPS * cfg::TILE_KV * norms_token();
  }

  // A whole tile inside of a page.
  __device__ __forceinline__ void copy(u8* slot, int lane) const {
    if constexpr (WHOLE_ROWS) {
      constexpr int ROWS_AT_ONCE = WARP / Kv::CHUNKS;
      const u8* source = at;
#pragma unroll
      for (int i = 0; i < COPIES; ++i) {
        ptx::cp_async16(slot + Kv::offset(i * ROWS_AT_ONCE + lane / Kv::CHUNKS, lane % Kv::CHUNKS), source, true);
        source += ROWS_AT_ONCE * token();
      }
    } else {
#pragma unroll
      for (int i = 0; i < COPIES; ++i) {
        const int row = (i * WARP + lane) / Kv::CHUNKS, chunk = (i * WARP + lane) % Kv::CHUNKS;
        ptx::cp_async16(slot + Kv::offset(row, chunk), at + row * token() + chunk * 16, true);
      }
    }
  }
  // Any tile; a lane knows page of its row and token of the page, and whether there is one.
  __device__ __forceinline__ void copy(u8* slot, int page, int token, bool valid, int lane) const {
    const i64 address = reinterpret_cast<i64>(row(page, token));
    const u32 valid_rows = __ballot_sync(FULL_MASK, valid);
#pragma unroll
    for (int i = 0; i < COPIES; ++i) {
      const int index = i * WARP + lane;
      const int from = index / Kv::CHUNKS, chunk = index % Kv::CHUNKS;
      const u8* source = reinterpret_cast<const u8*>(__shfl_sync(FULL_MASK, address, from));
      // Rows that are not there are written as zeros: 0 * NaN in P V would show what lies there.
      ptx::cp_async16(slot + Kv::offset(from, chunk), source + chunk * 16, (valid_rows >> from & 1) != 0);
    }
  }

  // Stores the norms that were loaded for the tile before, and loads those of this one: a whole step is their latency.
  __device__ __forceinline__ void load_norms(u8* slot, const u8* address, bool valid, int lane) {
    if constexpr (Kv::NORMS > 0) {
      if (lane < cfg::TILE_KV) waiting.write(waiting_slot + cfg::TILE_KV * Kv::ROW_BYTES + lane * 2 * Kv::NORMS);
      waiting = Norms{};
      if (valid) waiting = Norms::fetch(address);
      waiting_slot = slot;
    }
  }

  // Rows and norms of a whole tile inside of a page.
  __device__ __forceinline__ void load(u8* slot, int lane) {
    copy(slot, lane);
    load_norms(slot, norms_at, true, lane);
  }
  // Rows and norms of any tile; nothing is copied if there is none.
  __device__ __forceinline__ void load(u8* slot, bool exists, int page, int token, bool valid, int lane) {
    if (exists) copy(slot, page, token, valid, lane);
    load_norms(slot, norms(page, token), valid, lane);
  }
};

// Fills the ring of one warp, whose tiles are every NUM_WARPS-th of those from `begin` on.
template <class K, class V>
struct Loader {
  Stream<K, true> k;
  Stream<V, false> v;
  PageTable pages;
  u8* ring;
  u8* slot;
  int first, end;  // keys that are loaded
  int key0;        // of the next K tile
  // Of this lane's row: the page in the next K tile, read one step ahead of its use; page and token of the page in the
  // V tile that follows, unless that is `whole`, and whether it is valid.
  int next_page, page, token;
  bool valid;
  bool whole;  // the V tile that follows is all valid and inside of a page

  __device__ __forceinline__ Loader(const DecodeParams& p, PageTable table, u8* warp_ring, int first_key, int end_key,
                                    int begin, int lane)
      : k(p, warp_ring),
        v(p, warp_ring + SLOT_BYTES<K>),
        pages(table),
        ring(warp_ring),
        slot(warp_ring),
        first(first_key),
        end(end_key),
        key0(begin),
        next_page(0),
        page(0),
        token(0),
        valid(false),
        whole(false) {
    look_ahead(lane);
    point(next_page, pages.slot(key0), lane);
  }

  __device__ __forceinline__ void point(int in_page, int first_slot, int lane) {
    k.point(in_page, first_slot, lane);
    v.point(in_page, first_slot, lane);
  }
  __device__ __forceinline__ void look_ahead(int lane) {
    const int position = key0 + lane % cfg::TILE_KV;
    next_page = position >= first && position < end ? pages.page(position) : pages.dense_page;
  }

  // One group each, empty past the last tile, so that a wait can count groups.
  __device__ __forceinline__ void load_k(int lane) {
    const int first_slot = pages.slot(key0);
    whole = key0 >= first && key0 + cfg::TILE_KV <= end && first_slot + cfg::TILE_KV <= pages.page_size;
    if (whole) {
      if (!pages.dense) point(__shfl_sync(FULL_MASK, next_page, 0), first_slot, lane);
      k.load(slot, lane);
    } else {
      const int position = key0 + lane % cfg::TILE_KV;
      valid = position >= first && position < end;
      page = next_page;
      token = valid ? pages.slot(position) : 0;
      k.load(slot, key0 < end, page, token, valid, lane);
    }
    ptx::cp_async_commit();
    slot = next_slot<K>(slot, ring);
  }
  __device__ __forceinline__ void load_v(int lane) {
    if (whole) {
      v.load(slot, lane);
    } else {
      v.load(slot, key0 < end, page, token, valid, lane);
    }
    ptx::cp_async_commit();
    slot = next_slot<V>(slot, ring);
    key0 += cfg::NUM_WARPS * cfg::TILE_KV;
    if (pages.dense) {
      k.step();
      v.step();
    } else {
      look_ahead(lane);
    }
  }
  // The tile that follows the one in use by NUM_STAGES - 1.
  template <bool AFTER_K>
  __device__ __forceinline__ void load_ahead(int lane) {
    if constexpr (AFTER_K == (cfg::NUM_STAGES % 2 == 1)) {
      load_k(lane);
    } else {
      load_v(lane);
    }
  }
  template <class Kv, class Byte>
  static __device__ __forceinline__ Byte* next_slot(Byte* at, u8* ring) {
    at += SLOT_BYTES<Kv>;
    return at == ring + RING_BYTES<K, V> ? ring : at;
  }
};

#endif
