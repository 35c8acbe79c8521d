// Training of networks of dense layers (crates/neural) in single precision: forward pass, loss and backward pass of a batch.
//
// All sums have a fixed order that depends on the sizes alone, so a device kind gives the same bits at every execution; CPU and GPU agree to
// rounding. Compiled with -fmad=false: fused operations are those that are written. Matrices are row-major.
#include "prelude.cuh"
#ifdef CUDA_HOST_SHIM
#include <math.h>
#endif

constexpr u32 SIDE = 64;           // rows and columns of a product that a block computes
constexpr u32 STEP = 16;           // terms of a sum in shared memory
constexpr u32 EACH = 4;            // rows and columns of a thread
constexpr u32 STRIDE = SIDE + 4;   // against bank conflicts
constexpr u32 LOADS = SIDE * STEP / THREADS;
constexpr u32 BAND = 32, LANES = THREADS / BAND;  // columns of a block that adds rows, and the threads that share one
static_assert(SIDE / EACH * (SIDE / EACH) == THREADS && LOADS * THREADS == SIDE * STEP, "threads of a block");

enum Activation : u32 { NONE, RELU, GELU, TANH, SIGMOID };
enum Loss : u32 { MSE, HUBER, BCE, CROSS_ENTROPY };

INLINE float sigmoid_of(float x) { return 1.0f / (1.0f + expf(-x)); }
INLINE float normal_distribution(float x) { return 0.5f * (1.0f + erff(x * 0.70710678f)); }

INLINE float activated(u32 kind, float x) {
  switch (kind) {
    case RELU: return x > 0.0f ? x : 0.0f;
    case GELU: return x * normal_distribution(x);
    case TANH: return tanhf(x);
    case SIGMOID: return sigmoid_of(x);
    default: return x;
  }
}

// Gradient of the input of an activation from that of its output. `kept` is its input for GELU, its output for the others.
INLINE float through(u32 kind, float delta, float kept) {
  switch (kind) {
    case RELU: return kept > 0.0f ? delta : 0.0f;
    case GELU: return delta * (normal_distribution(kept) + kept * 0.3989423f * expf(-0.5f * kept * kept));
    case TANH: return delta * (1.0f - kept * kept);
    case SIGMOID: return delta * (kept * (1.0f - kept));
    default: return delta;
  }
}

// Sum over the lanes of a warp, the same bits in all of them.
INLINE float warp_sum(float value) {
  for (u32 by = 16; by > 0; by >>= 1) value = value + __shfl_xor_sync(ALL_LANES, value, by);
  return value;
}
INLINE float warp_max(float value) {
  for (u32 by = 16; by > 0; by >>= 1) {
    float other = __shfl_xor_sync(ALL_LANES, value, by);
    value = other > value ? other : value;
  }
  return value;
}

// Tiles of both factors of a product.
struct alignas(16) Tiles { float left[STEP][STRIDE], right[STEP][STRIDE]; };

// Tile `tile` of left * right over the terms from..to: calls finish(row, column, sum) for its entries. A transposed left factor is stored as
// [depth][rows], a transposed right one as [columns][depth]. `row_sums`, of threads below SIDE, are the sums of the rows of the left tile.
template <bool LEFT_TRANSPOSED, bool RIGHT_TRANSPOSED, bool SUMS_ROWS, class Finish>
INLINE float product(const float* left, const float* right, u32 rows, u32 depth, u32 columns, u32 from, u32 to, u32 tile, Tiles& at, Finish finish) {
  u32 across = (columns + SIDE - 1) / SIDE, first_row = tile / across * SIDE, first_column = tile % across * SIDE;
  u32 row_of = threadIdx.x / (SIDE / EACH) * EACH, column_of = threadIdx.x % (SIDE / EACH) * EACH;
  float sum[EACH][EACH] = {}, next_left[LOADS], next_right[LOADS], row_sum = 0;
  // Threads of a warp read consecutive addresses.
  auto load_tiles = [&](u32 begin) {
    for (u32 load = 0; load < LOADS; load++) {
      u32 place = load * THREADS + threadIdx.x;
      u32 step = begin + (LEFT_TRANSPOSED ? place / SIDE : place % STEP), row = first_row + (LEFT_TRANSPOSED ? place % SIDE : place / STEP);
      next_left[load] = step < to && row < rows ? left[LEFT_TRANSPOSED ? (size_t)step * rows + row : (size_t)row * depth + step] : 0.0f;
      step = begin + (RIGHT_TRANSPOSED ? place % STEP : place / SIDE);
      u32 column = first_column + (RIGHT_TRANSPOSED ? place / STEP : place % SIDE);
      next_right[load] = step < to && column < columns ? right[RIGHT_TRANSPOSED ? (size_t)column * depth + step : (size_t)step * columns + column] : 0.0f;
    }
  };
  load_tiles(from);
  for (u32 begin = from; begin < to; begin += STEP) {
    __syncthreads();
    for (u32 load = 0; load < LOADS; load++) {
      u32 place = load * THREADS + threadIdx.x;
      if (LEFT_TRANSPOSED) at.left[place / SIDE][place % SIDE] = next_left[load];
      else at.left[place % STEP][place / STEP] = next_left[load];
      if (RIGHT_TRANSPOSED) at.right[place % STEP][place / STEP] = next_right[load];
      else at.right[place / SIDE][place % SIDE] = next_right[load];
    }
    __syncthreads();
    // The next tiles arrive while the block computes on these.
    if (begin + STEP < to) load_tiles(begin + STEP);
    for (u32 step = 0; step < STEP; step++) {
      float own_left[EACH], own_right[EACH];
      for (u32 i = 0; i < EACH; i++) own_left[i] = at.left[step][row_of + i];
      for (u32 j = 0; j < EACH; j++) own_right[j] = at.right[step][column_of + j];
      for (u32 i = 0; i < EACH; i++)
        for (u32 j = 0; j < EACH; j++) sum[i][j] = fmaf(own_left[i], own_right[j], sum[i][j]);
    }
    if (SUMS_ROWS && threadIdx.x < SIDE)
      for (u32 step = 0; step < STEP; step++) row_sum = row_sum + at.left[step][threadIdx.x];
  }
  for (u32 i = 0; i < EACH; i++)
    for (u32 j = 0; j < EACH; j++)
      if (first_row + row_of + i < rows && first_column + column_of + j < columns) finish(first_row + row_of + i, first_column + column_of + j, sum[i][j]);
  return row_sum;
}

// out = activation(input * weight^T + bias), with weight[outputs][inputs]. `before` receives the values before the activation, where it is set.
KERNEL dense_forward(const float* __restrict__ input, const float* __restrict__ weight, const float* __restrict__ bias, u32 rows, u32 inputs, u32 outputs, u32 activation,
                     float* __restrict__ before, float* __restrict__ out) {
  __shared__ Tiles at;
  product<false, true, false>(input, weight, rows, inputs, outputs, 0, inputs, blockIdx.x, at, [&](u32 row, u32 column, float sum) {
    size_t place = (size_t)row * outputs + column;
    float value = bias == nullptr ? sum : sum + bias[column];
    if (before != nullptr) before[place] = value;
    out[place] = activated(activation, value);
  });
}

// out = (delta * weight) through the activation below, of which `kept` has what its derivative needs; null without one.
KERNEL dense_input(const float* __restrict__ delta, const float* __restrict__ weight, const float* __restrict__ kept, u32 rows, u32 inputs, u32 outputs, u32 activation,
                   float* __restrict__ out) {
  __shared__ Tiles at;
  product<false, false, false>(delta, weight, rows, outputs, inputs, 0, outputs, blockIdx.x, at, [&](u32 row, u32 column, float sum) {
    size_t place = (size_t)row * inputs + column;
    out[place] = kept == nullptr ? sum : through(activation, sum, kept[place]);
  });
}

// Gradient of weight and, if `has_bias` is not 0, of the bias after it: delta^T * input and the column sums of delta, over rows in parts of
// `each` rows. out[part][outputs * inputs (+ outputs)]; blocks count tiles, part by part.
KERNEL dense_gradient(const float* __restrict__ delta, const float* __restrict__ input, u32 rows, u32 inputs, u32 outputs, u32 has_bias, u32 each, float* __restrict__ out) {
  __shared__ Tiles at;
  u32 across = (inputs + SIDE - 1) / SIDE, tiles = (outputs + SIDE - 1) / SIDE * across, part = blockIdx.x / tiles, tile = blockIdx.x % tiles;
  u32 from = part * each, to = min(from + each, rows);
  size_t weights = (size_t)outputs * inputs;
  float* own = out + part * (weights + (has_bias ? outputs : 0));
  float row_sum = product<true, false, true>(delta, input, outputs, rows, inputs, from, to, tile, at,
                                             [&](u32 row, u32 column, float sum) { own[(size_t)row * inputs + column] = sum; });
  u32 row = tile / across * SIDE + threadIdx.x;
  if (has_bias && tile % across == 0 && threadIdx.x < SIDE && row < outputs) own[weights + row] = row_sum;
}

// out[i] = sum over parts of partial[part][i], in the order of the parts.
KERNEL sum_parts(const float* __restrict__ partial, u32 parts, u32 count, float* __restrict__ out) {
  u32 at = blockIdx.x * THREADS + threadIdx.x;
  if (at >= count) return;
  float sum = 0;
  for (u32 part = 0; part < parts; part++) sum = sum + partial[(size_t)part * count + at];
  out[at] = sum;
}

// Layer normalization, a warp per row. `statistics` receives the mean and the inverse standard deviation of each row.
KERNEL norm_forward(const float* __restrict__ input, const float* __restrict__ weight, const float* __restrict__ bias, u32 rows, u32 width, float epsilon,
                    float* __restrict__ statistics, float* __restrict__ out) {
  u32 row = blockIdx.x * WARPS + warp_of(), lane = lane_of();
  if (row >= rows) return;
  const float* own = input + (size_t)row * width;
  float sum = 0;
  for (u32 i = lane; i < width; i += 32) sum = sum + own[i];
  float mean = warp_sum(sum) / (float)width;
  sum = 0;
  for (u32 i = lane; i < width; i += 32) sum = fmaf(own[i] - mean, own[i] - mean, sum);
  float inverse = 1.0f / sqrtf(warp_sum(sum) / (float)width + epsilon);
  for (u32 i = lane; i < width; i += 32) out[(size_t)row * width + i] = (own[i] - mean) * inverse * weight[i] + bias[i];
  if (lane == 0) statistics[2 * (size_t)row] = mean, statistics[2 * (size_t)row + 1] = inverse;
}

// Replaces `delta`, the gradient of the outputs of layer normalization, by that of its inputs.
KERNEL norm_input(const float* __restrict__ input, const float* __restrict__ weight, const float* __restrict__ statistics, u32 rows, u32 width, float* __restrict__ delta) {
  u32 row = blockIdx.x * WARPS + warp_of(), lane = lane_of();
  if (row >= rows) return;
  const float* own = input + (size_t)row * width;
  float* to = delta + (size_t)row * width;
  float mean = statistics[2 * (size_t)row], inverse = statistics[2 * (size_t)row + 1], sum = 0, dot = 0;
  for (u32 i = lane; i < width; i += 32) {
    float weighted = to[i] * weight[i];
    sum = sum + weighted;
    dot = fmaf(weighted, (own[i] - mean) * inverse, dot);
  }
  sum = warp_sum(sum) / (float)width;
  dot = warp_sum(dot) / (float)width;
  for (u32 i = lane; i < width; i += 32) to[i] = inverse * (to[i] * weight[i] - sum - (own[i] - mean) * inverse * dot);
}

// Gradient of weight and bias of layer normalization over rows in parts of `each` rows: out[part][2 * width]; blocks count bands of columns,
// part by part.
KERNEL norm_gradient(const float* __restrict__ delta, const float* __restrict__ input, const float* __restrict__ statistics, u32 rows, u32 width, u32 each,
                     float* __restrict__ out) {
  __shared__ float sums[2][LANES][BAND];
  u32 bands = (width + BAND - 1) / BAND, part = blockIdx.x / bands, column = blockIdx.x % bands * BAND + threadIdx.x % BAND, lane = threadIdx.x / BAND;
  u32 to = min((part + 1) * each, rows);
  float to_weight = 0, to_bias = 0;
  if (column < width)
    for (u32 row = part * each + lane; row < to; row += LANES) {
      float own = delta[(size_t)row * width + column];
      to_weight = fmaf(own, (input[(size_t)row * width + column] - statistics[2 * (size_t)row]) * statistics[2 * (size_t)row + 1], to_weight);
      to_bias = to_bias + own;
    }
  sums[0][lane][threadIdx.x % BAND] = to_weight;
  sums[1][lane][threadIdx.x % BAND] = to_bias;
  __syncthreads();
  if (lane >= 2 || column >= width) return;
  float sum = 0;
  for (u32 other = 0; other < LANES; other++) sum = sum + sums[lane][other][threadIdx.x % BAND];
  out[(size_t)part * 2 * width + lane * width + column] = sum;
}

// out = activation(input), where no dense layer is before it.
KERNEL activation_forward(const float* input, u32 count, u32 activation, float* out) {
  u32 at = blockIdx.x * THREADS + threadIdx.x;
  if (at < count) out[at] = activated(activation, input[at]);
}

// Replaces the gradient of the outputs of an activation by that of its inputs, where no dense layer is after it.
KERNEL activation_input(const float* __restrict__ kept, u32 count, u32 activation, float* __restrict__ delta) {
  u32 at = blockIdx.x * THREADS + threadIdx.x;
  if (at < count) delta[at] = through(activation, delta[at], kept[at]);
}

// out = left + right; `out` may be one of them.
KERNEL add_values(const float* left, const float* right, u32 count, float* out) {
  u32 at = blockIdx.x * THREADS + threadIdx.x;
  if (at < count) out[at] = left[at] + right[at];
}

// Philox4x32-10 (Salmon and others, 2011): four random words for a key and a counter.
INLINE void philox(u64 key, u32 (&words)[4]) {
  u32 low_key = (u32)key, high_key = (u32)(key >> 32);
  for (u32 round = 0; round < 10; round++) {
    u64 a = 0xD2511F53ull * words[0], b = 0xCD9E8D57ull * words[2];
    u32 second = words[1], fourth = words[3];
    words[0] = (u32)(b >> 32) ^ second ^ low_key;
    words[1] = (u32)b;
    words[2] = (u32)(a >> 32) ^ fourth ^ high_key;
    words[3] = (u32)a;
    low_key += 0x9E3779B9u;
    high_key += 0xBB67AE85u;
  }
}

// out = input with units dropped, a thread for four units of a row; the same for the gradient. Whether a unit is dropped follows from key,
// step, the position of its row in the global batch, and the unit: the bits of the CPU. `out` may be `input`.
KERNEL dropout(const float* input, const u32* __restrict__ positions, u32 rows, u32 width, float probability, u64 key, u64 step, float* out) {
  u32 blocks = (width + 3) / 4, at = blockIdx.x * THREADS + threadIdx.x, row = at / blocks, block = at % blocks;
  if (row >= rows) return;
  u32 words[4] = {block, positions[row], (u32)step, (u32)(step >> 32)};
  philox(key, words);
  float keep = 1.0f / (1.0f - probability);
  for (u32 i = 0; i < 4 && 4 * block + i < width; i++) {
    size_t place = (size_t)row * width + 4 * block + i;
    out[place] = input[place] * ((float)(words[i] >> 8) / 16777216.0f < probability ? 0.0f : keep);
  }
}

// Loss and error of each row, and `scale` times the row's weight times the gradient of its loss; a warp per row. Targets are `values`
// [rows][width], or one of `classes` per row with CROSS_ENTROPY. Without `weights` each row has weight 1.
KERNEL row_losses(const float* __restrict__ outputs, const float* __restrict__ values, const u32* __restrict__ classes, const float* __restrict__ weights, u32 rows, u32 width,
                  u32 kind, float huber_delta, float scale, float* __restrict__ delta, float* __restrict__ losses, float* __restrict__ errors) {
  u32 row = blockIdx.x * WARPS + warp_of(), lane = lane_of();
  if (row >= rows) return;
  const float* own = outputs + (size_t)row * width;
  float* to = delta + (size_t)row * width;
  float factor = (weights == nullptr ? 1.0f : weights[row]) * scale, loss = 0, error = 0;
  if (kind == CROSS_ENTROPY) {
    float top = own[lane < width ? lane : 0], sum = 0;
    for (u32 i = lane; i < width; i += 32) top = own[i] > top ? own[i] : top;
    top = warp_max(top);
    for (u32 i = lane; i < width; i += 32) sum = sum + expf(own[i] - top);
    sum = warp_sum(sum);
    u32 target = classes[row];
    float above = own[target] - top;
    for (u32 i = lane; i < width; i += 32) to[i] = (expf(own[i] - top) / sum - (i == target ? 1.0f : 0.0f)) * factor;
    loss = logf(sum) - above;
    error = 1.0f - expf(above) / sum;
  } else {
    for (u32 i = lane; i < width; i += 32) {
      float predicted = own[i], target = values[(size_t)row * width + i], off = predicted - target, slope;
      if (kind == BCE) {
        slope = sigmoid_of(predicted) - target;
        loss = loss + ((predicted > 0.0f ? predicted : 0.0f) - predicted * target + log1pf(expf(-fabsf(predicted))));
        error = error + fabsf(slope);
      } else {
        float size = fabsf(off);
        bool is_near = kind == MSE || size <= huber_delta;
        slope = kind == MSE ? 2.0f * off : is_near ? off : copysignf(huber_delta, off);
        loss = loss + (kind == MSE ? off * off : is_near ? 0.5f * off * off : huber_delta * (size - 0.5f * huber_delta));
        error = error + size;
      }
      to[i] = slope / (float)width * factor;
    }
    loss = warp_sum(loss) / (float)width;
    error = warp_sum(error) / (float)width;
  }
  if (lane == 0) losses[row] = loss, errors[row] = error;
}

CUDA_HOST_KERNEL(dense_forward)
CUDA_HOST_KERNEL(dense_input)
CUDA_HOST_KERNEL(dense_gradient)
CUDA_HOST_KERNEL(sum_parts)
CUDA_HOST_KERNEL(norm_forward)
CUDA_HOST_KERNEL(norm_input)
CUDA_HOST_KERNEL(norm_gradient)
CUDA_HOST_KERNEL(activation_forward)
CUDA_HOST_KERNEL(activation_input)
CUDA_HOST_KERNEL(add_values)
CUDA_HOST_KERNEL(dropout)
CUDA_HOST_KERNEL(row_losses)
