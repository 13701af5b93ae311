// decode.cu -- split-KV decode attention: 1 to 16 query tokens a sequence against a paged KV cache.
// SPDX-License-Identifier: Apache-2.0
//
//   grid   (num_splits * row blocks, num_kv_heads, batch)      block  NUM_WARPS * 32
//   CTA    up to ROWS query rows of one KV head, one split of their keys; row = token * group + head of the group
//   warp   every NUM_WARPS-th step of TILE_KV keys, an online softmax of its own; the warps merge at the end
//
// Keys are the M of mma.m16n8k16, query rows its N: S^T = K Q^T and O^T = V^T P^T, so that 8 rows fill a tile. K and V
// tiles alternate in a ring of NUM_STAGES slots that belongs to one warp: no barrier of the CTA stands in the loop.
#include "common/mask.cuh"
#include "common/paging.cuh"
#include "common/params.cuh"
#include "common/softmax.cuh"
#include "common/tile16.cuh"
#include "kv/kv.cuh"

namespace {

using Elem = ElemOf<cfg::DTYPE>::type;
using Kv = KvOf<cfg::KV_FORMAT, Elem, cfg::HEAD_DIM>::type;
using QTile = Tile16<cfg::HEAD_DIM>;

constexpr int ROWS = 8 * cfg::ROW_TILES;
constexpr int DIM_BLOCKS = cfg::HEAD_DIM / 16;
constexpr int KEY_BLOCKS = cfg::TILE_KV / 16;
constexpr int O_STRIDE = cfg::HEAD_DIM + 4;  // floats; the padding keeps the four t of a quad in different banks
static_assert(cfg::TILE_KV == 16 || cfg::TILE_KV == 32, "each lane looks up the page of one row of a tile");
static_assert(cfg::TILE_KV * Kv::CHUNKS % WARP == 0, "a tile is a whole number of 16-byte copies per lane");
static_assert(cfg::NUM_STAGES >= 2, "K and V of a step are in flight together");

struct Smem {
  union {
    alignas(128) u8 ring[cfg::NUM_WARPS][cfg::NUM_STAGES][cfg::TILE_KV * Kv::ROW_BYTES];
    float o[cfg::NUM_WARPS][ROWS][O_STRIDE];  // after the loop
  };
  alignas(128) u8 q[ROWS * QTile::ROW_BYTES];
  float m[cfg::NUM_WARPS][ROWS];
  float l[cfg::NUM_WARPS][ROWS];
  float weight[cfg::NUM_WARPS][ROWS];  // of a warp's o in the result
};
static_assert(sizeof(Smem) == cfg::SMEM_BYTES, "cuattn/_plan and decode.cu disagree on shared memory");
static_assert(sizeof(DecodeParams) == cfg::PARAMS_BYTES, "cuattn/_params.py and params.cuh disagree");

// What one CTA works on.
struct Work {
  int batch, kv_head, split;
  int row0, num_rows;  // rows of this CTA: row0 .. row0 + num_rows - 1
  int kv_len;          // clamped to the capacity of the page table
  int begin, end;      // keys of this split that at least one row sees

  __device__ __forceinline__ int token(const DecodeParams& p, int row) const { return (row0 + row) / p.group; }
  __device__ __forceinline__ int head(const DecodeParams& p, int row) const {
    return kv_head * p.group + (row0 + row) % p.group;
  }
  // Index of `row` in [num_splits, batch, seqlen_q, num_qo_heads].
  __device__ __forceinline__ i64 flat(const DecodeParams& p, int row) const {
    const i64 sequence = static_cast<i64>(split) * gridDim.z + batch;
    return (sequence * p.seqlen_q + token(p, row)) * p.num_qo_heads + head(p, row);
  }
  __device__ __forceinline__ KeyRange keys(const DecodeParams& p, int row) const {
    // The rows that pad a tile see what the last one sees.
    return visible_keys(token(p, min(row, num_rows - 1)), p.seqlen_q, kv_len, p.window_left, p.window_right);
  }
};

__device__ __forceinline__ Work find_work(const DecodeParams& p) {
  Work w;
  w.batch = blockIdx.z;
  w.kv_head = blockIdx.y;
  const int all_rows = p.seqlen_q * p.group;
  const int row_blocks = (all_rows + ROWS - 1) / ROWS;
  w.split = blockIdx.x / row_blocks;
  w.row0 = blockIdx.x % row_blocks * ROWS;
  w.num_rows = min(ROWS, all_rows - w.row0);
  const int len = *reinterpret_cast<const int*>(reinterpret_cast<const u8*>(p.kv_len) + w.batch * p.kv_len_stride);
  const i64 capacity = static_cast<i64>(p.max_pages) * p.page_size;
  w.kv_len = max(0, static_cast<int>(min(static_cast<i64>(len), capacity)));
  const int lo = w.keys(p, 0).lo, hi = w.keys(p, w.num_rows - 1).hi;
  // Splits are whole steps and at least MIN_SPLIT keys; with few keys the last splits are empty.
  const int per_split = (max(0, hi - lo) + p.num_splits - 1) / p.num_splits;
  const int chunk = max(cfg::MIN_SPLIT, (per_split + cfg::TILE_KV - 1) / cfg::TILE_KV * cfg::TILE_KV);
  w.begin = static_cast<int>(min(static_cast<i64>(hi), lo + static_cast<i64>(w.split) * chunk));
  w.end = max(w.begin, static_cast<int>(min(static_cast<i64>(hi), static_cast<i64>(w.begin) + chunk)));
  return w;
}

// Copies K and V tiles of one warp into its ring, in the order K V K V ...
struct Loader {
  const u8* k;
  const u8* v;
  PageTable pages;
  i64 k_page, k_token, v_page, v_token;
  int end;
  int position;   // of this lane's row in the next tile
  int next_page;  // its page, read one step ahead of its use
  i64 v_offset;   // of this lane's row in the V tile that follows
  int v_valid;    // rows of that tile before `end`
  u8* slot;

  __device__ __forceinline__ Loader(const DecodeParams& p, const Work& w, u8* ring, int warp, int lane) {
    k = p.k + w.kv_head * p.k_stride_head;
    v = p.v + w.kv_head * p.v_stride_head;
    const u8* table = reinterpret_cast<const u8*>(p.page_table);
    pages = {table == nullptr ? nullptr : table + w.batch * p.page_table_stride_batch, p.page_table_stride_page,
             p.page_size, w.batch};
    k_page = p.k_stride_page;
    k_token = p.k_stride_token;
    v_page = p.v_stride_page;
    v_token = p.v_stride_token;
    end = w.end;
    position = w.begin + warp * cfg::TILE_KV + lane % cfg::TILE_KV;
    next_page = position < end ? pages.page(position) : 0;
    v_offset = 0;
    v_valid = 0;
    slot = ring;
  }

  __device__ __forceinline__ void copy(const u8* base, i64 row_offset, int valid, int lane) {
#pragma unroll
    for (int i = 0; i < cfg::TILE_KV * Kv::CHUNKS / WARP; ++i) {
      const int index = i * WARP + lane;
      const int row = index / Kv::CHUNKS, chunk = index % Kv::CHUNKS;
      const i64 offset = __shfl_sync(FULL_MASK, row_offset, row);
      // Rows past the end are written as zeros: 0 * NaN in P V would show what lies there.
      ptx::cp_async16(slot + Kv::offset(row, chunk), base + offset + chunk * 16, row < valid);
    }
  }

  __device__ __forceinline__ void advance(u8* ring) {
    slot += cfg::TILE_KV * Kv::ROW_BYTES;
    if (slot == ring + cfg::NUM_STAGES * cfg::TILE_KV * Kv::ROW_BYTES) slot = ring;
  }

  // One group each, empty past the last tile, so that a wait can count groups.
  __device__ __forceinline__ void load_k(u8* ring, int lane) {
    v_valid = end - (position - lane % cfg::TILE_KV);
    if (v_valid > 0) {
      const i64 page = next_page, token = position < end ? pages.slot(position) : 0;
      v_offset = page * v_page + token * v_token;
      copy(k, page * k_page + token * k_token, v_valid, lane);
      position += cfg::NUM_WARPS * cfg::TILE_KV;
      next_page = position < end ? pages.page(position) : 0;
    }
    ptx::cp_async_commit();
    advance(ring);
  }
  __device__ __forceinline__ void load_v(u8* ring, int lane) {
    if (v_valid > 0) copy(v, v_offset, v_valid, lane);
    ptx::cp_async_commit();
    advance(ring);
  }
  // The tile that follows tile `tile` of the sequence K V K V ... by NUM_STAGES - 1.
  template <bool AFTER_K>
  __device__ __forceinline__ void load_ahead(u8* ring, int lane) {
    if constexpr (AFTER_K == (cfg::NUM_STAGES % 2 == 1)) {
      load_k(ring, lane);
    } else {
      load_v(ring, lane);
    }
  }
};

// B operands of Q: from registers where they fit beside the accumulators, else from shared memory each time.
struct QueryFragments {
  static constexpr int KEPT = cfg::Q_IN_REGISTERS ? DIM_BLOCKS / 2 : 1;
  u32 kept[cfg::ROW_TILES][KEPT][4];  // of two successive blocks of 16 head_dim

  static __device__ __forceinline__ void load(u32 (&b)[4], const u8* q, int tile, int pair, int lane) {
    ptx::ldmatrix_x4(b, q + QTile::offset(tile * 8 + lane % 8, 4 * pair + lane / 8));
  }
  __device__ __forceinline__ void keep(const u8* q, int lane) {
    if constexpr (cfg::Q_IN_REGISTERS) {
#pragma unroll
      for (int n = 0; n < cfg::ROW_TILES; ++n) {
#pragma unroll
        for (int pair = 0; pair < KEPT; ++pair) load(kept[n][pair], q, n, pair, lane);
      }
    }
  }
  __device__ __forceinline__ void get(u32 (&b)[4], const u8* q, int tile, int pair, int lane) const {
    if constexpr (cfg::Q_IN_REGISTERS) {
#pragma unroll
      for (int i = 0; i < 4; ++i) b[i] = kept[tile][pair][i];
    } else {
      load(b, q, tile, pair, lane);
    }
  }
};

// s[i][n] = rows of K block i times rows of Q tile n, raw scores.
__device__ __forceinline__ void multiply_k(float (&s)[KEY_BLOCKS][cfg::ROW_TILES][4], const u8* tile, const u8* q,
                                           const QueryFragments& queries, int lane) {
#pragma unroll
  for (int i = 0; i < KEY_BLOCKS; ++i) {
#pragma unroll
    for (int n = 0; n < cfg::ROW_TILES; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) s[i][n][e] = 0.f;
    }
  }
#pragma unroll
  for (int pair = 0; pair < DIM_BLOCKS / 2; ++pair) {
    u32 b[cfg::ROW_TILES][4];
#pragma unroll
    for (int n = 0; n < cfg::ROW_TILES; ++n) queries.get(b[n], q, n, pair, lane);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int i = 0; i < KEY_BLOCKS; ++i) {
        u32 a[4];
        Kv::load_k(a, tile, i * 16, 2 * pair + half, lane);
#pragma unroll
        for (int n = 0; n < cfg::ROW_TILES; ++n) {
          const u32 part[2] = {b[n][2 * half], b[n][2 * half + 1]};
          ptx::mma_m16n8k16<Elem>(s[i][n], a, part);
        }
      }
    }
  }
}

// o[n][mb] += V^T P^T; p as left by ColumnState::update.
__device__ __forceinline__ void multiply_v(float (&o)[cfg::ROW_TILES][DIM_BLOCKS][4],
                                           const float (&p)[KEY_BLOCKS][cfg::ROW_TILES][4], const u8* tile, int lane) {
#pragma unroll
  for (int i = 0; i < KEY_BLOCKS; ++i) {
    // P^T: an accumulator holds (key g, rows 2t, 2t+1), the operand wants (keys 2t, 2t+1, row g).
    u32 b[cfg::ROW_TILES][2];
#pragma unroll
    for (int n = 0; n < cfg::ROW_TILES; ++n) {
      b[n][0] = ptx::movmatrix_trans(ptx::pack2<Elem>(p[i][n][0], p[i][n][1]));
      b[n][1] = ptx::movmatrix_trans(ptx::pack2<Elem>(p[i][n][2], p[i][n][3]));
    }
#pragma unroll
    for (int mb = 0; mb < DIM_BLOCKS; ++mb) {
      u32 a[4];
      Kv::load_v(a, tile, i * 16, mb, lane);
#pragma unroll
      for (int n = 0; n < cfg::ROW_TILES; ++n) ptx::mma_m16n8k16<Elem>(o[n][mb], a, b[n]);
    }
  }
}

// As multiply_v for a tile with infinities or NaN, where 0 times a hidden value would show: each row adds its own keys
// only. Slow, and rare: such values next to the newest tokens of a call with several of them.
__device__ __forceinline__ void multiply_v_visible(float (&o)[cfg::ROW_TILES][DIM_BLOCKS][4],
                                                   const float (&p)[KEY_BLOCKS][cfg::ROW_TILES][4], const u8* tile,
                                                   const DecodeParams& params, const Work& w, int key0, int lane) {
  const int g = lane / 4, t = lane % 4;
#pragma unroll
  for (int n = 0; n < cfg::ROW_TILES; ++n) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const KeyRange keys = w.keys(params, n * 8 + 2 * t + c);
      const int lo = keys.lo - key0, hi = min(keys.hi, w.end) - key0;
#pragma unroll
      for (int i = 0; i < KEY_BLOCKS; ++i) {
        for (int key = 0; key < 16; ++key) {
          const float held =
              key < 8 ? p[i][n][c] : p[i][n][c + 2];  // of keys g and g + 8, the same row in lanes of one t
          const float weight = __shfl_sync(FULL_MASK, held, key % 8 * 4 + t);
          if (i * 16 + key < lo || i * 16 + key >= hi) continue;
#pragma unroll
          for (int mb = 0; mb < DIM_BLOCKS; ++mb) {
            o[n][mb][c] += weight * Kv::value(tile, i * 16 + key, mb * 16 + g);
            o[n][mb][c + 2] += weight * Kv::value(tile, i * 16 + key, mb * 16 + g + 8);
          }
        }
      }
    }
  }
}

__device__ __forceinline__ void load_queries(const DecodeParams& p, const Work& w, u8* q) {
  for (int index = threadIdx.x; index < ROWS * QTile::CHUNKS; index += cfg::NUM_WARPS * WARP) {
    const int row = index / QTile::CHUNKS, chunk = index % QTile::CHUNKS;
    uint4 value = make_uint4(0, 0, 0, 0);
    if (row < w.num_rows) {
      value = ptx::ld_global_nc_v4(p.q + w.batch * p.q_stride_batch + w.token(p, row) * p.q_stride_token +
                                   w.head(p, row) * p.q_stride_head + chunk * 16);
    }
    *reinterpret_cast<uint4*>(q + QTile::offset(row, chunk)) = value;
  }
}

// Merges the warps, adds the sink, writes the result of the split.
__device__ __forceinline__ void finish(const DecodeParams& p, const Work& w, Smem& sm) {
  const bool direct = p.num_splits == 1;
  __syncthreads();  // every warp's o, m, l are in shared memory
  for (int row = threadIdx.x; row < w.num_rows; row += cfg::NUM_WARPS * WARP) {
    float m = neg_inf();
    for (int i = 0; i < cfg::NUM_WARPS; ++i) m = fmaxf(m, sm.m[i][row]);
    float l = 0.f, total_m = m;
    for (int i = 0; i < cfg::NUM_WARPS; ++i) l += sm.l[i][row] * softmax::weight(sm.m[i][row], m);
    if (p.sinks != nullptr && w.split == 0) {
      softmax::add_sink(__ldg(p.sinks + w.head(p, row)), total_m, l);
    }
    // Parts go to merge.cu as they are: a rounded lse would cost their weights the precision that it lost.
    const float scale = direct ? softmax::inverse_sum(l) : 1.f;
    for (int i = 0; i < cfg::NUM_WARPS; ++i) {
      sm.weight[i][row] = softmax::weight(sm.m[i][row], total_m) * scale;
    }
    if (!direct) {
      reinterpret_cast<float2*>(p.state_partial)[w.flat(p, row)] = make_float2(total_m, l);
    } else if (p.lse != nullptr) {
      p.lse[w.flat(p, row)] = softmax::lse(total_m, l);
    }
  }
  __syncthreads();  // weights are in shared memory
  for (int index = threadIdx.x; index < w.num_rows * cfg::HEAD_DIM / 2; index += cfg::NUM_WARPS * WARP) {
    const int row = index / (cfg::HEAD_DIM / 2), dim = index % (cfg::HEAD_DIM / 2) * 2;
    float x = 0.f, y = 0.f;
#pragma unroll
    for (int i = 0; i < cfg::NUM_WARPS; ++i) {
      x += sm.weight[i][row] * sm.o[i][row][dim];
      y += sm.weight[i][row] * sm.o[i][row][dim + 1];
    }
    if (direct) {
      u8* out = p.out + w.batch * p.out_stride_batch + w.token(p, row) * p.out_stride_token +
                w.head(p, row) * p.out_stride_head;
      *reinterpret_cast<u32*>(out + dim * sizeof(Elem)) = ptx::pack2<Elem>(x, y);
    } else {
      *reinterpret_cast<float2*>(p.out_partial + w.flat(p, row) * cfg::HEAD_DIM + dim) = make_float2(x, y);
    }
  }
}

__device__ __forceinline__ void decode(const DecodeParams& p, Smem& sm) {
  const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
  const Work w = find_work(p);
  if (w.begin == w.end && w.split > 0) {
    // An empty part is its state alone; split 0 is never skipped, it carries the sink and the zeros of an empty row.
    for (int row = threadIdx.x; row < w.num_rows; row += cfg::NUM_WARPS * WARP) {
      reinterpret_cast<float2*>(p.state_partial)[w.flat(p, row)] = make_float2(neg_inf(), EMPTY_PART);
    }
    return;
  }

  u8* ring = sm.ring[warp][0];
  Loader loader(p, w, ring, warp, lane);
#pragma unroll
  for (int i = 0; i < cfg::NUM_STAGES - 1; ++i) {
    if (i % 2 == 0) {
      loader.load_k(ring, lane);
    } else {
      loader.load_v(ring, lane);
    }
  }
  load_queries(p, w, sm.q);
  __syncthreads();  // q is in shared memory
  QueryFragments queries;
  queries.keep(sm.q, lane);

  // Steps inside these bounds need no mask: every row of the CTA sees all their keys.
  const int full_lo = w.keys(p, w.num_rows - 1).lo, full_hi = min(w.keys(p, 0).hi, w.end);

  softmax::ColumnState<cfg::ROW_TILES> state;
  float o[cfg::ROW_TILES][DIM_BLOCKS][4];  // O^T: head_dim 16 mb + g (+8), rows 2t, 2t+1 of tile n
#pragma unroll
  for (int n = 0; n < cfg::ROW_TILES; ++n) {
#pragma unroll
    for (int mb = 0; mb < DIM_BLOCKS; ++mb) {
#pragma unroll
      for (int e = 0; e < 4; ++e) o[n][mb][e] = 0.f;
    }
  }

  const u8* slot = ring;
  const auto next_slot = [&] {
    slot += cfg::TILE_KV * Kv::ROW_BYTES;
    if (slot == ring + cfg::NUM_STAGES * cfg::TILE_KV * Kv::ROW_BYTES) slot = ring;
  };
  for (int key0 = w.begin + warp * cfg::TILE_KV; key0 < w.end; key0 += cfg::NUM_WARPS * cfg::TILE_KV) {
    ptx::cp_async_wait<cfg::NUM_STAGES - 2>();
    __syncwarp();  // K of this step is visible to all lanes, and all have read the slot refilled next
    loader.load_ahead<true>(ring, lane);
    float s[KEY_BLOCKS][cfg::ROW_TILES][4];
    multiply_k(s, slot, sm.q, queries, lane);
    next_slot();

#pragma unroll
    for (int i = 0; i < KEY_BLOCKS; ++i) {
#pragma unroll
      for (int n = 0; n < cfg::ROW_TILES; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          float& x = s[i][n][e];
          x = p.softcap_log2 != 0.f ? softmax::softcap(x, p.softcap_log2, p.scale_over_softcap)
                                    : x * p.softmax_scale_log2;
        }
      }
    }
    const bool masked = key0 < full_lo || key0 + cfg::TILE_KV > full_hi;
    if (masked) {
#pragma unroll
      for (int n = 0; n < cfg::ROW_TILES; ++n) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const KeyRange keys = w.keys(p, n * 8 + 2 * t + c);
          const int lo = keys.lo - key0 - g, hi = min(keys.hi, w.end) - key0 - g;
#pragma unroll
          for (int i = 0; i < KEY_BLOCKS; ++i) {
            if (i * 16 < lo || i * 16 >= hi) s[i][n][c] = neg_inf();
            if (i * 16 + 8 < lo || i * 16 + 8 >= hi) s[i][n][c + 2] = neg_inf();
          }
        }
      }
    }
    state.update(s, [&](int n, int c, float factor) {
#pragma unroll
      for (int mb = 0; mb < DIM_BLOCKS; ++mb) {
        o[n][mb][c] *= factor;
        o[n][mb][c + 2] *= factor;
      }
    });

    ptx::cp_async_wait<cfg::NUM_STAGES - 2>();
    __syncwarp();  // V of this step is visible to all lanes, and all have read K
    loader.load_ahead<false>(ring, lane);
    if (masked && p.seqlen_q > 1 && !Kv::all_finite(slot, cfg::TILE_KV, lane)) {
      multiply_v_visible(o, s, slot, p, w, key0, lane);
    } else {
      multiply_v(o, s, slot, lane);
    }
    next_slot();
  }

  state.reduce();
  ptx::cp_async_wait<0>();
  __syncthreads();  // all warps are done with the ring, whose memory sm.o takes over
#pragma unroll
  for (int n = 0; n < cfg::ROW_TILES; ++n) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int row = n * 8 + 2 * t + c;
#pragma unroll
      for (int mb = 0; mb < DIM_BLOCKS; ++mb) {
        sm.o[warp][row][mb * 16 + g] = o[n][mb][c];
        sm.o[warp][row][mb * 16 + g + 8] = o[n][mb][c + 2];
      }
      if (g == 0) {
        sm.m[warp][row] = state.m[n][c];
        sm.l[warp][row] = state.l[n][c];
      }
    }
  }
  finish(p, w, sm);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(cfg::NUM_WARPS* WARP, cfg::CTAS_PER_SM)
    decode_kernel(const __grid_constant__ DecodeParams p) {
  decode(p, *reinterpret_cast<Smem*>(ptx::dynamic_smem()));
}
