// kv/tiles.cuh -- the tile seam: K and V as tiles of rows. A kernel names a format only through TilesOf.
// SPDX-License-Identifier: Apache-2.0
//
// A policy has:
//   Operand            element type of the mma that multiplies its rows
//   Tile               geometry of the rows that operands are read from
//   Source             geometry of the rows as copies bring them
//   Expansion          makes a tile of what copies bring, one tile ahead, by EXPAND_STEPS calls of make and put in all
//                      threads; 0: a tile is what they bring
//   NORMS              float16 norms of a row in a plane of their own; 0: none
//   IN_ROTATED_DOMAIN  whether rows are rotated, so that Q and O must be too
//   Buffers            its shared memory: incoming(i) for the copy of tile i, tile(i) to read operands from, whose
//                      values are its elements times 2 to the power log2_scale(i); store_norms
//   store_queries      Q to shared memory
//   restore            a row of O in the lanes of a warp
//   pair               elements of a tile; in 16 bits all_finite and clear too
#ifndef CUATTN_KV_TILES_CUH
#define CUATTN_KV_TILES_CUH
#include "kv/tiles_raw16.cuh"
#include "kv/tiles_raw32.cuh"
#if CUATTN_TBQ4
#include "kv/tiles_tbq4.cuh"
#endif

template <KvFormat FORMAT, class Elem, int DIM>
struct TilesOf;
template <class Elem, int DIM>
struct TilesOf<KvFormat::RAW16, Elem, DIM> {
  using type = Raw16Tiles<Elem, DIM>;
};
template <int DIM>
struct TilesOf<KvFormat::RAW32, float, DIM> {
  using type = Raw32Tiles<DIM>;
};
#if CUATTN_TBQ4
template <class Elem, int DIM>
struct TilesOf<KvFormat::TBQ4, Elem, DIM> {
  using type = tbq4::Tiles<Elem, DIM>;
};
#endif

#endif
