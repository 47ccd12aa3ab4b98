// Events: cudaEventCreate, cudaEventRecord, cudaEventQuery, cudaStreamWaitEvent, and
// those of cudaEventInterprocess, which other processes open by a handle.
//
// An event has a count of its records, and notes which of them their streams have
// reached: an event can be recorded on one stream while an earlier record, on another
// stream, is still awaited. Those of interprocess events are in shared memory.
#include <cstring>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include "runtime.h"

namespace simgpu {
namespace {

struct Counters {
  static constexpr int KEPT = 64;
  std::atomic<uint64_t> recorded{0};
  std::atomic<uint64_t> reached[KEPT]{};  // the last record reached, by number % KEPT
  std::atomic<int64_t> reached_ns{0};

  bool has_reached(uint64_t number) const { return reached[number % KEPT] >= number; }
};

struct State {
  Counters* counters = nullptr;
  int file = -1;  // of an interprocess event
  int device = 0;
  unsigned flags = 0;
  bool is_imported = false;
  std::atomic<unsigned long long> capture{0};  // in which it was last recorded

  ~State() {
    if (flags & cudaEventInterprocess)
      munmap(counters, sizeof *counters);
    else
      delete counters;
    if (file >= 0) close(file);
  }
  // SIMGPU_EVENTS_LIE: an event of another process always seems to be done.
  bool lies() const { return is_imported && is_set("SIMGPU_EVENTS_LIE"); }
  bool is_done() const { return lies() || counters->has_reached(counters->recorded); }
};

using Event = std::shared_ptr<State>;

Event& event_of(cudaEvent_t handle) { return *reinterpret_cast<Event*>(handle); }

Counters* map_counters(int file) {
  void* at =
      mmap(nullptr, sizeof(Counters), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  return at == MAP_FAILED ? nullptr : static_cast<Counters*>(at);
}

class Record : public Operation {
 public:
  Record(Event event, uint64_t number) : event_(std::move(event)), number_(number) {}
  bool run() override {
    Counters& counters = *event_->counters;
    counters.reached_ns = Clock::now().time_since_epoch().count();
    auto& reached = counters.reached[number_ % Counters::KEPT];
    uint64_t seen = reached;
    while (seen < number_ && !reached.compare_exchange_weak(seen, number_)) {
    }
    return true;
  }

 private:
  Event event_;
  uint64_t number_;
};

// Waits for the record that was the latest when the wait was queued.
class Wait : public Operation {
 public:
  Wait(Event event, uint64_t number) : event_(std::move(event)), number_(number) {}
  bool is_ready(Clock::time_point) override {
    return event_->lies() || event_->counters->has_reached(number_);
  }
  bool run() override { return true; }
  std::string describe() const override {
    return "a wait for record " + std::to_string(number_) + " of " +
           std::to_string(event_->counters->recorded.load()) + " of an event";
  }

 private:
  Event event_;
  uint64_t number_;
};

// The error of a host's wait or query. A captured event is never done.
cudaError_t host_wait_error(const Event& event) {
  if (!event->capture) return unsafe_call_error();
  invalidate_capture(event->capture);
  return cudaErrorCapturedEvent;
}

struct Handle {
  char magic[8];
  int pid, file;
};

}  // namespace
}  // namespace simgpu

using namespace simgpu;

SIMGPU_EXPORT cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  SIMGPU_ENTER();
  bool is_shared = flags & cudaEventInterprocess;
  if (is_shared && !(flags & cudaEventDisableTiming)) return fail(cudaErrorInvalidValue);
  auto state = std::make_shared<State>();
  state->device = current_device();
  if (is_shared) {
    state->file = memfd_create("simgpu-event", MFD_CLOEXEC);
    if (state->file < 0 || ftruncate(state->file, sizeof(Counters)) != 0 ||
        !(state->counters = map_counters(state->file)))
      return fail(cudaErrorMemoryAllocation);
  } else {
    state->counters = new Counters;
  }
  state->flags = flags;
  *event = reinterpret_cast<cudaEvent_t>(new Event(std::move(state)));
  return cudaSuccess;
}

SIMGPU_EXPORT cudaError_t cudaEventCreate(cudaEvent_t* event) {
  return cudaEventCreateWithFlags(event, 0);
}

// Returns at once: streams that wait for the event still do.
SIMGPU_EXPORT cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete &event_of(event);
  return cudaSuccess;
}

// The event and the stream must be of one device.
SIMGPU_EXPORT cudaError_t cudaEventRecordWithFlags(cudaEvent_t handle,
                                                   cudaStream_t stream, unsigned) {
  SIMGPU_ENTER();
  pause_host();
  const Event& event = event_of(handle);
  Stream* on = stream_of(stream);
  if (!event->is_imported && device_of(on) != event->device)
    return fail(cudaErrorInvalidResourceHandle);
  event->capture = capture_of(on);
  if (event->capture) return cudaSuccess;  // it is a place in the graph, and no record
  push(on, std::make_unique<Record>(event, ++event->counters->recorded));
  return cudaSuccess;
}

SIMGPU_EXPORT cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return cudaEventRecordWithFlags(event, stream, 0);
}

// An event that was never recorded is done.
SIMGPU_EXPORT cudaError_t cudaEventQuery(cudaEvent_t event) {
  SIMGPU_ENTER();
  if (cudaError_t error = host_wait_error(event_of(event))) return fail(error);
  return event_of(event)->is_done() ? cudaSuccess : fail(cudaErrorNotReady);
}

SIMGPU_EXPORT cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
  Event event = event_of(handle);
  if (cudaError_t error = host_wait_error(event)) return fail(error);
  uint64_t last = event->counters->recorded;
  while (!event->lies() && !event->counters->has_reached(last)) {
    SIMGPU_ENTER();
    usleep(20);
  }
  SIMGPU_ENTER();
  return cudaSuccess;
}

// The event and the stream may be of different devices.
SIMGPU_EXPORT cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t handle,
                                              unsigned) {
  SIMGPU_ENTER();
  const Event& event = event_of(handle);
  Stream* waits = stream_of(stream);
  unsigned long long own = capture_of(waits), other = event->capture;
  if (other && own && own != other) return fail(cudaErrorStreamCaptureMerge);
  if (other) {  // the stream belongs to the capture from here on
    if (!own) join_capture(waits, other);
    return cudaSuccess;
  }
  uint64_t last = event->counters->recorded;
  if (own && last) {  // no graph can wait for work that is not its own
    invalidate_capture(own);
    return fail(cudaErrorStreamCaptureIsolation);
  }
  if (last) push(waits, std::make_unique<Wait>(event, last));
  return cudaSuccess;
}

SIMGPU_EXPORT cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t begin,
                                               cudaEvent_t end) {
  SIMGPU_ENTER();
  for (cudaEvent_t each : {begin, end}) {
    const Event& event = event_of(each);
    if (event->flags & cudaEventDisableTiming || !event->counters->recorded)
      return fail(cudaErrorInvalidResourceHandle);
    if (!event->is_done()) return fail(cudaErrorNotReady);
  }
  int64_t ns = event_of(end)->counters->reached_ns - event_of(begin)->counters->reached_ns;
  *ms = float(double(ns) / 1e6);
  return cudaSuccess;
}

SIMGPU_EXPORT cudaError_t cudaIpcGetEventHandle(cudaIpcEventHandle_t* handle,
                                                cudaEvent_t event) {
  SIMGPU_ENTER();
  const Event& of = event_of(event);
  if (is_set("SIMGPU_NO_EVENT_IPC") || of->file < 0)
    return fail(cudaErrorInvalidResourceHandle);
  Handle given{"SIMEVNT", getpid(), of->file};
  memset(handle, 0, sizeof *handle);
  memcpy(handle, &given, sizeof given);
  return cudaSuccess;
}

// The process that made the event must have it still.
SIMGPU_EXPORT cudaError_t cudaIpcOpenEventHandle(cudaEvent_t* event,
                                                 cudaIpcEventHandle_t handle) {
  SIMGPU_ENTER();
  Handle given;
  memcpy(&given, &handle, sizeof given);
  if (memcmp(given.magic, "SIMEVNT", 8) != 0 || is_set("SIMGPU_NO_EVENT_OPEN"))
    return fail(cudaErrorInvalidResourceHandle);
  char path[64];
  snprintf(path, sizeof path, "/proc/%d/fd/%d", given.pid, given.file);
  int file = open(path, O_RDWR | O_CLOEXEC);
  Counters* counters = file < 0 ? nullptr : map_counters(file);
  if (file >= 0) close(file);
  if (!counters) return fail(cudaErrorInvalidResourceHandle);
  auto state = std::make_shared<State>();
  state->counters = counters;
  state->device = current_device();
  state->flags = cudaEventInterprocess | cudaEventDisableTiming;
  state->is_imported = true;
  *event = reinterpret_cast<cudaEvent_t>(new Event(std::move(state)));
  return cudaSuccess;
}
