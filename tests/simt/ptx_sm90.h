// ptx_sm90.h -- cuda_src/common/ptx_sm90.cuh for the CPU: the same functions, behind the same include guard.
// SPDX-License-Identifier: Apache-2.0
#ifndef CUATTN_COMMON_PTX_SM90_CUH
#define CUATTN_COMMON_PTX_SM90_CUH
#include "ptx.h"

namespace simt {

// What stands in the bytes of a TensorMap. Index 0 is the innermost dimension; its stride is `element_bytes`.
struct Tensor {
  const char* base;
  i64 stride[5];
  int dim[5], box[5];
  int rank, element_bytes, swizzle;
};
static_assert(sizeof(Tensor) <= sizeof(TensorMap), "a tensor map has 128 bytes");

// Swizzle of a byte address: the 16-byte chunks of a row of `span` bytes are permuted.
inline u32 swizzled(u32 address, int span) { return address ^ (address >> 3 & static_cast<u32>(span - 16) & 0x70); }

// The restrictions of cuTensorMapEncodeTiled. Returns null, or what is wrong.
inline const char* encode_tensor_map(void* out, const void* base, int element_bytes, int rank, const u64* dim,
                                     const u64* stride, const u32* box, int swizzle) {
  Tensor t{static_cast<const char*>(base), {element_bytes}, {}, {}, rank, element_bytes, swizzle ? swizzle : 16};
  if (rank < 2 || rank > 4) return "tensor map: the rank must be 2, 3 or 4";
  if (swizzle != 0 && swizzle != 32 && swizzle != 64 && swizzle != 128) return "tensor map: no such swizzle";
  if (reinterpret_cast<uintptr_t>(base) % 16) return "tensor map: the array must start at a multiple of 16 bytes";
  for (int i = 0; i < rank; i++) {
    if (dim[i] == 0 || dim[i] >> 31) return "tensor map: a dimension is empty or too large";
    if (box[i] == 0 || box[i] > 256) return "tensor map: a box has 1 to 256 elements in each dimension";
    t.dim[i] = static_cast<int>(dim[i]);
    t.box[i] = static_cast<int>(box[i]);
    if (i > 0) t.stride[i] = static_cast<i64>(stride[i - 1]);
    if (i > 0 && t.stride[i] % 16) return "tensor map: strides must be multiples of 16 bytes";
  }
  const int inner = t.box[0] * element_bytes;
  if (inner % 16) return "tensor map: the innermost dimension of the box must be a multiple of 16 bytes";
  if (swizzle && inner > swizzle) return "tensor map: the innermost dimension of the box exceeds the swizzle";
  memset(out, 0, sizeof(TensorMap));
  memcpy(out, &t, sizeof t);
  return nullptr;
}

// ---- TMA and bulk copies -----------------------------------------------------------------------------------------

inline void land(const BulkCopy& copy) {
  for (size_t i = 0; i < copy.data.size(); i += 16) {
    memcpy(block->smem + swizzled(copy.dst + static_cast<u32>(i), copy.swizzle), &copy.data[i], 16);
  }
  update_mbarrier(copy.mbarrier, 0, -static_cast<i64>(copy.data.size()));
}

// Until the copy lands the destination holds NaN.
inline void issue(void* dst, u64* bar, std::vector<char> data, int swizzle, const char* what) {
  load_mbarrier(bar);
  memset(dst, 0xff, data.size());
  const u32 offset = smem_offset(dst, data.size(), what);
  block->in_flight.push_back({offset, swizzle, bar, std::move(data), land});
}

template <int RANK>
void tma_load(void* dst, const TensorMap* map, u64* bar, const int (&at)[RANK]) {
  const Tensor t = load_argument<Tensor>(map);
  if (t.rank != RANK) fail("tma_load_%dd: the tensor map has rank %d", RANK, t.rank);
  check_aligned(dst, t.swizzle == 16 ? 128 : 8 * t.swizzle, "tma_load: destination");
  // Found on an H200, which answers with "illegal instruction".
  if (at[0] * t.element_bytes % 16) fail("tma_load_%dd: coordinate %d is not a multiple of 16 bytes", RANK, at[0]);
  int rows = 1;
  for (int i = 1; i < RANK; i++) rows *= t.box[i];
  const int row_bytes = t.box[0] * t.element_bytes;
  smem_offset(dst, static_cast<size_t>(rows) * row_bytes, "tma_load: destination");
  std::vector<char> data(static_cast<size_t>(rows) * row_bytes, 0);
  const int first = max(0, -at[0]), last = min(t.box[0], t.dim[0] - at[0]);  // elements of a row inside the tensor
  for (int row = 0; row < rows; row++) {
    bool inside = first < last;
    i64 offset = (at[0] + static_cast<i64>(first)) * t.element_bytes;
    for (int i = 1, rest = row; i < RANK; rest /= t.box[i++]) {
      const i64 x = at[i] + static_cast<i64>(rest % t.box[i]);
      inside &= x >= 0 && x < t.dim[i];
      offset += x * t.stride[i];
    }
    if (!inside) continue;
    memcpy(&data[row * row_bytes + first * t.element_bytes], t.base + offset, (last - first) * t.element_bytes);
  }
  issue(dst, bar, std::move(data), t.swizzle, "tma_load: destination");
}

// ---- wgmma -------------------------------------------------------------------------------------------------------

// Address of element (mn, k), see ptx::smem_desc.
inline u32 operand_address(u64 desc, int mn, int k, bool mn_major) {
  const u32 start = (desc & 0x3fff) << 4, lbo = (desc >> 16 & 0x3fff) << 4, sbo = (desc >> 32 & 0x3fff) << 4;
  const int s = desc >> 62 ? 256 >> (desc >> 62) : 16;
  u32 a = start;
  if (mn_major) {
    a += s > 16 ? 2 * mn / s * lbo + k / 8 * sbo + k % 8 * s + 2 * (mn % (s / 2))
                : mn / 8 * sbo + k / 8 * lbo + k % 8 * 16 + mn % 8 * 2;
  } else {
    a += s > 16 ? mn / 8 * sbo + mn % 8 * s + 2 * k : mn / 8 * sbo + k / 8 * lbo + mn % 8 * 16 + k % 8 * 2;
  }
  return swizzled(a, s);
}

// [rows, 16] elements of an operand in shared memory.
inline std::vector<uint16_t> gather(u64 desc, int rows, bool mn_major) {
  std::vector<uint16_t> values(rows * 16);
  for (int i = 0; i < rows * 16; i++) {
    const u32 a = operand_address(desc, i / 16, i % 16, mn_major);
    if (a + 2 > block->smem_bytes) fail("wgmma: descriptor %016llx reads shared memory +%u", desc, a);
    if (const int writer = block->unfenced[a / 16]) {
      fail("wgmma: descriptor %016llx reads what thread %d wrote without a proxy fence, +%u", desc, writer - 1, a);
    }
    memcpy(&values[i], block->smem + a, 2);
  }
  return values;
}

// Computes at issue; the result stays aside until wgmma_wait, and so do the operands, to be compared then.
template <class Elem, int N>
void wgmma(float (&d)[N / 2], const u32* a, u64 desc_a, u64 desc_b, bool accumulate, bool trans_a, bool trans_b,
           Place at) {
  static_assert(N % 8 == 0 && N >= 8 && N <= 256, "shapes of wgmma");
  enter(at);
  const int group = self->linear / GROUP_LANES, rank = self->linear % GROUP_LANES;
  if ((group + 1) * GROUP_LANES > block->threads) fail("wgmma: the warpgroup has fewer than 128 threads");
  if (!self->acc_fenced) fail("wgmma: a batch begins with wgmma_fence");
  struct Operands {
    float* d;
    u64 desc_a, desc_b;
    u32 a[4];
    bool accumulate, from_registers;
  } mine{d, desc_a, desc_b, {}, accumulate, a != nullptr};
  if (a) memcpy(mine.a, a, sizeof mine.a);

  auto compute = [=](Slot* slots) {
    static float A[64][16], B[16][N], D[64][N];
    const Operands all = slots[0].get<Operands>();
    const int acc_group = self->acc_group;
    auto keep = [&](u64 desc, int rows, bool mn_major) {
      block->operands[group].push_back({desc, acc_group, rows, mn_major, gather(desc, rows, mn_major)});
      return block->operands[group].back().values.data();
    };
    if (!all.from_registers) {
      const uint16_t* x = keep(all.desc_a, 64, trans_a);
      for (int i = 0; i < 64 * 16; i++) A[i / 16][i % 16] = element<Elem>(x[i]);
    }
    const uint16_t* y = keep(all.desc_b, N, trans_b);
    for (int i = 0; i < N * 16; i++) B[i % 16][i / 16] = element<Elem>(y[i]);
    for (int l = 0; l < GROUP_LANES; l++) {
      const Operands x = slots[l].get<Operands>();
      if (x.desc_a != all.desc_a || x.desc_b != all.desc_b || x.accumulate != all.accumulate) {
        fail("wgmma: the threads of the warpgroup disagree on the operands");
      }
      const int row = l / 32 * 16 + l % 32 / 4, col = l % 4 * 2;
      for (int i = 0; x.from_registers && i < 8; i++) {
        A[row + i / 2 % 2 * 8][col + i / 4 * 8 + i % 2] = element<Elem>(x.a[i / 2] >> i % 2 * 16);
      }
    }
    for (int i = 0; i < 64; i++) {
      for (int j = 0; j < N; j++) D[i][j] = 0.f;
      for (int k = 0; k < 16; k++) {
        for (int j = 0; j < N; j++) D[i][j] += A[i][k] * B[k][j];
      }
    }
    for (int l = 0; l < GROUP_LANES; l++) {
      Fiber& f = block->fibers[group * GROUP_LANES + l];
      float* regs = slots[l].get<Operands>().d;
      PendingAcc* acc = nullptr;
      for (PendingAcc& x : f.accs) {
        if (x.regs == regs) acc = &x;
      }
      if (!acc) {
        f.accs.push_back({regs, 0, std::vector<float>(regs, regs + N / 2)});
        acc = &f.accs.back();
        for (int i = 0; i < N / 2; i++) regs[i] = NAN;
      }
      if (acc->values.size() != N / 2) fail("wgmma: the accumulator is in flight with another N");
      acc->group = f.acc_group;
      for (int i = 0; i < N / 2; i++) {
        const float sum = D[l / 32 * 16 + l % 32 / 4 + i / 2 % 2 * 8][i / 4 * 8 + l % 4 * 2 + i % 2];
        acc->values[i] = all.accumulate ? acc->values[i] + sum : sum;
      }
    }
  };
  meet(block->group_meetings[group], rank, GROUP_LANES, 0, at, "wgmma", mine, compute, [](const Slot*) { return 0; });
}

inline void wgmma_wait(int still, Place at) {
  enter(at);
  if (!self->accs.empty()) wait_late("wgmma.wait_group");
  std::vector<PendingOperand>& operands = block->operands[self->linear / GROUP_LANES];
  for (size_t i = 0; i < operands.size();) {
    const PendingOperand& x = operands[i];
    if (x.group + still >= self->acc_group) {
      i++;
      continue;
    }
    if (gather(x.desc, x.rows, x.mn_major) != x.values) {
      fail("wgmma: an operand (descriptor %016llx) was overwritten before the wait", x.desc);
    }
    operands.erase(operands.begin() + static_cast<long>(i));
  }
  for (size_t i = 0; i < self->accs.size();) {
    PendingAcc& acc = self->accs[i];
    if (acc.group + still >= self->acc_group) {
      i++;
      continue;
    }
    memcpy(acc.regs, acc.values.data(), acc.values.size() * sizeof(float));
    self->accs.erase(self->accs.begin() + static_cast<long>(i));
  }
}

}  // namespace simt

namespace ptx {

inline void fence_mbarrier_init() {}
inline void mbarrier_expect_tx(u64* bar, u32 bytes, Place at = here()) {
  simt::enter(at);
  simt::update_mbarrier(bar, 0, bytes);
}
inline void mbarrier_arrive_expect_tx(u64* bar, u32 bytes, Place at = here()) {
  simt::enter(at);
  simt::update_mbarrier(bar, 1, bytes);
}
inline void fence_proxy_async() {
  for (const unsigned i : simt::self->unfenced) {
    if (simt::block->unfenced[i] == simt::self->linear + 1) simt::block->unfenced[i] = 0;
  }
  simt::self->unfenced.clear();
}

// Which lane it is depends on the seed.
inline bool elect_one(Place at = here()) {
  simt::warp_read(FULL_MASK, at, "elect.sync", 0, [](const simt::Slot*) { return 0; });
  return simt::lane() == simt::block->launch->seed * 9 % WARP;
}

inline void prefetch_tensormap(const TensorMap*) {}
inline void tma_load_2d(void* dst, const TensorMap* map, u64* bar, int c0, int c1, Place at = here()) {
  simt::enter(at);
  simt::tma_load<2>(dst, map, bar, {c0, c1});
}
inline void tma_load_3d(void* dst, const TensorMap* map, u64* bar, int c0, int c1, int c2, Place at = here()) {
  simt::enter(at);
  simt::tma_load<3>(dst, map, bar, {c0, c1, c2});
}
inline void tma_load_4d(void* dst, const TensorMap* map, u64* bar, int c0, int c1, int c2, int c3, Place at = here()) {
  simt::enter(at);
  simt::tma_load<4>(dst, map, bar, {c0, c1, c2, c3});
}
inline void bulk_load(void* dst, const void* src, u32 bytes, u64* bar, Place at = here()) {
  simt::enter(at);
  simt::check_aligned(dst, 16, "bulk_load: destination");
  simt::check_aligned(src, 16, "bulk_load: source");
  if (bytes == 0 || bytes % 16) simt::fail("bulk_load: %u bytes", bytes);
  simt::smem_offset(dst, bytes, "bulk_load: destination");
  simt::check_global(src, bytes, "bulk_load");
  const char* p = static_cast<const char*>(src);
  simt::issue(dst, bar, std::vector<char>(p, p + bytes), 16, "bulk_load: destination");
}

inline void wgmma_fence() { simt::self->acc_fenced = true; }
inline void wgmma_commit() {
  simt::self->acc_group++;
  simt::self->acc_fenced = false;
}
template <int N>
void wgmma_wait(Place at = here()) {
  simt::wgmma_wait(N, at);
}
template <int N>
void wgmma_wait_behind(float x, float y, Place at = here()) {
  if (x < 0.f || y < 0.f) simt::fail("wgmma_wait_behind: %g, %g", x, y);
  simt::wgmma_wait(N, at);
}
template <int N>
void read_behind(float (&)[N]) {}

template <int SWIZZLE>
u64 smem_desc(const void* p, u32 lbo, u32 sbo, Place at = here()) {
  static_assert(SWIZZLE == 0 || SWIZZLE == 32 || SWIZZLE == 64 || SWIZZLE == 128, "swizzle spans");
  constexpr u64 MODE = SWIZZLE == 128 ? 1 : SWIZZLE == 64 ? 2 : SWIZZLE == 32 ? 3 : 0;
  if ((lbo | sbo) % 16 || lbo >> 18 || sbo >> 18) simt::fail("smem_desc: lbo %u, sbo %u", lbo, sbo);
  simt::check_aligned(p, 16, "smem_desc");
  return static_cast<u64>(smem_addr(p, at) >> 4) | static_cast<u64>(lbo >> 4) << 16 | static_cast<u64>(sbo >> 4) << 32 |
         MODE << 62;
}

template <class Elem, int N, int TRANS_A = 0, int TRANS_B = 0>
void wgmma_ss(float (&d)[N / 2], u64 desc_a, u64 desc_b, bool accumulate, Place at = here()) {
  simt::wgmma<Elem, N>(d, nullptr, desc_a, desc_b, accumulate, TRANS_A, TRANS_B, at);
}
template <class Elem, int N, int TRANS_B = 0>
void wgmma_rs(float (&d)[N / 2], const u32 (&a)[4], u64 desc_b, bool accumulate, Place at = here()) {
  simt::wgmma<Elem, N>(d, a, 0, desc_b, accumulate, false, TRANS_B, at);
}

template <int R>
void setmaxnreg_dec() {
  static_assert(R % 8 == 0 && R >= 24 && R <= 256, "setmaxnreg takes multiples of 8 from 24 to 256");
}
template <int R>
void setmaxnreg_inc() {
  setmaxnreg_dec<R>();
}

}  // namespace ptx

#endif
