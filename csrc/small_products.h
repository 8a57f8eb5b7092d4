// SPDX-License-Identifier: Apache-2.0
// A linear is left in 16 bits where FP8 would be slower: by a table of sizes, never by timing or by what shares x, so
// that the same model has the same bits wherever and whenever it runs under the same table.
#pragma once

#include <c10/core/SymInt.h>
#include <octavo/small.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "slot.h"

namespace octavo {

struct SmallProducts {
  struct Corner {
    int64_t m, n, k;
  };
  SmallTable table;
  std::vector<Corner> delayed;
  std::vector<Corner> dynamic;

  // FP8 pays for y[M, N] = x[M, K] w[N, K]^T: M, N and K reach those of a corner. Symbolic sizes: a guard a corner.
  bool pays(ScalingKind kind, const c10::SymInt& m, const c10::SymInt& n, const c10::SymInt& k) const;
};

// Throws, naming the known ones, for a name that no table has.
std::shared_ptr<const SmallProducts> small_products(const std::string& name);
// How often one was loaded: where it has not moved, the answers are what they were.
std::size_t small_tables_loaded();
// The table of a kind of device, or null.
std::shared_ptr<const SmallProducts> small_products_of(const std::string& device_name);

}  // namespace octavo
