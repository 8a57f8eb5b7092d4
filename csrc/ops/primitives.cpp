// SPDX-License-Identifier: Apache-2.0
#include "primitives.h"

#include "find.h"

namespace octavo::ops {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

OptionalTensor if_defined(const Tensor& tensor) { return tensor.defined() ? OptionalTensor(tensor) : std::nullopt; }

}  // namespace

ForwardResult linear_forward(const ForwardCall& call) {
  using Returned = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;
  static const auto op =
      find<Returned(const Tensor&, const Tensor&, const OptionalTensor&, int64_t, int64_t, int64_t, bool, bool, bool,
                    int64_t, at::ScalarType, at::ScalarType, at::ScalarType, bool, bool, bool, int64_t, int64_t,
                    const OptionalTensor&, const OptionalTensor&, const OptionalTensor&, const OptionalTensor&)>(
          "octavo::_linear_forward");
  const Made none;
  const Made &x = call.x_made ? *call.x_made : none, &w = call.w_made ? *call.w_made : none;
  auto [y, x_row, x_col, w_row, w_col, tape] =
      op.call(call.x, call.w, call.bias, call.slot.slot, call.slot.generation, call.slot.ring, call.slot.seeded,
              call.slot.alone, call.slot.likely, call.policy, call.x_type, call.w_type, call.y_type, call.wants_y,
              call.fast, call.records, call.x_keep, call.w_keep, if_defined(x.row), if_defined(x.tape),
              if_defined(w.row), if_defined(w.tape));
  return {std::move(y),
          {std::move(x_row), std::move(x_col), {}},
          {std::move(w_row), std::move(w_col), {}},
          std::move(tape)};
}

BackwardResult linear_backward(const BackwardCall& call) {
  using Returned = std::tuple<Tensor, Tensor, Tensor>;
  static const auto op =
      find<Returned(const Tensor&, const Tensor&, const OptionalTensor&, const OptionalTensor&, const OptionalTensor&,
                    const OptionalTensor&, int64_t, at::ScalarType, at::ScalarType, at::IntArrayRef, at::ScalarType,
                    at::ScalarType, bool, bool, std::optional<at::ScalarType>, bool, bool, bool)>(
          "octavo::_linear_backward");
  auto [dx, dw, db] =
      op.call(call.g, call.tape, if_defined(call.w), if_defined(call.w_col), if_defined(call.x_col),
              if_defined(call.w_tape), call.policy, call.g_type, call.w_type, call.dx_sizes, call.dx_type, call.dw_type,
              call.dx_fast, call.dw_fast, call.db_type, call.seeded, call.likely, call.records);
  return {std::move(dx), std::move(dw), std::move(db)};
}

void record(const at::Tensor& tape, int64_t policy) {
  static const auto op = find<void(const Tensor&, int64_t)>("octavo::_record");
  op.call(tape, policy);
}

Quantized quantize_padded(const at::Tensor& x, const at::Tensor& step, at::ScalarType type, Copies copies,
                          std::optional<at::ScalarType> sums, bool wants_amax) {
  using Returned = std::tuple<Tensor, Tensor, Tensor, Tensor>;
  static const auto op =
      find<Returned(const Tensor&, const Tensor&, at::ScalarType, int64_t, std::optional<at::ScalarType>, bool)>(
          "octavo::_quantize_padded");
  auto [row, col, summed, amax] = op.call(x, step, type, copies, sums, wants_amax);
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
