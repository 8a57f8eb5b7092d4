// SPDX-License-Identifier: Apache-2.0
#include "small_products.h"

#include <c10/util/Exception.h>

#include <atomic>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <mutex>
#include <sstream>
#include <string_view>

#include "text_table.h"

namespace octavo {
namespace {

constexpr ShippedTable kShipped[] = {
#include "shipped_small_tables.inc"
};

std::shared_ptr<const SmallProducts> parse(const std::string& text, const std::string& file) {
  auto products = std::make_shared<SmallProducts>();
  products->table.hash = text_hash(text);
  std::istringstream lines(text);
  std::string line;
  for (int number = 1; std::getline(lines, line); ++number) {
    const auto expect = [&](bool good, const char* what) {
      TORCH_CHECK(good, "octavo: ", file, ":", number, ": expected ", what, ", found \"", line, "\"");
    };
    if (number == 1) {
      expect(line == "octavo-small-table 1", "\"octavo-small-table 1\"");
    } else if (line.starts_with("name=")) {
      products->table.name = line.substr(5);
      expect(!products->table.name.empty() && products->table.name != "auto", "a name other than \"auto\"");
    } else if (line.starts_with("device=\"") && line.ends_with("\"") && line.size() > 9) {
      products->table.device = line.substr(8, line.size() - 9);
    } else if (!line.empty() && line[0] != '#') {
      char recipe[16] = "", rest;
      SmallProducts::Corner c;
      long long m, n, k;
      const int fields = std::sscanf(line.c_str(), "%15s %lld %lld %lld %c", recipe, &m, &n, &k, &rest);
      const std::string_view kind = recipe;
      expect(fields == 4 && (kind == "delayed" || kind == "dynamic") && m > 0 && n > 0 && k > 0,
             "name=, device=\"\", or delayed or dynamic with M, N and K");
      c = {m, n, k};
      (kind == "delayed" ? products->delayed : products->dynamic).push_back(c);
    }
  }
  TORCH_CHECK(!products->table.name.empty() && !products->table.device.empty(), "octavo: ", file,
              ": expected the lines \"octavo-small-table 1\", name= and device=\"\"");
  return products;
}

struct Tables {
  std::mutex mutex;
  std::vector<std::shared_ptr<const SmallProducts>> all;  // the later counts; each name once
  std::atomic<std::size_t> loads = 0;
};
Tables& tables() {
  static auto* instance = [] {
    auto* made = new Tables;
    for (const auto& shipped : kShipped) made->all.push_back(parse(shipped.text, shipped.name));
    return made;
  }();
  return *instance;
}

// The last that fits, or null.
template <class Fits>
std::shared_ptr<const SmallProducts> find(Fits&& fits) {
  auto& t = tables();
  std::lock_guard lock(t.mutex);
  for (auto it = t.all.rbegin(); it != t.all.rend(); ++it)
    if (fits((*it)->table)) return *it;
  return nullptr;
}

}  // namespace

bool SmallProducts::pays(ScalingKind kind, const c10::SymInt& m, const c10::SymInt& n, const c10::SymInt& k) const {
  for (const auto& corner : kind == ScalingKind::kDynamic ? dynamic : delayed)
    if (m >= corner.m && n >= corner.n && k >= corner.k) return true;
  return false;
}

std::shared_ptr<const SmallProducts> small_products(const std::string& name) {
  auto found = find([&](const SmallTable& table) { return table.name == name; });
  if (found) return found;
  std::string known;
  for (const auto& table : small_tables()) known += ", \"" + table.name + "\"";
  TORCH_CHECK(false, "octavo: small must be \"\" (everything in FP8), \"auto\"", known,
              ", or the name of a table that ", "load_small_table has read, not \"", name, "\"");
}

std::size_t small_tables_loaded() { return tables().loads; }

std::shared_ptr<const SmallProducts> small_products_of(const std::string& device_name) {
  return find([&](const SmallTable& table) { return table.device == device_name; });
}

std::string load_small_table(const std::string& path) {
  std::string text;
  TORCH_CHECK(read_text(path, text), "octavo: the table ", path, " cannot be read");
  auto products = parse(text, path);
  auto& t = tables();
  std::lock_guard lock(t.mutex);
  std::erase_if(t.all, [&](const auto& old) { return old->table.name == products->table.name; });
  t.all.push_back(products);
  ++t.loads;
  return products->table.name;
}

std::vector<SmallTable> small_tables() {
  auto& t = tables();
  std::lock_guard lock(t.mutex);
  std::vector<SmallTable> found;
  for (const auto& products : t.all) found.push_back(products->table);
  return found;
}

}  // namespace octavo
