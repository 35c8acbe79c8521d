// Stable radix sort of (u32 key, u32 value), eight bits per pass: onesweep (Adinets and Merrill, 2022). One histogram of all digits, then one
// read and one write per pass. The host skips passes whose digit is the same in all keys.
#include "prelude.cuh"

constexpr u32 DIGITS = 256, ITEMS = 16, SORT_TILE = THREADS * ITEMS;

// Adds to bins[place][digit] for the four digit places; initially zero.
KERNEL radix_histogram(const u32* __restrict__ key, u32 n, u32* __restrict__ bins) {
  __shared__ u32 own[4][DIGITS];
  for (u32 place = 0; place < 4; place++) own[place][threadIdx.x] = 0;
  __syncthreads();
  for (u32 i = blockIdx.x * THREADS + threadIdx.x; i < n; i += gridDim.x * THREADS)
    for (u32 place = 0; place < 4; place++) atomicAdd(&own[place][key[i] >> 8 * place & 255], 1u);
  __syncthreads();
  for (u32 place = 0; place < 4; place++)
    if (own[place][threadIdx.x]) atomicAdd(&bins[place * DIGITS + threadIdx.x], own[place][threadIdx.x]);
}

// One pass over the digit at `shift`. offsets[digit] is the number of keys with a smaller digit; a null `value` means 0, 1, 2, ...
// status[tile][digit] holds look-back words, so n < 2^30; `status` and `ticket` are initially zero.
KERNEL radix_pass(const u32* __restrict__ key, const u32* __restrict__ value, u32* __restrict__ key_out, u32* __restrict__ value_out, u32 n, u32 shift, const u32* __restrict__ offsets, u32* status, u32* ticket) {
  __shared__ u32 count[WARPS][DIGITS + 1];  // one more for items beyond the end: a branch would cost registers
  __shared__ u32 place_of[DIGITS], out_of[DIGITS], warps[WARPS], shared_tile;
  __shared__ u32 exchange[SORT_TILE];
  for (u32 i = threadIdx.x; i < WARPS * (DIGITS + 1); i += THREADS) (&count[0][0])[i] = 0;
  const u32 tile = take_ticket(ticket, shared_tile), lane = lane_of(), warp = warp_of();
  const u32 begin = tile * SORT_TILE, first = begin + warp * 32 * ITEMS + lane, length = min(n - begin, SORT_TILE);

  // Rank among equal digits of the warp, in input order.
  u32 own[ITEMS], place[ITEMS];
#pragma unroll
  for (u32 j = 0; j < ITEMS; j++) {
    bool live = first + j * 32 < n;
    own[j] = live ? key[first + j * 32] : 0;
    u32 digit = live ? own[j] >> shift & 255 : DIGITS;
    u32 peers = __match_any_sync(ALL_LANES, digit), before = count[warp][digit];
    __syncwarp();
    if (lane == (u32)__ffs((int)peers) - 1) count[warp][digit] = before + __popc(peers);
    __syncwarp();
    place[j] = before + __popc(peers & ((1u << lane) - 1));
  }
  __syncthreads();

  // One thread per digit: its keys in earlier warps, in earlier tiles, and those of smaller digits.
  u32 digit = threadIdx.x, mine = 0, all;
  for (u32 w = 0; w < WARPS; w++) {
    u32 here = count[w][digit];
    count[w][digit] = mine;
    mine += here;
  }
  place_of[digit] = block_prefix(mine, warps, all);
  out_of[digit] = offsets[digit] + look_back(status + digit, tile, DIGITS, mine) - place_of[digit];
  __syncthreads();

  // Through shared memory, so that every digit is written as one run.
#pragma unroll
  for (u32 j = 0; j < ITEMS; j++) {
    if (first + j * 32 >= n) continue;
    u32 digit = own[j] >> shift & 255;
    place[j] += place_of[digit] + count[warp][digit];
    exchange[place[j]] = own[j];
  }
  __syncthreads();
  u32 to[ITEMS];
#pragma unroll
  for (u32 j = 0; j < ITEMS; j++) {
    u32 i = j * THREADS + threadIdx.x;
    if (i >= length) continue;
    u32 moved = exchange[i];
    to[j] = out_of[moved >> shift & 255] + i;
    key_out[to[j]] = moved;
  }
  __syncthreads();
#pragma unroll
  for (u32 j = 0; j < ITEMS; j++) {
    u32 i = first + j * 32;
    if (i < n) exchange[place[j]] = value ? value[i] : i;
  }
  __syncthreads();
#pragma unroll
  for (u32 j = 0; j < ITEMS; j++) {
    u32 i = j * THREADS + threadIdx.x;
    if (i < length) value_out[to[j]] = exchange[i];
  }
}

CUDA_HOST_KERNEL(radix_histogram)
CUDA_HOST_KERNEL(radix_pass)
