// ptx.h -- cuda_src/common/ptx.cuh for the CPU: the same functions, behind the same include guard.
// SPDX-License-Identifier: Apache-2.0
//
// The last parameter is the line of the caller, see builtins.h. Shared-memory addresses are offsets in the dynamic
// shared memory, and whatever these functions touch has to lie there.
#ifndef CUATTN_COMMON_PTX_CUH
#define CUATTN_COMMON_PTX_CUH
#include "builtins.h"
#include "common/types.cuh"

namespace simt {

// Names the instruction for the reports, and its line.
inline void enter(Place at) { self->place = at; }

inline void check_aligned(const void* p, unsigned bytes, const char* what) {
  if (reinterpret_cast<uintptr_t>(p) % bytes) fail("%s: the address is not a multiple of %u", what, bytes);
}
// Offset in the dynamic shared memory.
inline u32 smem_offset(const void* p, size_t bytes, const char* what) {
  const long offset = static_cast<long>(reinterpret_cast<intptr_t>(p) - reinterpret_cast<intptr_t>(block->smem));
  if (offset < 0 || offset + bytes > block->smem_bytes) {
    fail("%s: shared memory %+ld..%+ld is outside of its %zu bytes", what, offset, offset + static_cast<long>(bytes),
         block->smem_bytes);
  }
  return static_cast<u32>(offset);
}
inline void check_global(const void* p, size_t bytes, const char* what) {
  const Launch& l = *block->launch;
  const char* c = static_cast<const char*>(p);
  for (int i = 0; i < l.num_memory; i++) {
    if (c >= l.memory[i].begin && c + bytes <= l.memory[i].end) return;
  }
  if (l.memory) fail("%s: the %zu bytes at %p are outside of the memory given to launch()", what, bytes, p);
}

inline float half_to_float(u16 h) {
  // The product rebiases the exponent, exactly, and makes subnormals normal.
  const float magnitude = bit_cast<float>((h & 0x7fffu) << 13) * 0x1p112f;
  u32 u = bit_cast<u32>(magnitude);
  if (magnitude >= 65536.f) u |= 0x7f800000u;
  return bit_cast<float>(u | (h & 0x8000u) << 16);
}
inline u16 float_to_half(float x) {
  u32 u = bit_cast<u32>(x);
  const u32 sign = u >> 16 & 0x8000u;
  u &= 0x7fffffffu;
  if (u > 0x7f800000u) return 0x7fff;
  if (u >= 0x477ff000u) return static_cast<u16>(sign | 0x7c00u);  // 65520 is the tie between 65504 and infinity
  // An ulp of 0.5 is the smallest subnormal, so this sum rounds to subnormals.
  if (u < 0x38800000u) return static_cast<u16>(sign | (bit_cast<u32>(bit_cast<float>(u) + 0.5f) - 0x3f000000u));
  return static_cast<u16>(sign | (u + 0xfffu + (u >> 13 & 1) - 0x38000000u) >> 13);
}
inline u16 float_to_bfloat16(float x) {
  const u32 u = bit_cast<u32>(x);
  if ((u & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
  return static_cast<u16>((u + 0x7fffu + (u >> 16 & 1)) >> 16);
}
template <class Elem>
float element(u32 bits) {
  static_assert(std::is_same_v<Elem, Half> || std::is_same_v<Elem, Bfloat16>, "a 16-bit element");
  return std::is_same_v<Elem, Half> ? half_to_float(static_cast<u16>(bits)) : bit_cast<float>(bits << 16);
}
inline float flush_subnormal(float x) { return fabsf(x) < 0x1p-126f ? copysignf(0.f, x) : x; }

template <int N>
void ldmatrix(u32 (&r)[N], const void* row, bool trans, Place at) {
  enter(at);
  if (lane() < 8 * N) {
    check_aligned(row, 16, "ldmatrix");
    smem_offset(row, 16, "ldmatrix");
  }
  warp_read(FULL_MASK, at, "ldmatrix", static_cast<const u16*>(row), [&](const Slot* s) {
    const int g = lane() / 4, t = lane() % 4 * 2;
    for (int m = 0; m < N; m++) {
      auto read = [&](int i, int j) { return static_cast<u32>(s[8 * m + i].get<const u16*>()[j]); };
      r[m] = trans ? read(t, g) | read(t + 1, g) << 16 : read(g, t) | read(g, t + 1) << 16;
    }
    return 0;
  });
}

template <class T>
T load_shared(u32 address, Place at) {
  enter(at);
  const void* p = block->smem + address;
  check_aligned(p, sizeof(T), "ld.shared");
  smem_offset(p, sizeof(T), "ld.shared");
  return load_argument<T>(p);
}

// Until the wait the destination holds NaN.
template <int BYTES>
void cp_async(void* dst, const void* src, bool valid, Place at) {
  enter(at);
  check_aligned(dst, BYTES, "cp.async");
  smem_offset(dst, BYTES, "cp.async");
  AsyncCopy copy{dst, self->copy_group, BYTES, {}};
  if (valid) {
    check_aligned(src, BYTES, "cp.async");
    check_global(src, BYTES, "cp.async");
    memcpy(copy.data, src, BYTES);
  }
  memset(dst, 0xff, BYTES);
  self->copies.push_back(copy);
}

// To float32 as accumulators of tensor cores: toward zero.
inline float cut_off(double x) {
  const float nearest = static_cast<float>(x);
  return fabs(static_cast<double>(nearest)) > fabs(x) ? nextafterf(nearest, 0.f) : nearest;
}

// ---- mbarrier ----------------------------------------------------------------------------------------------------

// The bits of an mbarrier. A fiber waits on the lowest one.
struct Mbarrier {
  u64 phase : 1, pending : 20, expected : 20;
  i64 bytes : 23;  // announced, not landed
};
static_assert(sizeof(Mbarrier) == 8, "an mbarrier has 8 bytes");

inline Mbarrier load_mbarrier(const u64* bar) {
  check_aligned(bar, 8, "mbarrier");
  smem_offset(bar, 8, "mbarrier");
  if (*bar == ~0ull) fail("mbarrier at shared memory +%u: not initialized", smem_offset(bar, 8, "mbarrier"));
  return bit_cast<Mbarrier>(*bar);
}

inline void update_mbarrier(u64* bar, u32 arrivals, i64 bytes) {
  Mbarrier m = load_mbarrier(bar);
  const u32 offset = smem_offset(bar, 8, "mbarrier");
  if (arrivals > m.pending) fail("mbarrier at shared memory +%u: more arrivals than its count", offset);
  m.pending -= arrivals;
  m.bytes += bytes;
  if (m.pending == 0 && m.bytes == 0) {
    for (const BulkCopy& copy : block->in_flight) {
      if (copy.mbarrier != bar) continue;
      fail("mbarrier at shared memory +%u: a phase completes with copies in flight, too few bytes were expected",
           offset);
    }
    m.phase ^= 1;
    m.pending = m.expected;
  }
  *bar = bit_cast<u64>(m);
}

inline Wait mbarrier_phase(const u64* bar, u32 parity) {
  load_mbarrier(bar);
  if (parity > 1) fail("mbarrier wait: parity %u", parity);
  return {bar, 1, parity, parity ? "mbarrier, parity 1" : "mbarrier, parity 0", nullptr, nullptr};
}

inline void land(const AsyncCopy& copy) { memcpy(copy.dst, copy.data, copy.bytes); }
inline void land(const CopyArrival& arrival) {
  for (const AsyncCopy& copy : arrival.copies) land(copy);
  update_mbarrier(arrival.mbarrier, 1, 0);
}

// d += a b; a word of an operand has K / 8 neighboring elements of k. Floats, whose products a kernel adds up to more
// than 16 bits, are cut off once as on the chip; sums of 16-bit elements are those of float32.
template <int K, class Element>
void mma(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2], Place at, Element element) {
  struct Operands {
    u32 a[4], b[2];
    float d[4];
  } mine;
  memcpy(mine.a, a, sizeof a);
  memcpy(mine.b, b, sizeof b);
  memcpy(mine.d, d, sizeof d);
  auto compute = [element](Slot* slots) {
    float A[16][K], B[K][8], D[16][8];
    for (int l = 0; l < WARP; l++) {
      const Operands x = slots[l].get<Operands>();
      const int g = l / 4, t = l % 4 * (K / 8);
      for (int e = 0; e < K / 8; e++) {
        for (int i = 0; i < 4; i++) A[g + i % 2 * 8][t + i / 2 * (K / 2) + e] = element(x.a[i], e);
        for (int i = 0; i < 2; i++) B[t + i * (K / 2) + e][g] = element(x.b[i], e);
      }
      for (int i = 0; i < 4; i++) D[g + i / 2 * 8][l % 4 * 2 + i % 2] = x.d[i];
    }
    for (int i = 0; i < 16; i++) {
      if constexpr (K == 8) {
        for (int j = 0; j < 8; j++) {
          double sum = D[i][j];
          for (int k = 0; k < K; k++) sum += static_cast<double>(A[i][k]) * B[k][j];
          D[i][j] = cut_off(sum);
        }
        continue;
      }
      for (int k = 0; k < K; k++) {
        for (int j = 0; j < 8; j++) D[i][j] += A[i][k] * B[k][j];
      }
    }
    for (int l = 0; l < WARP; l++) {
      Operands x = slots[l].get<Operands>();
      for (int i = 0; i < 4; i++) x.d[i] = D[l / 4 + i / 2 * 8][l % 4 * 2 + i % 2];
      slots[l].set(x);
    }
  };
  warp_meet(FULL_MASK, at, "mma", mine, compute, [&](const Slot* s) {
    const Operands x = s[lane()].get<Operands>();
    memcpy(d, x.d, sizeof d);
    return 0;
  });
}

}  // namespace simt

namespace ptx {
using simt::here;
using simt::Place;

inline u8* dynamic_smem() { return reinterpret_cast<u8*>(simt::block->smem); }

inline u32 smem_addr(const void* p, Place at = here()) {
  simt::enter(at);
  return simt::smem_offset(p, 0, "smem_addr");
}

template <class Elem>
void mma_m16n8k16(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2], Place at = here()) {
  simt::mma<16>(d, a, b, at, [](u32 word, int e) { return simt::element<Elem>(word >> 16 * e); });
}

template <class Elem>
void mul_m16n8k16(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2], Place at = here()) {
  for (float& x : d) x = 0.f;
  mma_m16n8k16<Elem>(d, a, b, at);
}

inline void mma_m16n8k8_tf32(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2], Place at = here()) {
  simt::mma<8>(d, a, b, at, [](u32 word, int) { return simt::bit_cast<float>(word & 0xffffe000u); });
}

inline void mul_m16n8k8_tf32(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2], Place at = here()) {
  for (float& x : d) x = 0.f;
  mma_m16n8k8_tf32(d, a, b, at);
}

inline void ldmatrix_x2(u32 (&r)[2], const void* row, Place at = here()) { simt::ldmatrix(r, row, false, at); }
inline void ldmatrix_x4(u32 (&r)[4], const void* row, Place at = here()) { simt::ldmatrix(r, row, false, at); }
inline void ldmatrix_x4_trans(u32 (&r)[4], const void* row, Place at = here()) { simt::ldmatrix(r, row, true, at); }

inline u32 movmatrix_trans(u32 value, Place at = here()) {
  return simt::warp_read(FULL_MASK, at, "movmatrix", value, [](const simt::Slot* s) {
    const int g = simt::lane() / 4, t = simt::lane() % 4 * 2;
    auto read = [&](int i, int j) { return s[i * 4 + j / 2].get<u32>() >> j % 2 * 16 & 0xffffu; };
    return read(t, g) | read(t + 1, g) << 16;
  });
}

inline void cp_async16(void* dst, const void* src, bool valid, Place at = here()) {
  simt::cp_async<16>(dst, src, valid, at);
}
template <int BYTES>
void cp_async_small(void* dst, const void* src, bool valid, Place at = here()) {
  static_assert(BYTES == 4 || BYTES == 8, "cp_async16 has 16, and there is nothing below 4");
  simt::cp_async<BYTES>(dst, src, valid, at);
}
inline void cp_async_commit() { simt::self->copy_group++; }
template <int N>
void cp_async_wait() {
  const auto wanted = [](const simt::AsyncCopy& copy) { return copy.group + N < simt::self->copy_group; };
  for (const simt::CopyArrival& arrival : simt::block->copy_arrivals) {
    if (arrival.thread != simt::self->linear) continue;
    for (const simt::AsyncCopy& copy : arrival.copies) {
      if (wanted(copy)) simt::fail("cp.async.wait_group: a copy that an mbarrier counts is waited for");
    }
  }
  std::vector<simt::AsyncCopy>& copies = simt::self->copies;
  size_t kept = 0;
  for (const simt::AsyncCopy& copy : copies) {
    if (wanted(copy)) {
      simt::land(copy);
    } else {
      copies[kept++] = copy;
    }
  }
  copies.resize(kept);
}
inline void cp_async_mbarrier_arrive(u64* bar, Place at = here()) {
  simt::enter(at);
  simt::load_mbarrier(bar);
  simt::block->copy_arrivals.push_back({bar, simt::self->linear, std::move(simt::self->copies)});
  simt::self->copies.clear();
}

inline void mbarrier_init(u64* bar, u32 count, Place at = here()) {
  simt::enter(at);
  simt::check_aligned(bar, 8, "mbarrier");
  simt::smem_offset(bar, 8, "mbarrier");
  if (count < 1 || count >= 1 << 20) simt::fail("mbarrier: a count of %u", count);
  *bar = simt::bit_cast<u64>(simt::Mbarrier{0, count, count, 0});
}
inline void mbarrier_arrive(u64* bar, Place at = here()) {
  simt::enter(at);
  simt::update_mbarrier(bar, 1, 0);
}
inline bool mbarrier_try_wait(u64* bar, u32 parity, Place at = here()) {
  simt::enter(at);
  const simt::Wait wait = simt::mbarrier_phase(bar, parity);
  if ((*wait.word & wait.mask) != wait.value) return true;
  simt::poll();
  return false;
}
inline void mbarrier_wait(u64* bar, u32 parity, Place at = here()) {
  simt::enter(at);
  simt::wait_for(simt::mbarrier_phase(bar, parity));
}

inline uint2 ld_global_nc_v2(const void* p, Place at = here()) {
  simt::enter(at);
  simt::check_aligned(p, 8, "ld.global.v2");
  simt::check_global(p, 8, "ld.global.v2");
  return simt::load_argument<uint2>(p);
}
inline uint4 ld_global_nc_v4(const void* p, Place at = here()) {
  simt::enter(at);
  simt::check_aligned(p, 16, "ld.global.v4");
  simt::check_global(p, 16, "ld.global.v4");
  return simt::load_argument<uint4>(p);
}

inline u32 ld_global_u16(const void* p, Place at = here()) {
  simt::enter(at);
  simt::check_aligned(p, 2, "ld.global.u16");
  simt::check_global(p, 2, "ld.global.u16");
  return simt::load_argument<u16>(p);
}

inline u32 ld_shared(u32 address, Place at = here()) { return simt::load_shared<u32>(address, at); }
inline uint2 ld_shared_v2(u32 address, Place at = here()) { return simt::load_shared<uint2>(address, at); }

inline void st_shared_v4(u32 address, const uint4& v, Place at = here()) {
  simt::enter(at);
  u8* p = reinterpret_cast<u8*>(simt::block->smem) + address;
  simt::check_aligned(p, sizeof v, "st.shared.v4");
  simt::smem_offset(p, sizeof v, "st.shared.v4");
  memcpy(p, &v, sizeof v);
  simt::block->unfenced[address / 16] = simt::self->linear + 1;
  simt::self->unfenced.push_back(address / 16);
}

inline int thread_index() { return static_cast<int>(threadIdx.x); }
inline u32 opaque(u32 x) { return x; }
inline const u8* opaque(const u8* p) { return p; }
inline u32 held(u32 x) { return x; }
inline u8* opaque_shared(u8* p) { return p; }

inline const u8* mad_wide(u32 a, u32 b, const u8* c) {
  return reinterpret_cast<const u8*>(reinterpret_cast<u64>(c) + static_cast<u64>(a) * b);
}

inline u32 nan_if_infinite(u32 halves) {
  const auto half = [](u32 h) { return (h & 0x7fff) == 0x7c00 ? h | 0x200 : h; };
  return half(halves & 0xffff) | half(halves >> 16) << 16;
}
inline u32 warp_max(u32 x, Place at = here()) {
  return simt::warp_read(FULL_MASK, at, "redux.sync.max", x, [](const simt::Slot* s) {
    u32 largest = 0;
    for (int i = 0; i < WARP; i++) largest = largest > s[i].get<u32>() ? largest : s[i].get<u32>();
    return largest;
  });
}
inline u32 mul_half2(u32 a, u32 b) {
  const auto product = [](u32 x, u32 y) -> u32 {  // exact in float32, so rounded once
    return simt::float_to_half(simt::half_to_float(x & 0xffff) * simt::half_to_float(y & 0xffff));
  };
  return product(a, b) | product(a >> 16, b >> 16) << 16;
}
inline u32 abs_half2(u32 a) { return a & 0x7fff7fffu; }
inline u32 max_half2(u32 a, u32 b) {
  const auto larger = [](u32 x, u32 y) -> u32 {
    const float p = simt::half_to_float(x & 0xffff), q = simt::half_to_float(y & 0xffff);
    if (std::isnan(p) || std::isnan(q)) return std::isnan(p) ? (std::isnan(q) ? 0x7fff : y & 0xffff) : x & 0xffff;
    return (p == q ? x & y : p > q ? x : y) & 0xffff;  // +0 is above -0
  };
  return larger(a, b) | larger(a >> 16, b >> 16) << 16;
}
inline u32 select_bits(u32 a, u32 b, u32 mask) { return (a & mask) | (b & ~mask); }

inline u32 prmt(u32 a, u32 b, u32 selector) {
  u32 r = __byte_perm(a, b, selector);
  const u32 sign = (r >> 7 & 0x01010101u) * 0xffu;
  const u32 replicate = (selector >> 3 & 1) * 0xffu | (selector >> 7 & 1) * 0xff00u | (selector >> 11 & 1) * 0xff0000u |
                        (selector >> 15 & 1) * 0xff000000u;
  return (r & ~replicate) | (sign & replicate);
}

template <class Params>
void read_ahead(const Params&) {}
inline int ld_relaxed(const int* p, Place at = here()) {
  simt::enter(at);
  simt::check_aligned(p, 4, "ld.relaxed");
  return *p;
}
inline void prefetch_l2(const void* p, u32 bytes, Place at = here()) {
  simt::enter(at);
  simt::check_aligned(p, 16, "cp.async.bulk.prefetch.L2");
  if (bytes % 16) simt::fail("cp.async.bulk.prefetch.L2: %u bytes", bytes);
  simt::check_global(p, bytes, "cp.async.bulk.prefetch.L2");
}
inline void griddepcontrol_wait() {}
inline void griddepcontrol_launch_dependents() {}

inline float exp2(float x) { return simt::flush_subnormal(exp2f(simt::flush_subnormal(x))); }
inline float log2(float x) { return log2f(simt::flush_subnormal(x)); }
inline float sqrt(float x) { return sqrtf(simt::flush_subnormal(x)); }
inline float rsqrt(float x) { return 1.f / sqrtf(simt::flush_subnormal(x)); }

template <class Elem>
u32 pack2(float lo, float hi) {
  if constexpr (std::is_same_v<Elem, Half>) {
    return simt::float_to_half(lo) | static_cast<u32>(simt::float_to_half(hi)) << 16;
  } else {
    return simt::float_to_bfloat16(lo) | static_cast<u32>(simt::float_to_bfloat16(hi)) << 16;
  }
}

constexpr bool CONVERTS_E4M3 = true;
inline void halves_of_e4m3(u32 (&pairs)[2], u32 codes) {
  const auto half = [](u32 code) -> u32 {
    const u32 exponent = code >> 3 & 15, mantissa = code & 7, sign = (code & 0x80) << 8;
    if ((code & 0x7f) == 0x7f) return 0x7fff;
    const float size = exponent ? ldexpf(8.f + mantissa, static_cast<int>(exponent) - 10) : ldexpf(mantissa, -9);
    return sign | simt::float_to_half(size);
  };
  for (int i = 0; i < 2; i++) pairs[i] = half(codes >> 16 * i & 0xff) | half(codes >> (16 * i + 8) & 0xff) << 16;
}
inline u32 pack_e4m3(float lo, float hi) {
  const auto code = [](float x) -> u32 {
    if (std::isnan(x)) return 0x7f;
    // The largest of the numbers not above, or the one after it; of two that are as near, the even one.
    const auto number = [](u32 c) { return c < 8 ? ldexpf(c, -9) : ldexpf(8.f + c % 8, static_cast<int>(c / 8) - 10); };
    const float size = fminf(fabsf(x), 448.f);
    u32 below = 0;
    while (below < 0x7e && number(below + 1) <= size) below++;
    const float down = size - number(below), up = below < 0x7e ? number(below + 1) - size : INFINITY;
    return (std::signbit(x) ? 0x80 : 0) | (down < up || (down == up && below % 2 == 0) ? below : below + 1);
  };
  return code(lo) | code(hi) << 8;
}

inline float to_float(Half x) { return simt::half_to_float(x.bits); }
inline float to_float(Bfloat16 x) { return simt::element<Bfloat16>(x.bits); }
inline float to_float(float x) { return x; }

inline void bar_sync(int id, int threads, Place at = here()) {
  simt::enter(at);
  simt::arrive_and_wait(id, threads, "bar.sync");
}
inline void bar_arrive(int id, int threads, Place at = here()) {
  simt::enter(at);
  simt::arrive(id, threads, "bar.arrive");
}

}  // namespace ptx

#endif
