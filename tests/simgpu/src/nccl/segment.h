// The memory that the ranks of a communicator share, and what they tell each other in it.
#pragma once

#include <nccl.h>

#include "../runtime.h"

namespace simgpu {

constexpr int MOST_RANKS = 64;

// What a rank gives to a collective: its data, and what must agree on all ranks.
struct Contribution {
  Place input;
  bool has_input;
  int kind, type, op, root;
  size_t count;
  double scalar;  // of ncclRedOpCreatePreMulSum
};

// A message from one rank to another, which is taken from the sender's memory.
struct Letter {
  std::atomic<uint64_t> sent, taken;
  Place data;
  size_t bytes;
};

// What a rank tells the others while a communicator is made, divided or ended.
struct Note {
  int unit, pid;
  int color, key;
  int file;  // of a new communicator's segment, in the process `pid`
};

struct Line {
  alignas(64) std::atomic<uint64_t> phase;  // of the collectives, on the device
  alignas(64) std::atomic<uint64_t> round;  // of the notes, on the host
  Contribution contribution;
  Note notes[2];  // of even and odd rounds: a rank may be one round ahead
};

struct Segment {
  Line lines[MOST_RANKS];
  Letter letters[MOST_RANKS][MOST_RANKS];  // from, to
};

// A file of zeros with the size of a segment; -1 without memory.
int make_segment_file();
// Map the segment that a process has in a file; null if it cannot be.
Segment* map_segment(int pid, int file);

}  // namespace simgpu
