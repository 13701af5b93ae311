// common/mask.cuh -- which keys a query token sees. Causal, windows and lengths are one range; nothing else masks.
// SPDX-License-Identifier: Apache-2.0
#ifndef CUATTN_COMMON_MASK_CUH
#define CUATTN_COMMON_MASK_CUH
#include "common/types.cuh"

// Keys lo .. hi - 1; empty when hi <= lo.
struct KeyRange {
  int lo, hi;
};

// The keys that query `token` of `seqlen_q` sees among `kv_len`. Queries are aligned to the end: token i stands at key
// position kv_len - seqlen_q + i. Both bounds grow with `token`.
__device__ __forceinline__ KeyRange visible_keys(int token, int seqlen_q, int kv_len, int left, int right) {
  const int position = kv_len - seqlen_q + token;
  KeyRange r{0, kv_len};
  if (left >= 0) r.lo = max(0, position - left);
  if (right >= 0) r.hi = max(0, min(kv_len, position + right + 1));
  return r;
}

#endif
