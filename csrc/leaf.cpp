// SPDX-License-Identifier: Apache-2.0
#include "leaf.h"

namespace octavo {

std::pair<at::Tensor, ViewKey> leaf_of(const at::Tensor& weight) {
  if (!weight.is_view()) return {weight.is_leaf() ? weight : at::Tensor(), {}};
  auto base = weight._base();
  if (!base.is_leaf()) return {};
  // A part of a buffer that learns by itself is a parameter; a slice of a parameter is not, also under no_grad.
  if (weight.is_leaf() && weight.requires_grad() && !base.requires_grad()) return {weight, {}};
  ViewKey key = {weight.storage_offset()};
  key.insert(key.end(), weight.sizes().begin(), weight.sizes().end());
  key.insert(key.end(), weight.strides().begin(), weight.strides().end());
  return {std::move(base), std::move(key)};
}

}  // namespace octavo
