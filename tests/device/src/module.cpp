// The Python module of the simulated device. `simulated.py` is built on it.
#include <pybind11/stl.h>
#include <torch/csrc/Storage.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include "memory_operators.h"
#include "nccl.h"

namespace {
using namespace sim;

auto locked(auto f) {
  std::lock_guard<std::mutex> lock(gpu.mutex);
  return f();
}

void start(int devices, const std::string& type) {
  TYPE = Device(type).type();
  gpu.thread = [] {
    at::AutoDispatchBelowADInplaceOrView no_autograd;
    at::NoGradGuard no_grad;
    device_loop();
  };
  gpu.streams.resize(devices);
  for (auto& each : gpu.streams) each.reserve(MOST_STREAMS);
  for (int d = 0; d < devices; ++d) guard_impl.getNewStream(Device(TYPE, d), 0);
  static c10::impl::DeviceGuardImplRegistrar registrar(TYPE, &guard_impl);
  c10::SetAllocator(TYPE, &allocator, 1);
  if (TYPE == c10::DeviceType::PrivateUse1) at::RegisterPrivateUse1HooksInterface(&own_hooks);
  register_operators();
  if (TYPE == c10::DeviceType::CUDA)
    c10d::TimerRegistry()->Register(TYPE, [](Device d) -> std::unique_ptr<c10d::Timer> { return std::make_unique<NoTimer>(d); });
}

// After a run that broke: whatever is queued is dropped.
void clear() {
  locked([] {
    for (Queue* q : std::exchange(gpu.waiting, {})) q->tasks.clear();
    communicators.clear();
    for (auto& failure : gpu.failure) failure.clear();
    for (auto* counts : {&gpu.fails_in, &memory.fails_in}) std::fill(counts->begin(), counts->end(), 0);
    std::fill(gpu.held.begin(), gpu.held.end(), 0);
    return 0;
  });
}

void bind_nccl(py::module& m) {
  py::class_<SimulatedNccl, Ref<SimulatedNccl>, c10d::Backend> group(m, "ProcessGroupNCCL");
  py::class_<SimulatedNccl::Options, Ref<SimulatedNccl::Options>, c10d::Backend::Options>(group, "Options")
      .def(py::init([] { return c10::make_intrusive<SimulatedNccl::Options>(); }))
      .def_readwrite("is_high_priority_stream", &SimulatedNccl::Options::is_high_priority_stream)
      .def_readwrite("split_from", &SimulatedNccl::Options::split_from)
      .def_readwrite("split_color", &SimulatedNccl::Options::split_color);
  group
      .def(py::init([](Ref<c10d::Store> store, int rank, int size, Ref<SimulatedNccl::Options> options) {
        return c10::make_intrusive<SimulatedNccl>(std::move(store), rank, size, std::move(options));
      }))
      .def_property_readonly("options", [](SimulatedNccl& self) { return self.options; })
      .def("perform_nocolor_split", [](SimulatedNccl& self, Device) { self.split(-1); }, py::call_guard<py::gil_scoped_release>());
}
}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("start", &start);
  m.def("bind_nccl", [m]() mutable { bind_nccl(m); });
  m.def("schedule", [](int policy, uint64_t seed, double progress, bool eager, int spoil) {
    locked([&] {
      gpu.policy = policy;
      gpu.progress = progress;
      gpu.eager = eager;
      memory.spoil = spoil;
      gpu.dice.seed(seed);
      return 0;
    });
  });
  m.def("is_asked", [] { return at::detail::getCUDAHooks().hasCUDA() || TYPE != c10::DeviceType::CUDA; });
  m.def("set_dry", [](bool on) { asked.dry = on; });
  m.def("set_patience", [](double seconds) { gpu.patience = seconds; });
  m.def("set_hosts", [](size_t count) { locked([&] { return orders = {}, gpu.hosts = count; }); });
  m.def("host_ended", [] {
    locked([] { return gpu.hosts -= gpu.hosts > 0; });
    gpu.changed.notify_all();
  });
  m.def("set_room", [](size_t room) { locked([&] { return gpu.room = room ? room : SIZE_MAX; }); });
  m.def("set_watchdog", [](bool ends_process) { gpu.ends_process = ends_process; });
  m.def("set_sync_mode", [](int mode) { asked.sync_mode = mode; });
  m.def("fail_allocation", [](int device, int number) { locked([&] { return memory.fails_in[device] = number; }); });
  m.def("fail_kernel", [](int device, int number) { locked([&] { return gpu.fails_in[device] = number; }); });
  m.def("set_device", [](int device) { current_device = device; });
  m.def("set_stream", [](int device, int number) { current_stream[device] = number; });
  m.def("get_stream", [](int device) { return current_stream[device]; });
  m.def("priorities", [](int device) {  // of the streams made so far
    return locked([&] {
      std::vector<int> out;
      for (auto& q : gpu.streams[device]) out.push_back(q->priority);
      return out;
    });
  });
  m.def("resize_storage", [](py::object s, size_t n) { resize_storage(THPStorage_Unpack(s.ptr()).unsafeGetStorageImpl(), n); });
  m.def("sleep", [](int us) {
    launch(current(current_device), "sleep", {}, [us] { std::this_thread::sleep_for(std::chrono::microseconds(us)); });
  });
  m.def("waits", [] { return locked([] { return std::exchange(asked.waits, {}); }); });
  m.def("event_waits", [] { return locked([] { return std::exchange(asked.event_waits, 0); }); });
  m.def("pinned", [] { return locked([] { return pinned.nbytes(); }); });  // bytes
  m.def("failure", [](int device) { return locked([&] { return gpu.failure[device]; }); });
  m.def("executed", [] { return gpu.executed; });
  m.def("allocations", [](int device) { return memory.count[device]; });
  m.def("allocated", [](int device) { return memory.allocated[device]; });
  m.def("peak", [](int device) { return memory.peak[device]; });
  m.def("reset_peak", [](int device) { memory.peak[device] = memory.allocated[device]; });
  m.def("block_of", [](const Tensor& t) {  // its number in the log; 0: none
    return locked([&] {
      auto found = memory.live.find((char*)t.storage().data());
      return found == memory.live.end() ? uint64_t(0) : found->second->id;
    });
  });
  m.def("clear", &clear);
  m.def("log", [](bool on) { written.on = on, written.depth = 0; });
  m.def("mark", [](const std::string& name) { written.note('m', name, 0); });
  m.def("take_log", [] {
    py::list out;
    for (auto& e : written.take())
      out.append(py::make_tuple(std::string(1, e.kind), e.name, e.stream, e.id, e.cost.flops, e.cost.bytes, e.cost.narrow, e.cost.kernels, e.host));
    return out;
  });
}
