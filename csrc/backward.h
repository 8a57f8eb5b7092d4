// SPDX-License-Identifier: Apache-2.0
// The backward of one FP8 linear, from what its forward saved.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/SymInt.h>

#include <optional>

#include "ops/primitives.h"
#include "policy.h"

namespace octavo {

struct Backward {
  const at::Tensor& g;  // [..., N]
  // As forward's `Saved`; undefined where not wanted, or not made. x is the transposed copy, or x itself.
  at::Tensor tape, x, w, w_col;
  ops::Made scope_w;
  const LinearRecipe& recipe;
  c10::SymInt k;
  at::ScalarType compute;
  // Of the gradients; none where one is not wanted.
  std::optional<at::ScalarType> dx_type, dw_type, db_type;
  bool seeded;   // g's step is known to be on the tape
  bool likely;   // it is nearly always
  bool records;  // there is a slot to record in

  ops::BackwardResult run() const;
};

}  // namespace octavo
