// Streams: cudaStreamCreate, cudaStreamSynchronize, cudaStreamQuery, cudaLaunchHostFunc.
//
// A stream is a queue. One thread of the process runs the first operations of all
// streams in a random order, and puts some of them off, so that streams which nothing
// orders do run in another order. All streams behave as cudaStreamNonBlocking ones: they
// are not ordered by the default stream.
#include <algorithm>
#include <condition_variable>
#include <cstdlib>
#include <deque>
#include <map>
#include <mutex>
#include <random>
#include <set>
#include <thread>
#include <unistd.h>

#include "runtime.h"

namespace simgpu {

struct Stream {
  explicit Stream(int on) : device(on) {}

  const int device;
  std::deque<std::unique_ptr<Operation>> queue;
  uint64_t pushed = 0, finished = 0;
  bool is_running = false, is_destroyed = false;
  int dropped = 0;          // times that `drop_work` was called
  Clock::time_point again;  // when an unfinished operation is called again
  std::chrono::microseconds pause{0};
};

namespace {

using std::chrono::microseconds;
constexpr microseconds SHORTEST_PAUSE{50}, LONGEST_PAUSE{400};

// None of these is ever destroyed: the thread runs until the process has ended.
std::mutex& mutex() {
  static auto* made = new std::mutex;
  return *made;
}
std::condition_variable& pushed() {
  static auto* made = new std::condition_variable;
  return *made;
}
std::condition_variable& finished() {
  static auto* made = new std::condition_variable;
  return *made;
}
std::set<Stream*>& streams() {
  static auto* made = new std::set<Stream*>;
  return *made;
}
std::map<int, Stream*>& default_streams() {
  static auto* made = new std::map<int, Stream*>;
  return *made;
}

bool is_ending = false;  // guarded by the mutex, as the streams are

// A rank has its own numbers, which are the same in each run with this seed.
std::mt19937& random_numbers() {
  static auto* made = [] {
    auto seed = std::uint32_t(number_of("SIMGPU_SEED", 0));
    auto rank = std::uint32_t(
        number_of("OMPI_COMM_WORLD_RANK", number_of("RANK", 0)));
    std::seed_seq both{seed, rank};
    return new std::mt19937(both);
  }();
  return *made;
}

// How long an operation is put off: mostly not at all, sometimes a little, and rarely
// for many operations' time, which is when a missing wait shows.
microseconds random_delay() {
  static const long longest = number_of("SIMGPU_JITTER_US", 100);
  if (longest <= 0) return microseconds(0);
  auto draw = random_numbers()() % 100;
  if (draw < 65) return microseconds(0);
  long bound = draw < 96 ? longest : 30 * longest;
  return microseconds(random_numbers()() % bound);
}

class Work : public Operation {
 public:
  explicit Work(std::function<void()> work) : work_(std::move(work)) {}
  bool is_ready(Clock::time_point now) override {
    if (begin_ == Clock::time_point()) begin_ = now + random_delay();
    return now >= begin_;
  }
  bool run() override {
    work_();
    return true;
  }

 private:
  std::function<void()> work_;
  Clock::time_point begin_;
};

// Take the first operation off its queue. Called with the lock.
void pop(Stream* stream) {
  stream->queue.pop_front();
  stream->finished++;
  stream->pause = microseconds(0);
  stream->again = Clock::time_point();
}

void run_one(Stream* stream, std::unique_lock<std::mutex>& lock) {
  Operation* operation = stream->queue.front().get();
  stream->is_running = true;
  int dropped = stream->dropped;
  lock.unlock();
  bool is_done = operation->run();
  lock.lock();
  stream->is_running = false;
  if (is_done || stream->dropped != dropped) {
    pop(stream);
    finished().notify_all();
  } else {
    stream->pause = std::min(std::max(stream->pause * 2, SHORTEST_PAUSE), LONGEST_PAUSE);
    stream->again = Clock::now() + stream->pause;
  }
}

[[noreturn]] void run_all() {
  std::unique_lock<std::mutex> lock(mutex());
  for (;;) {
    while (is_ending) {
      finished().notify_all();
      pushed().wait(lock);
    }
    std::vector<Stream*> ready;
    bool is_waiting = false;
    auto now = Clock::now();
    for (auto each = streams().begin(); each != streams().end();) {
      Stream* stream = *each;
      if (stream->queue.empty() && stream->is_destroyed) {
        each = streams().erase(each);
        delete stream;
        continue;
      }
      ++each;
      if (stream->queue.empty()) continue;
      is_waiting = true;
      if (now >= stream->again && stream->queue.front()->is_ready(now))
        ready.push_back(stream);
    }
    if (!ready.empty())
      run_one(ready[random_numbers()() % ready.size()], lock);
    else if (is_waiting)
      pushed().wait_for(lock, SHORTEST_PAUSE);
    else
      pushed().wait(lock);
  }
}

// Drop the queued work, and wait for what runs.
void end() {
  std::unique_lock<std::mutex> lock(mutex());
  is_ending = true;
  finished().notify_all();
  finished().wait_for(lock, std::chrono::seconds(5), [] {
    return std::none_of(streams().begin(), streams().end(),
                        [](const Stream* each) { return each->is_running; });
  });
}

bool is_idle(const Stream* stream) { return stream->finished == stream->pushed; }

}  // namespace

Stream* stream_of(cudaStream_t handle) {
  if (handle && handle != cudaStreamLegacy && handle != cudaStreamPerThread)
    return reinterpret_cast<Stream*>(handle);
  std::lock_guard<std::mutex> locked(mutex());
  Stream*& found = default_streams()[current_device()];
  if (!found) streams().insert(found = new Stream(current_device()));
  return found;
}

int device_of(Stream* stream) { return stream->device; }

void pause_host() {
  static const long longest = number_of("SIMGPU_HOST_PAUSE_US", 0);
  if (longest <= 0) return;
  long pause = 0;
  {
    std::lock_guard<std::mutex> locked(mutex());
    if (random_numbers()() % 5 == 0) pause = long(random_numbers()()) % longest;
  }
  if (pause > 0) usleep(useconds_t(pause));
}

void push(Stream* stream, std::unique_ptr<Operation> operation) {
  static std::once_flag once;
  std::call_once(once, [] {
    std::atexit(end);
    std::thread(run_all).detach();
  });
  if (capture(stream, operation)) return;
  {
    std::lock_guard<std::mutex> locked(mutex());
    if (broken(stream->device) != cudaSuccess) return;
    stream->queue.push_back(std::move(operation));
    stream->pushed++;
  }
  pushed().notify_all();
}

void push_work(Stream* stream, std::function<void()> work) {
  push(stream, std::make_unique<Work>(std::move(work)));
}

void wait_for(Stream* stream) {
  std::unique_lock<std::mutex> lock(mutex());
  uint64_t last = stream->pushed;
  finished().wait(lock, [&] { return is_ending || stream->finished >= last; });
}

void wait_for_device(int device) {
  std::unique_lock<std::mutex> lock(mutex());
  std::map<Stream*, uint64_t> last;
  for (Stream* each : streams())
    if (each->device == device) last[each] = each->pushed;
  finished().wait(lock, [&] {
    if (is_ending) return true;
    for (auto& [stream, number] : last)
      if (streams().count(stream) && stream->finished < number) return false;
    return true;
  });
}

void drop_work(int device) {
  std::lock_guard<std::mutex> locked(mutex());
  for (Stream* each : streams()) {
    if (each->device != device) continue;
    each->dropped++;
    while (each->queue.size() > (each->is_running ? 1 : 0)) {
      each->queue.pop_back();
      each->finished++;
    }
  }
  finished().notify_all();
}

}  // namespace simgpu

using namespace simgpu;

SIMGPU_EXPORT cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned,
                                                       int) {
  SIMGPU_ENTER();
  auto* made = new Stream(current_device());
  std::lock_guard<std::mutex> locked(mutex());
  streams().insert(made);
  *stream = reinterpret_cast<cudaStream_t>(made);
  return cudaSuccess;
}

SIMGPU_EXPORT cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream,
                                                    unsigned flags) {
  return cudaStreamCreateWithPriority(stream, flags, 0);
}

SIMGPU_EXPORT cudaError_t cudaStreamCreate(cudaStream_t* stream) {
  return cudaStreamCreateWithPriority(stream, 0, 0);
}

// Returns at once: the stream is released when its work is done.
SIMGPU_EXPORT cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  std::lock_guard<std::mutex> locked(mutex());
  reinterpret_cast<Stream*>(stream)->is_destroyed = true;
  return cudaSuccess;
}

SIMGPU_EXPORT cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  SIMGPU_ENTER();
  if (cudaError_t error = wait_error(stream_of(stream))) return fail(error);
  wait_for(stream_of(stream));
  SIMGPU_ENTER();
  return cudaSuccess;
}

SIMGPU_EXPORT cudaError_t cudaStreamQuery(cudaStream_t handle) {
  SIMGPU_ENTER();
  Stream* stream = stream_of(handle);
  if (cudaError_t error = wait_error(stream)) return fail(error);
  std::lock_guard<std::mutex> locked(mutex());
  return is_idle(stream) ? cudaSuccess : fail(cudaErrorNotReady);
}

SIMGPU_EXPORT cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function,
                                             void* data) {
  SIMGPU_ENTER();
  push_work(stream_of(stream), [=] { function(data); });
  return cudaSuccess;
}

SIMGPU_EXPORT cudaError_t cudaStreamAddCallback(cudaStream_t stream,
                                                cudaStreamCallback_t function,
                                                void* data, unsigned) {
  SIMGPU_ENTER();
  push_work(stream_of(stream), [=] { function(stream, cudaSuccess, data); });
  return cudaSuccess;
}

SIMGPU_EXPORT cudaError_t cudaStreamGetPriority(cudaStream_t, int* priority) {
  *priority = 0;
  return cudaSuccess;
}

SIMGPU_EXPORT cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  if (least) *least = 0;
  if (greatest) *greatest = -5;
  return cudaSuccess;
}

// For a debugger, in a process that hangs: `call (void)simgpu_print_streams()` prints the
// first operation of each stream that is not idle.
SIMGPU_EXPORT void simgpu_print_streams() {
  for (Stream* each : streams())
    if (!each->queue.empty())
      fprintf(stderr, "simgpu: stream %p on device %d: %zu queued, first: %s%s\n",
              static_cast<void*>(each), each->device, each->queue.size(),
              each->queue.front()->describe().c_str(),
              each->is_running ? " (running)" : "");
}

// For the plugin, at the exit of Python: drop the queued work, as the driver does at the
// exit of a process (cudaErrorCudartUnloading in later calls). What the work would use is
// destroyed from then on: Python's objects first, and then what C++ libraries made since
// the first work. The C library's exit comes later; it serves a program without Python.
SIMGPU_EXPORT void simgpu_end() { end(); }

// For the operators: queue a copy of a function.
SIMGPU_EXPORT void simgpu_enqueue(void* stream, const std::function<void()>* function) {
  push_work(stream_of(static_cast<cudaStream_t>(stream)), *function);
}
