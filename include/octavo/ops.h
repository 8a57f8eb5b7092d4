// SPDX-License-Identifier: Apache-2.0
// The kernel interface: public ops, usable without a region. Also torch.ops.octavo.*. Every scale is a quantisation
// *step*: x ~ q * scale. Scales are one-element float32 tensors; one on the CPU that is not finite and positive throws,
// one on the GPU is not read by the host: all bytes become NaN (0x7f).
#pragma once

#include <ATen/core/Tensor.h>
#include <octavo/export.h>

#include <array>
#include <optional>
#include <tuple>

namespace octavo {

// q = cast(x / scale) to `dtype` (kFloat8_e4m3fn or kFloat8_e5m2), x's shape, contiguous; amax: 0-d float32, the
// largest finite |x|. x: bf16, fp16 or float32 of any shape and strides.
OCTAVO_API std::tuple<at::Tensor, at::Tensor> quantize(const at::Tensor& x, const at::Tensor& scale,
                                                       at::ScalarType dtype);

// a[M, K] b[N, K]^T * scale_a * scale_b + bias[N], one rounding to out_dtype: bf16, fp16, float32, or float8_e4m3fn
// with out_scale (a step, like every scale). a and b are float8 of either format; bias has out_dtype, or any of the
// three where the output is E4M3.
OCTAVO_API at::Tensor mm_fp8(const at::Tensor& a, const at::Tensor& b, const at::Tensor& scale_a,
                             const at::Tensor& scale_b, const std::optional<at::Tensor>& bias = {},
                             at::ScalarType out_dtype = at::kBFloat16, const std::optional<at::Tensor>& out_scale = {},
                             bool fast_accumulation = false);

// (y[..., N], amax_x, amax_w) of y = x w^T + bias with both operands quantised to `dtype`; y has x's dtype.
OCTAVO_API std::tuple<at::Tensor, at::Tensor, at::Tensor> linear_forward_fp8(const at::Tensor& x, const at::Tensor& w,
                                                                             const std::optional<at::Tensor>& bias,
                                                                             const at::Tensor& scale_x,
                                                                             const at::Tensor& scale_w,
                                                                             at::ScalarType dtype);

// (grad_x, grad_w, grad_b, amax_g) of that linear for the gradient g[..., N] of its output, in g's dtype; masks = which
// of x, w and bias are asked for, the others come back undefined (None). `dtype` is the format of g, `operand_dtype`
// that of x and w.
OCTAVO_API std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> linear_backward_fp8(
    const at::Tensor& g, const at::Tensor& x, const at::Tensor& w, std::array<bool, 3> masks, const at::Tensor& scale_g,
    const at::Tensor& scale_w, const at::Tensor& scale_x, at::ScalarType dtype,
    at::ScalarType operand_dtype = at::kFloat8_e4m3fn);

}  // namespace octavo
