// Reinforcement of whole groups: the host composes the updates of one (segment, group), in order, into one map.
#include "laws.cuh"

struct Rule { Clamped map; u32 group, unused; };
constexpr u32 NO_RULE = 0xffff;  // a segment has at most GROUPS rules

// Folds if the segment needs it, then applies rules[first[segment]..first[segment + 1]], one per group; adds the number of addressed
// memories to count[rule].
KERNEL update_groups(u32* __restrict__ potential, const u8* __restrict__ group, const Segment* __restrict__ segments, const Tile* __restrict__ tiles, const u32* __restrict__ first, const Rule* __restrict__ rules, u32* __restrict__ count) {
  __shared__ Rule own[GROUPS];
  __shared__ u32 rule_of[GROUPS], counted[GROUPS];
  Tile tile = tiles[blockIdx.x];
  if (tile.count == 0) return;
  Segment segment = segments[tile.segment];
  u32 begin = first[tile.segment], rule_count = first[tile.segment + 1] - begin;
  if (rule_count == 0 && segment.fold == 0) return;
  rule_of[threadIdx.x] = NO_RULE;
  counted[threadIdx.x] = 0;
  if (threadIdx.x < rule_count) own[threadIdx.x] = rules[begin + threadIdx.x];
  __syncthreads();
  if (threadIdx.x < rule_count) rule_of[own[threadIdx.x].group] = threadIdx.x;
  __syncthreads();
  for (u32 place = threadIdx.x; place < TILE; place += THREADS) {
    bool used = place < tile.count;
    u32 slot = blockIdx.x * TILE + place, rule = used ? rule_of[group[slot]] : NO_RULE;
    if (used && (segment.fold || rule != NO_RULE)) {
      u32 own_potential = folded(potential[slot], segment.fold);
      potential[slot] = rule == NO_RULE ? own_potential : segment.clock + applied(own[rule].map, weight_of(own_potential, segment.clock));
    }
    // One addition per rule and warp: with two groups in a tile, all lanes would otherwise contend for one counter.
    u32 peers = __match_any_sync(ALL_LANES, rule);
    if (rule != NO_RULE && lane_of() == (u32)__ffs((int)peers) - 1) atomicAdd(&counted[rule], (u32)__popc(peers));
  }
  __syncthreads();
  if (threadIdx.x < rule_count && counted[threadIdx.x] > 0) atomicAdd(&count[begin + threadIdx.x], counted[threadIdx.x]);
}

CUDA_HOST_KERNEL(update_groups)
