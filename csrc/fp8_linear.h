// SPDX-License-Identifier: Apache-2.0
// One FP8 linear: forward, and the autograd node of its backward. What is eligible was decided before
// (aten_linear.cpp).
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "compiled_linear.h"
#include "policy.h"

namespace octavo {

// y[..., N] = x[..., K] w[N, K]^T + bias[N]. `compute` is the 16-bit type (or float32, where the region includes it) of
// y and of the products that stay in high precision; x, w and bias are the user's own tensors, quantised from whatever
// type they have. Differentiable (once) if grad mode is on. `traced`: whose w is, where a
// compiler is making a graph of it.
at::Tensor fp8_linear(const at::Tensor& x, const at::Tensor& w, const std::optional<at::Tensor>& bias,
                      at::ScalarType compute, const LinearRecipe& recipe, const TracedWeight* traced = nullptr);

}  // namespace octavo
