// kv/tiles_raw16.cuh -- tiles of fp16 or bf16 rows.
// SPDX-License-Identifier: Apache-2.0
#ifndef CUATTN_KV_TILES_RAW16_CUH
#define CUATTN_KV_TILES_RAW16_CUH
#include "kv/tile_elements.cuh"
#include "kv/tiles_raw.cuh"

template <class Elem, int DIM>
struct Raw16Tiles : TileElements<Elem, DIM>, RawTiles<Tile16<DIM>> {
  using Operand = Elem;
  using Tile = Tile16<DIM>;
};

#endif
