// SPDX-License-Identifier: Apache-2.0
// The public ops that are made of internal ones, for every device; and the typed C++ callers of include/octavo/ops.h.
#include <ATen/Functions.h>
#include <octavo/ops.h>
#include <torch/library.h>

#include "checks.h"
#include "device.h"
#include "find.h"
#include "primitives.h"

namespace octavo {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

using ops::as_matrix;
using ops::find;

// With zero bytes up to multiples of 16, as the products want their operands.
Tensor padded(const Tensor& codes) {
  const int64_t rows = ops::round_up_16(codes.size(0)), cols = ops::round_up_16(codes.size(1));
  if (rows == codes.size(0) && cols == codes.size(1)) {
    const auto whole = codes.contiguous();
    return reinterpret_cast<uintptr_t>(whole.const_data_ptr()) % 16 == 0 ? whole : whole.clone();
  }
  auto copy = at::zeros({rows, cols}, codes.options().dtype(at::kByte));
  copy.narrow(0, 0, codes.size(0)).narrow(1, 0, codes.size(1)).copy_(codes.view(at::kByte));
  return copy.view(codes.scalar_type());
}

void check_bias(const char* op, const OptionalTensor& bias, int64_t n, at::ScalarType dtype, c10::Device device) {
  if (!bias || !bias->defined()) return;
  ops::check_device(op, "bias", *bias, device);
  TORCH_CHECK(bias->dim() == 1 && bias->size(0) == n, op, ": bias must have shape [", n, "], not ", bias->sizes());
  ops::check_high(op, "bias", *bias);
  TORCH_CHECK(ops::is_fp8(dtype) || bias->scalar_type() == dtype, op, ": bias must have the output's dtype ", dtype,
              ", not ", bias->scalar_type());
}

Tensor product(const Tensor& a, const Tensor& b, const Tensor& scale_a, const Tensor& scale_b,
               const OptionalTensor& bias, at::ScalarType dtype, bool fast) {
  const int64_t m = a.size(0), n = b.size(0);
  if (m == 0 || n == 0 || a.size(1) == 0) {
    auto out = at::zeros({m, n}, a.options().dtype(dtype));
    return bias ? out.add_(*bias) : out;
  }
  return ops::mm(padded(a), padded(b), ops::step_words(scale_a, a.device()), 0, ops::step_words(scale_b, a.device()), 0,
                 bias, m, n, dtype, fast);
}

Tensor mm_fp8_impl(const Tensor& a, const Tensor& b, const Tensor& scale_a, const Tensor& scale_b,
                   const OptionalTensor& bias, at::ScalarType out_dtype, const OptionalTensor& out_scale, bool fast) {
  ops::check_mm("mm_fp8", a, b, scale_a, scale_b, out_dtype, out_scale);
  ops::check_fp8_support(a.device());
  check_bias("mm_fp8", bias, b.size(0), out_dtype, a.device());
  const OptionalTensor b_or_none = bias && bias->defined() ? bias : std::nullopt;
  if (!ops::is_fp8(out_dtype)) return product(a, b, scale_a, scale_b, b_or_none, out_dtype, fast);
  ops::check_scale("mm_fp8", "out_scale", *out_scale, a.device());
  const auto high = product(a, b, scale_a, scale_b,
                            b_or_none ? OptionalTensor(b_or_none->to(at::kFloat)) : std::nullopt, at::kFloat, fast);
  return std::get<0>(quantize(high, *out_scale, out_dtype));
}

void check_operand(const char* op, const char* argument, const Tensor& t, int64_t min_dim, int64_t max_dim) {
  ops::check_high(op, argument, t);
  TORCH_CHECK(t.dim() >= min_dim && t.dim() <= max_dim, op, ": ", argument, " must have ", min_dim,
              max_dim == min_dim ? "" : " or more", " dimensions, not shape ", t.sizes());
}

constexpr int64_t kManyDims = 64;

std::tuple<Tensor, Tensor, Tensor> linear_forward_fp8_impl(const Tensor& x, const Tensor& w, const OptionalTensor& bias,
                                                           const Tensor& scale_x, const Tensor& scale_w,
                                                           at::ScalarType dtype) {
  constexpr auto op = "linear_forward_fp8";
  check_operand(op, "x", x, 1, kManyDims);
  check_operand(op, "w", w, 2, 2);
  ops::check_fp8_support(x.device());
  ops::check_fp8_type(op, "dtype", dtype);
  ops::check_scale(op, "scale_x", scale_x, x.device());
  ops::check_scale(op, "scale_w", scale_w, x.device());
  TORCH_CHECK(x.size(-1) == w.size(1) && x.device() == w.device(), op, ": x ", x.sizes(), " on ", x.device(), " and w ",
              w.sizes(), " on ", w.device(), " must be on one device and have equal last dimensions");
  check_bias(op, bias, w.size(0), x.scalar_type(), x.device());
  const auto x2 = as_matrix(x);
  auto [qx, amax_x] = quantize(x2, scale_x, dtype);
  auto [qw, amax_w] = quantize(w, scale_w, dtype);
  const OptionalTensor b = bias && bias->defined() ? bias : std::nullopt;
  auto sizes = x.sizes().vec();
  sizes.back() = w.size(0);
  return {product(qx, qw, scale_x, scale_w, b, x.scalar_type(), true).view(sizes), amax_x, amax_w};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> linear_backward_fp8_impl(const Tensor& g, const Tensor& x, const Tensor& w,
                                                                    std::array<bool, 3> masks, const Tensor& scale_g,
                                                                    const Tensor& scale_w, const Tensor& scale_x,
                                                                    at::ScalarType dtype,
                                                                    at::ScalarType operand_dtype) {
  constexpr auto op = "linear_backward_fp8";
  check_operand(op, "g", g, 1, kManyDims);
  check_operand(op, "x", x, 1, kManyDims);
  check_operand(op, "w", w, 2, 2);
  ops::check_fp8_type(op, "dtype", dtype);
  ops::check_fp8_type(op, "operand_dtype", operand_dtype);
  ops::check_fp8_support(g.device());
  ops::check_device(op, "x", x, g.device());
  ops::check_device(op, "w", w, g.device());
  ops::check_scale(op, "scale_g", scale_g, g.device());
  ops::check_scale(op, "scale_w", scale_w, g.device());
  ops::check_scale(op, "scale_x", scale_x, g.device());
  TORCH_CHECK(x.size(-1) == w.size(1) && g.size(-1) == w.size(0) &&
                  g.sizes().slice(0, g.dim() - 1) == x.sizes().slice(0, x.dim() - 1),
              op, ": g ", g.sizes(), ", x ", x.sizes(), " and w ", w.sizes(), " are not those of one linear");
  const auto g2 = as_matrix(g), x2 = as_matrix(x);
  const int64_t m = g2.size(0), n = w.size(0), k = w.size(1);
  const auto dtype_out = g.scalar_type();
  Tensor dx, dw, db;
  if (g2.numel() == 0 || k == 0) {
    if (masks[0]) dx = at::zeros(x.sizes(), g.options());
    if (masks[1]) dw = at::zeros(w.sizes(), g.options());
    if (masks[2]) db = g2.sum(0);
    return {dx, dw, db, std::get<1>(quantize(g2, scale_g, dtype))};
  }
  const auto word = [&](const Tensor& scale) { return ops::step_words(scale, g.device()); };
  const auto gq = ops::quantize_padded(g2, scale_g, dtype, ops::copies(masks[0], masks[1]),
                                       masks[2] ? std::optional(dtype_out) : std::nullopt, true);
  if (masks[0]) {
    const auto wq = ops::quantize_padded(w, scale_w, operand_dtype, ops::kCol, {}, false);
    dx = ops::mm(gq.row, wq.col, word(scale_g), 0, word(scale_w), 0, {}, m, k, dtype_out, false).view(x.sizes());
  }
  if (masks[1]) {
    const auto xq = ops::quantize_padded(x2, scale_x, operand_dtype, ops::kCol, {}, false);
    dw = ops::mm(gq.col, xq.col, word(scale_g), 0, word(scale_x), 0, {}, n, k, dtype_out, false);
  }
  if (masks[2]) db = gq.sums;
  return {dx, dw, db, gq.amax};
}

}  // namespace

std::tuple<Tensor, Tensor> quantize(const Tensor& x, const Tensor& scale, at::ScalarType dtype) {
  static const auto op = find<decltype(quantize)>("octavo::quantize");
  return op.call(x, scale, dtype);
}

Tensor mm_fp8(const Tensor& a, const Tensor& b, const Tensor& scale_a, const Tensor& scale_b,
              const OptionalTensor& bias, at::ScalarType out_dtype, const OptionalTensor& out_scale,
              bool fast_accumulation) {
  static const auto op = find<decltype(mm_fp8)>("octavo::mm_fp8");
  return op.call(a, b, scale_a, scale_b, bias, out_dtype, out_scale, fast_accumulation);
}

std::tuple<Tensor, Tensor, Tensor> linear_forward_fp8(const Tensor& x, const Tensor& w, const OptionalTensor& bias,
                                                      const Tensor& scale_x, const Tensor& scale_w,
                                                      at::ScalarType dtype) {
  static const auto op = find<decltype(linear_forward_fp8)>("octavo::linear_forward_fp8");
  return op.call(x, w, bias, scale_x, scale_w, dtype);
}

std::tuple<Tensor, Tensor, Tensor, Tensor> linear_backward_fp8(const Tensor& g, const Tensor& x, const Tensor& w,
                                                               std::array<bool, 3> masks, const Tensor& scale_g,
                                                               const Tensor& scale_w, const Tensor& scale_x,
                                                               at::ScalarType dtype, at::ScalarType operand_dtype) {
  static const auto op = find<decltype(linear_backward_fp8)>("octavo::linear_backward_fp8");
  return op.call(g, x, w, masks, scale_g, scale_w, scale_x, dtype, operand_dtype);
}

}  // namespace octavo

TORCH_LIBRARY_IMPL(octavo, CompositeExplicitAutograd, m) {
  m.impl("mm_fp8", &octavo::mm_fp8_impl);
  m.impl("linear_forward_fp8", &octavo::linear_forward_fp8_impl);
  m.impl("linear_backward_fp8", &octavo::linear_backward_fp8_impl);
}
