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
  int num_splits;             // of this sequence
  int part;                   // index of this split's results among those of all
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
  // Index of `row` in [parts, seqlen_q, num_qo_heads].
  __device__ __forceinline__ i64 flat(const DecodeParams& p, int row) const {
    return (static_cast<i64>(part) * p.seqlen_q + token(p, row)) * p.num_qo_heads + head(p, row);
  }
  static __device__ __forceinline__ KeyRange keys_of_token(const DecodeParams& p, int token, int kv_len) {
    KeyRange r = visible_keys(token, p.seqlen_q, kv_len, p.window_left, p.window_right);
    r.lo = max(r.lo, max(p.first_key, kv_len - p.last_keys));
    r.hi = min(r.hi, min(p.end_key, kv_len - p.skip_last));
    return r;
  }
  __device__ __forceinline__ KeyRange keys(const DecodeParams& p, int row) const {
    // The rows that pad a tile see what the last one sees.
    return keys_of_token(p, token(p, min(in_head(row), num_rows - 1)), kv_len);
  }
  // The first key that a tree of tokens may hide from some of them.
  __device__ __forceinline__ int tree_begin(const DecodeParams& p) const {
    return p.tree_mask == nullptr ? kv_len : kv_len - p.seqlen_q;
  }
  // Whether the tree hides one of the keys of `row` from it; `tree` is [ROWS] of what read_tree gives, if there is one.
  __device__ __forceinline__ bool tree_hides(const DecodeParams& p, const u32* tree, int row, int key) const {
    const int place = key - (kv_len - p.seqlen_q);
    return p.tree_mask != nullptr && place >= 0 && place < p.seqlen_q && (tree[row] >> place & 1) == 0;
  }
  // Of the last seqlen_q keys, which the token of `row` sees in its tree.
  __device__ __forceinline__ u32 read_tree(const DecodeParams& p, int row) const {
    const int of_row = token(p, min(in_head(row), num_rows - 1));
    const u8* mask = p.tree_mask + batch * p.tree_mask_stride_batch + of_row * p.tree_mask_stride_token;
    u32 seen = 0;
    for (int i = 0; i < p.seqlen_q; ++i) seen |= static_cast<u32>(mask[i * p.tree_mask_stride_key] != 0) << i;
    return seen;
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
  w.num_splits = p.num_splits;
  w.part = w.split * static_cast<int>(gridDim.z) + w.batch;
  w.row0 = row_blocks == 1 ? 0 : blockIdx.y % row_blocks * HEAD_ROWS;
  w.num_rows = min(HEAD_ROWS, all_rows - w.row0);
  return w;
}

// Where the length of a sequence stands, and a length that the cache has room for, whatever stands there.
__device__ __forceinline__ const int* place_of_length(const DecodeParams& p, int batch) {
  return reinterpret_cast<const int*>(reinterpret_cast<const u8*>(p.kv_len) + batch * p.kv_len_stride);
}
__device__ __forceinline__ int limited(const DecodeParams& p, int length) { return max(0, min(length, p.capacity)); }
__device__ __forceinline__ int given_length(const DecodeParams& p, int batch) {
  return limited(p, *place_of_length(p, batch));
}

// Steps of all warps over the keys that any row of a sequence sees.
__device__ __forceinline__ int steps_of(const DecodeParams& p, int batch) {
  const int kv_len = given_length(p, batch);
  const int lo = Work::keys_of_token(p, 0, kv_len).lo / cfg::TILE_KV * cfg::TILE_KV;
  const int keys = Work::keys_of_token(p, p.seqlen_q - 1, kv_len).hi - lo;
  return keys <= 0 ? 0 : (keys + cfg::KEYS_PER_STEP - 1) / cfg::KEYS_PER_STEP;
}

// Gives the p.num_splits parts of a whole batch to its sequences by their lengths, and finds the one of this CTA: each
// sequence has one part, or as many as it takes that none has more than `most` steps, the fewest for which the parts
// suffice. Every warp of every CTA comes to the same. Returns false for a part that no sequence needs.
__device__ __forceinline__ bool find_share(const DecodeParams& p, Work& w) {
  const int lane = threadIdx.x % WARP, wanted = w.split;
  const auto parts_of = [&](int batch, int most) {
    return batch < p.batch ? max(1, (steps_of(p, batch) + most - 1) / most) : 0;
  };
  int longest = 1;
  for (int b = lane; b < p.batch; b += WARP) longest = max(longest, steps_of(p, b));
  int few = 1, most = __reduce_max_sync(FULL_MASK, longest);
  while (few < most) {
    const int middle = (few + most) / 2;
    int parts = 0;
    for (int b = lane; b < p.batch; b += WARP) parts += parts_of(b, middle);
    if (__reduce_add_sync(FULL_MASK, parts) <= p.num_splits) {
      most = middle;
    } else {
      few = middle + 1;
    }
  }
  int first = 0;  // part of the 32 sequences
  for (int b0 = 0; b0 < p.batch; b0 += WARP) {
    const int parts = parts_of(b0 + lane, most);
    int end = parts;  // of the sequence, from `first` on
#pragma unroll
    for (int distance = 1; distance < WARP; distance *= 2) {
      const int before = __shfl_up_sync(FULL_MASK, end, distance);
      if (lane >= distance) end += before;
    }
    const u32 behind = __ballot_sync(FULL_MASK, first + end > wanted);
    if (behind != 0) {
      const int owner = __ffs(static_cast<int>(behind)) - 1;
      const int begin = first + __shfl_sync(FULL_MASK, end - parts, owner);
      w.batch = b0 + owner;
      w.split = wanted - begin;
      w.num_splits = __shfl_sync(FULL_MASK, parts, owner);
      w.part = wanted;
      if (w.split == 0 && w.kv_head == 0 && w.row0 == 0 && threadIdx.x == 0) {
        p.shares[2 * w.batch] = begin;
        p.shares[2 * w.batch + 1] = w.num_splits;
      }
      return true;
    }
    first += __shfl_sync(FULL_MASK, end, WARP - 1);
  }
  return false;
}

__device__ __forceinline__ void find_keys(const DecodeParams& p, int length, Work& w) {
  w.kv_len = length;
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
  const bool many_steps = (hi - lo) / cfg::KEYS_PER_STEP >= cfg::MANY_STEPS * w.num_splits;
  const int unit = many_steps ? cfg::KEYS_PER_STEP : cfg::TILE_KV;
  const int units = (hi - lo + unit - 1) / unit;
  // Those that have one unit more are not the first, whose first tile takes more time if keys are hidden there.
  const int per_split = units / w.num_splits, rest = units - per_split * w.num_splits;
  const auto begin_of = [&](int split) {
    const int even = split * per_split + min(max(split - 1, 0), rest);  // at most the number of units
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
