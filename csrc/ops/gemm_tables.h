// SPDX-License-Identifier: Apache-2.0
// The tables of cuBLASLt's algorithms (kernels/tables.h), for a build that may be without the kernels.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace octavo::ops {

struct GemmTable {
  std::string name;
  std::string hash;
  int64_t entries = 0;
  std::vector<std::string> refused;
};

// In the order in which they are asked; none without CUDA.
std::vector<GemmTable> gemm_tables();

struct GemmTableFunctions {
  void (*load)(const std::string& path) = nullptr;
  std::vector<GemmTable> (*in_force)() = nullptr;
};
// The CUDA half's, registered when it is loaded.
void register_gemm_tables(GemmTableFunctions functions);

}  // namespace octavo::ops
