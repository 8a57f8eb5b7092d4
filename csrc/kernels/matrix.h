// SPDX-License-Identifier: Apache-2.0
// Other ways to look at the same elements, so that a kernel meets few kinds of strides.
#pragma once

#include <cstdint>
#include <utility>

#include "kernels.h"

namespace octavo::kernels {

inline int64_t element_size(DType dtype) { return dtype == DType::kFP32 ? 4 : 2; }

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

inline Matrix transposed(Matrix x) {
  std::swap(x.rows, x.cols);
  std::swap(x.row_stride, x.col_stride);
  return x;
}

// The stride of a dimension of one element says nothing, and may be anything.
inline Matrix without_idle_strides(Matrix x) {
  if (x.rows <= 1) x.row_stride = 0;
  if (x.cols <= 1) x.col_stride = 1;
  return x;
}

// Whether every row can be read in whole 16-byte words from its first element on.
inline bool rows_are_aligned(const Matrix& x) {
  return x.col_stride == 1 && reinterpret_cast<uintptr_t>(x.data) % 16 == 0 &&
         x.row_stride * element_size(x.dtype) % 16 == 0;
}

}  // namespace octavo::kernels
