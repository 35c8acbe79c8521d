// Rows by slot: gather and scatter of potential and group, and gather of one column.
#include "prelude.cuh"

// Reads potential and group of each slot.
KERNEL gather_rows(const u32* __restrict__ slots, u32 n, const u32* __restrict__ potential, const u8* __restrict__ group, u32* __restrict__ potential_out, u8* __restrict__ group_out) {
  u32 i = blockIdx.x * THREADS + threadIdx.x;
  if (i >= n) return;
  potential_out[i] = potential[slots[i]];
  group_out[i] = group[slots[i]];
}

// Writes rows of distinct slots.
KERNEL scatter_rows(const u32* __restrict__ slots, u32 n, const u32* __restrict__ potential_in, const u8* __restrict__ group_in, u32* __restrict__ potential, u8* __restrict__ group) {
  u32 i = blockIdx.x * THREADS + threadIdx.x;
  if (i >= n) return;
  potential[slots[i]] = potential_in[i];
  group[slots[i]] = group_in[i];
}

CUDA_HOST_KERNEL(gather_rows)
CUDA_HOST_KERNEL(scatter_rows)
