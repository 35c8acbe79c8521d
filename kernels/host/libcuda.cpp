// Emulated CUDA driver (libcuda.so.1): the entry points that src/gpu/cuda.rs uses through cudarc, with the kernels on the CPU. A test
// re-executes itself with this library on its path.
//
// Streams are LAZY on purpose: work runs when the host waits for it or queries it, so that a missing wait reads stale
// data. Copies are bounds-checked, images are validated like by a driver, and fresh memory has a pattern. While a stream captures,
// its calls are recorded in the graph and run only with it; a query invalidates the capture.
//
//   CUDA_HOST_DEVICES=1  CUDA_HOST_CAPABILITY=90  CUDA_HOST_DRIVER=13000
//   CUDA_HOST_MEMORY_MIB=4096     of every device, or of each: 4096,16
//   CUDA_HOST_FAIL=call:n:code    the n-th call of that name returns the code; a kernel's code (700 to 719, 214) appears when its stream
//                                 runs, and every later call of the context returns it too; call:n:code:1 counts calls of device 1
#include "cuda_host.h"
#include <chrono>
#include <cstdlib>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <vector>

#define API extern "C" __attribute__((visibility("default"))) int

namespace {

enum : int {
  INVALID_VALUE = 1,
  OUT_OF_MEMORY = 2,
  NOT_INITIALIZED = 3,
  NO_DEVICE = 100,
  INVALID_DEVICE = 101,
  INVALID_IMAGE = 200,
  INVALID_CONTEXT = 201,
  NO_BINARY_FOR_GPU = 209,
  DEVICE_UNUSABLE = 214,
  UNSUPPORTED_PTX_VERSION = 222,
  INVALID_HANDLE = 400,
  NOT_FOUND = 500,
  NOT_READY = 600,
  CAPTURE_UNSUPPORTED = 900,
  CAPTURE_INVALIDATED = 901,
};
constexpr unsigned BLOCK_LIMIT = 1024;

using Address = uint64_t;
using Work = std::function<int()>;
struct Context;
struct Graph {
  std::vector<Work> works;
  bool spoiled = false;
};
struct Stream {
  Context* context;
  std::deque<Work> queue;
  Graph* capturing = nullptr;
};
// The work that an event was last recorded for.
struct Record {
  Stream* stream;
  bool reached = false;
  std::chrono::steady_clock::time_point at;
};
struct Event {
  Context* context;
  std::shared_ptr<Record> last;
};
struct Module;
struct Function { const shim::Kernel* kernel; Module* module; };
struct Module {
  Context* context;
  std::vector<std::unique_ptr<Function>> functions;
};
struct Context {
  int device = 0;
  int references = 0;
  int error = 0;  // sticky
  std::set<Stream*> streams;
  std::set<Module*> modules;
};
struct Memory { size_t size; Context* context; };

std::recursive_mutex one;
std::map<Address, Memory> allocated;
std::map<Address, size_t> pinned;
std::map<int, Context*> primary;
std::map<int, size_t> used;
std::set<int> lost;
thread_local Context* bound;
bool initialized;

long setting(const char* name, long otherwise) {
  const char* text = getenv(name);
  return text ? atol(text) : otherwise;
}
int devices() { return (int)setting("CUDA_HOST_DEVICES", 1); }
unsigned capability() { return (unsigned)setting("CUDA_HOST_CAPABILITY", 90); }
int driver() { return (int)setting("CUDA_HOST_DRIVER", 13000); }
size_t memory(int device) {
  const char* text = getenv("CUDA_HOST_MEMORY_MIB");
  for (const char* next; text && device > 0 && (next = strchr(text, ',')); device--) text = next + 1;
  return (size_t)(text ? atol(text) : 4096) << 20;
}

bool is_sticky(int code) { return code == DEVICE_UNUSABLE || (code >= 700 && code <= 719); }

bool is_context(Context* context) {
  for (auto& [device, own] : primary)
    if (own == context) return true;
  return false;
}

int planned(const char* call) {
  static const std::string plan = getenv("CUDA_HOST_FAIL") ? getenv("CUDA_HOST_FAIL") : "";
  static long seen = 0;
  size_t first = plan.find(':'), second = plan.find(':', first + 1), third = plan.find(':', second + 1);
  if (second != std::string::npos && third != std::string::npos)
    if (!is_context(bound) || bound->device != atoi(plan.c_str() + third + 1)) return 0;
  std::string name = call;
  if (name.size() > 3 && name.compare(name.size() - 3, 3, "_v2") == 0) name.resize(name.size() - 3);
  if (second == std::string::npos || plan.substr(0, first) != name) return 0;
  return ++seen == atol(plan.c_str() + first + 1) ? atoi(plan.c_str() + second + 1) : 0;
}

int poison(Context* context, int code) {
  if (is_sticky(code) && !context->error) context->error = code;
  if (code == DEVICE_UNUSABLE) lost.insert(context->device);
  return code;
}

int enter(const char* call, bool in_context) {
  if (!initialized) return NOT_INITIALIZED;
  if (in_context && !is_context(bound)) return INVALID_CONTEXT;
  if (in_context && bound->error) return bound->error;
  int code = planned(call);
  return code && in_context ? poison(bound, code) : code;
}
#define LOCK std::lock_guard<std::recursive_mutex> lock(one)
#define DRIVER LOCK; if (int code = enter(__func__, false)) return code
#define CONTEXT LOCK; if (int code = enter(__func__, true)) return code

int run_one(Stream* stream) {
  Work work = std::move(stream->queue.front());
  stream->queue.pop_front();
  const int code = work();
  if (code == NOT_READY) {  // It waits for another GPU.
    stream->queue.push_front(std::move(work));
    return 0;
  }
  return poison(stream->context, code);
}
int run_all(Stream* stream) {
  while (!stream->context->error && !stream->queue.empty()) run_one(stream);
  return stream->context->error;
}
int push(void* stream, Work work) {
  auto* own = (Stream*)stream;
  if (own->capturing) own->capturing->works.push_back(std::move(work));
  else own->queue.push_back(std::move(work));
  return 0;
}
// Calls that cannot be part of a graph, or that wait for work that was not enqueued.
bool spoils(void* stream) {
  auto* own = (Stream*)stream;
  if (own->capturing) own->capturing->spoiled = true;
  return own->capturing != nullptr;
}

template <class Map, class Size> bool is_inside(const Map& map, Address at, size_t length, Size size) {
  auto next = map.upper_bound(at);
  if (next == map.begin()) return false;
  --next;
  return at + length <= next->first + size(next->second);
}
bool on_device(Address at, size_t length) { return is_inside(allocated, at, length, [](const Memory& own) { return own.size; }); }
bool is_pinned(const void* at, size_t length) { return is_inside(pinned, (Address)at, length, [](size_t size) { return size; }); }
int outside(const char* call) {
  fprintf(stderr, "libcuda: %s outside of any allocation\n", call);
  return INVALID_VALUE;
}

// Images that a driver accepts: code of the device's major version up to its minor one, or PTX that is not newer than the driver.
template <class T> T read(const char* from, size_t offset) {
  T value;
  memcpy(&value, from + offset, sizeof value);
  return value;
}
int check_image(const char* image) {
  constexpr unsigned MAGIC = 0xBA55ED50;
  constexpr int PTX = 1, CODE = 2;
  if (read<uint32_t>(image, 0) != MAGIC || read<uint16_t>(image, 6) != 16) return INVALID_IMAGE;
  const uint64_t end = 16 + read<uint64_t>(image, 8);
  int best = NO_BINARY_FOR_GPU;
  for (uint64_t at = 16; at < end;) {
    const int kind = read<uint16_t>(image, at), minor = read<uint16_t>(image, at + 24), major = read<uint16_t>(image, at + 26);
    const unsigned header = read<uint32_t>(image, at + 4), architecture = read<uint32_t>(image, at + 28);
    const uint64_t size = read<uint64_t>(image, at + 8);
    if (header < 64 || at + header + size > end) return INVALID_IMAGE;
    if (kind == CODE && architecture / 10 == capability() / 10 && architecture <= capability()) return 0;
    if (kind == PTX && architecture <= capability()) {
      const int newest = driver() >= 13000 ? 90 : 88;
      best = major * 10 + minor > newest ? UNSUPPORTED_PTX_VERSION : 0;
    }
    at += header + size;
  }
  return best;
}

}  // namespace

API cuInit(unsigned) {
  LOCK;
  if (devices() == 0) return NO_DEVICE;
  initialized = true;
  return planned(__func__);
}
API cuDriverGetVersion(int* version) { *version = driver(); return 0; }
API cuDeviceGetCount(int* count) { DRIVER; *count = devices(); return 0; }
API cuDeviceGet(int* device, int ordinal) {
  DRIVER;
  if (ordinal < 0 || ordinal >= devices()) return INVALID_DEVICE;
  *device = ordinal;
  return 0;
}
API cuDeviceGetName(char* name, int size, int device) { DRIVER; snprintf(name, size, "emulated %d", device); return 0; }
API cuDeviceGetUuid_v2(char* uuid, int device) { DRIVER; memset(uuid, 0xE0 + device, 16); return 0; }
API cuDeviceGetAttribute(int* value, int attribute, int) {
  DRIVER;
  constexpr int MAJOR = 75, MINOR = 76, POOLS = 115;
  *value = attribute == MAJOR ? (int)capability() / 10 : attribute == MINOR ? (int)capability() % 10 : attribute == POOLS;
  return 0;
}
API cuDevicePrimaryCtxRetain(void** out, int device) {
  DRIVER;
  if (lost.count(device)) return DEVICE_UNUSABLE;
  Context*& own = primary[device];
  if (!own) own = new Context;
  own->device = device;
  own->references++;
  *out = own;
  return 0;
}
API cuDevicePrimaryCtxRelease_v2(int device) {
  DRIVER;
  Context* own = primary[device];
  if (!own) return INVALID_CONTEXT;
  if (--own->references > 0) return 0;
  for (auto at = allocated.begin(); at != allocated.end();) {
    if (at->second.context != own) {
      ++at;
      continue;
    }
    used[device] -= at->second.size;
    free((void*)at->first);
    at = allocated.erase(at);
  }
  for (Stream* stream : own->streams) delete stream;
  for (Module* module : own->modules) delete module;
  primary.erase(device);
  delete own;
  return 0;
}
API cuCtxSetCurrent(void* context) { DRIVER; bound = (Context*)context; return 0; }
API cuCtxGetCurrent(void** context) { DRIVER; *context = is_context(bound) ? bound : nullptr; return 0; }
API cuCtxSynchronize() {
  CONTEXT;
  for (Stream* stream : bound->streams) run_all(stream);
  return bound->error;
}

API cuDeviceGetDefaultMemPool(void** pool, int) { DRIVER; static char any; *pool = &any; return 0; }
API cuMemPoolSetAttribute(void*, int, void*) { DRIVER; return 0; }
API cuMemGetInfo_v2(size_t* free, size_t* all) { CONTEXT; *all = memory(bound->device); *free = *all - used[bound->device]; return 0; }
API cuMemAllocAsync(Address* out, size_t size, void* stream) {
  CONTEXT;
  if (size == 0) return INVALID_VALUE;
  if (spoils(stream)) return CAPTURE_UNSUPPORTED;
  const size_t own = memory(bound->device);
  if (used[bound->device] + size > own) run_all((Stream*)stream);  // runs earlier frees
  if (used[bound->device] + size > own) return OUT_OF_MEMORY;
  void* data = nullptr;
  if (posix_memalign(&data, 256, size)) return OUT_OF_MEMORY;
  memset(data, 0xA5, size);
  allocated[(Address)data] = {size, bound};
  used[bound->device] += size;
  *out = (Address)data;
  return 0;
}
API cuMemFreeAsync(Address address, void* stream) {
  CONTEXT;
  return push(stream, [address] {
    auto found = allocated.find(address);
    if (found == allocated.end()) return outside("a free");
    used[found->second.context->device] -= found->second.size;
    allocated.erase(found);
    free((void*)address);
    return 0;
  });
}
API cuMemHostAlloc(void** out, size_t size, unsigned) {
  CONTEXT;
  if (posix_memalign(out, 4096, size)) return OUT_OF_MEMORY;
  memset(*out, 0x5A, size);
  pinned[(Address)*out] = size;
  return 0;
}
API cuMemFreeHost(void* address) {
  LOCK;
  if (!pinned.erase((Address)address)) return INVALID_VALUE;
  free(address);
  return 0;
}
API cuMemcpyHtoDAsync_v2(Address to, const void* from, size_t size, void* stream) {
  CONTEXT;
  if (!on_device(to, size)) return outside(__func__);
  if (is_pinned(from, size)) return push(stream, [=] { memcpy((void*)to, from, size); return 0; });
  if (spoils(stream)) return CAPTURE_UNSUPPORTED;
  std::string staged((const char*)from, size);  // like a driver with pageable memory
  return push(stream, [to, staged] { memcpy((void*)to, staged.data(), staged.size()); return 0; });
}
API cuMemcpyDtoHAsync_v2(void* to, Address from, size_t size, void* stream) {
  CONTEXT;
  if (!on_device(from, size)) return outside(__func__);
  if (!is_pinned(to, size) && spoils(stream)) return CAPTURE_UNSUPPORTED;
  push(stream, [=] { memcpy(to, (void*)from, size); return 0; });
  return is_pinned(to, size) ? 0 : run_all((Stream*)stream);
}
API cuMemcpyDtoDAsync_v2(Address to, Address from, size_t size, void* stream) {
  CONTEXT;
  if (!on_device(to, size) || !on_device(from, size)) return outside(__func__);
  return push(stream, [=] { memcpy((void*)to, (void*)from, size); return 0; });
}
API cuMemsetD8Async(Address to, unsigned char byte, size_t size, void* stream) {
  CONTEXT;
  if (!on_device(to, size)) return outside(__func__);
  return push(stream, [=] { memset((void*)to, byte, size); return 0; });
}

API cuStreamCreate(void** out, unsigned) {
  CONTEXT;
  auto* stream = new Stream{bound, {}, nullptr};
  bound->streams.insert(stream);
  *out = stream;
  return 0;
}
API cuStreamDestroy_v2(void* stream) {
  LOCK;
  for (auto& [device, own] : primary) {
    if (!own->streams.erase((Stream*)stream)) continue;
    run_all((Stream*)stream);
    delete (Stream*)stream;
    return 0;
  }
  return INVALID_HANDLE;
}
API cuStreamSynchronize(void* stream) { CONTEXT; return spoils(stream) ? CAPTURE_UNSUPPORTED : run_all((Stream*)stream); }
// A query makes progress: one piece of work per call.
API cuStreamQuery(void* stream) {
  CONTEXT;
  if (spoils(stream)) return CAPTURE_UNSUPPORTED;
  auto* own = (Stream*)stream;
  if (!own->queue.empty())
    if (int code = run_one(own)) return code;
  return own->queue.empty() ? 0 : NOT_READY;
}

API cuStreamBeginCapture_v2(void* stream, int) {
  CONTEXT;
  auto* own = (Stream*)stream;
  if (own->capturing) return INVALID_VALUE;
  own->capturing = new Graph;
  return 0;
}
API cuStreamEndCapture(void* stream, void** out) {
  CONTEXT;
  auto* own = (Stream*)stream;
  if (!own->capturing) return INVALID_VALUE;
  std::unique_ptr<Graph> graph(own->capturing);
  own->capturing = nullptr;
  if (graph->spoiled) return CAPTURE_INVALIDATED;
  *out = graph.release();
  return 0;
}
API cuGraphInstantiateWithFlags(void** out, void* graph, unsigned long long) { CONTEXT; *out = new Graph(*(Graph*)graph); return 0; }
API cuGraphLaunch(void* executable, void* stream) {
  CONTEXT;
  for (const Work& work : ((Graph*)executable)->works) push(stream, work);
  return 0;
}
API cuGraphDestroy(void* graph) { LOCK; delete (Graph*)graph; return 0; }
API cuGraphExecDestroy(void* executable) { LOCK; delete (Graph*)executable; return 0; }

API cuEventCreate(void** out, unsigned) { CONTEXT; *out = new Event{bound, nullptr}; return 0; }
API cuEventDestroy_v2(void* event) { LOCK; delete (Event*)event; return 0; }
API cuEventRecord(void* event, void* stream) {
  CONTEXT;
  auto* own = (Event*)event;
  if (own->context != bound || ((Stream*)stream)->context != bound) return INVALID_HANDLE;
  own->last = std::make_shared<Record>(Record{(Stream*)stream, false, {}});
  return push(stream, [record = own->last] {
    record->reached = true;
    record->at = std::chrono::steady_clock::now();
    return 0;
  });
}
// A query makes progress, as with a stream.
API cuEventQuery(void* event) {
  CONTEXT;
  auto record = ((Event*)event)->last;
  if (!record || record->reached) return 0;
  if (int code = run_one(record->stream)) return code;
  return record->reached ? 0 : NOT_READY;
}
API cuEventElapsedTime_v2(float* milliseconds, void* from, void* to) {
  CONTEXT;
  auto begin = ((Event*)from)->last, end = ((Event*)to)->last;
  if (!begin || !end) return INVALID_HANDLE;
  if (!begin->reached || !end->reached) return NOT_READY;
  *milliseconds = std::chrono::duration<float, std::milli>(end->at - begin->at).count();
  return 0;
}

API cuModuleLoadData(void** out, const void* image) {
  CONTEXT;
  if (int code = check_image((const char*)image)) return code;
  auto* module = new Module{bound, {}};
  bound->modules.insert(module);
  *out = module;
  return 0;
}
API cuModuleUnload(void* module) {
  CONTEXT;
  if (!bound->modules.erase((Module*)module)) return INVALID_HANDLE;
  delete (Module*)module;
  return 0;
}
API cuModuleGetFunction(void** out, void* module, const char* name) {
  CONTEXT;
  const shim::Kernel* kernel = shim::find(name);
  if (!kernel) return NOT_FOUND;
  auto& functions = ((Module*)module)->functions;
  functions.push_back(std::make_unique<Function>(Function{kernel, (Module*)module}));
  *out = functions.back().get();
  return 0;
}
API cuFuncLoad(void*) { CONTEXT; return 0; }
API cuLaunchKernel(void* function, unsigned blocks, unsigned y, unsigned z, unsigned threads, unsigned, unsigned, unsigned shared, void* stream, void** arguments, void**) {
  LOCK;
  // A kernel's failure appears when it runs, any other one at the call.
  int code = planned(__func__);
  if (code && !is_sticky(code)) return code;
  if (int error = enter("", true)) return error;
  auto* own = (Function*)function;
  if (own->module->context != bound || ((Stream*)stream)->context != bound) return INVALID_HANDLE;
  if (!blocks || y != 1 || z != 1 || !threads || threads > BLOCK_LIMIT || shared) return INVALID_VALUE;
  // The driver copies the arguments.
  struct Call {
    const shim::Kernel* kernel;
    std::vector<uint64_t> values;
  };
  auto call = std::make_shared<Call>(Call{own->kernel, std::vector<uint64_t>(own->kernel->signature.size())});
  for (size_t i = 0; i < call->values.size(); i++) {
    const char letter = own->kernel->signature[i];
    memcpy(&call->values[i], arguments[i], letter == 'p' || letter == '8' ? 8 : 4);
  }
  return push(stream, [=] {
    if (code) return code;
    auto body = [](void* context) {
      auto* own = (Call*)context;
      std::vector<void*> pointers;
      for (uint64_t& value : own->values) pointers.push_back(&value);
      own->kernel->call(pointers.data());
    };
    shim::launch(blocks, threads, body, call.get());
    return 0;
  });
}

// Not a call of drivers: for the emulated NCCL. The work returns NOT_READY until it is done.
API cuHostEnqueue(void* stream, int (*work)(void*), void* argument) { CONTEXT; return push(stream, [=] { return work(argument); }); }

API cuGetErrorName(int, const char** name) { *name = "error of the emulated driver"; return 0; }
API cuGetErrorString(int, const char** text) { *text = "error of the emulated driver"; return 0; }
