// SPDX-License-Identifier: Apache-2.0
#include "shared_input.h"

namespace octavo {

// The finalizer of splitmix64.
uint64_t InputHistory::mixed(uint64_t a, uint64_t b) {
  uint64_t x = a * 0x9e3779b97f4a7c15u + b + 0x632be59bd9b4e019u;
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
  x = (x ^ x >> 27) * 0x94d049bb133111ebu;
  return (x ^ x >> 31) | 2;  // neither kEmpty nor kStateless, and never 0
}

SharedInput& SharedInput::of_this_thread() {
  static thread_local SharedInput shared;
  return shared;
}

Content::Content(const at::Tensor& x)
    : storage_(x.storage().getWeakStorageImpl()),
      version_(x._version()),
      offset_(x.storage_offset()),
      type_(x.scalar_type()),
      sizes_(x.sizes()),
      strides_(x.strides()) {}

bool Content::is_still_of(const at::Tensor& x) const {
  return storage_._unsafe_get_target() == x.storage().unsafeGetStorageImpl() && version_ == x._version() &&
         offset_ == x.storage_offset() && type_ == x.scalar_type() && x.sizes() == at::IntArrayRef(sizes_) &&
         x.strides() == at::IntArrayRef(strides_);
}

uint64_t SharedInput::new_number() {
  static std::atomic<uint64_t> numbers = 0;
  return ++numbers;
}

uint64_t SharedInput::meet(const at::Tensor& x, const CopyKey& key) {
  if (x.is_inference()) {  // it has no version, and may have changed
    forget();
    return new_number();
  }
  const bool is_same = x_._unsafe_get_target() == x.unsafeGetTensorImpl() && key == key_ && content_.is_still_of(x);
  if (is_same) return number_;
  forget();
  x_ = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>(x.getIntrusivePtr());
  content_ = Content(x);
  key_ = key;
  number_ = new_number();
  return number_;
}

std::optional<ops::Made> SharedInput::find(uint64_t history, ops::Copies wanted, bool records) const {
  const bool has_them =
      (!(wanted & ops::kRow) || made_.row.defined()) && (!(wanted & ops::kCol) || made_.col.defined());
  if (!made_.tape.defined() || history != history_ || (records && !records_)) return std::nullopt;
  if (!has_them && maker_) maker_->goes_on = true;
  return has_them ? std::optional(made_) : std::nullopt;
}

void SharedInput::keep(uint64_t number, ops::Made made, uint64_t history, bool records,
                       std::shared_ptr<InputHistory> maker) {
  if (number != number_) return;
  maker_ = std::move(maker);
  made_ = std::move(made);
  history_ = history;
  records_ = records;
}

}  // namespace octavo
