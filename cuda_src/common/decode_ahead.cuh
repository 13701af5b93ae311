// common/decode_ahead.cuh -- what a CTA of decode.cu asks L2 for while the grid before it ends.
// SPDX-License-Identifier: Apache-2.0
#ifndef CUATTN_COMMON_DECODE_AHEAD_CUH
#define CUATTN_COMMON_DECODE_AHEAD_CUH
#include "common/decode_work.cuh"
#include "common/ptx.cuh"

// Asks for as many keys and values of a split as the rings hold, if the length stays what it was. All of it, and the
// length, may be written until griddepcontrol_wait: this is a guess, and every byte is read again behind the wait. Not
// for pages, nor for parts given by lengths; of the newest tokens, which are a ring, nothing is asked for.
template <class K, class V>
__device__ __forceinline__ void ask_for_keys(const DecodeParams& p, Work w) {
  constexpr int KEYS = (cfg::NUM_STAGES + 1) / 2 * cfg::KEYS_PER_STEP;
  find_keys(p, limited(p, ptx::ld_relaxed(place_of_length(p, w.batch))), w);
  if (w.end > p.page_size) return;
  const u8* k = p.k + w.batch * p.k_stride_page + w.kv_head * p.k_stride_head;
  const u8* v = p.v + w.batch * p.v_stride_page + w.kv_head * p.v_stride_head;
  const int end = min(w.end, w.begin + KEYS);
  for (i64 key = w.begin + static_cast<int>(threadIdx.x); key < end; key += cfg::NUM_WARPS * WARP) {
    ptx::prefetch_l2(k + key * p.k_stride_token, K::ROW_BYTES);
    ptx::prefetch_l2(v + key * p.v_stride_token, V::ROW_BYTES);
  }
}

#endif
