// kv/tiles_sm90.cuh -- the tile seam of prefill_sm90.cu, which names a format only through SwizzledTilesOf.
// SPDX-License-Identifier: Apache-2.0
//
// A policy has:
//   Operand        element type of the wgmma that multiplies its tiles
//   EXPANDED       whether the producer's warps write a tile rather than TMA. Its values are its elements times two to
//                  a power of the tile, in the rotated domain, so that Q and O must be there too
//   Expander       tiles on their way, by a warpgroup; if EXPANDED. CODE_BYTES of shared memory have TILE_BYTES of each
//                  begin(head), and for each tile in this order, though not one by one: fetch_codes to a slot,
//                  fetch_norms, take_codes from the slot once they have landed, scale_norms, expand
//   store_queries, restore    rows of Q and of O of a warp; if EXPANDED
//   load_row, is_bad          a row in the lanes of a warp, outside of that domain; whether it is not finite: for what
//                             is rare
#ifndef CUATTN_KV_TILES_SM90_CUH
#define CUATTN_KV_TILES_SM90_CUH
#include "kv/tiles_sm90_raw16.cuh"
#if CUATTN_TBQ4
#include "kv/tiles_sm90_tbq4.cuh"
#endif

template <KvFormat FORMAT, class Elem, int DIM>
struct SwizzledTilesOf;
template <class Elem, int DIM>
struct SwizzledTilesOf<KvFormat::RAW16, Elem, DIM> {
  using type = SwizzledRaw16<Elem, DIM>;
};
#if CUATTN_TBQ4
template <class Elem, int DIM>
struct SwizzledTilesOf<KvFormat::TBQ4, Elem, DIM> {
  using type = tbq4::SwizzledTiles<Elem, DIM>;
};
#endif

#endif
