// SPDX-License-Identifier: Apache-2.0
// Whose a weight is, and what we keep with it. A hook of ours that does nothing, in the leaf's AutogradMeta, holds it,
// so that it moves with the parameter and dies with it.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <typeinfo>
#include <utility>
#include <vector>

namespace octavo {

using ViewKey = std::vector<int64_t>;  // of a slice of the parameter: offset, sizes, strides; empty: the whole

// The leaf that a weight is, or is a part of, and which part; an undefined tensor if there is none.
using WeightPart = std::pair<at::Tensor, ViewKey>;
WeightPart leaf_of(const at::Tensor& weight);

using WeakLeaf = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

// Note [Cleared hooks]
// The first Python hook that a user registers on a parameter clears all that are there, ours too. A hook that ends
// while its leaf lives leaves what it held here, under the leaf's own identity (a weak pointer: no other tensor can
// come to have it), and the next one who asks puts it back.
void leave_behind(WeakLeaf leaf, const std::type_info& type, std::shared_ptr<void> kept);
// What was left behind of this type, or null.
std::shared_ptr<void> take_back(const at::Tensor& leaf, const std::type_info& type);

// Guards every list of hooks that we look at or add to.
std::mutex& hooks_mutex();

template <class Kept>
class ParameterHook final : public torch::autograd::FunctionPreHook {
 public:
  ParameterHook(const at::Tensor& leaf, std::shared_ptr<Kept> what)
      : kept(std::move(what)), leaf_(leaf.getIntrusivePtr()) {}
  ~ParameterHook() override {
    if (!leaf_.expired()) leave_behind(std::move(leaf_), typeid(Kept), std::move(kept));
  }
  torch::autograd::variable_list operator()(const torch::autograd::variable_list& grads) override { return grads; }
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs&) const override {}

  std::shared_ptr<Kept> kept;

 private:
  WeakLeaf leaf_;
};

// What is kept of this type with a leaf, or null.
template <class Kept>
Kept* find_kept(const at::Tensor& leaf) {
  auto* meta = torch::autograd::impl::get_autograd_meta(leaf);
  if (!meta) return nullptr;
  std::lock_guard lock(hooks_mutex());
  for (auto& hook : meta->hooks_)
    if (auto* found = dynamic_cast<ParameterHook<Kept>*>(hook.get())) return found->kept.get();
  auto back = std::static_pointer_cast<Kept>(take_back(leaf, typeid(Kept)));
  if (!back) return nullptr;
  meta->hooks_.push_back(std::make_unique<ParameterHook<Kept>>(leaf, back));
  return back.get();
}

// The same, made if there is none.
template <class Kept>
Kept& kept_with(const at::Tensor& leaf) {
  if (auto* found = find_kept<Kept>(leaf)) return *found;
  auto made = std::make_shared<Kept>();
  // Not impl::add_hook, which wants to be the first.
  auto& hooks = torch::autograd::impl::materialize_autograd_meta(leaf)->hooks_;
  std::lock_guard lock(hooks_mutex());
  hooks.push_back(std::make_unique<ParameterHook<Kept>>(leaf, made));
  return *made;
}

}  // namespace octavo
