// append.cu -- new tokens of all sequences and heads into the caches of K and V, of any format.
// SPDX-License-Identifier: Apache-2.0
//
//   grid   (enough for all SMs, or fewer; K, V)      block  NUM_WARPS * 32
//   warp   four pieces of PIECE values at a time, eight lanes each, until none is left
//
// Rows are [batch, seqlen_new, heads]; a row has HEAD_DIM / PIECE pieces. Token i of a sequence stands at position
// kv_len - seqlen_new + i; one without a place in the cache is left out.
#include "common/paging.cuh"
#include "common/params.cuh"
#include "kv/writer.cuh"

namespace {

using In = ElemOf<cfg::IN_DTYPE>::type;
using Elem = ElemOf<cfg::DTYPE>::type;

constexpr u32 PIECES_PER_ROW = cfg::HEAD_DIM / cfg::PIECE;
constexpr u32 PIECES_PER_WARP = WARP / kv::LANES;
static_assert(sizeof(AppendParams) == cfg::PARAMS_BYTES, "cuattn/_params.py and params.cuh disagree");
static_assert(PIECES_PER_ROW * cfg::PIECE == cfg::HEAD_DIM, "pieces fill a row");

template <KvFormat FORMAT>
__device__ __forceinline__ void append(const AppendParams& p, const AppendSide& side) {
  using Writer = typename kv::WriterOf<FORMAT, Elem>::type;
  static_assert(Writer::SMEM_BYTES <= cfg::SMEM_BYTES, "cuattn/_plan and kv/writer.cuh disagree on shared memory");
  const Writer writer(ptx::dynamic_smem());
  ptx::griddepcontrol_wait();

  const u32 lane = threadIdx.x % WARP;
  const u32 num_pieces = static_cast<u32>(p.num_rows) * PIECES_PER_ROW;
  const u32 step = gridDim.x * cfg::NUM_WARPS * PIECES_PER_WARP;
  for (u32 first = (blockIdx.x * cfg::NUM_WARPS + threadIdx.x / WARP) * PIECES_PER_WARP; first < num_pieces;
       first += step) {
    // Lanes past the end repeat a piece, for the shuffles' sake, and write nothing.
    const bool exists = first + lane / kv::LANES < num_pieces;
    const u32 piece = exists ? first + lane / kv::LANES : first;
    const u32 row = piece / PIECES_PER_ROW;
    kv::Slot slot;
    slot.dim = static_cast<int>(piece % PIECES_PER_ROW * cfg::PIECE + lane % kv::LANES * kv::VALUES);
    slot.head = static_cast<int>(row % p.num_kv_heads);
    const u32 token = row / p.num_kv_heads % p.seqlen_new;
    const i64 sequence = row / p.num_kv_heads / p.seqlen_new;

    const u8* kv_len = reinterpret_cast<const u8*>(p.kv_len) + sequence * p.kv_len_stride;
    const i64 end = __ldg(reinterpret_cast<const int*>(kv_len));
    const i64 place = end - p.seqlen_new + token;
    const bool inside = exists && place >= 0 && place < p.capacity;
    if (!__any_sync(FULL_MASK, inside)) continue;
    const int position = static_cast<int>(place);

    const kv::Values<In> x(side.rows + sequence * side.rows_stride_batch + token * side.rows_stride_token +
                           slot.head * side.rows_stride_head + slot.dim * static_cast<i64>(sizeof(In)));
    // 16 bits for readers that want the first and the last tokens exactly. Of tokens that meet in a slot of the ring
    // only the last is written.
    slot.page = sequence;
    if (inside && side.sink != nullptr && position < p.num_sink) {
      slot.token = position;
      x.template store_as<Elem>(side.sink + slot.dim * 2 +
                                slot.offset(side.sink_stride_batch, side.sink_stride_token, side.sink_stride_head));
    }
    if (inside && side.recent != nullptr && position >= min(end, static_cast<i64>(p.capacity)) - p.num_recent) {
      slot.token = position % p.num_recent;
      x.template store_as<Elem>(
          side.recent + slot.dim * 2 +
          slot.offset(side.recent_stride_batch, side.recent_stride_token, side.recent_stride_head));
    }
    if (inside) {
      const u8* table = reinterpret_cast<const u8*>(p.page_table);
      const PageTable pages{table == nullptr ? nullptr : table + sequence * p.page_table_stride_batch,
                            p.page_table_stride_page, Divisor(p.page_size), static_cast<int>(sequence)};
      slot.page = pages.page(position);
      slot.token = pages.slot(position);
    }
    writer.write(side, x, slot, inside);
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(cfg::NUM_WARPS* WARP, cfg::CTAS_PER_SM)
    append_kernel(const __grid_constant__ AppendParams p) {
  // One copy of the code where both have one format.
  if constexpr (cfg::K_FORMAT == cfg::V_FORMAT) {
    append<cfg::K_FORMAT>(p, blockIdx.y == 0 ? p.k : p.v);
  } else if (blockIdx.y == 0) {
    append<cfg::K_FORMAT>(p, p.k);
  } else {
    append<cfg::V_FORMAT>(p, p.v);
  }
}
