// SPDX-License-Identifier: Apache-2.0
// cuBLASLt, reduced to the one kind of product that is needed, with its plans and workspaces kept. An algorithm comes
// from the tables in force (tables.h) where they have the product, else from cuBLASLt's heuristic: nothing is timed.
#pragma once

#include <cuda_runtime_api.h>
#include <library_types.h>

#include <cstdint>
#include <optional>

namespace octavo::kernels {

// What an allocation of its own has. Tables are for matrices aligned so; others take the heuristic's choice.
constexpr uint32_t kTunedAlignment = 256;

// Row-major d[m, n] = a[m, k] * b[n, k]^T, both operands without gaps, d with rows of `ld` elements. A value: equal
// problems on one device run the same algorithm, as long as no table is loaded.
struct Product {
  int64_t m = 0;
  int64_t n = 0;
  int64_t k = 0;
  int64_t ld = 0;
  cudaDataType_t a_type = CUDA_R_16BF;
  cudaDataType_t b_type = CUDA_R_16BF;
  cudaDataType_t d_type = CUDA_R_32F;
  std::optional<cudaDataType_t> bias_type = std::nullopt;
  bool scaled = false;  // FP8 operands, each with its scale on the device
  bool fast_accumulation = false;
  bool accumulate = false;  // the product is added to d
  uint32_t alignment = 16;  // bytes, of all three matrices

  bool operator==(const Product&) const = default;
};

struct ProductOperands {
  const void* a = nullptr;
  const void* b = nullptr;
  const float* scale_a = nullptr;
  const float* scale_b = nullptr;
  const void* bias = nullptr;
  void* d = nullptr;
};

// On the current device. Throws where cuBLASLt knows no algorithm for it.
void multiply(const Product& product, const ProductOperands& operands, cudaStream_t stream);

// For all devices: the next product of each kind looks for its algorithm anew.
void drop_plans();

struct ComputeCapability {
  int major = 0;
  int minor = 0;
};

// Of the current device.
ComputeCapability compute_capability();

}  // namespace octavo::kernels
