// The device's index: id -> slot, for updates by the million. Open addressing over the slots alone: the id of an entry is read from the id
// column, so an entry costs four bytes and is written by one compare-and-swap.
//
// An id is in at most one entry; what a launch inserts is not there yet, what it erases is distinct. Insertion, erasure and look-ups are
// launches of their own. The seed is drawn by the host: ids that a hostile client chose cannot be aimed at one chain.
#include "prelude.cuh"

constexpr u32 EMPTY = NO_SLOT, ERASED = NO_SLOT - 1;  // neither is a slot: the host keeps arenas below them

INLINE u64 mix64(u64 x) {
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ x >> 27) * 0x94d049bb133111ebull;
  return x ^ x >> 31;
}
// The highest bits: those below are the same for all ids of a partition.
INLINE u32 home(u64 id, u64 seed, u32 mask) { return (u32)(mix64(id ^ seed) >> 32) & mask; }

INLINE void insert(u32 slot, const u64* __restrict__ id, u64 seed, u32* entry, u32 mask) {
  for (u32 at = home(id[slot], seed, mask);; at = (at + 1) & mask)
    if (atomicCAS(&entry[at], EMPTY, slot) == EMPTY) return;
}

// Where the id stands, or the empty entry that ends its chain.
INLINE u32 find(u64 wanted, const u64* __restrict__ id, u64 seed, const u32* entry, u32 mask) {
  u32 at = home(wanted, seed, mask);
  for (u32 slot; (slot = entry[at]) != EMPTY; at = (at + 1) & mask)
    if (slot != ERASED && id[slot] == wanted) break;
  return at;
}

// Inserts every slot in use; all entries are EMPTY before, and at least as many again stay so.
KERNEL index_build(const Tile* __restrict__ tiles, const u64* __restrict__ id, u64 seed, u32* entry, u32 mask) {
  for (u32 i = threadIdx.x; i < tiles[blockIdx.x].count; i += THREADS) insert(blockIdx.x * TILE + i, id, seed, entry, mask);
}

KERNEL index_insert(const u32* __restrict__ slots, u32 n, const u64* __restrict__ id, u64 seed, u32* entry, u32 mask) {
  u32 i = blockIdx.x * THREADS + threadIdx.x;
  if (i < n) insert(slots[i], id, seed, entry, mask);
}

// Marks the entries of these ids; an id that is not there is left out.
KERNEL index_erase(const u64* __restrict__ wanted, u32 n, const u64* __restrict__ id, u64 seed, u32* entry, u32 mask) {
  u32 i = blockIdx.x * THREADS + threadIdx.x;
  if (i >= n) return;
  // Other threads mark other entries meanwhile: both values of such an entry keep the search going.
  u32 at = home(wanted[i], seed, mask);
  for (u32 slot; (slot = atomicAdd(&entry[at], 0u)) != EMPTY; at = (at + 1) & mask)
    if (slot != ERASED && id[slot] == wanted[i]) {
      atomicExch(&entry[at], ERASED);
      return;
    }
}

// The slot of each id, NO_SLOT where there is none.
KERNEL index_find(const u64* __restrict__ wanted, u32 n, const u64* __restrict__ id, u64 seed, const u32* __restrict__ entry, u32 mask, u32* __restrict__ slots) {
  u32 i = blockIdx.x * THREADS + threadIdx.x;
  if (i < n) slots[i] = entry[find(wanted[i], id, seed, entry, mask)];
}

CUDA_HOST_KERNEL(index_build)
CUDA_HOST_KERNEL(index_insert)
CUDA_HOST_KERNEL(index_erase)
CUDA_HOST_KERNEL(index_find)
