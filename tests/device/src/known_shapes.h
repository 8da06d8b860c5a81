// What the meta device has said of an operator's results is kept: most of its kernels are Python, and models ask the same of each block.
#pragma once
#include <ATen/core/ivalue.h>

#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "device.h"

namespace sim {
using c10::IValue;

// All of a call that the shapes of its results may depend on, in bytes. Not for arguments of kinds that it does not know.
class Question {
 public:
  Question(const std::string& name, const std::vector<IValue>& args) : known_(name.rfind("aten::", 0) == 0), text_(name) {
    put(c10::get_default_dtype_as_scalartype());
    for (const IValue& each : args) ask(each);
  }
  const std::string* text() const { return known_ ? &text_ : nullptr; }

 private:
  template <class T>
  void put(const T& value) {
    text_.append((const char*)&value, sizeof value);
  }
  template <class List>
  void put_all(const List& list) {
    put(list.size());
    for (const auto& each : list) put(each);
  }
  void ask(const Tensor& t) {
    put(t.defined());
    if (!t.defined()) return;
    known_ = known_ && t.layout() == at::kStrided;
    put(t.device().type()), put(t.scalar_type()), put(t.unsafeGetTensorImpl()->is_wrapped_number()), put(t.is_conj()), put(t.is_neg());
    put_all(t.sizes()), put_all(t.strides());
    if (t.device().is_cpu() && t.dim() == 0) text_.append((const char*)t.const_data_ptr(), t.element_size());  // a number
  }
  void ask(const IValue& v) {
    text_ += '\n' + v.tagKind();
    if (v.isTensor()) ask(v.toTensor());
    else if (v.isTensorList()) ask_all(v.toTensorVector());
    else if (v.isInt()) put(v.toInt());
    else if (v.isDouble()) put(v.toDouble());
    else if (v.isBool()) put(v.toBool());
    else if (v.isString()) text_ += v.toStringRef() + '\n';
    else if (v.isIntList()) put_all(v.toIntVector());
    else if (v.isDevice()) put(v.toDevice().type());
    else known_ = known_ && v.isNone();
  }
  void ask_all(const std::vector<Tensor>& list) {
    put(list.size());
    for (const Tensor& each : list) ask(each);
  }

  bool known_;
  std::string text_;
};

struct Shapes {
  std::vector<IValue> results;                               // on the meta device
  std::vector<std::pair<size_t, std::vector<int64_t>>> outs;  // of arguments that are an `out`, by place
};

struct KnownShapes {
  std::mutex mutex;
  std::unordered_map<std::string, Shapes> answers;

  std::optional<Shapes> of(const Question& question) {
    std::lock_guard<std::mutex> lock(mutex);
    auto found = question.text() ? answers.find(*question.text()) : answers.end();
    return found == answers.end() ? std::nullopt : std::optional(found->second);
  }
  void keep(const Question& question, const Shapes& answer) {
    if (!question.text()) return;
    std::lock_guard<std::mutex> lock(mutex);
    answers.emplace(*question.text(), answer);
  }
};
inline KnownShapes& known_shapes = *new KnownShapes;
}  // namespace sim
