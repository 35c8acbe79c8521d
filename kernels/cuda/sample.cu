// Prioritized sampling in integers: a priority is a power of the weight from a table, draws are thresholds into prefix sums.
#include "priority.cuh"

constexpr u32 ITEMS = TILE / THREADS;

// Inclusive prefix sums of the priorities over the tiles of `order`, in that order (tiles of a segment are adjacent, in the segment's own order);
// those of order[i] start at sums[first[i]]. `status` holds look-back words, so all sums are below 2^62; it and `ticket` are initially zero.
KERNEL priority_sums(const u32* __restrict__ order, const u32* __restrict__ first, const u32* __restrict__ potential, const Segment* __restrict__ segments, const Tile* __restrict__ tiles, const u32* __restrict__ table, u64* __restrict__ sums, u64* status, u32* ticket) {
  __shared__ u64 warps[WARPS], before_block;
  __shared__ u32 shared_tile;
  const u32 turn = take_ticket(ticket, shared_tile), index = order[turn], begin = threadIdx.x * ITEMS;
  Tile tile = tiles[index];
  u32 clock = segments[tile.segment].clock;
  u64 own[ITEMS], mine = 0, all;
#pragma unroll
  for (u32 j = 0; j < ITEMS; j++) {
    if (begin + j < tile.count) mine += priority_of(table, weight_of(potential[(size_t)index * TILE + begin + j], clock));
    own[j] = mine;
  }
  u64 before = block_prefix(mine, warps, all);
  if (threadIdx.x == 0) before_block = look_back(status, turn, 1, all);
  __syncthreads();
  before += before_block;
#pragma unroll
  for (u32 j = 0; j < ITEMS; j++)
    if (begin + j < tile.count) sums[first[turn] + begin + j] = before + own[j];
}

// A segment that draws may fall on: its priorities are in [offset, offset + total) of all partitions of the cluster, after `before` of this device,
// and its sums in [begin, end).
struct Share { u64 offset, total, before; u32 begin, end; };

// Draw k of `draws`, with priorities that sum to `total` over the cluster: returns the memory whose range of sums contains the threshold, NO_SLOT if
// it is in no share of this device. Shares ascend by offset. A memory of priority 0 is never drawn.
KERNEL sample(const Share* __restrict__ shares, u32 share_count, const u32* __restrict__ slots, const u64* __restrict__ sums, u64 seed, u64 step, u32 draws, u64 total, u32* __restrict__ slot_out, u32* __restrict__ priority_out) {
  u32 k = blockIdx.x * THREADS + threadIdx.x;
  if (k >= draws) return;
  u64 drawn = threshold(k, draws, random_u64(seed, step, k), total);
  u32 low = 0, high = share_count;  // the first share that starts beyond the threshold
  while (low < high) {
    u32 middle = (low + high) / 2;
    if (shares[middle].offset > drawn) high = middle; else low = middle + 1;
  }
  slot_out[k] = NO_SLOT;
  priority_out[k] = 0;
  if (low == 0) return;
  Share share = shares[low - 1];
  if (drawn - share.offset >= share.total) return;
  u64 wanted = share.before + (drawn - share.offset);
  low = share.begin;
  high = share.end - 1;
  while (low < high) {
    u32 middle = low + (high - low) / 2;
    if (sums[middle] > wanted) high = middle; else low = middle + 1;
  }
  slot_out[k] = slots[low];
  priority_out[k] = (u32)(sums[low] - (low == 0 ? 0 : sums[low - 1]));
}

CUDA_HOST_KERNEL(priority_sums)
CUDA_HOST_KERNEL(sample)
