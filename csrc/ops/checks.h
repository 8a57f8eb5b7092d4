// SPDX-License-Identifier: Apache-2.0
// What the public ops ask of their arguments, the same for every device.
#pragma once

#include <ATen/Functions.h>

#include <cmath>
#include <optional>

#include "float_mode.h"

namespace octavo::ops {

inline bool is_fp8(at::ScalarType type) { return type == at::kFloat8_e4m3fn || type == at::kFloat8_e5m2; }
inline bool is_high(at::ScalarType type) { return type == at::kBFloat16 || type == at::kHalf || type == at::kFloat; }

inline void check_fp8_type(const char* op, const char* argument, at::ScalarType type) {
  TORCH_CHECK(is_fp8(type), op, ": ", argument, " must be float8_e4m3fn or float8_e5m2, not ", type);
}

inline void check_high(const char* op, const char* argument, const at::Tensor& t) {
  TORCH_CHECK(is_high(t.scalar_type()), op, ": ", argument, " must be bfloat16, float16 or float32, not ",
              t.scalar_type());
}

// The value of a step on the CPU. float64 is taken too, so that a caller whose thread flushes subnormals can hand one
// on.
inline float float32_step(const at::Tensor& scale) {
  const IeeeFloats ieee;
  return scale.scalar_type() == at::kDouble ? static_cast<float>(*scale.const_data_ptr<double>())
                                            : *scale.const_data_ptr<float>();
}

// A step: one float32. On the CPU its value is checked too; a device scale is not read by the host.
inline void check_scale(const char* op, const char* argument, const at::Tensor& scale, c10::Device device) {
  const bool has_type = scale.scalar_type() == at::kFloat || (scale.is_cpu() && scale.scalar_type() == at::kDouble);
  TORCH_CHECK(has_type && scale.numel() == 1, op, ": ", argument, " must be one float32 (the quantisation step), not ",
              scale.scalar_type(), " of shape ", scale.sizes());
  TORCH_CHECK(scale.is_cpu() || scale.is_meta() || scale.device() == device, op, ": ", argument, " is on ",
              scale.device(), ", the operands on ", device);
  if (!scale.is_cpu()) return;
  const IeeeFloats ieee;
  const float value = float32_step(scale);
  TORCH_CHECK(std::isfinite(value) && value > 0, op, ": ", argument, " must be finite and positive, not ", value);
}

inline void check_device(const char* op, const char* argument, const at::Tensor& t, c10::Device device) {
  TORCH_CHECK(t.device() == device, op, ": ", argument, " is on ", t.device(), ", the other operands on ", device);
}

inline void check_mm(const char* op, const at::Tensor& a, const at::Tensor& b, const at::Tensor& scale_a,
                     const at::Tensor& scale_b, at::ScalarType out_dtype, const std::optional<at::Tensor>& out_scale) {
  check_fp8_type(op, "a's dtype", a.scalar_type());
  check_fp8_type(op, "b's dtype", b.scalar_type());
  TORCH_CHECK(a.dim() == 2 && b.dim() == 2 && a.sym_size(1) == b.sym_size(1) && a.device() == b.device(), op,
              ": a [M, K] and b [N, K] must be matrices on one device with equal last dimensions, not ", a.sym_sizes(),
              " on ", a.device(), " and ", b.sym_sizes(), " on ", b.device());
  check_scale(op, "scale_a", scale_a, a.device());
  check_scale(op, "scale_b", scale_b, a.device());
  TORCH_CHECK(is_high(out_dtype) || out_dtype == at::kFloat8_e4m3fn, op,
              ": out_dtype must be bfloat16, float16, float32 or float8_e4m3fn, not ", out_dtype);
  TORCH_CHECK(is_high(out_dtype) || out_scale, op, ": out_dtype float8_e4m3fn needs out_scale, the step of the output");
  TORCH_CHECK(!is_high(out_dtype) || !out_scale, op, ": out_scale goes with out_dtype float8_e4m3fn alone, not with ",
              out_dtype);
}

// What a product is added to.
inline void check_sum(const at::Tensor& d) {
  check_high("_mm_into", "d", d);
  TORCH_CHECK(d.dim() == 2 && d.is_contiguous(), "_mm_into: d must be a contiguous matrix, not of shape ", d.sizes(),
              " and strides ", d.strides());
}

// A step as one int32 word of a tape, on the operands' device.
inline at::Tensor step_words(const at::Tensor& scale, c10::Device device) {
  // From the host as an argument of a kernel: a copy would wait for the device, and could not be captured.
  const IeeeFloats ieee;
  auto step = scale.is_cpu() ? at::full({1}, float32_step(scale), at::TensorOptions().dtype(at::kFloat).device(device))
                             : scale.detach().reshape({1});
  return step.view(at::kInt);
}

// Any tensor as a matrix of its last dimension's rows.
inline at::Tensor as_matrix(const at::Tensor& x) {
  if (x.dim() == 2) return x;
  const int64_t cols = x.dim() ? x.size(-1) : 1;
  return x.reshape({cols ? x.numel() / cols : 0, cols});
}

constexpr int64_t round_up_16(int64_t n) { return (n + 15) / 16 * 16; }

}  // namespace octavo::ops
