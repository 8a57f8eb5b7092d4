// SPDX-License-Identifier: Apache-2.0
// The forward of one FP8 linear: which copies it makes, keeps, or takes over from others.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <utility>

#include "ops/primitives.h"
#include "region.h"
#include "shared_input.h"

namespace octavo {

inline bool in_fp8(Precision precision) { return precision != Precision::kHigh; }
inline bool is_fast(Precision precision) { return precision == Precision::kFast; }

// What forward makes for backward.
struct Saved {
  at::Tensor x;          // wgrad's operand: the transposed FP8 copy, or x itself; undefined if not wanted
  at::Tensor tape;       // undefined if nothing was quantised
  at::Tensor w_col;      // w's transposed copy, if that is kept
  ops::Made scope_w;     // the same of a scope of unchanged weights, with the tape that has its step
  bool seeded = false;   // g's step is on the tape
  bool records = false;  // there is a slot to record in
  std::shared_ptr<InputHistory> inputs;  // where a record of x is noted, under its number
  uint64_t input = 0;
};

struct Forward {
  const at::Tensor& x;
  const at::Tensor& w;
  const std::optional<at::Tensor>& bias;
  at::ScalarType compute;
  const Region& region;
  bool needs_dx;
  bool needs_dw;
  bool needs_db;

  bool trains() const { return needs_dx || needs_dw || needs_db; }
  // y, and what backward needs.
  std::pair<at::Tensor, Saved> run() const;
};

}  // namespace octavo
