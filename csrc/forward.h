// SPDX-License-Identifier: Apache-2.0
// The forward of one FP8 linear: which copies it makes, keeps, or takes over from others.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <utility>

#include "leaf.h"
#include "ops/primitives.h"
#include "policy.h"
#include "shared_input.h"

namespace octavo {

// What forward makes for backward.
struct Saved {
  at::Tensor x;          // wgrad's operand: the transposed FP8 copy, or x itself; undefined if not wanted
  at::Tensor tape;       // undefined if nothing was quantised
  at::Tensor w_col;      // w's transposed copy, if that is kept
  ops::Made scope_w;     // the same of a scope of unchanged weights, with the tape that has its step
  bool seeded = false;   // g's step is on the tape
  bool likely = false;   // it is nearly always
  bool records = false;  // there is a slot to record in
  std::shared_ptr<InputHistory> inputs;  // where a record of x is noted, under its number
  uint64_t input = 0;
};

struct Forward {
  const at::Tensor& x;
  const at::Tensor& w;
  const std::optional<at::Tensor>& bias;
  at::ScalarType compute;
  const LinearRecipe& recipe;
  bool needs_dx;
  bool needs_dw;
  bool needs_db;
  const WeightPart* part = nullptr;  // in a compiled graph: whose w is. Nothing but results then outlives the op

  bool keeps_x_col() const { return needs_dw && in_fp8(recipe.products.wgrad); }
  bool keeps_w_step() const { return needs_dx && in_fp8(recipe.products.dgrad); }
  bool trains() const { return needs_dx || needs_dw || needs_db; }
  // y, and what backward needs.
  std::pair<at::Tensor, Saved> run() const;
};

}  // namespace octavo
