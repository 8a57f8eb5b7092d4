// SPDX-License-Identifier: Apache-2.0
// The tables of algorithms in force: those in the library (csrc/kernels/tables), then the file that the environment
// variable OCTAVO_GEMM_TABLE names, read once at the first use of any table, then those loaded. Later ones count
// before earlier ones.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "algorithm_table.h"

namespace octavo::kernels {

struct Table {
  std::string name;  // the file's path, or "shipped: " and its name
  std::string hash;  // of the text, 16 hexadecimal digits
  std::vector<TableEntry> entries;
  std::vector<std::string> refused;  // entries that cuBLASLt did not take when a product asked for them, and why
};

std::vector<Table> tables_in_force();

// Puts the file's table before all others, in the place of one of the same name. Every product that begins after this
// returns takes its algorithm from it. Throws where the file cannot be read or is not a table; nothing is changed then.
void load_table(const std::string& path);

std::optional<TableEntry> find_entry(const std::string& device, size_t cublaslt, const Product& product);
void note_refused(const TableEntry& entry, const std::string& reason);

}  // namespace octavo::kernels
