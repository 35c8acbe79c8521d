// A learning epoch in two launches: updates go into one bucket per tile, then one block per tile applies, folds and sums.
//
// An overflowing bucket (a hot memory) sets `overflow`; the second kernel then changes nothing, and the caller uses the sorted path
// of update.cu. For 10,000 updates a bucket holds 40 on average at 1 M memories, 4 at 10 M.
#include "quality.cuh"

constexpr u32 BUCKET = 128;
struct Update { u32 slot, order; int delta; };

// Puts update i of `n` into the bucket of its tile, with its index in the record. `count` is initially zero. The number of updates is read from
// memory, so that one launch (and graph) serves other batches.
KERNEL bucket_updates(const u32* __restrict__ slot, const int* __restrict__ delta, const u32* __restrict__ n, u32* count, Update* __restrict__ bucket, u32* overflow) {
  u32 i = blockIdx.x * THREADS + threadIdx.x;
  if (i >= *n) return;
  u32 tile = slot[i] >> TILE_BITS, place = atomicAdd(&count[tile], 1u);
  if (place < BUCKET) bucket[(size_t)tile * BUCKET + place] = {slot[i], i, delta[i]};
  else atomicExch(overflow, 1u);
}

// Resets `count` to zero for the next epoch.
KERNEL epoch(u32* __restrict__ potential, const u8* __restrict__ group, const Segment* __restrict__ segments, const Tile* __restrict__ tiles, u32 groups, Quality* __restrict__ out, u32* count, const Update* __restrict__ bucket, const u32* __restrict__ overflow) {
  __shared__ GroupSums sums;
  __shared__ Update drawn[BUCKET], sorted[BUCKET];
  __shared__ u32 touched[TILE / 32];
  const u32 index = blockIdx.x, me = threadIdx.x, n = count[index];
  const bool overflowed = *overflow != 0;
  Tile tile = tiles[index];
  __syncthreads();
  if (me == 0) count[index] = 0;
  if (overflowed || tile.count == 0) return;
  Segment segment = segments[tile.segment];
  if (me < TILE / 32) touched[me] = 0;
  if (me < n) drawn[me] = bucket[(size_t)index * BUCKET + me];
  __syncthreads();
  // The bucket was filled in arbitrary order: sort by slot, then by index in the record.
  if (me < n) {
    u32 rank = 0;
    for (u32 j = 0; j < n; j++) rank += drawn[j].slot < drawn[me].slot || (drawn[j].slot == drawn[me].slot && drawn[j].order < drawn[me].order);
    sorted[rank] = drawn[me];
  }
  __syncthreads();
  // The first thread of a run applies all of it.
  if (me < n && (me == 0 || sorted[me - 1].slot != sorted[me].slot)) {
    u32 slot = sorted[me].slot, place = slot & (TILE - 1);
    u32 weight = weight_of(folded(potential[slot], segment.fold), segment.clock);
    for (u32 j = me; j < n && sorted[j].slot == slot; j++) weight = applied(update_by(sorted[j].delta), weight);
    potential[slot] = segment.clock + weight;
    atomicOr(&touched[place >> 5], 1u << (place & 31));
  }
  __syncthreads();
  add_tile_quality(index, tile, segment, touched, potential, group, groups, out, sums);
}

CUDA_HOST_KERNEL(bucket_updates)
CUDA_HOST_KERNEL(epoch)
