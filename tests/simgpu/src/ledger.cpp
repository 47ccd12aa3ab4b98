// A file that all simulated processes map, SIMGPU_STATE. Each process has a line of it.
// The driver frees the memory of a process that dies; a line of a dead process does not
// count, and is given to the next process.
#include "ledger.h"

#include <atomic>
#include <cstring>
#include <fcntl.h>
#include <mutex>
#include <sys/file.h>
#include <sys/mman.h>
#include <unistd.h>

namespace simgpu {
namespace {

constexpr int LINES = 256;

struct Line {
  std::atomic<int64_t> pid, started;
  std::atomic<int64_t> bytes[MOST_UNITS];
};

// When a process was started, in clock ticks after the boot; 0 if there is none.
int64_t start_of(int pid) {
  char path[64], text[1024];
  snprintf(path, sizeof path, "/proc/%d/stat", pid);
  int file = open(path, O_RDONLY | O_CLOEXEC);
  if (file < 0) return 0;
  ssize_t length = read(file, text, sizeof text - 1);
  close(file);
  if (length <= 0) return 0;
  text[length] = 0;
  const char* at = strrchr(text, ')');  // the name may have spaces and brackets
  char state = at ? at[2] : 'X';
  if (state == 'Z' || state == 'X') return 0;
  for (int field = 2; at && field < 22; field++) at = strchr(at + 1, ' ');
  return at ? atoll(at + 1) : 0;
}

bool lives(const Line& line) {
  int64_t pid = line.pid.load();
  return pid && start_of(int(pid)) == line.started.load();
}

struct Ledger {
  int file = -1;
  Line* lines = nullptr;
  Line* mine = nullptr;
  int pid = 0;  // whose line `mine` is

  void open_file() {
    const char* path = getenv("SIMGPU_STATE");
    size_t size = LINES * sizeof(Line);
    if (path) file = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (file < 0) file = memfd_create("simgpu-ledger", MFD_CLOEXEC);
    void* at = MAP_FAILED;
    if (ftruncate(file, off_t(size)) == 0)
      at = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (at == MAP_FAILED) perror("simgpu: SIMGPU_STATE"), abort();
    lines = static_cast<Line*>(at);
  }

  Line& own() {
    if (pid == getpid()) return *mine;
    flock(file, LOCK_EX);
    for (int i = 0; i < LINES && pid != getpid(); i++) {
      if (lives(lines[i])) continue;
      for (auto& bytes : lines[i].bytes) bytes = 0;
      lines[i].started = start_of(getpid());
      lines[i].pid = getpid();
      mine = &lines[i];
      pid = getpid();
    }
    flock(file, LOCK_UN);
    if (pid != getpid()) fprintf(stderr, "simgpu: more than 256 processes\n"), abort();
    return *mine;
  }
};

std::mutex& mutex() {
  static auto* made = new std::mutex;
  return *made;
}

Ledger& ledger() {
  static auto* made = [] {
    auto* opened = new Ledger;
    opened->open_file();
    return opened;
  }();
  return *made;
}

}  // namespace

std::vector<Use> uses(Unit unit) {
  std::vector<Use> found;
  for (int i = 0; i < LINES; i++) {
    const Line& line = ledger().lines[i];
    size_t bytes = size_t(line.bytes[unit.index()].load());
    if (bytes && lives(line)) found.push_back({int(line.pid.load()), bytes});
  }
  return found;
}

size_t used_bytes(Unit unit) {
  size_t total = 0;
  for (const Use& use : uses(unit)) total += use.bytes;
  return total;
}

bool take_bytes(Unit unit, size_t bytes) {
  std::lock_guard<std::mutex> locked(mutex());
  Line& mine = ledger().own();
  if (used_bytes(unit) + bytes > unit.bytes()) return false;
  mine.bytes[unit.index()] += int64_t(bytes);
  return true;
}

void return_bytes(Unit unit, size_t bytes) {
  std::lock_guard<std::mutex> locked(mutex());
  ledger().own().bytes[unit.index()] -= int64_t(bytes);
}

}  // namespace simgpu
