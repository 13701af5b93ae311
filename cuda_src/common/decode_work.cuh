// common/decode_work.cuh -- what a CTA of decode.cu works on: its query rows, and its split of their keys.
// SPDX-License-Identifier: Apache-2.0
#ifndef CUATTN_COMMON_DECODE_WORK_CUH
#define CUATTN_COMMON_DECODE_WORK_CUH
#include "common/mask.cuh"
#include "common/params.cuh"

constexpr int ROWS = 8 * cfg::ROW_TILES;
constexpr int HEAD_ROWS = ROWS / cfg::TILE_HEADS;  // of each KV head

struct Work {
  int batch, kv_head, split;  // the first KV head
  int row0, num_rows;         // rows of this CTA, of each KV head: row0 .. row0 + num_rows - 1
  int kv_len;                 // clamped to the capacity of the page table
  int first;                  // no row sees a key before it
  int begin, end;             // keys of this split, a whole number of tiles but at the end

  // Rows of the CTA: HEAD_ROWS of each KV head, of which num_rows are there.
  static __device__ __forceinline__ int in_head(int row) { return cfg::TILE_HEADS == 1 ? row : row % HEAD_ROWS; }
  __device__ __forceinline__ bool has(int row) const { return in_head(row) < num_rows; }
  __device__ __forceinline__ int end_row() const { return cfg::TILE_HEADS == 1 ? num_rows : ROWS; }
  __device__ __forceinline__ int kv_head_of(int row) const {
    return cfg::TILE_HEADS == 1 ? kv_head : kv_head + row / HEAD_ROWS;
  }
  // One token a sequence is the most frequent case, and a division takes as long as a trip to L2.
  __device__ __forceinline__ int token(const DecodeParams& p, int row) const {
    return p.seqlen_q == 1 ? 0 : (row0 + in_head(row)) / p.group;
  }
  __device__ __forceinline__ int head(const DecodeParams& p, int row) const {
    const int index = row0 + in_head(row);
    return kv_head_of(row) * p.group + (p.seqlen_q == 1 ? index : index % p.group);
  }
  // Index of `row` in [num_splits, batch, seqlen_q, num_qo_heads].
  __device__ __forceinline__ i64 flat(const DecodeParams& p, int row) const {
    const i64 sequence = static_cast<i64>(split) * gridDim.z + batch;
    return (sequence * p.seqlen_q + token(p, row)) * p.num_qo_heads + head(p, row);
  }
  __device__ __forceinline__ KeyRange keys(const DecodeParams& p, int row) const {
    // The rows that pad a tile see what the last one sees.
    KeyRange r =
        visible_keys(token(p, min(in_head(row), num_rows - 1)), p.seqlen_q, kv_len, p.window_left, p.window_right);
    r.lo = max(r.lo, max(p.first_key, kv_len - p.last_keys));
    r.hi = min(r.hi, min(p.end_key, kv_len - p.skip_last));
    return r;
  }
};

// The rows of this CTA; the keys are not known yet.
__device__ __forceinline__ Work find_rows(const DecodeParams& p) {
  Work w{};
  w.batch = blockIdx.z;
  w.kv_head = blockIdx.x * cfg::TILE_HEADS;
  const int all_rows = p.seqlen_q * p.group;
  const int row_blocks = (all_rows + HEAD_ROWS - 1) / HEAD_ROWS;
  w.split = row_blocks == 1 ? blockIdx.y : blockIdx.y / row_blocks;
  w.row0 = row_blocks == 1 ? 0 : blockIdx.y % row_blocks * HEAD_ROWS;
  w.num_rows = min(HEAD_ROWS, all_rows - w.row0);
  return w;
}

__device__ __forceinline__ int given_length(const DecodeParams& p, const Work& w) {
  return *reinterpret_cast<const int*>(reinterpret_cast<const u8*>(p.kv_len) + w.batch * p.kv_len_stride);
}

__device__ __forceinline__ void find_keys(const DecodeParams& p, int length, Work& w) {
  w.kv_len = max(0, min(length, p.capacity));
  w.first = w.keys(p, 0).lo;
  const int hi = w.keys(p, w.num_rows - 1).hi;
  if (hi <= w.first) {
    w.begin = w.end = w.first;
    return;
  }
  // The keys are cut at multiples of TILE_KV, so that a tile lies inside of a page if a page is a whole number of
  // tiles: into splits of whole steps of all warps where there are many, that no warp is left with one step more than
  // the others; else of tiles. With few keys, splits have MIN_SPLIT and the last ones are empty.
  const int lo = w.first / cfg::TILE_KV * cfg::TILE_KV;
  if (p.split_size > 0) {
    // Cut where neither another sequence nor the capacity has a say.
    const i64 cut = static_cast<i64>(w.split) * p.split_size;
    w.begin = static_cast<int>(min(static_cast<i64>(hi), max(static_cast<i64>(lo), cut)));
    w.end = static_cast<int>(min(static_cast<i64>(hi), max(static_cast<i64>(lo), cut + p.split_size)));
    return;
  }
  const bool many_steps = (hi - lo) / cfg::KEYS_PER_STEP >= cfg::MANY_STEPS * p.num_splits;
  const int unit = many_steps ? cfg::KEYS_PER_STEP : cfg::TILE_KV;
  const int units = (hi - lo + unit - 1) / unit;
  const int per_split = units / p.num_splits, rest = units - per_split * p.num_splits;
  const auto begin_of = [&](int split) {
    const int even = split * per_split + min(split, rest);  // at most the number of units
    const int dense = min(units, split * ((cfg::MIN_SPLIT + unit - 1) / unit));
    return static_cast<int>(min(static_cast<i64>(hi), lo + static_cast<i64>(max(even, dense)) * unit));
  };
  w.begin = begin_of(w.split);
  w.end = begin_of(w.split + 1);
}

// The address of a row of Q, null for those that pad a tile.
__device__ __forceinline__ const u8* query(const DecodeParams& p, const Work& w, int row) {
  if (!w.has(row)) return nullptr;
  return p.q + w.batch * p.q_stride_batch + w.token(p, row) * p.q_stride_token + w.head(p, row) * p.q_stride_head;
}

#endif
