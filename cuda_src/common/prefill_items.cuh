// common/prefill_items.cuh -- which tiles of query tokens CTAs of prefill_sm90.cu take, in which order, and how.
// SPDX-License-Identifier: Apache-2.0
#ifndef CUATTN_COMMON_PREFILL_ITEMS_CUH
#define CUATTN_COMMON_PREFILL_ITEMS_CUH
#include "common/head_rows.cuh"
#include "common/mask.cuh"
#include "common/paging.cuh"
#include "common/params.cuh"
#include "common/ptx_sm90.cuh"
#include "common/ragged.cuh"

// A tile of query tokens of one head.
struct Item {
  int batch, head, kv_head;
  int q0, k0;              // first tokens of the sequence among all ragged ones, else 0
  int seqlen_q, kv_len;    // its lengths
  int token0, num_tokens;  // `num_tokens` of them are there
  KeyRange tiles;          // of keys that any row sees

  __device__ __forceinline__ bool is_there() const { return num_tokens > 0; }
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
  __device__ __forceinline__ const u8* page_entry(const TiledPrefillParams& p, int index) const {
    return reinterpret_cast<const u8*>(p.page_table) + batch * p.page_table_stride_batch +
           index * p.page_table_stride_page;
  }
  // Of a key that the sequence has: other entries of its page table may be anything.
  __device__ __forceinline__ Place place_of_key(const TiledPrefillParams& p, int key) const {
    if constexpr (!cfg::PAGED) return {p.cu_seqlens_k != nullptr ? 0 : batch, k0 + key};
    const Divisor page_size(p.page_size);
    Place at;
    at.page = PagedRows{true, page_entry(p, 0), p.page_table_stride_page, page_size}.find(key, at.token);
    return at;
  }
  // Rows of keys and of values.
  __device__ __forceinline__ HeadPlanes keys_of(const TiledPrefillParams& p) const {
    return {
        {p.k + kv_head * p.k_stride_head, p.k_stride_page, static_cast<u32>(p.k_stride_token)},
        {p.k_norms + kv_head * p.k_norms_stride_head, p.k_norms_stride_page, static_cast<u32>(p.k_norms_stride_token)}};
  }
  __device__ __forceinline__ HeadPlanes values_of(const TiledPrefillParams& p) const {
    return {
        {p.v + kv_head * p.v_stride_head, p.v_stride_page, static_cast<u32>(p.v_stride_token)},
        {p.v_norms + kv_head * p.v_norms_stride_head, p.v_norms_stride_page, static_cast<u32>(p.v_norms_stride_token)}};
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

// Places of a sequence's tiles of keys, from one to those before it. Pages have whole tiles.
struct TilePlaces {
  Place at;
  const u8* entry;  // of the page table

  __device__ __forceinline__ TilePlaces(const TiledPrefillParams& p, const Item& w, int tile)
      : at(w.place_of_key(p, tile * cfg::TILE_KV)), entry(nullptr) {
    if constexpr (cfg::PAGED) entry = w.page_entry(p, tile * cfg::TILE_KV / p.page_size);
  }
  // To the tile before, which the sequence has, too.
  __device__ __forceinline__ void go_back(const TiledPrefillParams& p) {
    at.token -= cfg::TILE_KV;
    if (!cfg::PAGED || at.token >= 0) return;
    at.token += p.page_size;
    entry -= p.page_table_stride_page;
    at.page = __ldg(reinterpret_cast<const int*>(entry));
  }
};

// A value that is the same in all lanes of a warp, for the compiler, too: what it takes for different ones would have
// to be made uniform for each instruction that wants an operand that is.
__device__ __forceinline__ int uniform(int x) { return __shfl_sync(FULL_MASK, x, 0); }
__device__ __forceinline__ KeyRange uniform(const KeyRange& x) { return {uniform(x.lo), uniform(x.hi)}; }

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

// Items of a CTA on their way from the producer to the consumers: the one that these work on and the next. One that is
// not there ends them.
struct ItemQueue {
  static constexpr int SLOTS = 2;
  struct Queued : Item {
    KeyRange own[cfg::CONSUMERS];   // tiles of which any row of a warpgroup sees a key
    KeyRange full[cfg::CONSUMERS];  // and those of which all rows see all keys; full.lo > full.hi: none
  };
  Queued items[SLOTS];
  u64 full[SLOTS], empty[SLOTS];  // mbarriers: an item is there; all warps that take it are done with it

  __device__ __forceinline__ void init(int takers) {
#pragma unroll
    for (int slot = 0; slot < SLOTS; ++slot) {
      ptx::mbarrier_init(&full[slot], 1);
      ptx::mbarrier_init(&empty[slot], takers);
    }
  }
};

// Where a warp is in the queue.
struct QueuePlace {
  int number = 0;  // of items before

  __device__ __forceinline__ void advance() { ++number; }
  __device__ __forceinline__ int slot() const { return number % ItemQueue::SLOTS; }
  __device__ __forceinline__ u32 phase() const { return static_cast<u32>(number / ItemQueue::SLOTS % 2); }
  // Of what there is once for each item.
  __device__ __forceinline__ u32 parity() const { return static_cast<u32>(number % 2); }
  // By one lane.
  __device__ __forceinline__ void put(ItemQueue& queue, const TiledPrefillParams& p, const Item& w) const {
    ptx::mbarrier_wait(&queue.empty[slot()], phase() ^ 1);
    ItemQueue::Queued& to = queue.items[slot()];
    static_cast<Item&>(to) = w;
#pragma unroll 1
    for (int group = 0; group < cfg::CONSUMERS; ++group) {
      constexpr int ROWS = cfg::TILE_Q / cfg::CONSUMERS;
      const int first = group * ROWS, last = first + ROWS - 1;
      const KeyRange own = w.tiles_of(p, first, last);
      const bool sees = first < w.num_tokens && own.lo < own.hi;
      to.own[group] = sees ? own : KeyRange{w.tiles.lo, w.tiles.lo};
      to.full[group] = w.full_tiles_of(p, first, last);
    }
    ptx::mbarrier_arrive(&queue.full[slot()]);
  }
  // By whole warps.
  __device__ __forceinline__ const ItemQueue::Queued& wait(ItemQueue& queue) const {
    ptx::mbarrier_wait(&queue.full[slot()], phase());
    return queue.items[slot()];
  }
  __device__ __forceinline__ void release(ItemQueue& queue) const {
    __syncwarp();
    if (threadIdx.x % WARP == 0) ptx::mbarrier_arrive(&queue.empty[slot()]);
  }
};

// The items of a CTA, in whole warps. Its first one is that of its number; the others it claims one after the other, so
// that SMs have as much to do however long items take.
struct ItemSource {
  int index = static_cast<int>(blockIdx.x);

  // Asks for the next one. By lane 0, which shares it with `turn`.
  __device__ __forceinline__ void claim(const TiledPrefillParams& p) {
    index = p.num_items;
    if (p.items_claimed != nullptr) index = static_cast<int>(gridDim.x) + atomicAdd(p.items_claimed, 1);
  }
  __device__ __forceinline__ void turn() { index = uniform(index); }
  // The next one that there is; one that is not there if there is none.
  __device__ __forceinline__ void find(const TiledPrefillParams& p, Item& w) {
    // Unsigned: a counter that someone else writes to leaves items out, and none is made up.
    while (static_cast<u32>(index) < static_cast<u32>(p.num_items)) {
      if (find_item(p, index, w)) return;
      if (threadIdx.x % WARP == 0) claim(p);
      turn();
    }
    w = Item{};
  }
};

#endif
