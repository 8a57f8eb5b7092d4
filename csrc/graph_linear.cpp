// SPDX-License-Identifier: Apache-2.0
// octavo::_linear, which a compiled graph has in the place of aten::linear, under a region by its text.
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/library.h>

#include "eligible.h"

namespace octavo {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

// Whether it is called to make a graph of it, on tensors of the compiler's own.
bool is_traced(const Tensor& x, const Tensor& w, const OptionalTensor& bias) {
  using c10::impl::TorchDispatchModeKey;
  const auto is_on = [](TorchDispatchModeKey key) {
    return c10::impl::TorchDispatchModeTLS::get_mode(key).has_value();
  };
  const auto is_own = [](const Tensor& t) { return t.key_set().has_any(c10::python_ks); };
  return (is_own(x) || is_own(w) || (bias && is_own(*bias))) &&
         (is_on(TorchDispatchModeKey::FAKE) || is_on(TorchDispatchModeKey::FUNCTIONAL) ||
          is_on(TorchDispatchModeKey::PROXY));
}

Tensor try_fp8(std::string_view region, const TracedWeight& weight, const Tensor& x, const Tensor& w,
               const OptionalTensor& bias, std::optional<at::ScalarType> autocast) {
  if (region.empty()) return {};
  return octavo::try_fp8(*region_by_text(region), x, w, bias, autocast, is_traced(x, w, bias) ? &weight : nullptr);
}

Tensor linear_in_graph(const Tensor& x, const Tensor& w, const OptionalTensor& bias, std::string_view region,
                       const OptionalTensor& leaf, c10::SymIntArrayRef slice) {
  if (auto y = try_fp8(region, {leaf, slice}, x, w, bias, std::nullopt); y.defined()) return y;
  const TurnedDown guard;
  return at::linear(x, w, bias);
}

template <c10::DeviceType device>
Tensor linear_in_graph_autocast(const Tensor& x, const Tensor& w, const OptionalTensor& bias, std::string_view region,
                                const OptionalTensor& leaf, c10::SymIntArrayRef slice) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(
      at::autocast::get_autocast_dispatch_key_from_device_type(device));
  const auto dtype = at::autocast::get_lower_precision_fp_from_device_type(device);
  if (auto y = try_fp8(region, {leaf, slice}, x, w, bias, dtype); y.defined()) return y;
  return cast_and_linear<device>(dtype, x, w, bias);
}

// A linear that whoever makes the graph leaves alone, for a reason of the report.
void left_alone(std::string_view region, std::string_view reason, at::ScalarType w_type, bool computed,
                at::ScalarType compute) {
  for (const auto outcome : {Outcome::kExcluded, Outcome::kSubclass, Outcome::kTransform})
    if (reason == describe(outcome))
      return turn_down(*region_by_text(region), outcome, w_type, computed, compute, /*traced=*/true);
  TORCH_CHECK(false, "octavo: no linear is left alone because \"", reason, "\"");
}

}  // namespace
}  // namespace octavo

TORCH_LIBRARY_IMPL(octavo, CompositeImplicitAutograd, m) { m.impl("_linear", &octavo::linear_in_graph); }
TORCH_LIBRARY_IMPL(octavo, AutocastCPU, m) {
  m.impl("_linear", &octavo::linear_in_graph_autocast<c10::DeviceType::CPU>);
}
TORCH_LIBRARY_IMPL(octavo, AutocastCUDA, m) {
  m.impl("_linear", &octavo::linear_in_graph_autocast<c10::DeviceType::CUDA>);
}
TORCH_LIBRARY_IMPL(octavo, CatchAll, m) {
  m.impl("_left_alone", &octavo::left_alone);
  m.impl("_take_warnings", &octavo::take_warnings);
}
