// Operators of torch on the simulated device.
//
// An operator is computed by its CPU kernel, later, on the device's thread. Its results' shapes are asked of the meta device at once.
// Where there is no meta kernel, or the result is a number for the host, the host waits, as it would on CUDA.
#pragma once
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include "costs.h"
#include "known_shapes.h"
#include "torch_device.h"

namespace sim {
using Stack = torch::jit::Stack;

inline void keep_number(const Tensor& from, Tensor& to) {
  if (from.unsafeGetTensorImpl()->is_wrapped_number()) to.unsafeGetTensorImpl()->set_wrapped_number(true);
}
inline Tensor on_meta(const Tensor& t) {
  if (!on_device(t) && t.dim() == 0) return t;  // scalars stay on the host
  Tensor m = at::empty_strided(t.sizes(), t.strides(), t.options().device(at::kMeta));
  keep_number(t, m);
  return m;
}
inline Tensor host_copy(const Tensor& t) {
  Tensor c = t.clone();
  keep_number(t, c);
  return c;
}
inline Tensor empty_on(int device, const Tensor& like) {
  return at::empty_strided(like.sizes(), like.strides(), like.options().device(Device(TYPE, device)));
}

// An argument in which `f` has replaced every tensor, and `to` every device.
template <class F>
IValue mapped(const IValue& v, F f, c10::DeviceType to) {
  if (v.isTensor()) return v.toTensor().defined() ? IValue(f(v.toTensor())) : v;
  if (v.isTensorList()) {
    c10::List<Tensor> out;
    for (const Tensor& t : v.toTensorVector()) out.push_back(f(t));
    return out;
  }
  if (v.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> out;
    for (const auto& t : v.toOptionalTensorVector()) {
      bool some = t.has_value() && t->defined();
      out.push_back(some ? std::optional<Tensor>(f(*t)) : std::nullopt);
    }
    return out;
  }
  return v.isDevice() ? IValue(Device(to)) : v;
}

// An operator's arguments as a kernel holds them: places of device tensors, copies of the host's. Nothing is kept alive.
struct Arguments {
  struct Slot {
    bool on_device;
    Place place;
    Tensor host;
  };
  std::vector<Slot> slots;
  std::vector<IValue> shape;

  explicit Arguments(const std::vector<IValue>& args) {
    auto note = [&](const Tensor& t) {
      slots.push_back(on_device(t) ? Slot{true, place_of(t), {}} : Slot{false, {}, host_copy(t)});
      return at::empty({0});
    };
    for (auto& a : args) shape.push_back(mapped(a, note, at::kCPU));
  }
  Stack on_cpu() const {
    size_t next = 0;
    Stack out;
    auto put = [&](const Tensor&) {
      const Slot& slot = slots[next++];
      return slot.on_device ? look_at(slot.place) : slot.host;
    };
    for (auto& a : shape) out.push_back(mapped(a, put, at::kCPU));
    return out;
  }
};

inline int device_of(const std::string& name, const std::vector<IValue>& args) {
  int device = -1;
  bool mixes = name.find("index") != std::string::npos || name.find("copy") != std::string::npos;
  auto look = [&](const Tensor& t) {
    if (on_device(t)) {
      bool same = device < 0 || device == t.device().index() || t.dim() == 0;
      TORCH_CHECK(same, name, ": tensors on device ", device, " and ", t.device());
      if (device < 0) device = t.device().index();
    } else {
      TORCH_CHECK(t.dim() == 0 || mixes, "Expected all tensors to be on the same device, but found ", t.device(), " too, in ", name);
    }
    return t;
  };
  for (auto& a : args) mapped(a, look, TYPE);
  for (auto& a : args) {
    if (device < 0 && a.isDevice()) device = a.toDevice().index();
  }
  return device < 0 ? current_device : device;
}

struct Call {
  const c10::OperatorHandle& op;
  const c10::FunctionSchema& schema;
  std::string name;
  std::vector<IValue> args;
  int device;

  // The argument that result number k is, if it is one: in-place and out= operators.
  const IValue* written(size_t k) const {
    const auto* alias = schema.returns()[k].alias_info();
    if (!alias || !alias->isWrite()) return nullptr;
    for (size_t i = 0; i < args.size(); ++i) {
      const auto* other = schema.arguments()[i].alias_info();
      if (other && *other == *alias) return &args[i];
    }
    return nullptr;
  }
  bool gives_tensors_only() const {
    return std::all_of(schema.returns().begin(), schema.returns().end(), [](const auto& r) {
      return r.type()->isSubtypeOf(*c10::TensorType::get()) || r.type()->isSubtypeOf(*c10::ListType::ofTensors());
    });
  }
  bool has_out() const {
    return std::any_of(schema.arguments().begin(), schema.arguments().end(), [](const auto& a) { return a.is_out(); });
  }

  // The results on the meta device; nothing where shapes depend on values. Each `out` is made to fit.
  std::optional<std::vector<IValue>> shapes() const {
    const Question question(name, args);
    auto answer = known_shapes.of(question);
    if (!answer) {
      if (!(answer = answer_of_meta())) return std::nullopt;
      known_shapes.keep(question, *answer);
    }
    for (auto& [i, sizes] : answer->outs) {
      if (args[i].toTensor().sizes() != sizes) args[i].toTensor().resize_(sizes);
    }
    return answer->results;
  }
  std::optional<Shapes> answer_of_meta() const {
    std::vector<IValue> given;
    for (auto& a : args) given.push_back(mapped(a, on_meta, at::kMeta));
    Stack meta(given.begin(), given.end());
    try {
      c10::impl::ExcludeDispatchKeyGuard no_autograd(c10::autograd_dispatch_keyset_with_ADInplaceOrView);
      op.callBoxed(meta);
    } catch (const std::exception&) {
      return std::nullopt;
    }
    Shapes answer{{meta.begin(), meta.end()}, {}};
    for (size_t i = 0; i < args.size(); ++i) {
      if (schema.arguments()[i].is_out() && args[i].isTensor()) answer.outs.emplace_back(i, given[i].toTensor().sizes().vec());
    }
    return answer;
  }

  // The host waits for the arguments, computes, and puts results on the device.
  std::vector<IValue> at_once(Queue* q) const {
    if (sim::written.on) sim::written.note('k', name, q->number, 0, cost_of(schema, name, args, {}));
    synchronize(q, name);
    Stack host = Arguments(args).on_cpu();
    {
      at::AutoDispatchBelowADInplaceOrView below;
      op.callBoxed(host);
    }
    auto upload = [&](const Tensor& t) {
      Tensor d = empty_on(device, t);
      wait_until(idle(q), {q}, device);
      look_at(place_of(d)).copy_(t);
      return d;
    };
    std::vector<IValue> results;
    for (size_t k = 0; k < host.size(); ++k) results.push_back(written(k) ? *written(k) : mapped(host[k], upload, TYPE));
    return results;
  }

  std::vector<IValue> later(Queue* q, const std::vector<IValue>& metas) const {
    std::vector<IValue> results;
    std::map<size_t, std::vector<Place>> fresh;
    for (size_t k = 0; k < schema.returns().size(); ++k) {
      if (const IValue* argument = written(k)) {
        results.push_back(*argument);
        continue;
      }
      auto make = [&](const Tensor& m) {
        Tensor d = empty_on(device, m);
        fresh[k].push_back(place_of(d));
        return d;
      };
      results.push_back(mapped(metas[k], make, TYPE));
    }
    const Cost cost = sim::written.on ? cost_of(schema, name, args, results) : Cost();
    if (asked.dry) {
      launch(q, name, cost, nullptr);
      return results;
    }
    launch(q, name, cost, [op = op, arguments = Arguments(args), fresh] {
      Stack host = arguments.on_cpu();
      op.callBoxed(host);
      for (auto& [k, places] : fresh) {
        if (host[k].isTensor()) {
          if (host[k].toTensor().defined()) look_at(places[0]).copy_(host[k].toTensor());
          continue;
        }
        auto made = host[k].toTensorVector();
        for (size_t i = 0; i < made.size(); ++i) look_at(places[i]).copy_(made[i]);
      }
    });
    return results;
  }
};

inline void fallback(const c10::OperatorHandle& op, Stack* stack) {
  NotTheHosts excluded;
  const auto& schema = op.schema();
  const size_t n = schema.arguments().size();
  std::vector<IValue> args(stack->end() - n, stack->end());
  const auto& full_name = schema.operator_name();
  std::string name = full_name.name + (full_name.overload_name.empty() ? "" : "." + full_name.overload_name);
  Call call{op, schema, name, args, device_of(name, args)};
  OnDevice guard(call.device);
  Queue* q = current(call.device);
  bool only_written = true;
  for (const auto& r : schema.returns()) {
    TORCH_CHECK(!r.alias_info() || r.alias_info()->isWrite(), "simulated device: the view ", name, " is not implemented");
    only_written = only_written && r.alias_info();
  }
  std::optional<std::vector<IValue>> shapes;
  // (attention's numbers are sizes)
  if (call.gives_tensors_only() || has(name, "scaled_dot_product")) shapes = only_written && !call.has_out() ? std::vector<IValue>() : call.shapes();
  std::vector<IValue> results = shapes ? call.later(q, *shapes) : call.at_once(q);
  torch::jit::drop(*stack, n);
  for (auto& r : results) stack->push_back(r);
}
}  // namespace sim
