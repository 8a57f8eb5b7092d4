// SPDX-License-Identifier: Apache-2.0
// Device code: one rounding, to nearest even, to a result's dtype.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace octavo::kernels {

template <typename T>
struct Rounded;

template <>
struct Rounded<__nv_bfloat16> {
  __device__ static __nv_bfloat16 from(float x) { return __float2bfloat16_rn(x); }
  __device__ static __nv_bfloat16 from(double x) { return __double2bfloat16(x); }
};

template <>
struct Rounded<__half> {
  __device__ static __half from(float x) { return __float2half_rn(x); }
  __device__ static __half from(double x) { return __double2half(x); }
};

template <>
struct Rounded<float> {
  __device__ static float from(float x) { return x; }
  __device__ static float from(double x) { return __double2float_rn(x); }
};

}  // namespace octavo::kernels
