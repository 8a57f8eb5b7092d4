// SPDX-License-Identifier: Apache-2.0
#include "tables.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <mutex>
#include <stdexcept>
#include <string_view>

#include "../text_table.h"

namespace octavo::kernels {
namespace {

constexpr ShippedTable kShipped[] = {
#include "shipped_tables.inc"
};

Table table_of(std::string_view text, const std::string& name) {
  return {.name = name, .hash = text_hash(text), .entries = parse_table(text, name), .refused = {}};
}

Table read(const std::string& path) {
  std::string text;
  if (!read_text(path, text)) throw std::runtime_error("octavo: the table " + path + " cannot be read");
  return table_of(text, path);
}

std::mutex& tables_mutex() {
  static std::mutex& mutex = *new std::mutex;
  return mutex;
}

// The last one counts first. Call with the mutex held. Throws, at each use, where the environment's table is no table.
std::vector<Table>& tables_locked() {
  static std::vector<Table>* tables = nullptr;
  if (tables == nullptr) {
    std::vector<Table> first;
    for (const ShippedTable& shipped : kShipped) {
      first.push_back(table_of(shipped.text, std::string("shipped: ") + shipped.name));
    }
    const char* path = std::getenv("OCTAVO_GEMM_TABLE");
    if (path != nullptr && *path != '\0') first.push_back(read(path));
    tables = new std::vector<Table>(std::move(first));
  }
  return *tables;
}

}  // namespace

std::vector<Table> tables_in_force() {
  const std::lock_guard lock(tables_mutex());
  return {tables_locked().rbegin(), tables_locked().rend()};
}

void load_table(const std::string& path) {
  Table table = read(path);
  {
    const std::lock_guard lock(tables_mutex());
    std::vector<Table>& tables = tables_locked();
    std::erase_if(tables, [&](const Table& other) { return other.name == path; });
    tables.push_back(std::move(table));
  }
  drop_plans();
}

std::optional<TableEntry> find_entry(const std::string& device, size_t cublaslt, const Product& product) {
  const std::lock_guard lock(tables_mutex());
  const std::vector<Table>& tables = tables_locked();
  for (auto table = tables.rbegin(); table != tables.rend(); ++table) {
    const auto entry = std::find_if(table->entries.rbegin(), table->entries.rend(), [&](const TableEntry& e) {
      return e.product == product && e.cublaslt == cublaslt && e.device == device;
    });
    if (entry != table->entries.rend()) return *entry;
  }
  return std::nullopt;
}

void note_refused(const TableEntry& entry, const std::string& reason) {
  const std::lock_guard lock(tables_mutex());
  std::vector<Table>& tables = tables_locked();
  const auto table = std::find_if(tables.rbegin(), tables.rend(), [&](const Table& t) {
    return std::find(t.entries.begin(), t.entries.end(), entry) != t.entries.end();
  });
  if (table == tables.rend()) return;  // replaced meanwhile
  const std::string line = to_line(entry) + ": " + reason;
  if (std::find(table->refused.begin(), table->refused.end(), line) == table->refused.end()) {
    table->refused.push_back(line);
  }
}

}  // namespace octavo::kernels
