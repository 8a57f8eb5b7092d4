// SPDX-License-Identifier: Apache-2.0
// cuBLASLt's own terms for a Product, for what runs it (lt.cpp) and for what tunes it (tune.cpp).
#pragma once

#include <cublasLt.h>

#include <cstddef>
#include <string>
#include <vector>

#include "lt.h"

namespace octavo::kernels {

constexpr size_t kWorkspaceBytes = size_t{32} << 20;

// Plain values, so that nothing needs destroying and a copy costs nothing. cuBLASLt's matrices are column-major: our
// d[m, n] is its D[n, m], our b its A (transposed), our a its B.
struct Problem {
  cublasLtMatmulDescOpaque_t product;
  cublasLtMatrixLayoutOpaque_t a;
  cublasLtMatrixLayoutOpaque_t b;
  cublasLtMatrixLayoutOpaque_t d;
};

Problem problem_of(const Product& product, const ProductOperands& operands);
void set_pointers(Problem& problem, const Product& product, const ProductOperands& operands);

// At most `count` algorithms that the heuristic takes for fit, the best guess first; none where it knows none.
std::vector<cublasLtMatmulHeuristicResult_t> ask_heuristic(cublasLtHandle_t handle, Problem problem,
                                                           const Product& product, int count);

cublasStatus_t run(cublasLtHandle_t handle, Problem problem, const Product& product, const ProductOperands& operands,
                   const cublasLtMatmulAlgo_t& algorithm, void* workspace, cudaStream_t stream);

// "bf16", "e4m3", ...
const char* name_of(cudaDataType_t type);
size_t size_of(cudaDataType_t type);
std::string in_words(const Product& product);

// What lt.cpp keeps for the current device, and for a stream of it.
struct LtDevice {
  cublasLtHandle_t handle = nullptr;
  std::string name;
  void* workspace = nullptr;  // kWorkspaceBytes
};
LtDevice lt_device(cudaStream_t stream);

}  // namespace octavo::kernels
