// What hosts ask of the device, in their order, if it is written down: `tests/device/clock.py` replays it on virtual clocks.
#pragma once
#include <time.h>

#include <atomic>
#include <cstdint>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace sim {
// What a kernel takes on a GPU, which may be one where this device runs several, or several where it runs one.
struct Cost {
  double flops = 0, bytes = 0;  // bytes read and written
  double narrow = 0;            // the smallest dimension of a matrix product; 0: it is none
  int kernels = 1;
};

// k kernel, r record, w wait, c collective (`kernels` is its number of ranks), h host waits for a stream, e for an event, d for the
// device, a allocation, f free, u record_stream, m a mark of whoever reads the log.
struct Entry {
  char kind;
  std::string name;
  int stream;
  uint64_t id;  // of an event, a block of memory, or a communicator
  Cost cost;
  double host;  // seconds of the processor so far, without those of the device's own code
};

inline double processor_seconds() {
  timespec t;
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
  return t.tv_sec + 1e-9 * t.tv_nsec;
}

struct Log {
  bool on = false;
  std::vector<Entry> entries;
  double own = 0;  // seconds of the processor that the device's own code took
  int depth = 0;
  std::mutex writing;  // ranks are threads

  void note(char kind, const std::string& name, int stream, uint64_t id = 0, Cost cost = {}) {
    if (!on) return;
    std::lock_guard<std::mutex> alone(writing);
    entries.push_back({kind, name, stream, id, cost, processor_seconds() - own});
  }

  std::vector<Entry> take() {
    std::lock_guard<std::mutex> alone(writing);
    return std::exchange(entries, {});
  }
};
inline Log& written = *new Log;

// Around what a GPU would do, or its driver: its time is not the host's.
struct NotTheHosts {
  double began = written.on && written.depth++ == 0 ? processor_seconds() : 0;
  ~NotTheHosts() {
    if (written.on && --written.depth == 0 && began) written.own += processor_seconds() - began;
  }
};

inline uint64_t next_number() {
  static std::atomic<uint64_t> count{0};
  return ++count;
}
}  // namespace sim
