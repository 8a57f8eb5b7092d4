// SPDX-License-Identifier: Apache-2.0
// FP8 copies of weights that are made once, within a scope in which the user promises that the weights do not change:
// micro-batches between two optimizer steps, frozen weights, evaluation. Both copies are kept, two bytes a parameter,
// with the parameter, until the scope ends.
#pragma once

#include <ATen/core/Tensor.h>

#include "ops/primitives.h"
#include "shared_input.h"

namespace octavo {

// Scopes nest, and hold for every thread. The end of the outermost one frees the copies.
void enter_weight_scope();
void leave_weight_scope();
bool in_weight_scope();
// An optimizer has stepped: whatever was promised, the weights are others now.
void weights_changed();

// What a weight is, and when: taken before it is quantised, since another thread may change it meanwhile.
struct WeightStamp {
  Content content;
  uint64_t epoch = 0;
};
WeightStamp stamp_of(const at::Tensor& weight);

// The copies of a weight made under this key in this scope, if it is (as far as autograd can tell) what it was; and
// with peaks, if `records`. Undefined tensors if there are none.
ops::Made find_weight_copies(const at::Tensor& weight, const CopyKey& key, bool records);
// Of one parameter no more than twice its elements are kept, however many slices of it are used.
void keep_weight_copies(const at::Tensor& weight, const CopyKey& key, const WeightStamp& stamp, bool records,
                        const ops::Made& made);

}  // namespace octavo
