// schedule.h -- runs a CUDA kernel on the CPU: one cluster of blocks at a time, which of the fibers runs next, and when
// copies land.
// SPDX-License-Identifier: Apache-2.0
//
// The schedule is adversarial. A warp runs until all its threads wait, and only then the next warp starts, so warps
// drift apart as far as the kernel's synchronization lets them; so do the blocks of a cluster, of which each runs until
// all its warps wait. Asynchronous work is as late as possible: TMA and bulk copies, and those that an mbarrier counts,
// land, and waits for wgmma return, when no thread can run. `seed` 0 takes clusters, blocks, warps, lanes and copies in
// ascending order, 1 in descending order, and larger seeds permute them; there a warp or block may also be left for the
// next, and copies may land, at any time. Shared memory starts as NaN (0xff bytes).
//
// Not seen: a missing fence (memory or mbarrier-init; a proxy fence but between st_shared_v4 and wgmma), bank
// conflicts, registers, speed. Sums have another order than on tensor cores. Blocks of different clusters, and without
// clusters all blocks, do not run beside each other.
#ifndef CUATTN_SIMT_SCHEDULE_H
#define CUATTN_SIMT_SCHEDULE_H
#include <sys/mman.h>

#include "fibers.h"

namespace simt {

// One of 0 .. n - 1: the first for seed 0, the last for seed 1, any for larger seeds.
inline int choose(Cluster& c, int n) {
  if (c.seed < 2) return c.seed ? n - 1 : 0;
  c.random = c.random * 1664525u + 1013904223u;
  return static_cast<int>((c.random >> 8) % static_cast<unsigned>(n));
}

// 0 .. n - 1 in the order that the seed asks for.
inline std::vector<int> ordered(Cluster& c, int n) {
  const int seed = c.seed;
  std::vector<int> order(n);
  for (int i = 0; i < n; i++) order[i] = seed == 1 ? n - 1 - i : i;
  for (int i = n - 1; seed > 1 && i > 0; i--) std::swap(order[i], order[choose(c, i + 1)]);
  return order;
}

[[noreturn]] inline void report_deadlock(Cluster& c) {
  int done = 0, threads = 0;
  std::string waits;
  std::vector<std::pair<const char*, int>> seen;
  for (Block& b : c.blocks) {
    done += b.done;
    threads += b.threads;
    for (const Fiber& f : b.fibers) {
      const std::pair<const char*, int> key(f.wait.word ? f.wait.what : "polling", f.place.line);
      bool old = f.done;
      for (const auto& k : seen) old |= k == key;
      if (old || seen.size() == 4) continue;
      if (seen.empty()) block = &b;  // which the report names
      seen.push_back(key);
      waits += format("; thread %d%s waits at %s:%d, %s", f.linear,
                      c.blocks.size() > 1 ? format(" of rank %d", b.rank).c_str() : "", f.place.file, f.place.line,
                      key.first);
      if (f.wait.word && f.wait.arrived) waits += format(" (%d/%d)", *f.wait.arrived, *f.wait.needed);
    }
  }
  fail("deadlock: %d of %d threads finished%s", done, threads, waits.c_str());
}

// Stacks of one launch. They are not kept: guard pages make two mappings of each, every library that is loaded would
// keep its own, and a process may have some 65,000 mappings.
class Stacks {
 public:
  explicit Stacks(int threads) : bytes_(STACK_BYTES * static_cast<size_t>(threads)) {
    void* p = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) throw Error{"cannot map the fiber stacks"};
    base_ = static_cast<char*>(p);
    for (int i = 0; i < threads; i++) mprotect(of(i), PAGE_BYTES, PROT_NONE);
  }
  ~Stacks() {
    clean();
    munmap(base_, bytes_);
  }
  Stacks(const Stacks&) = delete;
  Stacks& operator=(const Stacks&) = delete;

  char* of(int thread) const { return base_ + STACK_BYTES * static_cast<size_t>(thread); }
  // Forgets what AddressSanitizer knows of the frames of the cluster before.
  void clean() const {
#if defined(__SANITIZE_ADDRESS__)
    __asan_unpoison_memory_region(base_, bytes_);
#endif
  }

 private:
  char* base_;
  size_t bytes_;
};

inline void prepare(Block& b) {
  const dim3 n = b.launch->block;
  b.fibers = std::vector<Fiber>(b.threads);
  for (int i = 0; i < b.threads; i++) {
    Fiber& f = b.fibers[i];
    f.linear = i;
    f.thread_idx = {i % n.x, i / n.x % n.y, i / (n.x * n.y)};
    f.stack = b.stacks->of(b.rank * b.threads + i);
    void** top = reinterpret_cast<void**>(f.stack + STACK_BYTES - 16);
    *--top = nullptr;
    *--top = reinterpret_cast<void*>(fiber_main);
    for (int k = 0; k < 6; k++) *--top = nullptr;  // the six saved registers
    f.sp = top;
  }
  const int warps = (b.threads + WARP_LANES - 1) / WARP_LANES, groups = (b.threads + GROUP_LANES - 1) / GROUP_LANES;
  memset(b.barriers, 0, sizeof b.barriers);
  b.warp_meetings = std::vector<std::list<Meeting>>(warps);
  b.group_meetings = std::vector<std::list<Meeting>>(groups);
  b.operands.assign(groups, {});
  b.in_flight.clear();
  b.copy_arrivals.clear();
  b.late_waits = b.done = 0;
  b.cluster_waits = 0;
  b.last_read = {};
  b.ended = false;
  b.unfenced.assign(b.smem_bytes / 16 + 1, 0);
  memset(b.smem, 0xff, b.smem_bytes);
  b.warp_order = ordered(*b.cluster, warps);
  b.lane_order = ordered(*b.cluster, WARP_LANES);
}

inline void land(const CopyArrival& arrival);

// Lets the copies that one mbarrier waits for land, and those that their threads began earlier.
inline void land_copies(Block& b) {
  const Word* mbarrier =
      std::next(b.copy_arrivals.begin(), choose(*b.cluster, static_cast<int>(b.copy_arrivals.size())))->mbarrier;
  std::vector<char> landing(b.threads, 0);
  std::list<CopyArrival> landed;
  for (auto a = b.copy_arrivals.end(); a != b.copy_arrivals.begin();) {
    --a;
    if (!(landing[a->thread] |= a->mbarrier == mbarrier)) continue;
    const auto next = std::next(a);
    landed.splice(landed.begin(), b.copy_arrivals, a);
    a = next;
  }
  for (const CopyArrival& arrival : landed) land(arrival);
}

// Lets a copy land, or those that an mbarrier waits for; returns whether there was one.
inline bool land_one(Block& b) {
  if (!b.copy_arrivals.empty() && (b.in_flight.empty() || choose(*b.cluster, 2) == 0)) {
    land_copies(b);
    return true;
  }
  if (b.in_flight.empty()) return false;
  const int i = choose(*b.cluster, static_cast<int>(b.in_flight.size()));
  const BulkCopy copy = std::move(b.in_flight[i]);
  b.in_flight.erase(b.in_flight.begin() + i);
  copy.land(copy);
  return true;
}

// Lets the oldest copy of any one thread land that has not asked for an arrival yet.
inline void land_any(Block& b) {
  Fiber& f = b.fibers[choose(*b.cluster, b.threads)];
  if (f.copies.empty()) return;
  memcpy(f.copies.front().dst, f.copies.front().data, f.copies.front().bytes);
  f.copies.erase(f.copies.begin());
}

// Resumes every lane once that is not blocked; returns whether one of them did more than poll.
inline bool run_warp(Block& b, int w) {
  bool progress = false;
  for (int l : b.lane_order) {
    const int i = w * WARP_LANES + l;
    if (i >= b.threads || blocked(b.fibers[i])) continue;
    Fiber& f = b.fibers[i];
    f.polled = false;
    resume(f);
    if (!error.empty()) throw Error{error};
    b.done += f.done;
    progress |= !f.polled;
  }
  return progress;
}

// Runs each warp of `block` until it waits; returns whether one of them did more than poll.
inline bool run_warps(Block& b) {
  Cluster& c = *b.cluster;
  const bool restless = c.seed > 1;
  bool progress = false;
  for (int w : b.warp_order) {
    while (run_warp(b, w)) {
      progress = true;
      if (restless && !b.copy_arrivals.empty() && choose(c, 8) == 0) land_copies(b);
      if (restless) land_any(b);
      if (restless && choose(c, 8) == 0) break;
    }
  }
  return progress;
}

// Lets go of late waits, or a copy land, in one block where no thread can run; returns whether there was one.
inline bool settle(Cluster& c) {
  for (int rank : ordered(c, static_cast<int>(c.blocks.size()))) {
    Block& b = c.blocks[rank];
    block = &b;
    if (b.late_waits && ((b.in_flight.empty() && b.copy_arrivals.empty()) || choose(c, 2) == 0)) {
      b.late_waits = 0;
      b.lulls++;
      return true;
    }
    if (land_one(b)) return true;
  }
  return false;
}

// What has to hold of `block` when its last thread has ended.
inline void check_end(Block& b) {
  if (!b.in_flight.empty()) fail("the block ended with %zu TMA or bulk copies in flight", b.in_flight.size());
  if (b.cluster_waits < b.last_read.waits) {
    fail("the block ended without a wait for barrier.cluster behind the read of its shared memory by rank %d, %s:%d",
         b.last_read.reader, b.last_read.place.file, b.last_read.place.line);
  }
#if !defined(__SANITIZE_ADDRESS__)
  for (int i = 0; i < CANARY_BYTES; i++) {
    if (b.smem[b.smem_bytes + i] != 0x5a) fail("a store past the %zu bytes of shared memory", b.smem_bytes);
  }
#endif
}

inline void run_cluster(Cluster& c) {
  c.generation = c.arrived = 0;
  c.blocks.front().stacks->clean();
  for (Block& b : c.blocks) prepare(b);
  const int size = static_cast<int>(c.blocks.size());
  // One in how many times a block is left for the next one that could still run; 0: never.
  const int patience = size > 1 && c.seed > 1 ? 1 << choose(c, 4) : 0;
  for (int idle = 0, ended = 0; ended < size;) {
    bool progress = false;
    for (int rank : ordered(c, size)) {
      Block& b = c.blocks[rank];
      if (b.ended) continue;
      block = &b;
      while (b.done < b.threads && run_warps(b)) {
        progress = true;
        if (patience && choose(c, patience) == 0) break;
      }
      if (b.done < b.threads) continue;
      check_end(b);
      b.ended = true;
      ended++;
    }
    if (progress) idle = 0;
    if (progress && size > 1) continue;                                  // what one block did may let another one run
    if (ended < size && !settle(c) && ++idle > 100) report_deadlock(c);  // a poll may be bounded
  }
}

template <class T>
T load_argument(const void* p) {
  T value;
  memcpy(static_cast<void*>(&value), p, sizeof(T));
  return value;
}
template <class... A, size_t... I>
void call(void (*kernel)(A...), void** args, std::index_sequence<I...>) {
  kernel(load_argument<std::remove_const_t<A>>(args[I])...);
}
template <class... A>
void body(void* kernel, void** args) {
  call(reinterpret_cast<void (*)(A...)>(kernel), args, std::index_sequence_for<A...>());
}

// The static shared memory, which is one for all blocks (builtins.h); null if there is none.
extern "C" __attribute__((weak, visibility("hidden"))) char __start_simt_shared[];

// Runs `kernel` for every cluster of the grid, one after another.
template <class... A>
void launch(const Launch& l, void (*kernel)(A...)) {
  constexpr int NUM_ARGS = sizeof...(A);
  const size_t bytes[NUM_ARGS + 1] = {sizeof(A)..., 0};
  if (l.num_args != NUM_ARGS) throw Error{format("the kernel takes %d arguments, got %d", NUM_ARGS, l.num_args)};
  for (int i = 0; i < NUM_ARGS; i++) {
    if (l.arg_bytes[i] == bytes[i]) continue;
    throw Error{format("argument %d has %zu bytes in the kernel, got %zu", i, bytes[i], l.arg_bytes[i])};
  }
  const int threads = static_cast<int>(l.block.x * l.block.y * l.block.z);
  if (threads < 1 || threads > 1024) throw Error{format("a block of %d threads", threads)};
  const dim3 g = l.grid, n = l.cluster;
  const unsigned size = n.x * n.y * n.z;
  if (size < 1 || size > MAX_CLUSTER) throw Error{format("a cluster of %u blocks", size)};
  if (g.x % n.x || g.y % n.y || g.z % n.z) {
    throw Error{format("clusters of (%u,%u,%u) blocks in a grid of (%u,%u,%u)", n.x, n.y, n.z, g.x, g.y, g.z)};
  }
  if (size > 1 && __start_simt_shared) throw Error{"blocks of a cluster would share static shared memory"};
  Cluster c;
  struct Cleanup {
    Cluster& c;
    ~Cleanup() {
      for (Block& b : c.blocks) free(b.smem);
      block = nullptr;
      self = nullptr;
    }
  } cleanup{c};
  const Stacks stacks(static_cast<int>(size) * threads);
  c.blocks = std::vector<Block>(size);
  c.needed = static_cast<int>(size) * threads;
  c.seed = l.seed;
  c.random = static_cast<unsigned>(l.seed);
#if defined(__SANITIZE_ADDRESS__)
  const size_t canary = 0;  // AddressSanitizer has its own, so here the memory ends where it was asked to
#else
  const size_t canary = CANARY_BYTES;
#endif
  for (unsigned rank = 0; rank < size; rank++) {
    Block& b = c.blocks[rank];
    b.launch = &l;
    b.cluster = &c;
    b.rank = static_cast<int>(rank);
    b.threads = threads;
    b.body = body<A...>;
    b.kernel = reinterpret_cast<void*>(kernel);
    b.stacks = &stacks;
    b.smem_bytes = l.smem_bytes;
    void* p = nullptr;
    if (posix_memalign(&p, 1024, l.smem_bytes + canary)) throw Error{"no memory for shared memory"};
    b.smem = static_cast<char*>(p);
    memset(b.smem + l.smem_bytes, 0x5a, canary);
  }
  error.clear();
  const dim3 clusters = {g.x / n.x, g.y / n.y, g.z / n.z};
  for (int i : ordered(c, static_cast<int>(clusters.x * clusters.y * clusters.z))) {
    const unsigned u = static_cast<unsigned>(i);
    const dim3 at = {u % clusters.x, u / clusters.x % clusters.y, u / (clusters.x * clusters.y)};
    for (unsigned rank = 0; rank < size; rank++) {
      c.blocks[rank].block_idx = {at.x * n.x + rank % n.x, at.y * n.y + rank / n.x % n.y,
                                  at.z * n.z + rank / (n.x * n.y)};
    }
    run_cluster(c);
  }
}

}  // namespace simt

#endif
