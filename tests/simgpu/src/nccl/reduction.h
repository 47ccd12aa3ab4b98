// NCCL's data types and reductions.
#pragma once

#include <nccl.h>

#include <cstddef>

namespace simgpu {

// Bytes of an element; 0 for an unknown type.
size_t size_of(ncclDataType_t type);

// The value of one element, as a double.
double read_scalar(const void* data, ncclDataType_t type);

// target = target op source. The average adds.
void combine(void* target, const void* source, size_t count, ncclDataType_t type,
             ncclRedOp_t op);
// target = target * factor, or target / factor.
void scale(void* target, size_t count, ncclDataType_t type, double factor);
void divide(void* target, size_t count, ncclDataType_t type, int divisor);

}  // namespace simgpu
