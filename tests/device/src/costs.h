// What an operator takes on a GPU: floating-point operations, bytes, kernels. By its name and its tensors alone.
//
// Bytes are those of the tensors that it reads and writes, each once (in-place operators read and write). Operators that look at few
// elements of a tensor, that only write, or that are several kernels have rules of their own.
#pragma once
#include "device.h"

namespace sim {
using c10::IValue;

inline bool on_device(const Tensor& t) { return t.defined() && t.device().type() == TYPE; }
inline double bytes_of(const Tensor& t) {  // of an expanded tensor no more than it has
  return on_device(t) ? std::min<double>((double)t.numel() * t.element_size(), t.storage().nbytes()) : 0;
}
inline bool has(const std::string& name, const char* part) { return name.find(part) != std::string::npos; }

inline std::vector<Tensor> tensors_in(const IValue& v) {
  if (v.isTensor()) return v.toTensor().defined() ? std::vector<Tensor>{v.toTensor()} : std::vector<Tensor>{};
  if (v.isTensorList()) return v.toTensorVector();
  return {};
}

// Kernels of torch's multi_tensor_apply: each takes so many tensors, by how many lists there are, in at most 320 blocks of 65536 elements.
inline int multi_tensor_kernels(const std::vector<Tensor>& list, size_t lists) {
  static const int most[] = {110, 64, 48, 36, 30};
  const int tensors = most[std::min<size_t>(std::max<size_t>(lists, 1), 5) - 1];
  int kernels = 0, held = 0, blocks = 0;
  for (const Tensor& t : list) {
    if (t.numel() == 0) continue;
    ++held;
    for (int64_t left = (t.numel() + 65535) / 65536; left > 0;) {
      int64_t taken = std::min<int64_t>(left, 320 - blocks);
      left -= taken, blocks += taken;
      if (blocks == 320 || (left == 0 && held == tensors)) ++kernels, held = left ? 1 : 0, blocks = 0;
    }
  }
  return kernels + (blocks > 0);
}

// Whether torch's CUDA kernels take such lists together. Otherwise there is a kernel for each tensor.
inline bool go_together(const std::vector<std::vector<Tensor>>& lists) {
  for (const auto& list : lists) {
    for (size_t i = 0; i < list.size(); ++i) {
      if (list[i].scalar_type() != list[0].scalar_type() || list.size() != lists[0].size()) return false;
      if (list[i].sizes() != lists[0][i].sizes() || list[i].strides() != lists[0][i].strides()) return false;
    }
  }
  return true;
}

inline double attention_flops(const std::vector<IValue>& args, bool backward, double products) {
  const Tensor &q = args[backward].toTensor(), &k = args[backward + 1].toTensor();
  const double rows = q.size(-2), columns = k.size(-2), square = std::min(rows, columns);
  bool causal = false;
  for (const IValue& v : args) causal = causal || (v.isBool() && v.toBool());
  const double pairs = causal ? square * (square + 1) / 2 + (rows - square) * columns : rows * columns;
  return products * 2 * q.numel() / rows * pairs;
}

inline Cost cost_of(const c10::FunctionSchema& schema, const std::string& name, const std::vector<IValue>& args, const std::vector<IValue>& results) {
  const std::string op = name.substr(6, name.find('.') == std::string::npos ? std::string::npos : name.find('.') - 6);  // without "aten::"
  const bool only_writes = has(op, "zero") || has(op, "fill_") || has(op, "ones") || has(op, "full") || has(op, "copy_") || has(op, "normal_") || has(op, "uniform_");
  double read = 0, changed = 0, made = 0;  // made: results, be their memory new or given
  std::vector<std::vector<Tensor>> lists;
  std::vector<Tensor> tensors;
  for (size_t i = 0; i < args.size(); ++i) {
    const auto& argument = schema.arguments()[i];
    const bool writes = argument.alias_info() && argument.alias_info()->isWrite();
    double bytes = 0;
    auto found = tensors_in(args[i]);
    for (const Tensor& t : found) bytes += bytes_of(t);
    if (args[i].isTensorList()) lists.push_back(found);
    tensors.insert(tensors.end(), found.begin(), found.end());
    if (argument.is_out()) made += bytes;
    else if (writes && !(has(op, "_fused_") && i == 1)) changed += bytes;  // (optimizers may scale gradients, and do not)
    if (!writes || !(argument.is_out() || only_writes)) read += bytes;
  }
  for (size_t k = 0; k < results.size(); ++k) {
    if (schema.returns()[k].alias_info()) continue;
    for (const Tensor& t : tensors_in(results[k])) made += bytes_of(t);
    if (results[k].isTensorList() && has(op, "_foreach")) lists.push_back(results[k].toTensorVector());
  }
  Cost cost{0, read + changed + made};
  auto t = [&](size_t i) { return args[i].toTensor(); };
  auto product = [&](const Tensor& a, const Tensor& b, double share = 1) {
    cost.flops = share * 2.0 * a.numel() * b.size(-1);
    cost.narrow = std::min({a.size(-1), a.size(-2), b.size(-1)});
  };
  if (op == "mm") product(t(0), t(1));
  else if (op == "bmm") product(t(0), t(1));
  else if (op == "addmm") product(t(1), t(2));
  else if (op == "_scaled_dot_product_flash_attention") cost.flops = attention_flops(args, false, 2), cost.narrow = t(0).size(-1);
  else if (op == "_scaled_dot_product_flash_attention_backward") {
    cost.flops = attention_flops(args, true, 5), cost.narrow = t(1).size(-1), cost.kernels = 3;
    cost.bytes += 8 * t(1).numel();  // the query's gradient is added up in fp32
  } else if (op == "embedding" || op == "index_select" || op == "gather" || op == "index") {
    cost.bytes = 2 * made;  // the rows that are asked for
  } else if (op == "embedding_dense_backward") {
    cost.bytes = made + 3 * bytes_of(t(0)), cost.kernels = 14;  // zeros, a sort of the indices, their runs, sums
  } else if (op == "nll_loss_forward") {
    cost.bytes = 64.0 * t(1).numel();
  } else if (op == "nll_loss_backward") {
    cost.bytes = made, cost.kernels = 2;
  } else if (op == "index_add_" || op == "index_put_" || op == "scatter_add_" || op == "index_copy_" || op == "scatter_") {
    cost.bytes = 3 * bytes_of(t(args.size() > 3 && args[3].isTensor() ? 3 : 0));
  } else if (op == "index_add" || op == "index_put" || op == "scatter_add" || op == "scatter") {
    const IValue& out = args.back();  // in place, too, is called by the name with an `out`
    if (out.isTensor() && on_device(out.toTensor()) && out.toTensor().is_same(t(0))) cost.bytes = 3 * (args[3].isTensor() ? bytes_of(t(3)) : 1.0 * t(2).numel() * t(0).element_size());  // or one number
    else cost.kernels = 2;  // a copy first
  } else if (op == "topk" || op == "sort") {
    cost.kernels = 4;
  } else if (has(op, "_foreach") || has(op, "_fused_")) {
    if (!lists.empty() && has(op, "_foreach") && !has(op, "norm") && !go_together(lists)) cost.kernels = lists[0].size();
    else if (!lists.empty()) cost.kernels = std::max(1, multi_tensor_kernels(lists[0], has(op, "_fused_") ? 4 : lists.size()));
    if (has(op, "_foreach_norm")) cost.kernels += 2;  // sums of parts are zeroed, and added up
    if (op == "_fused_rms_norm_backward") cost.kernels = 2;  // of the input, and of the weight
  }
  return cost;
}
}  // namespace sim
