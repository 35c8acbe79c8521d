// Stands in for cub_rank where there is no nvcc: the same files, the same order, by the standard library. WRONG turns ties round.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <numeric>
#include <vector>

static std::vector<uint32_t> read(const char* path) {
  std::ifstream file(path, std::ios::binary);
  std::vector<char> bytes{std::istreambuf_iterator<char>(file), {}};
  return {(const uint32_t*)bytes.data(), (const uint32_t*)(bytes.data() + bytes.size())};
}

int main(int, char** arguments) {
  auto keys = read(arguments[1]), slots = read(arguments[2]);
  std::vector<uint32_t> order(keys.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](uint32_t a, uint32_t b) { return keys[a] < keys[b]; });
  for (uint32_t& place : order) place = slots[place];
  if (getenv("WRONG")) std::swap(order.front(), order.back());
  std::ofstream(arguments[3], std::ios::binary).write((const char*)order.data(), order.size() * 4);
  printf("{\"best\": 1.5, \"median\": 2.5, \"repeats\": 3}\n");
}
