// SPDX-License-Identifier: Apache-2.0
// Finds the fastest algorithm of a product by timing, for a table. Waits for the device; not to be captured.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>
#include <vector>

#include "kernels.h"
#include "lt.h"

namespace octavo::kernels {

struct TuneOptions {
  bool exhaustive = false;  // also candidates that the heuristic does not offer
  double seconds = 0.3;     // about; trying every candidate once comes first, however many there are
};

struct Finalist {
  double microseconds = 0;  // median
  std::string line;         // the table's entry; empty where no entry can bring it back
};

struct Tuning {
  std::vector<Finalist> finalists;  // [0] is the heuristic's first choice
  int64_t in_force = 0;             // which of them products run now
  int64_t winner = 0;               // the heuristic's, unless one is faster by more than 1% and gives the same result
  int64_t tried = 0;
  int64_t wrong = 0;  // faster ones whose result was not that of the heuristic's
};

// Operands should hold what products meet in training: on zeros the device is faster. They and d stay as they are.
Tuning tune(const Product& product, const ProductOperands& operands, const TuneOptions& options, cudaStream_t stream);

// The product behind this one, without what comes after cuBLASLt. Writes to scratch, not to d.
Tuning tune(const Gemm& g, void* scratch, const TuneOptions& options, cudaStream_t stream);

}  // namespace octavo::kernels
