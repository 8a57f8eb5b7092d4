// SPDX-License-Identifier: Apache-2.0
#include "backward.h"

#include <ATen/Functions.h>

#include "ops/checks.h"

namespace octavo {
namespace {

using at::Tensor;
using ops::as_matrix;

}  // namespace

ops::BackwardResult Backward::run() const {
  const auto& products = recipe.products;
  const bool dx_fp8 = dx_type && in_fp8(products.dgrad), dw_fp8 = dw_type && in_fp8(products.wgrad);
  at::DimVector dx_sizes(g.sizes());
  dx_sizes.back() = k.expect_int();

  ops::BackwardResult result;
  // Also where only the bias learns: g's history goes on, for when more does again.
  const bool quantizes = tape.defined() && (in_fp8(products.dgrad) || in_fp8(products.wgrad));
  if (quantizes) {
    result = ops::linear_backward({.g = g,
                                   .tape = tape,
                                   .w = dx_fp8 ? w : Tensor(),
                                   .w_col = dx_fp8 ? (scope_w.col.defined() ? scope_w.col : w_col) : Tensor(),
                                   .x_col = dw_fp8 ? x : Tensor(),
                                   .w_tape = scope_w.tape,
                                   .policy = recipe.policy.id,
                                   .g_type = recipe.types.type[kG],
                                   .w_type = recipe.types.type[kW],
                                   .dx_sizes = dx_sizes,
                                   .dx_type = dx_type.value_or(compute),
                                   .dw_type = dw_type.value_or(compute),
                                   .dx_fast = is_fast(products.dgrad),
                                   .dw_fast = is_fast(products.wgrad),
                                   .db_type = db_type,
                                   .seeded = seeded,
                                   .likely = likely,
                                   .records = records});
  } else if (records) {
    ops::record(tape, recipe.policy.id);
  }

  const auto high = [&](const Tensor& a, const Tensor& b) { return at::mm(a.to(compute), b.to(compute)); };
  if (dx_type && !dx_fp8) result.dx = high(as_matrix(g), w).to(*dx_type).view(dx_sizes);
  if (dw_type && !dw_fp8) result.dw = high(as_matrix(g).t(), as_matrix(x)).to(*dw_type);
  if (db_type && !quantizes) {  // alone, by the same kernel and so in the same order
    const auto any_step = at::ones({1}, g.options().dtype(at::kFloat));
    result.db =
        ops::quantize_padded(as_matrix(g), any_step, recipe.types.type[kG], ops::kNoCopies, db_type, false).sums;
  }
  return result;
}

}  // namespace octavo
