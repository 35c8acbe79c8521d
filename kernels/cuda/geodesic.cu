// Networks and path features of the geodesic model (crates/geodesic) in double precision, for all models of a worker in one launch each.
//
// A network is `inputs -> 64 tanh -> 128 tanh -> 1`; its parameters are one array: W1 [inputs][64], b1, W2 [64][128], b2, W3 [128], b3. Sums
// have a fixed order, so a device kind gives the same bits however many models a launch has; CPU and GPU agree to rounding, since the CPU adds
// in an order of its own. Compiled with -fmad=false: fused operations are those that are written.
#include "prelude.cuh"
#ifdef CUDA_HOST_SHIM
#include <math.h>
#endif

constexpr u32 FIRST = 64, SECOND = 128, MOST_INPUTS = 5;
constexpr u32 ROWS = 16, HALF = ROWS / 2;  // rows of a tile; two threads share a unit of the second layer
constexpr u32 SHARE = FIRST / 2;             // weights of W2 per thread
constexpr u32 QUARTER = ROWS / 4;          // rows of the first layer per thread
constexpr u32 STRIP = 16;                  // columns of W2 in shared memory
static_assert(THREADS == 2 * SECOND && THREADS == 4 * FIRST && THREADS == ROWS * ROWS, "threads of a block");

// Values of the units of a tile of rows.
struct Layers { double input[ROWS][MOST_INPUTS], first[ROWS][FIRST], second[ROWS][SECOND]; };

INLINE u32 parameter_count(u32 inputs) { return inputs * FIRST + FIRST + FIRST * SECOND + SECOND + SECOND + 1; }

// The polynomial of the CPU: tanh x = sign(x) (1 - 2 / (exp(2 |x|) + 1)).
INLINE double tanh_of(double x) {
  const double round = 6755399441055744.0;  // 1.5 * 2^52
  double magnitude = fabs(x);
  double y = 2.0 * (magnitude > 20.0 ? 20.0 : magnitude);
  double shifted = y * 1.4426950408889634 + round;
  double n = shifted - round;
  double r = (y - n * 6.931471803691238e-1) - n * 1.9082149292705877e-10;
  double p = 1.0 / 6227020800.0;
  p = p * r + 1.0 / 479001600.0;
  p = p * r + 1.0 / 39916800.0;
  p = p * r + 1.0 / 3628800.0;
  p = p * r + 1.0 / 362880.0;
  p = p * r + 1.0 / 40320.0;
  p = p * r + 1.0 / 5040.0;
  p = p * r + 1.0 / 720.0;
  p = p * r + 1.0 / 120.0;
  p = p * r + 1.0 / 24.0;
  p = p * r + 1.0 / 6.0;
  p = p * r + 0.5;
  p = p * r + 1.0;
  p = p * r + 1.0;
  // n is at most 58.
  double power = (double)(1ull << (u32)(i64)n);
  return copysign(1.0 - 2.0 / (p * power + 1.0), x);
}

// Evaluates both layers on rows first..first + ROWS; rows beyond `count` are 0. Contains barriers, the last one at its end.
INLINE void layers(const double* parameters, u32 inputs, const double* rows, u32 first, u32 count, Layers& at) {
  for (u32 place = threadIdx.x; place < ROWS * inputs; place += THREADS) {
    u32 row = first + place / inputs;
    at.input[place / inputs][place % inputs] = row < count ? rows[(size_t)row * inputs + place % inputs] : 0;
  }
  __syncthreads();
  const double* bias = parameters + inputs * FIRST;
  for (u32 place = threadIdx.x; place < ROWS * FIRST; place += THREADS) {
    u32 row = place / FIRST, unit = place % FIRST;
    double sum = bias[unit];
    for (u32 i = 0; i < inputs; i++) sum = sum + at.input[row][i] * parameters[i * FIRST + unit];
    at.first[row][unit] = tanh_of(sum);
  }
  __syncthreads();
  const double* weights = bias + FIRST;
  u32 unit = threadIdx.x % SECOND, from = threadIdx.x / SECOND * HALF;
  double sum[HALF] = {};
  for (u32 k = 0; k < FIRST; k++) {
    double weight = weights[k * SECOND + unit];
    for (u32 row = 0; row < HALF; row++) sum[row] = fma(at.first[from + row][k], weight, sum[row]);
  }
  for (u32 row = 0; row < HALF; row++) at.second[from + row][unit] = tanh_of(weights[FIRST * SECOND + unit] + sum[row]);
  __syncthreads();
}

// Outputs of each model's network at its own rows: parameters[model][parameter_count], rows[model][count][inputs], out[model][count]. Blocks
// count tiles of rows, model by model.
KERNEL network_values(const double* __restrict__ parameters, u32 inputs, const double* __restrict__ rows, u32 count, double* __restrict__ out) {
  __shared__ Layers at;
  __shared__ double parts[ROWS][ROWS + 1];
  u32 tiles = (count + ROWS - 1) / ROWS, model = blockIdx.x / tiles, first = blockIdx.x % tiles * ROWS;
  const double* own = parameters + (size_t)model * parameter_count(inputs);
  layers(own, inputs, rows + (size_t)model * count * inputs, first, count, at);
  const double* last = own + parameter_count(inputs) - 1 - SECOND;
  u32 row = threadIdx.x / ROWS, lane = threadIdx.x % ROWS;
  double sum = 0;
  for (u32 unit = lane; unit < SECOND; unit += ROWS) sum = fma(at.second[row][unit], last[unit], sum);
  parts[row][lane] = sum;
  __syncthreads();
  if (threadIdx.x >= ROWS || first + threadIdx.x >= count) return;
  double total = last[SECOND];
  for (u32 part = 0; part < ROWS; part++) total = total + parts[threadIdx.x][part];
  out[(size_t)model * count + first + threadIdx.x] = total;
}

// Gradient of the sum over rows of adjoint[model][row] * output. A block takes every `groups`-th tile of a model's rows and writes
// partial[model][group][parameter_count]; blocks count groups, model by model. With `to_inputs`, also the gradient with respect to the rows.
KERNEL network_gradient(const double* __restrict__ parameters, u32 inputs, const double* __restrict__ rows, const double* __restrict__ adjoint, u32 count, u32 groups,
                        double* __restrict__ partial, double* __restrict__ to_inputs) {
  __shared__ Layers at;
  __shared__ double strip[FIRST][STRIP + 1], scale[ROWS];
  u32 model = blockIdx.x / groups, group = blockIdx.x % groups, tiles = (count + ROWS - 1) / ROWS;
  const double* own = parameters + (size_t)model * parameter_count(inputs);
  const double* weights = own + inputs * FIRST + FIRST;
  const double* last = weights + FIRST * SECOND + SECOND;
  rows += (size_t)model * count * inputs;
  adjoint += (size_t)model * count;
  u32 unit = threadIdx.x % SECOND, half = threadIdx.x / SECOND;     // of the second layer
  u32 first_unit = threadIdx.x % FIRST, quarter = threadIdx.x / FIRST;  // of the first layer
  double to_second[SHARE] = {}, to_first[MOST_INPUTS] = {}, to_last = 0, to_second_bias = 0, to_first_bias = 0, to_last_bias = 0;
  for (u32 tile = group; tile < tiles; tile += groups) {
    u32 first = tile * ROWS;
    if (threadIdx.x < ROWS) scale[threadIdx.x] = first + threadIdx.x < count ? adjoint[first + threadIdx.x] : 0;
    layers(own, inputs, rows, first, count, at);
    for (u32 row = half * HALF; row < half * HALF + HALF; row++) {
      double value = at.second[row][unit];
      to_last = to_last + scale[row] * value;
      double delta = scale[row] * last[unit] * (1.0 - value * value);
      to_second_bias = to_second_bias + delta;
      at.second[row][unit] = delta;
    }
    if (threadIdx.x == 0)
      for (u32 row = 0; row < ROWS; row++) to_last_bias = to_last_bias + scale[row];
    __syncthreads();
    for (u32 row = 0; row < ROWS; row++) {
      double delta = at.second[row][unit];
      for (u32 k = 0; k < SHARE; k++) to_second[k] = fma(at.first[row][half * SHARE + k], delta, to_second[k]);
    }
    double sum[QUARTER] = {};
    for (u32 from = 0; from < SECOND; from += STRIP) {
      __syncthreads();
      for (u32 place = threadIdx.x; place < FIRST * STRIP; place += THREADS) strip[place / STRIP][place % STRIP] = weights[place / STRIP * SECOND + from + place % STRIP];
      __syncthreads();
      for (u32 k = 0; k < STRIP; k++)
        for (u32 row = 0; row < QUARTER; row++) sum[row] = fma(at.second[quarter * QUARTER + row][from + k], strip[first_unit][k], sum[row]);
    }
    for (u32 row = 0; row < QUARTER; row++) {
      u32 place = quarter * QUARTER + row;
      double value = at.first[place][first_unit], delta = sum[row] * (1.0 - value * value);
      to_first_bias = to_first_bias + delta;
      for (u32 i = 0; i < MOST_INPUTS; i++)
        if (i < inputs) to_first[i] = to_first[i] + at.input[place][i] * delta;
      at.first[place][first_unit] = delta;
    }
    __syncthreads();
    if (to_inputs != nullptr && threadIdx.x < ROWS * inputs && first + threadIdx.x / inputs < count) {
      double total = 0;
      for (u32 k = 0; k < FIRST; k++) total = fma(at.first[threadIdx.x / inputs][k], own[threadIdx.x % inputs * FIRST + k], total);
      to_inputs[(size_t)model * count * inputs + (size_t)first * inputs + threadIdx.x] = total;
    }
    __syncthreads();
  }
  double* out = partial + (size_t)blockIdx.x * parameter_count(inputs);
  double* out_second = out + inputs * FIRST + FIRST;
  for (u32 k = 0; k < SHARE; k++) out_second[(half * SHARE + k) * SECOND + unit] = to_second[k];
  // Halves and quarters of the rows meet in shared memory.
  at.second[half][unit] = to_second_bias;
  at.second[2 + half][unit] = to_last;
  at.first[quarter][first_unit] = to_first_bias;
  for (u32 i = 0; i < MOST_INPUTS; i++)
    if (i < inputs) at.second[4 + i * 2 + quarter / 2][quarter % 2 * FIRST + first_unit] = to_first[i];
  __syncthreads();
  if (half == 0) {
    out_second[FIRST * SECOND + unit] = at.second[0][unit] + at.second[1][unit];
    out_second[FIRST * SECOND + SECOND + unit] = at.second[2][unit] + at.second[3][unit];
  }
  if (quarter == 0) {
    out[inputs * FIRST + first_unit] = at.first[0][first_unit] + at.first[1][first_unit] + at.first[2][first_unit] + at.first[3][first_unit];
    for (u32 i = 0; i < inputs; i++) {
      double* parts = at.second[4 + i * 2];  // two rows of `second` hold the four quarters
      out[i * FIRST + first_unit] = parts[first_unit] + parts[FIRST + first_unit] + parts[2 * FIRST + first_unit] + parts[3 * FIRST + first_unit];
    }
  }
  if (threadIdx.x == 0) out[parameter_count(inputs) - 1] = to_last_bias;
}

// out[model][n] = sum over groups of partial[model][group][n], in the order of the groups; `total` is models * n.
KERNEL sum_gradients(const double* __restrict__ partial, u32 groups, u32 n, u32 total, double* __restrict__ out) {
  u32 at = blockIdx.x * THREADS + threadIdx.x;
  if (at >= total) return;
  const double* own = partial + (size_t)(at / n) * groups * n + at % n;
  double sum = 0;
  for (u32 group = 0; group < groups; group++) sum = sum + own[(size_t)group * n];
  out[at] = sum;
}

// The metric g = softplus(z) + 0.1 of network outputs: root = sqrt(g), slope = d root / d z.
KERNEL metric_roots(const double* __restrict__ z, u32 count, double* __restrict__ root, double* __restrict__ slope) {
  u32 at = blockIdx.x * THREADS + threadIdx.x;
  if (at >= count) return;
  double own = z[at], value = sqrt((own > 0 ? own : 0) + log1p(exp(-fabs(own))) + 0.1);
  root[at] = value;
  slope[at] = 1.0 / (1.0 + exp(-own)) / (2.0 * value);
}

// Features of each pair of break points and wavelength, [model][pair][wavelength]: signed length, mean of c over time, largest and initial
// velocity, one array of `total` after the other. root[model][place][wavelength]; places are the nodes of all intervals, then the break points;
// points[model][place] is c, weights[model][node] the rule. `lowest` is the place of the least root on the path.
KERNEL path_features(const double* __restrict__ root, const double* __restrict__ points, const double* __restrict__ weights, const u32* __restrict__ pairs, u32 pair_count,
                     u32 wavelengths, u32 nodes, u32 intervals, u32 total, double* __restrict__ features, u32* __restrict__ lowest) {
  u32 at = blockIdx.x * THREADS + threadIdx.x;
  if (at >= total) return;
  u32 wavelength = at % wavelengths, pair = at / wavelengths % pair_count, model = at / wavelengths / pair_count;
  u32 rule = nodes * intervals, places = rule + intervals + 1;
  root += (size_t)model * places * wavelengths + wavelength;
  points += (size_t)model * places;
  weights += (size_t)model * rule;
  u32 source = pairs[2 * pair], target = pairs[2 * pair + 1];
  u32 low = min(source, target), high = max(source, target), lowest_place = rule + low;
  double length = 0, moment = 0, least = root[(size_t)lowest_place * wavelengths];
  for (u32 node = low * nodes; node < high * nodes; node++) {
    double value = root[(size_t)node * wavelengths], part = weights[node] * value;
    length = length + part;
    moment = moment + part * points[node];
    if (value < least) least = value, lowest_place = node;
  }
  for (u32 end = rule + low + 1; end <= rule + high; end++) {
    double value = root[(size_t)end * wavelengths];
    if (value < least) least = value, lowest_place = end;
  }
  double signed_length = source < target ? length : -length;
  features[at] = signed_length;
  features[total + at] = moment / length;
  features[2 * total + at] = length / least;
  features[3 * total + at] = signed_length / root[(size_t)(rule + source) * wavelengths];
  lowest[at] = lowest_place;
}

// Gradient with respect to the network's outputs, [model][place][wavelength], of gradients with respect to the features: adjoint holds those of
// path length, mean and largest velocity, one array of `total` after the other. `count` is models * places * wavelengths.
KERNEL path_adjoint(const double* __restrict__ slope, const double* __restrict__ points, const double* __restrict__ weights, const u32* __restrict__ pairs, u32 pair_count,
                    u32 wavelengths, u32 nodes, u32 intervals, u32 total, const double* __restrict__ features, const u32* __restrict__ lowest,
                    const double* __restrict__ adjoint, u32 count, double* __restrict__ out) {
  u32 at = blockIdx.x * THREADS + threadIdx.x;
  if (at >= count) return;
  u32 rule = nodes * intervals, places = rule + intervals + 1;
  u32 wavelength = at % wavelengths, place = at / wavelengths % places, model = at / wavelengths / places;
  double along = 0, bottom = 0, c = points[(size_t)model * places + place];
  for (u32 pair = 0; pair < pair_count; pair++) {
    u32 entry = (model * pair_count + pair) * wavelengths + wavelength;
    u32 low = min(pairs[2 * pair], pairs[2 * pair + 1]), high = max(pairs[2 * pair], pairs[2 * pair + 1]);
    double length = fabs(features[entry]), mean = features[total + entry], inverse = features[2 * total + entry] / length;
    double to_mean = adjoint[total + entry] / length, to_velocity = adjoint[2 * total + entry];
    if (place < rule && low * nodes <= place && place < high * nodes) along = along + (adjoint[entry] + to_velocity * inverse + to_mean * (c - mean));
    if (lowest[entry] == place) bottom = bottom - to_velocity * length * inverse * inverse;
  }
  double weight = place < rule ? weights[(size_t)model * rule + place] : 0;
  out[at] = (weight * along + bottom) * slope[at];
}

CUDA_HOST_KERNEL(network_values)
CUDA_HOST_KERNEL(network_gradient)
CUDA_HOST_KERNEL(sum_gradients)
CUDA_HOST_KERNEL(metric_roots)
CUDA_HOST_KERNEL(path_features)
CUDA_HOST_KERNEL(path_adjoint)
