// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <octavo/export.h>

#include <string>

namespace octavo {

// Puts a table of cuBLASLt's algorithms, which `python -m octavo tune` writes, before those in force: the ones that the
// library brings, and the one that the environment variable OCTAVO_GEMM_TABLE names. An entry holds for its device,
// version of cuBLASLt and product alone. Products that begin after this returns use it. Throws where the file cannot
// be read or is not a table (naming the line), and in a build without CUDA; nothing changes then.
OCTAVO_API void load_gemm_table(const std::string& path);

}  // namespace octavo
