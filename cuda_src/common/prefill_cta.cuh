// common/prefill_cta.cuh -- sizes and types of a CTA of prefill_mma.cu, and which part of it a thread has.
// SPDX-License-Identifier: Apache-2.0
#ifndef CUATTN_COMMON_PREFILL_CTA_CUH
#define CUATTN_COMMON_PREFILL_CTA_CUH
#include "common/prefill_work.cuh"
#include "common/products16.cuh"
#include "common/products32.cuh"
#include "common/softmax.cuh"
#include "common/tile16.cuh"
#include "kv/tiles.cuh"

namespace {

using Elem = ElemOf<cfg::DTYPE>::type;
using K = TilesOf<cfg::K_FORMAT, Elem, cfg::HEAD_DIM>::type;
using V = TilesOf<cfg::V_FORMAT, Elem, cfg::VALUE_DIM>::type;
using QTile = typename K::Tile;

constexpr bool IN_FLOATS = SAME<Elem, float>;
constexpr int THREADS = cfg::NUM_WARPS * WARP;
constexpr int ROW_WARPS = cfg::NUM_WARPS / cfg::DIM_SPLITS;
constexpr int ROW_TILES = cfg::TILE_Q / ROW_WARPS / 16;  // of 16 rows, of a warp
constexpr int KEY_TILES = cfg::TILE_KV / 8;
constexpr int DIMS = cfg::VALUE_DIM / cfg::DIM_SPLITS;  // of a warp
constexpr int DIM_TILES = DIMS / 8;
constexpr int Q_ROW_BYTES = QTile::ROW_BYTES;
constexpr int O_ROW_BYTES = cfg::VALUE_DIM * sizeof(Elem);
static_assert(cfg::TILE_Q % (16 * ROW_WARPS) == 0, "a warp has whole tiles of 16 rows");
static_assert(cfg::TILE_KV % 8 == 0, "keys are the N of an mma");
static_assert(cfg::NUM_STAGES >= 2, "a stage is on its way while another is worked on");
static_assert(O_ROW_BYTES <= Q_ROW_BYTES, "o takes the place of q");
static_assert(cfg::DIM_SPLITS == 1 || DIMS * sizeof(Elem) % (16 * V::Tile::PERIOD) == 0,
              "parts are swizzled by themselves");

struct Smem {
  alignas(128) u8 q[cfg::TILE_Q * Q_ROW_BYTES];  // later o
  typename K::Buffers k;
  typename V::Buffers v;
  // Scores are raw products times scale, plus bias; where K is in a rotated domain.
  float q_scale[K::IN_ROTATED_DOMAIN ? cfg::TILE_Q : 1], q_bias[K::IN_ROTATED_DOMAIN ? cfg::TILE_Q : 1];
  u64 keys_turn, values_turn;  // mbarriers
  Work work;
  int hidden_bad;  // 1: some value that is infinite or NaN was replaced in a tile with a mask, or met in floats
};
static_assert(sizeof(Smem) == cfg::SMEM_BYTES, "cuattn/_plan and prefill_mma.cu disagree on shared memory");
static_assert(sizeof(PrefillParams) == cfg::PARAMS_BYTES, "cuattn/_params.py and params.cuh disagree");

// Of N tiles of 8 keys.
template <int N>
using ScoresOf = float[ROW_TILES][N][4];
using Outputs = float[ROW_TILES][DIM_TILES][4];
using State = softmax::RowState<ROW_TILES>;
using Products =
    Either<IN_FLOATS, Products32<K, V, ROW_TILES, DIM_TILES>, Products16<K, V, ROW_TILES, DIM_TILES>>::type;
using Factors = softmax::RowFactors<ROW_TILES, K::IN_ROTATED_DOMAIN>;

// Which part of the CTA's work a lane has.
struct Lane {
  int lane, g, t;
  int row0;      // first row of its warp
  int dim_part;  // of value_dim
  u32 q, k, v;   // where it begins to read, in tiles that begin at multiples of 128 bytes

  __device__ __forceinline__ Lane() {
    const int warp = threadIdx.x / WARP;
    lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
    row0 = warp % ROW_WARPS * ROW_TILES * 16;
    dim_part = warp / ROW_WARPS;
    q = QTile::offset(row0 + lane % 16, lane / 16);
    k = K::Tile::offset(lane / 16 * 8 + lane % 8, lane / 8 % 2);
    v = Products::value_place(lane) + dim_part * DIMS * sizeof(Elem);
  }
  // Row g (`c` 0) or g + 8 (1) of row tile r.
  __device__ __forceinline__ int row(int r, int c) const { return row0 + r * 16 + g + 8 * c; }
};

}  // namespace

#endif
