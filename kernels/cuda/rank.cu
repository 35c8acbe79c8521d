// Input of the ranking sort: slots in scope with the key of their weight, and slots with half of their id.
//
// Rank order is weight descending, then id ascending. Slots in id order, sorted stably by ONE - weight, are in rank order
// without a 96-bit key. The key is the weight, never the potential: memories of weight 0 are all tied.
#include "laws.cuh"

// Lists the used slots of the tiles in `order`, in that order; those of order[i] start at slots[first[i]].
KERNEL list_slots(const u32* __restrict__ order, const u32* __restrict__ first, const Tile* __restrict__ tiles, u32* __restrict__ slots) {
  u32 index = order[blockIdx.x], count = tiles[index].count;
  for (u32 i = threadIdx.x; i < count; i += THREADS) slots[first[blockIdx.x] + i] = index * TILE + i;
}

// Returns half of the id of each slot: the low one for the first sort, the high one for the second.
KERNEL id_keys(const u32* __restrict__ slots, u32 n, const u64* __restrict__ id, u32 shift, u32* __restrict__ key) {
  u32 i = blockIdx.x * THREADS + threadIdx.x;
  if (i < n) key[i] = (u32)(id[slots[i]] >> shift);
}

constexpr u32 EVERYTHING = 0, ONE_SEGMENT = 1, ONE_GROUP = 2;
INLINE bool in_scope(u32 scope, u32 wanted, u32 segment, u32 hidden, u32 group) {
  if (scope == ONE_SEGMENT) return segment == wanted;
  return !hidden && (scope == EVERYTHING || group == wanted);
}

constexpr u32 ITEMS = 4, KEYS = THREADS * ITEMS;

// Keeps the slots in scope, in the given order, with their keys ONE - weight; *kept is their number. `status` and `ticket` are initially zero.
KERNEL weight_keys(const u32* __restrict__ slots, u32 n, const u32* __restrict__ potential, const u8* __restrict__ group, const Segment* __restrict__ segments, const Tile* __restrict__ tiles, u32 scope, u32 wanted, u32* __restrict__ key_out, u32* __restrict__ slot_out, u32* __restrict__ kept, u32* status, u32* ticket) {
  __shared__ u32 warps[WARPS], before_block, shared_tile;
  const u32 tile = take_ticket(ticket, shared_tile), first = tile * KEYS + threadIdx.x * ITEMS;
  u32 slot[ITEMS], key[ITEMS], mine = 0, all;
#pragma unroll
  for (u32 j = 0; j < ITEMS; j++) {
    slot[j] = NO_SLOT;
    if (first + j >= n) continue;
    u32 at = slots[first + j], segment = tiles[at >> TILE_BITS].segment;
    Segment its = segments[segment];
    if (!in_scope(scope, wanted, segment, its.hidden, scope == ONE_GROUP ? group[at] : 0)) continue;
    slot[j] = at;
    key[j] = ONE - weight_of(potential[at], its.clock);
    mine++;
  }
  u32 place = block_prefix(mine, warps, all);
  if (threadIdx.x == 0) {
    before_block = look_back(status, tile, 1, all);
    if (tile == gridDim.x - 1) *kept = before_block + all;
  }
  __syncthreads();
  place += before_block;
#pragma unroll
  for (u32 j = 0; j < ITEMS; j++) {
    if (slot[j] == NO_SLOT) continue;
    key_out[place] = key[j];
    slot_out[place++] = slot[j];
  }
}

CUDA_HOST_KERNEL(list_slots)
CUDA_HOST_KERNEL(id_keys)
CUDA_HOST_KERNEL(weight_keys)
