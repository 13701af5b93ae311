// kv/kv.cuh -- the list of KV cache formats. A kernel names a format only through KvOf.
// SPDX-License-Identifier: Apache-2.0
//
// A policy has: ROW_BYTES, CHUNKS (16-byte pieces of a row), offset(row, chunk) in a shared tile, load_k and load_v
// (A operands of mma.m16n8k16 in registers), and for tiles in which a row may not see every key value and all_finite.
#ifndef CUATTN_KV_KV_CUH
#define CUATTN_KV_KV_CUH
#include "kv/raw16.cuh"

template <KvFormat FORMAT, class Elem, int HEAD_DIM>
struct KvOf;
template <class Elem, int HEAD_DIM>
struct KvOf<KvFormat::RAW16, Elem, HEAD_DIM> {
  using type = Raw16<Elem, HEAD_DIM>;
};

#endif
