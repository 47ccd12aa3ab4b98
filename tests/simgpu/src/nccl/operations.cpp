// Communication: ncclAllReduce and the other collectives, ncclSend and ncclRecv, and
// group calls.
//
// The work of a group call is one operation of a stream, as it is one kernel on a GPU. It
// is done in steps, none of which waits: a stream that waits for another rank stops no
// other stream. No data is copied to the other ranks: they read it from this rank's
// memory, and this rank's work is over when they have.
#include <algorithm>
#include <cstring>
#include <deque>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include "communicator.h"
#include "reduction.h"

namespace simgpu {
namespace {

enum Kind {
  ALL_REDUCE, REDUCE, BROADCAST, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL, GATHER, SCATTER,
  SEND, RECEIVE,
};

struct Task {
  Kind kind;
  const void* input;
  void* output;
  size_t count;  // elements of the parameter that NCCL's function has
  ncclDataType_t type;
  int op;    // ncclRedOp_t
  int root;  // or the other rank of a message
  PreMulSum factor = {};  // of an op that ncclRedOpCreatePreMulSum has made

  size_t bytes() const { return count * size_of(type); }
};

// Memory of another rank, or of this one, mapped while it is read.
class Mapped {
 public:
  explicit Mapped(const Place& place) : length_(place.length) {
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/fd/%d", place.pid, place.file);
    int file = open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0) return;
    void* at = mmap(nullptr, length_, PROT_READ, MAP_SHARED, file, 0);
    close(file);
    if (at == MAP_FAILED) return;
    base_ = static_cast<char*>(at);
    data_ = base_ + place.offset;
  }
  ~Mapped() {
    if (base_) munmap(base_, length_);
  }
  Mapped(const Mapped&) = delete;
  Mapped& operator=(const Mapped&) = delete;
  // Null if the rank has died.
  const char* data() const { return data_; }

 private:
  size_t length_;
  char *base_ = nullptr, *data_ = nullptr;
};

// One task in progress.
class Progress {
 public:
  Progress(Communicator& comm, const Task& task) : comm_(comm), task_(task) {}
  virtual ~Progress() = default;
  // Do what can be done now. True when the task is done.
  virtual bool step() = 0;

 protected:
  Communicator& comm_;
  const Task task_;

  // A kernel that is given memory which is not the device's.
  bool break_if(bool is_bad, const char* text) {
    if (!is_bad) return false;
    fprintf(stderr, "simgpu: NCCL: %s\n", text);
    break_context(comm_.device, cudaErrorIllegalAddress);
    return true;
  }
};

// A collective: each rank offers its input, waits for the inputs of all, computes its
// output aside, waits until all have done so, and then stores it.
class Collective : public Progress {
 public:
  using Progress::Progress;

  bool step() override {
    if (state_ == BEGIN && !offer()) return true;
    if (state_ == OFFERED && (!all_reached() || !compute())) return false;
    if (state_ == COMPUTED && all_reached()) {
      if (!result_.empty())
        memcpy(host_address(task_.output), result_.data(), result_.size());
      return true;
    }
    return false;
  }

 private:
  enum { BEGIN, OFFERED, COMPUTED } state_ = BEGIN;
  std::vector<char> result_;
  bool has_told_ = false;

  bool offer() {
    bool gives = gives_input() && task_.count > 0;
    bool takes = takes_output() && task_.count > 0;
    Contribution& mine = comm_.own_line().contribution;
    mine = {};
    mine.has_input = gives && find_place(task_.input, &mine.input);
    if (break_if((gives && !mine.has_input) || (takes && !is_device_memory(task_.output)),
                 "the data is not in device memory"))
      return false;
    mine.kind = task_.kind, mine.type = task_.type, mine.root = task_.root;
    mine.count = task_.count;
    mine.op = std::min<int>(task_.op, ncclNumOps);
    if (task_.op >= ncclNumOps) mine.scalar = scalar();
    comm_.own_line().phase = ++comm_.phase;
    state_ = OFFERED;
    return true;
  }

  double scalar() const {
    const PreMulSum& of = task_.factor;
    return of.device ? read_scalar(host_address(of.device), of.type) : of.value;
  }

  bool all_reached() const {
    for (int rank = 0; rank < comm_.size; rank++)
      if (comm_.segment->lines[rank].phase < comm_.phase) return false;
    return true;
  }

  // Ranks that call different collectives: NCCL's kernels then hang or give nonsense.
  // With SIMGPU_NCCL_MIXES_OPS each rank reduces by its own op, and none hangs.
  bool agrees() {
    static const bool mixes_ops = is_set("SIMGPU_NCCL_MIXES_OPS");
    const Contribution& mine = comm_.own_line().contribution;
    for (int rank = 0; rank < comm_.size; rank++) {
      const Contribution& other = comm_.segment->lines[rank].contribution;
      if (other.kind == mine.kind && other.type == mine.type &&
          (other.op == mine.op || mixes_ops) && other.root == mine.root &&
          other.count == mine.count)
        continue;
      if (!has_told_)
        fprintf(stderr,
                "simgpu: NCCL: ranks %d and %d call different collectives, and hang\n",
                comm_.rank, rank);
      has_told_ = true;
      return false;
    }
    return true;
  }

  bool gives_input() const {
    bool has_root_only = task_.kind == BROADCAST || task_.kind == SCATTER;
    return !has_root_only || comm_.rank == task_.root;
  }
  bool takes_output() const {
    bool is_for_root = task_.kind == REDUCE || task_.kind == GATHER;
    return !is_for_root || comm_.rank == task_.root;
  }

  bool compute() {
    if (!agrees()) return false;
    size_t part = task_.bytes();
    size_t size = size_t(comm_.size), own = size_t(comm_.rank);
    bool is_read = takes_output() && part > 0;
    if (is_read) switch (task_.kind) {
        case BROADCAST: is_read = gather(task_.root, 0, part, 0, part); break;
        case SCATTER: is_read = gather(task_.root, own * part, part, 0, part); break;
        case ALL_GATHER:
        case GATHER:
          for (size_t rank = 0; rank < size && is_read; rank++)
            is_read = gather(int(rank), 0, part, rank * part, size * part);
          break;
        case ALL_TO_ALL:
          for (size_t rank = 0; rank < size && is_read; rank++)
            is_read = gather(int(rank), own * part, part, rank * part, size * part);
          break;
        case REDUCE_SCATTER: is_read = reduce(own * part); break;
        default: is_read = reduce(0);
      }
    else
      is_read = true;
    if (!is_read) return false;  // a rank has died: this one waits for it
    comm_.own_line().phase = ++comm_.phase;
    state_ = COMPUTED;
    return true;
  }

  // Read a part of a rank's input into a part of the result.
  bool gather(int rank, size_t from, size_t bytes, size_t to, size_t total) {
    Mapped input(comm_.segment->lines[rank].contribution.input);
    if (!input.data()) return false;
    result_.resize(total);
    memcpy(result_.data() + to, input.data() + from, bytes);
    return true;
  }

  // Reduce the inputs in rank order, which gives all ranks the same bits.
  bool reduce(size_t from) {
    const Contribution& mine = comm_.own_line().contribution;
    std::vector<char> scaled;
    result_.resize(task_.bytes());
    for (int rank = 0; rank < comm_.size; rank++) {
      const Contribution& theirs = comm_.segment->lines[rank].contribution;
      Mapped input(theirs.input);
      if (!input.data()) return false;
      const char* data = input.data() + from;
      if (mine.op == ncclNumOps) {
        scaled.assign(data, data + task_.bytes());
        scale(scaled.data(), task_.count, task_.type, theirs.scalar);
        data = scaled.data();
      }
      if (rank == 0)
        memcpy(result_.data(), data, task_.bytes());
      else
        combine(result_.data(), data, task_.count, task_.type, ncclRedOp_t(mine.op));
    }
    if (mine.op == ncclAvg) divide(result_.data(), task_.count, task_.type, comm_.size);
    return true;
  }
};

// A message to a rank: posted when the previous one was taken, done when it is taken.
class Send : public Progress {
 public:
  using Progress::Progress;

  bool step() override {
    Letter& letter = comm_.segment->letters[comm_.rank][task_.root];
    if (number_ == 0) {
      if (letter.taken < letter.sent) return false;
      letter.bytes = task_.bytes();
      if (break_if(task_.count > 0 && !find_place(task_.input, &letter.data),
                   "the data is not in device memory"))
        return true;
      letter.sent = number_ = letter.sent + 1;
    }
    return letter.taken >= number_;
  }

 private:
  uint64_t number_ = 0;
};

class Receive : public Progress {
 public:
  using Progress::Progress;

  bool step() override {
    Letter& letter = comm_.segment->letters[task_.root][comm_.rank];
    uint64_t last = letter.sent;
    if (letter.taken >= last) return false;
    if (letter.bytes != task_.bytes()) {
      if (!has_told_)
        fprintf(stderr, "simgpu: NCCL: rank %d sends %zu bytes and rank %d wants %zu\n",
                task_.root, letter.bytes, comm_.rank, task_.bytes());
      has_told_ = true;
      return false;
    }
    if (break_if(task_.count > 0 && !is_device_memory(task_.output),
                 "the data is not in device memory"))
      return true;
    if (task_.count > 0) {
      Mapped data(letter.data);
      if (!data.data()) return false;
      memcpy(host_address(task_.output), data.data(), task_.bytes());
    }
    letter.taken = last;
    return true;
  }

 private:
  bool has_told_ = false;
};

// The tasks that a group call has for one communicator.
class Plan : public Operation {
 public:
  Plan(Comm comm, const std::vector<Task>& tasks)
      : comm_(std::move(comm)), number_(comm_->queued++) {
    for (const Task& task : tasks)
      if (task.kind == SEND)
        messages_[{SEND, task.root}].push_back(std::make_unique<Send>(*comm_, task));
      else if (task.kind == RECEIVE)
        messages_[{RECEIVE, task.root}].push_back(
            std::make_unique<Receive>(*comm_, task));
      else
        collectives_.push_back(std::make_unique<Collective>(*comm_, task));
  }
  ~Plan() override { pass_turn(); }

  bool is_ready(Clock::time_point) override {
    return comm_->is_released() || comm_->turn >= number_;
  }

  std::string describe() const override {
    std::string text = "NCCL's work " + std::to_string(number_) + " of rank " +
                       std::to_string(comm_->rank) + " of " +
                       std::to_string(comm_->size) + ", turn " +
                       std::to_string(comm_->turn.load()) + ", phases";
    for (int rank = 0; rank < comm_->size; rank++)
      text += " " + std::to_string(comm_->segment->lines[rank].phase);
    return text;
  }

  // The messages make progress together; those between two ranks are in order, and so
  // are the collectives.
  bool run() override {
    if (comm_->is_released()) return true;
    if (comm_->error != ncclSuccess && comm_->error != ncclInProgress) return false;
    while (!collectives_.empty() && collectives_.front()->step())
      collectives_.pop_front();
    bool is_done = collectives_.empty();
    for (auto& [to, queue] : messages_) {
      while (!queue.empty() && queue.front()->step()) queue.pop_front();
      is_done &= queue.empty();
    }
    if (is_done) pass_turn();
    return is_done;
  }

 private:
  Comm comm_;
  uint64_t number_;
  std::deque<std::unique_ptr<Progress>> collectives_;
  std::map<std::pair<Kind, int>, std::deque<std::unique_ptr<Progress>>> messages_;

  void pass_turn() {
    uint64_t mine = number_;
    comm_->turn.compare_exchange_strong(mine, number_ + 1);
  }
};

// -- group calls -----------------------------------------------------------------------

struct Queued {
  ncclComm_t handle;
  cudaStream_t stream;
  Task task;
};
thread_local int depth = 0;
thread_local std::vector<Queued> queued;
thread_local ncclResult_t group_error = ncclSuccess;

// Queue the tasks of one communicator on the first of their streams. The other streams
// wait for the work, and the work waits for them.
ncclResult_t launch(ncclComm_t handle, const std::vector<Queued>& tasks) {
  Comm comm = comm_of(handle);
  if (!comm || comm->is_released())
    return nccl_error(ncclInvalidArgument, "the communicator was destroyed");
  if (cudaError_t error = entry_error(); error != cudaSuccess) {
    nccl_error(ncclUnhandledCudaError, cudaGetErrorString(error));
    return ncclUnhandledCudaError;
  }
  cudaStream_t first = tasks.front().stream;
  std::vector<Task> own;
  std::vector<cudaStream_t> others;
  for (const Queued& each : tasks) {
    own.push_back(each.task);
    if (each.stream != first &&
        std::find(others.begin(), others.end(), each.stream) == others.end())
      others.push_back(each.stream);
  }
  auto order = [](cudaStream_t before, cudaStream_t after) {
    cudaEvent_t event;
    cudaEventCreateWithFlags(&event, cudaEventDisableTiming);
    cudaEventRecord(event, before);
    cudaStreamWaitEvent(after, event, 0);
    cudaEventDestroy(event);
  };
  for (cudaStream_t each : others) order(each, first);
  push(stream_of(first), std::make_unique<Plan>(comm, own));
  for (cudaStream_t each : others) order(first, each);
  return ncclSuccess;
}

ncclResult_t launch_all() {
  std::vector<Queued> all;
  all.swap(queued);
  ncclResult_t error = group_error;
  group_error = ncclSuccess;
  if (error != ncclSuccess) return error;
  while (!all.empty() && error == ncclSuccess) {
    ncclComm_t handle = all.front().handle;
    std::vector<Queued> own;
    auto rest = std::stable_partition(all.begin(), all.end(), [&](const Queued& each) {
      return each.handle != handle;
    });
    own.assign(rest, all.end());
    all.erase(rest, all.end());
    error = launch(handle, own);
  }
  return error;
}

// Check a task. The caller may destroy its operation as soon as the call has returned.
ncclResult_t complete(const Comm& comm, Task& task) {
  if (!comm) return nccl_error(ncclInvalidArgument, "no communicator");
  if (size_of(task.type) == 0) return nccl_error(ncclInvalidArgument, "unknown type");
  if (task.root < 0 || task.root >= comm->size)
    return nccl_error(ncclInvalidArgument, "a root outside of the communicator");
  if (task.op >= 0 && task.op < ncclNumOps) return ncclSuccess;
  std::lock_guard<std::mutex> locked(comm->mutex);
  auto found = comm->operations.find(task.op);
  if (found == comm->operations.end())
    return nccl_error(ncclInvalidArgument, "unknown operation");
  task.factor = found->second;
  return ncclSuccess;
}

// Queue a task; outside of a group call, launch it.
ncclResult_t add(ncclComm_t handle, cudaStream_t stream, Task task) {
  ncclResult_t error = complete(comm_of(handle), task);
  if (error == ncclSuccess)
    queued.push_back({handle, stream, task});
  else if (depth > 0)
    group_error = error;
  return depth > 0 || error != ncclSuccess ? error : launch_all();
}

}  // namespace
}  // namespace simgpu

using namespace simgpu;

SIMGPU_EXPORT ncclResult_t ncclGroupStart() {
  depth++;
  return ncclSuccess;
}

SIMGPU_EXPORT ncclResult_t ncclGroupEnd() {
  if (depth == 0) return nccl_error(ncclInvalidUsage, "no ncclGroupStart");
  return --depth == 0 ? launch_all() : ncclSuccess;
}

SIMGPU_EXPORT ncclResult_t ncclAllReduce(const void* input, void* output, size_t count,
                                         ncclDataType_t type, ncclRedOp_t op,
                                         ncclComm_t comm, cudaStream_t stream) {
  return add(comm, stream, {ALL_REDUCE, input, output, count, type, op, 0});
}

SIMGPU_EXPORT ncclResult_t ncclReduce(const void* input, void* output, size_t count,
                                      ncclDataType_t type, ncclRedOp_t op, int root,
                                      ncclComm_t comm, cudaStream_t stream) {
  return add(comm, stream, {REDUCE, input, output, count, type, op, root});
}

SIMGPU_EXPORT ncclResult_t ncclBroadcast(const void* input, void* output, size_t count,
                                         ncclDataType_t type, int root, ncclComm_t comm,
                                         cudaStream_t stream) {
  return add(comm, stream, {BROADCAST, input, output, count, type, 0, root});
}

SIMGPU_EXPORT ncclResult_t ncclBcast(void* data, size_t count, ncclDataType_t type,
                                     int root, ncclComm_t comm, cudaStream_t stream) {
  return ncclBroadcast(data, data, count, type, root, comm, stream);
}

SIMGPU_EXPORT ncclResult_t ncclAllGather(const void* input, void* output, size_t count,
                                         ncclDataType_t type, ncclComm_t comm,
                                         cudaStream_t stream) {
  return add(comm, stream, {ALL_GATHER, input, output, count, type, 0, 0});
}

SIMGPU_EXPORT ncclResult_t ncclReduceScatter(const void* input, void* output,
                                             size_t count, ncclDataType_t type,
                                             ncclRedOp_t op, ncclComm_t comm,
                                             cudaStream_t stream) {
  return add(comm, stream, {REDUCE_SCATTER, input, output, count, type, op, 0});
}

SIMGPU_EXPORT ncclResult_t ncclAlltoAll(const void* input, void* output, size_t count,
                                        ncclDataType_t type, ncclComm_t comm,
                                        cudaStream_t stream) {
  return add(comm, stream, {ALL_TO_ALL, input, output, count, type, 0, 0});
}

SIMGPU_EXPORT ncclResult_t ncclGather(const void* input, void* output, size_t count,
                                      ncclDataType_t type, int root, ncclComm_t comm,
                                      cudaStream_t stream) {
  return add(comm, stream, {GATHER, input, output, count, type, 0, root});
}

SIMGPU_EXPORT ncclResult_t ncclScatter(const void* input, void* output, size_t count,
                                       ncclDataType_t type, int root, ncclComm_t comm,
                                       cudaStream_t stream) {
  return add(comm, stream, {SCATTER, input, output, count, type, 0, root});
}

SIMGPU_EXPORT ncclResult_t ncclSend(const void* data, size_t count, ncclDataType_t type,
                                    int peer, ncclComm_t comm, cudaStream_t stream) {
  return add(comm, stream, {SEND, data, nullptr, count, type, 0, peer});
}

SIMGPU_EXPORT ncclResult_t ncclRecv(void* data, size_t count, ncclDataType_t type,
                                    int peer, ncclComm_t comm, cudaStream_t stream) {
  return add(comm, stream, {RECEIVE, nullptr, data, count, type, 0, peer});
}
