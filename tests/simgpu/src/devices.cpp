// Device management: cudaGetDeviceCount, cudaSetDevice, cudaGetDeviceProperties, and
// peer access.
#include <algorithm>
#include <cctype>
#include <cstring>

#include "ledger.h"
#include "runtime.h"

namespace simgpu {
namespace {

thread_local int current = 0;

// The units that CUDA_VISIBLE_DEVICES names, by index or by the beginning of a UUID. The
// first unknown name ends the list. With a name twice, no unit is visible. A process sees
// at most one MIG device.
std::vector<Unit> read_visible() {
  std::vector<Unit> units = all_units(), found;
  const char* text = getenv("CUDA_VISIBLE_DEVICES");
  if (!text) {
    found = units;
  } else {
    std::string names(text);
    for (size_t at = 0; at <= names.size();) {
      size_t end = std::min(names.find(',', at), names.size());
      std::string name = names.substr(at, end - at);
      at = end + 1;
      const Unit* named = nullptr;
      for (size_t i = 0; i < units.size() && !named; i++) {
        bool is_index = !name.empty() && isdigit(name[0]);
        if (is_index ? atoi(name.c_str()) == int(i)
                     : !name.empty() && units[i].uuid().rfind(name, 0) == 0)
          named = &units[i];
      }
      if (!named) break;
      if (std::find(found.begin(), found.end(), *named) != found.end()) return {};
      found.push_back(*named);
    }
  }
  for (const Unit& unit : found)
    if (unit.slice >= 0) return {unit};
  return found;
}

bool has_peer_access() { return !is_set("SIMGPU_NO_P2P"); }

}  // namespace

const std::vector<Unit>& visible() {
  static const auto* units = new std::vector<Unit>(read_visible());
  return *units;
}

int current_device() { return current; }

bool is_device(int device) { return device >= 0 && device < int(visible().size()); }

}  // namespace simgpu

using namespace simgpu;

SIMGPU_EXPORT cudaError_t cudaGetDeviceCount(int* count) {
  if (cudaError_t error = initialise(); error != cudaSuccess) return fail(error);
  *count = int(visible().size());
  return *count ? cudaSuccess : fail(cudaErrorNoDevice);
}

SIMGPU_EXPORT cudaError_t cudaGetDevice(int* device) {
  *device = current;
  return cudaSuccess;
}

// Since CUDA 12 this makes the device's context.
SIMGPU_EXPORT cudaError_t cudaSetDevice(int device) {
  if (!is_device(device)) return fail(cudaErrorInvalidDevice);
  current = device;
  SIMGPU_ENTER();
  return cudaSuccess;
}

SIMGPU_EXPORT cudaError_t cudaDriverGetVersion(int* version) {
  *version = 13000;
  return cudaSuccess;
}

SIMGPU_EXPORT cudaError_t cudaRuntimeGetVersion(int* version) {
  return cudaDriverGetVersion(version);
}

SIMGPU_EXPORT cudaError_t cudaGetDeviceProperties(cudaDeviceProp* of, int device) {
  if (!is_device(device)) return fail(cudaErrorInvalidDevice);
  Unit unit = visible()[device];
  memset(of, 0, sizeof *of);
  snprintf(of->name, sizeof of->name, "Simulated GPU %d", unit.card);
  auto* uuid = reinterpret_cast<unsigned char*>(of->uuid.bytes);
  uuid[0] = 0xfa, uuid[1] = 0x4e;
  uuid[9] = static_cast<unsigned char>(unit.slice + 1);
  uuid[15] = static_cast<unsigned char>(unit.card + 1);
  of->totalGlobalMem = unit.bytes();
  of->major = 9, of->minor = 0;
  of->multiProcessorCount = 4;
  of->warpSize = 32;
  of->maxThreadsPerBlock = 1024;
  of->maxThreadsDim[0] = of->maxThreadsDim[1] = 1024, of->maxThreadsDim[2] = 64;
  of->maxGridSize[0] = 2147483647, of->maxGridSize[1] = of->maxGridSize[2] = 65535;
  of->maxThreadsPerMultiProcessor = 2048;
  of->regsPerBlock = of->regsPerMultiprocessor = 65536;
  of->sharedMemPerBlock = 49152;
  of->sharedMemPerBlockOptin = 232448;
  of->sharedMemPerMultiprocessor = 233472;
  of->l2CacheSize = 1 << 22;
  of->pciBusID = unit.card + 1;
  of->unifiedAddressing = of->managedMemory = of->concurrentKernels = 1;
  of->asyncEngineCount = 2;
  of->textureAlignment = 512;
  return cudaSuccess;
}

SIMGPU_EXPORT cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr name, int) {
  switch (name) {
    case cudaDevAttrComputeCapabilityMajor: *value = 9; break;
    case cudaDevAttrMultiProcessorCount: *value = 4; break;
    case cudaDevAttrMaxThreadsPerBlock: *value = 1024; break;
    case cudaDevAttrMaxGridDimX: *value = 2147483647; break;
    case cudaDevAttrWarpSize: *value = 32; break;
    default: *value = 0;
  }
  return cudaSuccess;
}

SIMGPU_EXPORT cudaError_t cudaDeviceGetPCIBusId(char* text, int size, int device) {
  if (!is_device(device)) return fail(cudaErrorInvalidDevice);
  snprintf(text, size_t(size), "0000:%02x:00.0", visible()[device].card + 1);
  return cudaSuccess;
}

SIMGPU_EXPORT cudaError_t cudaDeviceCanAccessPeer(int* can, int device, int peer) {
  if (!is_device(device) || !is_device(peer)) return fail(cudaErrorInvalidDevice);
  *can = device != peer && has_peer_access();
  return cudaSuccess;
}

SIMGPU_EXPORT cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned) {
  SIMGPU_ENTER();
  if (!is_device(peer) || peer == current) return fail(cudaErrorInvalidDevice);
  if (!has_peer_access()) return fail(cudaErrorPeerAccessUnsupported);
  thread_local bool enabled[MOST_UNITS][MOST_UNITS];
  if (enabled[current][peer]) return fail(cudaErrorPeerAccessAlreadyEnabled);
  enabled[current][peer] = true;
  return cudaSuccess;
}

SIMGPU_EXPORT cudaError_t cudaDeviceSynchronize() {
  SIMGPU_ENTER();
  if (cudaError_t error = device_wait_error(current)) return fail(error);
  wait_for_device(current);
  SIMGPU_ENTER();
  return cudaSuccess;
}

SIMGPU_EXPORT cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  SIMGPU_ENTER();
  Unit unit = visible().at(current);
  *total = unit.bytes();
  *free = unit.bytes() - used_bytes(unit);
  return cudaSuccess;
}
