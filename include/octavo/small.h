// SPDX-License-Identifier: Apache-2.0
// Which linears are too small for FP8 to pay.
#pragma once

#include <octavo/export.h>

#include <string>
#include <vector>

namespace octavo {

// A table that RecipeOptions::small may name. Measured on a kind of GPU by `python -m octavo tune-small`.
struct SmallTable {
  std::string name;
  std::string device;  // as the driver names it: "auto" takes the table of the device that the product runs on
  std::string hash;    // of its contents
};

// Reads a table from a file; it takes the place of one of the same name or device: for "auto" at once, for a name in
// regions that are entered from then on. Not between a forward and its backward, which a checkpoint would recompute
// under the new one.
// Returns its name. Throws std::exception naming the file, the line and what was expected; nothing is changed then.
OCTAVO_API std::string load_small_table(const std::string& path);

// Those that the library brings, and those loaded.
OCTAVO_API std::vector<SmallTable> small_tables();

}  // namespace octavo
