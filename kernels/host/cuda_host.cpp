// Runtime of cuda_host.h: fibers, barriers, warp rendezvous, launches.
//
// A block runs on one OS thread, a CUDA thread is a fiber of it that runs until it waits. Sanitizers are notified of every switch: compile
// with SHIM_ASAN in addition to -fsanitize=address. For ThreadSanitizer compile this file WITH SHIM_TSAN and WITHOUT -fsanitize=thread: its
// bookkeeping belongs to one OS thread, and only barriers, rendezvous and atomics may order the threads of a kernel.
//
// CUDA_HOST_SEED=n shuffles the threads of every block; CUDA_HOST_WORKERS=n is the number of concurrent blocks (default: two).
#include "cuda_host.h"
#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <functional>
#include <map>
#include <mutex>
#include <sched.h>
#include <sys/mman.h>
#include <thread>
#include <vector>
#undef __shared__
#if defined(SHIM_ASAN)
#include <sanitizer/common_interface_defs.h>
#endif
#if defined(SHIM_TSAN)
#include <sanitizer/tsan_interface.h>
#endif

extern "C" void shim_switch(void** save, void* load);
#if defined(__x86_64__)
asm(R"(.text
.globl shim_switch
.type shim_switch,@function
shim_switch:
  pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15
  movq %rsp,(%rdi)
  movq %rsi,%rsp
  popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp
  ret
)");
#else
#error "no fiber switch for this processor: save the callee-saved registers (aarch64: x19-x30, d8-d15)"
#endif

namespace shim {

__thread Thread* current;
__thread dim3 grid, block;

namespace {

#if defined(SHIM_ASAN)
constexpr size_t STACK_BYTES = 256 << 10;
#else
constexpr size_t STACK_BYTES = 64 << 10;
#endif
constexpr unsigned MOST_BLOCKS_UNDER_TSAN = 256;  // each has its own OS thread there

enum class State : uint8_t { Fresh, Ready, AtBarrier, InWarp, Yielded, Done };
const char* const NAMES[] = {"fresh", "ready", "at __syncthreads", "in a warp primitive", "yielded", "done"};

struct Fiber { void* stack_pointer; char* stack; unsigned thread; void* fake_stack; };

// A rendezvous of the lanes of `mask`; free while that is 0.
struct Rendezvous { unsigned mask, arrived, left; Primitive primitive; uint64_t value[32]; };
struct Warp { std::vector<Rendezvous> open; };

// Stacks outlive a launch; a fiber stays on its OS thread.
struct Idle {
  std::vector<Fiber*> fibers;
  ~Idle() {
    for (Fiber* fiber : fibers) {
      munmap(fiber->stack, STACK_BYTES);
      delete fiber;
    }
  }
};
thread_local Idle idle;

// One OS thread during one launch.
struct Scheduler {
  std::vector<Thread> threads;
  std::vector<State> states;
  std::vector<Fiber*> fibers;
  std::vector<Warp> warps;
  std::vector<unsigned> order;
  std::vector<void*> tsan_fibers;
  void* own_tsan_fiber = nullptr;
  void* stack_pointer = nullptr;
  void* fake_stack = nullptr;
  const void* stack_bottom = nullptr;
  size_t stack_size = 0;
  unsigned live = 0, waiting = 0, place = 0, barriers = 0;
  int barrier_line = 0;
  unsigned barrier_thread = 0;
  // Two alternating barriers: a thread that waits at the next one must not seem ordered before one that still leaves the first.
  char barrier_tag[2] = {0, 0};
  char shared_tag = 0;
  char *begin_tag = nullptr, *end_tag = nullptr;
  Body body = nullptr;
  void* context = nullptr;
  Fiber* running = nullptr;
  char* stacks = nullptr;
  uint64_t random = 1;
  ~Scheduler() {
    if (stacks) munmap(stacks, STACK_BYTES * threads.size());
  }
};
thread_local Scheduler* scheduler;

// OS threads that outlive a launch; one launch at a time.
class Workers {
 public:
  void run(unsigned count, const std::function<void()>& work) {
    std::unique_lock<std::mutex> lock(mutex_);
    for (; threads_ < count; threads_++) std::thread([this] { loop(); }).detach();
    work_ = &work;
    open_ = unfinished_ = count;
    begin_.notify_all();
    end_.wait(lock, [&] { return unfinished_ == 0; });
  }

 private:
  void loop() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      begin_.wait(lock, [&] { return open_ > 0; });
      open_--;
      const std::function<void()>* work = work_;
      lock.unlock();
      (*work)();
      lock.lock();
      if (--unfinished_ == 0) end_.notify_all();
    }
  }
  std::mutex mutex_;
  std::condition_variable begin_, end_;
  unsigned threads_ = 0, open_ = 0, unfinished_ = 0;
  const std::function<void()>* work_ = nullptr;
};

[[noreturn]] void die(const char* what) {
  unsigned in_block = current ? current->block.x : 0, thread = current ? current->index.x : 0;
  fprintf(stderr, "cuda_host: %s at block %u thread %u\n", what, in_block, thread);
  abort();
}

void acquire([[maybe_unused]] void* tag) {
#if defined(SHIM_TSAN)
  __tsan_acquire(tag);
#endif
}
void release([[maybe_unused]] void* tag) {
#if defined(SHIM_TSAN)
  __tsan_release(tag);
#endif
}

void to_scheduler() {
  Scheduler* from = scheduler;
  Fiber* fiber = from->running;
#if defined(SHIM_TSAN)
  __tsan_switch_to_fiber(from->own_tsan_fiber, 1 /* orders nothing */);
#endif
#if defined(SHIM_ASAN)
  __sanitizer_start_switch_fiber(&fiber->fake_stack, from->stack_bottom, from->stack_size);
#endif
  shim_switch(&fiber->stack_pointer, from->stack_pointer);
#if defined(SHIM_ASAN)
  // Not `from`: an idle fiber resumes in a later launch.
  __sanitizer_finish_switch_fiber(fiber->fake_stack, &scheduler->stack_bottom, &scheduler->stack_size);
#endif
}

// Without a pending barrier, the next fresh thread runs on this stack, which saves a switch. ThreadSanitizer needs one fiber each.
bool take_next([[maybe_unused]] Scheduler* own, [[maybe_unused]] unsigned done) {
#if !defined(SHIM_TSAN)
  if (own->place + 1 < own->threads.size() && own->waiting == 0) {
    unsigned next = own->order[own->place + 1];
    if (own->states[next] == State::Fresh) {
      own->place++;
      own->fibers[done] = nullptr;
      own->fibers[next] = own->running;
      own->running->thread = next;
      own->states[next] = State::Ready;
      current = &own->threads[next];
      return true;
    }
  }
#endif
  return false;
}

void fiber_main() {
#if defined(SHIM_ASAN)
  __sanitizer_finish_switch_fiber(nullptr, &scheduler->stack_bottom, &scheduler->stack_size);
#endif
  for (;;) {
    Scheduler* own = scheduler;
    unsigned thread = own->running->thread;
    acquire(own->begin_tag);
    acquire(&own->shared_tag);
    own->body(own->context);
    release(own->end_tag);
    own->states[thread] = State::Done;
    own->live--;
    if (!take_next(own, thread)) to_scheduler();  // the next start resumes here
  }
}

Fiber* new_fiber([[maybe_unused]] Scheduler* own, [[maybe_unused]] unsigned thread) {
  constexpr int PROTECTION = PROT_READ | PROT_WRITE, KIND = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  auto* fiber = new Fiber{};
#if defined(SHIM_TSAN)  // one slice per CUDA thread: a shared stack would look like a race between unordered threads
  if (!own->stacks) own->stacks = (char*)mmap(nullptr, STACK_BYTES * own->threads.size(), PROTECTION, KIND, -1, 0);
  if (own->stacks == MAP_FAILED) die("out of memory for stacks");
  fiber->stack = own->stacks + STACK_BYTES * thread;
#else
  fiber->stack = (char*)mmap(nullptr, STACK_BYTES, PROTECTION, KIND, -1, 0);
  if (fiber->stack == MAP_FAILED) die("out of memory for stacks");
  mprotect(fiber->stack, 4096, PROT_NONE);
#endif
  void** top = (void**)(fiber->stack + STACK_BYTES - 64);
  *--top = nullptr;
  *--top = (void*)fiber_main;
  for (int i = 0; i < 6; i++) *--top = nullptr;
  fiber->stack_pointer = top;
  return fiber;
}

void resume(unsigned thread) {
  Scheduler* own = scheduler;
  Fiber* fiber = own->fibers[thread];
  if (!fiber) {
    if (idle.fibers.empty()) {
      fiber = new_fiber(own, thread);
    } else {
      fiber = idle.fibers.back();
      idle.fibers.pop_back();
    }
    own->fibers[thread] = fiber;
    fiber->thread = thread;
  }
  current = &own->threads[thread];
  own->running = fiber;
#if defined(SHIM_ASAN)
  __sanitizer_start_switch_fiber(&own->fake_stack, fiber->stack, STACK_BYTES);
#endif
#if defined(SHIM_TSAN)
  __tsan_switch_to_fiber(own->tsan_fibers[thread], 1 /* orders nothing */);
#endif
  shim_switch(&own->stack_pointer, fiber->stack_pointer);
#if defined(SHIM_ASAN)
  __sanitizer_finish_switch_fiber(own->fake_stack, nullptr, nullptr);
#endif
  thread = fiber->thread;
  if (own->states[thread] != State::Done) return;
  own->fibers[thread] = nullptr;
#if defined(SHIM_TSAN)
  delete fiber;
#else
  idle.fibers.push_back(fiber);
#endif
}

void open_barrier(Scheduler* own) {
  own->waiting = 0;
  own->barrier_line = 0;
  own->barriers++;
  for (State& state : own->states)
    if (state == State::AtBarrier) state = State::Ready;
}

[[noreturn]] void report_deadlock(const Scheduler* own, unsigned number) {
  fprintf(stderr, "cuda_host: DEADLOCK in block %u: ", number);
  for (unsigned thread = 0, shown = 0; thread < own->states.size() && shown < 8; thread++) {
    if (own->states[thread] == State::Done) continue;
    fprintf(stderr, "thread %u is %s; ", thread, NAMES[(int)own->states[thread]]);
    shown++;
  }
  fprintf(stderr, "%zu of %zu threads have ended\n", own->threads.size() - own->live, own->threads.size());
  abort();
}

void run_block(unsigned number, bool shuffled) {
  Scheduler* own = scheduler;
  const unsigned count = (unsigned)own->threads.size();
  for (Thread& thread : own->threads) thread.block = {number, 0, 0};
  std::fill(own->states.begin(), own->states.end(), State::Fresh);
  for (Warp& warp : own->warps) warp.open.clear();
  own->live = count;
  own->waiting = 0;
  own->barrier_line = 0;
  release(&own->shared_tag);
  for (unsigned i = count; shuffled && i > 1; i--) {
    own->random = own->random * 6364136223846793005ull + 1442695040888963407ull;
    std::swap(own->order[i - 1], own->order[(own->random >> 33) % i]);
  }
  while (own->live > 0) {
    bool progress = false, yielded = false;
    for (own->place = 0; own->place < count; own->place++) {
      unsigned thread = own->order[own->place];
      State state = own->states[thread];
      if (state != State::Fresh && state != State::Ready && state != State::Yielded) continue;
      yielded |= state == State::Yielded;
      own->states[thread] = State::Ready;
      resume(thread);
      progress = true;
      if (own->waiting > 0 && own->waiting == own->live) open_barrier(own);
    }
    if (yielded) sched_yield();
    if (!progress && own->live > 0) report_deadlock(own, number);
  }
}

// Rendezvous of the lanes of `mask`; the last one releases the others.
Rendezvous& meet(unsigned mask, Primitive primitive, uint64_t value) {
  Scheduler* own = scheduler;
  Warp& warp = own->warps[current->warp];
  const unsigned bit = 1u << current->lane;
  if (!(mask & bit)) die("a lane calls a warp primitive and is not in its mask");
  if (warp.open.empty()) warp.open.reserve(64);  // a reference must not move
  Rendezvous* found = nullptr;
  for (Rendezvous& open : warp.open)
    if (open.mask == mask && !(open.arrived & bit)) {
      found = &open;
      break;
    }
  if (!found) {
    for (Rendezvous& open : warp.open)
      if (open.mask == 0) found = &open;
    if (!found && warp.open.size() == warp.open.capacity()) die("too many warp primitives at once");
    if (!found) found = &warp.open.emplace_back();
    found->mask = found->left = mask;
    found->arrived = 0;
    found->primitive = primitive;
  }
  if (found->primitive != primitive) die("lanes of one mask are in different warp primitives");
  found->arrived |= bit;
  found->value[current->lane] = value;
  if (primitive == Primitive::SyncWarp) release(found);  // other primitives exchange values without ordering
  if (found->arrived == mask) {
    for (unsigned lane = 0; lane < 32; lane++)
      if ((mask >> lane & 1) && lane != current->lane) own->states[current->warp * 32 + lane] = State::Ready;
  } else {
    own->states[current->number] = State::InWarp;
    to_scheduler();
  }
  return *found;
}

void leave(Rendezvous& met) {
  met.left &= ~(1u << current->lane);
  if (met.left == 0) met.mask = 0;
}

template <class F> unsigned over_lanes(Rendezvous& met, unsigned start, F add) {
  unsigned result = start;
  for (unsigned lane = 0; lane < 32; lane++)
    if (met.mask >> lane & 1) result = add(result, lane, met.value[lane]);
  leave(met);
  return result;
}

std::map<std::string, Kernel>& kernels() {
  static auto* all = new std::map<std::string, Kernel>;
  return *all;
}

}  // namespace

void sync_threads(int line) {
  Scheduler* own = scheduler;
  if (own->barrier_line && own->barrier_line != line) {
    fprintf(stderr, "cuda_host: thread %u is at the __syncthreads() of line %d, thread %u at line %d\n", current->number, line,
            own->barrier_thread, own->barrier_line);
    die("divergent barrier");
  }
  own->barrier_line = line;
  own->barrier_thread = current->number;
  own->waiting++;
  char* tag = &own->barrier_tag[own->barriers & 1];
  release(tag);
  own->states[current->number] = State::AtBarrier;
  to_scheduler();
  acquire(tag);
}

void sync_warp(unsigned mask) {
  Rendezvous& met = meet(mask, Primitive::SyncWarp, 0);
  acquire(&met);
  leave(met);
}

uint64_t shuffle(unsigned mask, uint64_t value, unsigned from) {
  Rendezvous& met = meet(mask, Primitive::Shuffle, value);
  // The value of an inactive lane is undefined: make that visible.
  uint64_t result = mask >> (from & 31) & 1 ? met.value[from & 31] : 0xDEADBEEFDEADBEEFull;
  leave(met);
  return result;
}

unsigned match(unsigned mask, uint64_t value) {
  Rendezvous& met = meet(mask, Primitive::Match, value);
  return over_lanes(met, 0, [&](unsigned all, unsigned lane, uint64_t other) { return all | (unsigned)(other == value) << lane; });
}

unsigned ballot(unsigned mask, bool predicate) {
  Rendezvous& met = meet(mask, Primitive::Ballot, predicate);
  return over_lanes(met, 0, [](unsigned all, unsigned lane, uint64_t other) { return all | (unsigned)other << lane; });
}

unsigned reduce(unsigned mask, unsigned value, Primitive how) {
  Rendezvous& met = meet(mask, how, value);
  return over_lanes(met, 0, [&](unsigned all, unsigned, uint64_t other) {
    return how == Primitive::ReduceAdd ? all + (unsigned)other : std::max(all, (unsigned)other);
  });
}

void yield() {
  scheduler->states[current->number] = State::Yielded;
  to_scheduler();
}

void launch(unsigned blocks, unsigned threads, Body body, void* context) {
  static const char* const seed = getenv("CUDA_HOST_SEED");
  static const unsigned at_once = [] {
    const char* asked = getenv("CUDA_HOST_WORKERS");
    return asked ? std::max(1, atoi(asked)) : 2;
  }();
  static std::atomic<uint64_t> launches{0};
  const uint64_t number_of_launch = launches++;
  std::atomic<unsigned> next{0};
  char begin_tag = 0, end_tag = 0;
  auto run = [&](unsigned worker, unsigned begin, unsigned end) {
    Scheduler own;
    scheduler = &own;
    grid = {blocks, 1, 1};
    block = {threads, 1, 1};
    own.threads.resize(threads);
    own.states.resize(threads);
    own.fibers.assign(threads, nullptr);
    own.warps.resize((threads + 31) / 32);
    own.order.resize(threads);
    own.body = body;
    own.context = context;
    own.begin_tag = &begin_tag;
    own.end_tag = &end_tag;
    own.random = seed ? strtoull(seed, nullptr, 10) * 2 + 1 + worker * 7919 + number_of_launch * 104729 : 1;
    for (unsigned i = 0; i < threads; i++) {
      own.order[i] = i;
      own.threads[i] = {{i, 0, 0}, {0, 0, 0}, i & 31, i >> 5, i};
    }
#if defined(SHIM_TSAN)
    own.own_tsan_fiber = __tsan_get_current_fiber();
    for (unsigned i = 0; i < threads; i++) own.tsan_fibers.push_back(__tsan_create_fiber(0));
#endif
    if (begin < end) {
      for (unsigned number = begin; number < end; number++) run_block(number, seed != nullptr);
    } else {
      for (unsigned number; (number = next.fetch_add(1)) < blocks;) run_block(number, seed != nullptr);
    }
#if defined(SHIM_TSAN)
    acquire(&end_tag);
    for (void* fiber : own.tsan_fibers) __tsan_destroy_fiber(fiber);
#endif
    scheduler = nullptr;
    current = nullptr;
  };
  release(&begin_tag);
#if defined(SHIM_TSAN)  // one OS thread per block: fresh shared memory, and no ordering between blocks that a GPU lacks
  if (blocks > MOST_BLOCKS_UNDER_TSAN) {
    fprintf(stderr, "cuda_host: at most %u blocks per launch under ThreadSanitizer\n", MOST_BLOCKS_UNDER_TSAN);
    abort();
  }
  std::vector<std::thread> workers;
  std::atomic<unsigned> done{0};
  for (unsigned number = 0; number < blocks; number++) {
    while (number >= done.load() + at_once) sched_yield();
    workers.emplace_back([&, number] {
      run(number, number, number + 1);
      done++;
    });
  }
  for (std::thread& worker : workers) worker.join();
#else
  (void)MOST_BLOCKS_UNDER_TSAN;
  static auto* workers = new Workers;
  std::atomic<unsigned> worker{0};
  if (blocks == 1 || at_once == 1) run(0, 0, blocks);
  else workers->run(std::min(at_once, blocks), [&] { run(worker++, 0, 0); });
#endif
  acquire(&end_tag);
}

Registration::Registration(const char* name, Kernel kernel) { kernels()[name] = std::move(kernel); }

const Kernel* find(const char* name) {
  auto found = kernels().find(name);
  return found == kernels().end() ? nullptr : &found->second;
}

}  // namespace shim
