// What torch asks of a device: which is current, streams and events, and whether there is one at all.
#pragma once
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>

#include "pinned.h"

namespace sim {
struct Event {
  std::shared_ptr<Moment> moment;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static int index(Device d) { return d.index() >= 0 ? d.index() : current_device; }
  static std::shared_ptr<Moment> moment_of(void* e) { return e ? ((Event*)e)->moment : nullptr; }

  c10::DeviceType type() const override { return TYPE; }
  c10::DeviceIndex deviceCount() const noexcept override { return gpu.streams.size(); }
  Device getDevice() const override { return Device(TYPE, current_device); }
  void setDevice(Device d) const override { current_device = index(d); }
  void uncheckedSetDevice(Device d) const noexcept override { current_device = index(d); }
  Device exchangeDevice(Device d) const override {
    Device before = getDevice();
    setDevice(d);
    return before;
  }

  c10::Stream getStream(Device d) const override { return stream_of(index(d), current_stream[index(d)]); }
  c10::Stream getDefaultStream(Device d) const override { return stream_of(index(d), 0); }
  c10::Stream getStreamFromGlobalPool(Device d, bool high) const override { return getNewStream(d, high ? -1 : 0); }
  c10::Stream getNewStream(Device d, int priority) const override {
    std::lock_guard<std::mutex> lock(gpu.mutex);
    auto& streams = gpu.streams[index(d)];
    TORCH_CHECK(streams.size() < MOST_STREAMS, "simulated device: too many streams");  // others read the vector without the lock
    streams.push_back(std::make_unique<Queue>());
    streams.back()->device = index(d);
    streams.back()->priority = priority;
    streams.back()->number = streams.size() - 1;
    return stream_of(index(d), streams.size() - 1);
  }
  c10::Stream exchangeStream(c10::Stream s) const override {
    c10::Stream before = getStream(s.device());
    current_stream[s.device_index()] = s.id();
    return before;
  }

  void destroyEvent(void* e, c10::DeviceIndex) const noexcept override { delete (Event*)e; }
  void record(void** e, const c10::Stream& s, c10::DeviceIndex, c10::EventFlag) const override {
    if (!*e) *e = new Event;
    ((Event*)*e)->moment = sim::record(queue_of(s));
  }
  void block(void* e, const c10::Stream& s) const override {
    if (auto moment = moment_of(e)) await(queue_of(s), moment);
  }
  bool queryEvent(void* e) const override {
    std::lock_guard<std::mutex> lock(gpu.mutex);
    auto moment = moment_of(e);
    return !moment || moment->reached;
  }
  bool queryStream(const c10::Stream& s) const override {
    std::lock_guard<std::mutex> lock(gpu.mutex);
    return queue_of(s)->idle();
  }
  void synchronizeEvent(void* e) const override {
    auto moment = moment_of(e);
    if (!moment) return;
    const std::string at = place();
    {
      std::lock_guard<std::mutex> lock(gpu.mutex);
      ++asked.event_waits;
      written.note('e', "event" + at, moment->on->number, moment->id);
    }
    wait_until([moment] { return moment->reached; }, {moment->on}, moment->on->device);
  }
  void synchronizeStream(const c10::Stream& s) const override {
    written.note('h', "stream" + place(), s.id());
    wait_until(idle(queue_of(s)), {queue_of(s)}, s.device_index());
  }
  void synchronizeDevice(c10::DeviceIndex d) const override {
    std::vector<Queue*> all;
    written.note('d', "device" + place(), 0);
    for (auto& q : gpu.streams[d]) all.push_back(q.get());
    wait_until([all] { return std::all_of(all.begin(), all.end(), [](Queue* q) { return q->idle(); }); }, all, d);
  }
  void recordDataPtrOnStream(const c10::DataPtr& p, const c10::Stream& s) const override { use_on(p, s.device_index(), s.id()); }
  double elapsedTime(void* a, void* b, c10::DeviceIndex) const override {
    return std::chrono::duration<double, std::milli>(moment_of(b)->time - moment_of(a)->time).count();
  }
};
inline Guard guard_impl;

struct CudaHooks final : at::CUDAHooksInterface {
  explicit CudaHooks(at::CUDAHooksArgs) {}
  static bool here() { return TYPE == c10::DeviceType::CUDA; }
  void init() const override {}
  bool hasCUDA() const override { return here(); }
  bool isBuilt() const override { return here(); }
  bool isAvailable() const override { return here(); }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return here(); }
  int getNumGPUs() const override { return here() ? gpu.streams.size() : 0; }
  c10::DeviceIndex deviceCount() const override { return getNumGPUs(); }
  c10::DeviceIndex current_device() const override { return sim::current_device; }
  c10::DeviceIndex getCurrentDevice() const override { return sim::current_device; }
  void setCurrentDevice(c10::DeviceIndex d) const override { sim::current_device = d; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex d) const override { return guard_impl.exchangeDevice(Device(TYPE, d)).index(); }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex d) const override { return exchangeDevice(d); }
  void deviceSynchronize(c10::DeviceIndex d) const override { guard_impl.synchronizeDevice(d); }
  Device getDeviceFromPtr(void*) const override { return Device(TYPE, sim::current_device); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned; }
  bool isPinnedPtr(const void* p) const override { return pinned.holds(p); }
};

struct OwnHooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return gpu.streams.size(); }
  c10::DeviceIndex getCurrentDevice() const override { return sim::current_device; }
  void setCurrentDevice(c10::DeviceIndex d) const override { sim::current_device = d; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex d) const override { return guard_impl.exchangeDevice(Device(TYPE, d)).index(); }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex d) const override { return exchangeDevice(d); }
  Device getDeviceFromPtr(void*) const override { return Device(TYPE, sim::current_device); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned; }
  bool isPinnedPtr(const void* p) const override { return pinned.holds(p); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t n) const override { resize_storage(storage.unsafeGetStorageImpl(), n); }
};
inline OwnHooks own_hooks;
}  // namespace sim

namespace at {
using simulated_hooks = sim::CudaHooks;
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, sim::CudaHooks)
}  // namespace at
