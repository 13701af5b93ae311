// kv/writer.cuh -- new rows into a KV cache of any format. A kernel names a format only through WriterOf.
// SPDX-License-Identifier: Apache-2.0
//
// Eight neighboring lanes hold PIECE values of a row, each VALUES neighboring ones. A writer has: SMEM_BYTES, a
// constructor that fills them, called by the whole block, and write, called by the whole warp together.
#ifndef CUATTN_KV_WRITER_CUH
#define CUATTN_KV_WRITER_CUH
#include "common/e4m3.cuh"
#include "common/params.cuh"
#include "common/ptx.cuh"
#include "kv/tbq4_codec.cuh"

namespace kv {

constexpr int LANES = tbq4::LANES;
constexpr int VALUES = cfg::PIECE / LANES;

// Words in accesses of 16 bytes, or of 8 or 4 where there are so few.
template <int WORDS>
__device__ __forceinline__ void load(u32 (&words)[WORDS], const u8* source) {
  if constexpr (WORDS == 2) {
    const uint2 two = *reinterpret_cast<const uint2*>(source);
    words[0] = two.x, words[1] = two.y;
  } else {
#pragma unroll
    for (int i = 0; i < WORDS; i += 4) {
      const uint4 four = reinterpret_cast<const uint4*>(source)[i / 4];
      words[i] = four.x, words[i + 1] = four.y, words[i + 2] = four.z, words[i + 3] = four.w;
    }
  }
}
template <int WORDS>
__device__ __forceinline__ void store(u8* target, const u32 (&words)[WORDS]) {
  if constexpr (WORDS == 1) {
    *reinterpret_cast<u32*>(target) = words[0];
  } else if constexpr (WORDS == 2) {
    *reinterpret_cast<uint2*>(target) = make_uint2(words[0], words[1]);
  } else {
#pragma unroll
    for (int i = 0; i < WORDS; i += 4) {
      reinterpret_cast<uint4*>(target)[i / 4] = make_uint4(words[i], words[i + 1], words[i + 2], words[i + 3]);
    }
  }
}

// A lane's values of a new row, as they came.
template <class In>
struct Values {
  static constexpr int COUNT = VALUES;
  u32 words[COUNT * sizeof(In) / 4];

  __device__ __forceinline__ explicit Values(const u8* source) { load(words, source); }

  __device__ __forceinline__ float value(int j) const {
    if constexpr (SAME<In, float>) {
      return __uint_as_float(words[j]);
    } else {
      return ptx::to_float(In{static_cast<u16>(words[j / 2] >> (j % 2 * 16))});
    }
  }

  // Stores them in a 16-bit type; no bit changes if they have it already.
  template <class Elem>
  __device__ __forceinline__ void store_as(u8* target) const {
    u32 pairs[COUNT / 2];
#pragma unroll
    for (int i = 0; i < COUNT / 2; ++i) {
      if constexpr (SAME<In, Elem>) {
        pairs[i] = words[i];
      } else {
        pairs[i] = ptx::pack2<Elem>(value(2 * i), value(2 * i + 1));
      }
    }
    store(target, pairs);
  }
};

// Where a lane's values of a row go.
struct Slot {
  i64 page;   // or sequence
  int token;  // of the page
  int head;
  int dim;  // first value of this lane

  __device__ __forceinline__ i64 offset(i64 stride_page, i64 stride_token, i64 stride_head) const {
    return page * stride_page + token * stride_token + head * stride_head;
  }
};

template <class Elem>
struct Raw16Writer {
  static constexpr int SMEM_BYTES = 0;

  __device__ __forceinline__ explicit Raw16Writer(u8*) {}

  template <class In>
  __device__ __forceinline__ void write(const AppendSide& side, const Values<In>& x, const Slot& slot,
                                        bool inside) const {
    if (!inside) return;
    const i64 row = slot.offset(side.cache_stride_page, side.cache_stride_token, side.cache_stride_head);
    x.template store_as<Elem>(side.cache + row + slot.dim * 2);
  }
};

struct Fp8Writer {
  static constexpr int SMEM_BYTES = 0;

  __device__ __forceinline__ explicit Fp8Writer(u8*) {}

  template <class In>
  __device__ __forceinline__ void write(const AppendSide& side, const Values<In>& x, const Slot& slot,
                                        bool inside) const {
    if (!inside) return;
    const float scale = side.scales == nullptr ? side.scale : __ldg(side.scales + slot.head);
    u32 words[Values<In>::COUNT / 4];
#pragma unroll
    for (int i = 0; i < Values<In>::COUNT / 4; ++i) {
      words[i] = e4m3::narrow(x.value(4 * i) / scale, x.value(4 * i + 1) / scale) |
                 e4m3::narrow(x.value(4 * i + 2) / scale, x.value(4 * i + 3) / scale) << 16;
    }
    store(side.cache + slot.offset(side.cache_stride_page, side.cache_stride_token, side.cache_stride_head) + slot.dim,
          words);
  }
};

struct Tbq4Writer {
  static constexpr int SMEM_BYTES = sizeof(tbq4::Cells);

  const tbq4::Cells& cells;
  tbq4::Signs<LANES> signs;

  __device__ __forceinline__ explicit Tbq4Writer(u8* smem)
      : cells(*reinterpret_cast<tbq4::Cells*>(smem)), signs(cfg::SIGNS1, cfg::SIGNS2, threadIdx.x % LANES) {
    reinterpret_cast<tbq4::Cells*>(smem)->fill(threadIdx.x, cfg::NUM_WARPS * WARP);
    __syncthreads();  // the table is there
  }

  template <class In>
  __device__ __forceinline__ void write(const AppendSide& side, const Values<In>& values, const Slot& slot,
                                        bool inside) const {
    static_assert(Values<In>::COUNT == tbq4::VALUES, "eight lanes hold a block");
    float x[tbq4::VALUES];
#pragma unroll
    for (int j = 0; j < tbq4::VALUES; ++j) x[j] = values.value(j);
    if (side.mean != nullptr) {
      const float* mean = side.mean + slot.head * cfg::HEAD_DIM + slot.dim;
#pragma unroll
      for (int j = 0; j < tbq4::VALUES; ++j) x[j] -= __ldg(mean + j);
    }
    u32 words[tbq4::CODE_BYTES / 4];
    const tbq4::Norms block = tbq4::encode(words, x, signs, cells);
    if (!inside) return;
    u8* codes = side.cache + slot.offset(side.cache_stride_page, side.cache_stride_token, side.cache_stride_head) +
                slot.dim / 2;
    if constexpr (tbq4::CODE_BYTES == 8) {
      *reinterpret_cast<uint2*>(codes) = make_uint2(words[0], words[tbq4::CODE_BYTES / 4 - 1]);
    } else {
      *reinterpret_cast<u32*>(codes) = words[0];
    }
    if (threadIdx.x % LANES != 0) return;
    u8* norms = side.norms + slot.offset(side.norms_stride_page, side.norms_stride_token, side.norms_stride_head);
    reinterpret_cast<u16*>(norms)[slot.dim / cfg::BLOCK] =
        tbq4::stored_norm(block.sum, block.squared_length, side.clamped);
  }
};

template <KvFormat FORMAT, class Elem>
struct WriterOf;
template <class Elem>
struct WriterOf<KvFormat::RAW16, Elem> {
  using type = Raw16Writer<Elem>;
};
template <class Elem>
struct WriterOf<KvFormat::TBQ4, Elem> {
  using type = Tbq4Writer;
};

template <class Elem>
struct WriterOf<KvFormat::FP8, Elem> {
  using type = Fp8Writer;
};

}  // namespace kv

#endif
