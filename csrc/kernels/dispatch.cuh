// SPDX-License-Identifier: Apache-2.0
// Values known at run time become template arguments: dispatch(dtype, [&]<typename T>() { ... }).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <stdexcept>
#include <utility>

#include "kernels.h"

namespace octavo::kernels {

template <typename Body>
void dispatch(DType dtype, Body&& body) {
  switch (dtype) {
    case DType::kBF16:
      return std::forward<Body>(body).template operator()<__nv_bfloat16>();
    case DType::kFP16:
      return std::forward<Body>(body).template operator()<__half>();
    case DType::kFP32:
      return std::forward<Body>(body).template operator()<float>();
  }
  throw std::runtime_error("octavo: no such dtype");
}

template <typename Body>
void dispatch(Fp8 format, Body&& body) {
  switch (format) {
    case Fp8::kE4M3:
      return std::forward<Body>(body).template operator()<Fp8::kE4M3>();
    case Fp8::kE5M2:
      return std::forward<Body>(body).template operator()<Fp8::kE5M2>();
  }
  throw std::runtime_error("octavo: no such FP8 format");
}

template <typename Body>
void dispatch(bool flag, Body&& body) {
  return flag ? std::forward<Body>(body).template operator()<true>()
              : std::forward<Body>(body).template operator()<false>();
}

}  // namespace octavo::kernels
