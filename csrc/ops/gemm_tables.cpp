// SPDX-License-Identifier: Apache-2.0
#include "gemm_tables.h"

#include <c10/util/Exception.h>
#include <octavo/gemm_table.h>

namespace octavo {
namespace {

ops::GemmTableFunctions& functions() {
  static ops::GemmTableFunctions instance;  // set while the library is loaded, and never after
  return instance;
}

}  // namespace

namespace ops {

std::vector<GemmTable> gemm_tables() {
  return functions().in_force ? functions().in_force() : std::vector<GemmTable>();
}

void register_gemm_tables(GemmTableFunctions registered) { functions() = registered; }

}  // namespace ops

void load_gemm_table(const std::string& path) {
  TORCH_CHECK(functions().load, "octavo: this build has no CUDA kernels, and so no use for the table ", path);
  functions().load(path);
}

}  // namespace octavo
