// SPDX-License-Identifier: Apache-2.0
// The algorithms of cuBLASLt that could run a product.
#pragma once

#include <vector>

#include "algorithm.h"
#include "lt_problem.h"

namespace octavo::kernels {

struct Candidate {
  cublasLtMatmulAlgo_t algorithm;
  Algorithm configuration;
  // Whether it is what its configuration alone gives. Only such a one can be in a table.
  bool is_reproducible = false;
};

// All that the heuristic offers, its first choice first; `exhaustive`: also what is found by going through the
// attributes that each algorithm says it has, evenly thinned out to some 1000.
std::vector<Candidate> candidates_for(cublasLtHandle_t handle, const Product& product, const Problem& problem,
                                      bool exhaustive);

}  // namespace octavo::kernels
