// Computations without state: max-plus products, and sums of outer products of scores, with the bits of the CPU (crates/tropical,
// crates/information). Max is exact and each sum of two numbers is rounded once; products of two f32 are exact in f64 and are added in the
// order of the samples. So no split of rows or tiles changes a bit. Compiled with -fmad=false.
#include "prelude.cuh"

constexpr u32 ACROSS = 16;  // a block is a square of 16 x 16 threads
static_assert(THREADS == ACROSS * ACROSS, "one thread per place of the square");
constexpr u32 DEPTH = 16;  // steps of a tile in shared memory

constexpr u32 MAX_EACH = 8, MAX_SIDE = ACROSS * MAX_EACH;  // f32: a thread computes 8 x 8 entries, a block 128 x 128
constexpr u32 SUM_EACH = 4, SUM_SIDE = ACROSS * SUM_EACH;  // f64: 4 x 4 entries, 64 x 64

// out[i][j] = max over k of left[i][k] + right[k][j]; blocks count tiles of `out` row by row. Entries are finite or negative infinity, zeros are
// +0, so that no sum is NaN and no zero has a sign.
KERNEL max_plus_product(const float* __restrict__ left, const float* __restrict__ right, u32 rows, u32 depth, u32 columns, float* __restrict__ out) {
  __shared__ float left_tile[DEPTH][MAX_SIDE + 1], right_tile[DEPTH][MAX_SIDE];
  const float none = __uint_as_float(0xff800000u);
  u32 tiles = (columns + MAX_SIDE - 1) / MAX_SIDE;
  u32 first_row = blockIdx.x / tiles * MAX_SIDE, first_column = blockIdx.x % tiles * MAX_SIDE;
  u32 own_row = threadIdx.x / ACROSS, own_column = threadIdx.x % ACROSS;
  float best[MAX_EACH][MAX_EACH];
  for (u32 i = 0; i < MAX_EACH; i++)
    for (u32 j = 0; j < MAX_EACH; j++) best[i][j] = none;
  for (u32 from = 0; from < depth; from += DEPTH) {
    // Places beyond the matrices are missing edges, which never win.
    for (u32 place = threadIdx.x; place < MAX_SIDE * DEPTH; place += THREADS) {
      u32 row = first_row + place / DEPTH, step = from + place % DEPTH;
      left_tile[place % DEPTH][place / DEPTH] = row < rows && step < depth ? left[(size_t)row * depth + step] : none;
    }
    for (u32 place = threadIdx.x; place < MAX_SIDE * DEPTH; place += THREADS) {
      u32 column = first_column + place % MAX_SIDE, step = from + place / MAX_SIDE;
      right_tile[place / MAX_SIDE][place % MAX_SIDE] = column < columns && step < depth ? right[(size_t)step * columns + column] : none;
    }
    __syncthreads();
    for (u32 step = 0; step < DEPTH; step++) {
      float weight[MAX_EACH], value[MAX_EACH];
      for (u32 i = 0; i < MAX_EACH; i++) weight[i] = left_tile[step][own_row + i * ACROSS];
      for (u32 j = 0; j < MAX_EACH; j++) value[j] = right_tile[step][own_column + j * ACROSS];
      for (u32 i = 0; i < MAX_EACH; i++)
        for (u32 j = 0; j < MAX_EACH; j++) best[i][j] = max(best[i][j], weight[i] + value[j]);
    }
    __syncthreads();
  }
  for (u32 i = 0; i < MAX_EACH; i++) {
    u32 row = first_row + own_row + i * ACROSS;
    if (row >= rows) continue;
    // One address per row: with 64 of them the kernel takes twice the registers.
    float* target = out + (size_t)row * columns + first_column + own_column;
    for (u32 j = 0; j < MAX_EACH; j++)
      if (first_column + own_column + j * ACROSS < columns) target[j * ACROSS] = best[i][j];
  }
}

// Start of a row in the packed upper triangle of a matrix of `size` rows.
INLINE u64 packed_row(u64 row, u64 size) { return row * size - row * (row > 0 ? row - 1 : 0) / 2; }

// Rows first..end of the packed upper triangle of the sum of s s^T over `samples` rows of scores[sample][size]. Blocks count tiles of the
// square (end - first) x (size - first) row by row; those below the diagonal have nothing to do.
KERNEL outer_products(const float* __restrict__ scores, u32 samples, u32 size, u32 first, u32 end, double* __restrict__ sums) {
  __shared__ float row_tile[DEPTH][SUM_SIDE], column_tile[DEPTH][SUM_SIDE];
  u32 tiles = (size - first + SUM_SIDE - 1) / SUM_SIDE;
  if (blockIdx.x % tiles < blockIdx.x / tiles) return;  // whole blocks
  u32 first_row = first + blockIdx.x / tiles * SUM_SIDE, first_column = first + blockIdx.x % tiles * SUM_SIDE;
  u32 own_row = threadIdx.x / ACROSS, own_column = threadIdx.x % ACROSS;
  double sum[SUM_EACH][SUM_EACH] = {};
  for (u32 from = 0; from < samples; from += DEPTH) {
    u32 steps = min(DEPTH, samples - from);
    for (u32 place = threadIdx.x; place < SUM_SIDE * steps; place += THREADS) {
      u32 step = place / SUM_SIDE, offset = place % SUM_SIDE;
      const float* sample = scores + (size_t)(from + step) * size;
      row_tile[step][offset] = first_row + offset < size ? sample[first_row + offset] : 0;
      column_tile[step][offset] = first_column + offset < size ? sample[first_column + offset] : 0;
    }
    __syncthreads();
    for (u32 step = 0; step < steps; step++) {
      double value[SUM_EACH];
      for (u32 j = 0; j < SUM_EACH; j++) value[j] = column_tile[step][own_column + j * ACROSS];
      for (u32 i = 0; i < SUM_EACH; i++) {
        double factor = row_tile[step][own_row + i * ACROSS];
        for (u32 j = 0; j < SUM_EACH; j++) sum[i][j] = sum[i][j] + factor * value[j];
      }
    }
    __syncthreads();
  }
  for (u32 i = 0; i < SUM_EACH; i++) {
    u32 row = first_row + own_row + i * ACROSS;
    for (u32 j = 0; j < SUM_EACH; j++) {
      u32 column = first_column + own_column + j * ACROSS;
      if (row < end && row <= column && column < size) sums[packed_row(row, size) - packed_row(first, size) + column - row] = sum[i][j];
    }
  }
}

// Adds n sums to others, element by element: a step of the fixed tree of additions.
KERNEL add_sums(double* __restrict__ into, const double* __restrict__ other, u32 n) {
  u32 i = blockIdx.x * THREADS + threadIdx.x;
  if (i < n) into[i] = into[i] + other[i];
}

CUDA_HOST_KERNEL(max_plus_product)
CUDA_HOST_KERNEL(outer_products)
CUDA_HOST_KERNEL(add_sums)
