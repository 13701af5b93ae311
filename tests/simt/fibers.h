// fibers.h -- runs a CUDA kernel on the CPU: a fiber per CUDA thread, one block at a time, all in one OS thread.
// SPDX-License-Identifier: Apache-2.0
//
// The schedule is adversarial. A warp runs until all its threads wait, and only then the next warp starts, so warps
// drift apart as far as the kernel's synchronization lets them. Asynchronous work is as late as possible: TMA and bulk
// copies, and those that an mbarrier counts, land, and waits for wgmma return, when no thread can run. `seed` 0 takes
// blocks, warps, lanes and copies in ascending order, 1 in descending order, and larger seeds permute them; there a
// warp may also be left for the next, and copies may land, at any time. Shared memory starts as NaN (0xff bytes).
//
// Not seen: a missing fence (memory or mbarrier-init; a proxy fence but between st_shared_v4 and wgmma), bank
// conflicts, registers, speed. Sums have another order than on tensor cores. There are no clusters, and blocks do not
// run beside each other.
#ifndef CUATTN_SIMT_FIBERS_H
#define CUATTN_SIMT_FIBERS_H
#if !defined(__x86_64__)
#error "the fiber switch is written for x86-64"
#endif
#include <math.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include <list>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

struct dim3 {
  unsigned x, y, z;
};

namespace simt {

using Word = unsigned long long;

constexpr size_t STACK_BYTES = 256 * 1024;  // per fiber; the lowest page is a guard page
constexpr size_t PAGE_BYTES = 4096;
constexpr int CANARY_BYTES = 256;  // behind the dynamic shared memory
constexpr int NUM_NAMED_BARRIERS = 16;
constexpr int WARP_LANES = 32;
constexpr int GROUP_LANES = 128;  // a warpgroup

// Where the kernel calls a built-in. As the last parameter, `Place at = here()` names the line of the caller.
struct Place {
  const char* file;
  int line;
};
inline Place here(const char* file = __builtin_FILE(), int line = __builtin_LINE()) { return {file, line}; }

// What a fiber waits for: it is blocked while (*word & mask) == value.
struct Wait {
  const Word* word;
  Word mask, value;
  const char* what;
  const int *arrived, *needed;  // null where there is no count
};

struct Barrier {
  Word generation;
  int needed, arrived;
  Place place;
};

// What one thread hands to a collective.
struct Slot {
  alignas(16) unsigned char bytes[64];

  template <class T>
  T get() const {
    T value;
    memcpy(static_cast<void*>(&value), bytes, sizeof(T));
    return value;
  }
  template <class T>
  void set(const T& value) {
    static_assert(sizeof(T) <= sizeof(bytes), "too large for a slot");
    memcpy(bytes, static_cast<const void*>(&value), sizeof(T));
  }
};

// A warp or warpgroup collective: threads of equal mask and line gather, the last one computes, all read.
struct Meeting {
  Word completed = 0;  // counts the uses
  unsigned mask = 0;
  int line = 0, needed = 0, arrived = 0, readers = 0;
  Slot slots[GROUP_LANES];
};

// A cp.async in flight: read at issue, written by the wait of its thread, or before the arrival that follows it.
struct AsyncCopy {
  void* dst;
  int group, bytes;
  unsigned char data[16];
};

// A thread's arrival on an mbarrier that comes once its copies have landed.
struct CopyArrival {
  Word* mbarrier;
  int thread;
  std::vector<AsyncCopy> copies;
};

// A wgmma accumulator in flight: `regs` hold NaN until the wait of their thread.
struct PendingAcc {
  float* regs;
  int group;
  std::vector<float> values;
};

// A shared-memory operand of a wgmma in flight. Changing it before the wait is an error.
struct PendingOperand {
  Word desc;
  int group, rows;
  bool mn_major;
  std::vector<uint16_t> values;
};

// A TMA or bulk copy in flight: read at issue, written when no thread can run.
struct BulkCopy {
  unsigned dst;  // offset in shared memory
  int swizzle;
  Word* mbarrier;
  std::vector<char> data;
  void (*land)(const BulkCopy&);
};

struct Fiber {
  void* sp = nullptr;
  char* stack = nullptr;
  void* fake_stack = nullptr;  // of AddressSanitizer
  dim3 thread_idx = {};
  int linear = 0;
  bool done = false, polled = false;
  Wait wait = {};
  Place place = {"", 0};  // of the latest built-in
  std::vector<AsyncCopy> copies;
  int copy_group = 0;
  std::vector<PendingAcc> accs;
  int acc_group = 0;
  bool acc_fenced = false;
  std::vector<unsigned> unfenced;  // see Block
};

struct Range {
  const char *begin, *end;
};

struct Launch {
  dim3 grid, block;
  size_t smem_bytes;
  int seed;
  void** args;  // args[i] points to the value of parameter i, as for cuLaunchKernel
  const size_t* arg_bytes;
  int num_args;
  const Range* memory;  // what global loads may touch; null allows everything
  int num_memory;
};

class Stacks;

struct Block {
  const Launch* launch = nullptr;
  dim3 block_idx = {};
  int threads = 0, done = 0;
  void (*body)(void* kernel, void** args) = nullptr;
  void* kernel = nullptr;
  const Stacks* stacks = nullptr;
  char* smem = nullptr;  // dynamic shared memory
  size_t smem_bytes = 0;
  std::vector<Fiber> fibers;
  Barrier barriers[NUM_NAMED_BARRIERS] = {};
  std::vector<std::list<Meeting>> warp_meetings, group_meetings;
  std::vector<std::vector<PendingOperand>> operands;  // by warpgroup
  std::vector<BulkCopy> in_flight;
  std::list<CopyArrival> copy_arrivals;
  // By 16 bytes of shared memory, the thread, plus 1, whose st_shared_v4 there no proxy fence of its own has followed.
  std::vector<int> unfenced;
  Word lulls = 0;  // how often no thread could run, and late_waits were let go
  int late_waits = 0;
  unsigned random = 0;
  void* scheduler_sp = nullptr;
  void* scheduler_fake_stack = nullptr;
  const void* scheduler_stack = nullptr;
  size_t scheduler_stack_bytes = 0;
};

// What launch() throws.
struct Error {
  std::string text;
};

inline Block* block = nullptr;
inline Fiber* self = nullptr;  // null: the scheduler runs
inline std::string error;      // of the running block

// Saves the callee-saved registers and the stack pointer to *save, continues at `to`.
extern "C" __attribute__((visibility("hidden"))) void simt_switch(void** save, void* to);
asm(R"(
.text
.p2align 4
.weak simt_switch
.hidden simt_switch
.type simt_switch,@function
simt_switch:
  push %rbp; push %rbx; push %r12; push %r13; push %r14; push %r15
  mov %rsp,(%rdi)
  mov %rsi,%rsp
  pop %r15; pop %r14; pop %r13; pop %r12; pop %rbx; pop %rbp
  ret
.size simt_switch,.-simt_switch
)");

inline void to_scheduler() {
  Fiber& f = *self;
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(f.done ? nullptr : &f.fake_stack, block->scheduler_stack,
                                 block->scheduler_stack_bytes);
#endif
  simt_switch(&f.sp, block->scheduler_sp);
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(f.fake_stack, &block->scheduler_stack, &block->scheduler_stack_bytes);
#endif
}

inline void resume(Fiber& f) {
  self = &f;
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(&block->scheduler_fake_stack, f.stack, STACK_BYTES);
#endif
  simt_switch(&block->scheduler_sp, f.sp);
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(block->scheduler_fake_stack, nullptr, nullptr);
#endif
  self = nullptr;
}

inline void fiber_main() {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(nullptr, &block->scheduler_stack, &block->scheduler_stack_bytes);
#endif
  block->body(block->kernel, block->launch->args);
  self->done = true;
  to_scheduler();
  abort();
}

inline std::string format(const char* pattern, va_list args) {
  char text[400];
  vsnprintf(text, sizeof text, pattern, args);
  return text;
}
__attribute__((format(printf, 1, 2))) inline std::string format(const char* pattern, ...) {
  va_list args;
  va_start(args, pattern);
  const std::string text = format(pattern, args);
  va_end(args);
  return text;
}

// Reports an error of the kernel. The block is abandoned, and launch() throws.
[[noreturn]] __attribute__((format(printf, 1, 2))) inline void fail(const char* pattern, ...) {
  va_list args;
  va_start(args, pattern);
  error = format(pattern, args);
  va_end(args);
  const dim3 b = block->block_idx;
  error += format(" [block (%u,%u,%u)", b.x, b.y, b.z);
  if (!self) throw Error{error + "]"};
  error += format(", thread %d, %s:%d]", self->linear, self->place.file, self->place.line);
  self->done = true;
  for (;;) to_scheduler();
}

inline bool blocked(const Fiber& f) { return f.done || (f.wait.word && (*f.wait.word & f.wait.mask) == f.wait.value); }

inline void wait_for(const Wait& wait) {
  self->wait = wait;
  while (blocked(*self)) to_scheduler();
  self->wait.word = nullptr;
}

// Waits until no thread can run.
inline void wait_late(const char* what) {
  block->late_waits++;
  wait_for({&block->lulls, ~0ull, block->lulls, what, nullptr, nullptr});
}

// Lets the other threads run, in a loop that polls memory.
inline void poll() {
  self->polled = true;
  to_scheduler();
}

// ---- barriers ----------------------------------------------------------------------------------------------------

// Returns whether this arrival opened the barrier.
inline bool arrive(int id, int needed, const char* what) {
  if (id < 0 || id >= NUM_NAMED_BARRIERS) fail("%s: there is no barrier %d", what, id);
  if (needed <= 0 || (needed % WARP_LANES && needed != block->threads)) fail("%s: %d threads", what, needed);
  Barrier& b = block->barriers[id];
  if (b.arrived && b.needed != needed) {
    fail("%s: barrier %d is for %d threads here, for %d at %s:%d", what, id, needed, b.needed, b.place.file,
         b.place.line);
  }
  if (b.arrived == 0) b.place = self->place;
  b.needed = needed;
  if (++b.arrived < needed) return false;
  b.arrived = 0;
  b.generation++;
  return true;
}

inline void arrive_and_wait(int id, int needed, const char* what) {
  if (arrive(id, needed, what)) return;
  const Barrier& b = block->barriers[id];
  wait_for({&b.generation, ~0ull, b.generation, what, &b.arrived, &b.needed});
}

// All threads of the block have to come by the same line.
inline void sync_threads(Place at) {
  self->place = at;
  const Barrier& b = block->barriers[0];
  if (b.arrived && b.place.line != at.line) {
    fail("__syncthreads: other threads of the block wait at %s:%d", b.place.file, b.place.line);
  }
  arrive_and_wait(0, block->threads, "__syncthreads");
}

// ---- collectives -------------------------------------------------------------------------------------------------

// The caller leaves `value` as participant `index` of `needed`. The last one runs compute(slots), then all read(slots).
template <class T, class Compute, class Read>
auto meet(std::list<Meeting>& meetings, int index, int needed, unsigned mask, Place at, const char* what,
          const T& value, Compute compute, Read read) {
  self->place = at;
  Meeting *m = nullptr, *unused = nullptr;
  for (Meeting& x : meetings) {
    if (x.arrived && x.mask == mask && x.line == at.line) m = &x;
    if (!x.arrived && !x.readers) unused = &x;
  }
  if (!m) m = unused ? unused : &meetings.emplace_back();
  m->mask = mask;
  m->line = at.line;
  m->needed = needed;
  m->slots[index].set(value);
  if (++m->arrived == needed) {
    compute(m->slots);
    m->arrived = 0;
    m->readers = needed;
    m->completed++;
  } else {
    wait_for({&m->completed, ~0ull, m->completed, what, &m->arrived, &m->needed});
  }
  auto result = read(static_cast<const Slot*>(m->slots));
  m->readers--;
  return result;
}

inline int lane() { return self->linear % WARP_LANES; }
inline int warp() { return self->linear / WARP_LANES; }
inline bool participates(unsigned mask, int l) { return mask >> l & 1 && warp() * WARP_LANES + l < block->threads; }

// All lanes of `mask` have to come by the same line.
template <class T, class Compute, class Read>
auto warp_meet(unsigned mask, Place at, const char* what, const T& value, Compute compute, Read read) {
  self->place = at;
  if (!(mask >> lane() & 1)) fail("%s: mask %08x does not name lane %d, which calls", what, mask, lane());
  int needed = 0;
  for (int l = 0; l < WARP_LANES; l++) needed += participates(mask, l);
  return meet(block->warp_meetings[warp()], lane(), needed, mask, at, what, value, compute, read);
}

template <class T, class Read>
auto warp_read(unsigned mask, Place at, const char* what, const T& value, Read read) {
  return warp_meet(mask, at, what, value, [](Slot*) {}, read);
}

// ---- scheduler ---------------------------------------------------------------------------------------------------

// One of 0 .. n - 1: the first for seed 0, the last for seed 1, any for larger seeds.
inline int choose(Block& b, int n) {
  if (b.launch->seed < 2) return b.launch->seed ? n - 1 : 0;
  b.random = b.random * 1664525u + 1013904223u;
  return static_cast<int>((b.random >> 8) % static_cast<unsigned>(n));
}

// 0 .. n - 1 in the order that the seed asks for.
inline std::vector<int> ordered(Block& b, int n) {
  const int seed = b.launch->seed;
  std::vector<int> order(n);
  for (int i = 0; i < n; i++) order[i] = seed == 1 ? n - 1 - i : i;
  for (int i = n - 1; seed > 1 && i > 0; i--) std::swap(order[i], order[choose(b, i + 1)]);
  return order;
}

[[noreturn]] inline void report_deadlock(Block& b) {
  std::string text = format("deadlock: %d of %d threads finished", b.done, b.threads);
  std::vector<std::pair<const char*, int>> seen;
  for (const Fiber& f : b.fibers) {
    const std::pair<const char*, int> key(f.wait.word ? f.wait.what : "polling", f.place.line);
    bool old = f.done;
    for (const auto& k : seen) old |= k == key;
    if (old || seen.size() == 4) continue;
    seen.push_back(key);
    text += format("; thread %d waits at %s:%d, %s", f.linear, f.place.file, f.place.line, key.first);
    if (f.wait.word && f.wait.arrived) text += format(" (%d/%d)", *f.wait.arrived, *f.wait.needed);
  }
  fail("%s", text.c_str());
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
  // Forgets what AddressSanitizer knows of the frames of the block before.
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
  b.stacks->clean();
  b.fibers = std::vector<Fiber>(b.threads);
  for (int i = 0; i < b.threads; i++) {
    Fiber& f = b.fibers[i];
    f.linear = i;
    f.thread_idx = {i % n.x, i / n.x % n.y, i / (n.x * n.y)};
    f.stack = b.stacks->of(i);
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
  b.unfenced.assign(b.smem_bytes / 16 + 1, 0);
  memset(b.smem, 0xff, b.smem_bytes);
}

inline void land(const CopyArrival& arrival);

// Lets the copies that one mbarrier waits for land, and those that their threads began earlier.
inline void land_copies(Block& b) {
  const Word* mbarrier =
      std::next(b.copy_arrivals.begin(), choose(b, static_cast<int>(b.copy_arrivals.size())))->mbarrier;
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
  if (!b.copy_arrivals.empty() && (b.in_flight.empty() || choose(b, 2) == 0)) {
    land_copies(b);
    return true;
  }
  if (b.in_flight.empty()) return false;
  const int i = choose(b, static_cast<int>(b.in_flight.size()));
  const BulkCopy copy = std::move(b.in_flight[i]);
  b.in_flight.erase(b.in_flight.begin() + i);
  copy.land(copy);
  return true;
}

// Lets the oldest copy of any one thread land that has not asked for an arrival yet.
inline void land_any(Block& b) {
  Fiber& f = b.fibers[choose(b, b.threads)];
  if (f.copies.empty()) return;
  memcpy(f.copies.front().dst, f.copies.front().data, f.copies.front().bytes);
  f.copies.erase(f.copies.begin());
}

// Resumes every lane once that is not blocked; returns whether one of them did more than poll.
inline bool run_warp(Block& b, int w, const std::vector<int>& lanes) {
  bool progress = false;
  for (int l : lanes) {
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

inline void run_block(Block& b) {
  prepare(b);
  const std::vector<int> warps = ordered(b, static_cast<int>(b.warp_meetings.size()));
  const std::vector<int> lanes = ordered(b, WARP_LANES);
  const bool restless = b.launch->seed > 1;
  for (int idle = 0; b.done < b.threads;) {
    bool progress = false;
    for (int w : warps) {
      while (run_warp(b, w, lanes)) {
        progress = true;
        if (restless && !b.copy_arrivals.empty() && choose(b, 8) == 0) land_copies(b);
        if (restless) land_any(b);
        if (restless && choose(b, 8) == 0) break;
      }
    }
    if (progress) {
      idle = 0;
    } else if (b.late_waits && ((b.in_flight.empty() && b.copy_arrivals.empty()) || choose(b, 2) == 0)) {
      b.late_waits = 0;
      b.lulls++;
    } else if (land_one(b)) {
      continue;
    } else if (++idle > 100) {  // a poll may be bounded
      report_deadlock(b);
    }
  }
  if (!b.in_flight.empty()) fail("the block ended with %zu TMA or bulk copies in flight", b.in_flight.size());
#if !defined(__SANITIZE_ADDRESS__)
  for (int i = 0; i < CANARY_BYTES; i++) {
    if (b.smem[b.smem_bytes + i] != 0x5a) fail("a store past the %zu bytes of shared memory", b.smem_bytes);
  }
#endif
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

// Runs `kernel` for every block of the grid, one after another.
template <class... A>
void launch(const Launch& l, void (*kernel)(A...)) {
  constexpr int NUM_ARGS = sizeof...(A);
  const size_t bytes[NUM_ARGS + 1] = {sizeof(A)..., 0};
  if (l.num_args != NUM_ARGS) throw Error{format("the kernel takes %d arguments, got %d", NUM_ARGS, l.num_args)};
  for (int i = 0; i < NUM_ARGS; i++) {
    if (l.arg_bytes[i] == bytes[i]) continue;
    throw Error{format("argument %d has %zu bytes in the kernel, got %zu", i, bytes[i], l.arg_bytes[i])};
  }
  Block b;
  struct Cleanup {
    Block& b;
    ~Cleanup() {
      free(b.smem);
      block = nullptr;
      self = nullptr;
    }
  } cleanup{b};
  b.launch = &l;
  b.threads = static_cast<int>(l.block.x * l.block.y * l.block.z);
  if (b.threads < 1 || b.threads > 1024) throw Error{format("a block of %d threads", b.threads)};
  b.body = body<A...>;
  b.kernel = reinterpret_cast<void*>(kernel);
  b.random = static_cast<unsigned>(l.seed);
  b.smem_bytes = l.smem_bytes;
#if defined(__SANITIZE_ADDRESS__)
  const size_t canary = 0;  // AddressSanitizer has its own, so here the memory ends where it was asked to
#else
  const size_t canary = CANARY_BYTES;
#endif
  void* p = nullptr;
  if (posix_memalign(&p, 1024, l.smem_bytes + canary)) throw Error{"no memory for shared memory"};
  b.smem = static_cast<char*>(p);
  memset(b.smem + l.smem_bytes, 0x5a, canary);
  const Stacks stacks(b.threads);
  b.stacks = &stacks;
  block = &b;
  error.clear();
  for (int i : ordered(b, static_cast<int>(l.grid.x * l.grid.y * l.grid.z))) {
    const unsigned u = static_cast<unsigned>(i);
    b.block_idx = {u % l.grid.x, u / l.grid.x % l.grid.y, u / (l.grid.x * l.grid.y)};
    run_block(b);
  }
}

}  // namespace simt

#endif
