// Recall: cosine of f16 features times weight, in f32 with a fixed order of additions, so that CPU and GPU return the same bits (see
// src/recall.rs). No tensor cores, no contraction: compiled with -fmad=false.
#include "laws.cuh"

// Returns the sort key of a score, ascending from the highest: finite, and -0 is 0.
INLINE u32 score_key(float score) {
  u32 bits = __float_as_uint(score == 0 ? 0.0f : score);
  return bits >> 31 ? bits : ~(bits | 0x80000000u);
}

// One warp per memory: lane l adds the products l, l + 32, ... in turn, then a tree of distances 16, 8, 4, 2, 1. key[i] belongs to slots[i].
// feature[slot][dimension] is finite; inverse_norm is 0 for a zero vector.
KERNEL recall_keys(const u16* __restrict__ feature, const float* __restrict__ inverse_norm, u32 dimension, const float* __restrict__ query, float query_inverse_norm, const u32* __restrict__ slots, u32 n, const u32* __restrict__ potential, const Segment* __restrict__ segments, const Tile* __restrict__ tiles, u32* __restrict__ key) {
  u32 i = blockIdx.x * WARPS + warp_of();
  if (i >= n) return;  // whole warps
  u32 slot = slots[i];
  const u16* own = feature + (size_t)slot * dimension;
  float sum = 0;
  for (u32 d = lane_of(); d < dimension; d += 32) sum = sum + half_to_float(own[d]) * query[d];
  for (u32 o = 16; o > 0; o >>= 1) sum = sum + __shfl_xor_sync(ALL_LANES, sum, o);
  if (lane_of() > 0) return;
  u32 weight = weight_of(potential[slot], segments[tiles[slot >> TILE_BITS].segment].clock);
  key[i] = score_key(((sum * query_inverse_norm) * inverse_norm[slot]) * ((float)weight * 0x1p-30f));
}

CUDA_HOST_KERNEL(recall_keys)
