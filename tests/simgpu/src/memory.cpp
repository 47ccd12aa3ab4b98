// Memory management: cudaMalloc, cudaHostAlloc, cudaMemcpyAsync, cudaMemsetAsync,
// cudaPointerGetAttributes, and CUDA IPC's memory handles.
//
// Device memory is a memfd. A pointer to it, as cudaMalloc returns it, is an address that
// the host cannot read: code that takes it for host memory ends with SIGSEGV, as with a
// GPU. The simulator itself reads and writes the memory at another address.
#include <cstring>
#include <fcntl.h>
#include <map>
#include <mutex>
#include <sys/mman.h>
#include <unistd.h>

#include "ledger.h"
#include "runtime.h"

namespace simgpu {
namespace {

struct Allocation {
  size_t size;
  int file;
  int device;
  bool is_imported;
  char* host;  // where the simulator reads and writes
  bool is_counted = true;  // not for imported memory and reserved ranges
};

std::mutex& mutex() {
  static auto* made = new std::mutex;
  return *made;
}
std::map<const char*, Allocation>& device_memory() {
  static auto* made = new std::map<const char*, Allocation>;
  return *made;
}
std::map<const char*, size_t>& pinned_memory() {
  static auto* made = new std::map<const char*, size_t>;
  return *made;
}

// The allocation that a pointer is within; the map's end if there is none.
auto find(const void* pointer) {
  auto& memory = device_memory();
  auto at = static_cast<const char*>(pointer);
  auto next = memory.upper_bound(at);
  if (next == memory.begin()) return memory.end();
  --next;
  return at < next->first + next->second.size ? next : memory.end();
}

// New memory holds what was there before, which is never zeros.
void poison(char* at, size_t size) { memset(at, 0xA5, std::min<size_t>(size, 1 << 20)); }

// Map a file twice: where the host cannot read it, and where the simulator does.
void* add(int file, size_t size, int device, bool is_imported, bool is_counted = true) {
  int kind = MAP_SHARED;
  if (is_imported && is_set("SIMGPU_IPC_STALE")) kind = MAP_PRIVATE;
  void* given = mmap(nullptr, size, PROT_NONE, MAP_SHARED, file, 0);
  void* host = mmap(nullptr, size, PROT_READ | PROT_WRITE, kind, file, 0);
  if (given == MAP_FAILED || host == MAP_FAILED) return nullptr;
  auto* bytes = static_cast<char*>(host);
  if (kind == MAP_PRIVATE) memset(bytes, 0xA5, std::min<size_t>(size, 1 << 20));
  std::lock_guard<std::mutex> locked(mutex());
  device_memory()[static_cast<char*>(given)] = {
      size, file, device, is_imported, bytes, is_counted && !is_imported};
  return given;
}

// Unmap an allocation, after the work that is queued on its device.
cudaError_t remove(void* pointer) {
  int device;
  {
    std::lock_guard<std::mutex> locked(mutex());
    auto found = device_memory().find(static_cast<char*>(pointer));
    if (found == device_memory().end()) return cudaErrorInvalidValue;
    device = found->second.device;
  }
  wait_for_device(device);
  std::lock_guard<std::mutex> locked(mutex());
  auto found = device_memory().find(static_cast<char*>(pointer));
  if (found == device_memory().end()) return cudaErrorInvalidValue;
  Allocation gone = found->second;
  device_memory().erase(found);
  munmap(pointer, gone.size);
  munmap(gone.host, gone.size);
  close(gone.file);
  if (gone.is_counted) return_bytes(visible().at(device), gone.size);
  return cudaSuccess;
}

struct Handle {
  char magic[8];
  Place place;
  int unit;  // index of the owner's
};

int open_file_of(int pid, int file) {
  char path[64];
  snprintf(path, sizeof path, "/proc/%d/fd/%d", pid, file);
  return open(path, O_RDWR | O_CLOEXEC);
}

// A memory access of a kernel: false if the memory is gone, which breaks the context.
bool resolve(int device, const void* pointer, bool was_device, char** host) {
  *host = static_cast<char*>(host_address(pointer));
  if (was_device && !is_device_memory(pointer)) *host = nullptr;
  if (*host) return true;
  fprintf(stderr, "simgpu: a copy of memory that was freed\n");
  break_context(device, cudaErrorIllegalAddress);
  return false;
}

}  // namespace

void* host_address(const void* pointer) {
  std::lock_guard<std::mutex> locked(mutex());
  auto found = find(pointer);
  if (found == device_memory().end()) return const_cast<void*>(pointer);
  return found->second.host + (static_cast<const char*>(pointer) - found->first);
}

bool is_device_memory(const void* pointer) {
  std::lock_guard<std::mutex> locked(mutex());
  return find(pointer) != device_memory().end();
}

bool is_pinned_memory(const void* pointer) {
  std::lock_guard<std::mutex> locked(mutex());
  auto& memory = pinned_memory();
  auto at = static_cast<const char*>(pointer);
  auto next = memory.upper_bound(at);
  if (next == memory.begin()) return false;
  --next;
  return at < next->first + next->second;
}

bool find_place(const void* pointer, Place* place) {
  std::lock_guard<std::mutex> locked(mutex());
  auto found = find(pointer);
  if (found == device_memory().end()) return false;
  const Allocation& in = found->second;
  auto offset = size_t(static_cast<const char*>(pointer) - found->first);
  *place = {getpid(), in.file, offset, in.size, in.device};
  return true;
}

void* map_place(const Place& place) {
  int file = open_file_of(place.pid, place.file);
  if (file < 0) return nullptr;
  void* made = add(file, place.length, current_device(), true);
  if (!made) close(file);
  return made;
}

void* reserve_range(size_t size) {
  int file = memfd_create("simgpu-range", MFD_CLOEXEC);
  void* made = nullptr;
  if (file >= 0 && ftruncate(file, off_t(size)) == 0)
    made = add(file, size, current_device(), false, false);
  if (!made && file >= 0) close(file);
  return made;
}

cudaError_t free_reserved_range(void* pointer) { return remove(pointer); }

void empty_range(void* pointer, size_t size) {
  Place place;
  if (!find_place(pointer, &place)) return;
  wait_for_device(place.device);
  fallocate(place.file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, off_t(place.offset),
            off_t(size));
}

}  // namespace simgpu

using namespace simgpu;

SIMGPU_EXPORT cudaError_t cudaMalloc(void** pointer, size_t size) {
  SIMGPU_ENTER();
  if (cudaError_t error = unsafe_call_error()) return fail(error);
  Unit unit = visible().at(current_device());
  if (!take_bytes(unit, size)) return fail(cudaErrorMemoryAllocation);
  int file = memfd_create("simgpu", MFD_CLOEXEC);
  void* made = nullptr;
  if (file >= 0 && ftruncate(file, off_t(size)) == 0)
    made = add(file, size, current_device(), false);
  if (!made) {
    return_bytes(unit, size);
    return fail(cudaErrorMemoryAllocation);
  }
  poison(static_cast<char*>(host_address(made)), size);
  *pointer = made;
  return cudaSuccess;
}

// It waits for the device, as CUDA's does.
SIMGPU_EXPORT cudaError_t cudaFree(void* pointer) {
  SIMGPU_ENTER();
  if (!pointer) return cudaSuccess;
  if (cudaError_t unsafe = unsafe_call_error()) return fail(unsafe);
  cudaError_t error = remove(pointer);
  return error == cudaSuccess ? error : fail(error);
}

SIMGPU_EXPORT cudaError_t cudaHostAlloc(void** pointer, size_t size, unsigned) {
  SIMGPU_ENTER();
  if (cudaError_t error = unsafe_call_error()) return fail(error);
  void* made = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS,
                    -1, 0);
  if (made == MAP_FAILED) return fail(cudaErrorMemoryAllocation);
  poison(static_cast<char*>(made), size);
  std::lock_guard<std::mutex> locked(mutex());
  pinned_memory()[static_cast<char*>(made)] = size;
  *pointer = made;
  return cudaSuccess;
}

SIMGPU_EXPORT cudaError_t cudaFreeHost(void* pointer) {
  for (int device = 0; is_device(device); device++) wait_for_device(device);
  std::lock_guard<std::mutex> locked(mutex());
  auto found = pinned_memory().find(static_cast<char*>(pointer));
  if (found == pinned_memory().end()) return fail(cudaErrorInvalidValue);
  munmap(pointer, found->second);
  pinned_memory().erase(found);
  return cudaSuccess;
}

SIMGPU_EXPORT cudaError_t cudaHostRegister(void* pointer, size_t size, unsigned) {
  SIMGPU_ENTER();
  std::lock_guard<std::mutex> locked(mutex());
  pinned_memory()[static_cast<char*>(pointer)] = size;
  return cudaSuccess;
}

SIMGPU_EXPORT cudaError_t cudaHostUnregister(void* pointer) {
  std::lock_guard<std::mutex> locked(mutex());
  return pinned_memory().erase(static_cast<char*>(pointer))
             ? cudaSuccess
             : fail(cudaErrorInvalidValue);
}

SIMGPU_EXPORT cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* of,
                                                   const void* pointer) {
  memset(of, 0, sizeof *of);
  Place place;
  if (find_place(pointer, &place)) {
    of->type = cudaMemoryTypeDevice;
    of->device = place.device;
    of->devicePointer = const_cast<void*>(pointer);
  } else if (is_pinned_memory(pointer)) {
    of->type = cudaMemoryTypeHost;
    of->device = current_device();
    of->hostPointer = of->devicePointer = const_cast<void*>(pointer);
  } else {
    of->type = cudaMemoryTypeUnregistered;
    of->device = -1;
  }
  return cudaSuccess;
}

static std::atomic<size_t> bytes_to_host{0};

// For tests: the bytes that this process has copied from a device to the host.
SIMGPU_EXPORT size_t simgpu_bytes_to_host() { return bytes_to_host; }

// From pageable host memory the data is taken before the call returns. To pageable host
// memory the call waits for the copy. From and to pinned memory it does neither.
SIMGPU_EXPORT cudaError_t cudaMemcpyAsync(void* target, const void* source, size_t size,
                                          cudaMemcpyKind, cudaStream_t handle) {
  SIMGPU_ENTER();
  if (size == 0) return cudaSuccess;
  Stream* stream = stream_of(handle);
  int device = device_of(stream);
  bool to_device = is_device_memory(target), from_device = is_device_memory(source);
  bool waits = !to_device && !is_pinned_memory(target);
  if (cudaError_t error = waits ? wait_error(stream) : cudaSuccess) return fail(error);
  if (from_device && !to_device) bytes_to_host += size;
  std::shared_ptr<std::vector<char>> taken;
  if (!from_device && !is_pinned_memory(source)) {
    auto* bytes = static_cast<const char*>(source);
    taken = std::make_shared<std::vector<char>>(bytes, bytes + size);
  }
  push_work(stream, [=] {
    char *to, *from;
    if (!resolve(device, target, to_device, &to)) return;
    if (taken)
      from = taken->data();
    else if (!resolve(device, source, from_device, &from))
      return;
    memmove(to, from, size);
  });
  if (waits) {
    wait_for(stream);
    SIMGPU_ENTER();
  }
  return cudaSuccess;
}

SIMGPU_EXPORT cudaError_t cudaMemcpy(void* target, const void* source, size_t size,
                                     cudaMemcpyKind kind) {
  cudaError_t error = cudaMemcpyAsync(target, source, size, kind, nullptr);
  return error == cudaSuccess ? cudaStreamSynchronize(nullptr) : error;
}

SIMGPU_EXPORT cudaError_t cudaMemcpyPeerAsync(void* target, int, const void* source, int,
                                              size_t size, cudaStream_t stream) {
  return cudaMemcpyAsync(target, source, size, cudaMemcpyDefault, stream);
}

SIMGPU_EXPORT cudaError_t cudaMemcpy2DAsync(void* target, size_t target_pitch,
                                            const void* source, size_t source_pitch,
                                            size_t width, size_t height,
                                            cudaMemcpyKind kind, cudaStream_t stream) {
  for (size_t row = 0; row < height; row++) {
    cudaError_t error = cudaMemcpyAsync(
        static_cast<char*>(target) + row * target_pitch,
        static_cast<const char*>(source) + row * source_pitch, width, kind, stream);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

SIMGPU_EXPORT cudaError_t cudaMemsetAsync(void* target, int value, size_t size,
                                          cudaStream_t handle) {
  SIMGPU_ENTER();
  if (size == 0) return cudaSuccess;
  Stream* stream = stream_of(handle);
  bool to_device = is_device_memory(target);
  push_work(stream, [=] {
    char* to;
    if (resolve(device_of(stream), target, to_device, &to)) memset(to, value, size);
  });
  return cudaSuccess;
}

SIMGPU_EXPORT cudaError_t cudaMemset(void* target, int value, size_t size) {
  return cudaMemsetAsync(target, value, size, nullptr);
}

SIMGPU_EXPORT cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t* handle,
                                              void* pointer) {
  SIMGPU_ENTER();
  if (is_set("SIMGPU_NO_IPC")) return fail(cudaErrorNotSupported);
  std::lock_guard<std::mutex> locked(mutex());
  auto found = find(pointer);
  if (found == device_memory().end() || found->second.is_imported)
    return fail(cudaErrorInvalidValue);
  const Allocation& in = found->second;
  Handle given{"SIMMEM",
               {getpid(), in.file, 0, in.size, in.device},
               visible().at(in.device).index()};
  static_assert(sizeof given <= sizeof *handle, "the handle has 64 bytes");
  memset(handle, 0, sizeof *handle);
  memcpy(handle, &given, sizeof given);
  return cudaSuccess;
}

// The memory is mapped for the current device. The process that allocated it cannot
// open its own handle, and a device without peer access cannot open another device's.
SIMGPU_EXPORT cudaError_t cudaIpcOpenMemHandle(void** pointer, cudaIpcMemHandle_t handle,
                                               unsigned) {
  SIMGPU_ENTER();
  Handle given;
  memcpy(&given, &handle, sizeof given);
  if (memcmp(given.magic, "SIMMEM", 7) != 0 || is_set("SIMGPU_NO_OPEN"))
    return fail(cudaErrorMapBufferObjectFailed);
  if (given.place.pid == getpid()) return fail(cudaErrorDeviceUninitialized);
  bool is_peer = given.unit != visible().at(current_device()).index();
  if (is_peer && is_set("SIMGPU_NO_P2P")) return fail(cudaErrorPeerAccessUnsupported);
  *pointer = map_place(given.place);
  return *pointer ? cudaSuccess : fail(cudaErrorMapBufferObjectFailed);
}

SIMGPU_EXPORT cudaError_t cudaIpcCloseMemHandle(void* pointer) {
  SIMGPU_ENTER();
  cudaError_t error = remove(pointer);
  return error == cudaSuccess ? error : fail(error);
}

// For the operators, which read and write device memory themselves.
SIMGPU_EXPORT void* simgpu_host_address(const void* pointer) {
  return host_address(pointer);
}
