// Compiles a .cu file as plain C++17 and runs it on the CPU, one fiber per CUDA thread, under any sanitizer:
//
//   g++ -std=c++17 -ffp-contract=off -x c++ -include cuda_host.h sort.cu ... cuda_host.cpp serve.cpp -pthread
//
// A test oracle, not a back end: a CUDA thread costs microseconds. tests/injected_bugs.rs shows what it detects. It cannot detect a
// missing fence (memory is that of x86), or code that relies on the order of blockIdx (blocks start in ascending order).
// One dimension only, no dynamic shared memory, no cooperative launch: the kernels need none.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>

#define CUDA_HOST_SHIM 1
#define __global__
#define __device__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __shared__ static thread_local  // an OS thread runs one block at a time

struct uint3 { unsigned x, y, z; };
struct dim3 { unsigned x, y, z; };
struct alignas(16) uint4 { unsigned x, y, z, w; };

namespace shim {

struct Thread { uint3 index, block; unsigned lane, warp, number; };
extern __thread Thread* current;  // __thread: no initialization check at every use, unlike extern thread_local
extern __thread dim3 grid, block;

// Warp primitives; all lanes of a mask must call the same one.
enum class Primitive : uint8_t { SyncWarp, Shuffle, Match, Ballot, ReduceAdd, ReduceMax };

void sync_threads(int line);
void sync_warp(unsigned mask);
uint64_t shuffle(unsigned mask, uint64_t value, unsigned from);
unsigned match(unsigned mask, uint64_t value);
unsigned ballot(unsigned mask, bool predicate);
unsigned reduce(unsigned mask, unsigned value, Primitive how);
void yield();

using Body = void (*)(void* context);
void launch(unsigned blocks, unsigned threads, Body body, void* context);

template <class T> uint64_t bits(T value) {
  static_assert(sizeof(T) <= 8);
  uint64_t out = 0;
  memcpy(&out, &value, sizeof value);
  return out;
}
template <class T> T from_bits(uint64_t in) {
  T value;
  memcpy(&value, &in, sizeof value);
  return value;
}
template <class T> using Same = typename std::common_type<T>::type;

// Kernels by name, for launches with a name and untyped arguments.
struct Kernel {
  std::string signature;  // one letter per argument: p pointer, 4 or 8 integer of that many bytes, f float
  void (*call)(void** arguments);
};
struct Registration { Registration(const char* name, Kernel kernel); };
const Kernel* find(const char* name);

template <class A> constexpr char letter() {
  return std::is_pointer_v<A> ? 'p' : std::is_floating_point_v<A> ? 'f' : sizeof(A) == 8 ? '8' : '4';
}
template <class... A> std::string signature(void (*)(A...)) { return {letter<A>()...}; }
template <class... A, size_t... I> void call_with(void (*kernel)(A...), void** arguments, std::index_sequence<I...>) {
  kernel(*static_cast<std::remove_cv_t<A>*>(arguments[I])...);
}
template <class... A> void call(void (*kernel)(A...), void** arguments) {
  call_with(kernel, arguments, std::index_sequence_for<A...>{});
}

}  // namespace shim

#define CUDA_HOST_KERNEL(name) \
  static shim::Registration shim_##name(#name, {shim::signature(&name), [](void** arguments) { shim::call(&name, arguments); }});

#define threadIdx (shim::current->index)
#define blockIdx (shim::current->block)
#define blockDim (shim::block)
#define gridDim (shim::grid)

#define __syncthreads() shim::sync_threads(__LINE__)
static inline void __syncwarp(unsigned mask = ~0u) { shim::sync_warp(mask); }
static inline void __nanosleep(unsigned) { shim::yield(); }

template <class T> static inline T __shfl_up_sync(unsigned mask, T value, unsigned by) {
  unsigned lane = shim::current->lane;
  return shim::from_bits<T>(shim::shuffle(mask, shim::bits(value), lane >= by ? lane - by : lane));
}
template <class T> static inline T __shfl_down_sync(unsigned mask, T value, unsigned by) {
  unsigned lane = shim::current->lane;
  return shim::from_bits<T>(shim::shuffle(mask, shim::bits(value), lane + by < 32 ? lane + by : lane));
}
template <class T> static inline T __shfl_xor_sync(unsigned mask, T value, unsigned by) {
  return shim::from_bits<T>(shim::shuffle(mask, shim::bits(value), shim::current->lane ^ by));
}
template <class T> static inline unsigned __match_any_sync(unsigned mask, T value) { return shim::match(mask, shim::bits(value)); }
static inline unsigned __ballot_sync(unsigned mask, int predicate) { return shim::ballot(mask, predicate != 0); }
static inline unsigned __reduce_add_sync(unsigned mask, unsigned value) { return shim::reduce(mask, value, shim::Primitive::ReduceAdd); }
static inline unsigned __reduce_max_sync(unsigned mask, unsigned value) { return shim::reduce(mask, value, shim::Primitive::ReduceMax); }

// Atomics are relaxed, as on a GPU.
template <class T> static inline T atomicAdd(T* at, shim::Same<T> value) { return __atomic_fetch_add(at, value, __ATOMIC_RELAXED); }
template <class T> static inline T atomicOr(T* at, shim::Same<T> value) { return __atomic_fetch_or(at, value, __ATOMIC_RELAXED); }
template <class T> static inline T atomicExch(T* at, shim::Same<T> value) { return __atomic_exchange_n(at, value, __ATOMIC_RELAXED); }
template <class T> static inline T atomicCAS(T* at, shim::Same<T> expected, shim::Same<T> value) {
  __atomic_compare_exchange_n(at, &expected, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
  return expected;
}
template <class T> static inline T atomicMax(T* at, shim::Same<T> value) {
  T old = __atomic_load_n(at, __ATOMIC_RELAXED);
  while (old < value && !__atomic_compare_exchange_n(at, &old, value, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {}
  return old;
}

static inline int __popc(unsigned value) { return __builtin_popcount(value); }
static inline int __clz(int value) { return value ? __builtin_clz((unsigned)value) : 32; }
static inline int __ffs(int value) { return __builtin_ffs(value); }
static inline unsigned __float_as_uint(float value) { return shim::from_bits<unsigned>(shim::bits(value)); }
static inline float __uint_as_float(unsigned value) { return shim::from_bits<float>(value); }
template <class T> static inline T max(T a, shim::Same<T> b) { return a > b ? a : b; }
template <class T> static inline T min(T a, shim::Same<T> b) { return a < b ? a : b; }
