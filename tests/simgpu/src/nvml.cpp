// NVML (libnvidia-ml.so.1): what nbdist and torch ask of it. NVML counts all cards, also
// those that CUDA_VISIBLE_DEVICES hides.
#include <cstring>

#include "ledger.h"
#include "runtime.h"

using namespace simgpu;

namespace {

enum Result {
  SUCCESS = 0,
  INVALID_ARGUMENT = 2,
  NOT_SUPPORTED = 3,
  NOT_FOUND = 6,
  INSUFFICIENT_SIZE = 7,
};

// The error that the first MIG device, or its card, gives for a function, as
// SIMGPU_NVML_ERROR has it: "nvmlDeviceGetUUID=4". SUCCESS without one.
int error_of(const char* function) {
  const char* text = getenv("SIMGPU_NVML_ERROR");
  size_t length = strlen(function);
  if (!text || strncmp(text, function, length) || text[length] != '=') return SUCCESS;
  return atoi(text + length + 1);
}

struct Device {
  Unit unit;
};

// The cards, and after them the MIG devices.
Device* devices() {
  static auto* made = [] {
    auto* array = new Device[MOST_CARDS + MOST_SLICES];
    for (int card = 0; card < MOST_CARDS; card++) array[card].unit = {card, -1};
    for (int slice = 0; slice < MOST_SLICES; slice++)
      array[MOST_CARDS + slice].unit = {0, slice};
    return array;
  }();
  return made;
}

// nvmlMemory_t, nvmlUtilization_t and nvmlProcessInfo_t.
struct Memory {
  unsigned long long total, free, used;
};
struct Utilization {
  unsigned gpu, memory;
};
struct ProcessInfoV1 {
  unsigned pid;
  unsigned long long used;
};
struct ProcessInfo {
  unsigned pid;
  unsigned long long used;
  unsigned gpu_instance, compute_instance;
};
// The beginning of nvmlGpuFabricInfoV_t, which all its versions have.
struct FabricInfo {
  unsigned version;
  unsigned char cluster[16];
  int status;
  unsigned clique;
  unsigned char state;
};

bool is_first_mig(const Device* device) {
  return device->unit == Unit{0, 0};
}

bool has_mig(const Device* device) {
  return device->unit.card == 0 && device->unit.slice < 0 && slice_count() > 0;
}

// The units of a device: a card with MIG has several.
std::vector<Unit> units_of(const Device* device) {
  if (!has_mig(device)) return {device->unit};
  std::vector<Unit> found;
  for (int slice = 0; slice < slice_count(); slice++) found.push_back({0, slice});
  return found;
}

}  // namespace

SIMGPU_EXPORT int nvmlInit() { return SUCCESS; }
SIMGPU_EXPORT int nvmlInit_v2() { return SUCCESS; }
SIMGPU_EXPORT int nvmlInitWithFlags(unsigned) { return SUCCESS; }
SIMGPU_EXPORT int nvmlShutdown() { return SUCCESS; }

SIMGPU_EXPORT const char* nvmlErrorString(int error) {
  switch (error) {
    case NOT_SUPPORTED: return "Not Supported";
    case NOT_FOUND: return "Not Found";
    default: return "an error of the simulated NVML";
  }
}

SIMGPU_EXPORT int nvmlDeviceGetCount_v2(unsigned* count) {
  *count = unsigned(card_count());
  return SUCCESS;
}
SIMGPU_EXPORT int nvmlDeviceGetCount(unsigned* count) {
  return nvmlDeviceGetCount_v2(count);
}

SIMGPU_EXPORT int nvmlDeviceGetHandleByIndex_v2(unsigned index, Device** device) {
  if (int(index) >= card_count()) return INVALID_ARGUMENT;
  *device = &devices()[index];
  return SUCCESS;
}

SIMGPU_EXPORT int nvmlDeviceGetHandleByUUID(const char* uuid, Device** device) {
  for (int i = 0; i < MOST_CARDS + MOST_SLICES; i++) {
    Unit unit = devices()[i].unit;
    bool is_there = unit.slice < 0 ? unit.card < card_count() : unit.slice < slice_count();
    if (!is_there || unit.uuid() != uuid) continue;
    *device = &devices()[i];
    return SUCCESS;
  }
  return NOT_FOUND;
}

// torch asks for it to describe a lack of memory.
SIMGPU_EXPORT int nvmlDeviceGetHandleByPciBusId_v2(const char* bus, Device** device) {
  for (unsigned card = 0; int(card) < card_count(); card++) {
    char text[32];
    snprintf(text, sizeof text, "%02x:00", card + 1);
    if (strstr(bus, text)) return nvmlDeviceGetHandleByIndex_v2(card, device);
  }
  return NOT_FOUND;
}

SIMGPU_EXPORT int nvmlDeviceGetUUID(Device* device, char* text, unsigned size) {
  if (int error = is_first_mig(device) ? error_of("nvmlDeviceGetUUID") : 0) return error;
  snprintf(text, size, "%s", device->unit.uuid().c_str());
  return SUCCESS;
}

SIMGPU_EXPORT int nvmlDeviceGetName(Device* device, char* text, unsigned size) {
  if (int error = has_mig(device) ? error_of("nvmlDeviceGetName") : 0) return error;
  snprintf(text, size, "Simulated GPU %d", device->unit.card);
  return SUCCESS;
}

// A machine whose CPU and GPU share memory, such as a GB10, does not support it.
SIMGPU_EXPORT int nvmlDeviceGetMemoryInfo(Device* device, Memory* memory) {
  if (int error = is_first_mig(device) ? error_of("nvmlDeviceGetMemoryInfo") : 0) return error;
  if (is_set("SIMGPU_UMA")) return NOT_SUPPORTED;
  *memory = {};
  for (const Unit& unit : units_of(device)) {
    memory->total += unit.bytes();
    memory->used += used_bytes(unit);
  }
  memory->free = memory->total - memory->used;
  return SUCCESS;
}

SIMGPU_EXPORT int nvmlDeviceGetComputeMode(Device*, int* mode) {
  *mode = compute_mode();
  return SUCCESS;
}

SIMGPU_EXPORT int nvmlDeviceGetMigMode(Device* device, unsigned* now, unsigned* later) {
  if (slice_count() == 0) return NOT_SUPPORTED;
  *now = *later = has_mig(device);
  return SUCCESS;
}

SIMGPU_EXPORT int nvmlDeviceGetMaxMigDeviceCount(Device* device, unsigned* count) {
  *count = has_mig(device) ? MOST_SLICES : 0;
  return SUCCESS;
}

SIMGPU_EXPORT int nvmlDeviceGetMigDeviceHandleByIndex(Device* device, unsigned index,
                                                      Device** slice) {
  if (int error = index == 0 ? error_of("nvmlDeviceGetMigDeviceHandleByIndex") : 0) return error;
  if (!has_mig(device)) return NOT_SUPPORTED;
  if (int(index) >= slice_count()) return NOT_FOUND;
  *slice = &devices()[MOST_CARDS + index];
  return SUCCESS;
}

SIMGPU_EXPORT int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(Device* slice,
                                                               Device** device) {
  if (slice->unit.slice < 0) return INVALID_ARGUMENT;
  *device = &devices()[slice->unit.card];
  return SUCCESS;
}

SIMGPU_EXPORT int nvmlDeviceGetP2PStatus(Device*, Device*, int, int* status) {
  *status = is_set("SIMGPU_NO_P2P");  // NVML_P2P_STATUS_OK is 0
  return SUCCESS;
}

// Not supported for a MIG device.
SIMGPU_EXPORT int nvmlDeviceGetUtilizationRates(Device* device, Utilization* rates) {
  if (device->unit.slice >= 0 || has_mig(device)) return NOT_SUPPORTED;
  *rates = {42, 7};
  return SUCCESS;
}

// In degrees Celsius. A MIG device has no sensor of its own, and no meter of power.
SIMGPU_EXPORT int nvmlDeviceGetTemperature(Device* device, int, unsigned* degrees) {
  if (device->unit.slice >= 0) return INVALID_ARGUMENT;
  *degrees = 40 + unsigned(device->unit.card);
  return SUCCESS;
}

SIMGPU_EXPORT int nvmlDeviceGetPowerUsage(Device* device, unsigned* milliwatts) {
  if (device->unit.slice >= 0) return NOT_SUPPORTED;
  *milliwatts = 250000 + 1000 * unsigned(device->unit.card);
  return SUCCESS;
}

SIMGPU_EXPORT int nvmlDeviceGetComputeRunningProcesses_v3(Device* device, unsigned* count,
                                                          ProcessInfo* processes) {
  unsigned room = processes ? *count : 0;
  *count = 0;
  for (const Unit& unit : units_of(device))
    for (const Use& use : uses(unit)) {
      if (*count < room)
        processes[*count] = {unsigned(use.pid), use.bytes, 0xFFFFFFFF, 0xFFFFFFFF};
      ++*count;
    }
  return *count > room ? INSUFFICIENT_SIZE : SUCCESS;
}

// The first version's nvmlProcessInfo_t has no instances.
SIMGPU_EXPORT int nvmlDeviceGetComputeRunningProcesses(Device* device, unsigned* count,
                                                       ProcessInfoV1* processes) {
  std::vector<ProcessInfo> found(processes ? *count : 0);
  int result = nvmlDeviceGetComputeRunningProcesses_v3(
      device, count, processes ? found.data() : nullptr);
  for (size_t i = 0; i < found.size() && i < *count; i++)
    processes[i] = {found[i].pid, found[i].used};
  return result;
}

SIMGPU_EXPORT int nvmlSystemGetDriverVersion(char* text, unsigned size) {
  snprintf(text, size, "580.00");
  return SUCCESS;
}

// There is no NVLink.
SIMGPU_EXPORT int nvmlDeviceGetNvLinkRemoteDeviceType() { return NOT_SUPPORTED; }
SIMGPU_EXPORT int nvmlDeviceGetNvLinkRemotePciInfo_v2() { return NOT_SUPPORTED; }

// Cards of this compute capability answer, and say that they are in no fabric
// (NVML_GPU_FABRIC_STATE_NOT_SUPPORTED). torch warns of cards that do not answer.
SIMGPU_EXPORT int nvmlDeviceGetGpuFabricInfoV(Device*, FabricInfo* info) {
  info->status = NOT_SUPPORTED, info->state = 0;
  return SUCCESS;
}

SIMGPU_EXPORT int nvmlSystemGetCudaDriverVersion_v2(int* version) {
  *version = 13000;
  return SUCCESS;
}
