// Making, dividing and ending communicators: ncclGetUniqueId, ncclCommInitRank,
// ncclCommSplit, ncclCommShrink, ncclCommFinalize, ncclCommDestroy, ncclCommAbort.
#include <algorithm>
#include <csignal>
#include <cstring>
#include <set>
#include <sys/mman.h>
#include <thread>
#include <unistd.h>

#include "communicator.h"
#include "reduction.h"

namespace simgpu {
namespace {

// An id names the file of a segment, in the process that has called ncclGetUniqueId.
struct Id {
  char magic[8];
  int pid, file;
};

std::mutex& mutex() {
  static auto* made = new std::mutex;
  return *made;
}
std::map<ncclComm_t, Comm>& communicators() {
  static auto* made = new std::map<ncclComm_t, Comm>;
  return *made;
}
thread_local std::string last_error;
std::atomic<int> planned_end{ncclSuccess};

ncclComm_t add(const Comm& comm) {
  std::lock_guard<std::mutex> locked(mutex());
  auto handle = reinterpret_cast<ncclComm_t>(comm.get());
  communicators()[handle] = comm;
  return handle;
}

void remove(ncclComm_t handle) {
  std::lock_guard<std::mutex> locked(mutex());
  communicators().erase(handle);
}

// Tell the members a note, and wait for theirs. False if the communicator was aborted.
// Nothing else ends the wait, also not the death of a rank, as with NCCL.
bool exchange(Communicator& comm, const std::vector<int>& members, const Note& note) {
  uint64_t round = ++comm.round;
  comm.own_line().notes[round & 1] = note;
  comm.own_line().round = round;
  for (int rank : members)
    while (comm.segment->lines[rank].round < round) {
      if (comm.is_aborted) return false;
      usleep(100);
    }
  return true;
}

const Note& note_of(Communicator& comm, int rank) {
  return comm.segment->lines[rank].notes[comm.round & 1];
}

std::vector<int> all_ranks(int size) {
  std::vector<int> ranks;
  for (int rank = 0; rank < size; rank++) ranks.push_back(rank);
  return ranks;
}

Note own_note(int device) {
  Note note = {};
  note.unit = visible().at(device).index();
  note.pid = getpid();
  return note;
}

// Two ranks on one GPU are refused. NCCL compares the bus ids of the cards: some of its
// versions refuse two MIG devices of a card as well (SIMGPU_NCCL_NO_MIG).
ncclResult_t check_devices(Communicator& comm) {
  std::map<int, int> seen;
  for (int rank = 0; rank < comm.size; rank++) {
    int unit = note_of(comm, rank).unit, card = unit / (MOST_SLICES + 1);
    auto found = seen.emplace(is_set("SIMGPU_NCCL_NO_MIG") ? card : unit, rank);
    if (found.second) continue;
    char text[128];
    snprintf(text, sizeof text,
             "Duplicate GPU detected : rank %d and rank %d both on CUDA device %x000",
             found.first->second, rank, card + 1);
    return nccl_error(ncclInvalidUsage, text);
  }
  return ncclSuccess;
}

// Meet the other ranks in the segment. All ranks must call.
ncclResult_t connect(Communicator& comm) {
  if (!exchange(comm, all_ranks(comm.size), own_note(comm.device)))
    return nccl_error(ncclInternalError, "aborted while it was made");
  ncclResult_t error = check_devices(comm);
  // The second round: no rank closes what the others still read.
  exchange(comm, all_ranks(comm.size), own_note(comm.device));
  return error;
}

// Make a communicator over a segment, which it then owns. A communicator that is not
// blocking connects in a thread; ncclCommGetAsyncError says how that has ended.
ncclResult_t make(Segment* segment, int rank, int size, bool is_blocking,
                  ncclComm_t* made) {
  auto comm = std::make_shared<Communicator>();
  comm->rank = rank, comm->size = size;
  comm->device = current_device();
  comm->segment = segment;
  comm->is_blocking = is_blocking;
  if (!is_blocking) {
    comm->error = ncclInProgress;
    *made = add(comm);
    std::thread([comm] { comm->error = connect(*comm); }).detach();
    return ncclInProgress;
  }
  ncclResult_t error = connect(*comm);
  *made = error == ncclSuccess ? add(comm) : nullptr;
  return error;
}

bool wants_blocking(const ncclConfig_t* config, bool otherwise) {
  bool is_given = config && config->blocking != NCCL_CONFIG_UNDEF_INT;
  return is_given ? config->blocking != 0 : otherwise;
}

// Wait for the work that was queued, unless the communicator is released.
void drain(Communicator& comm) {
  uint64_t last = comm.queued;
  while (comm.turn < last && !comm.is_released() &&
         broken(comm.device) == cudaSuccess)
    usleep(100);
}

// Make a communicator of some of a communicator's ranks, in the order of the list. The
// first of them makes its segment. The members must call.
ncclResult_t derive(Communicator& from, const std::vector<int>& members,
                    const std::vector<int>& callers, bool is_blocking,
                    ncclComm_t* made) {
  bool leads = !members.empty() && members.front() == from.rank;
  Note note = own_note(from.device);
  note.file = leads ? make_segment_file() : -1;
  if (!exchange(from, callers, note))
    return nccl_error(ncclInternalError, "aborted while it was divided");
  *made = nullptr;
  ncclResult_t error = ncclSuccess;
  Segment* segment = nullptr;
  if (!members.empty()) {
    const Note& leader = note_of(from, members.front());
    segment = map_segment(leader.pid, leader.file);
  }
  if (!exchange(from, callers, note))  // all have mapped it
    error = nccl_error(ncclInternalError, "aborted while it was divided");
  if (leads) close(note.file);
  if (members.empty() || error != ncclSuccess) return error;
  if (!segment) return nccl_error(ncclSystemError, "a rank has died");
  auto own = std::find(members.begin(), members.end(), from.rank);
  return make(segment, int(own - members.begin()), int(members.size()), is_blocking,
              made);
}

}  // namespace

Communicator::~Communicator() {
  if (segment) munmap(segment, sizeof(Segment));
}

Comm comm_of(ncclComm_t handle) {
  std::lock_guard<std::mutex> locked(mutex());
  auto found = communicators().find(handle);
  return found == communicators().end() ? nullptr : found->second;
}

ncclResult_t nccl_error(ncclResult_t error, const std::string& text) {
  last_error = text;
  return error;
}

}  // namespace simgpu

using namespace simgpu;

SIMGPU_EXPORT ncclResult_t ncclGetVersion(int* version) {
  *version = NCCL_VERSION_CODE;
  return ncclSuccess;
}

// The process keeps the file: it cannot know when the last rank has come.
SIMGPU_EXPORT ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  Id made{"SIMNCCL", getpid(), make_segment_file()};
  if (made.file < 0) return nccl_error(ncclSystemError, "no memory");
  memset(id, 0, sizeof *id);
  memcpy(id, &made, sizeof made);
  return ncclSuccess;
}

SIMGPU_EXPORT ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int size,
                                                  ncclUniqueId id, int rank,
                                                  ncclConfig_t* config) {
  Id given;
  memcpy(&given, &id, sizeof given);
  *comm = nullptr;
  if (size < 1 || size > MOST_RANKS || rank < 0 || rank >= size)
    return nccl_error(ncclInvalidArgument, "a rank outside of the communicator");
  if (memcmp(given.magic, "SIMNCCL", 8) != 0)
    return nccl_error(ncclInvalidArgument, "no id of ncclGetUniqueId");
  if (entry_error() != cudaSuccess) return ncclUnhandledCudaError;
  int planned = planned_end.exchange(ncclSuccess);
  if (planned < 0) kill(getpid(), SIGKILL);
  if (planned > 0) return nccl_error(ncclResult_t(planned), "a planned error");
  Segment* segment = map_segment(given.pid, given.file);
  if (!segment) return nccl_error(ncclRemoteError, "the process of the id has ended");
  return make(segment, rank, size, wants_blocking(config, true), comm);
}

SIMGPU_EXPORT ncclResult_t ncclCommInitRank(ncclComm_t* comm, int size, ncclUniqueId id,
                                            int rank) {
  return ncclCommInitRankConfig(comm, size, id, rank, nullptr);
}

// Several ids make the start faster; here the first one is used.
SIMGPU_EXPORT ncclResult_t ncclCommInitRankScalable(ncclComm_t* comm, int size, int rank,
                                                    int, ncclUniqueId* ids,
                                                    ncclConfig_t* config) {
  return ncclCommInitRankConfig(comm, size, ids[0], rank, config);
}

// The ranks are threads of this process, each with a device.
SIMGPU_EXPORT ncclResult_t ncclCommInitAll(ncclComm_t* comms, int size,
                                           const int* devices) {
  ncclUniqueId id;
  ncclResult_t error = ncclGetUniqueId(&id);
  std::vector<std::thread> threads;
  std::vector<ncclResult_t> errors(size_t(size), error);
  for (int rank = 0; rank < size && error == ncclSuccess; rank++)
    threads.emplace_back([&, rank] {
      cudaSetDevice(devices ? devices[rank] : rank);
      errors[size_t(rank)] = ncclCommInitRank(&comms[rank], size, id, rank);
    });
  for (std::thread& each : threads) each.join();
  for (ncclResult_t each : errors)
    if (each != ncclSuccess) error = each;
  return error;
}

// All ranks of the parent must call, also those that become no member.
SIMGPU_EXPORT ncclResult_t ncclCommSplit(ncclComm_t parent, int color, int key,
                                         ncclComm_t* made, ncclConfig_t* config) {
  Comm from = comm_of(parent);
  *made = nullptr;
  if (!from || from->is_released()) return nccl_error(ncclInvalidArgument, "no parent");
  Note note = own_note(from->device);
  note.color = color, note.key = key;
  if (!exchange(*from, all_ranks(from->size), note))
    return nccl_error(ncclInternalError, "aborted while it was divided");
  std::vector<std::pair<int, int>> ordered;  // key, rank
  for (int rank = 0; rank < from->size; rank++)
    if (color != NCCL_SPLIT_NOCOLOR && note_of(*from, rank).color == color)
      ordered.push_back({note_of(*from, rank).key, rank});
  std::sort(ordered.begin(), ordered.end());
  std::vector<int> members;
  for (auto& each : ordered) members.push_back(each.second);
  return derive(*from, members, all_ranks(from->size),
                wants_blocking(config, from->is_blocking), made);
}

// The ranks that stay must call.
SIMGPU_EXPORT ncclResult_t ncclCommShrink(ncclComm_t parent, int* excluded, int count,
                                          ncclComm_t* made, ncclConfig_t* config,
                                          int flags) {
  Comm from = comm_of(parent);
  *made = nullptr;
  if (!from) return nccl_error(ncclInvalidArgument, "no parent");
  if (flags & NCCL_SHRINK_ABORT) from->is_revoked = true;
  std::vector<int> members;
  for (int rank = 0; rank < from->size; rank++)
    if (std::find(excluded, excluded + count, rank) == excluded + count)
      members.push_back(rank);
  return derive(*from, members, members, wants_blocking(config, from->is_blocking),
                made);
}

// Waits for the work, and for all ranks: NCCL's documentation calls it "an intra-node
// collective call, which all ranks on the same node should call to avoid a hang".
SIMGPU_EXPORT ncclResult_t ncclCommFinalize(ncclComm_t handle) {
  Comm comm = comm_of(handle);
  if (!comm) return nccl_error(ncclInvalidArgument, "no communicator");
  if (comm->is_finalized.exchange(true)) return ncclSuccess;
  auto finish = [comm] {
    drain(*comm);
    bool is_sound = comm->error == ncclInProgress || comm->error == ncclSuccess;
    if (is_sound && broken(comm->device) == cudaSuccess)
      exchange(*comm, all_ranks(comm->size), own_note(comm->device));
    if (comm->error == ncclInProgress) comm->error = ncclSuccess;
  };
  if (comm->is_blocking) {
    finish();
    return ncclSuccess;
  }
  comm->error = ncclInProgress;
  std::thread(finish).detach();
  return ncclInProgress;
}

SIMGPU_EXPORT ncclResult_t ncclCommDestroy(ncclComm_t handle) {
  if (!handle) return ncclSuccess;
  Comm comm = comm_of(handle);
  if (!comm) return nccl_error(ncclInvalidArgument, "no communicator");
  if (!comm->is_released()) {
    ncclCommFinalize(handle);
    while (comm->error == ncclInProgress && !comm->is_aborted) usleep(100);
  }
  remove(handle);
  return ncclSuccess;
}

// Ends this rank's work and waits. The other ranks' work stands until they abort, too.
SIMGPU_EXPORT ncclResult_t ncclCommAbort(ncclComm_t handle) {
  if (!handle) return ncclSuccess;
  Comm comm = comm_of(handle);
  if (!comm) return nccl_error(ncclInvalidArgument, "no communicator");
  comm->is_aborted = true;
  remove(handle);
  return ncclSuccess;
}

SIMGPU_EXPORT ncclResult_t ncclCommRevoke(ncclComm_t handle, int) {
  Comm comm = comm_of(handle);
  if (!comm) return nccl_error(ncclInvalidArgument, "no communicator");
  comm->is_revoked = true;
  return ncclSuccess;
}

SIMGPU_EXPORT ncclResult_t ncclCommGetAsyncError(ncclComm_t handle,
                                                 ncclResult_t* error) {
  Comm comm = comm_of(handle);
  if (!comm) return nccl_error(ncclInvalidArgument, "no communicator");
  *error = ncclResult_t(comm->error.load());
  return ncclSuccess;
}

SIMGPU_EXPORT ncclResult_t ncclCommCount(const ncclComm_t handle, int* count) {
  Comm comm = comm_of(handle);
  if (!comm) return nccl_error(ncclInvalidArgument, "no communicator");
  *count = comm->size;
  return ncclSuccess;
}

SIMGPU_EXPORT ncclResult_t ncclCommUserRank(const ncclComm_t handle, int* rank) {
  Comm comm = comm_of(handle);
  if (!comm) return nccl_error(ncclInvalidArgument, "no communicator");
  *rank = comm->rank;
  return ncclSuccess;
}

SIMGPU_EXPORT ncclResult_t ncclCommCuDevice(const ncclComm_t handle, int* device) {
  Comm comm = comm_of(handle);
  if (!comm) return nccl_error(ncclInvalidArgument, "no communicator");
  *device = comm->device;
  return ncclSuccess;
}

// Registered memory is faster on a GPU. Here it is nothing but a handle.
SIMGPU_EXPORT ncclResult_t ncclCommRegister(const ncclComm_t, void* memory, size_t,
                                            void** handle) {
  *handle = memory;
  return ncclSuccess;
}
SIMGPU_EXPORT ncclResult_t ncclCommDeregister(const ncclComm_t, void*) {
  return ncclSuccess;
}

SIMGPU_EXPORT ncclResult_t ncclMemAlloc(void** pointer, size_t size) {
  return cudaMalloc(pointer, size) == cudaSuccess ? ncclSuccess : ncclUnhandledCudaError;
}
SIMGPU_EXPORT ncclResult_t ncclMemFree(void* pointer) {
  return cudaFree(pointer) == cudaSuccess ? ncclSuccess : ncclUnhandledCudaError;
}

// sum(scalar * input): each rank has a scalar of its own.
SIMGPU_EXPORT ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t* op, void* scalar,
                                                    ncclDataType_t type,
                                                    ncclScalarResidence_t residence,
                                                    ncclComm_t handle) {
  Comm comm = comm_of(handle);
  if (!comm) return nccl_error(ncclInvalidArgument, "no communicator");
  std::lock_guard<std::mutex> locked(comm->mutex);
  bool is_host = residence == ncclScalarHostImmediate;
  int made = comm->next_operation++;
  comm->operations[made] = {type, is_host ? nullptr : scalar,
                            is_host ? read_scalar(scalar, type) : 0.0};
  *op = ncclRedOp_t(made);
  return ncclSuccess;
}

SIMGPU_EXPORT ncclResult_t ncclRedOpDestroy(ncclRedOp_t op, ncclComm_t handle) {
  Comm comm = comm_of(handle);
  if (!comm) return nccl_error(ncclInvalidArgument, "no communicator");
  std::lock_guard<std::mutex> locked(comm->mutex);
  return comm->operations.erase(int(op)) ? ncclSuccess : ncclInvalidArgument;
}

SIMGPU_EXPORT const char* ncclGetErrorString(ncclResult_t error) {
  switch (error) {
    case ncclSuccess: return "no error";
    case ncclUnhandledCudaError: return "unhandled cuda error";
    case ncclSystemError: return "unhandled system error";
    case ncclInternalError: return "internal error";
    case ncclInvalidArgument: return "invalid argument";
    case ncclInvalidUsage: return "invalid usage";
    case ncclRemoteError: return "remote process exited or there was a network error";
    case ncclInProgress: return "NCCL operation in progress";
    default: return "unknown result code";
  }
}

SIMGPU_EXPORT const char* ncclGetLastError(ncclComm_t) { return last_error.c_str(); }

// For tests: give all communicators of this process an asynchronous error. Their work
// stands until they are aborted.
SIMGPU_EXPORT void simgpu_fail_nccl(int error) {
  std::lock_guard<std::mutex> locked(mutex());
  for (auto& each : communicators()) each.second->error = error;
}

// For tests: how the next connection of this process ends, by an error or, if it is
// negative, by SIGKILL.
SIMGPU_EXPORT void simgpu_end_next_init(int error) { planned_end = error; }

SIMGPU_EXPORT ncclResult_t ncclCommMemStats(ncclComm_t, ncclCommMemStat_t,
                                            uint64_t* value) {
  *value = 0;
  return ncclSuccess;
}

// What is not simulated is refused, because the real NCCL would take these handles for
// its own.
static ncclResult_t not_simulated(const char* name) {
  fprintf(stderr, "simgpu: NCCL: %s is not simulated\n", name);
  return nccl_error(ncclInvalidUsage, std::string(name) + " is not simulated");
}
#define SIMGPU_REFUSE(name) \
  SIMGPU_EXPORT ncclResult_t simgpu_##name() __asm__(#name); \
  ncclResult_t simgpu_##name() { return not_simulated(#name); }

SIMGPU_REFUSE(ncclCommGetUniqueId)
SIMGPU_REFUSE(ncclCommGrow)
SIMGPU_REFUSE(ncclCommResume)
SIMGPU_REFUSE(ncclCommSuspend)
SIMGPU_REFUSE(ncclCommWindowDeregister)
SIMGPU_REFUSE(ncclCommWindowRegister)
SIMGPU_REFUSE(ncclDevCommCreate)
SIMGPU_REFUSE(ncclDevCommDestroy)
SIMGPU_REFUSE(ncclGetLsaMultimemDevicePointer)
SIMGPU_REFUSE(ncclGetPeerDevicePointer)
SIMGPU_REFUSE(ncclGroupSimulateEnd)
SIMGPU_REFUSE(ncclPutSignal)
SIMGPU_REFUSE(ncclSignal)
SIMGPU_REFUSE(ncclWaitSignal)
SIMGPU_REFUSE(ncclWinGetUserPtr)
