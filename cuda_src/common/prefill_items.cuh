// common/prefill_items.cuh -- in which order CTAs of prefill_sm90.cu take tiles of query tokens, and what these see.
// SPDX-License-Identifier: Apache-2.0
#ifndef CUATTN_COMMON_PREFILL_ITEMS_CUH
#define CUATTN_COMMON_PREFILL_ITEMS_CUH
#include "common/head_rows.cuh"
#include "common/mask.cuh"
#include "common/paging.cuh"
#include "common/params.cuh"
#include "common/ragged.cuh"

// Where a token lies: the page, which for dense arrays is the sequence, and 0 for ragged ones, and its place there.
struct Place {
  int page, token;
};

// A tile of query tokens of one head.
struct Item {
  int batch, head, kv_head;
  int q0, k0;              // first tokens of the sequence among all ragged ones, else 0
  int seqlen_q, kv_len;    // its lengths
  int token0, num_tokens;  // `num_tokens` of them are there
  KeyRange tiles;          // of keys that any row sees
  KeyRange full;           // of those that all rows of a warpgroup see; full.lo > full.hi: none. Consumers fill it in

  // What row `row` sees; the rows that pad a tile see what the last one sees.
  __device__ __forceinline__ KeyRange keys(const TiledPrefillParams& p, int row) const {
    return visible_keys(token0 + min(row, num_tokens - 1), seqlen_q, kv_len, p.window_left, p.window_right);
  }
  __device__ __forceinline__ bool has_keys() const { return tiles.hi > tiles.lo; }
  // Of a row.
  __device__ __forceinline__ Place place_of_row(const TiledPrefillParams& p, int row) const {
    return {p.cu_seqlens_q != nullptr ? 0 : batch, q0 + token0 + row};
  }
  // Tiles of which any of some rows sees a key, and those of which all see all.
  __device__ __forceinline__ KeyRange tiles_of(const TiledPrefillParams& p, int first, int last) const {
    const int lo = keys(p, first).lo / cfg::TILE_KV;
    return {lo, max(lo, (keys(p, last).hi + cfg::TILE_KV - 1) / cfg::TILE_KV)};
  }
  __device__ __forceinline__ KeyRange full_tiles_of(const TiledPrefillParams& p, int first, int last) const {
    return {(keys(p, last).lo + cfg::TILE_KV - 1) / cfg::TILE_KV, keys(p, first).hi / cfg::TILE_KV};
  }
  __device__ __forceinline__ const u8* query(const TiledPrefillParams& p, int row) const {
    const Place at = place_of_row(p, row);
    return p.q + at.page * p.q_stride_batch + at.token * p.q_stride_token + head * p.q_stride_head;
  }
  // Of a key that the sequence has: other entries of its page table may be anything.
  __device__ __forceinline__ Place place_of_key(const TiledPrefillParams& p, int key) const {
    if constexpr (!cfg::PAGED) return {p.cu_seqlens_k != nullptr ? 0 : batch, k0 + key};
    const u8* row = reinterpret_cast<const u8*>(p.page_table) + batch * p.page_table_stride_batch;
    const Divisor page_size(p.page_size);
    Place at;
    at.page = PagedRows{true, row, p.page_table_stride_page, page_size}.find(key, at.token);
    return at;
  }
  // `count` rows from a place on.
  __device__ __forceinline__ HeadRows key_rows(const TiledPrefillParams& p, const Place& at, int count) const {
    return {p.k + at.page * p.k_stride_page + at.token * p.k_stride_token + kv_head * p.k_stride_head,
            p.k_norms + at.page * p.k_norms_stride_page + at.token * p.k_norms_stride_token +
                kv_head * p.k_norms_stride_head,
            static_cast<u32>(p.k_stride_token), static_cast<u32>(p.k_norms_stride_token), count};
  }
  __device__ __forceinline__ HeadRows value_rows(const TiledPrefillParams& p, const Place& at, int count) const {
    return {p.v + at.page * p.v_stride_page + at.token * p.v_stride_token + kv_head * p.v_stride_head,
            p.v_norms + at.page * p.v_norms_stride_page + at.token * p.v_norms_stride_token +
                kv_head * p.v_norms_stride_head,
            static_cast<u32>(p.v_stride_token), static_cast<u32>(p.v_norms_stride_token), count};
  }
  __device__ __forceinline__ u8* out(const TiledPrefillParams& p, int row) const {
    const Place at = place_of_row(p, row);
    return p.out + at.page * p.out_stride_batch + at.token * p.out_stride_token + head * p.out_stride_head;
  }
  // Index of a row in lse.
  __device__ __forceinline__ i64 flat(const TiledPrefillParams& p, int row) const {
    const Place at = place_of_row(p, row);
    return (static_cast<i64>(at.page) * p.num_tokens + at.token) * p.num_qo_heads + head;
  }
};

// A value that is the same in all lanes of a warp, for the compiler, too: what it takes for different ones would have
// to be made uniform for each instruction that wants an operand that is.
__device__ __forceinline__ int uniform(int x) { return __shfl_sync(FULL_MASK, x, 0); }

// Item `index` of all, for a whole warp; false if it is none: of ragged sequences there may be fewer than were planned.
// Streams, which are KV heads (of sequences, unless these are ragged), take turns by `streams_at_once`. Of those the
// tiles of the last tokens come first, as a causal mask leaves them the most keys: work that begins last should be
// short. The heads of a group, which read the same keys, are neighbors.
__device__ __forceinline__ bool find_item(const TiledPrefillParams& p, int index, Item& w) {
  const int per_turn = p.streams_at_once * p.group * p.num_tiles;
  const int turn = index / per_turn, in_turn = index % per_turn;
  const int heads = min(p.streams_at_once, p.num_streams - turn * p.streams_at_once) * p.group;
  const int stream = turn * p.streams_at_once + in_turn % heads / p.group;
  const auto tiles_of = [](int tokens) { return (tokens + cfg::TILE_Q - 1) / cfg::TILE_Q; };
  w.batch = stream / p.num_kv_heads;
  w.kv_head = stream % p.num_kv_heads;
  w.head = w.kv_head * p.group + in_turn % heads % p.group;
  w.q0 = 0;
  w.seqlen_q = p.num_tokens;
  int from_end = in_turn / heads;
  if (p.cu_seqlens_q != nullptr) {
    RaggedTile found;
    if (!find_ragged(p.cu_seqlens_q, p.batch, p.num_tokens, from_end, tiles_of, found)) return false;
    w.batch = uniform(found.batch);
    w.q0 = uniform(found.first);
    w.seqlen_q = uniform(found.count);
    from_end = uniform(found.tile);
  }
  w.token0 = (tiles_of(w.seqlen_q) - 1 - from_end) * cfg::TILE_Q;
  w.num_tokens = min(cfg::TILE_Q, w.seqlen_q - w.token0);
  w.k0 = 0;
  w.kv_len = p.capacity;
  if (p.cu_seqlens_k != nullptr) {
    find_sequence(p.cu_seqlens_k, w.batch, p.capacity, w.k0, w.kv_len);
    w.k0 = uniform(w.k0);
    w.kv_len = uniform(w.kv_len);
  }
  if (p.kv_len != nullptr) {
    const u8* length = reinterpret_cast<const u8*>(p.kv_len) + w.batch * p.kv_len_stride;
    w.kv_len = uniform(max(0, min(p.capacity, __ldg(reinterpret_cast<const int*>(length)))));
  }
  w.tiles = w.tiles_of(p, 0, cfg::TILE_Q);
  return true;
}

// Calls work(item) for each item of this CTA, in whole warps. CTAs take one in each round, in turns from the first and
// from the last, so that none has the longest of every round.
template <class Work>
__device__ __forceinline__ void for_items(const TiledPrefillParams& p, Work work) {
  const int ctas = static_cast<int>(gridDim.x), cta = static_cast<int>(blockIdx.x);
#pragma unroll 1
  for (int round = 0;; ++round) {
    const int index = round * ctas + (round % 2 == 0 ? cta : ctas - 1 - cta);
    if (index >= p.num_items) break;
    Item w;
    if (find_item(p, index, w)) work(w);
  }
}

#endif
