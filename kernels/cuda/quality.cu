// Fold, and fold fused with quality: one block per tile.
#include "quality.cuh"

// Subtracts the segment's fold from every potential.
KERNEL fold(u32* __restrict__ potential, const Segment* __restrict__ segments, const Tile* __restrict__ tiles) {
  Tile tile = tiles[blockIdx.x];
  u32 subtract = tile.count > 0 ? segments[tile.segment].fold : 0;
  if (subtract == 0) return;
  uint4* four = (uint4*)(potential + (size_t)blockIdx.x * TILE);
  for (u32 i = threadIdx.x; i * 4 < tile.count; i += THREADS) {
    uint4 own = four[i];
    four[i] = {folded(own.x, subtract), folded(own.y, subtract), folded(own.z, subtract), folded(own.w, subtract)};
  }
}

// Folds if the segment needs it, and adds the quality of every (segment, group) to `out`, which is initially zero.
KERNEL fold_quality(u32* __restrict__ potential, const u8* __restrict__ group, const Segment* __restrict__ segments, const Tile* __restrict__ tiles, u32 groups, Quality* __restrict__ out) {
  __shared__ GroupSums sums;
  Tile tile = tiles[blockIdx.x];
  if (tile.count == 0) return;
  add_tile_quality(blockIdx.x, tile, segments[tile.segment], nullptr, potential, group, groups, out, sums);
}

CUDA_HOST_KERNEL(fold)
CUDA_HOST_KERNEL(fold_quality)
