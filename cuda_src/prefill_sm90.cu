// prefill_sm90.cu -- FlashAttention prefill with TMA and wgmma (sm_90a): 16-bit queries; keys and values in 16 bits or
// TBQ4, dense, padded, ragged, and in pages.
// SPDX-License-Identifier: Apache-2.0
//
//   grid   as many CTAs as the plan asks for, one an SM; each works on items in the order of find_item
//   block  CONSUMERS warpgroups that attend, and one of which a warp finds items, which all have by a queue, and asks
//          TMA for tiles, another for queries; or all of its warps expand codes
//   item   TILE_Q query tokens of one head, 64 for each consumer, against all keys that they see, the last first
//
// Tiles lie in shared memory as TMA writes them: chunks of 64 columns, rows of 128 bytes, swizzled. Mbarriers say of
// each tile of K and of V that it is there, and that all consumers have read the one whose place it takes. Scores of a
// tile are begun before the values of the tile before are added, so that exponentials of a warpgroup stand beside its
// own products; and warpgroups take turns in beginning products, so that they stand beside those of the others.
// Formats of K and V are policies, each by itself (kv/tiles_sm90.cuh).
#include "common/softmax.cuh"
#include "common/tiled_producer.cuh"

namespace {

constexpr int STEP = 16;                                                     // the K of wgmma
constexpr int KEY_TILES = cfg::TILE_KV / 8, DIM_TILES = cfg::VALUE_DIM / 8;  // of 8 columns of an accumulator
static_assert(cfg::TILE_KV % STEP == 0, "keys are the K of P V");
static_assert(cfg::HEAD_DIM % STEP == 0, "columns are the K of Q K^T");
static_assert(DIM_TILES % 4 == 0, "four lanes store four tiles at a time");

// Named barriers; 0 is __syncthreads. Each has one for every consumer.
enum {
  FIRST_TURN = 1,
  FIRST_CLEARED = FIRST_TURN + cfg::CONSUMERS,
  FIRST_QUERIES = FIRST_CLEARED + cfg::CONSUMERS,
};

using Scores = float[KEY_TILES * 4];
using Outputs = float[DIM_TILES * 4];
using Weights = u32[cfg::TILE_KV / STEP][4];  // the A of wgmma
using State = softmax::RowState<1>;
using Factors = softmax::RowFactors<1, K::EXPANDED>;

__device__ __forceinline__ Ring ring_of(int count) {
  return {static_cast<int>(static_cast<u32>(count) % cfg::NUM_STAGES), static_cast<u32>(count) / cfg::NUM_STAGES % 2};
}

// ---- a consumer --------------------------------------------------------------------------------------------------

// Which rows of the CTA's tile a lane has.
struct Lane {
  int group, lane, g, t;
  int row0;  // first row of its warp

  __device__ __forceinline__ Lane() {
    const int warp = __shfl_sync(FULL_MASK, static_cast<int>(threadIdx.x) / WARP, 0);  // uniform for the compiler, too
    group = warp / GROUP_WARPS;
    lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
    row0 = warp * 16;
  }
  // Row g (`r` 0) or g + 8 (1) of the warp's 16.
  __device__ __forceinline__ int row(int r) const { return row0 + g + 8 * r; }
};

// Warpgroups begin products one after the other.
struct Turns {
  static constexpr bool ON = cfg::TAKE_TURNS && cfg::CONSUMERS > 1;
  int group;

  __device__ __forceinline__ void begin() const {
    if constexpr (ON) ptx::bar_sync(FIRST_TURN + group, 2 * GROUP_THREADS);
  }
  __device__ __forceinline__ void end() const {
    if constexpr (ON) ptx::bar_arrive(FIRST_TURN + (group + 1) % cfg::CONSUMERS, 2 * GROUP_THREADS);
  }
};

// This warp has read what `empty` guards; all its lanes have waited for it, as after a wgmma.
__device__ __forceinline__ void release(u64* empty, const Lane& at) {
  if (at.lane == 0) ptx::mbarrier_arrive(empty);
}

// Begins s = Q K^T. Descriptors count in units of 16 bytes, and the sum does not leave their field.
__device__ __forceinline__ void begin_scores(Scores& s, u64 q, u64 k) {
  constexpr u32 Q_CHUNK = GROUP_ROWS * ROW_BYTES, K_CHUNK = cfg::TILE_KV * ROW_BYTES;
#pragma unroll
  for (int step = 0; step < cfg::HEAD_DIM / STEP; ++step) {
    const int chunk = step * STEP / CHUNK, within = step * STEP % CHUNK * sizeof(Elem);
    ptx::wgmma_ss<K::Operand, cfg::TILE_KV>(s, q + (chunk * Q_CHUNK + within) / 16, k + (chunk * K_CHUNK + within) / 16,
                                            step > 0);
  }
}

// Begins o += P V.
__device__ __forceinline__ void begin_outputs(Outputs& o, const Weights& weights, u64 v) {
#pragma unroll
  for (int step = 0; step < cfg::TILE_KV / STEP; ++step) {
    ptx::wgmma_rs<V::Operand, cfg::VALUE_DIM, 1>(o, weights[step], v + step * STEP * ROW_BYTES / 16, true);
  }
}

// Zeros take the place of a tile's rows from `count` on, which are none of the sequence: of values, as weights of 0
// would make NaN of a NaN; all consumers store the same. (The swizzle stays within a row.)
template <int ROWS, int NUM_CHUNKS>
__device__ __forceinline__ void clear_rows(Elem (&tile)[NUM_CHUNKS][ROWS * CHUNK], int count, const Lane& at) {
  constexpr int VECTORS = ROW_BYTES / 16;  // of a row of a chunk
#pragma unroll 1
  for (int i = max(0, count) * VECTORS + static_cast<int>(threadIdx.x) % GROUP_THREADS; i < ROWS * VECTORS;
       i += GROUP_THREADS) {
#pragma unroll
    for (int c = 0; c < NUM_CHUNKS; ++c) reinterpret_cast<uint4*>(tile[c])[i] = make_uint4(0, 0, 0, 0);
  }
  ptx::fence_proxy_async();
  ptx::bar_sync(FIRST_CLEARED + at.group, GROUP_THREADS);  // the zeros are there
}

// Scores of keys that a row does not see. The two ends of a window are apart, as tiles hardly ever have both.
__device__ __forceinline__ void hide(Scores& s, const TiledPrefillParams& p, const Item& w, const KeyRange& full,
                                     int tile, const Lane& at) {
  const int key0 = tile * cfg::TILE_KV + 2 * at.t;  // of this lane
  if (tile >= full.hi) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int hi = w.keys(p, at.row(r)).hi - key0;
#pragma unroll
      for (int n = 0; n < KEY_TILES; ++n) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          if (n * 8 + j >= hi) s[4 * n + 2 * r + j] = neg_inf();
        }
      }
    }
  }
  if (tile < full.lo) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int lo = w.keys(p, at.row(r)).lo - key0;
#pragma unroll
      for (int n = 0; n < KEY_TILES; ++n) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          if (n * 8 + j < lo) s[4 * n + 2 * r + j] = neg_inf();
        }
      }
    }
  }
}

// Raw products as they are before the factor.
__device__ __forceinline__ void cap(Scores& s, const TiledPrefillParams& p) {
  if constexpr (cfg::SOFTCAP) {
#pragma unroll
    for (int i = 0; i < KEY_TILES * 4; ++i) s[i] = softmax::softcap(s[i] * p.scale_over_softcap, p.softcap_log2);
  }
}

using Tile = float[1][KEY_TILES][4];

// Turns scores into weights; by[r] is what the outputs so far are to be multiplied by if the result is true.
__device__ __forceinline__ bool weigh(Scores& s, State& state, const Factors& factors, float (&by)[2]) {
  Tile& x = reinterpret_cast<Tile&>(s);
  const bool grew = state.follow(x, factors, [&](int, int r, float factor) { by[r] = factor; });
#pragma unroll
  for (int n = 0; n < KEY_TILES; ++n) state.weigh(x[0][n], factors, 0);
  return grew;
}

// Columns of weights stand in an accumulator as in the A of a product.
__device__ __forceinline__ void pack(Weights& weights, int n, const float (&w)[4]) {
  weights[n / 2][n % 2 * 2] = ptx::pack2<V::Operand>(w[0], w[1]);
  weights[n / 2][n % 2 * 2 + 1] = ptx::pack2<V::Operand>(w[2], w[3]);
}
__device__ __forceinline__ void pack(Weights& weights, const Scores& s) {
#pragma unroll
  for (int n = 0; n < KEY_TILES; ++n) pack(weights, n, reinterpret_cast<const Tile&>(s)[0][n]);
}

// Both, where no product reads `weights` any more.
__device__ __forceinline__ bool absorb(Weights& weights, const Scores& s, State& state, const Factors& factors,
                                       bool first, float (&by)[2]) {
  return state.absorb(
      reinterpret_cast<const Tile&>(s), factors, first, [&](int, int n, const float (&w)[4]) { pack(weights, n, w); },
      [&](int, int r, float factor) { by[r] = factor; });
}

__device__ __forceinline__ void scale(Outputs& o, const float (&by)[2]) {
#pragma unroll
  for (int i = 0; i < DIM_TILES * 4; ++i) o[i] *= by[i / 2 % 2];
}

// Adds the head's sink to (m, l), and returns what normalizes outputs.
__device__ __forceinline__ float finish(const TiledPrefillParams& p, const Item& w, float& m, float& l) {
  if (p.sinks == nullptr) return softmax::inverse_sum(l);
  const float keys_m = m;
  softmax::add_sink(__ldg(p.sinks + w.head), m, l);
  return softmax::inverse_sum(l) * softmax::weight(keys_m, m);
}

// Normalizes and stores the warp's rows, which are accumulators times `unit`. Four lanes have four times four bytes of
// a row each: after an exchange each of them has sixteen successive ones.
__device__ __forceinline__ void store(const Outputs& o, float unit, const State& state, const TiledPrefillParams& p,
                                      const Item& w, const Lane& at) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = at.row(r);
    const bool is_there = row < w.num_tokens;
    float m = state.maximum(0, r), l = state.l[0][r];
    const float by = finish(p, w, m, l) * unit;
    if (at.t == 0 && is_there && p.lse != nullptr) p.lse[w.flat(p, row)] = softmax::lse(m, l);
    u8* out = w.out(p, row) + at.t * 16;
#pragma unroll
    for (int d = 0; d < DIM_TILES; d += 4) {
      u32 x[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        x[i] = ptx::pack2<Elem>(o[4 * (d + i) + 2 * r] * by, o[4 * (d + i) + 2 * r + 1] * by);
      }
#pragma unroll
      for (int bit = 1; bit < 4; bit *= 2) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if ((i & bit) != 0) continue;
          const bool upper = (at.t & bit) != 0;
          const u32 other = __shfl_xor_sync(FULL_MASK, upper ? x[i] : x[i | bit], bit);
          if (upper) {
            x[i] = other;
          } else {
            x[i | bit] = other;
          }
        }
      }
      if (is_there) *reinterpret_cast<uint4*>(out + d * 16) = make_uint4(x[0], x[1], x[2], x[3]);
    }
  }
}

// ---- values that are not finite ----------------------------------------------------------------------------------
// One that is hidden from some rows of a tile reaches them as 0 * NaN. It shows in the result; then the values that not
// all rows of the warp see are looked at, and if it is there, the warp attends anew by ordinary sums. Rare.

__device__ __forceinline__ bool is_bad(const Outputs& o) {
  float sum = 0.f;  // x * 0 is NaN if x is no number
#pragma unroll
  for (int i = 0; i < DIM_TILES * 4; ++i) sum += o[i] * 0.f;
  return __any_sync(FULL_MASK, sum != 0.f);
}

__device__ __forceinline__ bool has_bad_values(const TiledPrefillParams& p, const Item& w, const Lane& at) {
  const int begin = w.tiles.lo * cfg::TILE_KV, end = min(w.tiles.hi * cfg::TILE_KV, w.kv_len);
  const KeyRange seen{w.keys(p, at.row0 + 15).lo, w.keys(p, at.row0).hi};  // by all rows
  bool bad = false;
#pragma unroll 1
  for (int key = begin; key < end; ++key) {
    if (seen.lo <= key && key < seen.hi) key = seen.hi;
    if (key >= end) break;
    bad |= V::is_bad(w.values_of(p).at(w.place_of_key(p, key)), at.lane);
  }
  return __any_sync(FULL_MASK, bad);
}

__device__ __forceinline__ void attend_plainly(const TiledPrefillParams& p, const Item& w, const Lane& at) {
  using Row = LaneRow<cfg::HEAD_DIM>;
  using ValueRow = LaneRow<cfg::VALUE_DIM>;
#pragma unroll 1
  for (int row = at.row0; row < min(at.row0 + 16, w.num_tokens); ++row) {
    Row q;
    ValueRow o{};
    SwizzledRaw16<Elem, cfg::HEAD_DIM>::load_row(q, {w.query(p, row), nullptr}, at.lane);
    float m = neg_inf(), l = 0.f;
    const KeyRange keys = w.keys(p, row);
#pragma unroll 1
    for (int key = keys.lo; key < keys.hi; ++key) {
      Row k;
      ValueRow v;
      K::load_row(k, w.keys_of(p).at(w.place_of_key(p, key)), at.lane);
      float sum = 0.f;
#pragma unroll
      for (int i = 0; i < Row::VECTORS; ++i) {
        sum += q.x[i].x * k.x[i].x + q.x[i].y * k.x[i].y + q.x[i].z * k.x[i].z + q.x[i].w * k.x[i].w;
      }
#pragma unroll
      for (int bit = 1; bit < WARP; bit *= 2) sum += __shfl_xor_sync(FULL_MASK, sum, bit);
      const float x =
          cfg::SOFTCAP ? softmax::softcap(sum * p.scale_over_softcap, p.softcap_log2) : sum * p.softmax_scale_log2;
      const float m_new = fmaxf(m, x);
      const float by = softmax::weight(m, m_new), weight = softmax::weight(x, m_new);
      m = m_new;
      l = l * by + weight;
      V::load_row(v, w.values_of(p).at(w.place_of_key(p, key)), at.lane);
#pragma unroll
      for (int i = 0; i < ValueRow::VECTORS; ++i) {
        o.x[i].x = o.x[i].x * by + weight * v.x[i].x, o.x[i].y = o.x[i].y * by + weight * v.x[i].y;
        o.x[i].z = o.x[i].z * by + weight * v.x[i].z, o.x[i].w = o.x[i].w * by + weight * v.x[i].w;
      }
    }
    const float by = finish(p, w, m, l);
    if (at.lane == 0 && p.lse != nullptr) p.lse[w.flat(p, row)] = softmax::lse(m, l);
#pragma unroll
    for (int i = 0; i < ValueRow::VECTORS; ++i) {
      const int dim = ValueRow::dim(i, at.lane);
      if (dim >= cfg::VALUE_DIM) continue;
      store4(reinterpret_cast<Elem*>(w.out(p, row)) + dim,
             make_float4(o.x[i].x * by, o.x[i].y * by, o.x[i].z * by, o.x[i].w * by));
    }
  }
}

// ---- the loop of a consumer --------------------------------------------------------------------------------------

// Q of a warpgroup, rotated as K is; scale[r] makes scores of raw products of this lane's rows.
__device__ __forceinline__ void rotate_queries(const TiledPrefillParams& p, const Item& w, Smem& sm, const Lane& at,
                                               float (&scale)[2]) {
  ptx::bar_sync(FIRST_QUERIES + at.group, GROUP_THREADS);  // all have read Q of the item before
  u8* tile = reinterpret_cast<u8*>(sm.q[at.group]);
  K::template store_queries<GROUP_ROWS>(tile, at.row0 % GROUP_ROWS, at.lane, scale, [&](int r) -> const u8* {
    const int row = at.row(r);
    return row < w.num_tokens ? w.query(p, row) : nullptr;
  });
  ptx::fence_proxy_async();
  ptx::bar_sync(FIRST_QUERIES + at.group, GROUP_THREADS);  // Q is there
#pragma unroll
  for (int r = 0; r < 2; ++r) scale[r] *= p.softmax_scale_log2;
}

__device__ __forceinline__ void consume(const TiledPrefillParams& p, Smem& sm) {
  const Lane at;
  const Turns turns{at.group};
  const u64 q = ptx::smem_desc<128>(sm.q[at.group][0], 16, EIGHT_ROWS);
  const auto keys_at = [&](int stage) { return ptx::smem_desc<128>(sm.k[stage][0], 16, EIGHT_ROWS); };
  const auto values_at = [&](int stage) {
    return ptx::smem_desc<128>(sm.v[stage][0], cfg::TILE_KV * ROW_BYTES, EIGHT_ROWS);
  };
  Factors factors{};
  factors.fill([&](int, int) { return cfg::SOFTCAP ? 1.f : p.softmax_scale_log2; });
  int count = 0;  // of tiles so far
  QueuePlace place;
  if (at.group == cfg::CONSUMERS - 1) turns.end();  // the first one begins

  // Items stay in shared memory, which leaves registers to the loop over tiles.
  const auto attend = [&](const ItemQueue::Queued& w) {
    const KeyRange own = uniform(w.own[at.group]);
    const KeyRange& full = w.full[at.group];
    State state;
    float q_scale[2] = {};   // of Q where it is rotated
    float log2_scale = 0.f;  // outputs are accumulators times 2 to this power
    // What scores of a tile are over its raw products; not zero, which would make a hidden score of -inf NaN.
    const auto scale_scores = [&](int stage) {
      constexpr float SMALLEST = 1.17549435e-38f;  // normal
      if constexpr (K::EXPANDED) {
        const float scale = ptx::exp2(sm.k_log2_scale[stage]);
        factors.fill([&](int, int r) { return fmaxf(q_scale[r] * scale, SMALLEST); });
      }
    };
    if constexpr (K::EXPANDED) {
      if (w.has_keys()) rotate_queries(p, w, sm, at, q_scale);  // before accumulators take registers
    }
    Outputs o;
    // Accumulators have the scale of the tile of V that is added next. (If weights had it rather, a row that sees small
    // values only would lose them behind a tile in which others see large ones.)
    const auto scale_outputs = [&](const Ring& tile) {
      if constexpr (V::EXPANDED) {
        ptx::mbarrier_wait(&sm.v_full[tile.stage], tile.phase);
        const float now = sm.v_log2_scale[tile.stage];
        if (now == log2_scale) return;
        const float factor = ptx::exp2(log2_scale - now);
        scale(o, {factor, factor});
        log2_scale = now;
      }
    };
#pragma unroll
    for (int i = 0; i < DIM_TILES * 4; ++i) o[i] = 0.f;
    const int last = count + uniform(w.tiles.hi) - 1;  // tile `t` is number last - t of all
    // Tiles that only rows of other warpgroups see. Each is waited for, as arrivals for two phases could meet in one.
    const auto leave_out = [&](int first, int end) {
#pragma unroll 1
      for (int tile = end - 1; tile >= first; --tile) {
        const Ring unseen = ring_of(last - tile);
        turns.begin();
        turns.end();
        ptx::mbarrier_wait(&sm.k_full[unseen.stage], unseen.phase);
        __syncwarp();
        release(&sm.k_empty[unseen.stage], at);
        ptx::mbarrier_wait(&sm.v_full[unseen.stage], unseen.phase);
        __syncwarp();
        release(&sm.v_empty[unseen.stage], at);
      }
    };
    leave_out(own.hi, uniform(w.tiles.hi));
    if (!K::EXPANDED) {
      ptx::mbarrier_wait(&sm.q_full[at.group], place.parity());
      __syncwarp();
      if (own.lo == own.hi) release(&sm.q_empty[at.group], at);
    }
    if (own.lo < own.hi) {
      Scores s;
      Weights weights;
      float by[2];
      int tile = own.hi - 1;
      const Ring first = ring_of(last - tile);

      // A sequence shall not depend on the next: maxima of a warp's rows are taken together.
      if (!K::EXPANDED && p.cu_seqlens_q != nullptr && w.num_tokens < (at.group + 1) * GROUP_ROWS) {
        clear_rows<GROUP_ROWS>(sm.q[at.group], w.num_tokens - at.group * GROUP_ROWS, at);
      }
      turns.begin();
      ptx::mbarrier_wait(&sm.k_full[first.stage], first.phase);
      ptx::wgmma_fence();
      begin_scores(s, q, keys_at(first.stage));
      ptx::wgmma_commit();
      turns.end();
      ptx::wgmma_wait<0>();
      ptx::read_behind(s);
      scale_scores(first.stage);
      release(&sm.k_empty[first.stage], at);
      if (!K::EXPANDED && tile == own.lo) release(&sm.q_empty[at.group], at);
      cap(s, p);
      if (tile < full.lo || tile >= full.hi) hide(s, p, w, full, tile, at);
      absorb(weights, s, state, factors, true, by);
      scale_outputs(first);
      // TMA itself puts zeros behind the end of an array.
      if (!V::EXPANDED && w.k0 + w.kv_len < p.capacity && w.kv_len < own.hi * cfg::TILE_KV) {
        ptx::mbarrier_wait(&sm.v_full[first.stage], first.phase);
        clear_rows<cfg::TILE_KV>(sm.v[first.stage], w.kv_len - tile * cfg::TILE_KV, at);
      }

      const auto step = [&](auto masked) {
        const Ring values = ring_of(last - tile);
        --tile;
        const Ring keys = ring_of(last - tile);
        turns.begin();
        ptx::mbarrier_wait(&sm.k_full[keys.stage], keys.phase);
        ptx::wgmma_fence();
        begin_scores(s, q, keys_at(keys.stage));
        ptx::wgmma_commit();
        if (!V::EXPANDED) ptx::mbarrier_wait(&sm.v_full[values.stage], values.phase);
        ptx::wgmma_fence();
        begin_outputs(o, weights, values_at(values.stage));
        ptx::wgmma_commit();
        turns.end();
        ptx::wgmma_wait<1>();
        ptx::read_behind(s);
        scale_scores(keys.stage);
        release(&sm.k_empty[keys.stage], at);
        if (!K::EXPANDED && tile == own.lo) release(&sm.q_empty[at.group], at);
        cap(s, p);
        if constexpr (decltype(masked)::value) hide(s, p, w, full, tile, at);
        if constexpr (cfg::WEIGH_FIRST) {
          const bool grew = weigh(s, state, factors, by);
          ptx::wgmma_wait_behind<0>(state.l[0][0], state.l[0][1]);
          ptx::read_behind(o);
          release(&sm.v_empty[values.stage], at);
          scale_outputs(keys);
          if (grew) scale(o, by);
          pack(weights, s);
        } else {
          ptx::wgmma_wait<0>();
          ptx::read_behind(o);
          release(&sm.v_empty[values.stage], at);
          scale_outputs(keys);
          if (absorb(weights, s, state, factors, false, by)) scale(o, by);
        }
      };
      // Tiles whose keys all rows see are neighbors.
#pragma unroll 1
      while (tile > own.lo) {
        if (tile <= full.lo || tile > full.hi) {
          step(Flag<true>{});
        } else {
          const int end = uniform(full.lo);
#pragma unroll 1
          do step(Flag<false>{});
          while (tile > end);
        }
      }

      const Ring values = ring_of(last - tile);
      if (!V::EXPANDED) ptx::mbarrier_wait(&sm.v_full[values.stage], values.phase);
      ptx::wgmma_fence();
      begin_outputs(o, weights, values_at(values.stage));
      ptx::wgmma_commit();
      ptx::wgmma_wait<0>();
      ptx::read_behind(o);
      release(&sm.v_empty[values.stage], at);
    }
    leave_out(uniform(w.tiles.lo), own.lo);
    count = last - uniform(w.tiles.lo) + 1;
    state.reduce();
    if (is_bad(o) && has_bad_values(p, w, at)) {
      attend_plainly(p, w, at);
    } else {
      if constexpr (V::EXPANDED) V::restore(o, at.t);
      store(o, V::EXPANDED ? ptx::exp2(log2_scale) : 1.f, state, p, w, at);
    }
  };
#pragma unroll 1
  for (;; place.advance()) {
    const ItemQueue::Queued& w = place.wait(sm.queue);
    if (!w.is_there()) break;
    attend(w);
    place.release(sm.queue);
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__((cfg::CONSUMERS + 1) * 128, 1)
    prefill_sm90_kernel(const __grid_constant__ TiledPrefillParams p) {
  Smem& sm = *reinterpret_cast<Smem*>(ptx::dynamic_smem());
  if (threadIdx.x == 0) {
    sm.queue.init(CONSUMER_WARPS + PRODUCER_WARPS);
#pragma unroll
    for (int i = 0; i < cfg::CONSUMERS; ++i) {
      ptx::mbarrier_init(&sm.q_full[i], 1);
      ptx::mbarrier_init(&sm.q_empty[i], GROUP_WARPS);
    }
#pragma unroll
    for (int i = 0; i < cfg::NUM_STAGES; ++i) {
      ptx::mbarrier_init(&sm.k_full[i], K::EXPANDED ? GROUP_WARPS : 1);
      ptx::mbarrier_init(&sm.v_full[i], V::EXPANDED ? GROUP_WARPS : 1);
      ptx::mbarrier_init(&sm.k_empty[i], CONSUMER_WARPS);
      ptx::mbarrier_init(&sm.v_empty[i], CONSUMER_WARPS);
    }
    ptx::fence_mbarrier_init();
  }
  __syncthreads();  // the barriers are there
  ptx::griddepcontrol_wait();
  ptx::griddepcontrol_launch_dependents();
  if (threadIdx.x < cfg::CONSUMERS * GROUP_THREADS) {
    ptx::setmaxnreg_inc<cfg::CONSUMER_REGISTERS>();
    consume(p, sm);
  } else {
    ptx::setmaxnreg_dec<cfg::PRODUCER_REGISTERS>();
    const int warp = static_cast<int>(threadIdx.x) / WARP - CONSUMER_WARPS;
    if (EXPANDS || warp == 0) {
      produce(p, sm);
    } else if (warp < PRODUCER_WARPS) {
      produce_queries(p, sm);
    }
  }
}
