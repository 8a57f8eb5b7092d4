// SPDX-License-Identifier: Apache-2.0
// Recipes: how amaxes become quantisation steps, and which of a linear's three products run in FP8.
#pragma once

#include <ATen/core/Tensor.h>
#include <octavo/export.h>

#include <cstdint>
#include <memory>
#include <string>

namespace octavo {

// HYBRID: E4M3 for inputs and weights, E5M2 for gradients.
enum class Fp8Format { E4M3, E5M2, HYBRID };

// How one product runs.
enum class Precision {
  kFast,      // FP8, Hopper's shorter accumulator
  kAccurate,  // FP8, accumulated in float32
  kHigh,      // not FP8: in the operands' own 16-bit type, or autocast's
};

// The three matrix products of a linear: y = x w^T, dx = dy w, dw = dy^T x.
struct Products {
  Precision forward = Precision::kFast;
  Precision dgrad = Precision::kAccurate;
  Precision wgrad = Precision::kAccurate;
  bool operator==(const Products&) const = default;
};

enum class DelayedAlgorithm {
  kMax,         // the largest amax of the window
  kMostRecent,  // the amax of the last step alone
};

// What every recipe has. The step is (amax / FP8_MAX) * 2^margin, with `power_of_two` rounded up to a power of two.
struct RecipeOptions {
  int64_t history_len = 16;  // optimizer steps in the window, 1 to 65536
  double margin = 0;         // headroom in powers of two, -64 to 64
  bool power_of_two = false;
  DelayedAlgorithm algorithm = DelayedAlgorithm::kMax;  // of DelayedScaling alone
  Products products = {};
  // Linears that are faster in 16 bits stay there: "auto", by the table of the device that they run on, if there is
  // one; a table's name (small.h), by that one on any device; "", none stays.
  std::string small = "auto";
};

// A scaling policy of the user's own: derive, and compute the step from the window. Recipes are immutable.
// Throws c10::Error for options out of range, naming the option.
class OCTAVO_API Recipe {
 public:
  explicit Recipe(const RecipeOptions& options = {});
  virtual ~Recipe();
  Recipe(const Recipe&) = delete;
  Recipe& operator=(const Recipe&) = delete;

  // amax: float32 [slots, history_len], oldest first, on the device of the state. Returns the steps, float32 [slots];
  // margin and power_of_two are its own affair. One that is not finite and positive leaves the slot's old step.
  virtual at::Tensor scale_from_history(const at::Tensor& amax, Fp8Format format) const = 0;

  // What the policy is, as text: two recipes of equal identity share their state. Name the type and every value that
  // scale_from_history depends on. The options above need not be in it.
  virtual std::string identity() const = 0;

  const RecipeOptions& options() const { return options_; }

 private:
  const RecipeOptions options_;
};

// The step from the amaxes of the last `history_len` optimizer steps, known before the tensor is.
class OCTAVO_API DelayedScaling final : public Recipe {
 public:
  using Recipe::Recipe;
  at::Tensor scale_from_history(const at::Tensor& amax, Fp8Format format) const override;
  std::string identity() const override;
};

// The step from the tensor's own amax ("current scaling"): one more read of each tensor, no state.
class OCTAVO_API DynamicScaling final : public Recipe {
 public:
  using Recipe::Recipe;
  at::Tensor scale_from_history(const at::Tensor& amax, Fp8Format format) const override;
  std::string identity() const override;
};

}  // namespace octavo
