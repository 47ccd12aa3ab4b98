// aten's operators for CUDA tensors, run with the CPU's kernels.
//
// An operator is queued on the current stream and returns at once, as a kernel launch
// does. If it returns new tensors, a run with zeros as its arguments first shows their
// shapes. Where these depend on the arguments' values, it waits for the stream. What the
// CPU's kernel raises while it runs in the stream is a device-side assertion: it breaks
// the context.
#include <ATen/ATen.h>
#include <ATen/Context.h>
#include <ATen/NativeFunctions.h>
#include <ATen/SparseTensorImpl.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/Copy.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <torch/library.h>

#include <fstream>

namespace {

using c10::IValue;
using Stack = torch::jit::Stack;

// -- what the simulated runtime exports ------------------------------------------------

template <class Function>
Function* runtime(const char* name) {
  void* found = dlsym(RTLD_DEFAULT, name);
  TORCH_CHECK(found, "simgpu: the simulated CUDA runtime is not preloaded: ", name);
  return reinterpret_cast<Function*>(found);
}

void* host_address(const void* pointer) {
  static auto* function = runtime<void*(const void*)>("simgpu_host_address");
  return function(pointer);
}

void break_context(int device, int error) {
  static auto* function = runtime<void(int, int)>("simgpu_break_context");
  function(device, error);
}

int sticky_error(int device) {
  static auto* function = runtime<int(int)>("simgpu_sticky_error");
  return function(device);
}

// Run a function in the order of a stream. As each launch of a kernel, it raises the
// error that an earlier kernel has left.
void enqueue(c10::cuda::CUDAStream stream, std::function<void()> function) {
  static auto* put = runtime<void(void*, const std::function<void()>*)>("simgpu_enqueue");
  put(stream.stream(), &function);
  C10_CUDA_CHECK(cudaError_t(sticky_error(stream.device_index())));
}

std::vector<at::Tensor> tensors_in(const IValue& value) {
  if (value.isTensor()) return {value.toTensor()};
  if (value.isTensorList()) return value.toTensorVector();
  std::vector<at::Tensor> found;
  if (value.isOptionalTensorList())
    for (const auto& each : value.toOptionalTensorVector())
      if (each) found.push_back(*each);
  return found;
}

std::vector<at::Tensor> tensors_in(const Stack& stack) {
  std::vector<at::Tensor> found;
  for (const IValue& value : stack)
    for (const at::Tensor& each : tensors_in(value)) found.push_back(each);
  return found;
}

void report(const c10::OperatorHandle& op, int device, const char* text) {
  fprintf(stderr, "simgpu: assertion in %s on device %d: %s\n",
          op.schema().name().c_str(), device, text);
  break_context(device, cudaErrorAssert);
}

// Stores the results in `targets`. The arguments are a copy, because a graph runs the
// kernel again.
void run_kernel(const c10::OperatorHandle& op, Stack stack, int device,
                std::vector<at::Tensor> targets = {}) {
  at::NoGradGuard no_grad;
  try {
    op.callBoxed(&stack);
    auto results = tensors_in(stack);
    for (size_t i = 0; i < targets.size(); i++)
      if (results.at(i).defined()) targets[i].copy_(results[i]);
  } catch (const c10::Error& error) {
    report(op, device, error.what_without_backtrace());
  } catch (const std::exception& error) {
    report(op, device, error.what());
  }
}

// -- arguments -------------------------------------------------------------------------

bool is_sparse(const at::Tensor& tensor) {
  return tensor.defined() && tensor.layout() == at::kSparse;
}

// A CPU tensor over the memory of a CUDA tensor. It does not own the memory: that of a
// tensor that is freed before its kernel runs may be given to another tensor, as on a
// GPU.
at::Tensor over_memory_of(const at::Tensor& tensor) {
  auto options = tensor.options().device(at::kCPU).requires_grad(false);
  static char nothing[64];
  void* data = tensor.numel() ? host_address(tensor.data_ptr()) : nothing;
  at::Tensor made =
      at::from_blob(data, tensor.sizes(), tensor.strides(), [](void*) {}, options);
  made._set_conj(tensor.is_conj());
  made._set_neg(tensor.is_neg());
  return made;
}

at::Tensor on_cpu(const at::Tensor& tensor) {
  if (!tensor.defined()) return tensor;
  if (is_sparse(tensor)) {
    if (!tensor.is_cuda()) return tensor;
    auto made = at::_sparse_coo_tensor_unsafe(
        over_memory_of(tensor._indices()), over_memory_of(tensor._values()),
        tensor.sizes(), tensor.options().device(at::kCPU));
    return made._coalesced_(tensor.is_coalesced());
  }
  if (tensor.is_cuda()) return over_memory_of(tensor);
  // A launch reads a host tensor at once: the caller may change it afterwards.
  bool is_number = tensor.unsafeGetTensorImpl()->is_wrapped_number();
  at::Tensor copy = tensor.detach().clone();
  if (is_number) copy.unsafeGetTensorImpl()->set_wrapped_number(true);
  return copy;
}

// A value with other tensors in place of its tensors.
template <class Function>
IValue replaced(const IValue& value, Function function) {
  if (value.isTensor()) return function(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& each : value.toTensorVector()) list.push_back(function(each));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const auto& each : value.toOptionalTensorVector())
      list.push_back(each ? std::optional(function(*each)) : std::nullopt);
    return list;
  }
  return value;
}

IValue on_cpu(const IValue& value) {
  if (value.isDevice() && value.toDevice().is_cuda()) return c10::Device(at::kCPU);
  if (value.isGenerator()) return IValue();  // the CPU's default generator
  return replaced(value, [](const at::Tensor& each) { return on_cpu(each); });
}

// A CPU tensor of zeros, with the layout of another one.
at::Tensor zeros(const at::Tensor& like) {
  if (!like.defined()) return like;
  auto made = at::empty_strided(like.sizes(), like.strides(), like.options()).zero_();
  made._set_conj(like.is_conj());
  made._set_neg(like.is_neg());
  if (like.unsafeGetTensorImpl()->is_wrapped_number())
    made.unsafeGetTensorImpl()->set_wrapped_number(true);
  return made;
}

// Operators that take host tensors beside CUDA tensors.
bool takes_host_tensors(const std::string& name) {
  for (const char* part : {"index", "copy", "pack", "_to_", "normal", "random"})
    if (name.find(part) != std::string::npos) return true;
  return false;
}

// The device of the arguments.
c10::Device device_of(const std::vector<IValue>& arguments, const std::string& name) {
  std::optional<c10::Device> found;
  bool mixes = takes_host_tensors(name);
  for (const IValue& each : arguments)
    for (const at::Tensor& tensor : tensors_in(each)) {
      if (!tensor.defined() || !tensor.is_cuda()) continue;
      TORCH_CHECK(!found || *found == tensor.device() || tensor.dim() == 0,
                  "Expected all tensors to be on the same device, but found at least "
                  "two devices, ", *found, " and ", tensor.device(), "!");
      if (!found) found = tensor.device();
    }
  for (const IValue& each : arguments) {
    if (!found && each.isDevice() && each.toDevice().is_cuda()) found = each.toDevice();
    for (const at::Tensor& tensor : tensors_in(each))
      TORCH_CHECK(!found || mixes || !tensor.defined() || tensor.is_cuda() ||
                      tensor.dim() == 0,
                  "Expected all tensors to be on the same device, but found at least "
                  "two devices, ", *found, " and ", tensor.device(), "! (", name, ")");
  }
  TORCH_CHECK(found, "simgpu: no CUDA tensor among the arguments of ", name);
  if (!found->has_index())
    found = c10::Device(c10::kCUDA, c10::cuda::current_device());
  return *found;
}

// -- results ---------------------------------------------------------------------------

// New memory on a device for a result; nothing is written there.
at::Tensor room(const at::Tensor& result, c10::Device device) {
  if (!result.defined()) return result;
  return at::empty_strided(result.sizes(), result.strides(),
                           result.options().device(device));
}

at::Tensor on_device(const at::Tensor& tensor, c10::Device device) {
  if (!tensor.defined()) return tensor;
  if (is_sparse(tensor)) {
    auto made = at::_sparse_coo_tensor_unsafe(
        on_device(tensor._indices(), device), on_device(tensor._values(), device),
        tensor.sizes(), tensor.options().device(device));
    return made._coalesced_(tensor.is_coalesced());
  }
  auto made = room(tensor, device);
  if (tensor.numel()) made.copy_(tensor);
  return made;
}

IValue on_device(const IValue& value, c10::Device device) {
  return replaced(value, [=](const at::Tensor& each) { return on_device(each, device); });
}

// Give a sparse tensor the content of another one.
void store_sparse(const at::Tensor& target, const at::Tensor& content) {
  auto* impl = static_cast<at::SparseTensorImpl*>(target.unsafeGetTensorImpl());
  impl->raw_resize_(content.sparse_dim(), content.dense_dim(), content.sizes());
  impl->set_indices_and_values_unsafe(on_device(content._indices(), target.device()),
                                      on_device(content._values(), target.device()));
  impl->set_coalesced(content.is_coalesced());
}

// -- operators -------------------------------------------------------------------------

struct Call {
  const c10::OperatorHandle& op;
  std::vector<IValue> arguments;
  c10::Device device;
  c10::cuda::CUDAStream stream;
  std::shared_ptr<Stack> host;  // the arguments as CPU tensors; then the results

  bool is_written(size_t i) const {
    const auto* alias = op.schema().arguments()[i].alias_info();
    return alias && alias->isWrite();
  }
  bool only_writes() const {
    const auto& returns = op.schema().returns();
    if (returns.empty()) return op.schema().is_mutable();
    return std::all_of(returns.begin(), returns.end(),
                       [](const auto& each) { return each.alias_info() != nullptr; });
  }
  bool writes_sparse() const {
    for (size_t i = 0; i < arguments.size(); i++)
      if (is_written(i) && arguments[i].isTensor() && is_sparse(arguments[i].toTensor()))
        return true;
    return false;
  }
  // Whether an `out` of no elements must first get its size.
  bool resizes() const {
    for (size_t i = 0; i < arguments.size(); i++)
      if (op.schema().arguments()[i].is_out() && arguments[i].isTensor() &&
          arguments[i].toTensor().numel() == 0)
        return true;
    return false;
  }

  void run_now() {
    stream.synchronize();
    at::NoGradGuard no_grad;
    op.callBoxed(host.get());
  }
  // The results for zeros. None if the shapes depend on the values, if a second run
  // would draw other random numbers, and if zeros are refused.
  std::optional<Stack> results_for_zeros() const {
    for (at::Tag tag : {at::Tag::dynamic_output_shape, at::Tag::nondeterministic_seeded})
      if (op.hasTag(tag)) return std::nullopt;
    Stack stack;
    for (size_t i = 0; i < host->size(); i++) {
      if (is_written(i)) return std::nullopt;
      stack.push_back((*host)[i]);
    }
    auto is_dense = [&] {
      auto tensors = tensors_in(stack);
      return std::none_of(tensors.begin(), tensors.end(), is_sparse);
    };
    if (!is_dense()) return std::nullopt;
    for (IValue& each : stack) each = replaced(each, zeros);
    at::NoGradGuard no_grad;
    try {
      op.callBoxed(&stack);
    } catch (const std::exception&) {
      return std::nullopt;
    }
    for (const IValue& each : stack)
      if (!each.isTensor() && !each.isTensorList()) return std::nullopt;
    return is_dense() ? std::optional(stack) : std::nullopt;
  }
};

std::vector<IValue> written(const Call& call) {
  std::vector<IValue> found;
  for (size_t i = 0; i < call.arguments.size(); i++)
    if (call.is_written(i)) found.push_back(call.arguments[i]);
  return found;
}

void write(Call& call) {
  if (call.writes_sparse()) {
    std::vector<IValue> before(*call.host);
    call.run_now();
    for (size_t i = 0; i < call.arguments.size(); i++)
      if (call.is_written(i) && is_sparse(call.arguments[i].toTensor()))
        store_sparse(call.arguments[i].toTensor(), before[i].toTensor());
  } else if (call.resizes()) {
    for (size_t i = 0; i < call.arguments.size(); i++)
      if (call.op.schema().arguments()[i].is_out())
        (*call.host)[i] = at::empty(
            {0}, call.arguments[i].toTensor().options().device(at::kCPU));
    call.run_now();
    auto outputs = written(call);
    size_t first = call.host->size() - call.op.schema().returns().size();
    for (size_t i = first; i < call.host->size(); i++) {
      at::Tensor result = (*call.host)[i].toTensor();
      at::Tensor output = outputs[i - first].toTensor();
      output.resize_(result.sizes());
      if (result.numel()) output.copy_(result);
    }
  } else {
    auto run = [op = call.op, host = call.host, index = call.device.index()] {
      run_kernel(op, *host, index);
    };
    enqueue(call.stream, run);
  }
}

// Queue an operator that returns new tensors, or run it now.
Stack make(Call& call) {
  Stack made;
  auto results = call.results_for_zeros();
  if (!results) {
    call.run_now();
    for (const IValue& each : *call.host) made.push_back(on_device(each, call.device));
    return made;
  }
  for (const IValue& each : *results)
    made.push_back(replaced(
        each, [&](const at::Tensor& result) { return room(result, call.device); }));
  std::vector<at::Tensor> targets;
  for (const at::Tensor& each : tensors_in(made)) targets.push_back(on_cpu(each));
  enqueue(call.stream, [op = call.op, host = call.host, targets,
                        index = call.device.index()] {
    run_kernel(op, *host, index, targets);
  });
  return made;
}

void boxed(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  size_t count = op.schema().arguments().size();
  std::vector<IValue> arguments(stack->end() - long(count), stack->end());
  c10::Device device = device_of(arguments, op.schema().name());
  c10::cuda::CUDAGuard guard(device);
  auto host = std::make_shared<Stack>();
  Call call{op, arguments, device, c10::cuda::getCurrentCUDAStream(device.index()), host};
  for (size_t i = 0; i < count; i++) {
    // A host tensor that is written must be the caller's own.
    bool is_own = call.is_written(i) && arguments[i].isTensor() &&
                  !arguments[i].toTensor().is_cuda();
    host->push_back(is_own ? arguments[i] : on_cpu(arguments[i]));
  }
  torch::jit::drop(*stack, count);
  if (call.only_writes()) {
    write(call);
    auto outputs = written(call);
    for (size_t i = 0; i < op.schema().returns().size(); i++)
      stack->push_back(outputs.at(i));
  } else {
    for (IValue& each : make(call)) stack->push_back(std::move(each));
  }
}

// -- copies ----------------------------------------------------------------------------

// Tensors that one cudaMemcpyAsync copies.
bool is_plain(const at::Tensor& target, const at::Tensor& source) {
  return target.dtype() == source.dtype() && target.sizes() == source.sizes() &&
         target.is_contiguous() && source.is_contiguous() &&
         target.is_conj() == source.is_conj() && target.is_neg() == source.is_neg();
}

// aten's copy between devices uses cudaMemcpyAsync for plain tensors, and kernels on the
// GPU to make tensors plain. The kernels are replaced here.
at::Tensor& copy(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  if (self.numel() == 0 || is_plain(self, source))
    return at::native::copy_(self, source, non_blocking);
  if (self.is_cuda() && source.is_cuda()) {
    c10::cuda::CUDAGuard guard(source.device());
    auto stream = c10::cuda::getCurrentCUDAStream(source.device().index());
    at::Tensor to = over_memory_of(self), from = over_memory_of(source);
    auto run = [to, from]() mutable {
      at::NoGradGuard no_grad;
      to.copy_(from);
    };
    if (self.device() == source.device()) {
      enqueue(stream, run);
    } else {  // the streams of both devices wait for each other, as in aten
      auto other = c10::cuda::getCurrentCUDAStream(self.device().index());
      other.synchronize();
      enqueue(stream, run);
      stream.synchronize();
    }
    return self;
  }
  if (self.is_cuda()) {
    auto host = at::empty(self.sizes(), self.options().device(at::kCPU));
    host.copy_(source);
    auto device = at::empty(self.sizes(), self.options());
    at::native::copy_(device, host, false);
    return self.copy_(device);
  }
  auto host = at::empty(source.sizes(), source.options().device(at::kCPU));
  auto device = source.contiguous().resolve_conj().resolve_neg();
  at::native::copy_(host, device, false);
  return self.copy_(host);
}

// Lists whose tensors are on different devices are copied one by one, as in aten.
void copy_lists(at::TensorList targets, at::TensorList sources, bool non_blocking) {
  TORCH_CHECK(targets.size() == sources.size(), "lists of different lengths");
  for (size_t i = 0; i < targets.size(); i++)
    at::Tensor(targets[i]).copy_(sources[i], non_blocking);
}

// -- registration ----------------------------------------------------------------------

struct Silence : c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

// The names are in the file SIMGPU_OPS, which list_operators.py writes: a dispatch key
// and an operator a line.
struct Registration {
  torch::Library dense{torch::Library::IMPL, "aten", c10::DispatchKey::CUDA, __FILE__,
                       __LINE__};
  torch::Library sparse{torch::Library::IMPL, "aten", c10::DispatchKey::SparseCUDA,
                        __FILE__, __LINE__};
  Registration() {
    const char* path = getenv("SIMGPU_OPS");
    std::ifstream file(path ? path : "");
    TORCH_CHECK(file, "simgpu: SIMGPU_OPS names no file");
    Silence silence;  // torch warns of kernels that are replaced
    c10::WarningUtils::WarningHandlerGuard guard(&silence);
    std::string key, name;
    while (file >> key >> name)
      (key == "CUDA" ? dense : sparse)
          .impl(name.c_str(), torch::CppFunction::makeFromBoxedFunction<&boxed>());
    dense.impl("copy_", TORCH_FN(copy));
    dense.impl("_foreach_copy_", TORCH_FN(copy_lists));
    // cuDNN has kernels of its own. Without it, convolutions are aten's operators.
    at::globalContext().setUserEnabledCuDNN(false);
  }
};
Registration* registration = new Registration;

}  // namespace
