// A driver for tests: reads commands from standard input, runs kernels on the CPU, writes responses to standard output. An error ends it, with
// the reason on standard error. tests/host/mod.rs is the client.
//
// Every command is one byte and its operands, integers little-endian u64:
//   A bytes                         allocates; buffers are numbered from 0. Fresh memory has a non-zero pattern
//   F buffer                        frees
//   U buffer offset length data     copies to it
//   D buffer offset length          copies from it: the response is the data
//   C from to length                copies between two buffers
//   S buffer offset length byte     fills
//   W                               waits: the response is one byte
//   L length name blocks count, then for each argument: a letter (p 4 8 f, n for a null pointer), value (p: buffer), offset (p only)
#include "cuda_host.h"
#include <cstdlib>
#include <memory>
#include <vector>

namespace {

constexpr unsigned THREADS = 256;
constexpr size_t ALIGNMENT = 256;  // of cudaMalloc
constexpr char FRESH = (char)0xA5;

[[noreturn]] void refuse(const char* what, const char* detail = "") {
  fprintf(stderr, "serve: %s %s\n", what, detail);
  abort();
}

void read(void* to, size_t length) {
  if (fread(to, 1, length, stdin) != length) refuse("truncated command");
}
uint64_t read_number() {
  uint64_t value;
  read(&value, sizeof value);
  return value;
}

// A separate heap allocation, so that AddressSanitizer detects every access beyond it.
struct Buffer {
  struct Free {
    void operator()(char* data) const { free(data); }
  };
  std::unique_ptr<char, Free> data;
  size_t size = 0;
};
std::vector<Buffer> buffers;

Buffer& buffer(uint64_t number) {
  if (number >= buffers.size() || !buffers[number].data) refuse("no such buffer");
  return buffers[number];
}
char* range(uint64_t number, uint64_t offset, uint64_t length) {
  Buffer& found = buffer(number);
  if (offset > found.size || length > found.size - offset) refuse("copy outside of its buffer");
  return found.data.get() + offset;
}

void allocate() {
  uint64_t size = read_number();
  void* data = nullptr;
  if (posix_memalign(&data, ALIGNMENT, size)) refuse("out of memory");
  memset(data, FRESH, size);
  Buffer& fresh = buffers.emplace_back();
  fresh.data.reset((char*)data);
  fresh.size = size;
}

void launch() {
  std::string name(read_number(), 0);
  read(name.data(), name.size());
  uint64_t blocks = read_number(), count = read_number();
  const shim::Kernel* kernel = shim::find(name.c_str());
  if (!kernel) refuse("unknown kernel", name.c_str());
  std::vector<uint64_t> values(count);
  std::vector<void*> arguments(count);
  std::string signature;
  for (uint64_t i = 0; i < count; i++) {
    char letter;
    read(&letter, 1);
    values[i] = read_number();
    if (letter == 'p') values[i] = (uint64_t)range(values[i], read_number(), 0);
    signature += letter == 'n' ? 'p' : letter;
    arguments[i] = &values[i];
  }
  if (signature != kernel->signature) refuse("argument mismatch for", (name + ": " + signature + " for " + kernel->signature).c_str());
  if (blocks == 0 || blocks > 0x7fffffff) refuse("invalid grid for", name.c_str());
  struct Call {
    const shim::Kernel* kernel;
    void** arguments;
  } call = {kernel, arguments.data()};
  auto body = [](void* context) {
    auto* own = (Call*)context;
    own->kernel->call(own->arguments);
  };
  shim::launch((unsigned)blocks, THREADS, body, &call);
}

}  // namespace

int main() {
  for (int command; (command = getchar()) != EOF;) {
    if (command == 'A') {
      allocate();
    } else if (command == 'F') {
      buffer(read_number()).data.reset();
    } else if (command == 'U') {
      uint64_t number = read_number(), offset = read_number(), length = read_number();
      read(range(number, offset, length), length);
    } else if (command == 'D') {
      uint64_t number = read_number(), offset = read_number(), length = read_number();
      fwrite(range(number, offset, length), 1, length, stdout);
      if (fflush(stdout)) refuse("failed to write the response");
    } else if (command == 'C') {
      uint64_t from = read_number(), to = read_number(), length = read_number();
      memcpy(range(to, 0, length), range(from, 0, length), length);
    } else if (command == 'S') {
      uint64_t number = read_number(), offset = read_number(), length = read_number(), byte = read_number();
      memset(range(number, offset, length), (int)byte, length);
    } else if (command == 'W') {
      putchar('W');
      if (fflush(stdout)) refuse("failed to write the response");
    } else if (command == 'L') {
      launch();
    } else {
      refuse("unknown command");
    }
  }
}
