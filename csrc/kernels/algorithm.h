// SPDX-License-Identifier: Apache-2.0
// An algorithm of cuBLASLt by its configuration, from which another process with the same cuBLASLt rebuilds it.
#pragma once

#include <cublasLt.h>

#include <compare>
#include <cstddef>
#include <cstdint>
#include <string>

#include "lt_problem.h"

namespace octavo::kernels {

// cuBLASLt's attributes CUBLASLT_ALGO_CONFIG_*, of its types and with its defaults.
struct Algorithm {
  int32_t id = 0;
  uint32_t tile = 0;
  uint32_t stages = 0;
  int32_t split_k = 1;
  uint32_t reduction = 0;
  uint32_t swizzle = 0;
  uint32_t custom = 0;
  uint16_t inner_shape = 0;
  uint16_t cluster_shape = 0;

  auto operator<=>(const Algorithm&) const = default;
};

Algorithm configuration_of(const cublasLtMatmulAlgo_t& algorithm);

// Whether sums split over k, if it splits them, are put together in float32. Others are no candidates (lt_problem.cpp).
bool sums_in_float32(const Algorithm& algorithm);

// As cublasLtMatmulAlgoInit makes it, of this id.
cublasStatus_t initial(cublasLtHandle_t handle, const Product& product, int id, cublasLtMatmulAlgo_t& algorithm);

struct Rebuilt {
  cublasLtMatmulAlgo_t algorithm;
  float waves = 0;      // of thread blocks over the device
  std::string refused;  // why it cannot run here; empty if it can
};
Rebuilt rebuild(cublasLtHandle_t handle, const Product& product, Problem problem, const Algorithm& algorithm);

}  // namespace octavo::kernels
