// prefill_mma.cu -- FlashAttention prefill with mma.sync: any number of query tokens, dense, ragged or paged keys.
// SPDX-License-Identifier: Apache-2.0
//
//   grid   a CTA for every tile of query rows of a KV head, in the order of find_work, and split of its keys
//   block  NUM_WARPS * 32
//   CTA    TILE_Q query rows of one KV head, row = token * group + head of the group: one K/V tile serves all its heads
//   warp   whole tiles of 16 rows and their online softmax; with DIM_SPLITS > 1 that many warps have the same rows, and
//          each a part of value_dim
//
// Query rows are the M of an mma, keys its N; S, P and O stay in registers. Tiles of K and of V are there for all warps
// together; an mbarrier for each says that a tile is there and that the one whose place the next takes has been read.
// Formats of K and V are policies, each by itself (kv/tiles.cuh), and so are the products of 16-bit elements and of
// floats (common/products16.cuh, common/products32.cuh).
#include "common/elements.cuh"
#include "common/prefill_cta.cuh"
#include "common/prefill_epilogue.cuh"
#include "common/ptx.cuh"
#include "common/softmax.cuh"
#include "common/tile_loader.cuh"

namespace {

template <int N, class F>
__device__ __forceinline__ void for_all(ScoresOf<N>& s, F f) {
#pragma unroll
  for (int r = 0; r < ROW_TILES; ++r) {
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) f(s[r][n][e], r, n, e);
    }
  }
}

// s = Q K^T of this warp's rows and N * 8 keys of tile i, from row `first` on, a multiple of 8 N.
template <int N, class Beside>
__device__ __forceinline__ void multiply_k(ScoresOf<N>& s, const u8* q, typename K::Buffers& keys, int i, int first,
                                           const Lane& at, Beside beside) {
  Products::template multiply_k<N>(s, q, at.q, keys.tile(i) + first * K::Tile::ROW_BYTES, at.k, beside);
}

// Q to shared memory, rotated where K is.
__device__ __forceinline__ void load_queries(const PrefillParams& p, const Work& w, Smem& sm) {
  const float* mean = p.k_mean == nullptr ? nullptr : p.k_mean + w.kv_head * cfg::HEAD_DIM;
  K::store_queries(sm.q, sm.q_scale, sm.q_bias, mean, cfg::TILE_Q,
                   [&](int row) -> const u8* { return row < w.num_rows ? w.query(p, row) : nullptr; });
}

// Tiles that are expanded before their use.
template <class Kv>
constexpr int AHEAD_OF = Kv::EXPAND_STEPS > 0 ? 1 : 0;
constexpr int AHEAD = AHEAD_OF<K> + AHEAD_OF<V> > 0 ? 1 : 0;

// This warp has read its tile, and made its part of the next.
__device__ __forceinline__ void end_turn(u64* turn, const Lane& at) {
  __syncwarp();
  if (at.lane == 0) ptx::mbarrier_arrive(turn);
}

// The share of step `step` of `steps` in an expansion of K or V: what is made beside one step of a product is stored
// beside a later one, so that the compiler may spread the arithmetic among the products between the two.
template <class Kv>
__device__ __forceinline__ void expand_part(typename Kv::Expansion& expansion, int step, int steps) {
  const auto begin = [steps](int s) { return (s * Kv::EXPAND_STEPS + steps - 1) / steps; };
#pragma unroll
  for (int e = begin(step); e < begin(step + 1); ++e) {
    if (e > 0) expansion.put(e - 1);
    expansion.make(e);
  }
  if (Kv::EXPAND_STEPS > 0 && step == steps - 1) expansion.put(Kv::EXPAND_STEPS - 1);
}

// K and V on their way to shared memory.
struct Pipeline {
  const PrefillParams& p;
  const Work& w;
  // In registers where there are some, while all else of the work stays in shared memory.
  typename Either<AHEAD == 0, const KeyTiles, const KeyTiles&>::type keys;
  Smem& sm;

  // The first key of tile i.
  __device__ __forceinline__ int key(int i) const { return keys.begin + i * cfg::TILE_KV; }
  __device__ __forceinline__ bool has(int i) const { return key(i) < keys.hi; }
  __device__ __forceinline__ bool has_mask(int i) const { return i < w.full.lo || i >= w.full.hi; }

  // Tile i of K, or what it is expanded from; nothing past the last.
  __device__ __forceinline__ void copy_keys(int i) const {
    if (!has(i)) return;
    TileLoader<typename K::Source>::load(sm.k.incoming(i), {keys.k, p.k_stride_page, p.k_stride_token}, w.pages(p),
                                         keys, key(i), p.q);
  }
  __device__ __forceinline__ void copy_values(int i) const {
    if (!has(i)) return;
    TileLoader<typename V::Source>::load(sm.v.incoming(i), {keys.v, p.v_stride_page, p.v_stride_token}, w.pages(p),
                                         keys, key(i), p.q);
  }
  // Tile i, now.
  __device__ __forceinline__ void copy_now(int i) const {
    copy_keys(i);
    copy_values(i);
    ptx::cp_async_commit();
    ptx::cp_async_wait<0>();
  }
  // Before tile i: asks for what is next, as all warps have done with K of tile i - 1 and V of tile i - 2, and arrives
  // once what tile i needs, and K of the next, are there.
  __device__ __forceinline__ void copy_ahead(int i) const {
    constexpr int BY = cfg::NUM_STAGES - 1;
    if (BY > 1) arrive();
    copy_values(i + BY - 1 + AHEAD_OF<V>);
    copy_keys(i + BY + AHEAD_OF<K>);
    if (BY == 1) arrive();
  }
  __device__ __forceinline__ void arrive() const {
    ptx::cp_async_mbarrier_arrive(&sm.values_turn);
    ptx::cp_async_mbarrier_arrive(&sm.keys_turn);
  }
  __device__ __forceinline__ void expand(int i) const {
    typename K::Expansion k(sm.k, i);
    expand_part<K>(k, 0, 1);
    typename V::Expansion v(sm.v, i);
    expand_part<V>(v, 0, 1);
  }
};

// Norms of a tile on their way, those of K by one warp and those of V by another. Warps take turns, as one that is a
// bit behind makes none wait.
struct NormPipeline {
  static constexpr int ROWS = (cfg::TILE_KV + WARP - 1) / WARP;  // of a lane
  static constexpr int NORMS = K::NORMS > V::NORMS ? K::NORMS : V::NORMS;
  static constexpr int WORDS = NORMS > 2 ? NORMS / 2 : 1;
  static_assert(cfg::NUM_WARPS >= 2, "a warp for K and one for V");
  u32 words[ROWS][WORDS];

  static __device__ __forceinline__ bool has_keys(int i) {
    return K::NORMS > 0 && threadIdx.x / WARP == in_ring<cfg::NUM_WARPS>(i);
  }
  static __device__ __forceinline__ bool has_values(int i) {
    return V::NORMS > 0 && threadIdx.x / WARP == in_ring<cfg::NUM_WARPS>(i + cfg::NUM_WARPS / 2);
  }

  // Those of rows that no query sees are zero.
  __device__ __forceinline__ void fetch(const Pipeline& s, int i, const Lane& at) {
    if (!has_keys(i) && !has_values(i)) return;
    const PrefillParams& p = s.p;
    RowPlane plane{s.keys.k_norms, p.k_norms_stride_page, p.k_norms_stride_token};
    if (!has_keys(i)) plane = {s.keys.v_norms, p.v_norms_stride_page, p.v_norms_stride_token};
    const PagedRows pages = s.w.pages(p);
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      const int row = r * WARP + at.lane, key = s.key(i) + row;
#pragma unroll
      for (int n = 0; n < WORDS; ++n) words[r][n] = 0;
      if (row >= cfg::TILE_KV || key < s.keys.lo || key >= s.keys.hi) continue;
      const u8* norms = plane.base + plane.offset_of(pages, key);
      if constexpr (NORMS == 1) {
        words[r][0] = ptx::ld_global_u16(norms);
      } else {
#pragma unroll
        for (int n = 0; n < WORDS; ++n) words[r][n] = __ldg(reinterpret_cast<const u32*>(norms) + n);
      }
    }
  }
  __device__ __forceinline__ void store(Smem& sm, int i, const Lane& at) const {
    if (has_keys(i)) sm.k.store_norms(i, words, at.lane);
    if (has_values(i)) sm.v.store_norms(i, words, at.lane);
  }
};

// What the elements of tile i are multiplied by.
template <class Kv>
__device__ __forceinline__ float scale_of(const typename Kv::Buffers& b, int i) {
  return Kv::NORMS > 0 ? ptx::exp2(b.log2_scale(i)) : 1.f;
}

// Scores over raw products of tile i, in log2 units, or 1 where `transform` has made them scores; not zero, which would
// make a hidden score of -inf NaN.
template <bool SOFTCAP>
__device__ __forceinline__ Factors factors_of(const PrefillParams& p, const Smem& sm, int i, const Lane& at) {
  constexpr float SMALLEST = 1.17549435e-38f;  // normal
  Factors f{};
  const float scale = fabsf(p.softmax_scale_log2) * scale_of<K>(sm.k, i);
  f.fill([&](int r, int c) {
    const float of_row = K::IN_ROTATED_DOMAIN ? sm.q_scale[at.row(r, c)] : 1.f;
    return SOFTCAP && p.softcap_log2 != 0.f ? 1.f : fmaxf(scale * of_row, SMALLEST);
  });
  return f;
}

// Raw products of tile i as they are before the factor: softcap, and a scale that is negative or zero.
template <int N>
__device__ __forceinline__ void transform(ScoresOf<N>& s, const PrefillParams& p, const Smem& sm, int i,
                                          const Lane& at) {
  if (p.softcap_log2 != 0.f) {
    const float scale = scale_of<K>(sm.k, i);
    for_all<N>(s, [&](float& x, int r, int, int e) {
      const int row = at.row(r, e / 2);
      const float raw = K::IN_ROTATED_DOMAIN ? fmaf(x, sm.q_scale[row] * scale, sm.q_bias[row]) : x;
      x = softmax::softcap(raw * p.scale_over_softcap, p.softcap_log2);
    });
  } else if (p.softmax_scale_log2 <= 0.f) {
    const float sign = p.softmax_scale_log2 < 0.f ? -1.f : 0.f;
    for_all<N>(s, [sign](float& x, int, int, int) { x *= sign; });
  }
}

// Scores of keys that a row does not see; the first of all is key0.
template <int N>
__device__ __forceinline__ void hide(ScoresOf<N>& s, const PrefillParams& p, const Work& w, int key0, const Lane& at) {
#pragma unroll
  for (int r = 0; r < ROW_TILES; ++r) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const KeyRange keys = w.keys(p, at.row(r, c));
      const int lo = keys.lo - key0 - 2 * at.t, hi = keys.hi - key0 - 2 * at.t;
#pragma unroll
      for (int n = 0; n < N; ++n) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          if (n * 8 + j < lo || n * 8 + j >= hi) s[r][n][2 * c + j] = neg_inf();
        }
      }
    }
  }
}

// o += weight(r, c) times row `row` of a tile of V, which is key `key`: for the rows of Q that see it.
template <class Weight>
__device__ __forceinline__ void add_row(Outputs& o, const PrefillParams& p, const Work& w, const u8* tile, int row,
                                        int key, const Lane& at, Weight weight) {
#pragma unroll
  for (int r = 0; r < ROW_TILES; ++r) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const float x = weight(r, c);  // in all lanes
      const KeyRange keys = w.keys(p, at.row(r, c));
      if (key < keys.lo || key >= keys.hi) continue;
#pragma unroll
      for (int d = 0; d < DIM_TILES; ++d) {
        const float2 v = V::pair(tile, row, at.dim_part * DIMS + d * 8 + 2 * at.t);
        o[r][d][2 * c] += x * v.x;
        o[r][d][2 * c + 1] += x * v.y;
      }
    }
  }
}

// A value that is infinite or NaN and hidden from some rows of a tile would reach them as 0 * NaN. In tiles with a mask
// zeros take the place of rows of V with such values; add_bad_rows adds them later to the rows of Q that see them.
template <class V>
__device__ __forceinline__ void clear_bad_rows(Smem& sm, int i, const Lane& at) {
  constexpr int ROWS = cfg::TILE_KV / cfg::NUM_WARPS;  // of a warp
  static_assert(cfg::TILE_KV % cfg::NUM_WARPS == 0, "warps have whole rows");
  u8* tile = sm.v.tile(i);
  const int first = static_cast<int>(threadIdx.x) / WARP * ROWS;
  if (!V::all_finite(tile, first, ROWS, at.lane)) {
#pragma unroll 1
    for (int row = first; row < first + ROWS; ++row) {
      if (V::all_finite(tile, row, 1, at.lane)) continue;
      V::clear(tile, row, at.lane);
      sm.hidden_bad = 1;
    }
  }
  __syncthreads();  // the zeros are there
}

// Goes through the tiles with a mask once more, 16 keys at a time: accumulators leave few registers. Rare.
template <class V>
__device__ __forceinline__ void add_bad_rows(const Pipeline& pipeline, Outputs& o, const State& state, const Lane& at) {
  const PrefillParams& p = pipeline.p;
  const Work& w = pipeline.w;
  Smem& sm = pipeline.sm;
#pragma unroll 1
  for (int i = 0; pipeline.has(i); ++i) {
    if (!pipeline.has_mask(i)) continue;
    NormPipeline norms{};
    norms.fetch(pipeline, i, at);
    __syncthreads();  // all have read the tiles before
    norms.store(sm, i, at);
    pipeline.copy_now(i);
    __syncthreads();  // tile i is there, or its codes and norms
    pipeline.expand(i);
    __syncthreads();  // and its values
    const u8* tile = sm.v.tile(i);
    const float scale = scale_of<V>(sm.v, i);
    const Factors factors = factors_of<true>(p, sm, i, at);
#pragma unroll 1
    for (int first = 0; first < cfg::TILE_KV; first += 16) {
      ScoresOf<2> s;
      multiply_k<2>(s, sm.q, sm.k, i, first, at, [](int, int) {});
      transform<2>(s, p, sm, i, at);
#pragma unroll 1
      for (int row = first; row < first + 16; ++row) {
        if (V::all_finite(tile, row, 1, at.lane)) continue;
        const int source = at.g * 4 + row % 8 / 2;  // the lane that has the row's scores
        add_row(o, p, w, tile, row, pipeline.key(i) + row, at, [&](int r, int c) {
          const float (&x)[4] = s[r][0], (&y)[4] = s[r][1];
          const float even = row % 16 < 8 ? x[2 * c] : y[2 * c];
          const float odd = row % 16 < 8 ? x[2 * c + 1] : y[2 * c + 1];
          return state.weight(__shfl_sync(FULL_MASK, row % 2 == 0 ? even : odd, source), factors, r, c) * scale;
        });
      }
    }
  }
}

// Whether a result may have met an infinity or NaN, which floats in parts make NaN of whatever they should become.
__device__ __forceinline__ bool is_bad(const Outputs& o, const State& state) {
  float sum = 0.f;  // x * 0 is NaN if x is no number
#pragma unroll
  for (int r = 0; r < ROW_TILES; ++r) {
    sum += state.l[r][0] * 0.f + state.l[r][1] * 0.f;
#pragma unroll
    for (int d = 0; d < DIM_TILES; ++d) {
#pragma unroll
      for (int e = 0; e < 4; ++e) sum += o[r][d][e] * 0.f;
    }
  }
  return sum != 0.f;
}

__device__ __forceinline__ void scale_row(Outputs& o, int r, int c, float by) {
#pragma unroll
  for (int d = 0; d < DIM_TILES; ++d) {
    o[r][d][2 * c] *= by;
    o[r][d][2 * c + 1] *= by;
  }
}

// Attends anew by ordinary sums, eight keys at a time, each row to the keys that it sees. Rare.
template <class Products>
__device__ __forceinline__ void attend_plainly(const Pipeline& pipeline, Outputs& o, State& state, const Lane& at) {
  const PrefillParams& p = pipeline.p;
  const Work& w = pipeline.w;
  Smem& sm = pipeline.sm;
  state = State();
  clear(o);
  const Factors factors = factors_of<true>(p, sm, 0, at);
#pragma unroll 1
  for (int i = 0; pipeline.has(i); ++i) {
    __syncthreads();  // all have read the tiles before
    pipeline.copy_now(i);
    __syncthreads();  // tile i is there
#pragma unroll 1
    for (int first = 0; first < cfg::TILE_KV; first += 8) {
      ScoresOf<1> s;
      Products::multiply_k_plainly(s, sm.q, at.row0, sm.k.tile(i), first, at.lane);
      transform<1>(s, p, sm, i, at);
      hide<1>(s, p, w, pipeline.key(i) + first, at);
      state.follow(s, factors, [&](int r, int c, float by) { scale_row(o, r, c, by); });
#pragma unroll
      for (int r = 0; r < ROW_TILES; ++r) state.weigh(s[r][0], factors, r);
#pragma unroll 1
      for (int row = 0; row < 8; ++row) {
        add_row(o, p, w, sm.v.tile(i), first + row, pipeline.key(i) + first + row, at, [&](int r, int c) {
          const float held = row % 2 == 0 ? s[r][0][2 * c] : s[r][0][2 * c + 1];
          return __shfl_sync(FULL_MASK, held, at.g * 4 + row / 2);
        });
      }
    }
  }
  state.reduce();
}

// What is left to do for the whole CTA where something was infinite or NaN.
template <class Operand>
__device__ __forceinline__ void mend(const Pipeline& pipeline, Outputs& o, State& state, const Lane& at) {
  if constexpr (SAME<Operand, float>) {
    attend_plainly<Products>(pipeline, o, state, at);
  } else {
    add_bad_rows<V>(pipeline, o, state, at);
  }
}

__device__ __forceinline__ void prefill(const PrefillParams& p, Smem& sm) {
  ptx::griddepcontrol_wait();
  Work found{};
  if (!find_work(p, found)) return;
  if (threadIdx.x == 0) {
    sm.work = found, sm.hidden_bad = 0;
    ptx::mbarrier_init(&sm.keys_turn, THREADS + cfg::NUM_WARPS);
    // That V of a tile has been read follows from the turn of K of the next, unless V of the one after is made by then.
    ptx::mbarrier_init(&sm.values_turn, THREADS + AHEAD_OF<V> * cfg::NUM_WARPS);
  }
  __syncthreads();  // the work is there
  const Work& w = sm.work;
  const Lane at;
  const Pipeline pipeline{p, w, w, sm};
  NormPipeline norms{};
  if (!K::IN_ROTATED_DOMAIN) load_queries(p, w, sm);
#pragma unroll 1
  for (int i = 0; i < cfg::NUM_STAGES - 1 + AHEAD_OF<K>; ++i) pipeline.copy_keys(i);
#pragma unroll 1
  for (int i = 0; i < cfg::NUM_STAGES - 2 + AHEAD_OF<V>; ++i) pipeline.copy_values(i);
  ptx::cp_async_commit();
  if (K::IN_ROTATED_DOMAIN) load_queries(p, w, sm);
  if constexpr (AHEAD > 0) {
#pragma unroll 1
    for (int i = 0; i < 2; ++i) {
      norms.fetch(pipeline, i, at);
      norms.store(sm, i, at);
    }
    ptx::cp_async_wait<0>();
    __syncthreads();  // codes of the first tile are there, and rotated queries
    pipeline.expand(0);
  }
  ptx::cp_async_mbarrier_arrive(&sm.keys_turn);
  end_turn(&sm.keys_turn, at);
  if (AHEAD_OF<V>) end_turn(&sm.values_turn, at);

  State state;
  Outputs o;
  clear(o);

  float log2_scale = 0.f;  // of the values of the last tile
  // Tiles whose keys all rows see are the most: without softcap they have a path of their own.
  const auto attend = [&](auto any, int i) {
    constexpr bool ANY = decltype(any)::value;
    // With a mask fewer keys at once: more of them may be hidden from all rows, and that takes registers.
    constexpr int TILES = ANY && KEY_TILES % 4 == 0 ? 4 : KEY_TILES, PARTS = KEY_TILES / TILES;
    ptx::mbarrier_wait(&sm.keys_turn, i & 1);
    pipeline.copy_ahead(i);
    if constexpr (AHEAD > 0) norms.fetch(pipeline, i + 2, at);
    if constexpr (ANY) {
      ptx::mbarrier_wait(&sm.values_turn, i & 1);
      if constexpr (!IN_FLOATS) {
        if (pipeline.has_mask(i)) clear_bad_rows<V>(sm, i, at);
      }
      pipeline.expand(i + 1);
    }
#pragma unroll 1
    for (int part = 0; part < PARTS; ++part) {
      const int first = part * TILES * 8;
      ScoresOf<TILES> s;
      typename K::Expansion next_k(sm.k, i + 1);
      multiply_k<TILES>(s, sm.q, sm.k, i, first, at, [&](int step, int steps) {
        if (!ANY) expand_part<K>(next_k, step, steps);
      });
      if (part == PARTS - 1) {
        if constexpr (AHEAD > 0) norms.store(sm, i + 2, at);
        end_turn(&sm.keys_turn, at);
      }
      if constexpr (ANY) {
        transform<TILES>(s, p, sm, i, at);
        if (pipeline.has_mask(i)) hide<TILES>(s, p, w, pipeline.key(i) + first, at);
      }
      if constexpr (V::NORMS > 0) {
        const float now = sm.v.log2_scale(i);
        if (now != log2_scale) state.shift(now - log2_scale);
        log2_scale = now;
      }
      const Factors factors = factors_of<ANY>(p, sm, i, at);
      state.follow(s, factors, [&](int r, int c, float by) { scale_row(o, r, c, by); });
      if (!ANY) ptx::mbarrier_wait(&sm.values_turn, i & 1);
      typename V::Expansion next_v(sm.v, i + 1);
      Products::template multiply_v<TILES>(
          o, sm.v.tile(i) + first * V::Tile::ROW_BYTES, at.v,
          [&](int r, int n) -> const float (&)[4] {
            state.weigh(s[r][n], factors, r);
            return s[r][n];
          },
          [&](int step, int steps) {
            if (!ANY) expand_part<V>(next_v, step, steps);
          });
    }
    if (AHEAD_OF<V>) end_turn(&sm.values_turn, at);
  };
  // Tiles whose keys all rows see are neighbors.
  int i = 0;
#pragma unroll 1
  while (pipeline.has(i)) {
    if (p.softcap_log2 != 0.f || p.softmax_scale_log2 <= 0.f || pipeline.has_mask(i)) {
      attend(Flag<true>{}, i++);
    } else {
#pragma unroll 1
      do attend(Flag<false>{}, i++);
      while (i < w.full.hi);
    }
  }
  ptx::mbarrier_wait(&sm.keys_turn, i & 1);  // all have read q, whose memory o takes, and it is not on its way
  ptx::griddepcontrol_launch_dependents();
  if (V::NORMS > 0) state.shift(-log2_scale);
  state.reduce();
  if constexpr (IN_FLOATS) {
    if (is_bad(o, state)) sm.hidden_bad = 1;
    __syncthreads();  // what any warp found is known
  }
  if (sm.hidden_bad != 0) {
    mend<Elem>(pipeline, o, state, at);
    __syncthreads();  // all have read q again
  }

  const Epilogue epilogue{p, w, sm, at, sm.q + at.row0 * Q_ROW_BYTES};
#pragma unroll
  for (int r = 0; r < ROW_TILES; ++r) {
#pragma unroll
    for (int c = 0; c < 2; ++c) epilogue.store(o, state, r, c);
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(cfg::NUM_WARPS* WARP, cfg::CTAS_PER_SM)
    prefill_mma_kernel(const __grid_constant__ PrefillParams p) {
  u8* smem = ptx::dynamic_smem();
  if (cfg::HOLD_BASE) smem = ptx::opaque_shared(smem);
  prefill(p, *reinterpret_cast<Smem*>(smem));
}
