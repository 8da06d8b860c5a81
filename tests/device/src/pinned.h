// Pinned memory of the host, as CUDA's caching host allocator keeps it.
//
// It is known by its address: a tensor inside of a block is pinned, whoever made it. The device copies from and to it while the host goes
// on, and a copy holds addresses. A block that is given back is handed out again when streams have come past the copies that were told of
// it, by the tensor's own context or by the block's first address. All other memory is the caller's to keep until the copy is over.
#pragma once
#include <bit>

#include "device.h"

namespace sim {
struct PinnedBlock {
  char* data;
  size_t size;
  std::set<Queue*> used_on;
  std::vector<std::shared_ptr<Moment>> moments;  // of these streams, when it was given back
};

// No two bytes that stand side by side are alike, since ranks may compare what they read; all floating-point dtypes show nan.
inline void spoil_host(char* data, size_t size) {
  for (size_t i = 0; i < size; ++i) data[i] = i % 2 ? 0xFF : 0x81 + i / 2 % 127;
}

struct PinnedMemory final : c10::Allocator {
  std::map<char*, PinnedBlock*> all;  // by address; what the process has pinned stays pinned
  std::set<PinnedBlock*> live;
  std::map<size_t, std::vector<PinnedBlock*>> pools;
  std::vector<PinnedBlock*> leaving;

  c10::DataPtr allocate(size_t n) override {
    std::lock_guard<std::mutex> lock(gpu.mutex);
    take_back_what_is_over();
    size_t size = std::bit_ceil(std::max<size_t>(n, 1));  // as CUDA's allocator rounds
    auto& pool = pools[size];
    PinnedBlock* b;
    if (pool.empty()) {
      b = new PinnedBlock{(char*)std::aligned_alloc(4096, std::max<size_t>(size, 4096)), size};
      TORCH_CHECK(b->data, "simulated device: the host has no memory for ", size, " bytes");
      all[b->data] = b;
    } else {
      b = pool.back();
      pool.pop_back();
    }
    if (memory.spoil != NEVER && !asked.dry) spoil_host(b->data, size);
    live.insert(b);
    return {b->data, b, &give_back, Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, std::size_t n) const override { std::memcpy(to, from, n); }

  bool holds(const void* p) {
    std::lock_guard<std::mutex> lock(gpu.mutex);
    auto next = all.upper_bound((char*)p);
    return next != all.begin() && (char*)p < std::prev(next)->second->data + std::prev(next)->second->size;
  }
  bool may_copy_later(const Tensor& t) { return t.is_contiguous() && holds(t.data_ptr()); }

  // The stream copies from or to the tensor.
  void use_on(const Tensor& t, Queue* q) {
    std::lock_guard<std::mutex> lock(gpu.mutex);
    auto* block = (PinnedBlock*)t.storage().data_ptr().get_context();
    if (!live.count(block)) {
      auto found = all.find((char*)t.data_ptr());
      if (found == all.end() || !live.count(found->second)) return;
      block = found->second;
    }
    block->used_on.insert(q);
  }
  size_t nbytes() const {  // of blocks that somebody has
    size_t sum = 0;
    for (PinnedBlock* b : live) sum += b->size;
    return sum;
  }

 private:
  static void give_back(void* block);
  void pool(PinnedBlock* b) {
    if (memory.spoil == WHEN_FREED && !asked.dry) spoil_host(b->data, b->size);
    pools[b->size].push_back(b);
  }
  void take_back_what_is_over() {
    std::erase_if(leaving, [this](PinnedBlock* b) {
      bool over = std::all_of(b->moments.begin(), b->moments.end(), [](auto& moment) { return moment->reached; });
      if (over) b->moments.clear(), pool(b);
      return over;
    });
  }
};
inline PinnedMemory& pinned = *new PinnedMemory;

inline void PinnedMemory::give_back(void* context) {
  std::lock_guard<std::mutex> lock(gpu.mutex);
  auto* b = (PinnedBlock*)context;
  pinned.live.erase(b);
  for (Queue* q : std::exchange(b->used_on, {})) {
    if (q->idle() || asked.dry) continue;
    b->moments.push_back(moment_on(q));
    put(q, Task{"pinned memory given back", nullptr, b->moments.back()});
  }
  pinned.leaving.push_back(b);
  pinned.take_back_what_is_over();
}
}  // namespace sim
