// fibers.h -- a fiber per CUDA thread, all in one OS thread: their state, what they wait for, and how they meet.
// SPDX-License-Identifier: Apache-2.0
//
// schedule.h says which one runs next.
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
constexpr unsigned MAX_CLUSTER = 16;

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
  Word cluster_arrivals = 0, cluster_waits = 0;
};

// A read of a block's shared memory by another one. The block may end once a thread of it has waited `waits` times for
// the barrier of the cluster: the last of these waits is for the reader's next arrival.
struct RemoteRead {
  Word waits;
  int reader;  // its rank
  Place place;
};

struct Range {
  const char *begin, *end;
};

struct Launch {
  dim3 grid, block, cluster;
  size_t smem_bytes;
  int seed;
  void** args;  // args[i] points to the value of parameter i, as for cuLaunchKernel
  const size_t* arg_bytes;
  int num_args;
  const Range* memory;  // what global loads may touch; null allows everything
  int num_memory;
};

class Stacks;
struct Cluster;

struct Block {
  const Launch* launch = nullptr;
  Cluster* cluster = nullptr;
  int rank = 0;  // in its cluster
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
  std::vector<int> warp_order, lane_order;
  Word cluster_waits = 0;  // the most of a thread
  RemoteRead last_read = {};
  bool ended = false;
  void* scheduler_sp = nullptr;
  void* scheduler_fake_stack = nullptr;
  const void* scheduler_stack = nullptr;
  size_t scheduler_stack_bytes = 0;
};

// Blocks that run at the same time.
struct Cluster {
  std::vector<Block> blocks;  // by rank
  Word generation = 0;        // of the barrier, whose phases are counted
  int arrived = 0, needed = 0;
  int seed = 0;
  unsigned random = 0;
};

// What launch() throws.
struct Error {
  std::string text;
};

inline Block* block = nullptr;
inline Fiber* self = nullptr;  // null: the scheduler runs
inline std::string error;      // of the running cluster

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

// Reports an error of the kernel. The cluster is abandoned, and launch() throws.
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

}  // namespace simt

#endif
