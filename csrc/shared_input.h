// SPDX-License-Identifier: Apache-2.0
// Several linears on one input (q, k and v; gate and up) quantise it once. What the linear before has made of its input
// is kept, for this thread, until a linear meets another one, a region begins or ends, or a checkpoint does.
//
// Note [Equal histories]
// Copies of x may be used again where the slot would give the same step. The values are on the device, so the host
// argues by what it has set off: a slot's state of x is a function of the records and advances that it has met. Each
// input gets a number, which is the same for linears that meet it one after the other; a slot's `InputHistory` is a
// hash over the numbers recorded between two advances, and over the advances. Equal hashes under one policy: equal
// steps, bit for bit. What the host cannot follow (two policies on one slot, a recipe of the user's own) shares
// nothing.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>

#include "ops/primitives.h"

namespace octavo {

class InputHistory {
 public:
  // All the slots of which nothing is known but that they are empty have this one.
  static constexpr uint64_t kEmpty = 0;
  // Slots that are not there: every step is the tensor's own.
  static constexpr uint64_t kStateless = 1;

  uint64_t value() const { return value_.load(std::memory_order_relaxed); }
  // A backward has recorded this input. In any order, as the maximum that it stands for.
  void record(uint64_t input) { pending_ += mixed(input, 0x9e3779b97f4a7c15u); }
  // Advance number `step` has met the slot. It counts also where nothing seems to be pending: something loaded may be,
  // or what an advance that was predicated off has left.
  void advance(uint64_t step) { value_ = mixed(mixed(value_, pending_.exchange(0)), step); }
  // Emptied (kEmpty), or loaded with contents of this hash.
  void reset(uint64_t value) { value_ = value, pending_ = 0; }

  // A linear of this slot has met an input that the next one met too: its copies are worth keeping.
  std::atomic<bool> goes_on = false;

  static uint64_t mixed(uint64_t a, uint64_t b);

 private:
  std::atomic<uint64_t> value_ = kEmpty;
  std::atomic<uint64_t> pending_ = 0;
};

// A tensor as far as autograd's version, its storage and its layout tell: where they are the same, its values are.
class Content {
 public:
  Content() = default;
  explicit Content(const at::Tensor& x);
  bool is_still_of(const at::Tensor& x) const;

 private:
  // Weak: no other storage can come to have this identity.
  c10::weak_intrusive_ptr<c10::StorageImpl> storage_{c10::intrusive_ptr<c10::StorageImpl>()};
  int64_t version_ = 0, offset_ = 0;
  at::ScalarType type_ = at::kFloat;
  at::DimVector sizes_, strides_;
};

// What else has to be the same for copies to be the same.
struct CopyKey {
  int32_t policy = 0;
  at::ScalarType type = at::kFloat8_e4m3fn;
  uint64_t stream = 0;
  uint64_t capture = 0;  // of a CUDA graph; 0: none
  int32_t version = 0;   // of the slot; for copies of weights
  bool operator==(const CopyKey&) const = default;
};

// This thread's last input.
class SharedInput {
 public:
  static SharedInput& of_this_thread();

  // The number of an input that is not to be shared.
  static uint64_t new_number();
  // Begins a use of x: gives its number, new if it is not the last one's input.
  uint64_t meet(const at::Tensor& x, const CopyKey& key);
  // Copies that a slot with this history may use, or none. `wanted`: which copies; `records`: with peaks.
  std::optional<ops::Made> find(uint64_t history, ops::Copies wanted, bool records) const;
  // What the slot's forward has made of input `number`, unless the thread has met another one since; of copies that
  // were not kept, the row copy is missing.
  void keep(uint64_t number, ops::Made made, uint64_t history, bool records, std::shared_ptr<InputHistory> maker);
  void forget() { *this = {}; }

 private:
  c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> x_{
      c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>()};
  Content content_;
  CopyKey key_;
  uint64_t number_ = 0;
  ops::Made made_;
  uint64_t history_ = 0;
  bool records_ = false;
  std::shared_ptr<InputHistory> maker_;
};

}  // namespace octavo
