// Virtual memory management: cuMemAddressReserve, cuMemCreate, cuMemMap, cuMemUnmap, with
// which torch's allocator has expandable segments.
//
// A reserved range is one file, so that a pointer into it is found as any device pointer
// is. Physical memory is only counted; an unmapped part of the file is emptied.
#include <cuda.h>

#include <cstring>
#include <fcntl.h>
#include <map>
#include <mutex>

#include "ledger.h"
#include "runtime.h"

namespace simgpu {
namespace {

struct Physical {
  size_t size;
  Unit unit;
  bool is_released = false, is_mapped = false;
};

std::mutex& mutex() {
  static auto* made = new std::mutex;
  return *made;
}
std::map<CUmemGenericAllocationHandle, Physical>& physical() {
  static auto* made = new std::map<CUmemGenericAllocationHandle, Physical>;
  return *made;
}
// The physical memory at each mapped address.
std::map<CUdeviceptr, CUmemGenericAllocationHandle>& mappings() {
  static auto* made = new std::map<CUdeviceptr, CUmemGenericAllocationHandle>;
  return *made;
}

// Memory is free when it is neither mapped nor held by its handle.
void forget_if_free(CUmemGenericAllocationHandle handle) {
  auto found = physical().find(handle);
  if (!found->second.is_released || found->second.is_mapped) return;
  return_bytes(found->second.unit, found->second.size);
  physical().erase(found);
}

CUresult reserve(CUdeviceptr* address, size_t size, size_t, CUdeviceptr,
                 unsigned long long) {
  if (entry_error() != cudaSuccess) return CUDA_ERROR_ILLEGAL_ADDRESS;
  void* made = reserve_range(size);
  if (!made) return CUDA_ERROR_OUT_OF_MEMORY;
  *address = reinterpret_cast<CUdeviceptr>(made);
  return CUDA_SUCCESS;
}

CUresult free_range(CUdeviceptr address, size_t) {
  cudaError_t error = free_reserved_range(reinterpret_cast<void*>(address));
  return error == cudaSuccess ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult create(CUmemGenericAllocationHandle* handle, size_t size,
                const CUmemAllocationProp* of, unsigned long long) {
  if (!is_device(of->location.id)) return CUDA_ERROR_INVALID_VALUE;
  Unit unit = visible()[size_t(of->location.id)];
  if (!take_bytes(unit, size)) return CUDA_ERROR_OUT_OF_MEMORY;
  std::lock_guard<std::mutex> locked(mutex());
  static CUmemGenericAllocationHandle last = 0;
  *handle = ++last;
  physical()[*handle] = {size, unit};
  return CUDA_SUCCESS;
}

CUresult release(CUmemGenericAllocationHandle handle) {
  std::lock_guard<std::mutex> locked(mutex());
  auto found = physical().find(handle);
  if (found == physical().end()) return CUDA_ERROR_INVALID_VALUE;
  found->second.is_released = true;
  forget_if_free(handle);
  return CUDA_SUCCESS;
}

CUresult map(CUdeviceptr address, size_t, size_t, CUmemGenericAllocationHandle handle,
             unsigned long long) {
  std::lock_guard<std::mutex> locked(mutex());
  auto found = physical().find(handle);
  if (found == physical().end() || found->second.is_mapped)
    return CUDA_ERROR_INVALID_VALUE;
  found->second.is_mapped = true;
  mappings()[address] = handle;
  return CUDA_SUCCESS;
}

// The range may have several pieces of physical memory.
CUresult unmap(CUdeviceptr address, size_t size) {
  std::lock_guard<std::mutex> locked(mutex());
  auto next = mappings().lower_bound(address);
  if (next == mappings().end() || next->first != address)
    return CUDA_ERROR_INVALID_VALUE;
  while (next != mappings().end() && next->first < address + size) {
    CUmemGenericAllocationHandle handle = next->second;
    next = mappings().erase(next);
    physical()[handle].is_mapped = false;
    forget_if_free(handle);
  }
  empty_range(reinterpret_cast<void*>(address), size);
  return CUDA_SUCCESS;
}

CUresult set_access(CUdeviceptr, size_t, const CUmemAccessDesc*, size_t) {
  return CUDA_SUCCESS;
}

}  // namespace

void* virtual_memory_function(const char* name) {
  const struct {
    const char* name;
    void* function;
  } functions[] = {
      {"cuMemAddressReserve", reinterpret_cast<void*>(reserve)},
      {"cuMemAddressFree", reinterpret_cast<void*>(free_range)},
      {"cuMemCreate", reinterpret_cast<void*>(create)},
      {"cuMemRelease", reinterpret_cast<void*>(release)},
      {"cuMemMap", reinterpret_cast<void*>(map)},
      {"cuMemUnmap", reinterpret_cast<void*>(unmap)},
      {"cuMemSetAccess", reinterpret_cast<void*>(set_access)},
  };
  for (auto& each : functions)
    if (strcmp(each.name, name) == 0) return each.function;
  return nullptr;
}

}  // namespace simgpu
