// SPDX-License-Identifier: Apache-2.0
// Whose a weight is, and what we keep with it: hooks of ours that do nothing, in the leaf's AutogradMeta, so that what
// they hold moves with the parameter and dies with it; nothing is looked up by an address.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

namespace octavo {

using ViewKey = std::vector<int64_t>;  // of a slice of the parameter: offset, sizes, strides; empty: the whole

// The leaf that a weight is, or is a part of, and which part; an undefined tensor if there is none.
std::pair<at::Tensor, ViewKey> leaf_of(const at::Tensor& weight);

class ParameterHook : public torch::autograd::FunctionPreHook {
 public:
  torch::autograd::variable_list operator()(const torch::autograd::variable_list& grads) override { return grads; }
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs&) const override {}
};

// The leaf's hook of this class, or null.
template <class Hook>
Hook* find_hook(const at::Tensor& leaf) {
  auto* meta = torch::autograd::impl::get_autograd_meta(leaf);
  if (!meta) return nullptr;
  for (auto& hook : meta->hooks_)
    if (auto* found = dynamic_cast<Hook*>(hook.get())) return found;
  return nullptr;
}

// The same, made if there is none.
template <class Hook>
Hook& hook_of(const at::Tensor& leaf) {
  if (auto* found = find_hook<Hook>(leaf)) return *found;
  auto made = std::make_unique<Hook>();
  auto& hook = *made;
  torch::autograd::impl::add_hook(leaf, std::move(made));
  return hook;
}

}  // namespace octavo
