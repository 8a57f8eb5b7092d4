// SPDX-License-Identifier: Apache-2.0
#include "report.h"

#include <map>
#include <mutex>

namespace octavo {
namespace {

using Key = std::tuple<int64_t, int64_t, int64_t, Outcome>;
struct Table {
  std::mutex mutex;
  std::map<Key, int64_t> calls;
};
Table& table() {
  static auto* instance = new Table;
  return *instance;
}

}  // namespace

const char* describe(Outcome outcome) {
  switch (outcome) {
    case Outcome::kFp8:
      return "fp8";
    case Outcome::kFp8Stateless:
      return "fp8, scaled by its own amax: the weight is not a parameter or a slice of one";
    case Outcome::kExcluded:
      return "excluded";
    case Outcome::kFloat32:
      return "float32";
    case Outcome::kDtype:
      return "dtype";
    case Outcome::kWeight1d:
      return "1-D weight";
    case Outcome::kEmpty:
      return "empty";
    case Outcome::kBiasShape:
      return "broadcast bias";
    case Outcome::kSubclass:
      return "tensor subclass";
    case Outcome::kTransform:
      return "functorch transform";
    case Outcome::kForwardAd:
      return "forward-mode AD";
    case Outcome::kLayout:
      return "layout";
    case Outcome::kHigh:
      return "high precision, by the recipe";
    case Outcome::kSmall:
      return "small: faster in 16 bits, by the recipe's table";
  }
  return "unknown";
}

bool is_fallback(Outcome outcome) {
  switch (outcome) {
    case Outcome::kWeight1d:
    case Outcome::kBiasShape:
    case Outcome::kSubclass:
    case Outcome::kTransform:
    case Outcome::kForwardAd:
    case Outcome::kLayout:
      return true;
    case Outcome::kFp8:
    case Outcome::kFp8Stateless:
    case Outcome::kExcluded:
    case Outcome::kFloat32:
    case Outcome::kDtype:
    case Outcome::kEmpty:
    case Outcome::kHigh:
    case Outcome::kSmall:
      return false;
  }
  return false;
}

void count(int64_t m, int64_t n, int64_t k, Outcome outcome) {
  auto& t = table();
  std::lock_guard lock(t.mutex);
  Key key{m, n, k, outcome};
  if (t.calls.size() >= kMaxShapes && !t.calls.contains(key)) key = {-1, -1, -1, outcome};
  ++t.calls[key];
}

std::vector<ReportRow> report_rows() {
  auto& t = table();
  std::lock_guard lock(t.mutex);
  std::vector<ReportRow> rows;
  for (const auto& [key, calls] : t.calls) {
    const auto [m, n, k, outcome] = key;
    rows.push_back({m, n, k, calls, outcome});
  }
  return rows;
}

void clear_report() {
  auto& t = table();
  std::lock_guard lock(t.mutex);
  t.calls.clear();
}

}  // namespace octavo
