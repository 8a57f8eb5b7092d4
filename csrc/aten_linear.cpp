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
#include <torch/library.h>

#include <mutex>

#include "eligible.h"
#include "region.h"

namespace octavo {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

// A compiler that traces a model inside the region (on fake tensors, all of them do) would record bf16 products.
void refuse_tracing() {
  using c10::impl::TorchDispatchModeKey;
  TORCH_CHECK(!c10::impl::TorchDispatchModeTLS::get_mode(TorchDispatchModeKey::FAKE),
              "octavo: torch.compile (or another tracer) reached a linear inside an FP8 region, which is not supported "
              "yet: it would silently run in bf16; call the model uncompiled, or outside of the region");
}

// The same in this thread's region.
Tensor try_fp8(const Tensor& x, const Tensor& w, const OptionalTensor& bias, std::optional<at::ScalarType> autocast) {
  if (is_turned_down()) return {};
  const auto region = active_region();
  if (!region) return {};
  refuse_tracing();
  return try_fp8(*region, x, w, bias, autocast);
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
Tensor linear_autocast(const Tensor& x, const Tensor& w, const OptionalTensor& bias) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(
      at::autocast::get_autocast_dispatch_key_from_device_type(device));
  const auto dtype = at::autocast::get_lower_precision_fp_from_device_type(device);
  if (auto y = try_fp8(x, w, bias, dtype); y.defined()) return y;
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
    const bool computed = is_computed(w) || region->excludes(w);
    turn_down(*region, Outcome::kTransform, w.scalar_type(), computed, compute_type(x, w, bias, autocast));
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

}  // namespace octavo
