// Index on the device (id -> slot), for millions of updates by id. Open addressing over slots only: the id of an entry is read from the id
// column, so an entry costs four bytes and is written by one compare-and-swap.
//
// An id has at most one entry; inserted ids are new, erased ids are distinct. Insertion, erasure and look-up are separate
// launches. The host draws the seed: a hostile client cannot choose ids that collide in one chain.
#include "prelude.cuh"

constexpr u32 EMPTY = NO_SLOT, ERASED = NO_SLOT - 1;  // neither is a slot: the host keeps arenas below them

INLINE u64 mix64(u64 x) {
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ x >> 27) * 0x94d049bb133111ebull;
  return x ^ x >> 31;
}
// Uses the highest bits: the lower ones are the same for all ids of a partition.
INLINE u32 home(u64 id, u64 seed, u32 mask) { return (u32)(mix64(id ^ seed) >> 32) & mask; }

INLINE void insert(u32 slot, const u64* __restrict__ id, u64 seed, u32* entry, u32 mask) {
  for (u32 at = home(id[slot], seed, mask);; at = (at + 1) & mask)
    if (atomicCAS(&entry[at], EMPTY, slot) == EMPTY) return;
}

// Returns the entry of the id, or the empty entry that ends its chain.
INLINE u32 find(u64 wanted, const u64* __restrict__ id, u64 seed, const u32* entry, u32 mask) {
  u32 at = home(wanted, seed, mask);
  for (u32 slot; (slot = entry[at]) != EMPTY; at = (at + 1) & mask)
    if (slot != ERASED && id[slot] == wanted) break;
  return at;
}

// Inserts every used slot; all entries are initially EMPTY, and at least half of them stay so.
KERNEL index_build(const Tile* __restrict__ tiles, const u64* __restrict__ id, u64 seed, u32* entry, u32 mask) {
  for (u32 i = threadIdx.x; i < tiles[blockIdx.x].count; i += THREADS) insert(blockIdx.x * TILE + i, id, seed, entry, mask);
}

KERNEL index_insert(const u32* __restrict__ slots, u32 n, const u64* __restrict__ id, u64 seed, u32* entry, u32 mask) {
  u32 i = blockIdx.x * THREADS + threadIdx.x;
  if (i < n) insert(slots[i], id, seed, entry, mask);
}

// Marks the entries of these ids as erased; missing ids are ignored.
KERNEL index_erase(const u64* __restrict__ wanted, u32 n, const u64* __restrict__ id, u64 seed, u32* entry, u32 mask) {
  u32 i = blockIdx.x * THREADS + threadIdx.x;
  if (i >= n) return;
  // Other threads erase other entries concurrently: the search continues at either value of such an entry.
  u32 at = home(wanted[i], seed, mask);
  for (u32 slot; (slot = atomicAdd(&entry[at], 0u)) != EMPTY; at = (at + 1) & mask)
    if (slot != ERASED && id[slot] == wanted[i]) {
      atomicExch(&entry[at], ERASED);
      return;
    }
}

// Returns the slot of each id, NO_SLOT if it is missing.
KERNEL index_find(const u64* __restrict__ wanted, u32 n, const u64* __restrict__ id, u64 seed, const u32* __restrict__ entry, u32 mask, u32* __restrict__ slots) {
  u32 i = blockIdx.x * THREADS + threadIdx.x;
  if (i < n) slots[i] = entry[find(wanted[i], id, seed, entry, mask)];
}

CUDA_HOST_KERNEL(index_build)
CUDA_HOST_KERNEL(index_insert)
CUDA_HOST_KERNEL(index_erase)
CUDA_HOST_KERNEL(index_find)
