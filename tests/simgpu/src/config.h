// The simulated machine, as environment variables describe it. ../README.md lists them.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

namespace simgpu {

constexpr int MOST_CARDS = 16;
constexpr int MOST_SLICES = 8;

inline long number_of(const char* name, long otherwise) {
  const char* text = getenv(name);
  return text && *text ? atol(text) : otherwise;
}

inline bool is_set(const char* name) { return number_of(name, 0) != 0; }

inline int card_count() { return int(number_of("SIMGPU_COUNT", 1)); }

inline size_t card_bytes() { return size_t(number_of("SIMGPU_MEM_MB", 16384)) << 20; }

// Bytes that a process's context takes on each card that it uses.
inline size_t context_bytes() {
  return size_t(number_of("SIMGPU_CONTEXT_MB", 300)) << 20;
}

// cudaComputeMode of all cards, which NVML numbers alike.
inline int compute_mode() { return int(number_of("SIMGPU_COMPUTE_MODE", 0)); }

// MIG devices of the first card; 0 if MIG is off.
inline int slice_count() { return int(number_of("SIMGPU_MIG", 0)); }

// What CUDA calls a device: a card, or a MIG device ("slice") of one.
struct Unit {
  int card;
  int slice;  // -1 for a whole card

  bool operator==(const Unit& other) const {
    return card == other.card && slice == other.slice;
  }
  int index() const { return card * (MOST_SLICES + 1) + slice + 1; }
  size_t bytes() const { return slice < 0 ? card_bytes() : card_bytes() / slice_count(); }
  std::string uuid() const {
    char text[64];
    snprintf(text, sizeof text, "%s-fa4e0000-0000-0000-00%02x-%012x",
             slice < 0 ? "GPU" : "MIG", slice + 1, card + 1);
    return text;
  }
};

constexpr int MOST_UNITS = MOST_CARDS * (MOST_SLICES + 1);

inline std::vector<Unit> all_units() {
  std::vector<Unit> found;
  for (int card = 0; card < card_count(); card++) {
    if (card > 0 || slice_count() == 0)
      found.push_back({card, -1});
    else
      for (int slice = 0; slice < slice_count(); slice++) found.push_back({card, slice});
  }
  return found;
}

}  // namespace simgpu
