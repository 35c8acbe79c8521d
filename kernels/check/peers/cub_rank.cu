// Full ranking by CUB, for comparison: the same stable sort of (key, slot) pairs by 31 bits. The input is in id order, so that ties
// stay ordered by id. Temporary memory is allocated outside of the timed section.
//
//   cub_rank KEYS SLOTS ORDER DEVICE REPEATS     files of u32, little-endian; prints milliseconds as JSON
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cub/device/device_radix_sort.cuh>
#include <vector>

static void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(error));
  exit(1);
}
#define CHECK(call) check(call, #call)

static std::vector<uint32_t> read(const char* path) {
  FILE* file = fopen(path, "rb");
  if (!file) { perror(path); exit(1); }
  fseek(file, 0, SEEK_END);
  std::vector<uint32_t> values((size_t)ftell(file) / sizeof(uint32_t));
  rewind(file);
  if (fread(values.data(), sizeof(uint32_t), values.size(), file) != values.size()) { perror(path); exit(1); }
  fclose(file);
  return values;
}

int main(int count, char** arguments) {
  constexpr int BITS = 31, WARM_UP = 3, ENOUGH = 20;
  if (count != 6) {
    fprintf(stderr, "cub_rank KEYS SLOTS ORDER DEVICE REPEATS\n");
    return 2;
  }
  std::vector<uint32_t> keys = read(arguments[1]), slots = read(arguments[2]);
  if (keys.size() != slots.size() || keys.empty()) {
    fprintf(stderr, "at least one key and as many slots are required\n");
    return 1;
  }
  CHECK(cudaSetDevice(atoi(arguments[4])));
  const size_t repeats = (size_t)std::max(1, atoi(arguments[5])), bytes = keys.size() * sizeof(uint32_t);
  uint32_t *keys_in, *keys_out, *slots_in, *slots_out;
  CHECK(cudaMalloc(&keys_in, bytes));
  CHECK(cudaMalloc(&keys_out, bytes));
  CHECK(cudaMalloc(&slots_in, bytes));
  CHECK(cudaMalloc(&slots_out, bytes));
  CHECK(cudaMemcpy(keys_in, keys.data(), bytes, cudaMemcpyHostToDevice));
  CHECK(cudaMemcpy(slots_in, slots.data(), bytes, cudaMemcpyHostToDevice));
  void* temporary = nullptr;
  size_t size = 0;
  auto sort = [&] {
    CHECK(cub::DeviceRadixSort::SortPairs(temporary, size, keys_in, keys_out, slots_in, slots_out, (int64_t)keys.size(), 0, BITS));
  };
  sort();  // returns the size of the temporary memory
  CHECK(cudaMalloc(&temporary, size));
  for (int run = 0; run < WARM_UP; run++) sort();
  CHECK(cudaDeviceSynchronize());

  cudaEvent_t begin, end;
  CHECK(cudaEventCreate(&begin));
  CHECK(cudaEventCreate(&end));
  std::vector<float> took;
  const auto started = std::chrono::steady_clock::now();
  auto long_enough = [&] { return std::chrono::steady_clock::now() - started >= std::chrono::seconds(1); };
  while (took.size() < repeats && (took.size() < ENOUGH || !long_enough())) {
    CHECK(cudaEventRecord(begin));
    sort();
    CHECK(cudaEventRecord(end));
    CHECK(cudaEventSynchronize(end));
    float milliseconds = 0;
    CHECK(cudaEventElapsedTime(&milliseconds, begin, end));
    took.push_back(milliseconds);
  }
  CHECK(cudaMemcpy(slots.data(), slots_out, bytes, cudaMemcpyDeviceToHost));
  FILE* file = fopen(arguments[3], "wb");
  if (!file || fwrite(slots.data(), sizeof(uint32_t), slots.size(), file) != slots.size() || fclose(file)) {
    perror(arguments[3]);
    return 1;
  }
  std::sort(took.begin(), took.end());
  printf("{\"best\": %.6f, \"median\": %.6f, \"repeats\": %zu}\n", took[0], took[took.size() / 2], took.size());
}
