// Execution control: what nvcc's code calls to register and to launch a kernel.
//
// No machine code of a GPU runs. operators.cpp replaces the operators that launch
// kernels; the one kernel that is simulated here is that of torch.cuda._sleep.
#include <cstring>
#include <mutex>
#include <unordered_map>

#include "runtime.h"

namespace simgpu {
namespace {

constexpr double CLOCK_HZ = 2e9;

std::unordered_map<const void*, std::string>& kernels() {
  static auto* made = new std::unordered_map<const void*, std::string>;
  return *made;
}

struct Configuration {
  dim3 grid, block;
  size_t shared;
  cudaStream_t stream;
};
thread_local std::vector<Configuration> configurations;

// Occupies its stream for a time.
class Sleep : public Operation {
 public:
  explicit Sleep(double seconds) : seconds_(seconds) {}
  bool is_ready(Clock::time_point now) override {
    if (end_ == Clock::time_point())
      end_ = now + std::chrono::nanoseconds(int64_t(seconds_ * 1e9));
    return now >= end_;
  }
  bool run() override { return true; }

 private:
  double seconds_;
  Clock::time_point end_;
};

cudaError_t launch(const void* kernel, void** arguments, cudaStream_t stream) {
  SIMGPU_ENTER();
  auto found = kernels().find(kernel);
  std::string name = found == kernels().end() ? "?" : found->second;
  if (name.find("spin_kernel") != std::string::npos) {
    auto ticks = *static_cast<int64_t*>(arguments[0]);
    push(stream_of(stream), std::make_unique<Sleep>(double(ticks) / CLOCK_HZ));
    return cudaSuccess;
  }
  fprintf(stderr, "simgpu: no kernel %s\n", name.c_str());
  return fail(cudaErrorNotSupported);
}

}  // namespace
}  // namespace simgpu

using namespace simgpu;

SIMGPU_EXPORT void** __cudaRegisterFatBinary(void*) {
  static void* handle[4];
  return handle;
}
SIMGPU_EXPORT void __cudaRegisterFatBinaryEnd(void**) {}
SIMGPU_EXPORT void __cudaUnregisterFatBinary(void**) {}
SIMGPU_EXPORT char __cudaInitModule(void**) { return 0; }
SIMGPU_EXPORT void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int,
                                     int) {}
SIMGPU_EXPORT void __cudaRegisterFunction(void**, const char* host, char*,
                                          const char* name, int, uint3*, uint3*, dim3*,
                                          dim3*, int*) {
  kernels()[host] = name;
}

SIMGPU_EXPORT unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared,
                                                   cudaStream_t stream) {
  configurations.push_back({grid, block, shared, stream});
  return 0;
}

SIMGPU_EXPORT cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block,
                                                     size_t* shared, void* stream) {
  Configuration last = configurations.back();
  configurations.pop_back();
  *grid = last.grid, *block = last.block, *shared = last.shared;
  *static_cast<cudaStream_t*>(stream) = last.stream;
  return cudaSuccess;
}

SIMGPU_EXPORT cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  *kernel = static_cast<cudaKernel_t>(const_cast<void*>(function));
  return cudaSuccess;
}

SIMGPU_EXPORT cudaError_t cudaLaunchKernel(const void* kernel, dim3, dim3,
                                           void** arguments, size_t,
                                           cudaStream_t stream) {
  return launch(kernel, arguments, stream);
}

SIMGPU_EXPORT cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3, dim3,
                                             void** arguments, size_t,
                                             cudaStream_t stream) {
  return launch(kernel, arguments, stream);
}

SIMGPU_EXPORT cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* configuration,
                                              const void* kernel, void** arguments) {
  return launch(kernel, arguments, configuration->stream);
}

SIMGPU_EXPORT cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* of, const void*) {
  memset(of, 0, sizeof *of);
  of->maxThreadsPerBlock = 1024;
  return cudaSuccess;
}

SIMGPU_EXPORT cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) {
  return cudaSuccess;
}

SIMGPU_EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
    int* blocks, const void*, int, size_t, unsigned) {
  *blocks = 1;
  return cudaSuccess;
}

SIMGPU_EXPORT cudaError_t cudaProfilerStart() { return cudaSuccess; }
SIMGPU_EXPORT cudaError_t cudaProfilerStop() { return cudaSuccess; }
