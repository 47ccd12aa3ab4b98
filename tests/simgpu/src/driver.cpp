// The driver's API (libcuda.so.1): the few functions that torch asks for.
#include <cstring>

#include "runtime.h"

using namespace simgpu;

namespace {

constexpr int NOT_SUPPORTED = 801;  // CUDA_ERROR_NOT_SUPPORTED

int get_device(int* device, int ordinal) {
  *device = ordinal;
  return 0;
}

int get_attribute(int* value, int, int) {
  *value = 0;
  return 0;
}

int get_error_string(int, const char** text) {
  *text = "an error of the simulated driver";
  return 0;
}

int not_supported() { return NOT_SUPPORTED; }

}  // namespace

SIMGPU_EXPORT int cuInit(unsigned) { return initialise(); }

SIMGPU_EXPORT int cuDriverGetVersion(int* version) {
  return cudaDriverGetVersion(version);
}

SIMGPU_EXPORT int cuDeviceGetCount(int* count) {
  *count = int(visible().size());
  return 0;
}

SIMGPU_EXPORT int cuGetErrorString(int error, const char** text) {
  return get_error_string(error, text);
}

SIMGPU_EXPORT int cuCtxGetCurrent(void** context) {
  *context = reinterpret_cast<void*>(1);
  return 0;
}

// torch asks it whether a process has made a context on a device.
SIMGPU_EXPORT int cuDevicePrimaryCtxGetState(int device, unsigned* flags,
                                             int* is_active) {
  *flags = 0, *is_active = has_context(device);
  return 0;
}

SIMGPU_EXPORT cudaError_t cudaGetDriverEntryPointByVersion(
    const char* name, void** function, unsigned, unsigned long long,
    cudaDriverEntryPointQueryResult* result) {
  if (is_set("SIMGPU_VERBOSE")) fprintf(stderr, "simgpu: entry point %s\n", name);
  auto is = [&](const char* other) { return strcmp(name, other) == 0; };
  if ((*function = virtual_memory_function(name)) != nullptr) {
    if (result) *result = cudaDriverEntryPointSuccess;
    return cudaSuccess;
  }
  *function = is("cuDeviceGet")            ? reinterpret_cast<void*>(get_device)
              : is("cuDeviceGetAttribute") ? reinterpret_cast<void*>(get_attribute)
              : is("cuGetErrorString")     ? reinterpret_cast<void*>(get_error_string)
                                           : reinterpret_cast<void*>(not_supported);
  if (result) *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
