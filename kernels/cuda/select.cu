// Selection of the first k by (key, id): a radix select from the highest bits down. A round counts the items that match the cut by their
// next bits; the host moves the cut into the bin that contains position k. Items at or before the cut are then collected and sorted.
//
// A pair has 96 bits: the key, then the id. With `reverse` the order is reversed by taking complements of both.
#include "prelude.cuh"

constexpr u32 SELECT_BINS = 2048;  // 11 bits per round
constexpr u32 ITEMS = 8;

INLINE u32 key_of(u32 key, u32 reverse) { return reverse ? ~key : key; }
INLINE u64 id_of(u64 id, u32 reverse) { return reverse ? ~id : id; }

// Counts items that match the cut in all bits above, in bins of the bits from `shift` on (those of the id if `of_id`); initially zero.
KERNEL select_histogram(const u32* __restrict__ key, const u32* __restrict__ slots, const u64* __restrict__ id, u32 n, u32 reverse, u32 of_id, u32 shift, u32 bits, u32 cut_key, u64 cut_id, u32* __restrict__ bins) {
  __shared__ u32 own[SELECT_BINS];
  for (u32 bin = threadIdx.x; bin < SELECT_BINS; bin += THREADS) own[bin] = 0;
  __syncthreads();
  const u32 above = shift + bits, mask = (1u << bits) - 1;
  const u32 first = blockIdx.x * THREADS * ITEMS + threadIdx.x;
  for (u32 j = 0; j < ITEMS; j++) {
    u32 i = first + j * THREADS, bin = SELECT_BINS;
    if (i < n) {
      u32 k = key_of(key[i], reverse);
      if (!of_id) {
        if (above >= 32 || k >> above == cut_key >> above) bin = k >> shift & mask;
      } else if (k == cut_key) {
        u64 own_id = id_of(id[slots[i]], reverse);
        if (above >= 64 || own_id >> above == cut_id >> above) bin = (u32)(own_id >> shift) & mask;
      }
    }
    // One addition per bin and warp: with many ties all lanes would otherwise contend for one bin.
    u32 peers = __match_any_sync(ALL_LANES, bin);
    if (bin < SELECT_BINS && lane_of() == (u32)__ffs((int)peers) - 1) atomicAdd(&own[bin], (u32)__popc(peers));
  }
  __syncthreads();
  for (u32 bin = threadIdx.x; bin < SELECT_BINS; bin += THREADS)
    if (own[bin]) atomicAdd(&bins[bin], own[bin]);
}

// Collects the items at or before the cut, in any order; *kept is initially zero, and the caller knows their number.
KERNEL select_collect(const u32* __restrict__ key, const u32* __restrict__ slots, const u64* __restrict__ id, u32 n, u32 reverse, u32 cut_key, u64 cut_id, u32* __restrict__ key_out, u32* __restrict__ slot_out, u32* kept) {
  const u32 first = blockIdx.x * THREADS * ITEMS + threadIdx.x;
  for (u32 j = 0; j < ITEMS; j++) {
    u32 i = first + j * THREADS;
    if (i >= n) continue;
    u32 k = key_of(key[i], reverse);
    if (k > cut_key || (k == cut_key && ~cut_id && id_of(id[slots[i]], reverse) > cut_id)) continue;
    u32 place = atomicAdd(kept, 1u);
    key_out[place] = key[i];
    slot_out[place] = slots[i];
  }
}

CUDA_HOST_KERNEL(select_histogram)
CUDA_HOST_KERNEL(select_collect)
