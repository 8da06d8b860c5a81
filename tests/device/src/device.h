// The host's side of the simulated device: the current device and stream, kernels, waits, memory, errors.
#pragma once
#include <ATen/ATen.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <pybind11/pybind11.h>
#include <sys/mman.h>

#include "queues.h"

namespace sim {
using at::Tensor;
using c10::Device;

inline c10::DeviceType TYPE = c10::DeviceType::CUDA;  // which of torch's device types this is; chosen when the module is loaded

inline thread_local int current_device = 0;
inline thread_local std::vector<int> current_stream(MOST_DEVICES, 0);

struct OnDevice {
  int before = current_device;
  explicit OnDevice(int device) {
    if (device >= 0) current_device = device;
  }
  ~OnDevice() { current_device = before; }
};

inline Queue* queue_of(c10::Stream s) { return gpu.streams[s.device_index()][s.id()].get(); }
inline Queue* current(int device) { return gpu.streams[device][current_stream[device]].get(); }
inline c10::Stream stream_of(int device, int number) { return c10::Stream(c10::Stream::UNSAFE, Device(TYPE, device), number); }
inline std::function<bool()> idle(Queue* q) {
  return [q] { return q->idle(); };
}

// -- what the host asks for and waits for

// Where Python is that made the host wait: the innermost line that is not the device's own. "" if no Python runs in this thread.
inline std::string place() {
  if (!written.on || !Py_IsInitialized()) return "";
  namespace py = pybind11;
  py::gil_scoped_acquire python;  // an operator runs without Python's lock
  if (!PyEval_GetFrame()) return "";
  for (py::object frame = py::module_::import("sys").attr("_getframe")(); !frame.is_none(); frame = frame.attr("f_back")) {
    std::string file = py::str(frame.attr("f_code").attr("co_filename"));
    if (file.find("tests/device/simulated.py") != std::string::npos) continue;
    for (const char* root : {"/site-packages/", "/zero3/", "/benchmarks/"}) {
      if (size_t at = file.rfind(root); at != std::string::npos) file = file.substr(at + (root[1] == 's' ? 15 : 1));
    }
    return " at " + file + ":" + std::string(py::str(frame.attr("f_lineno")));
  }
  return "";
}

struct Asked {  // what is asked of the device by tests, under the machine's mutex
  int sync_mode = 0;               // 2: an operation that makes the host wait is an error
  bool dry = false;                // no arithmetic and no memory, only the code path and the allocator's counts
  std::vector<std::string> waits;  // why the host had to wait
  size_t event_waits = 0;          // how often it waited for an event: CUDA does not call that a synchronizing operation
};
inline Asked& asked = *new Asked;

// As CUDA does: an error of a kernel is told by a later call, and every call after it fails.
inline void check_alive(int device) {
  const std::string& failure = gpu.failure[device];
  if (failure.empty()) return;
  throw c10::AcceleratorError({__func__, __FILE__, __LINE__}, 710, "CUDA error: a kernel failed some time before this call: " + failure);
}

inline void wait_until(std::function<bool()> over, std::vector<Queue*> on, int device) {
  std::string stuck;
  {
    std::optional<pybind11::gil_scoped_release> release;
    if (Py_IsInitialized() && PyGILState_Check()) release.emplace();
    stuck = wait_for([&] { return over() || !gpu.failure[device].empty(); }, std::move(on));
  }
  check_alive(device);
  TORCH_CHECK(stuck.empty(), "simulated device: ", stuck);
}

// The host waits for a result, where CUDA would have it wait. `why` is kept.
inline void synchronize(Queue* q, const std::string& why) {
  const std::string at = place();  // (before the lock: Python's collector may give memory back)
  {
    std::lock_guard<std::mutex> lock(gpu.mutex);
    asked.waits.push_back(why);
    written.note('h', why + at, q->number);
  }
  TORCH_CHECK(asked.sync_mode != 2, "called a synchronizing operation: ", why);
  wait_until(idle(q), {q}, q->device);
}

inline void enqueue(Queue* q, Task task) {
  // Events and waits for them only keep an order. The host goes on: Python's collector of cycles, in the thread of any rank, may end the
  // lanes of another rank's model, and a rank that waited there for the other's stream would be what that stream waits for.
  const bool in_order = gpu.eager && task.run;
  if (task.records) {
    written.note('r', task.name, q->number, task.records->id);
  } else if (task.awaits) {
    written.note('w', task.name, q->number, task.awaits->id);
  } else {
    written.note('k', task.name, q->number, 0, task.cost);
  }
  if (asked.dry) {
    if (task.records) task.records->reached = true;
    return;
  }
  bool notify;
  {
    std::lock_guard<std::mutex> lock(gpu.mutex);
    check_alive(q->device);
    put(q, std::move(task));
    if (gpu.progress > 0 && std::uniform_real_distribution<>(0, 1)(gpu.dice) < gpu.progress) gpu.budget += 1 + gpu.dice() % 8;
    notify = !gpu.waiters.empty() || gpu.budget > 0;
  }
  if (in_order) {
    wait_until(idle(q), {q}, q->device);
  } else if (notify) {
    gpu.changed.notify_all();
  }
}
inline void launch(Queue* q, std::string name, Cost cost, std::function<void()> run) {
  Task task{std::move(name), std::move(run)};
  task.cost = cost;
  enqueue(q, std::move(task));
}

inline std::shared_ptr<Moment> moment_on(Queue* q) {
  auto moment = std::make_shared<Moment>();
  moment->on = q;
  return moment;
}
inline std::shared_ptr<Moment> record(Queue* q, const char* name = "record") {
  auto moment = moment_on(q);
  enqueue(q, Task{name, nullptr, moment});
  return moment;
}
inline void await(Queue* q, std::shared_ptr<Moment> moment) { enqueue(q, Task{"wait", nullptr, nullptr, std::move(moment)}); }

// -- memory: as the caching allocator's, but that blocks are neither split nor joined

struct Block {
  char* data;
  size_t size;
  int device, number;                     // the stream that it was allocated on, and where it may be handed out again
  std::set<std::pair<int, int>> used_on;  // other streams, told by record_stream
  uint64_t id = 0;                        // in the log
};

// Freed, but other streams were said to use it: theirs until they have come to these moments.
struct Deferred {
  Block* block;
  std::vector<std::shared_ptr<Moment>> moments;
};

enum Spoil { NEVER, WHEN_FREED, WHEN_REUSED };

struct Memory {
  int spoil = WHEN_FREED;
  std::map<std::tuple<int, int, size_t>, std::vector<Block*>> pools;
  std::vector<Deferred> deferred;
  std::map<char*, Block*> live;
  std::vector<int64_t> allocated = std::vector<int64_t>(MOST_DEVICES), peak = allocated, count = allocated;
  std::vector<int> fails_in = std::vector<int>(MOST_DEVICES, 0);  // by device: the allocation, from now on, that fails; 0: none
};
inline Memory& memory = *new Memory;

inline void spoil(Block* b) {
  char* data = b->data;
  size_t size = b->size;
  put(gpu.streams[b->device][b->number].get(), Task{"memory given back", [data, size] { std::memset(data, 0xFF, size); }});
}
inline void give_back(Block* b) {
  if (memory.spoil == WHEN_FREED && !asked.dry) spoil(b);
  memory.pools[{b->device, b->number, b->size}].push_back(b);
}
inline void give_back_deferred() {
  std::erase_if(memory.deferred, [](Deferred& d) {
    bool over = std::all_of(d.moments.begin(), d.moments.end(), [](auto& moment) { return moment->reached; });
    if (over) give_back(d.block);
    return over;
  });
}

inline void release(void* context) {
  std::lock_guard<std::mutex> lock(gpu.mutex);
  auto* b = (Block*)context;
  written.note('f', "", b->number, b->id);
  memory.allocated[b->device] -= b->size;
  memory.live.erase(b->data);
  if (asked.dry) b->used_on.clear();  // no stream comes to any moment
  if (b->used_on.empty()) return give_back(b);
  Deferred d{b, {}};
  for (auto& [device, number] : std::exchange(b->used_on, {})) {
    d.moments.push_back(moment_on(gpu.streams[device][number].get()));
    put(d.moments.back()->on, Task{"record_stream", nullptr, d.moments.back()});
  }
  memory.deferred.push_back(d);
}

inline Block* new_block(size_t size, int device, int number) {
  // a dry run takes addresses only: pages that nobody touches cost nothing, and may be more than the host has
  int how = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  void* data = asked.dry ? mmap(nullptr, size, PROT_READ | PROT_WRITE, how, -1, 0) : std::aligned_alloc(512, size);
  TORCH_CHECK(data && data != MAP_FAILED, "simulated device: the host has no memory for ", size, " bytes");
  if (!asked.dry) std::memset(data, 0xFF, size);
  return new Block{(char*)data, size, device, number, {}};
}

struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(size_t n) override {
    Device device(TYPE, current_device);
    if (n == 0) return {nullptr, nullptr, &nothing, device};
    std::lock_guard<std::mutex> lock(gpu.mutex);
    give_back_deferred();
    ++memory.count[current_device];
    bool fails = memory.fails_in[current_device] && --memory.fails_in[current_device] == 0;
    TORCH_CHECK_WITH(OutOfMemoryError, !fails, "CUDA out of memory: allocation number ", memory.count[current_device], ", ", n, " bytes");
    size_t size = (n + 511) / 512 * 512;  // as CUDA's allocator rounds
    int number = current_stream[current_device];
    auto& pool = memory.pools[{current_device, number, size}];
    Block* b;
    if (pool.empty()) {
      b = new_block(size, current_device, number);
    } else {
      b = pool.back();
      pool.pop_back();
      if (memory.spoil == WHEN_REUSED && !asked.dry) spoil(b);
    }
    memory.allocated[current_device] += size;
    memory.peak[current_device] = std::max(memory.peak[current_device], memory.allocated[current_device]);
    memory.live[b->data] = b;
    b->id = next_number();
    written.note('a', "", number, b->id, {0, (double)n});
    return {b->data, b, &release, device};
  }
  static void nothing(void*) {}
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void*, const void*, std::size_t) const override { TORCH_CHECK(false, "simulated device: copy_data"); }
};
inline Allocator allocator;

inline void use_on(const c10::DataPtr& p, int device, int number) {
  std::lock_guard<std::mutex> lock(gpu.mutex);
  auto found = memory.live.find((char*)p.get());
  if (found == memory.live.end()) return;
  Block* b = found->second;
  if (b->device == device && b->number == number) return;
  b->used_on.insert({device, number});
  written.note('u', "", number, b->id);
}

// What `UntypedStorage.resize_` does on CUDA: new memory of the current stream, and the old memory given back at once.
inline void resize_storage(c10::StorageImpl* storage, size_t n) {
  OnDevice guard(storage->device().index());
  c10::DataPtr fresh = allocator.allocate(n);
  if (n && storage->data()) {
    char *to = (char*)fresh.get(), *from = (char*)storage->mutable_data();
    size_t keep = std::min(n, storage->nbytes());
    launch(current(current_device), "resize_", {0, 2.0 * keep}, [to, from, keep] { std::memcpy(to, from, keep); });
  }
  storage->set_data_ptr_noswap(std::move(fresh));
  storage->set_nbytes(n);
}

// Where a tensor lies. A kernel holds places and not tensors, so memory may be given back and reused before it runs.
struct Place {
  char* data = nullptr;
  std::vector<int64_t> sizes, strides;
  at::ScalarType dtype;
  bool conjugate = false, negative = false;  // the bits of a tensor whose memory holds other values
};
inline Place place_of(const Tensor& t) {
  bool some = t.numel() || t.storage().data();
  char* data = some ? (char*)t.storage().mutable_data() + t.storage_offset() * t.element_size() : nullptr;
  return Place{data, t.sizes().vec(), t.strides().vec(), t.scalar_type(), t.is_conj(), t.is_neg()};
}
inline Tensor look_at(const Place& p) {
  Tensor t = at::from_blob(p.data, p.sizes, p.strides, at::TensorOptions().dtype(p.dtype).device(at::kCPU));
  if (p.conjugate) t._set_conj(true);
  if (p.negative) t._set_neg(true);
  return t;
}
}  // namespace sim
