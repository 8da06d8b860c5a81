// What stands where NCCL would: torch.distributed's backend, for ranks that are threads of this process, each with a device of its own.
//
// As in torch's ProcessGroupNCCL: a collective with `async_op=False` is work of the current stream; one with `async_op=True` is work of
// the communicator's own stream, and `Work.wait` makes the current stream wait, and not the host. Collectives of one communicator run
// one after another. A group of a bound device is made by splitting its parent's communicator, which all of the parent's ranks do.
#pragma once
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>

#include "operators.h"

namespace sim {
using Tensors = std::vector<Tensor>;
template <class T>
using Ref = c10::intrusive_ptr<T>;

// What the ranks of one communicator share.
struct Communicator {
  std::string name;
  size_t world;
  std::shared_ptr<Meeting> last;  // the latest collective that any rank has issued
  struct Exchange {
    std::shared_ptr<Meeting> meeting;
    std::string what;
    std::vector<std::vector<Place>> ins, outs;  // [rank]
  };
  std::map<uint64_t, std::shared_ptr<Exchange>> open;  // by number: not all ranks have issued these
  std::map<uint64_t, std::set<int>> splits;            // by number: the ranks that have come to split
};
inline std::map<std::string, std::shared_ptr<Communicator>>& communicators = *new std::map<std::string, std::shared_ptr<Communicator>>;

// Ranks have to begin the collectives of all their communicators in orders that fit together. If the orders make a circle (one rank
// begins A and then B, another B and then A), and devices make one collective after another, ranks wait for each other for ever.
struct Orders {
  using What = std::shared_ptr<Communicator::Exchange>;
  std::map<int, std::deque<What>> queues;     // of each device: what it has begun and that can't be over yet
  std::map<What, std::set<int>> begun;        // the devices that have begun it

  void begin(int device, const What& what) {
    queues[device].push_back(what);
    begun[what].insert(device);
    while (end_first()) {
    }
    for (auto& [start, queue] : queues) {
      std::string told;
      std::set<int> path;
      TORCH_CHECK_WITH(DistBackendError, !circle(start, path, told), "simulated NCCL: ranks begin collectives in different orders:", told);
    }
  }

  bool end_first() {
    for (auto& [what, devices] : begun) {
      auto is_first = [&, what = what](int device) { return queues[device].front() == what; };
      if (devices.size() < what->ins.size() || !std::all_of(devices.begin(), devices.end(), is_first)) continue;
      for (int device : devices) queues[device].pop_front();
      begun.erase(What(what));
      return true;
    }
    return false;
  }

  // Whether `device` waits for itself, by way of others.
  bool circle(int device, std::set<int>& path, std::string& told) {
    if (queues[device].empty()) return false;
    if (!path.insert(device).second) return true;
    const What& first = queues[device].front();
    for (int other : begun[first]) {
      if (queues[other].front() == first || !circle(other, path, told)) continue;
      told += " device " + std::to_string(device) + " makes " + first->meeting->name + " first;";
      return true;
    }
    path.erase(device);
    return false;
  }
};
inline Orders& orders = *new Orders;

inline void sum_up(Tensor& total, const Tensor& other, c10d::ReduceOp::RedOpType how) {
  using Op = c10d::ReduceOp;
  TORCH_CHECK(how == Op::SUM || how == Op::AVG || how == Op::MAX || how == Op::MIN, "simulated NCCL: reduce operation ", (int)how);
  if (how == Op::MAX || how == Op::MIN) {
    total.copy_(how == Op::MAX ? at::maximum(total, other) : at::minimum(total, other));
  } else {
    total.add_(other);
  }
}

// The arithmetic of all ranks' collective. Everything is read before anything is written, since places may overlap.
inline void exchange(Communicator::Exchange& e, const std::string& kind, int root, c10d::ReduceOp::RedOpType how) {
  const int world = e.ins.size();
  auto in = [&](int rank, int k) { return look_at(e.ins[rank][k]); };
  auto reduced = [&](int k) {
    Tensor total = in(0, k).clone();
    for (int rank = 1; rank < world; ++rank) sum_up(total, in(rank, k), how);
    return how == c10d::ReduceOp::AVG ? total.div_(world) : total;
  };
  Tensors sent;
  for (int rank = 0; rank < world; ++rank) {
    if (kind == "all_gather") sent.push_back(in(rank, 0).clone());
    if (kind == "reduce_scatter") sent.push_back(reduced(rank));
    if (kind == "scatter") sent.push_back(in(root, rank).clone());
    if (kind == "broadcast") sent.push_back(in(root, 0).clone());
    for (int to = 0; to < world && kind == "all_to_all"; ++to) sent.push_back(in(rank, to).clone());
    if (kind == "all_reduce") sent.push_back(rank == 0 ? reduced(0) : sent[0]);
  }
  for (int rank = 0; rank < world; ++rank) {
    for (size_t k = 0; k < e.outs[rank].size(); ++k) {
      const size_t from = kind == "all_gather" ? k : kind == "all_to_all" ? k * world + rank : rank;
      look_at(e.outs[rank][k]).copy_(sent.at(from).view_as(look_at(e.outs[rank][k])));
    }
  }
}

struct StreamWork final : c10d::Work {
  std::shared_ptr<Moment> end;
  int device;
  Ref<c10::ivalue::Future> future;  // what DDP waits for
  StreamWork(std::shared_ptr<Moment> end, int device) : end(std::move(end)), device(device) {}
  StreamWork(Queue* q, const Tensors& results) : StreamWork(record(q), q->device) {
    OnDevice guard(device);
    const int before = std::exchange(current_stream[device], q->number);  // the future's event is this stream's
    future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::ofTensors(), std::vector<Device>{Device(TYPE, device)});
    future->markCompleted(c10::IValue(results));
    current_stream[device] = before;
  }
  Ref<c10::ivalue::Future> getFuture() override { return future; }
  bool isCompleted() override {
    std::lock_guard<std::mutex> lock(gpu.mutex);
    return end->reached;
  }
  bool wait(std::chrono::milliseconds) override {
    await(current(device), end);
    return true;
  }
  void synchronize() override { wait({}); }
};

// DDP asks how long its parts took. Nobody knows.
struct NoTimer final : c10d::Timer {
  explicit NoTimer(Device) {}
  std::optional<int64_t> measureDifference(Event, Event) override { return std::nullopt; }
};

struct SimulatedNccl final : c10d::Backend {
  struct Options final : c10d::Backend::Options {
    Options() : c10d::Backend::Options("nccl") {}
    bool is_high_priority_stream = false;
    Ref<SimulatedNccl> split_from;
    int split_color = 0;
  };
  Ref<c10d::Store> store;
  Ref<Options> options;
  std::shared_ptr<Communicator> shared;
  uint64_t issued = 0, split_count = 0;
  std::map<int, int> own_stream;  // by device

  SimulatedNccl(Ref<c10d::Store> store, int rank, int size, Ref<Options> options)
      : Backend(rank, size), store(std::move(store)), options(std::move(options)) {}

  const std::string getBackendName() const override { return "nccl"; }
  Ref<c10d::Backend::Options> getBackendOptions() override { return options; }
  bool supportsSplitting() const override { return true; }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return issued; }
  void eagerConnectSingleDevice(Device) override { connect(); }

  // The first use makes the communicator. All its ranks do that together, and those of the parent if it is split off.
  Communicator& connect() {
    if (shared) return *shared;
    std::string name;
    if (options->split_from) {
      name = options->split_from->split(options->split_color);
    } else if (rank_ == 0) {
      static std::atomic<int> count{0};
      name = "communicator " + std::to_string(count++);
      store->set("unique id", std::vector<uint8_t>(name.begin(), name.end()));
    } else {
      auto told = store->get("unique id");
      name = std::string(told.begin(), told.end());
    }
    std::lock_guard<std::mutex> lock(gpu.mutex);
    auto& found = communicators[name];
    if (!found) found = std::make_shared<Communicator>(Communicator{name, (size_t)size_});
    shared = found;
    return *shared;
  }

  // As ncclCommSplit: every rank of the parent comes, also those that will not be in the new group.
  std::string split(int color) {
    Communicator& parent = connect();
    uint64_t number = ++split_count;
    std::unique_lock<std::mutex> lock(gpu.mutex);
    auto& here = parent.splits[number];
    here.insert(rank_);
    gpu.changed.notify_all();
    bool all = gpu.changed.wait_for(lock, std::chrono::duration<double>(gpu.patience), [&] { return here.size() == parent.world; });
    TORCH_CHECK_WITH(DistBackendError, all, "simulated NCCL: a split of ", parent.name, " waits for all ", parent.world, " ranks, and ", here.size(), " came");
    return parent.name + "." + std::to_string(number) + "." + std::to_string(color);
  }
  Ref<Backend> split(const Ref<c10d::Store>& store, const std::vector<int>& ranks, const Ref<Backend::Options>& opts) override {
    auto place = std::find(ranks.begin(), ranks.end(), rank_);
    if (place == ranks.end()) {
      split(-1);
      return nullptr;
    }
    auto child = c10::make_intrusive<Options>();
    child->timeout = opts->timeout;
    child->split_from = Ref<SimulatedNccl>::reclaim_copy(this);
    child->split_color = ranks.front();
    auto made = c10::make_intrusive<SimulatedNccl>(store, place - ranks.begin(), ranks.size(), child);
    made->connect();
    return made;
  }

  // -- collectives

  struct Manner {
    bool async;
    int root = 0;
    c10d::ReduceOp::RedOpType how = c10d::ReduceOp::SUM;
  };

  std::vector<Place> places(const Tensors& tensors, int device, const std::string& kind) {
    std::vector<Place> out;
    for (const Tensor& t : tensors) {
      TORCH_CHECK(on_device(t) && t.device().index() == device, "simulated NCCL: ", kind, ": a tensor is on ", t.device());
      TORCH_CHECK(!t.is_complex(), "simulated NCCL: ", kind, ": unconvertible NCCL type ", t.dtype());
      TORCH_CHECK(t.is_contiguous(), "simulated NCCL: ", kind, ": a tensor is not contiguous");
      out.push_back(place_of(t));
    }
    return out;
  }

  Ref<c10d::Work> issue(const std::string& kind, const Tensors& ins, const Tensors& outs, Manner manner) {
    const int device = (ins.empty() ? outs[0] : ins[0]).device().index();
    if (asked.dry) {  // nobody else is there
      Queue* q = manner.async ? stream_after_current(device) : current(device);
      if (manner.async) use_all(ins, outs, q);
      write(kind, ins, outs, q);
      return manner.async ? c10::make_intrusive<StreamWork>(q, outs) : nullptr;
    }
    Communicator& c = connect();
    auto in = places(ins, device, kind), out = places(outs, device, kind);
    Queue* q = manner.async ? stream_after_current(device) : current(device);
    if (manner.async) use_all(ins, outs, q);  // on the current stream memory is a matter of that stream's order
    write(kind, ins, outs, q);
    const uint64_t number = ++issued;
    {
      std::lock_guard<std::mutex> lock(gpu.mutex);
      check_alive(device);
      auto& e = c.open[number];
      if (!e) {
        e = std::make_shared<Communicator::Exchange>();
        e->what = kind;
        e->ins.resize(c.world);
        e->outs.resize(c.world);
        e->meeting = std::make_shared<Meeting>();
        e->meeting->name = kind + " number " + std::to_string(number) + " of " + c.name;
        e->meeting->world = c.world;
        e->meeting->before = std::exchange(c.last, e->meeting);
        e->meeting->run = [e, kind, manner] { exchange(*e, kind, manner.root, manner.how); };
      }
      TORCH_CHECK_WITH(DistBackendError, e->what == kind, "simulated NCCL: ranks make different collectives, ", e->what, " and ", kind);
      orders.begin(device, e);
      e->ins[rank_] = std::move(in);
      e->outs[rank_] = std::move(out);
      e->meeting->queues.push_back(q);
      Task task{e->meeting->name};
      task.meeting = e->meeting;
      put(q, std::move(task));
      if (e->meeting->queues.size() == c.world) c.open.erase(number);
    }
    gpu.changed.notify_all();
    if (gpu.eager && !manner.async) wait_until(idle(q), {q}, device);
    return manner.async ? c10::make_intrusive<StreamWork>(q, outs) : nullptr;
  }

  static void use_all(const Tensors& ins, const Tensors& outs, Queue* q) {
    for (const Tensors* tensors : {&ins, &outs}) {
      for (const Tensor& t : *tensors) use_on(t.storage().data_ptr(), q->device, q->number);
    }
  }

  // In the log: the bytes of all ranks' parts together, and how many ranks there are.
  void write(const std::string& kind, const Tensors& ins, const Tensors& outs, Queue* q) {
    double in = 0, out = 0;
    for (const Tensor& t : ins) in += (double)t.numel() * t.element_size();
    for (const Tensor& t : outs) out += (double)t.numel() * t.element_size();
    written.note('c', kind, q->number, (uint64_t)this, {0, std::max(in, out), 0, size_});
  }

  Queue* stream_after_current(int device) {
    if (!own_stream.count(device)) own_stream[device] = guard_impl.getNewStream(Device(TYPE, device), -1).id();
    Queue* q = gpu.streams[device][own_stream[device]].get();
    await(q, record(current(device)));
    return q;
  }

  Tensors pieces(Tensor& full) {
    TORCH_CHECK(full.numel() % size_ == 0, "simulated NCCL: ", full.numel(), " elements for ", size_, " ranks");
    return full.view({size_, -1}).unbind(0);
  }

  Ref<c10d::Work> broadcast(Tensors& tensors, const c10d::BroadcastOptions& o) override {
    return issue("broadcast", tensors, tensors, {o.asyncOp, (int)o.rootRank});
  }
  Ref<c10d::Work> allreduce(Tensors& tensors, const c10d::AllreduceOptions& o) override {
    return issue("all_reduce", tensors, tensors, {o.asyncOp, 0, o.reduceOp});
  }
  Ref<c10d::Work> allgather(std::vector<Tensors>& outs, Tensors& ins, const c10d::AllgatherOptions& o) override {
    return issue("all_gather", ins, outs[0], {o.asyncOp});
  }
  Ref<c10d::Work> _allgather_base(Tensor& out, Tensor& in, const c10d::AllgatherOptions& o) override {
    TORCH_CHECK(out.numel() == in.numel() * size_ && out.dtype() == in.dtype(), "simulated NCCL: all_gather of ", in.numel(), " into ", out.numel());
    return issue("all_gather", {in}, pieces(out), {o.asyncOp});
  }
  Ref<c10d::Work> scatter(Tensors& outs, std::vector<Tensors>& ins, const c10d::ScatterOptions& o) override {
    return issue("scatter", ins.empty() ? Tensors{} : ins[0], outs, {o.asyncOp, (int)o.rootRank});
  }
  Ref<c10d::Work> reduce_scatter(Tensors& outs, std::vector<Tensors>& ins, const c10d::ReduceScatterOptions& o) override {
    return issue("reduce_scatter", ins[0], outs, {o.asyncOp, 0, o.reduceOp});
  }
  Ref<c10d::Work> _reduce_scatter_base(Tensor& out, Tensor& in, const c10d::ReduceScatterOptions& o) override {
    TORCH_CHECK(in.numel() == out.numel() * size_ && out.dtype() == in.dtype(), "simulated NCCL: reduce_scatter of ", in.numel(), " into ", out.numel());
    return issue("reduce_scatter", pieces(in), {out}, {o.asyncOp, 0, o.reduceOp});
  }
  Tensors split(Tensor& flat, const std::vector<int64_t>& sizes) { return sizes.empty() ? pieces(flat) : at::split_with_sizes(flat, sizes); }
  Ref<c10d::Work> alltoall_base(Tensor& out, Tensor& in, std::vector<int64_t>& outs, std::vector<int64_t>& ins, const c10d::AllToAllOptions& o) override {
    return issue("all_to_all", split(in, ins), split(out, outs), {o.asyncOp});
  }
  Ref<c10d::Work> barrier(const c10d::BarrierOptions&) override {
    Tensor one = at::zeros({1}, at::TensorOptions().device(Device(TYPE, current_device)));
    issue("all_reduce", {one}, {one}, {false});
    synchronize(current(current_device), "barrier");
    return nullptr;
  }
};
}  // namespace sim
