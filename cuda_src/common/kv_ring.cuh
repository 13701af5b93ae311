// common/kv_ring.cuh -- a warp's ring of K and V tiles in shared memory, filled by asynchronous copies.
// SPDX-License-Identifier: Apache-2.0
//
// Tiles of TILE_KV keys alternate, K V K V ..., in NUM_STAGES slots. A slot holds rows, then their norms if the format
// has any. Rows before the first key and past the last are zeros, with norms of zero.
#ifndef CUATTN_COMMON_KV_RING_CUH
#define CUATTN_COMMON_KV_RING_CUH
#include "common/paging.cuh"
#include "common/params.cuh"
#include "common/ptx.cuh"
#include "common/tile16.cuh"

// Where the plan finds no registers for Q, none are left for values that can be had in another way.
constexpr bool REGISTERS_ARE_SCARCE = !cfg::Q_IN_REGISTERS;

// A value that a lane needs in every step: in a register where there are some, else computed anew.
__device__ __forceinline__ u32 held(u32 x) { return REGISTERS_ARE_SCARCE ? x : ptx::opaque(x); }

template <class Kv>
constexpr int SLOT_BYTES = (cfg::TILE_KV * (Kv::ROW_BYTES + 2 * Kv::NORMS) + 127) / 128 * 128;
template <class K, class V>
constexpr int RING_BYTES = cfg::NUM_STAGES * (SLOT_BYTES<K> + SLOT_BYTES<V>) / 2;

// Whether norms of any of these formats go to their slot through a register, one tile of their kind late: those of rows
// with a single one, as cp.async has four bytes at least. All others are copied like rows, in the group of their rows.
template <class... Kv>
constexpr bool NORMS_ARE_LATE = ((Kv::NORMS == 1) || ...);

// Norms in a slot, those of a row side by side, rows in the order of row % 8, then of row / 8. So those of the rows
// whose scores a lane has, operand rows g and g + 8 of every 16, lie together, or with those of other heads between.
//
// An infinite norm becomes NaN: so is infinity times levels of both signs, while infinity times their sum may hide a
// key, and an infinite weight leaves no range to the others. That is done once, where a register holds the norm on its
// way to the slot, else by each lane that reads it.
template <class Kv>
struct TileNorms {
  static constexpr int OF_ROW = Kv::NORMS / cfg::TILE_HEADS;  // in one head
  static constexpr int ROWS = cfg::TILE_KV / 8;
  // A lane's words have two norms each, but one where the next one in the slot is of another head.
  static constexpr bool APART = OF_ROW == 1 && cfg::TILE_HEADS > 1;
  static_assert(cfg::TILE_HEADS == 1 || OF_ROW <= 1, "norms of a row's blocks stand side by side in one head only");
  static constexpr int HALVES_OF_ROW = APART ? 2 : OF_ROW;
  static constexpr int WORDS = ROWS * HALVES_OF_ROW / 2;
  u32 words[WORDS > 0 ? WORDS : 1];

  static __device__ __forceinline__ u32 place_of_row(int row) {
    return static_cast<u32>(cfg::TILE_KV * Kv::ROW_BYTES + (row % 8 * ROWS + row / 8) * 2 * Kv::NORMS);
  }
  // Of this lane's first row, in the head of its columns.
  static __device__ __forceinline__ u32 place(int lane) {
    return place_of_row(tile_row(lane / 4)) + static_cast<u32>(lane % 4 * cfg::TILE_HEADS / 4 * 2 * OF_ROW);
  }
  static __device__ __forceinline__ void write(u8* place, u32 norm) {
    *reinterpret_cast<u16*>(place) = static_cast<u16>(ptx::nan_if_infinite(norm));
  }

  // `first` is what place() gives.
  __device__ __forceinline__ TileNorms(const u8* tile, u32 first) {
    if constexpr (APART) {
#pragma unroll
      for (int i = 0; i < WORDS; ++i) {
        words[i] = ptx::nan_if_infinite(*reinterpret_cast<const u16*>(tile + first + 2 * Kv::NORMS * i));
      }
    } else if constexpr (Kv::NORMS > 0) {
      constexpr int AT_ONCE = WORDS < 4 ? WORDS : 4;
      struct alignas(4 * AT_ONCE) Vector {
        u32 words[AT_ONCE];
      };
#pragma unroll
      for (int i = 0; i < WORDS; i += AT_ONCE) {
        const Vector v = *reinterpret_cast<const Vector*>(tile + first + 4 * i);
#pragma unroll
        for (int j = 0; j < AT_ONCE; ++j) {
          words[i + j] = NORMS_ARE_LATE<Kv> ? v.words[j] : ptx::nan_if_infinite(v.words[j]);
        }
      }
    }
  }
  // Of operand row g + 8 * half of 16 rows `block`.
  __device__ __forceinline__ float get(int block, int half, int part) const {
    if constexpr (Kv::NORMS == 0) {
      return 1.f;
    } else {
      // Where parts take turns, only `part` is not known: no index of an array may come from it.
      const int first = (2 * block + half) * HALVES_OF_ROW, word = first / 2;
      const u32 pair = OF_ROW == 4 && part >= 2 ? words[word + 1] : words[word];
      return ptx::to_float(Half{static_cast<u16>(pair >> (16 * ((first + part) % 2)))});
    }
  }
};

// The rows of K (`IS_K`) or of V of this CTA's KV heads: where they lie in global memory, and, where norms are late, a
// norm of the tile before, which waits in a register for this one. Addresses are made from the parameters where they
// are needed: few are, and a thread has no registers to spare.
template <class Kv, bool IS_K>
struct Stream {
  static constexpr int COPIES = cfg::TILE_KV * Kv::CHUNKS / WARP;  // of 16 bytes, of a lane for a tile
  // The same where rows are looked up one by one, each with an address of its own.
  static constexpr int COPIES_AT_ONCE = REGISTERS_ARE_SCARCE ? 2 : COPIES;
  // And in a whole tile: floats take more copies of a lane, and more places.
  static constexpr int PLACES_AT_ONCE = SAME<typename Kv::Operand, float> ? 2 : COPIES;
  // Whole rows in a copy of the warp: successive copies of a lane are a fixed number of rows apart.
  static constexpr bool WHOLE_ROWS = WARP % Kv::CHUNKS == 0;
  static constexpr int ROWS_AT_ONCE = WARP / Kv::CHUNKS;
  static constexpr bool ONE_PLACE = WHOLE_ROWS && ROWS_AT_ONCE % Kv::ROW_PERIOD == 0;
  const DecodeParams& p;
  const u8* at;        // of this lane's first copy in the next tile
  const u8* norms_at;  // of the norms of this lane's row there
  u32 waiting;         // norm of the tile before
  // In a slot: of this lane's first copy, where the others are a fixed number of rows further, and of its row's norms.
  u32 place, norms_place;

  __device__ __forceinline__ Stream(const DecodeParams& params, u32 first_place, u32 place_of_norms)
      : p(params), at(nullptr), norms_at(nullptr), waiting(0), place(first_place), norms_place(place_of_norms) {}

  static __device__ __forceinline__ u32 first_place(int lane) {
    return static_cast<u32>(Kv::offset(lane / Kv::CHUNKS, lane % Kv::CHUNKS));
  }
  static __device__ __forceinline__ u32 place_of_norms(int lane) {
    return TileNorms<Kv>::place_of_row(lane % cfg::TILE_KV);
  }
  __device__ __forceinline__ i64 token() const { return IS_K ? p.k_stride_token : p.v_stride_token; }
  __device__ __forceinline__ i64 norms_token() const { return IS_K ? p.k_norms_stride_token : p.v_norms_stride_token; }
  // Row, and its norms, in token `slot` of page `page`.
  __device__ __forceinline__ const u8* row(int page, int slot) const {
    return (IS_K ? p.k : p.v) + blockIdx.x * cfg::TILE_HEADS * (IS_K ? p.k_stride_head : p.v_stride_head) +
           page * (IS_K ? p.k_stride_page : p.v_stride_page) + slot * token();
  }
  __device__ __forceinline__ const u8* norms(int page, int slot) const {
    return (IS_K ? p.k_norms : p.v_norms) +
           blockIdx.x * cfg::TILE_HEADS * (IS_K ? p.k_norms_stride_head : p.v_norms_stride_head) +
           page * (IS_K ? p.k_norms_stride_page : p.v_norms_stride_page) + slot * norms_token();
  }

  // Points at the tile whose first row is token `slot` of page `page`.
  __device__ __forceinline__ void point(int page, int slot, int lane) {
    at = WHOLE_ROWS ? row(page, slot + lane / Kv::CHUNKS) + lane % Kv::CHUNKS * 16 : row(page, slot);
    if constexpr (Kv::NORMS > 0) norms_at = norms(page, slot + lane % cfg::TILE_KV);
  }
  // To the next tile of this warp in the same page.
  __device__ __forceinline__ void step() {
    at += IS_K ? p.k_stride_step : p.v_stride_step;
    if constexpr (Kv::NORMS > 0) norms_at += IS_K ? p.k_norms_stride_step : p.v_norms_stride_step;
  }

  // A whole tile inside of a page.
  __device__ __forceinline__ void copy(u8* slot, int lane) const {
    if constexpr (WHOLE_ROWS) {
      const u8* source = at;
      u8* target = slot + place;
#pragma unroll PLACES_AT_ONCE
      for (int i = 0; i < COPIES; ++i) {
        if constexpr (!ONE_PLACE) {
          target = slot + Kv::offset(i * ROWS_AT_ONCE + lane / Kv::CHUNKS, lane % Kv::CHUNKS);
        }
        ptx::cp_async16(target, source, true);
        // One from the other: an addition of 64 bits each, where products would take as many instructions again.
        source = ptx::opaque(source + ROWS_AT_ONCE * token());
        target += ROWS_AT_ONCE * Kv::ROW_BYTES;
      }
    } else {
#pragma unroll PLACES_AT_ONCE
      for (int i = 0; i < COPIES; ++i) {
        const int row = (i * WARP + lane) / Kv::CHUNKS, chunk = (i * WARP + lane) % Kv::CHUNKS;
        ptx::cp_async16(slot + Kv::offset(row, chunk), at + row * token() + chunk * 16, true);
      }
    }
  }
  // Any tile; a lane knows page of its row and token of the page, and whether there is one.
  __device__ __forceinline__ void copy(u8* slot, int page, int token, bool valid, int lane) const {
    const i64 address = reinterpret_cast<i64>(row(page, token));
    const u32 valid_rows = __ballot_sync(FULL_MASK, valid);
#pragma unroll COPIES_AT_ONCE
    for (int i = 0; i < COPIES; ++i) {
      const int index = i * WARP + lane;
      const int from = index / Kv::CHUNKS, chunk = index % Kv::CHUNKS;
      const u8* source = reinterpret_cast<const u8*>(__shfl_sync(FULL_MASK, address, from));
      // Rows that are not there are written as zeros: 0 * NaN in P V would show what lies there.
      ptx::cp_async16(slot + Kv::offset(from, chunk), source + chunk * 16, (valid_rows >> from & 1) != 0);
    }
  }

  // A norm that was loaded for a tile goes to its slot, before others take its register: a whole step is its latency.
  __device__ __forceinline__ void store_norms(u8* slot, int lane) const {
    if constexpr (NORMS_ARE_LATE<Kv>) {
      if (lane < cfg::TILE_KV) TileNorms<Kv>::write(slot + norms_place, waiting);
    }
  }
  // This lane's row has its norms at `address`; zeros, and nothing is read there, unless `valid`.
  __device__ __forceinline__ void load_norms(u8* slot, const u8* address, bool valid, int lane) {
    if constexpr (NORMS_ARE_LATE<Kv>) {
      waiting = 0;
      if (valid) waiting = ptx::ld_global_u16(address);
    } else if constexpr (Kv::NORMS > 0) {
      if (lane < cfg::TILE_KV) ptx::cp_async_small<2 * Kv::NORMS>(slot + norms_place, address, valid);
    }
  }

  // Rows and norms of a whole tile inside of a page.
  __device__ __forceinline__ void load(u8* slot, int lane) {
    copy(slot, lane);
    load_norms(slot, norms_at, true, lane);
  }
  // Rows and norms of any tile; nothing is copied if there is none.
  __device__ __forceinline__ void load(u8* slot, bool exists, int page, int token, bool valid, int lane) {
    if (exists) copy(slot, page, token, valid, lane);
    // No row is valid where there is no tile, so that a register needs no branch for that.
    if (exists || NORMS_ARE_LATE<Kv>) load_norms(slot, norms(page, token), valid, lane);
  }
};

// Fills the ring of one warp, whose tiles are every NUM_WARPS-th of those from `begin` on, or from
// where go_to says.
template <class K, class V>
struct Loader {
  Stream<K, true> k;
  Stream<V, false> v;
  PageTable pages;
  u8* ring;
  int first, end;  // keys that are loaded
  int key0;        // of the next K tile
  int next_page;   // of this lane's row in the next tile of K, and of the tile of V after it; read a step ahead
  bool whole;      // the tile of V that follows is all valid and inside of a page

  __device__ __forceinline__ Loader(const DecodeParams& p, PageTable table, u8* warp_ring, int first_key, int end_key,
                                    int begin, int lane)
      : k(p, held(Stream<K, true>::first_place(lane)), held(Stream<K, true>::place_of_norms(lane))),
        v(p, SAME<K, V> ? k.place : held(Stream<V, false>::first_place(lane)),
          SAME<K, V> ? k.norms_place : held(Stream<V, false>::place_of_norms(lane))),
        pages(table),
        ring(warp_ring),
        first(first_key),
        end(end_key),
        key0(begin),
        next_page(0),
        whole(false) {
    look_ahead(lane);
    point(next_page, pages.slot(key0), lane);
  }

  __device__ __forceinline__ void point(int in_page, int first_slot, int lane) {
    k.point(in_page, first_slot, lane);
    v.point(in_page, first_slot, lane);
  }
  __device__ __forceinline__ void look_ahead(int lane) {
    const int position = key0 + lane % cfg::TILE_KV;
    next_page = position >= first && position < end ? pages.page(position) : pages.dense_page;
  }

  // To `position`, from which on all tiles before `before` are loaded.
  __device__ __forceinline__ void go_to(int position, int before, int lane) {
    key0 = position;
    end = before;
    look_ahead(lane);
    point(next_page, pages.slot(key0), lane);
  }

  // Offset in the ring of the i-th slot, and of those after and before that of a tile of K or of V.
  static constexpr u32 slot_of(int i) { return i / 2 * (SLOT_BYTES<K> + SLOT_BYTES<V>)+i % 2 * SLOT_BYTES<K>; }
  template <bool IS_K>
  static __device__ __forceinline__ u32 next_slot(u32 slot) {
    slot += IS_K ? SLOT_BYTES<K> : SLOT_BYTES<V>;
    constexpr bool MAY_BE_LAST = !IS_K || cfg::NUM_STAGES % 2 == 1;
    return MAY_BE_LAST && slot == RING_BYTES<K, V> ? 0 : slot;
  }
  template <bool IS_K>
  static __device__ __forceinline__ u32 slot_before(u32 slot) {
    constexpr bool MAY_BE_FIRST = IS_K || cfg::NUM_STAGES % 2 == 1;
    const u32 end = MAY_BE_FIRST && slot == 0 ? RING_BYTES<K, V> : slot;
    return end - (IS_K ? SLOT_BYTES<V> : SLOT_BYTES<K>);
  }

  template <class OneStream>
  __device__ __forceinline__ void load_any(OneStream& stream, u32 slot, int lane) {
    const int position = key0 + lane % cfg::TILE_KV;
    const bool valid = position >= first && position < end;
    stream.load(ring + slot, key0 < end, next_page, valid ? pages.slot(position) : 0, valid, lane);
  }

  // Whether the tile of `position`, token `slot` of a page, is all valid and inside of that page.
  __device__ __forceinline__ bool is_whole(int position, int slot) const {
    return position >= first && position + cfg::TILE_KV <= end && slot + cfg::TILE_KV <= pages.size();
  }
  // Whether the two tiles that a step loads are whole, or past the last. So the last steps of a warp, which lack one
  // to load, are plain too: what is rarely needed would first have to be fetched as code, for a step that takes 2 us.
  __device__ __forceinline__ bool next_are_plain() const {
    const auto is_plain = [&](int position) { return position >= end || is_whole(position, pages.slot(position)); };
    if constexpr (LOADS_K<true>) {
      return is_plain(key0);
    } else {
      return (whole || key0 >= end) && is_plain(key0 + cfg::KEYS_PER_STEP);
    }
  }

  // One group each, empty past the last tile, so that a wait can count groups. PLAIN: the tile is known to be whole if
  // there is one.
  template <bool PLAIN = false>
  __device__ __forceinline__ void load_k(u32 slot, int lane) {
    const int first_slot = pages.slot(key0);
    whole = PLAIN ? key0 < end : is_whole(key0, first_slot);
    if (whole) {
      if (!pages.dense) point(__shfl_sync(FULL_MASK, next_page, 0), first_slot, lane);
      k.load(ring + slot, lane);
    } else if constexpr (!PLAIN) {
      load_any(k, slot, lane);
    }
    ptx::cp_async_commit();
  }
  template <bool PLAIN = false>
  __device__ __forceinline__ void load_v(u32 slot, int lane) {
    if (whole) {
      v.load(ring + slot, lane);
    } else if constexpr (!PLAIN) {
      load_any(v, slot, lane);
    }
    ptx::cp_async_commit();
    key0 += cfg::KEYS_PER_STEP;
    if (pages.dense) {
      k.step();
      v.step();
    } else {
      look_ahead(lane);
    }
  }

  // Whether the tile that is loaded while one of K (`AFTER_K`) or of V is in use is one of K.
  template <bool AFTER_K>
  static constexpr bool LOADS_K = AFTER_K == (cfg::NUM_STAGES % 2 == 1);
  // The norm that waits in the register that load_ahead is going to load; `slot` is that of the tile in use. A barrier
  // of the warp between the two keeps the compiler from loading into another register and copying that, for which the
  // norm would have to be there.
  template <bool AFTER_K>
  __device__ __forceinline__ void store_norms(u32 slot, int lane) const {
    // Of the tile that follows by NUM_STAGES - 3.
    static_assert(!NORMS_ARE_LATE<K, V> || (cfg::NUM_STAGES >= 4 && cfg::NUM_STAGES % 2 == 0),
                  "the slots below are for an even number of stages, from four on");
    u32 waiting = next_slot<AFTER_K>(slot);
    if constexpr (cfg::NUM_STAGES > 4) {
      constexpr u32 STEP = SLOT_BYTES<K> + SLOT_BYTES<V>;
      const u32 next = slot_before<AFTER_K>(slot);
      waiting = next < STEP ? next + (RING_BYTES<K, V> - STEP) : next - STEP;
    }
    if constexpr (LOADS_K<AFTER_K>) {
      k.store_norms(ring + waiting, lane);
    } else {
      v.store_norms(ring + waiting, lane);
    }
  }
  // The tile that follows the one in use, in `slot`, by NUM_STAGES - 1, into the slot of the one before.
  template <bool AFTER_K, bool PLAIN>
  __device__ __forceinline__ void load_ahead(u32 slot, int lane) {
    if constexpr (LOADS_K<AFTER_K>) {
      load_k<PLAIN>(slot_before<AFTER_K>(slot), lane);
    } else {
      load_v<PLAIN>(slot_before<AFTER_K>(slot), lane);
    }
  }
};

#endif
