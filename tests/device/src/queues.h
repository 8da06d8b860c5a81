// Streams and events of the simulated device, and the one thread that executes all streams. Nothing here knows about tensors.
//
// A stream is a queue of tasks. Hosts put tasks into queues and go on. The device's thread takes the head of a queue that events
// allow; a policy and a seed choose which one. Unless a host waits, it does nothing: what nobody waits for stays undone as long as
// it may. That is the hardest case for code that forgot to wait.
#pragma once
#include <algorithm>
#include <chrono>
#include <climits>
#include <condition_variable>
#include <deque>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <sstream>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "log.h"

namespace sim {
using Time = std::chrono::steady_clock;
constexpr size_t MOST_STREAMS = 1 << 16, MOST_DEVICES = 16;

struct Queue;

// A point in a stream's work. An event stands for the last one that was recorded with it.
struct Moment {
  Queue* on = nullptr;
  bool reached = false;
  Time::time_point time;
  uint64_t id = next_number();
};

// A collective. On each device it starts when it comes to the head of its queue, and then waits there for the other ranks. When it has
// started on all devices it runs.
struct Meeting {
  std::string name;
  size_t world = 0;
  std::shared_ptr<Meeting> before;  // on the same communicator, which runs one after another
  std::vector<Queue*> queues;       // of the ranks that have issued it
  size_t started = 0;
  bool over = false;
  std::function<void()> run;
};

struct Task {
  std::string name;
  std::function<void()> run;
  std::shared_ptr<Moment> records, awaits;
  std::shared_ptr<Meeting> meeting;
  bool started = false;
  Cost cost;
};

struct Queue {
  int device, number;  // number 0: the default stream, where computation is
  int priority = 0;
  std::deque<Task> tasks;
  bool busy = false;
  bool idle() const { return tasks.empty() && !busy; }
};

struct ByPlace {
  bool operator()(const Queue* a, const Queue* b) const { return std::tie(a->device, a->number) < std::tie(b->device, b->number); }
};

// A host that waits until `over`, which is a matter of the queues `on`.
struct Waiter {
  std::function<bool()> over;
  std::vector<Queue*> on;
  bool stuck = false;
};

enum Policy { RANDOM, COMPUTE, LANES, LOW, HIGH, DEMAND };

struct Machine {
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<std::vector<std::unique_ptr<Queue>>> streams;  // [device][number]
  std::set<Queue*, ByPlace> waiting;                         // queues with tasks
  std::list<Waiter*> waiters;
  std::mt19937_64 dice{0};
  std::function<void()> thread;  // what the device's thread runs: `device_loop`, in the state that kernels need
  bool has_thread = false;

  // settings
  int policy = RANDOM;
  double progress = 0;           // the chance that a new task lets some tasks run though no host waits
  bool eager = false;            // the host waits for each task: execution in order, the reference for all others
  size_t room = SIZE_MAX;        // collectives that a device can hold at once, started and waiting for other ranks
  size_t hosts = 0;              // threads that may wait; if all do and nothing can go on, nothing ever will. 0: unknown
  double patience = 300;         // seconds without any task after which a host gives up
  bool ends_process = false;     // what NCCL's watchdog does with a collective that nobody joins
  std::vector<int> fails_in = std::vector<int>(MOST_DEVICES, 0);  // by device: the kernel, from now on, that fails; 0: none

  // what goes on
  int64_t budget = 0;  // tasks that may run though no host waits
  std::vector<size_t> held = std::vector<size_t>(MOST_DEVICES, 0);  // collectives started on each device
  std::vector<std::string> failure = std::vector<std::string>(MOST_DEVICES);  // the first kernel that failed, by device
  uint64_t executed = 0;
};
inline Machine& gpu = *new Machine;  // never destroyed: its thread outlives main

inline bool ready(Queue* q) {
  if (q->busy || q->tasks.empty() || !gpu.failure[q->device].empty()) return false;
  const Task& head = q->tasks.front();
  if (head.awaits) return head.awaits->reached;
  if (!head.meeting) return true;
  bool its_turn = !head.meeting->before || head.meeting->before->over;
  return !head.started && its_turn && gpu.held[q->device] < gpu.room;
}

// The queues on which the waiting hosts depend. The laziest device executes no others.
inline std::set<Queue*> demanded() {
  std::set<Queue*> found;
  std::vector<Queue*> todo;
  auto add = [&](const std::vector<Queue*>& more) { todo.insert(todo.end(), more.begin(), more.end()); };
  for (Waiter* waiter : gpu.waiters) add(waiter->on);
  while (!todo.empty()) {
    Queue* q = todo.back();
    todo.pop_back();
    if (!found.insert(q).second || q->tasks.empty()) continue;
    const Task& head = q->tasks.front();
    if (head.awaits && !head.awaits->reached) add({head.awaits->on});
    for (auto meeting = head.meeting; meeting && !meeting->over; meeting = meeting->before) add(meeting->queues);
  }
  return found;
}

inline Queue* pick() {
  std::set<Queue*> wanted;
  if (gpu.policy == DEMAND) wanted = demanded();
  std::vector<Queue*> best;
  int highest = INT_MIN;
  for (Queue* q : gpu.waiting) {
    if (!ready(q) || (gpu.policy == DEMAND && !wanted.count(q))) continue;
    int key = 0;
    if (gpu.policy == COMPUTE) key = q->number == 0;
    if (gpu.policy == LANES) key = q->number != 0;
    if (gpu.policy == LOW) key = -q->number;
    if (gpu.policy == HIGH) key = q->number;
    if (key > highest) best.clear();
    highest = std::max(highest, key);
    if (key == highest) best.push_back(q);
  }
  return best.empty() ? nullptr : best[gpu.dice() % best.size()];
}

inline std::string heads() {
  std::ostringstream out;
  for (Queue* q : gpu.waiting) {
    const Task& head = q->tasks.front();
    out << "\n  device " << q->device << " stream " << q->number << ": " << q->tasks.size() << " queued, first " << head.name;
    if (head.meeting) out << " (" << head.meeting->started << " of " << head.meeting->world << " ranks have started it)";
  }
  return out.str();
}

// Nothing can go on: told to all hosts if all of them wait.
inline void notice_stuck() {
  if (!gpu.hosts || gpu.waiters.size() < gpu.hosts) return;
  for (Waiter* waiter : gpu.waiters) {
    if (waiter->over() || waiter->stuck) return;
  }
  if (gpu.ends_process) {
    fprintf(stderr, "simulated watchdog: a collective was not joined by all ranks within the group's timeout; the process ends.%s\n", heads().c_str());
    std::abort();
  }
  for (Waiter* waiter : gpu.waiters) waiter->stuck = true;
  gpu.changed.notify_all();
}

inline void pop(Queue* q) {
  q->tasks.pop_front();
  if (q->tasks.empty()) gpu.waiting.erase(q);
}

// Starts a collective on one device. The queues on which it is to run now, if it has started everywhere.
inline std::vector<Queue*> arrive(Queue* q, Task& task) {
  task.started = true;
  ++gpu.held[q->device];
  auto& meeting = *task.meeting;
  if (++meeting.started < meeting.world) return {};
  for (Queue* each : meeting.queues) --gpu.held[each->device];
  return meeting.queues;
}

inline void execute(Queue* q, std::unique_lock<std::mutex>& lock) {
  std::vector<Queue*> together{q};
  if (q->tasks.front().meeting) together = arrive(q, q->tasks.front());
  if (together.empty()) return;
  Task task = std::move(q->tasks.front());
  for (Queue* each : together) {
    pop(each);
    each->busy = true;
  }
  bool fails = task.run && !task.meeting && gpu.fails_in[q->device] && --gpu.fails_in[q->device] == 0;
  auto run = task.meeting ? task.meeting->run : std::exchange(task.run, nullptr);
  lock.unlock();
  std::string error = fails ? task.name + ": it was told to fail" : "";
  try {
    if (run && !fails) run();
  } catch (const std::exception& e) {
    error = task.name + ": " + e.what();
  }
  run = nullptr;
  lock.lock();
  if (!error.empty()) gpu.failure[q->device] = error;
  if (task.meeting) task.meeting->over = true, task.meeting->before = nullptr;
  if (task.records) task.records->reached = true, task.records->time = Time::now();
  for (Queue* each : together) each->busy = false;
}

inline void device_loop() {
  std::unique_lock<std::mutex> lock(gpu.mutex);
  while (true) {
    bool may = !gpu.waiters.empty() || gpu.budget > 0;
    Queue* q = may ? pick() : nullptr;
    if (!q) {
      gpu.budget = 0;
      notice_stuck();
      gpu.changed.wait_for(lock, std::chrono::milliseconds(200));
      continue;
    }
    gpu.budget = std::max<int64_t>(0, gpu.budget - 1);
    execute(q, lock);
    ++gpu.executed;
    gpu.changed.notify_all();
  }
}

// The caller holds the mutex.
inline void put(Queue* q, Task task) {
  if (!std::exchange(gpu.has_thread, true)) std::thread(gpu.thread).detach();  // late, because a process may fork before it
  q->tasks.push_back(std::move(task));
  gpu.waiting.insert(q);
}

// Returns "" when `over`, which is looked at under the mutex, or else why it never will be. The caller does not hold Python's lock.
inline std::string wait_for(std::function<bool()> over, std::vector<Queue*> on) {
  std::unique_lock<std::mutex> lock(gpu.mutex);
  Waiter me{std::move(over), std::move(on)};
  auto place = gpu.waiters.insert(gpu.waiters.end(), &me);
  gpu.changed.notify_all();
  uint64_t seen = gpu.executed;
  auto since = Time::now();
  while (!me.over() && !me.stuck) {
    gpu.changed.wait_for(lock, std::chrono::milliseconds(100));
    if (seen != gpu.executed) since = Time::now();
    seen = gpu.executed;
    me.stuck = me.stuck || std::chrono::duration<double>(Time::now() - since).count() > gpu.patience;
  }
  gpu.waiters.erase(place);
  return me.stuck ? "no stream can go on:" + heads() : "";
}
}  // namespace sim
