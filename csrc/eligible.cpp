// SPDX-License-Identifier: Apache-2.0
#include "eligible.h"

#include <ATen/ops/linear_native.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <octavo/linear.h>

#include <utility>

#include "fp8_linear.h"
#include "linear_state.h"
#include "ops/device.h"

namespace octavo {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

thread_local bool turned_down = false;
thread_local std::vector<std::string> warnings;

bool is_half(at::ScalarType dtype) { return dtype == at::kBFloat16 || dtype == at::kHalf; }

bool any_of_operands(const Tensor& x, const Tensor& w, const OptionalTensor& bias, auto&& predicate) {
  return predicate(x) || predicate(w) || (bias && bias->defined() && predicate(*bias));
}

// Calls that F.linear itself refuses, or that are no linear as we know it: PyTorch's own words for those.
bool is_well_formed(const Tensor& x, const Tensor& w, const OptionalTensor& bias) {
  if (x.dim() < 1 || w.dim() < 1 || w.dim() > 2 || x.sym_size(-1) != w.sym_size(-1)) return false;
  const auto device = x.device();
  return !any_of_operands(x, w, bias, [&](const Tensor& t) { return t.device() != device || !t.is_floating_point(); });
}

// Tensors that are more than strided memory of their own, told by their keys alone: some cannot even say their sizes.
// `traced`: the ones of a compiler that makes a graph are none.
std::optional<Outcome> why_special(const Tensor& x, const Tensor& w, const OptionalTensor& bias, bool traced = false) {
  using c10::DispatchKey;
  const auto any_has = [&](c10::DispatchKeySet keys) {
    return any_of_operands(x, w, bias, [&](const Tensor& t) { return t.key_set().has_any(keys); });
  };
  if (any_has(c10::DispatchKeySet({DispatchKey::FuncTorchGradWrapper, DispatchKey::FuncTorchBatched})))
    return Outcome::kTransform;
  if (!traced && any_has(c10::python_ks)) return Outcome::kSubclass;
  if (any_of_operands(x, w, bias, [](const Tensor& t) { return t.is_nested() || t.layout() != at::kStrided; }))
    return Outcome::kLayout;
  return std::nullopt;
}

bool all_in_high_precision(const Products& products) {
  return products == Products{Precision::kHigh, Precision::kHigh, Precision::kHigh};
}

Outcome decide(const Region& region, const Tensor& x, const Tensor& w, const OptionalTensor& bias,
               at::ScalarType compute, bool traced = false) {
  if (any_of_operands(x, w, bias, [](const Tensor& t) { return t._fw_grad(0).defined(); })) return Outcome::kForwardAd;
  if (region.excludes(w)) return Outcome::kExcluded;
  if (compute == at::kFloat && !region.include_float32) return Outcome::kFloat32;
  if (compute != at::kFloat && !is_half(compute)) return Outcome::kDtype;
  if (w.dim() == 1) return Outcome::kWeight1d;
  if (bias && bias->defined() && (bias->dim() != 1 || bias->sym_size(0) != w.sym_size(0))) return Outcome::kBiasShape;
  if (x.sym_numel() == 0 || w.sym_numel() == 0) return Outcome::kEmpty;
  if (all_in_high_precision(region.products)) return Outcome::kHigh;
  if (const auto* small = region.small_on(x.device())) {
    const auto k = x.sym_size(-1);
    if (!small->pays(region.policy.kind, x.sym_numel() / k, w.sym_size(0), k)) return Outcome::kSmall;
  }
  ops::check_fp8_support(x.device());
  const bool has_state = region.policy.kind == ScalingKind::kDynamic || traced || can_hold_state(w);
  return has_state ? Outcome::kFp8 : Outcome::kFp8Stateless;
}

void count_call(const Tensor& x, const Tensor& w, Outcome outcome) {
  c10::SymInt m = 1;
  for (int64_t i = 0; i + 1 < x.dim(); ++i) m = m * x.sym_size(i);
  const auto n = w.dim() == 2 ? w.sym_size(0) : c10::SymInt(1);
  const auto number = [](const c10::SymInt& size) { return size.maybe_as_int().value_or(-1); };
  count(number(m), number(n), number(x.sym_size(-1)), outcome);
}

bool is_fp8(Outcome outcome) { return outcome == Outcome::kFp8 || outcome == Outcome::kFp8Stateless; }

// Whether a traced call is the one that makes the graph: compilers run a function several times.
bool makes_graph() {
  using c10::impl::TorchDispatchModeKey;
  return c10::impl::TorchDispatchModeTLS::get_mode(TorchDispatchModeKey::PROXY).has_value();
}

// What on_fallback says of a linear that did not run in FP8.
void answer_fallback(const Region& region, Outcome outcome, at::ScalarType w_type, bool computed,
                     std::optional<at::ScalarType> compute, bool traced) {
  if (region.on_fallback == OnFallback::kAllow || !is_fallback(outcome)) return;
  const bool wanted = compute && (is_half(*compute) || (*compute == at::kFloat && region.include_float32));
  if (!wanted || computed || all_in_high_precision(region.products)) return;
  const auto says =
      c10::str("octavo: a linear with ", w_type, " weights should run in FP8 here and cannot: ", describe(outcome));
  TORCH_CHECK(region.on_fallback == OnFallback::kWarn, says,
              "; with on_fallback=\"warn\" or \"allow\" it runs as outside of the region, and so it does inside "
              "fp8_autocast(enabled=False)");
  const auto warning =
      says + "; it runs as outside of the region (on_fallback=\"allow\" says so in octavo.report() alone)";
  if (traced) {
    warnings.push_back(warning);
  } else {
    TORCH_WARN(warning);
  }
}

}  // namespace

std::optional<at::ScalarType> compute_type(const Tensor& x, const Tensor& w, const OptionalTensor& bias,
                                           std::optional<at::ScalarType> autocast) {
  const auto type_of = [&](const Tensor& t) {
    return autocast && t.scalar_type() != at::kDouble ? *autocast : t.scalar_type();
  };
  const auto compute = type_of(x);
  if (any_of_operands(x, w, bias, [&](const Tensor& t) { return type_of(t) != compute; })) return std::nullopt;
  return compute;
}

bool is_computed(const Tensor& w) { return !(w.is_view() ? w._base() : w).is_leaf(); }

void turn_down(const Region& region, Outcome outcome, at::ScalarType w_type, bool computed,
               std::optional<at::ScalarType> compute, bool traced) {
  count(-1, -1, -1, outcome);
  answer_fallback(region, outcome, w_type, computed, compute, traced);
}

std::vector<std::string> take_warnings() { return std::exchange(warnings, {}); }

TurnedDown::TurnedDown() : before_(turned_down) { turned_down = true; }
TurnedDown::~TurnedDown() { turned_down = before_; }
bool is_turned_down() { return turned_down; }

Tensor try_fp8(const Region& region, const Tensor& x, const Tensor& w, const OptionalTensor& bias,
               std::optional<at::ScalarType> autocast, const TracedWeight* traced) {
  const auto compute = [&] { return compute_type(x, w, bias, autocast); };
  // What the region excludes is no fallback either.
  const auto computed = [&] { return traced ? !traced->leaf : is_computed(w) || region.excludes(w); };
  if (const auto special = why_special(x, w, bias, traced)) {
    turn_down(region, *special, w.scalar_type(), computed(), compute(), traced);
    return {};
  }
  if (!is_well_formed(x, w, bias)) return {};
  const auto type = compute();
  if (!type) return {};
  const auto outcome = decide(region, x, w, bias, *type, traced);
  // A graph's ops count their own calls; what it leaves alone is counted once.
  if (!traced || (!is_fp8(outcome) && makes_graph())) count_call(x, w, outcome);
  if (!traced || makes_graph()) answer_fallback(region, outcome, w.scalar_type(), computed(), type, traced);
  return is_fp8(outcome) ? fp8_linear(x, w, bias, *type, region, traced) : Tensor();
}

Tensor linear(const Tensor& x, const Tensor& w, const OptionalTensor& bias) {
  auto region = active_region();
  if (!region) {
    static const auto recipe = std::make_shared<DelayedScaling>();
    region = std::make_shared<Region>(recipe, AutocastOptions{});
  }
  TORCH_CHECK(!why_special(x, w, bias), "octavo::linear: x, w and bias must be plain strided tensors");
  TORCH_CHECK(is_well_formed(x, w, bias), "octavo::linear: x ", x.sizes(), " and w ", w.sizes(),
              " must be floating point matrices on one device with equal last dimensions");
  const auto compute = compute_type(x, w, bias, std::nullopt);
  TORCH_CHECK(compute, "octavo::linear: x, w and bias must have one dtype, not ", x.scalar_type(), " and ",
              w.scalar_type());
  const auto outcome = decide(*region, x, w, bias, *compute);
  count_call(x, w, outcome);
  const bool stays = outcome == Outcome::kEmpty || outcome == Outcome::kHigh || outcome == Outcome::kSmall;
  if (stays) return at::native::linear(x, w, bias);
  TORCH_CHECK(is_fp8(outcome), "octavo::linear: x ", x.sizes(), " ", x.scalar_type(), " and w ", w.sizes(),
              " cannot run in FP8: ", describe(outcome));
  return fp8_linear(x, w, bias, *compute, *region);
}

}  // namespace octavo
