// SPDX-License-Identifier: Apache-2.0
// aten::linear at three kinds of keys, for CPU and CUDA, and where functorch's transforms take it:
//   Autograd*  what nn.Linear and F.linear reach
//   CPU, CUDA  below autograd: inference_mode, and calls from inside other autograd kernels
//   Autocast*  in front of torch.autocast's own casts: there the operands are still the user's, so state stays with the
//              parameter, and float32 is quantised directly instead of by way of bf16
//   FuncTorchDynamicLayerFrontMode  in front of all of them, where PyTorch takes a linear apart: it runs so, and is
//   counted
// Outside a region each does what PyTorch does without Octavo.
#include "aten_linear.h"

#include <ATen/autocast_mode.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/linear_native.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <octavo/linear.h>
#include <torch/library.h>

#include <mutex>

#include "fp8_linear.h"
#include "linear_state.h"
#include "ops/device.h"
#include "region.h"
#include "report.h"

namespace octavo {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

// Set while a linear that was turned down goes on to PyTorch's implementation, which may come by here again.
thread_local bool turned_down = false;
struct TurnedDown {
  TurnedDown() { turned_down = true; }
  ~TurnedDown() { turned_down = before; }
  const bool before = turned_down;
};

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

// The type that the products have outside the region; nullopt where the operands' types do not fit together.
std::optional<at::ScalarType> compute_type(const Tensor& x, const Tensor& w, const OptionalTensor& bias,
                                           std::optional<at::ScalarType> autocast) {
  const auto type_of = [&](const Tensor& t) {
    return autocast && t.scalar_type() != at::kDouble ? *autocast : t.scalar_type();
  };
  const auto compute = type_of(x);
  if (any_of_operands(x, w, bias, [&](const Tensor& t) { return type_of(t) != compute; })) return std::nullopt;
  return compute;
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

// Before anything has run. What the user chose is no fallback, whatever would have stood in the way after it.
void answer_fallback(const Region& region, const Tensor& w, std::optional<at::ScalarType> compute, Outcome outcome,
                     const TracedWeight* traced = nullptr) {
  if (region.on_fallback == OnFallback::kAllow || !is_fallback(outcome)) return;
  const bool wanted = compute && (is_half(*compute) || (*compute == at::kFloat && region.include_float32));
  const bool computed = traced ? !traced->leaf : !(w.is_view() ? w._base() : w).is_leaf();
  if (!wanted || computed || all_in_high_precision(region.products) || region.excludes(w)) return;
  const auto says = c10::str("octavo: a linear with ", w.scalar_type(),
                             " weights should run in FP8 here and cannot: ", describe(outcome));
  TORCH_CHECK(region.on_fallback == OnFallback::kWarn, says,
              "; with on_fallback=\"warn\" or \"allow\" it runs as outside of the region, and so it does inside "
              "fp8_autocast(enabled=False)");
  TORCH_WARN(says, "; it runs as outside of the region (on_fallback=\"allow\" says so in octavo.report() alone)");
}

// A compiler that traces a model inside the region (on fake tensors, all of them do) would record bf16 products.
void refuse_tracing() {
  using c10::impl::TorchDispatchModeKey;
  TORCH_CHECK(!c10::impl::TorchDispatchModeTLS::get_mode(TorchDispatchModeKey::FAKE),
              "octavo: torch.compile (or another tracer) reached a linear inside an FP8 region, which is not supported "
              "yet: it would silently run in bf16; call the model uncompiled, or outside of the region");
}

// The FP8 result, or undefined where PyTorch's implementation shall run. `traced`: a compiler makes a graph of it,
// whose ops count their own calls; what it leaves alone is counted once, here.
Tensor try_fp8(const Region& region, const Tensor& x, const Tensor& w, const OptionalTensor& bias,
               std::optional<at::ScalarType> autocast, const TracedWeight* traced) {
  if (const auto special = why_special(x, w, bias, traced)) {
    count(-1, -1, -1, *special);
    answer_fallback(region, w, compute_type(x, w, bias, autocast), *special, traced);
    return {};
  }
  if (!is_well_formed(x, w, bias)) return {};
  const auto compute = compute_type(x, w, bias, autocast);
  if (!compute) return {};
  const auto outcome = decide(region, x, w, bias, *compute, traced);
  if (!traced || !is_fp8(outcome)) count_call(x, w, outcome);
  answer_fallback(region, w, compute, outcome, traced);
  return is_fp8(outcome) ? fp8_linear(x, w, bias, *compute, region, traced) : Tensor();
}

// The same in this thread's region.
Tensor try_fp8(const Tensor& x, const Tensor& w, const OptionalTensor& bias, std::optional<at::ScalarType> autocast) {
  if (turned_down) return {};
  const auto region = active_region();
  if (!region) return {};
  refuse_tracing();
  return try_fp8(*region, x, w, bias, autocast, /*traced=*/nullptr);
}

Tensor linear_autograd(const Tensor& x, const Tensor& w, const OptionalTensor& bias) {
  if (auto y = try_fp8(x, w, bias, std::nullopt); y.defined()) return y;
  return at::native::linear(x, w, bias);
}

// Below autograd nobody asks for a derivative, whatever grad mode says.
Tensor linear_below_autograd(const Tensor& x, const Tensor& w, const OptionalTensor& bias) {
  const at::NoGradGuard no_grad;
  return linear_autograd(x, w, bias);
}

template <c10::DeviceType device>
Tensor cast_and_linear(at::ScalarType dtype, const Tensor& x, const Tensor& w, const OptionalTensor& bias) {
  const TurnedDown guard;
  return at::linear(at::autocast::cached_cast(dtype, x, device), at::autocast::cached_cast(dtype, w, device),
                    at::autocast::cached_cast(dtype, bias, device));
}

template <c10::DeviceType device>
Tensor linear_autocast(const Tensor& x, const Tensor& w, const OptionalTensor& bias) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(
      at::autocast::get_autocast_dispatch_key_from_device_type(device));
  const auto dtype = at::autocast::get_lower_precision_fp_from_device_type(device);
  if (auto y = try_fp8(x, w, bias, dtype); y.defined()) return y;
  return cast_and_linear<device>(dtype, x, w, bias);
}

// octavo::_linear, which a compiled graph has in the place of aten::linear: under a region by its text.

// Whether it is called to make a graph of it, on tensors of the compiler's own.
bool is_traced(const Tensor& x, const Tensor& w, const OptionalTensor& bias) {
  using c10::impl::TorchDispatchModeKey;
  const auto is_on = [](TorchDispatchModeKey key) {
    return c10::impl::TorchDispatchModeTLS::get_mode(key).has_value();
  };
  return any_of_operands(x, w, bias, [](const Tensor& t) { return t.key_set().has_any(c10::python_ks); }) &&
         (is_on(TorchDispatchModeKey::FAKE) || is_on(TorchDispatchModeKey::FUNCTIONAL) ||
          is_on(TorchDispatchModeKey::PROXY));
}

// What the op of the graph is told beside its operands.
struct InGraph {
  std::string_view region;
  std::string_view left_alone;
  TracedWeight weight;
};

Tensor try_fp8(const InGraph& graph, const Tensor& x, const Tensor& w, const OptionalTensor& bias,
               std::optional<at::ScalarType> autocast) {
  if (graph.region.empty()) return {};
  const auto region = region_by_text(graph.region);
  if (graph.left_alone.empty())
    return try_fp8(*region, x, w, bias, autocast, is_traced(x, w, bias) ? &graph.weight : nullptr);
  const bool excluded = graph.left_alone == describe(Outcome::kExcluded);
  TORCH_CHECK(excluded || graph.left_alone == describe(Outcome::kSubclass),
              "octavo: no linear is left alone because \"", graph.left_alone, "\"");
  const auto outcome = excluded ? Outcome::kExcluded : Outcome::kSubclass;
  count(-1, -1, -1, outcome);
  answer_fallback(*region, w, compute_type(x, w, bias, autocast), outcome, &graph.weight);
  return {};
}

Tensor linear_in_graph(const Tensor& x, const Tensor& w, const OptionalTensor& bias, std::string_view region,
                       std::string_view left_alone, const OptionalTensor& leaf, c10::SymIntArrayRef slice) {
  if (auto y = try_fp8({region, left_alone, {leaf, slice}}, x, w, bias, std::nullopt); y.defined()) return y;
  const TurnedDown guard;
  return at::linear(x, w, bias);
}

template <c10::DeviceType device>
Tensor linear_in_graph_autocast(const Tensor& x, const Tensor& w, const OptionalTensor& bias, std::string_view region,
                                std::string_view left_alone, const OptionalTensor& leaf, c10::SymIntArrayRef slice) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(
      at::autocast::get_autocast_dispatch_key_from_device_type(device));
  const auto dtype = at::autocast::get_lower_precision_fp_from_device_type(device);
  if (auto y = try_fp8({region, left_alone, {leaf, slice}}, x, w, bias, dtype); y.defined()) return y;
  return cast_and_linear<device>(dtype, x, w, bias);
}

c10::OperatorHandle aten_linear() { return c10::Dispatcher::singleton().findSchemaOrThrow("aten::linear", ""); }

constexpr auto kTransforms = c10::DispatchKey::FuncTorchDynamicLayerFrontMode;

// PyTorch's own kernel at that key: to be asked for before it is replaced, and kept for ever, as what replaces it is.
const c10::SafeKernelFunction& functorch_linear() {
  static const auto* kernel = new c10::SafeKernelFunction(aten_linear().getComputedKernelForDispatchKey(kTransforms));
  return *kernel;
}

Tensor linear_in_transform(c10::DispatchKeySet keys, const Tensor& x, const Tensor& w, const OptionalTensor& bias) {
  if (const auto region = active_region(); region && (x.is_cpu() || x.is_cuda())) {
    refuse_tracing();
    const auto device = x.device().type();
    const auto autocast = at::autocast::is_autocast_enabled(device)
                              ? std::optional(at::autocast::get_autocast_dtype(device))
                              : std::nullopt;
    count(-1, -1, -1, Outcome::kTransform);
    answer_fallback(*region, w, compute_type(x, w, bias, autocast), Outcome::kTransform);
  }
  torch::jit::Stack stack{x, w, bias};
  functorch_linear().callBoxed(aten_linear(), keys, &stack);
  return std::move(stack.front()).toTensor();
}

// PyTorch warns that a kernel of its own (the Autocast keys' and functorch's) is replaced: that is what is meant here.
class ExpectedOverride final : public c10::WarningHandler {
 public:
  void process(const c10::Warning& warning) override {
    if (warning.msg().find("Overriding a previously registered kernel") == std::string::npos) before_->process(warning);
  }

 private:
  c10::WarningHandler* before_ = c10::WarningUtils::get_warning_handler();
};

template <class Kernel>
void register_at(c10::DispatchKey key, Kernel* kernel) {
  // Kept for ever: a kernel must outlive the last call of it.
  auto* library = new torch::Library(torch::Library::IMPL, "aten", key, __FILE__, __LINE__);
  library->impl("linear", kernel);
}

}  // namespace

void intercept_aten_linear() {
  static std::once_flag once;
  std::call_once(once, [] {
    ExpectedOverride handler;
    const c10::WarningUtils::WarningHandlerGuard guard(&handler);
    register_at(c10::DispatchKey::AutogradCPU, &linear_autograd);
    register_at(c10::DispatchKey::AutogradCUDA, &linear_autograd);
    register_at(c10::DispatchKey::CPU, &linear_below_autograd);
    register_at(c10::DispatchKey::CUDA, &linear_below_autograd);
    register_at(c10::DispatchKey::AutocastCPU, &linear_autocast<c10::DeviceType::CPU>);
    register_at(c10::DispatchKey::AutocastCUDA, &linear_autocast<c10::DeviceType::CUDA>);
    functorch_linear();
    register_at(kTransforms, &linear_in_transform);
  });
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

TORCH_LIBRARY_IMPL(octavo, CompositeImplicitAutograd, m) { m.impl("_linear", &octavo::linear_in_graph); }
TORCH_LIBRARY_IMPL(octavo, AutocastCPU, m) {
  m.impl("_linear", &octavo::linear_in_graph_autocast<c10::DeviceType::CPU>);
}
TORCH_LIBRARY_IMPL(octavo, AutocastCUDA, m) {
  m.impl("_linear", &octavo::linear_in_graph_autocast<c10::DeviceType::CUDA>);
}
