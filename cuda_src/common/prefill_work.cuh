// common/prefill_work.cuh -- what a CTA of prefill works on: its query rows and the keys that they see.
// SPDX-License-Identifier: Apache-2.0
#ifndef CUATTN_COMMON_PREFILL_WORK_CUH
#define CUATTN_COMMON_PREFILL_WORK_CUH
#include "common/mask.cuh"
#include "common/paging.cuh"
#include "common/params.cuh"
#include "common/ragged.cuh"

// Keys in tiles, and where their rows lie.
struct KeyTiles {
  int lo, hi;                           // keys that any row sees
  int begin;                            // of tile 0
  KeyRange full;                        // tiles whose keys all rows see
  const u8 *k, *v, *k_norms, *v_norms;  // the first row of the sequence, or of page 0
};

struct Work : KeyTiles {
  int batch, kv_head;
  int row0, num_rows;  // of the sequence's seqlen_q * group rows; row = token * group + head of the group
  int q0, seqlen_q;    // first token among all ragged ones, and tokens of the sequence
  int kv_len;
  Divisor page_size;

  // Leaves part `split` of `splits` of these keys, of whole tiles.
  __device__ __forceinline__ void cut(int split, int splits) {
    const int tiles = (hi - begin + cfg::TILE_KV - 1) / cfg::TILE_KV, of_part = (tiles + splits - 1) / splits;
    const int first = split * of_part;
    begin += first * cfg::TILE_KV;
    lo = max(lo, begin);
    hi = max(lo, min(hi, begin + of_part * cfg::TILE_KV));
    full.lo = max(0, full.lo - first);
    full.hi = max(0, min(full.hi - first, of_part));
  }
  // The rows that pad a tile see what the last one sees.
  __device__ __forceinline__ int index(int row) const { return row0 + min(row, num_rows - 1); }
  __device__ __forceinline__ int token(const PrefillParams& p, int row) const { return index(row) / p.group; }
  __device__ __forceinline__ int head(const PrefillParams& p, int row) const {
    return kv_head * p.group + index(row) % p.group;
  }
  __device__ __forceinline__ KeyRange keys(const PrefillParams& p, int row) const {
    return visible_keys(token(p, row), seqlen_q, kv_len, p.window_left, p.window_right);
  }
  __device__ __forceinline__ const u8* query(const PrefillParams& p, int row) const {
    return p.q + batch * p.q_stride_batch + (q0 + token(p, row)) * p.q_stride_token + head(p, row) * p.q_stride_head;
  }
  __device__ __forceinline__ u8* out(const PrefillParams& p, int row) const {
    return p.out + batch * p.out_stride_batch + (q0 + token(p, row)) * p.out_stride_token +
           head(p, row) * p.out_stride_head;
  }
  // Index of a row in lse.
  __device__ __forceinline__ i64 flat(const PrefillParams& p, int row) const {
    const i64 first = p.cu_seqlens_q != nullptr ? q0 : static_cast<i64>(batch) * p.num_tokens;
    return (first + token(p, row)) * p.num_qo_heads + head(p, row);
  }
  // Index of a row in state_partial.
  __device__ __forceinline__ i64 flat_part(const PrefillParams& p, int row) const {
    return static_cast<i64>(blockIdx.y) * p.batch * p.num_tokens * p.num_qo_heads + flat(p, row);
  }
  __device__ __forceinline__ PagedRows pages(const PrefillParams& p) const {
    const u8* table = reinterpret_cast<const u8*>(p.page_table);
    return {table != nullptr, table + batch * p.page_table_stride_batch, p.page_table_stride_page, page_size};
  }
  // The first row of this KV head among those of a plane, as `k` and `v`.
  __device__ __forceinline__ const u8* first_row(const PrefillParams& p, const u8* plane, int k0, i64 stride_page,
                                                 i64 stride_token, i64 stride_head) const {
    if (p.page_table == nullptr && p.cu_seqlens_k == nullptr) plane += batch * stride_page;
    return plane + k0 * stride_token + kv_head * stride_head;
  }
};

// Tiles of a sequence's query rows.
__device__ __forceinline__ int tiles_of(const PrefillParams& p, int seqlen_q) {
  return (seqlen_q * p.group + cfg::TILE_Q - 1) / cfg::TILE_Q;
}

// The work of this CTA; false if there is none. Streams, which are KV heads (of sequences, unless these are ragged),
// take turns by `streams_at_once`. Of those the tiles of the last query rows come first, as a causal mask leaves them
// the most keys: work that begins last should be short.
__device__ __forceinline__ bool find_work(const PrefillParams& p, Work& w) {
  const int streams = p.cu_seqlens_q != nullptr ? p.num_kv_heads : p.num_kv_heads * p.batch;
  const int per_turn = p.streams_at_once * p.num_tiles;
  const int turn = static_cast<int>(blockIdx.x) / per_turn, in_turn = static_cast<int>(blockIdx.x) % per_turn;
  const int at_once = min(p.streams_at_once, streams - turn * p.streams_at_once);
  const int stream = turn * p.streams_at_once + in_turn % at_once;
  int from_end = in_turn / at_once;
  if (p.cu_seqlens_q != nullptr) {
    w.kv_head = stream;
    RaggedTile found;
    if (!find_ragged(p.cu_seqlens_q, p.batch, p.num_tokens, from_end, [&p](int n) { return tiles_of(p, n); }, found)) {
      return false;
    }
    w.batch = found.batch;
    w.q0 = found.first;
    w.seqlen_q = found.count;
    from_end = found.tile;
  } else {
    w.batch = stream / p.num_kv_heads;
    w.kv_head = stream % p.num_kv_heads;
    w.q0 = 0;
    w.seqlen_q = p.num_tokens;
  }
  w.row0 = (tiles_of(p, w.seqlen_q) - 1 - from_end) * cfg::TILE_Q;
  w.num_rows = min(cfg::TILE_Q, w.seqlen_q * p.group - w.row0);
  int k0 = 0;
  w.kv_len = p.capacity;
  if (p.cu_seqlens_k != nullptr) find_sequence(p.cu_seqlens_k, w.batch, p.capacity, k0, w.kv_len);
  if (p.kv_len != nullptr) {
    const u8* length = reinterpret_cast<const u8*>(p.kv_len) + w.batch * p.kv_len_stride;
    w.kv_len = max(0, min(w.kv_len, *reinterpret_cast<const int*>(length)));
  }
  w.page_size = Divisor(max(1, p.page_size));  // 0: there are no keys
  w.k = w.first_row(p, p.k, k0, p.k_stride_page, p.k_stride_token, p.k_stride_head);
  w.v = w.first_row(p, p.v, k0, p.v_stride_page, p.v_stride_token, p.v_stride_head);
  w.k_norms = w.first_row(p, p.k_norms, k0, p.k_norms_stride_page, p.k_norms_stride_token, p.k_norms_stride_head);
  w.v_norms = w.first_row(p, p.v_norms, k0, p.v_norms_stride_page, p.v_norms_stride_token, p.v_norms_stride_head);
  const KeyRange first = w.keys(p, 0), last = w.keys(p, w.num_rows - 1);
  w.lo = first.lo;
  w.hi = max(w.lo, last.hi);
  w.begin = w.lo / cfg::TILE_KV * cfg::TILE_KV;
  w.full.lo = (max(0, last.lo - w.begin) + cfg::TILE_KV - 1) / cfg::TILE_KV;
  w.full.hi = max(0, first.hi - w.begin) / cfg::TILE_KV;
  w.cut(static_cast<int>(blockIdx.y), p.num_splits);
  return true;
}

#endif
