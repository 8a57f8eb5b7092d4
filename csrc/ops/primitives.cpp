// SPDX-License-Identifier: Apache-2.0
#include "primitives.h"

#include "find.h"

namespace octavo::ops {
at::Tensor new_tape(const at::Tensor& like, int64_t slot, int64_t generation, int64_t ring, int64_t policy) {
  static const auto op = find<at::Tensor(const at::Tensor&, int64_t, int64_t, int64_t, int64_t)>("octavo::_new_tape");
  return op.call(like, slot, generation, ring, policy);
}

at::Tensor new_gradient_tape(const at::Tensor& tape) {
  static const auto op = find<at::Tensor(const at::Tensor&)>("octavo::_new_gradient_tape");
  return op.call(tape);
}

Quantized quantize_operand(const at::Tensor& x, const at::Tensor& taped, Operand operand, StepSource source,
                           int64_t policy, at::ScalarType type, const Wanted& wanted) {
  static const auto op = find<std::tuple<at::Tensor, at::Tensor, at::Tensor>(
      const at::Tensor&, const at::Tensor&, int64_t, int64_t, int64_t, at::ScalarType, bool, bool,
      std::optional<at::ScalarType>)>("octavo::_quantize_operand");
  auto [row, col, sums] = op.call(x, taped, operand, static_cast<int64_t>(source), policy, type, wanted.row, wanted.col,
                                  wanted.column_sums);
  return {std::move(row), std::move(col), std::move(sums)};
}

at::Tensor mm(const at::Tensor& a, const at::Tensor& b, const at::Tensor& scale_a, int64_t word_a,
              const at::Tensor& scale_b, int64_t word_b, const std::optional<at::Tensor>& bias, int64_t m, int64_t n,
              at::ScalarType out_dtype, bool fast_accumulation) {
  static const auto op =
      find<at::Tensor(const at::Tensor&, const at::Tensor&, const at::Tensor&, int64_t, const at::Tensor&, int64_t,
                      const std::optional<at::Tensor>&, int64_t, int64_t, at::ScalarType, bool)>("octavo::_mm");
  return op.call(a, b, scale_a, word_a, scale_b, word_b, bias, m, n, out_dtype, fast_accumulation);
}

void record(const at::Tensor& tape, const std::optional<at::Tensor>& gradient, int64_t policy) {
  static const auto op = find<void(const at::Tensor&, const std::optional<at::Tensor>&, int64_t)>("octavo::_record");
  op.call(tape, gradient, policy);
}

void advance(const at::Tensor& anchor, int64_t owner, const std::optional<at::Tensor>& found_inf) {
  static const auto op = find<void(const at::Tensor&, int64_t, const std::optional<at::Tensor>&)>("octavo::_advance");
  op.call(anchor, owner, found_inf);
}

std::tuple<at::Tensor, at::Tensor> gather_rings(const at::Tensor& slots, int64_t policy) {
  static const auto op = find<std::tuple<at::Tensor, at::Tensor>(const at::Tensor&, int64_t)>("octavo::_gather_rings");
  return op.call(slots, policy);
}

at::Tensor apply_steps(const at::Tensor& slots, const at::Tensor& due, const at::Tensor& steps, int64_t policy) {
  static const auto op =
      find<at::Tensor(const at::Tensor&, const at::Tensor&, const at::Tensor&, int64_t)>("octavo::_apply_steps");
  return op.call(slots, due, steps, policy);
}

}  // namespace octavo::ops
