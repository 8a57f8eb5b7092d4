// SPDX-License-Identifier: Apache-2.0
// Tensors on a GPU as the kernels want them.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/cuda/CUDAContext.h>
#include <ATen/cuda/EmptyTensor.h>

#include "../kernels/kernels.h"

namespace octavo::ops::cuda {

// Not at::empty: under torch.use_deterministic_algorithms that fills every new tensor, a kernel each.
inline at::Tensor empty(at::IntArrayRef sizes, at::ScalarType dtype, c10::Device device) {
  return at::detail::empty_cuda(sizes, dtype, device, std::nullopt);
}

inline cudaStream_t stream_of(const at::Tensor& t) {
  return at::cuda::getCurrentCUDAStream(t.device().index()).stream();
}

inline kernels::DType dtype_of(at::ScalarType type) {
  if (type == at::kBFloat16) return kernels::DType::kBF16;
  if (type == at::kHalf) return kernels::DType::kFP16;
  TORCH_INTERNAL_ASSERT(type == at::kFloat);
  return kernels::DType::kFP32;
}
inline kernels::Fp8 fp8_of(at::ScalarType type) {
  return type == at::kFloat8_e5m2 ? kernels::Fp8::kE5M2 : kernels::Fp8::kE4M3;
}

inline kernels::Matrix matrix_of(const at::Tensor& x) {
  return {x.const_data_ptr(), dtype_of(x.scalar_type()), x.size(0), x.size(1), x.stride(0), x.stride(1)};
}

// At a position of an int32 tensor.
inline float* float_at(const at::Tensor& words, int64_t position) {
  return reinterpret_cast<float*>(static_cast<int32_t*>(words.mutable_data_ptr()) + position);
}
inline Peak* peaks_at(const at::Tensor& words, int64_t position) {
  return reinterpret_cast<Peak*>(static_cast<int32_t*>(words.mutable_data_ptr()) + position);
}

}  // namespace octavo::ops::cuda
