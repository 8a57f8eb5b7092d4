// SPDX-License-Identifier: Apache-2.0
// What a product needs around cuBLASLt where that cannot do it by itself (gemm.cpp).
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels.h"

namespace octavo::kernels {

// d[m, n] = accumulators[m, ld] * *scale_a * *scale_b + bias[n] (+ d[m, n], if `accumulate`): float32 operations, one
// rounding each, then one to d's dtype. Scales and bias may be null. ld is a multiple of 4 and `accumulators` 16-byte
// aligned; d may be them, unless it is added to.
struct Finish {
  int64_t m = 0;
  int64_t n = 0;
  int64_t ld = 0;
  const float* accumulators = nullptr;
  const float* scale_a = nullptr;
  const float* scale_b = nullptr;
  const void* bias = nullptr;
  DType bias_dtype = DType::kBF16;
  void* d = nullptr;
  DType d_dtype = DType::kBF16;
  bool accumulate = false;
};
void finish(const Finish& f, cudaStream_t stream);

// FP8 bytes as bf16, in which every value of both formats is exact. `count` is a multiple of 16, pointers are 16-byte
// aligned.
void decode(const uint8_t* bytes, Fp8 format, int64_t count, uint16_t* bf16, cudaStream_t stream);

}  // namespace octavo::kernels
