// kv/kv.cuh -- the list of KV cache formats. A kernel names a format only through KvOf.
// SPDX-License-Identifier: Apache-2.0
//
// A policy has:
//   Operand                 element type of the mma that multiplies its rows
//   ROW_BYTES, CHUNKS       of a row in the cache, and its 16-byte pieces
//   offset(row, chunk)      place in a shared tile; ROW_PERIOD rows further it is as many rows further
//   NORMS                   float16 norms of a row in a plane of their own; 0: none
//   PARTS                   blocks of head_dim with an accumulator or a P of their own
//   IN_ROTATED_DOMAIN       whether rows are rotated, so that Q and O must be too, and may have lost a mean
//   SCALES_QUERIES          whether rows of Q are stored with a factor each, by which scores are multiplied
//   HAS_SCALE               whether values are multiplied by a scale of their KV head: the factor of Q (K), or O (V)
//   fetch_queries, store_queries  Q on its way, and in a shared tile
//   restore                 a row of O in the lanes of a warp
//   fill_table              what its operands look up
//   KeyLane, ValueLane      what a lane needs of the table and of tiles for every step
//   Keys, Values            A operands of S^T = K Q^T and O^T = V^T P^T for 16 rows of a tile and one part; floats have
//                           get_values and operand_row for Values (common/decode_floats.cuh)
//   dim(mb, g, upper)       head_dim of the rows of V's operands
//   O_STRIDE, o_place, store_o    rows of O in shared memory
//   value, all_finite       for tiles in which a row may not see every key; formats without norms only, floats no value
#ifndef CUATTN_KV_KV_CUH
#define CUATTN_KV_KV_CUH
#include "kv/fp8.cuh"
#include "kv/raw16.cuh"
#include "kv/raw32.cuh"
#if CUATTN_TBQ4
#include "kv/tbq4.cuh"
#endif

template <KvFormat FORMAT, class Elem, int HEAD_DIM>
struct KvOf;
template <class Elem, int HEAD_DIM>
struct KvOf<KvFormat::RAW16, Elem, HEAD_DIM> {
  using type = Raw16<Elem, HEAD_DIM>;
};
template <int HEAD_DIM>
struct KvOf<KvFormat::RAW32, float, HEAD_DIM> {
  using type = Raw32<HEAD_DIM>;
};
template <class Elem, int HEAD_DIM>
struct KvOf<KvFormat::FP8, Elem, HEAD_DIM> {
  using type = Fp8<Elem, HEAD_DIM>;
};
#if CUATTN_TBQ4
template <class Elem, int HEAD_DIM>
struct KvOf<KvFormat::TBQ4, Elem, HEAD_DIM> {
  using type = tbq4::Rows<Elem, HEAD_DIM>;
};
#endif

#endif
