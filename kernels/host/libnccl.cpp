// Emulated NCCL (libnccl.so.2): the entry points that src/gpu/nccl.rs uses, between threads of one process with GPUs of the emulated driver.
// It adds in the reverse order of the ranks: nothing may rely on an order.
//
//   NCCL_HOST_VERSION=22000
//   NCCL_HOST_FAIL=call:n:code    the n-th call of that name returns the code
#include <array>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#define API extern "C" __attribute__((visibility("default"))) int

// Of the emulated driver: enqueues work on a stream, which returns NOT_READY until it is done.
extern "C" int cuHostEnqueue(void* stream, int (*work)(void*), void* argument);

namespace {

enum : int { SUCCESS = 0, INVALID_ARGUMENT = 4, INVALID_USAGE = 5, REMOTE_ERROR = 6, IN_PROGRESS = 7 };
constexpr int NOT_READY = 600;

struct Id { char bytes[128]; };
using Key = std::array<char, 128>;
// The sums of a communicator: those that a rank has not yet contributed to are incomplete.
struct Sum {
  std::vector<std::vector<float>> parts;
  int contributed = 0;
};
struct Group {
  int ranks, joined = 0;
  bool aborted = false;
  std::map<uint64_t, Sum> sums;
};
struct Comm {
  std::shared_ptr<Group> group;
  int rank;
  uint64_t next = 0;
};
struct Call {
  std::shared_ptr<Group> group;
  int rank;
  uint64_t number;
  const float* from;
  float* to;
  size_t count;
  bool is_sent = false;
};
struct Config { size_t size; unsigned magic, version; int blocking; };

std::mutex one;
std::map<Key, std::shared_ptr<Group>> groups;

int planned(const char* call) {
  static const std::string plan = getenv("NCCL_HOST_FAIL") ? getenv("NCCL_HOST_FAIL") : "";
  static long seen = 0;
  const size_t first = plan.find(':'), second = plan.find(':', first + 1);
  if (second == std::string::npos || plan.substr(0, first) != call) return SUCCESS;
  return ++seen == atol(plan.c_str() + first + 1) ? atoi(plan.c_str() + second + 1) : SUCCESS;
}
#define ENTER std::lock_guard<std::mutex> lock(one); if (int code = planned(__func__)) return code

int run(void* argument) {
  std::lock_guard<std::mutex> lock(one);
  auto* call = (Call*)argument;
  // Like kernels of an aborted communicator.
  if (call->group->aborted) {
    delete call;
    return 0;
  }
  Sum& sum = call->group->sums[call->number];
  if (!call->is_sent) {
    sum.parts.resize(call->group->ranks);
    sum.parts[call->rank].assign(call->from, call->from + call->count);
    sum.contributed++;
    call->is_sent = true;
  }
  if (sum.contributed < call->group->ranks) return NOT_READY;
  for (size_t at = 0; at < call->count; at++) {
    float total = 0;
    for (int rank = call->group->ranks; rank-- > 0;) total += sum.parts[rank][at];
    call->to[at] = total;
  }
  delete call;
  return 0;
}

}  // namespace

API ncclGetVersion(int* version) {
  const char* text = getenv("NCCL_HOST_VERSION");
  *version = text ? atoi(text) : 22000;
  return SUCCESS;
}
API ncclGetUniqueId(Id* id) {
  ENTER;
  static char number = 0;
  memset(id->bytes, ++number, sizeof id->bytes);
  return SUCCESS;
}
API ncclCommInitRankConfig(Comm** out, int ranks, Id id, int rank, Config* config) {
  ENTER;
  if (config->size != sizeof(Config) || config->magic != 0xcafebeef || config->version < 21400 || config->blocking) return INVALID_ARGUMENT;
  if (rank < 0 || rank >= ranks) return INVALID_ARGUMENT;
  Key key;
  memcpy(key.data(), id.bytes, key.size());
  auto& group = groups[key];
  if (!group) group = std::make_shared<Group>(Group{ranks, 0, false, {}});
  group->joined++;
  *out = new Comm{group, rank};
  return IN_PROGRESS;
}
API ncclCommGetAsyncError(Comm* comm, int* state) {
  ENTER;
  *state = comm->group->aborted ? REMOTE_ERROR : comm->group->joined < comm->group->ranks ? IN_PROGRESS : SUCCESS;
  return SUCCESS;
}
static int prepare(const void* from, void* to, size_t count, int type, int operation, Comm* comm, Call** call) {
  std::lock_guard<std::mutex> lock(one);
  if (int code = planned("ncclAllReduce")) return code;
  if (type != 7 || operation != 0) return INVALID_ARGUMENT;
  if (comm->group->joined < comm->group->ranks) return INVALID_USAGE;
  *call = new Call{comm->group, comm->rank, comm->next++, (const float*)from, (float*)to, count};
  return SUCCESS;
}
API ncclAllReduce(const void* from, void* to, size_t count, int type, int operation, Comm* comm, void* stream) {
  Call* call = nullptr;
  if (int code = prepare(from, to, count, type, operation, comm, &call)) return code;
  // Without the lock: the driver holds its own one while it runs the work.
  return cuHostEnqueue(stream, run, call);
}
API ncclCommAbort(Comm* comm) {
  ENTER;
  comm->group->aborted = true;
  delete comm;
  return SUCCESS;
}
