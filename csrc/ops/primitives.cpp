// SPDX-License-Identifier: Apache-2.0
#include "primitives.h"

#include "find.h"

namespace octavo::ops {
ForwardOperands quantize_forward(const at::Tensor& x, const at::Tensor& w, const SlotUse& slot, int64_t policy,
                                 at::ScalarType x_type, at::ScalarType w_type, Copies x_copies, Copies w_copies,
                                 bool records) {
  using Returned = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;
  static const auto op =
      find<Returned(const at::Tensor&, const at::Tensor&, int64_t, int64_t, int64_t, bool, int64_t, at::ScalarType,
                    at::ScalarType, int64_t, int64_t, bool)>("octavo::_quantize_forward");
  auto [x_row, x_col, w_row, w_col, tape] = op.call(x, w, slot.slot, slot.generation, slot.ring, slot.seeded, policy,
                                                    x_type, w_type, x_copies, w_copies, records);
  return {std::move(x_row), std::move(x_col), std::move(w_row), std::move(w_col), std::move(tape)};
}

BackwardOperands quantize_backward(const at::Tensor& g, const std::optional<at::Tensor>& w, const at::Tensor& tape,
                                   int64_t policy, at::ScalarType g_type, at::ScalarType w_type, Copies g_copies,
                                   std::optional<at::ScalarType> sums, bool seeded, bool records) {
  using Returned = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;
  static const auto op =
      find<Returned(const at::Tensor&, const std::optional<at::Tensor>&, const at::Tensor&, int64_t, at::ScalarType,
                    at::ScalarType, int64_t, std::optional<at::ScalarType>, bool, bool)>("octavo::_quantize_backward");
  auto [g_row, g_col, w_col, summed, g_tape] =
      op.call(g, w, tape, policy, g_type, w_type, g_copies, sums, seeded, records);
  return {std::move(g_row), std::move(g_col), std::move(w_col), std::move(summed), std::move(g_tape)};
}

void record(const at::Tensor& tape, int64_t policy) {
  static const auto op = find<void(const at::Tensor&, int64_t)>("octavo::_record");
  op.call(tape, policy);
}

Quantized quantize_padded(const at::Tensor& x, const at::Tensor& step, at::ScalarType type, Copies copies,
                          std::optional<at::ScalarType> sums) {
  using Returned = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;
  static const auto op =
      find<Returned(const at::Tensor&, const at::Tensor&, at::ScalarType, int64_t, std::optional<at::ScalarType>)>(
          "octavo::_quantize_padded");
  auto [row, col, summed, amax] = op.call(x, step, type, copies, sums);
  return {std::move(row), std::move(col), std::move(summed), std::move(amax)};
}

at::Tensor mm(const at::Tensor& a, const at::Tensor& b, const at::Tensor& scale_a, int64_t word_a,
              const at::Tensor& scale_b, int64_t word_b, const std::optional<at::Tensor>& bias, int64_t m, int64_t n,
              at::ScalarType out_dtype, bool fast_accumulation) {
  static const auto op =
      find<at::Tensor(const at::Tensor&, const at::Tensor&, const at::Tensor&, int64_t, const at::Tensor&, int64_t,
                      const std::optional<at::Tensor>&, int64_t, int64_t, at::ScalarType, bool)>("octavo::_mm");
  return op.call(a, b, scale_a, word_a, scale_b, word_b, bias, m, n, out_dtype, fast_accumulation);
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
