// Operators that are about memory: empty tensors, storages, copies. And their registration, with the fallback for all others.
#pragma once
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/scaled_dot_product_attention_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include "operators.h"

namespace sim {
using Ints = at::IntArrayRef;
template <class T>
using Opt = std::optional<T>;

inline c10::DispatchKey key() { return c10::computeDispatchKey(std::nullopt, std::nullopt, Device(TYPE)); }
inline int index_of(const Opt<Device>& d) { return d && d->index() >= 0 ? d->index() : current_device; }

inline Tensor empty(Ints size, Opt<at::ScalarType> dtype, Opt<at::Layout>, Opt<Device> d, Opt<bool>, Opt<at::MemoryFormat> format) {
  OnDevice guard(index_of(d));
  return at::detail::empty_generic(size, &allocator, c10::DispatchKeySet(key()), c10::dtype_or_default(dtype), format);
}
inline Tensor empty_strided(Ints size, Ints stride, Opt<at::ScalarType> dtype, Opt<at::Layout>, Opt<Device> d, Opt<bool>) {
  OnDevice guard(index_of(d));
  return at::detail::empty_strided_generic(size, stride, &allocator, c10::DispatchKeySet(key()), c10::dtype_or_default(dtype));
}
inline const Tensor& resize_(const Tensor& self, Ints size, Opt<at::MemoryFormat>) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(size);
  size_t need = (impl->numel() + impl->storage_offset()) * self.element_size();
  if (impl->numel() && self.storage().nbytes() < need) resize_storage(self.storage().unsafeGetStorageImpl(), need);
  return self;
}
inline Tensor& set_storage(Tensor& self, at::Storage source, int64_t offset, Ints size, Ints stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_storage_offset(offset);
  if (stride.data() && stride.size() == size.size()) {
    impl->set_sizes_and_strides(size, stride);
  } else {
    impl->set_sizes_contiguous(size);
  }
  return self;
}
inline Tensor& set_whole_storage(Tensor& self, at::Storage source) {
  int64_t count = source.nbytes() / self.element_size();
  return set_storage(self, source, 0, {count}, {});
}
inline Tensor& set_tensor(Tensor& self, const Tensor& t) { return set_storage(self, t.storage(), t.storage_offset(), t.sizes(), t.strides()); }

// A copy between the device and the host's pinned memory is made when its turn comes, by addresses. For one from or to pageable memory the
// host waits, whatever it asks for.
inline Cost moved(double times, const Tensor& t) { return {0, times * t.numel() * t.element_size()}; }
inline Tensor& copy_to_host(Tensor& self, const Tensor& src, bool later) {
  OnDevice guard(src.device().index());
  Queue* q = current(current_device);
  Place from = place_of(src.expand_as(self));
  if (later && pinned.may_copy_later(self)) {
    pinned.use_on(self, q);
    launch(q, "copy_ to pinned memory", moved(1, self), [to = place_of(self), from] { look_at(to).copy_(look_at(from)); });
    return self;
  }
  synchronize(q, "copy_ to host");
  at::AutoDispatchBelowADInplaceOrView below;
  self.copy_(look_at(from));
  return self;
}
inline void copy_from_host(Tensor& self, const Tensor& src, bool later) {
  Queue* q = current(current_device);
  Place to = place_of(self);
  if (later && pinned.may_copy_later(src)) {
    pinned.use_on(src, q);
    launch(q, "copy_ from pinned memory", moved(1, self), [to, from = place_of(src)] { look_at(to).copy_(look_at(from).expand(to.sizes)); });
    return;
  }
  synchronize(q, "copy_ from host");
  // Small ones are copied by a dry device too: DDP sends the numbers of its buckets, and reads what came.
  if (!asked.dry || src.nbytes() <= 1 << 20) look_at(to).copy_(src.expand(to.sizes));
}
inline Tensor& copy_(Tensor& self, const Tensor& src, bool later) {
  NotTheHosts excluded;
  if (self.numel() == 0) return self;
  if (!on_device(self)) return copy_to_host(self, src, later);
  OnDevice guard(self.device().index());
  if (!on_device(src)) {
    copy_from_host(self, src, later);
    return self;
  }
  if (src.device() != self.device()) synchronize(current(src.device().index()), "copy_ across devices");
  launch(current(current_device), "copy_", {0, bytes_of(self) + bytes_of(src)}, [to = place_of(self), from = place_of(src)] { look_at(to).copy_(look_at(from).expand(to.sizes)); });
  return self;
}
inline void record_stream(Tensor& self, c10::Stream s) { use_on(self.storage().data_ptr(), s.device_index(), s.id()); }
inline int64_t attention_kernel(const Tensor&, const Tensor&, const Tensor&, const Opt<Tensor>&, double, bool, Opt<double>, bool) { return 0; }  // plain operators
// With arithmetic attention is plain operators. A dry device chooses as a GPU does: flash, if it is in halves and without a mask.
inline Tensor attention(const Tensor& q, const Tensor& k, const Tensor& v, const Opt<Tensor>& mask, double dropout, bool causal, Opt<double> scale, bool grouped) {
  if (asked.dry && !mask && c10::isReducedFloatingType(q.scalar_type())) {
    return std::get<0>(at::_scaled_dot_product_flash_attention(q, k, v, dropout, causal, false, scale));
  }
  return at::native::scaled_dot_product_attention(q, k, v, mask, dropout, causal, scale, grouped);
}

// torch's build for CUDA has one kernel for it, and two for its backward. A dry device that keeps a log takes them too.
inline void rms_norm(const c10::OperatorHandle& plain, Stack* stack) {
  static auto fused = c10::Dispatcher::singleton().findSchemaOrThrow("aten::_fused_rms_norm", "");
  if (!asked.dry || !written.on) return plain.callBoxedForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd, *stack);
  fused.callBoxed(stack);
  stack->pop_back();  // what its backward needs
}

struct NoWarnings final : c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

// Operators that are one kernel on a GPU, or a few for all tensors. The CPU's build of torch has them as a kernel for each tensor.
inline bool is_one(const std::string& name) {
  return name.starts_with("aten::_foreach_") || name == "aten::_chunk_cat" || name == "aten::split_with_sizes_copy" || name == "aten::silu_backward" || name.starts_with("aten::_fused_rms_norm");
}
// A list of host tensors among them: torch copies one after another, on GPUs too.
inline void copy_all(at::TensorList to, at::TensorList from, bool later) {
  auto there = [](const Tensor& t) { return on_device(t); };
  if (std::all_of(to.begin(), to.end(), there) && std::all_of(from.begin(), from.end(), there)) {
    static auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::_foreach_copy_", "");
    Stack stack{to, from, later};
    return fallback(op, &stack);
  }
  for (size_t i = 0; i < to.size(); ++i) to[i].copy_(from[i], later);
}

inline void register_operators() {
  static torch::Library rest(torch::Library::IMPL, "_", key(), __FILE__, __LINE__);
  rest.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
  static torch::Library m(torch::Library::IMPL, "aten", key(), __FILE__, __LINE__);
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", TORCH_FN(at::native::view));
  m.impl("view_as_real", TORCH_FN(at::native::view_as_real));
  m.impl("view_as_complex", TORCH_FN(at::native::view_as_complex));
  m.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  m.impl("unfold", TORCH_FN(at::native::unfold));
  m.impl("resize_", resize_);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Storage", set_whole_storage);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("copy_", copy_);
  m.impl("record_stream", record_stream);
  m.impl("_fused_sdp_choice", attention_kernel);
  NoWarnings unsaid;
  c10::WarningUtils::WarningHandlerGuard quiet(&unsaid);  // of kernels that these stand in front of
  for (const auto& each : c10::Dispatcher::singleton().getAllOpNames()) {
    if (!is_one(each.name) || each.name == "aten::_foreach_copy_") continue;
    const std::string name = each.name.substr(6) + (each.overload_name.empty() ? "" : "." + each.overload_name);
    m.impl(name.c_str(), torch::CppFunction::makeFromBoxedFunction<&fallback>());
  }
  m.impl("_foreach_copy_", copy_all);
  m.impl("scaled_dot_product_attention", attention);
  m.impl("rms_norm", torch::CppFunction::makeFromBoxedFunction<&rms_norm>());
  static torch::Library with_gradients(torch::Library::IMPL, "aten", c10::getAutogradKeyFromBackend(c10::toBackendComponent(key())), __FILE__, __LINE__);
  with_gradients.impl("scaled_dot_product_attention", attention);
  with_gradients.impl("rms_norm", torch::CppFunction::makeFromBoxedFunction<&rms_norm>());
}
}  // namespace sim
