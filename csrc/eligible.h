// SPDX-License-Identifier: Apache-2.0
// Which linears run in FP8 in a region, and what happens to the others.
#pragma once

#include <ATen/autocast_mode.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/linear.h>

#include <optional>
#include <string>
#include <vector>

#include "compiled_linear.h"
#include "region.h"
#include "report.h"

namespace octavo {

// The FP8 result, or undefined where PyTorch's implementation shall run. `autocast`: the type that torch.autocast casts
// to, if it is on. `traced`: a compiler makes a graph of it, whose ops count their own calls.
at::Tensor try_fp8(const Region& region, const at::Tensor& x, const at::Tensor& w,
                   const std::optional<at::Tensor>& bias, std::optional<at::ScalarType> autocast,
                   const TracedWeight* traced = nullptr);

// The type that the products have outside the region; nullopt where the operands' types do not fit together.
std::optional<at::ScalarType> compute_type(const at::Tensor& x, const at::Tensor& w,
                                           const std::optional<at::Tensor>& bias,
                                           std::optional<at::ScalarType> autocast);

// Counts a linear that does not run in FP8, by its sizes as far as they are known, and does what the region's
// on_fallback says if it should have. What the user chose is no fallback, whatever would have stood in the way after
// it. `computed`: its weight is the result of a computation.
void turn_down(const Region& region, Outcome outcome, at::ScalarType w_type, bool computed,
               std::optional<at::ScalarType> compute, bool traced = false);
// What on_fallback="warn" has said on this thread while graphs were made: in ops that Python calls, no warning reaches
// Python's own. Empties it.
std::vector<std::string> take_warnings();
bool is_computed(const at::Tensor& w);

// While one lives, a linear that was turned down goes on to PyTorch's implementation, which may come by here again.
class TurnedDown {
 public:
  TurnedDown();
  ~TurnedDown();
  TurnedDown(const TurnedDown&) = delete;
  TurnedDown& operator=(const TurnedDown&) = delete;

 private:
  const bool before_;
};
bool is_turned_down();

// What torch.autocast makes of a linear.
template <c10::DeviceType device>
at::Tensor cast_and_linear(at::ScalarType dtype, const at::Tensor& x, const at::Tensor& w,
                           const std::optional<at::Tensor>& bias) {
  const TurnedDown guard;
  return at::linear(at::autocast::cached_cast(dtype, x, device), at::autocast::cached_cast(dtype, w, device),
                    at::autocast::cached_cast(dtype, bias, device));
}

}  // namespace octavo
