// Reductions, element by element. Narrow floating-point numbers are computed in float32,
// and rounded after each step. As on a GPU, "min" and "max" of a number and a NaN are the
// number.
#include "reduction.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Float8_e4m3fn.h>
#include <c10/util/Float8_e5m2.h>
#include <c10/util/Half.h>

#include <cmath>
#include <type_traits>

namespace simgpu {
namespace {

// The type in which an element is computed.
template <class T>
using Wide = std::conditional_t<std::is_arithmetic_v<T>, T, float>;

// Call `function` with a null pointer of the element's type.
template <class Function>
void with_type(ncclDataType_t type, Function function) {
  switch (type) {
    case ncclInt8: return function(static_cast<int8_t*>(nullptr));
    case ncclUint8: return function(static_cast<uint8_t*>(nullptr));
    case ncclInt32: return function(static_cast<int32_t*>(nullptr));
    case ncclUint32: return function(static_cast<uint32_t*>(nullptr));
    case ncclInt64: return function(static_cast<int64_t*>(nullptr));
    case ncclUint64: return function(static_cast<uint64_t*>(nullptr));
    case ncclFloat16: return function(static_cast<c10::Half*>(nullptr));
    case ncclFloat32: return function(static_cast<float*>(nullptr));
    case ncclFloat64: return function(static_cast<double*>(nullptr));
    case ncclBfloat16: return function(static_cast<c10::BFloat16*>(nullptr));
    case ncclFloat8e4m3: return function(static_cast<c10::Float8_e4m3fn*>(nullptr));
    case ncclFloat8e5m2: return function(static_cast<c10::Float8_e5m2*>(nullptr));
    default: return;
  }
}

template <class W>
W least(W a, W b) {
  if constexpr (std::is_floating_point_v<W>) return std::fmin(a, b);
  return b < a ? b : a;
}

template <class W>
W greatest(W a, W b) {
  if constexpr (std::is_floating_point_v<W>) return std::fmax(a, b);
  return a < b ? b : a;
}

template <class T, class Function>
void each(void* target, const void* source, size_t count, Function function) {
  auto* to = static_cast<T*>(target);
  auto* from = static_cast<const T*>(source);
  for (size_t i = 0; i < count; i++)
    to[i] = static_cast<T>(
        function(static_cast<Wide<T>>(to[i]), static_cast<Wide<T>>(from[i])));
}

}  // namespace

size_t size_of(ncclDataType_t type) {
  size_t size = 0;
  with_type(type, [&](auto* kind) { size = sizeof *kind; });
  return size;
}

double read_scalar(const void* data, ncclDataType_t type) {
  double value = 0;
  with_type(type, [&](auto* kind) {
    using T = std::remove_pointer_t<decltype(kind)>;
    value = double(static_cast<Wide<T>>(*static_cast<const T*>(data)));
  });
  return value;
}

void combine(void* target, const void* source, size_t count, ncclDataType_t type,
             ncclRedOp_t op) {
  with_type(type, [&](auto* kind) {
    using T = std::remove_pointer_t<decltype(kind)>;
    using W = Wide<T>;
    switch (op) {
      case ncclProd:
        return each<T>(target, source, count, [](W a, W b) { return W(a * b); });
      case ncclMin: return each<T>(target, source, count, least<W>);
      case ncclMax: return each<T>(target, source, count, greatest<W>);
      default: return each<T>(target, source, count, [](W a, W b) { return W(a + b); });
    }
  });
}

void scale(void* target, size_t count, ncclDataType_t type, double factor) {
  with_type(type, [&](auto* kind) {
    using T = std::remove_pointer_t<decltype(kind)>;
    using W = Wide<T>;
    each<T>(target, target, count, [&](W a, W) { return W(a * W(factor)); });
  });
}

void divide(void* target, size_t count, ncclDataType_t type, int divisor) {
  with_type(type, [&](auto* kind) {
    using T = std::remove_pointer_t<decltype(kind)>;
    using W = Wide<T>;
    each<T>(target, target, count, [&](W a, W) { return W(a / W(divisor)); });
  });
}

}  // namespace simgpu
