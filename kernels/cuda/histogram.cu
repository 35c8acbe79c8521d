// Counts of weights in 2^bits bins, per group, of all segments that are not hidden.
#include "laws.cuh"

// bins[group << bits | bin], initially zero.
KERNEL weight_histogram(const u32* __restrict__ potential, const u8* __restrict__ group, const Segment* __restrict__ segments, const Tile* __restrict__ tiles, u32 bits, u32* __restrict__ bins) {
  Tile tile = tiles[blockIdx.x];
  if (tile.count == 0) return;
  Segment segment = segments[tile.segment];
  if (segment.hidden) return;
  for (u32 place = threadIdx.x; place < TILE; place += THREADS) {
    u32 slot = blockIdx.x * TILE + place, bin = 0xffffffffu;
    if (place < tile.count) bin = (u32)group[slot] << bits | min(weight_of(potential[slot], segment.clock) >> (30 - bits), (1u << bits) - 1);
    u32 peers = __match_any_sync(ALL_LANES, bin);
    if (place < tile.count && lane_of() == (u32)__ffs((int)peers) - 1) atomicAdd(&bins[bin], (u32)__popc(peers));
  }
}

CUDA_HOST_KERNEL(weight_histogram)
