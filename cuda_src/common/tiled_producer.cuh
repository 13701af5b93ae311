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
using V = SwizzledTilesOf<cfg::V_FORMAT, Elem, cfg::VALUE_DIM>::type;

constexpr int GROUP_THREADS = 128, GROUP_WARPS = 4;  // of a warpgroup
constexpr int GROUP_ROWS = 64;                       // the M of wgmma
constexpr int CONSUMER_WARPS = cfg::CONSUMERS * GROUP_WARPS;
constexpr int CHUNK = cfg::CHUNK;  // columns of a swizzled row; behind the last one of an array are zeros
constexpr int CHUNKS = (cfg::HEAD_DIM + CHUNK - 1) / CHUNK, VALUE_CHUNKS = (cfg::VALUE_DIM + CHUNK - 1) / CHUNK;
constexpr u32 ROW_BYTES = CHUNK * sizeof(Elem), EIGHT_ROWS = 8 * ROW_BYTES;
static_assert(ROW_BYTES == 128, "TMA and wgmma swizzle rows of 128 bytes");
static_assert(cfg::TILE_Q == cfg::CONSUMERS * GROUP_ROWS, "a consumer has 64 rows");
static_assert(cfg::TILE_KV <= 256, "a box of TMA has 256 rows at most");

static_assert(cfg::CODE_SLOTS == 2, "codes of a tile take the place of those two tiles before");
constexpr int CODE_BYTES = K::Expander::CODE_BYTES + V::Expander::CODE_BYTES;

struct Smem {
  alignas(1024) Elem q[cfg::CONSUMERS][CHUNKS][GROUP_ROWS * CHUNK];
  alignas(1024) Elem k[cfg::NUM_STAGES][CHUNKS][cfg::TILE_KV * CHUNK];
  alignas(1024) Elem v[cfg::NUM_STAGES][VALUE_CHUNKS][cfg::TILE_KV * CHUNK];
  u64 q_full[cfg::CONSUMERS], q_empty[cfg::CONSUMERS];
  u64 k_full[cfg::NUM_STAGES], k_empty[cfg::NUM_STAGES];
  u64 v_full[cfg::NUM_STAGES], v_empty[cfg::NUM_STAGES];
  float k_log2_scale[cfg::NUM_STAGES], v_log2_scale[cfg::NUM_STAGES];  // of tiles that are expanded
  ItemQueue queue;
  alignas(16) u8 codes[CODE_BYTES + 16];  // of K, then of V; an array of none is not C++
};
static_assert(cfg::CONSUMERS * cfg::CONSUMER_REGISTERS + cfg::PRODUCER_REGISTERS <=
                  (cfg::CONSUMERS + 1) * cfg::LAUNCH_REGISTERS,
              "a warpgroup would wait forever for registers");
static_assert(sizeof(Smem) == cfg::SMEM_BYTES, "cuattn/_plan and tiled_producer.cuh disagree on shared memory");
static_assert(sizeof(TiledPrefillParams) == cfg::PARAMS_BYTES, "cuattn/_params.py and params.cuh disagree");

constexpr bool EXPANDS = K::EXPANDED || V::EXPANDED;
// Tiles of K and V are published together. With one stage they would wait for each other: the place of values is free
// once those before are added, which consumers do after they have begun scores of the keys.
constexpr bool TOGETHER = K::EXPANDED && V::EXPANDED && cfg::NUM_STAGES > 1;
constexpr int PRODUCER_WARPS = EXPANDS ? GROUP_WARPS : 2;

// The place in a ring of tiles, and the parity of its phase.
struct Ring {
  int stage = 0;
  u32 phase = 0;

  __device__ __forceinline__ void advance() {
    const bool wraps = stage == cfg::NUM_STAGES - 1;
    stage = wraps ? 0 : stage + 1;
    phase ^= wraps ? 1 : 0;
  }
};

// ---- the producer ------------------------------------------------------------------------------------------------

template <int ROWS, int NUM_CHUNKS>
__device__ __forceinline__ void load_tile(Elem (&tile)[NUM_CHUNKS][ROWS * CHUNK], const TensorMap& map, u64* full,
                                          int head, int token, int page) {
  ptx::mbarrier_arrive_expect_tx(full, sizeof(tile));
#pragma unroll
  for (int c = 0; c < NUM_CHUNKS; ++c) ptx::tma_load_4d(tile[c], &map, full, c * CHUNK, head, token, page);
}

// This warp has written a tile.
__device__ __forceinline__ void publish(u64* full) {
  ptx::fence_proxy_async();
  __syncwarp();
  if (threadIdx.x % WARP == 0) ptx::mbarrier_arrive(full);
}

// Q of an item; items without keys have none.
__device__ __forceinline__ void load_queries(const TiledPrefillParams& p, Smem& sm, const QueuePlace& place,
                                             const Item& w) {
#pragma unroll 1
  for (int group = 0; group < cfg::CONSUMERS; ++group) {
    ptx::mbarrier_wait(&sm.q_empty[group], place.parity() ^ 1);
    const Place at = w.place_of_row(p, group * GROUP_ROWS);
    if (w.has_keys()) {
      load_tile<GROUP_ROWS>(sm.q[group], p.q_map, &sm.q_full[group], w.head, at.token, at.page);
    } else {
      ptx::mbarrier_arrive(&sm.q_full[group]);
    }
  }
}

// A warp that asks for Q alone: the one that asks for tiles shall not wait until Q of the item before is read.
__device__ __forceinline__ void produce_queries(const TiledPrefillParams& p, Smem& sm) {
#pragma unroll 1
  for (QueuePlace place;; place.advance()) {
    const Item& w = place.wait(sm.queue);
    if (!w.is_there()) break;
    if (threadIdx.x % WARP == 0) load_queries(p, sm, place, w);
    place.release(sm.queue);
  }
}

// Makes tiles in the order in which consumers need them: K of a tile, then V of the one before, or of the same where
// outputs depend on its scale. A single lane asks TMA, and where items come from takes a warp; a warpgroup expands
// codes, and then it asks for Q, too.
__device__ __forceinline__ void produce(const TiledPrefillParams& p, Smem& given) {
  Smem& sm = *reinterpret_cast<Smem*>(EXPANDS ? ptx::opaque_shared(reinterpret_cast<u8*>(&given))
                                              : reinterpret_cast<u8*>(&given));
  constexpr int BEHIND = V::EXPANDED ? 0 : 1;
  const bool asks = threadIdx.x % (EXPANDS ? GROUP_THREADS : WARP) == 0;
  const bool finds = threadIdx.x / WARP == CONSUMER_WARPS;
  Ring ring, values_ring;  // of a tile of K, and of one of V; the latter where V is a tile behind
  QueuePlace place;
  ItemSource source;
  typename K::Expander key_codes;
  typename V::Expander value_codes;
  // Codes of a tile of K and of one of V, in one of the slots.
  const auto key_slot = [&](int tile) { return sm.codes + tile % cfg::CODE_SLOTS * K::Expander::TILE_BYTES; };
  const auto value_slot = [&](int tile) {
    return sm.codes + K::Expander::CODE_BYTES + tile % cfg::CODE_SLOTS * V::Expander::TILE_BYTES;
  };
  const auto make_tiles = [&](const Item& w) {
    const int last = w.tiles.hi - 1, end = w.keys(p, cfg::TILE_Q).hi;
    const auto load_keys = [&](const Place& at, const Ring& keys) {
      if (K::EXPANDED || asks) ptx::mbarrier_wait(&sm.k_empty[keys.stage], keys.phase ^ 1);
      if constexpr (K::EXPANDED) {
        key_codes.expand(reinterpret_cast<u8*>(sm.k[keys.stage]), sm.k_log2_scale[keys.stage]);
        if (!TOGETHER) publish(&sm.k_full[keys.stage]);
      } else if (asks) {
        load_tile<cfg::TILE_KV>(sm.k[keys.stage], p.k_map, &sm.k_full[keys.stage], w.kv_head, at.token, at.page);
      }
    };
    const auto load_values = [&](const Place& at, Ring& values) {
      if (V::EXPANDED || asks) ptx::mbarrier_wait(&sm.v_empty[values.stage], values.phase ^ 1);
      if constexpr (V::EXPANDED) {
        value_codes.expand(reinterpret_cast<u8*>(sm.v[values.stage]), sm.v_log2_scale[values.stage]);
        publish(&sm.v_full[values.stage]);
        if (TOGETHER && threadIdx.x % WARP == 0) ptx::mbarrier_arrive(&sm.k_full[values.stage]);
      } else if (asks) {
        load_tile<cfg::TILE_KV>(sm.v[values.stage], p.v_map, &sm.v_full[values.stage], w.kv_head, at.token, at.page);
      }
      if (BEHIND == 1) values.advance();
    };
    // Codes of a tile that have landed, and its norms. Scores may have another power in each tile, which outputs better
    // have not.
    const auto take = [&](int tile) {
      ptx::cp_async_wait<1>();
      key_codes.take_codes(key_slot(tile));
      value_codes.take_codes(value_slot(tile));
      key_codes.template scale_norms<false>();
      value_codes.template scale_norms<true>();
    };
    TilePlaces places(p, w, last);
    Place before{}, at = places.at;
    key_codes.begin(w.keys_of(p));
    value_codes.begin(w.values_of(p));
    if constexpr (EXPANDS) {
      const int count = end - last * cfg::TILE_KV;  // of rows that are there: only the last tile has others
      key_codes.template fetch_codes<false>(key_slot(last), at, count);
      value_codes.template fetch_codes<false>(value_slot(last), at, count);
      ptx::cp_async_commit();
      key_codes.template fetch_norms<false>(at, count);
      value_codes.template fetch_norms<false>(at, count);
      if (last > w.tiles.lo) {
        places.go_back(p);
        key_codes.template fetch_codes<true>(key_slot(last - 1), places.at);
        value_codes.template fetch_codes<true>(value_slot(last - 1), places.at);
      }
      ptx::cp_async_commit();
      take(last);
    }
#pragma unroll 1
    for (int tile = last; tile >= w.tiles.lo; --tile) {
      if (tile == w.tiles.lo && asks) source.claim(p);  // whose answer comes while this tile is made
      const bool has_next = tile > w.tiles.lo, has_second = tile - 1 > w.tiles.lo;
      Place next = places.at;
      if constexpr (EXPANDS) {
        // Norms are a tile ahead, and codes two: nothing waits for what was asked for just before.
        if (has_next) {
          key_codes.template fetch_norms<true>(next);
          value_codes.template fetch_norms<true>(next);
        }
        if (has_second) places.go_back(p);
      } else {
        if (has_next) places.go_back(p);
        next = places.at;
      }
      load_keys(at, ring);
      if (EXPANDS && !K::EXPANDED && asks && tile == last) load_queries(p, sm, place, w);
      if constexpr (EXPANDS) {
        if (has_second) {
          key_codes.template fetch_codes<true>(key_slot(tile), places.at);
          value_codes.template fetch_codes<true>(value_slot(tile), places.at);
        }
        ptx::cp_async_commit();
      }
      if (BEHIND == 0) load_values(at, ring);
      if (BEHIND == 1 && tile < last) load_values(before, values_ring);
      if constexpr (EXPANDS) {
        if (has_next) take(tile - 1);
      }
      before = at;
      at = next;
      ring.advance();
    }
    if (BEHIND == 1) load_values(before, values_ring);
  };
#pragma unroll 1
  for (;; place.advance()) {
    if (finds) {
      Item w;
      source.find(p, w);
      if (asks) place.put(sm.queue, p, w);
      __syncwarp();  // before others wait for it in a loop
    }
    const Item& w = place.wait(sm.queue);
    if (!w.is_there()) break;
    if (w.has_keys()) {
      if (EXPANDS || asks) make_tiles(w);
    } else if (asks) {
      source.claim(p);
      if (EXPANDS && !K::EXPANDED) load_queries(p, sm, place, w);
    }
    place.release(sm.queue);
    if (finds) source.turn();
  }
}

}  // namespace

#endif
