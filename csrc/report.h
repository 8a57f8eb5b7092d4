// SPDX-License-Identifier: Apache-2.0
// What ran in FP8 and what did not: calls of linears inside a region, by shape and reason.
#pragma once

#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

namespace octavo {

enum class Outcome : int32_t {
  kFp8,
  kFp8Stateless,
  kExcluded,
  kFloat32,
  kDtype,
  kWeight1d,
  kEmpty,
  kBiasShape,
  kSubclass,
  kTransform,
  kForwardAd,
  kLayout,
  kHigh,
  kSmall,
};
const char* describe(Outcome outcome);
// Whether the linear should have run in FP8 and could not, as opposed to what somebody chose.
bool is_fallback(Outcome outcome);

void count(int64_t m, int64_t n, int64_t k, Outcome outcome);

struct ReportRow {
  int64_t m, n, k, calls;
  Outcome outcome;
};
// Sorted by shape. At most kMaxShapes of them; calls of further shapes, and of tensors that are not asked for
// theirs, are added up in rows with m = n = k = -1.
constexpr std::size_t kMaxShapes = 4096;
std::vector<ReportRow> report_rows();
void clear_report();

}  // namespace octavo
