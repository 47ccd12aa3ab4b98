// The memory that all processes have taken of each card, as the driver counts it.
#pragma once

#include <cstdint>
#include <vector>

#include "config.h"

namespace simgpu {

struct Use {
  int pid;
  size_t bytes;
};

// The living processes that use a unit, and their bytes.
std::vector<Use> uses(Unit unit);

// Bytes that all processes use of a unit.
size_t used_bytes(Unit unit);

// Change what this process uses of a unit. False if the unit has no such room.
bool take_bytes(Unit unit, size_t bytes);
void return_bytes(Unit unit, size_t bytes);

}  // namespace simgpu
