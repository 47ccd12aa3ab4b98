// What the units of the simulated CUDA runtime share.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "config.h"

#define SIMGPU_EXPORT extern "C" __attribute__((visibility("default")))

namespace simgpu {

using Clock = std::chrono::steady_clock;

// -- devices.cpp -----------------------------------------------------------------------

// The devices that CUDA_VISIBLE_DEVICES leaves to this process.
const std::vector<Unit>& visible();
int current_device();
bool is_device(int device);

// -- errors.cpp ------------------------------------------------------------------------

// Return an error, and keep it for cudaGetLastError.
cudaError_t fail(cudaError_t error);

// As cuInit: fails in a child that was forked after its parent had used CUDA.
cudaError_t initialise();

// The error with which each call must end: of a context that a kernel has broken, or of
// a process that was forked after its parent had used CUDA. It also makes the context.
cudaError_t entry_error();
bool has_context(int device);

// Break the context of a device: a sticky error.
void break_context(int device, cudaError_t error);
cudaError_t broken(int device);

#define SIMGPU_ENTER()                                                  \
  do {                                                                  \
    if (cudaError_t entered = simgpu::entry_error(); entered != cudaSuccess) \
      return simgpu::fail(entered);                                     \
  } while (0)

// -- streams.cpp -----------------------------------------------------------------------

// Work that a stream runs in its turn.
class Operation {
 public:
  virtual ~Operation() = default;
  // Whether it can run now. Called with the lock of all streams: must be short.
  virtual bool is_ready(Clock::time_point) { return true; }
  // Run it, or a step of it. False to be called again later.
  virtual bool run() = 0;
  // What it is, for simgpu_print_streams.
  virtual std::string describe() const { return "work"; }
};

struct Stream;

// The stream of a handle. 0 and cudaStreamPerThread are the device's default stream.
Stream* stream_of(cudaStream_t handle);
int device_of(Stream* stream);
// Sometimes wait, as a host whose process gets no core (SIMGPU_HOST_PAUSE_US).
void pause_host();
void push(Stream* stream, std::unique_ptr<Operation> operation);
// Queue a function. It begins after a random delay.
void push_work(Stream* stream, std::function<void()> work);
// Wait for the work queued so far.
void wait_for(Stream* stream);
void wait_for_device(int device);
// Drop the work queued on a device whose context is broken.
void drop_work(int device);

// -- graphs.cpp ------------------------------------------------------------------------

// The error of a call that a capture prohibits, which invalidates the capture; or
// cudaSuccess. The calls: one that may wait or change the device, a wait for a stream,
// and one for a device.
cudaError_t unsafe_call_error();
cudaError_t wait_error(Stream* waited);
cudaError_t device_wait_error(int device);
// The number of the capture of a stream; 0 if there is none.
unsigned long long capture_of(Stream* stream);
// Keep an operation for the graph. False if the stream is not captured.
bool capture(Stream* stream, std::unique_ptr<Operation>& operation);
void join_capture(Stream* stream, unsigned long long id);
void invalidate_capture(unsigned long long id);

// -- memory.cpp ------------------------------------------------------------------------

// Where a piece of device memory is, for this process and for others.
struct Place {
  int pid, file;
  size_t offset;  // in the file
  size_t length;  // of the file
  int device;
};

// The address at which this process can read and write device memory. A pointer that
// CUDA gave out cannot be dereferenced by the host, as on a GPU. Other pointers are
// returned unchanged, and a null pointer stands for device memory that was freed.
void* host_address(const void* pointer);
bool is_device_memory(const void* pointer);
bool is_pinned_memory(const void* pointer);
// False if the pointer is not within device memory.
bool find_place(const void* pointer, Place* place);
// Map device memory of another process at a new device address; null if it cannot be.
void* map_place(const Place& place);
// Device addresses that no memory is counted for, or null.
void* reserve_range(size_t size);
cudaError_t free_reserved_range(void* pointer);
// Give the memory of a part of a reserved range back.
void empty_range(void* pointer, size_t size);

// -- virtual_memory.cpp ----------------------------------------------------------------

// The driver's function of this name; null if it is none of virtual memory.
void* virtual_memory_function(const char* name);

}  // namespace simgpu
