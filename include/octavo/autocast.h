// SPDX-License-Identifier: Apache-2.0
// The region in which linears run in FP8.
#pragma once

#include <ATen/core/Tensor.h>
#include <octavo/export.h>
#include <octavo/recipe.h>

#include <memory>
#include <vector>

namespace octavo {

// What happens to a linear that should run in FP8 and cannot: its tensors are of a subclass, nested or not strided,
// inside a functorch transform or forward-mode AD, or its weight or bias has not a linear's shape. It then runs as it
// would outside. What was chosen so (excluded, float32, small, by the recipe) is no fallback, nor is an empty
// product or one whose weight is the result of a computation.
enum class OnFallback {
  kAllow,  // counted in the report
  kWarn,   // and warned about
  kError,  // an error instead
};

struct AutocastOptions {
  bool enabled = true;  // false: a region in which nothing runs in FP8, whatever surrounds it
  Fp8Format format = Fp8Format::HYBRID;
  std::vector<at::Tensor> exclude = {};  // weights whose linears stay as they are
  bool include_float32 = false;          // also linears whose operands are float32
  bool share_inputs = true;              // linears that follow each other on one input quantise it once: the same bits
  bool keep_fp8_weights = false;         // from forward to backward, a byte a parameter, instead of quantising again
  OnFallback on_fallback = OnFallback::kAllow;
};

struct Region;

// Every eligible linear that this thread calls while the guard lives runs in FP8, and so does its backward wherever
// that is called. Nests; the innermost counts, and inherits nothing.
//
//   octavo::Autocast guard;                                       // DelayedScaling
//   octavo::Autocast guard(std::make_shared<octavo::DynamicScaling>());
class OCTAVO_API Autocast {
 public:
  explicit Autocast(std::shared_ptr<const Recipe> recipe = std::make_shared<DelayedScaling>(),
                    const AutocastOptions& options = {});
  ~Autocast();
  Autocast(const Autocast&) = delete;
  Autocast& operator=(const Autocast&) = delete;

 private:
  std::shared_ptr<Region> region_;
};

// While one of these lives, weights are quantised once, because the caller promises that they do not change: for
// micro-batches between two steps, frozen weights, evaluation. The copies take two bytes a parameter. Holds for every
// thread. An optimizer's step, octavo::step(), and whatever changes a weight's version or address are noticed; a change
// that autograd does not see either (through `data`, by a fused kernel) is not.
class OCTAVO_API UnchangedWeights {
 public:
  UnchangedWeights();
  ~UnchangedWeights();
  UnchangedWeights(const UnchangedWeights&) = delete;
  UnchangedWeights& operator=(const UnchangedWeights&) = delete;
};

// Whether linears of this thread run in FP8 here.
OCTAVO_API bool is_autocast_enabled();

}  // namespace octavo
