// A communicator, and the work that is queued on it.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "segment.h"

namespace simgpu {

struct PreMulSum {
  ncclDataType_t type;
  const void* device;  // read while the collective runs; null for `value`
  double value;
};

// What this process knows of a communicator. Queued work keeps it alive.
struct Communicator {
  int rank, size, device;
  Segment* segment;
  bool is_blocking = true;

  // Collectives that the device has begun, and notes that were exchanged.
  uint64_t phase = 0, round = 0;
  // NCCL's work of a communicator runs in the order in which it was queued, whatever
  // its streams are: each piece has a number, and waits for its turn.
  std::atomic<uint64_t> queued{0}, turn{0};
  // Letters by the other rank: those that were posted here, and those that were taken.
  uint64_t sent[MOST_RANKS] = {}, taken[MOST_RANKS] = {};

  std::atomic<bool> is_aborted{false}, is_revoked{false}, is_finalized{false};
  // The error of ncclCommGetAsyncError. After one, the work of the communicator stands
  // until it is aborted, as that of a peer's connection that has failed.
  std::atomic<int> error{ncclSuccess};

  std::mutex mutex;  // for what follows
  std::map<int, PreMulSum> operations;
  int next_operation = ncclNumOps;

  ~Communicator();
  bool is_released() const { return is_aborted || is_revoked; }
  Line& own_line() { return segment->lines[rank]; }
};

using Comm = std::shared_ptr<Communicator>;

// The communicator of a handle; null for one that was destroyed.
Comm comm_of(ncclComm_t handle);

// Keep the text for ncclGetLastError, and return the error.
ncclResult_t nccl_error(ncclResult_t error, const std::string& text);

}  // namespace simgpu
