// Reinforcement by slot, exact for any number of updates of one memory: sorted stably by slot (sort.cu), the updates of a memory are
// a run, and the map of a run is a segmented scan of the maps of its updates. No atomics on weights: 10,000 updates of one memory cost
// as much as 10,000 different ones.
#include "laws.cuh"

// A span of updates: the map of its last run, and whether that run starts inside it.
struct Run { Clamped map; u32 head; };
INLINE Run nothing() { return {unchanged(), 0}; }
INLINE Run join(const Run& left, const Run& right) {
  if (right.head) return right;
  return {then(left.map, right.map), left.head};
}
INLINE Run shuffle_up(const Run& run, u32 lanes) {
  u64 bounds = __shfl_up_sync(ALL_LANES, (u64)run.map.low << 32 | run.map.high, lanes);
  Run other;
  other.map.add = (i64)__shfl_up_sync(ALL_LANES, (u64)run.map.add, lanes);
  other.map.low = (u32)(bounds >> 32);
  other.map.high = (u32)bounds;
  other.head = __shfl_up_sync(ALL_LANES, run.head, lanes);
  return other;
}

constexpr u32 ITEMS = 4, UPDATES = THREADS * ITEMS;

// `slot` is sorted; order[i] is the index of update i in the record. Updates of NO_SLOT come last and change nothing. The thread with the last
// update of a run writes its slot. `status` and `ticket` are initially zero; `aggregate` and `prefix` hold one Run per block.
KERNEL apply_updates(const u32* __restrict__ slot, const u32* __restrict__ order, const int* __restrict__ delta, u32 n, u32* __restrict__ potential, const Segment* __restrict__ segments, const Tile* __restrict__ tiles, u32* status, Run* aggregate, Run* prefix, u32* ticket) {
  __shared__ Run warp_total[WARPS], before_block;
  __shared__ u32 shared_tile;
  const u32 tile = take_ticket(ticket, shared_tile), first = tile * UPDATES + threadIdx.x * ITEMS;
  Run own[ITEMS], total = nothing();
#pragma unroll
  for (u32 j = 0; j < ITEMS; j++) {
    u32 i = first + j;
    own[j] = i < n ? Run{update_by(delta[order[i]]), i == 0 || slot[i] != slot[i - 1]} : nothing();
    total = own[j] = join(total, own[j]);
  }
  Run inclusive = total;
  for (u32 o = 1; o < 32; o <<= 1) {
    Run left = shuffle_up(inclusive, o);
    if (lane_of() >= o) inclusive = join(left, inclusive);
  }
  if (lane_of() == 31) warp_total[warp_of()] = inclusive;
  Run before = shuffle_up(inclusive, 1);
  if (lane_of() == 0) before = nothing();
  __syncthreads();
  if (threadIdx.x == 0) {
    Run all = nothing(), left = nothing();
    for (u32 warp = 0; warp < WARPS; warp++) all = join(all, warp_total[warp]);
    aggregate[tile] = all;
    store_release(&status[tile], OWN);
    for (u32 other = tile; other-- > 0;) {
      u32 flag;
      while (!(flag = load_acquire(&status[other]))) __nanosleep(20);
      left = join(flag == UP_TO_HERE ? prefix[other] : aggregate[other], left);
      if (flag == UP_TO_HERE || left.head) break;
    }
    prefix[tile] = join(left, all);
    store_release(&status[tile], UP_TO_HERE);
    before_block = left;
  }
  __syncthreads();
  Run left = before_block;
  for (u32 warp = 0; warp < warp_of(); warp++) left = join(left, warp_total[warp]);
  before = join(left, before);
#pragma unroll
  for (u32 j = 0; j < ITEMS; j++) {
    u32 i = first + j;
    if (i >= n || (i + 1 < n && slot[i + 1] == slot[i]) || slot[i] == NO_SLOT) continue;
    u32 at = slot[i], clock = segments[tiles[at >> TILE_BITS].segment].clock;
    potential[at] = clock + applied(join(before, own[j]).map, weight_of(potential[at], clock));
  }
}

CUDA_HOST_KERNEL(apply_updates)
