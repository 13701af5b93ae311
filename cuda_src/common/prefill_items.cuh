// common/prefill_items.cuh -- in which order CTAs of prefill_sm90.cu take tiles of query tokens, and what these see.
// SPDX-License-Identifier: Apache-2.0
#ifndef CUATTN_COMMON_PREFILL_ITEMS_CUH
#define CUATTN_COMMON_PREFILL_ITEMS_CUH
#include "common/head_rows.cuh"
#include "common/mask.cuh"
#include "common/paging.cuh"
#include "common/params.cuh"

// Where a key lies: its page, which without pages is its sequence, and its token there.
struct Place {
  int page, token;
};

// A tile of query tokens of one head.
struct Item {
  int batch, head, kv_head;
  int kv_len;              // of the sequence
  int token0, num_tokens;  // `num_tokens` of them are there
  int key_tiles;           // that any row sees

  // The first key that row `row` does not see; the rows that pad a tile see what the last one sees.
  __device__ __forceinline__ int end_of_keys(const TiledPrefillParams& p, int row) const {
    return visible_keys(token0 + min(row, num_tokens - 1), p.num_tokens, kv_len, -1, p.window_right).hi;
  }
  // Tiles of keys that it sees something of.
  __device__ __forceinline__ int tiles_of_keys(const TiledPrefillParams& p, int row) const {
    return (end_of_keys(p, row) + cfg::TILE_KV - 1) / cfg::TILE_KV;
  }
  __device__ __forceinline__ const u8* query(const TiledPrefillParams& p, int row) const {
    return p.q + batch * p.q_stride_batch + (token0 + row) * p.q_stride_token + head * p.q_stride_head;
  }
  // Of a key that the sequence has: other entries of its page table may be anything.
  __device__ __forceinline__ Place place(const TiledPrefillParams& p, int key) const {
    if constexpr (!cfg::PAGED) return {batch, key};
    const u8* row = reinterpret_cast<const u8*>(p.page_table) + batch * p.page_table_stride_batch;
    const Divisor page_size(p.page_size);
    Place at;
    at.page = PagedRows{true, row, p.page_table_stride_page, page_size}.find(key, at.token);
    return at;
  }
  // `count` rows from a place on.
  __device__ __forceinline__ HeadRows keys(const TiledPrefillParams& p, const Place& at, int count) const {
    return {p.k + at.page * p.k_stride_page + at.token * p.k_stride_token + kv_head * p.k_stride_head,
            p.k_norms + at.page * p.k_norms_stride_page + at.token * p.k_norms_stride_token +
                kv_head * p.k_norms_stride_head,
            static_cast<u32>(p.k_stride_token), static_cast<u32>(p.k_norms_stride_token), count};
  }
  __device__ __forceinline__ HeadRows values(const TiledPrefillParams& p, const Place& at, int count) const {
    return {p.v + at.page * p.v_stride_page + at.token * p.v_stride_token + kv_head * p.v_stride_head,
            p.v_norms + at.page * p.v_norms_stride_page + at.token * p.v_norms_stride_token +
                kv_head * p.v_norms_stride_head,
            static_cast<u32>(p.v_stride_token), static_cast<u32>(p.v_norms_stride_token), count};
  }
  __device__ __forceinline__ u8* out(const TiledPrefillParams& p, int row) const {
    return p.out + batch * p.out_stride_batch + (token0 + row) * p.out_stride_token + head * p.out_stride_head;
  }
  // Index of a row in lse.
  __device__ __forceinline__ i64 flat(const TiledPrefillParams& p, int row) const {
    return (static_cast<i64>(batch) * p.num_tokens + token0 + row) * p.num_qo_heads + head;
  }
};

// A value that is the same in all lanes of a warp, for the compiler, too: what it takes for different ones would have
// to be made uniform for each instruction that wants an operand that is.
__device__ __forceinline__ int uniform(int x) { return __shfl_sync(FULL_MASK, x, 0); }

// Item `index` of all, for a whole warp. Streams, which are KV heads of sequences, take turns by `streams_at_once`. Of
// those the tiles of the last tokens come first, as a causal mask leaves them the most keys: work that begins last
// should be short. The heads of a group, which read the same keys, are neighbors.
__device__ __forceinline__ Item item_at(const TiledPrefillParams& p, int index) {
  const int per_turn = p.streams_at_once * p.group * p.num_tiles;
  const int turn = index / per_turn, in_turn = index % per_turn;
  const int heads = min(p.streams_at_once, p.num_streams - turn * p.streams_at_once) * p.group;
  const int stream = turn * p.streams_at_once + in_turn % heads / p.group;
  Item w;
  w.batch = stream / p.num_kv_heads;
  w.kv_head = stream % p.num_kv_heads;
  w.head = w.kv_head * p.group + in_turn % heads % p.group;
  w.token0 = (p.num_tiles - 1 - in_turn / heads) * cfg::TILE_Q;
  w.num_tokens = min(cfg::TILE_Q, p.num_tokens - w.token0);
  w.kv_len = p.capacity;
  if (p.kv_len != nullptr) {
    const u8* length = reinterpret_cast<const u8*>(p.kv_len) + w.batch * p.kv_len_stride;
    w.kv_len = uniform(max(0, min(p.capacity, __ldg(reinterpret_cast<const int*>(length)))));
  }
  w.key_tiles = w.tiles_of_keys(p, cfg::TILE_Q);
  return w;
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
    work(item_at(p, index));
  }
}

#endif
