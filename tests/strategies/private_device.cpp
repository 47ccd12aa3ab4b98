// A device of torch's PrivateUse1, whose memory the host cannot read.
//
// Device memory is a file that is mapped twice. The pointer that torch gets is at an
// address without access rights, so that code which takes it for host memory ends with
// SIGSEGV. An operator reads and writes the other address, with the CPU's kernels.
#include <ATen/ATen.h>
#include <ATen/NativeFunctions.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/alloc_cpu.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <sys/mman.h>
#include <torch/library.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <map>
#include <mutex>

namespace {

using c10::IValue;
constexpr auto DEVICE = c10::DeviceType::PrivateUse1;

// -- memory ----------------------------------------------------------------------------

struct Mapping {
  char* host;
  size_t size;
};
std::mutex mutex;
std::map<char*, Mapping> mappings;  // by the device's address

char* host_address(const void* pointer) {
  std::lock_guard<std::mutex> locked(mutex);
  auto* at = static_cast<char*>(const_cast<void*>(pointer));
  auto next = mappings.upper_bound(at);
  TORCH_CHECK(next != mappings.begin(), "not in device memory");
  --next;
  TORCH_CHECK(at < next->first + next->second.size, "not in device memory");
  return next->second.host + (at - next->first);
}

void release(void* pointer) {
  if (!pointer) return;
  std::lock_guard<std::mutex> locked(mutex);
  auto found = mappings.find(static_cast<char*>(pointer));
  munmap(found->first, found->second.size);
  munmap(found->second.host, found->second.size);
  mappings.erase(found);
}

struct Allocator : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    c10::Device device(DEVICE, 0);
    if (size == 0) return {nullptr, nullptr, &release, device};
    int file = memfd_create("private-device", MFD_CLOEXEC);
    TORCH_CHECK(file >= 0 && ftruncate(file, off_t(size)) == 0, "no memory");
    void* given = mmap(nullptr, size, PROT_NONE, MAP_SHARED, file, 0);
    void* host = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    TORCH_CHECK(given != MAP_FAILED && host != MAP_FAILED, "no memory");
    memset(host, 0xA5, size);  // new memory is not zero
    std::lock_guard<std::mutex> locked(mutex);
    mappings[static_cast<char*>(given)] = {static_cast<char*>(host), size};
    return {given, given, &release, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* target, const void* source, size_t size) const override {
    memcpy(host_address(target), host_address(source), size);
  }
};
Allocator allocator;
REGISTER_ALLOCATOR(DEVICE, &allocator);

// -- the device, of which there is one -------------------------------------------------

std::atomic<int> waits{0};

// Work is done when its call returns: a wait for it is only counted.
struct Guard : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return DEVICE; }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Device getDevice() const override { return {DEVICE, 0}; }
  c10::Device exchangeDevice(c10::Device) const override { return {DEVICE, 0}; }
  c10::Stream getStream(c10::Device) const noexcept override {
    return c10::Stream(c10::Stream::DEFAULT, c10::Device(DEVICE, 0));
  }
  c10::Stream exchangeStream(c10::Stream stream) const noexcept override {
    return stream;
  }
  void record(void**, const c10::Stream&, c10::DeviceIndex,
              c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, c10::DeviceIndex) const noexcept override {}
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeDevice(c10::DeviceIndex) const override { waits++; }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
};
bool are_hooked = (at::RegisterPrivateUse1HooksInterface(new Hooks), true);

// -- tensors ---------------------------------------------------------------------------

at::Tensor empty_strided(at::IntArrayRef sizes, at::IntArrayRef strides,
                         std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device>,
                         std::optional<bool>) {
  c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_strided_generic(sizes, strides, &allocator, keys,
                                           c10::dtype_or_default(dtype));
}

at::Tensor empty(at::IntArrayRef sizes, std::optional<at::ScalarType> dtype,
                 std::optional<at::Layout>, std::optional<at::Device>,
                 std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_generic(sizes, &allocator, keys, c10::dtype_or_default(dtype),
                                   format);
}

// A CPU tensor over the memory of a tensor.
at::Tensor on_host(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.device().type() != DEVICE) return tensor;
  auto options = tensor.options().device(at::kCPU).requires_grad(false);
  if (tensor.numel() == 0) return at::empty(tensor.sizes(), options);
  return at::from_blob(host_address(tensor.data_ptr()), tensor.sizes(),
                       tensor.strides(), [](void*) {}, options);
}

IValue on_host(const IValue& value) {
  if (value.isTensor()) return on_host(value.toTensor());
  if (value.isDevice()) return c10::Device(at::kCPU);
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& each : value.toTensorVector()) list.push_back(on_host(each));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const auto& each : value.toOptionalTensorVector())
      list.push_back(each ? std::optional(on_host(*each)) : std::nullopt);
    return list;
  }
  return value;
}

IValue on_device(const IValue& value) {
  if (!value.isTensor() || !value.toTensor().defined()) return value;
  const at::Tensor& host = value.toTensor();
  auto options = host.options().device(c10::Device(DEVICE, 0));
  at::Tensor made = at::empty_strided(host.sizes(), host.strides(), options);
  on_host(made).copy_(host);
  return made;
}

// Give an `out` that had no elements the size and the content of its CPU tensor.
void take_size(const at::Tensor& out, const IValue& host) {
  if (!out.defined() || out.sizes() == host.toTensor().sizes()) return;
  at::Tensor made = on_device(host).toTensor();
  out.unsafeGetTensorImpl()->set_storage_keep_dtype(made.storage());
  out.unsafeGetTensorImpl()->set_sizes_and_strides(made.sizes(), made.strides());
}

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool) {
  on_host(target).copy_(on_host(source));
  return target;
}

at::Scalar local_scalar(const at::Tensor& self) { return on_host(self).item(); }

// -- operators -------------------------------------------------------------------------

void boxed(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  size_t count = op.schema().arguments().size();
  torch::jit::Stack given(stack->end() - long(count), stack->end()), host;
  torch::jit::drop(*stack, count);
  for (const IValue& each : given) host.push_back(on_host(each));
  const torch::jit::Stack before(host);
  {
    at::NoGradGuard no_grad;
    op.callBoxed(&host);
  }
  std::vector<IValue> written;
  for (size_t i = 0; i < count; i++) {
    const auto* alias = op.schema().arguments()[i].alias_info();
    if (!alias || !alias->isWrite()) continue;
    if (given[i].isTensor()) take_size(given[i].toTensor(), before[i]);
    written.push_back(given[i]);
  }
  size_t next = 0;
  for (size_t i = 0; i < op.schema().returns().size(); i++) {
    const auto* alias = op.schema().returns()[i].alias_info();
    TORCH_CHECK(!alias || alias->isWrite(), "no view ", op.schema().name());
    stack->push_back(alias ? written.at(next++) : on_device(host[i]));
  }
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&boxed>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", TORCH_FN(empty));
  library.impl("empty_strided", TORCH_FN(empty_strided));
  library.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
  library.impl("view", TORCH_FN(at::native::view));
  library.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  library.impl("_copy_from", TORCH_FN(copy_from));
  library.impl("_local_scalar_dense", TORCH_FN(local_scalar));
}

}  // namespace

// The number of waits for the device.
extern "C" int private_device_waits() { return waits; }
