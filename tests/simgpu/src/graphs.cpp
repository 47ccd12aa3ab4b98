// CUDA graphs: the capture of a stream, and what it prohibits to the threads.
//
// A stream that is captured keeps the operations queued on it in place of running them.
// A call that may wait or change the device is prohibited to threads as
// cudaThreadExchangeStreamCaptureMode describes; it invalidates the capture. A graph's
// launch runs the operations one after the other.
#include <algorithm>
#include <map>
#include <mutex>
#include <thread>

#include "runtime.h"

namespace simgpu {
namespace {

using Work = std::vector<std::unique_ptr<Operation>>;

struct Capture {
  unsigned long long id;
  cudaStreamCaptureMode mode;
  std::thread::id thread;
  Stream* origin;
  bool is_valid = true;
  std::shared_ptr<Work> work = std::make_shared<Work>();
};

thread_local cudaStreamCaptureMode thread_mode = cudaStreamCaptureModeGlobal;
std::atomic<int> under_way{0};

std::mutex& mutex() {
  static auto* made = new std::mutex;
  return *made;
}
// Every stream that is captured: the one that began, and those that wait for its events.
std::map<Stream*, std::shared_ptr<Capture>>& captures() {
  static auto* made = new std::map<Stream*, std::shared_ptr<Capture>>;
  return *made;
}

std::shared_ptr<Capture> find(Stream* stream) {
  auto found = captures().find(stream);
  return found == captures().end() ? nullptr : found->second;
}

bool prohibits(const Capture& capture) {
  bool is_own = capture.thread == std::this_thread::get_id();
  if (capture.mode == cudaStreamCaptureModeRelaxed ||
      thread_mode == cudaStreamCaptureModeRelaxed)
    return false;
  if (is_own) return true;
  return capture.mode == cudaStreamCaptureModeGlobal &&
         thread_mode == cudaStreamCaptureModeGlobal;
}

// Invalidate the captures that a call conflicts with.
template <class Conflicts>
cudaError_t check(Conflicts conflicts) {
  if (!under_way) return cudaSuccess;
  std::lock_guard<std::mutex> locked(mutex());
  cudaError_t error = cudaSuccess;
  for (auto& [stream, capture] : captures())
    if (conflicts(stream, *capture)) {
      capture->is_valid = false;
      error = cudaErrorStreamCaptureUnsupported;
    }
  return error;
}

}  // namespace

cudaError_t unsafe_call_error() {
  return check([](Stream*, const Capture& capture) { return prohibits(capture); });
}

cudaError_t wait_error(Stream* waited) {
  return check([&](Stream* stream, const Capture& capture) {
    return stream == waited || prohibits(capture);
  });
}

cudaError_t device_wait_error(int device) {
  return check([&](Stream* stream, const Capture& capture) {
    return device_of(stream) == device || prohibits(capture);
  });
}

unsigned long long capture_of(Stream* stream) {
  if (!under_way) return 0;
  std::lock_guard<std::mutex> locked(mutex());
  auto found = find(stream);
  return found ? found->id : 0;
}

bool capture(Stream* stream, std::unique_ptr<Operation>& operation) {
  if (!under_way) return false;
  std::lock_guard<std::mutex> locked(mutex());
  auto found = find(stream);
  if (found) found->work->push_back(std::move(operation));
  return bool(found);
}

void join_capture(Stream* stream, unsigned long long id) {
  std::lock_guard<std::mutex> locked(mutex());
  for (auto& each : captures())
    if (each.second->id == id) {
      captures()[stream] = each.second;
      return;
    }
}

void invalidate_capture(unsigned long long id) {
  std::lock_guard<std::mutex> locked(mutex());
  for (auto& [_, capture] : captures())
    if (capture->id == id) capture->is_valid = false;
}

}  // namespace simgpu

using namespace simgpu;

SIMGPU_EXPORT cudaError_t cudaThreadExchangeStreamCaptureMode(
    cudaStreamCaptureMode* mode) {
  SIMGPU_ENTER();  // it makes the context, as most calls do
  std::swap(*mode, thread_mode);
  return cudaSuccess;
}

// The legacy default stream cannot be captured.
SIMGPU_EXPORT cudaError_t cudaStreamBeginCapture(cudaStream_t handle,
                                                 cudaStreamCaptureMode mode) {
  SIMGPU_ENTER();
  if (!handle || handle == cudaStreamLegacy)
    return fail(cudaErrorStreamCaptureUnsupported);
  static unsigned long long last = 0;
  Stream* stream = stream_of(handle);
  std::lock_guard<std::mutex> locked(mutex());
  if (find(stream)) return fail(cudaErrorIllegalState);
  captures()[stream] = std::make_shared<Capture>(
      Capture{++last, mode, std::this_thread::get_id(), stream});
  under_way++;
  return cudaSuccess;
}

SIMGPU_EXPORT cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t* graph) {
  SIMGPU_ENTER();
  *graph = nullptr;
  Stream* stream = stream_of(handle);
  std::lock_guard<std::mutex> locked(mutex());
  auto ended = find(stream);
  if (!ended) return fail(cudaErrorIllegalState);
  if (ended->origin != stream) return fail(cudaErrorStreamCaptureUnmatched);
  if (ended->mode != cudaStreamCaptureModeRelaxed &&
      ended->thread != std::this_thread::get_id())
    return fail(cudaErrorStreamCaptureWrongThread);
  for (auto each = captures().begin(); each != captures().end();)
    each = each->second == ended ? captures().erase(each) : std::next(each);
  under_way--;
  if (!ended->is_valid) return fail(cudaErrorStreamCaptureInvalidated);
  *graph = reinterpret_cast<cudaGraph_t>(new std::shared_ptr<Work>(ended->work));
  return cudaSuccess;
}

SIMGPU_EXPORT cudaError_t cudaStreamGetCaptureInfo(
    cudaStream_t handle, cudaStreamCaptureStatus* status, unsigned long long* id,
    cudaGraph_t*, const cudaGraphNode_t**, const cudaGraphEdgeData**, size_t*) {
  *status = cudaStreamCaptureStatusNone;
  if (!under_way) return cudaSuccess;
  Stream* stream = stream_of(handle);
  std::lock_guard<std::mutex> locked(mutex());
  auto found = find(stream);
  if (!found) return cudaSuccess;
  *status = found->is_valid ? cudaStreamCaptureStatusActive
                            : cudaStreamCaptureStatusInvalidated;
  if (id) *id = found->id;
  return cudaSuccess;
}

SIMGPU_EXPORT cudaError_t cudaStreamIsCapturing(cudaStream_t stream,
                                                cudaStreamCaptureStatus* status) {
  return cudaStreamGetCaptureInfo(stream, status, nullptr, nullptr, nullptr, nullptr,
                                  nullptr);
}

SIMGPU_EXPORT cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t*,
                                            size_t* count) {
  *count = (*reinterpret_cast<std::shared_ptr<Work>*>(graph))->size();
  return cudaSuccess;
}

SIMGPU_EXPORT cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* made,
                                                        cudaGraph_t graph,
                                                        unsigned long long) {
  SIMGPU_ENTER();
  auto& work = *reinterpret_cast<std::shared_ptr<Work>*>(graph);
  *made = reinterpret_cast<cudaGraphExec_t>(new std::shared_ptr<Work>(work));
  return cudaSuccess;
}

SIMGPU_EXPORT cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t stream) {
  SIMGPU_ENTER();
  auto work = *reinterpret_cast<std::shared_ptr<Work>*>(graph);
  push_work(stream_of(stream), [work] {
    for (auto& each : *work)
      while (!each->run()) std::this_thread::yield();
  });
  return cudaSuccess;
}

SIMGPU_EXPORT cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete reinterpret_cast<std::shared_ptr<Work>*>(graph);
  return cudaSuccess;
}

SIMGPU_EXPORT cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graph) {
  delete reinterpret_cast<std::shared_ptr<Work>*>(graph);
  return cudaSuccess;
}
