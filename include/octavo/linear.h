// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <octavo/export.h>

#include <optional>

namespace octavo {

// y[..., N] = x[..., K] w[N, K]^T + bias[N] in FP8, differentiable once, under the region in force or, outside of any,
// DelayedScaling. bf16 or fp16 (float32 where the region includes it), CPU or CUDA, any strides.
// Throws c10::Error where the linear cannot run in FP8, saying why.
OCTAVO_API at::Tensor linear(const at::Tensor& x, const at::Tensor& w, const std::optional<at::Tensor>& bias = {});

}  // namespace octavo
