// Count, sum, largest and smallest weight of one tile per group; shared by quality.cu and epoch.cu.
#pragma once
#include "laws.cuh"

// All zero = no memory: the smallest weight is stored as the largest ONE - weight.
struct Quality { u64 sum; u32 count, max, missing, unused; };

struct GroupSums { u64 sum[GROUPS]; u32 count[GROUPS], max[GROUPS], missing[GROUPS]; };

constexpr u32 REGISTER_GROUPS = 4;  // groups 0 to 3 are summed in registers, the others in shared memory

// Executed by the whole block: sums tile `index` into out[segment * groups + group]. If the segment folds, folds and stores its potentials, except
// for the slots of `touched` (one bit each, may be null), which already have their value after the fold. Contains barriers.
INLINE void add_tile_quality(u32 index, Tile tile, Segment segment, const u32* touched, u32* potential, const u8* group, u32 groups, Quality* out, GroupSums& sums) {
  for (u32 g = threadIdx.x; g < groups; g += THREADS) {
    sums.sum[g] = 0;
    sums.count[g] = sums.max[g] = sums.missing[g] = 0;
  }
  __syncthreads();
  u64 sum[REGISTER_GROUPS] = {};
  u32 count[REGISTER_GROUPS] = {}, most[REGISTER_GROUPS] = {}, missing[REGISTER_GROUPS] = {};
  for (u32 first = threadIdx.x * 4; first < tile.count; first += THREADS * 4) {
    u32 slot = index * TILE + first, four_groups = load_four(group + slot);
    uint4 four = *(const uint4*)(potential + slot);
    u32 own[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
      u32 place = first + i;
      if (segment.fold && !(touched && touched[place >> 5] >> (place & 31) & 1)) own[i] = folded(own[i], segment.fold);
      if (place >= tile.count) continue;
      u32 weight = weight_of(own[i], segment.clock), g = four_groups >> 8 * i & 255;
#pragma unroll
      for (u32 r = 0; r < REGISTER_GROUPS; r++)
        if (g == r) {
          sum[r] += weight;
          count[r]++;
          most[r] = max(most[r], weight);
          missing[r] = max(missing[r], ONE - weight);
        }
      if (g >= REGISTER_GROUPS) {
        atomicAdd(&sums.sum[g], (u64)weight);
        atomicAdd(&sums.count[g], 1u);
        atomicMax(&sums.max[g], weight);
        atomicMax(&sums.missing[g], ONE - weight);
      }
    }
    if (segment.fold) *(uint4*)(potential + slot) = {own[0], own[1], own[2], own[3]};
  }
#pragma unroll
  for (u32 r = 0; r < REGISTER_GROUPS; r++) {
    // A thread has at most 16 memories of the tile: the sum has 34 bits, and either part fits in a word.
    u32 low = __reduce_add_sync(ALL_LANES, (u32)sum[r] & 0xffffff), high = __reduce_add_sync(ALL_LANES, (u32)(sum[r] >> 24));
    u32 all = __reduce_add_sync(ALL_LANES, count[r]), top = __reduce_max_sync(ALL_LANES, most[r]), bottom = __reduce_max_sync(ALL_LANES, missing[r]);
    if (lane_of() == 0 && all > 0) {
      atomicAdd(&sums.sum[r], ((u64)high << 24) + low);
      atomicAdd(&sums.count[r], all);
      atomicMax(&sums.max[r], top);
      atomicMax(&sums.missing[r], bottom);
    }
  }
  __syncthreads();
  for (u32 g = threadIdx.x; g < groups; g += THREADS) {
    if (sums.count[g] == 0) continue;
    Quality* total = &out[(size_t)tile.segment * groups + g];
    atomicAdd(&total->sum, sums.sum[g]);
    atomicAdd(&total->count, sums.count[g]);
    atomicMax(&total->max, sums.max[g]);
    atomicMax(&total->missing, sums.missing[g]);
  }
}
