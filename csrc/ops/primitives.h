// SPDX-License-Identifier: Apache-2.0
// Typed callers of the library's internal ops, one kernel each per device. schema.cpp says what they do.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>

#include "../slot.h"

namespace octavo::ops {

// Where a quantisation takes its step from.
enum class StepSource : int64_t {
  kTaped = 0,    // the step that the tape holds
  kAmax = 1,     // the tensor's own amax
  kHistory = 2,  // the step that the tape holds, or, where that is 0 for want of a history, the tensor's own amax
};

// What to make of an operand.
struct Wanted {
  bool row = false;                                // [rows, cols], both padded to 16
  bool col = false;                                // the transpose of that
  std::optional<at::ScalarType> column_sums = {};  // [cols] of this type
};
struct Quantized {
  at::Tensor row;
  at::Tensor col;
  at::Tensor column_sums;
};

at::Tensor new_tape(const at::Tensor& like, int64_t slot, int64_t generation, int64_t ring, int64_t policy);
at::Tensor new_gradient_tape(const at::Tensor& tape);

Quantized quantize_operand(const at::Tensor& x, const at::Tensor& taped, Operand operand, StepSource source,
                           int64_t policy, at::ScalarType type, const Wanted& wanted);
at::Tensor mm(const at::Tensor& a, const at::Tensor& b, const at::Tensor& scale_a, int64_t word_a,
              const at::Tensor& scale_b, int64_t word_b, const std::optional<at::Tensor>& bias, int64_t m, int64_t n,
              at::ScalarType out_dtype, bool fast_accumulation);
void record(const at::Tensor& tape, const std::optional<at::Tensor>& gradient, int64_t policy);
void advance(const at::Tensor& anchor, int64_t owner, const std::optional<at::Tensor>& found_inf);
std::tuple<at::Tensor, at::Tensor> gather_rings(const at::Tensor& slots, int64_t policy);
at::Tensor apply_steps(const at::Tensor& slots, const at::Tensor& due, const at::Tensor& steps, int64_t policy);

// Position, in int32 words, of an operand's TapedOperand in a tape.
constexpr int64_t tape_word(Operand operand) { return operand == kG ? 0 : operand * kTapedOperandWords; }

}  // namespace octavo::ops
