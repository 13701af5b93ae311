// decode.cu -- split-KV decode attention: 1 to 16 query tokens a sequence against a paged KV cache.
// SPDX-License-Identifier: Apache-2.0
//
//   grid   (num_kv_heads, num_splits * row blocks, batch)      block  NUM_WARPS * 32
//          With p.shares (num_kv_heads, num_splits * row blocks): splits of the batch, given to sequences by length.
//   CTA    up to ROWS query rows of one KV head, one split of their keys; row = token * group + head of the group
//          With TILE_HEADS > 1, of that many KV heads, each with its share of the rows; grid.x counts such groups.
//   warp   every NUM_WARPS-th step of TILE_KV keys, an online softmax of its own; the warps merge at the end
//
// Keys are the M of an mma, query rows its N: S^T = K Q^T and O^T = V^T P^T, so that 8 rows fill a tile. K and V
// tiles alternate in a ring of NUM_STAGES slots that belongs to one warp: no barrier of the CTA stands in the loop.
// Formats of K and V are policies, each by itself (kv/kv.cuh).
#include "common/decode_ahead.cuh"
#include "common/decode_floats.cuh"
#include "common/decode_result.cuh"
#include "common/decode_work.cuh"
#include "common/kv_ring.cuh"
#include "common/softmax.cuh"
#include "common/tf32.cuh"
#include "common/tile16.cuh"
#include "kv/kv.cuh"

namespace {

using Elem = ElemOf<cfg::DTYPE>::type;
// Of tiles, whose rows are those of TILE_HEADS heads side by side.
using K = KvOf<cfg::K_FORMAT, Elem, cfg::HEAD_DIM * cfg::TILE_HEADS>::type;
using V = KvOf<cfg::V_FORMAT, Elem, cfg::HEAD_DIM * cfg::TILE_HEADS>::type;
// Of Q and O, whose rows are those of a head.
using KHead = KvOf<cfg::K_FORMAT, Elem, cfg::HEAD_DIM>::type;
using VHead = KvOf<cfg::V_FORMAT, Elem, cfg::HEAD_DIM>::type;
constexpr bool IN_FLOATS = SAME<Elem, float>;
using QTile = Either<IN_FLOATS, Tile32<cfg::HEAD_DIM>, Tile16<cfg::HEAD_DIM>>::type;

constexpr int DIM_BLOCKS = cfg::HEAD_DIM / 16;
constexpr int Q_PAIRS = QTile::ROW_BYTES / 64;  // of two operands' parts of a row of Q
constexpr int KEY_BLOCKS = cfg::TILE_KV / 16;
constexpr int O_STRIDE = VHead::O_STRIDE;  // floats
static_assert(cfg::TILE_HEADS == 1 || (cfg::ROW_TILES == 1 && KHead::PARTS == 1 && VHead::PARTS == 1 &&
                                       KHead::NORMS == 1 && VHead::NORMS == 1),
              "several heads share the eight columns of one tile, and a column has one norm a key");
static_assert(cfg::TILE_KV == 16 || cfg::TILE_KV == 32, "each lane looks up the page of one row of a tile");
static_assert(cfg::TILE_KV * K::CHUNKS % WARP == 0 && cfg::TILE_KV * V::CHUNKS % WARP == 0,
              "a tile is a whole number of 16-byte copies per lane");
static_assert(cfg::NUM_STAGES >= 2, "K and V of a step are in flight together");
static_assert(cfg::NUM_STAGES >= 4 || !NORMS_ARE_LATE<K, V>, "norms reach shared memory one tile of their kind late");
static_assert(cfg::NUM_STAGES % 2 == 0 || cfg::K_FORMAT == cfg::V_FORMAT, "slots serve K or V, or have one size");

// A table with a stride of 256 begins at a multiple of 64 KB of the shared window. The rings of the first warps lie
// below it, in the order of descending addresses, and all else above.
struct Smem {
  union {
    struct {
      alignas(128) u8 table[cfg::TABLE_BYTES];  // of a format's levels; 128 unused bytes without one
      alignas(128) u8 ring[cfg::NUM_WARPS - cfg::WARPS_BELOW][RING_BYTES<K, V>];
    };
    float o[cfg::NUM_WARPS][ROWS][O_STRIDE];  // after the loop
  };
  alignas(128) u8 q[ROWS * QTile::ROW_BYTES];
  float q_scale[ROWS], q_bias[ROWS];  // scores are (s + bias / scale) * scale; used where K scales queries
  u32 tree[ROWS];                     // what a row sees of the last keys
  float m[cfg::NUM_WARPS][ROWS];
  float l[cfg::NUM_WARPS][ROWS];
};
static_assert(cfg::LEAD_BYTES + sizeof(Smem) == cfg::SMEM_BYTES,
              "cuattn/_plan and decode.cu disagree on shared memory");
static_assert(sizeof(DecodeParams) == cfg::PARAMS_BYTES, "cuattn/_params.py and params.cuh disagree");

// x where column g of an operand is one of KV head `head`, else zeros: a column of another head takes no part.
__device__ __forceinline__ u32 of_head(u32 x, int head, int lane) {
  return cfg::TILE_HEADS == 1 || lane / 4 / HEAD_ROWS == head ? x : 0;
}

// B operands of Q, of the rows of each KV head: from registers where they fit beside the accumulators, else from shared
// memory each time.
struct QueryFragments {
  static constexpr int KEPT = cfg::Q_IN_REGISTERS ? Q_PAIRS : 1;
  u32 kept[cfg::TILE_HEADS][cfg::ROW_TILES][KEPT][4];  // of 64 successive bytes

  static __device__ __forceinline__ void load(u32 (&b)[4], const u8* q, int head, int tile, int pair, int lane) {
    ptx::ldmatrix_x4(b, q + QTile::offset(tile * 8 + lane % 8, 4 * pair + lane / 8));
#pragma unroll
    for (int i = 0; i < 4; ++i) b[i] = of_head(b[i], head, lane);
  }
  __device__ __forceinline__ void keep(const u8* q, int lane) {
    if constexpr (cfg::Q_IN_REGISTERS) {
#pragma unroll
      for (int head = 0; head < cfg::TILE_HEADS; ++head) {
#pragma unroll
        for (int n = 0; n < cfg::ROW_TILES; ++n) {
#pragma unroll
          for (int pair = 0; pair < KEPT; ++pair) load(kept[head][n][pair], q, head, n, pair, lane);
        }
      }
    }
  }
  __device__ __forceinline__ void get(u32 (&b)[4], const u8* q, int head, int tile, int pair, int lane) const {
    if constexpr (cfg::Q_IN_REGISTERS) {
#pragma unroll
      for (int i = 0; i < 4; ++i) b[i] = kept[head][tile][pair][i];
    } else {
      load(b, q, head, tile, pair, lane);
    }
  }
};

// Parts of K whose loop is unrolled: where accumulators leave few registers, parts take turns with them.
constexpr int PARTS_AT_ONCE = cfg::Q_IN_REGISTERS ? KHead::PARTS : 1;
// Whether plain steps have code of their own, without what is rarely needed in its midst. It pays where instructions
// bind.
constexpr bool PLAIN_STEPS = cfg::K_FORMAT == KvFormat::TBQ4 || cfg::V_FORMAT == KvFormat::TBQ4;
// What is read ahead takes registers, of which floats leave few.
constexpr int PAIRS_AT_ONCE = IN_FLOATS && !cfg::Q_IN_REGISTERS ? 2 : Q_PAIRS;

// s[i][n] = rows of K block i times rows of Q tile n, raw scores.
__device__ __forceinline__ void multiply_k(float (&s)[KEY_BLOCKS][cfg::ROW_TILES][4], const u8* tile, const u8* q,
                                           const QueryFragments& queries, const typename K::KeyLane& key_lane,
                                           u32 norms_place, int lane) {
  constexpr int PAIRS = Q_PAIRS / KHead::PARTS;
  const TileNorms<K> row_norms(tile, norms_place);
#pragma unroll PARTS_AT_ONCE
  for (int part = 0; part < KHead::PARTS; ++part) {
    float sum[KEY_BLOCKS][cfg::ROW_TILES][4];
#pragma unroll
    for (int head = 0; head < cfg::TILE_HEADS; ++head) {
      typename K::Keys keys[KEY_BLOCKS];
#pragma unroll
      for (int i = 0; i < KEY_BLOCKS; ++i) {
        keys[i].load(tile, i * 16, head * KHead::PARTS + part, key_lane);
        if (head > 0) continue;
#pragma unroll
        for (int n = 0; n < cfg::ROW_TILES; ++n) {
#pragma unroll
          for (int e = 0; e < 4; ++e) sum[i][n][e] = 0.f;
        }
      }
#pragma unroll PAIRS_AT_ONCE
      for (int pair = 0; pair < PAIRS; ++pair) {
        u32 b[cfg::ROW_TILES][4];
#pragma unroll
        for (int n = 0; n < cfg::ROW_TILES; ++n) queries.get(b[n], q, head, n, part * PAIRS + pair, lane);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
#pragma unroll
          for (int i = 0; i < KEY_BLOCKS; ++i) {
            u32 a[4];
            keys[i].get(a, 2 * pair + half, key_lane);
#pragma unroll
            for (int n = 0; n < cfg::ROW_TILES; ++n) {
              const u32 operand[2] = {b[n][2 * half], b[n][2 * half + 1]};
              multiply_add<typename K::Operand>(sum[i][n], a, operand);
            }
          }
        }
      }
    }
#pragma unroll
    for (int i = 0; i < KEY_BLOCKS; ++i) {
      const float norms[2] = {row_norms.get(i, 0, part), row_norms.get(i, 1, part)};  // of rows g and g + 8
#pragma unroll
      for (int n = 0; n < cfg::ROW_TILES; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float x = K::NORMS > 0 ? sum[i][n][e] * norms[e / 2] : sum[i][n][e];
          s[i][n][e] = part == 0 ? x : s[i][n][e] + x;
        }
      }
    }
  }
}

// P of each part of V: probabilities, times the norms of V's rows where it has norms.
using Weights = float[VHead::PARTS][KEY_BLOCKS][cfg::ROW_TILES][4];

// o[n][mb] += V^T P^T.
template <class V>
__device__ __forceinline__ void multiply_v16(float (&o)[cfg::ROW_TILES][DIM_BLOCKS][4], const Weights& p,
                                             const u8* tile, const typename V::ValueLane& value_lane, int lane) {
  constexpr int PART_BLOCKS = DIM_BLOCKS / VHead::PARTS;
#pragma unroll
  for (int i = 0; i < KEY_BLOCKS; ++i) {
#pragma unroll
    for (int part = 0; part < VHead::PARTS; ++part) {
      // P^T: an accumulator holds (key g, rows 2t, 2t+1), the operand wants (keys 2t, 2t+1, row g).
      u32 b[cfg::ROW_TILES][2];
#pragma unroll
      for (int n = 0; n < cfg::ROW_TILES; ++n) {
        const float (&x)[4] = p[part][i][n];
        b[n][0] = ptx::movmatrix_trans(ptx::pack2<typename V::Operand>(x[0], x[1]));
        b[n][1] = ptx::movmatrix_trans(ptx::pack2<typename V::Operand>(x[2], x[3]));
      }
#pragma unroll
      for (int head = 0; head < cfg::TILE_HEADS; ++head) {
        u32 operand[cfg::ROW_TILES][2];
#pragma unroll
        for (int n = 0; n < cfg::ROW_TILES; ++n) {
#pragma unroll
          for (int j = 0; j < 2; ++j) operand[n][j] = of_head(b[n][j], head, lane);
        }
        typename V::Values values;
        values.load(tile, i * 16, head * VHead::PARTS + part, value_lane);
#pragma unroll
        for (int mb = 0; mb < PART_BLOCKS; ++mb) {
          u32 a[4];
          values.get(a, mb, value_lane);
#pragma unroll
          for (int n = 0; n < cfg::ROW_TILES; ++n) {
            ptx::mma_m16n8k16<typename V::Operand>(o[n][part * PART_BLOCKS + mb], a, operand[n]);
          }
        }
      }
    }
  }
}

template <class V>
__device__ __forceinline__ void multiply_v(float (&o)[cfg::ROW_TILES][DIM_BLOCKS][4], const Weights& p, const u8* tile,
                                           const typename V::ValueLane& value_lane, int lane) {
  if constexpr (SAME<typename V::Operand, float>) {
    DecodeFloats<V, KEY_BLOCKS, cfg::ROW_TILES, DIM_BLOCKS>::multiply_v(o, p[0], tile, value_lane, lane);
  } else {
    multiply_v16<V>(o, p, tile, value_lane, lane);
  }
}

// As multiply_v for a tile with infinities or NaN, where 0 times a hidden value would show: each row adds its own keys
// only. Slow, and rare: such values next to the newest tokens of a call with several of them, or any among floats,
// whose two parts would show. Returns false, having done nothing, for other tiles, and for all of a format with norms:
// there a hidden row has the weight 0 and finite levels.
template <class Kv>
__device__ __forceinline__ bool multiply_v_visible(float (&o)[cfg::ROW_TILES][DIM_BLOCKS][4], const Weights& p,
                                                   const u8* tile, const DecodeParams& params, const Work& w,
                                                   const u32* tree, int key0, int lane) {
  if constexpr (Kv::NORMS > 0) {
    return false;
  } else if constexpr (SAME<typename Kv::Operand, float>) {
    if (Kv::all_finite(tile, cfg::TILE_KV, lane)) return false;
    DecodeFloats<Kv, KEY_BLOCKS, cfg::ROW_TILES, DIM_BLOCKS>::add_visible(o, p[0], tile, lane, [&](int row, int key) {
      const KeyRange keys = w.keys(params, row);
      return key0 + key >= keys.lo && key0 + key < min(keys.hi, w.end) && !w.tree_hides(params, tree, row, key0 + key);
    });
    return true;
  } else {
    if (Kv::all_finite(tile, cfg::TILE_KV, lane)) return false;
    const int g = lane / 4, t = lane % 4;
#pragma unroll
    for (int n = 0; n < cfg::ROW_TILES; ++n) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const KeyRange keys = w.keys(params, n * 8 + 2 * t + c);
        const int lo = keys.lo - key0, hi = min(keys.hi, w.end) - key0;
#pragma unroll
        for (int i = 0; i < KEY_BLOCKS; ++i) {
          for (int row = 0; row < 16; ++row) {
            const float held =
                row < 8 ? p[0][i][n][c] : p[0][i][n][c + 2];  // of rows g and g + 8, the same query in lanes of one t
            const float weight = __shfl_sync(FULL_MASK, held, row % 8 * 4 + t);
            const int key = i * 16 + tile_row(row);
            if (key < lo || key >= hi || w.tree_hides(params, tree, n * 8 + 2 * t + c, key0 + key)) continue;
#pragma unroll
            for (int mb = 0; mb < DIM_BLOCKS; ++mb) {
              o[n][mb][c] += weight * Kv::value(tile, key, Kv::dim(mb, g, 0));
              o[n][mb][c + 2] += weight * Kv::value(tile, key, Kv::dim(mb, g, 1));
            }
          }
        }
      }
    }
    return true;
  }
}

// Scores in log2 units from raw ones.
struct ScoreScale {
  float factor[cfg::ROW_TILES][2], bias[cfg::ROW_TILES][2];

  __device__ __forceinline__ ScoreScale(const DecodeParams& p, const Smem& sm, int lane) {
    const float factor_of_all = p.softcap_log2 != 0.f ? p.scale_over_softcap : p.softmax_scale_log2;
#pragma unroll
    for (int n = 0; n < cfg::ROW_TILES; ++n) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int row = n * 8 + lane % 4 * 2 + c;
        factor[n][c] = K::SCALES_QUERIES ? sm.q_scale[row] * factor_of_all : factor_of_all;
        bias[n][c] = K::IN_ROTATED_DOMAIN ? sm.q_bias[row] * factor_of_all : 0.f;
      }
    }
  }
  // Calls f(score, n, c) for every score, of column c of tile n.
  template <class F>
  static __device__ __forceinline__ void for_all(float (&s)[KEY_BLOCKS][cfg::ROW_TILES][4], F f) {
#pragma unroll
    for (int i = 0; i < KEY_BLOCKS; ++i) {
#pragma unroll
      for (int n = 0; n < cfg::ROW_TILES; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) f(s[i][n][e], n, e % 2);
      }
    }
  }
  __device__ __forceinline__ void apply(float (&s)[KEY_BLOCKS][cfg::ROW_TILES][4], float softcap_log2) const {
    for_all(s, [&](float& x, int n, int c) {
      x = K::IN_ROTATED_DOMAIN ? fmaf(x, factor[n][c], bias[n][c]) : x * factor[n][c];
    });
    if (softcap_log2 != 0.f) for_all(s, [&](float& x, int, int) { x = softmax::softcap(x, softcap_log2); });
  }
};

// Calls hide(i, e) for the keys of column c of tile n that its row does not see: accumulator e of key block i.
template <class Hide>
__device__ __forceinline__ void for_hidden(const DecodeParams& p, const Work& w, const u32* tree, int n, int c,
                                           int key0, int lane, Hide hide) {
  const int row = n * 8 + lane % 4 * 2 + c;
  const KeyRange keys = w.keys(p, row);
  const int first = key0 + tile_row(lane / 4), lo = keys.lo - first, hi = min(keys.hi, w.end) - first;
#pragma unroll
  for (int i = 0; i < KEY_BLOCKS; ++i) {
    if (i * 16 < lo || i * 16 >= hi) hide(i, c);
    if (i * 16 + 8 < lo || i * 16 + 8 >= hi) hide(i, c + 2);
  }
  if (p.tree_mask == nullptr) return;
#pragma unroll
  for (int i = 0; i < KEY_BLOCKS; ++i) {
    if (w.tree_hides(p, tree, row, first + i * 16)) hide(i, c);
    if (w.tree_hides(p, tree, row, first + i * 16 + 8)) hide(i, c + 2);
  }
}

__device__ __forceinline__ u8* ring_of(Smem& sm, int warp) {
  if (warp < cfg::WARPS_BELOW) return reinterpret_cast<u8*>(&sm) - (warp + 1) * RING_BYTES<K, V>;
  return sm.ring[warp - cfg::WARPS_BELOW];
}

__device__ __forceinline__ Loader<K, V> make_loader(const DecodeParams& p, const Work& w, u8* ring, int begin,
                                                    int lane) {
  const u8* table = reinterpret_cast<const u8*>(p.page_table);
  const PageTable pages{table == nullptr ? nullptr : table + w.batch * p.page_table_stride_batch,
                        p.page_table_stride_page, Divisor(p.page_size, p.page_reciprocal), w.batch,
                        table == nullptr && w.end <= p.page_size};
  return Loader<K, V>(p, pages, ring, w.first, w.end, begin, lane);
}

// Tiles that are loaded before Q is there. Where norms are late, a third tile waits for those of the first, so the rest
// comes right before the loop.
constexpr int BEFORE_Q = NORMS_ARE_LATE<K, V> ? 2 : cfg::NUM_STAGES - 1;
// Whether a warp may begin with its last tile: both tiles of its first step are to be loaded before the others.
constexpr bool MAY_TURN = PLAIN_STEPS && BEFORE_Q >= 2;
// The tiles of a warp, every NUM_WARPS-th of the split's. If the last one is not whole it comes first: then it is
// loaded before the loop, whose loads are then plain but where another tile is not whole. Code that the SM has not
// executed before takes microseconds to get there.
struct Order {
  int begin;  // of the first one
  bool is_there;
  int next, end;  // the others, every KEYS_PER_STEP keys
  bool turned;

  __device__ __forceinline__ Order(const Work& w, int warp) {
    const int start = w.begin + warp * cfg::TILE_KV;
    is_there = start < w.end;
    const int last = start + (w.end - 1 - start) / cfg::KEYS_PER_STEP * cfg::KEYS_PER_STEP;
    turned = MAY_TURN && last > start && last + cfg::TILE_KV > w.end;
    begin = turned ? last : start;
    next = turned ? start : start + cfg::KEYS_PER_STEP;
    end = turned ? last : w.end;
  }
};

// The split's keys: their softmax state and their share of the result, of every warp, in shared memory.
template <class Source>
__device__ __forceinline__ void attend(const DecodeParams& p, const Work& w, Smem& sm, Source row_of_q,
                                       const typename KHead::QueryPart& query_part) {
  const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
  u8* ring = ptx::opaque_shared(ring_of(sm, warp));
  Order order(w, warp);
  Loader<K, V> loader = make_loader(p, w, ring, order.begin, lane);
  const auto load = [&](int i) {
    if (i % 2 == 0) {
      if (i >= 2) loader.k.store_norms(ring + Loader<K, V>::slot_of(i - 2), lane);
      loader.load_k(Loader<K, V>::slot_of(i), lane);
    } else {
      if (i >= 2) loader.v.store_norms(ring + Loader<K, V>::slot_of(i - 2), lane);
      loader.load_v(Loader<K, V>::slot_of(i), lane);
    }
  };
#pragma unroll
  for (int i = 0; i < BEFORE_Q; ++i) {
    load(i);
    if (MAY_TURN && i == 1 && order.turned) loader.go_to(order.next, order.end, lane);
  }
  const auto mean_of = [&](int row) {
    return p.k_mean == nullptr ? nullptr : p.k_mean + w.kv_head_of(row) * cfg::HEAD_DIM;
  };
  const auto k_scale_of = [&](int row) { return head_scale(p.k_scales, p.k_scale, w.kv_head_of(row)); };
  KHead::store_queries(sm.q, sm.q_scale, sm.q_bias, mean_of, k_scale_of, ROWS, row_of_q, query_part);
  if (p.tree_mask != nullptr && threadIdx.x < ROWS) sm.tree[threadIdx.x] = w.read_tree(p, threadIdx.x);
  __syncthreads();  // q, the table and the tree are in shared memory
  QueryFragments queries;
  queries.keep(sm.q, lane);
  const ScoreScale held_scores(p, sm, lane);
  const typename K::KeyLane key_lane(sm.table, lane);
  const typename V::ValueLane value_lane(sm.table, lane);
  const u32 k_norms_place = held(TileNorms<K>::place(lane));
  const u32 v_norms_place = SAME<K, V> ? k_norms_place : held(TileNorms<V>::place(lane));

  // Steps inside these bounds need no mask: every row of the CTA sees all their keys.
  const auto full_range = [&] {
    return KeyRange{w.keys(p, w.num_rows - 1).lo, min(min(w.keys(p, 0).hi, w.end), w.tree_begin(p))};
  };
  const KeyRange held_full = full_range();

  softmax::ColumnState<cfg::ROW_TILES> state;
  softmax::ColumnScale<cfg::ROW_TILES> scale;  // of O, where V has norms
  float o[cfg::ROW_TILES][DIM_BLOCKS][4];      // O^T: VHead::dim(mb, g, 0 or 1), rows 2t, 2t+1 of tile n
#pragma unroll
  for (int n = 0; n < cfg::ROW_TILES; ++n) {
#pragma unroll
    for (int mb = 0; mb < DIM_BLOCKS; ++mb) {
#pragma unroll
      for (int e = 0; e < 4; ++e) o[n][mb][e] = 0.f;
    }
  }
  const auto multiply_o = [&](int n, int c, float factor) {
#pragma unroll
    for (int mb = 0; mb < DIM_BLOCKS; ++mb) {
      o[n][mb][c] *= factor;
      o[n][mb][c + 2] *= factor;
    }
  };

#pragma unroll
  for (int i = BEFORE_Q; i < cfg::NUM_STAGES - 1; ++i) load(i);
  u32 slot = 0;  // offset in the ring of the tile in use
  // A step is plain if rows see the same keys of it, both tiles that it loads are whole or past the last, and scores
  // are not capped.
  const auto take_step = [&](auto is_plain, int key0, bool masked) {
    constexpr bool PLAIN = is_plain.value;
    // Whether accumulator e of key block i of a plain step is of a hidden key.
    const auto is_hidden = [&](int i, int e) {
      const int key = key0 + tile_row(g) + i * 16 + e / 2 * 8;
      return key < held_full.lo || key >= held_full.hi;
    };
    ptx::cp_async_wait<cfg::NUM_STAGES - 2>();
    loader.template store_norms<true>(slot, lane);
    __syncwarp();  // K of this step is visible to all lanes, and all have read the slot refilled next
    loader.template load_ahead<true, PLAIN>(slot, lane);
    float s[KEY_BLOCKS][cfg::ROW_TILES][4];
    multiply_k(s, ring + slot, sm.q, queries, key_lane, k_norms_place, lane);
    if constexpr (IN_FLOATS) DecodeFloats<K, KEY_BLOCKS, cfg::ROW_TILES, DIM_BLOCKS>::mend(s, ring + slot, sm.q, lane);
    slot = Loader<K, V>::next_slot<true>(slot);

    const ScoreScale scores = REGISTERS_ARE_SCARCE ? ScoreScale(p, sm, lane) : held_scores;
    scores.apply(s, PLAIN ? 0.f : p.softcap_log2);
    if (PLAIN && masked) {
#pragma unroll
      for (int n = 0; n < cfg::ROW_TILES; ++n) {
#pragma unroll
        for (int i = 0; i < KEY_BLOCKS; ++i) {
#pragma unroll
          for (int e = 0; e < 4; ++e) s[i][n][e] = is_hidden(i, e) ? neg_inf() : s[i][n][e];
        }
      }
    }
    if (!PLAIN && masked) {
#pragma unroll
      for (int n = 0; n < cfg::ROW_TILES; ++n) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          for_hidden(p, w, sm.tree, n, c, key0, lane, [&](int i, int e) { s[i][n][e] = neg_inf(); });
        }
      }
    }
    const bool grew = state.update(s, [&](int n, int c, float factor) {
      scale.rescale(n, c, factor);
      multiply_o(n, c, factor);
    });

    ptx::cp_async_wait<cfg::NUM_STAGES - 2>();
    loader.template store_norms<false>(slot, lane);
    __syncwarp();  // V of this step is visible to all lanes, and all have read K
    loader.template load_ahead<false, PLAIN>(slot, lane);
    const u8* tile = ring + slot;
    const TileNorms<V> row_norms(tile, v_norms_place);
    Weights weights;
#pragma unroll
    for (int part = 0; part < VHead::PARTS; ++part) {
#pragma unroll
      for (int i = 0; i < KEY_BLOCKS; ++i) {
        const float norms[2] = {row_norms.get(i, 0, part), row_norms.get(i, 1, part)};  // of rows g and g + 8
#pragma unroll
        for (int n = 0; n < cfg::ROW_TILES; ++n) {
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            weights[part][i][n][e] = V::NORMS > 0 ? s[i][n][e] * scale.factor[n][e % 2] * norms[e / 2] : s[i][n][e];
          }
        }
      }
    }
    if constexpr (V::NORMS > 0) {
      if (!PLAIN && masked) {
        // A hidden row's norm may be anything, and zero times infinity is NaN. Keys that no row sees are loaded as
        // zeros with norms of zero, so that a plain step needs none of this.
#pragma unroll
        for (int n = 0; n < cfg::ROW_TILES; ++n) {
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            for_hidden(p, w, sm.tree, n, c, key0, lane, [&](int i, int e) {
#pragma unroll
              for (int part = 0; part < VHead::PARTS; ++part) weights[part][i][n][e] = 0.f;
            });
          }
        }
      }
      scale.update(weights, grew, multiply_o);
    }
    const bool may_show = IN_FLOATS || (!PLAIN && masked && (p.seqlen_q > 1 || p.tree_mask != nullptr));
    if (!may_show || !multiply_v_visible<V>(o, weights, tile, p, w, sm.tree, key0, lane)) {
      multiply_v<V>(o, weights, tile, value_lane, lane);
    }
    slot = Loader<K, V>::next_slot<false>(slot);
  };
  const bool same_for_all = p.seqlen_q == 1 && p.tree_mask == nullptr;
  for (int key0 = order.begin; order.is_there; key0 = order.next, order.next += cfg::KEYS_PER_STEP) {
    order.is_there = order.next < order.end;
    const KeyRange full = REGISTERS_ARE_SCARCE ? full_range() : held_full;
    const bool masked = key0 < full.lo || key0 + cfg::TILE_KV > full.hi;
    if (PLAIN_STEPS && (!masked || same_for_all) && p.softcap_log2 == 0.f && loader.next_are_plain()) {
      take_step(Constant<true>{}, key0, masked);
    } else {
      take_step(Constant<false>{}, key0, masked);
    }
  }

  ptx::griddepcontrol_launch_dependents();
  state.reduce();
  ptx::cp_async_wait<0>();
  __syncthreads();  // all warps are done with the ring, whose memory sm.o takes over
#pragma unroll
  for (int n = 0; n < cfg::ROW_TILES; ++n) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int row = n * 8 + 2 * t + c;
      if constexpr (V::NORMS > 0) multiply_o(n, c, 1.f / scale.factor[n][c]);  // exact: a power of two
#pragma unroll
      for (int mb = 0; mb < DIM_BLOCKS; ++mb) {
        VHead::store_o(sm.o[warp][row], mb, g, o[n][mb][c], o[n][mb][c + 2]);
      }
      if (g == 0) {
        sm.m[warp][row] = state.maximum(n, c);
        sm.l[warp][row] = state.l[n][c];
      }
    }
  }
  __syncthreads();  // every warp's o, m, l are in shared memory
}

__device__ __forceinline__ void decode(const DecodeParams& p, Smem& sm) {
  ptx::read_ahead(p);
  Work w = find_rows(p);
  if constexpr (K::NORMS > 0) {
    KHead::fill_table(sm.table);
  } else {
    VHead::fill_table(sm.table);
  }
  if constexpr (!REGISTERS_ARE_SCARCE && K::NORMS == 0 && V::NORMS == 0) {
    if (p.asks_ahead != 0) ask_for_keys<K, V>(p, w);
  }
  ptx::griddepcontrol_wait();
  if (p.shares != nullptr && !find_share(p, w)) return;
  const int length = given_length(p, w.batch);
  const auto row_of_q = [&](int row) { return query(p, w, row); };
  const typename KHead::QueryPart query_part = KHead::fetch_queries(ROWS, row_of_q);
  find_keys(p, length, w);
  // Split 0 is never empty: it carries the sink and the zeros of an empty row.
  if (w.begin == w.end && w.split > 0) {
    leave_empty(p, w);
  } else {
    attend(p, w, sm, row_of_q, query_part);
    finish<Elem, VHead>(p, w, sm);
  }
}

// The next multiple of BYTES in the shared window, where a table begins; 0: the memory itself.
template <int BYTES>
__device__ __forceinline__ u8* after_lead(u8* memory) {
  if constexpr (BYTES == 0) {
    return memory;
  } else {
    return memory + (BYTES - ptx::smem_addr(memory) % BYTES);
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(cfg::NUM_WARPS* WARP, cfg::CTAS_PER_SM)
    decode_kernel(const __grid_constant__ DecodeParams p) {
  decode(p, *reinterpret_cast<Smem*>(after_lead<cfg::LEAD_BYTES>(ptx::dynamic_smem())));
}
