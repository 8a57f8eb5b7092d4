// SPDX-License-Identifier: Apache-2.0
// One product on a GPU, from pointers: for ops that keep several operands in one allocation.
#pragma once

#include "cuda_tensors.h"

namespace octavo::ops::cuda {

// A quantised copy, padded to multiples of 16, and its step on the device, 16-byte aligned.
struct Factor {
  const uint8_t* codes;
  at::ScalarType type;
  const float* step;
};

struct Multiplication {
  Factor a, b;
  int64_t m, n, k;       // k padded
  at::Tensor bias = {};  // [n], contiguous, or undefined
  bool fast = false;
  bool accumulate = false;
};

// d = a b^T + bias, d contiguous with m * n elements.
void multiply(const Multiplication& x, const at::Tensor& d);

}  // namespace octavo::ops::cuda
