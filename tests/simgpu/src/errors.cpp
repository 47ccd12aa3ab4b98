// Error handling: cudaGetLastError, the errors' names, sticky errors, and forks.
#include <unistd.h>

#include "ledger.h"
#include "runtime.h"

namespace simgpu {
namespace {

thread_local cudaError_t last = cudaSuccess;
std::atomic<int> breakages[MOST_UNITS];
std::atomic<bool> contexts[MOST_UNITS];
std::atomic<int> user{0};  // the process that has initialised CUDA

struct Text {
  cudaError_t error;
  const char *name, *text;
};

// The texts are CUDA's own, because programs show them and some compare them.
// Whether the compute mode, cudaComputeMode, lets this process make a context.
bool permits_context(Unit unit) {
  if (compute_mode() == cudaComputeModeProhibited) return false;
  if (compute_mode() != cudaComputeModeExclusiveProcess) return true;
  for (const Use& use : uses(unit))
    if (use.pid != getpid()) return false;
  return true;
}

const Text TEXTS[] = {
    {cudaSuccess, "cudaSuccess", "no error"},
    {cudaErrorInvalidValue, "cudaErrorInvalidValue", "invalid argument"},
    {cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation", "out of memory"},
    {cudaErrorInitializationError, "cudaErrorInitializationError",
     "initialization error"},
    {cudaErrorNoDevice, "cudaErrorNoDevice", "no CUDA-capable device is detected"},
    {cudaErrorInvalidDevice, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {cudaErrorDeviceUninitialized, "cudaErrorDeviceUninitialized",
     "invalid device context"},
    {cudaErrorDevicesUnavailable, "cudaErrorDevicesUnavailable",
     "CUDA-capable device(s) is/are busy or unavailable"},
    {cudaErrorMapBufferObjectFailed, "cudaErrorMapBufferObjectFailed",
     "mapping of buffer object failed"},
    {cudaErrorPeerAccessUnsupported, "cudaErrorPeerAccessUnsupported",
     "peer access is not supported between these two devices"},
    {cudaErrorPeerAccessAlreadyEnabled, "cudaErrorPeerAccessAlreadyEnabled",
     "peer access is already enabled"},
    {cudaErrorInvalidResourceHandle, "cudaErrorInvalidResourceHandle",
     "invalid resource handle"},
    {cudaErrorNotReady, "cudaErrorNotReady", "device not ready"},
    {cudaErrorIllegalAddress, "cudaErrorIllegalAddress",
     "an illegal memory access was encountered"},
    {cudaErrorAssert, "cudaErrorAssert", "device-side assert triggered"},
    {cudaErrorLaunchFailure, "cudaErrorLaunchFailure", "unspecified launch failure"},
    {cudaErrorECCUncorrectable, "cudaErrorECCUncorrectable",
     "uncorrectable ECC error encountered"},
    {cudaErrorNotSupported, "cudaErrorNotSupported", "operation not supported"},
    {cudaErrorStreamCaptureUnsupported, "cudaErrorStreamCaptureUnsupported",
     "operation not permitted when stream is capturing"},
    {cudaErrorStreamCaptureInvalidated, "cudaErrorStreamCaptureInvalidated",
     "operation failed due to a previous error during capture"},
    {cudaErrorStreamCaptureMerge, "cudaErrorStreamCaptureMerge",
     "operation would result in a merge of separate capture sequences"},
    {cudaErrorStreamCaptureIsolation, "cudaErrorStreamCaptureIsolation",
     "dependency created on uncaptured work in another stream"},
    {cudaErrorCapturedEvent, "cudaErrorCapturedEvent",
     "operation not permitted on an event last recorded in a capturing stream"},
};

}  // namespace

cudaError_t fail(cudaError_t error) { return last = error; }

cudaError_t initialise() {
  int nobody = 0;
  user.compare_exchange_strong(nobody, getpid());
  return user == getpid() ? cudaSuccess : cudaErrorInitializationError;
}

cudaError_t entry_error() {
  if (initialise() != cudaSuccess) return cudaErrorInitializationError;
  int device = current_device();
  if (!is_device(device)) return cudaErrorNoDevice;
  if (!contexts[device].exchange(true)) {
    Unit unit = visible()[device];
    cudaError_t error = cudaSuccess;
    if (!permits_context(unit))
      error = cudaErrorDevicesUnavailable;
    else if (!take_bytes(unit, context_bytes()))
      error = cudaErrorMemoryAllocation;
    if (error != cudaSuccess) {
      contexts[device] = false;
      return error;
    }
  }
  return broken(device);
}

bool has_context(int device) { return contexts[device]; }

cudaError_t broken(int device) { return cudaError_t(breakages[device].load()); }

void break_context(int device, cudaError_t error) {
  int none = 0;
  if (breakages[device].compare_exchange_strong(none, error)) drop_work(device);
}

}  // namespace simgpu

using namespace simgpu;

SIMGPU_EXPORT cudaError_t cudaGetLastError() {
  cudaError_t error = last;
  last = cudaSuccess;
  cudaError_t sticky = is_device(current_device()) ? broken(current_device())
                                                   : cudaSuccess;
  return sticky != cudaSuccess ? sticky : error;
}

SIMGPU_EXPORT cudaError_t cudaPeekAtLastError() {
  cudaError_t sticky = is_device(current_device()) ? broken(current_device())
                                                   : cudaSuccess;
  return sticky != cudaSuccess ? sticky : last;
}

SIMGPU_EXPORT const char* cudaGetErrorString(cudaError_t error) {
  for (const Text& each : TEXTS)
    if (each.error == error) return each.text;
  return "unrecognized error code";
}

SIMGPU_EXPORT const char* cudaGetErrorName(cudaError_t error) {
  for (const Text& each : TEXTS)
    if (each.error == error) return each.name;
  return "unrecognized error code";
}

// For tests and operators: break this process's context as a faulty kernel would.
SIMGPU_EXPORT void simgpu_break_context(int device, int error) {
  break_context(device, cudaError_t(error));
}

// For operators: the error that has broken the context of a device, or cudaSuccess.
SIMGPU_EXPORT int simgpu_sticky_error(int device) { return broken(device); }
