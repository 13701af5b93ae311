// common/paging.cuh -- KV position to page. A dense cache is one page a sequence.
// SPDX-License-Identifier: Apache-2.0
#ifndef CUATTN_COMMON_PAGING_CUH
#define CUATTN_COMMON_PAGING_CUH
#include "common/divisor.cuh"

struct PageTable {
  const u8* row;   // this sequence's entries; null: the sequence is page `dense_page`
  i64 stride;      // bytes
  Divisor divide;  // by the tokens of a page
  int dense_page;
  bool dense;  // no table, and no position asked for is past the page: successive tokens are successive rows

  __device__ __forceinline__ int size() const { return static_cast<int>(divide.divisor); }
  // The page that holds `position`. Entries past the last used one are never read: ask only for positions < kv_len.
  __device__ __forceinline__ int page(int position) const {
    if (row == nullptr) return dense_page;
    u32 rest;
    return __ldg(reinterpret_cast<const int*>(row + stride * divide.divide(static_cast<u32>(position), rest)));
  }
  // Without a table a page may be a ring, of tokens that are the newest.
  __device__ __forceinline__ int slot(int position) const {
    if (position < size()) return position;
    u32 rest;
    divide.divide(static_cast<u32>(position), rest);
    return static_cast<int>(rest);
  }
};

// The same for kernels that look up many positions. Without a table successive positions are successive rows.
struct PagedRows {
  bool are_there;
  const u8* table;        // this sequence's entries
  i64 stride;             // bytes
  const Divisor& divide;  // by the tokens of a page

  __device__ __forceinline__ int size() const { return static_cast<int>(divide.divisor); }
  // The page that holds `position`, and where in it.
  __device__ __forceinline__ int find(int position, int& slot) const {
    u32 rest;
    const u32 page = divide.divide(static_cast<u32>(position), rest);
    slot = static_cast<int>(rest);
    return __ldg(reinterpret_cast<const int*>(table + stride * page));
  }
};

#endif
