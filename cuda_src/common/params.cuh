// common/params.cuh -- the kernels' arguments: one struct by value for each kernel.
// SPDX-License-Identifier: Apache-2.0
//
// cuattn/_params.py mirrors every field in this order; tests/cpu/test_params.py compares the two. Strides are in bytes,
// so that a cache format needs no other unit.
#ifndef CUATTN_COMMON_PARAMS_CUH
#define CUATTN_COMMON_PARAMS_CUH
#include "common/types.cuh"

struct DecodeParams {
  const u8* q;            // [batch, seqlen_q, num_qo_heads, head_dim], Elem
  const u8* k;            // [num_pages, page_size, num_kv_heads] rows, see kv/*.cuh
  const u8* v;            // as k
  const u8* k_norms;      // [num_pages, page_size, num_kv_heads] norms of the rows; null: a format without norms
  const u8* v_norms;      // as k_norms
  const float* k_mean;    // [num_kv_heads, head_dim], what keys had before it was subtracted; null: none
  const float* v_mean;    // as k_mean
  u8* out;                // as q; written when out_partial is null
  float* lse;             // [batch, seqlen_q, num_qo_heads], natural log; null: not wanted
  float* out_partial;     // [num_splits, batch, seqlen_q, num_qo_heads, head_dim], not normalized
  float* state_partial;   // [num_splits, batch, seqlen_q, num_qo_heads, 2], (m, l); l = -1: empty, the part not written
  const int* kv_len;      // [batch], tokens
  const int* page_table;  // [batch, max_pages]; null: page b is all of sequence b
  const float* sinks;     // [num_qo_heads], score of a key whose value is zero; null: none
  int* shares;  // [batch, 2]: first part of a sequence and how many it has, written here; null: num_splits each
  i64 q_stride_batch;
  i64 q_stride_token;
  i64 q_stride_head;
  i64 k_stride_page;
  i64 k_stride_token;
  i64 k_stride_head;
  i64 k_stride_step;  // of NUM_WARPS * TILE_KV tokens, here and below
  i64 v_stride_page;
  i64 v_stride_token;
  i64 v_stride_head;
  i64 v_stride_step;
  i64 k_norms_stride_page;
  i64 k_norms_stride_token;
  i64 k_norms_stride_head;
  i64 k_norms_stride_step;
  i64 v_norms_stride_page;
  i64 v_norms_stride_token;
  i64 v_norms_stride_head;
  i64 v_norms_stride_step;
  i64 out_stride_batch;
  i64 out_stride_token;
  i64 out_stride_head;
  i64 kv_len_stride;
  i64 page_table_stride_batch;
  i64 page_table_stride_page;
  int seqlen_q;
  int num_qo_heads;
  int group;      // query heads per KV head
  int page_size;  // tokens
  int capacity;   // tokens of a sequence at most
  int num_splits;
  int first_key;  // of those, keys max(first_key, kv_len - last_keys) .. min(end_key, kv_len - skip_last) - 1
  int last_keys;  // are attended to here, and the others by other launches
  int end_key;
  int skip_last;
  int window_left;           // keys p - left .. p + right of a query at key position p are visible; -1: unbounded
  int window_right;          // causal is a right window of 0
  float softmax_scale_log2;  // softmax_scale * log2(e)
  float softcap_log2;        // softcap * log2(e); 0: none
  float scale_over_softcap;  // softmax_scale / softcap
  int split_size;            // tokens of a split, at whose multiples sequences are cut; 0: num_splits even ones
  int batch;
  int asks_ahead;       // whether CTAs ask L2 for keys before the grid before them has ended
  u32 page_reciprocal;  // of a Divisor by page_size
  int reserved;
  const u8* tree_mask;  // [batch, seqlen_q, seqlen_q]: which of the last seqlen_q keys a token sees; null: all
  i64 tree_mask_stride_batch;
  i64 tree_mask_stride_token;
  i64 tree_mask_stride_key;
  const float* k_scales;  // [num_kv_heads], what values of fp8 are multiplied by; null: k_scale, for all heads
  const float* v_scales;  // as k_scales
  float k_scale;
  float v_scale;
};

struct MergeParams {
  const u8* out_partial;     // [num_parts, dim0, dim1, heads, head_dim], In
  const float* lse_partial;  // [num_parts, dim0, dim1, heads], natural log; -inf: the part is empty, whatever it holds.
                             // Parts::STATE: [num_parts, dim0, dim1, heads, 2], (m, l); l = -1: empty
  u8* out;                   // [dim0, dim1, heads, head_dim], Out
  float* lse;                // [dim0, dim1, heads], contiguous; null: not wanted
  const int* shares;         // [dim0, 2]: first part and number of parts of each; null: parts 0 .. num_parts - 1
  i64 out_partial_stride_part;
  i64 out_partial_stride_dim0;
  i64 out_partial_stride_dim1;
  i64 out_partial_stride_head;
  i64 lse_partial_stride_part;
  i64 lse_partial_stride_dim0;
  i64 lse_partial_stride_dim1;
  i64 lse_partial_stride_head;
  i64 out_stride_dim0;
  i64 out_stride_dim1;
  i64 out_stride_head;
  int num_parts;
  int dim1;
  int heads;
  int reserved;
};

struct PrefillParams {
  const u8* q;              // [batch, num_tokens, num_qo_heads, head_dim], or ragged [num_tokens, num_qo_heads, ...]
  const u8* k;              // [num_pages, page_size, num_kv_heads] rows, see kv/*.cuh; ragged: one page
  const u8* v;              // as k
  const u8* k_norms;        // norms of the rows of k; null: a format without norms
  const u8* v_norms;        // as k_norms
  const float* k_mean;      // [num_kv_heads, head_dim], what keys had before it was subtracted; null: none
  const float* v_mean;      // as k_mean
  u8* out;                  // as q, value_dim
  float* lse;               // as q without head_dim, contiguous, natural log; null: not wanted
  float* out_partial;       // [num_splits, batch, num_tokens, num_qo_heads, value_dim]; null: one split, which is out
  float* state_partial;     // the same without value_dim, 2: (m, l) of a split; l = -1: empty, whatever its out holds
  const int* cu_seqlens_q;  // [batch + 1], where the tokens of each sequence begin; null: not ragged
  const int* cu_seqlens_k;  // [batch + 1], as cu_seqlens_q; null: pages
  const int* kv_len;        // [batch], tokens; null: capacity
  const int* page_table;    // [batch, max_pages]; null: page b is all of sequence b
  const float* sinks;       // [num_qo_heads], score of a key whose value is zero; null: none
  i64 q_stride_batch;
  i64 q_stride_token;
  i64 q_stride_head;
  i64 k_stride_page;
  i64 k_stride_token;
  i64 k_stride_head;
  i64 v_stride_page;
  i64 v_stride_token;
  i64 v_stride_head;
  i64 k_norms_stride_page;
  i64 k_norms_stride_token;
  i64 k_norms_stride_head;
  i64 v_norms_stride_page;
  i64 v_norms_stride_token;
  i64 v_norms_stride_head;
  i64 out_stride_batch;
  i64 out_stride_token;
  i64 out_stride_head;
  i64 kv_len_stride;
  i64 page_table_stride_batch;
  i64 page_table_stride_page;
  int batch;
  int num_tokens;  // of q, of a sequence or of all ragged ones
  int num_qo_heads;
  int num_kv_heads;
  int group;        // query heads per KV head
  int page_size;    // tokens
  int capacity;     // tokens of k and v, of a sequence or of all ragged ones
  int window_left;  // as in DecodeParams
  int window_right;
  int num_tiles;             // of query rows, of a sequence or of all ragged ones
  int streams_at_once;       // KV heads, or KV heads of sequences, whose tiles are worked on together
  int num_splits;            // parts into which the keys that a CTA's rows see are cut
  float softmax_scale_log2;  // softmax_scale * log2(e)
  float softcap_log2;        // softcap * log2(e); 0: none
  float scale_over_softcap;  // softmax_scale / softcap
  int reserved;
};

// Of prefill_sm90.cu.
struct TiledPrefillParams {
  TensorMap q_map;  // [batch or 1, num_tokens, num_qo_heads, head_dim], boxes of 64 tokens of a head and 64 of head_dim
  TensorMap k_map;  // [num_pages, page_size, num_kv_heads, head_dim], of TILE_KV tokens of a page; if in 16 bits
  TensorMap v_map;
  const u8* q;  // the same arrays, for ordinary loads
  const u8* k;
  const u8* v;
  const u8* k_norms;        // [num_pages, page_size, num_kv_heads] norms of the rows; null: a format without norms
  const u8* v_norms;        // as k_norms
  u8* out;                  // as q
  float* lse;               // as q without head_dim, contiguous, natural log; null: not wanted
  const int* cu_seqlens_q;  // [batch + 1], where the tokens of each sequence begin; null: not ragged
  const int* cu_seqlens_k;  // [batch + 1], as cu_seqlens_q; null: pages
  const int* kv_len;        // [batch], tokens; null: capacity
  const int* page_table;    // [batch, max_pages]; null: page b is all of sequence b
  const float* sinks;       // [num_qo_heads], score of a key whose value is zero; null: none
  int* items_claimed;       // of the items that no CTA begins with, 0 at launch; null: there are none
  i64 q_stride_batch;
  i64 q_stride_token;
  i64 q_stride_head;
  i64 k_stride_page;
  i64 k_stride_token;
  i64 k_stride_head;
  i64 v_stride_page;
  i64 v_stride_token;
  i64 v_stride_head;
  i64 k_norms_stride_page;
  i64 k_norms_stride_token;
  i64 k_norms_stride_head;
  i64 v_norms_stride_page;
  i64 v_norms_stride_token;
  i64 v_norms_stride_head;
  i64 out_stride_batch;
  i64 out_stride_token;
  i64 out_stride_head;
  i64 kv_len_stride;
  i64 page_table_stride_batch;
  i64 page_table_stride_page;
  int batch;
  int num_tokens;  // of q, of a sequence or of all ragged ones
  int num_qo_heads;
  int num_kv_heads;
  int group;        // query heads per KV head
  int page_size;    // tokens
  int capacity;     // tokens of k and v, of a sequence or of all ragged ones
  int window_left;  // as in DecodeParams
  int window_right;
  int num_tiles;             // of query tokens, of a sequence or of all ragged ones
  int num_streams;           // KV heads, or KV heads of sequences
  int streams_at_once;       // whose tiles are worked on together
  int num_items;             // tiles of query heads in all
  float softmax_scale_log2;  // softmax_scale * log2(e), positive
  float softcap_log2;        // softcap * log2(e); with cfg::SOFTCAP
  float scale_over_softcap;  // softmax_scale / softcap
  int reserved[12];          // a tensor map aligns to 128 bytes
};

struct QuantizeParams {
  const u8* x;        // [dim0, dim1, heads, head_dim], In
  const float* mean;  // [heads, head_dim], subtracted; null: none
  u8* codes;          // [dim0, dim1, heads, head_dim / 2], contiguous
  u16* norms;         // [dim0, dim1, heads, head_dim / block], float16, contiguous
  int* clamped;       // [1], counts norms too large for float16
  i64 x_stride_dim0;
  i64 x_stride_dim1;
  i64 x_stride_head;
  i64 num_rows;  // dim0 * dim1 * heads
  int dim1;
  int heads;
};

struct DequantizeParams {
  const u8* codes;    // [dim0, dim1, heads, head_dim / 2]
  const u8* norms;    // [dim0, dim1, heads, head_dim / block], float16
  const float* mean;  // [heads, head_dim], added; null: none
  u8* out;            // [dim0, dim1, heads, head_dim], Out, contiguous
  i64 codes_stride_dim0;
  i64 codes_stride_dim1;
  i64 codes_stride_head;
  i64 norms_stride_dim0;
  i64 norms_stride_dim1;
  i64 norms_stride_head;
  i64 num_rows;  // dim0 * dim1 * heads
  int dim1;
  int heads;
};

// What append.cu writes of K, or of V.
struct AppendSide {
  const u8* rows;     // [batch, seqlen_new, num_kv_heads, head_dim], In
  u8* cache;          // [num_pages, page_size, num_kv_heads] rows of 16-bit values, or the codes of TBQ4
  u8* norms;          // [num_pages, page_size, num_kv_heads, head_dim / block], float16; TBQ4 only
  const float* mean;  // [num_kv_heads, head_dim], subtracted before encoding; null: none
  int* clamped;       // [1], counts norms too large for float16; null: not counted
  u8* sink;           // [batch, num_sink, num_kv_heads, head_dim], Elem: the first tokens; null: none
  u8* recent;         // [batch, num_recent, num_kv_heads, head_dim], Elem: token p at p % num_recent; null: none
  i64 rows_stride_batch;
  i64 rows_stride_token;
  i64 rows_stride_head;
  i64 cache_stride_page;
  i64 cache_stride_token;
  i64 cache_stride_head;
  i64 norms_stride_page;
  i64 norms_stride_token;
  i64 norms_stride_head;
  i64 sink_stride_batch;
  i64 sink_stride_token;
  i64 sink_stride_head;
  i64 recent_stride_batch;
  i64 recent_stride_token;
  i64 recent_stride_head;
  const float* scales;  // [num_kv_heads], what values are divided by before they become fp8; null: scale, for all heads
  float scale;
  int reserved;
};

struct AppendParams {
  AppendSide k;
  AppendSide v;
  const int* kv_len;      // [batch], tokens, the new ones included
  const int* page_table;  // [batch, max_pages]; null: page b is all of sequence b
  i64 kv_len_stride;
  i64 page_table_stride_batch;
  i64 page_table_stride_page;
  i64 num_rows;  // batch * seqlen_new * num_kv_heads
  int seqlen_new;
  int num_kv_heads;
  int page_size;  // tokens
  int capacity;   // tokens that the cache holds of a sequence
  int num_sink;
  int num_recent;
};

#endif
