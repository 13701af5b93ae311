// common/tiled_producer.cuh -- shared memory of prefill_sm90.cu, and the warpgroup that fills it with tiles.
// SPDX-License-Identifier: Apache-2.0
#ifndef CUATTN_COMMON_TILED_PRODUCER_CUH
#define CUATTN_COMMON_TILED_PRODUCER_CUH
#include "common/elements.cuh"
#include "common/prefill_items.cuh"
#include "common/ptx_sm90.cuh"
#include "kv/tiles_sm90.cuh"

namespace {

using Elem = ElemOf<cfg::DTYPE>::type;
using K = SwizzledTilesOf<cfg::K_FORMAT, Elem, cfg::HEAD_DIM>::type;
using V = SwizzledTilesOf<cfg::V_FORMAT, Elem, cfg::HEAD_DIM>::type;

constexpr int GROUP_THREADS = 128, GROUP_WARPS = 4;  // of a warpgroup
constexpr int GROUP_ROWS = 64;                       // the M of wgmma
constexpr int CONSUMER_WARPS = cfg::CONSUMERS * GROUP_WARPS;
constexpr int CHUNK = 64, CHUNKS = cfg::HEAD_DIM / CHUNK;  // columns that a swizzled row of 128 bytes has
constexpr u32 ROW_BYTES = CHUNK * sizeof(Elem), EIGHT_ROWS = 8 * ROW_BYTES;
static_assert(cfg::TILE_Q == cfg::CONSUMERS * GROUP_ROWS, "a consumer has 64 rows");
static_assert(cfg::HEAD_DIM % CHUNK == 0, "chunks of columns are whole");
static_assert(cfg::TILE_KV <= 256, "a box of TMA has 256 rows at most");

struct Smem {
  alignas(1024) Elem q[cfg::CONSUMERS][CHUNKS][GROUP_ROWS * CHUNK];
  alignas(1024) Elem k[cfg::NUM_STAGES][CHUNKS][cfg::TILE_KV * CHUNK];
  alignas(1024) Elem v[cfg::NUM_STAGES][CHUNKS][cfg::TILE_KV * CHUNK];
  u64 q_full[cfg::CONSUMERS], q_empty[cfg::CONSUMERS];
  u64 k_full[cfg::NUM_STAGES], k_empty[cfg::NUM_STAGES];
  u64 v_full[cfg::NUM_STAGES], v_empty[cfg::NUM_STAGES];
  float k_log2_scale[cfg::NUM_STAGES], v_log2_scale[cfg::NUM_STAGES];  // of tiles that are expanded
  Item items[CONSUMER_WARPS];                                          // what each warp works on
};
static_assert(cfg::CONSUMERS * cfg::CONSUMER_REGISTERS + cfg::PRODUCER_REGISTERS <=
                  (cfg::CONSUMERS + 1) * cfg::LAUNCH_REGISTERS,
              "a warpgroup would wait forever for registers");
static_assert(sizeof(Smem) == cfg::SMEM_BYTES, "cuattn/_plan and tiled_producer.cuh disagree on shared memory");
static_assert(sizeof(TiledPrefillParams) == cfg::PARAMS_BYTES, "cuattn/_params.py and params.cuh disagree");

constexpr bool EXPANDS = K::EXPANDED || V::EXPANDED;

// The place in a ring of tiles, and the parity of its phase.
struct Ring {
  int stage = 0;
  u32 phase = 0;

  __device__ __forceinline__ void advance() {
    if (++stage < cfg::NUM_STAGES) return;
    stage = 0;
    phase ^= 1;
  }
};

// ---- the producer ------------------------------------------------------------------------------------------------

template <int ROWS>
__device__ __forceinline__ void load_tile(Elem (&tile)[CHUNKS][ROWS * CHUNK], const TensorMap& map, u64* full, int head,
                                          int token, int page) {
  ptx::mbarrier_arrive_expect_tx(full, sizeof(tile));
#pragma unroll
  for (int c = 0; c < CHUNKS; ++c) ptx::tma_load_4d(tile[c], &map, full, c * CHUNK, head, token, page);
}

// This warp has written a tile.
__device__ __forceinline__ void publish(u64* full) {
  ptx::fence_proxy_async();
  __syncwarp();
  if (threadIdx.x % WARP == 0) ptx::mbarrier_arrive(full);
}

// Makes tiles in the order in which consumers need them: K of a tile, then V of the one before, or of the same where
// outputs depend on its scale. A single lane asks TMA, and where items come from takes a warp; a warpgroup expands
// codes.
__device__ __forceinline__ void produce(const TiledPrefillParams& p, Smem& sm) {
  constexpr int BEHIND = V::EXPANDED ? 0 : 1;
  const bool asks = threadIdx.x % (EXPANDS ? GROUP_THREADS : WARP) == 0;
  Ring keys, values;
  u32 q_phase = 0;
  typename K::Expander key_codes;
  typename V::Expander value_codes;
  for_items(p, [&](const Item& w) {
    if ((!EXPANDS && !asks) || !w.has_keys()) return;
    const int last = w.tiles.hi - 1, end = w.keys(p, cfg::TILE_Q).hi;
    const auto fetch_keys = [&](const Place& at, int tile) {
      key_codes.fetch(w.key_rows(p, at, end - tile * cfg::TILE_KV));
    };
    const auto fetch_values = [&](const Place& at, int tile) {
      value_codes.fetch(w.value_rows(p, at, end - tile * cfg::TILE_KV));
    };
    const auto load_keys = [&](const Place& at, const Place& next, int tile) {
      if (K::EXPANDED || asks) ptx::mbarrier_wait(&sm.k_empty[keys.stage], keys.phase ^ 1);
      if constexpr (K::EXPANDED) {
        key_codes.begin();  // scores may have another scale in each tile, which outputs better have not
        key_codes.expand(reinterpret_cast<u8*>(sm.k[keys.stage]), sm.k_log2_scale[keys.stage]);
        publish(&sm.k_full[keys.stage]);
        if (tile > w.tiles.lo) fetch_keys(next, tile - 1);
      } else if (asks) {
        load_tile<cfg::TILE_KV>(sm.k[keys.stage], p.k_map, &sm.k_full[keys.stage], w.kv_head, at.token, at.page);
      }
      keys.advance();
    };
    const auto load_values = [&](const Place& at, const Place& next, int tile) {
      if (V::EXPANDED || asks) ptx::mbarrier_wait(&sm.v_empty[values.stage], values.phase ^ 1);
      if constexpr (V::EXPANDED) {
        value_codes.expand(reinterpret_cast<u8*>(sm.v[values.stage]), sm.v_log2_scale[values.stage]);
        publish(&sm.v_full[values.stage]);
        if (tile > w.tiles.lo) fetch_values(next, tile - 1);
      } else if (asks) {
        load_tile<cfg::TILE_KV>(sm.v[values.stage], p.v_map, &sm.v_full[values.stage], w.kv_head, at.token, at.page);
      }
      values.advance();
    };
    const auto load_queries = [&] {
#pragma unroll 1
      for (int group = 0; group < cfg::CONSUMERS; ++group) {
        ptx::mbarrier_wait(&sm.q_empty[group], q_phase ^ 1);
        const Place at = w.place_of_row(p, group * GROUP_ROWS);
        load_tile<GROUP_ROWS>(sm.q[group], p.q_map, &sm.q_full[group], w.head, at.token, at.page);
      }
      q_phase ^= 1;
    };
    Place before{}, at = w.place_of_key(p, last * cfg::TILE_KV);
    value_codes.begin();
    if (K::EXPANDED) fetch_keys(at, last);
    if (V::EXPANDED) fetch_values(at, last);
#pragma unroll 1
    for (int tile = last; tile >= w.tiles.lo; --tile) {
      const Place next = tile > w.tiles.lo ? w.place_of_key(p, (tile - 1) * cfg::TILE_KV) : at;
      load_keys(at, next, tile);
      if (!K::EXPANDED && asks && tile == last) load_queries();
      if (BEHIND == 0) load_values(at, next, tile);
      if (BEHIND == 1 && tile < last) load_values(before, at, tile + 1);
      before = at;
      at = next;
    }
    if (BEHIND == 1) load_values(before, before, 0);
  });
}

}  // namespace

#endif
