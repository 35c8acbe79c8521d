// Common definitions of the .cu files: for nvcc on a GPU, and for g++ with host/cuda_host.h in tests.
//
// Conventions: every kernel is `extern "C"`, has one-dimensional blocks of THREADS threads, no dynamic shared memory, and is listed once by
// CUDA_HOST_KERNEL. The host checks ranges before a launch. No `assert` and no device variables, since they would make the compiled bytes
// depend on the path. Look-backs take their tile from an atomic ticket, never from blockIdx: a block then waits only for blocks that are
// already running.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#define INLINE static __device__ __forceinline__
#define KERNEL extern "C" __global__ void __launch_bounds__(THREADS, 1)

constexpr u32 THREADS = 256, WARPS = THREADS / 32;
constexpr u32 ALL_LANES = 0xffffffffu;
constexpr u32 TILE_BITS = 12, TILE = 1u << TILE_BITS;  // the arena is an array of tiles; slot s lies in tile s >> 12
constexpr u32 NO_SLOT = 0xffffffffu;                   // never a used slot: an arena ends below it
constexpr u32 GROUPS = 256;
static_assert(THREADS == GROUPS, "one thread per group, and one per digit of the sort");

// Tile table entry: the segment of a tile and its number of used slots.
struct Tile { u32 segment, count; };
// A partition: its decay clock after this pass's fold, the subtrahend of the fold (0 = none), and whether rankings exclude it.
struct Segment { u32 clock, fold, hidden; };

#ifndef CUDA_HOST_SHIM

#define CUDA_HOST_KERNEL(name)

INLINE void store_release(u32* to, u32 value) { asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(to), "r"(value) : "memory"); }
INLINE void store_release(u64* to, u64 value) { asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(to), "l"(value) : "memory"); }
INLINE u32 load_acquire(const u32* from) { u32 value; asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory"); return value; }
INLINE u64 load_acquire(const u64* from) { u64 value; asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(from) : "memory"); return value; }
INLINE float half_to_float(u16 half) { float value; asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(half)); return value; }
// Four groups in one load; `from` is a multiple of four bytes from the start of a tile.
INLINE u32 load_four(const u8* from) { return *reinterpret_cast<const u32*>(from); }

#else

template <class T> INLINE void store_release(T* to, T value) { __atomic_store_n(to, value, __ATOMIC_RELEASE); }
template <class T> INLINE T load_acquire(const T* from) { return __atomic_load_n(from, __ATOMIC_ACQUIRE); }
// Exact for finite values, subnormal ones included: the bits of cvt.f32.f16.
INLINE float half_to_float(u16 half) { float value = __uint_as_float((u32)(half & 0x7fff) << 13) * 0x1p112f; return half >> 15 ? -value : value; }
INLINE u32 load_four(const u8* from) { u32 four; memcpy(&four, from, sizeof four); return four; }

#endif

INLINE u32 lane_of() { return threadIdx.x & 31; }
INLINE u32 warp_of() { return threadIdx.x >> 5; }

// Returns the next tile of work, the same in all threads of the block; contains a barrier.
INLINE u32 take_ticket(u32* ticket, u32& shared) {
  if (threadIdx.x == 0) shared = atomicAdd(ticket, 1u);
  __syncthreads();
  return shared;
}

// Look-back word: value << 2 | flag. Flag 0: not published; 1: this tile only; 2: all tiles up to it.
constexpr u32 OWN = 1, UP_TO_HERE = 2;

// Returns the sum over all tiles before `tile`, whose own sum is `own`, and publishes both for later tiles. One thread calls it per `status[tile * stride]`.
template <class T> INLINE T look_back(T* status, u32 tile, u32 stride, T own) {
  T before = 0;
  if (tile > 0) store_release(&status[(size_t)tile * stride], (T)(own << 2 | OWN));
  for (u32 other = tile; other-- > 0;) {
    T word;
    while (!((word = load_acquire(&status[(size_t)other * stride])) & 3)) __nanosleep(20);
    before += word >> 2;
    if ((word & 3) == UP_TO_HERE) break;
  }
  store_release(&status[(size_t)tile * stride], (T)((before + own) << 2 | UP_TO_HERE));
  return before;
}

// Exclusive prefix of `value` over the threads of the block, and the total. `warps` is shared scratch memory; contains barriers.
template <class T> INLINE T block_prefix(T value, T (&warps)[WARPS], T& all) {
  T inclusive = value;
  for (u32 o = 1; o < 32; o <<= 1) {
    T left = __shfl_up_sync(ALL_LANES, inclusive, o);
    if (lane_of() >= o) inclusive += left;
  }
  if (lane_of() == 31) warps[warp_of()] = inclusive;
  __syncthreads();
  T before = 0;
  all = 0;
  for (u32 warp = 0; warp < WARPS; warp++) {
    if (warp < warp_of()) before += warps[warp];
    all += warps[warp];
  }
  __syncthreads();
  return before + inclusive - value;
}
